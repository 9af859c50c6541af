"""Subagents: what a child session takes over, what it reports, and that its parent stays what it was.

Run as a script this file is a process that is killed in the middle of a subagent.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from chapbook.kernels.errors import ToolDenied, UsageError
from chapbook.runtime.calls import ChoiceKind, ToolChoice
from chapbook.runtime.cancel import Cancel
from chapbook.runtime.checker import rebuild
from chapbook.runtime.events import (
    RequestHeader,
    SessionStart,
    StepEnd,
    StepUsage,
    ToolCallEvent,
    ToolResult,
    TurnEndReason,
)
from chapbook.runtime.log_reading import read_log, verify_log
from chapbook.runtime.projection import OUTCOME_UNKNOWN
from chapbook.runtime.scripted import Reply, ScriptedEngine
from chapbook.runtime.session import Session
from chapbook.runtime.session_settings import SessionHost, SessionSettings
from chapbook.runtime.store import SessionCondition, Store
from chapbook.runtime.stream import PrefillProgressed, StepStarted, SubagentEvent, ToolFinished, ToolStarted, TurnEnded
from chapbook.runtime.subagent import SUBAGENT_ROUNDS, SubagentReport
from chapbook.runtime.tools.builtin import builtin_tools
from chapbook.runtime.tools.catalogue import render_schemas
from chapbook.runtime.tools.declare import tool
from chapbook.runtime.tools.spec import Policy, ToolContext

N_CTX = 65_536
"""A token of a scripted engine is a byte."""

PATIENCE_S = 60.0
"""How long is waited for what must come: only a fault makes it wait so long."""


def call(name: str, /, **arguments: object) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


class Played:
    """A scripted engine, a workspace, and what the host was told."""

    def __init__(self, workspace: Path, replies: Iterable[Reply], **engine: Any) -> None:
        self.workspace = workspace
        self.engine = ScriptedEngine(replies, **{"n_ctx": N_CTX, **engine})
        self.told: list[SubagentEvent] = []
        self.on_subagent: Callable[[SubagentEvent], object] = self.told.append

    def open(self, *, resume: str | None = None, host: dict[str, Any] | None = None, **settings: Any) -> Session:
        options = {"on_subagent": self._tell, **(host or {})}
        return Session.open(
            self.engine,
            workspace=self.workspace,
            resume=resume,
            settings=SessionSettings(**{"subagents": True, **settings}),
            host=SessionHost(**options),
        )

    def _tell(self, event: SubagentEvent) -> None:
        self.on_subagent(event)  # what a test has put there since the session was opened

    def logged(self, session: str) -> list[Any]:
        """Return a session's events; its log is whole, and every request is what its text gives."""
        folder = Store.in_workspace(self.workspace).session_folder(session)
        assert verify_log(folder).intact
        contents = read_log(folder)
        assert rebuild(contents.events, tokenizer=self.engine, stored=contents.tokens).problems == ()
        return [logged.event for logged in contents.events]

    def usages(self, session: str) -> list[StepUsage]:
        return [event.usage for event in self.logged(session) if isinstance(event, StepEnd)]


@pytest.fixture
def play(tmp_path: Path) -> Callable[..., Played]:
    """Return a function (*replies, **options of ScriptedEngine) -> Played."""
    workspace = tmp_path / "workspace"
    workspace.mkdir()
    (workspace / "notes.md").write_text("The password is heron.\n")
    return lambda *replies, **engine: Played(workspace, replies, **engine)


def result_of(session: Session, text: str = "go") -> ToolFinished:
    """Play a turn and return the result of its one call."""
    (result,) = [event for event in session.send(text) if isinstance(event, ToolFinished)]
    return result


def child_of(parent: Session) -> str:
    (child,) = [each.id for each in parent.store.list_sessions() if each.parent == parent.id]
    return child


# What a child takes over


def test_without_the_feature_the_catalogue_is_what_it_was_and_with_it_one_tool_is_behind_it(play: Any) -> None:
    # While nothing is stored, there is nothing to call `artifact` for, and without a plan nothing for `plan_step`.
    plain = render_schemas(tool.schema for tool in builtin_tools() if tool.name not in {"artifact", "plan_step"})
    catalogues = []
    for subagents in (False, True):
        played = play()
        with played.open(subagents=subagents) as session:
            catalogues.append(render_schemas(tool.schema for tool in session.offered_tools()))
            assert (b"- task(" in played.engine.detokenize(session.transcript.window.tokens())) is subagents
    off, on = catalogues
    assert off == plain
    assert on.startswith(plain + "\n")
    assert [json.loads(line)["function"]["name"] for line in on[len(plain) + 1 :].splitlines()] == ["task"]


def test_a_child_has_the_prefix_of_its_parent_and_nothing_else_of_it(play: Any) -> None:
    played = play("I am the parent.", "I am the child.")
    with played.open() as parent:
        list(parent.send("Say who you are"))
        report = parent.subagent("And you?")
        prefix_tokens = sum(section.tokens for section in parent.prefix)
    assert report == SubagentReport(
        session=report.session,
        text="I am the child.",
        reason=TurnEndReason.COMPLETED,
        detail="",
        rounds=1,
        totals=report.totals,
    )
    start, header = played.logged(report.session)[:2]
    assert isinstance(start, SessionStart)
    assert (start.session, start.parent, start.root, start.intent) == (report.session, parent.id, parent.id, "subagent")
    assert header == next(event for event in played.logged(parent.id) if isinstance(event, RequestHeader))
    (usage,) = played.usages(report.session)
    assert usage.bound == usage.window - prefix_tokens, "the prefix counts as known, and nothing else"
    assert report.totals.bound == usage.bound
    assert report.totals.generated == len("I am the child.")


def test_a_child_of_a_session_that_has_asked_nothing_yet_is_bounded_by_the_recorded_prefix(play: Any) -> None:
    played = play("fresh")
    with played.open() as parent:
        report = parent.subagent("Begin")
        prefix_tokens = sum(section.tokens for section in parent.prefix)
    (usage,) = played.usages(report.session)
    assert usage.bound == usage.window - prefix_tokens


def test_a_child_of_a_resumed_session_has_the_prefix_that_was_recorded(play: Any) -> None:
    played = play("first", "child")
    (played.workspace / "AGENTS.md").write_text("Be brief.")
    with played.open() as parent:
        list(parent.send("go"))
    (played.workspace / "AGENTS.md").write_text("Be long.")
    with played.open(resume=parent.id) as resumed:
        report = resumed.subagent("go")
    assert played.logged(report.session)[1] == played.logged(parent.id)[1]


@pytest.mark.parametrize("kind", ["llama", "gemma3", "mamba", "hybrid"])
def test_parent_and_children_alternate_and_none_loses_its_kv(rig: Any, kind: str) -> None:
    made = rig(kind, n_ctx=16_384)
    replies = [
        reply
        for n in range(3)
        for reply in (call("task", task=f"{n}: read"), call("read", path="notes.md"), f"child {n}", f"parent {n}")
    ]
    with made.open(replies, settings=SessionSettings(subagents=True)) as parent:
        for n in range(3):
            assert list(parent.send(f"Have it read, {n}"))[-1].text == f"parent {n}"
        ids = [each.id for each in parent.store.list_sessions() if each.parent]
        for number, child in enumerate(ids):
            with made.open([f"again {number}"], resume=child, settings=SessionSettings(subagents=True)) as resumed:
                list(resumed.send("And again"))
            made.engine.check_integrity()
        made.check(parent)
        evaluated = bound = 0
        for session in (parent.id, *ids):
            folder = parent.store.session_folder(session)
            contents = read_log(folder)
            assert verify_log(folder).intact
            assert rebuild(contents.events, tokenizer=made.engine, stored=contents.tokens).problems == ()
            for usage in (each.event.usage for each in contents.events if isinstance(each.event, StepEnd)):
                assert usage.evaluated == usage.bound or (session != parent.id and kind != "llama"), usage
                evaluated, bound = evaluated + usage.evaluated, bound + usage.bound
            first = next(each.event.usage for each in contents.events if isinstance(each.event, StepEnd))
            assert session == parent.id or first.cached > 1000, "the prefix was evaluated once"
        assert evaluated <= 1.02 * bound


# The tool, and what its result says


def test_the_answer_of_a_child_is_the_result_of_the_call(play: Any) -> None:
    played = play(call("task", task="Read notes.md"), call("read", path="notes.md"), "It is heron.", "Heron, then.")
    with played.open() as parent:
        events = list(parent.send("What is the password?"))
        parent.check_integrity()
        child = child_of(parent)
    (result,) = [event for event in events if isinstance(event, ToolFinished)]
    assert result.content == f"[subagent {child}: completed, 2 rounds]\nIt is heron."
    assert not result.is_error
    assert (events[-1].reason, events[-1].text) == (TurnEndReason.COMPLETED, "Heron, then.")
    assert not any(isinstance(event, SubagentEvent) for event in events)
    assert {event.session for event in played.told} == {child}
    inner = [event.event for event in played.told]
    assert [type(event) for event in inner if isinstance(event, ToolStarted | TurnEnded)] == [ToolStarted, TurnEnded]
    assert any(isinstance(event, PrefillProgressed) for event in inner)
    assert msgspec.json.decode(msgspec.json.encode(played.told), type=list[SubagentEvent]) == played.told
    assert all(usage.evaluated == usage.bound for usage in played.usages(parent.id))


def test_nothing_of_the_parent_changes_while_its_child_runs(play: Any) -> None:
    played = play(call("task", task="Write it down"), call("write", path="a.txt", content="a"), "written", "ok")
    seen: list[object] = []

    def look(_event: SubagentEvent) -> None:
        folder = parent.store.session_folder(parent.id)
        files = tuple((folder / name).read_bytes() for name in ("log.jsonl", "tokens.i32"))
        seen.append((files, parent.transcript.window, parent.transcript.state))
        parent.check_integrity()

    played.on_subagent = look
    with played.open(policies={"write": Policy.ALLOW}) as parent:
        result = result_of(parent)
        assert parent.transcript.state.files_written == ()
    assert len(seen) > 8
    assert all(one == seen[0] for one in seen)
    assert result.content.endswith("written\nwritten: a.txt")


def test_an_answer_that_is_too_long_enters_as_a_stub(play: Any) -> None:
    played = play(call("task", task="Be long"), "long " * 400, "ok")
    with played.open(arrival_tokens=300) as parent:
        result = result_of(parent)
        assert result.artifact is not None
        assert "long " * 400 not in result.content
        assert b"long long" in parent.store.artifacts.find(result.artifact).path.read_bytes()


@pytest.mark.parametrize(
    ("replies", "reason", "says"),
    [
        (
            [
                "Half way. " + call("list", path="."),
                *(call("search", pattern=f"{n}") for n in range(1, SUBAGENT_ROUNDS)),
            ],
            "round_cap",
            "the turn took all of its 12 rounds]\nHalf way.",
        ),
        ([call("read", path="gone")] * 4, "stuck", "It gave no answer."),
        (["<tool_call>\nnot json\n</tool_call>"] * 2, "error", "It gave no answer."),
        ([""], "completed", "the model said nothing]\nIt gave no answer."),
    ],
    ids=["round_cap", "stuck", "error", "silent"],
)
def test_what_ended_a_child_is_said_with_what_it_produced(
    play: Any, replies: list[str], reason: str, says: str
) -> None:
    played = play(call("task", task="Try"), *replies, "I see.")
    with played.open() as parent:
        result = result_of(parent)
        assert parent.transcript.state.last_turn_end.reason is TurnEndReason.COMPLETED
    assert result.is_error
    assert f": {reason}, " in result.content.partition("\n")[0]
    assert says in result.content


def test_a_child_whose_window_is_full_says_so_and_the_parent_goes_on(play: Any) -> None:
    played = play("Half way. " + call("list", path="."), "The parent goes on.", n_ctx=8192)
    with played.open(arrival_tokens=7000) as parent:
        left_tokens = 8192 - 8192 // 8 - parent.transcript.window.token_count
        report = parent.subagent("x" * (left_tokens - 60))
        assert (report.reason, report.text) == (TurnEndReason.NO_ROOM, "Half way.")
        assert "n_ctx" in report.detail
        assert list(parent.send("go on"))[-1].text == "The parent goes on."


# Depth


def test_a_child_is_told_of_the_tool_and_may_not_use_it(play: Any) -> None:
    played = play(call("task", task="Delegate"), call("task", task="Delegate more"), "I did it myself.", "ok")
    with played.open() as parent:
        assert "task" in [each.schema.name for each in parent.offered_tools()]
        result = result_of(parent)
        child = child_of(parent)
    assert result.content.endswith("I did it myself.")
    events = played.logged(child)
    assert not any(isinstance(event, ToolCallEvent) for event in events), "its body was never about to run"
    (refused,) = [event for event in events if isinstance(event, ToolResult)]
    assert refused.is_error
    assert refused.content == "a subagent starts no subagent of its own: do this part yourself with the other tools"
    with played.open(resume=child) as resumed:
        assert "task" not in [each.schema.name for each in resumed.offered_tools()]
        with pytest.raises(ToolDenied, match="starts no subagent"):
            resumed.subagent("Deeper")
        with pytest.raises(UsageError, match="no tool 'task' to choose"):
            resumed.send("go", choice=ToolChoice(ChoiceKind.NAMED, "task"))
    assert len(parent.store.list_sessions()) == 2


def test_a_tool_of_the_host_reaches_subagents_and_no_deeper(play: Any) -> None:
    @tool
    def delegate(context: ToolContext, what: str) -> str:
        """Have it done."""
        return context.subagent(what, rounds=2).text

    played = play(call("delegate", what="a"), call("delegate", what="b"), "not deeper", "ok")
    with played.open(host={"tools": [*builtin_tools(), delegate]}, subagents=False) as parent:
        assert result_of(parent).content == "not deeper"
        (refused,) = [event for event in played.logged(child_of(parent)) if isinstance(event, ToolResult)]
    assert "starts no subagent" in refused.content


# What a child may do


def test_policies_hold_in_a_child_and_the_same_person_is_asked(play: Any) -> None:
    write = call("write", path="a.txt", content="a")
    asked: list[str] = []

    def ask(one: Any, _call: Any) -> bool:
        asked.append(f"{one.name} on {'the same thread' if threading.get_ident() == here else 'another thread'}")
        return True

    here = threading.get_ident()
    played = play(call("task", task="Write"), write, call("bash", command="ls"), "done", "ok")
    with played.open(host={"ask": ask}, policies={"bash": Policy.DENY}) as parent:
        result_of(parent)
        (wrote, denied) = [e for e in played.logged(child_of(parent)) if isinstance(e, ToolResult)]
    assert asked == ["write on another thread"]
    assert not wrote.is_error
    assert (played.workspace / "a.txt").read_text() == "a"
    assert denied.content == "bash is denied by policy; work without it"


def test_a_child_may_call_the_tools_it_was_given_and_no_others(play: Any) -> None:
    played = play(call("read", path="notes.md"), call("list", path="."), "done", "none at all")
    with played.open() as parent:
        report = parent.subagent("Look", tools=("list",))
        refused, listed = [e for e in played.logged(report.session) if isinstance(e, ToolResult)]
        assert refused.content == "read may not be called in this session, which may call list; work without it"
        assert "notes.md" in listed.content
        assert parent.subagent("Just say", tools=()).text == "none at all"
        before = len(parent.store.list_sessions())
        with pytest.raises(UsageError, match="no tool 'reed'"):
            parent.subagent("Look", tools=("reed",))
        for rounds in (0, 65):
            with pytest.raises(UsageError, match="1 to 64"):
                parent.subagent("Look", rounds=rounds)
        with pytest.raises(UsageError, match="the task is empty"):
            parent.subagent(" \n")
        assert len(parent.store.list_sessions()) == before, "nothing was opened for what cannot be"


def test_a_child_never_gets_a_tool_that_its_parent_may_not_call(play: Any) -> None:
    played = play(call("read", path="notes.md"), "a", call("read", path="notes.md"), "b")
    with played.open(usable_tools=("list", "search")) as parent:
        for tools in (None, ("read", "list")):
            report = parent.subagent("Look", tools=tools)
            (refused,) = [e for e in played.logged(report.session) if isinstance(e, ToolResult)]
            assert "read may not be called" in refused.content


# Cancel


def test_a_child_that_is_resumed_may_call_no_more_than_before(play: Any) -> None:
    playing = play("nothing to see", call("write", path="out.txt", content="x"), "done")
    with playing.open(mode="plan") as parent:
        report = parent.subagent("look")
    with playing.open(resume=report.session, policies={"write": Policy.ALLOW}) as child:
        child.set_mode("default")
        assert "write" not in {tool.schema.name for tool in child.offered_tools()}
        list(child.send("go on"))
        assert child.mode == "default"
    assert not (playing.workspace / "out.txt").exists()


def test_cancelling_the_parent_cancels_the_child(play: Any) -> None:
    played = play(call("task", task="Take long"), "a long answer " * 50, "never said")

    def stop(event: SubagentEvent) -> None:
        played.told.append(event)
        if isinstance(event.event, StepStarted):
            parent.cancel()

    played.on_subagent = stop
    with played.open() as parent:
        events = list(parent.send("go"))
        child = child_of(parent)
        assert parent.transcript.state.at_rest
    assert events[-1].reason is TurnEndReason.INTERRUPTED
    assert played.told[-1].event.reason is TurnEndReason.INTERRUPTED
    assert "[subagent" in next(event for event in events if isinstance(event, ToolFinished)).content
    assert played.logged(child)[-1].reason is TurnEndReason.INTERRUPTED


@pytest.mark.parametrize("by", ["session", "cancel"])
def test_a_child_that_a_host_runs_is_cancelled_by_the_session_and_by_the_hosts_own_cancel(play: Any, by: str) -> None:
    played = play("the answer to the last one")
    cancel = Cancel()
    with played.open() as parent:
        played.on_subagent = lambda _event: parent.cancel() if by == "session" else cancel.set()
        assert parent.subagent("Go", cancel=cancel).reason is TurnEndReason.INTERRUPTED
        played.on_subagent = played.told.append
        if by == "cancel":
            assert parent.subagent("Go", cancel=cancel).reason is TurnEndReason.INTERRUPTED, "it stays set"
        assert parent.subagent("Go").text == "the answer to the last one"


def test_a_child_ends_with_the_call_that_runs_it(play: Any) -> None:
    stopped: list[Cancel] = []

    @tool(timeout_s=0.05)
    def delegate(context: ToolContext, what: str) -> str:
        """Have it done."""
        stopped.append(context.cancel)
        return context.subagent(what).reason

    played = play(call("delegate", what="Take long"), "never said", "ok")
    played.on_subagent = lambda _event: stopped[0].wait(PATIENCE_S)
    with played.open(host={"tools": [*builtin_tools(), delegate]}) as parent:
        assert result_of(parent).content == "interrupted"


def test_a_host_that_raises_ends_the_child_and_leaves_it_closed(play: Any) -> None:
    played = play("an answer")

    def fail(event: SubagentEvent) -> None:
        if isinstance(event.event, StepStarted):
            raise RuntimeError("no more of it")

    played.on_subagent = fail
    with played.open() as parent:
        with pytest.raises(RuntimeError, match="no more of it"):
            parent.subagent("Go")
        child = child_of(parent)
        (summary,) = [each for each in parent.store.list_sessions() if each.id == child]
        assert summary.condition is SessionCondition.AT_REST
    assert played.logged(child)[-1].reason is TurnEndReason.INTERRUPTED


def test_a_closed_session_starts_none(play: Any) -> None:
    parent = play().open()
    parent.close()
    with pytest.raises(UsageError, match="closed"):
        parent.subagent("Go")


# The store


def test_subagents_are_marked_in_the_store_and_never_the_latest(play: Any) -> None:
    played = play("one", "two")
    with played.open() as parent:
        list(parent.send("first"))
        report = parent.subagent("second")
        listed = {each.id: each.parent for each in parent.store.list_sessions()}
        assert listed == {parent.id: None, report.session: parent.id}
        assert parent.store.list_sessions()[0].id == report.session, "it was last written to"
        assert parent.store.find_session("latest") == parent.id
        assert parent.store.find_session(report.session) == report.session


# A crash in the middle of a child


def die_in_a_child(workspace: Path) -> None:
    """Be the process that is killed while its subagent speaks."""
    played = Played(workspace, [call("task", task="Take long"), call("list", path="."), "never ended"])

    def kill(event: SubagentEvent) -> None:
        if isinstance(event.event, StepStarted) and event.event.step == 2:
            os.kill(os.getpid(), signal.SIGKILL)

    played.on_subagent = kill
    list(played.open().send("go"))


def test_after_a_crash_in_a_child_the_outcome_is_unknown_and_the_child_can_be_found_and_resumed(play: Any) -> None:
    played = play("The parent goes on.", "The child goes on.")
    died = subprocess.run([sys.executable, __file__, played.workspace], capture_output=True, text=True, check=False)
    assert died.returncode == -signal.SIGKILL, died.stderr
    with played.open(resume="latest") as parent:
        assert [result.content for result in parent.recovered.results] == [OUTCOME_UNKNOWN]
        child = child_of(parent)
        (summary,) = [each for each in parent.store.list_sessions() if each.id == child]
        assert summary.condition is SessionCondition.INTERRUPTED
        assert list(parent.send("go on"))[-1].text == "The parent goes on."
        with played.open(resume=child) as resumed:
            assert resumed.recovered.needed
            assert list(resumed.send("go on"))[-1].text == "The child goes on."
    assert any(isinstance(event, ToolResult) and event.synthetic for event in played.logged(parent.id))
    assert not any(isinstance(event, ToolResult) and event.synthetic for event in played.logged(child))


if __name__ == "__main__":
    die_in_a_child(Path(sys.argv[1]))
