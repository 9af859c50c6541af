"""Llama 3: bare JSON, which an answer may be too."""

from __future__ import annotations

import pytest

from chapbook.runtime.dialects.llama3 import Llama3Dialect

CALL = '{"name": "read", "parameters": {"path": "a"}}'


def read(reply: str):
    parsed = Llama3Dialect().parse(reply, reasoning=None)
    return [(call.name, call.arguments) for call in parsed.calls], parsed.text, parsed.problems


@pytest.mark.parametrize(
    "reply",
    [
        CALL,
        f"\n {CALL}\n",
        f"<|python_tag|>{CALL}",
        '{"type": "function", "name": "read", "parameters": {"path": "a"}}',
        '{"type": "function", "function": "read", "parameters": {"path": "a"}}',
        '{"function": {"name": "read", "arguments": {"path": "a"}}}'.replace("arguments", "parameters"),
    ],
)
def test_a_call_at_the_start_is_read(reply):
    calls, text, problems = read(reply)
    assert (calls, text, problems) == ([("read", {"path": "a"})], "", ())


def test_text_before_a_call_loses_neither():
    assert read(f"I will read it.\n{CALL} Done.") == ([("read", {"path": "a"})], "I will read it.\nDone.", ())


def test_several_calls_one_after_another_are_read():
    assert len(read(f"{CALL}; {CALL}\n{CALL}")[0]) == 3


def test_json_that_is_an_answer_stays_text():
    for answer in ('{"name": "Bob", "age": 3}', '{"total": 4}', '{"type": "circle", "r": 1', "[1, 2]", '{"name": "x"'):
        assert read(answer) == ([], answer, ())


def test_a_call_that_breaks_off_is_a_problem_with_its_place():
    calls, _, (problem,) = read('{"name": "read", "parameters": {"path": "a"')
    assert calls == []
    assert "line 1, column" in problem.problem
    assert problem.expected == '{"name": "TOOL", "parameters": {"ARGUMENT": "VALUE"}}'
    assert read("<|python_tag|>{oops")[2]
