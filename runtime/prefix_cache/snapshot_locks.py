"""Locks among the processes that use a folder of snapshots. The system lets go of them with the process."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

STALE_AFTER_S = 3600.0
"""Where files cannot be locked, a temporary file that was not written to for so long has no writer any more."""

_PATIENCE_S = 2.0
_POLL_S = 0.01


def lock_now(fd: int) -> bool | None:
    """Lock an open file or folder until it is closed. False where another has it, None where there are no locks."""
    try:
        import fcntl  # noqa: PLC0415 - not there on every platform

        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except (ImportError, OSError):
        return None
    return True


@contextmanager
def folder_turn(folder: Path) -> Iterator[None]:
    """Keep other processes from making room at the same time, so that together they stay within the budget.

    A courtesy: who waits for two seconds goes on without it, since the other may have been stopped.
    """
    fd = -1
    with suppress(OSError):
        fd = os.open(folder, os.O_RDONLY)
    try:
        deadline = time.monotonic() + _PATIENCE_S
        while fd >= 0 and lock_now(fd) is False and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        yield
    finally:
        if fd >= 0:
            os.close(fd)


def is_abandoned(temporary: Path, *, now: float) -> bool:
    """Return whether the writer of a temporary file is gone. `now` in Unix seconds."""
    try:
        fd = os.open(temporary, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0))
    except OSError:
        return False
    try:
        # A writer holds the lock as long as it lives. A process id would say less: it may be of another container.
        locked = lock_now(fd)
    finally:
        os.close(fd)
    return _is_old(temporary, now=now) if locked is None else locked


def _is_old(temporary: Path, *, now: float) -> bool:
    with suppress(OSError):
        return now - temporary.lstat().st_mtime > STALE_AFTER_S
    return False
