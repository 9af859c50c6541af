"""Finding a pattern: every match once, at its line and byte, and in time for hostile patterns."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from chapbook.compaction import matching
from chapbook.compaction.matching import ByteScan, Hit, MatchScan, Pattern, compile_pattern, hits_in
from chapbook.compaction.quoting import strip_ansi_bytes
from chapbook.kernels.errors import ToolError


def chunked(data: bytes, chunk_bytes: int = 1 << 16) -> Iterator[bytes]:
    return (data[at : at + chunk_bytes] for at in range(0, len(data), chunk_bytes))


def scan_of(data: bytes, source: str, *, chunk_bytes: int = 1 << 16, line: int = 1, column: int = 1) -> list[Hit]:
    """Return the hits from a place on, of a text given from a byte before that place on."""
    passed = max(0, column - 2)
    begin = [0, *(found.end() for found in re.finditer(b"\n", data))][line - 1]
    scan = MatchScan(
        compile_pattern(source),
        first_line=line,
        first_column=column,
        passed_bytes=passed,
        every_part=True,
        without_codes=True,
    )
    hits = []
    for hit in scan.hits(chunked(data[begin + passed :], chunk_bytes)):
        hits.append(hit)
        scan.check_integrity()
    assert not scan.was_stopped
    assert scan.reached_line == data.count(b"\n") + 1
    return hits


PIECES = st.sampled_from(
    [b"needle", b"nee", b"dle", b"\x1b[31m", b"\x1b[0m", b"\n", b"\r\n", "é".encode(), b" ", b"x" * 90]
)
TEXTS = st.lists(PIECES, max_size=60).map(b"".join)


@given(TEXTS, st.integers(1, 300))
@example(b"x" * 90 * 3 + b"needle" + b"x" * 300 + b"needle", 7)
@settings(max_examples=200, deadline=None)
def test_every_line_that_matches_as_a_terminal_shows_it_has_a_hit(data: bytes, chunk_bytes: int) -> None:
    lines = data.split(b"\n")
    expected = [number for number, line in enumerate(lines, start=1) if b"needle" in strip_ansi_bytes(line)]
    hits = scan_of(data, "needle$|NEEDLE", chunk_bytes=chunk_bytes)
    assert sorted({hit.line for hit in hits}) == expected
    for hit in hits:
        assert hit.text[hit.match_at :].startswith("needle")
        line = lines[hit.line - 1]
        if hit.column:
            # From the column on the line as it is stored begins with the text that is shown.
            assert strip_ansi_bytes(line[hit.column - 1 :]).decode().startswith(hit.text)
        else:
            assert strip_ansi_bytes(line).removesuffix(b"\r").decode() == hit.text


@given(TEXTS)
@settings(max_examples=100, deadline=None)
def test_a_scan_goes_on_from_any_hit_with_just_the_hits_that_are_left(data: bytes) -> None:
    hits = scan_of(data, "needle")
    for at, hit in enumerate(hits):
        rest = scan_of(data, "needle", line=hit.line, column=max(1, hit.match_column))
        assert [(one.line, one.match_column or hit.match_column) for one in rest] == [
            (one.line, one.match_column or hit.match_column) for one in hits[at:]
        ]
        assert [one.text[one.match_at :][:6] for one in rest] == ["needle"] * len(hits[at:])


def test_a_very_long_line_has_a_hit_for_each_part_that_matches() -> None:
    places = [0, 150, 5_000, 1_000_000, (1 << 20) - 3, 3_000_000, 4_999_990]
    line = bytearray(b"x" * 5_000_000)
    for place in places:
        line[place : place + 6] = b"needle"
    hits = scan_of(b"first\n" + bytes(line) + b"\nlast needle", "needle")
    # The second one is shown with the first.
    assert [hit.match_column for hit in hits[1:-1]] == [place + 1 for place in places[2:]]
    assert [hit.line for hit in hits] == [2] * 6 + [3]
    assert [hit.line for hit in hits_in(chunked(bytes(line) + b"\nneedle"), compile_pattern("needle"))] == [1, 2]


def test_the_ends_of_a_long_line_are_those_of_the_line_alone() -> None:
    data = b"a" * 3_000_000 + b"\nab\n"
    assert [hit.match_column for hit in scan_of(data, "^a")] == [0, 0]
    assert [hit.column for hit in scan_of(data, "a$")] == [3_000_000 - 99]
    assert len(scan_of(data, "^ab$")) == 1


def test_an_empty_match_counts_a_line_and_nothing_behind_the_last() -> None:
    assert [hit.line for hit in scan_of(b"a\n\nb\n", "x*")] == [1, 2, 3]
    assert [hit.line for hit in scan_of(b"a\nb", "$")] == [1, 2]
    assert scan_of(b"", "x*") == []


def test_a_stopped_scan_says_from_where_to_go_on() -> None:
    data = b"".join(b"line %d\n" % number for number in range(1000))
    looks = iter(range(1000))
    scan = MatchScan(compile_pattern("line"), is_stopped=lambda: next(looks) >= 10)
    assert len(list(scan.hits(chunked(data)))) == 10
    assert (scan.was_stopped, scan.reached_line, scan.reached_column) == (True, 11, 1)
    long = MatchScan(compile_pattern("a"), every_part=True, is_stopped=lambda: next(looks) >= 15)
    hits = list(long.hits(chunked(b"a" * 100_000)))
    assert long.was_stopped
    # Each part has the match in its middle, but for the first.
    assert (long.reached_line, long.reached_column) == (1, 200 + 101 * (len(hits) - 1) + 1)


WORDS = "|".join(f"{number * 7919 % 99991:x}w" for number in range(10_000))


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("(a*)*b", b"a"),
        ("((a+)+)+$", b"ab"),
        ("(((a|b){0,30}){0,30})c", b"ab"),
        ("(a|b)*a(a|b){200}c", b"aab"),
        ("(?:a?){500}a{500}", b"a"),
        ("a(.*Z)?", b"a"),
        (WORDS, b"2026-01-01 INFO request 12345 handled in 33 ms\n"),
        ("|".join(f".*{number}.*" for number in range(4000)), b"abcdefgh"),
    ],
    ids=[
        "nested",
        "nested to the end",
        "counted",
        "far back",
        "optional",
        "looks to the end",
        "10,000 words",
        "4,000 .*",
    ],
)
def test_no_look_at_a_hostile_pattern_takes_long(source: str, text: bytes) -> None:
    """Between two questions whether to stop there is one look: how many there are in a text bounds how long each is."""
    pattern = compile_pattern(source)
    assert not pattern.is_literal
    data = text * ((pattern.block_bytes * 4) // len(text))
    looks = 0

    def is_stopped() -> bool:
        nonlocal looks
        looks += 1
        return looks > 200

    scan = MatchScan(pattern, every_part=True, is_stopped=is_stopped)
    list(scan.hits(chunked(data)))
    assert looks >= 4
    assert pattern.block_bytes * pattern.compiled.programsize <= 10**9


def test_what_is_too_large_to_be_searched_in_time_is_refused() -> None:
    with pytest.raises(ToolError, match=f"the limit is {matching.PATTERN_LIMIT_BYTES}"):
        compile_pattern("x" * (matching.PATTERN_LIMIT_BYTES + 1))
    with pytest.raises(ToolError, match="instructions, the limit is 200,000; use fewer alternatives"):
        compile_pattern("|".join(r"\pL{200}" + str(number) for number in range(130)))


def test_what_does_not_compile_is_taken_literally_and_says_why() -> None:
    pattern = compile_pattern("(x")
    assert isinstance(pattern, Pattern)
    assert (pattern.is_literal, pattern.problem) == (True, "missing ): (x")
    assert [hit.line for hit in hits_in(iter([b"a\nf(X)\n"]), pattern)] == [2]


def test_hits_that_are_only_counted_are_as_many_as_those_given() -> None:
    data = b"a needle\n" * 1000 + b"x" * 5000 + b"needle" + b"x" * 5000 + b"needle\nneedle"
    scan = MatchScan(compile_pattern("needle"), every_part=True)
    given_hits = 0
    for _ in scan.hits(chunked(data)):
        given_hits += 1
        scan.counts_only = given_hits == 7
    assert (given_hits, scan.found) == (7, 1003)
    by_line = MatchScan(compile_pattern("needle"))
    assert len(list(by_line.hits(chunked(b"needle" + b"x" * (3 << 20) + b"needle")))) == by_line.found == 1


# It makes a pattern so large that it is shown small blocks, as hostile ones are.
LARGE = r"|\x07" + "[ab]{900}" * 8


@given(
    data=st.lists(st.sampled_from([b"needle", b"nee", b"\0", b"\xff", b"\n", b"\r\n", b"x" * 4000]), max_size=30).map(
        b"".join
    ),
    step_bytes=st.sampled_from([1, 16]),
    chunk_bytes=st.sampled_from([1000, 7000, 1 << 16]),
    source=st.sampled_from(["NEEDLE", r"\xff", r"e\x00?\xff", r"e[^x]+n", r"\x0a", "^needle", r"\bneedle"]),
)
@settings(max_examples=150, deadline=None)
def test_the_first_match_in_each_step_of_bytes_is_found(
    data: bytes, step_bytes: int, chunk_bytes: int, source: str
) -> None:
    expected, at = [], 0
    plain = re.compile(source.encode(), re.IGNORECASE | re.MULTILINE)
    while at < len(data) and (found := plain.search(data, at)):
        expected.append(range(*found.span()))
        at = found.start() + step_bytes - found.start() % step_bytes
    for pattern in (compile_pattern(source, for_bytes=True), compile_pattern(source + LARGE, for_bytes=True)):
        assert not pattern.is_literal
        scan = ByteScan(pattern, step_bytes=step_bytes)
        assert list(scan.matches(chunked(data, chunk_bytes))) == expected
        scan.check_integrity()
        assert scan.reached >= len(data)


def test_what_lies_across_two_blocks_of_bytes_is_found_once_and_whole() -> None:
    source = r"\bneee|nee(?:eedle)?" + LARGE
    pattern = compile_pattern(source, for_bytes=True)
    plain = re.compile(source.encode())
    block = pattern.block_bytes
    assert block < 10_000
    for edge in (block, block - 2048):
        for shift in range(-9, 3):
            for before in (b"x", b" "):
                data = before * (edge + shift) + b"neeeedle" + before * block
                found = list(ByteScan(pattern).matches(chunked(data)))
                assert found == [range(*each.span()) for each in plain.finditer(data)], (edge, shift, before)


def test_a_scan_of_bytes_that_was_stopped_goes_on_where_it_says() -> None:
    data = (b"\0" * 20 + b"needle\xff") * 500
    looks = iter(range(1000))
    scan = ByteScan(compile_pattern("needle", for_bytes=True), step_bytes=16, is_stopped=lambda: next(looks) >= 10)
    first = list(scan.matches(chunked(data)))
    assert (len(first), scan.was_stopped) == (10, True)
    rest = ByteScan(compile_pattern("needle", for_bytes=True), step_bytes=16).matches(iter([data[scan.reached :]]))
    assert len(first) + len(list(rest)) == 500
