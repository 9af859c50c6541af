"""A preview of a diff: its files, each with the lines that were added and removed."""

from __future__ import annotations

import re
from collections.abc import Iterator

import msgspec

from .kinds import Sample
from .quoting import PreviewLine, quoted

_FILES_SHOWN = 60
_FILES_HELD = 2000
_NAME_CHARS = 100

# git begins each file with a line of its own; other tools with the two that name the file before and after.
_GIT_START = re.compile(rb"(?m)^diff --git .*")
_PLAIN_START = re.compile(rb"(?m)^\+\+\+ .*")
_GIT_NAME = re.compile(r"diff --git (?:\"?a/)?(.+?)\"? \"?b/(.+?)\"?$")


class _FileDiff(msgspec.Struct):
    line: int
    name: str
    added: int = 0
    removed: int = 0


def diff_preview(blocks: Iterator[bytes], sample: Sample) -> list[PreviewLine]:
    """Return the lines of a preview, the files with the most changes first; none where no file begins."""
    is_git = re.search(_GIT_START.pattern.decode(), sample.head) is not None
    files: list[_FileDiff] = []
    total, line = 0, 1
    whole = current = _FileDiff(0, "")
    for block in blocks:
        at = 0
        for start in (_GIT_START if is_git else _PLAIN_START).finditer(block):
            _count_changes(block, at, start.start(), current, whole, is_git=is_git)
            line += block.count(b"\n", at, start.start())
            at = start.start()
            current = _FileDiff(line if is_git else max(1, line - 1), _name_of(start[0].decode(errors="replace")))
            total += 1
            if len(files) < _FILES_HELD:
                files.append(current)
        _count_changes(block, at, len(block), current, whole, is_git=is_git)
        line += block.count(b"\n", at)
    if not total:
        return []
    found = [PreviewLine(f"{total:,} file{'s' * (total > 1)} changed, +{whole.added:,} -{whole.removed:,}", 0)]
    largest = sorted(files, key=lambda one: -(one.added + one.removed))
    for place, one in enumerate(largest[:_FILES_SHOWN]):
        name = quoted(one.name, around=len(one.name) - 1, limit=_NAME_CHARS)
        found.append(PreviewLine(f"{one.line}: {name} +{one.added:,} -{one.removed:,}", 1 + place, one.line, 0, total))
    return found


def _count_changes(block: bytes, start: int, end: int, current: _FileDiff, whole: _FileDiff, *, is_git: bool) -> None:
    """Add the lines of [start, end), which begins with a line, to a file and to all; not those that name a file."""
    named = (b"+++ b/", b"+++ /dev/null", b"--- a/", b"--- /dev/null") if is_git else (b"+++ ", b"--- ")
    added, removed = _count(block, b"+", start, end), _count(block, b"-", start, end)
    for header in named:
        number = _count(block, header, start, end)
        added -= number * header.startswith(b"+")
        removed -= number * header.startswith(b"-")
    for one in (current, whole) if current is not whole else (whole,):
        one.added += added
        one.removed += removed


def _count(block: bytes, mark: bytes, start: int, end: int) -> int:
    return block.count(b"\n" + mark, start, end) + block.startswith(mark, start, end)


def _name_of(header: str) -> str:
    named = _GIT_NAME.match(header)
    return named[2] if named else header[4:].removeprefix("b/").split("\t")[0]
