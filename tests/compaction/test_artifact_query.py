"""Answers about stored texts: they fit, each says where to go on, and together they hold everything."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from chapbook.compaction.artifact_query import Asked, Place, contents_of, place_to_go_on, search_text
from chapbook.compaction.artifacts import ArtifactStore
from chapbook.compaction.stored_text import StoredText
from chapbook.kernels.errors import ToolError

Open = Callable[[bytes], StoredText]
NEXT = re.compile(r"next: offset=(\d+)(?:, column=(\d+))?")
PROPERTY = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def count(text: str) -> int:
    return -(-len(text.encode()) // 3)


@pytest.fixture
def opened(tmp_path: Path) -> Open:
    """Return a function that stores bytes and opens them as text."""
    store = ArtifactStore(tmp_path / "artifacts")
    return lambda data: store.open_text(store.put(data))


def asked(budget_tokens: int = 400, **options: object) -> Asked:
    return Asked(budget_tokens=budget_tokens, count_tokens=count, **options)


def footer_of(answer: str) -> str:
    return answer.rsplit("\n", 1)[-1]


def pages(ask: Callable[[Asked], str], budget_tokens: int, **options: object) -> list[str]:
    """Return all answers, each asked from where the one before said."""
    answers, place = [], {"line": 1, "column": 1}
    for _ in range(2000):
        answer = ask(asked(budget_tokens, **place, **options))
        assert count(answer) <= budget_tokens
        answers.append(answer)
        found = NEXT.search(footer_of(answer))
        if found is None:
            return answers
        place = {"line": int(found[1]), "column": int(found[2] or 1)}
    raise AssertionError("the pages do not end")


def hit_places(answer: str) -> list[tuple[int, int]]:
    """Return the line of each hit, and the column where its text begins, 0 for a line that is shown whole."""
    found = re.finditer(r"^(\d+):(?:(\d+):)?\t", answer, re.MULTILINE)
    return [(int(each[1]), int(each[2] or 0)) for each in found]


def test_a_search_shows_hits_with_their_neighbours_and_counts_all(opened: Open) -> None:
    text = opened(b"".join(b"needle\n" if n in (3, 5, 50) else b"line %d\n" % n for n in range(1, 101)))
    assert search_text(text, "NEEDLE", asked()) == (
        "1\tline 1\n2\tline 2\n3:\tneedle\n4\tline 4\n5:\tneedle\n6\tline 6\n7\tline 7\n"
        "--\n48\tline 48\n49\tline 49\n50:\tneedle\n51\tline 51\n52\tline 52\n[3 hits in 100 lines]"
    )
    assert footer_of(search_text(text, "needle", asked(line=6))) == "[1 hit from offset=6 on, to line 100]"
    assert search_text(text, "nothing", asked()) == "[no hits in 100 lines]"
    assert search_text(text, "needle", asked(line=500)) == "[no hits from offset=500 on; it has 100 lines]"
    assert footer_of(search_text(text, "needle", asked(limit=1))) == (
        "[3 hits in 100 lines; these are the first 1, 2 left; next: offset=5]"
    )


def test_a_pattern_that_does_not_compile_is_taken_literally_and_said(opened: Open) -> None:
    answer = search_text(opened(b"call f(x\n"), "f(x", asked())
    assert answer == "1:\tcall f(x\n[not a regular expression (missing ): f(x), so taken literally; 1 hit in 1 line]"


LINES = st.lists(
    st.sampled_from(["", "needle", "a needle in hay", "hay", "é" * 30, "hay " * 200 + "needle" + " hay" * 200]),
    max_size=40,
)


@given(LINES, st.integers(128, 700), st.sampled_from(["\n", "\r\n"]))
@example(["needle " * 300], 150, "\n")
@PROPERTY
def test_the_pages_of_a_search_show_every_hit_once(
    opened: Open, lines: list[str], budget_tokens: int, newline: str
) -> None:
    with opened(newline.join(lines).encode()) as text:
        whole = search_text(text, "needle", asked(10**7))
        answers = pages(lambda each: search_text(text, "needle", each), budget_tokens)
    shown = [place for answer in answers for place in hit_places(answer)]
    assert [line for line, _ in shown] == [line for line, _ in hit_places(whole)]
    assert sorted({line for line, _ in shown}) == [n for n, line in enumerate(lines, start=1) if "needle" in line]
    if len(answers) > 1:
        assert all(hit_places(answer) for answer in answers)


@given(st.lists(st.sampled_from(["", "needle", "hay", "[3 hits in 9 lines]", "5:\tneedle"]), max_size=30))
@example(["needle", *[""] * 4, "needle", *[""] * 5, "needle"])
@PROPERTY
def test_each_line_stands_behind_its_number_and_neighbours_are_those_of_the_text(
    opened: Open, lines: list[str]
) -> None:
    with opened("".join(f"{line}\n" for line in lines).encode()) as text:
        answer = search_text(text, "^needle$", asked(10**6))
    near = {
        at for n, line in enumerate(lines) if line == "needle" for at in range(n - 2, n + 3) if 0 <= at < len(lines)
    }
    expected = []
    for at in sorted(near):
        expected += ["--"] if expected and at - 1 not in near else []
        expected.append(f"{at + 1}{':' if lines[at] == 'needle' else ''}\t{lines[at]}")
    assert answer.split("\n")[:-1] == expected


def test_the_first_hit_is_shown_cut_where_no_more_fits(opened: Open) -> None:
    wide = "\U0001f600" * 30 + "needle" + "\U0001f600" * 30
    answer = search_text(opened(f"{wide}\n".encode() * 3), "needle", asked(60))
    assert count(answer) <= 60
    assert answer.startswith("1:121:\t…needle")
    assert "next: offset=2" in answer
    with pytest.raises(ToolError, match="no room for an answer: 5 tokens are left"):
        search_text(opened(b"needle"), "needle", asked(5))


def test_codes_are_passed_over_and_columns_are_those_that_read_takes(opened: Open) -> None:
    line = b"\x1b[1m" + b"x\x1b[0m" * 300 + b"ERR\x1b[31mOR" + b"y" * 300
    answer = search_text(opened(b"a\n" + line), "xerrory", asked())
    ((number, column),) = hit_places(answer)
    assert number == 2
    assert "\x1b" not in answer
    assert line[column - 1 :].replace(b"\x1b[0m", b"").startswith(b"xxxx")
    assert "xERRORy" in answer


def test_a_search_that_is_stopped_answers_with_what_it_has(opened: Open) -> None:
    text = opened(b"needle\nhay\n" * 200_000)
    looks = iter(range(10**6))
    answer = search_text(text, "needle", asked(200, is_stopped=lambda: next(looks) > 50))
    assert hit_places(answer)[0] == (1, 0)
    assert "51 hits from" not in answer
    assert "searched to line 101 of 400,000, then the time was up" in answer
    nothing = search_text(text, "needle", asked(200, line=5000, is_stopped=lambda: True))
    assert footer_of(nothing).endswith("searched to line 4999 of 400,000, then the time was up; next: offset=5000]")


def test_once_there_are_hits_enough_to_show_they_are_counted_for_a_second_at_most(opened: Open) -> None:
    text = opened(b"needle\nhay\n" * 50_000)
    times = iter(number / 1000 for number in range(10**6))
    answer = search_text(text, "needle", asked(200, clock=lambda: next(times)))
    assert re.fullmatch(r"\[more than 1,2\d\d hits; these are the first \d+; next: offset=\d+\]", footer_of(answer))
    assert "[50,000 hits in 100,000 lines; these" in search_text(text, "needle", asked(200))
    late = search_text(text, "needle", asked(200, line=99_990, clock=lambda: next(times)))
    assert footer_of(late).startswith("[5 hits from offset=99990 on, to line 100000]")


def test_letters_that_cannot_be_found_in_an_older_encoding_are_said_to_be(opened: Open) -> None:
    text = "Привет, world\n"
    answer = search_text(opened(text.encode("cp1251") * 9), "привет", asked())
    assert answer == "[not all of it is UTF-8, and in the rest only ASCII is found; no hits in 9 lines]"
    assert search_text(opened(text.encode("cp1251")), "world", asked()).startswith("1:\t\ufffd")
    assert search_text(opened(text.encode()), "мир", asked()) == "[no hits in 1 line]"


def test_the_place_to_go_on_is_read_from_the_last_line_alone() -> None:
    assert place_to_go_on("1\t[lines; next: offset=7]\n[1 hit in 2 lines]") is None
    assert place_to_go_on("[lines 1-2 of 9; next: offset=3]") == Place(3)
    assert place_to_go_on("1\ta\n[2 hits; next: offset=3, column=44; x]") == Place(3, 44)


def test_a_carriage_return_alone_is_part_of_a_neighbour(opened: Open) -> None:
    assert search_text(opened(b"needle\r\n\r\n\r"), "needle", asked()) == "1:\tneedle\n2\t\n3\t\r\n[1 hit in 3 lines]"


def test_the_pages_of_a_table_of_contents_list_every_entry_once(opened: Open) -> None:
    value = {f"key {number}": [0] * (number % 7) for number in range(900)}
    for data in (json.dumps(value), json.dumps(value, indent=1)):
        with opened(data.encode()) as text:
            answers = pages(lambda each, text=text: contents_of(text, each), 500)
            whole = footer_of(contents_of(text, asked(10**6)))
        titles = [line.split("\t")[1].strip() for answer in answers for line in answer.split("\n")[:-1]]
        assert titles == ["object of 900", *(f"{key}: array of {len(below)}" for key, below in value.items())]
        assert "of 901; next: offset=" in answers[0]
        assert re.match(r"\[contents of JSON, [\d,]+ lines?: 1-400 of 901; next: offset=", whole)


def test_titles_that_are_cut_are_said_to_be(opened: Open) -> None:
    with opened(b"# One\n\n[x](y)\n\n## " + b"long " * 50 + b"\n\n## Three\n\n- a\n") as text:
        assert footer_of(contents_of(text, asked())).endswith("1-3 of 3; titles cut at 120 characters]")
        assert count(contents_of(text, asked(60, line=4))) <= 60


def test_a_kind_without_contents_says_what_to_do_instead(opened: Open) -> None:
    answer = contents_of(opened(b"2026-01-01 10:00:00 INFO started\n" * 50), asked())
    assert answer == (
        "[log or test output, 50 lines: no contents to list; use search with a query, or read with an offset]"
    )
    with opened(b"# One\n\n[x](y)\n\n## Two\n") as text:
        assert "no entries from line 9 on, 2 before" in contents_of(text, asked(line=9))


def test_contents_of_other_encodings_are_those_of_their_text(opened: Open) -> None:
    text = "# Eins\r\n\r\n[ä](ö)\r\n\r\n## Zwei größer\r\n\r\n- a\r\n"
    expected = "1\t# Eins\n5\t## Zwei größer"
    for data in (text.encode("utf-16"), text.encode("utf-8-sig"), text.encode()):
        assert contents_of(opened(data), asked()).startswith(expected)
        assert search_text(opened(data), "GRÖSSER|größer$", asked()).count("5:\t## Zwei größer\n") == 1
