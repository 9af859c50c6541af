"""Finds a pattern in text by RE2: linear time, one hit for each line, any size in bounded memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..kernels.errors import ToolError
from ..kernels.lines import character_start

if TYPE_CHECKING:
    import re2

PATTERN_LIMIT_BYTES = 4096
MEMORY_LIMIT_BYTES = 8 << 20
BLOCK_BYTES = 8 << 20
EXCERPT_BYTES = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Pattern:
    """A compiled pattern. `is_literal`: it did not compile, `problem` says why, and it is looked for as it stands."""

    compiled: re2._Regexp
    source: str
    is_literal: bool = False
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Hit:
    """A line that matches: its number, and its text or a part of it around the match."""

    line: int
    text: str


def compile_pattern(source: str) -> Pattern:
    """Compile a pattern, case-insensitive, matching within one line. Raises ToolError where it is empty or too long."""
    import re2  # noqa: PLC0415 (loads a native library)

    encoded = source.encode(errors="replace")
    if not source:
        raise ToolError("the pattern is empty; use list to see files")
    if len(encoded) > PATTERN_LIMIT_BYTES:
        raise ToolError(f"the pattern has {len(encoded)} bytes; the limit is {PATTERN_LIMIT_BYTES}")
    options = re2.Options()
    options.case_sensitive = False
    options.max_mem = MEMORY_LIMIT_BYTES
    options.log_errors = False
    options.never_nl = True
    try:
        return Pattern(compiled=re2.compile(b"(?m)" + encoded, options), source=source)
    except re2.error as problem:
        reason = problem.args[0].decode(errors="replace") if problem.args else "not a regular expression"
        options.literal = True
        compiled = re2.compile(encoded, options)
        return Pattern(compiled=compiled, source=source, is_literal=True, problem=reason)


def hits_in(chunks: Iterator[bytes], pattern: Pattern) -> Iterator[Hit]:
    """Yield the lines of UTF-8 text that match, in order.

    A line longer than BLOCK_BYTES is searched block by block; a match that lies across two of them is not seen.
    """
    lines_before, column_before = 0, 0
    for block in _blocks(chunks):
        if b"\r\n" in block:
            block = block.replace(b"\r\n", b"\n")  # noqa: PLW2901 (so that $ matches at the end of a CRLF line)
        yield from _hits_of_block(block, pattern, lines_before, column_before)
        lines_before += block.count(b"\n")
        column_before = 0 if block.endswith(b"\n") else column_before + len(block)


def _blocks(chunks: Iterator[bytes]) -> Iterator[bytes]:
    """Yield blocks that end with a line, but for a line that is longer than a block."""
    pending = bytearray()
    for chunk in chunks:
        pending += chunk
        if len(pending) < BLOCK_BYTES:
            continue
        end = pending.rfind(b"\n") + 1 or len(pending)
        yield bytes(pending[:end])
        del pending[:end]
    if pending:
        yield bytes(pending)


def _hits_of_block(block: bytes, pattern: Pattern, lines_before: int, column_before: int) -> Iterator[Hit]:
    at, line, counted_to = 0, lines_before + 1, 0
    while at < len(block):
        match = pattern.compiled.search(block, at)
        if match is None:
            return
        first, last = match.span()
        if first == len(block):  # an empty match behind the last line feed is on no line
            return
        start = block.rfind(b"\n", 0, first) + 1
        end = block.find(b"\n", first)
        end = len(block) if end < 0 else end
        line += block.count(b"\n", counted_to, start)
        counted_to = start
        before = column_before if start == 0 else 0
        yield Hit(line, _excerpt(block[start:end], first - start, last - start, before))
        at = end + 1


def _excerpt(line: bytes, first: int, last: int, column_before: int) -> str:
    """Return the line, or bytes [start, end) around [first, last) with the column that `read` takes."""
    if len(line) <= EXCERPT_BYTES and not column_before:
        return _shown(line)
    spare = max(0, EXCERPT_BYTES - (last - first)) // 2
    start = character_start(line, max(0, first - spare))
    end = character_start(line, min(len(line), start + EXCERPT_BYTES))
    return f"[column {column_before + start + 1}] …{_shown(line[start:end])}…"


def _shown(line: bytes) -> str:
    return line.decode(errors="replace").replace("\0", "\ufffd")
