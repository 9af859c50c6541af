"""`chapbook artifact`: what results too large for the window left in the store, looked into without a model.

The answers are those that the model's tool gives, with more room.
"""

from __future__ import annotations

import sys
import time
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from ...compaction.artifact_query import MOST_HITS, Asked, place_to_go_on
from ...compaction.artifacts import ArtifactRef, ArtifactStore
from ...compaction.contents import MOST_ENTRIES
from ...compaction.kinds import Kind, detect_kind
from ...compaction.quoting import quantity
from ...compaction.store_report import StoreReport
from ...compaction.stored_text import StoredText
from ...kernels.errors import ArtifactError, UsageError
from ..sizes import size_text
from ..tools.artifact import DEFAULT_LINES, Action, look_into
from .opening import open_place
from .options import PlaceOptions, takes
from .terminal import print_columns, print_json, visible, visible_line

MOST_CHARACTERS = 40_000
"""What an answer may have: some screens of a terminal."""

MOST_PROBLEMS = 20

artifact = typer.Typer(
    help="List, look into or check what is stored of large results.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    add_completion=False,
)
AsJson = Annotated[bool, typer.Option("--json", help="For programs.")]
Id = Annotated[str, typer.Argument(metavar="ID", help="Eight or more first digits of its hash, or its path.")]
Offset = Annotated[int, typer.Option(min=1, help="The line to begin with.")]
Column = Annotated[int, typer.Option(min=1, help="The byte of a long line to begin with.")]


class Listed(msgspec.Struct, frozen=True, kw_only=True):
    """An artifact as it is listed. `kind` is None where it is damaged or cannot be read, and `problem` says why;
    `lines` is None then, and for what is binary."""

    id: str
    sha256: str
    size_bytes: int
    lines: int | None
    kind: Kind | None
    stored: float
    path: Path
    problem: str = ""
    is_damaged: bool = False


@artifact.command("list")
@takes(PlaceOptions)
def list_artifacts(as_json: AsJson = False, *, options: PlaceOptions) -> None:
    """List the artifacts of a workspace, the one stored last first."""
    store = _store(options)
    listed = sorted((_listed(store, ref) for ref in store.refs()), key=lambda one: (-one.stored, one.sha256))
    if as_json:
        print_json(listed)
    elif not listed:
        sys.stderr.write(f"no artifacts in {visible_line(str(store.folder))} yet\n")
    else:
        rows = [
            (
                one.id,
                size_text(one.size_bytes),
                "" if one.lines is None else f"{one.lines:,}",
                one.kind or ("damaged" if one.is_damaged else "unreadable"),
                datetime.fromtimestamp(one.stored).strftime("%Y-%m-%d %H:%M"),
            )
            for one in listed
        ]
        print_columns(("id", "size", "lines", "kind", "stored"), rows, no_color=options.no_color)


@artifact.command("toc")
@takes(PlaceOptions)
def toc(id: Id, offset: Offset = 1, column: Column = 1, as_json: AsJson = False, *, options: PlaceOptions) -> None:
    """Show the contents of Markdown, JSON, a diff or Python, by lines."""
    _show(options, id, "toc", "", _asked(offset, column, MOST_ENTRIES), as_json=as_json)


@artifact.command("search")
@takes(PlaceOptions)
def search(
    id: Id,
    pattern: Annotated[
        str,
        typer.Argument(metavar="PATTERN", help="A regular expression (RE2); one that begins with - stands behind --."),
    ],
    offset: Offset = 1,
    column: Column = 1,
    as_json: AsJson = False,
    *,
    options: PlaceOptions,
) -> None:
    """Show the lines that match, with their neighbours, ignoring case."""
    _show(options, id, "search", pattern, _asked(offset, column, MOST_HITS), as_json=as_json)


@artifact.command("read")
@takes(PlaceOptions)
def read(
    id: Id,
    offset: Offset = 1,
    limit: Annotated[int, typer.Option(min=1, help="How many lines.")] = DEFAULT_LINES,
    column: Column = 1,
    *,
    as_json: AsJson = False,
    raw: Annotated[bool, typer.Option("--raw", help="Write the whole as it is stored, to a file or a pipe.")] = False,
    options: PlaceOptions,
) -> None:
    """Show lines, numbered, and where to go on; of binary content 16 bytes a line."""
    if not raw:
        _show(options, id, "read", "", _asked(offset, column, limit), as_json=as_json)
        return
    if as_json or (offset, limit, column) != (1, DEFAULT_LINES, 1):
        raise UsageError("--raw writes the whole artifact: leave out --offset, --limit, --column and --json")
    if sys.stdout.isatty():
        raise UsageError("--raw writes what may act on a terminal: send it to a file or a pipe")
    with _opened(options, id) as text:
        for block in text.raw():
            sys.stdout.buffer.write(block)


@artifact.command("verify")
@takes(PlaceOptions)
def verify(as_json: AsJson = False, *, options: PlaceOptions) -> int:
    """Read every artifact and hold it against its hash. Ends with 1 where one is not what was stored."""
    report = _store(options).verify()
    if as_json:
        print_json(_report_for_programs(report))
        return 1 if report.problems else 0
    count = report.sound_blobs
    sys.stdout.write(f"{quantity(count, 'artifact')}, {size_text(report.sound_bytes)}: as stored\n")
    if report.unfinished.files:
        sys.stdout.write(
            f"{report.unfinished.files:,} unfinished, {size_text(report.unfinished.bytes)}: being written or left by a "
            "crash; nothing cites them\n"
        )
    for problem in report.problems[:MOST_PROBLEMS]:
        sys.stdout.write(f"{visible_line(f'problem: {problem.path}: {problem.what}')}\n")
    if len(report.problems) > MOST_PROBLEMS:
        sys.stdout.write(f"and {len(report.problems) - MOST_PROBLEMS:,} more; --json lists all\n")
    return 1 if report.problems else 0


def _store(options: PlaceOptions) -> ArtifactStore:
    return open_place(options).store.artifacts


def _opened(options: PlaceOptions, id: str) -> StoredText:
    store = _store(options)
    if not store.folder.is_dir():
        raise UsageError(
            f"there is no artifact store at {store.folder}: nothing was stored for this workspace yet. Name another "
            "workspace with -C, or its store with --store"
        )
    return store.open_text(store.lookup(id))


def _asked(offset: int, column: int, limit: int) -> Asked:
    return Asked(
        line=offset,
        column=column,
        limit=limit,
        budget_tokens=MOST_CHARACTERS,
        count_tokens=len,
        clock=time.monotonic,
    )


def _show(options: PlaceOptions, id: str, action: Action, query: str, asked: Asked, *, as_json: bool) -> None:
    with _opened(options, id) as text:
        answer = look_into(text, action, query, asked)
    if as_json:
        place = place_to_go_on(answer)
        print_json({"text": answer, "next": place and {"offset": place.line, "column": place.column}})
        return
    sys.stdout.write(f"{visible(answer) if sys.stdout.isatty() else answer}\n")


def _listed(store: ArtifactStore, ref: ArtifactRef) -> Listed:
    lines, kind, problem, is_damaged, stored = None, None, "", False, 0.0
    try:
        stored = ref.path.stat().st_mtime
        with store.open_text(ref) as text:
            kind = detect_kind(text)
            lines = None if kind is Kind.BINARY else text.line_count
    except (ArtifactError, OSError) as error:
        problem = str(error)
        is_damaged = not isinstance(error, OSError) and not isinstance(error.__cause__, OSError)
    return Listed(
        id=ref.short_id,
        sha256=ref.sha256,
        size_bytes=ref.size_bytes,
        lines=lines,
        kind=kind,
        stored=stored,
        path=ref.path,
        problem=problem,
        is_damaged=is_damaged,
    )


def _report_for_programs(report: StoreReport) -> dict[str, Any]:
    return {
        "sound_blobs": report.sound_blobs,
        "sound_bytes": report.sound_bytes,
        "problems": [problem._asdict() for problem in report.problems],
        "unfinished": report.unfinished._asdict(),
    }
