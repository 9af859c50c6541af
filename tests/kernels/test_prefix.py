import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from chapbook.kernels.prefix import (
    common_prefix_length,
    common_prefix_length_reference,
    shared_with_each,
    shared_with_each_reference,
)
from chapbook.kernels.tokens import NO_TOKENS, token_ids

LONG = token_ids(np.arange(6_000) % 251)

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


@given(runs, st.lists(runs, max_size=12))
def test_many_runs_share_what_comparing_them_in_turn_says(wanted, candidates):
    shared = shared_with_each(wanted, candidates)
    assert shared.dtype == np.int64
    assert shared.tolist() == shared_with_each_reference(wanted, candidates).tolist()


@st.composite
def relatives(draw):
    """A run that shares a drawn length with LONG and then ends, differs, or goes on as a longer one."""
    length = draw(st.one_of(st.integers(0, len(LONG)), st.sampled_from([0, 1, 511, 512, 513, 2_047, 2_048, 2_049])))
    tail = draw(st.sampled_from(["end", "differ", "view", "whole", "longer"]))
    if tail == "view":
        return length, LONG[:length]
    if tail == "whole":
        return len(LONG), LONG
    if tail == "longer":
        return len(LONG), token_ids(np.concatenate([LONG, np.full(length, -1)]))
    beyond = [] if tail == "end" else np.full(draw(st.integers(1, 3_000)), -1)
    return length, token_ids(np.concatenate([LONG[:length], beyond]).astype(np.int32))


@given(st.lists(relatives(), max_size=12), st.integers(0, len(LONG)))
def test_each_run_is_found_to_part_where_it_does_wherever_the_chunks_end(candidates, cut):
    wanted = LONG[:cut]
    expected = [min(length, cut) for length, _ in candidates]
    assert shared_with_each(wanted, [run for _, run in candidates]).tolist() == expected


def test_a_run_that_ended_shares_no_more_whatever_the_wanted_ids_are():
    extremes = token_ids([2**31 - 1, -(2**31), 0, -1] * 300)
    ends = [0, 1, 2, 3, 4, 600, 1_200]
    assert shared_with_each(extremes, [extremes[:end] for end in ends]).tolist() == ends


def test_no_runs_give_no_lengths():
    assert shared_with_each(LONG, []).shape == (0,)
    assert shared_with_each(NO_TOKENS, [LONG] * 5).tolist() == [0] * 5


def test_of_many_runs_what_follows_an_early_difference_is_not_looked_at():
    class Counting(np.ndarray):
        looked_at = 0

        def __getitem__(self, key):
            part = np.ndarray.__getitem__(self.view(np.ndarray), key)
            Counting.looked_at += np.size(part)
            return part

    other = np.full(100_000, -1, dtype=np.int32).view(Counting)
    wanted = token_ids(np.arange(100_000))
    assert shared_with_each(wanted, [other] * 10 + [wanted]).tolist() == [0] * 10 + [len(wanted)]
    assert 0 < Counting.looked_at <= 10 * 1_000
