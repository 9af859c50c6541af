"""A preview of a table: its columns, how many rows it has, its first and last ones."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from .kinds import Sample, csv_delimiter, csv_rows
from .quoting import PreviewLine, quoted

if TYPE_CHECKING:
    from .stored_text import StoredText

_ROWS_SHOWN = 6
_TAIL_LINES = 60
_NAMES = {"\t": "tabs", ",": "commas", ";": "semicolons", "|": "bars"}


def table_preview(text: StoredText, sample: Sample) -> list[PreviewLine]:
    """Return the lines of a preview; none where the text is no table."""
    delimiter = csv_delimiter(sample.head, whole=sample.whole)
    rows = csv_rows(sample.head, delimiter, whole=sample.whole) if delimiter else []
    if not rows:
        return []
    columns = len(rows[0])
    records = count_records(text.chunks())
    has_header = _is_header(rows)
    what = f"{columns} columns, separated by {_NAMES[delimiter]}; {records - has_header:,} rows"
    found = [PreviewLine(what + (" and a header" if has_header else ", no header"), 0)]
    shown = rows[: _ROWS_SHOWN + has_header]
    for place, row in enumerate(shown):
        label = "header" if has_header and not place else f"row {place + 1 - has_header}"
        found.append(PreviewLine(f"{label}: {_joined(row, delimiter)}", 1 + 2 * place))
    last = [] if records <= len(rows) <= len(shown) else last_rows(sample, delimiter, columns)
    hidden = records - len(shown)
    last = last[-max(0, min(_ROWS_SHOWN, hidden)) :] if hidden > 0 else []
    for place, row in enumerate(last):
        number = records - has_header - len(last) + place + 1
        found.append(PreviewLine(f"row {number:,}: {_joined(row, delimiter)}", 2 + 2 * (len(last) - place)))
    return found


def count_records(chunks: Iterator[bytes]) -> int:
    """Count the records that are not blank: line feeds outside of double quotes, as a quoted cell may hold some."""
    records, quotes, last, blank = 0, 0, ord("\n"), True
    for chunk in chunks:
        if not chunk:
            continue
        data = np.frombuffer(chunk, dtype=np.uint8)
        ends = np.flatnonzero(data == ord("\n"))
        if b'"' in chunk or quotes % 2:
            opened = np.flatnonzero(data == ord('"'))
            before = quotes + np.searchsorted(opened, ends)
            quotes += len(opened)
            ends = ends[before % 2 == 0]
        # A record is blank where its line feed follows another one; a carriage return between them is looked past.
        previous = np.where(ends > 0, data[ends - 1], last)
        if b"\r\n" in chunk:
            previous = np.where((previous == ord("\r")) & (ends > 1), data[ends - 2], previous)
        records += int(np.count_nonzero(previous != ord("\n")))
        last = int(data[-1])
        blank = last == ord("\n")
    return records + (not blank)


def last_rows(sample: Sample, delimiter: str, columns: int) -> list[list[str]]:
    """Return the rows at the end of the text that have as many columns as the others.

    The tail may begin within a quoted cell: it is read from the first line on from which its rows come out right.
    """
    lines = (sample.head if sample.whole else sample.tail).split("\n")[1:][-_TAIL_LINES:]
    for start in range(len(lines)):
        rows = csv_rows("\n".join(lines[start:]), delimiter, whole=True)
        if rows and all(len(row) == columns for row in rows):
            return rows
    return []


def _is_header(rows: list[list[str]]) -> bool:
    first = [cell.strip() for cell in rows[0]]
    return all(first) and len(set(first)) == len(first) and not any(cell.replace(".", "").isdigit() for cell in first)


def _joined(row: list[str], delimiter: str) -> str:
    cells = (quoted(cell.replace("\n", "\u23ce"), limit=40) for cell in row)
    return quoted((delimiter if delimiter != "\t" else " | ").join(cells))
