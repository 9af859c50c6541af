"""What tools and hooks do in a session, well and badly: it goes on, and the log and the window stay what they are."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from chapbook.kernels.errors import ToolError
from chapbook.runtime.calls import LoggedCall, ToolSchema
from chapbook.runtime.events import Notice, StepEnd, ToolCallEvent, ToolResult, TurnEndReason
from chapbook.runtime.hooks import Allow, Ask, Deny, Hooks
from chapbook.runtime.log_reading import read_log
from chapbook.runtime.session_settings import SessionSettings
from chapbook.runtime.stream import NoticeGiven, ToolFinished
from chapbook.runtime.tools.builtin import builtin_tools
from chapbook.runtime.tools.declare import tool
from chapbook.runtime.tools.spec import Policy, Tool, ToolContext, ToolOutput

PATIENCE_S = 60.0
"""How long a body waits for what must come: only a fault makes it wait so long."""


class Played:
    """One turn that was played to its end: what came of its calls, and what its log holds."""

    def __init__(self, made: Any, replies: list[str], *, message: str = "go", **options: Any) -> None:
        with made.open([*replies, "done"], **options) as session:
            self.events = list(session.send(message))
            self.results = [event for event in self.events if isinstance(event, ToolFinished)]
            self.end = self.events[-1]
            made.check(session)
            self.logged = [each.event for each in read_log(session.store.session_folder(session.id)).events]
            self.window = made.engine.detokenize(session.transcript.window.tokens()).decode()

    @property
    def contents(self) -> list[str]:
        return [result.content for result in self.results]

    def ran(self) -> list[str]:
        """The names of the tools whose bodies were started."""
        return [event.call.name for event in self.logged if isinstance(event, ToolCallEvent)]


@pytest.fixture
def play(rig: Callable[..., Any]) -> Callable[..., Played]:
    """Return a function (replies, *tools beside the built-in ones, hooks, ask, ...) -> Played, which completed."""
    made = rig()

    def run(replies: list[str], *tools: Tool, **options: Any) -> Played:
        host = {"tools": [*builtin_tools(), *tools]}
        host |= {key: options.pop(key) for key in {"hooks", "ask"} & set(options)}
        played = Played(made, replies, host=host, **options)
        assert played.end.reason is TurnEndReason.COMPLETED, played.end
        assert played.end.text == "done"
        return played

    run.made = made  # for what a test looks at besides the turn
    return run


@pytest.fixture
def call(play: Any) -> Callable[..., str]:
    spell: Callable[..., str] = play.made.call
    return spell


# Side by side, or one after another


def test_calls_of_safe_tools_overlap_and_their_results_come_in_call_order(play: Any, call: Any) -> None:
    met, second_ended = threading.Barrier(2, timeout=PATIENCE_S), threading.Event()

    @tool(safe=True)
    def meet(who: str) -> str:
        """Wait for the other one; the first goes last."""
        met.wait()
        assert who == "second" or second_ended.wait(PATIENCE_S)
        second_ended.set()
        return f"{who} was there"

    played = play([call("meet", who="first") + call("meet", who="second")], meet)
    assert played.contents == ["first was there", "second was there"]


def test_ten_safe_calls_run_at_once_and_the_eleventh_waits(play: Any, call: Any) -> None:
    ten, running, most = threading.Barrier(10, timeout=PATIENCE_S), [], []

    @tool(safe=True)
    def crowd(number: int) -> str:
        """Run with nine others; the last one alone."""
        running.append(number)
        if number < 10:
            ten.wait()
        most.append(len(running))
        if number < 10:
            ten.wait()
        running.remove(number)
        return str(number)

    played = play(["".join(call("crowd", number=number) for number in range(11))], crowd)
    assert played.contents == [str(number) for number in range(11)]
    assert sorted(most) == [1] + [10] * 10


def test_a_call_that_is_not_safe_runs_alone(play: Any, call: Any) -> None:
    seen: list[str] = []
    another = threading.Semaphore(0)

    def body(who: str) -> str:
        seen.append(f"{who} begins")
        another.release()
        another.acquire()
        # One that began beside this one would say so now; where none does, the wait is for nothing.
        another.acquire(timeout=0.1)
        seen.append(f"{who} ends")
        return who

    @tool(safe=True)
    def look(who: str) -> str:
        """Look."""
        return body(who)

    @tool()
    def change(who: str) -> str:
        """Change something."""
        return body(who)

    order = [("look", "a"), ("change", "b"), ("change", "c"), ("look", "d")]
    play(["".join(call(name, who=who) for name, who in order)], look, change)
    assert seen == [f"{who} {what}" for _, who in order for what in ("begins", "ends")]


def test_a_call_that_is_over_its_limit_is_stopped_while_one_before_it_still_runs(play: Any, call: Any) -> None:
    stopped = threading.Event()

    @tool(safe=True)
    def patient() -> str:
        """Wait until the other one was stopped."""
        return f"stopped: {stopped.wait(PATIENCE_S)}"

    @tool(safe=True, timeout_s=0.05)
    def hasty(context: ToolContext) -> str:
        """Run until stopped."""
        if context.cancel.wait(PATIENCE_S):
            stopped.set()
        return "I was stopped"

    played = play([call("patient") + call("hasty")], patient, hasty)
    assert played.contents == ["stopped: True", "I was stopped"]


def test_a_cancel_reaches_all_calls_that_run_at_once(rig: Callable[..., Any]) -> None:
    made = rig()
    met = threading.Barrier(3, timeout=PATIENCE_S)
    hosts_turn = threading.Barrier(4, timeout=PATIENCE_S)

    @tool(safe=True)
    def endless(context: ToolContext, who: str) -> str:
        """Run until cancelled, then wait until the others are too."""
        hosts_turn.wait()
        context.cancel.wait(PATIENCE_S)
        met.wait()
        return f"{who} was cancelled"

    host = {"tools": [*builtin_tools(), endless]}
    with made.open(["".join(made.call("endless", who=who) for who in "abc")], host=host) as session:
        cancel = threading.Thread(target=lambda: (hosts_turn.wait(), session.cancel()))
        cancel.start()
        events = list(session.send("go"))
        cancel.join()
        results = [event.content for event in events if isinstance(event, ToolFinished)]
        assert results == [f"{who} was cancelled" for who in "abc"]
        assert events[-1].reason is TurnEndReason.INTERRUPTED
        made.check(session)


# What goes wrong in a body


class Speechless(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


def test_whatever_a_body_raises_or_returns_is_a_result(play: Any, call: Any) -> None:
    raised = [ToolError("told"), ValueError("boom"), SystemExit(3), KeyboardInterrupt(), Speechless()]

    @tool()
    def fail(how: int) -> str:
        """Fail in one of many ways."""
        raise raised[how]

    schema = ToolSchema(name="wrong", description="Return no output.", parameters={"type": "object", "properties": {}})
    wrong = Tool(schema=schema, body=lambda _context, _arguments: None)
    played = play(["".join(call("fail", how=how) for how in range(5)) + call("wrong")], fail, wrong)
    told, boom, left, interrupted, speechless, returned = played.contents
    assert told == "told"
    assert boom == "fail raised ValueError: boom"
    assert left == "fail raised SystemExit: 3"
    assert interrupted == "fail raised KeyboardInterrupt"
    assert "Speechless" in speechless
    assert returned == "wrong returned NoneType; a body returns a ToolOutput"
    assert all(result.is_error for result in played.results)


def test_a_body_that_ignores_its_limit_is_left_behind_with_an_unknown_outcome(play: Any, call: Any) -> None:
    released, ended = threading.Event(), threading.Event()

    @tool(timeout_s=0.05)
    def deaf() -> str:
        """Hear no cancel."""
        released.wait(PATIENCE_S)
        ended.set()
        return "too late to be heard"

    played = play([call("deaf"), call("list")], deaf)
    assert played.results[0].is_error
    assert "longer than its limit of 0.05 s" in played.contents[0]
    assert "verify before trying again" in played.contents[0]
    released.set()
    assert ended.wait(PATIENCE_S)
    assert "too late" not in played.window


@pytest.mark.skipif(sys.platform != "linux", reason="resets and reads the peak of this process in /proc")
def test_a_hundred_megabytes_from_bash_become_an_artifact_and_never_fill_the_memory(play: Any, call: Any) -> None:
    size_bytes = 100_000_000
    Path("/proc/self/clear_refs").write_text("5")  # the peak of the resident memory starts anew
    before_bytes = peak_bytes()
    played = play([call("bash", command=f"head -c {size_bytes} /dev/zero | tr '\\0' x")])
    assert peak_bytes() - before_bytes < size_bytes // 2
    assert played.results[0].artifact is not None
    assert f"{size_bytes:,} bytes" in played.contents[0]
    stored = next(play.made.workspace.rglob(f"{played.results[0].artifact}.txt"))
    assert stored.stat().st_size == size_bytes
    assert len(played.window) < 20_000


def peak_bytes() -> int:
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines["VmHWM"].split()[0]) * 1024


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a process that leaves its group is not followed")
def test_a_command_that_kills_its_own_group_or_leaves_a_daemon_behind_is_a_result(play: Any, call: Any) -> None:
    daemon = "setsid sleep 1000 > /dev/null 2>&1 & echo $!"
    played = play([call("bash", command="echo before; kill -KILL 0"), call("bash", command=daemon)])
    assert played.results[0].is_error
    status, pid = played.contents[1].splitlines()
    assert "left running were ended" in status
    assert not psutil.pid_exists(int(pid)) or psutil.Process(int(pid)).status() == psutil.STATUS_ZOMBIE


def test_a_tool_can_neither_play_a_turn_of_its_own_session_nor_close_it(rig: Callable[..., Any]) -> None:
    made = rig()

    @tool
    def again(how: str) -> str:
        """Reach for the session that runs this."""
        session.close() if how == "close" else session.send("and now?")
        return "never"

    replies = [made.call("again", how="close") + made.call("again", how="send"), "done"]
    with made.open(replies, host={"tools": [*builtin_tools(), again]}) as session:
        events = list(session.send("go"))
        results = [event for event in events if isinstance(event, ToolFinished)]
        assert [result.is_error for result in results] == [True, True]
        assert all("a turn of this session is being played" in result.content for result in results)
        assert events[-1].text == "done"
        made.check(session)


# Who may stop a call


@pytest.mark.parametrize(
    ("ask", "said"),
    [
        (None, "nobody"),
        (lambda _tool, _call: False, "did not approve"),
        (lambda _tool, _call: "yes", "did not approve"),
        (lambda _tool, _call: 1 // 0, "division"),
    ],
)
def test_a_call_without_permission_is_not_run_and_says_why(ask: Any, said: str, play: Any, call: Any) -> None:
    played = play([call("write", path="new.txt", content="x")], ask=ask, settings=SessionSettings())
    assert played.results[0].is_error
    assert said in played.contents[0]
    assert not (play.made.workspace / "new.txt").exists()
    assert played.ran() == []


def test_a_person_is_asked_with_the_checked_arguments_and_allows(play: Any, call: Any) -> None:
    asked: list[dict[str, Any]] = []

    def ask(_tool: Tool, call: LoggedCall) -> bool:
        asked.append(call.arguments)
        return True

    play([call("read", path="notes.md", limit="2"), call("bash", command="true", timeout="5")], ask=ask,
         settings=SessionSettings())  # fmt: skip
    assert asked == [{"command": "true", "timeout": 5}]


def test_a_hook_stops_a_call_by_denying_and_by_failing(play: Any, call: Any) -> None:
    def guard(call: LoggedCall, _tool: Tool) -> Allow | Deny:
        if call.name == "list":
            return Deny("not that one")
        if call.name == "search":
            raise OSError("the guard is out")
        return Allow()

    replies = [call("list") + call("search", pattern="x") + call("read", path="notes.md", limit=1)]
    played = play(replies, hooks=Hooks(before_hooks=[guard]))
    assert [result.is_error for result in played.results] == [True, True, False]
    assert played.contents[0] == "not run, a hook denies it: not that one"
    assert "the guard is out" in played.contents[1]
    assert played.ran() == ["read"]


def test_a_hook_has_a_person_asked_where_the_policy_would_not(play: Any, call: Any) -> None:
    hooks = Hooks(before_hooks=[lambda _call, _tool: Ask("sensitive")])
    played = play([call("read", path="notes.md", limit=1)], hooks=hooks)
    assert played.results[0].is_error
    assert played.ran() == []


def test_what_hooks_add_comes_after_all_results_of_the_step_and_a_failing_one_adds_nothing(
    play: Any, call: Any
) -> None:
    def remark(call: LoggedCall, output: ToolOutput) -> str | None:
        if call.name == "search":
            raise ValueError("no remark")
        return f"{call.name} gave {len(output.content)} characters" if call.name == "list" else None

    replies = [call("list") + call("search", pattern="heron") + call("read", path="notes.md", limit=1)]
    played = play(replies, hooks=Hooks(after_hooks=[remark]))
    kinds = [event for event in played.logged if isinstance(event, ToolResult | Notice | StepEnd)]
    assert [type(event) for event in kinds] == [ToolResult, ToolResult, ToolResult, Notice, StepEnd, StepEnd]
    assert kinds[3].text.endswith(f"list gave {len(played.contents[0])} characters")
    to_host = [event for event in played.events if isinstance(event, NoticeGiven) and not event.to_model]
    assert len(to_host) == 1
    assert "no remark" in to_host[0].text
    assert "no remark" not in played.window


def test_what_a_hook_adds_is_too_large_for_the_window_and_is_stored(play: Any, call: Any) -> None:
    hooks = Hooks(after_hooks=[lambda _call, _output: "HEAD\n" + "filler\n" * 50_000 + "SENTINEL\n" * 9])
    played = play([call("list")], hooks=hooks)
    assert "HEAD" in played.window
    assert "stored whole" in played.window
    assert "filler\n" * 10 not in played.window


def test_calls_that_cannot_be_run_say_what_is_wrong(play: Any, call: Any) -> None:
    replies = [
        call("fly", to="the moon"),
        call("read"),
        call("read", path=["notes.md"]),
        call("read", path="notes.md", limit="many"),
        call("read", path="../outside"),
    ]
    played = play(["".join(replies)])
    assert all(result.is_error for result in played.results)
    for content, said in zip(played.contents, ("'fly'", "path", "path", "limit", "outside"), strict=True):
        assert said in content
    assert played.ran() == ["read"]


def test_a_policy_of_deny_holds_whatever_a_person_or_a_hook_says(play: Any, call: Any) -> None:
    played = play(
        [call("read", path="notes.md")],
        ask=lambda _tool, _call: True,
        hooks=Hooks(before_hooks=[lambda _call, _tool: Ask("really?")]),
        settings=SessionSettings(policies={"read": Policy.DENY}),
    )
    assert "denied by policy" in played.contents[0]
    assert played.ran() == []
