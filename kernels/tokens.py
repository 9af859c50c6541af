"""Token ids: the one array type that crosses every seam of chapbook.

A run of tokens is a one-dimensional, C-contiguous, read-only ``int32`` array, the form in which llama.cpp takes
ids and ``tokens.i32`` stores them (little-endian). Read-only, because a run that was evaluated never changes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NewType, TypeAlias, cast

import numpy as np
import xxhash
from numpy.typing import NDArray

TokenId = NewType("TokenId", int)
TokenIds: TypeAlias = NDArray[np.int32]

TOKEN_BYTES = 4


def token_ids(ids: Iterable[int] | NDArray[np.integer]) -> TokenIds:
    """Return `ids` as a read-only run of tokens. Shape: (n,). The input is copied unless it is one already.

    Raises OverflowError where an id does not fit 32 bits, ValueError where `ids` has more than one dimension.
    """
    if isinstance(ids, np.ndarray) and _is_run(ids):
        return cast("TokenIds", ids)
    wide = np.asarray(ids if isinstance(ids, np.ndarray | Sequence) else list(ids))
    if wide.ndim != 1:
        raise ValueError(f"a run of tokens has one dimension, this has {wide.ndim}")
    # Compared in the type they came in: a cast would wrap what does not fit.
    if wide.size and (wide.max() > np.iinfo(np.int32).max or wide.min() < np.iinfo(np.int32).min):
        raise OverflowError("a token id must fit 32 bits")
    narrow = wide.astype(np.int32)
    narrow.flags.writeable = False
    return narrow


def _is_run(array: NDArray[np.integer]) -> bool:
    flags = array.flags
    return array.dtype == np.int32 and array.ndim == 1 and flags.c_contiguous and not flags.writeable


def concat_tokens(runs: Sequence[TokenIds]) -> TokenIds:
    """Return the runs one after another as one read-only run."""
    joined = np.concatenate(runs) if runs else np.empty(0, dtype=np.int32)
    joined.flags.writeable = False
    return joined


def encode_tokens(ids: TokenIds) -> bytes:
    """Return the little-endian bytes of a run, `TOKEN_BYTES` each."""
    return ids.astype("<i4", copy=False).tobytes()


def decode_tokens(data: bytes | memoryview) -> TokenIds:
    """Return the run whose `encode_tokens` is `data`. Raises ValueError where the length is not a multiple of 4."""
    if len(data) % TOKEN_BYTES:
        raise ValueError(f"{len(data)} bytes are not whole tokens of {TOKEN_BYTES} bytes")
    return token_ids(np.frombuffer(data, dtype="<i4"))


def hash_tokens(ids: TokenIds) -> str:
    """Return the xxh3 (64 bits, 16 hex digits) of a run's bytes."""
    return xxhash.xxh3_64_hexdigest(encode_tokens(ids))


NO_TOKENS: TokenIds = token_ids(())
