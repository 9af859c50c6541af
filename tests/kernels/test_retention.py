import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from chapbook.kernels.retention import (
    choose_evictions,
    choose_evictions_reference,
    greedy_dual_priority,
    risen_clock,
)


@st.composite
def caches(draw):
    """Entries of (size, priority, pinned), with many ties."""
    priority = st.one_of(st.integers(0, 3).map(float), st.floats(0, 1e9), st.just(np.inf))
    entries = draw(st.lists(st.tuples(st.integers(0, 50), priority, st.booleans()), max_size=20))
    sizes, priorities, pinned = zip(*entries, strict=True) if entries else ((), (), ())
    return {
        "sizes": np.array(sizes, dtype=np.int64),
        "priorities": np.array(priorities, dtype=np.float64),
        "pinned": np.array(pinned, dtype=np.bool_),
    }


amounts = st.integers(-5, 600)


@given(caches(), amounts)
def test_what_goes_is_what_looking_for_the_next_one_says(cache, over):
    gone = choose_evictions(**cache, over=over)
    assert gone.dtype == np.intp
    assert gone.tolist() == choose_evictions_reference(**cache, over=over).tolist()


@given(caches(), amounts)
def test_enough_goes_where_there_is_enough_and_everything_where_there_is_not(cache, over):
    gone = choose_evictions(**cache, over=over)
    assert len(set(gone.tolist())) == len(gone)
    if cache["sizes"].sum() >= over:
        assert cache["sizes"][gone].sum() >= over
    else:
        assert len(gone) == len(cache["sizes"])


@given(caches(), amounts)
def test_the_last_one_to_go_had_to_go(cache, over):
    gone = choose_evictions(**cache, over=over)
    assert not len(gone) or cache["sizes"][gone[:-1]].sum() < over


@given(caches(), amounts)
def test_nothing_pinned_goes_while_something_else_remains(cache, over):
    gone = choose_evictions(**cache, over=over)
    if cache["pinned"][gone].any():
        assert set(np.flatnonzero(~cache["pinned"])) <= set(gone.tolist())


@given(caches(), amounts)
def test_of_one_kind_what_stays_has_no_lower_priority_and_among_equals_the_first_goes(cache, over):
    gone = choose_evictions(**cache, over=over).tolist()
    stays = set(range(len(cache["sizes"]))) - set(gone)
    for left, kept in ((left, kept) for left in gone for kept in stays):
        if cache["pinned"][left] == cache["pinned"][kept]:
            assert (cache["priorities"][left], left) < (cache["priorities"][kept], kept)


# Costs and sizes are such that every quotient and sum is exact.
accesses = st.lists(st.tuples(st.integers(0, 8), st.integers(1, 64)), max_size=40)


def size_of(key):
    return 2 ** (key % 3)


@given(accesses, st.integers(4, 16))
def test_a_rising_clock_lets_go_of_what_lowering_every_priority_does(accesses, room):
    """The algorithm as the paper first states it takes the lowest priority off all others at each eviction."""
    clock, ours, textbook = 0.0, {}, {}
    for key, cost in accesses:
        for held in (ours, textbook):
            held.pop(key, None)
        while sum(map(size_of, textbook)) + size_of(key) > room:
            lowest = min(textbook.values())
            del textbook[next(other for other in textbook if textbook[other] == lowest)]
            textbook = {other: priority - lowest for other, priority in textbook.items()}
        keys = list(ours)
        sizes = np.array([size_of(other) for other in keys], dtype=np.int64)
        priorities = np.array([ours[other] for other in keys])
        over = int(sizes.sum()) + size_of(key) - room
        gone = choose_evictions(sizes=sizes, priorities=priorities, pinned=np.zeros(len(keys), dtype=bool), over=over)
        for index in gone.tolist():
            del ours[keys[index]]
        clock = risen_clock(clock=clock, gone=priorities[gone])
        ours[key] = greedy_dual_priority(clock=clock, cost=cost, size=size_of(key))
        textbook[key] = cost / size_of(key)
        assert {other: priority - clock for other, priority in ours.items()} == textbook


def test_the_clock_never_falls_and_stays_where_nothing_went():
    assert risen_clock(clock=3.0, gone=np.array([1.0, 2.0])) == 3.0
    assert risen_clock(clock=3.0, gone=np.array([1.0, 5.0, 2.0])) == 5.0
    assert risen_clock(clock=3.0, gone=np.array([])) == 3.0


def test_what_is_dear_for_its_size_and_was_used_late_has_the_higher_priority():
    dear, cheap = (greedy_dual_priority(clock=1, cost=cost, size=10) for cost in (50, 20))
    assert (dear, cheap) == (6.0, 3.0)
    assert greedy_dual_priority(clock=2, cost=20, size=10) > cheap
    assert greedy_dual_priority(clock=1, cost=20, size=5) > cheap


@pytest.mark.parametrize(("cost", "size"), [(-1, 1), (1, 0), (1, -1), (float("nan"), 1), (1, float("nan"))])
def test_a_cost_or_a_size_that_can_be_none_is_refused(cost, size):
    with pytest.raises(ValueError, match="an entry costs at least 0"):
        greedy_dual_priority(clock=0, cost=cost, size=size)
