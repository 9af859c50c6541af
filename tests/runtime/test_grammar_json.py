"""The grammar of a tool's arguments: what it lets through is valid, and what is valid it lets through."""

from __future__ import annotations

import json
from typing import Annotated, Any

import jsonschema
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chapbook.kernels.errors import UsageError
from chapbook.runtime.calls import CallableTool, ToolSchema
from chapbook.runtime.grammar import RuleBook
from chapbook.runtime.grammar_json import MAX_FREE_DEPTH, arguments_object
from chapbook.runtime.schema import MAX_GROUNDED_VALUES

FEW = settings(max_examples=35, deadline=None)


def tool(parameters: dict[str, Any], **grounded: tuple[str, ...]) -> CallableTool:
    return CallableTool(schema=ToolSchema(name="t", description="", parameters=parameters), grounded=grounded)


def grammar_of(parameters: dict[str, Any], **grounded: tuple[str, ...]) -> str:
    rules = RuleBook()
    gbnf = rules.render(arguments_object(rules, tool(parameters, **grounded)))
    rules.check_integrity()
    return gbnf


def one(schema: dict[str, Any], *known: str) -> str:
    grounded = {"v": known} if known else {}
    return grammar_of({"type": "object", "properties": {"v": schema}, "required": ["v"]}, **grounded)


@FEW
@given(data=st.data(), seed=st.integers(0, 2**32))
def test_every_text_of_the_grammar_is_valid_for_the_schema(matcher, walk, parameter_schemas, data, seed):
    schema = data.draw(parameter_schemas)
    gbnf = grammar_of(schema)
    text = walk(gbnf, seed)
    assert matcher.accepts(gbnf, text)
    jsonschema.validate(json.loads(text), schema)


@FEW
@given(data=st.data())
def test_every_valid_value_has_a_text_in_the_grammar(matcher, parameter_schemas, valid_values, data):
    schema = data.draw(parameter_schemas)
    value = data.draw(valid_values(schema))
    in_order = {key: value[key] for key in schema["properties"] if key in value}
    for text in (json.dumps(in_order, ensure_ascii=False), json.dumps(in_order, ensure_ascii=False, indent=2)):
        assert matcher.accepts(grammar_of(schema), text), text


def test_up_to_five_properties_come_in_any_order_and_none_twice(matcher):
    schema = {"type": "object", "properties": {key: {"type": "null"} for key in "abcde"}, "required": ["c"]}
    gbnf = grammar_of(schema)
    assert matcher.accepts(gbnf, '{"e": null, "c": null, "a": null}')
    assert not matcher.accepts(gbnf, '{"e": null, "a": null}')
    assert not matcher.accepts(gbnf, '{"c": null, "c": null}')
    assert not matcher.accepts(gbnf, '{"c": null, "f": null}')


def test_who_takes_no_arguments_is_given_none_and_an_object_of_anything_stays_one(matcher):
    none = grammar_of({"type": "object", "properties": {}})
    assert matcher.accepts(none, "{}")
    assert not matcher.accepts(none, '{"a": 1}')
    anything = grammar_of({"type": "object"})
    named = grammar_of({"type": "object", "properties": {}, "additionalProperties": {"type": "integer"}})
    for gbnf in (anything, named):
        assert matcher.accepts(gbnf, '{"a": 1}')


@pytest.mark.parametrize("character", [chr(code) for code in (1, 7, 8, 9, 10, 13, 27, 31)])
def test_a_raw_control_character_never_passes_in_a_string(matcher, character):
    gbnf = one({"type": "string"})
    assert not matcher.accepts(gbnf, f'{{"v": "a{character}b"}}')
    assert matcher.accepts(gbnf, json.dumps({"v": f"a{character}b"}))


def test_half_a_surrogate_pair_never_passes_and_a_whole_one_does(matcher):
    gbnf = one({"type": "string"})
    assert matcher.accepts(gbnf, r'{"v": "\ud83d\ude00 \u00e9 \ud7ff"}')
    for half in (r"\ud83d", r"\ude00", r"\ud83dx", r"\ud83d\u0041"):
        assert not matcher.accepts(gbnf, f'{{"v": "{half}"}}'), half


def test_enum_values_with_quotes_backslashes_and_control_characters_are_exact(matcher):
    values = ['say "hi"', "back\\slash", "line\nbreak", "tab\t", "bell\x07", "é中😀", "", "]-^[", 3, None, True, 1.5]
    gbnf = one({"enum": values})
    for value in values:
        assert matcher.accepts(gbnf, json.dumps({"v": value}, ensure_ascii=False)), value
    for other in ("say hi", "x", 4, False):
        assert not matcher.accepts(gbnf, json.dumps({"v": other}, ensure_ascii=False)), other


def test_white_space_is_bounded(matcher):
    gbnf = one({"type": "integer"})
    assert matcher.accepts(gbnf, '{\n  "v": 1\n}')
    assert not matcher.accepts(gbnf, '{"v":  1}')
    assert not matcher.accepts(gbnf, '{"v":\n\n1}')
    assert not matcher.accepts(gbnf, '{"v":\n' + " " * 13 + "1}")


def test_known_values_are_the_only_ones_and_are_escaped(matcher):
    paths = ("src/a.py", "src/ab.py", 'odd "name".txt', "back\\slash", "café.md", "new\nline")
    gbnf = one({"type": "string"}, *paths)
    for path in paths:
        assert matcher.accepts(gbnf, json.dumps({"v": path}, ensure_ascii=False)), path
    for path in ("src/a", "src/abc.py", "", "README.md"):
        assert not matcher.accepts(gbnf, json.dumps({"v": path})), path


def test_known_values_reach_into_lists_and_nullable_strings(matcher):
    many = one({"type": "array", "items": {"type": "string"}}, "s1", "s2")
    assert matcher.accepts(many, '{"v": ["s2", "s1"]}')
    assert not matcher.accepts(many, '{"v": ["s3"]}')
    maybe = one({"anyOf": [{"type": "string"}, {"type": "null"}]}, "s1")
    assert matcher.accepts(maybe, '{"v": null}')
    assert not matcher.accepts(maybe, '{"v": "s2"}')


def test_more_known_values_than_the_limit_leave_free_text(matcher):
    at_limit = tuple(f"f{number}" for number in range(MAX_GROUNDED_VALUES))
    assert not matcher.accepts(one({"type": "string"}, *at_limit), '{"v": "other"}')
    assert matcher.accepts(one({"type": "string"}, *at_limit, "one more"), '{"v": "other"}')


def test_a_file_name_that_is_not_utf8_is_left_out(matcher):
    gbnf = one({"type": "string"}, "good", "bad\udce9")
    assert matcher.accepts(gbnf, '{"v": "good"}')
    assert not matcher.accepts(gbnf, r'{"v": "bad\udce9"}')


def test_a_value_without_a_schema_is_json_that_comes_to_an_end(matcher):
    gbnf = one({})
    assert matcher.accepts(gbnf, '{"v": {"a": [1, "x", {"b": null}]}}')
    for depth in (MAX_FREE_DEPTH, MAX_FREE_DEPTH + 1):
        nested = f'{{"v": {"[" * depth}1{"]" * depth}}}'
        assert matcher.accepts(gbnf, nested) == (depth <= MAX_FREE_DEPTH)


class Node(msgspec.Struct, forbid_unknown_fields=True):
    name: Annotated[str, msgspec.Meta(min_length=1)]
    children: list[Node] = []


class Order(msgspec.Struct, forbid_unknown_fields=True):
    root: Node
    tags: dict[str, int] = {}
    pair: tuple[int, str] | None = None


def test_a_schema_that_msgspec_wrote_works_through_its_references_even_recursive_ones(matcher, walk):
    schema = msgspec.json.schema(Order)
    gbnf = grammar_of(schema)
    nested = {"root": {"name": "a", "children": [{"name": "b", "children": [{"name": "c"}]}]}, "tags": {"x": 1}}
    assert matcher.accepts(gbnf, json.dumps(nested))
    assert not matcher.accepts(gbnf, '{"root": {"name": ""}}')
    for seed in range(30):
        text = walk(grammar_of({**schema, "$defs": {**schema["$defs"], "Order": _without_pair(schema)}}), seed)
        msgspec.json.decode(text, type=Order)


def _without_pair(schema: dict[str, Any]) -> dict[str, Any]:
    order = schema["$defs"]["Order"]
    return {**order, "properties": {key: part for key, part in order["properties"].items() if key != "pair"}}


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"$ref": "#/$defs/Gone"}, "refers to '#/\\$defs/Gone'"),
        ({"$ref": "other.json#/x"}, "define it under"),
        ({"enum": []}, "empty enum"),
        ({"type": "strng"}, "type 'strng'"),
        ({"type": "integer", "minimum": 2, "maximum": 1}, "allows no integer"),
    ],
)
def test_a_schema_that_cannot_be_written_is_refused_by_name(schema, message):
    with pytest.raises(UsageError, match=message):
        one(schema)


def test_a_reference_that_only_names_itself_is_refused():
    loop = {"type": "object", "properties": {"v": {"$ref": "#/$defs/A"}}, "$defs": {"A": {"$ref": "#/$defs/A"}}}
    with pytest.raises(UsageError, match="name itself"):
        grammar_of(loop)


def test_the_same_tool_gives_the_same_bytes():
    schema = {"type": "object", "properties": {"b": {"type": "string"}, "a": {"enum": ["y", "x"]}}}
    assert grammar_of(schema, b=("q", "p")) == grammar_of(schema, b=("p", "q"))
