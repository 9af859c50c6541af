"""What is in an artifact store: every file read, held against its name, and what does not belong there named."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import msgspec

from .blob_files import INDEX_SUFFIX, SUFFIXES, TEMPORARY_PREFIX, hash_in_name, index_path, is_sha256, open_blob
from .blob_index import read_index, survey_blob
from .durable_files import way_out


class Problem(NamedTuple):
    """A file that is not as it should be, and what is wrong with it."""

    path: Path
    what: str


class Leftovers(NamedTuple):
    """Temporary files of writers that were killed, or that are writing now. Nothing cites them."""

    files: int
    bytes: int


class StoreReport(msgspec.Struct, frozen=True, kw_only=True):
    """What a whole reading of a store found."""

    sound_blobs: int
    sound_bytes: int
    problems: tuple[Problem, ...]
    unfinished: Leftovers


def verify_store(folder: Path) -> StoreReport:
    """Read every file of the store in `folder`, which need not exist."""
    sizes: list[int] = []
    left: list[int] = []
    problems: list[Problem] = []
    for path in _files(folder, problems):
        if path.name.startswith(TEMPORARY_PREFIX):
            with suppress(FileNotFoundError):  # its writer is done
                left.append(path.lstat().st_size)
        elif hash_in_name(path):
            _verify_blob(path, sizes, problems)
        elif path.suffix != INDEX_SUFFIX or not is_sha256(path.stem):
            problems.append(Problem(path, "no file of the store"))
        elif not any(path.with_suffix(suffix).exists() for suffix in SUFFIXES):
            problems.append(Problem(path, "a line index without its blob. It can be removed"))
    return StoreReport(
        sound_blobs=len(sizes),
        sound_bytes=sum(sizes),
        problems=tuple(problems),
        unfinished=Leftovers(len(left), sum(left)),
    )


def _files(folder: Path, problems: list[Problem]) -> Iterator[Path]:
    """Give what is in the folders of the store, in order; what is no folder is a file of the store's own."""
    if not folder.is_dir():
        return
    for below in _listed(folder, problems):
        if below.is_dir() and not below.is_symlink():
            yield from _listed(below, problems)
        else:
            yield below


def _listed(folder: Path, problems: list[Problem]) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError as error:
        problems.append(Problem(folder, way_out(error)))
        return []


def _verify_blob(path: Path, sizes: list[int], problems: list[Problem]) -> None:
    try:
        with open_blob(path) as file:
            found = survey_blob(file)
    except OSError as error:
        problems.append(Problem(path, way_out(error)))
        return
    if found.sha256 != path.stem:
        what = f"it is not what was stored, its bytes now have the SHA-256 {found.sha256}. Restore it from a backup"
        problems.append(Problem(path, what))
        return
    size_bytes = found.index.size_bytes
    sizes.append(size_bytes)
    index = index_path(path)
    stored = read_index(index, found.sha256, found.index.encoding, size_bytes=size_bytes)
    if stored != found.index and os.path.lexists(index):
        problems.append(Problem(index, "it is not the line index of its blob. It is made anew at the next read"))
