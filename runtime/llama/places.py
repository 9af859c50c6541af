"""Making room: who gives up slot and cells for another sequence, and what is kept of it.

Callers hold the engine's turn. What gives way goes into a memory snapshot where that is worth its bytes, else it is
lost, unless it is on the disk already.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from dataclasses import replace

from ...kernels.chain import RunNamer, parse_run_name, run_name
from ...kernels.errors import DecodeFailed
from ...kernels.tokens import TokenIds
from ..engine import SequenceId
from ..prefix_cache.modes import ReuseModes
from ..prefix_cache.pool import Snapshot, SnapshotPool, StateBytes
from .cells import Cells
from .context import NO_ROOM_CODE, LlamaContext
from .sequence import SequenceState

EVICTED = "evicted to make room for another sequence"

PARKED = SequenceId(-1)
"""The id of runs that no open sequence owns any more: kept for whoever wants them, first to give way."""

LEAST_KEPT_TOKENS = 16
"""What only one sequence holds is copied or parked from here on: less is evaluated again sooner than it is copied."""

DRAG_TOKENS = 1024
"""An idle sequence with more cells of its own is taken out of full attention, which runs over all used cells: 4,000
idle tokens cost 2.4 ms for each token decoded, and their copy out and back 90 ms once (135M model, two cores)."""


class Places:
    """Slots and cells of a context, and the memory snapshots of what had to leave them."""

    def __init__(
        self,
        context: LlamaContext,
        pool: SnapshotPool,
        *,
        seed: bytes,
        modes: ReuseModes,
        spill: Callable[[Snapshot], None],
    ) -> None:
        """`spill` takes a memory snapshot that had to go, to write it to disk if it is worth that."""
        self._context, self._pool, self._spill = context, pool, spill
        self._seed, self._modes, self._rewinds = seed, modes, context.kind.rewinds
        self._ticks = itertools.count(1)

    @property
    def cells(self) -> Cells:
        return self._context.cells

    def touch(self, state: SequenceState) -> None:
        """Note that a sequence is used now."""
        state.last_used = next(self._ticks)

    def settle(self, state: SequenceState, *, besides: SequenceState | None = None) -> bool:
        """Give a sequence a slot if it has none, taking that of an idle one, but not of `besides`, if need be."""
        if state.slot is not None:
            return True
        if not self.cells.has_free_slot:
            victim = self._victim(state, besides, with_cells=False)
            if victim is None:
                return False
            self.evict(victim)
        self.cells.take_slot(state)
        return True

    def require_slot(self, state: SequenceState) -> None:
        """The same for a sequence that has to have one. Raises DecodeFailed where every other one is in use."""
        if not self.settle(state):
            raise self._all_in_use(state, f"all {self.cells.n_slots} places")

    def adopt(self, state: SequenceState, parked: SequenceState) -> None:
        """Let a sequence without a slot have that of a parked one, and all that it holds."""
        self.cells.hand_over(parked, state)
        state.run, parked.run = parked.run, state.run
        state.saved_tokens, state.last_good = parked.saved_tokens, parked.last_good
        state.changes += 1

    def make_room(self, state: SequenceState, tokens: int, *, besides: SequenceState | None = None) -> bool:
        """Evict idle sequences until `tokens` cells are free; say whether they are."""
        while self.cells.free < tokens:
            victim = self._victim(state, besides, with_cells=True)
            if victim is None:
                return False
            self.evict(victim)
        return True

    def evict_one(self, state: SequenceState) -> None:
        """Evict an idle sequence after llama.cpp found no room. Raises DecodeFailed where every one is in use."""
        victim = self._victim(state, None, with_cells=True)
        if victim is None:
            raise self._all_in_use(state, "all cells of the KV cache")
        self.evict(victim)

    def evict(self, state: SequenceState) -> None:
        """Take slot and cells of a sequence; a memory snapshot keeps what it held, where it can."""
        if len(state.run):
            state.lost = EVICTED
            if state.awaits_reply:
                state.unanswered = state.run.copy()
            self._keep_copy(state)
        self.vacate(state)

    def vacate(self, state: SequenceState) -> None:
        """Take slot and cells of a sequence, and keep nothing."""
        if state.slot is not None:
            self._context.clear(state)
            self.cells.give_back(state)

    def relieve(self, state: SequenceState) -> None:
        """Swap out idle sequences whose cells would slow down what `state` is about to evaluate."""
        if not self._rewinds:
            return
        for other in self.cells.holders():
            if other is state or not other.is_idle or self.cells.exclusive(other) < DRAG_TOKENS:
                continue
            if self._can_keep(other):
                self.evict(other)

    def retire(self, state: SequenceState) -> None:
        """Take a sequence's slot, so that it starts over; what it held stays parked there, if that is worth it."""
        if state.slot is None:
            return
        if self.cells.exclusive(state) < LEAST_KEPT_TOKENS or not self._modes.fork:
            self.vacate(state)
            return
        parked = SequenceState(PARKED)
        parked.run, state.run = state.run, parked.run
        parked.saved_tokens, state.saved_tokens = state.saved_tokens, 0
        parked.pinned_tokens = state.pinned_tokens
        parked.last_good, state.last_good = state.last_good, None
        self.cells.hand_over(state, parked)
        state.changes += 1
        self.touch(parked)
        self._context.forget(state)

    def keep_tail(self, state: SequenceState, keep: int) -> None:
        """Keep what a sequence is about to drop behind its first `keep` tokens, where that is worth it."""
        if self.cells.exclusive(state, begin=keep) < LEAST_KEPT_TOKENS:
            return
        if not self._rewinds:
            self._keep_copy(state, cost_tokens=len(state.run) - keep)
        elif self._modes.fork and (parked := self.share_out(state, len(state.run))) is not None:
            parked.saved_tokens = state.saved_tokens
            self.touch(parked)

    def share_out(self, state: SequenceState, length: int) -> SequenceState | None:
        """Return a parked sequence that shares the first cells of `state`; None where there is no free slot."""
        if not self.cells.has_free_slot:
            return None
        parked = SequenceState(PARKED)
        self.cells.take_slot(parked)
        self._context.share(state, parked, length)
        return parked

    def park(self, state: SequenceState) -> None:
        """Take a sequence that is being closed: what it holds serves others until room is needed."""
        snapshot = self.swapped(state)
        if snapshot is not None and snapshot.awaits_reply:
            # Nobody will ask for the reply any more: it may go like any other.
            self._pool.put(replace(snapshot, awaits_reply=False, logits=None))
        state.id, state.generation, state.awaits_reply, state.unanswered = PARKED, None, False, None
        state.forget_logits()
        self._context.forget(state)
        if state.slot is not None and not len(state.run):
            self.cells.give_back(state)

    def copy_state(
        self, state: SequenceState, *, partial: bool, run: TokenIds | None = None, beside_bytes: int = 0
    ) -> StateBytes | None:
        """Return a copy of a state for the pool, in which others make room for it; None where there is none.

        `run`: the one that a whole state is of, which replaces what it covers. `beside_bytes` are kept with it.
        """
        assert state.slot is not None
        memory = self._context.memory
        size_bytes = memory.state_bytes(state.slot, partial=partial) + beside_bytes
        fits = self._pool.make_room(size_bytes, run=run, covers=self._rewinds)
        for gone in self._pool.evicted():
            self._spill(gone)
        return memory.copy_state(state.slot, partial=partial) if fits else None

    def copy_into_memory(self, state: SequenceState) -> Snapshot | None:
        """Keep a copy of what a sequence holds in the pool, while it goes on; None where there is no room."""
        self._keep_copy(state)
        name, state.swapped = state.swapped, None
        return None if name is None else self._pool.snapshot(name)

    def _keep_copy(self, state: SequenceState, *, cost_tokens: int | None = None) -> None:
        """Copy a sequence's whole state into the pool, where that is worth it and there is room."""
        state.swapped = None
        if not self._can_keep(state):
            return
        tokens = state.run.copy()
        name = run_name(tokens, seed=self._seed)
        logits = self._context.logits(state).copy() if state.logits_at_hand else None
        there = self._pool.snapshot(name)
        if there is not None and (logits is None or there.logits is not None):
            self._pool.touch(there)
            state.swapped = name
            return
        beside_bytes = tokens.nbytes + (0 if logits is None else logits.nbytes)
        copy = self.copy_state(state, partial=False, run=tokens, beside_bytes=beside_bytes)
        if copy is None:
            return
        snapshot = Snapshot(
            tokens=tokens,
            state=copy,
            logits=logits,
            pinned=False,
            awaits_reply=state.awaits_reply,
            cost_tokens=self.cells.exclusive(state) if cost_tokens is None else cost_tokens,
        )
        if self._pool.put(snapshot, covers=self._rewinds):
            state.swapped = name

    def swapped(self, state: SequenceState) -> Snapshot | None:
        """Return the memory snapshot of the run, or of one that begins with it, into which a sequence went."""
        if state.swapped is None or state.slot is not None:
            return None
        exact = self._pool.snapshot(state.swapped)
        if exact is not None:
            return exact
        length = parse_run_name(state.swapped) or 0
        longer = [one for one in self._pool.snapshots() if len(one.tokens) > length]
        found = (one for one in longer if RunNamer(one.tokens, seed=self._seed).name(length) == state.swapped)
        return min(found, key=lambda one: len(one.tokens), default=None)

    def _can_keep(self, state: SequenceState) -> bool:
        least = 1 if state.awaits_reply else LEAST_KEPT_TOKENS
        if not self._modes.memory_snapshot or len(state.run) < least or self.cells.exclusive(state) < least:
            return False
        assert state.slot is not None
        return self._pool.room_for(self._context.memory.state_bytes(state.slot, partial=False))

    def _victim(self, state: SequenceState, besides: SequenceState | None, *, with_cells: bool) -> SequenceState | None:
        """Return the idle sequence that gives way first.

        Those that wait for their reply go last, parked ones first; what would be lost goes after what would be kept;
        then by how long ago they were used.
        """
        idle = [
            other
            for other in self.cells.holders()
            if other is not state
            and other is not besides
            and self._may_go(other)
            and (len(other.run) or not with_cells)
        ]
        return min(idle, key=self._worth, default=None)

    def _may_go(self, state: SequenceState) -> bool:
        if not state.is_idle:
            return False
        return not state.is_used_elsewhere(time.monotonic()) or self._can_keep(state)

    def _worth(self, state: SequenceState) -> tuple[bool, bool, bool, int]:
        on_disk = len(state.run) - state.saved_tokens < LEAST_KEPT_TOKENS
        lost = not on_disk and not self._can_keep(state)
        return state.awaits_reply, state.id != PARKED, lost, state.last_used

    def _all_in_use(self, state: SequenceState, what: str) -> DecodeFailed:
        return DecodeFailed(
            f"{what} are taken by sequences in use: open the engine with more n_sequences or n_ctx, or wait for a "
            f"reply to end",
            code=NO_ROOM_CODE,
            position=len(state.run),
        )
