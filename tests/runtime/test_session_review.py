"""Reviewers are foreign code: whatever one returns or raises, the session says what was decided and goes on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from chapbook.compaction.plans import PlanStatus, PlanVerdict
from chapbook.runtime import Policy, ReviewAnswer, ReviewDecision, SessionSettings, SubmittedPlan
from chapbook.runtime.events import PlanSubmitted, PlanVerdictGiven, ToolResult
from chapbook.runtime.log_reading import read_log, scan_log
from chapbook.runtime.session import Session
from chapbook.runtime.stored_plans import read_session_plans

PLAN = "# Rename the vault\n\n1. Rename it.\n"
OTHER = "# Sell the vault\n\n1. Sell it.\n"
APPROVE = ReviewAnswer(decision=ReviewDecision.APPROVE)
PLANNING = SessionSettings(policies={"write": Policy.ALLOW}, mode="plan")


def events_of(session: Session, kind: type) -> list[Any]:
    events = [logged.event for logged in read_log(session.store.session_folder(session.id)).events]
    return [event for event in events if isinstance(event, kind)]


def statuses_of(session: Session) -> list[PlanStatus]:
    return [stored.plan.status for stored in read_session_plans(session.store, session.id)]


def raising(error: BaseException) -> Callable[[SubmittedPlan], ReviewAnswer]:
    def review(_plan: SubmittedPlan) -> ReviewAnswer:
        raise error

    return review


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


def answering(*fields: Any) -> Callable[[SubmittedPlan], Any]:
    return lambda _plan: ReviewAnswer(decision=fields[0], note=fields[1])


@pytest.mark.parametrize(
    ("review", "says"),
    [
        (lambda _: True, "TypeError"),
        (lambda _: "approve", "TypeError"),
        (answering(ReviewDecision.APPROVE, None), "TypeError"),
        (answering("perhaps", ""), "'perhaps' is not a valid"),
        (raising(SystemExit(3)), "SystemExit: 3"),
        (raising(asyncio.CancelledError()), "CancelledError"),
        (raising(Unspeakable()), "Unspeakable"),
        (raising(OSError("no file \udcff")), "no file �"),
    ],
    ids=["true", "text", "note", "decision", "exit", "cancelled", "unspeakable", "no utf-8"],
)
def test_a_reviewer_that_fails_in_any_way_has_decided_nothing_and_the_turn_goes_on(
    review: Any, says: str, rig: Callable[..., Any]
) -> None:
    made = rig()
    replies = [made.call("exit_plan_mode", plan=PLAN), made.call("write", path="a.txt", content="x"), "done"]
    with made.open(replies, settings=PLANNING, host={"review_plan": review}) as session:
        events = list(session.send("go"))
        made.check(session)
        result, written = events_of(session, ToolResult)
        (verdict,) = events_of(session, PlanVerdictGiven)
        assert statuses_of(session) == [PlanStatus.FAILED]
        assert session.mode == "plan"
    assert "Nothing is approved" in result.content
    assert says in verdict.feedback
    assert (verdict.verdict, written.is_error) == (PlanVerdict.FAILED, True)
    assert events[-1].reason == "completed"


def test_feedback_that_is_no_utf8_reaches_the_model_and_the_log(rig: Callable[..., Any]) -> None:
    made = rig()
    review = answering(ReviewDecision.KEEP_PLANNING, "Mind the \udce4 heron")
    with made.open(
        [made.call("exit_plan_mode", plan=PLAN), "ok"], settings=PLANNING, host={"review_plan": review}
    ) as session:
        list(session.send("go"))
        made.check(session)
        (verdict,) = events_of(session, PlanVerdictGiven)
        (result,) = events_of(session, ToolResult)
    assert (verdict.verdict, verdict.feedback) == (PlanVerdict.REJECTED, "Mind the � heron")
    assert "Mind the � heron" in result.content


def test_a_decision_that_is_spelled_out_counts_as_what_it_says(rig: Callable[..., Any]) -> None:
    made = rig()
    for spelled, status in (("approve", PlanStatus.APPROVED), ("dismiss", PlanStatus.DISMISSED)):
        review = answering(spelled, "")
        with made.open(
            [made.call("exit_plan_mode", plan=PLAN), "ok"], settings=PLANNING, host={"review_plan": review}
        ) as session:
            list(session.send("go"))
            assert statuses_of(session) == [status]


def test_ctrl_c_on_the_hosts_own_thread_ends_the_turn_and_leaves_the_plan_pending(rig: Callable[..., Any]) -> None:
    made = rig()
    replies = [made.call("exit_plan_mode", plan=PLAN), "not said", "and now?"]
    with made.open(replies, settings=PLANNING, host={"review_plan": raising(KeyboardInterrupt())}) as session:
        with pytest.raises(KeyboardInterrupt):
            list(session.send("go"))
        assert statuses_of(session) == [PlanStatus.PENDING]
        list(session.send("again"))
        made.check(session)
        assert (statuses_of(session), session.mode) == ([PlanStatus.PENDING], "plan")


@pytest.mark.parametrize("second", [PLAN, OTHER])
def test_once_a_plan_is_approved_no_other_is_reviewed_in_its_step(second: str, rig: Callable[..., Any]) -> None:
    made = rig()
    seen: list[str] = []

    def review(plan: SubmittedPlan) -> ReviewAnswer:
        seen.append(plan.text)
        return ReviewAnswer(decision=ReviewDecision.KEEP_PLANNING) if len(seen) > 1 else APPROVE

    batch = made.call("exit_plan_mode", plan=PLAN) + made.call("exit_plan_mode", plan=second)
    replies = [batch, made.call("write", path="a.txt", content="x"), "done"]
    with made.open(replies, settings=PLANNING, host={"review_plan": review}) as session:
        list(session.send("go"))
        made.check(session)
        assert statuses_of(session) == [PlanStatus.APPROVED, PlanStatus.FAILED]
        assert session.mode == "default"
    assert seen == [PLAN]


def test_a_plan_that_is_under_review_can_be_looked_up_and_survives_a_crash(rig: Callable[..., Any]) -> None:
    made = rig()
    found: list[tuple[PlanStatus, str | None]] = []

    def review(plan: SubmittedPlan) -> ReviewAnswer:
        # As another process sees it, or this one after a crash.
        folder = session.store.session_folder(session.id)
        assert [type(logged.event) for logged in scan_log(folder).events][-1] is PlanSubmitted
        (stored,) = read_session_plans(session.store, session.id)
        found.append((stored.plan.status, stored.plan.exchange.artifact))
        assert found == [(PlanStatus.PENDING, plan.artifact)]
        return APPROVE

    with made.open(
        [made.call("exit_plan_mode", plan=PLAN), "done"], settings=PLANNING, host={"review_plan": review}
    ) as session:
        list(session.send("go"))
        assert [event.artifact for event in events_of(session, PlanSubmitted)] == [found[0][1]]
        assert statuses_of(session) == [PlanStatus.APPROVED]
    assert len(found) == 1


def test_a_plan_that_cannot_be_stored_is_not_reviewed_and_not_pending(rig: Callable[..., Any]) -> None:
    made = rig()
    asked: list[SubmittedPlan] = []

    def replies() -> Iterator[str]:
        folder = session.store.folder / "artifacts"
        assert not folder.exists()
        folder.write_text("in the way")
        yield made.call("exit_plan_mode", plan=PLAN)
        yield "done"

    def review(plan: SubmittedPlan) -> ReviewAnswer:
        asked.append(plan)
        return APPROVE

    with made.open(replies(), settings=PLANNING, host={"review_plan": review}) as session:
        list(session.send("go"))
        (result,) = events_of(session, ToolResult)
        assert "could not be stored" in result.content
        assert statuses_of(session) == [PlanStatus.FAILED]
    assert asked == []
