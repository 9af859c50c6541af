"""Playing one turn of a session, and keeping what it cost."""

from __future__ import annotations

import time

import msgspec

from ..kernels.errors import UsageError
from ..runtime.calls import ToolChoice
from ..runtime.engine import MemoryKind
from ..runtime.events import StepUsage, TurnEndReason
from ..runtime.session import Session
from ..runtime.stream import NoticeGiven, StepEnded, ToolFinished, TurnEnded
from .paired import Target


class PlayedTurn(msgspec.Struct, frozen=True, kw_only=True):
    """The steps of a turn, its seconds and those of them that tools took, and what a person was told of the cache."""

    usages: tuple[StepUsage, ...]
    seconds: float
    tools_s: float
    cache_notes: tuple[str, ...]


def reuse_target(memory: MemoryKind) -> Target:
    """Return what evaluated ÷ bound may be on this kind of memory."""
    return Target("<=", 1.0 if memory.rewinds else 1.02)


def play_turn(session: Session, message: str, *, choice: ToolChoice | None = None) -> PlayedTurn:
    """Send a message and read all that comes. Raises UsageError for a turn that is not completed."""
    usages: list[StepUsage] = []
    notes: list[str] = []
    tools_s = 0.0
    started_s = time.perf_counter()
    for event in session.send(message, choice=choice):
        match event:
            case StepEnded(usage=usage):
                usages.append(usage)
            case ToolFinished(seconds=seconds):
                tools_s += seconds
            case NoticeGiven(producer="cache", text=text):
                notes.append(text)
            case TurnEnded(reason=reason, detail=detail) if reason is not TurnEndReason.COMPLETED:
                raise UsageError(f"the benchmark's session did not come to its end ({reason}): {detail}")
    seconds = time.perf_counter() - started_s
    return PlayedTurn(usages=tuple(usages), seconds=seconds, tools_s=tools_s, cache_notes=tuple(notes))
