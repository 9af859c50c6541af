"""Line feeds by blocks, against a plain reference that walks the code units."""

from __future__ import annotations

import codecs

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from chapbook.kernels.line_index import BLOCK_BYTES, LineIndexer, index_lines, index_lines_reference
from chapbook.kernels.text_encoding import UTF_8, TextEncoding

ENCODINGS = [
    UTF_8,
    TextEncoding(name="utf-8", mark=codecs.BOM_UTF8),
    TextEncoding(name="utf-16-le", mark=codecs.BOM_UTF16_LE),
    TextEncoding(name="utf-16-be"),
    TextEncoding(name="utf-32-le"),
    TextEncoding(name="utf-32-be", mark=codecs.BOM_UTF32_BE),
]
# In UTF-16 the first two of these hold the byte of a line feed without being one.
CHARACTERS = st.sampled_from(["\u0a41", "\u410a", "\n", "\n\n", "\r\n", "a", "é", "😀"])


@st.composite
def texts(draw: st.DrawFn) -> tuple[bytes, TextEncoding]:
    """Bytes that begin with their mark, and may end within a code unit."""
    encoding = draw(st.sampled_from(ENCODINGS))
    text = "".join(draw(st.lists(CHARACTERS, max_size=20)))
    torn = draw(st.binary(max_size=encoding.unit_bytes - 1))
    return encoding.mark + text.encode(encoding.name) + torn, encoding


BLOCKS = st.sampled_from([4, 8, 12, 64])


@given(texts(), BLOCKS, st.lists(st.integers(0, 9), max_size=20))
def test_an_index_is_that_of_the_reference_however_the_chunks_come(
    text: tuple[bytes, TextEncoding], block_bytes: int, sizes: list[int]
) -> None:
    data, encoding = text
    indexer = LineIndexer(encoding, block_bytes=block_bytes)
    at = 0
    for size in [*sizes, len(data)]:
        indexer.feed(data[at : at + size])
        indexer.check_integrity()
        at += size
    index = indexer.finish()
    index.check_integrity()
    assert index == index_lines_reference(data, encoding, block_bytes=block_bytes)
    assert index == index_lines(data, encoding, block_bytes=block_bytes)


@given(texts(), BLOCKS)
def test_each_line_begins_where_splitting_the_text_says(text: tuple[bytes, TextEncoding], block_bytes: int) -> None:
    data, encoding = text
    index = index_lines(data, encoding, block_bytes=block_bytes)
    lines = data[len(encoding.mark) :].decode(encoding.name, "replace").split("\n")
    assert index.feeds == len(lines) - 1
    assert index.line_count == len(lines) - (not lines[-1])
    assert index.ends_with_newline == (not lines[-1])
    start = len(encoding.mark)
    for number in range(1, index.feeds + 1):
        # None of what is replaced is before a line feed, so encoding gives the bytes that were there.
        start += len((lines[number - 1] + "\n").encode(encoding.name))
        block = index.block_of_feed(number)
        span = index.block_span(block)
        assert index.behind_feed(number, block, data[span.start : span.stop]) == start


@given(texts().filter(lambda text: text[0]), BLOCKS, st.data())
def test_a_changed_or_cut_block_is_told_and_only_that_one(
    text: tuple[bytes, TextEncoding], block_bytes: int, draw: st.DataObject
) -> None:
    data, encoding = text
    index = index_lines(data, encoding, block_bytes=block_bytes)
    place = draw.draw(st.integers(0, len(data) - 1))
    changed = bytearray(data)
    changed[place] ^= draw.draw(st.integers(1, 255))
    for block in range(len(index.block_hashes)):
        span = index.block_span(block)
        assert index.holds_block(block, bytes(changed[span.start : span.stop])) == (place not in span)
        assert not index.holds_block(block, data[span.start : span.stop - 1])


class Indexing(RuleBasedStateMachine):
    """The reference is the bytes fed so far."""

    @initialize(encoding=st.sampled_from(ENCODINGS))
    def begin(self, encoding: TextEncoding) -> None:
        self.encoding = encoding
        self.indexer = LineIndexer(encoding, block_bytes=8)
        self.fed = b""

    @rule(chunk=st.binary(max_size=20) | st.sampled_from([b"\n", b"\n\0", b"\0\0\0\n"]))
    def feed(self, chunk: bytes) -> None:
        self.indexer.feed(chunk)
        self.fed += chunk

    @invariant()
    def it_is_sound(self) -> None:
        self.indexer.check_integrity()

    def teardown(self) -> None:
        index = self.indexer.finish()
        # The mark is whatever the first bytes were.
        assert index.size_bytes == len(self.fed)
        assert index.feeds == index_lines_reference(self.fed, self.encoding, block_bytes=8).feeds


TestIndexing = Indexing.TestCase
TestIndexing.settings = settings(max_examples=30, stateful_step_count=10, deadline=None)


def test_an_empty_text_has_no_line_and_one_of_a_mark_alone_neither() -> None:
    for data, encoding in ((b"", UTF_8), (codecs.BOM_UTF16_LE, ENCODINGS[2])):
        index = index_lines(data, encoding)
        index.check_integrity()
        assert (index.line_count, index.ends_with_newline) == (0, True)


def test_an_index_takes_sixteen_bytes_a_block_however_short_the_lines() -> None:
    index = index_lines(b"\n" * (4 * BLOCK_BYTES), UTF_8)
    assert index.feeds_before.tolist() == [BLOCK_BYTES * block for block in range(5)]
    assert index.feeds_before.nbytes + index.block_hashes.nbytes == 4 * 16 + 8


def test_a_line_feed_that_a_block_does_not_have_is_refused() -> None:
    index = index_lines(b"a\nb\n" * 4, UTF_8, block_bytes=8)
    with pytest.raises(ValueError, match="block 1 has 1 line feeds, so line feed 6 is not in it"):
        index.behind_feed(6, 1, b"........\n")


def test_blocks_that_would_cut_code_units_are_refused() -> None:
    for block_bytes in (0, 6):
        with pytest.raises(ValueError, match="cuts code units of 4"):
            LineIndexer(ENCODINGS[4], block_bytes=block_bytes)


def test_indexes_of_other_texts_are_not_equal() -> None:
    index = index_lines(b"a\nb\n", UTF_8)
    assert len({index, index_lines(b"a\nb\n", UTF_8)}) == 1
    assert index != index_lines(b"a\nc\n", UTF_8)
    assert index != index_lines(b"a\nb\n", UTF_8, block_bytes=4096)
    assert index != np.zeros(1)
