"""The artifact store: immutable blobs, each named by the SHA-256 of its bytes.

``<folder>/<first 2 hex>/<sha256>.<txt|bin>``. A name is there only once the whole content is on the disk, so a crash
leaves a temporary file that nothing cites, never a citation of half a blob. Content is verified when read.
"""

from __future__ import annotations

import codecs
import errno
import hashlib
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, NewType

import msgspec

from ..kernels.errors import ArtifactError
from ..kernels.line_index import LineIndexer
from ..kernels.text_encoding import HEAD_BYTES, detect_encoding
from .durable_files import FILE_MODE, flush_folder, flush_to_disk, make_private_folder, publish, way_out, write_all
from .stored_text import StoredText

Sha256 = NewType("Sha256", str)
"""64 lower-case hex digits."""

_CHUNK_BYTES = 1 << 20
_SHA256 = re.compile(r"[0-9a-f]{64}")


class ArtifactRef(msgspec.Struct, frozen=True, kw_only=True):
    """Where a blob is, and what it must be."""

    sha256: Sha256
    size_bytes: int
    path: Path


class ArtifactStore:
    """A content-addressed store in `folder`, which is created by the first write, in a folder that is there.

    It keeps nothing in memory.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def put(self, data: bytes, *, text: bool = True) -> ArtifactRef:
        """Store `data` and return its reference; content that is there already is not written again.

        Content that is not UTF-8 is stored as binary, whatever `text` says. Raises ArtifactError where it cannot be
        written, with nothing left of it.
        """
        digest = Sha256(hashlib.sha256(data).hexdigest())
        ref = self._ref(digest, len(data), text=text and _is_utf8(data))
        try:
            if not self._holds(ref):
                self._make_folder(ref.path.parent)
                with publish(ref.path) as file:
                    write_all(file, data)
        except OSError as error:
            raise self._refusal(error, size_bytes=len(data)) from error
        return ref

    def adopt(self, file: Path, *, text: bool = True) -> ArtifactRef:
        """Take over a regular file that nobody writes to any more; its old name is gone afterwards.

        It is read once, moved where store and file share a file system, copied otherwise, never held in memory.
        Raises ArtifactError, and then `file` is where it was.
        """
        size_bytes = None
        try:
            if not stat.S_ISREG(file.lstat().st_mode):
                raise ArtifactError(f"{file} is not a regular file: only those can be stored", path=file)
            size_bytes = file.stat().st_size
            ref = self._survey(file, text=text)
            if self._holds(ref):
                file.unlink()
                return ref
            self._make_folder(ref.path.parent)
            self._move(file, ref)
        except OSError as error:
            raise self._refusal(error, size_bytes=size_bytes) from error
        return ref

    def find(self, sha256: str) -> ArtifactRef:
        """Return the reference of a stored blob, not yet verified. Raises ArtifactError where there is none."""
        if not _SHA256.fullmatch(sha256):
            raise ArtifactError(f"{sha256[:80]!r} is not a SHA-256 of 64 lower-case hex digits", path=self.folder)
        for text in (True, False):
            path = self._path(Sha256(sha256), text=text)
            try:
                return ArtifactRef(sha256=Sha256(sha256), size_bytes=path.stat().st_size, path=path)
            except FileNotFoundError:
                continue
            except OSError as error:
                raise self._refusal(error, size_bytes=None) from error
        raise ArtifactError(f"no artifact {sha256} in {self.folder}", path=self.folder)

    def read(self, sha256: str) -> bytes:
        """Return the content. Raises ArtifactError where there is none, or where it is not what was stored."""
        with self.open(sha256) as file:
            return file.read()

    def open(self, sha256: str) -> BinaryIO:
        """Return the content as an open file, verified first. Raises ArtifactError as `read` does."""
        return self._open_verified(self.find(sha256))

    def open_text(self, ref: ArtifactRef) -> StoredText:
        """Return the blob as text, read by lines. Raises ArtifactError where it is not what was stored."""
        file = self._open_verified(ref)
        try:
            indexer = LineIndexer(detect_encoding(file.read(HEAD_BYTES)))
            file.seek(0)
            for chunk in iter(lambda: file.read(_CHUNK_BYTES), b""):
                indexer.feed(chunk)
            return StoredText(ref, file, indexer.finish())
        except BaseException:
            file.close()
            raise

    def refs(self) -> Iterator[ArtifactRef]:
        """Give every blob of the store, by hash, not yet verified."""
        for path in sorted(self.folder.glob("??/*")):
            if _SHA256.fullmatch(path.stem) and path.suffix in (".txt", ".bin"):
                yield ArtifactRef(sha256=Sha256(path.stem), size_bytes=path.stat().st_size, path=path)

    def check_integrity(self) -> None:
        """Read every blob. Raises ArtifactError at the first that is not what was stored."""
        for ref in self.refs():
            self._open_verified(ref).close()

    def _open_verified(self, ref: ArtifactRef) -> BinaryIO:
        try:
            file = ref.path.open("rb")
            try:
                found = hashlib.file_digest(file, "sha256").hexdigest()
                file.seek(0)
            except OSError:
                file.close()
                raise
        except OSError as error:
            raise self._refusal(error, size_bytes=ref.size_bytes) from error
        if found != ref.sha256:
            file.close()
            raise ArtifactError(
                f"artifact {ref.sha256} is not what was stored ({ref.size_bytes} bytes at {ref.path} now have the "
                f"SHA-256 {found}): restore the file from a backup",
                path=ref.path,
                size_bytes=ref.size_bytes,
            )
        return file

    def _path(self, sha256: Sha256, *, text: bool) -> Path:
        return self.folder / sha256[:2] / f"{sha256}.{'txt' if text else 'bin'}"

    def _ref(self, sha256: Sha256, size_bytes: int, *, text: bool) -> ArtifactRef:
        return ArtifactRef(sha256=sha256, size_bytes=size_bytes, path=self._path(sha256, text=text))

    def _survey(self, file: Path, *, text: bool) -> ArtifactRef:
        digest, size_bytes = hashlib.sha256(), 0
        decoder = codecs.getincrementaldecoder("utf-8")()
        with file.open("rb") as source:
            for chunk in iter(lambda: source.read(_CHUNK_BYTES), b""):
                digest.update(chunk)
                size_bytes += len(chunk)
                text = text and _decodes(decoder, chunk)
        text = text and _decodes(decoder, b"", final=True)
        return self._ref(Sha256(digest.hexdigest()), size_bytes, text=text)

    def _make_folder(self, folder: Path) -> None:
        # Made in its own place only: where the folder above was moved away, an empty one must not appear instead.
        if not self.folder.parent.is_dir():
            raise FileNotFoundError(errno.ENOENT, "the folder that holds the store is gone (moved or deleted)")
        make_private_folder(folder)

    def _holds(self, ref: ArtifactRef) -> bool:
        # Read rather than trusted: a blob that a broken disk has changed is written anew, not cited again.
        try:
            with ref.path.open("rb") as file:
                return hashlib.file_digest(file, "sha256").hexdigest() == ref.sha256
        except FileNotFoundError:
            return False

    def _move(self, file: Path, ref: ArtifactRef) -> None:
        with file.open("rb" if os.name == "posix" else "r+b") as source:
            flush_to_disk(source.fileno())
        try:
            file.replace(ref.path)
        except OSError as error:
            if error.errno != errno.EXDEV:
                raise
        else:
            ref.path.chmod(FILE_MODE)
            flush_folder(ref.path.parent)
            return
        with file.open("rb") as source, publish(ref.path) as target:
            for chunk in iter(lambda: source.read(_CHUNK_BYTES), b""):
                write_all(target, chunk)
        file.unlink()

    def _refusal(self, error: OSError, *, size_bytes: int | None) -> ArtifactError:
        size = "an artifact" if size_bytes is None else f"an artifact of {size_bytes:,} bytes"
        return ArtifactError(f"{size} in {self.folder}: {way_out(error)}", path=self.folder, size_bytes=size_bytes)


def _is_utf8(data: bytes) -> bool:
    return _decodes(codecs.getincrementaldecoder("utf-8")(), data, final=True)


def _decodes(decoder: codecs.IncrementalDecoder, chunk: bytes, *, final: bool = False) -> bool:
    try:
        decoder.decode(chunk, final)
    except UnicodeDecodeError:
        return False
    return True
