"""`read`: a page of a text file, its lines numbered, always with the place to go on from.

Every line of the file stands behind its number; what the tool says itself stands in brackets without one.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Annotated

from msgspec import Meta

from ...compaction.packing import fit_prefix, pack_lines, page_budget
from ...kernels.errors import ToolError
from ...kernels.lines import LineReader, character_start
from ...kernels.text_encoding import UTF_8
from .contents import SOURCE_LIMIT_BYTES, list_contents
from .declare import tool
from .spec import Grounded, ToolContext
from .text_file import COUNT_LIMIT_BYTES, TextFormat, binary_file, read_format, read_utf8

DEFAULT_LINES = 400
MOST_BYTES = 8 << 20


@tool(safe=True)
def read(
    context: ToolContext,
    path: Annotated[str, Grounded.FILE],
    offset: Annotated[int, Meta(ge=1, description="first line")] = 1,
    limit: Annotated[int, Meta(ge=1)] | None = None,
    column: Annotated[int, Meta(ge=1, description="first byte in a long line")] = 1,
) -> str:
    """Read a text file, with line numbers; says how to go on."""
    with context.workspace.open_file(path) as file:
        size_bytes = os.fstat(file.fileno()).st_size
        text_format = read_format(file, path=path, size_bytes=size_bytes)
        page = _Page(context, path, size_bytes, text_format)
        reader = LineReader(read_utf8(file, text_format.encoding, cancel=context.cancel))
        reader.skip_lines(offset - 1)
        if column == 1:
            page.take_lines(reader, offset, limit)
        else:
            page.take_rest_of_line(reader, offset, column)
        counted = reader.count_rest(limit_bytes=COUNT_LIMIT_BYTES)
        if not page.shown and (offset > 1 or column > 1):
            raise ToolError(f"{path!r} has {reader.lines} lines; offset {offset} is past its end")
        output = [*page.shown, page.footer(reader, counted=counted)]
        if offset == 1 and not limit and page.is_partial(reader) and size_bytes <= SOURCE_LIMIT_BYTES:
            whole = b"".join(read_utf8(file, text_format.encoding, cancel=context.cancel))
            output += _contents(context, path, whole.decode(errors="replace"), page.last_line)
    return "\n".join(output)


class _Page:
    """The lines to show, or a window of one line, and what the footer says of them."""

    def __init__(self, context: ToolContext, path: str, size_bytes: int, text_format: TextFormat) -> None:
        self.shown: list[str] = []
        self.last_line = 0
        self._context = context
        self._path = path
        self._size_bytes = size_bytes
        self._format = text_format
        self._budget_tokens = page_budget(context.arrival_tokens)
        self._place = ""
        self._next_column = 0
        self._was_replaced = False

    def take_lines(self, reader: LineReader, offset: int, limit: int | None) -> None:
        """Show whole lines from `offset`: `limit` of them, or as many as fit; or the start of one that does not."""
        most_bytes = MOST_BYTES if limit else max(1 << 16, 16 * self._budget_tokens)
        taken = reader.take(max_lines=limit or DEFAULT_LINES, max_bytes=most_bytes)
        rest_bytes = 0 if taken.endswith(b"\n") else reader.finish_line()
        lines = taken.split(b"\n")
        if not lines[-1]:
            lines.pop()
        cut = lines.pop() if rest_bytes else b""
        if not lines:
            if cut:
                self._show_window(cut, offset, 1, rest_bytes)
            return
        # A page ends before a line with a NUL; asking for that line refuses it.
        lines = lines[: next((at for at, line in enumerate(lines) if at and b"\0" in line), len(lines))]
        first = self._numbered(offset, lines[0])
        if not limit and self._context.count_tokens(first) > self._budget_tokens:
            self._show_window(lines[0], offset, 1, 0)
            return
        numbered = (self._numbered(number, line) for number, line in enumerate(lines, start=offset))
        self.shown = list(numbered) if limit else self._packed(numbered)
        self.last_line = offset + len(self.shown) - 1
        self._place = f"lines {offset}-{self.last_line}"

    def take_rest_of_line(self, reader: LineReader, offset: int, column: int) -> None:
        """Show line `offset` from byte `column`, or from the start of the character that it falls into."""
        before = min(3, column - 1)
        skipped = reader.skip_in_line(column - 1 - before)
        line = reader.take(max_lines=1, max_bytes=before + max(1 << 16, 16 * self._budget_tokens))
        rest_bytes = 0 if line.endswith(b"\n") else reader.finish_line()
        line = line.removesuffix(b"\n")
        if reader.lines >= offset and len(line) <= before:
            whole_bytes = skipped + len(line)
            raise ToolError(f"line {offset} of {self._path!r} has {whole_bytes} bytes; column {column} is past its end")
        if line:
            start = character_start(line, before)
            self._show_window(line[start:], offset, skipped + start + 1, rest_bytes)

    def is_partial(self, reader: LineReader) -> bool:
        """Whether there is more to read after this page."""
        return bool(self._next_column) or reader.lines > self.last_line

    def footer(self, reader: LineReader, *, counted: bool) -> str:
        """Return the bracketed line that says what was shown, of how much, and where to go on."""
        if not self.shown:
            return f"[empty file, {self._size_bytes} bytes]"
        notes = [self._place]
        if not self._next_column and not (counted and reader.lines == self.last_line):
            notes.append(f"next: offset={self.last_line + 1}")
        if self._next_column:
            notes.append(f"next: offset={self.last_line}, column={self._next_column}")
        total = f"{reader.lines}" if counted else f"more than {reader.lines}"
        notes[0] += f" of {total}" if self._place.startswith("lines") else f"; {total} lines in all"
        notes += self._oddities(at_end=counted and reader.lines == self.last_line and not reader.ended_with_newline)
        return f"[{'; '.join(notes)}]"

    def _oddities(self, *, at_end: bool) -> list[str]:
        notes = []
        encoding = self._format.encoding
        if encoding != UTF_8:
            notes.append(f"{encoding.name} with{'' if encoding.mark else 'out'} a byte order mark")
        if self._format.crlf:
            notes.append("CRLF line ends")
        if self._was_replaced:
            notes.append("invalid bytes shown as \ufffd")
        if at_end:
            notes.append("no newline at the end")
        return notes

    def _packed(self, lines: Iterator[str]) -> list[str]:
        return pack_lines(lines, budget_tokens=self._budget_tokens, count_tokens=self._context.count_tokens)

    def _numbered(self, number: int, line: bytes) -> str:
        if self._format.crlf:
            line = line.removesuffix(b"\r")
        return f"{number}\t{self._decoded(line, number)}"

    def _decoded(self, line: bytes, number: int) -> str:
        if b"\0" in line:
            raise binary_file(self._path, self._size_bytes, line=number)
        try:
            return line.decode()
        except UnicodeDecodeError:
            self._was_replaced = True
            return line.decode(errors="replace")

    def _show_window(self, data: bytes, number: int, column: int, rest_bytes: int) -> None:
        """Show as much of a line from `column` as fits: bytes [column - 1, column - 1 + length)."""

        def count(part: bytes) -> int:
            return self._context.count_tokens(f"{number}\t{part.decode(errors='replace')}")

        length = fit_prefix(data, budget_tokens=self._budget_tokens, count_tokens=count)
        if length < len(data) or rest_bytes:
            length = character_start(data, length) or length
        end = column - 1 + length
        whole_bytes = column - 1 + len(data) + rest_bytes
        self.shown = [self._numbered(number, data[:length])]
        self.last_line = number
        self._place = f"line {number}, bytes {column}-{end} of {whole_bytes}"
        self._next_column = end + 1 if end < whole_bytes else 0


def _contents(context: ToolContext, path: str, text: str, after_line: int) -> list[str]:
    entries, total = list_contents(path, text, after_line=after_line)
    if not entries:
        return []
    budget_tokens = context.arrival_tokens // 8
    packed = pack_lines(entries, budget_tokens=budget_tokens, count_tokens=context.count_tokens)
    more = f", {len(packed)} of {total}" if len(packed) < total else ""
    return [f"[contents after line {after_line}{more}]", *packed]
