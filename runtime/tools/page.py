"""Pages of a text: numbered lines, or a window of one long line, as many as fit a number of tokens.

Every line of the text stands behind its number and a tab; what is said of the page stands in brackets without one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from ...compaction.packing import fit_prefix, pack_lines
from ...compaction.quoting import quantity
from ...kernels.errors import ToolError
from ...kernels.lines import LineReader, character_start
from ...kernels.text_encoding import UTF_8, TextEncoding, decode_with_marks

MOST_BYTES = 8 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """What was read for a page: from byte `column` of line `first_line` on.

    `rest_bytes` is how much of the last line there is beyond `data`. `is_window`: no more than that one line is wanted.
    `has_feed`: the last line ends with a line feed, in `data` or, of a window, behind it.
    """

    first_line: int
    data: bytes
    column: int = 1
    rest_bytes: int = 0
    is_window: bool = False
    has_feed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """The lines to show, and what the footer says of them. `next_column` is 0 unless some of the last one is left."""

    shown: tuple[str, ...] = ()
    last_line: int = 0
    place: str = ""
    next_column: int = 0
    was_replaced: bool = False
    crlf: bool = False

    def is_partial(self, line_count: int) -> bool:
        """Whether there is more to read after this page."""
        return bool(self.next_column) or line_count > self.last_line

    def footer(
        self,
        *,
        line_count: int,
        counted: bool,
        ends_with_newline: bool,
        encoding: TextEncoding,
        notes: Sequence[str] = (),
    ) -> str:
        """Return the bracketed line that says what was shown, of how much, and where to go on.

        `line_count` is a floor unless `counted`.
        """
        at_end = counted and line_count == self.last_line
        more_than = "" if counted else "more than "
        if self.place.startswith("lines"):
            said = [f"{self.place} of {more_than}{line_count:,}"]
        else:
            said = [f"{self.place}; {more_than}{quantity(line_count, 'line')} in all"]
        if self.next_column:
            said.append(f"next: offset={self.last_line}, column={self.next_column}")
        elif not at_end:
            said.append(f"next: offset={self.last_line + 1}")
        said += notes
        if encoding != UTF_8:
            said.append(f"{encoding.name} with{'' if encoding.mark else 'out'} a byte order mark")
        if self.crlf:
            said.append("CRLF line ends")
        if self.was_replaced:
            said.append("invalid bytes shown as \ufffd")
        if at_end and not ends_with_newline:
            said.append("no newline at the end")
        return f"[{'; '.join(said)}]"


def take_lines(reader: LineReader, first_line: int, *, most_lines: int, most_bytes: int) -> Taken:
    """Read lines from where the reader stands, which is the start of `first_line`."""
    data = reader.take(max_lines=most_lines, max_bytes=most_bytes)
    rest_bytes = 0 if data.endswith(b"\n") else reader.finish_line()
    return Taken(first_line=first_line, data=data, rest_bytes=rest_bytes, has_feed=data.endswith(b"\n"))


def take_window(reader: LineReader, line: int, column: int, *, passed_bytes: int = 0, most_bytes: int) -> Taken:
    """Read line `line` from byte `column`, or from the start of the character that it falls into.

    The reader stands `passed_bytes` into the line. Where the line ends before `column`, the data are empty and their
    column is that behind the line's last byte.
    """
    before = min(3, column - 1)
    passed_bytes += reader.skip_in_line(column - 1 - before - passed_bytes)
    data = reader.take(max_lines=1, max_bytes=before + most_bytes)
    has_feed = data.endswith(b"\n")
    rest_bytes = 0 if has_feed else reader.finish_line()
    data = data.removesuffix(b"\n")
    start = character_start(data, before) if len(data) > before else len(data)
    return Taken(
        first_line=line,
        data=data[start:],
        column=passed_bytes + start + 1,
        rest_bytes=rest_bytes,
        is_window=True,
        has_feed=has_feed,
    )


def most_bytes_for(budget_tokens: int) -> int:
    """Return how many bytes are read for a page of so many tokens: a token seldom has more than sixteen."""
    return max(1 << 16, 16 * budget_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class PageLayout:
    """How lines are shown. `crlf`: a carriage return at a line's end is left out, since it ends the text's lines; None
    where that is to be told for each page by its lines, so that no byte is lost.

    `refuse_nul` makes the error for a line with a NUL, which a page ends before; without it a NUL is shown as U+FFFD.
    """

    count_tokens: Callable[[str], int]
    crlf: bool | None = None
    refuse_nul: Callable[[int], ToolError] | None = None

    def lay_out(self, taken: Taken, *, budget_tokens: int, packs: bool = True) -> Page:
        """Return the lines of `taken` that fit, all of them unless it `packs`, or the start of one that does not.

        The budget is for the lines alone; only the number and first character of a line may overrun it.
        """
        if taken.is_window:
            return self._window(taken, taken.data, budget_tokens)
        lines = taken.data.split(b"\n")
        if not lines[-1]:
            lines.pop()
        cut = lines.pop() if taken.rest_bytes else b""
        if not lines:
            return self._window(taken, cut, budget_tokens)
        # Without a line feed behind it a carriage return ends no line.
        fed_lines = len(lines) if taken.has_feed or cut else len(lines) - 1
        if self.refuse_nul is not None:
            lines = lines[: next((at for at, line in enumerate(lines) if at and b"\0" in line), len(lines))]
        crlf = self._ends_lines_with_crlf(taken, lines)
        numbered = [
            self._numbered(taken.first_line + at, line, crlf and at < fed_lines) for at, line in enumerate(lines)
        ]
        if not packs:
            shown = numbered
        elif self.count_tokens(numbered[0]) > budget_tokens:
            return self._window(replace(taken, rest_bytes=0, has_feed=fed_lines > 0), lines[0], budget_tokens)
        else:
            shown = pack_lines(numbered, budget_tokens=budget_tokens, count_tokens=self.count_tokens)
        last_line = taken.first_line + len(shown) - 1
        return Page(
            shown=tuple(shown),
            last_line=last_line,
            place=f"lines {taken.first_line}-{last_line}",
            was_replaced=any(map(_is_replaced, lines[: len(shown)])),
            crlf=crlf,
        )

    def _ends_lines_with_crlf(self, taken: Taken, lines: list[bytes]) -> bool:
        if self.crlf is not None:
            return self.crlf
        return taken.data.endswith(b"\n") and all(line.endswith(b"\r") for line in lines)

    def _window(self, taken: Taken, data: bytes, budget_tokens: int) -> Page:
        """Show as much of one line as fits: its bytes [column - 1, column - 1 + length)."""
        if not data:
            return Page()
        line, column = taken.first_line, taken.column

        def count(part: bytes) -> int:
            return self.count_tokens(f"{line}\t{decode_with_marks(part)}")

        length = fit_prefix(data, budget_tokens=budget_tokens, count_tokens=count)
        if length < len(data) or taken.rest_bytes:
            length = character_start(data, length) or _first_character_bytes(data)
        end = column - 1 + length
        whole_bytes = column - 1 + len(data) + taken.rest_bytes
        crlf = bool(self.crlf) and taken.has_feed and end == whole_bytes
        return Page(
            shown=(self._numbered(line, data[:length], crlf),),
            last_line=line,
            place=f"line {line}, bytes {column}-{end} of {whole_bytes:,}",
            next_column=end + 1 if end < whole_bytes else 0,
            was_replaced=_is_replaced(data[:length]),
            crlf=bool(self.crlf),
        )

    def _numbered(self, number: int, line: bytes, crlf: bool) -> str:
        if crlf:
            line = line.removesuffix(b"\r")
        if b"\0" in line and self.refuse_nul is not None:
            raise self.refuse_nul(number)
        return f"{number}\t{decode_with_marks(line)}"


def fit_page(layout: PageLayout, taken: Taken, *, budget_tokens: int, footer: Callable[[Page], str]) -> str:
    """Return a page with its footer that together take at most `budget_tokens`.

    Raises ToolError where not even one character of a line has room beside its footer.
    """
    lines_tokens = budget_tokens
    # It gets to 1, the smallest page, before it gives up, however unlike the sum of its parts a text counts.
    while lines_tokens > 0:
        page = layout.lay_out(taken, budget_tokens=lines_tokens)
        text = "\n".join((*page.shown, footer(page)))
        over_tokens = layout.count_tokens(text) - budget_tokens
        if over_tokens <= 0:
            return text
        lines_tokens = max(lines_tokens - over_tokens, lines_tokens // 2)
    raise ToolError(f"no room for a page: {budget_tokens} tokens are left for it; answer with what you have")


def _first_character_bytes(data: bytes) -> int:
    return next((size for size in range(1, len(data)) if character_start(data, size)), len(data))


def _is_replaced(line: bytes) -> bool:
    if b"\0" in line:
        return True
    try:
        line.decode()
    except UnicodeDecodeError:
        return True
    return False
