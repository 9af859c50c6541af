"""The terminal: what may be written to it, and whether there is one.

Models, files and tools are not trusted with a terminal. What comes from them is shown with its control characters
spelled out, so that none of it can move the cursor, change colours, turn text round or begin a line of its own.
"""

from __future__ import annotations

import os
import re
import sys
import unicodedata
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, TextIO

import msgspec

if TYPE_CHECKING:
    from rich.console import Console

# C0 and C1 controls but tab and newline; what turns the writing direction; line separators; lone surrogates.
_UNSAFE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
_LINE_BREAKERS = {"\n": "\\n", "\t": "\\t"}
_MOST_SHOWN = 200


def visible(text: str) -> str:
    """Return `text`, of any number of lines, with what could act on a terminal spelled out (`\\u001b`)."""
    return _UNSAFE.sub(lambda found: f"\\u{ord(found[0]):04x}", text.replace("\r\n", "\n"))


def visible_line(text: str) -> str:
    """Return `text` as one line that is safe to show."""
    return visible(re.sub(r"[\n\t]", lambda found: _LINE_BREAKERS[found[0]], text))


def clipped(text: str, width: int = _MOST_SHOWN) -> str:
    """Return a line cut to `width` characters, the cut marked."""
    return text if len(text) <= width else f"{text[: max(0, width - 1)]}…"


def wants_colour(no_color: bool) -> bool:
    """Whether colours are wanted at all (https://no-color.org)."""
    return not no_color and not os.environ.get("NO_COLOR")


def console(stream: TextIO, *, no_color: bool = False) -> Console:
    """Return a rich console on `stream` that interprets nothing in what it is given.

    Without colour it writes no styles at all, and to what is no terminal neither.
    """
    from rich.console import Console  # noqa: PLC0415  heavy: only where something is printed

    return Console(
        file=stream,
        color_system="auto" if wants_colour(no_color) and stream.isatty() else None,
        highlight=False,
        markup=False,
        emoji=False,
        soft_wrap=True,
        # Without a terminal nothing is cut or wrapped: a line stays a line for who reads it.
        width=None if stream.isatty() else 100_000,
    )


def print_json(value: Any) -> None:
    """Write a value as one line of JSON to standard output."""
    line = msgspec.json.encode(value, enc_hook=str).decode()
    sys.stdout.write((visible(line) if sys.stdout.isatty() else line) + "\n")


def print_columns(heads: tuple[str, ...], rows: Sequence[Sequence[str]], *, no_color: bool = False) -> None:
    """Write rows as aligned columns to standard output; on a terminal the last one is cut to its width."""
    from rich.table import Table  # noqa: PLC0415  heavy: only where something is printed

    table = Table(box=None, pad_edge=False, header_style="bold")
    for index, head in enumerate(heads):
        table.add_column(head, no_wrap=True, overflow="ellipsis" if index == len(heads) - 1 else "fold")
    for row in rows:
        table.add_row(*(visible_line(cell) for cell in row))
    shown = console(sys.stdout, no_color=no_color)
    with shown.capture() as captured:
        shown.print(table)
    for line in captured.get().splitlines():
        sys.stdout.write(line.rstrip() + "\n")


def boxed(text: str, *, width: int) -> Iterator[str]:
    """Yield one line of any length as rows that each begin with a mark, so that no wrapped part looks like another."""
    row, used, room = "", 0, max(10, width - 4)
    for character in visible_line(text):
        # Counted generously: what takes no cell by itself counts as one.
        cells = 2 if unicodedata.east_asian_width(character) in "WF" else 1
        if used + cells > room:
            yield f"  │ {row}"
            row, used = "", 0
        row, used = row + character, used + cells
    yield f"  │ {row}"
