"""What snapshots on disk cost the turns beside which they are written.

Two engines in one process play the same session, one with a folder for snapshots, one that keeps nothing. They take
turns in blocks. Within a block a message comes a little later than the time after which a turn is written, as it may of
a person: what is still being copied, hashed and flushed then falls into its turn. The first turn of a block has nothing
before it and is left out. Between the blocks all is written.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from ..runtime.engine import Engine
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
MESSAGE_DIVISOR = 16
"""A message is a sixteenth of the window, so that a turn is as long as in a session that has gone on for a while."""

PAUSE_S = CacheOptions().rest_s + 0.1
"""Between two turns; it counts for neither side."""

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

    def block(self) -> list[float]:
        """Play turns one after another, and return the seconds of each."""
        seconds: list[float] = []
        for _ in range(TURNS_A_BLOCK):
            started_s = time.perf_counter()
            self.turn(self.message_tokens)
            seconds.append(time.perf_counter() - started_s)
            time.sleep(PAUSE_S)
        return seconds

    @property
    def held_tokens(self) -> int:
        return self.session.transcript.window.token_count

    @property
    def message_tokens(self) -> int:
        return max(LEAST_MESSAGE_TOKENS, self.held_tokens // MESSAGE_DIVISOR)


@dataclass(slots=True)
class DelayRace:
    """The two engines, side by side. After `run`, `figures` say what the snapshots cost.

    `around` wraps the engine that writes snapshots.
    """

    model: Path
    folder: Path
    n_ctx: int
    n_threads: int | None
    plan: DelayPlan
    around: Callable[[Engine], Engine] = lambda engine: engine
    _turns: PairedTimes = field(default_factory=PairedTimes)
    _blocks: int = 0
    _wrote: int = 0

    def run(self) -> None:
        """Measure. In each round the engines are opened anew, and both sessions begin with nothing kept."""
        for number in range(self.plan.rounds):
            cache = CacheOptions(folder=str(self.snapshots / f"round{number}"))
            with (
                self._side(f"with{number}", cache, self.around) as ours,
                self._side(f"without{number}", CacheOptions(memory_mb=0), lambda engine: engine) as baseline,
            ):
                self._round(ours, baseline, ours_first=number % 2 == 0)

    def figures(self) -> tuple[Figure, ...]:
        """Return the speed with snapshots as a share of that without, and in how many blocks one was written."""
        return (
            judged(self._turns.figure("turns, snapshots written"), SPEED_TARGET),
            judged(
                Figure(
                    name="blocks in which one was written",
                    value=self._wrote / self._blocks if self._blocks else 0.0,
                    note=f"{self._wrote} of {self._blocks} blocks of {TURNS_A_BLOCK} turns",
                ),
                WRITTEN_TARGET,
            ),
        )

    @property
    def snapshots(self) -> Path:
        return self.folder / "snapshots"

    @contextlib.contextmanager
    def _side(self, name: str, cache: CacheOptions, around: Callable[[Engine], Engine]) -> Iterator[_Side]:
        from ..runtime.llama import LlamaEngine  # noqa: PLC0415  (loads llama.cpp)

        plan, workspace = self.plan, self.folder / name
        workspace.mkdir(parents=True)
        with LlamaEngine.open(self.model, n_ctx=self.n_ctx, n_threads=self.n_threads, cache=cache) as opened:
            engine = ReadingEngine(around(opened), reply=REPLY)
            with open_long_session(engine, workspace, templates=plan.templates, with_tools=plan.with_tools) as session:
                yield _Side(engine, session, SourceText(engine, seed=0))

    def _round(self, ours: _Side, baseline: _Side, *, ours_first: bool) -> None:
        # The first turn evaluates the session prefix, and allocates.
        for side in (ours, baseline):
            side.turn(LEAST_MESSAGE_TOKENS)
            side.engine.settle()
        while self._has_room(ours):
            before = self.written()
            seconds: dict[bool, list[float]] = {}
            for is_ours in (ours_first, not ours_first):
                side = ours if is_ours else baseline
                seconds[is_ours] = side.block()
                self._wrote += is_ours and self.written() != before
                side.engine.settle()
            self._blocks += 1
            for ours_s, baseline_s in zip(seconds[True][1:], seconds[False][1:], strict=True):
                self._turns.add(ours_s, baseline_s)
            ours_first = not ours_first

    def _has_room(self, side: _Side) -> bool:
        a_turn = side.message_tokens + GREEDY_TOKENS + AROUND_A_TURN_TOKENS
        # A later message of the block is longer than its first one by a third at most.
        return side.held_tokens + TURNS_A_BLOCK * a_turn * 4 // 3 <= self.plan.tokens

    def written(self) -> set[str]:
        """Return the names of the snapshots that are there; a longer one takes the place of a shorter one."""
        return {file.name for file in self.snapshots.rglob(f"*{SUFFIX}")}
