"""How many parts fit."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from chapbook.compaction.packing import most_that_fit


@given(st.integers(0, 500), st.integers(0, 600))
def test_the_largest_number_that_fits_is_found_in_few_looks(most: int, limit: int) -> None:
    looks: list[int] = []

    def fits(size: int) -> bool:
        looks.append(size)
        assert 1 <= size <= most
        return size <= limit

    assert most_that_fit(most, fits) == min(most, limit)
    assert len(looks) <= 20
