"""What is in a folder of snapshots. Headers and ids are read once, and again only where a file has changed.

    <folder>/<seed of the identity, 32 hex>/<run name>.kv       a snapshot
                                            <run name>.bad      one that was set aside
                                            .tmp-<pid>-<...>    one that is being written, or whose writer is gone

Other processes write and remove here at the same time: what a listing shows may be gone a moment later.
"""

from __future__ import annotations

import os
import re
import stat
import threading
from pathlib import Path

import msgspec

from ...kernels.chain import run_name
from ...kernels.errors import SnapshotUnusable
from .snapshot_format import SUFFIX
from .snapshot_reading import BAD_SUFFIX, FileStamp, SnapshotFile, opened, read_header

TEMPORARY_PREFIX = ".tmp-"

_SEED_FOLDER = re.compile(r"[0-9a-f]{32}")


class OtherFile(msgspec.Struct, frozen=True, kw_only=True):
    """What is in the folder and is no usable snapshot. Its own size and time, where it is a link."""

    path: Path
    stamp: FileStamp
    regular: bool

    @property
    def size_bytes(self) -> int:
        return self.stamp.size_bytes


class UnusableFile(msgspec.Struct, frozen=True, kw_only=True):
    """A file that must not be used, and why. A damaged one was set aside where that was possible."""

    path: Path
    reason: str
    damaged: bool

    @classmethod
    def of(cls, error: SnapshotUnusable) -> UnusableFile:
        return cls(path=error.path, reason=error.reason, damaged=error.damaged)

    def __str__(self) -> str:
        return f"the snapshot {self.path.name} is not used: {self.reason}"


class Survey(msgspec.Struct, frozen=True, kw_only=True):
    """All that a folder holds. `others` are not ours: they are neither counted against a budget nor removed."""

    files: tuple[SnapshotFile, ...]
    set_aside: tuple[OtherFile, ...]
    temporary: tuple[OtherFile, ...]
    others: tuple[OtherFile, ...]

    @property
    def held_bytes(self) -> int:
        """What counts against the budget."""
        others = (*self.set_aside, *self.temporary)
        return sum(file.size_bytes for file in self.files) + sum(file.size_bytes for file in others)


class SnapshotIndex:
    """The headers of all files in a folder, as of the last look. Thread-safe: one lock."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._lock = threading.Lock()
        self._known: dict[Path, SnapshotFile] = {}
        # Files that are of no use and could not be renamed: not to be read and reported again until they change.
        self._refused: dict[Path, FileStamp] = {}
        self._found_bad: list[UnusableFile] = []

    def files_in(self, seed_folder: Path) -> tuple[SnapshotFile, ...]:
        """Return the usable files of one identity, the last used first. An unchanged folder costs one scandir.

        A file whose header is damaged is set aside, with a note.
        """
        return tuple(sorted(self._look(seed_folder)[0], key=lambda file: file.stamp.mtime_ns, reverse=True))

    def survey(self) -> Survey:
        """Return all that the whole folder holds."""
        files: list[SnapshotFile] = []
        kinds: dict[str, list[OtherFile]] = {"set_aside": [], "temporary": [], "others": []}
        for entry in _entries(self.folder):
            if not _is_seed_folder(entry.path):
                kinds["others"].append(entry)
                continue
            usable, rest = self._look(entry.path)
            files.extend(usable)
            for left in rest:
                kinds[_kind_of(left)].append(left)
        return Survey(files=tuple(files), **{kind: tuple(found) for kind, found in kinds.items()})

    def keep(self, file: SnapshotFile) -> None:
        """Take in a file as it is now: it was just written, or used."""
        with self._lock:
            self._refused.pop(file.path, None)
            self._known[file.path] = file

    def refuse(self, file: SnapshotFile) -> None:
        """Forget a file that turned out to be damaged. If it is still there it is not read until it changes."""
        with self._lock:
            self._refuse(file.path, file.stamp)

    def take_unusable(self) -> tuple[UnusableFile, ...]:
        """Return which files looks have found to be of no use since the last call. Each is named once."""
        with self._lock:
            found, self._found_bad = tuple(self._found_bad), []
        return found

    def check_integrity(self) -> None:
        """Assert that what is kept is what the files were found to be."""
        with self._lock:
            assert not self._known.keys() & self._refused.keys()
            for path, file in self._known.items():
                assert file.path == path
                assert path.parent == self.folder / file.identity.seed.hex()
                assert path.name == run_name(file.tokens, seed=file.identity.seed) + SUFFIX
                assert file.layout.size_bytes == file.size_bytes
                assert not file.tokens.flags.writeable

    def _look(self, seed_folder: Path) -> tuple[list[SnapshotFile], list[OtherFile]]:
        """Return the usable files of one identity, and what else was there in the same scan.

        One scan, so that a file which takes its name meanwhile is seen as the one or as the other.
        """
        files: list[SnapshotFile] = []
        rest: list[OtherFile] = []
        with self._lock:
            entries = _entries(seed_folder) if _is_seed_folder(seed_folder) else []
            for entry in entries:
                file = self._file_of(entry) if entry.path.suffix == SUFFIX else None
                if file is not None:
                    files.append(file)
                else:
                    rest.append(_after_look(entry))
            there = {entry.path for entry in entries}
            for kept in (self._known, self._refused):
                for gone in [path for path in kept if path.parent == seed_folder and path not in there]:
                    del kept[gone]
        return files, rest

    def _file_of(self, entry: OtherFile) -> SnapshotFile | None:
        known = self._known.get(entry.path)
        if known is not None and known.stamp == entry.stamp:
            return known
        if self._refused.get(entry.path) == entry.stamp:
            return None
        try:
            with opened(entry.path) as handle:
                file = read_header(handle, entry.path)
        except SnapshotUnusable as error:
            self._refuse(entry.path, entry.stamp)
            if error.damaged or os.path.lexists(entry.path):
                self._found_bad.append(UnusableFile.of(error))
            return None
        self._refused.pop(entry.path, None)
        self._known[entry.path] = file
        return file

    def _refuse(self, path: Path, stamp: FileStamp) -> None:
        self._known.pop(path, None)
        self._refused[path] = stamp


def _entries(folder: Path) -> list[OtherFile]:
    """Return what is in a folder; nothing where it is missing, no folder, or a link to one."""
    found: list[OtherFile] = []
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                try:
                    status = entry.stat(follow_symlinks=False)
                except FileNotFoundError:
                    continue
                regular = stat.S_ISREG(status.st_mode)
                found.append(OtherFile(path=folder / entry.name, stamp=FileStamp.of(status), regular=regular))
    except OSError:
        return []
    return found


def _after_look(entry: OtherFile) -> OtherFile:
    """Return the entry under the name that it has if it was set aside just now."""
    bad = entry.path.with_suffix(BAD_SUFFIX)
    if entry.path.suffix == SUFFIX and not os.path.lexists(entry.path) and os.path.lexists(bad):
        return msgspec.structs.replace(entry, path=bad)
    return entry


def _is_seed_folder(path: Path) -> bool:
    try:
        return _SEED_FOLDER.fullmatch(path.name) is not None and path.is_dir() and not path.is_symlink()
    except OSError:  # its own folder may not be searched, or the device fails
        return False


def _kind_of(entry: OtherFile) -> str:
    if entry.regular and entry.path.name.startswith(TEMPORARY_PREFIX):
        return "temporary"
    return "set_aside" if entry.regular and entry.path.suffix == BAD_SUFFIX else "others"
