"""How texts and numbers are shown: lines without control characters, clipped around what matters, one line each."""

from __future__ import annotations

import re
from collections.abc import Iterable

import msgspec

QUOTED_CHARS = 160


def quantity(number: int, what: str) -> str:
    """Return a number with what it counts: `1 line`, `1,200 lines`."""
    return f"{number:,} {what}{'' if number == 1 else 's'}"


class PreviewLine(msgspec.Struct, frozen=True):
    """A line of a preview. The lowest `rank` is kept first.

    A quotation has the number of its `line`, and stands for `lines` lines with the blank ones that follow; gaps between
    quotations are announced. An entry of a table of contents has a `line` too, with `lines` 0, and says of how many
    `entries` it is one. Else it is a statement.
    """

    text: str
    rank: int
    line: int = 0
    lines: int = 1
    entries: int = 0


def entries_left(shown: Iterable[PreviewLine]) -> int:
    """Return how many entries of the contents are not among the lines that are shown; 0 where none of them is one."""
    totals = [line.entries for line in shown if line.entries]
    return max(totals) - len(totals) if totals else 0


# A sequence ends within its line: an unfinished one must not swallow what follows.
_ANSI = (
    r"\x1b(?:\[[0-?]*[ -/]*[@-~]"
    r"|\][^\x07\x1b\n]{0,4096}(?:\x07|\x1b\\)|[PX^_][^\x1b\n]{0,4096}\x1b\\|[ -/]+[0-~]|[0-Z\\^_`-~])"
)
_ANSI_TEXT = re.compile(_ANSI)
ANSI_CODE_BYTES = re.compile(_ANSI.encode())
# C0, C1, soft hyphen, zero-width and bidirectional marks, line and paragraph separators, surrogates, tag characters.
_CONTROL = re.compile(
    "[\x00-\x1f\x7f-\x9f\xad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f"
    "\ud800-\udfff\ufeff\ufff9-\ufffb\U000e0000-\U000e007f]+"
)
_BREAK = re.compile("[\t\n\x0b\x0c\r\x85\u2028\u2029]")
_RULE = re.compile(r"([=\-_*#~.+])\1{7,}")
_INDENT = re.compile(r" {9,}")


def strip_ansi(text: str) -> str:
    """Return the text without terminal colours and other escape sequences."""
    return _ANSI_TEXT.sub("", text) if "\x1b" in text else text


def strip_ansi_bytes(data: bytes) -> bytes:
    """Return the bytes without escape sequences; no line feed is removed."""
    return ANSI_CODE_BYTES.sub(b"", data) if b"\x1b" in data else data


def cleaned(line: str) -> str:
    """Return a line as it may be shown: what a terminal would leave of it, without control characters.

    Of a line that was written over by carriage returns, the last state. Long rules and runs of blanks are shortened.
    """
    line = strip_ansi(line).rstrip("\r\n")
    if "\r" in line:
        line = line[line.rindex("\r") + 1 :]
    line = _CONTROL.sub("", _BREAK.sub(" ", line)).rstrip()
    return _INDENT.sub("  ", _RULE.sub(r"\1\1\1", line))


def clipped(line: str, *, around: int = 0, limit: int = QUOTED_CHARS) -> str:
    """Return the line, or `limit` characters of it that hold the one at `around`, each cut marked with an ellipsis."""
    if len(line) <= limit:
        return line
    # [start, start + limit): a third of it before `around`, moved inside the line.
    start = min(max(0, around - limit // 3), len(line) - limit)
    if around < limit * 2 // 3:
        start = 0
    end = start + limit
    return ("…" if start else "") + line[start:end] + ("…" if end < len(line) else "")


def quoted(line: str, *, around: int = 0, limit: int = QUOTED_CHARS) -> str:
    """Return a line of a text as a preview shows it: cleaned and clipped."""
    return clipped(cleaned(line), around=around, limit=limit)
