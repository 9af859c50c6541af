"""What stands in a structured text and is not of it: a traceback behind a source, an error behind a table."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from .error_classes import LOG_CLASSES, ErrorClass
from .error_lines import ErrorLine
from .kinds import Kind, Sample, csv_delimiter, csv_rows, json_records
from .quoting import PreviewLine, quoted
from .rare_lines import RareLine

if TYPE_CHECKING:
    from .stored_text import StoredText

_SHOWN = 12
_BEFORE_THE_REST = 3
_END_LINES = 60
_JSON_SIGNS = ("{", "}", "[", "]", '"', ",", " ")
_DIFF_SIGNS = (" ", "+", "-", "@", "\\")
_DIFF_HEADERS = ("diff ", "index ", "new file", "deleted file", "similarity", "rename ", "old mode", "Binary files ")
_SOURCE_KINDS = (Kind.MARKDOWN, Kind.PYTHON)
# What source and prose hold themselves.
_ORDINARY = (*LOG_CLASSES, ErrorClass.MENTION)


def foreign_lines(
    errors: Sequence[ErrorLine], rare: Sequence[RareLine], text: StoredText, sample: Sample, kind: Kind
) -> list[PreviewLine]:
    """Return the lines of a preview that quote errors and rare lines, of those found in the text, and an end that are
    not of its kind. Of source and prose, which quote errors themselves, only what stands at the end counts."""
    is_foreign = _foreign_to(text, sample, kind)
    found = []
    for place, error in enumerate([error for error in errors if is_foreign(error)][:_SHOWN]):
        alike = f" [x{error.count:,}, last at {error.last_line}]" if error.count > 1 else ""
        rank = (2 if place < _BEFORE_THE_REST else 20) + place
        found.append(PreviewLine(f"{error.line}{alike}: {error.text}", rank, error.line))
    if kind in _SOURCE_KINDS:
        return found  # their end is shown anyway
    is_own = own_lines(sample, kind)
    others = ((one.line, one.text.decode(errors="replace")) for one in rare)
    strange = [(number, line) for number, line in others if not is_own(line)]
    for place, (number, line) in enumerate(strange[:_SHOWN]):
        found.append(PreviewLine(f"{number}: {quoted(line)}", (4 if place < _BEFORE_THE_REST else 20) + place, number))
    return found + last_line(text, sample, rank=2, unless=is_own)


def last_line(
    text: StoredText, sample: Sample, *, rank: int, unless: Callable[[str], bool] | None = None
) -> list[PreviewLine]:
    """Return a quotation of the last line that is not blank, if the text has more than one; `unless` gets the line."""
    lines = (sample.head if sample.whole else sample.tail).removesuffix("\n").split("\n")
    back, line = next(((back, line) for back, line in enumerate(reversed(lines)) if line.strip()), (0, ""))
    number = text.line_count - back
    if not line or number <= 1 or (unless is not None and unless(line)):
        return []
    return [PreviewLine(f"{number}: {quoted(line)}", rank, number)]


def _foreign_to(text: StoredText, sample: Sample, kind: Kind) -> Callable[[ErrorLine], bool]:
    """Return whether an error is none of what texts of that kind say themselves."""
    if kind in _SOURCE_KINDS:
        end = text.line_count - _END_LINES
        return lambda error: (
            error.line > end
            and error.error_class not in _ORDINARY
            and (not error.raw[:1].isspace() or error.error_class is ErrorClass.LOCATION)
        )
    is_own = own_lines(sample, kind)
    if kind is Kind.JSON and json_records(sample.head, whole=sample.whole):
        return lambda error: error.error_class in LOG_CLASSES or not is_own(error.raw)
    return lambda error: not error.column and not is_own(error.raw)


def own_lines(sample: Sample, kind: Kind) -> Callable[[str], bool]:
    """Return whether a line, which may be cut, has the form of those that JSON, a diff or this table is made of."""
    if kind is Kind.CSV:
        delimiter = csv_delimiter(sample.head, whole=sample.whole)
        rows = csv_rows(sample.head, delimiter, whole=sample.whole) if delimiter else []
        columns = len(rows[0]) if rows else 1
        # A cell may hold a delimiter, and a long line lacks those behind its cut.
        return lambda line: line.count(delimiter) * 2 >= columns - 1 if delimiter else True
    signs = _JSON_SIGNS if kind is Kind.JSON else _DIFF_SIGNS
    headers = () if kind is Kind.JSON else _DIFF_HEADERS
    return lambda line: line.startswith(signs) or line[:1].isdigit() or line.startswith(headers)
