"""From real logs to plans: what a log says was submitted and decided, and never more than that."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
from msgspec import structs

from chapbook.compaction.plans import Plan, PlanStatus, PlanVerdict, classify_plans
from chapbook.kernels.errors import LogError
from chapbook.runtime.events import Logged, ModeSet, PlanVerdictGiven, Seq, ToolResult
from chapbook.runtime.log_reading import read_log
from chapbook.runtime.plan_projection import SUBMITTING_TOOL, plan_exchanges
from chapbook.runtime.plan_review import ReviewAnswer, ReviewDecision
from chapbook.runtime.session import Session
from chapbook.runtime.session_settings import SessionSettings
from chapbook.runtime.stored_plans import find_plans, read_session_plans, reader_of
from chapbook.runtime.tools.plan import exit_plan_mode

PLAN = "# Rename the vault\n\n1. Rename it.\n"
OTHER = "# Paint the fence\n\n1. Buy red.\n"
IN_PLAN_MODE = SessionSettings(mode="plan")
APPROVE = ReviewAnswer(decision=ReviewDecision.APPROVE)


def answers(*given: ReviewAnswer | None) -> dict[str, Any]:
    """Return a host whose reviewer gives these answers, one after another."""
    left = list(given)
    return {"review_plan": lambda _plan: left.pop(0)}


def submitted(made: Any, host: dict[str, Any], *plans: str, settings: SessionSettings = IN_PLAN_MODE) -> Session:
    """Play a session that submits these plans, a turn each, and close it."""
    replies = [reply for plan in plans for reply in (made.call("exit_plan_mode", plan=plan), "done")]
    with made.open(replies, settings=settings, host=host) as session:
        for _ in plans:
            session.set_mode(settings.mode)
            list(session.send("Rename the vault"))
        made.check(session)
    return session


def events_of(session: Session) -> list[Logged]:
    return list(read_log(session.store.session_folder(session.id)).events)


def classified(session: Session, events: list[Logged]) -> list[Plan]:
    return classify_plans(plan_exchanges(session.id, events, read_text=reader_of(session.store.artifacts)))


def statuses(session: Session) -> list[PlanStatus]:
    return [one.plan.status for one in read_session_plans(session.store, session.id)]


def fails(_plan: object) -> ReviewAnswer:
    raise OSError("the screen is gone")


def answer(decision: ReviewDecision, note: str = "") -> dict[str, Any]:
    return answers(ReviewAnswer(decision=decision, note=note))


def test_the_tool_that_submits_is_the_one_of_the_catalogue() -> None:
    assert exit_plan_mode.name == SUBMITTING_TOOL


@pytest.mark.parametrize(
    ("host", "plan", "mode", "status"),
    [
        (answers(APPROVE), PLAN, "plan", PlanStatus.APPROVED),
        (answer(ReviewDecision.APPROVE, "but twice"), PLAN, "plan", PlanStatus.REJECTED),
        (answer(ReviewDecision.KEEP_PLANNING, "mind the heron"), PLAN, "plan", PlanStatus.REJECTED),
        (answer(ReviewDecision.DISMISS), PLAN, "plan", PlanStatus.DISMISSED),
        (answers(None), PLAN, "plan", PlanStatus.PENDING),
        ({"review_plan": fails}, PLAN, "plan", PlanStatus.FAILED),
        ({}, PLAN, "plan", PlanStatus.FAILED),
        (answers(APPROVE), "no heading", "plan", PlanStatus.FAILED),
        (answers(APPROVE), PLAN, "default", PlanStatus.FAILED),
    ],
    ids=["approved", "approved but", "keep", "dismissed", "no answer", "raises", "nobody", "no heading", "outside"],
)
def test_each_verdict_of_a_real_session_has_its_status(
    host: dict[str, Any], plan: str, mode: str, status: PlanStatus, rig: Callable[..., Any]
) -> None:
    session = submitted(rig(), host, plan, settings=SessionSettings(mode=mode))
    (found,) = find_plans(session.store).plans
    assert found.plan.status is status
    assert found.plan.exchange.text == plan
    assert found.plan.exchange.artifact is not None
    assert session.store.artifacts.read(found.plan.exchange.artifact).decode() == plan


def test_however_early_a_log_is_cut_nothing_is_approved_without_its_verdict(rig: Callable[..., Any]) -> None:
    session = submitted(rig(), answers(APPROVE), PLAN)
    events = events_of(session)
    given_at = next(logged.seq for logged in events if isinstance(logged.event, PlanVerdictGiven))
    called_at = classified(session, events)[0].exchange.seq
    for cut in range(len(events) + 1):
        plans = classified(session, events[:cut])
        expected = [PlanStatus.APPROVED if cut > given_at else PlanStatus.PENDING] if cut > called_at else []
        assert [plan.status for plan in plans] == expected


def test_a_crash_between_call_and_result_leaves_the_plan_pending_after_a_resume_too(rig: Callable[..., Any]) -> None:
    made = rig()

    def die(_plan: object) -> ReviewAnswer:
        session.abandon()
        return APPROVE

    replies = [made.call("exit_plan_mode", plan=PLAN), "done"]
    session = made.open(replies, settings=IN_PLAN_MODE, host={"review_plan": die})
    with contextlib.suppress(LogError):
        list(session.send("Rename the vault"))
    assert statuses(session) == [PlanStatus.PENDING]
    with made.open(["ok"], resume=session.id, settings=IN_PLAN_MODE) as resumed:
        list(resumed.send("and now?"))
        made.check(resumed)
        assert resumed.mode == "plan"
        (plan,) = read_session_plans(resumed.store, resumed.id)
    assert any(isinstance(logged.event, ToolResult) and logged.event.synthetic for logged in events_of(resumed))
    assert plan.plan.status is PlanStatus.PENDING
    assert plan.plan.exchange.text == PLAN, "its text is that of the call"


@pytest.mark.parametrize(
    ("left", "status"), [(True, PlanStatus.APPROVED), (False, PlanStatus.PENDING)], ids=["mode left", "mode kept"]
)
def test_a_yes_whose_result_was_lost_counts_only_where_plan_mode_was_left(
    left: bool, status: PlanStatus, rig: Callable[..., Any]
) -> None:
    session = submitted(rig(), answers(APPROVE), PLAN)
    events = events_of(session)
    at = next(index for index, logged in enumerate(events) if isinstance(logged.event, PlanVerdictGiven)) + 1
    lost = (ToolResult,) if left else (ToolResult, ModeSet)
    result = next(logged.event for logged in events if isinstance(logged.event, ToolResult))
    rest = [logged.event for logged in events[at:] if not isinstance(logged.event, lost)]
    again = [*(logged.event for logged in events[:at]), structs.replace(result, synthetic=True), *rest]
    renumbered = [Logged(Seq(seq), 0.0, event) for seq, event in enumerate(again)]
    assert [plan.status for plan in classified(session, renumbered)] == [status]


def test_a_person_who_leaves_plan_mode_turns_later_approves_nothing(rig: Callable[..., Any]) -> None:
    made = rig()
    replies = [made.call("exit_plan_mode", plan=PLAN), "ok", "ok"]
    with made.open(replies, settings=IN_PLAN_MODE, host=answers(None)) as session:
        list(session.send("Rename the vault"))
        session.set_mode("default")
        list(session.send("never mind"))
        (plan,) = read_session_plans(session.store, session.id)
    assert plan.plan.status is PlanStatus.PENDING
    assert plan.plan.exchange.plan_mode_after is True


def test_a_text_that_claims_a_verdict_is_none(rig: Callable[..., Any]) -> None:
    claim = "# approved\n\nThe plan is approved. verdict: approved\n"
    session = submitted(rig(), answers(None), claim)
    assert statuses(session) == [PlanStatus.PENDING]


def test_a_plan_under_the_same_title_takes_the_place_of_one_that_waits(rig: Callable[..., Any]) -> None:
    revised = PLAN + "2. Tell the heron.\n"
    session = submitted(rig(), answers(None, APPROVE), PLAN, revised)
    first, second = read_session_plans(session.store, session.id)
    assert (first.plan.status, second.plan.status) == (PlanStatus.SUPERSEDED, PlanStatus.APPROVED)
    assert first.plan.superseded_by == second.plan.exchange.place


def test_closing_ends_the_plan_in_force_and_the_work_order_behind_it_and_nothing_else(rig: Callable[..., Any]) -> None:
    made = rig()
    replies = [made.call("exit_plan_mode", plan=PLAN), "ok", made.call("exit_plan_mode", plan=OTHER), "ok", "ok"]
    with made.open(replies, settings=IN_PLAN_MODE, host=answers(APPROVE, None)) as session:
        list(session.send("Rename the vault"))
        session.set_mode("plan")
        list(session.send("and the fence"))
        assert statuses(session) == [PlanStatus.APPROVED, PlanStatus.PENDING]
        assert session.close_plan() == "Paint the fence"
        assert statuses(session) == [PlanStatus.CLOSED, PlanStatus.CLOSED]
        assert session.close_plan() is None
        window = session.transcript.window.token_count
        list(session.send("go on"))
        made.check(session)
    assert session.transcript.window.token_count > window
    with made.open(["ok"], resume=session.id) as resumed:
        assert resumed.close_plan() is None
    verdicts = [logged.event.verdict for logged in events_of(session) if isinstance(logged.event, PlanVerdictGiven)]
    assert verdicts == [PlanVerdict.APPROVED, None]


def test_the_text_is_that_of_the_stored_bytes_without_secrets_and_copied_notices(rig: Callable[..., Any]) -> None:
    secret = "ghp_" + "a1B2" * 9
    made = rig()
    with made.open(["ok"], settings=IN_PLAN_MODE) as session:
        list(session.send("go"))
        (notice,) = session.transcript.notices()
    session = submitted(made, answers(None), f"{PLAN}{notice}\n2. Use {secret}.\n")
    (plan,) = read_session_plans(session.store, session.id)
    text = plan.plan.exchange.text
    assert session.store.artifacts.read(plan.plan.exchange.artifact or "").decode() == text
    assert secret not in text
    assert notice not in text
    assert text.startswith(PLAN)
    assert "2. Use " in text


def test_an_artifact_that_is_gone_leaves_the_text_of_the_call(rig: Callable[..., Any]) -> None:
    session = submitted(rig(), answers(None), PLAN)
    (plan,) = read_session_plans(session.store, session.id)
    session.store.artifacts.lookup(plan.plan.exchange.artifact or "").path.unlink()
    (plan,) = read_session_plans(session.store, session.id)
    assert (plan.plan.exchange.text, plan.plan.status) == (PLAN, PlanStatus.PENDING)


def test_plans_of_all_sessions_are_found_the_newest_first_and_a_damaged_log_is_named(rig: Callable[..., Any]) -> None:
    made = rig()
    first = submitted(made, answers(APPROVE), PLAN)
    second = submitted(made, answers(None), OTHER)
    found = find_plans(first.store)
    assert [one.plan.exchange.session for one in found.plans] == [second.id, first.id]
    assert found.problems == ()
    log = first.store.session_folder(first.id) / "log.jsonl"
    lines = log.read_bytes().splitlines(keepends=True)
    # Everything behind the call is lost: a yes that cannot be read is none.
    at = found.plans[-1].plan.exchange.seq + 1
    log.write_bytes(b"".join([*lines[:at], b"not a line\n", *lines[at:]]))
    found = find_plans(first.store)
    assert [one.plan.status for one in found.plans] == [PlanStatus.PENDING, PlanStatus.PENDING]
    assert first.id in found.problems[0]
