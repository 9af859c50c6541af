"""The KV cache or recurrent state of a context, by slot (`seq_id`). Thin: what to do is decided elsewhere."""

from __future__ import annotations

import ctypes
from typing import Any

from ..prefix_cache.pool import StateBytes, new_buffer
from .library import library


class ContextMemory:
    """What llama.cpp remembers in one context. Positions count from 0; an empty slot has neither end.

    A *whole* state is all that a slot holds. A *partial* one leaves out what can be rewound: full attention's cells.
    """

    def __init__(self, context: Any) -> None:
        self._api = library().api
        self._context = context
        self._memory = self._api.llama_get_memory(context)

    def first_held(self, slot: int) -> int:
        """Return the lowest position held in every layer, -1 where the slot is empty.

        Sliding-window layers let go of old cells, so this is more than 0 there once the window has moved on.
        """
        return int(self._api.llama_memory_seq_pos_min(self._memory, slot))

    def held_tokens(self, slot: int) -> int:
        """Return how many positions the slot has come to."""
        return int(self._api.llama_memory_seq_pos_max(self._memory, slot)) + 1

    def drop_tail(self, slot: int, position: int) -> bool:
        """Forget [position, ...). False where this memory cannot; True says nothing of a sliding window's rest."""
        return bool(self._api.llama_memory_seq_rm(self._memory, slot, position, -1))

    def clear(self, slot: int) -> None:
        """Forget all of a slot, which never fails."""
        self._api.llama_memory_seq_rm(self._memory, slot, -1, -1)

    def share(self, source: int, target: int, length: int) -> None:
        """Let `target`, which is empty, hold the first `length` cells of `source` too. Full attention only.

        On a sliding window shared cells make the next decode fail, and recurrent memory copies the whole state.
        """
        self._api.llama_memory_seq_cp(self._memory, source, target, 0, length)

    @property
    def can_shift(self) -> bool:
        """Whether positions can be moved. It is said of recurrent memory too, which cannot: ask the kind first."""
        return bool(self._api.llama_memory_can_shift(self._memory))

    def drop_head(self, slot: int, position: int) -> None:
        """Forget [0, position). What is left is no run until it is shifted. Full attention only."""
        self._api.llama_memory_seq_rm(self._memory, slot, 0, position)

    def shift(self, slot: int, begin: int, delta: int) -> None:
        """Add `delta` to the positions of [begin, ...). Keys are turned at the next decode: copy no state before it.

        It moves a cell for every slot that shares it, so that no other one may.
        """
        self._api.llama_memory_seq_add(self._memory, slot, begin, -1, delta)

    def share_tail(self, source: int, target: int, begin: int) -> None:
        """Let `target` hold the cells of [begin, ...) of `source` too, behind its own. Full attention only."""
        self._api.llama_memory_seq_cp(self._memory, source, target, begin, -1)

    def state_bytes(self, slot: int, *, partial: bool) -> int:
        """Return the size of a copy of a slot's state."""
        return int(self._api.llama_state_seq_get_size_ext(self._context, slot, self._flags(partial=partial)))

    def copy_state(self, slot: int, *, partial: bool, into: StateBytes | None = None) -> StateBytes | None:
        """Return a copy of a slot's state, in `into` if given, which has its size. None where llama.cpp gives none."""
        size = self.state_bytes(slot, partial=partial)
        try:
            copy = new_buffer(size) if into is None and size else into
        except (OSError, MemoryError):
            return None
        if copy is None or copy.size != size:
            return None
        flags = self._flags(partial=partial)
        written = self._api.llama_state_seq_get_data_ext(self._context, _address(copy), size, slot, flags)
        return copy if written == size else None

    def restore_whole(self, slot: int, copy: StateBytes, *, tokens: int) -> bool:
        """Put a whole state of `tokens` tokens into an empty slot. On False the slot is to be cleared."""
        flags = self._flags(partial=False)
        if not self._api.llama_state_seq_set_data_ext(self._context, _address(copy), copy.size, slot, flags):
            return False
        return self.held_tokens(slot) == tokens

    def restore_partial(self, slot: int, copy: StateBytes, *, position: int) -> bool:
        """Put a partial state taken at `position` back, and forget what full attention holds from there on.

        On False the slot holds nothing of use and is to be cleared.
        """
        flags = self._flags(partial=True)
        if not self._api.llama_state_seq_set_data_ext(self._context, _address(copy), copy.size, slot, flags):
            return False
        return self.drop_tail(slot, position) and self.held_tokens(slot) == position

    def all_cells_bytes(self) -> int:
        """Return the size of the state of all slots, in which a cell that several share counts once. For checks."""
        return int(self._api.llama_state_get_size(self._context))

    def _flags(self, *, partial: bool) -> int:
        return int(self._api.LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY) if partial else 0


def _address(data: StateBytes) -> Any:
    return ctypes.cast(data.ctypes.data, ctypes.POINTER(ctypes.c_uint8))
