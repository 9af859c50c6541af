"""The bytes of a snapshot file: one run of tokens, the whole state after it, and partial states (rungs) on the way.

    front      magic, format version, header length, hash; then the header as JSON, filled up with spaces
    ids        the run, 4 bytes each, little-endian
    sections   the state first, then the rungs by ascending length

Every part begins at a multiple of 64 bytes and is filled up to one with zeros. The hash of a part covers its filling,
so each byte of a file lies under a hash. Where a part stands follows from the sizes of those before it: a header has
no offsets that could overlap or lead out of the file.

A file is untrusted. Nothing is allocated for what it claims before the claim is held against the size of the file.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Final, NamedTuple

import msgspec
import xxhash

from ...kernels.chain import RunName, run_name
from ...kernels.errors import SnapshotUnusable
from ...kernels.tokens import TOKEN_BYTES, TokenIds, decode_tokens
from .identity import CacheIdentity

MAGIC: Final = b"chapbkv\n"
FORMAT_VERSION: Final = 1
SUFFIX: Final = ".kv"
ALIGNMENT_BYTES: Final = 64

MAX_TOKENS: Final = 1 << 24
MAX_SECTIONS: Final = 4096
MAX_SECTION_BYTES: Final = 1 << 40
MAX_FRONT_BYTES: Final = 1 << 20

_PREAMBLE = struct.Struct("<8sII16s")
PREAMBLE_BYTES: Final = _PREAMBLE.size
_HASHED_PREAMBLE = struct.Struct("<8sII")

TokenCount = Annotated[int, msgspec.Meta(ge=1, le=MAX_TOKENS)]
SectionBytes = Annotated[int, msgspec.Meta(ge=1, le=MAX_SECTION_BYTES)]
HashText = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{32}\Z")]

NO_HASH: Final = "0" * 32
"""Stands where a hash will, and is as long: so a header's length is known before what it describes is there."""


class SectionPlan(msgspec.Struct, frozen=True, kw_only=True):
    """A state to be written: after how many tokens it was taken, whether it is partial, and its size."""

    tokens: int
    partial: bool
    size_bytes: int


class Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A state in a file. The hash is over its bytes and their filling."""

    tokens: TokenCount
    partial: bool
    size_bytes: SectionBytes
    xxh3_128: HashText = NO_HASH


class SnapshotHeader(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a file says of itself. `created` is in Unix seconds. The first section is the state, the others are rungs.

    A file that is `pinned` is the last to go, and no longer run replaces it.
    """

    identity: CacheIdentity
    tokens: TokenCount
    run: str
    pinned: bool
    created: float
    ids_xxh3_128: HashText
    sections: Annotated[tuple[Section, ...], msgspec.Meta(min_length=1, max_length=MAX_SECTIONS)]


class Part(NamedTuple):
    """Where a part lies in a file: its content at [start, stop), the content and its filling at [start, filled)."""

    start: int
    stop: int
    filled: int


class Layout(NamedTuple):
    """Where everything lies. The file ends where the last part does."""

    front: Part
    ids: Part
    sections: tuple[Part, ...]

    @property
    def size_bytes(self) -> int:
        return self.sections[-1].filled


def layout_of(front_bytes: int, header: SnapshotHeader) -> Layout:
    """Return where the parts of a file lie whose front has `front_bytes` bytes."""
    front = _part(0, front_bytes)
    ids = _part(front.filled, header.tokens * TOKEN_BYTES)
    parts, start = [], ids.filled
    for section in header.sections:
        parts.append(_part(start, section.size_bytes))
        start = parts[-1].filled
    return Layout(front, ids, tuple(parts))


def hash_bytes(data: bytes | memoryview) -> str:
    """Return the hash that stands in headers. Gives up the GIL on large data."""
    return xxhash.xxh3_128_hexdigest(data)


def check_plan(tokens: int, sections: Sequence[SectionPlan]) -> None:
    """Assert that these states can stand in one file of a run of `tokens`."""
    assert 0 < tokens <= MAX_TOKENS
    assert 0 < len(sections) <= MAX_SECTIONS
    assert all(0 < section.size_bytes <= MAX_SECTION_BYTES for section in sections)
    assert _in_order(tokens, sections), "first the state of the whole run, then rungs below it by ascending length"


def encode_front(header: SnapshotHeader) -> bytes:
    """Return the front of a file: preamble and header, filled up. Its length does not depend on the hashes."""
    text = msgspec.json.encode(header)
    text += b" " * (-(PREAMBLE_BYTES + len(text)) % ALIGNMENT_BYTES)
    assert PREAMBLE_BYTES + len(text) <= MAX_FRONT_BYTES
    return _PREAMBLE.pack(MAGIC, FORMAT_VERSION, len(text), _front_hash(FORMAT_VERSION, text)) + text


def front_bytes_of(preamble: bytes, *, path: Path) -> int:
    """Return how long the front is that begins with `preamble` (`PREAMBLE_BYTES`). Raises SnapshotUnusable."""
    if len(preamble) < PREAMBLE_BYTES:
        raise _damaged(f"it ends after {len(preamble)} bytes, within its header", path)
    magic, version, text_bytes, _ = _PREAMBLE.unpack(preamble)
    if magic != MAGIC:
        raise _damaged("it does not begin as a snapshot does", path)
    if version != FORMAT_VERSION:
        raise _damaged(f"it has format version {version}, and this chapbook reads {FORMAT_VERSION}", path)
    front_bytes = PREAMBLE_BYTES + int(text_bytes)
    if front_bytes > MAX_FRONT_BYTES or front_bytes % ALIGNMENT_BYTES:
        raise _damaged(f"it claims a header of {text_bytes} bytes", path)
    return front_bytes


def decode_front(front: bytes, *, path: Path) -> SnapshotHeader:
    """Return the header of a file that lies at `path`, which names its identity and its run.

    Raises SnapshotUnusable where it is not what was written, or lies about itself.
    """
    text = front[PREAMBLE_BYTES:]
    _, version, _, expected = _PREAMBLE.unpack_from(front)
    if len(front) != front_bytes_of(front[:PREAMBLE_BYTES], path=path) or _front_hash(version, text) != expected:
        raise _damaged("its header is not what was written", path)
    try:
        header = msgspec.json.decode(text, type=SnapshotHeader)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise _damaged(f"its header cannot be read: {error}", path) from error
    if not _in_order(header.tokens, header.sections):
        raise _damaged("its header does not name the state and then the rungs below it", path)
    if header.identity.seed.hex() != path.parent.name:
        raise _damaged(f"it is of {header.identity.model_name or 'a model'} as that is opened otherwise", path)
    return header


def decode_ids(data: bytes, header: SnapshotHeader, *, path: Path) -> TokenIds:
    """Return the run of a file, `data` being its part of ids with the filling. Raises SnapshotUnusable."""
    if hash_bytes(data) != header.ids_xxh3_128:
        raise _damaged("its token ids are not what was written", path)
    tokens = decode_tokens(data[: header.tokens * TOKEN_BYTES])
    if not header.run == run_name(tokens, seed=header.identity.seed) == path.stem:
        raise _damaged("its name is not that of its tokens", path)
    return tokens


def snapshot_path(folder: Path, *, identity: CacheIdentity, run: RunName) -> Path:
    """Return where the snapshot of a run stands in the folder of all snapshots."""
    return folder / identity.seed.hex() / f"{run}{SUFFIX}"


def _in_order(tokens: int, sections: Sequence[SectionPlan | Section]) -> bool:
    state, rungs = sections[0], [section.tokens for section in sections[1:]]
    below = sorted({length for length in rungs if 0 < length < tokens})
    return state.tokens == tokens and not state.partial and rungs == below


def _front_hash(version: int, text: bytes) -> bytes:
    return xxhash.xxh3_128_digest(_HASHED_PREAMBLE.pack(MAGIC, version, len(text)) + text)


def _part(start: int, size_bytes: int) -> Part:
    stop = start + size_bytes
    return Part(start, stop, stop + -stop % ALIGNMENT_BYTES)


def _damaged(reason: str, path: Path) -> SnapshotUnusable:
    return SnapshotUnusable(reason, path=path, damaged=True)
