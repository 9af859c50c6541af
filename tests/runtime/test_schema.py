"""Reading a JSON schema: references, alternatives, bounds, and its short description."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chapbook.kernels.errors import UsageError
from chapbook.runtime.schema import branches, describe, integer_bounds, resolve, same_json, value_schema

ROOT = {
    "$defs": {
        "A": {"$ref": "#/$defs/B"},
        "B": {"type": "integer"},
        "C": {"$ref": "#/$defs/C"},
        "a/b~c": {"type": "null"},
    }
}


def test_references_are_followed_to_their_end_also_through_an_all_of_one():
    assert resolve({"$ref": "#/$defs/A", "default": 3}, ROOT) == {"type": "integer"}
    assert resolve({"allOf": [{"$ref": "#/$defs/A"}]}, ROOT) == {"type": "integer"}
    assert resolve({"$ref": "#/$defs/a~1b~0c"}, ROOT) == {"type": "null"}


@pytest.mark.parametrize("reference", ["#/$defs/C", "#/$defs/Z", "elsewhere#/$defs/A"])
def test_a_reference_that_leads_nowhere_is_refused(reference):
    with pytest.raises(UsageError):
        resolve({"$ref": reference}, ROOT)


def test_a_list_of_types_is_alternatives():
    assert branches({"type": ["string", "null"], "maxLength": 3}) == (
        {"type": "string", "maxLength": 3},
        {"type": "null", "maxLength": 3},
    )


@given(low=st.integers(-99, 99), number=st.integers(-99, 99))
def test_exclusive_and_fractional_bounds_become_inclusive_ones(low, number):
    for schema in (
        {"minimum": low - 0.5, "maximum": low + 2.5},
        {"exclusiveMinimum": low - 1, "exclusiveMaximum": low + 3},
        {"exclusiveMinimum": low - 0.5, "exclusiveMaximum": low + 2.5},
        {"minimum": low, "exclusiveMinimum": low - 9, "maximum": low + 9, "exclusiveMaximum": low + 3},
    ):
        bounds = integer_bounds(schema)
        assert (bounds.low <= number <= bounds.high) == (low <= number <= low + 2)


def test_an_object_that_names_its_properties_is_closed_unless_it_says_otherwise():
    named = {"properties": {"a": {}}}
    assert value_schema(named) is None
    assert value_schema({**named, "additionalProperties": True}) == {}
    assert value_schema({"type": "object"}) == {}
    assert value_schema({"additionalProperties": {"type": "null"}}) == {"type": "null"}


def test_values_are_equal_as_json_and_not_as_python():
    assert same_json([1, {"a": 1.0}], [1.0, {"a": 1}])
    assert not same_json(1, True)
    assert not same_json([0], [False])
    assert not same_json({"a": 1}, {"a": 1, "b": 2})


def test_a_description_is_short_and_ends_on_recursion():
    tree = {"type": "object", "properties": {"kids": {"type": "array", "items": {"$ref": "#/$defs/T"}}}}
    root = {"$defs": {"T": tree}}
    assert describe({"type": "array", "items": {"enum": ["a", 1]}}, root) == '("a"|1)[]'
    assert describe({}, root) == "any"
    assert len(describe(tree, root)) < 80
