"""The seam between chapbook and whatever evaluates tokens.

The loop, the window and the checker know only this module. `chapbook.runtime.llama` implements it in process,
`chapbook.runtime.scripted` without a model. Nothing here assumes that the engine is in this process.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator
from typing import NewType, Protocol

import msgspec

from ..kernels.tokens import TokenId, TokenIds
from .cancel import Cancel
from .chat_format import ReasoningMarks

SequenceId = NewType("SequenceId", int)
"""One conversation's KV inside the engine: a llama.cpp `seq_id`."""

PrefillProgress = Callable[[int, int], None]
"""Called between batches with (tokens evaluated so far, tokens to evaluate)."""

OnDecode = Callable[[SequenceId, TokenIds, int], None]
"""Called with (sequence, tokens, position of the first) just before they are evaluated. A seam for tests."""


class MemoryKind(enum.StrEnum):
    """What a model's memory can do; named by its metadata, never by trying."""

    FULL = "full attention"
    SLIDING = "sliding window"
    RECURRENT = "recurrent"
    HYBRID = "hybrid"

    @property
    def rewinds(self) -> bool:
        """Whether any tail can be dropped at any time."""
        return self is MemoryKind.FULL


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What there is to know of a loaded model. `sliding_window_tokens` is 0 where there is none."""

    model_name: str
    model_path: str
    fingerprint: str
    n_ctx: int
    n_ctx_trained: int
    vocab_size: int
    memory: MemoryKind
    sliding_window_tokens: int
    chat_template: str | None
    add_bos: bool
    bos_id: TokenId | None
    bos_text: str
    eos_text: str
    control_texts: tuple[str, ...]
    """Every text that `parse_special=True` would turn into a control or user-defined structural token."""


class Sampling(msgspec.Struct, frozen=True, kw_only=True):
    """How a token is chosen. Temperature 0 is greedy. A seed makes a run repeatable; None draws one."""

    temperature: float = 0.7
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    repeat_penalty: float = 1.0
    repeat_last_n: int = 64
    seed: int | None = None


class Trigger(msgspec.Struct, frozen=True, kw_only=True):
    """A text that opens a constrained span. `at_start`: only as the first non-space text of the reply."""

    text: str
    at_start: bool = False


class Grammar(msgspec.Struct, frozen=True, kw_only=True):
    """A GBNF grammar for what follows a trigger; free text flows before and after it.

    `gbnf` has the rule `root`, which begins right after the trigger's text and ends with a fixed literal or a
    closing bracket: when it is complete, free text resumes. With `required`, the first trigger is forced at the
    start of the reply, so that the reply holds at least one constrained span. In `reasoning` nothing is a trigger;
    where the prompt has opened it, a required trigger stands behind its end.
    """

    gbnf: str
    triggers: tuple[Trigger, ...]
    required: bool = False
    reasoning: ReasoningMarks | None = None


class FinishReason(enum.StrEnum):
    """Why a generation ended."""

    EOG = "eog"
    LENGTH = "length"
    STOP = "stop"
    CANCELLED = "cancelled"


class SyncSource(enum.StrEnum):
    """Where the cached tokens came from.

    RESIDENT: the sequence held them. REWIND: it held more, and dropped a tail. PARTIAL: it went back to a partial
    snapshot. FORK: another sequence held them. The snapshots are whole states from memory and from disk.
    """

    RESIDENT = "resident"
    REWIND = "rewind"
    PARTIAL = "partial snapshot"
    FORK = "fork"
    MEMORY = "memory snapshot"
    DISK = "disk snapshot"
    NOTHING = "nothing"


class SyncPoints(msgspec.Struct, frozen=True, kw_only=True):
    """Lengths of the wanted run to which coming back is likely, ascending. What cannot be rewound is copied there.

    `pinned`: the end of the session prefix (and later the growth point of the index), where other sessions and
    compactions start. `ring`: ends of segments, of which the memory budget keeps what it can.
    """

    pinned: tuple[int, ...] = ()
    ring: tuple[int, ...] = ()


NO_POINTS = SyncPoints()


class SyncReport(msgspec.Struct, frozen=True, kw_only=True):
    """What a `sync` did. `cached + evaluated` is the length of the wanted run, unless `cancelled`.

    `reason` says why no more was reused, and is empty where all that could be was. `notes` tell a person what befell
    the cache since the last report: a snapshot file set aside, memory too short for more.
    """

    cached: int
    evaluated: int
    source: SyncSource
    seconds: float
    cancelled: bool = False
    reason: str = ""
    notes: tuple[str, ...] = ()


class GeneratedToken(msgspec.Struct, frozen=True):
    """One token of a reply. `piece` may end inside a UTF-8 character. Control tokens show as their text."""

    id: TokenId
    piece: bytes


class GenerationReport(msgspec.Struct, frozen=True, kw_only=True):
    """The end of a generation. `tokens` is the reply as it is resident: every one of them was evaluated.

    The end-of-generation token is not part of it: the transition to the next message brings its own. A token that
    was yielded when a cancel struck its decode is not part of it either.
    """

    finish: FinishReason
    tokens: TokenIds
    seconds: float
    first_token_s: float


class Generation(Protocol):
    """The tokens of a reply as they are chosen; `report` is set once the iterator is exhausted or closed."""

    def __iter__(self) -> Iterator[GeneratedToken]: ...

    @property
    def report(self) -> GenerationReport: ...

    def close(self) -> None:
        """Stop early; the tokens decoded so far are the reply."""


class Tokenizer(Protocol):
    """A vocabulary. Both directions are exact, and deterministic for a model's fingerprint."""

    def tokenize(self, text: str, *, parse_special: bool) -> TokenIds:
        """Tokenise a piece of text that stands on its own: no BOS, no space added at its start.

        With `parse_special=False` the result holds no control token and no structural user-defined one, whatever
        the text (promise 10). Runs of a million equal characters are handled.
        """

    def detokenize(self, tokens: TokenIds, *, special: bool = True) -> bytes:
        """Return the bytes of a run; control tokens show as their text unless `special` is False."""


class Engine(Tokenizer, Protocol):
    """A loaded model with a KV cache. Thread-safe: calls from several threads take turns."""

    @property
    def info(self) -> EngineInfo: ...

    def default_sampling(self) -> Sampling:
        """Return the sampling that the model's own file names, and the usual one where it names none."""

    def open_sequence(self) -> SequenceId:
        """Return a sequence of its own; its KV may be evicted and evaluated again, which `sync` reports."""

    def fork(self, sequence: SequenceId, *, at: int) -> SequenceId:
        """Return a new sequence that begins with the first `at` resident tokens of another, which keeps its own.

        As much of them as this memory can share or copy is resident in it; `sync` evaluates the rest.
        """

    def drop(self, sequence: SequenceId) -> None:
        """Give a sequence back. Dropping one twice does nothing. What it held may serve others until room is needed."""

    def resident(self, sequence: SequenceId) -> TokenIds:
        """Return the run whose KV the sequence holds right now."""

    def sync(
        self,
        sequence: SequenceId,
        wanted: TokenIds,
        *,
        points: SyncPoints = NO_POINTS,
        reuse: bool = True,
        progress: PrefillProgress | None = None,
        cancel: Cancel | None = None,
    ) -> SyncReport:
        """Make the sequence's KV equal `wanted` (not empty, at most n_ctx) with the least work.

        Afterwards the logits of the last token are at hand for `generate`. After a cancel the resident run is a
        prefix of `wanted`. Without `reuse` all of it is evaluated: what a test or a benchmark compares with.
        """

    def rest(self, sequence: SequenceId) -> None:
        """Note that a turn has ended: what the sequence holds is worth keeping across a restart.

        Returns at once. The copy is made while the engine is idle, and written in the background.
        """

    def settle(self) -> None:
        """Return once everything that was at rest is kept. Raises nothing: what could not be kept is a note."""

    def generate(
        self,
        sequence: SequenceId,
        *,
        sampling: Sampling,
        max_tokens: int,
        grammar: Grammar | None = None,
        stop: tuple[str, ...] = (),
        forced: TokenIds | None = None,
        so_far: TokenIds | None = None,
        cancel: Cancel | None = None,
    ) -> Generation:
        """Continue the sequence that was just synced.

        `forced` decodes these tokens as if the model had chosen them, then ends with EOG (no sampling).
        `stop` texts end the reply with STOP; the text that matched stays in it. `so_far` is the part of the same reply
        that was generated before a cut (it is resident already): triggers, an open constrained span and stop texts
        are tracked from its beginning, so that a call that was cut goes on under its grammar.
        """

    def score(self, sequence: SequenceId, tokens: TokenIds, *, given: TokenIds) -> list[float]:
        """Return the log-probability of each of `tokens`, the first one after `given`. It ends holding both."""

    def close(self) -> None:
        """Free the model. Closing twice does nothing."""
