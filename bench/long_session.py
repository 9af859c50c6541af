"""Sessions as long as asked for: messages of real text, short replies that are given, then a question.

The text is the source of the runtime, file by file in an order that a seed decides. The replies are forced, so that a
session is the same tokens in every process; only the question is answered by the model, greedily.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Unpack

import msgspec
import numpy as np

from .. import runtime
from ..compaction.budget import Budgets
from ..kernels.tokens import TokenIds, concat_tokens
from ..runtime.calls import ChoiceKind, ToolChoice
from ..runtime.engine import Engine, Generation, Sampling, SequenceId, Tokenizer
from ..runtime.events import StepUsage
from ..runtime.session import Session
from ..runtime.session_settings import SessionHost, SessionSettings
from ..runtime.wrapped import GenerateOptions, WrappedEngine
from .forced_session import DIALECT
from .played_turn import PlayedTurn, play_turn

GREEDY = Sampling(temperature=0.0)
GREEDY_TOKENS = 64
"""How much of the answer is compared."""

QUESTION = "What is the longest part above about? Describe it at length."
"""It begins otherwise than any message of `SourceText`, so that a new session shares its prefix and no more."""

NO_CALLS = ToolChoice(ChoiceKind.NONE)

LAST_TURN_TOKENS = 168
"""What is left of a window for the question, with what stands around it, also where every byte is a token."""

LEAST_MESSAGE_TOKENS = 128
"""A turn is worth writing to disk from 64 tokens on."""

AROUND_A_TURN_TOKENS = 64
"""What a turn takes beside its message: the reply and the transitions, also where every byte is a token."""


def most_tokens(n_ctx: int) -> int:
    """Return how long a session may be so that the question fits behind it."""
    return Budgets(n_ctx=n_ctx, prefix_tokens=0).usable_tokens - LAST_TURN_TOKENS


class SourceText:
    """The lines of the runtime's source as messages of a wanted length, over and over. Each begins with its number."""

    def __init__(self, tokenizer: Tokenizer, *, seed: int) -> None:
        self._tokenizer = tokenizer
        self._lines = self._endless(seed)
        self._next = next(self._lines)
        self._messages = 0

    def message(self, tokens: int) -> str:
        """Return the next lines, at most `tokens` but one line at least."""
        self._messages += 1
        taken = [f"Part {self._messages}:\n"]
        left = tokens - self._count(taken[0])
        while len(taken) == 1 or self._count(self._next) <= left:
            taken.append(self._next)
            left -= self._count(self._next)
            self._next = next(self._lines)
        return "".join(taken)

    def _count(self, text: str) -> int:
        return len(self._tokenizer.tokenize(text, parse_special=False))

    @staticmethod
    def _endless(seed: int) -> Iterator[str]:
        files = sorted(Path(runtime.__file__).parent.rglob("*.py"))
        order = np.random.default_rng(seed).permutation(len(files))
        while True:
            for index in order.tolist():
                text = files[index].read_text(encoding="utf-8")
                # An @ before a name would attach a file.
                yield from (line for line in text.splitlines(keepends=True) if line.strip() and "@" not in line)


class ReadingEngine(WrappedEngine):
    """Gives the same `reply` to every message; with `answers` the model itself replies."""

    def __init__(self, engine: Engine, *, reply: str = "I have read it.") -> None:
        super().__init__(engine)
        self.answers = False
        self._reply = self.engine.tokenize(reply, parse_special=False)

    def generate(self, sequence: SequenceId, **options: Unpack[GenerateOptions]) -> Generation:
        """Decode the reply as if the model had chosen it."""
        if not self.answers:
            options["forced"] = self._reply
        return super().generate(sequence, **options)


def open_long_session(
    engine: ReadingEngine, workspace: Path, *, templates: Path, with_tools: bool, resume: bool = False
) -> Session:
    """Open a session in a workspace, or go on with the last one there. `templates` keeps what was learnt of these.

    Without tools the session prefix is short enough for a model whose tokens are bytes.
    """
    return Session.open(
        engine,
        workspace=workspace,
        resume="latest" if resume else None,
        settings=SessionSettings(sampling=GREEDY, max_reply_tokens=GREEDY_TOKENS, continuations=0, dialect=DIALECT),
        host=SessionHost(tools=None if with_tools else (), cache_folder=templates),
    )


def grow(session: Session, text: SourceText, *, tokens: int, turn_tokens: int) -> list[PlayedTurn]:
    """Play turns until the session is `tokens` long, at most `LEAST_MESSAGE_TOKENS` less."""
    turns: list[PlayedTurn] = []
    while (left := tokens - session.transcript.window.token_count - AROUND_A_TURN_TOKENS) >= LEAST_MESSAGE_TOKENS:
        # The last two share what is left, so that none is too short.
        wanted = turn_tokens if left >= turn_tokens + LEAST_MESSAGE_TOKENS + AROUND_A_TURN_TOKENS else left
        turns.append(play_turn(session, text.message(wanted), choice=NO_CALLS))
    return turns


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """The step of a question, the ids of the request and of the reply, and how long it took to open the session."""

    usage: StepUsage
    request: tuple[int, ...]
    reply: tuple[int, ...]
    cache_notes: tuple[str, ...]
    opened_s: float = 0.0


def ask(session: Session, engine: ReadingEngine, question: str = QUESTION) -> Answer:
    """Ask, and go on greedily to `GREEDY_TOKENS` where the model ended its reply before."""
    engine.answers = True
    turn = play_turn(session, question, choice=NO_CALLS)
    (usage,) = turn.usages
    held = _continued(engine, session.sequence, usage.window + GREEDY_TOKENS)
    return Answer(
        usage=usage,
        request=tuple(held[: usage.window].tolist()),
        reply=tuple(held[usage.window :].tolist()),
        cache_notes=turn.cache_notes,
    )


def _continued(engine: Engine, sequence: SequenceId, tokens: int) -> TokenIds:
    """Return the first `tokens` of the sequence; a model that ends a reply early goes on with another."""
    while len(held := engine.resident(sequence)) < tokens:
        engine.sync(sequence, concat_tokens((held, held[:1])))
        for _ in engine.generate(sequence, sampling=GREEDY, max_tokens=tokens - len(held) - 1):
            pass
    return held[:tokens]
