import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from chapbook.kernels.tokens import concat_tokens, token_ids
from chapbook.runtime.engine import MemoryKind, SyncSource
from chapbook.runtime.prefix_cache.modes import ReuseModes
from chapbook.runtime.prefix_cache.plan import Held, HeldRun, plan_sync

RUN = token_ids(range(100))
BACKWARD_ONLY_TO_COPIES = (MemoryKind.SLIDING, MemoryKind.RECURRENT, MemoryKind.HYBRID)


def own(tokens=RUN, **more):
    return HeldRun(where=Held.OWN, tokens=tokens, **more)


def elsewhere(where, tokens=RUN, **more):
    return HeldRun(where=where, tokens=tokens, key=1, **more)


def plan_from(*held, wanted, kind=MemoryKind.FULL, **more):
    return plan_sync(wanted, held, kind=kind, **more)


def test_an_extension_keeps_everything_on_every_memory():
    for kind in MemoryKind:
        plan = plan_from(own(), wanted=token_ids(range(120)), kind=kind)
        assert (plan.source, plan.keep, plan.reason) == (SyncSource.RESIDENT, 100, "")


def test_the_same_run_with_its_logits_at_hand_costs_nothing():
    for kind in MemoryKind:
        plan = plan_from(own(logits_at_hand=True), wanted=RUN, kind=kind)
        assert (plan.source, plan.keep) == (SyncSource.RESIDENT, 100)


def test_the_same_run_without_logits_evaluates_its_last_token_again():
    plan = plan_from(own(), wanted=RUN)
    assert (plan.source, plan.keep) == (SyncSource.REWIND, 99)
    assert "logits" in plan.reason


def test_a_shorter_run_evaluates_its_last_token_again_and_says_why():
    plan = plan_from(own(logits_at_hand=True), wanted=RUN[:50])
    assert (plan.source, plan.keep) == (SyncSource.REWIND, 49)
    assert "ends before" in plan.reason


def test_a_difference_is_named_by_its_token():
    plan = plan_from(own(), wanted=concat_tokens([RUN[:40], token_ids([7, 7])]))
    assert (plan.source, plan.keep) == (SyncSource.REWIND, 40)
    assert "token 40" in plan.reason


def test_nothing_shared_starts_over():
    plan = plan_from(own(), wanted=token_ids([99, 98]))
    assert (plan.source, plan.keep) == (SyncSource.NOTHING, 0)
    assert plan.reason
    assert plan_from(wanted=RUN).reason == ""


def test_a_sliding_window_rewinds_only_where_the_window_before_the_cut_is_held():
    # To go on at token 60 with a window of 16, tokens from 44 on must be held.
    wanted = concat_tokens([RUN[:60], token_ids([7])])
    for first_held, source in ((0, SyncSource.REWIND), (44, SyncSource.REWIND), (45, SyncSource.NOTHING)):
        plan = plan_from(own(first_held=first_held), wanted=wanted, kind=MemoryKind.SLIDING, window_tokens=16)
        assert plan.source is source, first_held
    assert "window" in plan.reason


@pytest.mark.parametrize("kind", BACKWARD_ONLY_TO_COPIES)
def test_memory_that_cannot_go_back_takes_the_highest_rung_below_the_cut_or_starts_over(kind):
    wanted = concat_tokens([RUN[:60], token_ids([7])])
    held = own(first_held=99)
    plan = plan_from(held, wanted=wanted, kind=kind, rungs=(20, 50, 61))
    assert (plan.source, plan.keep, plan.rung) == (SyncSource.PARTIAL, 50, 50)
    plan = plan_from(held, wanted=wanted, kind=kind, rungs=(61,))
    assert (plan.source, plan.keep) == (SyncSource.NOTHING, 0)
    assert "60 tokens are shared" in plan.reason


def test_a_rung_is_a_whole_state_on_recurrent_memory_only():
    wanted = token_ids(range(60))
    for kind in MemoryKind:
        plan = plan_from(wanted=wanted, kind=kind, rungs=(50,))
        assert (plan.source, plan.keep) == (
            (SyncSource.PARTIAL, 50) if kind is MemoryKind.RECURRENT else (SyncSource.NOTHING, 0)
        )


def test_what_leaves_least_to_evaluate_wins_and_the_cheapest_among_equals():
    wanted = token_ids(range(101))
    sources = {Held.OTHER: SyncSource.FORK, Held.MEMORY: SyncSource.MEMORY, Held.DISK: SyncSource.DISK}
    for where, source in sources.items():
        plan = plan_from(own(RUN[:10]), elsewhere(where), wanted=wanted)
        assert (plan.source, plan.keep) == (source, 100)
    everywhere = [elsewhere(where) for where in sources]
    assert plan_from(own(), *everywhere, wanted=wanted).source is SyncSource.RESIDENT
    assert plan_from(*everywhere, wanted=wanted).source is SyncSource.FORK
    # Other kinds copy a whole state to fork it, which a snapshot in memory has done already.
    assert plan_from(*everywhere, wanted=wanted, kind=MemoryKind.HYBRID).source is SyncSource.MEMORY


def test_a_copy_must_be_worth_it():
    wanted = token_ids(range(101))
    for where, gain in ((Held.MEMORY, 8), (Held.DISK, 32)):
        for more, source in ((gain - 1, SyncSource.RESIDENT), (gain, None)):
            plan = plan_from(own(RUN[: 100 - more]), elsewhere(where), wanted=wanted)
            assert (plan.source is SyncSource.RESIDENT) == (source is SyncSource.RESIDENT)


def test_a_disk_snapshot_brings_rungs_of_its_own():
    wanted = concat_tokens([RUN[:60], token_ids([7])])
    plan = plan_from(elsewhere(Held.DISK, rungs=(20, 55)), wanted=wanted, kind=MemoryKind.HYBRID)
    assert (plan.source, plan.keep, plan.rung) == (SyncSource.DISK, 55, 55)


@pytest.mark.parametrize(
    ("mode", "held", "kind"),
    [
        ("rewind", own(), MemoryKind.FULL),
        ("fork", elsewhere(Held.OTHER), MemoryKind.FULL),
        ("memory_snapshot", elsewhere(Held.MEMORY), MemoryKind.FULL),
        ("disk_snapshot", elsewhere(Held.DISK), MemoryKind.FULL),
        ("partial_snapshot", own(first_held=99), MemoryKind.HYBRID),
    ],
)
def test_a_mode_that_is_off_is_not_used(mode, held, kind):
    wanted = concat_tokens([RUN[:60], token_ids([7])])
    rungs = () if kind.rewinds else (50,)
    assert plan_from(held, wanted=wanted, kind=kind, rungs=rungs).keep >= 50
    off = plan_from(held, wanted=wanted, kind=kind, rungs=rungs, modes=ReuseModes(**{mode: False}))
    assert (off.source, off.keep) == (SyncSource.NOTHING, 0)


runs = st.lists(st.integers(0, 2), max_size=40).map(token_ids)
held_runs = st.lists(
    st.builds(
        HeldRun,
        where=st.sampled_from([Held.OTHER, Held.MEMORY, Held.DISK]),
        tokens=runs,
        key=st.integers(0, 9),
        logits_at_hand=st.booleans(),
        first_held=st.integers(0, 40),
        rungs=st.just(()),
    ),
    max_size=4,
)
own_runs = st.builds(
    HeldRun, where=st.just(Held.OWN), tokens=runs, logits_at_hand=st.booleans(), first_held=st.integers(0, 40)
)


@given(
    wanted=runs.filter(len),
    mine=own_runs,
    others=held_runs,
    kind=st.sampled_from(MemoryKind),
    window_tokens=st.integers(1, 5),
    data=st.data(),
)
def test_a_plan_keeps_only_what_is_right_and_leaves_a_token_for_the_logits(
    *, wanted, mine, others, kind, window_tokens, data
):
    rungs = data.draw(st.lists(st.integers(1, len(wanted)), unique=True).map(sorted))
    held = [mine, *others]
    plan = plan_sync(wanted, held, kind=kind, window_tokens=window_tokens, rungs=rungs)
    base = plan.base
    if base is None:
        assert plan.keep == plan.rung
        assert plan.keep == 0 or (kind is MemoryKind.RECURRENT and plan.keep in rungs)
        return
    assert np.array_equal(base.tokens[: plan.keep], wanted[: plan.keep])
    whole = base.logits_at_hand and np.array_equal(base.tokens, wanted)
    assert plan.keep < len(wanted) or whole
    if plan.rung:
        assert plan.rung == plan.keep
        assert plan.rung in rungs
    elif plan.keep < len(base.tokens):
        in_window = kind is MemoryKind.SLIDING and base.first_held <= max(0, plan.keep - window_tokens)
        assert kind.rewinds or in_window


@given(wanted=runs.filter(len), mine=own_runs, others=held_runs)
def test_on_memory_that_rewinds_a_plan_keeps_the_longest_shared_run_but_for_what_a_copy_costs(wanted, mine, others):
    plan = plan_sync(wanted, [mine, *others], kind=MemoryKind.FULL)
    longest = 0
    for run in (mine, *others):
        shared = next(
            (at for at, (a, b) in enumerate(zip(run.tokens, wanted, strict=False)) if a != b),
            min(len(run.tokens), len(wanted)),
        )
        longest = max(longest, min(shared, len(wanted) - 1))
    assert longest - 31 <= plan.keep <= max(longest, len(wanted) * plan.base.logits_at_hand if plan.base else 0)
