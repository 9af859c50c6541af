"""Writing one snapshot file: whole under its name, or not there at all.

The file is allocated at its full size before it is mapped, so that a full disk is an error here and not a SIGBUS in
whoever fills it. It has a temporary name and a lock that goes with its writer; only when all of it is on the disk does
it take its name.
"""

from __future__ import annotations

import errno
import mmap
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Self

import msgspec
import numpy as np
from numpy.typing import NDArray

from ...compaction.durable_files import flush_folder, flush_to_disk, way_out
from ...kernels.errors import SnapshotWriteFailed
from ...kernels.tokens import TokenIds, encode_tokens
from ..sizes import size_text
from .pool import StateBytes
from .snapshot_format import SnapshotHeader, encode_front, hash_bytes, layout_of
from .snapshot_index import TEMPORARY_PREFIX
from .snapshot_locks import folder_turn, lock_now
from .snapshot_reading import FileStamp, SnapshotFile

OnStep = Callable[[str], None]
"""Called with the name of each step of a write when it is done. A seam for tests."""

OnCommit = Callable[[SnapshotFile, bool], None]

_ZEROS_BYTES = 1 << 20
_CREATE_ATTEMPTS = 5
_CANNOT_ALLOCATE = frozenset({errno.EOPNOTSUPP, errno.ENOTSUP, errno.EINVAL, errno.ENOSYS})


class PendingSnapshot:
    """A file that is being written. Used by one thread at a time; ends with `commit` or `abandon`.

    As a context manager it is abandoned where the block did not commit it.
    """

    def __init__(
        self, path: Path, header: SnapshotHeader, tokens: TokenIds, *, on_commit: OnCommit, on_step: OnStep
    ) -> None:
        """Create and allocate a temporary file beside `path`. Raises SnapshotWriteFailed, and then nothing is left."""
        self.path = path
        self._header, self._tokens = header, tokens
        self._on_commit, self._on_step = on_commit, on_step
        self._layout = layout_of(len(encode_front(header)), header)
        self._fd, self._temporary = -1, path
        self._whole: NDArray[np.uint8] | None = None
        with self._failing_cleanly():
            self._fd, self._temporary = _create_locked(path.parent)
            on_step("created")
            _allocate(self._fd, self.size_bytes)
            self._whole = np.frombuffer(mmap.mmap(self._fd, self.size_bytes), dtype=np.uint8)
            # Page faults of a shared mapping are slow: 1.6 s for 400 MB. Taken here, no engine waits for them.
            self._whole[:: mmap.PAGESIZE] = 0
            on_step("allocated")

    @property
    def size_bytes(self) -> int:
        """The size of the file."""
        return self._layout.size_bytes

    @property
    def has_rungs(self) -> bool:
        return len(self._header.sections) > 1

    def section(self, index: int) -> StateBytes:
        """Return where the bytes of a section go. Shape: (its size_bytes,). Not to be written to after the end."""
        assert self._whole is not None, "this snapshot has been committed or abandoned"
        part = self._layout.sections[index]
        return self._whole[part.start : part.stop]

    def commit(self, *, covers: bool = False) -> SnapshotFile:
        """Finish the file and give it its name, then remove shorter ones of the same run that it makes superfluous.

        A file of the same run is replaced. An unpinned one of a proper prefix goes where its length is a rung here;
        with `covers`, where a shorter run can be had from any longer one, whatever its length.
        Raises SnapshotWriteFailed, and then nothing is left.
        """
        with self._failing_cleanly():
            header = self._write_front_and_ids()
            self._on_step("hashed")
            if sys.platform != "linux":
                self._flush_mapping()
            flush_to_disk(self._fd)
            self._on_step("flushed")
            used_ns = round(header.created * 1e9)
            os.utime(self._temporary, ns=(used_ns, used_ns))
            stamp = FileStamp.of(os.fstat(self._fd))
            # Who makes room counts either this name or the other, and never none.
            with folder_turn(self.path.parent.parent):
                self._temporary.replace(self.path)
        self._on_step("renamed")
        self._release()
        with suppress(OSError):
            flush_folder(self.path.parent)
        front = encode_front(header)
        file = SnapshotFile(path=self.path, header=header, front=front, tokens=self._tokens, stamp=stamp)
        self._on_commit(file, covers)
        self._on_step("done")
        return file

    def abandon(self) -> None:
        """Leave nothing of it. Does nothing after the end."""
        if self._fd >= 0:
            with suppress(OSError):
                self._temporary.unlink()
            self._release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.abandon()

    def _write_front_and_ids(self) -> SnapshotHeader:
        assert self._whole is not None, "this snapshot has been committed or abandoned"
        layout, whole = self._layout, self._whole
        whole[layout.ids.start : layout.ids.stop] = np.frombuffer(encode_tokens(self._tokens), dtype=np.uint8)
        sections = tuple(
            msgspec.structs.replace(section, xxh3_128=hash_bytes(whole[part.start : part.filled].data))
            for section, part in zip(self._header.sections, layout.sections, strict=True)
        )
        ids_hash = hash_bytes(whole[layout.ids.start : layout.ids.filled].data)
        header = msgspec.structs.replace(self._header, sections=sections, ids_xxh3_128=ids_hash)
        front = encode_front(header)
        assert len(front) == layout.front.stop
        whole[: layout.front.stop] = np.frombuffer(front, dtype=np.uint8)
        return header

    def _flush_mapping(self) -> None:
        # On Linux fsync writes the pages of a shared mapping too, and this call would hold the GIL all the while.
        mapping = self._whole.base if self._whole is not None else None
        assert isinstance(mapping, mmap.mmap)
        mapping.flush()

    def _release(self) -> None:
        self._whole = None
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1

    @contextmanager
    def _failing_cleanly(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            self.abandon()
            if isinstance(error, OSError):
                message = f"a snapshot of {size_text(self.size_bytes)} cannot be written: {way_out(error)}"
                raise SnapshotWriteFailed(message, path=self.path, errno=error.errno) from error
            raise


def _create_locked(folder: Path) -> tuple[int, Path]:
    """Return the descriptor and the path of a new file, for the owner alone, that is locked. Raises OSError."""
    for _ in range(_CREATE_ATTEMPTS):
        fd, name = tempfile.mkstemp(prefix=f"{TEMPORARY_PREFIX}{os.getpid()}-", dir=folder)
        # Before it was locked, another process may have taken it for one whose writer is gone.
        with suppress(FileNotFoundError):
            if lock_now(fd) is not False and os.path.samestat(os.fstat(fd), Path(name).lstat()):
                return fd, Path(name)
        os.close(fd)
    raise OSError(errno.EBUSY, "other processes remove what is being written")


def _allocate(fd: int, size_bytes: int) -> None:
    """Give an empty file its size and the room for it. Raises OSError."""
    if hasattr(os, "posix_fallocate"):
        try:
            os.posix_fallocate(fd, 0, size_bytes)
            return
        except OSError as error:
            if error.errno not in _CANNOT_ALLOCATE:
                raise
    zeros = memoryview(bytes(_ZEROS_BYTES))
    written = 0
    while written < size_bytes:
        written += os.write(fd, zeros[: size_bytes - written])
