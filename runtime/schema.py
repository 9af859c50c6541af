"""The subset of JSON Schema that tools use, read in one place for the grammar and for the check of arguments.

Understood: ``type`` (also a list), ``enum``, ``const``, ``minimum``, ``maximum`` and their exclusive forms,
``minLength``, ``maxLength``, ``items``, ``minItems``, ``maxItems``, ``properties``, ``required``,
``additionalProperties``, ``anyOf``, ``oneOf`` (as ``anyOf``), ``allOf`` with one member, ``$ref`` into the schema
itself. Any other keyword bounds nothing here; the tool's own decoding has the last word on it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any, TypeAlias

import msgspec

from ..kernels.errors import UsageError

Schema: TypeAlias = Mapping[str, Any]

MAX_GROUNDED_VALUES = 2_000
"""Up to so many known values are written into the grammar; above, free text and a check."""

_MAX_REFERENCES = 32


class IntegerBounds(msgspec.Struct, frozen=True):
    """The inclusive bounds of an integer; None where there is none."""

    low: int | None
    high: int | None


def refer(reference: str, root: Schema) -> Schema:
    """Return what a ``$ref`` into `root` names. Raises UsageError where it names nothing."""
    found: Any = root
    path, _, pointer = reference.partition("#")
    for step in pointer.split("/")[1:]:
        key = step.replace("~1", "/").replace("~0", "~")
        found = found.get(key) if isinstance(found, Mapping) else None
    if path or not isinstance(found, Mapping):
        raise UsageError(f"the schema refers to {reference!r}, which is not in it; define it under $defs")
    return found


def resolve(schema: Any, root: Schema) -> Schema:
    """Return `schema` with references and an ``allOf`` of one followed. Raises UsageError where they lead nowhere."""
    for _ in range(_MAX_REFERENCES):
        if schema is True or schema is None:
            return {}
        if not isinstance(schema, Mapping):
            raise UsageError(f"a schema must be an object, this is {json.dumps(schema)}")
        if "$ref" in schema:
            schema = refer(schema["$ref"], root)
        elif len(schema.get("allOf", ())) == 1:
            schema = schema["allOf"][0]
        else:
            return schema
    raise UsageError(f"the schema follows more than {_MAX_REFERENCES} references without an end: does one name itself?")


def branches(schema: Schema) -> tuple[Schema, ...]:
    """Return the alternatives of a resolved schema (anyOf, oneOf, a list of types), or nothing where it has none."""
    for key in ("anyOf", "oneOf"):
        if schema.get(key):
            return tuple(schema[key])
    if isinstance(schema.get("type"), list):
        return tuple({**schema, "type": name} for name in schema["type"])
    return ()


def choices(schema: Schema) -> tuple[Any, ...] | None:
    """Return all the values that a resolved schema allows, or None where it does not list them."""
    if "const" in schema:
        return (schema["const"],)
    return tuple(schema["enum"]) if "enum" in schema else None


def type_of(schema: Schema) -> str:
    """Return the one type of a resolved schema without branches; empty where any will do."""
    named = schema.get("type", "")
    if not named and "properties" in schema:
        return "object"
    return str(named)


def item_schema(schema: Schema) -> Any:
    """Return the schema of an array's items: anything where ``items`` is not one."""
    items = schema.get("items")
    return items if isinstance(items, Mapping) else {}


def value_schema(schema: Schema) -> Any | None:
    """Return the schema of an object's properties beyond the named ones; None where there may be none.

    An object that names properties is closed unless it says otherwise.
    """
    more = schema.get("additionalProperties", not schema.get("properties"))
    if more is False:
        return None
    return {} if more is True else more


def integer_bounds(schema: Schema) -> IntegerBounds:
    """Return the tightest inclusive bounds of an integer schema."""
    lows = [math.ceil(schema["minimum"])] if "minimum" in schema else []
    highs = [math.floor(schema["maximum"])] if "maximum" in schema else []
    if "exclusiveMinimum" in schema:
        lows.append(math.floor(schema["exclusiveMinimum"]) + 1)
    if "exclusiveMaximum" in schema:
        highs.append(math.ceil(schema["exclusiveMaximum"]) - 1)
    return IntegerBounds(max(lows, default=None), min(highs, default=None))


def same_json(left: Any, right: Any) -> bool:
    """Return whether two values are equal as JSON: True is not 1, but 1.0 is 1."""
    if isinstance(left, bool) or isinstance(right, bool):
        return left is right
    if isinstance(left, list) and isinstance(right, list):
        return len(left) == len(right) and all(map(same_json, left, right))
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(same_json(left[key], right[key]) for key in left)
    return bool(left == right)


def describe(schema: Any, root: Schema, *, depth: int = 3) -> str:
    """Return the type of a schema in a few characters, as a catalogue and an error message show it."""
    schema = resolve(schema, root)
    listed = choices(schema)
    if listed is not None:
        return "|".join(json.dumps(value, ensure_ascii=False) for value in listed)
    parts = branches(schema)
    if parts:
        return "|".join(dict.fromkeys(describe(part, root, depth=depth) for part in parts))
    kind = type_of(schema)
    if kind == "array":
        inner = describe(item_schema(schema), root, depth=depth - 1) if depth else "any"
        return f"({inner})[]" if "|" in inner else f"{inner}[]"
    if kind == "object" and schema.get("properties") and depth:
        return "{" + describe_members(schema, root, depth=depth - 1) + "}"
    return kind or "any"


def describe_members(schema: Schema, root: Schema, *, depth: int = 3) -> str:
    """Return the properties of an object schema, a question mark after those that may be left out."""
    required = schema.get("required", ())
    return ", ".join(
        f"{key}{'' if key in required else '?'}: {describe(part, root, depth=depth)}"
        for key, part in schema.get("properties", {}).items()
    )
