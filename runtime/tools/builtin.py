"""The tools that every session has, in the order in which the model is told of them."""

from __future__ import annotations

from collections.abc import Sequence

from .artifact import artifact
from .bash import bash
from .listing import list_folder
from .plan import exit_plan_mode, plan_start, plan_status, plan_step
from .read import read
from .search import search
from .spec import ARTIFACT_TOOL, Tool
from .task import task
from .writing import edit, write


def builtin_tools() -> tuple[Tool, ...]:
    """Return the tools that a session has by default; the order is part of every session prefix."""
    return (
        *(read, search, list_folder, write, edit, bash, artifact),
        *(plan_start, plan_step, plan_status, exit_plan_mode),
    )


def with_artifact(tools: Sequence[Tool]) -> tuple[Tool, ...]:
    """Return a host's own tools with the one that stubs name behind them; no tools stay none."""
    if not tools or any(each.name == ARTIFACT_TOOL for each in tools):
        return tuple(tools)
    return (*tools, artifact)


def optional_tools(*, subagents: bool) -> tuple[Tool, ...]:
    """Return the tools that a session has only where they are switched on; they stand behind all others."""
    return (task,) if subagents else ()
