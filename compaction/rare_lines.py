"""Finds the lines of another shape in a text that is even otherwise: one pass, bounded memory and work.

Known forms of failures are a list, and a list ends. A tool that prints a thousand lines alike and one that is not has
said something, in whatever words. A line's shape is the words of it that many lines share, with a mark for the rest
(R. Vaarandi and M. Pihelgas, "LogCluster", CNSM 2015).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

_GROUPS_LIMIT = 4096
_KNOWN_LIMIT = 1 << 14
_STEP_BYTES = 1 << 17
_LOOKS_LIMIT = 30_000
_STEP_LOOKS = 25
_LOOKED_AT_BYTES = 300
_LEAST_LINES = 24
_EVEN_SHARE = 0.95
_COMMON_SHAPES = 64
_SHARED_WORD = 200
"""A word is shared, and a shape common, from one of so many lines on."""
_RARE_TIMES = 20
_RARE_HELD = 200

# Without them numbers, dates, addresses and hashes are gone in one fast step; that a word loses some too matters little
# for telling lines apart.
_HEX_DIGITS = b"0123456789abcdefABCDEF"
_WORD = re.compile(rb"[^\W\d_]+[:,.;!?]?|[^\w\s]+", re.ASCII)
_NAME, _INDENT = b"\x00", b"\x04"
_RUN_MARKS = (b"", b"\x01", b"\x02", b"\x02", b"\x03")
"""What stands for a run of words that are not shared, by their number: one, a few, many."""


@dataclass(slots=True)
class RareLine:
    """A line that stands for `count` of its shape, the first of them, cut to what is looked at."""

    line: int
    text: bytes
    count: int


class RareScan:
    """Reads a text in blocks of whole lines and counts their shapes.

    It gives up where a text has too many of them. Of a text with tens of thousands of different lines it looks at a
    sample.
    """

    def __init__(self) -> None:
        self._groups: dict[bytes, RareLine] = {}
        self._known: dict[int, RareLine] = {}
        self._shared: frozenset[bytes] | None = None
        self._line = 1
        self._within_line = False
        self._looks_left = _LOOKS_LIMIT
        self._given_up = False

    def check_integrity(self) -> None:
        """Assert that what is held is bounded."""
        assert len(self._groups) <= _GROUPS_LIMIT
        assert len(self._known) <= _KNOWN_LIMIT + _STEP_BYTES
        assert all(one.count >= 1 and len(one.text) <= _LOOKED_AT_BYTES for one in self._groups.values())
        assert not (self._given_up and self._groups)

    def feed(self, block: bytes) -> None:
        """Read on. Of a line that comes in several blocks, the first counts."""
        # [start, end): so few lines that holding each of them takes little.
        start = 0
        while start < len(block) and not self._given_up:
            end = block.find(b"\n", start + _STEP_BYTES) + 1 or len(block)
            self._read(block[start:end])
            start = end

    def _read(self, block: bytes) -> None:
        begins_within, self._within_line = self._within_line, not block.endswith(b"\n")
        lines = block.translate(None, _HEX_DIGITS).split(b"\n")
        if not self._within_line:
            lines.pop()
        if begins_within:
            lines[0] = b""
        self._count(lines, block)
        self._line += block.count(b"\n")

    def finish(self) -> list[RareLine] | None:
        """Return the lines of rare shapes, in order; None where the text is not even, so that none is rare."""
        if self._given_up:
            return None
        shared = self._shared or _shared_words(self._groups)
        groups = _merged(self._groups, shared)
        total = sum(one.count for one in groups.values())
        often = min(max(1, total // _SHARED_WORD), _RARE_TIMES)
        common = [one.count for one in groups.values() if one.count > often]
        if total < _LEAST_LINES or len(common) > _COMMON_SHAPES or sum(common) < _EVEN_SHARE * total:
            return None
        rare = [one for shape, one in self._groups.items() if groups[_reduced(shape, shared)].count <= often]
        return sorted(rare, key=lambda one: one.line)[:_RARE_HELD]

    def _count(self, lines: list[bytes], block: bytes) -> None:
        unknown = {}
        for line, count in Counter(lines).items():
            group = self._known.get(hash(line))
            if group is not None:
                group.count += count
            elif line and not line.isspace():
                unknown[line] = count
        if not unknown:
            return
        if len(self._known) > _KNOWN_LIMIT:
            self._known.clear()
        raw = block.split(b"\n")
        looks = max(self._looks_left, _STEP_LOOKS)
        for place, line in enumerate(lines):
            if line not in unknown:
                continue
            if looks <= 0:
                break
            looks -= 1
            self._meet(line, raw[place][:_LOOKED_AT_BYTES], self._line + place, unknown.pop(line))
            if self._given_up:
                return
        self._looks_left = looks

    def _meet(self, key: bytes, raw: bytes, line: int, count: int) -> None:
        shape = _words_of(raw)
        if self._shared is not None:
            shape = _reduced(shape, self._shared)
        group = self._groups.get(shape)
        if group is not None:
            group.count += count
        else:
            if len(self._groups) >= _GROUPS_LIMIT:
                self._reduce()
                if not self._given_up:
                    self._meet(key, raw, line, count)
                return
            group = self._groups[shape] = RareLine(line, raw, count)
        self._known[hash(key)] = group

    def _reduce(self) -> None:
        """Keep only the words that lines share from here on; give up where there are still too many shapes."""
        again = self._shared is not None
        self._shared = _shared_words(self._groups)
        self._groups = _merged(self._groups, self._shared)
        self._known.clear()
        self._given_up = again or len(self._groups) > _GROUPS_LIMIT // 4
        if self._given_up:
            self._groups = {}


def first_of_runs(rare: Iterable[RareLine], line_count: int) -> list[RareLine]:
    """Return the lines in the order of their worth: of each run of neighbours the first, then the second ones.

    What stands at the start or at the end of the text comes last: a preview shows those anyway.
    """
    ordered = []
    place, before, begins = 0, -9, 0
    for one in rare:
        near = one.line - before <= 2
        place, begins = (place + 1, begins) if near else (0, one.line)
        before = one.line
        at_edge = begins <= 2 or one.line > line_count - 2
        ordered.append((at_edge, place, one.count, one.line, one))
    return [entry[-1] for entry in sorted(ordered, key=lambda entry: entry[:-1])]


def _words_of(line: bytes) -> bytes:
    """Return the words and signs of a line in order, a mark for every run of what is neither, with blanks between."""
    shape = [_INDENT] if line[:1].isspace() else []
    for part in line.split():
        if _WORD.fullmatch(part):
            shape.append(part)
        elif not shape or shape[-1] != _NAME:
            shape.append(_NAME)
    return b" ".join(shape)


def _shared_words(groups: dict[bytes, RareLine]) -> frozenset[bytes]:
    counts: Counter[bytes] = Counter()
    for shape, group in groups.items():
        for word in set(shape.split(b" ")):
            counts[word] += group.count
    total = sum(group.count for group in groups.values())
    return frozenset(word for word, count in counts.items() if count >= max(3, total // _SHARED_WORD))


def _reduced(shape: bytes, shared: frozenset[bytes]) -> bytes:
    reduced: list[bytes] = []
    others = 0
    for word in (*shape.split(b" "), b""):
        if word and word not in (_NAME, _INDENT) and word not in shared and word not in _RUN_MARKS:
            others += 1
            continue
        if others:
            reduced.append(_RUN_MARKS[min(others, 4)])
            others = 0
        reduced.append(word)
    return b" ".join(reduced[:-1])


def _merged(groups: dict[bytes, RareLine], shared: frozenset[bytes]) -> dict[bytes, RareLine]:
    merged: dict[bytes, RareLine] = {}
    for shape, group in groups.items():
        known = merged.setdefault(_reduced(shape, shared), RareLine(group.line, group.text, 0))
        known.count += group.count
    return merged
