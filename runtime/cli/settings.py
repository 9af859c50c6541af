"""`chapbook config`: every setting, its value and where it comes from; and the user's trust in a workspace's file."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from ..config import trust_workspace_file, user_config_file
from ..config_keys import shown, shown_whole
from .opening import open_place, resolve_workspace
from .options import PlaceOptions, takes
from .terminal import print_columns, print_json, visible_line

config = typer.Typer(
    help="Show every setting and where it comes from.",
    invoke_without_command=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    add_completion=False,
)


@config.callback()
@takes(PlaceOptions)
def show(
    context: typer.Context,
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
    *,
    options: PlaceOptions,
) -> None:
    """Show every setting and where it comes from."""
    if context.invoked_subcommand is not None:
        context.obj = options
        return
    rows = open_place(options).loaded.rows()
    if as_json:
        print_json(rows)
        return
    columns = [(row.key, "auto" if row.value is None else shown(row.value), ", ".join(row.origins)) for row in rows]
    print_columns(("key", "value", "set by"), columns, no_color=options.no_color)


@config.command("trust")
@takes(PlaceOptions)
def trust(context: typer.Context, *, options: PlaceOptions) -> None:
    """Trust chapbook.toml of the workspace as it is now: read it first."""
    before = context.obj
    named = before if isinstance(before, PlaceOptions) and str(options.workspace) == "." else options
    workspace = resolve_workspace(named.workspace)
    settings = trust_workspace_file(workspace=workspace, user_file=user_config_file(os.environ))
    for setting in settings:
        sys.stdout.write(visible_line(f"{setting.origin}: {setting.key} = {shown_whole(setting.value)}") + "\n")
    what = "these settings take effect from now on" if settings else "it sets nothing that would have needed it"
    sys.stdout.write(f"trusted; {what}, until the file is changed\n")
