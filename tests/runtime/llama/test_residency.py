import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from chapbook.kernels.errors import EngineError
from chapbook.kernels.tokens import concat_tokens, token_ids
from chapbook.runtime.cancel import Cancel
from chapbook.runtime.engine import MemoryKind, Sampling, SyncSource
from chapbook.runtime.prefix_cache.options import CacheOptions

KINDS = ("llama", "gemma3", "mamba", "hybrid")
WINDOW = 256
NO_SNAPSHOTS = CacheOptions(memory_mb=0)


def fresh_logits(engine, run, next_logits):
    """Return the logits after `run`, evaluated from nothing."""
    sequence = engine.open_sequence()
    assert engine.sync(sequence, run, reuse=False).evaluated == len(run)
    logits = next_logits(engine, sequence)
    engine.drop(sequence)
    return logits


def assert_close(mine, theirs, tolerance=0.05):
    np.testing.assert_allclose(mine, theirs, atol=tolerance)
    assert mine.argmax() == theirs.argmax() or np.sort(mine)[-1] - np.sort(mine)[-2] < tolerance


def test_memory_kinds_come_from_the_model(open_engine):
    kinds = [open_engine(kind).info.memory for kind in KINDS]
    assert kinds == [MemoryKind.FULL, MemoryKind.SLIDING, MemoryKind.RECURRENT, MemoryKind.HYBRID]
    assert open_engine("gemma3").info.sliding_window_tokens == WINDOW
    assert open_engine("gemma3", swa_full=True).info.memory is MemoryKind.SLIDING


@pytest.mark.parametrize("kind", KINDS)
def test_an_extended_run_evaluates_only_what_is_new(open_engine, random_run, next_logits, kind):
    engine = open_engine(kind)
    run = random_run(900)
    sequence = engine.open_sequence()
    report = engine.sync(sequence, run[:600])
    assert (report.cached, report.evaluated, report.source) == (0, 600, SyncSource.NOTHING)
    report = engine.sync(sequence, run)
    assert (report.cached, report.evaluated, report.source, report.reason) == (600, 300, SyncSource.RESIDENT, "")
    report = engine.sync(sequence, run)
    assert (report.cached, report.evaluated) == (900, 0)
    assert_close(next_logits(engine, sequence), fresh_logits(engine, run, next_logits))


@pytest.mark.parametrize("kind", KINDS)
def test_a_branch_gives_the_logits_of_a_fresh_run(open_engine, random_run, next_logits, kind):
    engine = open_engine(kind)
    run, other = random_run(900), random_run(40, seed=1)
    sequence = engine.open_sequence()
    for cut in (890, 700, 300, 20):
        engine.sync(sequence, run)
        report = engine.sync(sequence, concat_tokens([run[:cut], other]))
        assert report.cached + report.evaluated == cut + 40
        if kind == "llama":
            assert report.cached == cut
        wanted = concat_tokens([run[:cut], other])
        assert_close(next_logits(engine, sequence), fresh_logits(engine, wanted, next_logits))
        engine.check_integrity()


def test_a_window_that_is_gone_is_evaluated_again_and_not_decoded_without(open_engine, random_run, next_logits):
    engine = open_engine("gemma3", n_batch=64, n_ubatch=64, n_sequences=1)
    run, other = random_run(1800), random_run(3, seed=1)
    sequence = engine.open_sequence()
    engine.sync(sequence, run)
    # The cache has cells for the window and a batch: a cut of 10 is inside, one of 1,300 is not.
    near = engine.sync(sequence, concat_tokens([run[:1790], other]))
    assert (near.source, near.cached) == (SyncSource.REWIND, 1790)
    engine.sync(sequence, run)
    far = concat_tokens([run[:500], other])
    report = engine.sync(sequence, far)
    assert (report.source, report.cached) == (SyncSource.NOTHING, 0)
    assert "window" in report.reason
    mine = next_logits(engine, sequence)
    engine.drop(sequence)
    assert_close(mine, fresh_logits(engine, far, next_logits))


def test_a_sliding_window_with_room_for_every_cell_rewinds_as_far_as_they_are_held(
    open_engine, random_run, next_logits
):
    engine = open_engine("gemma3", swa_full=True, n_batch=64, n_ubatch=64, n_ctx=1280, n_sequences=1)
    run, other = random_run(1000), random_run(3, seed=1)
    sequence = engine.open_sequence()
    engine.sync(sequence, run)
    report = engine.sync(sequence, concat_tokens([run[:300], other]))
    assert (report.source, report.cached) == (SyncSource.REWIND, 300)
    for begin, keep in ((1000, 900), (900, 300), (300, 20)):
        engine.sync(sequence, concat_tokens([run[:begin], random_run(200, seed=begin)]))
        wanted = concat_tokens([run[:keep], other])
        engine.sync(sequence, wanted)
        assert_close(next_logits(engine, sequence), fresh_logits(engine, wanted, next_logits))
        engine.check_integrity()


@pytest.mark.parametrize("kind", ["mamba", "hybrid"])
def test_recurrent_memory_goes_back_to_where_a_sync_ended(open_engine, random_run, next_logits, reply, kind):
    engine = open_engine(kind)
    run, other = random_run(20), random_run(25, seed=1)
    sequence = engine.open_sequence()
    engine.sync(sequence, run)
    reply(engine, sequence, forced=random_run(30, seed=2), max_tokens=30)
    wanted = concat_tokens([run, other])
    report = engine.sync(sequence, wanted)
    assert (report.source, report.cached, report.evaluated) == (SyncSource.PARTIAL, 20, 25)
    assert_close(next_logits(engine, sequence), fresh_logits(engine, wanted, next_logits))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("finished_chunks", [0, 1, 2])
def test_an_aborted_decode_leaves_what_was_finished_before(open_engine, random_run, next_logits, kind, finished_chunks):
    cancel = Cancel()
    decodes = []

    def strike(*_call):
        decodes.append(1)
        if len(decodes) == finished_chunks + 1:
            # Just before llama_decode: it is aborted at the first look at the flag.
            cancel.set()

    engine = open_engine(kind, n_batch=64, n_ubatch=64, on_decode=strike)
    sequence = engine.open_sequence()
    run = random_run(300)
    report = engine.sync(sequence, run, cancel=cancel)
    assert report.cancelled
    assert report.evaluated == len(engine.resident(sequence)) == 64 * finished_chunks
    engine.check_integrity()
    report = engine.sync(sequence, run)
    assert (report.cached, report.evaluated) == (64 * finished_chunks, 300 - 64 * finished_chunks)
    assert_close(next_logits(engine, sequence), fresh_logits(engine, run, next_logits))


def test_logits_survive_another_session_decoding_in_between(open_engine, random_run, next_logits):
    engine = open_engine("llama")
    first, second = engine.open_sequence(), engine.open_sequence()
    run = random_run(50)
    engine.sync(first, run)
    before = next_logits(engine, first)
    engine.sync(second, random_run(60, seed=1))
    engine.check_integrity()
    np.testing.assert_array_equal(next_logits(engine, first), before)
    assert engine.sync(first, run).evaluated == 0


def test_interleaved_replies_are_those_of_sessions_alone(open_engine, random_run):
    engine = open_engine("llama")
    prompts = [random_run(40), random_run(50, seed=1)]
    sampling = Sampling(seed=5, temperature=1.5)
    alone = []
    for prompt in prompts:
        sequence = engine.open_sequence()
        engine.sync(sequence, prompt)
        generation = engine.generate(sequence, sampling=sampling, max_tokens=30)
        alone.append([token.id for token in generation])
        engine.drop(sequence)
    sequences = [engine.open_sequence() for _ in prompts]
    for sequence, prompt in zip(sequences, prompts, strict=True):
        engine.sync(sequence, prompt)
    generations = [engine.generate(sequence, sampling=sampling, max_tokens=30) for sequence in sequences]
    together = [[], []]
    for _ in range(31):
        for ids, generation in zip(together, generations, strict=True):
            token = next(generation, None)
            if token is not None:
                ids.append(token.id)
    assert together == alone


def test_the_least_recently_used_sequence_gives_way_and_says_so(open_engine, random_run):
    engine = open_engine("llama", n_ctx=1024, n_sequences=3, cache=NO_SNAPSHOTS)
    first, second, third = (engine.open_sequence() for _ in range(3))
    engine.sync(first, random_run(400))
    engine.sync(second, random_run(400, seed=1))
    engine.sync(first, random_run(410))
    # There are cells for 1,280 tokens.
    engine.sync(third, random_run(500, seed=2))
    assert [len(engine.resident(sequence)) for sequence in (first, second, third)] == [410, 0, 500]
    engine.check_integrity()
    report = engine.sync(second, random_run(100, seed=1))
    assert report.source is SyncSource.NOTHING
    assert "evicted" in report.reason


def test_more_sequences_may_be_open_than_have_places(open_engine, random_run):
    for cache, held in ((NO_SNAPSHOTS, [0, 0, 0, 20, 20]), (CacheOptions(), [20] * 5)):
        engine = open_engine("llama", n_sequences=2, cache=cache)
        sequences = [engine.open_sequence() for _ in range(5)]
        for seed, sequence in enumerate(sequences):
            engine.sync(sequence, random_run(20, seed=seed))
            engine.check_integrity()
        assert [len(engine.resident(sequence)) for sequence in sequences] == held


def test_a_sequence_that_is_generating_is_not_evicted(open_engine, random_run):
    engine = open_engine("llama", n_ctx=512, n_sequences=2)
    first, second = engine.open_sequence(), engine.open_sequence()
    engine.sync(first, random_run(400))
    generation = engine.generate(first, sampling=Sampling(), max_tokens=5, forced=random_run(5))
    next(generation)
    with pytest.raises(EngineError, match="in use"):
        engine.sync(second, random_run(400, seed=1))
    engine.check_integrity()
    assert len([*generation]) == 4
    assert len(engine.resident(second)) + engine.sync(second, random_run(400, seed=1)).evaluated == 400
    engine.check_integrity()


def test_a_dropped_sequence_is_refused_and_may_be_dropped_again(open_engine, random_run):
    engine = open_engine("llama")
    sequence = engine.open_sequence()
    engine.sync(sequence, random_run(5))
    engine.drop(sequence)
    engine.drop(sequence)
    engine.check_integrity()
    with pytest.raises(EngineError, match="not open"):
        engine.resident(sequence)


def test_a_run_that_cannot_be_is_refused_before_anything_is_lost(open_engine, random_run):
    engine = open_engine("llama", n_ctx=300)
    sequence = engine.open_sequence()
    engine.sync(sequence, random_run(200))
    for wanted, problem in (
        (token_ids([]), "one token at least"),
        (random_run(301), "window of 300"),
        (token_ids([1, -1]), "token id -1"),
        (token_ids([engine.info.vocab_size]), "not in the vocabulary"),
    ):
        with pytest.raises(EngineError, match=problem):
            engine.sync(sequence, wanted)
    assert len(engine.resident(sequence)) == 200


@pytest.mark.parametrize("kind", KINDS)
def test_an_account_that_an_interrupt_left_wrong_is_noticed(open_engine, random_run, next_logits, kind):
    engine = open_engine(kind)
    sequence = engine.open_sequence()
    run = random_run(60)
    engine.sync(sequence, run[:50])
    # What an interrupt does right after llama_decode: evaluated, and not accounted for.
    engine.residency.state(sequence).run.truncate(49)
    engine.residency._unsettled = True
    report = engine.sync(sequence, run)
    # Full attention drops the token in doubt; on recurrent memory the copy at the end of the last sync is whole.
    assert (report.cached, report.evaluated) == {"llama": (49, 11), "mamba": (50, 10)}.get(kind, (0, 60))
    if not report.cached:
        assert "interrupt" in report.reason
    engine.check_integrity()
    assert_close(next_logits(engine, sequence), fresh_logits(engine, run, next_logits))


class EngineMachine(RuleBasedStateMachine):
    """Random syncs, replies and cancels on several sequences; the account and the logits stay those of fresh runs."""

    def __init__(self, engine, reference, next_logits):
        super().__init__()
        self.engine, self.reference, self.next_logits = engine, reference, next_logits
        self.sequences = [engine.open_sequence() for _ in range(2)]
        self.random = np.random.default_rng(0)

    def teardown(self):
        for sequence in self.sequences:
            self.engine.drop(sequence)

    def fresh_tokens(self, count):
        return token_ids(self.random.integers(0, 256, size=count))

    def wanted(self, sequence, keep_share, new):
        resident = self.engine.resident(sequence)
        kept = resident[: round(keep_share * len(resident))]
        return concat_tokens([kept[: self.engine.info.n_ctx - new], self.fresh_tokens(new)])

    which = st.integers(0, 1)
    keep_shares = st.sampled_from([1.0, 1.0, 0.99, 0.9, 0.5, 0.1, 0.0])

    @rule(which=which, keep_share=keep_shares, new=st.integers(1, 300))
    def sync(self, which, keep_share, new):
        sequence = self.sequences[which]
        wanted = self.wanted(sequence, keep_share, new)
        report = self.engine.sync(sequence, wanted)
        assert not report.cancelled
        assert report.cached + report.evaluated == len(wanted)
        assert np.array_equal(self.engine.resident(sequence), wanted)

    @rule(which=which, keep_share=keep_shares, new=st.integers(100, 300), chunks=st.integers(0, 2))
    def cancel_a_sync(self, which, keep_share, new, chunks):
        sequence = self.sequences[which]
        wanted = self.wanted(sequence, keep_share, new)
        cancel = Cancel()
        calls = []

        def progress(evaluated, _total):
            calls.append(evaluated)
            if len(calls) >= chunks:
                cancel.set()

        if not chunks:
            cancel.set()
        report = self.engine.sync(sequence, wanted, progress=progress, cancel=cancel)
        resident = self.engine.resident(sequence)
        assert np.array_equal(resident, wanted[: len(resident)])
        assert report.cancelled == (len(resident) < len(wanted))

    @precondition(lambda self: any(self.has_logits(sequence) for sequence in self.sequences))
    @rule(which=which, count=st.integers(1, 12), take=st.integers(0, 12))
    def reply(self, which, count, take):
        sequence = self.sequences[which]
        room = self.engine.info.n_ctx - len(self.engine.resident(sequence))
        if not self.has_logits(sequence) or room < count:
            return
        before = self.engine.resident(sequence)
        generation = self.engine.generate(
            sequence, sampling=Sampling(), max_tokens=count, forced=self.fresh_tokens(count)
        )
        for _ in range(take):
            next(generation, None)
        generation.close()
        after = self.engine.resident(sequence)
        assert np.array_equal(after, concat_tokens([before, generation.report.tokens]))
        assert len(generation.report.tokens) == min(count, max(0, take - 1))

    def has_logits(self, sequence):
        return self.engine.residency.state(sequence).logits_at_hand

    @invariant()
    def account_is_true(self):
        self.engine.check_integrity()
        for sequence in self.sequences:
            if self.has_logits(sequence):
                run = self.engine.resident(sequence)
                assert_close(
                    self.next_logits(self.engine, sequence), fresh_logits(self.reference, run, self.next_logits)
                )


@pytest.mark.parametrize("kind", KINDS)
def test_whatever_happened_the_logits_are_those_of_a_fresh_run(open_engine, next_logits, kind):
    options = {"n_ctx": 1024, "n_batch": 64, "n_ubatch": 64}
    engine = open_engine(kind, n_sequences=2, **options)
    reference = open_engine(kind, n_sequences=1, **options)
    run_state_machine_as_test(
        lambda: EngineMachine(engine, reference, next_logits),
        settings=settings(
            max_examples=5, stateful_step_count=10, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )
