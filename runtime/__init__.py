"""chapbook's embedding API, by name: `from chapbook.runtime import LlamaEngine, Session, TextDelta`.

A name is imported when it is first used, so that `import chapbook.runtime` costs next to nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..kernels.errors import ChapbookError as ChapbookError
    from .calls import ChoiceKind as ChoiceKind
    from .calls import ToolChoice as ToolChoice
    from .engine import Sampling as Sampling
    from .events import TurnEndReason as TurnEndReason
    from .hooks import Allow as Allow
    from .hooks import Deny as Deny
    from .hooks import Hooks as Hooks
    from .llama import LlamaEngine as LlamaEngine
    from .modes import Mode as Mode
    from .modes import ModeName as ModeName
    from .plan_review import ReviewAnswer as ReviewAnswer
    from .plan_review import ReviewDecision as ReviewDecision
    from .plan_review import SubmittedPlan as SubmittedPlan
    from .prefix_cache.options import CacheOptions as CacheOptions
    from .session import Session as Session
    from .session_settings import SessionHost as SessionHost
    from .session_settings import SessionSettings as SessionSettings
    from .stream import NoticeGiven as NoticeGiven
    from .stream import PrefillProgressed as PrefillProgressed
    from .stream import ReasoningDelta as ReasoningDelta
    from .stream import StepEnded as StepEnded
    from .stream import StepStarted as StepStarted
    from .stream import StreamEvent as StreamEvent
    from .stream import SubagentEvent as SubagentEvent
    from .stream import TextDelta as TextDelta
    from .stream import ToolFinished as ToolFinished
    from .stream import ToolStarted as ToolStarted
    from .stream import TurnEnded as TurnEnded
    from .stream import TurnStarted as TurnStarted
    from .subagent import SubagentReport as SubagentReport
    from .tools.builtin import builtin_tools as builtin_tools
    from .tools.declare import tool as tool
    from .tools.spec import Grounded as Grounded
    from .tools.spec import Policy as Policy
    from .tools.spec import ToolContext as ToolContext
    from .tools.spec import ToolOutput as ToolOutput

_HOMES = {
    "..kernels.errors": ("ChapbookError",),
    ".calls": ("ChoiceKind", "ToolChoice"),
    ".engine": ("Sampling",),
    ".events": ("TurnEndReason",),
    ".hooks": ("Allow", "Deny", "Hooks"),
    ".llama": ("LlamaEngine",),
    ".modes": ("Mode", "ModeName"),
    ".plan_review": ("ReviewAnswer", "ReviewDecision", "SubmittedPlan"),
    ".prefix_cache.options": ("CacheOptions",),
    ".session": ("Session",),
    ".session_settings": ("SessionHost", "SessionSettings"),
    ".stream": (
        "NoticeGiven",
        "PrefillProgressed",
        "ReasoningDelta",
        "StepEnded",
        "StepStarted",
        "StreamEvent",
        "SubagentEvent",
        "TextDelta",
        "ToolFinished",
        "ToolStarted",
        "TurnEnded",
        "TurnStarted",
    ),
    ".subagent": ("SubagentReport",),
    ".tools.builtin": ("builtin_tools",),
    ".tools.declare": ("tool",),
    ".tools.spec": ("Grounded", "Policy", "ToolContext", "ToolOutput"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = sorted(_HOME_OF)  # noqa: PLE0605  # one table holds the names


def __dir__() -> list[str]:
    return __all__


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOME_OF[name], __name__), name)
