"""Blobs as text, against splitting the decoded whole; what has changed on the disk is not given out."""

from __future__ import annotations

import codecs
import hashlib
import io
import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chapbook.compaction.artifacts import ArtifactRef, ArtifactStore
from chapbook.compaction.stored_text import StoredText
from chapbook.kernels.errors import ArtifactError
from chapbook.kernels.line_index import BLOCK_BYTES, index_lines
from chapbook.kernels.text_encoding import UTF_8, TextEncoding

ENCODINGS = [
    UTF_8,
    TextEncoding(name="utf-8", mark=codecs.BOM_UTF8),
    TextEncoding(name="utf-16-le", mark=codecs.BOM_UTF16_LE),
    TextEncoding(name="utf-16-be"),
    TextEncoding(name="utf-32-be", mark=codecs.BOM_UTF32_BE),
]
PIECES = st.sampled_from(["a", "bc", "\n", "\n\n", "\r\n", "é", "日", "😀", "\u0a0a"])


def text_of(data: bytes, encoding: TextEncoding, *, block_bytes: int) -> StoredText:
    ref = ArtifactRef(sha256=hashlib.sha256(data).hexdigest(), size_bytes=len(data), path=Path("blob"))
    return StoredText(ref, io.BytesIO(data), index_lines(data, encoding, block_bytes=block_bytes))


def decoded(data: bytes, encoding: TextEncoding) -> bytes:
    text = data.removeprefix(encoding.mark)
    return text if encoding.unit_bytes == 1 else text.decode(encoding.name, "replace").encode()


@st.composite
def blobs(draw: st.DrawFn) -> tuple[bytes, TextEncoding]:
    """Text with bytes here and there that do not decode."""
    encoding = draw(st.sampled_from(ENCODINGS))
    odd = st.sampled_from([b"\xff", b"\xc3", b"\x80"] if encoding.unit_bytes == 1 else [b"\xd8" * encoding.unit_bytes])
    parts = draw(st.lists(PIECES.map(lambda text: text.encode(encoding.name)) | odd, max_size=25))
    return encoding.mark + b"".join(parts) + draw(st.binary(max_size=encoding.unit_bytes - 1)), encoding


@given(blobs(), st.sampled_from([4, 8, 64]), st.integers(1, 30), st.integers(0, 12))
def test_any_line_is_read_from_any_place_in_it(
    blob: tuple[bytes, TextEncoding], block_bytes: int, from_line: int, skip_bytes: int
) -> None:
    data, encoding = blob
    whole = decoded(data, encoding)
    lines = whole.split(b"\n")
    with text_of(data, encoding, block_bytes=block_bytes) as text:
        text.check_integrity()
        assert text.line_count == len(lines) - (not lines[-1])
        assert text.ends_with_newline == (not lines[-1])
        assert b"".join(text.chunks()) == whole
        line = lines[from_line - 1] if from_line <= len(lines) else b""
        assert b"".join(text.raw(skip_bytes)) == data[skip_bytes:]
        rest = b"\n".join([line[min(skip_bytes, len(line)) :], *lines[from_line:]])
        assert b"".join(text.chunks(from_line=from_line, skip_bytes=skip_bytes)) == rest


@pytest.mark.parametrize("name", ["utf-8", "utf-16-le", "utf-16-be", "utf-32-le"])
def test_a_large_text_of_any_encoding_is_read_from_the_middle_of_a_long_line(store: ArtifactStore, name: str) -> None:
    lines = [f"line {number} é" for number in range(1, 200_001)]
    lines[99_999] = "ä" * 600_000 + "needle" + "ö" * 10
    mark = "\ufeff" if name != "utf-8" else ""
    ref = store.put((mark + "\n".join(lines)).encode(name))
    with store.open_text(ref) as text:
        assert (text.line_count, text.ends_with_newline, text.is_binary) == (200_000, False, False)
        assert text.encoding.name == name
        taken = b"".join(text.chunks(from_line=100_000, skip_bytes=1_200_000))
        assert taken.startswith(b"needle" + "ö".encode() * 10 + b"\nline 100001 ")
        assert b"".join(text.chunks(from_line=199_999)).decode() == "line 199999 é\nline 200000 é"
        assert b"".join(text.chunks(from_line=200_000, skip_bytes=1 << 40)) == b""
        assert b"".join(text.chunks(from_line=200_001)) == b""
        assert max(map(len, text.chunks())) <= 2 * BLOCK_BYTES


def test_carriage_returns_and_colour_codes_are_part_of_their_lines(store: ArtifactStore) -> None:
    with store.open_text(store.put(b"\x1b[31mred\x1b[0m\r\nbar\rbar\r\n\x0c\xe2\x80\xa8\n")) as text:
        assert text.line_count == 3
        assert not text.is_binary
        assert b"".join(text.chunks(from_line=2)) == b"bar\rbar\r\n\x0c\xe2\x80\xa8\n"


def test_invalid_bytes_are_kept_in_text_with_its_lines_right(store: ArtifactStore) -> None:
    data = b"caf\xe9\nna\xefve\n\xff\xfe\nplain ascii\n" * 20
    ref = store.put(data)
    assert ref.path.suffix == ".bin"
    with store.open_text(ref) as text:
        assert not text.is_binary
        assert text.line_count == 80
        assert b"".join(text.chunks(from_line=2)).startswith(b"na\xefve\n\xff\xfe\n")


@pytest.mark.parametrize(
    ("data", "is_binary"),
    [
        (b"", False),
        (b"text\n", False),
        ("日本語のテキスト".encode(), False),
        ("Grüße\n".encode("utf-16"), False),
        ("a\0b\n".encode("utf-16"), True),
        (b"text\0text", True),
        (b"x" * BLOCK_BYTES + b"\0", False),  # only the head is looked at
        (b"x" * (BLOCK_BYTES - 1) + "é".encode(), False),  # cut within a character
        (bytes(range(1, 32)) * 50, True),
        (random.Random(1).randbytes(5000).replace(b"\0", b"\1"), False),  # as text in some encoding may look
        ("Привет, мир\n".encode("cp1251") * 50, False),
        ("日本語のテキスト".encode("shift_jis") * 50, False),
        ("中文文本".encode("gb18030") * 50, False),
        (b"\x89PNG\r\n\x1a\n" + b"\x01\x02\x03\xff" * 200, True),
        (b"\x1b[1m" * 500, False),
    ],
)
def test_binary_is_told_by_the_head(store: ArtifactStore, data: bytes, is_binary: bool) -> None:
    with store.open_text(store.put(data)) as text:
        assert text.is_binary == is_binary
        assert b"".join(text.chunks()) == decoded(data, text.encoding)  # it can be read all the same
        assert b"".join(text.raw()) == data


def test_a_read_touches_only_the_blocks_that_it_needs(store: ArtifactStore) -> None:
    ref = store.put(b"".join(b"line %07d\n" % number for number in range(1, 500_001)))  # 13 bytes a line
    line = 400_000
    block = (line - 1) * 13 // BLOCK_BYTES
    with ref.path.open("r+b") as file:
        file.write(b"!" * (block * BLOCK_BYTES))
        file.seek((block + 1) * BLOCK_BYTES)
        file.write(b"!" * (ref.size_bytes - (block + 1) * BLOCK_BYTES))
    with store.open_text(ref) as text:
        chunks = text.chunks(from_line=line)
        assert next(chunks).startswith(b"line 0400000\n")
        with pytest.raises(ArtifactError, match="have changed"):
            next(chunks)


def test_what_was_altered_after_it_was_opened_is_not_given_out(store: ArtifactStore) -> None:
    ref = store.put(b"line\n" * 500_000)
    with store.open_text(ref) as text:
        with ref.path.open("r+b") as file:
            file.seek(10 * BLOCK_BYTES + 7)
            file.write(b"?")
        chunks = text.chunks()
        assert sum(len(next(chunks)) for _ in range(10)) == 10 * BLOCK_BYTES
        with pytest.raises(ArtifactError, match=r"2,500,000 bytes .* 655,360 to 720,895 have changed") as refused:
            next(chunks)
        assert (refused.value.path, refused.value.size_bytes) == (ref.path, ref.size_bytes)
        assert len(b"".join(text.chunks(from_line=400_000))) == 5 * 100_001
        with pytest.raises(ArtifactError, match="have changed"):
            text.check_integrity()
        with ref.path.open("r+b") as file:
            file.truncate(720_896)
        with pytest.raises(ArtifactError, match=r"720,896 to 786,431 have changed"):
            next(text.chunks(from_line=150_000))


def test_a_small_text_that_is_open_stays_as_it_was(store: ArtifactStore) -> None:
    ref = store.put(b"one\ntwo\n")
    with store.open_text(ref) as text:
        ref.path.write_bytes(b"one\nTWO\n")
        assert b"".join(text.chunks(from_line=2)) == b"two\n"
    with pytest.raises(ArtifactError, match="is not what was stored"):
        store.open_text(ref)


def test_two_readings_of_one_text_do_not_disturb_each_other(store: ArtifactStore) -> None:
    data = b"".join(b"%d\n" % number for number in range(300_000))
    with store.open_text(store.put(data)) as text:
        first, second = bytearray(), bytearray()
        for one, other in zip(text.chunks(), text.chunks(), strict=True):
            first += one
            second += other
    assert first == second == data


def test_numbers_out_of_range_are_refused_before_anything_is_read(store: ArtifactStore) -> None:
    with store.open_text(store.put(b"one\n")) as text:
        for options in ({"from_line": 0}, {"skip_bytes": -1}):
            with pytest.raises(ValueError, match="lines count from 1"):
                text.chunks(**options)


def test_an_index_that_is_not_that_of_the_text_is_refused() -> None:
    data = b"a\nb\nc\nd\n" * 4
    index = index_lines(data, UTF_8, block_bytes=8)
    index.feeds_before[1:3] += 4
    text = StoredText(text_of(data, UTF_8, block_bytes=8).ref, io.BytesIO(data), index)
    with pytest.raises(ArtifactError, match=r"its line index is wrong .* Remove the \.idx file"):
        text.chunks(from_line=7)


def test_closing_closes_the_file_and_can_be_repeated(store: ArtifactStore) -> None:
    text = store.open_text(store.put(b"x\n" * 600_000))
    text.close()
    text.close()
    with pytest.raises(ValueError, match="closed"):
        next(text.chunks())
