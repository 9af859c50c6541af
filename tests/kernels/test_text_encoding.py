"""Which encoding a head tells, and texts of any encoding as UTF-8, however they are cut."""

from __future__ import annotations

import codecs
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chapbook.kernels.text_encoding import UTF_8, TextEncoding, decode_to_utf8, decode_with_marks, detect_encoding

MARKS = {
    "utf-8": codecs.BOM_UTF8,
    "utf-16-le": codecs.BOM_UTF16_LE,
    "utf-16-be": codecs.BOM_UTF16_BE,
    "utf-32-le": codecs.BOM_UTF32_LE,
    "utf-32-be": codecs.BOM_UTF32_BE,
}
TEXTS = st.text(st.characters(codec="utf-8"), max_size=20)


@given(st.sampled_from(sorted(MARKS)), TEXTS)
def test_a_byte_order_mark_decides(name: str, text: str) -> None:
    # A NUL behind the mark of UTF-16 makes it that of UTF-32, by the bytes alone.
    text = text.lstrip("\0")
    assert detect_encoding(MARKS[name] + text.encode(name)) == TextEncoding(name=name, mark=MARKS[name])


@pytest.mark.parametrize("name", ["utf-16-le", "utf-16-be"])
@pytest.mark.parametrize("text", ["An unmarked text\r\n", "Grüße aus der Küche, schön.", "\t1,5\n" * 40])
def test_utf_16_without_a_mark_is_told_by_its_nuls(name: str, text: str) -> None:
    assert detect_encoding(text.encode(name)) == TextEncoding(name=name)
    assert detect_encoding(text.encode(name) + b"\0") == TextEncoding(name=name)


@pytest.mark.parametrize(
    "head",
    [
        b"",
        b"plain",
        "Grüße, 日本語".encode(),
        "too short".encode("utf-16-le")[:14],
        b"\0" * 4096,
        bytes(range(256)) * 8,
        random.Random(1).randbytes(4096),
        b"\x7fELF\x02\x01\x01\0\0\0\0\0\0\0\0\0\x03\0\x3e\0\x01\0\0\0" * 20,
        "日本語の文書には".encode("utf-16-le") * 40,
    ],
)
def test_what_nothing_says_otherwise_of_is_utf_8(head: bytes) -> None:
    assert detect_encoding(head) == UTF_8


def test_units_and_line_feeds_fit_the_encoding() -> None:
    for name, unit_bytes in (("utf-8", 1), ("utf-16-le", 2), ("utf-16-be", 2), ("utf-32-le", 4), ("utf-32-be", 4)):
        encoding = TextEncoding(name=name)
        assert encoding.unit_bytes == len(encoding.line_feed) == unit_bytes
        assert encoding.line_feed.decode(name) == "\n"


@given(st.sampled_from(sorted(MARKS)), TEXTS, st.lists(st.integers(0, 5), max_size=20))
def test_a_text_comes_out_as_utf_8_however_it_is_cut(name: str, text: str, sizes: list[int]) -> None:
    data, chunks = text.encode(name), []
    for size in sizes:
        chunks.append(data[:size])
        data = data[size:]
    assert b"".join(decode_to_utf8(iter([*chunks, data]), TextEncoding(name=name))) == text.encode()


def test_utf_8_passes_as_it_is_and_what_else_does_not_decode_is_replaced() -> None:
    chunks = [b"a\xff", b"\xc3"]
    assert list(decode_to_utf8(iter(chunks), UTF_8)) == chunks
    lone = "a".encode("utf-16-le") + b"\x00\xd8" + "\n".encode("utf-16-le") + b"b"
    decoded = b"".join(decode_to_utf8(iter([lone[:3], lone[3:]]), TextEncoding(name="utf-16-le")))
    assert decoded.decode() == "a\ufffd\n\ufffd"


def test_marks_stand_for_nuls_and_for_what_does_not_decode() -> None:
    assert decode_with_marks(b"a\0\xffb\r") == "a\ufffd\ufffdb\r"
    assert decode_with_marks("日\x1b\x01".encode()) == "日\x1b\x01"
