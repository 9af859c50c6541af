"""Answers about a binary blob that fit a number of tokens: its bytes, and where a pattern is in them.

It is shown as a text is, by numbered lines: of 16 bytes each, as hex and with what is printable beside it.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..kernels.errors import ToolError
from .artifact_query import GAP, Asked, HitCounting, pattern_notes
from .kinds import first_bytes
from .matching import ByteScan, compile_pattern
from .preview_binary import describe_binary
from .quoting import quantity
from .stored_text import StoredText

LINE_BYTES = 16
MOST_LINES = 400

_HEAD_BYTES = 1 << 16
_MOST_MATCH_LINES = 4
"""So many lines of one match are shown."""

_PRINTABLE = bytes(byte if 0x20 <= byte < 0x7F else ord(".") for byte in range(256))


def contents_of_bytes(text: StoredText, asked: Asked) -> str:
    """Return what a binary blob is, and what to do instead of listing contents. Raises ToolError without room."""
    what = describe_binary(first_bytes(text.raw(), _HEAD_BYTES))
    about = f"binary{', ' if what else ''}{what}, {text.ref.size_bytes:,} bytes: no contents to list"
    instead = f"read shows bytes as hex, {LINE_BYTES} a line; search finds a pattern in them"
    return asked.fitted(0, lambda _: f"[{about}; {instead}]", str)


def read_bytes(text: StoredText, asked: Asked) -> str:
    """Return lines of bytes from `asked.line` on. Raises ToolError past the end, and without room."""
    total = _line_count(text)
    if asked.line > total:
        raise ToolError(f"{text.ref.short_id} has {_lines_text(total)}; offset {asked.line} is past its end")
    most = min(asked.limit, MOST_LINES, total - asked.line + 1)
    lines = _lines(text, range(asked.line, asked.line + most))

    def footer(shown: int) -> str:
        last = asked.line + shown - 1
        more = f"; next: offset={last + 1}" if last < total else ""
        return f"[lines {asked.line}-{last} of {total:,}, each {LINE_BYTES} bytes of binary content{more}]"

    return asked.fitted(
        most, lambda shown: "\n".join((*lines[:shown], footer(shown))), lambda size: f"{lines[0][:size]}…\n{footer(1)}"
    )


def search_bytes(text: StoredText, query: str, asked: Asked) -> str:
    """Return the lines of bytes in which a match begins, with those that it goes on in, from a line on.

    Raises ToolError for a pattern that is empty or too large, and where there is no room for an answer.
    """
    pattern = compile_pattern(query, for_bytes=True)
    counting = HitCounting(asked)
    start = (asked.line - 1) * LINE_BYTES
    hits: list[range] = []  # each the numbers of its lines
    found = 0
    scan = ByteScan(pattern, step_bytes=LINE_BYTES, is_stopped=counting.is_over)
    for match in scan.matches(text.raw(start)):
        found += 1
        first, last = ((start + place) // LINE_BYTES + 1 for place in (match.start, max(match.start, match.stop - 1)))
        if len(hits) <= asked.most_hits:
            hits.append(range(first, min(last + 1, first + _MOST_MATCH_LINES)))
        else:
            counting.begin()
    shown_hits = [_lines(text, hit) for hit in hits[: asked.most_hits]]

    def footer(shown: int) -> str:
        said = [*pattern_notes(pattern), f"binary: {counting.hits_text(found)} in {_lines_text(_line_count(text))}"]
        if asked.line > 1:
            said[-1] += f", from offset={asked.line} on"
        if shown < found:
            said += [f"these are the first {shown}", f"next: offset={hits[shown].start}"]
        elif scan.was_stopped:
            said += ["then the time was up", f"next: offset={(start + scan.reached) // LINE_BYTES + 1}"]
        return f"[{'; '.join(said)}]"

    def one_cut(size: int) -> str:
        return f"{_marked(shown_hits[0][0])[:size]}…\n{footer(1)}"

    return asked.fitted(
        len(shown_hits), lambda shown: "\n".join((*_hit_lines(hits, shown_hits[:shown]), footer(shown))), one_cut
    )


def _hit_lines(hits: Sequence[range], lines: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of each hit, each line once, with dashes where some are left out."""
    shown: list[str] = []
    done = 0  # the last line that is shown
    for at, (numbers, own) in enumerate(zip(hits, lines, strict=False)):
        if done and numbers.start > done + 1:
            shown.append(GAP)
        shown.append(_marked(own[0]))
        # A line in which the next match begins is shown with that one.
        stop = min(numbers.stop, hits[at + 1].start) if at + 1 < len(lines) else numbers.stop
        shown += own[1 : stop - numbers.start]
        done = stop - 1
    return shown


def _marked(line: str) -> str:
    return line.replace("\t", ":\t", 1)


def _lines(text: StoredText, numbers: range) -> list[str]:
    """Return the lines of those numbers as they are shown: ``<number>``, a tab, the bytes as hex, what is printable."""
    data = first_bytes(text.raw((numbers.start - 1) * LINE_BYTES), len(numbers) * LINE_BYTES)
    shown = []
    for at, number in enumerate(numbers):
        line = data[at * LINE_BYTES : (at + 1) * LINE_BYTES]
        if line:
            shown.append(f"{number}\t{line.hex(' '):<{3 * LINE_BYTES - 1}}  |{line.translate(_PRINTABLE).decode()}|")
    return shown


def _line_count(text: StoredText) -> int:
    return -(-text.ref.size_bytes // LINE_BYTES)


def _lines_text(count: int) -> str:
    return f"{quantity(count, 'line')} of {LINE_BYTES} bytes"
