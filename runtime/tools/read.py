"""`read`: a page of a text file, its lines numbered, always with the place to go on from."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

from msgspec import Meta

from ...compaction.artifact_query import Asked
from ...compaction.blob_files import cited_hash
from ...compaction.contents import kind_by_name, list_contents
from ...compaction.packing import pack_lines, page_budget
from ...compaction.quoting import quantity
from ...kernels.errors import ToolError
from ...kernels.lines import LineReader
from .artifact import look_into, paths_as_the_model_names_them
from .declare import tool
from .page import MOST_BYTES, Page, PageLayout, Taken, fit_page, most_bytes_for, take_lines, take_window
from .spec import Grounded, ToolContext, ToolOutput
from .text_file import COUNT_LIMIT_BYTES, binary_file, read_format, read_utf8

DEFAULT_LINES = 400
CONTENTS_ENTRIES = 40
CONTENTS_TITLE_CHARS = 80
CONTENTS_LIMIT_BYTES = 4 << 20


@tool(safe=True)
def read(
    context: ToolContext,
    path: Annotated[str, Grounded.FILE],
    offset: Annotated[int, Meta(ge=1, description="first line")] = 1,
    limit: Annotated[int, Meta(ge=1)] | None = None,
    column: Annotated[int, Meta(ge=1, description="first byte in a long line")] = 1,
) -> ToolOutput:
    """Read a text file, with line numbers; says how to go on."""
    real = context.workspace.resolve(path).real
    budget_tokens = page_budget(context.arrival_tokens)
    asked = Asked(
        line=offset,
        column=column,
        limit=limit or DEFAULT_LINES,
        budget_tokens=budget_tokens,
        count_tokens=context.count_tokens,
    )
    stored_page = _read_blob(context, path, real, asked)
    if stored_page is not None:
        return ToolOutput(content=stored_page, paged=True)
    # What was stored because it was too large must not be stored again: of the store there are only pages.
    is_stored = context.workspace.is_in_store(real)
    with context.workspace.open_file(path) as file:
        size_bytes = os.fstat(file.fileno()).st_size
        text_format = read_format(file, path=path, size_bytes=size_bytes)
        reader = LineReader(read_utf8(file, text_format.encoding, cancel=context.cancel))
        reader.skip_lines(offset - 1)
        most_bytes = MOST_BYTES if limit and not is_stored else most_bytes_for(budget_tokens)
        taken = _take(reader, offset, limit, column, path=path, most_bytes=most_bytes)
        layout = PageLayout(
            count_tokens=context.count_tokens,
            crlf=text_format.crlf,
            refuse_nul=lambda line: binary_file(path, size_bytes, line=line),
        )
        counted = reader.count_rest(limit_bytes=COUNT_LIMIT_BYTES)
        if not taken.data and (offset > 1 or column > 1):
            raise ToolError(f"{path!r} has {quantity(reader.lines, 'line')}; offset {offset} is past its end")

        def footer(page: Page) -> str:
            if not page.shown:
                return f"[empty file, {size_bytes} bytes]"
            return page.footer(
                line_count=reader.lines,
                counted=counted,
                ends_with_newline=reader.ended_with_newline,
                encoding=text_format.encoding,
            )

        if is_stored:
            return ToolOutput(content=fit_page(layout, taken, budget_tokens=budget_tokens, footer=footer), paged=True)
        page = layout.lay_out(taken, budget_tokens=budget_tokens, packs=not limit)
        output = [*page.shown, footer(page)]
        if offset == 1 and not limit and page.is_partial(reader.lines) and size_bytes <= CONTENTS_LIMIT_BYTES:
            chunks = read_utf8(file, text_format.encoding, cancel=context.cancel)
            output += _contents(context, path, chunks, page.last_line)
    return ToolOutput(content="\n".join(output))


def _read_blob(context: ToolContext, path: str, real: Path, asked: Asked) -> str | None:
    """Return a page of a stored result, verified; None where the path, or where it leads, names none."""
    named = os.path.normpath(context.workspace.root / path)
    store = context.artifacts
    cited = cited_hash(named, store.folder) or cited_hash(str(real), store.folder)
    if cited is None:
        return None
    with paths_as_the_model_names_them(context), store.open_text(store.find(cited)) as text:
        return look_into(text, "read", "", asked)


def _take(reader: LineReader, offset: int, limit: int | None, column: int, *, path: str, most_bytes: int) -> Taken:
    if column == 1:
        return take_lines(reader, offset, most_lines=limit or DEFAULT_LINES, most_bytes=most_bytes)
    taken = take_window(reader, offset, column, most_bytes=most_bytes)
    if reader.lines >= offset and not taken.data:
        raise ToolError(f"line {offset} of {path!r} has {taken.column - 1:,} bytes; column {column} is past its end")
    return taken


def _contents(context: ToolContext, path: str, chunks: Iterator[bytes], after_line: int) -> list[str]:
    kind = kind_by_name(path)
    if kind is None:
        return []
    contents = list_contents(
        chunks, kind, from_line=after_line + 1, most_entries=CONTENTS_ENTRIES, title_chars=CONTENTS_TITLE_CHARS
    )
    if not contents.entries:
        return []
    entries = [f"{entry.line} {entry.title}" for entry in contents.entries]
    budget_tokens = context.arrival_tokens // 8
    packed = pack_lines(entries, budget_tokens=budget_tokens, count_tokens=context.count_tokens)
    more = f", {len(packed)} of {contents.total}" if len(packed) < contents.total else ""
    return [f"[contents after line {after_line}{more}]", *packed]
