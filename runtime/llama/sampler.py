"""Choosing a token in llama.cpp's own sampler chain. Logits come into Python only where a grammar rejects a choice."""

from __future__ import annotations

import ctypes
import secrets
import weakref
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...kernels.tokens import TokenIds
from ..engine import Sampling
from .library import library

_CANDIDATE = np.dtype([("id", "<i4"), ("logit", "<f4"), ("p", "<f4")])


class Candidates:
    """A `llama_token_data_array` over a numpy buffer, filled without a loop (0.2 ms for 49,000 tokens)."""

    def __init__(self, capacity: int) -> None:
        api = library().api
        self._data = np.zeros(capacity, dtype=_CANDIDATE)
        self.all_ids = np.arange(capacity, dtype=np.int32)
        self._pointer = ctypes.cast(self._data.ctypes.data, api.llama_token_data_p)
        self.raw = api.llama_token_data_array(data=self._pointer, size=0, selected=-1, sorted=False)
        self.reference = ctypes.byref(self.raw)

    def fill_all(self, logits: NDArray[np.float32]) -> None:
        """Set to the whole vocabulary."""
        self.fill(self.all_ids, logits)

    def fill(self, ids: NDArray[np.int32], logits: NDArray[np.float32]) -> None:
        """Set to these tokens. Shapes: (n,), (n,)."""
        n = len(ids)
        self._data["id"][:n] = ids
        self._data["logit"][:n] = logits
        self._data["p"][:n] = 0
        # Samplers shrink, sort and mark the array in place.
        self.raw.data = self._pointer
        self.raw.size = n
        self.raw.selected = -1
        self.raw.sorted = False

    def logits(self) -> NDArray[np.float32]:
        """Return the logits as they are now, in the order of `fill`; minus infinity where a grammar rejects."""
        return np.asarray(self._data["logit"][: self.raw.size])

    def selected(self) -> int:
        """Return the token that a chain selected."""
        assert 0 <= self.raw.selected < self.raw.size
        return int(self.raw.data[self.raw.selected].id)


class Sampler:
    """The chain of one reply: penalties, top-k, top-p, min-p, temperature, draw; greedy at temperature 0."""

    def __init__(self, sampling: Sampling, *, vocab_size: int, history: TokenIds) -> None:
        """`history` holds the tokens before the reply, which the repeat penalty looks back on."""
        api = library().api
        self._api = api
        self._vocab_size = vocab_size
        self._candidates: Candidates | None = None
        self._chain = api.llama_sampler_chain_init(api.llama_sampler_chain_default_params())
        self._finalizer = weakref.finalize(self, api.llama_sampler_free, self._chain)
        self._penalties: Any = None
        self._penalty_tokens = sampling.repeat_last_n if sampling.repeat_penalty != 1.0 else 0
        if self._penalty_tokens:
            self._penalties = api.llama_sampler_init_penalties(
                vocab_size, self._penalty_tokens, sampling.repeat_penalty, 0.0, 0.0
            )
            api.llama_sampler_chain_add(self._chain, self._penalties)
        for part in self._choosing_parts(sampling):
            api.llama_sampler_chain_add(self._chain, part)
        self._remember(history)

    def _choosing_parts(self, sampling: Sampling) -> list[Any]:
        api = self._api
        if sampling.temperature <= 0:
            return [api.llama_sampler_init_greedy()]
        seed = secrets.randbits(32) if sampling.seed is None else sampling.seed & 0xFFFFFFFF
        return [
            api.llama_sampler_init_top_k(sampling.top_k),
            api.llama_sampler_init_top_p(sampling.top_p, 1),
            api.llama_sampler_init_min_p(sampling.min_p, 1),
            api.llama_sampler_init_temp(sampling.temperature),
            api.llama_sampler_init_dist(seed),
        ]

    def sample_live(self, context: Any) -> int:
        """Choose from the context's own logits and accept the choice: nothing of it passes through Python."""
        return int(self._api.llama_sampler_sample(self._chain, context, -1))

    def pick(self, logits: NDArray[np.float32], *, among: NDArray[np.int32] | None = None) -> int:
        """Choose from `logits` (vocab_size,), `among` these tokens if given, without accepting the choice."""
        candidates = self.candidates
        if among is None:
            candidates.fill_all(logits)
        else:
            candidates.fill(among, logits[among])
        self._api.llama_sampler_apply(self._chain, candidates.reference)
        return candidates.selected()

    def accept(self, token: int) -> None:
        """Note that `token` is part of the reply."""
        self._api.llama_sampler_accept(self._chain, token)

    def take_back(self, history: TokenIds) -> None:
        """Undo the accepting of a token that was replaced: the penalties look back on `history` alone again."""
        if self._penalties is not None:
            self._api.llama_sampler_reset(self._penalties)
            self._remember(history)

    @property
    def candidates(self) -> Candidates:
        """A buffer for the whole vocabulary, made at its first use."""
        if self._candidates is None:
            self._candidates = Candidates(self._vocab_size)
        return self._candidates

    def close(self) -> None:
        """Free the chain."""
        self._finalizer()

    def _remember(self, history: TokenIds) -> None:
        if self._penalties is not None:
            for token in history[-self._penalty_tokens :].tolist():
                self._api.llama_sampler_accept(self._penalties, token)
