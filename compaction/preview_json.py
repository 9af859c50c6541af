"""A preview of JSON: the keys of an object with types and lengths, the shape of an array's elements, the fields of
records in lines. What is too large to parse is told from its head."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import msgspec

from .kinds import Sample, first_bytes, json_records
from .quoting import PreviewLine, cleaned, clipped

if TYPE_CHECKING:
    from .stored_text import StoredText

PARSED_LIMIT_BYTES = 4 << 20
_HEAD_BYTES = 1 << 18
_ELEMENTS_LOOKED_AT = 500
_KEYS_SHOWN = 40
_NESTED_KEYS_SHOWN = 12
_VALUE_CHARS = 60
_LINE_CHARS = 240


def json_preview(text: StoredText, sample: Sample) -> list[PreviewLine]:
    """Return the lines of a preview; none where nothing of the text can be parsed."""
    if json_records(sample.head, whole=sample.whole):
        return _records_preview(text, sample)
    problem = f"of {text.ref.size_bytes:,} bytes, too large to parse whole"
    if text.ref.size_bytes <= PARSED_LIMIT_BYTES and not sample.numbered:
        try:
            return _described(msgspec.json.decode(b"".join(text.chunks())), cut="")
        except (msgspec.MsgspecError, ValueError) as error:
            problem = f"not valid JSON as a whole: {clipped(cleaned(str(error)))}"
        except RecursionError:
            problem = "nested too deeply to parse"
    head = sample.head if sample.numbered else first_bytes(text.chunks(), _HEAD_BYTES).decode(errors="replace")
    closed = close_json(head.removeprefix("\ufeff"))
    try:
        value = msgspec.json.decode(closed)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return []
    return [PreviewLine(f"{problem}; from its first {len(head):,} characters:", 0), *_described(value, cut="+")]


# A whole string, or what opens, closes or separates; a quote alone begins a string that was cut.
_STRUCTURE = re.compile(r'"(?:[^"\\]|\\.)*+"|["\[\]{},]')


def close_json(head: str) -> str:
    """Return the start of a JSON text, cut behind the last whole value, with all that is open closed."""
    closers: list[str] = []
    end, closed = 0, ""
    for token in _STRUCTURE.finditer(head):
        mark = token[0]
        if mark == '"':
            break
        if mark in "[{":
            closers.append("]" if mark == "[" else "}")
            end, closed = token.end(), "".join(reversed(closers)) if len(closers) < 64 else closed
        elif mark in "]}":
            if not closers or closers.pop() != mark:
                break
            end, closed = token.end(), "".join(reversed(closers)) if len(closers) < 64 else closed
            if not closers:
                break
        elif mark == ",":
            end, closed = token.start(), "".join(reversed(closers)) if len(closers) < 64 else closed
    return head[:end] + closed


def _described(value: object, *, cut: str) -> list[PreviewLine]:
    """Return lines on a value, with `cut` behind each count that may be short of the whole."""
    if isinstance(value, dict):
        found = [PreviewLine(f"object, {len(value):,}{cut} keys", 1)]
        for place, (key, one) in enumerate(value.items()):
            if place == _KEYS_SHOWN:
                found.append(PreviewLine(f"{len(value) - place:,}{cut} more keys", 2 + place))
                break
            found.append(PreviewLine(_clipped(f'"{_name(key)}": {shape(one, cut=cut)}'), 2 + place))
            if isinstance(one, list) and one and isinstance(one[0], dict | list):
                found.append(PreviewLine(_clipped(f'"{_name(key)}", first: {_compact(one[0])}'), 50 + place))
        return found
    if isinstance(value, list):
        found = [PreviewLine(f"array, {len(value):,}{cut} elements", 1)]
        if value:
            found.append(PreviewLine(_clipped(f"each: {_element_shape(value, depth=2)}"), 2))
            found.append(PreviewLine(_clipped(f"first: {_compact(value[0])}"), 3))
        if len(value) > 1 and not cut:
            found.append(PreviewLine(_clipped(f"last: {_compact(value[-1])}"), 4))
        return found
    return [PreviewLine(_clipped(shape(value)), 1)]


def shape(value: object, *, depth: int = 1, cut: str = "") -> str:
    """Return what a value is: a short one itself, else type and length, for `depth` levels what is in it."""
    if isinstance(value, dict):
        keys = list(value)[:_NESTED_KEYS_SHOWN]
        more = ", …" if len(value) > len(keys) else ""
        inner = ", ".join(f"{_name(key)}: {type_name(value[key])}" if depth else _name(key) for key in keys)
        return f"object of {len(value):,}{cut} {{{inner}{more}}}"
    if isinstance(value, list):
        of = f" of {_element_shape(value, depth=depth)}" if value and depth else ""
        return f"array, {len(value):,}{cut}{of}"
    shown = _compact(value)
    if len(shown) <= _VALUE_CHARS:
        return shown
    return (
        f"string, {len(value):,} characters: {clipped(shown, limit=_VALUE_CHARS)}" if isinstance(value, str) else shown
    )


def type_name(value: object) -> str:
    """Return the name of a value's JSON type, with the length of what has one."""
    if isinstance(value, dict):
        return f"object of {len(value):,}"
    if isinstance(value, list):
        return f"array, {len(value):,}"
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    return "string" if isinstance(value, str) else "number"


def _element_shape(elements: list[object], *, depth: int) -> str:
    """Return the type of an array's elements; of objects, their keys with types, ``?`` where some have none."""
    looked_at = elements[:_ELEMENTS_LOOKED_AT]
    objects = [one for one in looked_at if isinstance(one, dict)]
    if len(objects) < len(looked_at):
        names = Counter(type_name(one).split(" ")[0].rstrip(",") for one in looked_at)
        return " or ".join(f"{name}" for name, _ in names.most_common())
    return _fields(objects) if depth else "object"


def _fields(objects: Iterable[Mapping[str, object]]) -> str:
    types: dict[str, Counter[str]] = {}
    total = 0
    for one in objects:
        total += 1
        for key, value in one.items():
            if key in types or len(types) < 4 * _NESTED_KEYS_SHOWN:
                name = type_name(value).split(" ")[0].rstrip(",")
                types.setdefault(key, Counter())[name] += 1
    shown = []
    for key, names in list(types.items())[:_NESTED_KEYS_SHOWN]:
        optional = "?" if names.total() < total else ""
        shown.append(f"{_name(key)}{optional}: {'/'.join(name for name, _ in names.most_common())}")
    return "{" + ", ".join(shown) + (", …" if len(types) > _NESTED_KEYS_SHOWN else "") + "}"


def _records_preview(text: StoredText, sample: Sample) -> list[PreviewLine]:
    records = json_records(sample.head, whole=sample.whole)
    objects = [one for one in records if isinstance(one, dict)]
    lines = [line for line in sample.head.split("\n") if line.strip()]
    last = [line for line in (sample.head if sample.whole else sample.tail).split("\n") if line.strip()]
    found = [PreviewLine(f"JSON lines, {text.line_count:,} records", 0)]
    if objects:
        found.append(PreviewLine(_clipped(f"each: {_fields(objects)}"), 1))
    found.append(PreviewLine(_clipped(f"1: {cleaned(lines[0][: 2 * _LINE_CHARS])}"), 6, 1))
    if last and text.line_count > 1:
        shown = cleaned(last[-1][: 2 * _LINE_CHARS])
        found.append(PreviewLine(_clipped(f"{text.line_count}: {shown}"), 7, text.line_count))
    return found


def _name(key: str) -> str:
    return clipped(cleaned(key), limit=40)


def _compact(value: object) -> str:
    try:
        return cleaned(msgspec.json.encode(value).decode(errors="replace")[: 2 * _LINE_CHARS])
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return type_name(value)


def _clipped(line: str) -> str:
    return clipped(line, limit=_LINE_CHARS)
