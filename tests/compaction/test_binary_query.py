"""Binary content: every byte of it is reached, and what is found in it is shown where it is."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from chapbook.compaction.artifact_query import Asked, place_to_go_on
from chapbook.compaction.artifacts import ArtifactStore
from chapbook.compaction.binary_query import contents_of_bytes, read_bytes, search_bytes
from chapbook.compaction.stored_text import StoredText
from chapbook.kernels.errors import ToolError

Open = Callable[[bytes], StoredText]
LINE = re.compile(r"(\d+)(:?)\t([0-9a-f ]{47})  \|(.{1,16})\|")


@pytest.fixture
def opened(tmp_path: Path) -> Open:
    """Return a function that stores bytes and opens them."""
    store = ArtifactStore(tmp_path / "artifacts")
    return lambda data: store.open_text(store.put(data))


def asked(budget_tokens: int = 400, **options: object) -> Asked:
    return Asked(budget_tokens=budget_tokens, count_tokens=lambda text: -(-len(text) // 3), **options)


def pages(ask: Callable[[Asked], str], budget_tokens: int) -> list[str]:
    """Return all answers, each asked from where the one before said."""
    answers, line = [], 1
    for _ in range(2000):
        answer = ask(asked(budget_tokens, line=line))
        assert -(-len(answer) // 3) <= budget_tokens
        answers.append(answer)
        place = place_to_go_on(answer)
        if place is None:
            return answers
        line = place.line
    raise AssertionError("the pages do not end")


def shown_lines(answer: str) -> list[tuple[int, str, bytes]]:
    """Return number, mark and bytes of each line of an answer."""
    found = [LINE.fullmatch(line) for line in answer.split("\n")[:-1] if line != "--"]
    return [(int(each[1]), each[2], bytes.fromhex(each[3])) for each in found]


@pytest.mark.parametrize("size_bytes", [1, 16, 17, 5000])
def test_the_pages_put_together_are_the_content(opened: Open, size_bytes: int) -> None:
    data = b"\0" + random.Random(2).randbytes(size_bytes - 1)
    for budget_tokens in (128, 700, 10**6):
        answers = pages(lambda each: read_bytes(opened(data), each), budget_tokens)
        lines = [line for answer in answers for line in shown_lines(answer)]
        assert b"".join(content for _, _, content in lines) == data
        assert [number for number, _, _ in lines] == list(range(1, len(lines) + 1))


def test_a_line_of_bytes_has_its_number_hex_and_what_is_printable(opened: Open) -> None:
    text = opened(b"PK\3\4 a|b\r\n\x1b\xe9\0[1]tail")
    assert read_bytes(text, asked()) == (
        "1\t50 4b 03 04 20 61 7c 62 0d 0a 1b e9 00 5b 31 5d  |PK.. a|b.....[1]|\n"
        "2\t74 61 69 6c                                      |tail|\n"
        "[lines 1-2 of 2, each 16 bytes of binary content]"
    )
    with pytest.raises(ToolError, match="has 2 lines of 16 bytes; offset 3 is past its end"):
        read_bytes(text, asked(line=3))
    assert contents_of_bytes(text, asked()).startswith("[binary, zip")


def test_the_pages_of_a_search_show_every_line_in_which_a_match_begins(opened: Open) -> None:
    chance = random.Random(3)
    data = bytearray(chance.randbytes(100_000).replace(b"needle", b"NO"))
    places = sorted(chance.sample(range(0, 99_000, 11), 40))
    for place in places:
        data[place : place + 6] = b"NEEdle"
    text = opened(bytes(data))
    answers = pages(lambda each: search_bytes(text, "needle", each), 300)
    hits = [number for answer in answers for number, mark, _ in shown_lines(answer) if mark]
    assert hits == sorted({place // 16 + 1 for place in places})
    for answer in answers:
        for number, _, content in shown_lines(answer):
            assert content == data[(number - 1) * 16 : number * 16]


def test_a_match_is_shown_with_the_lines_that_it_goes_on_in(opened: Open) -> None:
    data = bytearray(800)
    data[30:70] = b"x" * 40
    data[500] = 0xFF
    answer = search_bytes(opened(bytes(data)), r"x+|\xff", asked())
    assert [(number, mark) for number, mark, _ in shown_lines(answer)] == [
        (2, ":"), (3, ":"), (4, ":"), (5, ":"), (32, ":"),
    ]  # fmt: skip
    assert "\n--\n32:" in answer
    assert answer.endswith("\n[binary: 5 hits in 50 lines of 16 bytes]")
    once = search_bytes(opened(bytes(data)), r"\x00x{40}", asked())
    assert [(number, mark) for number, mark, _ in shown_lines(once)] == [(2, ":"), (3, ""), (4, ""), (5, "")]
    data[480:496] = b"z" * 16
    to_the_end = search_bytes(opened(bytes(data)), "z+", asked())
    assert [(number, mark) for number, mark, _ in shown_lines(to_the_end)] == [(31, ":")]
    assert search_bytes(opened(bytes(data)), "y", asked()) == "[binary: no hits in 50 lines of 16 bytes]"


def test_hits_beyond_those_shown_are_counted_for_a_second_and_a_stopped_search_can_go_on(opened: Open) -> None:
    text = opened(b"\0needle needle!!" * 20_000)
    times = iter(number / 1000 for number in range(10**6))
    answer = search_bytes(text, "needle", asked(200, clock=lambda: next(times)))
    assert re.search(r"\[binary: more than 1,\d{3} hits in 20,000 lines .* these are the first \d+; next: ", answer)
    looks = iter(range(10**6))
    stopped = search_bytes(text, "needle", asked(10**4, is_stopped=lambda: next(looks) >= 5))
    assert stopped.endswith("[binary: 5 hits in 20,000 lines of 16 bytes; then the time was up; next: offset=6]")
