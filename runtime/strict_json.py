"""Reading JSON that a model wrote: strict where something would be lost or ambiguous, and with the place of a fault.

Refused beyond what JSON forbids: a key that occurs twice, deep nesting, numbers that overflow, half a surrogate pair.
Raw newlines and tabs in strings pass: they can be read in one way only.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any, NamedTuple

MAX_VALUE_DEPTH = 32
"""How deep the arguments of a call may nest."""


class Unreadable(Exception):
    """A call that cannot be read, at an offset of the reply (never before where its reading began)."""

    def __init__(self, problem: str, position: int) -> None:
        super().__init__(problem)
        self.problem, self.position = problem, position


class JsonRead(NamedTuple):
    """A JSON value, and the offset behind it."""

    value: Any
    end: int


def skip_space(text: str, position: int) -> int:
    """Return the offset of the first character at or behind `position` that is no white space."""
    while position < len(text) and text[position].isspace():
        position += 1
    return position


def read_json(text: str, position: int) -> JsonRead:
    """Read the JSON value that begins at `position`.

    Raises Unreadable for anything that is not JSON, a key that occurs twice, NaN, or nesting over `MAX_VALUE_DEPTH`.
    """
    try:
        # A slice, since a JSONDecodeError counts the lines from the start of its text: many would take quadratic time.
        value, length = _DECODER.raw_decode(text[position:])
    except json.JSONDecodeError as broken:
        raise Unreadable(f"this is not valid JSON: {broken.msg}", position + broken.pos) from None
    except RecursionError:
        raise Unreadable(f"the JSON nests more than {MAX_VALUE_DEPTH} levels deep", len(text)) from None
    except ValueError as broken:
        raise Unreadable(str(broken), position) from None
    end = position + length
    if _depth_over(value, MAX_VALUE_DEPTH):
        raise Unreadable(f"the JSON nests more than {MAX_VALUE_DEPTH} levels deep", end)
    if not _encodes(value):
        raise Unreadable("a \\u escape is half of a surrogate pair, which is no character", end)
    return JsonRead(value, end)


def read_whole_json(text: str) -> Any:
    """Return the value that `text` is the JSON of, white space around it aside. Raises Unreadable otherwise."""
    read = read_json(text, skip_space(text, 0))
    if skip_space(text, read.end) < len(text):
        raise Unreadable("more follows the JSON value", read.end)
    return read.value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members: dict[str, Any] = {}
    for key, value in pairs:
        if key in members:
            raise ValueError(f"the key {json.dumps(key)} occurs twice in one object")
        members[key] = value
    return members


def _refuse_constant(text: str) -> Any:
    raise ValueError(f"{text} is not a JSON value")


def _finite(text: str) -> float:
    number = float(text)
    if number in (float("inf"), float("-inf")):
        raise ValueError(f"the number {text[:40]} is too large")
    return number


_DECODER = json.JSONDecoder(
    strict=False, object_pairs_hook=_unique, parse_constant=_refuse_constant, parse_float=_finite
)


def _depth_over(value: Any, limit: int) -> bool:
    level = [value]  # of containers at one depth, the value itself aside
    for _ in range(limit):
        inner = (item for outer in level for item in _items(outer))
        level = [item for item in inner if isinstance(item, dict | list)]
        if not level:
            return False
    return True


def _items(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()


def _encodes(value: Any) -> bool:
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True
