"""Answers about a stored text that fit a number of tokens: its contents, and where a pattern is.

Every line of the text stands behind its number and a tab, one that matches with a colon behind the number. Dashes stand
where lines are left out between hits. What is said of the answer is its last line, in brackets: counts in it have
thousands separators; places, which can be asked for as they stand, have none. It names the place to go on from.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..kernels.errors import ToolError
from ..kernels.lines import LineReader
from ..kernels.text_encoding import decode_with_marks
from .contents import MOST_ENTRIES, TITLE_CHARS, Contents, Entry, has_contents, list_contents
from .kinds import detect_kind, take_sample
from .matching import EXCERPT_BYTES, Hit, MatchScan, Pattern, compile_pattern
from .packing import most_that_fit
from .quoting import quantity, strip_ansi
from .stored_text import StoredText

CONTEXT_LINES = 2
MOST_HITS = 2000
COUNTING_S = 1.0
"""How long hits are counted once there are as many as may be shown."""

GAP = "--"
_NEXT_PLACE = re.compile(r"[\[;] ?next: offset=([0-9]+)(?:, column=([0-9]+))?[;\]]")
_PROBLEM_CHARS = 80


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """From where on, and how much: at most `limit` entries or hits, and `budget_tokens` for the whole answer.

    `is_stopped` is asked all along; once it says so, the answer is what was found until then. `clock` is in seconds.
    """

    line: int = 1
    column: int = 1
    limit: int = MOST_HITS
    budget_tokens: int
    count_tokens: Callable[[str], int]
    is_stopped: Callable[[], bool] = lambda: False
    clock: Callable[[], float] = lambda: 0.0

    @property
    def most_hits(self) -> int:
        """How many hits there may be to show: each takes a token at least."""
        return min(self.limit, MOST_HITS, max(1, self.budget_tokens))

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


@dataclass(frozen=True, slots=True)
class Place:
    """Where to go on, as `line` and `column` of Asked."""

    line: int
    column: int = 1


def place_to_go_on(answer: str) -> Place | None:
    """Return the place that the last line of an answer names; None where there is no more."""
    found = _NEXT_PLACE.findall(answer[answer.rfind("\n") + 1 :])
    return Place(int(found[-1][0]), int(found[-1][1] or 1)) if found else None


class HitCounting:
    """When to stop a search: at once where it is `asked` to, else COUNTING_S after there were enough hits to show."""

    def __init__(self, asked: Asked) -> None:
        self._asked = asked
        self._enough_since: float | None = None
        self.has_ended = False

    def begin(self) -> None:
        """There are enough hits: from now on they are counted only."""
        if self._enough_since is None:
            self._enough_since = self._asked.clock()

    def is_over(self) -> bool:
        """Whether the search must stop. `has_ended` tells that it stopped while it was counting."""
        if self._enough_since is None:
            return self._asked.is_stopped()
        if self._asked.is_stopped() or self._asked.clock() > self._enough_since + COUNTING_S:
            self.has_ended = True
        return self.has_ended

    def hits_text(self, total: int) -> str:
        """Return how many hits there are, or more than how many."""
        more = "more than " if self.has_ended else ""
        return f"{more}{quantity(total, 'hit')}" if total else "no hits"


def contents_of(text: StoredText, asked: Asked) -> str:
    """Return the entries of the text's contents from a place on; of a kind that has none, what to do instead.

    Raises ToolError where there is no room for an answer.
    """
    kind = detect_kind(text)
    about = f"{kind}, {quantity(text.line_count, 'line')}"
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
        about += f", of which the time was enough for {found.looked_to_line:,}"
    if not found.entries:
        before = f" from line {asked.line} on, {found.skipped:,} before" if found.skipped else ""
        return asked.fitted(0, lambda _: f"[{about}: no entries{before}; {instead}]", str)

    def answer(shown: int) -> str:
        lines = [_entry_line(entry, entry.title) for entry in found.entries[:shown]]
        return "\n".join((*lines, _contents_footer(found, shown, about)))

    def one_cut(size: int) -> str:
        entry = found.entries[0]
        return f"{_entry_line(entry, f'{entry.title[:size]}…')}\n{_contents_footer(found, 1, about)}"

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
    counting = HitCounting(asked)
    scan = MatchScan(
        pattern,
        first_line=asked.line,
        first_column=asked.column,
        passed_bytes=passed_bytes,
        every_part=True,
        without_codes=True,
        is_stopped=counting.is_over,
    )
    most_held = asked.most_hits
    hits: list[Hit] = []
    for hit in scan.hits(text.chunks(from_line=asked.line, skip_bytes=passed_bytes)):
        hits.append(hit)
        if len(hits) > most_held:
            scan.counts_only = True
            counting.begin()
    shows = _HitLines(text, hits)
    notes = pattern_notes(pattern)
    if not (hits or query.isascii()) and "\ufffd" in take_sample(text).head:
        notes.append("not all of it is UTF-8, and in the rest only ASCII is found")

    def footer(shown: int) -> str:
        said = _search_notes(scan, hits, shown, asked=asked, counting=counting, line_count=text.line_count)
        return f"[{'; '.join((*notes, *said))}]"

    def answer(shown: int) -> str:
        return "\n".join((*shows.lines(shown), footer(shown)))

    def one_cut(size: int) -> str:
        return f"{shows.cut(hits[0], size)}\n{footer(1)}"

    return asked.fitted(min(len(hits), most_held), answer, one_cut)


def _contents_footer(found: Contents, shown: int, about: str) -> str:
    total = found.skipped + found.total
    said = [f"contents of {about}: {found.skipped + 1}-{found.skipped + shown} of {total:,}"]
    if shown < len(found.entries):
        said.append(f"next: {_next_place(found.entries[shown].line, found.entries[shown].column)}")
    if found.titles_cut:
        said.append(f"titles cut at {TITLE_CHARS} characters")
    return f"[{'; '.join(said)}]"


def _search_notes(
    scan: MatchScan, hits: Sequence[Hit], shown: int, *, asked: Asked, counting: HitCounting, line_count: int
) -> list[str]:
    total = scan.found
    said = [counting.hits_text(total)]
    if asked.line > 1 or asked.column > 1:
        said[0] += f" from {_next_place(asked.line, asked.column)} on"
    if shown < total:
        said.append(f"these are the first {shown}" + ("" if counting.has_ended else f", {total - shown:,} left"))
        said.append(f"next: {_next_place(hits[shown].line, hits[shown].match_column)}")
    if counting.has_ended:
        return said
    if scan.was_stopped:
        within = f"byte {scan.reached_column - 1} of line {scan.reached_line}" if scan.reached_column > 1 else ""
        reached = within or f"line {scan.reached_line - 1} of {line_count:,}"
        said.append(f"searched to {reached}, then the time was up")
        if shown == total:
            said.append(f"next: {_next_place(scan.reached_line, scan.reached_column)}")
    elif asked.line > line_count:
        said.append(f"it has {quantity(line_count, 'line')}")
    else:
        said[0] += f" in {quantity(line_count, 'line')}" if asked.line == 1 else f", to line {line_count}"
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
            first = max(done + 1, hit.line - CONTEXT_LINES)
            if done and first > done + 1:
                lines.append(GAP)
            lines += self._neighbours_in(first, hit.line)
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
    line = data.removesuffix(b"\n").removesuffix(b"\r") if data.endswith(b"\n") else data
    return _clipped(strip_ansi(decode_with_marks(line)), EXCERPT_BYTES)


def _entry_line(entry: Entry, title: str) -> str:
    place = f"{entry.line}:{entry.column}" if entry.column else f"{entry.line}"
    return f"{place}\t{title}".replace("\0", "\ufffd")


def _hit_line(line: int, column: int, text: str) -> str:
    return f"{line}:{column}:\t…{text}…" if column else f"{line}:\t{text}"


def pattern_notes(pattern: Pattern) -> list[str]:
    """Return what is to be said of a pattern that did not compile."""
    problem = _clipped(pattern.problem, _PROBLEM_CHARS)
    return [f"not a regular expression ({problem}), so taken literally"] if pattern.is_literal else []


def _next_place(line: int, column: int) -> str:
    return f"offset={line}, column={column}" if column > 1 else f"offset={line}"


def _clipped(text: str, most_chars: int) -> str:
    return text if len(text) <= most_chars else f"{text[: most_chars - 1]}…"
