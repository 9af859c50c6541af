import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from chapbook.kernels.tokens import NO_TOKENS, concat_tokens, token_ids
from chapbook.runtime.engine import MemoryKind, SyncSource
from chapbook.runtime.sync_plan import HeldMemory, plan_sync

RESIDENT = token_ids(range(100))


def held(kind=MemoryKind.FULL, resident=RESIDENT, **changes):
    return HeldMemory(kind=kind, resident=resident, **changes)


def test_an_extension_keeps_everything_on_every_memory():
    for kind in MemoryKind:
        plan = plan_sync(token_ids(range(120)), held(kind))
        assert (plan.source, plan.keep, plan.reason) == (SyncSource.RESIDENT, 100, "")


def test_the_same_run_with_its_logits_at_hand_costs_nothing():
    for kind in MemoryKind:
        plan = plan_sync(RESIDENT, held(kind, logits_at_hand=True))
        assert (plan.source, plan.keep) == (SyncSource.RESIDENT, 100)


def test_the_same_run_without_logits_evaluates_its_last_token_again():
    plan = plan_sync(RESIDENT, held())
    assert (plan.source, plan.keep) == (SyncSource.REWIND, 99)
    assert "logits" in plan.reason


def test_a_shorter_run_evaluates_its_last_token_again_and_says_why():
    plan = plan_sync(RESIDENT[:50], held(logits_at_hand=True))
    assert (plan.source, plan.keep) == (SyncSource.REWIND, 49)
    assert "ends before" in plan.reason


def test_a_difference_is_named_by_its_token():
    plan = plan_sync(concat_tokens([RESIDENT[:40], token_ids([7, 7])]), held())
    assert (plan.source, plan.keep) == (SyncSource.REWIND, 40)
    assert "token 40" in plan.reason


def test_nothing_shared_starts_over():
    plan = plan_sync(token_ids([99, 98]), held())
    assert (plan.source, plan.keep) == (SyncSource.NOTHING, 0)
    assert plan.reason
    assert plan_sync(RESIDENT, held(resident=NO_TOKENS)).reason == ""


def test_a_sliding_window_rewinds_only_where_the_window_before_the_cut_is_held():
    # To go on at token 60 with a window of 16, tokens from 44 on must be held.
    wanted = concat_tokens([RESIDENT[:60], token_ids([7])])
    for first_held, source in ((0, SyncSource.REWIND), (44, SyncSource.REWIND), (45, SyncSource.NOTHING)):
        plan = plan_sync(wanted, held(MemoryKind.SLIDING, window_tokens=16, first_held=first_held))
        assert plan.source is source, first_held
    assert "window" in plan.reason


def test_recurrent_memory_goes_back_to_a_snapshot_or_starts_over():
    wanted = concat_tokens([RESIDENT[:60], token_ids([7])])
    for kind in (MemoryKind.RECURRENT, MemoryKind.HYBRID):
        plan = plan_sync(wanted, held(kind, snapshot=RESIDENT[:50]))
        assert (plan.source, plan.keep) == (SyncSource.SNAPSHOT, 50)
        for useless in (NO_TOKENS, RESIDENT[:70], token_ids([1, 2, 3])):
            plan = plan_sync(wanted, held(kind, snapshot=useless))
            assert (plan.source, plan.keep) == (SyncSource.NOTHING, 0)
            assert "cannot drop a tail" in plan.reason


runs = st.lists(st.integers(0, 2), max_size=12).map(token_ids)


memories = st.builds(
    HeldMemory,
    kind=st.sampled_from(MemoryKind),
    resident=runs,
    logits_at_hand=st.booleans(),
    window_tokens=st.integers(1, 5),
    first_held=st.integers(0, 12),
    snapshot=runs,
)


@given(wanted=runs.filter(len), memory=memories)
def test_a_plan_keeps_only_what_is_right_and_leaves_a_token_for_the_logits(wanted, memory):
    kind, resident = memory.kind, memory.resident
    plan = plan_sync(wanted, memory)
    assert np.array_equal(resident[: plan.keep], wanted[: plan.keep])
    untouched = memory.logits_at_hand and np.array_equal(resident, wanted)
    assert plan.keep == len(wanted) if untouched else plan.keep < len(wanted)
    if plan.source is SyncSource.RESIDENT:
        assert plan.keep == len(resident) > 0
    elif plan.source is SyncSource.NOTHING:
        assert plan.keep == 0
    elif plan.source is SyncSource.SNAPSHOT:
        assert not kind.rewinds
        assert np.array_equal(memory.snapshot, wanted[: plan.keep])
    else:
        assert kind in (MemoryKind.FULL, MemoryKind.SLIDING)
        assert 0 < plan.keep < len(resident)
        if kind is MemoryKind.SLIDING:
            assert memory.first_held <= max(0, plan.keep - memory.window_tokens)
    assert bool(plan.reason) == (plan.keep < len(resident))
