"""What a session does when its prefix would be composed otherwise now, at a resume and between two turns."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from chapbook.kernels.errors import ContextTooSmall, NoRoom, UsageError
from chapbook.runtime.events import (
    DriftKind,
    HeaderReason,
    Notice,
    RequestHeader,
    SectionDrift,
    StepEnd,
    UserMessage,
)
from chapbook.runtime.log_reading import LOG_NAME, TOKENS_NAME, read_log
from chapbook.runtime.session import Session
from chapbook.runtime.session_settings import SessionSettings
from chapbook.runtime.stream import NoticeGiven, TurnEnded
from chapbook.runtime.tools.builtin import builtin_tools
from chapbook.runtime.tools.declare import tool
from chapbook.runtime.tools.spec import Tool

OLD = "Answer in English."
NEW = "Answer in French. Write short sentences, and no list is longer than five lines."


@tool()
def now() -> str:
    """Say what time it is."""
    return "noon"


def events_of(session: Session, kind: type) -> list[Any]:
    events = [logged.event for logged in read_log(session.store.session_folder(session.id)).events]
    return [event for event in events if isinstance(event, kind)]


def headers_of(session: Session) -> list[RequestHeader]:
    return events_of(session, RequestHeader)


def told(session: Session) -> list[str]:
    return [event.text for event in events_of(session, Notice) if event.producer == "prefix"]


def said(events: Sequence[object]) -> list[NoticeGiven]:
    return [event for event in events if isinstance(event, NoticeGiven) and event.producer == "prefix"]


def section_tokens(header: RequestHeader, name: str) -> int:
    return sum(section.tokens for section in header.sections if section.name == name)


@pytest.fixture
def written(rig: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function (**options of the engine) -> a rig and a session, closed, that was begun with `OLD`."""

    def make(model: str = "llama", **options: Any) -> tuple[Any, str]:
        made = rig(model, **options)
        (made.workspace / "AGENTS.md").write_text(OLD)
        with made.open([made.call("read", path="notes.md"), "It is heron."]) as session:
            list(session.send("What is the password?"))
            return made, session.id

    return make


def turn(session: Session, text: str = "Go on.") -> list[object]:
    return list(session.send(text))


def test_instructions_that_changed_are_recorded_and_told_to_the_token_while_the_old_ones_stay_in_force(
    written: Callable[..., Any],
) -> None:
    made, name = written()
    (made.workspace / "AGENTS.md").write_text(NEW)
    with made.open(["Yes."], resume=name) as session:
        before = session.transcript.window.tokens().tolist()
        initial, resumed = headers_of(session)
        grown = section_tokens(resumed, "instructions") - section_tokens(initial, "instructions")
        (drift,) = resumed.drifted
        assert drift == SectionDrift(
            name="instructions",
            before_tokens=section_tokens(initial, "instructions"),
            after_tokens=section_tokens(resumed, "instructions"),
            kind=DriftKind.CHANGED,
        )
        assert (resumed.reason, resumed.spans) == (HeaderReason.RESUME, ())
        assert session.prefix == initial.sections
        events = turn(session)
        usages = made.check(session)
        assert session.transcript.window.tokens().tolist()[: len(before)] == before
        (text,) = told(session)
    assert said(events) == [NoticeGiven(producer="prefix", text=text)]
    assert text.startswith(f"[chapbook] since this session began: project instructions changed, {grown:+,} tokens. ")
    assert "What it began with stays in force." in text
    assert text.endswith(f"AGENTS.md says now:\n{NEW}")
    assert all(usage.evaluated == usage.bound for usage in usages)
    assert usages[-1].cached == len(before)
    assert usages[-1].declared_break is None


def test_without_a_drift_nothing_is_logged_or_said(written: Callable[..., Any]) -> None:
    made, name = written()
    os.utime(made.workspace / "AGENTS.md", (1, 1))
    with made.open(["Yes."], resume=name) as session:
        assert said(turn(session)) == []
        assert len(headers_of(session)) == 1
        made.check(session)


def test_a_drift_is_told_once_over_all_resumes_and_its_end_too(written: Callable[..., Any]) -> None:
    made, name = written()
    agents = made.workspace / "AGENTS.md"
    for text, count in ((NEW, 1), (NEW, 1), (OLD, 2), (OLD, 2), (NEW, 3)):
        agents.write_text(text)
        with made.open(["Yes."], resume=name) as session:
            turn(session)
            made.check(session)
            assert (len(told(session)), len(headers_of(session))) == (count, count + 1)
            last = headers_of(session)[-1]
            assert bool(last.drifted) is (text == NEW)
            if text == OLD:
                assert "project instructions as before again" in told(session)[-1]


def test_a_session_that_stops_between_the_header_and_its_first_request_tells_the_next_time(
    written: Callable[..., Any],
) -> None:
    made, name = written()
    (made.workspace / "AGENTS.md").write_text(NEW)
    made.open([], resume=name).close()
    with made.open(["Yes."], resume=name) as session:
        assert (len(headers_of(session)), told(session)) == (2, [])
        turn(session)
        assert len(headers_of(session)) == 2
        assert NEW in told(session)[0]
        made.check(session)


@pytest.mark.parametrize("resumed", [False, True])
def test_instructions_that_change_in_mid_session_are_told_at_the_start_of_the_next_turn(
    written: Callable[..., Any], resumed: bool
) -> None:
    made, name = written()
    agents = made.workspace / "AGENTS.md"
    with made.open(["One.", "Two.", "Three."], resume=name if resumed else None) as session:
        turn(session)
        assert told(session) == []
        agents.write_text(NEW)
        assert [notice.to_model for notice in said(turn(session))] == [True]
        assert said(turn(session)) == []
        assert NEW in told(session)[0]
        usages = made.check(session)
        kinds = [type(event) for event in events_of(session, Notice | UserMessage)]
    assert kinds[-4:] == [UserMessage, Notice, UserMessage, UserMessage]
    assert all(usage.evaluated == usage.bound for usage in usages)


def test_a_subagent_is_told_what_its_parent_s_recorded_prefix_does_not_say(written: Callable[..., Any]) -> None:
    made, name = written()
    (made.workspace / "AGENTS.md").write_text(NEW)
    with made.open(["Done."], resume=name) as parent:
        report = parent.subagent("Look around.")
        folder = parent.store.session_folder(report.session)
        notices = [logged.event for logged in read_log(folder).events if isinstance(logged.event, Notice)]
    assert [NEW in notice.text for notice in notices] == [True]


def test_tools_that_came_and_went_are_named_with_the_tokens_of_the_catalogue(written: Callable[..., Any]) -> None:
    made, name = written()
    tools: list[Tool] = [*(each for each in builtin_tools() if each.name != "list"), now]
    with made.open(["Yes."], resume=name, host={"tools": tools}) as session:
        turn(session)
        initial, resumed = headers_of(session)
        (drift,) = resumed.drifted
        assert (drift.name, drift.kind) == ("catalogue", DriftKind.CHANGED)
        grown = drift.after_tokens - drift.before_tokens
        total = [sum(section.tokens for section in each.sections) for each in (initial, resumed)]
        assert grown == total[1] - total[0] != 0
        (text,) = told(session)
        assert f"tool catalogue changed, {grown:+,} tokens (new: now; gone: list)." in text
        assert "AGENTS.md" not in text
        assert all(usage.evaluated == usage.bound for usage in made.check(session))


def test_instructions_that_were_deleted_or_came_are_one_drift_of_their_own(written: Callable[..., Any]) -> None:
    made, name = written()
    (made.workspace / "AGENTS.md").unlink()
    with made.open(["Yes.", "No."], resume=name) as session:
        turn(session)
        initial, resumed = headers_of(session)
        gone = section_tokens(initial, "instructions")
        expected = SectionDrift(name="instructions", before_tokens=gone, after_tokens=0, kind=DriftKind.REMOVED)
        assert resumed.drifted == (expected,)
        assert f"project instructions removed, -{gone:,} tokens. What" in told(session)[0]
        made.check(session)
    with made.open(["Yes.", "No."]) as session:
        turn(session)
        (made.workspace / "AGENTS.md").write_text(NEW)
        turn(session)
        assert [drift.kind for drift in headers_of(session)[-1].drifted] == [DriftKind.ADDED]
        assert "project instructions added, +" in told(session)[0]
        made.check(session)


BROKEN = {
    "more than 65,536 bytes": b"x" * 70_000,
    "not UTF-8": b"caf\xe9 au lait",
}


@pytest.mark.parametrize("problem", ["more than 65,536 bytes", "not UTF-8"])
def test_instructions_that_broke_refuse_no_resume_and_the_host_is_told_why(
    written: Callable[..., Any], problem: str
) -> None:
    made, name = written()
    agents = made.workspace / "AGENTS.md"
    agents.write_bytes(BROKEN[problem])
    with made.open(["Yes.", "Yes.", "Yes."], resume=name) as session:
        (notice,) = said(turn(session))
        assert problem in notice.text
        assert not notice.to_model
        assert said(turn(session)) == []
        agents.write_text(NEW)
        turn(session)
        assert NEW in told(session)[0]
        made.check(session)
    agents.write_bytes(BROKEN[problem])
    with pytest.raises(UsageError, match=problem):
        made.open([], resume=name, recompose=True)
    made.open([], resume=name).close()


def test_instructions_that_lead_out_of_the_workspace_are_as_if_they_were_not_there(
    written: Callable[..., Any],
) -> None:
    made, name = written()
    (made.workspace / "AGENTS.md").unlink()
    (made.workspace / "AGENTS.md").symlink_to(made.workspace.parent / "outside.md")
    (made.workspace.parent / "outside.md").write_text("secret")
    with made.open(["Yes.", "Yes."], resume=name) as session:
        (notice,) = said(turn(session))
        assert "project instructions removed" in notice.text
        assert said(turn(session)) == []
        made.check(session)


def test_instructions_larger_than_what_may_arrive_are_a_stub_and_stored_whole(written: Callable[..., Any]) -> None:
    made, name = written()
    whole = "".join(f"Rule {number}: keep rule {number * 7919 % 1000} in mind.\n" for number in range(600))
    (made.workspace / "AGENTS.md").write_text(whole)
    with made.open(["Yes."], resume=name) as session:
        turn(session)
        (notice,) = [event for event in events_of(session, Notice) if event.producer == "prefix"]
        assert session.store.artifacts.read(notice.artifact).decode() == whole.strip()
        assert notice.text.startswith("[chapbook] since this session began: project instructions changed, +")
        budgets = session._assembled.parts.budgets
        assert len(made.engine.tokenize(notice.text, parse_special=False)) <= budgets.arrival_tokens
        made.check(session)


def test_where_a_notice_does_not_fit_the_turn_goes_on_and_the_host_is_told(written: Callable[..., Any]) -> None:
    made, name = written(n_ctx=4096)
    with made.open(["Yes."], resume=name) as session:
        budgets = session._assembled.parts.budgets
        left = budgets.left_tokens(session.transcript.opened_tokens(before=[UserMessage(text="")]))
        text = "x " * left
        while len(made.engine.tokenize(text, parse_special=False)) > left:
            text = text[2:]
        (made.workspace / "AGENTS.md").write_text(NEW)
        settings = SessionSettings(arrival_tokens=left + 10)
    with made.open(["Yes.", "Yes."], resume=name, settings=settings) as session:
        events = turn(session, text)
        assert [notice.to_model for notice in said(events)] == [False]
        assert "not told, for want of room" in said(events)[0].text
        assert told(session) == []
        (ended,) = [event for event in events if isinstance(event, TurnEnded)]
        assert ended.reason == "completed"
        made.check(session)


def test_a_template_that_is_used_otherwise_is_for_the_host_to_know(written: Callable[..., Any]) -> None:
    made, name = written()
    settings = SessionSettings(dialect="llama3")
    with made.open(["Yes."], resume=name, settings=settings) as session:
        (notice,) = said(turn(session))
        assert not notice.to_model
        assert "form of tool calls changed" in notice.text
        assert told(session) == []
    with made.open(["Yes."], resume=name, settings=settings) as session:
        assert said(turn(session)) == []
        assert len(headers_of(session)) == 2


# Recomposed


def declared(session: Session) -> list[Any]:
    return [event.usage.declared_break for event in events_of(session, StepEnd)]


@pytest.mark.parametrize("model", ["llama", "mamba"])
def test_a_recomposed_session_has_the_new_prefix_and_its_messages_as_they_were(
    written: Callable[..., Any], model: str
) -> None:
    made, name = written(model)
    (made.workspace / "AGENTS.md").write_text(NEW)
    with made.open(["Yes.", "Yes."], resume=name, recompose=True) as session:
        initial, change = headers_of(session)
        assert (change.reason, [drift.name for drift in change.drifted]) == (HeaderReason.CHANGE, ["instructions"])
        assert session.prefix == change.sections
        stored = read_log(session.store.session_folder(session.id)).tokens
        old, new = (sum(section.tokens for section in each.sections) for each in (initial, change))
        window = session.transcript.window.tokens().tolist()
        assert window == [*stored[-new:].tolist(), *stored[old:-new].tolist()]
        (notice,) = said(turn(session))
        assert "a new session prefix is in force: project instructions changed, +" in notice.text
        turn(session)
        made.check(session)
        assert told(session) == []
        first, second = declared(session)[-2:]
        assert first.section == "prefix: instructions"
        assert 0 < first.token < old
        assert second is None
        usages = [event.usage for event in events_of(session, StepEnd)]
        # A recurrent state goes back to the end of a prefix, not into it; the account says so.
        assert usages[-2].evaluated == usages[-2].bound if model == "llama" else usages[-2].reason
        assert all(usage.evaluated == usage.bound for usage in (*usages[:-2], usages[-1]))
    # The window of a resume, and what it must repeat, are those of the session that went on.
    with made.open(["Yes."], resume=name) as session:
        turn(session)
        usages = made.check(session)
        assert session.prefix == change.sections
        assert (len(headers_of(session)), declared(session)[-1]) == (2, None)
        assert usages[-1].evaluated == usages[-1].bound < 60


def test_a_session_recomposed_twice_with_and_without_a_request_between(written: Callable[..., Any]) -> None:
    made, name = written()
    agents = made.workspace / "AGENTS.md"
    for number, ask in enumerate((True, False, True, True)):
        agents.write_text(f"{NEW} Rule {number}.")
        with made.open(["Yes."], resume=name, recompose=True) as session:
            if ask:
                turn(session)
                assert declared(session)[-1].section == "prefix: instructions"
            usages = made.check(session)
            assert [header.reason for header in headers_of(session)] == ["initial", *["change"] * (number + 1)]
            assert f"Rule {number}." in made.engine.detokenize(session.transcript.window.tokens()).decode()
    assert all(usage.evaluated == usage.bound for usage in usages)


def test_a_recompose_that_was_cut_off_before_its_first_request_holds(written: Callable[..., Any]) -> None:
    made, name = written()
    (made.workspace / "AGENTS.md").write_text(NEW)
    made.open([], resume=name, recompose=True).close()
    with made.open(["Yes."], resume=name) as session:
        assert len(headers_of(session)) == 2
        turn(session)
        usages = made.check(session)
        assert declared(session)[-1].section == "prefix: instructions"
        assert usages[-1].evaluated == usages[-1].bound


def test_a_change_whose_header_was_torn_off_leaves_the_old_prefix_in_force(written: Callable[..., Any]) -> None:
    made, name = written()
    (made.workspace / "AGENTS.md").write_text(NEW)
    with made.open([], resume=name, recompose=True) as session:
        folder = session.store.session_folder(session.id)
    lines = (folder / LOG_NAME).read_bytes().splitlines(keepends=True)
    (folder / LOG_NAME).write_bytes(b"".join(lines[:-1]) + lines[-1][:-9])
    with made.open(["Yes."], resume=name) as session:
        turn(session)
        assert [header.reason for header in headers_of(session)] == ["initial", "resume"]
        assert NEW in told(session)[0]
        made.check(session)


def test_what_was_told_before_a_recompose_is_settled_by_it(written: Callable[..., Any]) -> None:
    made, name = written()
    agents = made.workspace / "AGENTS.md"
    agents.write_text(NEW)
    with made.open(["Yes."], resume=name) as session:
        turn(session)
    agents.write_text(f"{NEW} And no table.")
    made.open([], resume=name, recompose=True).close()
    with made.open(["Yes."], resume=name) as session:
        assert [header.reason for header in headers_of(session)] == ["initial", "resume", "change"]
        turn(session)
        assert len(told(session)) == 1
        made.check(session)


def test_a_recompose_of_what_has_not_changed_changes_nothing(written: Callable[..., Any]) -> None:
    made, name = written()
    with made.open(["Yes."], resume=name, recompose=True) as session:
        assert said(turn(session)) == []
        assert len(headers_of(session)) == 1
        assert made.check(session)[-1].cached > 0


def test_tools_and_dialect_of_a_recomposed_session_are_those_of_now(written: Callable[..., Any]) -> None:
    made, name = written()
    settings = SessionSettings(dialect="llama3", system="Be brief.")
    tools = [*builtin_tools(), now]
    with made.open(['{"name": "now", "parameters": {}}', "Noon."], resume=name, recompose=True, settings=settings,
                   host={"tools": tools}) as session:  # fmt: skip
        events = turn(session, "What time is it?")
        made.check(session)
        assert session.opened.dialect == "llama3"
        assert "now" in headers_of(session)[-1].tools
        assert [event.content for event in events if type(event).__name__ == "ToolFinished"] == ["noon"]


def test_subagents_and_new_sessions_find_the_prefix_of_a_recomposed_session_and_their_bound_knows_it(
    written: Callable[..., Any],
) -> None:
    made, name = written()
    (made.workspace / "AGENTS.md").write_text(NEW)
    with made.open(["Yes.", "Child.", "Other."], resume=name, recompose=True) as session:
        turn(session)
        prefix = sum(section.tokens for section in session.prefix)
        report = session.subagent("Look.")
        assert report.totals.evaluated == report.totals.bound
        assert report.totals.cached >= prefix
        child = read_log(session.store.session_folder(report.session)).events[1].event
        assert isinstance(child, RequestHeader)
        assert (child.reason, child.sections, child.drifted) == (HeaderReason.INITIAL, session.prefix, ())
    with made.open(["Other."]) as other:
        turn(other)
        (usage,) = made.check(other)
        assert usage.evaluated == usage.bound < prefix


BRACKETS = (
    "{% for message in messages %}[{{ message['role'] }}]{{ message['content'] }}[/]{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def test_after_a_recompose_in_another_template_messages_are_written_by_that_one(
    written: Callable[..., Any], tiny: Callable[..., Path]
) -> None:
    made, name = written(tiny("llama", template=BRACKETS))
    settings = SessionSettings(template="chatml")
    with made.open(["Yes."], resume=name, settings=settings) as session:
        (notice,) = said(turn(session))
        assert "markup between messages changed" in notice.text
        assert not notice.to_model
    with made.open(["No."], resume=name, recompose=True, settings=settings) as session:
        turn(session, "Sure?")
        made.check(session)
        window = made.engine.detokenize(session.transcript.window.tokens()).decode()
    assert "[user]Go on.[/][assistant]Yes." in window
    assert window.endswith("<|im_start|>user\nSure?<|im_end|>\n<|im_start|>assistant\nNo.")


def files_of(store: Path, name: str) -> Iterator[bytes]:
    for file in (LOG_NAME, TOKENS_NAME):
        yield (store / "sessions" / name / file).read_bytes()


def test_a_recompose_without_room_is_refused_with_the_numbers_and_nothing_is_written(
    written: Callable[..., Any],
) -> None:
    made, name = written(n_ctx=4096)
    store = made.workspace / ".chapbook"
    before = list(files_of(store, name))
    rules = [f"Rule {number}: keep {number * 7919 % 1000} in mind.\n" for number in range(600)]
    (made.workspace / "AGENTS.md").write_text("".join(rules))
    with pytest.raises(ContextTooSmall, match="instructions"):
        made.open([], resume=name, recompose=True)
    with made.open([], resume=name) as session:
        budgets = session._assembled.parts.budgets
        window = session.transcript.window
        old = window.start_of(window.prefix_length)
        messages = session.transcript.opened_tokens(before=[UserMessage(text="")]) - old
    # A prefix that leaves the least room of a new session, but less than the messages of this one take.
    log = (store / "sessions" / name / LOG_NAME).read_bytes()
    assert log.startswith(before[0])
    with made.open(["Yes."], resume=name) as session:
        turn(session, "y " * (budgets.left_tokens(messages + old) * 2 // 5))
        window = session.transcript.window
    before = list(files_of(store, name))
    (made.workspace / "AGENTS.md").write_text("".join(rules[:40]))
    with pytest.raises(NoRoom, match=r"the next request would be [\d,]+") as refused:
        made.open([], resume=name, recompose=True)
    assert refused.value.window_tokens > budgets.usable_tokens
    assert refused.value.by_segment["prefix"] > old
    assert list(files_of(store, name)) == before
    made.open([], resume=name).close()


def test_recompose_is_for_a_session_that_is_resumed(rig: Callable[..., Any]) -> None:
    made = rig()
    with pytest.raises(UsageError, match="resumed"):
        made.open([], recompose=True)
