"""What encoding a text is in, told from its first bytes, and its way into UTF-8 chunk by chunk."""

from __future__ import annotations

import codecs
from collections.abc import Iterator
from typing import Final

import msgspec
import numpy as np

HEAD_BYTES: Final = 1 << 16
"""How much of a file is enough to tell its encoding."""

# The longest marks first: that of UTF-32 starts with that of UTF-16.
_MARKS = (
    (codecs.BOM_UTF8, "utf-8"),
    (codecs.BOM_UTF32_LE, "utf-32-le"),
    (codecs.BOM_UTF32_BE, "utf-32-be"),
    (codecs.BOM_UTF16_LE, "utf-16-le"),
    (codecs.BOM_UTF16_BE, "utf-16-be"),
)
_LEAST_UNMARKED_UNITS = 8
_ASCII_SHARE = 0.7


class TextEncoding(msgspec.Struct, frozen=True, kw_only=True):
    """How a file spells text: a codec's name, and the byte order mark that it begins with, empty for none."""

    name: str
    mark: bytes = b""

    @property
    def unit_bytes(self) -> int:
        """The bytes of a code unit: a line feed takes that many, at a multiple of them."""
        return {"utf-16": 2, "utf-32": 4}.get(self.name[:6], 1)

    @property
    def line_feed(self) -> bytes:
        """A line feed in this encoding."""
        return "\n".encode(self.name)


UTF_8: Final = TextEncoding(name="utf-8")


def detect_encoding(head: bytes) -> TextEncoding:
    """Return the encoding of a file that begins with `head`; UTF-8 where nothing says otherwise.

    A byte order mark decides. UTF-16 without one is told by its NULs, which stand in every other byte of text in
    Latin letters.
    """
    for mark, name in _MARKS:
        if head.startswith(mark):
            return TextEncoding(name=name, mark=mark)
    return _unmarked_utf16(head) or UTF_8


def decode_to_utf8(chunks: Iterator[bytes], encoding: TextEncoding) -> Iterator[bytes]:
    """Yield what follows the mark as UTF-8; `chunks` begin behind it. UTF-8 passes as it is, valid or not."""
    if encoding.unit_bytes == 1:
        yield from chunks
        return
    decoder = codecs.getincrementaldecoder(encoding.name)("replace")
    for chunk in chunks:
        yield decoder.decode(chunk).encode()
    if rest := decoder.decode(b"", final=True):
        yield rest.encode()


def decode_with_marks(data: bytes) -> str:
    """Return UTF-8 as it is shown to a model or a person: with U+FFFD for NULs and for what does not decode."""
    return data.decode(errors="replace").replace("\0", "\ufffd")


def _unmarked_utf16(head: bytes) -> TextEncoding | None:
    units = np.frombuffer(head[: len(head) // 2 * 2], dtype=np.uint8).reshape(-1, 2)
    if len(units) < _LEAST_UNMARKED_UNITS:
        return None
    for name, letter, zero in (("utf-16-le", units[:, 0], units[:, 1]), ("utf-16-be", units[:, 1], units[:, 0])):
        ascii_text = (letter >= 0x20) & (letter < 0x7F) | (letter >= 0x09) & (letter <= 0x0D)
        if np.mean((zero == 0) & ascii_text) >= _ASCII_SHARE:
            return TextEncoding(name=name)
    return None
