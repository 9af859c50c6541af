"""Reading the metadata of a GGUF file: a parser that trusts no number in it.

The layout is that of ggml's `gguf.cpp` (versions 2 and 3, little-endian): magic, version, counts, key-value pairs,
tensor infos, padding, tensor data. Every count is checked against what is left of the file before anything is read
or allocated, arrays of strings stay bytes until they are asked for (a 152,000-token vocabulary reads in 0.1 s), and
the tensor infos tell whether the file holds all the data that it announces.
"""

from __future__ import annotations

import math
import os
import stat
import struct
from array import array
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import BinaryIO, Final, NoReturn

import numpy as np
import xxhash

from ..kernels.errors import ModelFileError
from .gguf_metadata import GgufMetadata, MetadataValue, StringArray, TensorInfo

MAX_HEADER_BYTES: Final = 256 << 20
"""Far above any real header (30 MB with a vocabulary of 262,144 tokens); bounds what a hostile one makes us read."""
MAX_PAIRS: Final = 1 << 16
MAX_TENSORS: Final = 1 << 17
MAX_STRINGS: Final = 1 << 22

_FIRST_READ_BYTES: Final = 1 << 20
_SCALARS: Final[Mapping[int, tuple[str, str]]] = MappingProxyType(
    # value type number: (struct format, numpy dtype)
    {
        0: ("<B", "<u1"),
        1: ("<b", "<i1"),
        2: ("<H", "<u2"),
        3: ("<h", "<i2"),
        4: ("<I", "<u4"),
        5: ("<i", "<i4"),
        6: ("<f", "<f4"),
        7: ("<?", "?"),
        10: ("<Q", "<u8"),
        11: ("<q", "<i8"),
        12: ("<d", "<f8"),
    }
)
_STRING, _ARRAY = 8, 9
_MAX_DIMENSIONS: Final = 4
_DEFAULT_ALIGNMENT: Final = 32
_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")
_FINGERPRINT_BLOCKS: Final = 64
_FINGERPRINT_BLOCK_BYTES: Final = 4_096

TYPE_BLOCKS: Final[Mapping[int, tuple[int, int]]] = MappingProxyType(
    # ggml type number: (elements in a block, bytes of a block); `ggml-common.h`
    {
        0: (1, 4),
        1: (1, 2),
        2: (32, 18),
        3: (32, 20),
        6: (32, 22),
        7: (32, 24),
        8: (32, 34),
        9: (32, 36),
        10: (256, 84),
        11: (256, 110),
        12: (256, 144),
        13: (256, 176),
        14: (256, 210),
        15: (256, 292),
        16: (256, 66),
        17: (256, 74),
        18: (256, 98),
        19: (256, 50),
        20: (32, 18),
        21: (256, 110),
        22: (256, 82),
        23: (256, 136),
        24: (1, 1),
        25: (1, 2),
        26: (1, 4),
        27: (1, 8),
        28: (1, 8),
        29: (256, 56),
        30: (1, 2),
        34: (256, 54),
        35: (256, 66),
        39: (32, 17),
        40: (64, 36),
        41: (128, 18),
        42: (64, 18),
    }
)
"""Sizes of the tensor types. Only `size_bytes` and the check for missing data depend on it."""

_NO_GGUF: Final = (
    # first bytes of a file: what it is, and what to do
    (b"version https://git-lfs", "a Git LFS pointer and not the model: run `git lfs pull`"),
    (b"<", "a web page and not the model: fetch the file itself"),
    (b"PK\x03\x04", "a zip archive: unpack it, or convert the model to GGUF"),
    (b"ggjt", "in a format from before GGUF: convert the model again"),
    (b"ggml", "in a format from before GGUF: convert the model again"),
    (b"tjgg", "in a format from before GGUF: convert the model again"),
    (b"lmgg", "in a format from before GGUF: convert the model again"),
    (b"", "not a GGUF file: pass a model in the GGUF format"),
)


def read_gguf(path: Path) -> GgufMetadata:
    """Read and check the header of the GGUF file at `path`, and that the file holds all tensor data it announces.

    Raises ModelFileError for whatever is not a whole GGUF file, with the offset where reading failed.
    """
    with _opened(path) as file:
        size = os.fstat(file.fileno()).st_size
        return _Header(file, path=path, size=size).parse()


def fingerprint(path: Path, metadata: GgufMetadata) -> str:
    """Return 32 hex digits (xxh3_128) that tell models apart without reading all of the weights.

    Hashes the file size, the header (metadata and tensor index) and 64 blocks of 4 KiB spread evenly over the tensor
    data. Raises ModelFileError where the file cannot be read.
    """
    digest = xxhash.xxh3_128(_U64.pack(metadata.file_size))
    with _opened(path) as file:
        digest.update(file.read(metadata.header_bytes))
        # The last block may start at `room`, so that it ends with the file.
        room = max(0, metadata.file_size - metadata.data_offset - _FINGERPRINT_BLOCK_BYTES)
        for block in range(_FINGERPRINT_BLOCKS):
            file.seek(metadata.data_offset + room * block // (_FINGERPRINT_BLOCKS - 1))
            digest.update(file.read(_FINGERPRINT_BLOCK_BYTES))
    return digest.hexdigest()


@contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    try:
        # Opening a pipe or a device could block or have effects: look first.
        if not stat.S_ISREG(path.stat().st_mode):
            raise ModelFileError(f"{path} is not a file: pass the path of a GGUF file", path=path)
        with path.open("rb") as file:
            yield file
    except FileNotFoundError as error:
        raise ModelFileError(f"there is no file {path}", path=path) from error
    except (OSError, ValueError) as error:
        raise ModelFileError(f"{path} cannot be read: {error}", path=path) from error


class _Header:
    """Walks the header. `_data` is what was read of it so far, [0, _at) is what was parsed."""

    def __init__(self, file: BinaryIO, *, path: Path, size: int) -> None:
        self._file, self._path, self._size = file, path, size
        self._data = bytearray()
        self._at = 0

    def parse(self) -> GgufMetadata:
        """Return the metadata, or raise ModelFileError."""
        version = self._version()
        n_tensors, n_pairs = self._u64(), self._u64()
        # A pair takes 13 bytes at least (length, a letter, type, value), a tensor 24.
        self._check_count(n_pairs, "key-value pairs", limit=MAX_PAIRS, least_bytes=13)
        self._check_count(n_tensors, "tensors", limit=MAX_TENSORS, least_bytes=24)
        values: dict[str, MetadataValue] = {}
        for _ in range(n_pairs):
            key = self._string()
            if not key or key in values:
                self._fail(f"the key {key!r} is " + ("there twice" if key else "empty"))
            values[key] = self._value()
        alignment = values.get("general.alignment", _DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment <= 0 or alignment & (alignment - 1):
            self._fail(f"general.alignment is {alignment!r}, not a power of 2")
        tensors = tuple(self._tensor() for _ in range(n_tensors))
        data_offset = -(-self._at // alignment) * alignment if tensors else self._at
        self._check_tensors(tensors, data_offset)
        return GgufMetadata(
            version=version,
            values=MappingProxyType(values),
            tensors=tensors,
            header_bytes=self._at,
            data_offset=data_offset,
            file_size=self._size,
        )

    def _version(self) -> int:
        self._load(min(self._size, _FIRST_READ_BYTES))
        if self._data[:4] != b"GGUF":
            what = next(what for start, what in _NO_GGUF if self._data.startswith(start))
            if not self._data:
                what = "empty: fetch the file again"
            raise ModelFileError(f"{self._path} is {what}", path=self._path, offset=0)
        self._at = 4
        version = self._u32()
        if version & 0xFFFF == 0:
            self._fail(
                "it is big-endian, and only little-endian models are supported", remedy="Convert the model again"
            )
        if version not in (2, 3):
            self._fail(
                f"it has GGUF version {version}, and only 2 and 3 are supported", remedy="Convert the model again"
            )
        return version

    def _value(self) -> MetadataValue:
        kind = self._u32()
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            return self._array()
        if kind not in _SCALARS:
            self._fail(f"there is no value type {kind}")
        reader = struct.Struct(_SCALARS[kind][0])
        value: bool | int | float = reader.unpack_from(self._data, self._take(reader.size))[0]
        return value

    def _array(self) -> MetadataValue:
        kind, count = self._u32(), self._u64()
        if kind == _STRING:
            self._check_count(count, "strings", limit=MAX_STRINGS, least_bytes=_U64.size)
            return self._strings(count)
        if kind not in _SCALARS:
            self._fail(f"an array holds values of type {kind}; llama.cpp reads arrays of numbers, bools and strings")
        dtype = np.dtype(_SCALARS[kind][1])
        start = self._take(count * dtype.itemsize)
        return np.frombuffer(bytes(self._data[start : self._at]), dtype=dtype)

    def _strings(self, count: int) -> StringArray:
        starts = array("Q")
        data, at, have = self._data, self._at, len(self._data)
        for _ in range(count):
            # The length is [at, at + 8), its string follows.
            if at + 8 > have:
                have = self._load(at + 8)
            at += 8
            starts.append(at)
            at += _U64.unpack_from(data, at - 8)[0]
            if at > have:
                have = self._load(at)
        self._at = at
        starts.append(at + 8)
        return StringArray(data, starts)

    def _tensor(self) -> TensorInfo:
        name = self._string()
        n_dimensions = self._u32()
        if n_dimensions > _MAX_DIMENSIONS:
            self._fail(f"the tensor {name!r} has {n_dimensions} dimensions, and {_MAX_DIMENSIONS} is the limit")
        shape = tuple(self._u64() for _ in range(n_dimensions))
        ggml_type, offset = self._u32(), self._u64()
        size = None
        if ggml_type in TYPE_BLOCKS:
            block_elements, block_bytes = TYPE_BLOCKS[ggml_type]
            row_elements, rows = (shape[0], math.prod(shape[1:])) if shape else (1, 1)
            if row_elements % block_elements:
                self._fail(f"the tensor {name!r} has rows of {row_elements}, not of whole blocks of {block_elements}")
            size = row_elements // block_elements * block_bytes * rows
        return TensorInfo(name=name, shape=shape, ggml_type=ggml_type, offset_bytes=offset, size_bytes=size)

    def _check_tensors(self, tensors: tuple[TensorInfo, ...], data_offset: int) -> None:
        if len({tensor.name for tensor in tensors}) < len(tensors):
            self._fail("two tensors have the same name")
        needed = max((data_offset + tensor.offset_bytes + (tensor.size_bytes or 0) for tensor in tensors), default=0)
        if needed > self._size:
            message = f"{self._path} is incomplete: it holds {self._size:,} of {needed:,} bytes. Fetch the file again"
            raise ModelFileError(message, path=self._path, offset=self._size)

    def _check_count(self, count: int, what: str, *, limit: int, least_bytes: int) -> None:
        if count > limit:
            self._fail(f"it announces {count:,} {what}, and {limit:,} is the limit")
        if count * least_bytes > self._size - self._at:
            self._fail(f"it announces {count:,} {what}, more than the {self._size - self._at:,} bytes left can hold")

    def _u32(self) -> int:
        value: int = _U32.unpack_from(self._data, self._take(_U32.size))[0]
        return value

    def _u64(self) -> int:
        value: int = _U64.unpack_from(self._data, self._take(_U64.size))[0]
        return value

    def _string(self) -> str:
        start = self._take(self._u64())
        return self._data[start : self._at].decode("utf-8", "replace")

    def _take(self, n_bytes: int) -> int:
        """Move past the next bytes, which are loaded then, and return where they start."""
        start, end = self._at, self._at + n_bytes
        if end > len(self._data):
            self._load(end)
        self._at = end
        return start

    def _load(self, end: int) -> int:
        """Read the file up to `end` at least, and return how much of it is loaded. It grows by doubling."""
        if end > self._size:
            self._fail(f"it ends at byte {self._size:,}, and what it announces reaches to byte {end:,}")
        if end > MAX_HEADER_BYTES:
            self._fail(f"its header reaches to byte {end:,}, and {MAX_HEADER_BYTES:,} is the limit")
        want = min(self._size, max(end, 2 * len(self._data)))
        self._data += self._file.read(want - len(self._data))
        if len(self._data) < end:
            self._fail(f"it became shorter while it was read, {len(self._data):,} bytes")
        return len(self._data)

    def _fail(self, problem: str, *, remedy: str = "It is damaged or incomplete: fetch the file again") -> NoReturn:
        message = f"{self._path} cannot be used: {problem} (at byte {self._at:,}). {remedy}"
        raise ModelFileError(message, path=self._path, offset=self._at)
