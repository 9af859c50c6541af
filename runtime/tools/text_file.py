"""Text files of a workspace: what encoding, which lines; a binary file is refused with its size."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO

from ...kernels.errors import ToolError
from ...kernels.text_encoding import HEAD_BYTES, TextEncoding, decode_to_utf8, detect_encoding
from ..cancel import Cancel

CHUNK_BYTES = 1 << 18
COUNT_LIMIT_BYTES = 1 << 28


@dataclass(frozen=True, slots=True)
class TextFormat:
    """How a file spells text. `crlf`: its first line ends with a carriage return and a line feed."""

    encoding: TextEncoding
    crlf: bool


def read_format(file: BinaryIO, *, path: str, size_bytes: int) -> TextFormat:
    """Return the format by the first 64 KB and go back to the start. Raises ToolError for a binary file."""
    head = file.read(HEAD_BYTES)
    file.seek(0)
    encoding = detect_encoding(head)
    text = b"".join(decode_to_utf8(iter((head[len(encoding.mark) :],)), encoding))
    if b"\0" in text:
        raise binary_file(path, size_bytes)
    first_end = text.find(b"\n")
    return TextFormat(encoding, first_end > 0 and text[first_end - 1] == ord("\r"))


def binary_file(path: str, size_bytes: int, *, line: int | None = None) -> ToolError:
    """Return the refusal of a file that holds NUL bytes."""
    where = "" if line is None else f" (NUL in line {line})"
    return ToolError(f"{path!r} is binary{where}, {size_bytes} bytes; look at it with bash: file, strings or xxd")


def read_utf8(file: BinaryIO, encoding: TextEncoding, *, cancel: Cancel | None = None) -> Iterator[bytes]:
    """Yield the text of a file from its start, as UTF-8 chunks, without its mark. Raises ToolError once cancelled."""
    file.seek(len(encoding.mark))
    return decode_to_utf8(_chunks(file, cancel), encoding)


def _chunks(file: BinaryIO, cancel: Cancel | None) -> Iterator[bytes]:
    while chunk := file.read(CHUNK_BYTES):
        if cancel is not None and cancel.is_set:
            raise ToolError("cancelled")
        yield chunk
