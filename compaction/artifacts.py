"""The artifact store: immutable blobs, each named by the SHA-256 of its bytes.

Whatever enters is redacted first, here and nowhere else: no secret of a known kind is ever written into the store, not
even into a temporary file. A name is there only once the whole content is on the disk, so a crash leaves a temporary
file that nothing cites, never a citation of half a blob. Content is verified when read.
"""

from __future__ import annotations

import errno
import io
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

import msgspec

from ..kernels.errors import ArtifactError
from ..kernels.line_index import LineIndex
from ..kernels.text_encoding import HEAD_BYTES, TextEncoding, detect_encoding
from .blob_files import Sha256, blob_path, cited_hash, hash_in_name, index_path, is_sha256, open_blob, open_regular
from .blob_index import Surveyed, read_index, survey_blob, write_index
from .durable_files import FILE_MODE, flush_folder, flush_to_disk, make_private_folder, publish, way_out, write_all
from .intake import Passed, redact_through
from .store_report import StoreReport, verify_store
from .stored_text import StoredText

INDEX_FROM_BYTES = 1 << 20

SHORT_ID_DIGITS = 12

_MOST_LISTED = 5
_MOST_UNWRITTEN = 8


class ArtifactRef(msgspec.Struct, frozen=True, kw_only=True):
    """Where a blob is, and what it must be."""

    sha256: Sha256
    size_bytes: int
    path: Path

    @property
    def short_id(self) -> str:
        """The digits of its hash that name it in a stub, and are offered to the model."""
        return self.sha256[:SHORT_ID_DIGITS]


class Stored(ArtifactRef, frozen=True, kw_only=True):
    """A blob that was stored just now. `redacted` says how many secrets of each kind were left out of it."""

    redacted: Mapping[str, int]


class ArtifactStore:
    """A content-addressed store in `folder`, which is created by the first write, in a folder that is there.

    Blobs of `index_from_bytes` or more have a line index beside them; smaller ones are hashed whole at every read.
    It keeps nothing in memory but line indexes that could not be written.
    """

    def __init__(self, folder: Path, *, index_from_bytes: int = INDEX_FROM_BYTES) -> None:
        self.folder = folder
        self._index_from_bytes = index_from_bytes
        self._unwritten: dict[Sha256, LineIndex] = {}

    def put(self, data: bytes, *, text: bool = True) -> Stored:
        """Redact and store `data`; content that is there already is not written again.

        Content that is not UTF-8 is stored as binary, whatever `text` says. Raises ArtifactError where it cannot be
        written, with nothing left of it.
        """
        pieces: list[bytes] = []
        passed = redact_through(io.BytesIO(data), write=pieces.append)
        stored = self._stored(passed, text=text)
        try:
            if not self._holds(stored):
                self._make_folder(stored.path.parent)
                with publish(stored.path) as file:
                    for piece in pieces:
                        write_all(file, piece)
            self._keep_index(stored, passed.found.index)
        except OSError as error:
            raise self._refusal(error, size_bytes=len(data)) from error
        return stored

    def adopt(self, file: Path, *, lead: bytes = b"", text: bool = True) -> Stored:
        """Redact and take over a regular file that nobody writes to any more; its old name is gone afterwards.

        `lead` is UTF-8 text that the blob has before the file's own, in the file's encoding and behind its byte order
        mark. The file is never held in memory. It is moved where store and file share a file system and nothing is to
        be changed, else it is read a second time and copied. Raises ArtifactError, and then `file` is where it was.
        """
        size_bytes = None
        try:
            with open_regular(file) as source:
                before = os.fstat(source.fileno())
                size_bytes = before.st_size + len(lead)
                passed = redact_through(source, lead=lead)
            stored = self._stored(passed, text=text)
            if not self._holds(stored):
                self._make_folder(stored.path.parent)
                if lead or passed.redacted or not _move(file, stored.path, before):
                    self._copy(file, lead, stored)
            self._keep_index(stored, passed.found.index)
            if os.path.realpath(file) != os.path.realpath(stored.path):
                file.unlink(missing_ok=True)  # moved already, or to go now that its blob is on the disk
        except OSError as error:
            raise self._refusal(error, size_bytes=size_bytes) from error
        return stored

    def lookup(self, citation: str) -> ArtifactRef:
        """Return the reference of the blob that a model or a person names, not yet verified.

        `citation` is 8 to 64 hex digits that one hash alone begins with, or a blob's path, absolute or relative to
        the store or a folder above it. Raises ArtifactError for anything else, and where there is none or several.
        """
        cited = cited_hash(citation, self.folder)
        if cited is None:
            shown = citation[:80] + ("…" if len(citation) > 80 else "")
            raise ArtifactError(
                f"{shown!r} names no artifact: give 8 to 64 hex digits of its SHA-256, or the path of its file in "
                f"{self.folder}",
                path=self.folder,
            )
        found = {path.stem for path in self._paths(cited[:2]) if path.stem.startswith(cited)}
        if len(found) == 1:
            return self.find(found.pop())
        if not found:
            raise ArtifactError(f"no artifact {cited} in {self._places}", path=self.folder)
        listed = ", ".join(sorted(found)[:_MOST_LISTED]) + (", …" if len(found) > _MOST_LISTED else "")
        raise ArtifactError(f"{len(found)} artifacts begin with {cited}: {listed}. Give more digits", path=self.folder)

    def find(self, sha256: str) -> ArtifactRef:
        """Return the reference of a stored blob, not yet verified. Raises ArtifactError where there is none."""
        if not is_sha256(sha256):
            raise ArtifactError(f"{sha256[:80]!r} is not a SHA-256 of 64 lower-case hex digits", path=self.folder)
        for text in (True, False):
            path = blob_path(self.folder, Sha256(sha256), text=text)
            try:
                with open_blob(path) as file:
                    size_bytes = os.fstat(file.fileno()).st_size
                return ArtifactRef(sha256=Sha256(sha256), size_bytes=size_bytes, path=path)
            except FileNotFoundError:
                continue
            except OSError as error:
                raise self._refusal(error, size_bytes=None) from error
        raise ArtifactError(f"no artifact {sha256} in {self._places}", path=self.folder)

    def read(self, sha256: str) -> bytes:
        """Return the content. Raises ArtifactError where there is none, or where it is not what was stored."""
        ref = self.find(sha256)
        try:
            with open_blob(ref.path) as file:
                data = file.read()
        except OSError as error:
            raise self._refusal(error, size_bytes=ref.size_bytes) from error
        _require(ref, survey_blob(io.BytesIO(data)))
        return data

    def open_text(self, ref: ArtifactRef) -> StoredText:
        """Return a blob as text, read by lines.

        A blob with a line index is hashed whole only where that is missing or damaged, and then it is made anew.
        Raises ArtifactError where the blob is gone or is not what was stored.
        """
        if ref.path not in (blob_path(self.folder, ref.sha256, text=text) for text in (True, False)):
            raise ArtifactError(f"{ref.path} is not a blob of {self._places}", path=ref.path)
        try:
            file = open_blob(ref.path)
        except OSError as error:
            raise self._refusal(error, size_bytes=ref.size_bytes) from error
        try:
            if ref.size_bytes < self._index_from_bytes:
                with file:
                    data = file.read(self._index_from_bytes)
                file = io.BytesIO(data)
            return StoredText(ref, file, self._index(ref, file))
        except OSError as error:
            file.close()
            raise self._refusal(error, size_bytes=ref.size_bytes) from error
        except BaseException:
            file.close()
            raise

    def refs(self) -> Iterator[ArtifactRef]:
        """Give every blob of the store, by hash, not yet verified."""
        for path in sorted(self._paths("??")):
            with suppress(FileNotFoundError):  # it went since it was listed
                yield ArtifactRef(sha256=Sha256(path.stem), size_bytes=path.stat().st_size, path=path)

    def verify(self) -> StoreReport:
        """Read everything in the store and return what is sound, what is not, and what crashes left behind."""
        return verify_store(self.folder)

    def check_integrity(self) -> None:
        """Read every blob. Raises ArtifactError at the first that is not what was stored."""
        for path, what in self.verify().problems:
            raise ArtifactError(f"{path}: {what}", path=path)
        for index in self._unwritten.values():
            index.check_integrity()
        assert len(self._unwritten) <= _MOST_UNWRITTEN

    @property
    def _places(self) -> str:
        """Where blobs are looked for, for a person to read."""
        return str(self.folder)

    def _paths(self, first_digits: str) -> Iterator[Path]:
        for path in self.folder.glob(f"{first_digits}/*"):
            if hash_in_name(path) and path.is_file() and not path.is_symlink() and not path.parent.is_symlink():
                yield path

    def _stored(self, passed: Passed, *, text: bool) -> Stored:
        found = passed.found
        path = blob_path(self.folder, found.sha256, text=text and found.is_utf8)
        return Stored(sha256=found.sha256, size_bytes=found.index.size_bytes, path=path, redacted=passed.redacted)

    def _make_folder(self, folder: Path) -> None:
        # Made in its own place only: where the folder above was moved away, an empty one must not appear instead.
        if not self.folder.parent.is_dir():
            raise FileNotFoundError(errno.ENOENT, "the folder that holds the store is gone (moved or deleted)")
        make_private_folder(folder)

    def _holds(self, ref: ArtifactRef) -> bool:
        # Read rather than trusted: a blob that a broken disk has changed is written anew, not cited again. So is one
        # that cannot be read; where it cannot be written either, that is the error to tell.
        try:
            with open_blob(ref.path) as file:
                return survey_blob(file).sha256 == ref.sha256
        except OSError:
            return False

    def _copy(self, file: Path, lead: bytes, ref: ArtifactRef) -> None:
        with open_regular(file) as source, publish(ref.path) as target:
            copied = redact_through(source, lead=lead, write=lambda piece: write_all(target, piece))
            if copied.found.sha256 != ref.sha256:
                raise OSError(errno.EBUSY, f"{file} was written to while it was stored. Try again")

    def _index(self, ref: ArtifactRef, file: BinaryIO) -> LineIndex:
        encoding = detect_encoding(file.read(HEAD_BYTES))
        index = self._known_index(ref, encoding)
        if index is None:
            file.seek(0)
            found = survey_blob(file)
            _require(ref, found)
            index = found.index
            self._keep_index(ref, index)
        return index

    def _known_index(self, ref: ArtifactRef, encoding: TextEncoding) -> LineIndex | None:
        if ref.size_bytes < self._index_from_bytes:
            return None
        known = self._unwritten.get(ref.sha256)
        return known or read_index(index_path(ref.path), ref.sha256, encoding, size_bytes=ref.size_bytes)

    def _keep_index(self, ref: ArtifactRef, index: LineIndex) -> None:
        """Write the index of a large blob beside it, or keep it in memory: a blob is of use without one."""
        if ref.size_bytes < self._index_from_bytes or self._known_index(ref, index.encoding) == index:
            return
        try:
            write_index(index_path(ref.path), index, ref.sha256)
            self._unwritten.pop(ref.sha256, None)
        except OSError:
            self._unwritten[ref.sha256] = index
            if len(self._unwritten) > _MOST_UNWRITTEN:
                self._unwritten.pop(next(iter(self._unwritten)), None)

    def _refusal(self, error: OSError, *, size_bytes: int | None) -> ArtifactError:
        size = "an artifact" if size_bytes is None else f"an artifact of {size_bytes:,} bytes"
        return ArtifactError(f"{size} in {self.folder}: {way_out(error)}", path=self.folder, size_bytes=size_bytes)


def _require(ref: ArtifactRef, found: Surveyed) -> None:
    if found.sha256 != ref.sha256:
        raise ArtifactError(
            f"artifact {ref.sha256} is not what was stored ({ref.size_bytes} bytes at {ref.path} now have the "
            f"SHA-256 {found.sha256}): restore the file from a backup",
            path=ref.path,
            size_bytes=ref.size_bytes,
        )


def _move(file: Path, path: Path, before: os.stat_result) -> bool:
    """Give a file its name in the store, durably; return False where it is on another file system.

    Raises OSError where it is not as it was `before` it was read, and then it has its old name.
    """
    file.chmod(FILE_MODE)
    with file.open("rb" if os.name == "posix" else "r+b") as source:
        flush_to_disk(source.fileno())
    try:
        file.replace(path)
    except OSError as error:
        if error.errno == errno.EXDEV:
            return False
        raise
    after = path.stat()
    if (after.st_size, after.st_mtime_ns) != (before.st_size, before.st_mtime_ns):
        path.replace(file)
        raise OSError(errno.EBUSY, f"{file} was written to while it was stored. Try again")
    flush_folder(path.parent)
    return True
