import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from chapbook.kernels.tokens import (
    NO_TOKENS,
    TOKEN_BYTES,
    concat_tokens,
    decode_tokens,
    encode_tokens,
    hash_tokens,
    token_ids,
)

ids = st.integers(min_value=-(2**31), max_value=2**31 - 1)
runs = st.lists(ids, max_size=50)


@given(runs)
def test_a_run_holds_the_ids_it_was_made_of_and_refuses_to_change(values):
    run = token_ids(values)
    assert run.tolist() == values
    assert run.dtype == np.int32
    assert run.flags.c_contiguous
    with pytest.raises(ValueError, match="read-only"):
        run[:] = 0


@given(runs)
def test_any_iterable_makes_the_same_run(values):
    expected = token_ids(values)
    for form in (tuple(values), iter(values), np.array(values, dtype=np.int64), np.array(values, dtype="<i4")):
        assert np.array_equal(token_ids(form), expected)


@given(runs)
def test_a_run_of_its_own_is_taken_as_it_is_and_a_writable_one_is_copied(values):
    run = token_ids(values)
    assert token_ids(run) is run
    writable = np.array(values, dtype=np.int32)
    copied = token_ids(writable)
    writable += 1
    assert copied.tolist() == values


@pytest.mark.parametrize("wide", [2**31, -(2**31) - 1, 2**63, 2**64 - 1, 2**80])
def test_an_id_over_32_bits_is_refused(wide):
    with pytest.raises(OverflowError):
        token_ids([1, wide])


def test_an_unsigned_id_does_not_wrap_into_a_negative_one():
    with pytest.raises(OverflowError):
        token_ids(np.array([2**64 - 1], dtype=np.uint64))


def test_a_run_with_gaps_is_made_contiguous():
    gaps = token_ids(range(10))[::2]
    assert not gaps.flags.c_contiguous
    run = token_ids(gaps)
    assert run.flags.c_contiguous
    assert run.tolist() == [0, 2, 4, 6, 8]


@given(npst.arrays(np.int64, npst.array_shapes(min_dims=2, max_dims=3, max_side=3), elements=ids))
def test_an_array_of_more_dimensions_is_refused(array):
    with pytest.raises(ValueError, match="one dimension"):
        token_ids(array)


@given(st.lists(runs, max_size=5))
def test_runs_are_joined_in_order(parts):
    joined = concat_tokens([token_ids(part) for part in parts])
    assert joined.tolist() == [value for part in parts for value in part]
    assert not joined.flags.writeable


@given(runs)
def test_bytes_and_back_are_the_same_run(values):
    data = encode_tokens(token_ids(values))
    assert len(data) == TOKEN_BYTES * len(values)
    assert b"".join(value.to_bytes(4, "little", signed=True) for value in values) == data
    for form in (data, memoryview(data)):
        decoded = decode_tokens(form)
        assert decoded.tolist() == values
        assert not decoded.flags.writeable


@given(st.binary(max_size=23).filter(lambda data: len(data) % TOKEN_BYTES))
def test_bytes_that_are_no_whole_tokens_are_refused(data):
    with pytest.raises(ValueError, match="whole tokens"):
        decode_tokens(data)


@given(runs, runs)
def test_runs_have_the_same_hash_exactly_where_they_are_equal(a, b):
    assert (hash_tokens(token_ids(a)) == hash_tokens(token_ids(b))) == (a == b)


def test_the_hash_of_a_run_stays_what_it_was_written_as():
    # Stored in logs: a change of algorithm or byte order would orphan them.
    assert hash_tokens(NO_TOKENS) == "2d06800538d394c2"
    assert hash_tokens(token_ids([1, -1, 2**31 - 1])) == "da5a9a5028c451c8"
