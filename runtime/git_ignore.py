"""Keeping a store out of git: one line in the workspace's ``.gitignore``, added without disturbing the others."""

from __future__ import annotations

from pathlib import Path

import msgspec

from ..compaction.durable_files import write_all, write_new_file
from .git_patterns import compile_patterns

MOST_BYTES = 1 << 20
"""A larger .gitignore is left alone."""


class IgnoreReport(msgspec.Struct, frozen=True, kw_only=True):
    """What was done so that git passes over a folder. `written` is the file that a line was added to, or None;
    `note` says it for a person, and is empty where there was nothing to do."""

    written: Path | None = None
    note: str = ""


def in_git_checkout(folder: Path) -> bool:
    """Return whether `folder` or a parent holds a ``.git`` that is a repository, or a file that points at one."""
    real = folder.resolve()
    return any(_is_git(each / ".git") for each in (real, *real.parents))


def ignore_folder(workspace: Path, name: str) -> IgnoreReport:
    """Have git pass over the folder `name` of `workspace`, if that is a checkout; `name` must exist. Never raises.

    Where a line does it already, or one says that the folder is wanted (``!name/``), nothing is done. A ``.gitignore``
    that cannot take a line (a symlink, which git does not follow; read-only) is left alone, and the folder gets one
    of its own that names all of it.
    """
    if not in_git_checkout(workspace):
        return IgnoreReport()
    path = workspace / ".gitignore"
    try:
        before = _read(path)
        if _is_settled(before, name):
            return IgnoreReport()
        _add_line(path, before, f"{name}/")
    except (OSError, ValueError) as error:
        return _ignore_from_within(workspace / name, f"{path} could not take a line: {error}")
    return IgnoreReport(written=path, note=f"added {name}/ to {path}, so that git leaves the session logs alone")


def _is_git(path: Path) -> bool:
    try:
        if path.is_dir():
            return (path / "HEAD").exists()
        return path.is_file() and _head(path) == b"gitdir:"
    except OSError:
        return False


def _read(path: Path) -> bytes:
    if path.is_symlink():
        raise ValueError("it is a symlink, which git does not follow")
    if not path.exists():
        return b""
    if not path.is_file():
        raise ValueError("it is not a regular file")
    if path.stat().st_size > MOST_BYTES:
        raise ValueError(f"it has more than {MOST_BYTES:,} bytes")
    data = path.read_bytes()
    if b"\0" in data:
        raise ValueError("it is not text")
    return data


def _is_settled(data: bytes, name: str) -> bool:
    lines = data.decode("utf-8", "surrogateescape").splitlines()
    spellings = {f"{slash}{name}{end}" for slash in ("", "/") for end in ("", "/")}
    if any(line.strip().removeprefix("!") in spellings for line in lines):
        return True
    if not lines:
        return False
    return compile_patterns(tuple(lines)).match_file(f"{name}/file")


def _add_line(path: Path, before: bytes, line: str) -> None:
    end = b"\r\n" if b"\r\n" in before else b"\n"
    opening = b"" if before.endswith(b"\n") or not before else end
    with path.open("ab", buffering=0) as file:
        try:
            write_all(file, opening + line.encode() + end)
        except OSError:
            file.truncate(len(before))
            raise


def _ignore_from_within(folder: Path, reason: str) -> IgnoreReport:
    path = folder / ".gitignore"
    try:
        write_new_file(path, b"*\n")
    except FileExistsError:
        return IgnoreReport()
    except OSError as error:
        return IgnoreReport(note=f"git may pick up {folder}: {reason}; {path}: {error.strerror or error}")
    return IgnoreReport(written=path, note=f"{reason}; wrote {path} instead")


def _head(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(7)
