"""What snapshots on disk cost the turns beside which they are written.

Two engines in one process play the same session, one with a folder for snapshots, one that keeps nothing. They take
turns in blocks: within a block a turn follows the last one at once, as that of a host which never pauses, so that the
copy and the writing after one turn fall into the next. Between the blocks all is written, which counts for neither.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from ..runtime.prefix_cache.options import CacheOptions
from ..runtime.prefix_cache.snapshot_format import SUFFIX
from ..runtime.session import Session
from .long_session import (
    AROUND_A_TURN_TOKENS,
    GREEDY_TOKENS,
    LEAST_MESSAGE_TOKENS,
    NO_CALLS,
    ReadingEngine,
    SourceText,
    open_long_session,
)
from .paired import Figure, PairedTimes, Target, judged
from .played_turn import play_turn

SPEED_TARGET = Target(">=", 1 / 1.05)
"""A turn takes 5 % more at most."""

WRITTEN_TARGET = Target(">=", 0.9)

TURNS_A_BLOCK = 4
MESSAGE_DIVISOR = 12
"""A message is a twelfth of the window, so that more than an eighth comes to it within two turns: a snapshot is
written in the middle of every block."""

REPLY = "I have read it, line by line, and can say what it does when you ask me; go on with the next part. "


class DelayPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Sessions grow to `tokens`, `rounds` times."""

    tokens: int
    rounds: int
    with_tools: bool
    templates: Path


@dataclass(slots=True)
class _Side:
    """One of the two engines with its session."""

    engine: ReadingEngine
    session: Session
    text: SourceText

    def turn(self, tokens: int) -> None:
        play_turn(self.session, self.text.message(tokens), choice=NO_CALLS)

    def block(self) -> None:
        """Play turns one after another."""
        for _ in range(TURNS_A_BLOCK):
            self.turn(self.message_tokens)

    @property
    def held_tokens(self) -> int:
        return self.session.transcript.window.token_count

    @property
    def message_tokens(self) -> int:
        return max(LEAST_MESSAGE_TOKENS, self.held_tokens // MESSAGE_DIVISOR)


@dataclass(slots=True)
class DelayRace:
    """The two engines, side by side. After `run`, `figures` say what the snapshots cost."""

    model: Path
    folder: Path
    n_ctx: int
    n_threads: int | None
    plan: DelayPlan
    timer: Callable[[], float] = time.perf_counter
    _blocks: PairedTimes = field(default_factory=PairedTimes)
    _wrote: int = 0

    def run(self) -> None:
        """Measure. In each round the engines are opened anew and both sessions begin."""
        for number in range(self.plan.rounds):
            with (
                self._side(f"with{number}", CacheOptions(folder=str(self.snapshots))) as ours,
                self._side(f"without{number}", CacheOptions(memory_mb=0)) as baseline,
            ):
                self._round(ours, baseline, ours_first=number % 2 == 0)

    def figures(self) -> tuple[Figure, ...]:
        """Return the speed with snapshots as a share of that without, and in how many blocks one was written."""
        blocks = len(self._blocks)
        return (
            judged(self._blocks.figure("turns, snapshots written"), SPEED_TARGET),
            judged(
                Figure(
                    name="blocks in which one was written",
                    value=self._wrote / blocks if blocks else 0.0,
                    note=f"{self._wrote} of {blocks} blocks of {TURNS_A_BLOCK} turns",
                ),
                WRITTEN_TARGET,
            ),
        )

    @property
    def snapshots(self) -> Path:
        return self.folder / "snapshots"

    @contextlib.contextmanager
    def _side(self, name: str, cache: CacheOptions) -> Iterator[_Side]:
        from ..runtime.llama import LlamaEngine  # noqa: PLC0415  (loads llama.cpp)

        plan, workspace = self.plan, self.folder / name
        workspace.mkdir(parents=True)
        with LlamaEngine.open(self.model, n_ctx=self.n_ctx, n_threads=self.n_threads, cache=cache) as opened:
            engine = ReadingEngine(opened, reply=REPLY)
            with open_long_session(engine, workspace, templates=plan.templates, with_tools=plan.with_tools) as session:
                yield _Side(engine, session, SourceText(engine, seed=0))

    def _round(self, ours: _Side, baseline: _Side, *, ours_first: bool) -> None:
        # The first turn evaluates the session prefix, and allocates.
        for side in (ours, baseline):
            side.turn(LEAST_MESSAGE_TOKENS)
            side.engine.settle()
        while self._has_room(ours):
            before = self.written()
            seconds: dict[bool, float] = {}
            for is_ours in (ours_first, not ours_first):
                side = ours if is_ours else baseline
                started_s = self.timer()
                side.block()
                seconds[is_ours] = self.timer() - started_s
                self._wrote += is_ours and self.written() != before
                side.engine.settle()
            self._blocks.add(seconds[True], seconds[False])
            ours_first = not ours_first

    def _has_room(self, side: _Side) -> bool:
        a_turn = side.message_tokens + GREEDY_TOKENS + AROUND_A_TURN_TOKENS
        # A later message of the block is longer than its first one by a third at most.
        return side.held_tokens + TURNS_A_BLOCK * a_turn * 4 // 3 <= self.plan.tokens

    def written(self) -> set[str]:
        """Return the names of the snapshots that are there; a longer one takes the place of a shorter one."""
        return {file.name for file in self.snapshots.rglob(f"*{SUFFIX}")}
