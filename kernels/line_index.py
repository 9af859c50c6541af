"""Where lines begin in a large text: line feeds counted by blocks, so that any line is a search and one block away.

A text is cut into blocks of equal size. For each the index holds how many line feeds stand before it and the xxh3_64
of its bytes: 16 bytes for 64 KB, whatever the length of the lines. A block that was read is checked on its own, so
a few lines of a text of gigabytes are verified without reading the rest.

xxh3 is no cryptographic hash: an index is made only from bytes whose own hash was checked in the same pass.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import xxhash
from numpy.typing import NDArray

from .text_encoding import TextEncoding

BLOCK_BYTES = 1 << 16
"""Read and hashed in some 30 µs; a multiple of every code unit, so a block never cuts one."""


@dataclass(frozen=True, slots=True, eq=False)
class LineIndex:
    """The index of a text of `size_bytes` bytes, its byte order mark included.

    `feeds_before` holds the line feeds before each block and at last their total, uint64, shape (blocks + 1,);
    `block_hashes` the xxh3_64 of each block, uint64, shape (blocks,). `ends_with_newline` is true of an empty text.
    """

    encoding: TextEncoding
    block_bytes: int
    size_bytes: int
    ends_with_newline: bool
    feeds_before: NDArray[np.uint64]
    block_hashes: NDArray[np.uint64]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, LineIndex):
            return NotImplemented
        return (
            (self.encoding, self.block_bytes, self.size_bytes, self.ends_with_newline)
            == (other.encoding, other.block_bytes, other.size_bytes, other.ends_with_newline)
            and np.array_equal(self.feeds_before, other.feeds_before)
            and np.array_equal(self.block_hashes, other.block_hashes)
        )

    def __hash__(self) -> int:
        return hash((self.encoding, self.block_bytes, self.size_bytes, self.feeds))

    @property
    def feeds(self) -> int:
        """How many line feeds the text has."""
        return int(self.feeds_before[-1])

    @property
    def line_count(self) -> int:
        """How many lines the text has; the last one counts without a line feed too, unless it is empty."""
        return self.feeds + (not self.ends_with_newline)

    def block_span(self, block: int) -> range:
        """Return the offsets [block * block_bytes, (block + 1) * block_bytes) of a block, cut at the text's end."""
        return range(block * self.block_bytes, min((block + 1) * self.block_bytes, self.size_bytes))

    def block_of_feed(self, number: int) -> int:
        """Return the block that holds line feed `number`, from 1 to `feeds`."""
        # The block b with feeds_before[b] < number <= feeds_before[b + 1].
        return int(np.searchsorted(self.feeds_before, np.uint64(number), side="left")) - 1

    def behind_feed(self, number: int, block: int, data: bytes) -> int:
        """Return the offset in the text behind line feed `number`, which is in `block`; `data` are its bytes.

        Raises ValueError where the block has no such line feed: then this is not the index of that text.
        """
        within = number - int(self.feeds_before[block])
        units = np.flatnonzero(_feeds(data, self.encoding))
        if not 1 <= within <= len(units):
            raise ValueError(f"block {block} has {len(units)} line feeds, so line feed {number} is not in it")
        return block * self.block_bytes + (int(units[within - 1]) + 1) * self.encoding.unit_bytes

    def holds_block(self, block: int, data: bytes) -> bool:
        """Whether `data` are the bytes of a block, all of them."""
        return len(data) == len(self.block_span(block)) and xxhash.xxh3_64_intdigest(data) == self.block_hashes[block]

    def check_integrity(self) -> None:
        """Assert that the parts agree, as far as that can be told without the text."""
        blocks = -(-self.size_bytes // self.block_bytes)
        assert self.block_bytes > 0
        assert self.block_bytes % self.encoding.unit_bytes == 0
        assert self.feeds_before.shape == (blocks + 1,)
        assert self.block_hashes.shape == (blocks,)
        assert self.feeds_before[0] == 0
        in_blocks = np.diff(self.feeds_before.astype(np.int64))
        assert np.all(in_blocks >= 0)
        assert np.all(in_blocks <= self.block_bytes // self.encoding.unit_bytes)
        assert self.size_bytes >= len(self.encoding.mark)


class LineIndexer:
    """Builds the index of a text that is fed in chunks of any size, holding less than a block and one chunk."""

    def __init__(self, encoding: TextEncoding, *, block_bytes: int = BLOCK_BYTES) -> None:
        """Raises ValueError where `block_bytes` is no multiple of the encoding's code unit."""
        if block_bytes < 1 or block_bytes % encoding.unit_bytes:
            raise ValueError(f"a block of {block_bytes} bytes cuts code units of {encoding.unit_bytes}")
        self._encoding = encoding
        self._block_bytes = block_bytes
        self._rest = b""
        self._feeds_before = [0]
        self._hashes: list[int] = []
        self._last_unit = b""

    def feed(self, chunk: bytes) -> None:
        """Take the next bytes of the text; the first ones include its byte order mark."""
        data = self._rest + chunk if self._rest else chunk
        whole = len(data) - len(data) % self._block_bytes
        view = memoryview(data)
        for start in range(0, whole, self._block_bytes):
            self._take(view[start : start + self._block_bytes])
        self._rest = data[whole:]

    def finish(self) -> LineIndex:
        """Return the index of all that was fed; nothing can be fed afterwards."""
        size_bytes = len(self._hashes) * self._block_bytes + len(self._rest)
        if self._rest:
            self._take(memoryview(self._rest))
            self._rest = b""
        is_empty = size_bytes <= len(self._encoding.mark)
        return LineIndex(
            encoding=self._encoding,
            block_bytes=self._block_bytes,
            size_bytes=size_bytes,
            ends_with_newline=is_empty or self._last_unit == self._encoding.line_feed,
            feeds_before=np.array(self._feeds_before, dtype=np.uint64),
            block_hashes=np.array(self._hashes, dtype=np.uint64),
        )

    def check_integrity(self) -> None:
        """Assert that the counts and hashes agree and that less than a block waits."""
        assert len(self._feeds_before) == len(self._hashes) + 1
        assert len(self._rest) < self._block_bytes
        assert self._feeds_before == sorted(self._feeds_before)

    def _take(self, block: memoryview) -> None:
        self._feeds_before.append(self._feeds_before[-1] + int(np.count_nonzero(_feeds(block, self._encoding))))
        self._hashes.append(xxhash.xxh3_64_intdigest(block))
        unit_bytes = self._encoding.unit_bytes
        # Of a text that ends within a code unit this is a part of one, which is no line feed.
        self._last_unit = bytes(block[(len(block) - 1) // unit_bytes * unit_bytes :])


def index_lines(data: bytes, encoding: TextEncoding, *, block_bytes: int = BLOCK_BYTES) -> LineIndex:
    """Return the index of a text that is in memory."""
    indexer = LineIndexer(encoding, block_bytes=block_bytes)
    indexer.feed(data)
    return indexer.finish()


def index_lines_reference(data: bytes, encoding: TextEncoding, *, block_bytes: int = BLOCK_BYTES) -> LineIndex:
    """The same, one code unit after another."""
    unit_bytes = encoding.unit_bytes
    feeds_before, hashes = [0], []
    for start in range(0, len(data), block_bytes):
        block = data[start : start + block_bytes]
        units = [block[at : at + unit_bytes] for at in range(0, len(block), unit_bytes)]
        feeds_before.append(feeds_before[-1] + units.count(encoding.line_feed))
        hashes.append(xxhash.xxh3_64_intdigest(block))
    text = data.removeprefix(encoding.mark)
    units = [text[at : at + unit_bytes] for at in range(0, len(text), unit_bytes)]
    return LineIndex(
        encoding=encoding,
        block_bytes=block_bytes,
        size_bytes=len(data),
        ends_with_newline=not units or units[-1] == encoding.line_feed,
        feeds_before=np.array(feeds_before, dtype=np.uint64),
        block_hashes=np.array(hashes, dtype=np.uint64),
    )


def _feeds(data: bytes | memoryview, encoding: TextEncoding) -> NDArray[np.bool_]:
    """Return for each whole code unit whether it is a line feed."""
    unit_bytes = encoding.unit_bytes
    order = ">" if encoding.name.endswith("-be") else "<"
    units = np.frombuffer(data, dtype=f"{order}u{unit_bytes}", count=len(data) // unit_bytes)
    feeds: NDArray[np.bool_] = units == ord("\n")
    return feeds
