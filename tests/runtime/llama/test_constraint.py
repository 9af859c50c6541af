import json
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chapbook.kernels.errors import GrammarError
from chapbook.kernels.tokens import token_ids
from chapbook.runtime.chat_format import ReasoningMarks
from chapbook.runtime.engine import FinishReason, Grammar, Sampling, Trigger
from chapbook.runtime.llama.grammar import utf8_remainder

OPEN, CLOSE = "<tool_call>", "</tool_call>"
JSON_CALL = r"""
root ::= "\n" object "\n" "</tool_call>"
object ::= "{" (member ("," " "? member){0,2})? "}"
member ::= string ":" " "? value
value ::= string | number | object | "true" | "null" | "[" (value ("," value){0,1})? "]"
string ::= "\"" char{0,6} "\""
char ::= [^"\\\x00-\x1f\x7f] | "\\" (["\\/bfnrt] | "u" [0-9a-fA-F]{4})
number ::= "-"? ("0" | [1-9] [0-9]{0,4}) ("." [0-9]{1,3})?
"""
CALL = Grammar(gbnf=JSON_CALL, triggers=(Trigger(text=OPEN),))
REQUIRED = Grammar(gbnf=JSON_CALL, triggers=CALL.triggers, required=True)
WILD = {"temperature": 1.5, "top_k": 0, "top_p": 1.0, "min_p": 0.0}


def spans(text, opening=OPEN, closing=CLOSE):
    """Return the constrained spans of a reply, and whether the last one is open."""
    found = text.split(opening.encode())[1:]
    return [span.split(closing.encode())[0] for span in found], bool(found) and closing.encode() not in found[-1]


def generate(engine, sequence, grammar, *, seed, max_tokens=400, stop=(), **options):
    sampling = Sampling(seed=seed, **(WILD | options))
    generation = engine.generate(sequence, sampling=sampling, max_tokens=max_tokens, grammar=grammar, stop=stop)
    text = b"".join(token.piece for token in generation)
    assert engine.detokenize(generation.report.tokens) == text
    return generation.report, text


def assert_calls_parse(engine, run, seeds):
    """Generate a required call for each seed; return how many were complete before the limit. These must parse."""
    sequence = engine.open_sequence()
    complete = 0
    for seed in seeds:
        engine.sync(sequence, run)
        report, text = generate(engine, sequence, REQUIRED, seed=seed, max_tokens=200, stop=(CLOSE,))
        (call,), is_open = spans(text)
        assert report.finish is (FinishReason.LENGTH if is_open else FinishReason.STOP)
        if not is_open:
            json.loads(call.decode())
            complete += 1
    engine.check_integrity()
    return complete


@pytest.mark.parametrize("kind", ["llama", "gemma3", "mamba", "hybrid"])
def test_random_weights_write_only_calls_that_parse(open_engine, random_run, kind):
    assert assert_calls_parse(open_engine(kind), random_run(20), range(40)) >= 30


@pytest.mark.slow  # a thousand calls of forty tokens: half a minute
def test_a_thousand_random_calls_parse(open_engine, random_run):
    for kind in ("llama", "mamba"):
        assert assert_calls_parse(open_engine(kind), random_run(20), range(40, 540)) > 350


def test_free_text_flows_until_the_trigger_and_after_the_call(open_engine, random_run):
    engine = open_engine("llama")
    sequence = engine.open_sequence()
    # A trigger that random text holds often, and a span that is easy to tell from random text.
    grammar = Grammar(gbnf='root ::= "123" [a-c]{4} ";"', triggers=(Trigger(text="a"),))
    several = 0
    for seed in range(15):
        engine.sync(sequence, random_run(20))
        _, text = generate(engine, sequence, grammar, seed=seed, max_tokens=300)
        rest = text
        found = 0
        while b"a" in rest:
            _, rest = rest.split(b"a", 1)
            match = re.match(rb"123[abc]{4};", rest)
            if match is None:
                # Only a reply that was cut may end inside the span.
                assert re.fullmatch(rb"1?2?3?[abc]{0,4}", rest), rest
                break
            rest = rest[match.end() :]
            found += 1
        several += found > 1
    assert several > 2


def test_a_token_that_completes_the_trigger_and_goes_on_is_cut_where_the_grammar_rejects_the_rest(
    open_engine, random_run
):
    engine = open_engine("llama")
    sequence = engine.open_sequence()
    # The vocabulary has the tokens `>"`, `><` and `>` with a line's end; only the last one may stand.
    grammar = Grammar(gbnf='root ::= "\\n" [x-z]{3} "."', triggers=(Trigger(text=">"),))
    pieces_seen = set()
    for seed in range(20):
        engine.sync(sequence, random_run(20))
        sampling = Sampling(seed=seed, **WILD)
        generation = engine.generate(sequence, sampling=sampling, max_tokens=200, grammar=grammar)
        pieces = [token.piece for token in generation]
        text = b"".join(pieces)
        # `</think>` and its like hold the trigger at their end, as one token.
        pieces_seen |= {piece for piece in pieces if b">" in piece}
        for rest in re.split(rb">", text)[1:-1]:
            assert re.match(rb"\n[xyz]{3}\.", rest), text
    assert {b">", b">\n"} <= pieces_seen
    assert not {b'>"', b"><"} & pieces_seen


def test_a_required_call_begins_the_reply(open_engine, random_run):
    engine = open_engine("llama")
    sequence = engine.open_sequence()
    for seed in range(10):
        engine.sync(sequence, random_run(20))
        report, text = generate(engine, sequence, REQUIRED, seed=seed)
        assert text.startswith((OPEN + "\n{").encode())
        # The trigger is structure here: its own token, and not its letters.
        assert report.tokens[0] == engine.tokenize(OPEN, parse_special=True)[0]


def test_a_trigger_at_the_start_is_one_only_there(open_engine, random_run):
    engine = open_engine("llama")
    sequence = engine.open_sequence()
    grammar = Grammar(gbnf='root ::= "xyz}"', triggers=(Trigger(text="{", at_start=True),))
    engine.sync(sequence, random_run(20))
    forced = Grammar(gbnf=grammar.gbnf, triggers=grammar.triggers, required=True)
    assert generate(engine, sequence, forced, seed=0)[1].startswith(b"{xyz}")
    later = 0
    for seed in range(60):
        engine.sync(sequence, random_run(20))
        _, text = generate(engine, sequence, grammar, seed=seed, max_tokens=100)
        if b"{" in text and not text.lstrip().startswith(b"{"):
            later += b"{xyz}" not in text
    assert later > 5


def test_a_call_that_was_cut_goes_on_under_its_grammar(open_engine, random_run):
    engine = open_engine("llama")
    sequence = engine.open_sequence()
    resumed = 0
    for seed in range(30):
        engine.sync(sequence, random_run(20))
        first, head = generate(engine, sequence, REQUIRED, seed=seed, max_tokens=3 + seed % 9)
        assert first.finish is FinishReason.LENGTH
        sampling = Sampling(seed=seed, **WILD)
        second = engine.generate(
            sequence, sampling=sampling, max_tokens=200, grammar=REQUIRED, so_far=first.tokens, stop=(CLOSE,)
        )
        text = head + b"".join(token.piece for token in second)
        calls, is_open = spans(text)
        assert text.startswith(OPEN.encode())
        if not is_open:
            json.loads(calls[0].decode())
            resumed += 1
    assert resumed > 20


def test_a_cut_inside_a_required_trigger_finishes_it(open_engine, random_run):
    engine = open_engine("llama")
    sequence = engine.open_sequence()
    engine.sync(sequence, random_run(20))
    grammar = Grammar(gbnf='root ::= "123;"', triggers=(Trigger(text="call:"),), required=True)
    first, head = generate(engine, sequence, grammar, seed=0, max_tokens=1)
    rest = engine.generate(sequence, sampling=Sampling(seed=0), max_tokens=30, grammar=grammar, so_far=first.tokens)
    assert (head + b"".join(token.piece for token in rest)).startswith(b"call:123;")


@pytest.mark.parametrize(
    "gbnf",
    [
        "", "  \n", "root ::= nothere", 'other ::= "a"', "root ::= [", 'root ::= root "a"', 'root ::= ("")*',
        'root ::= "a"\0"b"', "root ::= " + "(" * 20000 + '"a"' + ")" * 20000,
    ],
    ids=range(9),
)  # fmt: skip
def test_a_bad_grammar_is_an_error_and_not_a_crash(open_engine, random_run, gbnf):
    engine = open_engine("llama")
    sequence = engine.open_sequence()
    engine.sync(sequence, random_run(5))
    with pytest.raises(GrammarError):
        engine.generate(
            sequence, sampling=Sampling(), max_tokens=5, grammar=Grammar(gbnf=gbnf, triggers=(Trigger(text="a"),))
        )
    assert engine.sync(sequence, random_run(5)).evaluated == 0


def test_a_grammar_that_no_token_fits_ends_the_reply_with_an_error(open_engine, random_run):
    engine = open_engine("llama", model_options={"vocab": None})
    sequence = engine.open_sequence()
    engine.sync(sequence, random_run(5))
    # A NUL can be written in GBNF, but no token may hold one.
    grammar = Grammar(gbnf='root ::= "a" [\\x00]', triggers=(Trigger(text="x"),), required=True)
    generation = engine.generate(sequence, sampling=Sampling(), max_tokens=50, grammar=grammar)
    with pytest.raises(GrammarError, match="no token"):
        list(generation)
    assert generation.report.tokens.tolist() == [*b"xa"]
    engine.check_integrity()


def test_smollm2_writes_a_grounded_call(open_engine, smollm2_path):
    engine = open_engine(smollm2_path, n_threads=2)
    sequence = engine.open_sequence()
    prompt = "<|im_start|>user\nRead the file about the licence.<|im_end|>\n<|im_start|>assistant\n"
    engine.sync(sequence, engine.tokenize(prompt, parse_special=True))
    gbnf = (
        'root ::= "\\n{\\"name\\": \\"read\\", \\"arguments\\": {\\"path\\": \\"" path "\\"}}\\n</tool_call>"\n'
        'path ::= "README.md" | "LICENSE" | "src/main.py"'
    )
    grammar = Grammar(gbnf=gbnf, triggers=(Trigger(text=OPEN),), required=True)
    generation = engine.generate(sequence, sampling=Sampling(temperature=0.0), max_tokens=60, grammar=grammar)
    text = b"".join(token.piece for token in generation)
    call = json.loads(spans(text)[0][0])
    assert call["name"] == "read"
    assert call["arguments"]["path"] in {"README.md", "LICENSE", "src/main.py"}


@given(st.binary(max_size=12))
def test_an_unfinished_character_is_what_more_bytes_could_finish(data):
    rest = utf8_remainder(data)
    if rest is None:
        return
    assert data.endswith(rest)
    data[: len(data) - len(rest)].decode()
    assert len(rest) <= 3
    if rest:
        finished = [
            tail for tail in (b"\x80", b"\xbf", b"\x80\x80", b"\xbf\xbf", b"\xbf\xbf\xbf", b"\x80\x80\x80")
            if is_utf8(rest + tail)
        ]  # fmt: skip
        assert finished


def is_utf8(data):
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


@settings(max_examples=30)
@given(text=st.text(max_size=8), rest=st.binary(min_size=1, max_size=2))
def test_valid_text_leaves_no_remainder_and_a_broken_one_is_refused(text, rest):
    assert utf8_remainder(text.encode()) == b""
    assert (utf8_remainder(text.encode() + rest) is None) == (utf8_remainder(rest) is None)


def test_a_sampled_reply_is_the_same_with_a_grammar_that_never_triggers(open_engine, random_run):
    engine = open_engine("llama")
    sequence = engine.open_sequence()
    grammar = Grammar(gbnf='root ::= "x"', triggers=(Trigger(text="never written, as it is far too long"),))
    replies = []
    for choice in (None, grammar):
        engine.sync(sequence, random_run(20))
        replies.append(generate(engine, sequence, choice, seed=9)[0].tokens)
    assert np.array_equal(*replies)
    assert np.array_equal(replies[0], token_ids(replies[0]))


def test_no_control_token_stands_inside_a_call_as_text(open_engine, random_run):
    engine = open_engine("llama")
    run = random_run(40)
    grammar = Grammar(gbnf='root ::= [^\\x00]{30} "</tool_call>"', triggers=CALL.triggers, required=True)
    sequence = engine.open_sequence()
    control = {engine.tokenizer.control_ids[text] for text in engine.info.control_texts} - {
        engine.tokenizer.control_ids[CLOSE]
    }
    for seed in range(30):
        engine.sync(sequence, run)
        report, _ = generate(engine, sequence, grammar, seed=seed, stop=(CLOSE,))
        inside = report.tokens[len(engine.tokenize(OPEN, parse_special=True)) :]
        assert control.isdisjoint(inside.tolist())


@pytest.mark.parametrize("open_at_start", [False, True])
def test_a_trigger_inside_reasoning_is_none_and_one_behind_it_is(open_engine, open_at_start):
    engine = open_engine("llama")
    marks = ReasoningMarks(begin="<think>", end="</think>", open_at_start=open_at_start)
    grammar = Grammar(gbnf=JSON_CALL, triggers=CALL.triggers, reasoning=marks)
    opening = "" if open_at_start else "<think>"

    def in_span_after(text):
        return engine._constraint(grammar, engine.tokenize(text, parse_special=True)).in_span

    assert not in_span_after(f"{opening}I could write {OPEN}")
    assert not in_span_after(f"{opening}I could write {OPEN} but</think>no")
    assert in_span_after(f"{opening}hm {OPEN}</think>so {OPEN}")
    assert in_span_after(f"{opening}hm</think>{OPEN}")


def test_a_required_call_stands_behind_reasoning_that_the_prompt_has_opened(open_engine, random_run):
    engine = open_engine("llama")
    marks = ReasoningMarks(begin="<think>", end="</think>", open_at_start=True)
    sequence = engine.open_sequence()
    engine.sync(sequence, random_run(40))
    grammar = Grammar(gbnf=JSON_CALL, triggers=CALL.triggers, required=True, reasoning=marks)
    _, text = generate(engine, sequence, grammar, seed=1)
    assert text.startswith(b"</think><tool_call>\n{")
