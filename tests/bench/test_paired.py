"""The arithmetic of paired ratios: what they are, how sure they are, and that a slow side is seen."""

import math
import statistics

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chapbook.bench.paired import (
    CONFIDENCE,
    Figure,
    PairedTimes,
    Target,
    is_undecided,
    judged,
    ranks_outside,
    time_pair,
)

seconds = st.floats(1e-6, 1e3)


def paired(pairs):
    times = PairedTimes()
    for ours_s, baseline_s in pairs:
        times.add(ours_s, baseline_s)
    return times


@given(st.lists(st.tuples(seconds, seconds), min_size=1, max_size=40))
def test_a_paired_ratio_is_the_median_of_the_baselines_time_over_ours(pairs):
    figure = paired(pairs).figure("x")
    ratios = [baseline_s / ours_s for ours_s, baseline_s in pairs]
    assert figure.value == statistics.median(ratios)
    assert min(ratios) <= figure.low <= figure.value <= figure.high <= max(ratios)
    assert figure.of_totals == pytest.approx(sum(pair[1] for pair in pairs) / sum(pair[0] for pair in pairs))
    assert figure.pairs == len(pairs)


def test_a_side_that_takes_twice_as_long_has_half_the_speed():
    assert paired([(2.0, 1.0), (4.0, 2.0), (2.0, 1.0)]).figure("x").value == 0.5


def test_what_slows_both_of_a_pair_leaves_the_ratio_alone():
    quiet = paired([(1.1, 1.0)] * 9).figure("x")
    noisy = paired([(1.1 * noise, 1.0 * noise) for noise in (1, 7, 2, 30, 1, 1, 4, 9, 2)]).figure("x")
    assert noisy.value == pytest.approx(quiet.value)
    assert noisy.low == pytest.approx(quiet.low)


def test_no_pairs_are_no_number_and_meet_no_target():
    for relation in (">=", "<=", ">"):
        figure = judged(PairedTimes().figure("x"), Target(relation, 0.5))
        assert math.isnan(figure.value)
        assert figure.met is False


@pytest.mark.parametrize(
    ("relation", "value", "met"),
    [
        (">=", 0.97, True), (">=", 0.969, False), ("<=", 60.0, True), ("<=", 60.1, False), (">", 5.0, False),
        (">", 5.1, True),
    ],
)  # fmt: skip
def test_a_figure_is_judged_by_its_target(relation, value, met):
    limit = {">=": 0.97, "<=": 60.0, ">": 5.0}[relation]
    assert judged(Figure(name="x", value=value), Target(relation, limit)).met is met


@pytest.mark.parametrize(
    ("low", "high", "undecided"), [(0.9, 1.0, True), (0.98, 1.0, False), (0.9, 0.979, False), (None, None, False)]
)
def test_a_target_between_the_bounds_is_undecided(low, high, undecided):
    figure = Figure(name="x", value=0.95, low=low, high=high)
    assert is_undecided(judged(figure, Target(">=", 0.98))) is undecided
    assert not is_undecided(figure)


@settings(max_examples=40)
@given(st.integers(1, 600))
def test_the_ranks_left_out_are_the_most_that_keep_the_confidence(n):
    """By exact integers: both tails together, P(at most k - 1 of n coins are heads) twice, stay within 5 %."""

    def tails(outside):
        return 2 * sum(math.comb(n, count) for count in range(outside)) / 2**n

    outside = ranks_outside(n)
    assert 0 <= outside <= (n - 1) // 2
    assert tails(outside) <= 1 - CONFIDENCE + 1e-9
    if outside < (n - 1) // 2:
        assert tails(outside + 1) > 1 - CONFIDENCE - 1e-9


@pytest.mark.parametrize("ours_first", [True, False])
def test_a_pair_is_timed_in_the_order_asked_for_and_returned_as_ours_and_baseline(ours_first):
    clock_s, order = 0.0, []

    def work(name, takes_s):
        def run():
            nonlocal clock_s
            order.append(name)
            clock_s += takes_s

        return run

    pair = time_pair(work("ours", 3.0), work("baseline", 5.0), ours_first=ours_first, timer=lambda: clock_s)
    assert pair == (3.0, 5.0)
    assert order == (["ours", "baseline"] if ours_first else ["baseline", "ours"])
