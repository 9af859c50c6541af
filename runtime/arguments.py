"""The check of a call's arguments against the tool's schema, with the few coercions that lose nothing.

A text that spells the wanted type becomes it ("3", "true", "null", the JSON of an object or list), and 3.0 becomes 3.
Every such change is told. Anything else that does not fit is a problem, with the limit and what would have fitted.
"""

from __future__ import annotations

import difflib
import heapq
import json
import operator
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from ..kernels.errors import ToolArgumentsError
from .calls import ToolSchema
from .schema import (
    Schema,
    branches,
    choices,
    describe,
    integer_bounds,
    item_schema,
    resolve,
    same_json,
    type_of,
    value_schema,
)
from .strict_json import Unreadable, read_whole_json

_NUMBER = re.compile(r"-?(0|[1-9][0-9]{0,17})(\.[0-9]{1,17})?([eE][+-]?[0-9]{1,2})?\Z")
_WORDS: dict[str, Any] = {"true": True, "True": True, "false": False, "False": False, "null": None, "None": None}

_LIMITS: tuple[tuple[str, Callable[[float, float], bool], str], ...] = (
    ("minimum", operator.ge, "at least"),
    ("exclusiveMinimum", operator.gt, "over"),
    ("maximum", operator.le, "at most"),
    ("exclusiveMaximum", operator.lt, "under"),
)

_SHOWN_CHARS = 60
_NEAREST_SHOWN = 3
_NEAREST_COMPARED = 50

_HUGE = sys.float_info.max
_UNCHANGED = object()
_TYPES: Mapping[str, Callable[[Any], bool]] = {
    "string": lambda value: isinstance(value, str),
    "integer": lambda value: isinstance(value, int) and not isinstance(value, bool),
    "number": lambda value: isinstance(value, int | float) and not isinstance(value, bool) and -_HUGE <= value <= _HUGE,
    "boolean": lambda value: isinstance(value, bool),
    "null": lambda value: value is None,
    "array": lambda value: isinstance(value, list),
    "object": lambda value: isinstance(value, dict),
    "": lambda _: True,
}


class CheckedArguments(msgspec.Struct, frozen=True, kw_only=True):
    """Arguments that fit the schema; `coerced` has a line for each that was changed."""

    arguments: dict[str, Any]
    coerced: tuple[str, ...] = ()


def check_arguments(
    schema: ToolSchema, arguments: Mapping[str, Any], *, grounded: Mapping[str, Sequence[str]] | None = None
) -> CheckedArguments:
    """Return the arguments as the schema wants them. `grounded` maps a property to all its valid values.

    Raises ToolArgumentsError with every problem found, UsageError where the schema itself cannot be read.
    """
    root = schema.parameters
    check = _Check(root=root)
    checked = check.object_value(resolve(root, root), dict(arguments), "", known=grounded or {})
    if check.problems:
        count = "1 problem" if len(check.problems) == 1 else f"{len(check.problems)} problems"
        lines = "\n".join(f"- {line}" for line in check.problems)
        raise ToolArgumentsError(
            f"{count} with the arguments of {schema.name}:\n{lines}\nCorrect them and call it again.",
            problems=tuple(check.problems),
        )
    return CheckedArguments(arguments=checked, coerced=tuple(check.coerced))


@dataclass(slots=True)
class _Check:
    """One pass over the arguments; collects problems and coercions. `root` is what references point into."""

    root: Schema
    problems: list[str] = field(default_factory=list)
    coerced: list[str] = field(default_factory=list)

    def value(self, schema: Any, value: Any, path: str, known: Sequence[str] | None) -> Any:
        """Return `value` as `schema` wants it; a problem is noted where it does not fit."""
        schema = resolve(schema, self.root)
        parts = branches(schema)
        if parts:
            return self._any_of(parts, value, path, known)
        listed = choices(schema)
        if listed is not None and any(same_json(value, choice) for choice in listed):
            return value
        typed = self._typed(type_of(schema), value, path, listed)
        if typed is _UNCHANGED:
            wanted = describe(schema, self.root)
            self.problems.append(f"{path} must be {wanted}, this is {_shown(value)}{_nearest_choice(value, listed)}")
            return value
        return typed if listed is not None else self._inside(schema, typed, path, known)

    def _inside(self, schema: Schema, value: Any, path: str, known: Sequence[str] | None) -> Any:
        """Return a value of the right type with what it holds checked, and note what is out of bounds."""
        match type_of(schema):
            case "string":
                self._string(schema, value, path, known)
            case "integer" | "number" as kind:
                self._bounds(kind, schema, value, path)
            case "array":
                return self._array(schema, value, path, known)
            case "object":
                return self.object_value(schema, value, path, known={})
        return value

    def object_value(
        self, schema: Schema, value: dict[str, Any], path: str, *, known: Mapping[str, Sequence[str]]
    ) -> dict[str, Any]:
        """Return an object's properties as its schema wants them."""
        properties, more = schema.get("properties", {}), value_schema(schema)
        missing = [key for key in schema.get("required", ()) if key not in value]
        for key in missing:
            self.problems.append(f"{_join(path, key)} is required ({describe(properties.get(key), self.root)})")
        checked = {}
        for key, item in value.items():
            if key in properties:
                checked[key] = self.value(properties[key], item, _join(path, key), known.get(key))
            elif more is None:
                nearest = difflib.get_close_matches(key, properties, n=1)
                hint = f"; did you mean {nearest[0]}?" if nearest else f"; there are {', '.join(properties) or 'none'}"
                self.problems.append(f"there is no argument {_join(path, key)}{hint}")
            else:
                checked[key] = self.value(more, item, _join(path, key), None)
        return checked

    def _any_of(self, parts: Sequence[Schema], value: Any, path: str, known: Sequence[str] | None) -> Any:
        """Return the value as the first part wants it that takes it as it is, else as the first that coerces it."""
        attempts = []
        for part in parts:
            attempt = _Check(root=self.root)
            attempts.append((attempt, attempt.value(part, value, path, known)))
        fitting = [pair for pair in attempts if not pair[0].problems]
        best = next((pair for pair in fitting if not pair[0].coerced), fitting[0] if fitting else None)
        if best:
            self.coerced += best[0].coerced
            return best[1]
        # The part of the value's own type knows best what is wrong with it.
        apt = [check for (check, _), part in zip(attempts, parts, strict=True) if self._is_of_type(part, value)]
        if apt:
            self.problems += apt[0].problems
        else:
            self.problems.append(f"{path} must be {describe({'anyOf': parts}, self.root)}, this is {_shown(value)}")
        return value

    def _is_of_type(self, part: Schema, value: Any) -> bool:
        part = resolve(part, self.root)
        return choices(part) is None and not branches(part) and _TYPES.get(type_of(part), _TYPES[""])(value)

    def _typed(self, kind: str, value: Any, path: str, listed: Sequence[Any] | None) -> Any:
        """Return the value with the wanted type, or among those listed; `_UNCHANGED` where it cannot be."""
        is_wanted = _TYPES.get(kind, _TYPES[""])
        if listed is None and is_wanted(value) and not (kind == "integer" and isinstance(value, float)):
            return value
        coerced = _coerced(kind, value)
        fits = any(same_json(coerced, choice) for choice in listed or ()) if listed is not None else True
        if coerced is _UNCHANGED or not fits or not is_wanted(coerced):
            return _UNCHANGED
        self.coerced.append(f"{path}: {_shown(value)} became {_shown(coerced)}")
        return coerced

    def _string(self, schema: Schema, value: str, path: str, known: Sequence[str] | None) -> None:
        least, most = schema.get("minLength", 0), schema.get("maxLength")
        if len(value) < least:
            self.problems.append(f"{path} has {len(value)} characters; at least {least} are needed")
        if most is not None and len(value) > most:
            self.problems.append(f"{path} has {len(value)} characters; at most {most} are allowed")
        if known is not None and value not in known:
            nearest = nearest_values(value, known)
            hint = f"; nearest: {', '.join(nearest)}" if nearest else ""
            self.problems.append(f"{path}: {_shown(value)} does not exist{hint}")

    def _bounds(self, kind: str, schema: Schema, value: float, path: str) -> None:
        if kind == "integer":
            bounds = integer_bounds(schema)
            if bounds.low is not None and value < bounds.low:
                self.problems.append(f"{path} must be at least {bounds.low}, this is {value}")
            if bounds.high is not None and value > bounds.high:
                self.problems.append(f"{path} must be at most {bounds.high}, this is {value}")
            return
        for key, passes, words in _LIMITS:
            if key in schema and not passes(value, schema[key]):
                self.problems.append(f"{path} must be {words} {schema[key]}, this is {value}")

    def _array(self, schema: Schema, value: list[Any], path: str, known: Sequence[str] | None) -> list[Any]:
        least, most = schema.get("minItems", 0), schema.get("maxItems")
        if len(value) < least:
            self.problems.append(f"{path} has {len(value)} items; at least {least} are needed")
        if most is not None and len(value) > most:
            self.problems.append(f"{path} has {len(value)} items; at most {most} are allowed")
        items = item_schema(schema)
        return [self.value(items, item, f"{path}[{index}]", known) for index, item in enumerate(value)]


def nearest_values(value: str, known: Sequence[str]) -> tuple[str, ...]:
    """Return the known values that are most like `value`: those with the same last part of a path, then by spelling.

    Linear in the known values: only those that share most pairs of characters with it are compared closely.
    """
    name = value.rpartition("/")[2]
    same_name = [other for other in known if name and other.rpartition("/")[2] == name]
    pairs = {value[index : index + 2].lower() for index in range(len(value) - 1)}
    alike = heapq.nlargest(_NEAREST_COMPARED, known, key=lambda other: sum(pair in other.lower() for pair in pairs))
    close = difflib.get_close_matches(value, alike, n=_NEAREST_SHOWN, cutoff=0.4)
    return tuple(dict.fromkeys([*same_name[:_NEAREST_SHOWN], *close]))[:_NEAREST_SHOWN]


def _coerced(kind: str, value: Any) -> Any:
    """Return what `value` spells as `kind` (any, where it is empty), or `_UNCHANGED`."""
    if isinstance(value, float):
        exact = kind in ("integer", "") and value.is_integer() and abs(value) < 2**53
        return int(value) if exact else _UNCHANGED
    if not isinstance(value, str) or kind == "string":
        return _UNCHANGED
    text = value.strip()
    if text in _WORDS:
        return _WORDS[text]
    return _from_json(text) if _NUMBER.match(text) or text[:1] in ("[", "{") else _UNCHANGED


def _from_json(text: str) -> Any:
    try:
        return read_whole_json(text)
    except Unreadable:
        return _UNCHANGED


def _nearest_choice(value: Any, listed: Sequence[Any] | None) -> str:
    names = [choice for choice in listed or () if isinstance(choice, str)]
    nearest = difflib.get_close_matches(value, names, n=1) if isinstance(value, str) else []
    return f"; did you mean {nearest[0]}?" if nearest else ""


def _join(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= _SHOWN_CHARS else f"{text[: _SHOWN_CHARS - 1]}…"
