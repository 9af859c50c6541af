"""`artifact`: looks into what was stored because it was too large. Read-only, and confined to the store.

Whatever it is asked, its answer is a page that fits below the size over which a result would be stored, so that no
answer is ever stored again.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Literal

from msgspec import Meta

from ...compaction.artifact_query import MOST_HITS, Asked, contents_of, search_text
from ...compaction.binary_query import contents_of_bytes, read_bytes, search_bytes
from ...compaction.packing import page_budget
from ...compaction.quoting import quantity
from ...compaction.stored_text import StoredText
from ...kernels.errors import ArtifactError, ToolError
from ...kernels.lines import LineReader
from .declare import tool
from .page import Page, PageLayout, fit_page, most_bytes_for, take_lines, take_window
from .spec import Grounded, ToolContext, ToolOutput

DEFAULT_LINES = 200
MOST_LINES = 400
DEFAULT_SEARCH_TOKENS = 400
LEAST_TOKENS = 128
"""Less asked for is taken as this: a hit and the place to go on from need it."""

TIME_LIMIT_S = 20.0

Action = Literal["toc", "search", "read"]


@tool(safe=True, timeout_s=TIME_LIMIT_S)
def artifact(
    context: ToolContext,
    *,
    id: Annotated[str, Grounded.ARTIFACT],
    action: Action,
    query: str | None = None,
    offset: Annotated[int, Meta(ge=1)] = 1,
    limit: Annotated[int, Meta(ge=1)] | None = None,
    column: Annotated[int, Meta(ge=1)] = 1,
    max_tokens: Annotated[int, Meta(ge=1)] | None = None,
) -> ToolOutput:
    """Look into a stored result."""
    with paths_as_the_model_names_them(context):
        ref = context.artifacts.lookup(id)
    if action == "search" and not query:
        raise ToolError(f'search needs a query: id="{ref.short_id}", action="search", query="TEXT TO FIND"')
    if action != "search" and query:
        raise ToolError(f'{action} takes no query; to find text: id="{ref.short_id}", action="search", query="…"')
    page_tokens = page_budget(context.arrival_tokens)
    wanted_tokens = max_tokens or (DEFAULT_SEARCH_TOKENS if action == "search" else page_tokens)
    asked = Asked(
        line=offset,
        column=column,
        limit=limit or (DEFAULT_LINES if action == "read" else MOST_HITS),
        budget_tokens=min(max(wanted_tokens, LEAST_TOKENS), page_tokens),
        count_tokens=context.count_tokens,
        is_stopped=lambda: context.cancel.is_set,
        clock=time.monotonic,
    )
    with paths_as_the_model_names_them(context), context.artifacts.open_text(ref) as text:
        return ToolOutput(content=look_into(text, action, query or "", asked), paged=True)


@contextmanager
def paths_as_the_model_names_them(context: ToolContext) -> Iterator[None]:
    """Let an error of the store name its files from the workspace, where they lie in it."""
    try:
        yield
    except ArtifactError as error:
        folder, root = context.artifacts.folder, context.workspace.root
        if not folder.resolve().is_relative_to(root):
            raise
        message = str(error).replace(str(folder), folder.resolve().relative_to(root).as_posix())
        raise ArtifactError(message, path=error.path, size_bytes=error.size_bytes) from error


def look_into(text: StoredText, action: Action, query: str, asked: Asked) -> str:
    """Return the answer to a question about a stored text, or binary content. Raises ToolError where there is none."""
    is_binary = text.is_binary
    if action == "toc":
        return contents_of_bytes(text, asked) if is_binary else contents_of(text, asked)
    if action == "search":
        return search_bytes(text, query, asked) if is_binary else search_text(text, query, asked)
    return read_bytes(text, asked) if is_binary else read_lines(text, asked)


def read_lines(text: StoredText, asked: Asked) -> str:
    """Return a page of lines, or of one long line, with the place to go on from. Raises ToolError past the end."""
    if not text.line_count:
        return f"[empty, {text.ref.size_bytes} bytes]"
    if asked.line > text.line_count:
        raise ToolError(
            f"{text.ref.short_id} has {quantity(text.line_count, 'line')}; offset {asked.line} is past its end"
        )
    most_bytes = most_bytes_for(asked.budget_tokens)
    passed_bytes = max(0, asked.column - 4)  # a character may begin up to three bytes before the column
    reader = LineReader(text.chunks(from_line=asked.line, skip_bytes=passed_bytes), first_line=asked.line)
    if asked.column > 1:
        taken = take_window(reader, asked.line, asked.column, passed_bytes=passed_bytes, most_bytes=most_bytes)
        if not taken.data:
            raise ToolError(
                f"line {asked.line} of {text.ref.short_id} has {_line_bytes(text, asked.line):,} bytes; column "
                f"{asked.column} is past its end"
            )
    else:
        taken = take_lines(reader, asked.line, most_lines=min(asked.limit, MOST_LINES), most_bytes=most_bytes)
    notes = [f"at most {MOST_LINES} lines at once"] if asked.limit > MOST_LINES else []

    def footer(page: Page) -> str:
        return page.footer(
            line_count=text.line_count,
            counted=True,
            ends_with_newline=text.ends_with_newline,
            encoding=text.encoding,
            notes=notes,
        )

    layout = PageLayout(count_tokens=asked.count_tokens)
    return fit_page(layout, taken, budget_tokens=asked.budget_tokens, footer=footer)


def _line_bytes(text: StoredText, line: int) -> int:
    return LineReader(text.chunks(from_line=line)).finish_line()
