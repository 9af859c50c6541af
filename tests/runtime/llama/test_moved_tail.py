"""Moving a tail: the run, the cells and what the model foretells afterwards; who must not be moved along."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chapbook.kernels.tokens import NO_TOKENS, concat_tokens, token_ids
from chapbook.runtime.llama.library import CancelFlag
from chapbook.runtime.llama.moved_tail import TailMove, move_tail
from chapbook.runtime.llama.places import PARKED
from chapbook.runtime.llama.sequence import SequenceState


def move(engine, sequence, *, keep, dropped, inserted):
    """Move the tail of a sequence, with a scratch sequence whose slot goes back."""
    scratch = SequenceState(PARKED)
    state = engine.residency.state(sequence)
    engine.context.cells.take_slot(scratch)
    done = move_tail(engine.context, state, scratch, keep=keep, dropped=dropped, inserted=inserted)
    if scratch.slot is not None:
        engine.context.cells.give_back(scratch)
    engine.check_integrity()
    return done


def moved(run, *, keep, dropped, inserted):
    """Return what a run is after the move: the plain reference."""
    return concat_tokens([run[:keep], inserted, run[keep + dropped :]])


def log_probabilities(logits):
    shifted = logits.astype(np.float64) - logits.max()
    return shifted - np.log(np.exp(shifted).sum())


@pytest.fixture
def held(open_engine, random_run):
    """Return a function (kind, tokens, **options) -> an engine with a sequence that holds a random run, and that."""

    def hold(kind="llama", tokens=300, **options):
        engine = open_engine(kind, **options)
        sequence = engine.open_sequence()
        engine.sync(sequence, random_run(tokens), reuse=False)
        return engine, sequence, random_run(tokens)

    return hold


def test_the_sequence_holds_prefix_inserted_and_tail_and_goes_on(held, random_run, reply, next_logits):
    engine, sequence, run = held()
    how = {"keep": 100, "dropped": 150, "inserted": random_run(20, seed=1)}
    assert move(engine, sequence, **how) is TailMove.DONE
    after = moved(run, **how)
    assert np.array_equal(engine.resident(sequence), after)
    assert engine.context.cells.used == len(after)
    assert engine.sync(sequence, after).evaluated == 0
    near = log_probabilities(next_logits(engine, sequence))
    report, _ = reply(engine, sequence)
    assert len(report.tokens)
    fresh = engine.open_sequence()
    engine.sync(fresh, after, reuse=False)
    exact = log_probabilities(next_logits(engine, fresh))
    # An approximation: near what evaluating gives, where random logits are several nats apart.
    assert np.abs(near - exact).mean() < 0.6 < np.abs(exact - np.roll(exact, 1)).mean()


@pytest.mark.parametrize("inserted_tokens", [0, 1, 40, 200])
def test_there_and_back_it_is_as_if_never_moved(held, random_run, next_logits, inserted_tokens):
    engine, sequence, run = held()
    before = log_probabilities(next_logits(engine, sequence))
    inserted = random_run(inserted_tokens, seed=1)
    assert move(engine, sequence, keep=100, dropped=60, inserted=inserted) is TailMove.DONE
    assert move(engine, sequence, keep=100, dropped=len(inserted), inserted=run[100:160]) is TailMove.DONE
    assert np.array_equal(engine.resident(sequence), run)
    np.testing.assert_allclose(log_probabilities(next_logits(engine, sequence)), before, atol=0.02)


def test_a_move_evaluates_what_is_inserted_and_one_token(open_engine, random_run):
    decoded = []
    engine = open_engine("llama", on_decode=lambda _sequence, tokens, position: decoded.append((position, len(tokens))))
    sequence = engine.open_sequence()
    engine.sync(sequence, random_run(300))
    decoded.clear()
    move(engine, sequence, keep=100, dropped=150, inserted=random_run(20, seed=1))
    assert decoded == [(100, 20), (169, 1)]


def test_what_is_inserted_may_be_longer_than_a_batch(held, random_run):
    engine, sequence, run = held(n_batch=64, n_ubatch=64)
    how = {"keep": 10, "dropped": 5, "inserted": random_run(500, seed=1)}
    assert move(engine, sequence, **how) is TailMove.DONE
    assert np.array_equal(engine.resident(sequence), moved(run, **how))


@pytest.mark.parametrize(("at", "done"), [(100, TailMove.DONE), (250, TailMove.DONE), (251, TailMove.SHARED)])
def test_a_tail_that_a_fork_shares_is_not_moved_from_under_it(held, random_run, next_logits, at, done):
    engine, sequence, run = held()
    child = engine.fork(sequence, at=at)
    how = {"keep": 100, "dropped": 150, "inserted": random_run(20, seed=1)}
    assert move(engine, sequence, **how) is done
    assert np.array_equal(engine.resident(sequence), moved(run, **how) if done is TailMove.DONE else run)
    # The child is as it was.
    assert np.array_equal(engine.resident(child), run[:at])
    wanted = concat_tokens([run[:at], random_run(5, seed=2)])
    assert engine.sync(child, wanted).cached == at
    mine = next_logits(engine, child)
    fresh = engine.open_sequence()
    engine.sync(fresh, wanted, reuse=False)
    np.testing.assert_allclose(mine, next_logits(engine, fresh), atol=0.05)


def test_a_parked_run_that_shares_the_tail_is_in_the_way_too(held, random_run):
    engine, sequence, run = held()
    other = engine.fork(sequence, at=280)
    engine.sync(other, concat_tokens([run[:280], random_run(30, seed=3)]))
    engine.drop(other)
    how = {"keep": 100, "dropped": 150, "inserted": random_run(20, seed=1)}
    assert move(engine, sequence, **how) is TailMove.SHARED
    assert np.array_equal(engine.resident(sequence), run)


def test_without_cells_for_what_is_inserted_nothing_changes(held, random_run):
    engine, sequence, run = held(tokens=1000, n_ctx=1024)
    free = engine.context.cells.free
    assert move(engine, sequence, keep=100, dropped=150, inserted=random_run(free + 1, seed=1)) is TailMove.NO_ROOM
    assert np.array_equal(engine.resident(sequence), run)
    assert engine.sync(sequence, run).evaluated <= 1


def test_a_cancel_leaves_the_sequence_as_it_was(held, random_run, next_logits):
    engine, sequence, run = held()
    before = next_logits(engine, sequence)
    flag = CancelFlag()
    engine.context.arm(flag)
    flag.set()
    assert move(engine, sequence, keep=100, dropped=50, inserted=random_run(20, seed=1)) is TailMove.CANCELLED
    assert np.array_equal(engine.resident(sequence), run)
    assert engine.sync(sequence, run).evaluated <= 1
    np.testing.assert_allclose(next_logits(engine, sequence), before, atol=0.05)


@pytest.mark.parametrize("kind", ["gemma3", "mamba", "hybrid"])
def test_other_memory_cannot_move_a_tail(open_engine, kind):
    assert not open_engine(kind).context.can_move_tails


def test_a_sliding_window_cannot_though_every_cell_be_kept(open_engine):
    assert not open_engine("gemma3", swa_full=True).context.can_move_tails
    assert open_engine("llama").context.can_move_tails


@settings(max_examples=25)
@given(data=st.data())
def test_any_moves_one_after_the_other_keep_run_and_account_true(tiny_engine, data):
    engine = tiny_engine

    def random_run(tokens, *, seed):
        return token_ids(np.random.default_rng(seed).integers(0, 256, size=tokens))

    run = random_run(data.draw(st.integers(2, 120)), seed=4)
    sequence = engine.open_sequence()
    engine.sync(sequence, run, reuse=False)
    for seed in range(data.draw(st.integers(1, 3))):
        keep = data.draw(st.integers(0, len(run) - 1))
        dropped = data.draw(st.integers(0, len(run) - keep - 1))
        inserted = random_run(data.draw(st.integers(0, 70)), seed=seed) if data.draw(st.booleans()) else NO_TOKENS
        how = {"keep": keep, "dropped": dropped, "inserted": inserted}
        assert move(engine, sequence, **how) is TailMove.DONE
        run = moved(run, **how)
        assert np.array_equal(engine.resident(sequence), run)
    longer = concat_tokens([run, random_run(3, seed=8)])
    assert engine.sync(sequence, longer).evaluated == 3
    engine.check_integrity()
    engine.context.clear(engine.residency.state(sequence))
    engine.drop(sequence)
    engine.check_integrity()


@pytest.fixture(scope="module")
def tiny_engine(tiny):
    """Return one engine for all examples."""
    from chapbook.runtime.llama import LlamaEngine  # noqa: PLC0415  loads llama.cpp

    with LlamaEngine.open(tiny("llama"), n_ctx=1024, n_threads=1, n_batch=64, n_ubatch=64) as engine:
        yield engine
