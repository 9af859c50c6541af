"""Line indexes on disk, and the one pass over a blob that tells its hash, its encoding and its index.

A file of little-endian numbers, described in docs/artifacts.md: a front that binds it to the blob's SHA-256 and size,
the counts, the hashes, and a checksum of all before it. It can always be made anew, so whatever is not exactly right
is no index, and nothing is allocated for what a file claims.
"""

from __future__ import annotations

import codecs
import hashlib
import struct
from pathlib import Path
from typing import BinaryIO, Final

import msgspec
import numpy as np
import xxhash

from ..kernels.line_index import BLOCK_BYTES, LineIndex, LineIndexer
from ..kernels.text_encoding import HEAD_BYTES, TextEncoding, detect_encoding
from .blob_files import Sha256, open_blob
from .durable_files import publish, write_all

MAGIC: Final = b"chapbix\n"
FORMAT_VERSION: Final = 1
CHUNK_BYTES: Final = 1 << 20

_FRONT = struct.Struct("<8sII32sQ12s4sBB2x")
"""Magic, version, block size, SHA-256, blob size, encoding, byte order mark and its length, ends with a newline."""
_NUMBER = np.dtype("<u8")
_CHECKSUM_BYTES = 16


class Surveyed(msgspec.Struct, frozen=True, kw_only=True):
    """What a whole pass over a content found."""

    sha256: Sha256
    is_utf8: bool
    index: LineIndex


class Survey:
    """A pass over a content, fed in chunks of any size; holds 64 KB and one chunk."""

    def __init__(self) -> None:
        self._digest = hashlib.sha256()
        self._decoder: codecs.IncrementalDecoder | None = codecs.getincrementaldecoder("utf-8")()
        self._head = b""
        self._indexer: LineIndexer | None = None

    def feed(self, chunk: bytes) -> None:
        """Take the next bytes."""
        self._digest.update(chunk)
        self._decode(chunk)
        if self._indexer is not None:
            self._indexer.feed(chunk)
            return
        self._head += chunk
        if len(self._head) >= HEAD_BYTES:
            self._start_index()

    def finish(self) -> Surveyed:
        """Return what was found; nothing can be fed afterwards."""
        self._decode(b"", final=True)
        indexer = self._indexer or self._start_index()
        sha256 = Sha256(self._digest.hexdigest())
        return Surveyed(sha256=sha256, is_utf8=self._decoder is not None, index=indexer.finish())

    def check_integrity(self) -> None:
        """Assert that the head waits only until the encoding can be told."""
        assert len(self._head) < HEAD_BYTES
        if self._indexer is not None:
            assert not self._head
            self._indexer.check_integrity()

    def _start_index(self) -> LineIndexer:
        # By the same bytes as whoever opens the blob, however the chunks came.
        self._indexer = LineIndexer(detect_encoding(self._head[:HEAD_BYTES]))
        self._indexer.feed(self._head)
        self._head = b""
        return self._indexer

    def _decode(self, chunk: bytes, *, final: bool = False) -> None:
        if self._decoder is not None:
            try:
                self._decoder.decode(chunk, final)
            except UnicodeDecodeError:
                self._decoder = None


def survey_blob(file: BinaryIO) -> Surveyed:
    """Return what a pass over the rest of an open file finds."""
    survey = Survey()
    for chunk in iter(lambda: file.read(CHUNK_BYTES), b""):
        survey.feed(chunk)
    return survey.finish()


def encode_index(index: LineIndex, sha256: Sha256) -> bytes:
    """Return the bytes of an index file for the blob of that hash."""
    front = _front(sha256, index.encoding, index.size_bytes, ends_with_newline=index.ends_with_newline)
    data = front + index.feeds_before.astype(_NUMBER).tobytes() + index.block_hashes.astype(_NUMBER).tobytes()
    return data + xxhash.xxh3_128_digest(data)


def decode_index(data: bytes, sha256: Sha256, encoding: TextEncoding, *, size_bytes: int) -> LineIndex | None:
    """Return the index of the blob of that hash, encoding and size; None where `data` are not one, whole and right."""
    fronts = [_front(sha256, encoding, size_bytes, ends_with_newline=ends) for ends in (False, True)]
    front, checksum = data[: _FRONT.size], data[-_CHECKSUM_BYTES:]
    if len(data) != index_file_bytes(size_bytes) or front not in fronts:
        return None
    if xxhash.xxh3_128_digest(memoryview(data)[:-_CHECKSUM_BYTES]) != checksum:
        return None
    blocks = _blocks(size_bytes)
    numbers = np.frombuffer(data, dtype=_NUMBER, count=2 * blocks + 1, offset=_FRONT.size).astype(np.uint64)
    return LineIndex(
        encoding=encoding,
        block_bytes=BLOCK_BYTES,
        size_bytes=size_bytes,
        ends_with_newline=front == fronts[True],
        feeds_before=numbers[: blocks + 1],
        block_hashes=numbers[blocks + 1 :],
    )


def index_file_bytes(size_bytes: int) -> int:
    """Return how long the index file of a blob of `size_bytes` is."""
    return _FRONT.size + (2 * _blocks(size_bytes) + 1) * _NUMBER.itemsize + _CHECKSUM_BYTES


def read_index(path: Path, sha256: Sha256, encoding: TextEncoding, *, size_bytes: int) -> LineIndex | None:
    """Return the index in a file, as `decode_index` does; None too where there is no such file or it cannot be read."""
    try:
        with open_blob(path) as file:
            # A byte more than it should have tells one that is too long.
            return decode_index(file.read(index_file_bytes(size_bytes) + 1), sha256, encoding, size_bytes=size_bytes)
    except OSError:
        return None


def write_index(path: Path, index: LineIndex, sha256: Sha256) -> None:
    """Write an index file durably, in place of one that is there. Raises OSError, with nothing left of it."""
    with publish(path) as file:
        write_all(file, encode_index(index, sha256))


def _front(sha256: Sha256, encoding: TextEncoding, size_bytes: int, *, ends_with_newline: bool) -> bytes:
    name, mark = encoding.name.encode(), encoding.mark
    digest = bytes.fromhex(sha256)
    return _FRONT.pack(MAGIC, FORMAT_VERSION, BLOCK_BYTES, digest, size_bytes, name, mark, len(mark), ends_with_newline)


def _blocks(size_bytes: int) -> int:
    return -(-size_bytes // BLOCK_BYTES)
