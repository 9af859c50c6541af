"""What is shown of a stored text in place of the whole: the lines worth most, by kind, each with a rank.

Every number before a colon is that of the line in the stored text, which `read` takes. A text of any size is read once
at most, in bounded memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from .contents import list_contents
from .error_classes import LAST_TEST_RANK, ErrorClass
from .error_lines import ErrorLine, ErrorScan
from .kinds import Kind, Sample, last_states, take_sample, without_line_numbers
from .preview_binary import binary_preview
from .preview_diff import diff_preview
from .preview_foreign import foreign_lines, last_line
from .preview_json import json_preview
from .preview_table import table_preview
from .quoting import QUOTED_CHARS, PreviewLine, cleaned, quoted, strip_ansi_bytes
from .rare_lines import RareLine, RareScan, first_of_runs

if TYPE_CHECKING:
    from .stored_text import StoredText

_BLOCK_BYTES = 1 << 20
_EDGE_LINES = 12
_ERRORS_SHOWN = 40
_ENTRIES_HELD = 10_000
_ENTRIES_SHOWN = 60
_TITLE_CHARS = 100
_FEW_LINES = 24
_LONG_QUOTE_CHARS = 240
_SPACIOUS_LINES = 3
_HELD_BYTES = 1200
_RARE_SHOWN = 40
_RARE_BEFORE_EDGES = 6


def preview_lines(text: StoredText, kind: Kind) -> tuple[PreviewLine, ...]:
    """Return lines of a preview in document order, more of them than fit a stub. Raises ArtifactError as `chunks`."""
    if kind is Kind.BINARY:
        return binary_preview(text)
    sample = take_sample(text)
    if kind in (Kind.TEXT, Kind.LOG, Kind.TRACEBACK):
        return in_order(_output_preview(text, sample, kind))
    if kind is Kind.JSON:
        found = json_preview(text, sample)
    elif kind is Kind.CSV:
        found = table_preview(text, sample)
    elif kind is Kind.DIFF:
        found = diff_preview(clean_blocks(text, sample), sample)
    else:
        found = _contents_preview(text, sample, kind)
    if not found:
        return in_order(_edges(text, sample, first_rank=0))
    scanned = _scan(text, sample, shapes=kind in (Kind.JSON, Kind.CSV))
    return in_order(found + foreign_lines(scanned.errors, scanned.rare or (), text, sample, kind))


def in_order(lines: list[PreviewLine]) -> tuple[PreviewLine, ...]:
    """Return statements first, then quotations by line, of those of the same line the one of the lowest rank.

    What is said of a place within a line stands behind the quotation of it.
    """
    by_place: dict[tuple[int, str], PreviewLine] = {}
    for line in lines:
        place = (line.line, "" if line.line and line.lines else line.text)
        if place not in by_place or line.rank < by_place[place].rank:
            by_place[place] = line
    return tuple(sorted(by_place.values(), key=lambda one: (one.line, not one.lines, _is_end(one))))


def best_line(preview: Sequence[PreviewLine]) -> int:
    """Return the number of the line that the quotation or entry of the lowest rank names; 0 where there is none."""
    named = [line for line in preview if line.line]
    return min(named, key=lambda line: line.rank).line if named else 0


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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Scanned:
    """What a pass found. `rare` is None where the text is not even."""

    errors: list[ErrorLine]
    other_errors: int
    is_complete: bool
    rare: list[RareLine] | None


def _scan(text: StoredText, sample: Sample, *, shapes: bool) -> _Scanned:
    errors, rare = ErrorScan(), RareScan()
    for block in clean_blocks(text, sample):
        errors.feed(block)
        if shapes:
            rare.feed(block)
    return _Scanned(
        errors=errors.finish(), other_errors=errors.other_lines, is_complete=errors.is_complete, rare=rare.finish()
    )


def _output_preview(text: StoredText, sample: Sample, kind: Kind) -> list[PreviewLine]:
    """Return errors, then lines of rare shapes, and the first and the last ones.

    Prose speaks of errors too: of a text that is no log and not even, only what has the form of a failure counts.
    """
    scanned = _scan(text, sample, shapes=True)
    errors = scanned.errors
    if kind is Kind.TEXT and scanned.rare is None:
        errors = [error for error in errors if error.rank <= LAST_TEST_RANK]
    found = _error_lines(errors, others=scanned.other_errors, is_complete=scanned.is_complete)
    found += _rare_lines(scanned.rare or [], text.line_count)
    edges = _edges(text, sample, first_rank=80)
    if kind is Kind.TEXT:
        # The outermost lines say what it is; the best of what was found stands before them.
        best = min((line.rank for line in found), default=0)
        found = [_with_rank(line, 0 if line.rank == best else line.rank + 3) for line in found]
        edges = [_with_rank(edge, edge.rank - 79) if edge.rank <= 81 else edge for edge in edges]
    elif errors and errors[0].rank <= LAST_TEST_RANK and errors[-1].line < text.line_count:
        # How it ended outranks the second failure, unless that was told.
        told = any(error.error_class is ErrorClass.SUMMARY for error in errors)
        edges = [_with_rank(edge, 4) if edge.line == text.line_count and not told else edge for edge in edges]
    return [*edges, *found]


def _rare_lines(rare: list[RareLine], line_count: int) -> list[PreviewLine]:
    """Return lines of rare shapes, which rank behind known failures; the first few of them before the edges."""
    found = []
    for place, one in enumerate(first_of_runs(rare, line_count)[:_RARE_SHOWN]):
        alike = f" [x{one.count}]" if one.count > 1 else ""
        rank = (73 if place < _RARE_BEFORE_EDGES else 90) + place
        found.append(PreviewLine(f"{one.line}{alike}: {quoted(one.text.decode(errors='replace'))}", rank, one.line))
    return found


def _error_lines(errors: list[ErrorLine], *, others: int, is_complete: bool) -> list[PreviewLine]:
    found: list[PreviewLine] = []
    more = "" if is_complete else "+"
    for place, error in enumerate(errors[:_ERRORS_SHOWN]):
        alike = f" [x{error.count:,}{more}, last at {error.last_line}]" if error.count > 1 else ""
        column = f" (column {error.column})" if error.column else ""
        # A place in a very long line is no quotation of the line.
        lines = 0 if error.column else 1
        found.append(PreviewLine(f"{error.line}{column}{alike}: {error.text}", error.rank, error.line, lines))
        if place < _WITH_CONTEXT and not error.column:
            if error.error_class in _HAS_CONTEXT:
                found += _context(error.line - 1, error.before, error.rank + 9)
            if error.error_class in (*_HAS_CONTEXT, ErrorClass.FAILURE, ErrorClass.COMPLAINT):
                found += _context(error.line + 1, error.after, error.rank + (1 if error.text.endswith(":") else 4))
    hidden = others + sum(error.count for error in errors[_ERRORS_SHOWN:])
    if hidden:
        found.append(PreviewLine(f"{hidden:,}{more} more lines with errors", 76))
    return found


_WITH_CONTEXT = 4
_HAS_CONTEXT = (ErrorClass.ASSERTION, ErrorClass.COMPILER, ErrorClass.EXCEPTION)


def _context(number: int, line: str, rank: int) -> list[PreviewLine]:
    shown = quoted(line)
    return [PreviewLine(f"{number}: {shown}", rank, number)] if shown.strip() else []


def _edges(text: StoredText, sample: Sample, *, first_rank: int) -> list[PreviewLine]:
    """Return the first and the last lines that are not blank, the outermost with the lowest rank."""
    count = text.line_count
    if not sample.whole and count <= _FEW_LINES:
        return _few_lines(text, sample, first_rank)
    head = list(enumerate(sample.head.split("\n")[: 4 * _EDGE_LINES], start=1))
    first = _quotations([(number, line) for number, line in head if number <= count])[:_EDGE_LINES]
    ends = (sample.head if sample.whole else sample.tail).removesuffix("\n").split("\n")
    if count <= 1:
        return [*_ranked(first, first_rank), *_end_of_line(ends[-1], count, first_rank + 1)]
    if len(ends) == 1 and not sample.whole:
        return [*_ranked(first, first_rank), *_end_of_line(ends[0], count, first_rank + 1)]
    # The first line of the tail may be a part of one.
    numbered = list(zip(range(count - len(ends) + 1, count + 1), ends, strict=True))[0 if sample.whole else 1 :]
    last = _quotations(numbered)[-_EDGE_LINES:]
    return [*_ranked(first, first_rank), *_ranked(last[::-1], first_rank + 1)]


def _few_lines(text: StoredText, sample: Sample, first_rank: int) -> list[PreviewLine]:
    """Return the starts of the lines of a text that has only a few, very long ones, and then their ends."""
    starts, ends = [b""], [b""]
    for block in last_states(clean_blocks(text, sample)):
        pieces = block.split(b"\n")
        for place, piece in enumerate(pieces):
            if place:
                starts.append(b"")
                ends.append(b"")
            starts[-1] = (starts[-1] + piece[:_HELD_BYTES])[:_HELD_BYTES]
            ends[-1] = (ends[-1] + piece[-_HELD_BYTES:])[-_HELD_BYTES:]
    limit = _LONG_QUOTE_CHARS if text.line_count <= _SPACIOUS_LINES else QUOTED_CHARS
    shown, ended = [], []
    for number, (start, end) in enumerate(zip(starts, ends, strict=True), start=1):
        line = start.decode(errors="replace")
        if line.strip() and number <= text.line_count:
            shown.append(PreviewLine(f"{number}: {quoted(line, limit=limit)}", 0, number))
            ended += _end_of_line(end.decode(errors="replace"), number, 0)
    by_turns = [one for pair in zip(shown, shown[::-1], strict=True) for one in pair][: len(shown)]
    ended.sort(key=lambda line: -line.line)
    if len(shown) == 1:
        return [_with_rank(line, first_rank + place) for place, line in enumerate([*shown, *ended])]
    return [_with_rank(line, first_rank + place) for place, line in enumerate([*by_turns, *ended])]


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


_ENDS = "line {} ends: "


def _end_of_line(line: str, number: int, rank: int) -> list[PreviewLine]:
    """Return the end of a very long line."""
    shown = quoted(line[-_LONG_QUOTE_CHARS:], around=_LONG_QUOTE_CHARS)
    if len(line) <= len(shown):
        return []
    return [PreviewLine(_ENDS.format(number) + (shown if shown.startswith("…") else "…" + shown), rank, number, 0)]


def _is_end(line: PreviewLine) -> bool:
    return line.text.startswith(_ENDS.format(line.line))


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
        found.append(PreviewLine(f"{entry.line}: {cleaned(entry.title)}", 2 + place, entry.line, 0, contents.total))
    first = next((line for line in sample.head.split("\n") if line.strip()), "")
    if first and contents.entries[0].line > 1:
        number = sample.head[: sample.head.index(first)].count("\n") + 1
        found.append(PreviewLine(f"{number}: {quoted(first)}", 5, number, 0))
    listed = {line.line for line in found}
    return found + [line for line in last_line(text, sample, rank=4) if line.line not in listed]


def _level(title: str) -> int:
    """How deep a heading or a definition stands."""
    return len(title) - len(title.lstrip("#").lstrip(" \t"))
