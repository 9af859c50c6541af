"""The keys and lengths of JSON, with their lines and columns, in one pass and bounded memory.

It proves nothing about a text: what is no JSON gives fewer or odd entries, never an error. Brackets in strings are told
from others by the number of quotes before them, a block at a time, so that only what is listed costs Python's time.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

LISTED_DEPTH = 2
"""How many levels below the root are listed."""

_SEGMENT_BYTES = 400
_KEYS_SHOWN = 8
_NAME_CHARS = 80
_VALUE_CHARS = 40
_ESCAPE = re.compile(rb"\\.", re.DOTALL)
_NOT_BLANK = re.compile(rb"[^ \t\r\n]")

_IS_STRUCTURE = np.zeros(256, dtype=bool)
_IS_STRUCTURE[list(b"{}[],:")] = True
_STEP = np.zeros(256, dtype=np.int64)
_STEP[list(b"{[")] = 1
_STEP[list(b"}]")] = -1


class Place(NamedTuple):
    """Where something stands: its line and byte, both from 1."""

    line: int
    column: int


_BEGIN = Place(1, 1)


@dataclass(slots=True)
class JsonEntry:
    """A value: where it or its key begins, how deep below the root, its key or place in an array, and what it is."""

    place: Place
    depth: int
    name: str
    value: str = ""

    @property
    def title(self) -> str:
        named = f"{self.name}: {self.value}" if self.name else self.value
        return "  " * self.depth + " ".join(named.split())


@dataclass(slots=True)
class _Open:
    """An object or array that is not closed yet; `key` is that of the member which is being read."""

    entry: JsonEntry | None
    is_object: bool
    lists_members: bool
    deep_commas_before: int
    items: int = 0
    keys: list[str] = field(default_factory=list)
    key: str | None = None
    key_place: Place = _BEGIN
    holds_container: bool = False


class JsonScan:
    """Reads a text in blocks. `feed` gives the entries that begin in each; what they are is known once they close."""

    def __init__(self) -> None:
        self._start = _BEGIN
        self._half_escape = b""
        self._in_string = 0
        self._depth = 0
        self._deep_commas = 0
        self._open: list[_Open] = []
        self._roots = 0
        # What stands behind the last bracket, comma or colon: what of it was in earlier blocks, from where it is not
        # blank, and its part of this block, which is looked at only where it matters.
        self._carried = b""
        self._carried_place = _BEGIN
        self._block = b""
        self._span = range(0)
        self._newlines = np.zeros(0, dtype=np.intp)

    def feed(self, data: bytes) -> Iterator[JsonEntry]:
        """Yield the entries that begin in `data`, in order."""
        data = self._half_escape + data
        bare = _ESCAPE.sub(b"  ", data) if b"\\" in data else data
        self._half_escape = b"\\" if bare.endswith(b"\\") else b""
        if self._half_escape:  # is read with what follows
            data, bare = data[:-1], bare[:-1]
        if data:
            yield from self._scan(data, np.frombuffer(bare, dtype=np.uint8))

    def finish(self) -> None:
        """Say of what is still open that it is not closed."""
        for one in self._open:
            self._describe(one, ", not closed", self._deep_commas)

    def check_integrity(self) -> None:
        """Assert that what is open fits the depth that was counted."""
        assert self._in_string in (0, 1)
        assert len(self._open) <= LISTED_DEPTH + 1
        assert len(self._carried) <= _SEGMENT_BYTES
        assert 0 <= self._span.start <= self._span.stop <= len(self._block)
        assert self._deep_commas >= 0

    def _scan(self, data: bytes, codes: np.ndarray[Any, np.dtype[np.uint8]]) -> Iterator[JsonEntry]:
        quotes = np.flatnonzero(codes == ord('"'))
        newlines = np.flatnonzero(codes == ord("\n"))
        places = np.flatnonzero(_IS_STRUCTURE[codes])
        places = places[(np.searchsorted(quotes, places) + self._in_string) % 2 == 0]
        steps = _STEP[codes[places]]
        after = self._depth + np.cumsum(steps)
        # The depth within a bracket, for the opening and the closing one alike; of a comma, that of its container.
        within = np.where(steps < 0, after + 1, after)
        deep_commas = self._deep_commas + np.cumsum((codes[places] == ord(",")) & (within == LISTED_DEPTH + 1))
        listed = (within <= LISTED_DEPTH) | ((within == LISTED_DEPTH + 1) & (steps != 0))

        self._block, self._newlines, done = data, newlines, 0
        for at, commas in zip(places[listed].tolist(), deep_commas[listed].tolist(), strict=True):
            self._span = range(done, at)
            yield from self._event(data[at], at, commas)
            self._carried, done = b"", at + 1
        self._span = range(done, len(data))
        self._carried, self._carried_place = self._segment(), self._segment_place()
        self._start = self._place_of(len(data))
        self._in_string = (self._in_string + len(quotes)) % 2
        if len(places):
            self._depth, self._deep_commas = max(0, int(after[-1])), int(deep_commas[-1])

    def _place_of(self, at: int) -> Place:
        line = int(np.searchsorted(self._newlines, at))
        if not line:
            return Place(self._start.line, self._start.column + at)
        return Place(self._start.line + line, at - int(self._newlines[line - 1]))

    def _segment_begin(self) -> int:
        found = _NOT_BLANK.search(self._block, self._span.start, self._span.stop)
        return found.start() if found else self._span.stop

    def _segment_place(self) -> Place:
        return self._carried_place if self._carried else self._place_of(self._segment_begin())

    def _segment(self) -> bytes:
        """Return the first bytes of what stands behind the last bracket, comma or colon, from where it is not blank."""
        begin = self._span.start if self._carried else self._segment_begin()
        room = _SEGMENT_BYTES - len(self._carried)
        return self._carried + self._block[begin : min(self._span.stop, begin + room)]

    def _event(self, mark: int, at: int, deep_commas: int) -> Iterator[JsonEntry]:
        """Take in a bracket, comma or colon with the segment before it."""
        inner = self._open[-1] if self._open else None
        if mark in b"{[":
            yield from self._opens(inner, at, is_object=mark == ord("{"), deep_commas=deep_commas)
        elif inner is None:
            return
        elif mark == ord(":"):
            if inner.is_object:
                inner.key, inner.key_place = _unquoted(self._text()), self._segment_place()
                inner.keys += [inner.key] if len(inner.keys) < _KEYS_SHOWN else []
        else:
            yield from self._ends_item(inner)
            if mark != ord(","):
                self._open.pop()
                self._describe(inner, "", deep_commas)

    def _opens(self, parent: _Open | None, at: int, *, is_object: bool, deep_commas: int) -> Iterator[JsonEntry]:
        depth = len(self._open)
        if depth > LISTED_DEPTH:  # more was closed before than was open: this is no JSON
            return
        entry = None
        if parent is None:
            entry = JsonEntry(self._place_of(at), 0, "")
            self._roots += 1
        else:
            parent.holds_container = True
            if parent.lists_members:
                name = parent.key if parent.is_object else f"[{parent.items}]"
                entry = JsonEntry(
                    parent.key_place if parent.key is not None else self._place_of(at),
                    depth,
                    _clip(name or "", _NAME_CHARS),
                )
        # Members of an array's objects would drown the rest: they are named in the title.
        lists_members = self._roots == 1 and (
            depth == 0 or (depth < LISTED_DEPTH and is_object and parent is not None and parent.is_object)
        )
        self._open.append(_Open(entry, is_object, lists_members, deep_commas))
        if entry is not None:
            yield entry

    def _ends_item(self, inner: _Open) -> Iterator[JsonEntry]:
        """Take in the member or element that ends here, if there is one."""
        if not inner.holds_container and inner.key is not None and inner.lists_members:
            name, value = _clip(inner.key, _NAME_CHARS), _clip(self._text(), _VALUE_CHARS)
            yield JsonEntry(inner.key_place, len(self._open), name, value)
        if inner.holds_container or inner.key is not None or self._segment():
            inner.items += 1
        inner.key, inner.holds_container = None, False

    def _describe(self, one: _Open, ending: str, deep_commas: int) -> None:
        if one.entry is None:
            return
        items = one.items + deep_commas - one.deep_commas_before if one.entry.depth == LISTED_DEPTH else one.items
        if not one.is_object:
            what = f"array of {items:,}"
        else:
            what = f"object of {items:,}"
            if one.keys and not one.lists_members:
                more = ", …" if items > len(one.keys) else ""
                what += f": {', '.join(_clip(key, _VALUE_CHARS) for key in one.keys)}{more}"
        one.entry.value = what + ending

    def _text(self) -> str:
        return self._segment().decode(errors="replace").strip()


def _unquoted(text: str) -> str:
    return text[1:-1] if len(text) > 1 and text.startswith('"') and text.endswith('"') else text


def _clip(text: str, most_chars: int) -> str:
    return text if len(text) <= most_chars else f"{text[: most_chars - 1]}…"
