"""The tools of a plan: submitting one for review, and the ledger of its steps."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from ...compaction.ledger import StepState
from ...kernels.errors import ToolDenied
from .declare import tool
from .spec import Grounded, ToolContext, ToolOutput

if TYPE_CHECKING:
    from ..plan_desk import PlanDesk

LONGEST_REVIEW_S = 7 * 24 * 3600.0
"""A person may sleep over a plan."""


@tool(timeout_s=LONGEST_REVIEW_S, in_turn=True)
def exit_plan_mode(context: ToolContext, plan: str) -> ToolOutput:
    """Submit a plan, in Markdown, for review."""
    return _desk(context).submit(context.call_id, plan)


@tool
def plan_start(context: ToolContext, task: str, steps: list[str], replace: bool = False) -> ToolOutput:
    """Write down the steps of a task."""
    return _desk(context).start(context.call_id, task=task, steps=steps, replace=replace)


@tool
def plan_step(
    context: ToolContext,
    id: Annotated[str, Grounded.STEP],
    state: Literal["todo", "doing", "done", "blocked"],
    note: str = "",
) -> ToolOutput:
    """Mark a step."""
    return _desk(context).mark(context.call_id, id=id, state=StepState(state), note=note)


@tool(safe=False)
def plan_status(context: ToolContext) -> ToolOutput:
    """Show the steps."""
    return _desk(context).status()


def _desk(context: ToolContext) -> PlanDesk:
    if context.desk is None:
        raise ToolDenied("plans belong to a session, and this call is not made in one")
    return context.desk
