"""Lines of another shape than nearly all the others."""

import random
from collections import Counter

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from chapbook.compaction.rare_lines import RareLine, RareScan, first_of_runs

RANDOM = random.Random(7)
WORDS = ["".join(RANDOM.choices("ghijklmnopqrstuvwxyz", k=8)) for _ in range(3000)]


def scan(text: str, *, block_bytes: int = 1 << 20) -> list[RareLine] | None:
    """Feed whole lines, as a preview does."""
    found, block = RareScan(), b""
    for line in text.encode().splitlines(keepends=True):
        block += line
        if len(block) >= block_bytes:
            found.feed(block)
            found.check_integrity()
            block = b""
    found.feed(block)
    found.check_integrity()
    return found.finish()


def told(text: str, **options) -> list[tuple[int, str]] | None:
    found = scan(text, **options)
    return None if found is None else [(one.line, one.text.decode()) for one in found]


def word(number: int) -> str:
    return WORDS[number * 7919 % len(WORDS)]


EVEN = {
    "numbers": lambda n: f"step {n} of 5000 took {n * 3}.{n}s",
    "hashes": lambda n: f"stored {RANDOM.getrandbits(128):032x} at 2026-11-30T10:00:{n % 60:02d}Z",
    "paths": lambda n: f"/srv/{word(n)}/{word(n + 1)}.dat",
    "quoted": lambda n: f"'{word(n)} {word(n + 5)}.xml' accepted",
    "varied words": lambda n: f"   Compiling {word(n)} v1.{n}",
    "two shapes": lambda n: f"begin {word(n)}" if n % 2 else f"end of {word(n)} after {n}",
    "words alone": word,
}


@pytest.mark.parametrize("name", EVEN)
@pytest.mark.parametrize("block_bytes", [3000, 1 << 20])
def test_one_line_of_another_shape_among_thousands_is_found_whatever_it_says(name, block_bytes) -> None:
    lines = [EVEN[name](n) for n in range(5000)]
    lines[3210] = "the shard of mars refuses to mount"
    assert told("\n".join(lines) + "\n", block_bytes=block_bytes) == [(3211, lines[3210])]


def test_a_text_of_one_shape_has_no_rare_lines() -> None:
    assert told("".join(f"step {n}\n" for n in range(5000))) == []


def test_a_text_of_many_shapes_is_not_even() -> None:
    prose = "".join(" ".join(RANDOM.choices(WORDS[:60], k=12)) + "\n" for _ in range(9000))
    assert told(prose) is None


@pytest.mark.parametrize("text", ["", "\n" * 900, "one\ntwo\nthree\n", "a b\n" * 10 + "c\n"])
def test_a_short_text_is_not_even(text) -> None:
    assert told(text) is None


def test_neighbours_of_one_rare_shape_are_each_told() -> None:
    text = "check 1 passed\n" * 900 + "** odd **\n  wanted blue\n  have green\n" + "check 2 passed\n" * 900
    assert told(text) == [(901, "** odd **"), (902, "  wanted blue"), (903, "  have green")]


def test_what_is_met_now_and_then_is_not_rare() -> None:
    lines = ["step 5 done" if n % 100 else "pause of the clock" for n in range(5000)]
    assert told("\n".join(lines) + "\n") == []


def test_a_text_with_too_many_shapes_is_given_up_in_bounds() -> None:
    found = RareScan()
    for _ in range(40):
        found.feed(b"".join(" ".join(RANDOM.choices(WORDS, k=9)).encode() + b"\n" for _ in range(500)))
        found.check_integrity()
    assert found.finish() is None


def test_of_very_many_different_lines_a_sample_is_looked_at() -> None:
    found = RareScan()
    for start in range(0, 90_000, 3000):
        lines = [f"user {word(n)} opened {word(n * 3)} in {word(n * 5)}\n" for n in range(start, start + 3000)]
        found.feed("".join(lines).encode())
        found.check_integrity()
    found.feed(b"quorum vanished\n")
    assert [one.text for one in found.finish()] == [b"quorum vanished"]


def test_a_line_that_comes_in_several_blocks_is_one() -> None:
    found = RareScan()
    found.feed(b"step 1\n" * 500)
    for piece in (b"x y z " * 90, b"tail of it ", b"end\n"):
        found.feed(piece)
        found.check_integrity()
    found.feed(b"step 2\n" * 500 + b"odd one out\n")
    assert [(one.line, one.text[:5]) for one in found.finish()] == [(501, b"x y z"), (1002, b"odd o")]


def test_the_first_of_each_run_comes_first_and_the_edges_last() -> None:
    lines = [RareLine(number, b"", 1) for number in (1, 50, 51, 52, 90, 100)]
    assert [one.line for one in first_of_runs(lines, 100)] == [50, 90, 51, 52, 1, 100]


@example(kinds=[*["step"] * 22, "odd one", "quite another thing", *[""] * 6], block_bytes=1)
@settings(max_examples=60)
@given(
    kinds=st.lists(st.sampled_from(["step", "odd one", "quite another thing", ""]), min_size=30, max_size=300),
    block_bytes=st.integers(1, 2000),
)
def test_counts_are_those_of_counting_whatever_the_blocks_are(kinds, block_bytes) -> None:
    lines = [kind and f"{kind} {n}" for n, kind in enumerate(kinds)]
    plain = Counter(kind for kind in kinds if kind)
    # Words that fewer than three lines share are told apart by their number alone: two and three are "a few".
    shapes = {kind: kind if plain[kind] >= 3 else min(len(kind.split()), 2) for kind in plain}
    counts: Counter[str | int] = Counter()
    for kind, count in plain.items():
        counts[shapes[kind]] += count
    total = plain.total()
    often = max(1, total // 200)
    common = sum(count for count in counts.values() if count > often)
    found = scan("\n".join(lines) + "\n", block_bytes=block_bytes)
    if total < 24 or common < 0.95 * total:
        assert found is None
    else:
        expected = [kind for kind in plain if counts[shapes[kind]] <= often]
        assert sorted(one.text.decode().rsplit(" ", 1)[0] for one in found) == sorted(expected)
        assert all(lines[one.line - 1].encode() == one.text for one in found)
