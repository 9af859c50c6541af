"""The files of an artifact store: how they are named, which citations name one, and opening one without a detour.

``<folder>/<first 2 hex>/<sha256>.<txt|bin>`` is a blob, ``<sha256>.idx`` beside it its line index. A citation comes
from a model or a person: it is compared as text with the names that a store can hold and never followed, so that
none leads out of the store.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from pathlib import Path, PurePath
from typing import BinaryIO, Final, NewType

Sha256 = NewType("Sha256", str)
"""64 lower-case hex digits."""

SUFFIXES: Final = (".txt", ".bin")
INDEX_SUFFIX: Final = ".idx"
TEMPORARY_PREFIX: Final = ".tmp-"
LEAST_CITED_DIGITS: Final = 8
MOST_CITATION_CHARACTERS: Final = 4096

_SHA256 = re.compile(r"[0-9a-f]{64}")
_CITED_HASH = re.compile(rf"[0-9a-fA-F]{{{LEAST_CITED_DIGITS},64}}")


def is_sha256(text: str) -> bool:
    """Whether a text is 64 lower-case hex digits."""
    return _SHA256.fullmatch(text) is not None


def blob_path(folder: Path, sha256: Sha256, *, text: bool) -> Path:
    """Return where a blob of the store in `folder` is, or would be."""
    return folder / sha256[:2] / f"{sha256}{SUFFIXES[0] if text else SUFFIXES[1]}"


def index_path(blob: Path) -> Path:
    """Return where the line index of a blob is, or would be."""
    return blob.with_suffix(INDEX_SUFFIX)


def hash_in_name(path: PurePath) -> Sha256 | None:
    """Return the hash that a path ends in, if it ends as a blob's does."""
    is_blob = is_sha256(path.stem) and path.suffix in SUFFIXES and path.parent.name == path.stem[:2]
    return Sha256(path.stem) if is_blob else None


def cited_hash(citation: str, folder: Path) -> str | None:
    """Return the hash, or the beginning of one, that a citation gives; None where it can name no blob in `folder`.

    It gives one as 8 to 64 hex digits, or as a blob's path: absolute, or relative to the store or a folder above it.
    """
    if _CITED_HASH.fullmatch(citation):
        return citation.lower()
    if len(citation) > MOST_CITATION_CHARACTERS or "\0" in citation:
        return None
    path = PurePath(citation)
    sha256 = hash_in_name(path)
    above = path.parent.parent.parts
    for place in (Path(os.path.normpath(folder.absolute())), folder.resolve()):
        whole = place.parts
        # A relative path begins anywhere in the store's own: [len(whole) - len(above), len(whole)) is what it repeats.
        if above == whole or (not path.is_absolute() and above == whole[max(0, len(whole) - len(above)) :]):
            return sha256
    return None


def open_blob(path: Path) -> BinaryIO:
    """Open a file of the store for reading, as `open_regular` does. Raises OSError where its folder is a link, too."""
    if os.open not in os.supports_dir_fd:
        if path.parent.is_symlink():
            raise OSError(errno.ELOOP, f"{path.parent} is a symbolic link, not a folder of the store")
        return open_regular(path)
    try:
        folder_fd = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENOTDIR):
            raise OSError(
                error.errno, f"{path.parent} is a symbolic link or file, not a folder of the store"
            ) from error
        raise
    try:
        return open_regular(path, folder_fd=folder_fd)
    finally:
        os.close(folder_fd)


def open_regular(path: Path, *, folder_fd: int | None = None) -> BinaryIO:
    """Open a regular file for reading. Raises OSError for anything else, a symbolic link to one included.

    `folder_fd` is the folder of `path`, open; without it the path is followed.
    """
    flags = os.O_RDONLY
    for name in ("O_NOFOLLOW", "O_NONBLOCK", "O_BINARY"):  # not waiting: what has the name may be a pipe
        flags |= getattr(os, name, 0)
    try:
        fd = os.open(path if folder_fd is None else path.name, flags, dir_fd=folder_fd)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise OSError(errno.ELOOP, f"{path} is a symbolic link, not a regular file") from error
        raise
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, f"{path} is not a regular file")
    return os.fdopen(fd, "rb")
