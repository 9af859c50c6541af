import itertools
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from chapbook.kernels.errors import EngineClosed, EngineError
from chapbook.kernels.tokens import concat_tokens, token_ids
from chapbook.runtime.cancel import Cancel
from chapbook.runtime.engine import FinishReason, Sampling
from chapbook.runtime.prefix_cache.options import CacheOptions

KINDS = ("llama", "gemma3", "mamba", "hybrid")
NEVER_ENDS = Sampling(temperature=0.0)


@pytest.fixture
def synced(open_engine, random_run):
    """Return a function (kind, n) -> (engine, sequence synced to a random run)."""

    def open_synced(kind="llama", n=50, **options):
        engine = open_engine(kind, **options)
        sequence = engine.open_sequence()
        engine.sync(sequence, random_run(n))
        return engine, sequence

    return open_synced


@pytest.mark.parametrize("kind", KINDS)
def test_a_reply_ends_at_its_limit_with_every_token_evaluated(synced, reply, kind):
    engine, sequence = synced(kind)
    report, text = reply(engine, sequence, forced=token_ids(range(97, 117)), max_tokens=12)
    assert report.finish is FinishReason.LENGTH
    assert len(report.tokens) == 12
    assert text == b"abcdefghijkl"
    resumed = engine.sync(sequence, engine.resident(sequence))
    assert (resumed.cached, resumed.evaluated) == (62, 0)


def test_the_end_of_generation_is_neither_part_of_the_reply_nor_evaluated(synced, reply):
    engine, sequence = synced()
    eog = engine.tokenizer.eog_ids
    ended = 0
    for seed in range(40):
        before = len(engine.resident(sequence))
        report, _ = reply(engine, sequence, sampling=Sampling(temperature=3.0, top_k=0, top_p=1, min_p=0, seed=seed))
        assert not eog & set(report.tokens.tolist())
        assert len(engine.resident(sequence)) == before + len(report.tokens)
        ended += report.finish is FinishReason.EOG
    assert ended


def test_forced_tokens_are_the_reply_and_end_it(synced, reply, next_logits):
    engine, sequence = synced()
    forced = token_ids([104, 105, 10])
    report, text = reply(engine, sequence, forced=forced, max_tokens=100)
    assert (report.finish, text) == (FinishReason.EOG, b"hi\n")
    assert np.array_equal(report.tokens, forced)
    other = engine.open_sequence()
    engine.sync(other, engine.resident(sequence))
    np.testing.assert_allclose(next_logits(engine, sequence), next_logits(engine, other), atol=0.05)


def test_a_seed_repeats_a_reply_and_another_changes_it(synced, reply, random_run):
    engine, sequence = synced()
    texts = []
    for seed in (1, 1, 2):
        engine.sync(sequence, random_run(50))
        texts.append(reply(engine, sequence, sampling=Sampling(seed=seed, temperature=2.0))[1])
    assert texts[0] == texts[1] != texts[2]


def test_a_greedy_reply_takes_the_likeliest_token_every_time(synced, next_logits):
    engine, sequence = synced()
    likeliest = int(next_logits(engine, sequence).argmax())
    for token in engine.generate(sequence, sampling=NEVER_ENDS, max_tokens=10):
        assert token.id == likeliest
        # The token in hand is evaluated with the next step: its logits are those of a run that ends in it.
        other = engine.open_sequence()
        engine.sync(other, concat_tokens([engine.resident(sequence), token_ids([token.id])]))
        likeliest = int(next_logits(engine, other).argmax())
        engine.drop(other)


def test_a_stop_text_ends_the_reply_and_stays_in_it(open_engine, random_run):
    engine = open_engine("llama")
    sequence = engine.open_sequence()

    def pieces(seed, stop=()):
        engine.sync(sequence, random_run(50))
        sampling = Sampling(seed=seed, temperature=2.0)
        generation = engine.generate(sequence, sampling=sampling, max_tokens=40, stop=stop)
        return [token.piece for token in generation], generation.report

    tried = 0
    for seed in range(30):
        free, _ = pieces(seed)
        for first, second in itertools.pairwise(free):
            # A text across two tokens: the end of one and the start of the next.
            across = first[-1:] + second[:1]
            if not across.isascii():
                continue
            stopped, report = pieces(seed, stop=("never there", across.decode()))
            assert report.finish is FinishReason.STOP
            assert stopped == free[: len(stopped)]
            assert len(report.tokens) == len(stopped)
            assert across in b"".join(stopped)
            assert across not in b"".join(stopped[:-1])
            tried += 1
            break
    assert tried > 10


def test_a_reply_that_is_left_keeps_what_was_evaluated(synced, reply):
    for kind in KINDS:
        engine, sequence = synced(kind)
        report, text = reply(engine, sequence, forced=token_ids(range(97, 107)), max_tokens=10, take=4)
        assert report.finish is FinishReason.CANCELLED
        assert text == b"abcd"
        # The fourth was in hand and not evaluated yet.
        assert report.tokens.tolist() == [97, 98, 99]
        engine.close()


def test_a_cancel_between_tokens_ends_the_reply(synced):
    for kind in KINDS:
        engine, sequence = synced(kind)
        cancel = Cancel()
        shown = []
        generation = engine.generate(
            sequence, sampling=Sampling(), max_tokens=100, forced=token_ids(range(100)), cancel=cancel
        )
        for token in generation:
            shown.append(token.id)
            if len(shown) == 5:
                cancel.set()
        assert generation.report.finish is FinishReason.CANCELLED
        assert shown == [0, 1, 2, 3, 4]
        assert generation.report.tokens.tolist() in (shown, shown[:-1])
        assert len(engine.resident(sequence)) == 50 + len(generation.report.tokens)
        engine.check_integrity()
        engine.close()


@pytest.mark.parametrize("kind", KINDS)
def test_a_token_whose_decode_was_cancelled_is_dropped_where_that_loses_nothing_else(open_engine, random_run, kind):
    cancel = Cancel()
    decodes = []

    def strike(_sequence, tokens, _start):
        decodes.append(tokens)
        if len(decodes) == 4:
            cancel.set()

    engine = open_engine(kind, on_decode=strike)
    sequence = engine.open_sequence()
    engine.sync(sequence, random_run(50))
    generation = engine.generate(
        sequence, sampling=Sampling(), max_tokens=100, forced=token_ids(range(100)), cancel=cancel
    )
    assert [token.id for token in generation] == [0, 1, 2]
    assert generation.report.finish is FinishReason.CANCELLED
    # A recurrent state does not survive an abort, so there the token is finished first.
    expected = [0, 1, 2] if kind in ("mamba", "hybrid") else [0, 1]
    assert generation.report.tokens.tolist() == expected
    assert len(engine.resident(sequence)) == 50 + len(expected)
    engine.check_integrity()


def test_a_report_before_the_end_is_refused(synced):
    engine, sequence = synced()
    generation = engine.generate(sequence, sampling=NEVER_ENDS, max_tokens=10)
    with pytest.raises(EngineError, match="not finished"):
        _ = generation.report
    generation.close()
    assert len(generation.report.tokens) == 0
    assert [*generation] == []


def test_a_new_sync_ends_the_reply_before_it(synced, random_run):
    engine, sequence = synced()
    generation = engine.generate(sequence, sampling=NEVER_ENDS, max_tokens=10, forced=random_run(10))
    next(generation), next(generation)
    engine.sync(sequence, random_run(20))
    assert generation.report.finish is FinishReason.CANCELLED
    assert [*generation] == []
    assert len(generation.report.tokens) == 1


def test_a_reply_without_a_sync_is_refused(open_engine):
    engine = open_engine("llama")
    with pytest.raises(EngineError, match="sync it first"):
        engine.generate(engine.open_sequence(), sampling=NEVER_ENDS, max_tokens=1)


def test_a_reply_stops_at_the_end_of_the_window(synced, reply):
    engine, sequence = synced(n=500, n_ctx=512)
    report, _ = reply(engine, sequence, forced=token_ids(range(100)), max_tokens=100)
    assert (report.finish, len(report.tokens)) == (FinishReason.LENGTH, 12)


def test_a_repeat_penalty_looks_back_on_the_window(synced, next_logits):
    engine, sequence = synced(n=1)
    likeliest = int(next_logits(engine, sequence).argmax())
    engine.sync(sequence, token_ids([likeliest]))
    again = int(next_logits(engine, sequence).argmax())
    engine.sync(sequence, token_ids([again, likeliest]))
    last = int(next_logits(engine, sequence).argmax())
    penalised = Sampling(temperature=0.0, repeat_penalty=1000.0)
    engine.sync(sequence, token_ids([last, again, likeliest]))
    chosen = next(iter(engine.generate(sequence, sampling=penalised, max_tokens=1))).id
    assert chosen not in {last, again, likeliest}


def test_what_is_decoded_can_be_observed(open_engine, random_run):
    seen = []
    engine = open_engine("llama", n_batch=64, on_decode=lambda *call: seen.append(call))
    sequence = engine.open_sequence()
    run = random_run(150)
    engine.sync(sequence, run)
    assert [len([*engine.generate(sequence, sampling=Sampling(), max_tokens=9, forced=run[:2])])] == [2]
    assert {call[0] for call in seen} == {sequence}
    assert [(len(tokens), start) for _, tokens, start in seen] == [(64, 0), (64, 64), (22, 128), (1, 150), (1, 151)]
    assert np.array_equal(concat_tokens([tokens for _, tokens, _ in seen]), concat_tokens([run, run[:2]]))


def test_scores_are_the_log_probabilities_of_a_step_by_step_run(synced, next_logits, random_run):
    for kind in KINDS:
        engine, sequence = synced(kind)
        given, tokens = random_run(30), random_run(100, seed=7)
        scores = engine.score(sequence, tokens, given=given)
        assert len(scores) == 100
        assert np.array_equal(engine.resident(sequence), concat_tokens([given, tokens]))
        engine.check_integrity()
        for step in (0, 1, 63, 64, 99):
            engine.sync(sequence, concat_tokens([given, tokens[:step]]))
            logits = next_logits(engine, sequence).astype(np.float64)
            expected = logits[tokens[step]] - np.log(np.exp(logits - logits.max()).sum()) - logits.max()
            assert scores[step] == pytest.approx(expected, abs=0.05)
        engine.close()


def test_a_closed_engine_refuses_everything_but_closing(synced, random_run):
    engine, sequence = synced()
    generation = engine.generate(sequence, sampling=NEVER_ENDS, max_tokens=5)
    engine.close()
    engine.close()
    assert [*generation] == []
    engine.drop(sequence)
    for use in (
        lambda: engine.sync(sequence, random_run(5)),
        lambda: engine.generate(sequence, sampling=NEVER_ENDS, max_tokens=5),
        engine.open_sequence,
        lambda: engine.resident(sequence),
        lambda: engine.tokenize("x", parse_special=False),
        lambda: engine.score(sequence, random_run(2), given=random_run(2)),
        engine.check_integrity,
    ):
        with pytest.raises(EngineClosed):
            use()


def test_threads_take_turns_and_do_not_disturb_each_other(open_engine, random_run):
    engine = open_engine("llama", n_sequences=3)
    sampling = Sampling(seed=4, temperature=2.0)

    def converse(seed):
        sequence = engine.open_sequence()
        engine.sync(sequence, random_run(40, seed=seed))
        generation = engine.generate(sequence, sampling=sampling, max_tokens=40)
        return [token.id for token in generation]

    alone = [converse(seed) for seed in range(3)]
    together = [None] * 3
    threads = [
        threading.Thread(target=lambda seed=seed: together.__setitem__(seed, converse(seed))) for seed in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert together == alone
    engine.check_integrity()


@pytest.mark.parametrize("kind", ["llama", "gemma3", "mamba", "hybrid"])
def test_more_threads_than_places_wait_for_each_other_and_none_fails(open_engine, random_run, kind):
    engine = open_engine(kind, n_ctx=512, n_sequences=1, n_batch=64, n_ubatch=64, cache=CacheOptions(memory_mb=0))
    sampling = Sampling(seed=4, temperature=2.0)

    def converse(seed):
        sequence, ids = engine.open_sequence(), []
        for turn in range(3):
            engine.sync(sequence, random_run(100 * turn + 5, seed=seed))
            ids.append([token.id for token in engine.generate(sequence, sampling=sampling, max_tokens=8)])
        engine.drop(sequence)
        return ids

    alone = [converse(seed) for seed in range(4)]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(converse, range(4))) == alone
    engine.check_integrity()


def test_two_syncs_that_stand_in_each_others_way_both_come_to_their_end(open_engine, random_run):
    started = threading.Barrier(2, timeout=60)
    engine = open_engine("llama", n_ctx=512, n_batch=64, n_ubatch=64, cache=CacheOptions(memory_mb=0))

    def long_sync(seed):
        met = []

        def meet(evaluated, _total):
            # Both hold a part of the cells by then, and neither can have the rest.
            if evaluated >= 320 and not met:
                met.append(started.wait())

        sequence, run = engine.open_sequence(), random_run(500, seed=seed)
        report = engine.sync(sequence, run, progress=meet)
        assert len([*engine.generate(sequence, sampling=NEVER_ENDS, max_tokens=3)]) == 3
        return report

    with ThreadPoolExecutor(2) as pool:
        reports = list(pool.map(long_sync, range(2)))
    assert all(report.cached + report.evaluated >= 500 for report in reports)
    assert sum(report.evaluated for report in reports) > 1000
    engine.check_integrity()


def test_a_cancel_strikes_a_running_decode_and_leaves_the_account_true(open_engine, smollm2_path, next_logits):
    engine = open_engine(smollm2_path, n_threads=2)
    sequence = engine.open_sequence()
    run = engine.tokenize("The quick brown fox jumps over the lazy dog. " * 110, parse_special=False)
    cancel = Cancel()
    started_s = time.monotonic()
    timer = threading.Timer(0.4, cancel.set)
    timer.start()
    report = engine.sync(sequence, run, cancel=cancel)
    seconds = time.monotonic() - started_s
    timer.join()
    assert report.cancelled, seconds
    resident = engine.resident(sequence)
    assert len(resident) < len(run)
    assert np.array_equal(resident, run[: len(resident)])
    engine.check_integrity()
    short = run[: len(resident) + 20]
    engine.sync(sequence, short)
    mine = next_logits(engine, sequence)
    engine.drop(sequence)
    other = engine.open_sequence()
    engine.sync(other, short, reuse=False)
    theirs = next_logits(engine, other)
    assert mine.argmax() == theirs.argmax()
    # Other batches round otherwise; a single wrong token moves them by several units.
    assert np.abs(mine - theirs).mean() < 0.3


def test_a_late_cancel_of_one_session_does_not_touch_another(synced, random_run):
    engine, sequence = synced()
    cancel = Cancel()
    generation = engine.generate(sequence, sampling=Sampling(), max_tokens=5, forced=random_run(5), cancel=cancel)
    assert len([*generation]) == 5
    cancel.set()
    other = engine.open_sequence()
    assert not engine.sync(other, random_run(300)).cancelled
