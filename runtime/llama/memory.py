"""The KV cache or recurrent state of a context, by slot (`seq_id`). Thin: what to do is decided in `sync_plan`."""

from __future__ import annotations

import ctypes
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from .library import library

StateCopy: TypeAlias = NDArray[np.uint8]


class ContextMemory:
    """What llama.cpp remembers in one context. Positions count from 0; an empty slot has neither end."""

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

    def copy_state(self, slot: int) -> StateCopy | None:
        """Return a copy of the part of the state that cannot be rewound, None where llama.cpp gives none."""
        flags = self._api.LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY
        size = self._api.llama_state_seq_get_size_ext(self._context, slot, flags)
        copy: StateCopy = np.empty(size, dtype=np.uint8)
        written = self._api.llama_state_seq_get_data_ext(self._context, _address(copy), size, slot, flags)
        return copy if size and written == size else None

    def restore_state(self, slot: int, copy: StateCopy, *, position: int) -> bool:
        """Put a copy taken at `position` back, and forget what any attention layers hold from there on.

        On False the slot holds nothing of use and is to be cleared.
        """
        flags = self._api.LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY
        if not self._api.llama_state_seq_set_data_ext(self._context, _address(copy), copy.size, slot, flags):
            return False
        return self.drop_tail(slot, position) and self.held_tokens(slot) == position


def _address(data: StateCopy) -> Any:
    return ctypes.cast(data.ctypes.data, ctypes.POINTER(ctypes.c_uint8))
