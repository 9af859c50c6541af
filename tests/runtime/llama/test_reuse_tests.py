"""The self-test of the reuse modes: what works passes on every kind of memory, and each way to be wrong is found."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest

from chapbook.kernels.errors import UsageError
from chapbook.kernels.tokens import concat_tokens
from chapbook.runtime.llama.memory import ContextMemory
from chapbook.runtime.llama.reuse_tests import GIVEN_TOKENS, run_mode_tests
from chapbook.runtime.prefix_cache.mode_results import ModeResult, ModeResults, Outcome, save_results
from chapbook.runtime.prefix_cache.modes import ALL_MODES, ReuseModes
from chapbook.runtime.prefix_cache.options import CacheOptions

KINDS = ("llama", "gemma3", "mamba", "hybrid")
MODES = ReuseModes.__struct_fields__
NOT_APPLICABLE = {
    "llama": {"partial_snapshot"},
    "gemma3": {"moved_tail"},
    "mamba": {"rewind", "moved_tail"},
    "hybrid": {"rewind", "moved_tail"},
}
HELD = GIVEN_TOKENS - 1


class LostCells(ContextMemory):
    """Of what is kept at a rewind, [20, 40) is lost: as a sliding window that was let go of, and no call says so."""

    def drop_tail(self, slot, position):
        dropped = super().drop_tail(slot, position)
        self._api.llama_memory_seq_rm(self._memory, slot, 20, 40)
        return dropped


class HalfShared(ContextMemory):
    """A fork shares all but [20, 40)."""

    def share(self, source, target, length):
        super().share(source, target, length)
        self._api.llama_memory_seq_rm(self._memory, target, 20, 40)


class OtherState(ContextMemory):
    """A whole or partial state that is restored is that of another run of the same length."""

    def __init__(self, context, *, whole, partial):
        super().__init__(context)
        self.whole, self.partial = whole, partial

    def restore_whole(self, slot, copy, *, tokens):
        return super().restore_whole(slot, self.whole if self.whole is not None else copy, tokens=tokens)

    def restore_partial(self, slot, copy, *, position):
        state = self.partial if self.partial is not None and position == HELD else copy
        return super().restore_partial(slot, state, position=position)


class Refusing(ContextMemory):
    """No state can be restored, so that everything is evaluated again."""

    def restore_whole(self, *_, **__):
        return False

    def restore_partial(self, *_, **__):
        return False


class WrongDelta(ContextMemory):
    """A tail moves, but for its last token, 7 positions too little."""

    def shift(self, slot, begin, delta):
        end = self.held_tokens(slot)
        self._api.llama_memory_seq_add(self._memory, slot, begin, end - 1, delta - 7)
        self._api.llama_memory_seq_add(self._memory, slot, end - 1, end, delta)

    def share_tail(self, source, target, begin):
        super().share_tail(source, target, begin - 7)


class WrongDeltaOfAll(ContextMemory):
    """A tail moves 7 positions too little, its last token too."""

    def shift(self, slot, begin, delta):
        super().shift(slot, begin, delta - 7)


class KeysNotTurned(ContextMemory):
    """A tail gets its new positions, and its keys stay as they are. Full attention only."""

    def shift(self, slot, begin, delta):
        state = self.copy_state(slot, partial=False)
        words = state[: state.size // 4 * 4].view(np.int32)
        # The positions of its cells, each followed by the count of its sequences and their ids: three words a cell.
        first = next(at for at in range(16) if words[at] == begin and words[at + 3] == begin + 1)
        words[first : first + 3 * (self.held_tokens(slot) - begin) : 3] += delta
        self.clear(slot)
        address = ctypes.cast(state.ctypes.data, ctypes.POINTER(ctypes.c_uint8))
        assert self._api.llama_state_seq_set_data_ext(self._context, address, state.size, slot, 0)


@pytest.fixture
def tested(open_engine, tmp_path):
    """Return a function (kind or path, fault) -> the result of each mode, with that fault in the engine's memory."""

    def test(model, fault=None, **options):
        engine = open_engine(model, **({"n_ctx": 512} | options))
        if fault is not None:
            engine.context.memory = fault(engine)
        results = run_mode_tests(engine, folder=tmp_path)
        engine.context.memory = ContextMemory(engine.context.pointer)
        engine.check_integrity()
        assert not list(engine.context.cells.holders())
        return {result.mode: result for result in results}

    return test


def failed(results):
    return {mode for mode, result in results.items() if result.outcome is Outcome.FAILED}


def faulty(kind):
    return lambda engine: kind(engine.context.pointer)


def with_other_states(random_run, *, whole=False, partial=False):
    """Return what makes a memory that restores the state of another run."""

    def make(engine):
        sequence = engine.open_sequence()
        engine.sync(sequence, random_run(HELD, seed=9))
        slot, memory = engine.residency.state(sequence).slot, engine.context.memory
        states = {
            "whole": memory.copy_state(slot, partial=False) if whole else None,
            "partial": memory.copy_state(slot, partial=True) if partial else None,
        }
        engine.sync(sequence, random_run(1), reuse=False)
        engine.context.clear(engine.residency.state(sequence))
        engine.drop(sequence)
        return OtherState(engine.context.pointer, **states)

    return make


@pytest.mark.parametrize("kind", KINDS)
def test_every_mode_that_a_memory_has_passes_and_did_the_work(tested, kind):
    results = tested(kind)
    assert tuple(results) == MODES
    for mode, result in results.items():
        if mode in NOT_APPLICABLE[kind]:
            assert (result.outcome, result.agreement) == (Outcome.NOT_APPLICABLE, None)
            assert result.reason
            continue
        assert (result.outcome, result.reason) == (Outcome.PASSED, "")
        assert (result.source, result.cached) == (result.name, HELD)
        assert result.agreement == 1.0
        assert result.difference < 1e-3
    snapshots = [results[mode] for mode in ("memory_snapshot", "disk_snapshot")]
    assert [result.difference for result in snapshots] == [0.0, 0.0]


def test_a_sliding_window_that_keeps_every_cell_is_tested_like_any_other(tested):
    results = tested("gemma3", swa_full=True)
    assert results["moved_tail"].outcome is Outcome.NOT_APPLICABLE
    assert {result.outcome for name, result in results.items() if name != "moved_tail"} == {Outcome.PASSED}


def test_one_sequence_cannot_be_forked(tested):
    results = tested("llama", n_sequences=1)
    assert not failed(results)
    assert {results[mode].outcome for mode in ("fork", "moved_tail")} == {Outcome.NOT_APPLICABLE}


def test_what_other_sequences_hold_is_not_taken_for_the_test_s_own(open_engine, random_run, tmp_path):
    engine = open_engine("llama", n_ctx=1024)
    sequence = engine.open_sequence()
    engine.sync(sequence, random_run(100))
    assert not failed({result.mode: result for result in run_mode_tests(engine, folder=tmp_path)})
    engine.check_integrity()
    assert engine.sync(sequence, random_run(120)).cached == 100


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_a_rewind_that_loses_cells_is_found(tested, kind):
    results = tested(kind, faulty(LostCells))
    assert "rewind" in failed(results)
    assert "memory_snapshot" not in failed(results)
    assert results["rewind"].source == "rewind"
    assert "nats off" in results["rewind"].reason


def test_a_fork_that_shares_too_little_is_found(tested):
    # A moved tail gets such a prefix too, and so does what is put by for the disk.
    assert failed(tested("llama", faulty(HalfShared))) - {"moved_tail", "disk_snapshot"} == {"fork"}


@pytest.mark.parametrize("kind", KINDS)
def test_a_whole_state_of_another_run_is_found(tested, random_run, kind):
    copied = {"memory_snapshot", "disk_snapshot"} | (set() if kind == "llama" else {"fork"})
    assert failed(tested(kind, with_other_states(random_run, whole=True))) == copied


@pytest.mark.parametrize("kind", ["gemma3", "mamba", "hybrid"])
def test_a_wrong_rung_is_found(tested, random_run, kind):
    results = tested(kind, with_other_states(random_run, partial=True))
    assert failed(results) == {"partial_snapshot"}
    assert results["partial_snapshot"].source == "partial snapshot"


@pytest.mark.parametrize("kind", KINDS)
def test_evaluating_anew_instead_is_no_pass(tested, kind):
    results = tested(kind, faulty(Refusing))
    expected = {"memory_snapshot", "disk_snapshot"} | (set() if kind == "llama" else {"fork", "partial_snapshot"})
    assert failed(results) == expected
    assert "came from nothing, and 159 should from memory snapshot" in results["memory_snapshot"].reason
    assert results["memory_snapshot"].cached == 0
    assert results["memory_snapshot"].difference < 1e-3


def test_a_tail_that_moved_not_far_enough_is_found(tested):
    results = tested("llama", faulty(WrongDelta))
    assert failed(results) == {"moved_tail"}
    assert "diverges" in results["moved_tail"].reason
    assert results["moved_tail"].divergence > 1000 * tested("llama")["moved_tail"].divergence


def test_a_tail_that_ends_elsewhere_fails_its_test_and_no_other(tested):
    results = tested("llama", faulty(WrongDeltaOfAll))
    assert failed(results) == {"moved_tail"}
    assert "llama_decode failed" in results["moved_tail"].reason


def test_a_folder_that_cannot_be_written_leaves_the_disk_untested(open_engine, tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    results = run_mode_tests(open_engine("llama", n_ctx=512), folder=blocked)
    found = next(result for result in results if result.mode == "disk_snapshot")
    assert found.outcome is Outcome.NOT_TESTED
    assert "was not written" in found.reason


def test_a_window_that_is_too_small_is_refused(open_engine, tmp_path):
    with pytest.raises(UsageError, match="needs a window of 512 tokens, and n_ctx is 256"):
        run_mode_tests(open_engine("llama", n_ctx=256), folder=tmp_path)


def test_an_engine_goes_without_the_modes_that_failed_and_says_so_once(open_engine, random_run, tmp_path):
    plain = open_engine("llama")
    assert plain.modes == ALL_MODES
    failures = (
        ModeResult(mode="rewind", outcome=Outcome.FAILED), ModeResult(mode="moved_tail", outcome=Outcome.FAILED)
    )  # fmt: skip
    save_results(tmp_path, ModeResults(identity=plain.identity, tested=0.0, results=failures))
    asked = CacheOptions(modes_folder=str(tmp_path), modes=ReuseModes(fork=False))
    engine = open_engine("llama", cache=asked)
    assert engine.modes == ReuseModes(rewind=False, moved_tail=False, fork=False)
    sequence = engine.open_sequence()
    (note,) = engine.sync(sequence, random_run(300)).notes
    assert "failed: rewind, moved tail." in note
    report = engine.sync(sequence, concat_tokens([random_run(200), random_run(10, seed=1)]))
    assert (report.cached, report.notes) == (0, ())
    assert "switched off" in report.reason
    # Results with other options say nothing here.
    assert open_engine("llama", flash_attn=True, cache=asked).modes == ReuseModes(fork=False)


@pytest.mark.slow  # a real model: some 3,000 tokens
def test_on_a_real_model_all_passes_and_a_moved_tail_costs_nothing(tested, smollm2_path):
    results = tested(smollm2_path, n_threads=2)
    assert not failed(results)
    assert results["moved_tail"].loss_worse < 0.05
    not_turned = tested(smollm2_path, faulty(KeysNotTurned), n_threads=2)
    assert failed(not_turned) == {"moved_tail"}
    assert not_turned["moved_tail"].loss_worse > 0.3
    too_little = tested(smollm2_path, faulty(WrongDelta), n_threads=2)
    assert failed(too_little) == {"moved_tail"}
    assert too_little["moved_tail"].divergence > 10 * results["moved_tail"].divergence
