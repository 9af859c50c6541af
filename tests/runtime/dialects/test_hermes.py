"""Hermes: small models bend the form in a few known ways, and no call may be lost to that."""

from __future__ import annotations

import pytest

from chapbook.runtime.calls import ToolSchema
from chapbook.runtime.dialects.hermes import HermesDialect, render_catalogue

DIALECT = HermesDialect()
CALL = '{"name": "read", "arguments": {"path": "a"}}'


def read(reply: str):
    parsed = DIALECT.parse(reply, reasoning=None)
    return [(call.name, call.arguments) for call in parsed.calls], parsed.text, parsed.problems


@pytest.mark.parametrize(
    "reply",
    [
        f"<tool_call>{CALL}</tool_call>",
        f"<tool_call>\n{CALL}\n</tool_call>\n</tool_call>",
        f"<tool_call>\n{CALL}",
        f"<tool_call><tool_call>\n{CALL}</tool_call>",
        f"<tool_call>{CALL}}}</tool_call>",
        f"<tool_call>\n```json\n{CALL}\n```\n</tool_call>",
        f"<tool_call>[{CALL}]</tool_call>",
        '<tool_call>{"arguments": {"path": "a"}, "name": "read"}</tool_call>',
        '<tool_call>{"name": "read", "parameters": {"path": "a"}}</tool_call>',
        '<tool_call>{"name": "read", "arguments": "{\\"path\\": \\"a\\"}"}</tool_call>',
        '<tool_call>{"type": "function", "function": {"name": "read", "arguments": {"path": "a"}}}</tool_call>',
    ],
)
def test_a_bent_call_is_still_the_call(reply):
    assert read(reply) == ([("read", {"path": "a"})], "", ())


def test_a_duplicated_closing_tag_loses_neither_the_call_nor_the_next():
    calls, text, problems = read(f"One.<tool_call>{CALL}</tool_call></tool_call> Two.<tool_call>{CALL}</tool_call>")
    assert len(calls) == 2
    assert text == "One.\nTwo."
    assert not problems


def test_several_calls_in_one_pair_of_tags_are_all_read():
    calls, _, problems = read(f"<tool_call>{CALL}\n{CALL}</tool_call>")
    assert len(calls) == 2
    assert not problems


def test_a_call_without_its_closing_tag_leaves_the_text_behind_it_to_the_reader():
    assert read(f"<tool_call>{CALL}\nI wait.") == ([("read", {"path": "a"})], "I wait.", ())


def test_a_closing_tag_inside_a_string_does_not_end_the_call():
    calls, text, _ = read('<tool_call>{"name": "w", "arguments": {"t": "a</tool_call>b"}}</tool_call>done')
    assert calls == [("w", {"t": "a</tool_call>b"})]
    assert text == "done"


def test_a_raw_newline_in_a_string_is_read_as_what_it_is():
    calls, _, _ = read('<tool_call>{"name": "w", "arguments": {"t": "a\nb"}}</tool_call>')
    assert calls == [("w", {"t": "a\nb"})]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ('\n{"name": "read", "arguments": {"path": "a",,}}\n', "line 2, column 44"),
        ('{"name": "read", "arguments": {"path": "a"}', "line 1, column 55"),
        ('{"name": "read", "arguments": ["a"]}', "must be an object, this is a list"),
        ('{"name": "read", "arguments": "path=a"}', "not a JSON object"),
        ('{"arguments": {"path": "a"}}', 'has no "name"'),
        ('{"name": "", "arguments": {}}', 'has no "name"'),
        ('{"name": "read", "arguments": {"path": "a", "path": "b"}}', '"path" occurs twice'),
        ('{"name": "read", "arguments": {"n": NaN}}', "NaN is not a JSON value"),
        ('{"name": "read", "arguments": {"n": 1e999}}', "too large"),
        ('{"name": "read", "arguments": {"p": "\\ud83d"}}', "half of a surrogate pair"),
        ("[]", "empty"),
        ("read a", "not valid JSON"),
        ("", "not valid JSON"),
        (CALL + " and so on", "text stands between"),
        ('{"name": "read", "arguments": ' + '{"a":' * 40 + "1" + "}" * 41, "nests more than"),
    ],
)
def test_what_cannot_be_read_is_a_problem_with_its_place_and_the_shape(body, message):
    calls, text, problems = read(f"Before. <tool_call>{body}</tool_call> After.")
    assert calls == []
    assert text == "Before.\nAfter."
    (problem,) = problems
    assert message in problem.problem
    assert '"arguments"' in problem.expected
    assert problem.raw == f"<tool_call>{body}</tool_call>"


def test_a_broken_call_does_not_take_the_next_one_with_it():
    calls, _, problems = read(f'<tool_call>{{"name": "read", </tool_call><tool_call>{CALL}</tool_call>')
    assert calls == [("read", {"path": "a"})]
    assert len(problems) == 1
    calls, _, problems = read(f'<tool_call>{{"name": read<tool_call>{CALL}</tool_call>')
    assert calls == [("read", {"path": "a"})]
    assert len(problems) == 1


def test_an_unknown_name_is_kept_for_the_caller_to_judge():
    assert read('<tool_call>{"name": "no_such", "arguments": {}}</tool_call>')[0] == [("no_such", {})]


def test_a_reply_without_a_call_is_text():
    assert read("  The answer is <b>4</b>.\n") == ([], "The answer is <b>4</b>.", ())
    assert read("") == ([], "", ())
    assert read("ends in <tool_ca")[1] == "ends in <tool_ca"


def string(**more: object) -> dict[str, object]:
    return {"type": "string", **more}


def test_a_catalogue_of_fourteen_tools_is_cheap_and_names_everything(matcher):
    parameters = {
        "type": "object",
        "properties": {"path": string(), "offset": {"type": "integer"}, "limit": {"type": "integer"}},
        "required": ["path"],
    }
    tools = [
        ToolSchema(
            name=f"tool_{number}", description="Read a file of the workspace, with line numbers.", parameters=parameters
        )
        for number in range(14)
    ]
    text = render_catalogue(tools)
    assert text == render_catalogue(list(tools))
    assert len(matcher.tokens(text)) < 600
    assert "- tool_3(path: string, offset?: integer, limit?: integer): Read a file" in text
    example = text[text.index("<tool_call>") : text.index("</tool_call>") + len("</tool_call>")]
    assert read(example)[0] == [("TOOL", {"ARGUMENT": "VALUE"})]


def test_a_catalogue_shows_choices_lists_and_nested_objects():
    parameters = {
        "type": "object",
        "properties": {
            "state": {"enum": ["todo", "done"]},
            "steps": {"type": "array", "items": string()},
            "who": {"anyOf": [string(), {"type": "null"}]},
            "at": {"type": "object", "properties": {"line": {"type": "integer"}}, "required": ["line"]},
        },
        "required": ["state"],
    }
    line = render_catalogue([ToolSchema(name="t", description="D.", parameters=parameters)]).splitlines()[-1]
    assert line == '- t(state: "todo"|"done", steps?: string[], who?: string|null, at?: {line: integer}): D.'
