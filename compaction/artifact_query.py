"""Answers about a stored text that fit a number of tokens: its contents, and where a pattern is.

Every line of the text stands behind its number and a tab, one that matches with a colon behind the number; what is said
of the answer is its last line, in brackets. It names the place to go on from.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..kernels.errors import ToolError
from ..kernels.lines import LineReader
from .contents import MOST_ENTRIES, TITLE_CHARS, Contents, has_contents, list_contents
from .kinds import detect_kind, take_sample
from .matching import EXCERPT_BYTES, Hit, MatchScan, compile_pattern
from .packing import most_that_fit
from .quoting import strip_ansi
from .stored_text import StoredText

CONTEXT_LINES = 2
MOST_HITS = 2000

_PROBLEM_CHARS = 80


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """From where on, and how much: at most `limit` entries or hits, and `budget_tokens` for the whole answer.

    `is_stopped` is asked all along; once it says so, the answer is what was found until then.
    """

    line: int = 1
    column: int = 1
    limit: int = MOST_HITS
    budget_tokens: int
    count_tokens: Callable[[str], int]
    is_stopped: Callable[[], bool] = lambda: False

    def fits(self, text: str) -> bool:
        """Whether an answer has room."""
        return self.count_tokens(text) <= self.budget_tokens

    def fitted(self, most: int, answer: Callable[[int], str], one_cut: Callable[[int], str]) -> str:
        """Return the answer with as many of `most` parts as fit. Where not even one does, it is cut to some bytes.

        Raises ToolError where that has no room either.
        """
        shown = most_that_fit(most, lambda parts: self.fits(answer(parts)))
        if shown or (not most and self.fits(answer(0))):
            return answer(shown)
        most_bytes = most_that_fit(EXCERPT_BYTES * 4, lambda size: self.fits(one_cut(size))) if most else 0
        if not most_bytes:
            raise ToolError(f"no room for an answer: {self.budget_tokens} tokens are left; answer with what you have")
        return one_cut(most_bytes)


def contents_of(text: StoredText, asked: Asked) -> str:
    """Return the entries of the text's contents from a place on; of a kind that has none, what to do instead.

    Raises ToolError where there is no room for an answer.
    """
    kind = detect_kind(text)
    about = f"{kind}, {_lines_text(text.line_count)}"
    instead = "use search with a query, or read with an offset"
    if not has_contents(kind):
        return asked.fitted(0, lambda _: f"[{about}: no contents to list; {instead}]", str)
    found = list_contents(
        text.chunks(),
        kind,
        from_line=asked.line,
        from_column=asked.column,
        most_entries=min(asked.limit, MOST_ENTRIES) + 1,
        numbered=take_sample(text).numbered,
        is_stopped=asked.is_stopped,
    )
    if found.looked_to_line is not None:
        about += f", of which the time was enough for {found.looked_to_line}"
    if not found.entries:
        before = f" from line {asked.line} on, {found.skipped} before" if found.skipped else ""
        return asked.fitted(0, lambda _: f"[{about}: no entries{before}; {instead}]", str)

    def answer(shown: int) -> str:
        lines = [f"{_place(entry.line, entry.column)}\t{entry.title}" for entry in found.entries[:shown]]
        return "\n".join((*lines, _contents_footer(found, shown, about)))

    def one_cut(size: int) -> str:
        entry = found.entries[0]
        return f"{_place(entry.line, entry.column)}\t{entry.title[:size]}…\n{_contents_footer(found, 1, about)}"

    return asked.fitted(min(len(found.entries), asked.limit, MOST_ENTRIES), answer, one_cut)


def search_text(text: StoredText, query: str, asked: Asked) -> str:
    """Return the lines that match, with their neighbours, from a place on; the first one is always shown.

    Raises ToolError for a pattern that is empty or too large, and where there is no room for an answer.
    """
    if not query:
        raise ToolError("the pattern is empty: give the text to find")
    pattern = compile_pattern(query)
    # Some bytes before the place, for the pattern to see that no line begins there, and to be shown with a match.
    passed_bytes = max(0, asked.column - 1 - 4 * EXCERPT_BYTES)
    scan = MatchScan(
        pattern,
        first_line=asked.line,
        first_column=asked.column,
        passed_bytes=passed_bytes,
        every_part=True,
        without_codes=True,
        is_stopped=asked.is_stopped,
    )
    most_held = min(asked.limit, MOST_HITS, max(1, asked.budget_tokens))
    hits: list[Hit] = []
    total = 0
    for hit in scan.hits(text.chunks(from_line=asked.line, skip_bytes=passed_bytes)):
        total += 1
        if total <= most_held + 1:
            hits.append(hit)
    shows = _HitLines(text, hits)
    notes = []
    if pattern.is_literal:
        notes.append(f"not a regular expression ({_clipped(pattern.problem, _PROBLEM_CHARS)}), so taken literally")

    def footer(shown: int) -> str:
        said = [*notes, *_search_notes(scan, hits, total, shown, asked=asked, line_count=text.line_count)]
        return f"[{'; '.join(said)}]"

    def answer(shown: int) -> str:
        return "\n".join((*shows.lines(shown), footer(shown)))

    def one_cut(size: int) -> str:
        return f"{shows.cut(hits[0], size)}\n{footer(1)}"

    return asked.fitted(min(len(hits), most_held), answer, one_cut)


def _contents_footer(found: Contents, shown: int, about: str) -> str:
    total = found.skipped + found.total
    said = [f"contents of {about}: {found.skipped + 1}-{found.skipped + shown} of {total}"]
    if shown < len(found.entries):
        said.append(f"next: {_next_place(found.entries[shown].line, found.entries[shown].column)}")
    if found.titles_cut:
        said.append(f"titles cut at {TITLE_CHARS} characters")
    return f"[{'; '.join(said)}]"


def _search_notes(
    scan: MatchScan, hits: Sequence[Hit], total: int, shown: int, *, asked: Asked, line_count: int
) -> list[str]:
    said = [f"{total or 'no'} hit{'' if total == 1 else 's'}"]
    if asked.line > 1 or asked.column > 1:
        said[0] += f" from {_next_place(asked.line, asked.column)} on"
    if shown < total:
        said.append(f"these are the first {shown}, {total - shown} left")
        said.append(f"next: {_next_place(hits[shown].line, hits[shown].match_column)}")
    if scan.was_stopped:
        within = f"byte {scan.reached_column - 1} of line {scan.reached_line}" if scan.reached_column > 1 else ""
        reached = within or f"line {scan.reached_line - 1} of {line_count}"
        said.append(f"searched to {reached}, then the time was up")
        if shown == total:
            said.append(f"next: {_next_place(scan.reached_line, scan.reached_column)}")
    elif asked.line > line_count:
        said.append(f"it has {_lines_text(line_count)}")
    else:
        said[0] += f" in {_lines_text(line_count)}" if asked.line == 1 else f", to line {line_count}"
    return said


class _HitLines:
    """The lines of hits with their neighbours, which are read once they are asked for."""

    def __init__(self, text: StoredText, hits: Sequence[Hit]) -> None:
        self._text = text
        self._hits = hits
        self._neighbours: dict[int, str] = {}

    def lines(self, shown: int) -> list[str]:
        """Return the first hits and up to CONTEXT_LINES lines on each side, each line once for each of its hits."""
        lines: list[str] = []
        done = 0  # the last line that is shown
        for at, hit in enumerate(self._hits[:shown]):
            lines += self._neighbours_in(max(done + 1, hit.line - CONTEXT_LINES), hit.line)
            lines.append(_hit_line(hit.line, hit.column, hit.text))
            behind = min(hit.line + CONTEXT_LINES, self._text.line_count)
            if at + 1 < shown:
                behind = min(behind, self._hits[at + 1].line - 1)
            lines += self._neighbours_in(hit.line + 1, behind + 1)
            done = max(hit.line, behind)
        return lines

    def cut(self, hit: Hit, size_chars: int) -> str:
        """Return a hit alone, cut to so many characters from its match on."""
        before = hit.text[: hit.match_at]
        part = hit.text[hit.match_at :][:size_chars]
        return _hit_line(hit.line, max(1, hit.column) + len(before.encode()), part)

    def _neighbours_in(self, first: int, stop: int) -> list[str]:
        """Return the lines [first, stop)."""
        missing = [line for line in range(max(1, first), stop) if line not in self._neighbours]
        if missing:
            reader = LineReader(self._text.chunks(from_line=missing[0]), first_line=missing[0])
            for line in range(missing[0], stop):
                data = reader.take(max_lines=1, max_bytes=4 * EXCERPT_BYTES)
                if not data.endswith(b"\n"):
                    reader.finish_line()
                self._neighbours[line] = _neighbour(data)
        return [f"{line}\t{self._neighbours[line]}" for line in range(max(1, first), stop)]


def _neighbour(data: bytes) -> str:
    text = strip_ansi(data.decode(errors="replace").rstrip("\r\n")).replace("\0", "\ufffd")
    return _clipped(text, EXCERPT_BYTES)


def _hit_line(line: int, column: int, text: str) -> str:
    return f"{line}:{column}:\t…{text}…" if column else f"{line}:\t{text}"


def _lines_text(count: int) -> str:
    return f"{count} line{'' if count == 1 else 's'}"


def _place(line: int, column: int) -> str:
    return f"{line}:{column}" if column else f"{line}"


def _next_place(line: int, column: int) -> str:
    return f"offset={line}, column={column}" if column > 1 else f"offset={line}"


def _clipped(text: str, most_chars: int) -> str:
    return text if len(text) <= most_chars else f"{text[: most_chars - 1]}…"
