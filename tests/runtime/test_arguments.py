"""The check of arguments: the same verdicts as the reference validator, and few coercions, each of them told."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chapbook.kernels.errors import ToolArgumentsError
from chapbook.runtime.arguments import check_arguments, nearest_values
from chapbook.runtime.calls import ToolSchema

PARAMETERS = {
    "type": "object",
    "properties": {
        "path": {"type": "string", "minLength": 1, "maxLength": 20},
        "limit": {"type": "integer", "minimum": 1, "maximum": 400},
        "ratio": {"type": "number", "exclusiveMinimum": 0},
        "all": {"type": "boolean"},
        "state": {"enum": ["todo", "doing", "done"]},
        "steps": {"type": "array", "items": {"type": "string"}, "minItems": 1, "maxItems": 3},
        "maybe": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
        "inner": {"type": "object", "properties": {"deep": {"type": "integer"}}, "required": ["deep"]},
        "map": {"type": "object", "additionalProperties": {"type": "integer"}},
    },
    "required": ["path"],
}
TOOL = ToolSchema(name="read", description="", parameters=PARAMETERS)


def checked(**arguments: Any):
    return check_arguments(TOOL, {"path": "a", **arguments})


def problems(**arguments: Any) -> tuple[str, ...]:
    with pytest.raises(ToolArgumentsError) as raised:
        checked(**arguments)
    assert all(line in str(raised.value) for line in raised.value.problems)
    return raised.value.problems


ANYTHING = st.recursive(
    st.one_of(
        st.none(), st.booleans(), st.integers(-300, 3_000), st.sampled_from([0.5, -2.25, 1e300]), st.text(max_size=5)
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.dictionaries(
            st.sampled_from(["path", "limit", "steps", "note", "when", "kind", "deep", "x"]), inner, max_size=4
        ),
    ),
    max_leaves=6,
)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_what_is_accepted_unchanged_is_what_the_reference_validator_accepts(parameter_schemas, valid_values, data):
    schema = data.draw(parameter_schemas)
    arguments = data.draw(
        st.one_of(
            valid_values(schema), st.dictionaries(st.sampled_from([*schema["properties"], "x"]), ANYTHING, max_size=3)
        )
    )
    try:
        found = check_arguments(ToolSchema(name="t", description="", parameters=schema), arguments)
    except ToolArgumentsError:
        assert not jsonschema.Draft202012Validator(schema).is_valid(arguments)
    else:
        jsonschema.validate(found.arguments, schema)
        assert jsonschema.Draft202012Validator(schema).is_valid(arguments) == (not found.coerced)
        assert found.coerced or found.arguments == arguments


@pytest.mark.parametrize(
    ("name", "given_value", "wanted"),
    [
        ("limit", "3", 3),
        ("limit", 3.0, 3),
        ("ratio", "0.5", 0.5),
        ("ratio", "2", 2),
        ("all", "true", True),
        ("all", "False", False),
        ("maybe", "null", None),
        ("maybe", "-7", -7),
        ("steps", '["a", "b"]', ["a", "b"]),
        ("inner", '{"deep": 1}', {"deep": 1}),
        ("inner", {"deep": "4"}, {"deep": 4}),
    ],
)
def test_a_coercion_that_loses_nothing_is_made_and_told(name, given_value, wanted):
    found = checked(**{name: given_value})
    assert found.arguments[name] == wanted
    assert type(found.arguments[name]) is type(wanted)
    assert len(found.coerced) == 1
    assert name in found.coerced[0]


@pytest.mark.parametrize(
    ("name", "given_value"),
    [
        ("limit", "3.5"),
        ("limit", 3.5),
        ("limit", "03"),
        ("limit", "three"),
        ("limit", True),
        ("limit", "9" * 5_000),
        ("ratio", "nan"),
        ("ratio", float("inf")),
        ("all", 1),
        ("all", "yes"),
        ("path", 7),
        ("path", None),
        ("steps", "a"),
        ("steps", '["a"'),
        ("inner", "[1]"),
        ("inner", '{"deep": 1, "deep": 2}'),
        ("state", "finished"),
        ("maybe", "none of it"),
    ],
)
def test_what_would_lose_something_is_not_coerced(name, given_value):
    assert any(line.startswith(name) for line in problems(**{name: given_value}))


def test_a_text_stays_a_text_where_a_text_is_wanted():
    assert checked(path="3").arguments["path"] == "3"
    assert checked(path="true").coerced == ()


def test_a_part_that_takes_the_value_as_it_is_goes_before_one_that_would_change_it():
    schema = {"type": "object", "properties": {"v": {"anyOf": [{"type": "integer"}, {"type": "string"}]}}}
    found = check_arguments(ToolSchema(name="t", description="", parameters=schema), {"v": "3"})
    assert found.arguments == {"v": "3"}
    assert found.coerced == ()


def test_arguments_without_a_fault_come_back_as_they_were():
    given_arguments = {"path": "a", "limit": 3, "steps": ["x"], "maybe": None, "map": {"any": 1}}
    found = check_arguments(TOOL, given_arguments)
    assert found.arguments == given_arguments
    assert found.coerced == ()


def test_an_unknown_argument_is_refused_with_the_nearest_name():
    assert problems(limits=3) == ("there is no argument limits; did you mean limit?",)
    (line,) = problems(zzz=3)
    assert "path, limit" in line


def test_a_missing_argument_is_named_with_its_type():
    with pytest.raises(ToolArgumentsError) as raised:
        check_arguments(TOOL, {"limit": 3})
    assert raised.value.problems == ("path is required (string)",)


@pytest.mark.parametrize(
    ("name", "given_value", "limit"),
    [
        ("limit", 401, "at most 400"),
        ("limit", 0, "at least 1"),
        ("ratio", 0, "over 0"),
        ("path", "", "at least 1"),
        ("path", "a" * 21, "21 characters; at most 20"),
        ("steps", [], "at least 1"),
        ("steps", list("abcd"), "4 items; at most 3"),
        ("state", "don", "did you mean done?"),
    ],
)
def test_a_bound_that_is_passed_is_stated(name, given_value, limit):
    (line,) = problems(**{name: given_value})
    assert line.startswith(name)
    assert limit in line


def test_a_problem_names_where_it_is_and_all_of_them_are_told_at_once():
    found = problems(inner={"deep": "x"}, steps=["a", 2], limit=999)
    assert {line.partition(" ")[0] for line in found} == {"inner.deep", "steps[1]", "limit"}


def test_a_null_or_number_problem_is_told_by_the_part_of_that_type():
    schema = {"type": "object", "properties": {"n": {"anyOf": [{"type": "integer", "maximum": 5}, {"type": "null"}]}}}
    tool = ToolSchema(name="t", description="", parameters=schema)
    with pytest.raises(ToolArgumentsError) as raised:
        check_arguments(tool, {"n": 6})
    assert raised.value.problems == ("n must be at most 5, this is 6",)
    with pytest.raises(ToolArgumentsError) as raised:
        check_arguments(tool, {"n": []})
    assert raised.value.problems == ("n must be integer|null, this is []",)


def test_a_value_that_must_exist_and_does_not_is_answered_with_near_ones():
    known = {"path": ("src/parser.py", "src/lexer.py", "docs/guide.md", "tests/test_parser.py")}
    assert check_arguments(TOOL, {"path": "src/lexer.py"}, grounded=known).coerced == ()
    with pytest.raises(ToolArgumentsError) as raised:
        check_arguments(TOOL, {"path": "parser.py"}, grounded=known)
    (line,) = raised.value.problems
    assert '"parser.py" does not exist' in line
    assert "src/parser.py" in line.partition("nearest: ")[2].split(", ")[0]


def test_near_values_are_found_among_very_many():
    known = [f"pkg_{number % 97}/module_{number}.py" for number in range(50_000)]
    assert nearest_values("pkg_3/modul_100.py", [*known, "pkg_3/module_100.py"])[0] == "pkg_3/module_100.py"
    assert nearest_values("", known) == ()


def test_deep_or_hostile_arguments_are_a_problem_and_not_a_crash():
    assert problems(steps="[" * 100_000)
    assert problems(inner='{"deep": ' * 200)
    deep: Any = 1
    for _ in range(200):
        deep = [deep]
    assert json.dumps(deep)
    assert problems(steps=deep)
