"""Reading one snapshot file: nothing of it is used before its hash has been found right over the very bytes used.

llama.cpp takes a state with a flipped byte as it is, so these hashes are the only guard.
"""

from __future__ import annotations

import errno
import mmap
import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import xxhash

from ...compaction.durable_files import way_out
from ...kernels.errors import SnapshotUnusable
from ...kernels.tokens import TokenIds
from .identity import CacheIdentity
from .pool import StateBytes, new_buffer
from .snapshot_format import (
    PREAMBLE_BYTES,
    Layout,
    Part,
    SnapshotHeader,
    decode_front,
    decode_ids,
    front_bytes_of,
    hash_bytes,
    layout_of,
)

BAD_SUFFIX = ".bad"

_CHUNK_BYTES = 1 << 22


class FileStamp(NamedTuple):
    """What changes when a file does. `mtime_ns` is when it was last written or used."""

    size_bytes: int
    mtime_ns: int

    @classmethod
    def of(cls, status: os.stat_result) -> FileStamp:
        return cls(status.st_size, status.st_mtime_ns)


class SnapshotFile(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """A file whose header and ids have been found right. `used` is when it was last written or loaded, in Unix seconds.

    `rungs` are the lengths at which it holds a state below its own; one that is not partial stands by itself.
    """

    path: Path
    header: SnapshotHeader
    front: bytes
    tokens: TokenIds
    stamp: FileStamp

    @property
    def identity(self) -> CacheIdentity:
        return self.header.identity

    @property
    def rungs(self) -> tuple[int, ...]:
        return tuple(section.tokens for section in self.header.sections[1:])

    @property
    def size_bytes(self) -> int:
        return self.stamp.size_bytes

    @property
    def pinned(self) -> bool:
        return self.header.pinned

    @property
    def created(self) -> float:
        return self.header.created

    @property
    def used(self) -> float:
        return self.stamp.mtime_ns / 1e9

    @property
    def layout(self) -> Layout:
        return layout_of(len(self.front), self.header)

    def section_at(self, tokens: int) -> int:
        """Return which section holds the state after `tokens` tokens. Raises KeyError where none does."""
        for index, section in enumerate(self.header.sections):
            if section.tokens == tokens:
                return index
        raise KeyError(tokens)


@contextmanager
def opened(path: Path) -> Iterator[FileIO]:
    """Give a snapshot file, open for reading, which is a regular one, no link, and of this user.

    Raises SnapshotUnusable, also for an OSError in the block. A damaged file has been set aside by then: it has another
    suffix, so that nothing looks at it again.
    """
    try:
        fd = os.open(path, _OPEN_FLAGS)
    except OSError as error:
        raise _unreadable(error, path) from error
    try:
        _check_kind(os.fstat(fd), path)
        with FileIO(fd, closefd=False) as handle:
            yield handle
    except OSError as error:
        unusable = _unreadable(error, path)
        _set_aside(fd, unusable)
        raise unusable from error
    except SnapshotUnusable as error:
        _set_aside(fd, error)
        raise
    finally:
        os.close(fd)


def read_header(handle: FileIO, path: Path) -> SnapshotFile:
    """Return what a file says of itself, and its run: checked, and held against the file's size and place.

    Raises SnapshotUnusable or OSError.
    """
    status = os.fstat(handle.fileno())
    front_bytes = front_bytes_of(_read(handle, Part(0, PREAMBLE_BYTES, PREAMBLE_BYTES)), path=path)
    front = _read(handle, Part(0, front_bytes, front_bytes))
    header = decode_front(front, path=path)
    layout = layout_of(front_bytes, header)
    if status.st_size != layout.size_bytes:
        reason = f"it has {status.st_size:,} bytes, and by its header {layout.size_bytes:,}"
        raise SnapshotUnusable(reason, path=path, damaged=True)
    tokens = decode_ids(_read(handle, layout.ids), header, path=path)
    return SnapshotFile(path=path, header=header, front=front, tokens=tokens, stamp=FileStamp.of(status))


def read_sections(handle: FileIO, file: SnapshotFile, sections: Sequence[int], *, mapped: bool) -> list[StateBytes]:
    """Return these sections of an open file: in memory of their own, or `mapped` from the file.

    Memory of its own goes back to the system as soon as the array is dropped. A mapped file takes no memory that the
    system could not take back; a later damage to the disk can show in it.
    Raises SnapshotUnusable where it is not the file that was listed, or a section is not what was written; OSError.
    """
    again = read_header(handle, file.path)
    if again.front != file.front:
        raise SnapshotUnusable("another has taken its place since it was listed", path=file.path, damaged=False)
    parts = [file.layout.sections[index] for index in sections]
    whole = np.frombuffer(mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ), dtype=np.uint8) if mapped else None
    states = []
    for index, part in zip(sections, parts, strict=True):
        filled = whole[part.start : part.filled] if whole is not None else _read_into_memory(handle, part, file.path)
        _check_section(file, index, hash_bytes(filled.data))
        states.append(filled[: part.stop - part.start])
    return states


def check_sections(handle: FileIO, file: SnapshotFile) -> None:
    """Hold every section of an open file against its hash, a few megabytes at a time.

    Raises SnapshotUnusable or OSError.
    """
    for index, part in enumerate(file.layout.sections):
        hasher = xxhash.xxh3_128()
        for start in range(part.start, part.filled, _CHUNK_BYTES):
            stop = min(start + _CHUNK_BYTES, part.filled)
            hasher.update(_read(handle, Part(start, stop, stop)))
        _check_section(file, index, hasher.hexdigest())


def _unreadable(error: OSError, path: Path) -> SnapshotUnusable:
    if error.errno == errno.ENOENT:
        return SnapshotUnusable("it is gone", path=path, damaged=False)
    if error.errno == errno.ELOOP:
        return SnapshotUnusable("it is a symbolic link", path=path, damaged=False)
    # Any other error than the device's own may pass: too many open files, no memory for a mapping.
    damaged = error.errno == errno.EIO
    return SnapshotUnusable(f"it cannot be read: {way_out(error)}", path=path, damaged=damaged)


def _set_aside(fd: int, error: SnapshotUnusable) -> None:
    """Rename a damaged file, unless another has its name by now. Where that cannot be done it stays."""
    with suppress(OSError):
        if error.damaged and os.path.samestat(os.fstat(fd), error.path.lstat()):
            error.path.replace(error.path.with_suffix(BAD_SUFFIX))


def _check_kind(status: os.stat_result, path: Path) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise SnapshotUnusable("it is no regular file", path=path, damaged=False)
    if _THIS_USER is not None and status.st_uid != _THIS_USER():
        raise SnapshotUnusable(f"it belongs to user {status.st_uid}", path=path, damaged=False)


def _check_section(file: SnapshotFile, index: int, found: str) -> None:
    section = file.header.sections[index]
    if found != section.xxh3_128:
        reason = f"its state after {section.tokens:,} tokens is not what was written"
        raise SnapshotUnusable(reason, path=file.path, damaged=True)


def _read(handle: FileIO, part: Part) -> bytes:
    """Return the part with its filling, shorter where the file ends: its hash will tell."""
    handle.seek(part.start)
    pieces = []
    left = part.filled - part.start
    while left and (piece := handle.read(left)):
        pieces.append(piece)
        left -= len(piece)
    return b"".join(pieces)


def _read_into_memory(handle: FileIO, part: Part, path: Path) -> StateBytes:
    size_bytes = part.filled - part.start
    try:
        state = new_buffer(size_bytes)
    except (OSError, ValueError, OverflowError) as error:
        raise SnapshotUnusable(f"no memory for its {size_bytes:,} bytes", path=path, damaged=False) from error
    handle.seek(part.start)
    rest = state.data
    # A read may give less than was asked for; a file that was cut since leaves zeros, and the hash tells.
    while rest and (count := handle.readinto(rest)):
        rest = rest[count:]
    state.flags.writeable = False
    return state


# Without O_NONBLOCK, opening a FIFO would wait for its other end.
_OPEN_FLAGS = os.O_RDONLY | sum(getattr(os, name, 0) for name in ("O_NOFOLLOW", "O_NONBLOCK", "O_CLOEXEC", "O_BINARY"))
_THIS_USER = getattr(os, "geteuid", None)
