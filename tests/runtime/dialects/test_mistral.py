"""Mistral: lists of calls in older models, named calls in newer ones; either dialect reads both."""

from __future__ import annotations

import pytest

from chapbook.runtime.calls import CallableTool, ToolChoice, ToolSchema
from chapbook.runtime.dialects.mistral import MistralDialect

DIALECTS = [MistralDialect(), MistralDialect(name="mistral-args", named=True)]
BOTH = pytest.mark.parametrize("dialect", DIALECTS, ids=["list", "named"])


@BOTH
@pytest.mark.parametrize(
    "reply",
    [
        '[TOOL_CALLS][{"name": "read", "arguments": {"path": "a"}}]',
        '[TOOL_CALLS] [{"name": "read", "arguments": {"path": "a"}, "id": "abcdefghi"}]',
        '[TOOL_CALLS]{"name": "read", "arguments": {"path": "a"}}',
        '[TOOL_CALLS]read[ARGS]{"path": "a"}',
        '[TOOL_CALLS]read[CALL_ID]abcdefghi[ARGS]{"path": "a"}',
        '[TOOL_CALLS]read{"path": "a"}',
    ],
)
def test_every_form_is_read(dialect, reply):
    parsed = dialect.parse(f"Well.{reply}Then.", reasoning=None)
    assert [(call.name, call.arguments) for call in parsed.calls] == [("read", {"path": "a"})]
    assert parsed.text == "Well.\nThen."
    assert not parsed.problems


@BOTH
def test_several_calls_in_a_list_or_one_after_another_are_read(dialect):
    listed = '[TOOL_CALLS][{"name": "a", "arguments": {}}, {"name": "b", "arguments": {}}]'
    named = "[TOOL_CALLS]a[ARGS]{}[TOOL_CALLS]b[ARGS]{}"
    for reply in (listed, named, f"[TOOL_CALLS]{listed}"):
        parsed = dialect.parse(reply, reasoning=None)
        assert [call.name for call in parsed.calls] == ["a", "b"]
        assert not parsed.problems


@BOTH
@pytest.mark.parametrize("body", ["read", '[{"name": "a"', "read[ARGS]{", "read[ARGS][1]", "[ARGS]{}"])
def test_what_cannot_be_read_is_a_problem_and_the_next_call_is_still_read(dialect, body):
    parsed = dialect.parse(f"[TOOL_CALLS]{body}\n[TOOL_CALLS]list[ARGS]{{}}", reasoning=None)
    assert [call.name for call in parsed.calls] == ["list"]
    assert len(parsed.problems) == 1


def test_the_grammar_writes_the_form_of_its_variant(matcher):
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    tool = CallableTool(schema=ToolSchema(name="f", description="", parameters=schema))
    listed, named = (dialect.grammar([tool], choice=ToolChoice()).gbnf for dialect in DIALECTS)
    assert matcher.accepts(listed, '[{"name": "f", "arguments": {"n": 1}}, {"name": "f", "arguments": {"n": 2}}]')
    assert matcher.accepts(listed, ' [{"name": "f", "arguments": {"n": 1}, "id": "a1b2c3d4e"}]')
    assert matcher.accepts(named, 'f[ARGS]{"n": 1}')
    assert matcher.accepts(named, 'f[CALL_ID]a1b2c3d4e[ARGS]{"n": 1}')
    assert not matcher.accepts(named, '[{"name": "f", "arguments": {"n": 1}}]')
    assert not matcher.accepts(listed, 'f[ARGS]{"n": 1}')
