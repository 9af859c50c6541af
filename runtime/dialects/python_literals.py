"""Python literals as models write them: read without evaluating anything, written in one spelling.

A reader of our own, and not `ast`: it must find where a call ends before there is an expression to hand over, models
write raw newlines into quoted strings (the LFM2.5 template itself does), and JSON's ``true`` among them.
"""

from __future__ import annotations

import json
import re
import sys
from typing import Any, NamedTuple

from ..grammar_json import LiteralForm, json_text
from ..strict_json import MAX_VALUE_DEPTH, Unreadable, skip_space

_STRING = re.compile(
    r'"""(?P<d3>(?:[^\\"]|\\.|"(?!""))*)"""'
    r"|'''(?P<s3>(?:[^\\']|\\.|'(?!''))*)'''"
    r'|"(?P<d>(?:[^\\"]|\\.)*)"'
    r"|'(?P<s>(?:[^\\']|\\.)*)'",
    re.DOTALL,
)
_NUMBER = re.compile(r"[+-]?(?:\d+(?P<fraction>\.\d*)?|(?P<leading>\.\d+))(?P<exponent>[eE][+-]?\d+)?(?![\w.])")
_WORD = re.compile(r"[A-Za-z_]\w*")
_ESCAPE = re.compile(r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|([0-7]{1,3})|(.))", re.DOTALL)
_CONSTANTS = {"True": True, "False": False, "None": None, "true": True, "false": False, "null": None}
_CONTROL_ESCAPES = {"n": "\n", "r": "\r", "t": "\t", "b": "\b", "f": "\f", "a": "\a", "v": "\v", "\n": ""}
_MAX_NUMBER_CHARS = 400

_HEX = "[0-9a-fA-F]"
_ESCAPES_RULE = rf'"\\" ([\\"\x27nrtbf] | "x" {_HEX}{{2}} | "u" ([0-9a-cA-CefEF] {_HEX}{{3}} | [dD] [0-7] {_HEX}{{2}}))'


class LiteralRead(NamedTuple):
    """A value, and the offset behind it."""

    value: Any
    end: int


def read_literal(text: str, position: int, *, depth: int = 0) -> LiteralRead:
    """Read the literal that begins at `position`: a string, number, constant, list, tuple or dict.

    Raises Unreadable for anything else, and for nesting over `MAX_VALUE_DEPTH`.
    """
    if depth > MAX_VALUE_DEPTH:
        raise Unreadable(f"the value nests more than {MAX_VALUE_DEPTH} levels deep", position)
    opening = text[position : position + 1]
    if opening in ("'", '"'):
        return _read_string(text, position)
    if opening and opening in "[(":
        return _read_list(text, position, closing="]" if opening == "[" else ")", depth=depth)
    if opening == "{":
        return _read_dict(text, position, depth=depth)
    word = _WORD.match(text, position)
    if word and word.group() in _CONSTANTS:
        return LiteralRead(_CONSTANTS[word.group()], word.end())
    return _read_number(text, position)


def _read_string(text: str, position: int) -> LiteralRead:
    found = _STRING.match(text, position)
    if found is None:
        raise Unreadable("a string is not closed", position)
    value = _ESCAPE.sub(_unescaped, found.group(str(found.lastgroup)))
    try:
        value.encode()
    except UnicodeEncodeError:
        raise Unreadable("a \\u escape is half of a surrogate pair, which is no character", position) from None
    return LiteralRead(value, found.end())


def _unescaped(found: re.Match[str]) -> str:
    hexadecimal, octal, char = found.group(1) or found.group(2) or found.group(3), found.group(4), found.group(5)
    if hexadecimal or octal:
        code = int(hexadecimal, 16) if hexadecimal else int(octal, 8)
        return chr(code) if code <= sys.maxunicode else found.group()
    return char if char in "\\'\"" else _CONTROL_ESCAPES.get(char, found.group())


def _read_number(text: str, position: int) -> LiteralRead:
    found = _NUMBER.match(text, position)
    if found is None:
        raise Unreadable("a value must be a Python literal (text in quotes, number, list, dict, True, None)", position)
    if len(found.group()) > _MAX_NUMBER_CHARS:
        raise Unreadable(f"a number has more than {_MAX_NUMBER_CHARS} characters", position)
    if not any(found.group("fraction", "leading", "exponent")):
        return LiteralRead(int(found.group()), found.end())
    number = float(found.group())
    if number in (float("inf"), float("-inf")):
        raise Unreadable("a number is too large", position)
    return LiteralRead(number, found.end())


def _read_list(text: str, position: int, *, closing: str, depth: int) -> LiteralRead:
    values: list[Any] = []
    position = skip_space(text, position + 1)
    while not text.startswith(closing, position):
        value, position = read_literal(text, position, depth=depth + 1)
        values.append(value)
        position = skip_comma(text, position, closing=closing)
    return LiteralRead(values, position + 1)


def _read_dict(text: str, position: int, *, depth: int) -> LiteralRead:
    members: dict[str, Any] = {}
    position = skip_space(text, position + 1)
    while not text.startswith("}", position):
        key, after = read_literal(text, position, depth=depth + 1)
        if not isinstance(key, str) or key in members:
            raise Unreadable("a key must be a text that occurs once", position)
        colon = skip_space(text, after)
        if not text.startswith(":", colon):
            raise Unreadable("a key is not followed by a colon", colon)
        members[key], position = read_literal(text, skip_space(text, colon + 1), depth=depth + 1)
        position = skip_comma(text, position, closing="}")
    return LiteralRead(members, position + 1)


def skip_comma(text: str, position: int, *, closing: str) -> int:
    """Return the offset of the next item, or of the closing bracket. Raises Unreadable where neither follows."""
    position = skip_space(text, position)
    if text.startswith(",", position):
        return skip_space(text, position + 1)
    if not text.startswith(closing, position):
        raise Unreadable(f"a comma or {closing} is missing", position)
    return position


def python_text(value: Any) -> str:
    """Return `value` (of the types that JSON has) as a Python literal in one line."""
    if isinstance(value, str):
        return json_text(value)  # every escape that JSON writes means the same in Python
    if isinstance(value, list):
        return f"[{', '.join(map(python_text, value))}]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{python_text(str(key))}: {python_text(item)}" for key, item in value.items()) + "}"
    return repr(value) if value is None or isinstance(value, bool) else json.dumps(value, allow_nan=False)


def _spellings(value: Any) -> tuple[str, ...]:
    if not isinstance(value, str):
        return (python_text(value),)
    inner = json_text(value)[1:-1]
    single = inner.replace('\\"', '"').replace("'", "\\'")
    return (f'"{inner}"', f"'{single}'")


PYTHON_FORM = LiteralForm(
    true="True",
    false="False",
    null="None",
    characters={
        '"': rf'[^"\\\x00-\x1F] | {_ESCAPES_RULE}',
        "'": rf"[^'\\\x00-\x1F] | {_ESCAPES_RULE}",
    },
    spell=_spellings,
)
