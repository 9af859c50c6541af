"""A `llama_batch` over numpy arrays, filled without a Python loop (512 tokens in 3 microseconds)."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from ...kernels.tokens import TokenIds
from .library import library


class TokenBatch:
    """Room for `capacity` tokens of one sequence at a time. `raw` is passed to `llama_decode`.

    The struct holds the arrays' addresses, so they live as long as it does and are never replaced.
    """

    def __init__(self, capacity: int) -> None:
        api = library().api
        self._tokens = np.zeros(capacity, dtype=np.int32)
        self._positions = np.zeros(capacity, dtype=np.int32)
        self._counts = np.ones(capacity, dtype=np.int32)
        self._slots = np.zeros(capacity, dtype=np.int32)
        addresses = self._slots.ctypes.data + np.arange(capacity, dtype=np.uint64) * self._slots.itemsize
        self._slot_pointers = addresses.astype(np.uint64)
        self._outputs = np.zeros(capacity, dtype=np.int8)
        self._offsets = np.arange(capacity, dtype=np.int32)
        fields = dict(api.llama_batch._fields_)

        def pointer(name: str, array: Any) -> Any:
            return ctypes.cast(array.ctypes.data, fields[name])

        self.raw = api.llama_batch(
            n_tokens=0,
            token=pointer("token", self._tokens),
            embd=None,
            pos=pointer("pos", self._positions),
            n_seq_id=pointer("n_seq_id", self._counts),
            seq_id=pointer("seq_id", self._slot_pointers),
            logits=pointer("logits", self._outputs),
        )

    def fill(self, tokens: TokenIds, *, slot: int, start: int, all_logits: bool, last_logits: bool) -> None:
        """Set to `tokens` at positions [start, start + n) of `slot`, with the logits asked for."""
        n = len(tokens)
        self._tokens[:n] = tokens
        np.add(self._offsets[:n], start, out=self._positions[:n])
        self._slots[:n] = slot
        self._outputs[:n] = all_logits
        self._outputs[n - 1] = all_logits or last_logits
        self.raw.n_tokens = n

    def fill_one(self, token: int, *, slot: int, position: int) -> None:
        """Set to one token with its logits: the path of every generated token."""
        self._tokens[0] = token
        self._positions[0] = position
        self._slots[0] = slot
        self._outputs[0] = 1
        self.raw.n_tokens = 1
