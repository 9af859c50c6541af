"""Pages laid out directly: what is counted is what is shown, and the smallest page is a whole character."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from chapbook.kernels.errors import ToolError
from chapbook.kernels.lines import LineReader
from chapbook.kernels.text_encoding import UTF_8
from chapbook.runtime.tools.page import Page, PageLayout, fit_page, take_lines, take_window

MARK_TOKENS = 7


def count(text: str) -> int:
    """A token for each character, and more for U+FFFD; none for a NUL, which is never shown."""
    return sum(MARK_TOKENS if character == "\ufffd" else character != "\0" for character in text)


def read(data: bytes) -> LineReader:
    chunks: Iterator[bytes] = iter([data])
    return LineReader(chunks)


@pytest.mark.parametrize("line", [b"\0" * 5000, b"\xff" * 5000, b"\0a" * 5000, "日".encode() * 5000])
def test_marks_are_counted_as_they_are_shown(line: bytes) -> None:
    for data in (line, line + b"\n", (line[:9] + b"\n") * 500):
        for taken in (
            take_lines(read(data), 1, most_lines=400, most_bytes=1 << 16),
            take_window(read(data), 1, 2, most_bytes=1 << 16),
        ):
            page = PageLayout(count_tokens=count).lay_out(taken, budget_tokens=120)
            assert 0 < count("\n".join(page.shown)) <= 120
            text = fit_page(PageLayout(count_tokens=count), taken, budget_tokens=60, footer=lambda page: page.place)
            assert count(text) <= 60


@pytest.mark.parametrize("character", ["日", "\U0001f600", "é", "a"])
def test_the_smallest_page_is_a_whole_character(character: str) -> None:
    size_bytes = len(character.encode())
    page = PageLayout(count_tokens=count).lay_out(
        take_window(read(character.encode() * 9), 1, 1 + size_bytes, most_bytes=1 << 16), budget_tokens=1
    )
    assert (page.shown, page.next_column) == ((f"1\t{character}",), 1 + 2 * size_bytes)


def test_a_carriage_return_within_a_line_is_shown_where_a_page_ends_behind_it() -> None:
    layout = PageLayout(count_tokens=len, crlf=True)
    for column, shown, next_column in ((2, "bc\r", 5), (5, "def", 0)):
        taken = take_window(read(b"abc\rdef\r\n"), 1, column, most_bytes=1 << 16)
        page = layout.lay_out(taken, budget_tokens=5 if next_column else 9)
        assert (page.shown, page.next_column) == ((f"1\t{shown}",), next_column)


def test_a_page_is_found_where_a_text_counts_more_than_its_parts() -> None:
    def count_whole(text: str) -> int:
        return len(text) * (10 if "]" in text and len(text) > 30 else 1)

    def footer(page: Page) -> str:
        return f"[{page.last_line}]"

    taken = take_lines(read(b"abc\n" * 400), 1, most_lines=400, most_bytes=1 << 16)
    page = fit_page(PageLayout(count_tokens=count_whole), taken, budget_tokens=60, footer=footer)
    assert page.startswith("1\tabc\n2\tabc\n")
    with pytest.raises(ToolError, match="no room for a page: 3 tokens are left"):
        fit_page(PageLayout(count_tokens=count_whole), taken, budget_tokens=3, footer=footer)


def test_one_line_is_one_line_in_the_footer() -> None:
    page = Page(place="line 1, bytes 1-5 of 5,000", last_line=1, next_column=6)
    for line_count, words in ((1, "1 line in all"), (2000, "2,000 lines in all")):
        footer = page.footer(line_count=line_count, counted=True, ends_with_newline=True, encoding=UTF_8)
        assert f"; {words}; next: offset=1, column=6]" in footer
