"""The state of a session as a fold over its log, and what a resume appends after a crash."""

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from chapbook.compaction.ledger import Ledger, LedgerStep, StepState, close_plan
from chapbook.runtime.calls import CallId, LoggedCall
from chapbook.runtime.chat_format import AppendKind, ChatFormat
from chapbook.runtime.events import (
    AssistantMessage,
    Author,
    BreakReport,
    HeaderReason,
    IgnoredEvent,
    LedgerSet,
    LedgerStepMarked,
    Logged,
    PlanClosed,
    RequestHeader,
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
from chapbook.runtime.projection import (
    NOT_STARTED,
    OUTCOME_UNKNOWN,
    SessionState,
    Totals,
    fold,
    plan_recovery,
    project,
)

CHAT_FORMAT = ChatFormat(
    template_hash="t",
    origin="chatml",
    glues={},
    forms={},
    tools_native=False,
    system_native=True,
    append_kind=AppendKind.APPEND_ONLY,
)


def call(number, name="read", **arguments):
    return LoggedCall(id=CallId(f"call{number:05d}"), name=name, arguments=arguments)


def result(of, **fields):
    return ToolResult(call_id=of.id, name=of.name, content="done", **fields)


def usage(**fields):
    return StepUsage(**{"window": 10, "cached": 6, "evaluated": 4, "generated": 2, "bound": 4, **fields})


def header(reason, dialect):
    return RequestHeader(reason=reason, dialect=dialect, chat_format=CHAT_FORMAT, sections=(), tools=())


def logged(events, *, first=0):
    return [Logged(seq, float(seq), event) for seq, event in enumerate(events, start=first)]


def state_of(*events):
    return project(logged(events))


READ, WRITE, EDIT = call(1, path="a.py"), call(2, "write", path="b.py"), call(3, "edit", path="c.py")

A_TURN = (
    TurnStart(turn=1),
    UserMessage(text="a task\nin two lines"),
    StepStart(turn=1, step=1, window_tokens=100),
    AssistantMessage(text="I read", calls=(READ, WRITE)),
    ToolCallEvent(call=READ),
    result(READ),
    ToolCallEvent(call=WRITE),
    result(WRITE),
    StepEnd(turn=1, step=1, usage=usage()),
    StepStart(turn=1, step=2, window_tokens=150),
    AssistantMessage(text="Done"),
    StepEnd(turn=1, step=2, usage=usage(undeclared_break=BreakReport(section="prefix", token=3))),
    TurnEnd(turn=1, reason=TurnEndReason.COMPLETED, rounds=2),
)


def test_a_session_is_at_rest_before_and_after_a_turn_and_at_no_moment_within():
    assert SessionState().at_rest
    rests = [project(logged(A_TURN[:length])).at_rest for length in range(1, len(A_TURN) + 1)]
    assert rests == [False] * (len(A_TURN) - 1) + [True]


def test_a_whole_turn_leaves_its_sums_and_what_was_last():
    state = state_of(*A_TURN)
    assert state.totals == Totals(
        turns=1, steps=2, user_messages=1, calls=2, evaluated=8, cached=12, generated=4, bound=8, undeclared_breaks=1
    )
    assert (state.seq, state.time, state.last_turn, state.last_call_number) == (12, 12.0, 1, 2)
    assert state.last_request.window_tokens == 150
    assert state.last_turn_end.reason is TurnEndReason.COMPLETED
    assert state.first_user_text == "a task\nin two lines"
    assert state.files_written == ("b.py",)


def test_the_header_in_force_is_the_last_one_that_is_no_resume():
    initial, resume = header(HeaderReason.INITIAL, "hermes"), header(HeaderReason.RESUME, "llama3")
    change = header(HeaderReason.CHANGE, "mistral")
    assert state_of(initial, resume).header == initial
    assert state_of(initial, resume, change, resume).header == change


def test_calls_without_a_result_are_told_apart_by_whether_they_started():
    state = state_of(*A_TURN[:3], AssistantMessage(text="", calls=(READ, WRITE, EDIT)), ToolCallEvent(call=WRITE))
    assert [(one.call, one.started) for one in state.unfinished] == [(READ, False), (WRITE, True), (EDIT, False)]


def test_a_call_of_the_runtime_needs_no_message_before_it():
    state = state_of(TurnStart(turn=1), ToolCallEvent(call=READ, author=Author.RUNTIME))
    assert [(one.call, one.started, one.author) for one in state.unfinished] == [(READ, True, Author.RUNTIME)]
    assert state.last_call_number == 1


def test_a_reply_that_goes_on_after_a_cut_replaces_the_calls_of_the_cut_one():
    state = state_of(
        TurnStart(turn=1),
        StepStart(turn=1, step=1, window_tokens=1),
        AssistantMessage(text="", calls=(READ,), finish="length"),
        StepStart(turn=1, step=1, window_tokens=2, continues=True),
        AssistantMessage(text="", calls=(WRITE, EDIT)),
    )
    assert [one.call for one in state.unfinished] == [WRITE, EDIT]


def test_only_a_call_that_succeeded_wrote_its_file():
    state = state_of(
        TurnStart(turn=1),
        AssistantMessage(text="", calls=(WRITE, EDIT)),
        ToolCallEvent(call=WRITE),
        result(WRITE, is_error=True),
        result(EDIT, is_error=True, synthetic=True),
    )
    assert (state.files_written, state.files_uncertain) == ((), ())
    assert state.totals.failed_calls == 2


def test_a_file_whose_writing_was_cut_off_is_uncertain():
    before = state_of(TurnStart(turn=1), AssistantMessage(text="", calls=(WRITE,)), ToolCallEvent(call=WRITE))
    after = fold(before, Logged(3, 3.0, plan_recovery(before).results[0]))
    assert (after.files_written, after.files_uncertain) == ((), ("b.py",))


def test_an_event_that_was_passed_over_counts_and_changes_nothing_else():
    event = IgnoredEvent(event_type="later", data=msgspec.Raw(b"{}"))
    before = state_of(*A_TURN)
    after = fold(before, Logged(13, 99.0, event))
    assert after == msgspec.structs.replace(before, seq=13, time=99.0)


def test_recovery_gives_every_unfinished_call_a_result_and_ends_step_and_turn():
    recovery = plan_recovery(
        state_of(*A_TURN[:3], AssistantMessage(text="", calls=(READ, WRITE)), ToolCallEvent(call=READ))
    )
    assert [(r.call_id, r.content, r.is_error, r.synthetic) for r in recovery.results] == [
        (READ.id, OUTCOME_UNKNOWN, True, True),
        (WRITE.id, NOT_STARTED, True, True),
    ]
    assert "verify before trying again" in OUTCOME_UNKNOWN
    assert (recovery.step_end.turn, recovery.step_end.step, recovery.step_end.usage.window) == (1, 1, 100)
    assert recovery.turn_end == TurnEnd(turn=1, reason=TurnEndReason.INTERRUPTED, rounds=1)
    assert not recovery.reply_missing


def test_recovery_says_that_a_reply_was_opened_and_never_came():
    recovery = plan_recovery(state_of(*A_TURN[:3]))
    assert recovery.reply_missing
    assert recovery.results == ()


def test_a_session_at_rest_needs_no_recovery():
    assert not plan_recovery(SessionState()).needed
    assert not plan_recovery(state_of(*A_TURN)).needed


@given(cut=st.integers(0, len(A_TURN)))
def test_recovery_brings_a_session_cut_off_anywhere_to_rest(cut):
    before = project(logged(A_TURN[:cut]))
    recovery = plan_recovery(before)
    appended = [*recovery.results, recovery.step_end, recovery.turn_end]
    events = [event for event in appended if event is not None]
    after = before
    for one in logged(events, first=cut):
        after = fold(after, one)
    assert after.at_rest
    assert not plan_recovery(after).needed
    assert after.totals.steps == before.totals.steps
    assert after == project([*logged(A_TURN[:cut]), *logged(events, first=cut)])


def test_a_mark_in_an_older_log_of_a_plan_that_only_the_file_has_changes_nothing_and_refuses_nothing():
    steps = (LedgerStep(id="s1", text="one"),)
    ledger = Ledger(task="t", key=None, session="one", steps=steps)
    stray = LedgerStepMarked(id="s1", state=StepState.DONE, note="a1" * 30)
    closed = state_of(*A_TURN, LedgerSet(ledger=ledger), PlanClosed(task="t"), stray).ledger
    assert closed == close_plan(ledger)
    elsewhere = LedgerStepMarked(id="s9", state=StepState.TODO, note="")
    assert state_of(*A_TURN, LedgerSet(ledger=ledger), elsewhere).ledger == ledger
    assert state_of(*A_TURN, stray).ledger is None
