"""What is shown of a stored text in place of the whole: the lines worth most, by kind, each with a rank.

Every number before a colon is that of the line in the stored text, which `read` takes. A text of any size is read once
at most, in bounded memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import msgspec

from .contents import list_contents
from .error_classes import LAST_TEST_RANK, LOG_CLASSES, ErrorClass
from .error_lines import ErrorLine, ErrorScan
from .kinds import Kind, Sample, json_records, take_sample, without_line_numbers
from .preview_binary import binary_preview
from .preview_diff import diff_preview
from .preview_json import json_preview
from .preview_table import table_preview
from .quoting import PreviewLine, cleaned, quoted, strip_ansi_bytes

if TYPE_CHECKING:
    from .stored_text import StoredText

_BLOCK_BYTES = 1 << 20
_EDGE_LINES = 12
_ERRORS_SHOWN = 40
_ENTRIES_HELD = 10_000
_ENTRIES_SHOWN = 60
_TITLE_CHARS = 100
_END_CHARS = 240


def preview_lines(text: StoredText, kind: Kind) -> tuple[PreviewLine, ...]:
    """Return lines of a preview in document order, more of them than fit a stub. Raises ArtifactError as `chunks`."""
    if kind is Kind.BINARY:
        return binary_preview(text)
    sample = take_sample(text)
    if kind is Kind.JSON:
        found = json_preview(text, sample) + _logged_errors(text, sample)
    elif kind is Kind.CSV:
        found = table_preview(text, sample)
    elif kind is Kind.DIFF:
        found = diff_preview(clean_blocks(text, sample), sample)
    elif kind in (Kind.MARKDOWN, Kind.PYTHON):
        found = _contents_preview(text, sample, kind)
    else:
        found = _output_preview(text, sample, kind)
    return in_order(found or _edges(text, sample, first_rank=0))


def in_order(lines: list[PreviewLine]) -> tuple[PreviewLine, ...]:
    """Return statements first, then quotations by line, of those of the same line the one of the lowest rank."""
    by_line: dict[int, PreviewLine] = {}
    statements = [line for line in lines if not line.line]
    for line in lines:
        if line.line and (line.line not in by_line or line.rank < by_line[line.line].rank):
            by_line[line.line] = line
    return (*statements, *(by_line[number] for number in sorted(by_line)))


def clean_blocks(text: StoredText, sample: Sample) -> Iterator[bytes]:
    """Yield the text in blocks of whole lines without colour codes, carriage returns at line ends, and line numbers.

    A line that is longer than a block comes in several.
    """
    for block in _blocks(text.chunks()):
        clean = strip_ansi_bytes(block)
        if b"\r\n" in clean:
            clean = clean.replace(b"\r\n", b"\n")
        yield without_line_numbers(clean) if sample.numbered else clean


def _blocks(chunks: Iterator[bytes]) -> Iterator[bytes]:
    pending = bytearray()
    for chunk in chunks:
        pending += chunk
        if len(pending) >= _BLOCK_BYTES:
            end = pending.rfind(b"\n") + 1 or len(pending)
            yield bytes(pending[:end])
            del pending[:end]
    if pending:
        yield bytes(pending)


# Plain text, logs, test output, traces


def _logged_errors(text: StoredText, sample: Sample) -> list[PreviewLine]:
    """Return the errors among JSON records of a log, behind what the records are; none of other JSON."""
    if not json_records(sample.head, whole=sample.whole):
        return []
    scan = ErrorScan()
    for block in clean_blocks(text, sample):
        scan.feed(block)
    errors = [error for error in scan.finish() if error.error_class in LOG_CLASSES]
    return _error_lines(errors, scan, first_rank=1 - LAST_TEST_RANK)


def _output_preview(text: StoredText, sample: Sample, kind: Kind) -> list[PreviewLine]:
    scan = ErrorScan()
    for block in clean_blocks(text, sample):
        scan.feed(block)
    errors = scan.finish()
    if kind is Kind.TEXT:
        # Prose speaks of errors too: only what has the form of a failure, behind the first and the last line.
        errors = [error for error in errors if error.rank <= LAST_TEST_RANK]
        edges = _edges(text, sample, first_rank=0)
        if errors:
            edges = [_with_rank(edge, edge.rank + 20) if edge.rank > 1 else edge for edge in edges]
        return [*edges, *_error_lines(errors, scan, first_rank=2)]
    edges = _edges(text, sample, first_rank=80)
    if errors and errors[0].rank <= LAST_TEST_RANK and errors[-1].line < text.line_count:
        # How it ended outranks the second failure, unless that was told.
        told = any(error.error_class is ErrorClass.SUMMARY for error in errors)
        edges = [_with_rank(edge, 4) if edge.line == text.line_count and not told else edge for edge in edges]
    return [*edges, *_error_lines(errors, scan, first_rank=0)]


def _error_lines(errors: list[ErrorLine], scan: ErrorScan, *, first_rank: int) -> list[PreviewLine]:
    found: list[PreviewLine] = []
    more = "" if scan.is_complete else "+"
    for place, error in enumerate(errors[:_ERRORS_SHOWN]):
        alike = f" [x{error.count:,}{more}, last at {error.last_line}]" if error.count > 1 else ""
        column = f" (column {error.column})" if error.column else ""
        rank = first_rank + error.rank
        found.append(PreviewLine(f"{error.line}{column}{alike}: {error.text}", rank, error.line))
        if place < _WITH_CONTEXT and error.error_class in _HAS_CONTEXT:
            found += _context(error.line - 1, error.before, rank + 9)
            found += _context(error.line + 1, error.after, rank + 4)
    hidden = scan.other_lines + sum(error.count for error in errors[_ERRORS_SHOWN:])
    if hidden:
        found.append(PreviewLine(f"{hidden:,}{more} more lines with errors", first_rank + 76))
    return found


_WITH_CONTEXT = 4
_HAS_CONTEXT = (ErrorClass.ASSERTION, ErrorClass.COMPILER, ErrorClass.EXCEPTION)


def _context(number: int, line: str, rank: int) -> list[PreviewLine]:
    shown = quoted(line)
    return [PreviewLine(f"{number}: {shown}", rank, number)] if shown.strip() else []


def _edges(text: StoredText, sample: Sample, *, first_rank: int) -> list[PreviewLine]:
    """Return the first and the last lines that are not blank, the outermost with the lowest rank."""
    count = text.line_count
    head = list(enumerate(sample.head.split("\n")[: 4 * _EDGE_LINES], start=1))
    first = _quotations([(number, line) for number, line in head if number <= count])[:_EDGE_LINES]
    ends = (sample.head if sample.whole else sample.tail).removesuffix("\n").split("\n")
    if count <= 1 or (len(ends) == 1 and not sample.whole):
        return [*_ranked(first, first_rank), *_end_of_line(ends[-1], count, first_rank)]
    # The first line of the tail may be a part of one.
    numbered = list(zip(range(count - len(ends) + 1, count + 1), ends, strict=True))[0 if sample.whole else 1 :]
    last = _quotations(numbered)[-_EDGE_LINES:]
    return [*_ranked(first, first_rank), *_ranked(last[::-1], first_rank + 1)]


def _quotations(numbered: list[tuple[int, str]]) -> list[PreviewLine]:
    """Return the lines that are not blank, each with the blank ones that follow it."""
    shown = [(number, line) for number, line in numbered if line.strip()]
    ends = [number for number, _ in shown[1:]] + [numbered[-1][0] + 1] if shown else []
    return [
        PreviewLine(f"{number}: {quoted(line)}", 0, number, end - number)
        for (number, line), end in zip(shown, ends, strict=True)
    ]


def _ranked(lines: list[PreviewLine], first_rank: int) -> list[PreviewLine]:
    return [_with_rank(line, first_rank + 2 * place) for place, line in enumerate(lines)]


def _end_of_line(line: str, number: int, first_rank: int) -> list[PreviewLine]:
    """Return the end of one very long line, which is a statement: its start is the quotation."""
    shown = quoted(line[-_END_CHARS:], around=_END_CHARS)
    if len(line) <= len(shown):
        return []
    return [PreviewLine(f"line {number} ends: {shown if shown.startswith('…') else '…' + shown}", first_rank + 1)]


def _with_rank(line: PreviewLine, rank: int) -> PreviewLine:
    return msgspec.structs.replace(line, rank=rank)


# Markdown and Python: the top of a table of contents


def _contents_preview(text: StoredText, sample: Sample, kind: Kind) -> list[PreviewLine]:
    contents = list_contents(clean_blocks(text, sample), kind, most_entries=_ENTRIES_HELD, title_chars=_TITLE_CHARS)
    if not contents.entries:
        return []
    # All of an upper level before those below it.
    by_level = sorted(contents.entries, key=lambda entry: (_level(entry.title), entry.line))[:_ENTRIES_SHOWN]
    what = "heading" if kind is Kind.MARKDOWN else "definition"
    found = [PreviewLine(f"{contents.total:,} {what}{'s' * (contents.total > 1)}", 0)]
    for place, entry in enumerate(by_level):
        found.append(PreviewLine(f"{entry.line}: {cleaned(entry.title)}", 2 + place, entry.line, 0))
    first = next((line for line in sample.head.split("\n") if line.strip()), "")
    if first and contents.entries[0].line > 1:
        number = sample.head[: sample.head.index(first)].count("\n") + 1
        found.append(PreviewLine(f"{number}: {quoted(first)}", 5, number, 0))
    return found


def _level(title: str) -> int:
    """How deep a heading or a definition stands."""
    return len(title) - len(title.lstrip("#").lstrip(" \t"))
