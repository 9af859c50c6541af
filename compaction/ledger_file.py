"""The file of a plan ledger: one for each holder, always one writer's whole output, never outside the store.

``<store>/plan.json``, and ``<store>/plans/<holder>.json`` for a named holder. The last writer wins; a file that is no
plan is moved aside and kept.
"""

from __future__ import annotations

import errno
import itertools
import os
import re
import stat
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import msgspec

from ..kernels.errors import LedgerError
from ..kernels.secrets import redact
from .blob_files import TEMPORARY_PREFIX, open_blob, open_regular
from .durable_files import FILE_MODE, flush_folder, make_private_folder, way_out, write_new_file
from .ledger import NOTE_CHARS, STEP_CHARS, TASK_CHARS, Ledger, LedgerStep

FILE_NAME: Final = "plan.json"
FOLDER_NAME: Final = "plans"
UNNAMED: Final = "worker"
HOLDER_CHARS: Final = 40
MOST_FILE_BYTES: Final = 1 << 18
"""More than the largest plan takes, however its characters are escaped. No more is read: a larger file is torn then."""

_PROCESS = re.compile(r"pid-[0-9]+")
_UNNAMEABLE = re.compile(r"[^A-Za-z0-9._-]+")
_NO_REGULAR_FILE: Final = (errno.ELOOP, errno.EINVAL, errno.ENXIO)


class Loaded(msgspec.Struct, frozen=True, kw_only=True):
    """What a holder's file says, without secrets that a person wrote there. `quarantined` is where a file went that is
    no plan; then there is no ledger."""

    ledger: Ledger | None = None
    quarantined: Path | None = None


class FoundLedger(msgspec.Struct, frozen=True, kw_only=True):
    """A file of the store that has the name of a plan's. `ledger`, without secrets, is None where it is none, or cannot
    be read."""

    path: Path
    ledger: Ledger | None = None


def find_ledgers(store_folder: Path) -> tuple[FoundLedger, ...]:
    """Return the plans of all holders, and those that were set aside, by path. Nothing is moved, no link followed."""
    paths = [*store_folder.glob(f"{Path(FILE_NAME).stem}*.json")]
    folder = store_folder / FOLDER_NAME
    if not folder.is_symlink():
        paths += folder.glob("*.json")
    found = []
    for path in sorted(paths):
        try:
            with open_regular(path) as file:
                ledger = _decoded(file.read(MOST_FILE_BYTES))
        except OSError:
            ledger = None
        found.append(FoundLedger(path=path, ledger=None if ledger is None else _redacted(ledger)))
    return tuple(found)


def holder_name(holder: str) -> str:
    """Return the name that a holder's file has: letters, digits and ``._-``, 40 at most.

    Two holders whose names differ in other characters alone, or behind the 40th, share a file.
    """
    return _UNNAMEABLE.sub("-", holder).lstrip(".-")[:HOLDER_CHARS] or UNNAMED


class LedgerFile:
    """The file of `holder` in `store_folder`, which must be there when something is saved.

    Without a holder, or with one that only names a process (`pid-N`), it is the workspace's own file. `clock` gives
    Unix seconds and `pid` the process that writes; both go into names of files.
    """

    def __init__(self, store_folder: Path, *, holder: str | None, clock: Callable[[], float], pid: int) -> None:
        self._is_named = holder is not None and not _PROCESS.fullmatch(holder)
        named_path = store_folder / FOLDER_NAME / f"{holder_name(holder or '')}.json"
        self.path = named_path if self._is_named else store_folder / FILE_NAME
        self._store_folder = store_folder
        self._clock = clock
        self._pid = pid
        self._numbers = itertools.count(1)

    def load(self) -> Loaded:
        """Read the plan. What has the name and is no plan, a link included, is moved aside and not followed.

        Raises LedgerError where it cannot be read, or not be moved aside.
        """
        try:
            self._require_own_folder()
            data = self._read()
            ledger = _decoded(data)
            return Loaded(ledger=_redacted(ledger)) if ledger is not None else Loaded(quarantined=self._quarantine())
        except FileNotFoundError:  # there is none, or another process has just moved it aside
            return Loaded()
        except OSError as error:
            raise self._refusal(error, "read") from error

    def save(self, ledger: Ledger) -> None:
        """Replace the file, atomically and durably.

        Raises LedgerError: then the file is as it was, or, where only the last flush of its folder failed, the new one.
        """
        try:
            self._write(ledger, self.path)
        except OSError as error:
            raise self._refusal(error, "saved") from error

    def set_aside(self, ledger: Ledger) -> Path:
        """Keep a plan under a name of its own beside the file, and return it; the file stays.

        Renamed to the file it is in force again. Raises LedgerError with nothing left of it.
        """
        path = self._free_path(f"set-aside-{self._time()}-{self._pid}")
        try:
            self._write(ledger, path)
        except OSError as error:
            raise self._refusal(error, "set aside") from error
        return path

    def set_aside_of(self, session: str) -> str:
        """Return the name of the newest file in which a plan that `session` began was set aside; empty for none."""
        kept = [
            found.path.name
            for found in find_ledgers(self._store_folder)
            if found.path.parent == self.path.parent
            and found.path.name.startswith(f"{self.path.stem}.set-aside-")
            and found.ledger is not None
            and found.ledger.session == session
        ]
        return kept[-1] if kept else ""

    def check_integrity(self) -> None:
        """Assert that the file is a whole plan of the owner's, or not there, and that no write was left unfinished."""
        assert not list(self.path.parent.glob(f"{TEMPORARY_PREFIX}{self._pid}-*"))
        if not self.path.exists():
            return
        assert stat.S_IMODE(self.path.stat().st_mode) == FILE_MODE
        ledger = _decoded(self.path.read_bytes())
        assert ledger is not None
        assert ledger == _redacted(ledger)

    def _require_own_folder(self) -> None:
        """Raise OSError where the folder of named holders is a file, or a link, which may lead out of the store."""
        folder = self.path.parent
        if self._is_named and (folder.is_symlink() or (folder.exists() and not folder.is_dir())):
            raise OSError(0, f"{folder} is a symbolic link or a file, not a folder of the store. Remove it")

    def _read(self) -> bytes:
        try:
            with open_blob(self.path) if self._is_named else open_regular(self.path) as file:
                return file.read(MOST_FILE_BYTES)
        except OSError as error:
            if error.errno in _NO_REGULAR_FILE:
                return b""
            raise

    def _quarantine(self) -> Path:
        path = self._free_path(f"corrupt-{self._time()}")
        self.path.rename(path)
        flush_folder(path.parent)
        return path

    def _write(self, ledger: Ledger, path: Path) -> None:
        data = msgspec.json.encode(_redacted(ledger))
        self._require_own_folder()
        if not self._store_folder.is_dir():
            raise OSError(errno.ENOENT, "the store is gone (moved or deleted). Put it back, or start a new session")
        make_private_folder(path.parent)
        temporary = self._write_temporary(path.parent, data)
        try:
            temporary.replace(path)
        except OSError:
            temporary.unlink(missing_ok=True)
            raise
        flush_folder(path.parent)

    def _write_temporary(self, folder: Path, data: bytes) -> Path:
        while True:
            path = folder / f"{TEMPORARY_PREFIX}{self._pid}-{next(self._numbers)}"
            try:
                write_new_file(path, data)
                return path
            except FileExistsError:  # of another writer in this process, or of one that was killed and had its pid
                continue

    def _free_path(self, what: str) -> Path:
        """Return a path beside the file that nothing has: ``plan.<what>.json``, with a number where it is taken."""
        path = self.path.with_name(f"{self.path.stem}.{what}.json")
        for number in itertools.count(2):
            if not os.path.lexists(path):
                break
            path = self.path.with_name(f"{self.path.stem}.{what}-{number}.json")
        return path

    def _time(self) -> str:
        return f"{datetime.fromtimestamp(self._clock(), UTC):%Y%m%d-%H%M%S}"

    def _refusal(self, error: OSError, what: str) -> LedgerError:
        return LedgerError(
            f"the plan in {self.path} cannot be {what}: {way_out(error)}", path=self.path, errno=error.errno
        )


def _decoded(data: bytes) -> Ledger | None:
    """Return the plan that `data` is; None where it is none."""
    try:
        return msgspec.json.decode(data, type=Ledger)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None


def _redacted(ledger: Ledger) -> Ledger:
    """Return the plan without secrets. What `plan_start` and `plan_step` accept holds none: this is the second look."""
    return msgspec.structs.replace(
        ledger, task=_clean(ledger.task, TASK_CHARS), steps=tuple(_redacted_step(step) for step in ledger.steps)
    )


def _redacted_step(step: LedgerStep) -> LedgerStep:
    return msgspec.structs.replace(step, text=_clean(step.text, STEP_CHARS), note=_clean(step.note, NOTE_CHARS))


def _clean(text: str, limit: int) -> str:
    clean = redact(text.encode("utf-8", "replace")).data.decode("utf-8", "replace")
    return clean if len(clean) <= limit else clean[: limit - 1] + "…"
