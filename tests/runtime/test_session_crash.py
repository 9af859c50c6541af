"""Sessions that are killed at any moment, in a process of their own, and resumed in this one.

Run as a script this file is the child: it plays a session by the plan that it is given, until it is killed.
"""

from __future__ import annotations

import json
import os
import random
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest

from chapbook.kernels.errors import SessionNotFound
from chapbook.kernels.tokens import decode_tokens, encode_tokens
from chapbook.runtime.captured import DecodedBatch
from chapbook.runtime.events import AssistantMessage, Author, StepEnd, StepStart, ToolResult, TurnEnd, TurnEndReason
from chapbook.runtime.llama import LlamaEngine
from chapbook.runtime.log_reading import LogContents, read_log
from chapbook.runtime.projection import NOT_MEASURED, NOT_STARTED, OUTCOME_UNKNOWN
from chapbook.runtime.session import Session
from chapbook.runtime.session_settings import SessionHost, SessionSettings
from chapbook.runtime.stream import StepEnded
from chapbook.runtime.tools.builtin import builtin_tools
from chapbook.runtime.tools.declare import tool
from chapbook.runtime.tools.spec import Policy, Tool
from chapbook.runtime.wrapped import ForcedEngine

KINDS = ("llama", "gemma3", "mamba", "hybrid")
N_CTX = 16384
MESSAGES = ("What is the password? @notes.md:1-3", "Now look at out.txt", "Anything else?")
FRAME = struct.Struct("<ii")
"""Before each captured batch: the position of its first token, and how many there are."""


class Plan(msgspec.Struct, kw_only=True):
    """What the child does. It kills itself at its n-th decode, write to the log, or mark; 0: never."""

    model: str
    workspace: str
    cache_folder: str
    captured: str
    replies: list[str]
    die_at_decode: int = 0
    die_at_write: int = 0
    die_at_mark: int = 0


def marking(workspace: Path, before: Callable[[], None] = lambda: None) -> Tool:
    """Return a tool that leaves a line for every time that it runs."""

    @tool
    def mark(name: str) -> str:
        """Leave a mark."""
        before()
        with (workspace / "marks.txt").open("a") as file:
            file.write(f"{name}\n")
        return f"marked {name}"

    return mark


def counted(times: int) -> Callable[[], None]:
    """Return what kills this process when it is called for the n-th time."""
    left = iter(range(times - 1, -1, -1))

    def step() -> None:
        if next(left, -1) == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    return step


def play(plan: Plan) -> None:
    """Be the child. Every event that the host is told of is written to standard output before the next is asked for."""
    captured = os.open(plan.captured, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    decode, write, marked = counted(plan.die_at_decode), counted(plan.die_at_write), counted(plan.die_at_mark)

    def on_decode(_sequence: int, tokens: Any, start: int) -> None:
        os.write(captured, FRAME.pack(start, len(tokens)) + encode_tokens(tokens))
        decode()

    def clock() -> float:
        write()
        return time.time()

    workspace = Path(plan.workspace)
    with LlamaEngine.open(Path(plan.model), n_ctx=N_CTX, n_threads=1, on_decode=on_decode) as engine:
        host = SessionHost(
            tools=[*builtin_tools(), marking(workspace, marked)], cache_folder=Path(plan.cache_folder), clock=clock
        )
        settings = SessionSettings(policies=dict.fromkeys(("write", "edit", "bash"), Policy.ALLOW))
        with Session.open(
            ForcedEngine(engine, plan.replies), workspace=workspace, settings=settings, host=host
        ) as session:
            for message in MESSAGES:
                for event in session.send(message):
                    os.write(1, msgspec.json.encode(event) + b"\n")


if __name__ == "__main__":
    play(msgspec.json.decode(sys.argv[1], type=Plan))


def twenty_replies(call: Callable[..., str]) -> list[str]:
    return [
        call("list", path="."),
        call("mark", name="pair 1") + "\n" + call("mark", name="pair 2"),
        "Looking. " + call("search", pattern="vault"),
        *(call("mark", name=f"row {n}") for n in range(1, 6)),
        call("read", path="notes.md") + call("read", path="src/main.py") + call("mark", name="mixed"),
        call("write", path="out.txt", content="a\nb\n"),
        call("edit", path="out.txt", old="b", new="c"),
        call("read", path="missing.txt"),
        "<tool_call>\n{broken\n</tool_call>",
        "The password is heron.",
        call("bash", command="cat out.txt; echo bash >> marks.txt"),
        call("read", path="out.txt"),
        call("mark", name="last"),
        "It says a, c.",
        call("mark", name="really last"),
        "Nothing more.",
    ]


@dataclass
class Crash:
    """A session whose process was killed: what its host was told, and what was decoded for it."""

    made: Any
    replies: list[str]
    told: list[dict[str, Any]]
    log: LogContents

    @property
    def marks(self) -> list[str]:
        path = self.made.workspace / "marks.txt"
        return path.read_text().splitlines() if path.exists() else []

    @property
    def replies_left(self) -> list[str]:
        """The replies that the log does not hold."""
        replied = [e for e in events_of(self.log, AssistantMessage) if e.author is Author.MODEL]
        return self.replies[len(replied) :]

    def resume(self, replies: list[str]) -> Session:
        host = {"tools": [*builtin_tools(), marking(self.made.workspace)]}
        session: Session = self.made.open(replies, resume="latest", host=host)
        return session


def events_of(log: LogContents, kind: type) -> list[Any]:
    return [logged.event for logged in log.events if isinstance(logged.event, kind)]


@pytest.fixture
def crash(rig: Callable[..., Any], tmp_path: Path) -> Iterator[Callable[..., Crash]]:
    """Return a function (kind, when to die) -> Crash. `after_s` kills from outside, that long after the first turn
    has begun."""
    children: list[subprocess.Popen[bytes]] = []

    def run(kind: str, *, after_s: float | None = None, **die_at: int) -> Crash:
        made = rig(kind, n_ctx=N_CTX)
        plan = Plan(
            model=made.engine.info.model_path,
            workspace=str(made.workspace),
            cache_folder=str(made.cache_folder),
            captured=str(tmp_path / "captured"),
            replies=twenty_replies(made.call),
            **die_at,
        )
        command = [sys.executable, __file__, msgspec.json.encode(plan).decode()]
        with (tmp_path / "told").open("wb") as told:
            child = subprocess.Popen(command, stdout=told, stderr=subprocess.PIPE, cwd=tmp_path)
        children.append(child)
        if after_s is not None:
            while not (tmp_path / "told").stat().st_size and child.poll() is None:
                time.sleep(0.001)
            time.sleep(after_s)
            child.kill()
        errors = child.communicate()[1]
        assert child.returncode == -signal.SIGKILL or (after_s is not None and child.returncode == 0), errors.decode()
        made.decoded_before += read_captured(tmp_path / "captured")
        (log,) = (made.workspace / ".chapbook" / "sessions").iterdir()
        lines = (tmp_path / "told").read_bytes().split(b"\n")[:-1]
        return Crash(made, plan.replies, [json.loads(line) for line in lines], read_log(log))

    yield run
    for child in children:
        child.kill()
        child.wait()


def read_captured(path: Path) -> list[DecodedBatch]:
    """Read what the child was decoding; the last frame may be torn."""
    data, batches, at = path.read_bytes(), [], 0
    while at + FRAME.size <= len(data):
        start, count = FRAME.unpack_from(data, at)
        run = decode_tokens(data[at + FRAME.size : at + FRAME.size + 4 * count])
        at += FRAME.size + 4 * count
        if at <= len(data):
            batches.append(DecodedBatch(start, run))
    return batches


def check_nothing_that_was_told_is_lost(crashed: Crash) -> None:
    results = {event.call_id: event.content for event in events_of(crashed.log, ToolResult)}
    steps = {(event.turn, event.step): event.usage for event in events_of(crashed.log, StepEnd)}
    ended = {event.turn: event.reason for event in events_of(crashed.log, TurnEnd)}
    calls = {call.id for event in events_of(crashed.log, AssistantMessage) for call in event.calls}
    for told in crashed.told:
        match told:
            case {"type": "tool/result", "call_id": call_id, "content": content}:
                assert results[call_id] == content
            case {"type": "step/end", "turn": turn, "step": step, "usage": usage}:
                assert msgspec.to_builtins(steps[turn, step]) == usage
            case {"type": "turn/end", "turn": turn, "reason": reason}:
                assert ended[turn] == reason
            case {"type": "tool/call", "call": {"id": call_id}}:
                assert call_id in calls


def check_calls(crashed: Crash, log: LogContents) -> None:
    """Assert that every call has one result, and that the marks on the disk are what the results say."""
    calls = [call for event in events_of(log, AssistantMessage) for call in event.calls]
    results = {event.call_id: event for event in events_of(log, ToolResult)}
    assert len({call.id for call in calls}) == len(calls)
    assert {call.id for call in calls} <= set(results)
    for call in calls:
        if call.name == "mark":
            times = crashed.marks.count(call.arguments["name"])
            content = results[call.id].content
            expected = {NOT_STARTED: {0}, OUTCOME_UNKNOWN: {0, 1}}.get(content, {1})
            assert times in expected, (call, content, crashed.marks)
    assert all(crashed.marks.count(mark) == 1 for mark in crashed.marks)


def check_resumed(crashed: Crash) -> None:
    check_nothing_that_was_told_is_lost(crashed)
    before = len(events_of(crashed.log, StepEnd))
    left = crashed.replies_left
    with crashed.resume(left) as session:
        folder = session.store.session_folder(session.id)
        assert read_log(folder).events[: len(crashed.log.events)] == crashed.log.events
        assert session.transcript.state.at_rest
        last_end = session.transcript.state.last_turn_end
        if session.recovered.turn_end is not None:
            assert last_end is not None
            assert last_end.reason is TurnEndReason.INTERRUPTED
        crashed.made.check(session)
        played = 0
        while played < len(left):
            played += sum(isinstance(event, StepEnded) for event in session.send("Go on."))
        usages = [usage for usage in crashed.made.check(session)[before:] if usage.reason != NOT_MEASURED]
        check_calls(crashed, read_log(folder))
    assert len(usages) == len(left)
    for first in usages[:1]:
        # Nothing is resident in a new process, whatever the log knows of; it knows of nothing before a first request.
        assert (first.cached, first.evaluated) == (0, first.window)
        assert bool(first.reason) == (first.evaluated > first.bound) == bool(events_of(crashed.log, StepStart))
    for usage, last in zip(usages[1:], usages, strict=False):
        assert usage.cached == last.window + last.generated
        assert usage.evaluated == usage.bound
        assert usage.reason == ""


# The moments: while the prefix is evaluated, in the middle of a reply, between a token file and its event, between a
# result and the next.
@pytest.mark.parametrize(
    ("kind", "die_at"),
    [
        ("llama", {"die_at_write": 23}),
        ("gemma3", {"die_at_decode": 500}),
        ("mamba", {"die_at_decode": 2}),
        ("hybrid", {"die_at_write": 60}),
        # Slow: a real model, twice.
        pytest.param("smollm2", {"die_at_decode": 150}, marks=pytest.mark.slow),
    ],
)
def test_a_session_that_was_killed_goes_on_with_nothing_lost_and_nothing_done_twice(
    kind: str, die_at: dict[str, int], crash: Callable[..., Crash]
) -> None:
    crashed = crash(kind, **die_at)
    assert crashed.replies_left
    check_resumed(crashed)


@pytest.mark.slow  # a process that loads a model for each moment
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("write", [5, 9, 14, 31, 32, 33, 34, 77, 110])
def test_a_session_may_be_killed_before_any_write_to_its_log(
    kind: str, write: int, crash: Callable[..., Crash]
) -> None:
    check_resumed(crash(kind, die_at_write=write))


@pytest.mark.slow  # a process that loads a model for each moment
@pytest.mark.parametrize(("write", "events"), [(3, 0), (4, 1)])
def test_a_session_that_was_killed_before_its_prefix_was_written_is_not_resumed_and_stands_in_no_one_s_way(
    write: int, events: int, crash: Callable[..., Crash]
) -> None:
    crashed = crash("llama", die_at_write=write)
    assert len(crashed.log.events) == events
    with pytest.raises(SessionNotFound, match="start"):
        crashed.resume([])
    with crashed.made.open(["hello"]) as session:
        assert list(session.send("hi"))[-1].text == "hello"


@pytest.mark.slow  # a process that loads a model for each moment
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(4))
def test_a_session_may_be_killed_at_any_time(kind: str, seed: int, crash: Callable[..., Crash]) -> None:
    check_resumed(crash(kind, after_s=random.Random(f"{kind} {seed}").uniform(0, 2)))


def test_a_tool_that_was_running_when_the_process_died_has_an_unknown_outcome_and_is_not_run_again(
    crash: Callable[..., Crash],
) -> None:
    crashed = crash("llama", die_at_mark=3)
    assert crashed.marks == ["pair 1", "pair 2"]
    with crashed.resume(["I see."]) as session:
        results = [event for event in session.recovered.results if event.name == "mark"]
        assert [result.content for result in results] == [OUTCOME_UNKNOWN]
        assert "verify before trying again" in OUTCOME_UNKNOWN
        list(session.send("What happened?"))
        window = crashed.made.engine.detokenize(session.transcript.window.tokens()).decode()
        assert OUTCOME_UNKNOWN in window
        assert crashed.marks == ["pair 1", "pair 2"]
        crashed.made.check(session)
