"""Tests of the loaded model on this machine: each way of reusing KV must give what a fresh run gives.

Every mode is tested alone, with all others off, so that nothing else can have done its work; and what the sync says of
its source must be that mode. Batches are the same in both runs, one run at a time: then even a processor rounds alike,
and a mode that works is equal to a few bits. Only a fork by copy stands in other cells, and a moved tail is an
approximation.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from ...kernels.errors import EngineError, SnapshotError, UsageError
from ...kernels.tokens import TokenIds, concat_tokens, token_ids
from ..engine import NO_POINTS, MemoryKind, SyncReport, SyncSource
from ..prefix_cache.mode_results import ModeResult, Outcome
from ..prefix_cache.modes import ReuseModes
from ..prefix_cache.pool import SnapshotPool
from ..prefix_cache.snapshot_files import SnapshotFiles
from .cache_parts import CacheParts, put_together
from .engine import LlamaEngine
from .likeness import Foretold, Likeness, Reader
from .moved_tail import TailMove, move_tail
from .places import PARKED
from .sample_text import SAMPLE_TEXT
from .sequence import SequenceState

LEAST_WINDOW_TOKENS = 512
GIVEN_TOKENS, TESTED_TOKENS, DROPPED_TOKENS = 160, 64, 96
LEAST_AGREEMENT = 0.95
"""The share of positions whose likeliest token must be the same."""
MOST_DIFFERENCE = 0.02
"""How far the log-probabilities of the likeliest tokens may be off, in nats, on average: with equal batches runs are
equal to the bit on a processor (measured), and one wrong token among 160 shows as 0.3 on SmolLM2."""
PREFIX_TOKENS, SPAN_TOKENS, TAIL_TOKENS, INSERTED_TOKENS, FORETOLD_TOKENS = 64, 96, 96, 24, 200
"""What a tail is moved in, and how much text behind it has its loss measured."""
MOST_LOSS_WORSE = 0.05
"""How much worse, in nats. SmolLM2 loses nothing (-0.02); with keys that are not turned it is 0.8 (measured)."""
MOST_DIVERGENCE = 0.02
"""How far what is likely may be off, in nats of Kullback-Leibler divergence, where a run stands in other cells than the
fresh one, or was moved there and back: quantised weights amplify any rounding to 0.002 on SmolLM2, and keys that are
turned 7 positions too little give 0.04 (measured)."""

_ENDLESS_BYTES = 1 << 50


class _NotTested(Exception):
    """Something that is not the mode's fault kept it from being tested."""


def run_mode_tests(
    engine: LlamaEngine, *, folder: Path, on_test: Callable[[str], None] | None = None
) -> tuple[ModeResult, ...]:
    """Test each mode of reuse, in the order of `ReuseModes`, while nobody else uses the engine.

    `folder` takes snapshot files for as long as this runs; idle sequences may lose what they hold. A mode that the
    model's memory does not have is not applicable. `on_test` is called with a mode before its test. Raises UsageError
    for a window that is too small.
    """
    if engine.info.n_ctx < LEAST_WINDOW_TOKENS:
        raise UsageError(
            f"the self-test needs a window of {LEAST_WINDOW_TOKENS} tokens, and n_ctx is {engine.info.n_ctx}"
        )
    rig = _Rig(engine, folder)
    fresh = rig.fresh(rig.given, rig.ends, rig.tested)
    return tuple(_run(rig, fresh, mode, test, on_test) for mode, test in _TESTS.items())


@dataclass(frozen=True, slots=True, kw_only=True)
class _Reached:
    """How a test came to its run, what was wrong with that (`reason`), and how it compares.

    `rounds_alike`: the run stands in the same cells as the fresh one.
    """

    source: str
    cached: int
    reason: str
    compared: Likeness
    rounds_alike: bool = True
    loss_worse: float | None = None


def _run(
    rig: _Rig,
    fresh: Foretold,
    mode: str,
    test: Callable[[_Rig, Foretold], _Reached],
    on_test: Callable[[str], None] | None,
) -> ModeResult:
    lacking = _lacking(rig.engine, mode)
    if lacking:
        return ModeResult(mode=mode, outcome=Outcome.NOT_APPLICABLE, reason=lacking)
    if on_test is not None:
        on_test(mode)
    try:
        return _judge(mode, test(rig, fresh))
    except _NotTested as error:
        return ModeResult(mode=mode, outcome=Outcome.NOT_TESTED, reason=str(error))
    except (EngineError, SnapshotError) as error:
        return ModeResult(mode=mode, outcome=Outcome.FAILED, reason=str(error))


def _lacking(engine: LlamaEngine, mode: str) -> str:
    """Say what this memory lacks for a mode; nothing where it has it."""
    kind = engine.info.memory
    if mode == "rewind" and kind in (MemoryKind.RECURRENT, MemoryKind.HYBRID):
        return f"{kind} memory cannot drop a tail"
    if mode == "partial_snapshot" and kind.rewinds:
        return f"{kind} memory can drop any tail and needs none"
    if mode == "moved_tail" and not engine.context.can_move_tails:
        return f"{kind} memory does not hold a whole tail" if not kind.rewinds else "tails of this model cannot move"
    if mode in ("fork", "moved_tail") and engine.context.cells.n_slots < 2:
        return "the engine was opened for one sequence"
    return ""


def _judge(mode: str, reached: _Reached) -> ModeResult:
    compared, loss_worse = reached.compared, reached.loss_worse
    problems = [reached.reason, *(_not_equal(compared) if reached.rounds_alike else _not_near(compared))]
    if loss_worse is not None and not loss_worse <= MOST_LOSS_WORSE:
        problems.append(
            f"the text behind it is foretold {loss_worse:.3f} nats worse, and {MOST_LOSS_WORSE} is the most"
        )
    reason = "; ".join(filter(None, problems))
    return ModeResult(
        mode=mode,
        outcome=Outcome.FAILED if reason else Outcome.PASSED,
        reason=reason,
        source=reached.source,
        cached=reached.cached,
        agreement=compared.agreement,
        difference=compared.difference,
        divergence=compared.divergence,
        loss_worse=loss_worse,
    )


# What is not a number is no small difference: hence `not ... <=`.


def _not_equal(compared: Likeness) -> Iterator[str]:
    if not compared.agreement >= LEAST_AGREEMENT:
        yield f"the likeliest token is another at {1 - compared.agreement:.0%} of the positions"
    if not compared.difference <= MOST_DIFFERENCE:
        yield f"log-probabilities are {compared.difference:.3f} nats off, and {MOST_DIFFERENCE} is the most"


def _not_near(compared: Likeness) -> Iterator[str]:
    if not compared.divergence <= MOST_DIVERGENCE:
        yield f"what is likely diverges by {compared.divergence:.3f} nats, and {MOST_DIVERGENCE} is the most"


class _Rig:
    """The engine's context with a cache of its own for each test."""

    def __init__(self, engine: LlamaEngine, folder: Path) -> None:
        self.engine, self._folder = engine, folder
        text = engine.tokenize(SAMPLE_TEXT * 3, parse_special=False)
        # Models that are trained with it foretell badly without.
        bos = engine.info.bos_id if engine.info.add_bos else None
        self.text = text if bos is None else concat_tokens((token_ids((bos,)), text))
        self.given = self.text[:GIVEN_TOKENS]
        self.before = self.given[:-1]
        self.ends = len(self.before), len(self.given)
        self.tested = self.text[GIVEN_TOKENS : GIVEN_TOKENS + TESTED_TOKENS]
        dropped = self.text[GIVEN_TOKENS + TESTED_TOKENS :][:DROPPED_TOKENS]
        self.longer = concat_tokens((self.given, dropped))

    @contextmanager
    def cache(self, *modes: str) -> Iterator[CacheParts]:
        """Give a cache with only these modes, in which nothing is held; what it holds at the end is let go of."""
        engine, notes = self.engine, list[str]()
        pool = SnapshotPool(
            _ENDLESS_BYTES, reserve_bytes=0, seed=engine.identity.seed, available_bytes=lambda: _ENDLESS_BYTES
        )
        files = None
        if "disk_snapshot" in modes:
            files = SnapshotFiles(self._folder, identity=engine.identity, budget_bytes=_ENDLESS_BYTES, clock=time.time)
        parts = put_together(
            engine.context,
            engine.turns,
            pool,
            files,
            seed=engine.identity.seed,
            modes=ReuseModes.only(*modes),
            rest_s=0.0,
            notes=notes,
        )
        others = set(engine.context.cells.holders())
        try:
            yield parts
        finally:
            with engine.turns:
                for state in engine.context.cells.holders():
                    if state not in others:
                        parts.places.vacate(state)
            parts.keeper.close()

    def fresh(self, run: TokenIds, ends: tuple[int, ...], tokens: TokenIds) -> Foretold:
        """Evaluate a run from nothing in batches that end at `ends`, then `tokens`, and return what is likely there."""
        with self.cache() as parts:
            state = self.evaluated(parts, run, ends)
            with self.engine.turns:
                return self.reader(parts).foretell(state, tokens)

    def reader(self, parts: CacheParts) -> Reader:
        """Return what reads the model's expectations in a cache. Its methods want the engine's turn."""
        return Reader(self.engine.context, parts.residency)

    def evaluated(self, parts: CacheParts, run: TokenIds, ends: tuple[int, ...]) -> SequenceState:
        """Return a sequence that holds a run, evaluated from nothing in batches that end at `ends`."""
        with self.engine.turns:
            state = parts.residency.open()
        evaluated = 0
        for end in ends:
            report = _sync(parts, state, run[:end], reuse=evaluated > 0)
            evaluated += report.evaluated
        if evaluated != len(run):
            raise EngineError(f"{evaluated} of {len(run)} tokens were evaluated where all had to be")
        return state

    def arrived(
        self, parts: CacheParts, state: SequenceState, report: SyncReport, source: SyncSource, fresh: Foretold
    ) -> _Reached:
        """Compare a sequence that was synced to `given`, which all but the last token must have come from `source`."""
        right = report.source is source and report.cached == len(self.before)
        with self.engine.turns:
            compared = self.reader(parts).compare(state, self.tested, fresh)
        return _Reached(
            source=str(report.source),
            cached=report.cached,
            reason="" if right else _not_used(report, source, len(self.before)),
            compared=compared,
        )


def _sync(parts: CacheParts, state: SequenceState, wanted: TokenIds, *, reuse: bool = True) -> SyncReport:
    """Bring a sequence to a run."""
    return parts.residency.sync(state.id, wanted, points=NO_POINTS, reuse=reuse, progress=None, cancel=None)


def _rewind(rig: _Rig, fresh: Foretold) -> _Reached:
    with rig.cache("rewind") as parts:
        state = rig.evaluated(parts, rig.longer, (len(rig.before), len(rig.longer)))
        return rig.arrived(parts, state, _sync(parts, state, rig.given), SyncSource.REWIND, fresh)


def _fork(rig: _Rig, fresh: Foretold) -> _Reached:
    """The parent goes on after the child: neither may harm the other."""
    with rig.cache("fork") as parts:
        parent = rig.evaluated(parts, rig.before, (len(rig.before),))
        with rig.engine.turns:
            child = parts.residency.open()
        reached = rig.arrived(parts, child, _sync(parts, child, rig.given), SyncSource.FORK, fresh)
        # Then the parent goes on in the cells of a fresh run, and rounds alike.
        with rig.engine.turns:
            parts.places.vacate(child)
        of_parent = rig.arrived(parts, parent, _sync(parts, parent, rig.given), SyncSource.RESIDENT, fresh)
    harmed = "; ".join(filter(None, (of_parent.reason, *_not_equal(of_parent.compared))))
    if harmed and not reached.reason:
        return replace(reached, reason=f"the sequence that was forked suffered: {harmed}")
    # A copy has other cells than a fresh run.
    return replace(reached, rounds_alike=rig.engine.info.memory.rewinds)


def _memory_snapshot(rig: _Rig, fresh: Foretold) -> _Reached:
    with rig.cache("memory_snapshot") as parts:
        state = rig.evaluated(parts, rig.before, (len(rig.before),))
        with rig.engine.turns:
            parts.places.evict(state)
        if not parts.pool.snapshots():
            raise _NotTested("; ".join(parts.reuse.take_notes()) or "llama.cpp gave no copy of the state")
        return rig.arrived(parts, state, _sync(parts, state, rig.given), SyncSource.MEMORY, fresh)


def _disk_snapshot(rig: _Rig, fresh: Foretold) -> _Reached:
    """One cache writes, and a second one reads, as a later process would."""
    with rig.cache("disk_snapshot") as parts:
        state = rig.evaluated(parts, rig.before, (len(rig.before),))
        with rig.engine.turns:
            parts.keeper.rest(state)
        parts.keeper.settle()
        assert parts.files is not None
        if not parts.files.holds(rig.before):
            raise _NotTested("; ".join(parts.reuse.take_notes()) or "no snapshot was written")
    with rig.cache("disk_snapshot") as parts:
        with rig.engine.turns:
            state = parts.residency.open()
        return rig.arrived(parts, state, _sync(parts, state, rig.given), SyncSource.DISK, fresh)


def _partial_snapshot(rig: _Rig, fresh: Foretold) -> _Reached:
    """Rewinding is off, so that a sliding window goes back to the copy even where it still holds all it needs."""
    with rig.cache("partial_snapshot") as parts:
        state = rig.evaluated(parts, rig.longer, (len(rig.before), len(rig.longer)))
        return rig.arrived(parts, state, _sync(parts, state, rig.given), SyncSource.PARTIAL, fresh)


def _moved_tail(rig: _Rig, _fresh: Foretold) -> _Reached:
    """Moved and evaluated, what follows must be foretold as well; moved there and back, it must be as if never moved.

    The first finds keys that are not turned to their new positions, the second keys that are turned too far or not
    far enough, which costs a text of this length little.
    """
    ends = np.cumsum((0, PREFIX_TOKENS, SPAN_TOKENS, TAIL_TOKENS, FORETOLD_TOKENS, INSERTED_TOKENS)).tolist()
    prefix, span, tail, foretold, inserted = (rig.text[ends[i] : ends[i + 1]] for i in range(5))
    before, after = concat_tokens((prefix, span, tail)), concat_tokens((prefix, inserted, tail))
    # As `move_tail` evaluates them: the span by itself, and the last token by itself.
    batches = (*ends[1:3], len(before) - 1, len(before))
    unmoved = rig.fresh(before, batches, foretold[:TESTED_TOKENS])
    with rig.cache() as parts:
        state = rig.evaluated(parts, after, (len(after),))
        with rig.engine.turns:
            exact = rig.reader(parts).loss(state, foretold)
    with rig.cache() as parts:
        state = rig.evaluated(parts, before, batches)
        with rig.engine.turns:
            _move(rig, state, dropped=len(span), inserted=inserted, expected=after)
            moved = rig.reader(parts).loss(state, foretold)
    with rig.cache() as parts:
        state = rig.evaluated(parts, before, batches)
        with rig.engine.turns:
            _move(rig, state, dropped=len(span), inserted=inserted, expected=after)
            _move(rig, state, dropped=len(inserted), inserted=span, expected=before)
            compared = rig.reader(parts).compare(state, foretold[:TESTED_TOKENS], unmoved)
    return _Reached(
        source="moved tail",
        cached=len(prefix) + len(tail) - 1,
        reason="",
        compared=compared,
        rounds_alike=False,
        loss_worse=moved - exact,
    )


def _move(rig: _Rig, state: SequenceState, *, dropped: int, inserted: TokenIds, expected: TokenIds) -> None:
    """Move the tail behind the prefix. Raises EngineError where the sequence does not hold what is `expected` then."""
    context = rig.engine.context
    scratch = SequenceState(PARKED)
    context.arm(None)
    context.cells.take_slot(scratch)
    try:
        outcome = move_tail(context, state, scratch, keep=PREFIX_TOKENS, dropped=dropped, inserted=inserted)
    finally:
        if scratch.slot is not None:
            context.cells.give_back(scratch)
    if outcome is not TailMove.DONE:
        raise EngineError(f"the tail was not moved: {outcome.name.lower().replace('_', ' ')}")
    assert state.slot is not None
    held = context.memory.held_tokens(state.slot)
    if held != len(expected) or not np.array_equal(state.run.view(), expected):
        raise EngineError(f"{held} tokens are held after the move, and {len(expected)} should be")


_TESTS: Mapping[str, Callable[[_Rig, Foretold], _Reached]] = {
    "rewind": _rewind,
    "fork": _fork,
    "memory_snapshot": _memory_snapshot,
    "disk_snapshot": _disk_snapshot,
    "partial_snapshot": _partial_snapshot,
    "moved_tail": _moved_tail,
}


def _not_used(report: SyncReport, source: SyncSource, cached: int) -> str:
    why = f": {report.reason}" if report.reason else ""
    notes = "".join(f"; {note}" for note in report.notes)
    return f"{report.cached} tokens came from {report.source}, and {cached} should from {source}{why}{notes}"
