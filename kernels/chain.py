"""Names for runs of tokens, made of a chain of block hashes: what is held of a run is found by its tokens alone.

A run is cut into blocks of 256 tokens. The hash of a block covers the hash of the block before it, so one hash stands
for everything up to the end of its block. A name adds the hash of what follows the last whole block, and the length.

xxh3 is no cryptographic hash. Who keeps something under a name keeps the tokens with it and compares them before use.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Collection
from typing import NewType

import numpy as np
import xxhash
from numpy.typing import NDArray

from .tokens import TOKEN_BYTES, TokenIds, encode_tokens

BLOCK_TOKENS = 256
HASH_BYTES = 16

RunName = NewType("RunName", str)
"""`<chain, 32 hex>-<rest, 16 hex>-<length>`: safe as a file name."""

_BLOCK_BYTES = BLOCK_TOKENS * TOKEN_BYTES
# Ten digits hold any length that fits a machine; `int` raises on thousands of them.
_RUN_NAME = re.compile(r"[0-9a-f]{32}-[0-9a-f]{16}-(0|[1-9][0-9]{0,9})")


def chain_hashes(tokens: TokenIds, *, seed: bytes) -> NDArray[np.uint8]:
    """Return the hash at the end of each whole block, read-only. Shapes: (n,) to (n // 256, 16).

    Each is the xxh3_128 of the hash before it, `seed` (16 bytes) for the first, and of the block's little-endian bytes.
    Raises ValueError where the seed has another length.
    """
    _check_seed(seed)
    blocks = len(tokens) // BLOCK_TOKENS
    data = encode_tokens(tokens[: blocks * BLOCK_TOKENS])
    parent, hashes = seed, []
    for start in range(0, len(data), _BLOCK_BYTES):
        parent = xxhash.xxh3_128_digest(parent + data[start : start + _BLOCK_BYTES])
        hashes.append(parent)
    return np.frombuffer(b"".join(hashes), dtype=np.uint8).reshape(blocks, HASH_BYTES)


def chain_hashes_reference(tokens: TokenIds, *, seed: bytes) -> NDArray[np.uint8]:
    """The same, one token after another."""
    hashes = []
    hasher = xxhash.xxh3_128(seed)
    for length, token in enumerate(tokens.tolist(), start=1):
        hasher.update(struct.pack("<i", token))
        if length % BLOCK_TOKENS == 0:
            parent = hasher.digest()
            hashes.append(list(parent))
            hasher = xxhash.xxh3_128(parent)
    return np.array(hashes, dtype=np.uint8).reshape(len(hashes), HASH_BYTES)


class RunNamer:
    """Names the beginnings of one run. The chain is computed at the first name; each name costs its rest only."""

    __slots__ = ("_hashes", "_seed", "_tokens")

    def __init__(self, tokens: TokenIds, *, seed: bytes) -> None:
        """`tokens` must not change; `seed` has 16 bytes, else ValueError."""
        _check_seed(seed)
        self._tokens = tokens
        self._seed = seed
        self._hashes: NDArray[np.uint8] | None = None

    @property
    def length(self) -> int:
        """The length of the whole run, in tokens."""
        return len(self._tokens)

    def name(self, length: int) -> RunName:
        """Return the name of the first `length` tokens. Raises ValueError where the run has not as many."""
        if not 0 <= length <= len(self._tokens):
            raise ValueError(f"a run of {len(self._tokens)} tokens has no beginning of {length}")
        if self._hashes is None:
            self._hashes = chain_hashes(self._tokens, seed=self._seed)
        blocks = length // BLOCK_TOKENS
        chain = self._hashes[blocks - 1].tobytes() if blocks else self._seed
        # The rest's hash covers the chain too: together 192 bits stand for the tokens, whatever the length.
        rest = xxhash.xxh3_64_hexdigest(chain + encode_tokens(self._tokens[blocks * BLOCK_TOKENS : length]))
        return RunName(f"{chain.hex()}-{rest}-{length}")


def run_name(tokens: TokenIds, *, seed: bytes) -> RunName:
    """Return the name of a run. Equal for equal tokens and seeds (16 bytes), else different."""
    return RunNamer(tokens, seed=seed).name(len(tokens))


def parse_run_name(text: str) -> int | None:
    """Return the length in tokens that a name states, None where `text` is not spelt as a `RunName`."""
    found = _RUN_NAME.fullmatch(text)
    return int(found[1]) if found else None


def longest_named(namer: RunNamer, names: Collection[RunName]) -> int:
    """Return the length of the longest run in `names` that the namer's run begins with, 0 where there is none.

    `names` is one whose `in` is quick. Costs one hash of at most 255 tokens for each length that occurs in it.
    """
    lengths = {length for name in names if (length := parse_run_name(name)) is not None and length <= namer.length}
    return next((length for length in sorted(lengths, reverse=True) if namer.name(length) in names), 0)


def _check_seed(seed: bytes) -> None:
    if len(seed) != HASH_BYTES:
        raise ValueError(f"the seed of a chain has {HASH_BYTES} bytes, not {len(seed)}")
