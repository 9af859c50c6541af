"""A table of contents of a text, by lines: headings of Markdown, keys of JSON, files and hunks of a diff, definitions
of Python. One pass, in bounded memory.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

import msgspec

from .json_contents import JsonEntry, JsonScan
from .kinds import Kind

MOST_ENTRIES = 400
TITLE_CHARS = 120

_BLOCK_BYTES = 1 << 20
_STEP_BYTES = 1 << 16
_LINE_BYTES = 4096
"""A line that is longer than a block is looked at up to here."""

_FENCE = r"(?P<fence>`{3,}|~{3,})(?P<info>.*)"
_FENCE_LINE = re.compile(rf"^ {{0,3}}{_FENCE}$", re.MULTILINE)
_HEADING_OR_FENCE = re.compile(rf"^ {{0,3}}(?:{_FENCE}|#{{1,6}}[ \t]+\S.*)$", re.MULTILINE)
_DEFINITION = re.compile(r"^[^\S\n]*(?:async[^\S\n]+def|def|class)[^\S\n]+\w+.*$", re.MULTILINE)
_HUNK = re.compile(r"@@ -\d+(?:,(\d{1,9}))? \+\d+(?:,(\d{1,9}))? @@")
_FILE_NAME = re.compile(r' "?b/(.*?)"?$')
_NUMBERS = re.compile(rb"(?m)^ *[0-9]{1,9}\t")

Stopped = Callable[[], bool]


class Entry(msgspec.Struct, frozen=True):
    """A line of the contents. `column` is the byte where it begins, where other entries stand in its line before it."""

    line: int
    title: str
    column: int = 0


class Contents(msgspec.Struct, frozen=True, kw_only=True):
    """Entries from a place on. `total` is how many there are from there on, `skipped` how many before.

    `looked_to_line` is the last line that was looked at whole, None for all of them.
    """

    entries: tuple[Entry, ...]
    total: int
    skipped: int = 0
    titles_cut: bool = False
    looked_to_line: int | None = None


def has_contents(kind: Kind) -> bool:
    """Whether texts of that kind have contents to list."""
    return kind in (Kind.MARKDOWN, Kind.PYTHON, Kind.DIFF, Kind.JSON)


def kind_by_name(path: str) -> Kind | None:
    """Return the kind of a Markdown or Python file by its name; None for others."""
    lower = path.lower()
    if lower.endswith((".md", ".markdown")):
        return Kind.MARKDOWN
    return Kind.PYTHON if lower.endswith((".py", ".pyi")) else None


def list_contents(
    chunks: Iterator[bytes],
    kind: Kind,
    *,
    from_line: int = 1,
    from_column: int = 1,
    most_entries: int = MOST_ENTRIES,
    title_chars: int = TITLE_CHARS,
    numbered: bool = False,
    is_stopped: Stopped = lambda: False,
) -> Contents:
    """Return the entries at or behind a place, at most `most_entries`, their titles cut at `title_chars`.

    `chunks` are the whole text as UTF-8. `numbered`: each of its lines stands behind a number and a tab, which are
    passed over. `is_stopped` is asked between blocks, and ends the pass.
    """
    blocks = _Blocks(chunks, is_stopped, numbered=numbered)
    found = _json_entries(blocks) if kind is Kind.JSON else _line_entries(blocks, kind)
    held: list[tuple[int, int, JsonEntry | str]] = []
    skipped = total = line_before = 0
    for line, column, what in found:
        if (line, column) < (from_line, from_column):
            skipped += 1
            line_before = line
            continue
        total += 1
        if len(held) < most_entries:
            held.append((line, column if line == line_before else 0, what))
        line_before = line
    titles = [(what if isinstance(what, str) else what.title).rstrip() for _, _, what in held]
    return Contents(
        entries=tuple(
            Entry(line, title if len(title) <= title_chars else f"{title[: title_chars - 1]}…", column)
            for (line, column, _), title in zip(held, titles, strict=True)
        ),
        total=total,
        skipped=skipped,
        titles_cut=any(len(title) > title_chars for title in titles),
        looked_to_line=blocks.line - 1 if blocks.was_stopped else None,
    )


class _Blocks:
    """The text in blocks, each with the number of its first line; `line` is that of the next one."""

    def __init__(self, chunks: Iterator[bytes], is_stopped: Stopped, *, numbered: bool) -> None:
        self.line = 1
        self.was_stopped = False
        self._chunks = chunks
        self._is_stopped = is_stopped
        self.numbered = numbered

    def raw(self) -> Iterator[bytes]:
        """Yield the text as it comes, or by whole lines where their numbers are left out."""
        if self.numbered:
            for _, block in self.lines():
                yield _NUMBERS.sub(b"", block)
            return
        for chunk in self._until_stopped():
            yield chunk
            self.line += chunk.count(b"\n")

    def lines(self) -> Iterator[tuple[int, bytes]]:
        """Yield whole lines, with the number of the first; of a line longer than a block only its start."""
        pending = bytearray()
        for chunk in self._until_stopped():
            pending += chunk
            if len(pending) < _BLOCK_BYTES:
                continue
            end = pending.rfind(b"\n") + 1
            if not end:
                del pending[_LINE_BYTES:]
                continue
            yield self.line, bytes(pending[:end])
            self.line += pending.count(b"\n", 0, end)
            del pending[:end]
        if pending and not self.was_stopped:
            yield self.line, bytes(pending)

    def _until_stopped(self) -> Iterator[bytes]:
        for chunk in self._chunks:
            # [at, at + _STEP_BYTES): so much is done within a small part of a second, whatever it holds.
            for at in range(0, len(chunk), _STEP_BYTES):
                if self._is_stopped():
                    self.was_stopped = True
                    return
                yield chunk[at : at + _STEP_BYTES]


def _json_entries(blocks: _Blocks) -> Iterator[tuple[int, int, JsonEntry]]:
    scan = JsonScan()
    for block in blocks.raw():
        for entry in scan.feed(block):
            yield entry.place.line, entry.place.column, entry
    scan.finish()


def _line_entries(blocks: _Blocks, kind: Kind) -> Iterator[tuple[int, int, str]]:
    if not has_contents(kind):
        return
    find = _Headings() if kind is Kind.MARKDOWN else _Definitions() if kind is Kind.PYTHON else _Changes()
    for first_line, block in blocks.lines():
        # Only the number goes that stands before each line of what `read` gave.
        data = _NUMBERS.sub(b"", block) if blocks.numbered else block
        for line, title in find.entries(data.decode(errors="replace"), first_line):
            yield line, 1, title


class CodeFence:
    """Whether a place in Markdown lies in a code fence (https://spec.commonmark.org/0.31.2/#fenced-code-blocks)."""

    def __init__(self) -> None:
        self._opened_by = ""

    @property
    def is_open(self) -> bool:
        """Whether the next line is code, or closes it."""
        return bool(self._opened_by)

    def pass_line(self, line: str) -> None:
        """Go on to behind `line`, with or without its line feed."""
        found = _FENCE_LINE.match(line)
        if found:
            self.pass_fence(found["fence"], found["info"])

    def pass_fence(self, marks: str, info: str) -> None:
        """Go on to behind a line of `marks` with `info` behind them."""
        if not self._opened_by:
            # With a backtick behind them they are code within a line.
            self._opened_by = "" if marks[0] == "`" and "`" in info else marks
        elif marks.startswith(self._opened_by) and not info.strip():
            self._opened_by = ""


class _Headings:
    """ATX headings outside fences (https://spec.commonmark.org/0.31.2/#atx-headings)."""

    def __init__(self) -> None:
        self._fence = CodeFence()

    def entries(self, text: str, first_line: int) -> Iterator[tuple[int, str]]:
        for line, found in _numbered(_HEADING_OR_FENCE, text, first_line):
            if found["fence"] is not None:
                self._fence.pass_fence(found["fence"], found["info"])
            elif not self._fence.is_open:
                yield line, found[0].strip()


class _Definitions:
    """Classes and functions, with their indentation."""

    def entries(self, text: str, first_line: int) -> Iterator[tuple[int, str]]:
        for line, found in _numbered(_DEFINITION, text, first_line):
            yield line, found[0].split("(", 1)[0].rstrip(": \r")


class _Changes:
    """Files and hunks of a diff. What a hunk holds is counted, since a removed line may look like a file's name."""

    def __init__(self) -> None:
        self._old_left = self._new_left = 0
        self._in_header = False
        self._old_name: tuple[int, str] | None = None

    def entries(self, text: str, first_line: int) -> Iterator[tuple[int, str]]:
        for line, content in enumerate(text.removesuffix("\n").split("\n"), start=first_line):
            mark = content[:1].strip("\r") or " "
            if (self._old_left > 0 or self._new_left > 0) and mark in "+- \\":
                self._old_left -= mark in "- "
                self._new_left -= mark in "+ "
                continue
            self._old_left = self._new_left = 0
            yield from self._outside(line, content.rstrip("\r"))

    def _outside(self, line: int, content: str) -> Iterator[tuple[int, str]]:
        hunk = _HUNK.match(content)
        if hunk:
            self._old_left, self._new_left = (1 if size is None else int(size) for size in hunk.groups())
            self._in_header = False
            yield line, f"  {content}"
        elif content.startswith("@@@"):
            self._in_header = False
            yield line, f"  {content}"
        elif content.startswith(("diff --git ", "diff --cc ", "diff --combined ")):
            self._in_header = True
            named = _FILE_NAME.search(content)
            yield line, named[1] if named else content.split(" ", 2)[2]
        elif content.startswith("--- ") and not self._in_header:
            self._old_name = (line, content[4:].partition("\t")[0])
            return
        elif content.startswith("+++ ") and self._old_name is not None:
            old_line, old_name = self._old_name
            new_name = content[4:].partition("\t")[0]
            yield old_line, old_name if new_name == "/dev/null" else new_name.removeprefix("b/")
        self._old_name = None


def _numbered(pattern: re.Pattern[str], text: str, first_line: int) -> Iterator[tuple[int, re.Match[str]]]:
    line, counted_to = first_line, 0
    for found in pattern.finditer(text):
        line += text.count("\n", counted_to, found.start())
        counted_to = found.start()
        yield line, found
