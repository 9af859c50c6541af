"""Modes in a session: the prefix never changes, what is not allowed is neither offered nor run, the log decides."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from chapbook.kernels.errors import ConfigError, LogWriteFailed, UsageError
from chapbook.runtime.calls import ChoiceKind, ToolChoice
from chapbook.runtime.events import ModeSet, Notice, StepEnd, StepStart, ToolResult
from chapbook.runtime.hooks import Allow, Hooks
from chapbook.runtime.log_reading import read_log
from chapbook.runtime.modes import Mode, ModeName
from chapbook.runtime.session import Session
from chapbook.runtime.session_settings import SessionSettings
from chapbook.runtime.tools.spec import Policy

ALLOWED = dict.fromkeys(("write", "edit", "bash"), Policy.ALLOW)
READING = Mode(name=ModeName("reading"), guidance="Read, and nothing else.", allowed=("read",))


def events_of(session: Session) -> list[Any]:
    return [logged.event for logged in read_log(session.store.session_folder(session.id)).events]


def settings(**changes: Any) -> SessionSettings:
    return SessionSettings(policies=ALLOWED, **changes)


def prefix_tokens(session: Session) -> list[int]:
    count = sum(section.tokens for section in session.prefix)
    return session.transcript.window.tokens()[:count].tolist()


def test_fifty_flips_change_no_token_of_the_prefix_and_break_nothing(rig: Callable[..., Any]) -> None:
    made = rig(n_ctx=16384)
    with made.open(["ok"] * 50, settings=settings()) as session:
        before = prefix_tokens(session)
        for flip in range(50):
            session.set_mode("default" if flip % 2 else "plan")
            list(session.send("x"))
        usages = made.check(session)
        assert prefix_tokens(session) == before
        events = events_of(session)
    assert len([event for event in events if isinstance(event, ModeSet)]) == 50
    assert len([event for event in events if isinstance(event, Notice)]) == 50
    assert all(usage.undeclared_break is None for usage in usages)
    assert all(usage.evaluated == usage.bound for usage in usages)


def test_a_session_that_never_leaves_default_makes_the_requests_of_one_that_knows_other_modes(
    rig: Callable[..., Any],
) -> None:
    windows = []
    for modes in ((), (READING,)):
        made = rig()
        with made.open([made.call("read", path="notes.md"), "done"], settings=settings(modes=modes)) as session:
            session.set_mode("plan")
            session.set_mode("default")  # the newest wish: nothing changes, so nothing is logged
            list(session.send("go"))
            assert not any(isinstance(event, ModeSet | Notice) for event in events_of(session))
            windows.append(session.transcript.window.tokens().tolist())
    assert windows[0] == windows[1]


def test_what_a_mode_does_not_allow_is_neither_offered_nor_run_whatever_policies_and_hooks_say(
    rig: Callable[..., Any],
) -> None:
    made = rig()
    hooks = Hooks(before_hooks=[lambda _call, _tool: Allow()])
    calls = made.call("write", path="a.txt", content="x") + made.call("bash", command="touch b.txt")
    calls += made.call("read", path="notes.md")
    with made.open([calls, "done"], settings=settings(), host={"hooks": hooks}) as session:
        session.set_mode("plan")
        list(session.send("go"))
        made.check(session)
        plans = {"plan_start", "plan_status", "exit_plan_mode"}  # plan_step has no step to name yet
        assert {tool.schema.name for tool in session.offered_tools()} == {"read", "search", "list", *plans}
        results = [event for event in events_of(session) if isinstance(event, ToolResult)]
        assert [result.is_error for result in results] == [True, True, False]
        assert "mode plan does not allow write" in results[0].content
        assert not (made.workspace / "a.txt").exists()
        assert not (made.workspace / "b.txt").exists()


def test_a_wish_in_the_middle_of_a_step_is_in_force_from_its_end_on(rig: Callable[..., Any]) -> None:
    made = rig()

    def replies() -> Iterator[str]:
        session.set_mode("plan")  # while the first reply is generated
        assert session.mode == "default"
        yield made.call("write", path="first.txt", content="x")
        assert session.mode == "plan"
        yield made.call("write", path="second.txt", content="x")
        yield "done"

    with made.open(replies(), settings=settings()) as session:
        list(session.send("go"))
        made.check(session)
        results = [event for event in events_of(session) if isinstance(event, ToolResult)]
    assert [result.is_error for result in results] == [False, True]
    assert (made.workspace / "first.txt").exists()
    assert not (made.workspace / "second.txt").exists()


def test_a_switch_is_in_the_log_before_the_request_that_it_holds_for(rig: Callable[..., Any]) -> None:
    made = rig()
    with made.open(["done"], settings=settings(mode="plan")) as session:
        list(session.send("go"))
        kinds = [
            type(event) for event in events_of(session) if isinstance(event, ModeSet | Notice | StepStart | StepEnd)
        ]
    assert kinds == [ModeSet, Notice, StepStart, StepEnd]


def test_a_choice_is_judged_by_the_mode_in_which_the_turn_begins(rig: Callable[..., Any]) -> None:
    made = rig()
    named = ToolChoice(ChoiceKind.NAMED, "write")
    mute = Mode(name=ModeName("mute"), guidance="Say what you know.", allowed=())
    replies = [made.call("write", path="a.txt", content="x"), "done"]
    with made.open(replies, settings=settings(mode="plan", modes=(mute,))) as session:
        session.set_mode("default")
        list(session.send("go", choice=named))
        assert (made.workspace / "a.txt").exists()
        before = len(events_of(session))
        session.set_mode("plan")
        with pytest.raises(UsageError, match="mode plan does not allow 'write' to choose"):
            session.send("again", choice=named)
        session.set_mode("mute")
        with pytest.raises(UsageError, match="a call is required"):
            session.send("again", choice=ToolChoice(ChoiceKind.REQUIRED))
        assert len(events_of(session)) == before
        made.check(session)


def test_a_wish_whose_event_cannot_be_written_keeps_the_old_mode_and_is_not_forgotten(rig: Callable[..., Any]) -> None:
    made = rig()
    with made.open(["one", "two"], settings=settings()) as session:
        list(session.send("go"))
        log = session.transcript._log
        real = log.append

        def refuse(event: Any, **options: Any) -> Any:
            if isinstance(event, ModeSet):
                raise LogWriteFailed("the disk is full", path=log.folder, errno=28)
            return real(event, **options)

        session.set_mode("plan")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(log, "append", refuse)
            with pytest.raises(LogWriteFailed):
                list(session.send("go on"))
        assert session.mode == "default"
        list(session.send("go on"))
        assert session.mode == "plan"


def test_a_crash_between_the_wish_and_its_event_keeps_the_old_mode(rig: Callable[..., Any]) -> None:
    made = rig()
    session = made.open(["one"], settings=settings())
    list(session.send("go"))
    session.set_mode("plan")
    session.abandon()
    with made.open(["two"], resume=session.id, settings=settings()) as resumed:
        assert resumed.mode == "default"
        list(resumed.send("go"))
        assert not any(isinstance(event, ModeSet | Notice) for event in events_of(resumed))


def test_a_mode_outlives_a_resume_and_one_that_is_not_defined_any_more_acts_as_default(rig: Callable[..., Any]) -> None:
    made = rig()
    with made.open(["one"], settings=settings(modes=(READING,), mode="reading")) as session:
        list(session.send("go"))
    with made.open(["two"], resume=session.id, settings=settings(modes=(READING,))) as session:
        assert session.mode == "reading"
        assert {tool.schema.name for tool in session.offered_tools()} == {"read"}
        list(session.send("go"))
        assert len([event for event in events_of(session) if isinstance(event, Notice)]) == 1
    with made.open(["three", "four"], resume=session.id, settings=settings()) as session:
        assert "bash" in {tool.schema.name for tool in session.offered_tools()}
        list(session.send("go"))
        list(session.send("go"))
        notices = [event.text for event in events_of(session) if isinstance(event, Notice)]
    assert len(notices) == 2
    assert "not defined any more" in notices[1]


def test_a_subagent_begins_in_its_parents_mode_and_never_may_more(rig: Callable[..., Any]) -> None:
    made = rig()

    def replies() -> Iterator[str]:
        yield "ok"
        yield made.call("write", path="a.txt", content="x")
        yield "done"

    with made.open(replies(), settings=settings()) as session:
        session.set_mode("plan")
        list(session.send("go"))
        report = session.subagent("write a file")
        child = read_log(session.store.session_folder(report.session))
        events = [logged.event for logged in child.events]
        assert [event.mode for event in events if isinstance(event, ModeSet)] == ["plan"]
        (result,) = [event for event in events if isinstance(event, ToolResult)]
        assert result.is_error
        assert not (made.workspace / "a.txt").exists()


def test_what_is_no_mode_is_refused_at_open_and_at_the_call(rig: Callable[..., Any]) -> None:
    made = rig()
    with pytest.raises(UsageError, match="no mode 'plam'"):
        made.open([], settings=settings(mode="plam"))
    with pytest.raises(ConfigError, match="no tool"):
        made.open([], settings=settings(modes=(Mode(name=ModeName("x"), guidance="", allowed=("fly",)),)))
    with made.open([], settings=settings()) as session, pytest.raises(UsageError, match="no mode"):
        session.set_mode("x")
