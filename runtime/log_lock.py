"""One writer to a session: a lock that the system releases with its process, and a file that names the holder."""

from __future__ import annotations

import os
import shlex
import socket
import sys
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

import filelock
import msgspec

from ..compaction.durable_files import FILE_MODE, publish, write_all
from ..kernels.errors import LogError, LogLocked

LOCK_NAME = "lock"
HOLDER_NAME = "holder.json"
COMMAND_CHARS = 200

PATIENCE_S = 0.2
"""A listing that asks whether a session is held takes the lock for a moment: that must not look like a holder."""


class Holder(msgspec.Struct, frozen=True, kw_only=True):
    """A process that holds a session. `since` is when it took it, in Unix seconds."""

    pid: int
    host: str
    since: float
    command: str

    def __str__(self) -> str:
        since = datetime.fromtimestamp(self.since, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
        return f"process {self.pid} on {self.host} since {since}: {self.command}"


def this_process(*, now: float) -> Holder:
    """Return the running process as a holder."""
    # Arguments that are no UTF-8 come with surrogates, which JSON cannot hold.
    command = shlex.join(sys.argv)[:COMMAND_CHARS].encode("utf-8", "replace").decode()
    return Holder(pid=os.getpid(), host=socket.gethostname(), since=now, command=command)


class SessionLock:
    """The right to write to the session in `folder`, from construction until `release`."""

    def __init__(self, folder: Path, holder: Holder) -> None:
        """Take the lock. Raises LogLocked, which names the holder, and LogError where a lock cannot be made."""
        self._folder = folder
        self._lock = filelock.FileLock(folder / LOCK_NAME, timeout=PATIENCE_S, mode=FILE_MODE, thread_local=False)
        try:
            self._lock.acquire(poll_interval=PATIENCE_S / 10)
        except filelock.Timeout as error:
            raise _refusal(folder) from error
        except (OSError, NotImplementedError) as error:
            raise LogError(f"the session in {folder} cannot be locked: {error}", path=folder / LOCK_NAME) from error
        # A full disk must not keep anyone from opening a session: the name is a courtesy, the lock is the right.
        with suppress(OSError), publish(folder / HOLDER_NAME) as file:
            write_all(file, msgspec.json.encode(holder))

    def release(self) -> None:
        """Give the right back. Doing so again is no error."""
        if self._lock.is_locked:
            with suppress(OSError):
                (self._folder / HOLDER_NAME).unlink()
            self._lock.release()


def holder_of(folder: Path) -> Holder | None:
    """Return who said last that it holds the session, which may have died since; None where nobody did."""
    try:
        return msgspec.json.decode((folder / HOLDER_NAME).read_bytes(), type=Holder)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
        return None


def is_locked(folder: Path) -> bool:
    """Return whether a process holds the session; one that has just come, and not yet left its name, may be missed."""
    if not (folder / HOLDER_NAME).exists():
        return False
    lock = filelock.FileLock(folder / LOCK_NAME, timeout=0, mode=FILE_MODE, thread_local=False)
    try:
        with lock:
            return False
    except filelock.Timeout:
        return True
    except (OSError, NotImplementedError):
        return False


def _refusal(folder: Path) -> LogLocked:
    found = holder_of(folder)
    holder = "another process" if found is None else str(found)
    return LogLocked(
        f"the session in {folder} is held by {holder}. One process at a time may write to a session: end that one, "
        "or start a new session",
        path=folder / LOCK_NAME,
        holder=holder,
    )
