"""Pythonic: Python calls, read as literals and never evaluated."""

from __future__ import annotations

import ast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chapbook.runtime.dialects.python_literals import python_text, read_literal
from chapbook.runtime.dialects.pythonic import PythonicDialect
from chapbook.runtime.strict_json import Unreadable

TAGGED, BARE = PythonicDialect(), PythonicDialect(name="pythonic-bare", bare=True)


def read(reply: str, dialect: PythonicDialect = TAGGED):
    parsed = dialect.parse(reply, reasoning=None)
    return [(call.name, call.arguments) for call in parsed.calls], parsed.text, parsed.problems


@pytest.mark.parametrize(
    "reply",
    [
        '<|tool_call_start|>[read(path="a")]<|tool_call_end|>',
        "<|tool_call_start|>[read(path='a')]<|tool_call_end|><|tool_call_end|>",
        "<|tool_call_start|>[ read( path = 'a', ) , ]",
        "<|tool_call_start|>read(path='a')<|tool_call_end|>",
        "<|tool_call_start|>[read(path='''a''')]<|tool_call_end|>",
        '<|tool_call_start|>[{"name": "read", "arguments": {"path": "a"}}]<|tool_call_end|>',
    ],
)
def test_a_bent_call_is_still_the_call(reply):
    assert read(reply) == ([("read", {"path": "a"})], "", ())


def test_text_around_and_several_calls_are_kept():
    calls, text, _ = read("So: <|tool_call_start|>[f(a=1), g.h()]<|tool_call_end|> Then.")
    assert calls == [("f", {"a": 1}), ("g.h", {})]
    assert text == "So:\nThen."


def test_a_closing_tag_inside_a_string_does_not_end_the_call():
    assert read("<|tool_call_start|>[f(a='x)]<|tool_call_end|>y')]<|tool_call_end|>")[0] == [
        ("f", {"a": "x)]<|tool_call_end|>y"})
    ]


def test_without_tags_only_a_list_of_calls_at_the_start_counts():
    assert read("[f(a=1)] and more", BARE) == ([("f", {"a": 1})], "and more", ())
    assert read("[f(a=1)]", TAGGED) == ([], "[f(a=1)]", ())
    assert read("[f(a=1)] [g(b=2)]", BARE) == ([("f", {"a": 1})], "[g(b=2)]", ())
    for text in ("See [f(a=1)].", "[1, 2]", "[link](http://x)", "[]"):
        assert read(text, BARE) == ([], text, ())


@pytest.mark.parametrize(
    "body",
    [
        "f(a=__import__('os'))",
        "f(a=1+1)",
        "f(a=b)",
        "f(a=g())",
        "f(a=lambda: 0)",
        "f(a=b'x')",
        "f(a={1: 2})",
        "f(a='\\ud800')",
        "f(a=1e999)",
        f"f(a={'9' * 5_000})",
        f"f(a={'[' * 50}{']' * 50})",
        "f(a='x",
        "f(a=1",
        "f(a=1, a=2)",
        "f(**{})",
        "f(1)",
        "",
    ],
)
def test_what_is_no_literal_is_a_problem_and_is_not_evaluated(body):
    calls, _, problems = read(f"<|tool_call_start|>[{body}]<|tool_call_end|>")
    assert calls == []
    assert len(problems) == 1
    assert "column" in problems[0].problem


SCALARS = st.one_of(
    st.text(max_size=8), st.integers(), st.floats(allow_nan=False, allow_infinity=False), st.booleans(), st.none()
)
LITERALS = st.recursive(
    SCALARS,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=4), inner, max_size=3)),
    max_leaves=6,
)


@settings(max_examples=120, deadline=None)
@given(value=LITERALS)
def test_the_reader_agrees_with_python_on_how_python_and_we_write_literals(value):
    for text in (repr(value), python_text(value)):
        assert ast.literal_eval(text) == value
        if len(text) < 300:
            assert read_literal(text, 0) == (value, len(text))


@pytest.mark.filterwarnings("ignore:invalid escape sequence")
@settings(max_examples=120, deadline=None)
@given(
    text=st.lists(
        st.sampled_from(
            ["'", '"', "\\", "\\n", "\\x41", "\\u00e9", "\\012", "\\7", "\\q", "a", "''", "\n", "\\\n", "\\'"]
        ),
        max_size=8,
    ).map("".join)
)
def test_the_reader_agrees_with_python_on_every_string_that_python_reads(text):
    try:
        wanted = ast.literal_eval(text)
    except (SyntaxError, ValueError):
        wanted = None
    if isinstance(wanted, str) and text.startswith(("'", '"')):
        try:
            value, end = read_literal(text, 0)
        except Unreadable:
            pytest.fail(f"{text!r} is a string of Python")
        assert value == wanted or end < len(text)  # two strings side by side are one in Python only


def test_json_words_and_raw_newlines_are_understood():
    assert read_literal("{'a': [true, null, False], 'b': 'x\ny'}", 0).value == {"a": [True, None, False], "b": "x\ny"}
