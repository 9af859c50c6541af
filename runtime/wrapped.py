"""Engines around an engine: one that plays given replies through it, one that reuses nothing.

Both do the real work. They are what makes a benchmark deterministic, and what it is compared with.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Required, TypedDict, Unpack

from ..kernels.errors import EngineError
from ..kernels.tokens import TokenIds
from .cancel import Cancel
from .engine import (
    Engine,
    EngineInfo,
    Generation,
    Grammar,
    PrefillProgress,
    Sampling,
    SequenceId,
    SyncPoints,
    SyncReport,
)


class SyncOptions(TypedDict, total=False):
    """The options of `Engine.sync`."""

    points: SyncPoints
    reuse: bool
    progress: PrefillProgress | None
    cancel: Cancel | None


class GenerateOptions(TypedDict, total=False):
    """The options of `Engine.generate`."""

    sampling: Required[Sampling]
    max_tokens: Required[int]
    grammar: Grammar | None
    stop: tuple[str, ...]
    forced: TokenIds | None
    so_far: TokenIds | None
    cancel: Cancel | None


class WrappedEngine:
    """Hands everything on to another engine. `close` is left to whoever opened that one."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    @property
    def info(self) -> EngineInfo:
        return self.engine.info

    def default_sampling(self) -> Sampling:
        return self.engine.default_sampling()

    def tokenize(self, text: str, *, parse_special: bool) -> TokenIds:
        return self.engine.tokenize(text, parse_special=parse_special)

    def detokenize(self, tokens: TokenIds, *, special: bool = True) -> bytes:
        return self.engine.detokenize(tokens, special=special)

    def open_sequence(self) -> SequenceId:
        return self.engine.open_sequence()

    def fork(self, sequence: SequenceId, *, at: int) -> SequenceId:
        return self.engine.fork(sequence, at=at)

    def drop(self, sequence: SequenceId) -> None:
        self.engine.drop(sequence)

    def rest(self, sequence: SequenceId) -> None:
        self.engine.rest(sequence)

    def settle(self) -> None:
        self.engine.settle()

    def resident(self, sequence: SequenceId) -> TokenIds:
        return self.engine.resident(sequence)

    def sync(self, sequence: SequenceId, wanted: TokenIds, **options: Unpack[SyncOptions]) -> SyncReport:
        return self.engine.sync(sequence, wanted, **options)

    def generate(self, sequence: SequenceId, **options: Unpack[GenerateOptions]) -> Generation:
        return self.engine.generate(sequence, **options)

    def score(self, sequence: SequenceId, tokens: TokenIds, *, given: TokenIds) -> list[float]:
        return self.engine.score(sequence, tokens, given=given)

    def close(self) -> None:
        return


class ForcedEngine(WrappedEngine):
    """Plays `replies`, one for each generation: their tokens are decoded as if the model had chosen them.

    The KV work is real, and the token counts repeat exactly on any machine.
    """

    def __init__(self, engine: Engine, replies: Iterable[str]) -> None:
        super().__init__(engine)
        self._replies = iter(replies)

    def generate(self, sequence: SequenceId, **options: Unpack[GenerateOptions]) -> Generation:
        """Decode the next reply. Raises EngineError where there is none left."""
        if options.get("forced") is None:
            reply = next(self._replies, None)
            if reply is None:
                raise EngineError("all the replies that were given have been played; give more")
            options["forced"] = self.engine.tokenize(reply, parse_special=True)
        return super().generate(sequence, **options)


class ReuselessEngine(WrappedEngine):
    """Evaluates every request from the start: what a cache is measured against."""

    def sync(self, sequence: SequenceId, wanted: TokenIds, **options: Unpack[SyncOptions]) -> SyncReport:
        """Evaluate all of `wanted`, whatever is resident."""
        options["reuse"] = False
        return super().sync(sequence, wanted, **options)

    def fork(self, sequence: SequenceId, *, at: int) -> SequenceId:  # noqa: ARG002  nothing is shared
        return self.engine.open_sequence()
