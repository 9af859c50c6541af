"""Plans in a session: reviewed or not, never taken for approved; a ledger that is honest and cheap."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from chapbook.compaction.plans import PlanStatus, PlanVerdict
from chapbook.runtime.events import (
    LedgerSet,
    LedgerStepMarked,
    ModeSet,
    Notice,
    PlanSubmitted,
    PlanVerdictGiven,
    ToolResult,
)
from chapbook.runtime.log_reading import read_log
from chapbook.runtime.plan_review import ReviewAnswer, ReviewDecision, SubmittedPlan
from chapbook.runtime.session import Session
from chapbook.runtime.session_settings import SessionSettings
from chapbook.runtime.stored_plans import read_session_plans
from chapbook.runtime.stream import NoticeGiven
from chapbook.runtime.tools.spec import Policy

PLAN = "# Rename the vault\n\n## Steps\n\n1. Rename it.\n2. Tell the heron.\n"
ALLOWED = dict.fromkeys(("write", "edit", "bash"), Policy.ALLOW)
APPROVE = ReviewAnswer(decision=ReviewDecision.APPROVE)


def events_of(session: Session) -> list[Any]:
    return [logged.event for logged in read_log(session.store.session_folder(session.id)).events]


def settings(**changes: Any) -> SessionSettings:
    return SessionSettings(policies=ALLOWED, **changes)


def results_of(session: Session) -> list[ToolResult]:
    return [event for event in events_of(session) if isinstance(event, ToolResult)]


def verdicts_of(session: Session) -> list[PlanVerdict | None]:
    return [event.verdict for event in events_of(session) if isinstance(event, PlanVerdictGiven)]


def test_an_approved_plan_leaves_plan_mode_at_the_steps_end_and_not_before(rig: Callable[..., Any]) -> None:
    made = rig()
    seen: list[SubmittedPlan] = []

    def review(plan: SubmittedPlan) -> ReviewAnswer:
        seen.append(plan)
        return APPROVE

    batch = made.call("exit_plan_mode", plan=PLAN) + made.call("write", path="early.txt", content="x")
    replies = [batch, made.call("write", path="late.txt", content="x"), "done"]
    with made.open(replies, settings=settings(mode="plan"), host={"review_plan": review}) as session:
        list(session.send("Rename the vault"))
        made.check(session)
        events = events_of(session)
        results = results_of(session)
        assert session.mode == "default"
    assert [(plan.title, plan.text) for plan in seen] == [("Rename the vault", PLAN)]
    assert [result.is_error for result in results] == [False, True, False]
    assert "mode plan does not allow write" in results[1].content
    assert not (made.workspace / "early.txt").exists()
    assert (made.workspace / "late.txt").exists()
    (submitted,) = [event for event in events if isinstance(event, PlanSubmitted)]
    assert session.store.artifacts.read(submitted.artifact).decode() == PLAN
    assert [event.mode for event in events if isinstance(event, ModeSet)] == ["plan", "default"]


@pytest.mark.parametrize("kept", ["plan/verdict", "tool/result"])
def test_after_a_crash_before_the_mode_of_an_approval_the_old_one_stays_and_the_model_is_told(
    kept: str, rig: Callable[..., Any]
) -> None:
    made = rig()
    replies = [made.call("exit_plan_mode", plan=PLAN), "done"]
    session = made.open(replies, settings=settings(mode="plan"), host={"review_plan": lambda _: APPROVE})
    list(session.send("Rename the vault"))
    session.abandon()
    log = session.store.session_folder(session.id) / "log.jsonl"
    lines = log.read_bytes().splitlines(keepends=True)
    last = max(at for at, line in enumerate(lines) if f'"{kept}"'.encode() in line)
    log.write_bytes(b"".join(lines[: last + 1]))
    with made.open(["I go on planning"], resume=session.id, settings=settings()) as resumed:
        assert resumed.mode == "plan"
        list(resumed.send("go"))
        made.check(resumed)
        events = events_of(resumed)
        (plan,) = read_session_plans(resumed.store, resumed.id)
    # Where its result was lost, the model has read that the outcome is unknown: that is no approval.
    assert plan.plan.status is (PlanStatus.APPROVED if kept == "tool/result" else PlanStatus.PENDING)
    results = [event for event in events if isinstance(event, ToolResult)]
    assert ("is approved" in results[0].content) is (kept == "tool/result")
    notices = [event.text for event in events if isinstance(event, Notice) and event.producer == "mode"]
    assert len(notices) == 2
    assert "mode plan" in notices[-1]


def test_what_a_result_claims_is_in_the_log_before_it(rig: Callable[..., Any]) -> None:
    made = rig()
    calls = made.call("exit_plan_mode", plan=PLAN) + made.call("plan_start", task="Rename", steps=["one"])
    with made.open([calls, "done"], settings=settings(mode="plan"), host={"review_plan": lambda _: APPROVE}) as session:
        list(session.send("go"))
        events = events_of(session)
    kinds = [type(event) for event in events if isinstance(event, PlanVerdictGiven | LedgerSet | ToolResult)]
    assert kinds == [PlanVerdictGiven, ToolResult, LedgerSet, ToolResult]


def raises(_plan: SubmittedPlan) -> ReviewAnswer:
    raise OSError("the screen is gone")


@pytest.mark.parametrize(
    ("review", "plan", "mode", "verdict", "says"),
    [
        (None, PLAN, "plan", PlanVerdict.FAILED, "nobody to review it"),
        (raises, PLAN, "plan", PlanVerdict.FAILED, "the screen is gone"),
        (lambda _: None, PLAN, "plan", None, "pending, which is no approval"),
        (lambda _: APPROVE, "no heading", "plan", PlanVerdict.FAILED, "begins with a # heading"),
        (lambda _: APPROVE, PLAN, "default", PlanVerdict.FAILED, "for plan mode, which is not on"),
        (
            lambda _: ReviewAnswer(decision=ReviewDecision.KEEP_PLANNING, note="Mind the heron."),
            PLAN,
            "plan",
            PlanVerdict.REJECTED,
            "Feedback: Mind the heron.",
        ),
        (lambda _: ReviewAnswer(decision=ReviewDecision.DISMISS), PLAN, "plan", PlanVerdict.DISMISSED, "takes over"),
        (
            lambda _: ReviewAnswer(decision=ReviewDecision.APPROVE, note="But rename it twice."),
            PLAN,
            "plan",
            PlanVerdict.REJECTED,
            "Feedback: But rename it twice.",
        ),
    ],
    ids=["nobody", "raises", "no answer", "no heading", "outside", "keep planning", "dismissed", "approved but"],
)
def test_what_is_no_plain_approval_approves_nothing_and_keeps_the_mode(  # noqa: PLR0917 (parameters of one table)
    review: Any, plan: str, mode: str, verdict: PlanVerdict | None, says: str, rig: Callable[..., Any]
) -> None:
    made = rig()
    replies = [made.call("exit_plan_mode", plan=plan), "done"]
    with made.open(replies, settings=settings(mode=mode), host={"review_plan": review}) as session:
        events = list(session.send("go"))
        made.check(session)
        (result,) = results_of(session)
        assert result.is_error
        assert says in result.content
        assert verdicts_of(session) == [verdict]
        assert session.mode == mode
    told = [event.text for event in events if isinstance(event, NoticeGiven) and not event.to_model]
    assert any("not approved" in text for text in told) is (says == "Feedback: But rename it twice.")


def test_without_a_ledger_nothing_of_plans_is_in_any_result_or_on_the_disk(rig: Callable[..., Any]) -> None:
    made = rig()
    with made.open([made.call("read", path="notes.md"), "done"], settings=settings()) as session:
        list(session.send("go"))
        (result,) = results_of(session)
        assert "plan" not in result.content
        assert not (session.store.folder / "plan.json").exists()


def test_the_ledgers_line_rides_on_the_last_result_of_each_step_and_its_call_is_accepted_as_printed(
    rig: Callable[..., Any],
) -> None:
    made = rig()

    def replies() -> Iterator[str]:
        yield made.call("plan_start", task="Rename", steps=["rename the vault", "tell the heron"])
        both = made.call("read", path="notes.md", limit=1) + made.call("list", path=".")
        yield both
        line = results_of(session)[-1].content.splitlines()[-1]
        suggested = re.search(r'plan_step (\{"id":"s1","state":"done"\})', line)
        assert suggested is not None, line
        yield made.call("plan_step", **json.loads(suggested[1]))
        yield made.call("read", path="notes.md", limit=1)
        yield "done"

    with made.open(replies(), settings=settings()) as session:
        events = list(session.send("Rename the vault"))
        made.check(session)
        results = results_of(session)
        logged = events_of(session)
    assert "plan:" not in results[1].content, "only the last result of a step carries it"
    assert "0/2 done" in results[2].content
    assert not results[3].is_error
    assert "1/2 done" in results[-1].content
    assert "s2 tell the heron" in results[-1].content
    assert [event.ledger.task for event in logged if isinstance(event, LedgerSet)] == ["Rename"]
    assert [(event.id, event.state) for event in logged if isinstance(event, LedgerStepMarked)] == [("s1", "done")]
    reports = [event.text for event in events if isinstance(event, NoticeGiven) and event.producer == "plan"]
    print(reports)
    assert any("1 of 2 steps marked done" in text and "tell the heron" in text for text in reports)


def test_the_line_takes_no_result_its_room_and_a_stub_carries_it_too(rig: Callable[..., Any]) -> None:
    made = rig(n_ctx=8192)
    (made.workspace / "big.txt").write_text("line\n" * 9_000)
    replies = [
        made.call("plan_start", task="Look", steps=["look"]),
        made.call("bash", command="cat big.txt"),
        "done",
    ]
    with made.open(replies, settings=settings()) as session:
        list(session.send("go"))
        made.check(session)
        stub = results_of(session)[-1]
    assert stub.artifact is not None
    assert stub.content.splitlines()[-1].startswith("[plan: 0/1 done")


def test_another_run_of_the_same_task_is_handed_what_is_left(rig: Callable[..., Any]) -> None:
    made = rig()
    start = made.call("plan_start", task="Rename", steps=["one", "two"])
    with made.open([start, made.call("plan_step", id="s1", state="done"), "done"], settings=settings()) as session:
        list(session.send("Rename the vault"))
    with made.open([start, made.call("plan_step", id="s2", state="done"), "done"], settings=settings()) as session:
        list(session.send("Rename  the VAULT"))
        made.check(session)
        refused, marked = results_of(session)
    assert refused.is_error
    assert "s2" in refused.content
    assert not marked.is_error


def test_a_foreign_plan_is_mentioned_once_without_its_steps_and_set_aside_by_a_new_one(rig: Callable[..., Any]) -> None:
    made = rig()
    with made.open(
        [made.call("plan_start", task="Paint", steps=["buy red paint"]), "done"], settings=settings()
    ) as one:
        list(one.send("Paint the fence"))
    replies = ["ok", made.call("plan_start", task="Count", steps=["count herons"]), "done"]
    with made.open(replies, settings=settings()) as session:
        first = [event.text for event in session.send("Count all birds") if isinstance(event, NoticeGiven)]
        second = [event.text for event in session.send("go on") if isinstance(event, NoticeGiven) and event.to_model]
        made.check(session)
        (started,) = results_of(session)
        assert list(session.store.folder.glob("plan.set-aside-*.json"))
    assert len([text for text in first if "Paint" in text]) == 1
    assert not any("red paint" in text for text in first)
    assert second == []
    assert not started.is_error


def test_a_subagent_has_a_ledger_of_its_own(rig: Callable[..., Any]) -> None:
    made = rig()

    def replies() -> Iterator[str]:
        yield made.call("plan_start", task="Parent", steps=["mine"])
        yield "ok"
        yield made.call("plan_start", task="Child", steps=["its"])
        yield "done"
        yield made.call("plan_status")
        yield "done"

    with made.open(replies(), settings=settings()) as session:
        list(session.send("the parent's task"))
        session.subagent("something else")
        list(session.send("and now?"))
        made.check(session)
        assert "mine" in results_of(session)[-1].content
