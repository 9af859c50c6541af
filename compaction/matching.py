"""Finds a pattern in text by RE2: linear time, any size in bounded memory, and no look takes longer than a second.

RE2 answers most patterns by an automaton that it builds as it reads. Where that would outgrow its memory it falls back
to a slower one, whose time grows with the pattern's program too: 2 to 20 ns for each byte and instruction were measured
(google-re2 1.1, 10,000 alternatives, nested repetition). So the larger a program, the smaller the blocks it is shown.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING

from ..kernels.errors import ToolError
from ..kernels.lines import character_start
from ..kernels.text_encoding import decode_with_marks
from .quoting import ANSI_CODE_BYTES

if TYPE_CHECKING:
    import re2

PATTERN_LIMIT_BYTES = 64 << 10
PROGRAM_LIMIT = 200_000
MEMORY_LIMIT_BYTES = 8 << 20
LARGE_PATTERN_BYTES = 1024
LARGE_MEMORY_LIMIT_BYTES = 64 << 20
"""What the automaton of a pattern over LARGE_PATTERN_BYTES may take: with less, one of thousands of alternatives falls
back to the slow one on ordinary text (measured: 1,200 ms for 64 KB of a log, instead of 3)."""

EXCERPT_BYTES = 200

_LARGEST_BLOCK_BYTES = 1 << 20
_SMALLEST_BLOCK_BYTES = 8 << 10
_INSTRUCTION_BYTES_A_LOOK = 50_000_000
_OVERLAP_BYTES = 2048


@dataclass(frozen=True, slots=True, kw_only=True)
class Pattern:
    """A compiled pattern. `is_literal`: it did not compile, `problem` says why, and it is looked for as it stands."""

    compiled: re2._Regexp
    source: str
    is_literal: bool = False
    problem: str = ""

    @property
    def block_bytes(self) -> int:
        """How much text one look may be at."""
        instructions: int = self.compiled.programsize
        return max(_SMALLEST_BLOCK_BYTES, min(_INSTRUCTION_BYTES_A_LOOK // max(1, instructions), _LARGEST_BLOCK_BYTES))


@dataclass(frozen=True, slots=True, kw_only=True)
class Hit:
    """A match: its line, and the text of that, or a part around the match that begins at byte `column`, from 1.

    The match begins `match_at` characters into the text, and at byte `match_column` of the line: 0 for the first one
    of its line.
    """

    line: int
    text: str
    column: int = 0
    match_at: int = 0
    match_column: int = 0

    @property
    def shown(self) -> str:
        """The text, with its place in the line where it is a part."""
        return f"[column {self.column}] …{self.text}…" if self.column else self.text


def compile_pattern(source: str, *, for_bytes: bool = False) -> Pattern:
    """Compile a pattern, case-insensitive, matching within a line. Raises ToolError where it is empty or too large.

    `for_bytes`: matches any bytes, each a character, so that ``\\xff`` is one byte; a line feed is one of them.
    """
    import re2  # noqa: PLC0415 (loads a native library)

    encoded = source.encode(errors="replace")
    if not source:
        raise ToolError("the pattern is empty; use list to see files")
    if len(encoded) > PATTERN_LIMIT_BYTES:
        raise ToolError(f"the pattern has {len(encoded)} bytes; the limit is {PATTERN_LIMIT_BYTES}")
    options = re2.Options()
    options.case_sensitive = False
    options.max_mem = LARGE_MEMORY_LIMIT_BYTES if len(encoded) > LARGE_PATTERN_BYTES else MEMORY_LIMIT_BYTES
    options.log_errors = False
    options.never_nl = not for_bytes
    if for_bytes:
        options.encoding = re2.Options.Encoding.LATIN1
    # Where groups matched is never asked, and telling it would need the slow automaton.
    options.never_capture = True
    try:
        pattern = Pattern(compiled=re2.compile(b"(?m)" + encoded, options), source=source)
    except re2.error as problem:
        reason = problem.args[0].decode(errors="replace") if problem.args else "not a regular expression"
        reason = reason.replace("(?m)", "", 1)
        options.literal = True
        pattern = Pattern(compiled=re2.compile(encoded, options), source=source, is_literal=True, problem=reason)
    finally:
        re2.purge()  # its own cache would keep the automatons of the last 128 patterns
    if pattern.compiled.programsize > PROGRAM_LIMIT:
        raise ToolError(
            f"the pattern is too large: {pattern.compiled.programsize:,} instructions, the limit is {PROGRAM_LIMIT:,}; "
            "use fewer alternatives or smaller repetitions"
        )
    return pattern


class ByteScan:
    """One pass of a pattern over bytes. `reached` is the first place that was not looked at."""

    def __init__(
        self, pattern: Pattern, *, step_bytes: int = 1, is_stopped: Callable[[], bool] = lambda: False
    ) -> None:
        """Of the matches that begin in the same `step_bytes` bytes only the first one counts."""
        self.reached = 0
        self.was_stopped = False
        self._pattern = pattern
        self._step_bytes = step_bytes
        self._is_stopped = is_stopped

    def matches(self, chunks: Iterator[bytes]) -> Iterator[range]:
        """Yield where the pattern matches, in order; once the scan is stopped, no more.

        A match of over 2 KB may be cut or not be seen.
        """
        block_bytes = self._pattern.block_bytes
        pending, passed = bytearray(), 0  # the bytes from `passed` on, which is at most one before `reached`
        for chunk in chain(chunks, (b"",)):
            pending += chunk
            while passed + len(pending) > (passed + block_bytes if chunk else self.reached):
                block = bytes(pending[:block_bytes])
                is_part = bool(chunk) or len(block) < len(pending)
                yield from self._search(block, passed, is_part=is_part)
                if self.was_stopped:
                    return
                # What a match may begin in that goes on behind the block is seen again, and a byte before it.
                self.reached = max(self.reached, passed + len(block) - (_OVERLAP_BYTES if is_part else 0))
                done = min(self.reached - 1 - passed, len(block))
                del pending[:done]
                passed += done

    def check_integrity(self) -> None:
        """Assert that the place is in range."""
        assert self.reached >= 0

    def _search(self, block: bytes, passed: int, *, is_part: bool) -> Iterator[range]:
        while self.reached < passed + len(block):
            if self._is_stopped():
                self.was_stopped = True
                return
            match = self._pattern.compiled.search(block, self.reached - passed)
            if match is None or match.start() == len(block):
                return
            first, last = match.span()
            if is_part and first > len(block) - _OVERLAP_BYTES:
                return  # how far it goes shows only with what follows
            self.reached = passed + first + self._step_bytes - (passed + first) % self._step_bytes
            yield range(passed + first, passed + last)


def hits_in(chunks: Iterator[bytes], pattern: Pattern) -> Iterator[Hit]:
    """Yield the lines of UTF-8 text that match, in order, each once."""
    return MatchScan(pattern).hits(chunks)


class MatchScan:
    """One pass of a pattern over UTF-8 text.

    A line longer than a block is looked at part by part: a match of over 2 KB that lies across two may not be seen.
    With `every_part` a line too long to be shown whole has a hit for each part that has a match, else one. Without
    codes, what is searched is what a terminal would show. `reached_line` and `reached_column` are the first place that
    was not looked at. `found` counts hits; once `counts_only` is set they are counted and no more given, which takes
    less time.
    """

    def __init__(
        self,
        pattern: Pattern,
        *,
        first_line: int = 1,
        first_column: int = 1,
        passed_bytes: int = 0,
        every_part: bool = False,
        without_codes: bool = False,
        is_stopped: Callable[[], bool] = lambda: False,
    ) -> None:
        """Hits count from `first_column` of `first_line` on. The chunks begin `passed_bytes` into that line, which is
        at least a byte before the column unless it is the line's start."""
        self.reached_line, self.reached_column = first_line, first_column
        self.was_stopped = False
        self.found = 0
        self.counts_only = False
        self._pattern = pattern
        self._every_part = every_part
        self._without_codes = without_codes
        self._is_stopped = is_stopped
        self._passed_bytes = passed_bytes
        self._hit_line = first_line if first_column > 1 else 0

    def hits(self, chunks: Iterator[bytes]) -> Iterator[Hit]:
        """Yield the hits in order; once the scan is stopped, no more."""
        block_bytes = self._pattern.block_bytes
        pending = bytearray()
        for chunk in chunks:
            pending += chunk
            while len(pending) > block_bytes:
                lines_end = pending.rfind(b"\n", 0, block_bytes) + 1
                # A part of a line is seen again with what follows, for what lies across.
                done = lines_end or block_bytes - _OVERLAP_BYTES
                yield from self._search(bytes(pending[: lines_end or block_bytes]), is_part=not lines_end)
                if self.was_stopped:
                    return
                self._passed_bytes = 0 if lines_end else self._passed_bytes + done
                del pending[:done]
        if pending:
            yield from self._search(bytes(pending), is_part=False)

    def check_integrity(self) -> None:
        """Assert that places are in range."""
        assert self.reached_line >= max(1, self._hit_line)
        assert self.reached_column >= 1
        assert self._passed_bytes >= 0

    def _search(self, raw: bytes, *, is_part: bool) -> Iterator[Hit]:
        """Search a block that begins in line `reached_line`: whole lines, or (`is_part`) a part of one."""
        block = _Block(raw.replace(b"\r\n", b"\n"), without_codes=self._without_codes)
        text, line, counted_to = block.text, self.reached_line, 0
        # Of a block within a line this is behind its first byte, which tells that no line begins there.
        at = block.offset_of(self.reached_column - 1 - self._passed_bytes)
        while at <= len(text):
            if self._is_stopped():
                self.was_stopped = True
                return
            match = self._pattern.compiled.search(text, at)
            if match is None:
                break
            first, last = match.span()
            if first == len(text) and (is_part or text.endswith(b"\n")):
                break  # an empty match behind the last line feed is on no line
            if is_part and last == len(text) and first > len(text) - _OVERLAP_BYTES + 4:
                break  # what it is shows only with what follows
            start, end = text.rfind(b"\n", 0, first) + 1, text.find(b"\n", first)
            end = len(text) if end < 0 else end
            line += text.count(b"\n", counted_to, start)
            counted_to = start
            is_whole = end - start <= EXCERPT_BYTES and not is_part and not (start == 0 and self._passed_bytes)
            part = range(start, end) if is_whole else _excerpt(text, start, end, first, last)
            is_hit = self._every_part or line != self._hit_line
            self.found += is_hit
            if is_hit and not self.counts_only:
                yield Hit(
                    line=line,
                    text=decode_with_marks(text[part.start : part.stop]),
                    match_at=len(decode_with_marks(text[part.start : first])),
                    column=0 if is_whole else self._column(block, start, part.start),
                    match_column=self._column(block, start, first) if line == self._hit_line else 0,
                )
            self._hit_line = line
            at = max(part.stop, last, first + 1) if self._every_part else end + 1
            if at >= end and not is_part:
                at = end + 1
                self.reached_line, self.reached_column = line + 1, 1
            else:
                self.reached_line = line
                self.reached_column = self._column(block, start, min(at, len(text)))
        if is_part:
            self.reached_column = max(self.reached_column, self._passed_bytes + len(raw) - _OVERLAP_BYTES + 2)
        else:
            self.reached_line, self.reached_column = line + text.count(b"\n", counted_to), 1

    def _column(self, block: _Block, start: int, offset: int) -> int:
        """Return the byte of the line, as it is stored, that is at `offset`; `start` is the line's."""
        return block.raw_offset(offset) - block.raw_start(start) + 1 + (0 if start else self._passed_bytes)


def _excerpt(text: bytes, start: int, end: int, first: int, last: int) -> range:
    """Return the offsets [start, stop) around the match [first, last) to show of the line at [start, end)."""
    spare = max(0, EXCERPT_BYTES - (last - first)) // 2
    part_start = character_start(text, max(start, first - spare))
    return range(part_start, character_start(text, min(end, part_start + EXCERPT_BYTES)))


class _Block:
    """A part of a text, without escape sequences where asked, and how its offsets relate to those with them."""

    def __init__(self, raw: bytes, *, without_codes: bool) -> None:
        self.text = raw
        self._raw_starts: list[int] = []  # of each code
        self._starts: list[int] = []  # the same without the codes before it
        self._removed = [0]  # bytes of the first n codes
        if not without_codes or b"\x1b" not in raw:
            return
        for code in ANSI_CODE_BYTES.finditer(raw):
            self._raw_starts.append(code.start())
            self._starts.append(code.start() - self._removed[-1])
            self._removed.append(self._removed[-1] + len(code[0]))
        self.text = ANSI_CODE_BYTES.sub(b"", raw)

    def raw_offset(self, offset: int) -> int:
        """Return where the byte at `offset` of the text stands in the raw bytes: behind the codes before it."""
        return offset + self._removed[bisect_right(self._starts, offset)]

    def raw_start(self, offset: int) -> int:
        """Return where a line that begins at `offset` does so in the raw bytes: before its codes."""
        return offset + self._removed[bisect_left(self._starts, offset)]

    def offset_of(self, raw_offset: int) -> int:
        """Return the offset in the text of a raw byte, or of what follows the code that it is in; at least 0."""
        codes = bisect_left(self._raw_starts, raw_offset)
        return max(0, raw_offset - self._removed[codes], self._starts[codes - 1] if codes else 0)
