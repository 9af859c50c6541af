"""The estimate behind the bar of a prefill."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chapbook.runtime.cli.waiting import PrefillEstimate
from chapbook.runtime.stream import PrefillProgressed


def progress(done, total, seconds):
    return PrefillProgressed(evaluated_tokens=done, total_tokens=total, seconds=seconds)


def test_it_goes_on_at_the_rate_of_the_last_batch_and_stops_at_the_end_of_the_one_that_is_evaluated():
    estimate = PrefillEstimate()
    estimate.report(progress(0, 300, 0.0), now_s=10.0)
    assert estimate.done_tokens(99.0) == 0, "nothing is known of the rate"
    estimate.report(progress(100, 300, 2.0), now_s=12.0)
    assert estimate.done_tokens(13.0) == pytest.approx(150)
    assert estimate.done_tokens(50.0) == pytest.approx(200)
    estimate.report(progress(200, 300, 12.0), now_s=22.0)
    assert estimate.tokens_a_second == pytest.approx(10)
    assert estimate.done_tokens(27.0) == pytest.approx(250)
    assert estimate.done_tokens(1000.0) == 299
    estimate.report(progress(300, 300, 30.0), now_s=1000.0)
    assert estimate.done_tokens(1000.0) == 300


def test_another_prefill_begins_at_nothing():
    estimate = PrefillEstimate()
    for done, seconds in ((0, 0.0), (100, 1.0)):
        estimate.report(progress(done, 100, seconds), now_s=seconds)
    estimate.report(progress(0, 100, 0.1), now_s=5.0)
    assert estimate.done_tokens(60.0) == 0


@given(
    batches=st.lists(st.tuples(st.integers(1, 512), st.floats(0, 60)), min_size=1, max_size=8),
    looks=st.lists(st.floats(0, 90), max_size=5),
)
def test_it_never_goes_back_nor_beyond_the_batch_nor_to_the_whole_before_it_is_there(batches, looks):
    total = sum(tokens for tokens, _ in batches)
    estimate, done, seconds, shown, largest = PrefillEstimate(), 0, 0.0, 0.0, 0
    estimate.report(progress(0, total, 0.0), now_s=0.0)
    for tokens, took in batches:
        for look in sorted(looks):
            now = estimate.done_tokens(seconds + look)
            assert shown <= now <= min(done + largest, total - 1)
            shown = now
        done, seconds, largest = done + tokens, seconds + took, max(largest, tokens)
        estimate.report(progress(done, total, seconds), now_s=seconds)
        assert done <= estimate.done_tokens(seconds)
    assert estimate.done_tokens(seconds) == total
