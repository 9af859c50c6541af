"""Who holds which slot of a context, and how many of its cells are taken. A cell that several share counts once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator

import numpy as np

from .memory import ContextMemory
from .sequence import SequenceState

INTERRUPTED = "an interrupt during a decode left it uncertain what is resident"


class Cells:
    """The account of slots and cells. `n_cells` None: a memory without cells for each token (recurrent)."""

    def __init__(self, *, n_slots: int, n_cells: int | None) -> None:
        self.n_slots, self.n_cells = n_slots, n_cells
        self.used = 0
        self._free_slots = list(range(n_slots))
        self._holders: dict[int, SequenceState] = {}
        self._next = 0

    @property
    def free(self) -> int:
        """How many cells nobody holds; no limit shows as the largest number there is."""
        return np.iinfo(np.int32).max if self.n_cells is None else self.n_cells - self.used

    @property
    def has_free_slot(self) -> bool:
        return bool(self._free_slots)

    def holders(self) -> Iterator[SequenceState]:
        """Return the sequences that have a slot."""
        return iter(tuple(self._holders.values()))

    def take_slot(self, state: SequenceState) -> None:
        """Give a sequence a free slot."""
        slot = self._free_slots.pop()
        state.slot = slot
        self._holders[slot] = state

    def give_back(self, state: SequenceState) -> None:
        """Take the slot of a sequence whose run is empty."""
        assert state.slot is not None
        assert not len(state.run)
        del self._holders[state.slot]
        self._free_slots.append(state.slot)
        state.slot = None

    def hand_over(self, old: SequenceState, new: SequenceState) -> None:
        """Let `new` have the slot of `old`."""
        assert old.slot is not None
        assert new.slot is None
        self._holders[old.slot] = new
        old.slot, new.slot = None, old.slot

    def fill(self, count: int) -> int:
        """Take `count` cells in [first, first + count) of the account's numbers, and return the first."""
        first = self._next
        self._next += count
        self.used += count
        return first

    def exclusive(self, state: SequenceState, *, begin: int = 0) -> int:
        """Return how many cells of [begin, end) of a sequence's run no other one holds."""
        shared = max((state.run.shared_cells(other.run) for other in self.holders() if other is not state), default=0)
        return max(0, len(state.run) - max(begin, shared))

    def let_go(self, state: SequenceState, *, keep: int) -> None:
        """Count the cells behind the first `keep` tokens as free, just before the run is cut there."""
        self.used -= self.exclusive(state, begin=keep)

    def recount(self) -> None:
        """Count anew, where an interrupt may have struck between a cell and its account."""
        self.used = self._different()

    def repair(self, states: Collection[SequenceState], memory: ContextMemory, *, rewinds: bool) -> None:
        """Make the account true after an interrupt within a change of it. What is in doubt is forgotten.

        On memory that `rewinds` that is what was evaluated and not accounted for; elsewhere all of a sequence.
        """
        claims = Counter(state.slot for state in states if state.slot is not None)
        self._holders = {state.slot: state for state in states if state.slot is not None and claims[state.slot] == 1}
        self._free_slots = [slot for slot in range(self.n_slots) if slot not in self._holders]
        for slot in self._free_slots:
            memory.clear(slot)
        for state in states:
            if state.slot not in self._holders:
                state.start_over()
                continue
            held, accounted = memory.held_tokens(state.slot), len(state.run)
            if held == accounted or (rewinds and held > accounted and memory.drop_tail(state.slot, accounted)):
                continue
            memory.clear(state.slot)
            state.cut(0)
            state.lost = INTERRUPTED
        self.recount()

    def check_integrity(self) -> None:
        """Assert that every slot has one place in the account, and that the count is that of different cells."""
        assert sorted([*self._holders, *self._free_slots]) == list(range(self.n_slots))
        for slot, state in self._holders.items():
            assert state.slot == slot
        different = self._different()
        assert different == self.used, f"{different} cells are held, {self.used} accounted for"
        assert self.n_cells is None or self.used <= self.n_cells

    def _different(self) -> int:
        numbers = [state.run.cells() for state in self._holders.values()]
        return len(np.unique(np.concatenate(numbers))) if numbers else 0
