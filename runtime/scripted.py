"""An engine without a model: it plays given replies, and keeps the same account of its cache as a real one.

For tests of everything above the engine, and for embedders' own. A token is a byte, or one of the control texts.
Grammars are not enforced: what is played is played as it is.
"""

from __future__ import annotations

import itertools
import math
import re
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import TypeAlias

import numpy as np

from ..kernels.errors import EngineClosed, EngineError
from ..kernels.prefix import common_prefix_length
from ..kernels.tokens import NO_TOKENS, TokenId, TokenIds, concat_tokens, token_ids
from .cancel import Cancel
from .engine import (
    NO_POINTS,
    EngineInfo,
    FinishReason,
    GeneratedToken,
    GenerationReport,
    Grammar,
    MemoryKind,
    OnDecode,
    PrefillProgress,
    Sampling,
    SequenceId,
    SyncPoints,
    SyncReport,
    SyncSource,
)
from .prefix_cache.plan import Held, HeldRun, SyncPlan, plan_sync
from .text_watch import TextWatch

Reply: TypeAlias = "str | Callable[[TokenIds], str]"
"""What the model says: a text (control texts in it are structure), or what makes one of the request's tokens."""

CHATML_CONTROLS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>", "<think>", "</think>")
END_OF_REPLY = "<|im_end|>"
BYTES = 256


class ByteTokenizer:
    """A token for each byte, and one for each control text."""

    def __init__(self, control_texts: tuple[str, ...] = CHATML_CONTROLS) -> None:
        self.control_texts = control_texts
        self.size = BYTES + len(control_texts)
        self._control_ids = {text: BYTES + number for number, text in enumerate(control_texts)}
        longest_first = sorted(control_texts, key=len, reverse=True)
        self._controls = re.compile("|".join(map(re.escape, longest_first))) if longest_first else None

    def tokenize(self, text: str, *, parse_special: bool) -> TokenIds:
        """See `engine.Tokenizer.tokenize`."""
        if not parse_special or self._controls is None:
            return token_ids(np.frombuffer(text.encode(), dtype=np.uint8))
        ids: list[int] = []
        begin = 0
        for found in self._controls.finditer(text):
            ids += text[begin : found.start()].encode()
            ids.append(self._control_ids[found[0]])
            begin = found.end()
        return token_ids([*ids, *text[begin:].encode()])

    def detokenize(self, tokens: TokenIds, *, special: bool = True) -> bytes:
        """See `engine.Tokenizer.detokenize`."""
        return b"".join(self.piece(token) for token in tokens.tolist() if special or token < BYTES)

    def piece(self, token: int) -> bytes:
        """Return the bytes of one token."""
        if not 0 <= token < self.size:
            raise EngineError(f"token id {token} is not in the vocabulary of {self.size} tokens")
        return bytes((token,)) if token < BYTES else self.control_texts[token - BYTES].encode()

    def id_of(self, control_text: str) -> TokenId | None:
        """Return the id of a control text, None where it is none."""
        found = self._control_ids.get(control_text)
        return None if found is None else TokenId(found)


class _Sequence:
    """What a sequence holds: the resident run, and what its kind of memory needs for going back."""

    def __init__(self) -> None:
        self.run = NO_TOKENS
        self.logits_at_hand = False
        self.first_held = 0
        self.snapshot = NO_TOKENS
        self.lost = ""
        self.unplayed = NO_TOKENS
        self.generation: ScriptedGeneration | None = None

    def forget(self) -> None:
        self.run = self.snapshot = NO_TOKENS
        self.logits_at_hand, self.first_held = False, 0


class ScriptedEngine(ByteTokenizer):
    """See `engine.Engine`. Plays `replies` in order, one for each `generate` that is not forced.

    A reply that was cut by `max_tokens` goes on where it was cut when the next `generate` says what came `so_far`.
    """

    def __init__(
        self,
        replies: Iterable[Reply] = (),
        *,
        n_ctx: int = 8192,
        n_batch: int = 512,
        memory: MemoryKind = MemoryKind.FULL,
        sliding_window_tokens: int = 0,
        chat_template: str | None = None,
        control_texts: tuple[str, ...] = CHATML_CONTROLS,
        add_bos: bool = False,
        on_decode: OnDecode | None = None,
    ) -> None:
        super().__init__(control_texts)
        self._replies = iter(replies)
        self._n_batch = n_batch
        self._on_decode = on_decode
        self._lock = threading.RLock()
        self._sequences: dict[SequenceId, _Sequence] = {}
        self._ids = itertools.count()
        self._closed = False
        bos = control_texts[0] if control_texts else ""
        self.info = EngineInfo(
            model_name="scripted",
            model_path="",
            fingerprint="scripted",
            n_ctx=n_ctx,
            n_ctx_trained=n_ctx,
            vocab_size=self.size,
            memory=memory,
            sliding_window_tokens=sliding_window_tokens,
            chat_template=chat_template,
            add_bos=add_bos,
            bos_id=self.id_of(bos),
            bos_text=bos,
            eos_text=END_OF_REPLY if END_OF_REPLY in control_texts else "",
            control_texts=control_texts,
        )

    def default_sampling(self) -> Sampling:
        """See `engine.Engine.default_sampling`."""
        return Sampling()

    def open_sequence(self) -> SequenceId:
        """See `engine.Engine.open_sequence`."""
        with self._lock:
            self._check_open()
            sequence = SequenceId(next(self._ids))
            self._sequences[sequence] = _Sequence()
            return sequence

    def fork(self, sequence: SequenceId, *, at: int) -> SequenceId:
        """See `engine.Engine.fork`. What a memory that cannot rewind holds is shared whole, or not at all."""
        with self._lock:
            run = self._state(sequence).run
            if at > len(run):
                raise EngineError(f"sequence {sequence} holds {len(run)} tokens: it cannot be forked at {at}")
            child = self.open_sequence()
            if self.info.memory.rewinds or at == len(run):
                self._sequences[child].run = run[:at]
            return child

    def rest(self, sequence: SequenceId) -> None:
        """See `engine.Engine.rest`. Nothing outlives a scripted engine."""

    def settle(self) -> None:
        """See `engine.Engine.settle`."""

    def drop(self, sequence: SequenceId) -> None:
        """See `engine.Engine.drop`."""
        with self._lock:
            state = self._sequences.pop(sequence, None)
            if state is not None and state.generation is not None:
                state.generation.close()

    def evict(self, sequence: SequenceId) -> None:
        """Lose what is resident of a sequence, as happens on a real engine when another one needs the room."""
        with self._lock:
            state = self._state(sequence)
            state.forget()
            state.lost = "evicted"

    def resident(self, sequence: SequenceId) -> TokenIds:
        """See `engine.Engine.resident`."""
        with self._lock:
            return self._state(sequence).run

    def sync(
        self,
        sequence: SequenceId,
        wanted: TokenIds,
        *,
        points: SyncPoints = NO_POINTS,  # noqa: ARG002  (it takes a copy after every batch)
        reuse: bool = True,
        progress: PrefillProgress | None = None,
        cancel: Cancel | None = None,
    ) -> SyncReport:
        """See `engine.Engine.sync`."""
        with self._lock:
            state = self._state(sequence)
            if not reuse:
                state.forget()
            self._check_run(wanted)
            if state.generation is not None:
                state.generation.close()
            plan = self._prepare(state, wanted)
            if progress is not None and plan.keep < len(wanted):
                progress(0, len(wanted) - plan.keep)
            done = self._evaluate(sequence, wanted, plan, progress=progress, cancel=cancel)
            return SyncReport(
                cached=plan.keep,
                evaluated=len(state.run) - plan.keep,
                source=plan.source,
                seconds=0.0,
                cancelled=not done,
                reason=plan.reason,
            )

    def generate(
        self,
        sequence: SequenceId,
        *,
        sampling: Sampling,  # noqa: ARG002  (what is said is given)
        max_tokens: int,
        grammar: Grammar | None = None,  # noqa: ARG002  (what is said is given)
        stop: tuple[str, ...] = (),
        forced: TokenIds | None = None,
        so_far: TokenIds | None = None,
        cancel: Cancel | None = None,
    ) -> ScriptedGeneration:
        """See `engine.Engine.generate`. Raises EngineError where there is no reply left to play."""
        with self._lock:
            state = self._state(sequence)
            if state.generation is not None:
                state.generation.close()
            if not state.logits_at_hand:
                raise EngineError(f"sequence {sequence} has no logits to go on from: sync it first")
            goes_on = so_far is not None and len(so_far) > 0 and len(state.unplayed) > 0
            tokens = forced if forced is not None else state.unplayed if goes_on else self._next_reply(state.run)
            watch = TextWatch(stop if forced is None else ())
            watch.feed(self.detokenize(so_far) if so_far is not None else b"")
            room = min(max_tokens, self.info.n_ctx - len(state.run))
            state.generation = ScriptedGeneration(self, sequence, tokens, max_tokens=room, stop=watch, cancel=cancel)
            return state.generation

    def score(self, sequence: SequenceId, tokens: TokenIds, *, given: TokenIds) -> list[float]:
        """See `engine.Engine.score`. Every token is as likely as any other."""
        self.sync(sequence, concat_tokens([given, tokens]))
        return [-math.log(self.size)] * len(tokens)

    def check_integrity(self) -> None:
        """Raise AssertionError where a sequence holds what its kind of memory could not."""
        with self._lock:
            for state in self._sequences.values():
                assert len(state.run) <= self.info.n_ctx
                assert 0 <= state.first_held <= len(state.run)
                assert len(state.snapshot) <= len(state.run)
                assert not state.logits_at_hand or len(state.run)

    def close(self) -> None:
        """See `engine.Engine.close`."""
        with self._lock:
            for state in self._sequences.values():
                if state.generation is not None:
                    state.generation.close()
            self._closed = True

    def append(self, sequence: SequenceId, tokens: TokenIds) -> None:
        """Evaluate `tokens` after the resident ones. Called by the sequence's own generation, and by `sync`."""
        with self._lock:
            state = self._state(sequence)
            if self._on_decode is not None:
                self._on_decode(sequence, tokens, len(state.run))
            state.run = concat_tokens([state.run, tokens])
            state.logits_at_hand = True
            if self.info.memory is MemoryKind.SLIDING:
                state.first_held = max(state.first_held, len(state.run) - self.info.sliding_window_tokens)

    def set_unplayed(self, sequence: SequenceId, tokens: TokenIds) -> None:
        """Note what is left of a reply that was cut. Called by the sequence's own generation."""
        state = self._sequences.get(sequence)
        if state is not None:
            state.unplayed, state.generation = tokens, None

    def _next_reply(self, request: TokenIds) -> TokenIds:
        reply = next(self._replies, None)
        if reply is None:
            raise EngineError("the script has no reply left: give the engine as many as there are requests")
        text = reply if isinstance(reply, str) else reply(request)
        tokens = self.tokenize(text, parse_special=True)
        # The end of generation is no part of a reply, and nothing after it is said.
        ends = [at for at, token in enumerate(tokens.tolist()) if token == self.id_of(END_OF_REPLY)]
        return tokens[: ends[0]] if ends else tokens

    def _prepare(self, state: _Sequence, wanted: TokenIds) -> SyncPlan:
        rung = len(state.snapshot)
        goes_back = rung and common_prefix_length(state.snapshot, wanted) == rung
        own = HeldRun(
            where=Held.OWN, tokens=state.run, logits_at_hand=state.logits_at_hand, first_held=state.first_held
        )
        plan = plan_sync(
            wanted,
            (own,) if len(state.run) else (),
            kind=self.info.memory,
            window_tokens=self.info.sliding_window_tokens,
            rungs=(rung,) if goes_back else (),
        )
        if not plan.keep:
            lost, state.lost = state.lost, ""
            state.forget()
            return SyncPlan(source=SyncSource.NOTHING, keep=0, reason=plan.reason or lost)
        if plan.keep < len(state.run):
            state.run = state.run[: plan.keep]
            state.logits_at_hand = False
        return plan

    def _evaluate(
        self,
        sequence: SequenceId,
        wanted: TokenIds,
        plan: SyncPlan,
        *,
        progress: PrefillProgress | None,
        cancel: Cancel | None,
    ) -> bool:
        """Evaluate what is missing in batches; say whether it was brought to its end."""
        state = self._state(sequence)
        while (begin := len(state.run)) < len(wanted):
            if cancel is not None and cancel.is_set:
                state.logits_at_hand = False
                return False
            self.append(sequence, wanted[begin : begin + self._n_batch])
            if self.info.memory in (MemoryKind.RECURRENT, MemoryKind.HYBRID):
                state.snapshot = state.run
            if progress is not None:
                progress(len(state.run) - plan.keep, len(wanted) - plan.keep)
        return True

    def _state(self, sequence: SequenceId) -> _Sequence:
        self._check_open()
        state = self._sequences.get(sequence)
        if state is None:
            raise EngineError(f"sequence {sequence} is not open: it was dropped, or belongs to another engine")
        return state

    def _check_open(self) -> None:
        if self._closed:
            raise EngineClosed("the engine was closed")

    def _check_run(self, wanted: TokenIds) -> None:
        if not len(wanted):
            raise EngineError("a request has one token at least")
        if len(wanted) > self.info.n_ctx:
            raise EngineError(f"{len(wanted):,} tokens do not fit in the window of {self.info.n_ctx:,}")
        self.detokenize(wanted)


class ScriptedGeneration:
    """See `engine.Generation`. A token is evaluated when the next one is asked for, as on a real engine."""

    def __init__(
        self,
        engine: ScriptedEngine,
        sequence: SequenceId,
        tokens: TokenIds,
        *,
        max_tokens: int,
        stop: TextWatch,
        cancel: Cancel | None,
    ) -> None:
        self._engine, self._sequence = engine, sequence
        self._waiting = deque(tokens.tolist())
        self._max_tokens, self._stop, self._cancel = max_tokens, stop, cancel
        self._in_hand: int | None = None
        self._ends_after: FinishReason | None = None
        self._evaluated: list[int] = []
        self._report: GenerationReport | None = None

    def __iter__(self) -> Iterator[GeneratedToken]:
        return self

    def __next__(self) -> GeneratedToken:
        if self._report is None and self._in_hand is not None:
            self._engine.append(self._sequence, token_ids((self._in_hand,)))
            self._evaluated.append(self._in_hand)
            self._in_hand = None
        ending = self._ending()
        if ending is not None:
            self._finish(ending)
            raise StopIteration
        token = self._in_hand = self._waiting.popleft()
        piece = self._engine.piece(token)
        if self._stop.peek(piece) is not None:
            self._ends_after = FinishReason.STOP
        self._stop.feed(piece)
        return GeneratedToken(TokenId(token), piece)

    @property
    def report(self) -> GenerationReport:
        """See `engine.Generation.report`."""
        if self._report is None:
            raise EngineError("the reply is not finished: exhaust the iterator, or close it, before the report")
        return self._report

    def close(self) -> None:
        """See `engine.Generation.close`."""
        self._finish(FinishReason.CANCELLED)

    def _ending(self) -> FinishReason | None:
        if self._report is not None:
            return self._report.finish
        if self._ends_after is not None:
            return self._ends_after
        if self._cancel is not None and self._cancel.is_set:
            return FinishReason.CANCELLED
        if not self._waiting:
            return FinishReason.EOG
        return FinishReason.LENGTH if len(self._evaluated) >= self._max_tokens else None

    def _finish(self, reason: FinishReason) -> None:
        if self._report is None:
            self._report = GenerationReport(
                finish=reason, tokens=token_ids(self._evaluated), seconds=0.0, first_token_s=0.0
            )
            unplayed = token_ids(self._waiting) if reason is FinishReason.LENGTH else NO_TOKENS
            self._engine.set_unplayed(self._sequence, unplayed)
