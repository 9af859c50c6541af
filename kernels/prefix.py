"""The longest common prefix of runs of tokens: what `sync` can keep of what is resident."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from .tokens import TokenIds

_FIRST_CHUNK_TOKENS = 256
_CHUNK_GROWTH = 4

# Measured on 1 to 1,000 runs: below 4 there is nothing to gain, and behind 2,048 tokens, copying the chunks of all runs
# beside one another costs more than the calls that it saves.
_FEW_RUNS = 4
_SIDE_BY_SIDE_CHUNK_TOKENS = 512
_SIDE_BY_SIDE_TOKENS = 2_048


Numbers: TypeAlias = "NDArray[np.signedinteger[Any]]"
"""Token ids, or the numbers of the cells that hold them."""


def common_prefix_length(a: Numbers, b: Numbers) -> int:
    """Return how many tokens `a` and `b` share from their start. Shapes: (n,), (m,).

    Compared in chunks that grow, so that an early difference does not scan the rest, and a long prefix costs few calls.
    """
    return _shared_beyond(a, b, start=0)


def shared_with_each(wanted: TokenIds, runs: Sequence[TokenIds]) -> NDArray[np.int64]:
    """Return how many tokens `wanted` shares with each run from its start. Shapes: (n,), k of (m,) each, to (k,).

    A chunk of every run that is still equal is compared at once, which costs a fifth of comparing 200 runs in turn.
    """
    shared = np.zeros(len(runs), dtype=np.int64)
    equal = np.arange(len(runs))
    start = 0
    while len(equal) >= _FEW_RUNS and start < min(len(wanted), _SIDE_BY_SIDE_TOKENS):
        # Everything in [0, start) is equal in the runs of `equal`; this round looks at [start, start + len(chunk)).
        chunk = wanted[start : start + _SIDE_BY_SIDE_CHUNK_TOKENS]
        differs = _chunks(runs, equal, start=start, filler=~chunk) != chunk
        first = np.argmax(differs, axis=1)
        parted = differs[np.arange(len(equal)), first]
        shared[equal[parted]] = start + first[parted]
        equal = equal[~parted]
        start += len(chunk)
    for index in equal.tolist():
        shared[index] = _shared_beyond(wanted, runs[index], start=start)
    return shared


def _chunks(runs: Sequence[TokenIds], chosen: NDArray[np.intp], *, start: int, filler: TokenIds) -> TokenIds:
    """Return the tokens [start, start + w) of the chosen runs, `filler` where a run has ended. Shapes: (w,) to (c, w).

    `filler` differs from the wanted run in every place, so that a run parts from it where it ends.
    """
    pieces = []
    for index in chosen.tolist():
        piece = runs[index][start : start + len(filler)]
        pieces.append(piece)
        if len(piece) < len(filler):
            pieces.append(filler[len(piece) :])
    return np.concatenate(pieces).reshape(len(chosen), len(filler))


def _shared_beyond(a: Numbers, b: Numbers, *, start: int) -> int:
    """Return how many tokens `a` and `b` share where they are known to share `start`."""
    length = min(len(a), len(b))
    chunk = max(start, _FIRST_CHUNK_TOKENS)
    while start < length:
        # Everything in [0, start) is equal; this round looks at [start, end).
        end = min(start + chunk, length)
        differs = a[start:end] != b[start:end]
        first = int(np.argmax(differs))
        if differs[first]:
            return start + first
        start, chunk = end, chunk * _CHUNK_GROWTH
    return length


def common_prefix_length_reference(a: TokenIds, b: TokenIds) -> int:
    """The same by comparing one token after another."""
    length = 0
    for left, right in zip(a.tolist(), b.tolist(), strict=False):
        if left != right:
            break
        length += 1
    return length


def shared_with_each_reference(wanted: TokenIds, runs: Sequence[TokenIds]) -> NDArray[np.int64]:
    """The same by comparing one run after another, one token after another."""
    return np.array([common_prefix_length_reference(wanted, run) for run in runs], dtype=np.int64)
