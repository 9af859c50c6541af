"""Files that survive a crash: private folders, new files under their final name only once whole, flushes to the disk.

Nothing here overwrites or deletes what it did not write itself, but for `publish`, which replaces atomically.
"""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

FOLDER_MODE = 0o700
FILE_MODE = 0o600

_WAYS_OUT = {
    errno.ENOSPC: "the disk is full. Free some space and try again",
    errno.EDQUOT: "the disk quota is used up. Free some space and try again",
    errno.EFBIG: "the file would be larger than this process may write (ulimit -f). Raise the limit and try again",
    errno.EROFS: "the file system is read-only. Make it writable, or keep the store elsewhere",
    errno.EACCES: "permission denied. Make the folder writable for this user",
    errno.EPERM: "permission denied. Make the folder writable for this user",
    errno.EEXIST: "a file has the name of a folder that is needed. Move it away",
    errno.EISDIR: "a folder has the name of a file that is needed. Move it away",
    errno.EIO: "the device reports an error. Look at the disk before going on",
}


def way_out(error: OSError) -> str:
    """Return what was wrong with a write, and what a person can do about it."""
    return _WAYS_OUT.get(error.errno or 0, str(error.strerror or error))


def flush_to_disk(fd: int) -> None:
    """Return once what was written to `fd` is on the disk, not merely handed to it. Raises OSError."""
    try:
        import fcntl  # noqa: PLC0415 - not there on every platform

        # macOS: fsync returns before the drive has written; only this request waits for it.
        full_sync: int = fcntl.F_FULLFSYNC  # type: ignore[attr-defined,unused-ignore]
    except (ImportError, AttributeError):
        os.fsync(fd)
        return
    fcntl.fcntl(fd, full_sync)


def flush_folder(folder: Path) -> None:
    """Return once the names in `folder` are on the disk. A platform that cannot open a folder has no such call."""
    if os.name == "nt":
        return
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def make_private_folder(folder: Path) -> bool:
    """Create `folder` and its missing parents, for the owner alone, durably. Returns False where it was there.

    Raises OSError (FileExistsError where something else has the name).
    """
    if folder.is_dir():
        return False
    if not folder.parent.is_dir():
        make_private_folder(folder.parent)
    folder.mkdir(mode=FOLDER_MODE, exist_ok=True)
    flush_folder(folder.parent)
    return True


def create_private_file(path: Path) -> BinaryIO:
    """Create `path`, readable and writable by the owner alone, unbuffered. Raises FileExistsError where it is there."""
    return os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | _BINARY, FILE_MODE), "r+b", buffering=0)


def write_new_file(path: Path, data: bytes) -> None:
    """Write `data` to `path`, which must not exist, durably. On an error nothing is left. Raises OSError."""
    file = create_private_file(path)
    try:
        with file:
            write_all(file, data)
            flush_to_disk(file.fileno())
        flush_folder(path.parent)
    except OSError:
        path.unlink(missing_ok=True)
        raise


def write_all(file: BinaryIO, data: bytes) -> None:
    """Write the whole of `data` to an unbuffered file. Raises OSError, where a part may have been written."""
    rest = memoryview(data)
    while rest:
        # A disk that fills up takes a part first and refuses the next write.
        rest = rest[file.write(rest) :]


@contextmanager
def publish(path: Path) -> Iterator[BinaryIO]:
    """Give a temporary file beside `path`; when the block ends it is flushed and takes the name, atomically.

    Where the block or the flush fails, the temporary file is gone and `path` is as it was. Raises OSError.
    """
    fd, name = tempfile.mkstemp(prefix=".tmp-", dir=path.parent)
    temporary = Path(name)
    try:
        with os.fdopen(fd, "r+b", buffering=0) as file:
            yield file
            flush_to_disk(file.fileno())
        temporary.replace(path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise
    flush_folder(path.parent)


_BINARY = getattr(os, "O_BINARY", 0)
