"""Subagents: a child session works on a task in a window of its own and reports back.

It begins with its parent's session prefix as it was recorded, the same tokens, by which the engine finds their KV.
Nothing else of the parent is read, and nothing of it is written: parent and child share no lock.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeAlias

import msgspec

from ..kernels.errors import ToolDenied, UsageError
from .cancel import Cancel
from .events import HeaderReason, RequestHeader, SessionId, SessionStart, TurnEndReason
from .projection import Totals
from .stream import PrefillProgressed, StepStarted, StreamEvent, SubagentEvent, TextDelta, TurnEnded

if TYPE_CHECKING:
    from .transcript import Transcript

SUBAGENT_ROUNDS = 12
MOST_ROUNDS = 64

OnSubagent: TypeAlias = Callable[[SubagentEvent], None]


class SubagentReport(msgspec.Struct, frozen=True, kw_only=True):
    """What came of a subagent. `text` is what it said last: its answer where `reason` is COMPLETED.

    `detail` says why it was not completed, or what the answer falls short of. `totals` are the sums of its steps.
    """

    session: SessionId
    text: str
    reason: TurnEndReason
    detail: str
    rounds: int
    totals: Totals
    files_written: tuple[str, ...] = ()


class RunSubagent(Protocol):
    """Runs a subagent to its end; see `Session.subagent`."""

    def __call__(
        self,
        task: str,
        *,
        rounds: int = SUBAGENT_ROUNDS,
        tools: tuple[str, ...] | None = None,
        cancel: Cancel | None = None,
    ) -> SubagentReport: ...


class ChildSession(Protocol):
    """What of a `Session` a subagent needs."""

    @property
    def id(self) -> SessionId: ...

    @property
    def transcript(self) -> Transcript: ...

    def send(self, text: str) -> Iterator[StreamEvent]: ...

    def cancel(self) -> None: ...

    def close(self) -> None: ...


class OpenChild(Protocol):
    """Opens the session of a subagent; `tools` are those of the parent's that it may call, None: all of them."""

    def __call__(
        self, *, rounds: int, tools: tuple[str, ...] | None, on_prefill: Callable[[PrefillProgressed], None] | None
    ) -> ChildSession: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Parent:
    """The session of which a subagent is opened: how it began, and its session prefix as it was recorded."""

    start: SessionStart
    header: RequestHeader

    def header_for_child(self) -> RequestHeader:
        """Return the session prefix as the beginning of another log."""
        return msgspec.structs.replace(self.header, reason=HeaderReason.INITIAL, drifted=(), spans=())


def depth_refusal(start: SessionStart) -> str:
    """Return why a session may start no subagent, empty where it may: the one place where their depth is limited."""
    if start.parent is None:
        return ""
    return "a subagent starts no subagent of its own: do this part yourself with the other tools"


class Subagents:
    """Runs the subagents of one session. Any number may run at once, each on the thread that asked for it."""

    def __init__(self, *, open_child: OpenChild, refusal: str, on_event: OnSubagent | None) -> None:
        """`refusal` says why this session may start none; empty where it may."""
        self.refusal = refusal
        self._open_child = open_child
        self._on_event = on_event
        # Reentrant: a signal handler may cancel on the thread that is just starting one.
        self._guard = threading.RLock()
        self._running: list[Cancel] = []

    def run(
        self,
        task: str,
        *,
        rounds: int = SUBAGENT_ROUNDS,
        tools: tuple[str, ...] | None = None,
        cancel: Cancel | None = None,
    ) -> SubagentReport:
        """See `Session.subagent`."""
        if self.refusal:
            raise ToolDenied(self.refusal)
        if not task.strip():
            raise UsageError("the task is empty; say what the subagent is to do")
        if not 1 <= rounds <= MOST_ROUNDS:
            raise UsageError(f"rounds is {rounds}: a subagent has 1 to {MOST_ROUNDS}")
        on_event = self._on_event

        def tell(event: StreamEvent) -> None:
            if on_event is not None:
                on_event(SubagentEvent(session=child.id, event=event))

        with self._stopped_by(cancel) as stop:
            child = self._open_child(rounds=rounds, tools=tools, on_prefill=None if on_event is None else tell)
            try:
                return _play(child, task, stop=stop, tell=tell)
            finally:
                child.close()

    def cancel(self) -> None:
        """Stop those that run, from any thread."""
        with self._guard:
            running = list(self._running)
        for stop in running:
            stop.set()

    @contextmanager
    def _stopped_by(self, cancel: Cancel | None) -> Iterator[Cancel]:
        """A cancel of its own for one run, set by `cancel` and by this session's."""
        stop = Cancel()
        with self._guard:
            self._running.append(stop)
        try:
            with (cancel or Cancel()).listening(stop.set):
                yield stop
        finally:
            with self._guard:
                self._running.remove(stop)


def _play(child: ChildSession, task: str, *, stop: Cancel, tell: Callable[[StreamEvent], None]) -> SubagentReport:
    """Play the child's one turn to its end."""
    said, saying, ended = "", "", None
    events = child.send(task)
    # Only now: sending forgets a cancel that came before it.
    with stop.listening(child.cancel):
        for event in events:
            tell(event)
            match event:
                case StepStarted():
                    saying = ""
                case TextDelta(text=text):
                    saying += text
                    said = saying.strip() or said
                case TurnEnded():
                    ended = event
    assert ended is not None, "a turn that raises nothing ends with TurnEnded"
    state = child.transcript.state
    return SubagentReport(
        session=child.id,
        text=ended.text.strip() or said,
        reason=ended.reason,
        detail=ended.detail,
        rounds=ended.rounds,
        totals=state.totals,
        files_written=state.files_written,
    )
