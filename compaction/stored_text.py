"""A stored blob as text: from any line on, as UTF-8, each block checked before a byte of it is given out.

It reads and verifies only the blocks that it touches, by the blob's line index.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cached_property
from types import TracebackType
from typing import TYPE_CHECKING, BinaryIO, Self

from ..kernels.errors import ArtifactError
from ..kernels.line_index import LineIndex
from ..kernels.text_encoding import TextEncoding, decode_to_utf8
from .durable_files import way_out

if TYPE_CHECKING:
    from .artifacts import ArtifactRef

_NOT_TEXT_SHARE = 0.3
# Controls but for white space and what terminals are sent: bell, backspace, escape. What does not decode is no sign:
# text in an older encoding (windows-1251, Shift JIS, GB 18030, Latin-1) is mostly that.
_NOT_TEXT = re.compile("[\x00-\x06\x0e-\x1a\x1c-\x1f\x7f-\x84\x86-\x9f]")


class StoredText:
    """The text of a blob, read by lines in bounded memory. A binary blob can be read by lines too.

    `file` is the blob, at any position, and is closed with it; `index` was made from the content that `ref` names.
    Made by `ArtifactStore.open_text`.
    """

    def __init__(self, ref: ArtifactRef, file: BinaryIO, index: LineIndex) -> None:
        self.ref = ref
        self._file = file
        self._index = index

    @property
    def encoding(self) -> TextEncoding:
        """How the blob spells its text."""
        return self._index.encoding

    @property
    def line_count(self) -> int:
        """How many lines there are; the last one counts without a line feed too."""
        return self._index.line_count

    @property
    def ends_with_newline(self) -> bool:
        """Whether the last line has its line feed, or there is no line."""
        return self._index.ends_with_newline

    @cached_property
    def is_binary(self) -> bool:
        """Whether the first 64 KB hold a NUL once decoded, or are mostly controls. Raises ArtifactError as `chunks`."""
        head = self._block(0)[len(self.encoding.mark) :] if self._index.size_bytes else b""
        text = b"".join(decode_to_utf8(iter((head,)), self.encoding)).decode(errors="replace")
        return "\0" in text or len(_NOT_TEXT.findall(text)) > _NOT_TEXT_SHARE * len(text)

    def chunks(self, *, from_line: int = 1, skip_bytes: int = 0) -> Iterator[bytes]:
        """Yield the text from a line on, as UTF-8, from `skip_bytes` bytes into that line or else its line feed.

        Past the last line there is nothing. Raises ArtifactError where the blob is not what was stored, before any
        byte of the block that has changed, and ValueError where a number is out of range.
        """
        if from_line < 1 or skip_bytes < 0:
            raise ValueError(f"lines count from 1 and bytes from 0, not {from_line} and {skip_bytes}")
        if from_line > self.line_count:
            return iter(())
        start = self._line_start(from_line)
        if self.encoding.unit_bytes == 1:
            return self.raw(min(start + skip_bytes, self._line_end(from_line)) if skip_bytes else start)
        decoded = decode_to_utf8(self.raw(start), self.encoding)
        return _skip_in_line(decoded, skip_bytes) if skip_bytes else decoded

    def raw(self, start: int = 0) -> Iterator[bytes]:
        """Yield the bytes [start, size) as they are stored. Raises ArtifactError as `chunks` does."""
        block_bytes = self._index.block_bytes
        for block in range(start // block_bytes, len(self._index.block_hashes)):
            data = self._block(block)
            yield data[start - block * block_bytes :] if start > block * block_bytes else data

    def close(self) -> None:
        """Close the blob; it can be called again."""
        self._file.close()

    def check_integrity(self) -> None:
        """Assert that index and reference agree, and read every block. Raises ArtifactError as `chunks` does."""
        self._index.check_integrity()
        assert self._index.size_bytes == self.ref.size_bytes
        for block in range(len(self._index.block_hashes)):
            self._block(block)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _line_start(self, line: int) -> int:
        return self._behind_feed(line - 1) if line > 1 else len(self.encoding.mark)

    def _line_end(self, line: int) -> int:
        """Return the offset of the line's line feed, of one byte, or that of the end."""
        return self._behind_feed(line) - 1 if line <= self._index.feeds else self._index.size_bytes

    def _behind_feed(self, number: int) -> int:
        block = self._index.block_of_feed(number)
        data = self._block(block)
        try:
            return self._index.behind_feed(number, block, data)
        except ValueError as error:
            raise self._refusal(f"its line index is wrong ({error}). Remove the .idx file beside it") from error

    def _block(self, block: int) -> bytes:
        span = self._index.block_span(block)
        try:
            self._file.seek(span.start)
            data = self._file.read(len(span))
        except OSError as error:
            raise self._refusal(f"bytes from {span.start:,} on cannot be read: {way_out(error)}") from error
        if not self._index.holds_block(block, data):
            raise self._refusal(
                f"it is not what was stored, some of the bytes {span.start:,} to {span.stop - 1:,} have changed. "
                "Restore the file from a backup"
            )
        return data

    def _refusal(self, what: str) -> ArtifactError:
        ref = self.ref
        message = f"artifact {ref.sha256} of {ref.size_bytes:,} bytes at {ref.path}: {what}"
        return ArtifactError(message, path=ref.path, size_bytes=ref.size_bytes)


def _skip_in_line(chunks: Iterator[bytes], size_bytes: int) -> Iterator[bytes]:
    """Yield `chunks` without the first `size_bytes` bytes, but from the first line feed on at the latest."""
    for chunk in chunks:
        newline = chunk.find(b"\n", 0, size_bytes)
        passed = newline if newline >= 0 else min(size_bytes, len(chunk))
        size_bytes = 0 if newline >= 0 else size_bytes - passed
        if passed < len(chunk):
            yield chunk[passed:]
        if not size_bytes:
            break
    yield from chunks
