"""What a session's state is: a fold over its log, rebuilt from seq 0, in which the last value wins. Pure.

And what a resume must append after a crash, so that no call is left without a result and none is run again blindly.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from functools import reduce
from typing import Any

import msgspec
from msgspec.structs import replace

from ..compaction.artifacts import ArtifactRef
from ..compaction.ledger import Ledger, close_plan, with_mark
from ..compaction.plans import PlanVerdict
from .calls import CallId, LoggedCall
from .events import (
    AssistantMessage,
    Author,
    HeaderReason,
    LedgerSet,
    LedgerStepMarked,
    Logged,
    ModeSet,
    Notice,
    PlanClosed,
    PlanVerdictGiven,
    RequestHeader,
    Seq,
    SessionStart,
    StepEnd,
    StepStart,
    StepUsage,
    ToolCallEvent,
    ToolResult,
    TurnEnd,
    TurnEndReason,
    TurnStart,
    UserMessage,
)
from .modes import DEFAULT_MODE

NOT_STARTED = "not started: the session was interrupted before this call ran, and nothing of it was done"
OUTCOME_UNKNOWN = (
    "outcome unknown, verify before trying again: the session was interrupted while this call ran, and what it did "
    "was not recorded"
)
NOT_MEASURED = "not measured: the session was interrupted within this step"

MODE_PRODUCER = "mode"
"""The producer of notices whose form is the mode that they tell of."""

PREFIX_PRODUCER = "prefix"
"""The producer of notices that tell of what drifted in the session prefix."""

MOST_NAMED_HASHES = 16
_HASH = re.compile(r"\b[0-9a-f]{12,64}\b")

FILE_WRITERS = {"write": "path", "edit": "path"}
"""The tools whose call says which file they write, and the argument that does."""


class UnfinishedCall(msgspec.Struct, frozen=True, kw_only=True):
    """A call without a result. `started`: its intent was logged, so its body may have run."""

    call: LoggedCall
    started: bool
    author: Author


class OpenStep(msgspec.Struct, frozen=True, kw_only=True):
    """A step in progress. `replied` is False as long as its reply is not in the log."""

    request: StepStart
    replied: bool = False


class Totals(msgspec.Struct, frozen=True, kw_only=True):
    """The sums over a session, in tokens and counts. `steps` are those that ended and were measured."""

    turns: int = 0
    steps: int = 0
    user_messages: int = 0
    calls: int = 0
    failed_calls: int = 0
    evaluated: int = 0
    cached: int = 0
    generated: int = 0
    moved: int = 0
    bound: int = 0
    undeclared_breaks: int = 0


class SessionState(msgspec.Struct, frozen=True, kw_only=True):
    """The state of a session after its event `seq` (None: after none).

    `header` is the session prefix in force, `composed_header` what would be composed instead as far as that is known,
    `told_header` the one of those that the model was last told of. `turn` is the turn in progress, `rounds` its steps
    so far, `last_turn` the number of the last one that started. `unfinished` are calls without a result, in call order.
    `files_uncertain` were being written by a call whose outcome is not known. `artifacts` are the hashes of the
    blobs whose stubs are in the log, `named_hashes` the last words in a person's messages that may name others.
    `mode` is in force, `told_mode` is what the model was last told of. `ledger` is what this session did to the plan;
    the file says what it is.
    """

    seq: Seq | None = None
    time: float = 0.0
    start: SessionStart | None = None
    header: RequestHeader | None = None
    composed_header: RequestHeader | None = None
    told_header: RequestHeader | None = None
    turn: TurnStart | None = None
    rounds: int = 0
    last_turn: int = 0
    last_turn_end: TurnEnd | None = None
    step: OpenStep | None = None
    last_request: StepStart | None = None
    unfinished: tuple[UnfinishedCall, ...] = ()
    last_call_number: int = 0
    first_user_text: str = ""
    files_written: tuple[str, ...] = ()
    files_uncertain: tuple[str, ...] = ()
    artifacts: tuple[str, ...] = ()
    named_hashes: tuple[str, ...] = ()
    mode: str = DEFAULT_MODE
    told_mode: str = DEFAULT_MODE
    ledger: Ledger | None = None
    totals: Totals = Totals()

    @property
    def at_rest(self) -> bool:
        """Whether nothing is in progress: the next thing may be a user's message."""
        return self.turn is None and self.step is None and not self.unfinished


class Recovery(msgspec.Struct, frozen=True, kw_only=True):
    """What a resume appends, in this order, to bring a session that was cut off to rest.

    `reply_missing`: the glue that opens a reply is in the window and the reply is not. `results` come without spans:
    who appends them adds the tokens first.
    """

    reply_missing: bool = False
    results: tuple[ToolResult, ...] = ()
    step_end: StepEnd | None = None
    turn_end: TurnEnd | None = None

    @property
    def needed(self) -> bool:
        """Whether there is anything to append."""
        return bool(self.results or self.step_end or self.turn_end)


def project(events: Iterable[Logged]) -> SessionState:
    """Return the state after `events`, which start at seq 0."""
    return reduce(fold, events, SessionState())


def fold(state: SessionState, logged: Logged) -> SessionState:
    """Return the state after one more event."""
    change = _FOLDS.get(type(logged.event))
    changes = {} if change is None else change(state, logged.event)
    return replace(state, seq=logged.seq, time=logged.time, **changes)


def plan_recovery(state: SessionState, rescued: Mapping[CallId, ArtifactRef] | None = None) -> Recovery:
    """Return what is missing for `state` to be at rest; of one that is, nothing. Applied, it is at rest.

    `rescued` is what calls had put out before they were cut off.
    """
    results = tuple(_result_of_cut_off(one, (rescued or {}).get(one.call.id)) for one in state.unfinished)
    step_end = turn_end = None
    if state.step is not None:
        request = state.step.request
        usage = StepUsage(
            window=request.window_tokens, cached=0, evaluated=0, generated=0, bound=0, reason=NOT_MEASURED
        )
        step_end = StepEnd(turn=request.turn, step=request.step, usage=usage)
    if state.turn is not None:
        turn_end = TurnEnd(turn=state.turn.turn, reason=TurnEndReason.INTERRUPTED, rounds=state.rounds)
    return Recovery(
        reply_missing=state.step is not None and not state.step.replied,
        results=results,
        step_end=step_end,
        turn_end=turn_end,
    )


def _result_of_cut_off(one: UnfinishedCall, output: ArtifactRef | None) -> ToolResult:
    content = OUTCOME_UNKNOWN if one.started else NOT_STARTED
    if output is not None:
        content += f". Its output until then, {output.size_bytes:,} bytes: artifact {output.short_id}"
    return ToolResult(
        call_id=one.call.id,
        name=one.call.name,
        content=content,
        is_error=True,
        artifact=None if output is None else output.sha256,
        size_bytes=0 if output is None else output.size_bytes,
        synthetic=True,
    )


_Changes = dict[str, Any]


def _on_session_start(_state: SessionState, event: SessionStart) -> _Changes:
    return {"start": event}


def _on_header(state: SessionState, event: RequestHeader) -> _Changes:
    # With RESUME it says what drifted; the recorded prefix stays in force.
    if event.reason is HeaderReason.RESUME and state.header is not None:
        return {"composed_header": event}
    return {"header": event, "composed_header": None, "told_header": None}


def _on_turn_start(state: SessionState, event: TurnStart) -> _Changes:
    totals = replace(state.totals, turns=state.totals.turns + 1)
    return {"turn": event, "rounds": 0, "last_turn": event.turn, "totals": totals}


def _on_turn_end(_state: SessionState, event: TurnEnd) -> _Changes:
    return {"turn": None, "step": None, "last_turn_end": event}


def _on_step_start(state: SessionState, event: StepStart) -> _Changes:
    return {"step": OpenStep(request=event), "last_request": event, "rounds": state.rounds + 1}


def _on_step_end(state: SessionState, event: StepEnd) -> _Changes:
    usage = event.usage
    if usage.reason == NOT_MEASURED:
        return {"step": None}
    before = state.totals
    totals = replace(
        before,
        steps=before.steps + 1,
        evaluated=before.evaluated + usage.evaluated,
        cached=before.cached + usage.cached,
        generated=before.generated + usage.generated,
        moved=before.moved + usage.moved,
        bound=before.bound + usage.bound,
        undeclared_breaks=before.undeclared_breaks + (usage.undeclared_break is not None),
    )
    return {"step": None, "totals": totals}


def _on_user_message(state: SessionState, event: UserMessage) -> _Changes:
    first = event.text if state.totals.user_messages == 0 else state.first_user_text
    named = dict.fromkeys((*state.named_hashes, *_HASH.findall(event.text)))
    return {
        "first_user_text": first,
        "artifacts": _with_artifact(state, event.artifact),
        "named_hashes": tuple(named)[-MOST_NAMED_HASHES:],
        "totals": replace(state.totals, user_messages=state.totals.user_messages + 1),
    }


def _on_notice(state: SessionState, event: Notice) -> _Changes:
    changes: _Changes = {"artifacts": _with_artifact(state, event.artifact)}
    if event.producer == MODE_PRODUCER:
        changes["told_mode"] = event.form
    if event.producer == PREFIX_PRODUCER:
        changes["told_header"] = state.composed_header
    return changes


def _on_mode_set(_state: SessionState, event: ModeSet) -> _Changes:
    return {"mode": event.mode}


def _on_verdict(_state: SessionState, event: PlanVerdictGiven) -> _Changes:
    # The result of an approved call tells the model that plan mode is over.
    return {"told_mode": DEFAULT_MODE} if event.verdict is PlanVerdict.APPROVED else {}


def _on_ledger_set(_state: SessionState, event: LedgerSet) -> _Changes:
    return {"ledger": event.ledger}


def _on_ledger_step(state: SessionState, event: LedgerStepMarked) -> _Changes:
    if state.ledger is None or state.ledger.closed:
        return {}  # of a plan that only the file has, in a log of before such a plan was recorded with its first mark
    return {"ledger": with_mark(state.ledger, id=event.id, state=event.state, note=event.note)}


def _on_plan_closed(state: SessionState, _event: PlanClosed) -> _Changes:
    return {"ledger": None if state.ledger is None else close_plan(state.ledger)}


def _with_artifact(state: SessionState, artifact: str | None) -> tuple[str, ...]:
    if artifact is None or artifact in state.artifacts:
        return state.artifacts
    return (*state.artifacts, artifact)


def _on_assistant_message(state: SessionState, event: AssistantMessage) -> _Changes:
    unfinished = state.unfinished
    if state.step is not None and state.step.request.continues:
        # A reply that went on after a cut repeats what was parsed of it: its calls replace those of the cut one.
        unfinished = tuple(one for one in unfinished if one.started or one.author is not event.author)
    known = {one.call.id for one in unfinished}
    new = tuple(
        UnfinishedCall(call=call, started=False, author=event.author) for call in event.calls if call.id not in known
    )
    changes: _Changes = {
        "unfinished": unfinished + new,
        "last_call_number": _highest(state, *(call.id for call in event.calls)),
    }
    if state.step is not None and event.author is Author.MODEL:
        changes["step"] = OpenStep(request=state.step.request, replied=True)
    return changes


def _on_tool_call(state: SessionState, event: ToolCallEvent) -> _Changes:
    unfinished = list(state.unfinished)
    started = UnfinishedCall(call=event.call, started=True, author=event.author)
    for index, one in enumerate(unfinished):
        if one.call.id == event.call.id:
            unfinished[index] = started
            break
    else:
        unfinished.append(started)
    return {"unfinished": tuple(unfinished), "last_call_number": _highest(state, event.call.id)}


def _on_tool_result(state: SessionState, event: ToolResult) -> _Changes:
    asked = next((one for one in state.unfinished if one.call.id == event.call_id), None)
    changes: _Changes = {
        "unfinished": tuple(one for one in state.unfinished if one is not asked),
        # A call that could not be read has an id in its result alone.
        "last_call_number": _highest(state, event.call_id),
        "totals": replace(
            state.totals,
            calls=state.totals.calls + 1,
            failed_calls=state.totals.failed_calls + event.is_error,
        ),
    }
    changes["artifacts"] = _with_artifact(state, event.artifact)
    path = _written_path(asked)
    if path is not None and not event.is_error and path not in state.files_written:
        changes["files_written"] = (*state.files_written, path)
    if path is not None and event.is_error and event.synthetic and path not in state.files_uncertain:
        changes["files_uncertain"] = (*state.files_uncertain, path)
    return changes


def _written_path(asked: UnfinishedCall | None) -> str | None:
    """Return the file that a call was to write, if its body may have run."""
    if asked is None or not asked.started:
        return None
    path = asked.call.arguments.get(FILE_WRITERS.get(asked.call.name, ""))
    return path if isinstance(path, str) else None


def _highest(state: SessionState, *ids: CallId) -> int:
    digits = (call_id.removeprefix("call") for call_id in ids)
    return max((state.last_call_number, *(int(number) for number in digits if number.isdecimal())))


_FOLDS: dict[type, Callable[[SessionState, Any], _Changes]] = {
    SessionStart: _on_session_start,
    RequestHeader: _on_header,
    TurnStart: _on_turn_start,
    TurnEnd: _on_turn_end,
    StepStart: _on_step_start,
    StepEnd: _on_step_end,
    UserMessage: _on_user_message,
    Notice: _on_notice,
    ModeSet: _on_mode_set,
    PlanVerdictGiven: _on_verdict,
    LedgerSet: _on_ledger_set,
    LedgerStepMarked: _on_ledger_step,
    PlanClosed: _on_plan_closed,
    AssistantMessage: _on_assistant_message,
    ToolCallEvent: _on_tool_call,
    ToolResult: _on_tool_result,
}
