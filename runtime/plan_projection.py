"""Which plans a session submitted and what was said of them: from the events of its log to `PlanExchange`. Pure.

A submission is a call whose body began, so that one that was cut off is there. Its verdict is what `plan/verdict` says,
never what stands in a text. Its bytes are those of the artifact, else what the call was given.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from msgspec.structs import replace

from ..compaction.plans import (
    PlanExchange,
    PlanPlace,
    PlanResult,
    classify_plans,
    operative_plans,
    pair_results,
    strip_reminders,
)
from .calls import CallId
from .events import (
    Logged,
    ModeSet,
    Notice,
    PlanClosed,
    PlanSubmitted,
    PlanVerdictGiven,
    SessionId,
    StepStart,
    ToolCallEvent,
    ToolResult,
    TurnStart,
)
from .modes import DEFAULT_MODE, PLAN_MODE

SUBMITTING_TOOL = "exit_plan_mode"

ReadText: TypeAlias = Callable[[str], str | None]
"""Gives the text of an artifact by its hash; None where it is not there."""


def plan_exchanges(session: SessionId, events: Iterable[Logged], *, read_text: ReadText) -> list[PlanExchange]:
    """Return the submissions of a session, oldest first, with all that came of them by its `events` from seq 0 on."""
    found = _Found(session=session)
    for logged in events:
        found.take(logged)
    submissions = [_with_bytes(call, found.stored.get(CallId(call.call_id)), read_text) for call in found.calls]
    paired = pair_results(submissions, found.results)
    paired = [replace(one, plan_mode_after=found.plan_mode_after(one.results)) for one in paired]
    for seq in found.closings:
        places = _in_force_before(seq, paired)
        paired = [replace(one, closed_seq=seq) if one.place in places else one for one in paired]
    return paired


@dataclass(slots=True, kw_only=True)
class _Found:
    """What the events say of plans. `stored` is the artifact of a call, `modes` each mode with the seq that set it,
    `begins` where a step or a turn began."""

    session: SessionId
    calls: list[PlanExchange] = field(default_factory=list)
    stored: dict[CallId, str] = field(default_factory=dict)
    results: list[PlanResult] = field(default_factory=list)
    closings: list[int] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)
    mode_seqs: list[int] = field(default_factory=list)
    modes: list[str] = field(default_factory=list)
    begins: list[int] = field(default_factory=list)

    def take(self, logged: Logged) -> None:
        seq, event = logged.seq, logged.event
        match event:
            case ToolCallEvent(call=call) if call.name == SUBMITTING_TOOL:
                text = strip_reminders(str(call.arguments.get("plan", "")), self.notices)
                self.calls.append(PlanExchange(session=self.session, seq=seq, call_id=call.id, text=text))
            case PlanSubmitted():
                self.stored[event.call_id] = event.artifact
            case ToolResult(name=name) if name == SUBMITTING_TOOL:
                if not event.synthetic and any(result.call_id == event.call_id for result in self.results):
                    return  # the verdict before it says what it says
                self.results.append(PlanResult(session=self.session, call_id=event.call_id, seq=seq))
            case PlanVerdictGiven():
                self.results.append(
                    PlanResult(
                        session=self.session,
                        call_id=event.call_id,
                        seq=seq,
                        verdict=event.verdict,
                        feedback=event.feedback,
                    )
                )
            case PlanClosed():
                self.closings.append(seq)
            case Notice(text=text):
                self.notices.append(text)
            case ModeSet(mode=mode):
                self.mode_seqs.append(seq)
                self.modes.append(mode)
            case StepStart() | TurnStart():
                self.begins.append(seq)
            case _:
                pass

    def plan_mode_after(self, results: Sequence[PlanResult]) -> bool | None:
        """Whether plan mode is in force when the first request behind the last result is made; None without a result.

        A switch that a person asked for in a later turn says nothing of an answer.
        """
        if not results:
            return None
        later = self.begins[bisect_right(self.begins, max(result.seq for result in results)) :]
        # mode_seqs[:known] are those before it
        known = bisect_right(self.mode_seqs, later[0]) if later else len(self.modes)
        return (self.modes[known - 1] if known else DEFAULT_MODE) == PLAN_MODE


def _with_bytes(call: PlanExchange, artifact: str | None, read_text: ReadText) -> PlanExchange:
    stored = None if artifact is None else read_text(artifact)
    return replace(call, artifact=artifact, text=call.text if stored is None else stored)


def _in_force_before(seq: int, exchanges: Iterable[PlanExchange]) -> set[PlanPlace]:
    """Return the plans that were in force before the event `seq`, by what was known then."""
    then = [
        replace(one, results=tuple(result for result in one.results if result.seq < seq))
        for one in exchanges
        if one.seq < seq
    ]
    operative = operative_plans(classify_plans(then))
    return {plan.exchange.place for plan in (operative.plan, operative.work_order) if plan is not None}
