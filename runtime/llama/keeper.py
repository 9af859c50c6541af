"""Writing what is at rest to disk: copied while the engine is idle, written by a thread in the background.

A run is written when a turn has ended and nothing has come for a while; at once where much of it is not on the disk
yet, so that a host which never pauses loses little. The copy goes straight into the page cache of the new file: no
second copy in memory. It takes the engine's turn; hashing, flushing and renaming do not.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass

from ...kernels.chain import RunNamer, parse_run_name
from ...kernels.errors import SnapshotError
from ...kernels.tokens import TokenIds
from ..prefix_cache.modes import ReuseModes
from ..prefix_cache.pool import Rung, Snapshot, SnapshotPool
from ..prefix_cache.snapshot_files import PendingSnapshot, SectionPlan, SnapshotFile, SnapshotFiles
from ..prefix_cache.snapshot_room import is_superseded
from .context import LlamaContext
from .places import PARKED
from .sequence import SequenceState
from .turns import Turns

LEAST_SAVED_TOKENS = 64
"""What is written to disk is at least this much longer than what is there: less is evaluated again."""

URGENT_SHARE = 8
"""A run of which an eighth is not on disk is copied without waiting for a rest. To evaluate a token takes some 250
times as long as to copy one (135M model), so that the copy delays such turns by less than 5 %."""

FEWEST_RUNGS, MOST_RUNGS = 8, 64
"""Partial states that are written with a run: the pinned ones, and so many others; as many as take no more bytes than
the whole state, but within these limits."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Draft:
    """What is to be written of a sequence as it was when `changes` had been made to it."""

    tokens: TokenIds
    changes: int
    whole_bytes: int
    rungs: tuple[Rung, ...]


class Keeper:
    """Keeps the runs of one context on disk. `note` takes what a person should know."""

    def __init__(
        self,
        context: LlamaContext,
        turns: Turns,
        pool: SnapshotPool,
        files: SnapshotFiles | None,
        *,
        seed: bytes,
        modes: ReuseModes,
        rewinds: bool,
        rest_s: float,
        note: Callable[[str], None],
    ) -> None:
        self._context, self._turns, self._pool = context, turns, pool
        self._files = files if modes.disk_snapshot else None
        self._seed, self._rewinds, self._rest_s, self._note = seed, rewinds, rest_s, note
        self._changed = threading.Condition()
        self._resting: dict[SequenceState, float] = {}
        self._pending: deque[PendingSnapshot] = deque()
        self._working = False
        self._hurried = 0
        self._stopped = False
        self._thread: threading.Thread | None = None

    def rest(self, state: SequenceState) -> None:
        """Note that a sequence is at rest. The caller holds the engine's turn."""
        state.awaits_reply = False
        swapped = self._swapped(state) is not None
        if self._files is None or (self._unsaved(state) < LEAST_SAVED_TOKENS and not swapped):
            return
        urgent = self._unsaved(state) * URGENT_SHARE >= len(state.run)
        with self._changed:
            self._resting[state] = time.monotonic() + (0.0 if urgent else self._rest_s)
            self._wake()

    def spill(self, snapshot: Snapshot) -> None:
        """Write a memory snapshot that has to go, where it is worth that. The caller holds the engine's turn.

        Only the copy is made here; the thread does the rest.
        """
        pending = self._copy_snapshot(snapshot)
        if pending is not None:
            with self._changed:
                self._pending.append(pending)
                self._wake()

    def settle(self) -> None:
        """Return once all that is at rest is written. The caller does not hold the engine's turn."""
        with self._changed:
            if self._thread is None:
                return
            self._hurried += 1
            self._changed.notify_all()
            try:
                self._changed.wait_for(lambda: not (self._resting or self._pending or self._working))
            finally:
                self._hurried -= 1

    def close(self) -> None:
        """Write what is worth keeping and stop. The caller does not hold the engine's turn."""
        self.settle()
        if self._files is not None:
            with self._turns:
                states = [state for state in self._context.cells.holders() if state.is_idle]
                snapshots = self._pool.snapshots()
            for state in states:
                if self._unsaved(state) >= LEAST_SAVED_TOKENS:
                    self._save(state)
            for snapshot in snapshots:
                with self._turns:
                    pending = self._copy_snapshot(snapshot)
                if pending is not None:
                    self._commit(pending)
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()

    def _wake(self) -> None:
        """Have the thread look again; it is started with the first thing there is to do."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="chapbook-keeper", daemon=True)
            self._thread.start()
        self._changed.notify_all()

    def _work(self) -> None:
        while True:
            with self._changed:
                self._working = False
                self._changed.notify_all()
                job = self._next_job()
                if job is None:
                    return
                self._working = True
            if isinstance(job, SequenceState):
                self._save(job)
            else:
                self._commit(job)
            del job

    def _next_job(self) -> SequenceState | PendingSnapshot | None:
        """Wait for something that is due; None where the engine closes. The caller holds the condition."""
        while not self._stopped:
            if self._pending:
                return self._pending.popleft()
            now = time.monotonic()
            first = min(self._resting, key=self._resting.__getitem__, default=None)
            wait_s = None if first is None else self._resting[first] - now
            if first is not None and wait_s is not None and (wait_s <= 0 or self._hurried):
                del self._resting[first]
                return first
            self._changed.wait(wait_s)
        return None

    def _unsaved(self, state: SequenceState) -> int:
        return len(state.run) - state.saved_tokens

    def _save(self, state: SequenceState) -> None:
        """Write what a sequence holds, and its session prefix as a file of its own."""
        draft = self._draft(state)
        if draft is None:
            self._save_swapped(state)
            return
        assert self._files is not None
        prefix = draft.tokens[: state.pinned_tokens]
        if len(prefix) >= LEAST_SAVED_TOKENS and not self._files.holds(prefix):
            self._save_prefix(state, draft, prefix)
        if self._files.holds(draft.tokens):
            return
        rungs = self._rungs_to_write(draft.tokens, draft.rungs, whole_bytes=draft.whole_bytes)
        pending = self._begin(draft.tokens, whole_bytes=draft.whole_bytes, rungs=rungs, pinned=False)
        if pending is None:
            return
        with self._turns:
            filled = self._is_still(state, draft) and self._fill(state, pending)
        if not filled:
            pending.abandon()
            return
        for index, rung in enumerate(rungs, start=1):
            pending.section(index)[:] = rung.state
        if self._commit(pending):
            with self._turns:
                if self._is_still(state, draft):
                    state.saved_tokens = len(draft.tokens)

    def _save_swapped(self, state: SequenceState) -> None:
        """Write a sequence that went into a memory snapshot before it could be written."""
        with self._turns:
            snapshot = self._swapped(state)
            pending = None if snapshot is None else self._copy_snapshot(snapshot)
        if pending is not None:
            self._commit(pending)

    def _swapped(self, state: SequenceState) -> Snapshot | None:
        if state.swapped is None or state.slot is not None:
            return None
        length = parse_run_name(state.swapped) or 0
        longer = (one for one in self._pool.snapshots() if len(one.tokens) >= length)
        return next(
            (one for one in longer if RunNamer(one.tokens, seed=self._seed).name(length) == state.swapped), None
        )

    def _draft(self, state: SequenceState) -> _Draft | None:
        """Return what is to be written of a sequence; None where it is in use, or has gone from its cells."""
        with self._turns:
            if state.slot is None or not state.is_idle:
                return None
            tokens = state.run.copy()
            return _Draft(
                tokens=tokens,
                changes=state.changes,
                whole_bytes=self._context.memory.state_bytes(state.slot, partial=False),
                rungs=self._rungs_below(tokens),
            )

    def _is_still(self, state: SequenceState, draft: _Draft) -> bool:
        same = state.changes == draft.changes and len(state.run) == len(draft.tokens)
        return same and state.slot is not None and state.is_idle

    def _fill(self, state: SequenceState, pending: PendingSnapshot) -> bool:
        assert state.slot is not None
        return self._context.memory.copy_state(state.slot, partial=False, into=pending.section(0)) is not None

    def _save_prefix(self, state: SequenceState, draft: _Draft, prefix: TokenIds) -> None:
        """Write the state at the end of the session prefix, from which other sessions start."""
        with self._turns:
            if self._rewinds:
                pending = self._copy_prefix(state, draft, prefix)
            else:
                kept = next((one for one in self._pool.snapshots() if _same(one.tokens, prefix)), None)
                pending = None if kept is None else self._copy_snapshot(kept)
        if pending is not None:
            self._commit(pending)

    def _copy_prefix(self, state: SequenceState, draft: _Draft, prefix: TokenIds) -> PendingSnapshot | None:
        """Copy the first tokens of a run on memory that rewinds, by way of a slot that shares their cells."""
        cells, memory = self._context.cells, self._context.memory
        if not self._is_still(state, draft) or not cells.has_free_slot:
            return None
        scratch = SequenceState(PARKED)
        cells.take_slot(scratch)
        assert scratch.slot is not None
        try:
            self._context.share(state, scratch, len(prefix))
            size = memory.state_bytes(scratch.slot, partial=False)
            pending = self._begin(prefix, whole_bytes=size, rungs=(), pinned=True)
            if pending is not None and not self._fill(scratch, pending):
                pending.abandon()
                return None
            return pending
        finally:
            self._context.clear(scratch)
            cells.give_back(scratch)

    def _copy_snapshot(self, snapshot: Snapshot) -> PendingSnapshot | None:
        """Copy a memory snapshot into a new file; None where it is on disk, or is not worth that."""
        if self._files is None or snapshot.cost_tokens < LEAST_SAVED_TOKENS or self._files.holds(snapshot.tokens):
            return None
        rungs = self._rungs_to_write(
            snapshot.tokens, self._rungs_below(snapshot.tokens), whole_bytes=snapshot.state.nbytes
        )
        # One that waits for its reply is pinned in memory only; it has its logits, which a session prefix has not.
        pinned = snapshot.pinned and snapshot.logits is None
        pending = self._begin(snapshot.tokens, whole_bytes=snapshot.state.nbytes, rungs=rungs, pinned=pinned)
        if pending is None:
            return None
        pending.section(0)[:] = snapshot.state
        for index, rung in enumerate(rungs, start=1):
            pending.section(index)[:] = rung.state
        return pending

    def _rungs_below(self, tokens: TokenIds) -> tuple[Rung, ...]:
        """Return the rungs of a run that are in memory."""
        if self._rewinds or len(tokens) < 2:
            return ()
        namer = RunNamer(tokens, seed=self._seed)
        rungs = [self._pool.rung(namer.name(length)) for length in self._pool.rungs_of(namer, len(tokens) - 1)]
        return tuple(rung for rung in rungs if rung is not None)

    def _rungs_to_write(self, tokens: TokenIds, in_memory: tuple[Rung, ...], *, whole_bytes: int) -> tuple[Rung, ...]:
        """Return the rungs to write with a run, ascending: of those in memory, and in the files that it replaces."""
        if self._rewinds:
            return ()
        assert self._files is not None
        lengths = {rung.length for rung in in_memory}
        largest_bytes = max((rung.state.nbytes for rung in in_memory), default=1)
        on_disk: dict[int, SnapshotFile] = {}
        for file in self._files.find():
            if is_superseded(file, tokens):
                on_disk |= {length: file for length in file.rungs if length not in lengths}
                largest_bytes = max([largest_bytes, *(part.size_bytes for part in file.header.sections[1:])])
        most = max(FEWEST_RUNGS, min(MOST_RUNGS, whole_bytes // largest_bytes))
        pinned = {rung.length for rung in in_memory if rung.pinned}
        chosen = pinned | set(thin_out([*lengths, *on_disk], end=len(tokens), most=most))
        rungs = [rung for rung in in_memory if rung.length in chosen]
        namer = RunNamer(tokens, seed=self._seed)
        for length in sorted(chosen & on_disk.keys()):
            # What cannot be read is missing in the new file, no more.
            with suppress(SnapshotError, OSError):
                state = self._files.load_rung(on_disk[length], length)
                rungs.append(
                    Rung(name=namer.name(length), length=length, state=state, pinned=False, cost_tokens=length)
                )
        return tuple(sorted(rungs, key=lambda rung: rung.length))

    def _begin(
        self, tokens: TokenIds, *, whole_bytes: int, rungs: tuple[Rung, ...], pinned: bool
    ) -> PendingSnapshot | None:
        assert self._files is not None
        sections = [SectionPlan(tokens=len(tokens), partial=False, size_bytes=whole_bytes)]
        sections += [SectionPlan(tokens=rung.length, partial=True, size_bytes=rung.state.nbytes) for rung in rungs]
        try:
            return self._files.begin(tokens, sections, pinned=pinned)
        except (SnapshotError, OSError) as error:
            self._note(f"a snapshot of {len(tokens):,} tokens was not written: {error}")
            return None

    def _commit(self, pending: PendingSnapshot) -> bool:
        try:
            pending.commit(covers=self._rewinds)
        except (SnapshotError, OSError) as error:
            self._note(f"a snapshot was not written: {error}")
            return False
        return True


def thin_out(lengths: Collection[int], *, end: int, most: int) -> list[int]:
    """Return at most `most` of `lengths`, ascending: dense where `end` is near, sparse where it is far.

    To go back far is rarer than to go back a little: one that is left out costs what lies between it and the one
    before, as likely as it is near the end.
    """
    kept = sorted(lengths)
    while len(kept) > most:
        # The one at i would have saved [kept[i - 1], kept[i]).
        before = [0, *kept[:-1]]
        costs = [(length - last) / (end - length + 1) for last, length in zip(before, kept, strict=True)]
        del kept[costs.index(min(costs))]
    return kept


def _same(left: TokenIds, right: TokenIds) -> bool:
    return len(left) == len(right) and bool((left == right).all())
