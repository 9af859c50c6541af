"""`list`: what is in a folder, sorted, with sizes, as paths that the other tools take."""

from __future__ import annotations

from itertools import islice
from typing import Annotated

from msgspec import Meta

from ...compaction.packing import pack_lines, page_budget
from ...kernels.errors import ToolError
from .declare import tool
from .spec import Grounded, ToolContext
from .walk import TreeEntry, TreeWalk

ENTRIES_SHOWN_LIMIT = 400


@tool(name="list", safe=True)
def list_folder(
    context: ToolContext,
    path: Annotated[str, Grounded.FOLDER] = ".",
    depth: Annotated[int, Meta(ge=1)] = 1,
    offset: Annotated[int, Meta(ge=1, description="first entry")] = 1,
) -> str:
    """List a folder: paths and sizes in bytes."""
    resolved = context.workspace.resolve(path)
    if resolved.real.is_file():
        raise ToolError(f"{path!r} is a file; use read")
    if not resolved.real.is_dir():
        raise ToolError(f"there is no folder {path!r}; list '.' shows what is there")
    walk = TreeWalk(context.workspace, resolved.relative, max_depth=depth, show_ignored=True, with_sizes=True)
    entries = iter(walk)
    passed = sum(1 for _ in islice(entries, offset - 1))
    candidates = [_line(entry) for entry in islice(entries, ENTRIES_SHOWN_LIMIT)]
    shown = pack_lines(candidates, budget_tokens=page_budget(context.arrival_tokens), count_tokens=context.count_tokens)
    total = passed + len(candidates) + sum(1 for _ in entries)
    return "\n".join([*shown, _footer(walk, offset, len(shown), total)])


def _line(entry: TreeEntry) -> str:
    if entry.is_folder:
        return f"{entry.path}/{' (ignored)' if entry.ignored else ''}"
    return f"{entry.path} {entry.size_bytes}{' (ignored)' if entry.ignored else ''}"


def _footer(walk: TreeWalk, offset: int, shown: int, total: int) -> str:
    last = offset + shown - 1
    notes = [f"{total} entries" if walk.complete else f"more than {total} entries"]
    if not total:
        notes = ["empty folder"]
    elif not shown:
        notes.append(f"offset {offset} is past the last")
    elif last < total or offset > 1:
        notes.append(f"these are {offset}-{last}")
    if shown and last < total:
        notes.append(f"next: offset={last + 1}, or a folder further down")
    if walk.unnameable:
        notes.append(
            f"{walk.unnameable} left out: their names are not UTF-8 or hold control characters; bash sees them"
        )
    return f"[{'; '.join(notes)}]"
