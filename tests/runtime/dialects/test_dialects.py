"""What holds for every dialect: calls survive being written and read, and no ill-formed call is in a grammar."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from chapbook.kernels.errors import UsageError
from chapbook.runtime.arguments import check_arguments
from chapbook.runtime.calls import CallableTool, ChoiceKind, ToolChoice, ToolSchema
from chapbook.runtime.chat_format import ReasoningMarks
from chapbook.runtime.dialects import DIALECTS

EVERY = pytest.mark.parametrize("dialect", DIALECTS.values(), ids=list(DIALECTS))
THINK = ReasoningMarks(begin="<think>", end="</think>")
AUTO = ToolChoice()

NAMES = st.from_regex(r"[a-z][a-z0-9_.-]{0,9}", fullmatch=True)
KEYS = st.from_regex(r"[a-z_][a-z0-9_]{0,6}", fullmatch=True)
MARKS = [
    "</tool_call>", "<tool_call>", "<|tool_call_end|>", "[TOOL_CALLS]", "[ARGS]", "<function=", "</function>",
    "<parameter=x>", "<|call|>", "<|end|>", "<|message|>", "<|python_tag|>", "<think>", "'''", '"""', "}]", ")]",
    "\\", "\r\n",
]  # fmt: skip
STRINGS = st.one_of(
    st.text(st.characters(exclude_categories=["Cs"]), max_size=10),
    st.lists(st.one_of(st.sampled_from(MARKS), st.text("ab'\"\\\n{}[](),=: é😀", max_size=5)), max_size=4).map("".join),
)
VALUES = st.recursive(
    st.one_of(STRINGS, st.integers(-(10**15), 10**15), st.booleans(), st.none(), st.sampled_from([0.5, -1e-9, 2.5e20])),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(STRINGS, inner, max_size=3)),
    max_leaves=6,
)


def written(dialect: Any, name: str, arguments: dict[str, Any]) -> str:
    return "".join(piece.text for piece in dialect.render_call(name, arguments))


def as_read(dialect: Any, arguments: dict[str, Any]) -> dict[str, Any]:
    """The XML dialect reads every value as text; the schema types it later."""
    if dialect.name != "qwen-xml":
        return arguments
    return {
        key: value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        for key, value in arguments.items()
    }


def tool(name: str, parameters: dict[str, Any], **grounded: tuple[str, ...]) -> CallableTool:
    return CallableTool(schema=ToolSchema(name=name, description="", parameters=parameters), grounded=grounded)


PATH = {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}


@EVERY
@settings(max_examples=30, deadline=None)
@given(name=NAMES, arguments=st.dictionaries(KEYS, VALUES, max_size=4))
def test_a_call_that_is_written_is_read_back_the_same(dialect, name, arguments):
    parsed = dialect.parse(written(dialect, name, arguments), reasoning=THINK)
    assert not parsed.problems
    assert [(call.name, call.arguments) for call in parsed.calls] == [(name, as_read(dialect, arguments))]
    assert parsed.text == ""
    assert parsed.reasoning == ""


@EVERY
@settings(max_examples=8, deadline=None)
@given(data=st.data(), name=NAMES)
def test_a_call_that_is_written_is_in_the_grammar(  # noqa: PLR0917 - fixtures
    matcher, parameter_schemas, valid_values, dialect, data, name
):
    schema = data.draw(parameter_schemas)
    value = data.draw(valid_values(schema))
    arguments = {key: value[key] for key in schema["properties"] if key in value}
    assume(dialect.name != "qwen-xml" or xml_can_tell(schema, arguments))
    grammar = dialect.grammar([tool("other", PATH), tool(name, schema)], choice=AUTO)
    text = written(dialect, name, arguments)
    trigger = grammar.triggers[0].text
    assert text.startswith(trigger)
    assert matcher.accepts(grammar.gbnf, text.removeprefix(trigger).removesuffix("<|tool_call_end|>"))


def xml_can_tell(schema: dict[str, Any], arguments: dict[str, Any]) -> bool:
    """A value that is no text, where a text could stand, reads as that text in XML: it has no other spelling."""
    return all(
        isinstance(value, str) or not re.search('"string"', json.dumps(schema["properties"][key].get("anyOf", [])))
        for key, value in arguments.items()
    )


def walkable(schema: dict[str, Any], *, text_bounds: bool) -> dict[str, Any]:
    """Leave out what a grammar cannot hold: that free keys differ; and, in XML, how long a text is."""
    if "anyOf" in schema:
        return {"anyOf": [walkable(part, text_bounds=text_bounds) for part in schema["anyOf"]]}
    if schema.get("type") == "string" and not text_bounds:
        return {"type": "string"}
    if schema.get("type") == "array":
        return {**schema, "items": walkable(schema["items"], text_bounds=True)}
    if schema.get("type") == "object" and "properties" in schema:
        properties = {key: walkable(part, text_bounds=True) for key, part in schema["properties"].items()}
        return {**schema, "properties": properties}
    return {"type": "boolean"} if schema.get("type") == "object" else schema


@EVERY
@settings(max_examples=8, deadline=None)
@given(data=st.data(), seed=st.integers(0, 2**32))
def test_every_text_of_a_grammar_reads_as_calls_that_pass_the_check(  # noqa: PLR0917 - fixtures
    matcher, walk, parameter_schemas, dialect, data, seed
):
    drawn = data.draw(parameter_schemas)
    bounded = dialect.name != "qwen-xml"
    drawn["properties"] = {key: walkable(part, text_bounds=bounded) for key, part in drawn["properties"].items()}
    tools = {"read": PATH, "re-read.all": drawn}
    grammar = dialect.grammar([tool(name, schema) for name, schema in tools.items()], choice=AUTO)
    for text in (walk(grammar.gbnf, seed), walk(grammar.gbnf, seed + 1)):
        assert matcher.accepts(grammar.gbnf, text)
        for trigger in grammar.triggers:
            parsed = dialect.parse(trigger.text + text, reasoning=None)
            assert not parsed.problems
            assert parsed.calls
            for call in parsed.calls:
                check_arguments(tool(call.name, tools[call.name]).schema, call.arguments)


@EVERY
def test_a_grammar_offers_just_the_tools_that_were_given_and_known_values(matcher, dialect):
    known = ("src/a.py", 'it\'s "odd".md', "café/中.txt")
    grammar = dialect.grammar([tool("read", PATH, path=known), tool("list", PATH)], choice=AUTO)
    trigger = grammar.triggers[0].text

    def passes(name: str, path: str) -> bool:
        text = written(dialect, name, {"path": path})
        return matcher.accepts(grammar.gbnf, text.removeprefix(trigger).removesuffix("<|tool_call_end|>"))

    assert all(passes("read", path) for path in known)
    assert not passes("read", "src/b.py")
    assert passes("list", "src/b.py")
    assert not passes("write", "src/a.py")
    assert not passes("rea", "src/a.py")


@EVERY
def test_two_thousand_known_paths_compile_in_every_dialect(matcher, dialect):
    known = tuple(f"src/part_{number % 37}/it's_{number}.py" for number in range(2_000))
    grammar = dialect.grammar([tool("read", PATH, path=known)], choice=AUTO)
    text = written(dialect, "read", {"path": known[1_234]})
    assert matcher.accepts(grammar.gbnf, text.removeprefix(grammar.triggers[0].text).removesuffix("<|tool_call_end|>"))


@EVERY
def test_tool_choice_decides_what_a_grammar_is(matcher, dialect):
    tools = [tool("read", PATH), tool("list", PATH)]
    assert dialect.grammar(tools, choice=ToolChoice(ChoiceKind.NONE)) is None
    assert dialect.grammar([], choice=AUTO) is None
    assert not dialect.grammar(tools, choice=AUTO).required
    assert dialect.grammar(tools, choice=ToolChoice(ChoiceKind.REQUIRED)).required
    named = dialect.grammar(tools, choice=ToolChoice(ChoiceKind.NAMED, "list"))
    assert named.required
    trigger = named.triggers[0].text
    texts = {
        name: written(dialect, name, {"path": "a"}).removeprefix(trigger).removesuffix("<|tool_call_end|>")
        for name in ("list", "read")
    }
    assert matcher.accepts(named.gbnf, texts["list"])
    assert not matcher.accepts(named.gbnf, texts["read"])
    with pytest.raises(UsageError, match="nearest: list"):
        dialect.grammar(tools, choice=ToolChoice(ChoiceKind.NAMED, "lists"))
    with pytest.raises(UsageError, match="no tool may be called"):
        dialect.grammar([], choice=ToolChoice(ChoiceKind.REQUIRED))


@EVERY
def test_the_same_tools_give_the_same_grammar(dialect):
    tools = [tool("read", PATH, path=("b", "a")), tool("list", PATH)]
    assert dialect.grammar(tools, choice=AUTO) == dialect.grammar(list(tools), choice=AUTO)


@EVERY
def test_the_expected_shape_is_a_call_that_reads(dialect):
    schema = {
        "type": "object",
        "properties": {"path": {"type": "string"}, "n": {"type": "integer", "minimum": 3}, "x": {"type": "null"}},
        "required": ["path", "n"],
    }
    shape = dialect.expected_shape(ToolSchema(name="read", description="", parameters=schema))
    (call,) = dialect.parse(shape, reasoning=None).calls
    assert call.name == "read"
    assert check_arguments(tool("read", schema).schema, call.arguments).arguments == {"path": "…", "n": 3}
    assert dialect.parse(dialect.expected_shape(None), reasoning=None).calls


TAGGED = [dialect for dialect in DIALECTS.values() if dialect.name not in ("harmony",)]
MARKUP_AROUND = [dialect for dialect in TAGGED if dialect.name != "pythonic-bare"]


@pytest.mark.parametrize("dialect", MARKUP_AROUND, ids=lambda dialect: dialect.name)
@given(before=st.text("ab .\n", max_size=8), between=st.text("xy .\n", max_size=8), after=st.text("cd .\n", max_size=8))
@settings(max_examples=30, deadline=None)
def test_text_around_calls_is_kept_and_every_call_is_read(dialect, before, between, after):
    first, second = written(dialect, "read", {"path": "a"}), written(dialect, "list", {"path": "b"})
    parsed = dialect.parse(f"{before}{first}{between}{second}{after}", reasoning=THINK)
    assert [(call.name, call.arguments["path"]) for call in parsed.calls] == [("read", "a"), ("list", "b")]
    assert parsed.text.split() == f"{before} {between} {after}".split()
    assert not parsed.problems


@pytest.mark.parametrize("dialect", TAGGED, ids=lambda dialect: dialect.name)
def test_a_call_inside_reasoning_is_not_a_call(dialect):
    call = written(dialect, "read", {"path": "a"})
    inside = dialect.parse(f"<think>I could write {call}</think>\n\nNo need.", reasoning=THINK)
    assert (inside.calls, inside.problems, inside.text) == ((), (), "No need.")
    assert call.strip() in inside.reasoning
    after = dialect.parse(f"<think>I will</think>\n{call}", reasoning=THINK)
    assert [found.name for found in after.calls] == ["read"]
    assert after.reasoning == "I will"


@pytest.mark.parametrize("dialect", TAGGED, ids=lambda dialect: dialect.name)
def test_reasoning_without_an_end_is_all_there_is(dialect):
    call = written(dialect, "read", {"path": "a"})
    for reply, marks in (
        (f"<think>hm {call}", THINK),
        (f"hm {call}", ReasoningMarks(begin="<think>", end="</think>", open_at_start=True)),
    ):
        parsed = dialect.parse(reply, reasoning=marks)
        assert parsed.calls == ()
        assert parsed.text == ""
        assert parsed.reasoning.startswith("hm")


def test_reasoning_that_the_prompt_opened_ends_at_its_mark():
    marks = ReasoningMarks(begin="<think>", end="</think>", open_at_start=True)
    for reply in ("so\n</think>\n\nThe answer.", "<think>so</think>The answer."):
        parsed = DIALECTS["hermes"].parse(reply, reasoning=marks)
        assert (parsed.reasoning, parsed.text) == ("so", "The answer.")


def test_a_word_about_the_mark_in_the_answer_hides_nothing():
    parsed = DIALECTS["hermes"].parse("The tag <think> opens it.", reasoning=THINK)
    assert parsed.text == "The tag <think> opens it."
    assert parsed.reasoning == ""


ARBITRARY = st.lists(
    st.one_of(
        st.sampled_from(
            [
                *MARKS,
                '{"name": "a"',
                '"arguments": {',
                "[f(",
                "a=1",
                "to=functions.f",
                "<|channel|>commentary",
                "<|start|>",
            ]
        ),
        st.text(max_size=6),
    ),
    max_size=12,
).map("".join)


@EVERY
@settings(max_examples=50, deadline=None)
@given(reply=ARBITRARY)
def test_no_reply_raises_and_every_problem_is_located_and_shows_the_shape(dialect, reply):
    parsed = dialect.parse(reply, reasoning=THINK)
    for problem in parsed.problems:
        assert problem.raw in reply
        assert re.search(r"\(line \d+, column \d+ of the call\)$", problem.problem)
        assert problem.expected == dialect.expected_shape(None)
    for call in parsed.calls:
        json.dumps(call.arguments).encode()


HOSTILE = {
    "many openings": lambda opening: opening * 20_000,
    "open brackets": lambda opening: opening + "[" * 100_000,
    "open braces": lambda opening: opening + '{"name":' * 25_000,
    "open parentheses": lambda opening: opening + "f(a=" + "(" * 100_000,
    "a long string": lambda opening: opening + '{"name": "' + "a" * 1_000_000,
    "many broken calls": lambda opening: (opening + '{"name": "x", }') * 10_000,
    "calls in calls": lambda opening: (opening + '{"name":"a","x":[') * 10_000,
    "white space": lambda opening: opening + " " * 1_000_000,
    "many quotes": lambda opening: opening + "[f(a='" + "\\'" * 300_000,
    "a long number": lambda opening: opening + "[f(a=" + "9" * 500_000 + ")]",
    "headers": lambda opening: opening + "<|channel|>commentary to=functions.f" * 10_000,
    "names": lambda opening: opening + "f" * 500_000,
}  # fmt: skip


@EVERY
@pytest.mark.parametrize("made", HOSTILE.values(), ids=list(HOSTILE))
def test_a_very_large_hostile_reply_is_read_to_its_end(dialect, made):
    opening = dialect.grammar([tool("f", PATH)], choice=AUTO).triggers[0].text
    for reply in (made(opening), made("<think>" + opening)):
        parsed = dialect.parse(reply, reasoning=THINK)
        assert len(parsed.calls) + len(parsed.problems) <= 20_000
