"""The snapshots in memory: what is held, what goes, and that memory comes back."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from chapbook.kernels.chain import RunNamer
from chapbook.kernels.tokens import token_ids
from chapbook.runtime.prefix_cache.pool import Rung, Snapshot, SnapshotPool, new_buffer

SEED = bytes(16)
PLENTY = 10**12


def make_pool(budget_bytes=10_000, *, reserve_bytes=0, available=lambda: PLENTY):
    return SnapshotPool(budget_bytes, reserve_bytes=reserve_bytes, seed=SEED, available_bytes=available)


def snapshot(tokens, size=1000, *, pinned=False, cost=None, logits=None):
    """A snapshot that counts `size` bytes."""
    tokens = token_ids(tokens)
    state = new_buffer(size - tokens.nbytes - (0 if logits is None else logits.nbytes))
    cost_tokens = len(tokens) if cost is None else cost
    return Snapshot(tokens=tokens, state=state, logits=logits, pinned=pinned, cost_tokens=cost_tokens)


def rung(tokens, length, size=1000, *, pinned=False, cost=None):
    """A rung that counts `size` bytes."""
    name = RunNamer(token_ids(tokens), seed=SEED).name(length)
    state = new_buffer(size - len(name))
    return Rung(name=name, length=length, state=state, pinned=pinned, cost_tokens=length if cost is None else cost)


def test_a_size_counts_state_ids_and_logits():
    one = snapshot(range(10), 1000, logits=np.zeros(50, dtype=np.float32))
    assert (one.state.nbytes, one.tokens.nbytes, one.size_bytes) == (760, 40, 1000)


def test_the_same_run_is_replaced():
    pool = make_pool()
    first, second = snapshot([1, 2]), snapshot([1, 2], 1500)
    assert pool.put(first)
    assert pool.put(second)
    assert pool.snapshots() == (second,)
    assert pool.usage().held_bytes == 1500
    assert pool.evicted() == ()


def test_where_memory_rewinds_a_longer_run_replaces_its_unpinned_beginnings_and_nothing_else():
    pool = make_pool()
    pinned, shorter, other = snapshot([1], pinned=True), snapshot([1, 2]), snapshot([1, 3])
    for each in (pinned, shorter, other):
        assert pool.put(each, covers=True)
    longer = snapshot([1, 2, 4])
    assert pool.put(longer, covers=True)
    assert set(pool.snapshots()) == {pinned, other, longer}
    assert pool.evicted() == ()  # what is covered need not be written to disk


def test_on_memory_that_does_not_rewind_the_shorter_one_stays():
    pool = make_pool()
    shorter, longer = snapshot([1, 2]), snapshot([1, 2, 4])
    pool.put(shorter)
    pool.put(longer)
    assert set(pool.snapshots()) == {shorter, longer}


def test_what_saves_little_for_its_size_goes_first_and_pinned_ones_last():
    pool = make_pool(3000)
    cheap_but_pinned, dear, cheap = snapshot([1], pinned=True, cost=1), snapshot([2], cost=500), snapshot([3], cost=10)
    for each in (cheap_but_pinned, dear, cheap):
        pool.put(each)
    pool.put(snapshot([4], cost=100))
    assert pool.evicted() == (cheap,)
    pool.put(snapshot([5], cost=100))
    assert len(pool.evicted()) == 1
    assert cheap_but_pinned in pool.snapshots()
    assert dear in pool.snapshots()


def test_what_was_used_lately_outlives_what_was_not():
    pool = make_pool(3000)
    old, used = snapshot([1], cost=100), snapshot([2], cost=100)
    pool.put(old)
    pool.put(used)
    for number in range(10, 30):
        pool.touch(used)
        pool.put(snapshot([number], cost=50))
    assert used in pool.snapshots()
    assert old not in pool.snapshots()


def test_what_is_gone_is_touched_and_dropped_without_effect():
    pool = make_pool()
    one, other = snapshot([1]), rung([1], 1)
    pool.put(one)
    pool.put_rung(other)
    for _ in range(2):
        pool.drop(one)
        pool.drop(other)
        pool.touch(one)
        pool.touch(other)
    assert pool.usage().held_bytes == 0
    pool.check_integrity()


def test_evicted_ones_are_told_once():
    pool = make_pool(1000)
    one = snapshot([1])
    pool.put(one)
    pool.put(snapshot([2]))
    assert pool.evicted() == (one,)
    assert pool.evicted() == ()


def test_evicted_ones_are_kept_while_only_rungs_go_and_until_others_do():
    pool = make_pool(2000)
    first, second = snapshot([1], cost=1), snapshot([2], cost=10)
    pool.put(first)
    pool.put_rung(rung([3], 1, cost=5))
    pool.put_rung(rung([4], 1, cost=1000))  # the snapshot goes
    pool.put(second)  # the first rung goes
    pool.drop(second)
    assert pool.evicted() == (first,)
    pool.put(second)
    pool.put(snapshot([5], cost=20))
    pool.put(snapshot([6], cost=30))
    assert [each.tokens.tolist() for each in pool.evicted()] == [[5]]


# Rungs


def test_rungs_are_found_by_the_run_alone_and_ascending():
    pool = make_pool(100_000)
    run, other = list(range(1000)), [*range(600), 7, 7]
    for length in (700, 300, 512, 256, 1):
        pool.put_rung(rung(run, length))
    assert pool.rungs_of(RunNamer(token_ids(run), seed=SEED), 1000) == (1, 256, 300, 512, 700)
    assert pool.rungs_of(RunNamer(token_ids(run), seed=SEED), 699) == (1, 256, 300, 512)
    assert pool.rungs_of(RunNamer(token_ids(other), seed=SEED), 10**6) == (1, 256, 300, 512)
    assert pool.rungs_of(RunNamer(token_ids(run), seed=bytes(range(16))), 1000) == ()


def test_a_rung_comes_back_by_its_name():
    pool = make_pool()
    held = rung(range(300), 280)
    pool.put_rung(held)
    assert pool.rung(held.name) is held
    assert pool.rung(rung(range(300), 279).name) is None
    again = rung(range(300), 280, 500)
    pool.put_rung(again)
    assert pool.rung(held.name) is again
    assert pool.usage().held_bytes == 500


# Refusals


def test_what_is_larger_than_the_budget_is_refused_and_what_is_held_stays():
    pool = make_pool(1000)
    held = snapshot([1])
    pool.put(held)
    assert not pool.put(snapshot([2], 1001))
    assert not pool.put_rung(rung([2], 1, 1001))
    assert not pool.room_for(1001)
    assert pool.room_for(1000)
    assert pool.snapshots() == (held,)


def test_refusals_in_a_row_give_one_note_with_the_numbers():
    pool = make_pool(64_000_000)
    for _ in range(3):
        assert not pool.room_for(94_000_000)
    (note,) = pool.drain_notes()
    assert note == (
        "memory for snapshots is used up: one of 94.0 MB does not fit in 64.0 MB; "
        "cache.memory_mb sets how much there is"
    )
    assert not pool.room_for(94_000_000)
    assert pool.drain_notes() == ()
    assert pool.put(snapshot([1]))
    assert not pool.room_for(94_000_000)
    assert len(pool.drain_notes()) == 1


def test_a_budget_of_nothing_takes_nothing_and_is_no_news():
    pool = make_pool(0)
    assert not pool.put(snapshot([1]))
    assert pool.drain_notes() == ()


def test_nothing_is_taken_where_the_reserve_would_not_stay_free():
    pool = make_pool(10_000_000, reserve_bytes=5_000_000, available=lambda: 5_500_000)
    assert pool.room_for(500_000)
    assert not pool.room_for(500_001)
    (note,) = pool.drain_notes()
    assert "with one of 500.0 kB and none besides it 5.0 MB would be free, and 5.0 MB must be" in note


def test_memory_that_others_want_is_given_back_dearest_last():
    free = [100_000]
    pool = make_pool(10_000, reserve_bytes=50_000, available=lambda: free[0] - pool.usage().held_bytes)
    cheap, dear = snapshot([1], 2000, cost=1), snapshot([2], 2000, cost=9)
    pool.put(cheap)
    pool.put(dear)
    free[0] = 52_500  # 48,500 are available: 1,500 are missing
    assert pool.room_for(2500)
    assert not pool.room_for(2600)
    assert pool.evicted() == (cheap,)
    assert pool.snapshots() == (dear,)
    free[0] = 0
    assert not pool.room_for(1)
    assert pool.usage().held_bytes == 0


def test_what_is_replaced_counts_towards_what_is_missing():
    free = [100_000]
    pool = make_pool(10_000, reserve_bytes=50_000, available=lambda: free[0] - pool.usage().held_bytes)
    other, shorter = snapshot([9], cost=1), snapshot([1], 2000)
    pool.put(other)
    pool.put(shorter)
    free[0] = 51_000
    assert pool.put(snapshot([1, 2]), covers=True)
    assert other in pool.snapshots()


def test_room_made_beforehand_lets_go_of_what_the_snapshot_will_replace_and_of_nothing_else():
    pool = make_pool(2000)
    other, shorter = snapshot([9], cost=1), snapshot([1, 2], cost=1000)
    pool.put(other)
    pool.put(shorter)
    longer = snapshot([1, 2, 3])
    assert pool.make_room(longer.size_bytes, run=longer.tokens, covers=True)
    assert pool.snapshots() == (other,)
    assert pool.put(longer, covers=True)
    assert pool.snapshots() == (other, longer)
    assert pool.evicted() == ()


def test_a_smaller_budget_lets_go_of_what_does_not_fit():
    pool = make_pool(3000)
    kept, going = snapshot([1], cost=9), snapshot([2], cost=1)
    pool.put(kept)
    pool.put(going)
    pool.resize(1999)
    assert pool.evicted() == (going,)
    assert pool.snapshots() == (kept,)
    assert pool.usage().budget_bytes == 1999


# Against a plain model

RUNS = ((0,), (0, 1), (0, 1, 0), (0, 1, 1), (0, 1, 1, 2), (1,), (1, 1), (2, 0, 1))
runs = st.sampled_from(RUNS)
sizes, costs = st.integers(100, 1500), st.integers(0, 300)


class Held:
    """What the plain model keeps of one entry."""

    def __init__(self, value, run, priority):
        self.value, self.run, self.priority = value, run, priority


class PoolMachine(RuleBasedStateMachine):
    """A pool on a machine whose free memory others change, and a list that does the same one entry at a time."""

    RESERVE = 5000

    def __init__(self):
        super().__init__()
        self.free, self.budget, self.clock = 20_000, 4000, 0.0
        self.in_hand = 0
        self.model: list[Held] = []
        self.going: list[Snapshot] = []
        self.pool = SnapshotPool(self.budget, reserve_bytes=self.RESERVE, seed=SEED, available_bytes=self.available)

    def held_bytes(self):
        return sum(each.value.size_bytes for each in self.model)

    def available(self):
        return self.free - self.pool.usage().held_bytes - self.in_hand

    def priority(self, value):
        return self.clock + value.cost_tokens / value.size_bytes

    def evict(self, enough):
        """Let go of the least until `enough()`."""
        going = []
        while self.model and not enough():
            least = min(self.model, key=lambda each: (each.value.pinned, each.priority))
            self.model.remove(least)
            going.append(least)
        self.clock = max([self.clock, *(each.priority for each in going)])
        self.going = [each.value for each in going if isinstance(each.value, Snapshot)] or self.going

    def enough_free(self, size=0):
        return self.free - self.held_bytes() - self.in_hand - size >= self.RESERVE

    def take(self, size, replaced, *, in_hand):
        """Make room in the model as the pool must; whether there is any."""
        to_come = 0 if in_hand else size
        if size > self.budget or self.free - self.in_hand - to_come < self.RESERVE:
            self.evict(self.enough_free)
            return False
        self.model = [each for each in self.model if each not in replaced]
        self.evict(lambda: self.enough_free(to_come) and self.held_bytes() + size <= self.budget)
        return True

    def replaced(self, run, covers):
        return [
            each
            for each in self.model
            if isinstance(each.value, Snapshot)
            and (
                each.run == run
                or (covers and not each.value.pinned and each.run == run[: len(each.run)] and len(each.run) < len(run))
            )
        ]

    @rule(run=runs, size=sizes, cost=costs, pinned=st.booleans(), covers=st.booleans())
    def put(self, run, size, cost, pinned, covers):
        value = snapshot(run, size, pinned=pinned, cost=cost)
        self.in_hand = size
        expected = self.take(size, self.replaced(run, covers), in_hand=True)
        assert self.pool.put(value, covers=covers) == expected
        self.in_hand = 0
        if expected:
            self.model.append(Held(value, run, self.priority(value)))
            assert self.available() >= self.RESERVE

    @rule(run=runs, size=sizes, cost=costs, pinned=st.booleans(), data=st.data())
    def put_rung(self, run, size, cost, pinned, data):
        length = data.draw(st.integers(1, len(run)))
        value = rung(run, length, size, pinned=pinned, cost=cost)
        same = [each for each in self.model if isinstance(each.value, Rung) and each.run == run[:length]]
        self.in_hand = size
        expected = self.take(size, same, in_hand=True)
        assert self.pool.put_rung(value) == expected
        self.in_hand = 0
        if expected:
            self.model.append(Held(value, run[:length], self.priority(value)))

    @rule(size=sizes, run=st.none() | runs, covers=st.booleans())
    def make_room(self, size, run, covers):
        replaced = [] if run is None else self.replaced(run, covers)
        expected = self.take(size, replaced, in_hand=False)
        assert self.pool.make_room(size, run=run and token_ids(run), covers=covers) == expected
        if expected:
            assert self.pool.usage().held_bytes + size <= self.budget
            assert self.available() - size >= self.RESERVE

    @rule(size=sizes)
    def room_for(self, size):
        if expected := (size <= self.budget and self.free - size >= self.RESERVE):
            before = self.held_bytes()
        else:
            self.evict(self.enough_free)
        assert self.pool.room_for(size) == expected
        assert not expected or self.pool.usage().held_bytes == before

    @precondition(lambda self: self.model)
    @rule(data=st.data(), keep=st.booleans())
    def use_or_drop(self, data, keep):
        each = data.draw(st.sampled_from(self.model))
        if keep:
            self.pool.touch(each.value)
            each.priority = self.priority(each.value)
        else:
            self.pool.drop(each.value)
            self.model.remove(each)

    @rule(free=st.integers(4500, 9500))
    def others_take_memory(self, free):
        self.free = free

    @rule(budget=st.integers(0, 5000))
    def resize(self, budget):
        self.budget = budget
        self.evict(lambda: self.held_bytes() <= budget)
        self.pool.resize(budget)

    @rule()
    def drain(self):
        assert list(self.pool.evicted()) == self.going
        self.going = []

    @invariant()
    def the_same_is_held(self):
        self.pool.check_integrity()
        usage = self.pool.usage()
        assert (usage.held_bytes, usage.budget_bytes) == (self.held_bytes(), self.budget)
        snapshots = {each.value for each in self.model if isinstance(each.value, Snapshot)}
        assert set(self.pool.snapshots()) == snapshots
        rungs = {each.run: each.value for each in self.model if isinstance(each.value, Rung)}
        assert (usage.snapshots, usage.rungs) == (len(snapshots), len(rungs))
        for run in RUNS:
            namer = RunNamer(token_ids(run), seed=SEED)
            lengths = tuple(length for length in range(1, len(run) + 1) if run[:length] in rungs)
            assert self.pool.rungs_of(namer, len(run)) == lengths
            assert all(self.pool.rung(namer.name(length)) is rungs[run[:length]] for length in lengths)


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


# Real memory

MEMORY_PROGRAM = """
import json
import numpy as np
import psutil
from chapbook.kernels.tokens import token_ids
from chapbook.runtime.prefix_cache.pool import Snapshot, SnapshotPool, new_buffer

MB = 1_000_000
process = psutil.Process()
rss = lambda: process.memory_info().rss

def fill(run, size):
    state = new_buffer(size)
    state[:] = 1
    return Snapshot(tokens=token_ids(run), state=state, logits=None, pinned=False, cost_tokens=len(run))

pool = SnapshotPool(64 * MB, reserve_bytes=0, seed=bytes(16), available_bytes=lambda: 10**12)
for number in range(4):
    pool.put(fill([number], 24 * MB))
pool.resize(0), pool.evicted(), pool.resize(64 * MB)
start, peak, between = rss(), 0, []
for session in range(40):
    size = (1 + session * 7 % 13) * MB
    assert pool.make_room(size + 4)
    pool.evicted()
    assert pool.put(fill([session], size))
    between.append(np.zeros(1000))  # what lives on keeps malloc from giving back what lies below it
    peak = max(peak, rss())
held = pool.usage().held_bytes
for snapshot in pool.snapshots():
    pool.drop(snapshot)
del snapshot
print(json.dumps({"start": start, "peak": peak, "held": held, "end": rss()}))
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="what RSS counts differs by system")
def test_rss_stays_within_the_budget_and_falls_back_when_snapshots_go():
    ended = subprocess.run([sys.executable, "-c", MEMORY_PROGRAM], capture_output=True, text=True, check=True)
    told = json.loads(ended.stdout)
    assert told["held"] > 50_000_000
    assert told["held"] <= told["peak"] - told["start"] <= 64_000_000 * 1.1
    assert told["end"] - told["start"] < 2_000_000


@pytest.mark.parametrize("size", [0, 1, 4096, 19_531])
def test_a_buffer_has_the_size_that_was_asked_for_and_can_be_written(size):
    buffer = new_buffer(size)
    assert (buffer.shape, buffer.dtype) == ((size,), np.uint8)
    buffer[:] = 7
    assert (buffer == 7).all()
