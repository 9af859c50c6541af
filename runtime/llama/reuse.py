"""Starting a sequence from the best that is held: gathers what there is, has it planned, and carries the plan out.

Callers hold the engine's turn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from ...kernels.chain import RunNamer, parse_run_name, run_name
from ...kernels.errors import SnapshotUnusable
from ...kernels.tokens import TokenIds
from ..engine import MemoryKind, SyncSource
from ..prefix_cache.modes import ReuseModes
from ..prefix_cache.plan import Held, HeldRun, SyncPlan, plan_sync
from ..prefix_cache.pool import Rung, Snapshot, SnapshotPool, StateBytes
from ..prefix_cache.snapshot_files import SnapshotFile, SnapshotFiles
from .context import LlamaContext
from .places import PARKED, Places
from .sequence import SequenceState

LEAST_EXPLAINED_TOKENS = 64
"""A request that has to evaluate fewer from nothing needs no look into the snapshot folder for the reason."""

_MOST_ATTEMPTS = 8


class Reuse:
    """What a context can start a sequence from. `notes` is where everybody puts what a person should know."""

    def __init__(
        self,
        context: LlamaContext,
        places: Places,
        pool: SnapshotPool,
        files: SnapshotFiles | None,
        *,
        seed: bytes,
        modes: ReuseModes,
        notes: list[str],
    ) -> None:
        self.context, self._places, self.pool, self.files = context, places, pool, files
        self._kind, self.window_tokens = context.kind, context.window_tokens
        self._seed, self._modes = seed, modes
        self._notes = notes

    @property
    def copies_to_fork(self) -> bool:
        """Whether a sequence that starts from another one copies its state, instead of sharing its cells."""
        return not self._kind.rewinds

    def start(self, state: SequenceState, wanted: TokenIds) -> SyncPlan:
        """Bring what a sequence holds to a prefix of `wanted`, and say what that took."""
        namer = RunNamer(wanted, seed=self._seed)
        failed: set[tuple[Held, int]] = set()
        lost, state.lost = state.lost, ""
        for _ in range(_MOST_ATTEMPTS):
            held = _Candidates(self, state, failed)
            plan = plan_sync(
                wanted,
                held.runs,
                kind=self._kind,
                window_tokens=self.window_tokens,
                rungs=self.pool.rungs_of(namer, len(wanted)),
                modes=self._modes,
            )
            if plan.source is SyncSource.NOTHING:
                break
            # Held on to from here: making room for the state may let go of what is in memory.
            rung = self.pool.rung(namer.name(plan.rung)) if plan.rung else None
            if self._carry_out(state, plan, held, wanted, rung):
                state.swapped = None
                return plan
            assert plan.base is not None or plan.rung
            if plan.base is not None:
                failed.add((plan.base.where, plan.base.key))
        self._places.retire(state)
        self._places.require_slot(state)
        state.swapped = None
        return SyncPlan(source=SyncSource.NOTHING, keep=0, reason=self._explain(wanted, plan.reason or lost))

    def take_rung(self, state: SequenceState, *, pinned: bool, cost_tokens: int) -> None:
        """Copy the part of a state that cannot be rewound, so that this point can be come back to."""
        if self._kind.rewinds or not self._modes.partial_snapshot or not len(state.run):
            return
        run = state.run.view()
        name = RunNamer(run, seed=self._seed).name(len(run))
        if self.pool.rung(name) is not None:
            return
        copy = self._places.copy_state(state, partial=True)
        if copy is not None:
            self.pool.put_rung(
                Rung(name=name, length=len(run), state=copy, pinned=pinned, cost_tokens=max(1, cost_tokens))
            )

    def take_pinned(self, state: SequenceState) -> None:
        """Keep the whole state at the end of a session prefix, where a longer run's cannot be cut back to it."""
        if self._kind.rewinds or not self._modes.memory_snapshot:
            return
        tokens = state.run.copy()
        if self.pool.snapshot(run_name(tokens, seed=self._seed)) is not None:
            return
        copy = self._places.copy_state(state, partial=False)
        if copy is not None:
            self.pool.put(
                Snapshot(tokens=tokens, state=copy, logits=None, pinned=True, cost_tokens=len(tokens)), covers=False
            )

    def bring_back(self, state: SequenceState) -> bool:
        """Put a sequence that was swapped out after its sync back as it was, with its logits; say whether it worked."""
        snapshot = self._places.swapped(state)
        if snapshot is None or snapshot.logits is None or state.swapped is None:
            return False
        if parse_run_name(state.swapped) != len(snapshot.tokens):
            return False
        if not self._places.settle(state):
            return False
        state.swapped = None
        if not self._put_whole(state, snapshot.tokens, snapshot.state):
            return False
        state.logits_at_hand, state.saved_logits, state.lost = True, snapshot.logits, ""
        self.pool.drop(snapshot)
        return True

    def repair(self, states: Sequence[SequenceState]) -> None:
        """Make all accounts true after an interrupt within a change of them."""
        self.context.repair(states)
        self.pool.recount()

    def take_notes(self) -> tuple[str, ...]:
        """Return what befell the cache since the last call."""
        from_files = self.files.take_notes() if self.files is not None else ()
        notes = (*self._notes, *self.pool.drain_notes(), *from_files)
        self._notes.clear()
        return notes

    def _carry_out(
        self, state: SequenceState, plan: SyncPlan, held: _Candidates, wanted: TokenIds, rung: Rung | None
    ) -> bool:
        """Do what a plan says; False where it could not be, and then the sequence holds nothing."""
        base = plan.base
        if base is None:
            self._places.retire(state)
            if not self._places.settle(state):
                return False
        elif base.where is not Held.OWN:
            self._places.retire(state)
            if not self._start_from(state, base, held, plan):
                return False
        if plan.keep == len(state.run):
            return True
        if base is not None and base.where is Held.OWN:
            self._places.keep_tail(state, plan.keep)
        if plan.rung:
            return self._put_rung(state, plan, held, wanted, rung)
        return self.context.rewind(state, plan.keep) and self._holds_window(state)

    def _holds_window(self, state: SequenceState) -> bool:
        """Say whether what the next token attends to is there; if not, clear the sequence. llama.cpp would go on."""
        if self._kind is not MemoryKind.SLIDING:
            return True
        assert state.slot is not None
        # The token at n attends to (n - window, n].
        if self.context.memory.first_held(state.slot) <= max(0, len(state.run) - self.window_tokens + 1):
            return True
        self.context.clear(state)
        return False

    def _start_from(self, state: SequenceState, base: HeldRun, held: _Candidates, plan: SyncPlan) -> bool:
        if base.where is Held.OTHER:
            return self._fork(state, held.sequences[base.key], plan.keep)
        if not self._places.settle(state):
            return False
        if base.where is Held.MEMORY:
            return self._from_memory(state, held.snapshots[base.key], keep=plan.keep)
        return self._from_disk(state, held.files[base.key])

    def _from_disk(self, state: SequenceState, file: SnapshotFile) -> bool:
        if not self._places.make_room(state, len(file.tokens)):
            return False
        loaded = self._load(lambda files: files.load_state(file))
        if loaded is None:
            return False
        if not self._put_whole(state, file.tokens, loaded):
            self._condemn(file)
            return False
        state.saved_tokens = len(file.tokens)
        return True

    def _condemn(self, file: SnapshotFile) -> None:
        """Set a file aside whose state llama.cpp refuses. It may have been for want of room where others hold some."""
        if self.files is not None and self.context.cells.used == 0:
            self._notes.append(self.files.condemn(file, "llama.cpp refuses its state"))

    def _from_memory(self, state: SequenceState, snapshot: Snapshot, *, keep: int) -> bool:
        if not self._put_whole(state, snapshot.tokens, snapshot.state):
            self.pool.drop(snapshot)
            return False
        self.pool.touch(snapshot)
        # Resident again and every token wanted: one copy is enough.
        if keep == len(snapshot.tokens) and not snapshot.pinned:
            if snapshot.logits is not None:
                state.logits_at_hand, state.saved_logits = True, snapshot.logits
            self.take_rung(state, pinned=False, cost_tokens=snapshot.cost_tokens)
            self.pool.drop(snapshot)
        return True

    def _fork(self, state: SequenceState, other: SequenceState, keep: int) -> bool:
        if other.id == PARKED:
            self._places.adopt(state, other)
            self._places.keep_tail(state, keep)
            return True
        if not self._places.settle(state, besides=other):
            return self._swap_out(other)
        if self._kind.rewinds:
            self.context.share(other, state, keep)
            state.saved_tokens = min(other.saved_tokens, keep)
            return True
        assert other.slot is not None
        if not self._places.make_room(state, len(other.run), besides=other):
            return self._swap_out(other)
        copy = self.context.memory.copy_state(other.slot, partial=False)
        return copy is not None and self.context.restore_whole(state, other.run.copy(), copy)

    def _swap_out(self, other: SequenceState) -> bool:
        """Where there is no room beside `other`, have it in a memory snapshot: the next attempt starts from that."""
        assert other.slot is not None
        size_bytes = self.context.memory.state_bytes(other.slot, partial=False)
        if self._modes.memory_snapshot and other.is_idle and self.pool.room_for(size_bytes):
            self._places.evict(other)
        return False

    def _put_whole(self, state: SequenceState, tokens: TokenIds, copy: StateBytes) -> bool:
        return self._places.make_room(state, len(tokens)) and self.context.restore_whole(state, tokens, copy)

    def _put_rung(
        self, state: SequenceState, plan: SyncPlan, held: _Candidates, wanted: TokenIds, rung: Rung | None
    ) -> bool:
        if rung is not None:
            self.pool.touch(rung)
            if self.context.restore_partial(state, rung.state, length=plan.rung, tokens=wanted):
                return True
            self.pool.drop(rung)
            return False
        assert plan.base is not None
        file = held.files[plan.base.key]
        copy = self._load(lambda files: files.load_rung(file, plan.rung))
        if copy is None:
            self.context.clear(state)
            return False
        if self.context.restore_partial(state, copy, length=plan.rung, tokens=wanted):
            return True
        self._condemn(file)
        return False

    def _load(self, read: Callable[[SnapshotFiles], StateBytes]) -> StateBytes | None:
        assert self.files is not None
        try:
            return read(self.files)
        except SnapshotUnusable as error:
            self._notes.append(str(error))
            return None

    def _explain(self, wanted: TokenIds, reason: str) -> str:
        """Add why nothing was found on the disk, where that could have been."""
        if self.files is None or len(wanted) < LEAST_EXPLAINED_TOKENS:
            return reason
        missed = self.files.miss_reason(wanted)
        return "; ".join(part for part in (reason, missed) if part)


class _Candidates:
    """Everything that a sequence could start from, but for what failed before. `runs` name it by where and key."""

    def __init__(self, reuse: Reuse, state: SequenceState, failed: set[tuple[Held, int]]) -> None:
        self.sequences: dict[int, SequenceState] = {}
        self.snapshots: dict[int, Snapshot] = {}
        self.files: dict[int, SnapshotFile] = {}
        runs = [*self._resident(reuse, state), *self._in_memory(reuse), *self._on_disk(reuse)]
        self.runs = [run for run in runs if (run.where, run.key) not in failed]

    def _resident(self, reuse: Reuse, state: SequenceState) -> Iterator[HeldRun]:
        for holder in reuse.context.cells.holders():
            assert holder.slot is not None
            if not len(holder.run):
                continue
            self.sequences[holder.slot] = holder
            first_held = max(0, reuse.context.memory.first_held(holder.slot))
            copied = holder is not state and holder.id != PARKED and reuse.copies_to_fork
            yield HeldRun(
                where=Held.OWN if holder is state else Held.OTHER,
                key=holder.slot,
                tokens=holder.run.view(),
                logits_at_hand=holder is state and state.logits_at_hand,
                first_held=max(first_held, len(holder.run) - reuse.window_tokens) if copied else first_held,
            )

    # A copy of a state holds only the window of a sliding-window layer, [length - window, length), where the slot that
    # it was made of may hold more.

    def _in_memory(self, reuse: Reuse) -> Iterator[HeldRun]:
        for snapshot in reuse.pool.snapshots():
            self.snapshots[id(snapshot)] = snapshot
            yield HeldRun(
                where=Held.MEMORY,
                key=id(snapshot),
                tokens=snapshot.tokens,
                logits_at_hand=snapshot.logits is not None,
                first_held=max(0, len(snapshot.tokens) - reuse.window_tokens),
            )

    def _on_disk(self, reuse: Reuse) -> Iterator[HeldRun]:
        for file in reuse.files.find() if reuse.files is not None else ():
            self.files[hash(file.path)] = file
            yield HeldRun(
                where=Held.DISK,
                key=hash(file.path),
                tokens=file.tokens,
                first_held=max(0, len(file.tokens) - reuse.window_tokens),
                rungs=file.rungs,
            )
