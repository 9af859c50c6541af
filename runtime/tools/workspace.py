"""The workspace: the one folder that tools see, and the only door to its files.

Every path is resolved on its deepest existing ancestor and must lie inside. A file is then opened from the root down,
component by component, following no symbolic link, so that a link planted after the check leads nowhere.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from ...kernels.errors import ContainmentError, ToolError, WorkspaceError
from .containment import Rule, check_text, is_device_name, is_git_folder, split_path
from .spec import Grounded

GROUNDED_LIMIT = 2000

_GROUNDED_ENTRIES = 10_000
_WALKED_ENTRIES = 200_000

_NO_FOLLOW = getattr(os, "O_NOFOLLOW", 0)
_FOLDER_FLAGS = os.O_RDONLY | getattr(os, "O_DIRECTORY", 0) | _NO_FOLLOW | getattr(os, "O_CLOEXEC", 0)
# O_NONBLOCK, since opening a FIFO without a writer would wait for ever.
_FILE_FLAGS = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | _NO_FOLLOW | getattr(os, "O_BINARY", 0)
_NEW_FILE_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | _NO_FOLLOW | getattr(os, "O_BINARY", 0)
_HAS_FOLDER_HANDLES = os.open in os.supports_dir_fd


@dataclass(frozen=True, slots=True)
class ResolvedPath:
    """A path inside the workspace: `relative` with slashes ('.' is the root), `real` without symbolic links."""

    relative: str
    real: Path

    @property
    def components(self) -> tuple[str, ...]:
        return () if self.relative == "." else tuple(self.relative.split("/"))


class Workspace:
    """A folder and its rules. Holds no handle; nothing of it is cached, since others write there too."""

    def __init__(self, root: Path, store_folder: Path | None = None) -> None:
        """`store_folder` is the session store: readable if it lies inside, never writable by a tool.

        Raises WorkspaceError where `root` is missing, not a folder, or not readable.
        """
        self._given_root = Path.cwd() / root
        self.root = Path(os.path.realpath(root))
        self.store_folder = None if store_folder is None else Path(os.path.realpath(store_folder))
        self.check()

    def check(self) -> None:
        """Raise WorkspaceError unless the root is a folder that can be read, now."""
        try:
            next(self.root.iterdir(), None)
        except OSError as problem:
            raise _unusable(self._given_root, problem) from problem
        if not os.access(self.root, os.R_OK | os.X_OK):
            raise _unusable(self._given_root, PermissionError(errno.EACCES, "permission denied"))

    def resolve(self, path: str, *, writing: bool = False) -> ResolvedPath:
        """Return where `path` leads; it need not exist. Raises ContainmentError that names the rule it breaks."""
        check_text(path)
        given = Path(path)
        if given.is_absolute() and given.is_relative_to(self._given_root):
            given = given.relative_to(self._given_root)
        try:
            real = Path(os.path.realpath(self.root / given))
        except OSError as problem:  # a link that was swapped between two looks at it
            message = f"{path!r} changed while it was being looked at: {problem.strerror}; try again"
            raise ContainmentError(message, path=path, rule=Rule.SYMLINK_RACE) from problem
        if not real.is_relative_to(self.root):
            message = f"{path!r} leads outside the workspace; only paths inside it can be used"
            raise ContainmentError(message, path=path, rule=Rule.OUTSIDE)
        resolved = ResolvedPath(real.relative_to(self.root).as_posix(), real)
        _check_entry(path, resolved)
        if writing:
            self._check_writable(path, resolved)
        return resolved

    def has_file(self, path: str) -> bool:
        """Whether `path` names a regular file inside the workspace."""
        try:
            return self.resolve(path).real.is_file()
        except (ContainmentError, OSError):
            return False

    def shown(self, path: Path) -> str:
        """Return how a tool names a file of ours: relative where it lies in the workspace."""
        real = path.resolve()
        return real.relative_to(self.root).as_posix() if real.is_relative_to(self.root) else str(real)

    @contextmanager
    def open_file(self, path: str) -> Iterator[BinaryIO]:
        """Open a regular file for reading. Raises ContainmentError, or ToolError where it is missing or unreadable."""
        resolved = self.resolve(path)
        with _explained(self, resolved):
            file = os.fdopen(self._open(resolved, _FILE_FLAGS), "rb")
        with file:
            _check_regular(path, os.fstat(file.fileno()))
            yield file

    @contextmanager
    def open_folder(self, resolved: ResolvedPath) -> Iterator[int | Path]:
        """Give what `os.scandir` takes for a folder: a handle where the system has them, else its path."""
        if not _HAS_FOLDER_HANDLES:
            yield resolved.real
            return
        handle = self._open(resolved, _FOLDER_FLAGS)
        try:
            yield handle
        finally:
            os.close(handle)

    def replace_file(self, path: str, data: bytes) -> bool:
        """Write a file whole or not at all (temporary file, fsync, rename), with its parents; keep its mode.

        Returns whether it was there before. Raises ContainmentError, or ToolError where the disk refuses.
        """
        resolved = self.resolve(path, writing=True)
        if not resolved.components:
            raise ToolError(f"{path!r} is the workspace itself; name a file in it")
        with _explained(self, resolved):
            parent = ResolvedPath("/".join(resolved.components[:-1]) or ".", resolved.real.parent)
            self._make_folders(parent)
            with self.open_folder(parent) as folder:
                return _replace(folder, resolved.components[-1], data, path)

    def list_files(self, *, limit: int) -> tuple[str, ...] | None:
        """Return the files that .gitignore leaves, sorted, without .git and the store; None above `limit`."""
        return self._listed(Grounded.FILE, limit, max_entries=_WALKED_ENTRIES)

    def grounded_values(self, kind: Grounded, limit: int = GROUNDED_LIMIT) -> tuple[str, ...] | None:
        """Return all valid values of a parameter marked `kind`, sorted.

        None where there are more than `limit`, or the tree is too large to look through before every request.
        """
        return self._listed(kind, limit, max_entries=_GROUNDED_ENTRIES)

    def _listed(self, kind: Grounded, limit: int, *, max_entries: int) -> tuple[str, ...] | None:
        from .walk import TreeWalk  # noqa: PLC0415 (walk needs this module's types)

        found = [] if kind is Grounded.FILE else ["."]
        walk = TreeWalk(self, max_entries=max_entries)
        for entry in walk:
            if entry.is_folder == (kind is Grounded.FILE) and kind is not Grounded.PATH:
                continue
            found.append(entry.path)
            if len(found) > limit:
                return None
        return tuple(found) if walk.complete else None

    def _check_writable(self, path: str, resolved: ResolvedPath) -> None:
        if any(is_git_folder(component) for component in resolved.components):
            message = f"{path!r} lies under .git, where no tool writes; git does that"
            raise ContainmentError(message, path=path, rule=Rule.GIT_FOLDER)
        if self.store_folder is not None and self.is_in_store(resolved.real):
            message = f"{path!r} lies in the session store, where no tool writes"
            raise ContainmentError(message, path=path, rule=Rule.STORE)

    def is_in_store(self, real: Path) -> bool:
        """Whether a path without symbolic links is the session store or lies in it."""
        store = self.store_folder
        if store is None:
            return False
        if real.is_relative_to(store):
            return True
        # Where names ignore case, the text may differ and the folder be the same.
        return any(_same_file(ancestor, store) for ancestor in (real, *real.parents))

    def _open(self, resolved: ResolvedPath, flags: int) -> int:
        """Open what `resolved` names from the root down, following no link."""
        if not _HAS_FOLDER_HANDLES:
            return os.open(resolved.real, flags)
        if not resolved.components:
            return os.open(self.root, flags)
        with self._descended(resolved.components[:-1]) as folder:
            return os.open(resolved.components[-1], flags, dir_fd=folder)

    def _make_folders(self, resolved: ResolvedPath) -> None:
        """Make the folders that are missing on the way to `resolved`, and itself."""
        if not _HAS_FOLDER_HANDLES:
            resolved.real.mkdir(parents=True, exist_ok=True)
            return
        for depth, component in enumerate(resolved.components):
            with self._descended(resolved.components[:depth]) as folder, contextlib.suppress(FileExistsError):
                os.mkdir(component, dir_fd=folder)

    @contextmanager
    def _descended(self, components: tuple[str, ...]) -> Iterator[int]:
        """Give a handle of the folder at the end of `components`, reached without following a link."""
        folder = os.open(self.root, _FOLDER_FLAGS)
        try:
            for component in components:
                deeper = os.open(component, _FOLDER_FLAGS, dir_fd=folder)
                os.close(folder)
                folder = deeper
            yield folder
        finally:
            os.close(folder)


def _check_entry(path: str, resolved: ResolvedPath) -> None:
    """Refuse what is neither a regular file nor a folder nor absent, and names that are devices somewhere."""
    try:
        status: os.stat_result | None = resolved.real.stat()
    except OSError as problem:
        status = None
        if problem.errno == errno.ELOOP:
            message = f"{path!r} is a loop of symbolic links"
            raise ContainmentError(message, path=path, rule=Rule.SYMLINK_LOOP) from problem
    # On POSIX `aux.c` is a file like any other once it is there; nothing makes a new one that a checkout breaks on.
    if os.name == "nt" or status is None:
        for component in split_path(resolved.relative):
            if is_device_name(component) or (os.name == "nt" and ":" in component):
                message = f"{path!r} names a device on Windows ({component}); choose another name"
                raise ContainmentError(message, path=path, rule=Rule.DEVICE_NAME)
    if status is not None and not stat.S_ISDIR(status.st_mode):
        _check_regular(path, status)


def _check_regular(path: str, status: os.stat_result) -> None:
    if stat.S_ISREG(status.st_mode):
        return
    if stat.S_ISDIR(status.st_mode):
        raise ToolError(f"{path!r} is a folder; use list to see what is in it")
    message = f"{path!r} is a device, FIFO or socket; only regular files can be used"
    raise ContainmentError(message, path=path, rule=Rule.SPECIAL_FILE)


def _replace(folder: int | Path, name: str, data: bytes, path: str) -> bool:
    """Put `data` in the place of `name`. With a handle, names are relative to it; with a path, they are joined."""
    at = folder if isinstance(folder, int) else None
    target = name if isinstance(folder, int) else str(folder / name)
    temporary = f"{target.removesuffix(name)}.chapbook-{secrets.token_hex(8)}.tmp"
    try:
        old: os.stat_result | None = os.stat(target, follow_symlinks=False, dir_fd=at)
    except FileNotFoundError:
        old = None
    if old is not None:
        _check_regular(path, old)
        if not old.st_mode & 0o222:
            raise ToolError(f"{path!r} is read-only; nothing was written. Its owner can change that with chmod u+w")
    handle = os.open(temporary, _NEW_FILE_FLAGS, 0o666, dir_fd=at)
    try:
        with os.fdopen(handle, "wb") as file:
            if old is not None and hasattr(os, "fchmod"):
                os.fchmod(file.fileno(), stat.S_IMODE(old.st_mode))
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target, src_dir_fd=at, dst_dir_fd=at)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary, dir_fd=at)
        raise
    if at is not None:
        os.fsync(at)
    return old is not None


@contextmanager
def _explained(workspace: Workspace, resolved: ResolvedPath) -> Iterator[None]:
    """Turn what the system says of a file into what the model can act on."""
    try:
        yield
    except OSError as problem:
        workspace.check()
        path = resolved.relative
        if problem.errno in (errno.ELOOP, errno.EMLINK):
            message = f"{path!r} became a symbolic link while it was being opened"
            raise ContainmentError(message, path=path, rule=Rule.SYMLINK_RACE) from problem
        raise ToolError(_explanation(path, problem)) from problem


def _explanation(path: str, problem: OSError) -> str:
    reason = problem.strerror or str(problem)
    match problem.errno:
        case errno.ENOENT:
            explanation = f"there is no {path!r}; use list or search to find it"
        case errno.ENOTDIR | errno.EEXIST:
            explanation = f"a part of {path!r} is a file, not a folder"
        case errno.EISDIR:
            explanation = f"{path!r} is a folder; use list to see what is in it"
        case errno.ENOSPC | errno.EDQUOT | errno.EFBIG:
            explanation = f"no room on the disk for {path!r} ({reason}); nothing was changed. Free some, then try again"
        case errno.ENAMETOOLONG:
            explanation = f"a part of {path!r} is longer than this file system allows (often 255 bytes)"
        case _:
            explanation = f"{path!r} cannot be used: {reason}; nothing was changed"
    return explanation


def _same_file(one: Path, other: Path) -> bool:
    try:
        return one.samefile(other)
    except OSError:
        return False


def _unusable(root: Path, problem: OSError) -> WorkspaceError:
    if isinstance(problem, FileNotFoundError):
        what = "is not there (never made, moved or deleted)"
    elif isinstance(problem, NotADirectoryError):
        what = "is not a folder"
    else:
        what = f"cannot be read ({problem.strerror or problem})"
    return WorkspaceError(f"the workspace {root} {what}; give a folder that you can read", path=root)
