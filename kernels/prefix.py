"""The longest common prefix of two runs of tokens: what `sync` can keep of what is resident."""

from __future__ import annotations

import numpy as np

from .tokens import TokenIds

_FIRST_CHUNK_TOKENS = 256
_CHUNK_GROWTH = 4


def common_prefix_length(a: TokenIds, b: TokenIds) -> int:
    """Return how many tokens `a` and `b` share from their start. Shapes: (n,), (m,).

    Compared in chunks that grow, so that an early difference does not scan the rest, and a long prefix costs few calls.
    """
    length = min(len(a), len(b))
    start, chunk = 0, _FIRST_CHUNK_TOKENS
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
