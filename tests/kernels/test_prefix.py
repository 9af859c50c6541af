import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from chapbook.kernels.prefix import common_prefix_length, common_prefix_length_reference
from chapbook.kernels.tokens import NO_TOKENS, token_ids

runs = st.lists(st.integers(0, 2), max_size=20).map(token_ids)


@given(runs, runs)
def test_two_runs_share_what_comparing_them_one_by_one_says(a, b):
    assert common_prefix_length(a, b) == common_prefix_length_reference(a, b)


@given(st.integers(0, 3_000), st.integers(0, 3_000), st.integers(0, 3_000))
def test_a_difference_is_found_wherever_the_chunks_end(length, other_length, at):
    a = np.zeros(length, dtype=np.int32)
    b = np.zeros(other_length, dtype=np.int32)
    b[at : at + 1] = 1
    expected = min(length, other_length, at) if at < other_length else min(length, other_length)
    assert common_prefix_length(a, b) == common_prefix_length(b, a) == expected
    assert common_prefix_length_reference(a, b) == expected


def test_an_empty_run_shares_nothing():
    assert common_prefix_length(NO_TOKENS, token_ids([1])) == 0
    assert common_prefix_length(NO_TOKENS, NO_TOKENS) == 0


def test_what_follows_an_early_difference_is_not_looked_at():
    class Counting(np.ndarray):
        compared = 0

        def __ne__(self, other):
            Counting.compared += len(self)
            return np.ndarray.__ne__(self.view(np.ndarray), other)

    a = np.zeros(100_000, dtype=np.int32).view(Counting)
    b = np.ones(100_000, dtype=np.int32)
    assert common_prefix_length(a, b) == 0
    assert 0 < Counting.compared <= 1_000
