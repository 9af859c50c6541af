"""How many parts fit."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from chapbook.compaction.packing import most_that_fit, pack_lines


@given(st.integers(0, 500), st.integers(0, 600))
def test_the_largest_number_that_fits_is_found_in_few_looks(most: int, limit: int) -> None:
    looks: list[int] = []

    def fits(size: int) -> bool:
        looks.append(size)
        assert 1 <= size <= most
        return size <= limit

    assert most_that_fit(most, fits) == min(most, limit)
    assert len(looks) <= 20


@given(st.lists(st.text(alphabet="ab", max_size=60), max_size=120), st.integers(1, 900))
def test_as_many_lines_are_packed_as_fit_in_a_few_counts(lines: list[str], budget_tokens: int) -> None:
    counted: list[str] = []

    def count(text: str) -> int:
        counted.append(text)
        return len(text)

    packed = pack_lines(lines, budget_tokens=budget_tokens, count_tokens=count)
    fitting = [size for size in range(len(lines) + 1) if len("\n".join(lines[:size])) <= budget_tokens]
    assert packed == lines[: max(fitting[-1], min(1, len(lines)))]
    assert len(counted) <= 12


def test_a_page_of_even_lines_is_found_in_three_counts() -> None:
    counted: list[str] = []

    def count(text: str) -> int:
        counted.append(text)
        return len(text) // 3

    packed = pack_lines([f"line {at:05}" for at in range(400)], budget_tokens=1_000, count_tokens=count)
    assert len(packed) == 273  # of 11 characters with their line feed, but for the last: 3,002 characters
    assert len(counted) <= 4
