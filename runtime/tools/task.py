"""The `task` tool: a part of the work goes to a subagent, whose answer is the result. Off unless switched on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from msgspec import Meta

from ..events import TurnEndReason
from .declare import tool
from .spec import ToolContext, ToolOutput

if TYPE_CHECKING:
    from ..subagent import SubagentReport

LONGEST_S = 3600.0
"""A prefill of minutes for each of its rounds is usual on a small machine; its rounds are what bounds a subagent."""


@tool(timeout_s=LONGEST_S)
def task(context: ToolContext, task: Annotated[str, Meta(min_length=1)]) -> ToolOutput:
    """Have a helper do a task and report. It sees nothing of this conversation: say all that it needs."""
    report = context.subagent(task)
    answered = report.reason is TurnEndReason.COMPLETED and bool(report.text)
    return ToolOutput(content=_told(report), is_error=not answered)


def _told(report: SubagentReport) -> str:
    """Return how it ended and what it produced, the head in one line."""
    rounds = f"{report.rounds} round" + ("" if report.rounds == 1 else "s")
    head = f"[subagent {report.session}: {report.reason}, {rounds}"
    head += f"; {report.detail}]" if report.detail else "]"
    written = f"written: {', '.join(report.files_written)}" if report.files_written else ""
    return "\n".join(line for line in (head, report.text or "It gave no answer.", written) if line)
