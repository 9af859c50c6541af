import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chapbook.kernels.errors import EngineClosed, EngineError
from chapbook.kernels.tokens import concat_tokens, token_ids
from chapbook.runtime.cancel import Cancel
from chapbook.runtime.engine import FinishReason, MemoryKind, Sampling, SyncSource
from chapbook.runtime.scripted import CHATML_CONTROLS, ScriptedEngine


def synced(*replies, prompt="hello", **options):
    engine = ScriptedEngine(replies, **options)
    sequence = engine.open_sequence()
    engine.sync(sequence, engine.tokenize(prompt, parse_special=True))
    return engine, sequence


def play(engine, sequence, *, max_tokens=1000, **options):
    generation = engine.generate(sequence, sampling=Sampling(), max_tokens=max_tokens, **options)
    text = b"".join(token.piece for token in generation).decode()
    engine.check_integrity()
    return generation.report, text


def test_replies_are_played_in_order_and_stay_resident():
    engine, sequence = synced("first", "second <tool_call>x</tool_call>")
    assert play(engine, sequence)[1] == "first"
    report, text = play(engine, sequence)
    assert (report.finish, text) == (FinishReason.EOG, "second <tool_call>x</tool_call>")
    assert engine.detokenize(engine.resident(sequence)) == b"hellofirstsecond <tool_call>x</tool_call>"
    with pytest.raises(EngineError, match="no reply left"):
        play(engine, sequence)


def test_a_reply_may_be_made_of_the_request():
    engine = ScriptedEngine([lambda request: f"you sent {len(request)} tokens"])
    sequence = engine.open_sequence()
    engine.sync(sequence, engine.tokenize("abc", parse_special=False))
    assert play(engine, sequence)[1] == "you sent 3 tokens"


def test_what_stands_after_the_end_of_a_reply_is_not_said():
    engine, sequence = synced("done<|im_end|>\nmore")
    assert play(engine, sequence)[1] == "done"


def test_a_cut_reply_goes_on_where_it_was_cut():
    engine, sequence = synced("one two three", "another")
    first, head = play(engine, sequence, max_tokens=4)
    assert (first.finish, head, len(first.tokens)) == (FinishReason.LENGTH, "one ", 4)
    second, rest = play(engine, sequence, so_far=first.tokens)
    assert (second.finish, rest) == (FinishReason.EOG, "two three")
    assert play(engine, sequence, so_far=second.tokens)[1] == "another"


def test_stop_forced_and_cancel_end_a_reply():
    engine, sequence = synced("a STOP b", "x", "long reply")
    report, text = play(engine, sequence, stop=("STOP",))
    assert (report.finish, text) == (FinishReason.STOP, "a STOP")
    forced = engine.tokenize("forced <think>", parse_special=True)
    report, text = play(engine, sequence, forced=forced, stop=("f",))
    assert (report.finish, text) == (FinishReason.EOG, "forced <think>")
    assert np.array_equal(report.tokens, forced)
    assert play(engine, sequence)[1] == "x"
    cancel = Cancel()
    generation = engine.generate(sequence, sampling=Sampling(), max_tokens=100, cancel=cancel)
    next(generation)
    cancel.set()
    assert [*generation] == []
    assert generation.report.finish is FinishReason.CANCELLED
    assert engine.detokenize(generation.report.tokens) == b"l"


def test_a_reply_that_is_left_keeps_what_was_evaluated():
    engine, sequence = synced("abcdef")
    generation = engine.generate(sequence, sampling=Sampling(), max_tokens=100)
    next(generation), next(generation), next(generation)
    with pytest.raises(EngineError, match="not finished"):
        _ = generation.report
    generation.close()
    assert engine.detokenize(generation.report.tokens) == b"ab"
    assert engine.detokenize(engine.resident(sequence)) == b"helloab"


def test_a_window_that_is_full_ends_the_reply_and_refuses_more():
    engine, sequence = synced("x" * 100, n_ctx=16)
    report, _ = play(engine, sequence)
    assert (report.finish, len(report.tokens)) == (FinishReason.LENGTH, 11)
    with pytest.raises(EngineError, match="window of 16"):
        engine.sync(sequence, token_ids(range(17)))


def test_content_is_bytes_and_markup_is_structure():
    engine = ScriptedEngine()
    hostile = "<|im_end|>\0<tool_call>é"
    assert engine.tokenize(hostile, parse_special=False).tolist() == [*hostile.encode()]
    parsed = engine.tokenize(hostile, parse_special=True)
    assert len(parsed) == 5
    assert engine.detokenize(parsed) == hostile.encode()
    assert engine.detokenize(parsed, special=False) == "\0é".encode()
    assert engine.info.control_texts == CHATML_CONTROLS


def test_each_memory_goes_back_as_its_kind_can():
    run, other = token_ids(range(100)), token_ids([7, 7])
    expected = {
        MemoryKind.FULL: (SyncSource.REWIND, 60),
        MemoryKind.SLIDING: (SyncSource.NOTHING, 0),
        MemoryKind.RECURRENT: (SyncSource.NOTHING, 0),
        MemoryKind.HYBRID: (SyncSource.NOTHING, 0),
    }
    for kind, (source, cached) in expected.items():
        engine = ScriptedEngine(memory=kind, sliding_window_tokens=16)
        sequence = engine.open_sequence()
        engine.sync(sequence, run)
        report = engine.sync(sequence, concat_tokens([run[:60], other]))
        assert (report.source, report.cached, report.evaluated) == (source, cached, 62 - cached), kind
        engine.check_integrity()


def test_recurrent_memory_goes_back_to_the_end_of_a_sync():
    engine, sequence = synced("reply", memory=MemoryKind.RECURRENT)
    play(engine, sequence)
    report = engine.sync(sequence, engine.tokenize("hello again", parse_special=False))
    assert (report.source, report.cached, report.evaluated) == (SyncSource.PARTIAL, 5, 6)


def test_an_evicted_sequence_starts_over_and_says_why():
    engine, sequence = synced()
    engine.evict(sequence)
    report = engine.sync(sequence, engine.tokenize("hello", parse_special=False))
    assert (report.cached, report.evaluated, report.reason) == (0, 5, "evicted")


def test_a_cancelled_sync_leaves_a_prefix_and_can_be_finished():
    engine = ScriptedEngine(n_batch=10)
    sequence = engine.open_sequence()
    cancel = Cancel()
    wanted = token_ids(range(45))
    calls = []

    def progress(done, total):
        calls.append((done, total))
        if done == 20:
            cancel.set()

    report = engine.sync(sequence, wanted, progress=progress, cancel=cancel)
    assert (report.cancelled, report.evaluated, calls) == (True, 20, [(0, 45), (10, 45), (20, 45)])
    assert np.array_equal(engine.resident(sequence), wanted[:20])
    with pytest.raises(EngineError, match="sync it first"):
        engine.generate(sequence, sampling=Sampling(), max_tokens=1)
    assert engine.sync(sequence, wanted).evaluated == 25


def test_a_closed_engine_refuses_everything_but_closing():
    engine, sequence = synced("x")
    engine.close()
    engine.close()
    with pytest.raises(EngineClosed):
        engine.sync(sequence, token_ids([1]))


@settings(max_examples=60)
@given(
    kind=st.sampled_from(MemoryKind),
    steps=st.lists(st.tuples(st.integers(0, 30), st.integers(1, 20), st.integers(0, 9)), max_size=8),
)
def test_the_account_and_what_is_observed_agree_whatever_is_asked(kind, steps):
    seen = {}

    def observe(sequence, tokens, start):
        seen[sequence] = [*seen.get(sequence, [])[:start], *tokens.tolist()]

    engine = ScriptedEngine(memory=kind, sliding_window_tokens=8, n_batch=7, on_decode=observe)
    sequence = engine.open_sequence()
    for kept, new, replied in steps:
        wanted = concat_tokens([engine.resident(sequence)[:kept], token_ids([new] * new)])
        report = engine.sync(sequence, wanted)
        assert report.cached + report.evaluated == len(wanted)
        assert np.array_equal(engine.resident(sequence), wanted)
        play(engine, sequence, forced=token_ids([65] * replied))
        assert engine.resident(sequence).tolist() == seen[sequence] == [*wanted.tolist(), *[65] * replied]
        engine.check_integrity()
