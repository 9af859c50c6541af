"""Reading by lines and bytes in bounded memory, against plain slicing of the whole."""

from __future__ import annotations

from collections.abc import Iterator

from hypothesis import given
from hypothesis import strategies as st

from chapbook.kernels.lines import LineReader, character_start

TEXTS = st.lists(st.sampled_from([b"a", b"bc", b"\n", b"\n\n", b"\r\n", "é".encode(), "日".encode()]), max_size=30)


def chunks_of(data: bytes, sizes: list[int]) -> Iterator[bytes]:
    """Cut `data` into chunks of these sizes, empty ones too, and the rest."""
    at = 0
    for size in sizes:
        yield data[at : at + size]
        at += size
    yield data[at:]


def line_count(data: bytes) -> int:
    return data.count(b"\n") + (not data.endswith(b"\n") and data != b"")


@given(TEXTS.map(b"".join), st.lists(st.integers(0, 4), max_size=20), st.data())
def test_any_way_forward_passes_the_bytes_that_slicing_gives(
    data: bytes, sizes: list[int], draw: st.DataObject
) -> None:
    reader = LineReader(chunks_of(data, sizes))
    at = 0
    for _ in range(draw.draw(st.integers(0, 6))):
        count = draw.draw(st.integers(1, 5))
        match draw.draw(st.sampled_from(["skip lines", "skip in line", "take", "finish"])):
            case "skip lines":
                reader.skip_lines(count)
                at += _after_newlines(data[at:], count)
            case "skip in line":
                expected = min(count, len(data[at:].split(b"\n")[0]))
                assert reader.skip_in_line(count) == expected
                at += expected
            case "take":
                most = draw.draw(st.integers(1, 9))
                expected_bytes = data[at : at + min(most, _after_newlines(data[at:], count))]
                assert reader.take(max_lines=count, max_bytes=most) == expected_bytes
                at += len(expected_bytes)
            case _:
                rest = data[at:].split(b"\n")[0]
                assert reader.finish_line() == len(rest)
                at = min(len(data), at + len(rest) + 1)
        reader.check_integrity()
        assert reader.passed_bytes == at
        assert reader.lines == line_count(data[:at])
        assert reader.ended_with_newline == (data[:at].endswith(b"\n") or at == 0)
    assert reader.count_rest(limit_bytes=1000)
    assert reader.lines == line_count(data)


def _after_newlines(data: bytes, count: int) -> int:
    """Return the length of the prefix with `count` line feeds, or of everything."""
    return len(b"\n".join(data.split(b"\n")[:count])) + 1 if data.count(b"\n") >= count else len(data)


def test_counting_gives_up_past_its_limit() -> None:
    reader = LineReader(iter([b"a\n" * 1000] * 100))
    assert not reader.count_rest(limit_bytes=4000)
    assert 2000 <= reader.lines < 10_000


@given(st.text(st.characters(codec="utf-8"), max_size=8), st.integers(0, 40))
def test_a_cut_goes_back_to_the_start_of_the_character_that_it_would_split(text: str, at: int) -> None:
    data = text.encode()
    at = min(at, len(data))
    start = character_start(data, at)
    data[:start].decode()
    assert at - 3 <= start <= at
    assert start == max(size for size in _boundaries(text) if size <= at)


def _boundaries(text: str) -> list[int]:
    return [len(text[:size].encode()) for size in range(len(text) + 1)]


@given(st.binary(max_size=12), st.integers(0, 12))
def test_bytes_that_are_no_characters_are_cut_where_asked_or_close_before(data: bytes, at: int) -> None:
    at = min(at, len(data))
    start = character_start(data, at)
    assert max(0, at - 3) <= start <= at
    replaced = data[:start].decode(errors="replace") + data[start:].decode(errors="replace")
    assert replaced.count("\ufffd") >= data.decode(errors="replace").count("\ufffd")


def test_lines_count_on_from_the_line_that_the_chunks_begin_with() -> None:
    reader = LineReader(iter((b"nine\nten", b"\neleven")), first_line=9)
    assert reader.lines == 8
    reader.skip_lines(2)
    assert reader.lines == 10
    assert reader.count_rest(limit_bytes=100)
    assert reader.lines == 11
    reader.check_integrity()
