"""Writing what is at rest to disk: copied while the engine is idle, written by a thread in the background.

A run is written when a turn has ended and nothing has come for a while. Where much of it is not on the disk yet it is
put by at once, so that a host which never pauses loses little: in shared cells, or as a memory snapshot where cells
cannot be shared. Cells are copied straight into the page cache of the new file: no second copy in memory. That takes
the engine's turn; hashing, flushing and renaming do not.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass

from ...kernels.chain import RunNamer, run_name
from ...kernels.errors import SnapshotError
from ...kernels.tokens import TokenIds
from ..prefix_cache.modes import ReuseModes
from ..prefix_cache.pool import Rung, Snapshot, SnapshotPool, stays
from ..prefix_cache.snapshot_files import PendingSnapshot, SectionPlan, SnapshotFile, SnapshotFiles
from ..prefix_cache.snapshot_room import is_superseded
from .context import LlamaContext
from .places import Places
from .sequence import SequenceState
from .turns import Turns

LEAST_SAVED_TOKENS = 64
"""What is written to disk is at least this much longer than what is there: less is evaluated again."""

LOOK_AGAIN_S = 1.0
"""How often `settle` looks whether the thread it waits for still lives."""

LEAST_SPILLED_TOKENS = 512
"""A memory snapshot that has to go is written, while a request waits, if it saves so many."""

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


@dataclass(frozen=True, slots=True, eq=False)
class _PutBy:
    """What `owner` held when `changes` had been made to it: in cells that a sequence shares with it, or in memory."""

    owner: SequenceState
    changes: int
    held: SequenceState | Snapshot


class Keeper:
    """Keeps the runs of one context on disk. `note` takes what a person should know."""

    def __init__(
        self,
        context: LlamaContext,
        turns: Turns,
        places: Places,
        pool: SnapshotPool,
        files: SnapshotFiles | None,
        *,
        seed: bytes,
        modes: ReuseModes,
        rest_s: float,
        note: Callable[[str], None],
    ) -> None:
        self._context, self._turns, self._places, self._pool = context, turns, places, pool
        self._files = files if modes.disk_snapshot else None
        self._seed, self._rewinds, self._rest_s, self._note = seed, context.kind.rewinds, rest_s, note
        self._changed = threading.Condition()
        self._resting: dict[SequenceState, float] = {}
        self._pending: deque[PendingSnapshot] = deque()
        self._put_by_jobs: deque[_PutBy] = deque()
        self._told: set[str] = set()
        self._hurried = 0
        self._stopped = False
        self._thread: threading.Thread | None = None

    def rest(self, state: SequenceState) -> None:
        """Note that a sequence is at rest. The caller holds the engine's turn."""
        state.awaits_reply = False
        swapped = self._places.swapped(state) is not None
        if self._files is None or (self._unsaved(state) < LEAST_SAVED_TOKENS and not swapped):
            return
        urgent = not swapped and self._unsaved(state) * URGENT_SHARE >= len(state.run)
        copied = self._put_by(state) if urgent else None
        with self._changed:
            if copied is None:
                self._resting[state] = time.monotonic() + self._rest_s
            else:
                self._put_by_jobs.append(copied)
            self._wake()

    def _put_by(self, state: SequenceState) -> _PutBy | None:
        """Hold on to what a sequence holds now, whatever comes next: by its cells where they can be shared, else by a
        memory snapshot. None where there is no room for that: it is then written once it rests."""
        if not self._rewinds:
            snapshot = self._places.copy_into_memory(state)
            return None if snapshot is None else _PutBy(state, state.changes, snapshot)
        scratch = self._places.share_out(state, len(state.run))
        if scratch is None:
            return None
        scratch.pinned_tokens = state.pinned_tokens
        return _PutBy(state, state.changes, scratch)

    def spill(self, snapshot: Snapshot) -> None:
        """Write a memory snapshot that has to go, where it is worth that. The caller holds the engine's turn.

        The copy is made here, since the memory is needed now; the thread does the rest.
        """
        if snapshot.cost_tokens < LEAST_SPILLED_TOKENS:
            return
        pending = self._copy_snapshot(snapshot, self._rungs_below(snapshot.tokens))
        if pending is not None:
            with self._changed:
                self._pending.append(pending)
                self._wake()

    def settle(self) -> None:
        """Return once all that is at rest is written. The caller does not hold the engine's turn."""
        # A turn that an interrupt left with this thread is handed on.
        with self._turns:
            pass
        with self._changed:
            self._hurried += 1
            self._changed.notify_all()
            try:
                while self._is_at_work():
                    self._changed.wait(LOOK_AGAIN_S)
            finally:
                self._hurried -= 1

    def close(self) -> None:
        """Write what is worth keeping and stop. The caller does not hold the engine's turn.

        An interrupt leaves the rest unwritten; nothing of the context is used afterwards.
        """
        try:
            self.settle()
            if self._files is not None:
                with self._turns:
                    states = [state for state in self._context.cells.holders() if state.is_idle]
                    snapshots = self._pool.snapshots()
                for state in states:
                    if self._unsaved(state) >= LEAST_SAVED_TOKENS:
                        self._save(state)
                for snapshot in snapshots:
                    self._save_snapshot(snapshot)
        finally:
            with self._turns, self._changed:
                self._stopped = True
                self._resting.clear()

    def _wake(self) -> None:
        """Have the thread look; there is one as long as there is something to do.

        It is no daemon: a process that ends without closing its engine waits until what is at rest is written, and
        the thread is never in a context that is being freed.
        """
        if not self._is_at_work():
            thread = threading.Thread(target=self._work, name="chapbook-keeper")
            try:
                thread.start()
            except RuntimeError as error:  # the system gives no more threads: `close` writes what is left
                self._tell(error)
                return
            # It needs the condition, which the caller holds, to do anything.
            self._thread = thread
        self._changed.notify_all()

    def _is_at_work(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def _work(self) -> None:
        while True:
            with self._changed:
                job = self._next_job()
                if job is None:
                    self._thread = None
                    self._changed.notify_all()
                    return
            try:
                if isinstance(job, SequenceState):
                    self._save(job)
                elif isinstance(job, _PutBy):
                    self._save_put_by(job)
                else:
                    self._commit(job)
            except Exception as error:  # a thread that dies would leave `settle` waiting for ever
                self._tell(error)

    def _next_job(self) -> SequenceState | PendingSnapshot | _PutBy | None:
        """Wait for what is due next; None where there is nothing more to do. The caller holds the condition."""
        while self._pending or self._put_by_jobs or self._resting:
            if self._pending:
                return self._pending.popleft()
            if self._put_by_jobs:
                return self._put_by_jobs.popleft()
            first = min(self._resting, key=self._resting.__getitem__)
            wait_s = self._resting[first] - time.monotonic()
            if wait_s <= 0 or self._hurried:
                del self._resting[first]
                return first
            self._changed.wait(wait_s)
        return None

    def _unsaved(self, state: SequenceState) -> int:
        return len(state.run) - state.saved_tokens

    def _save(self, state: SequenceState) -> None:
        """Write what a sequence holds, and its session prefix as a file of its own."""
        with self._turns:
            draft = self._draft(state)
            snapshot = self._places.swapped(state)
            pinned_tokens = state.pinned_tokens
        if draft is not None:
            # A prefill that was cancelled may not have come to the end of the prefix.
            if LEAST_SAVED_TOKENS <= pinned_tokens <= len(draft.tokens):
                self._save_prefix(state, draft, pinned_tokens)
            self._write(state, draft, pinned=False)
        elif snapshot is not None:
            # It went into a memory snapshot before it could be written.
            self._save_snapshot(snapshot)

    def _save_put_by(self, job: _PutBy) -> None:
        """Write what was put by, and let go of it."""
        held, saved_tokens = job.held, 0
        if isinstance(held, Snapshot):
            saved_tokens = len(held.tokens) if self._save_snapshot(held) else 0
            with self._turns:
                if not stays(held):
                    self._pool.drop(held)
        else:
            try:
                self._save(held)
                saved_tokens = held.saved_tokens
            finally:
                with self._turns:
                    if not self._stopped:
                        self._places.vacate(held)
        if not saved_tokens:
            # It had to give way before it was written: its owner is written once that rests.
            with self._changed:
                self._resting.setdefault(job.owner, time.monotonic() + self._rest_s)
            return
        with self._turns:
            # It may have grown since; where it was cut, nothing is known of it.
            if job.owner.changes == job.changes:
                job.owner.saved_tokens = max(job.owner.saved_tokens, saved_tokens)

    def _save_prefix(self, state: SequenceState, draft: _Draft, length: int) -> None:
        """Write the state at the end of the session prefix, from which other sessions start."""
        assert self._files is not None
        prefix = draft.tokens[:length]
        if self._files.holds(prefix):
            return
        if not self._rewinds:
            with self._turns:
                kept = self._pool.snapshot(run_name(prefix, seed=self._seed))
            if kept is not None:
                self._save_snapshot(kept)
            return
        # A sequence that shares its cells and no more, for as long as it takes.
        with self._turns:
            scratch = self._places.share_out(state, length) if self._is_still(state, draft) else None
            if scratch is None:
                return
            its_draft = self._draft(scratch)
        try:
            if its_draft is not None:
                self._write(scratch, its_draft, pinned=True)
        finally:
            with self._turns:
                if not self._stopped:
                    self._places.vacate(scratch)

    def _write(self, state: SequenceState, draft: _Draft, *, pinned: bool) -> None:
        """Write what a sequence held when it was drafted, if it still does."""
        assert self._files is not None
        if self._files.holds(draft.tokens):
            with self._turns:
                if self._is_still(state, draft):
                    state.saved_tokens = len(draft.tokens)
            return
        rungs = self._rungs_to_write(draft.tokens, draft.rungs, whole_bytes=draft.whole_bytes)
        pending = self._begin(draft.tokens, whole_bytes=draft.whole_bytes, rungs=rungs, pinned=pinned)
        if pending is None:
            return
        with self._turns:
            filled = self._is_still(state, draft) and self._fill(state, pending)
        if not filled:
            pending.abandon()
            with self._turns:
                snapshot = self._places.swapped(state)
            if snapshot is not None:
                # It was swapped out in the meantime.
                self._save_snapshot(snapshot)
        elif self._commit(pending):
            with self._turns:
                if self._is_still(state, draft):
                    state.saved_tokens = len(draft.tokens)

    def _save_snapshot(self, snapshot: Snapshot) -> bool:
        """Write a memory snapshot, where it is worth that. Say whether it was written."""
        with self._turns:
            rungs = self._rungs_below(snapshot.tokens)
        pending = self._copy_snapshot(snapshot, rungs)
        return pending is not None and self._commit(pending)

    def _draft(self, state: SequenceState) -> _Draft | None:
        """Return what is to be written of a sequence; None where it is in use, or has gone from its cells."""
        if state.slot is None or not state.is_idle or self._stopped:
            return None
        if self._context.memory.held_tokens(state.slot) != len(state.run):
            # An interrupt struck; the next change of the accounts repairs them.
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
        return same and state.slot is not None and state.is_idle and not self._stopped

    def _fill(self, state: SequenceState, pending: PendingSnapshot) -> bool:
        assert state.slot is not None
        return self._context.memory.copy_state(state.slot, partial=False, into=pending.section(0)) is not None

    def _copy_snapshot(self, snapshot: Snapshot, in_memory: tuple[Rung, ...]) -> PendingSnapshot | None:
        """Copy a memory snapshot and its rungs into a new file; None where it is on disk, or is not worth that."""
        if self._files is None or snapshot.cost_tokens < LEAST_SAVED_TOKENS or self._files.holds(snapshot.tokens):
            return None
        rungs = self._rungs_to_write(snapshot.tokens, in_memory, whole_bytes=snapshot.state.nbytes)
        pending = self._begin(snapshot.tokens, whole_bytes=snapshot.state.nbytes, rungs=rungs, pinned=snapshot.pinned)
        if pending is not None:
            pending.section(0)[:] = snapshot.state
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
            pending = self._files.begin(tokens, sections, pinned=pinned)
        except (SnapshotError, OSError) as error:
            self._tell(error)
            return None
        for index, rung in enumerate(rungs, start=1):
            pending.section(index)[:] = rung.state
        return pending

    def _commit(self, pending: PendingSnapshot) -> bool:
        try:
            # Where rungs stand for shorter runs, those that were thinned out are not worth a file either.
            pending.commit(covers=self._rewinds or pending.has_rungs)
        except (SnapshotError, OSError) as error:
            self._tell(error)
            return False
        return True

    def _tell(self, error: Exception) -> None:
        """Note why a snapshot was not written; the same reason once."""
        if str(error) not in self._told:
            self._told.add(str(error))
            self._note(f"a snapshot was not written: {error}")


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
