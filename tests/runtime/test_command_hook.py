"""Hooks that are real programs."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest

from chapbook.kernels.errors import ToolError, UsageError
from chapbook.runtime.calls import CallId, LoggedCall, ToolSchema
from chapbook.runtime.command_hook import MOST_CONTENT_BYTES, MOST_OUTPUT_BYTES, CommandHook, command_hooks
from chapbook.runtime.config_keys import HookCommand, HooksConfig
from chapbook.runtime.events import SessionId
from chapbook.runtime.hooks import Allow, Ask, Deny, HookDecision, Hooks
from chapbook.runtime.tools.spec import Tool, ToolContext, ToolOutput


def body(_context: ToolContext, _arguments: Mapping[str, Any]) -> ToolOutput:
    raise AssertionError("no hook runs a tool")


TOOL = Tool(schema=ToolSchema(name="bash", description="", parameters={}), body=body)
CALL = LoggedCall(id=CallId("call00001"), name="bash", arguments={"command": "echo é\ud800"})
OUTPUT = ToolOutput(content="one\ntwo", is_error=True)


def hook(folder: Path, program: str, *, tools: tuple[str, ...] = (), timeout_s: float = 20.0) -> CommandHook:
    return CommandHook(
        command=(sys.executable, "-S", "-E", "-c", program),
        session=SessionId("s1"),
        workspace=folder,
        tools=frozenset(tools),
        timeout_s=timeout_s,
    )


def before(folder: Path, program: str, **options: Any) -> HookDecision:
    return hook(folder, program, **options).before(CALL, TOOL)


def why_denied(decision: HookDecision) -> str:
    assert isinstance(decision, Deny)
    return decision.reason


def test_a_program_reads_what_it_is_asked_about_in_the_workspace(tmp_path: Path) -> None:
    program = "import os, sys; open('seen', 'wb').write(sys.stdin.buffer.read()); assert os.getcwd() == %r"
    assert before(tmp_path, program % str(tmp_path.resolve())) == Allow()
    assert json.loads((tmp_path / "seen").read_bytes()) == {
        "event": "before",
        "tool": "bash",
        "arguments": {"command": "echo é\ud800"},
        "call_id": "call00001",
        "session": "s1",
        "workspace": str(tmp_path),
    }


@pytest.mark.parametrize(
    ("printed", "decision"),
    [
        ("", Allow()),
        ('{"decision": "allow"}', Allow()),
        ('{"decision": "ask", "reason": "sure?"}\n', Ask("sure?")),
        ('{"decision": "deny", "reason": "no rm", "more": 1}', Deny("no rm")),
    ],
)
def test_a_program_decides_by_what_it_prints(tmp_path: Path, printed: str, decision: HookDecision) -> None:
    assert before(tmp_path, f"print({printed!r}, end='')") == decision


def test_status_two_denies_with_standard_error_as_the_reason(tmp_path: Path) -> None:
    said = "import sys; print('{\"decision\": \"allow\"}'); sys.stderr.write('not on fridays\\n'); sys.exit(2)"
    assert before(tmp_path, said) == Deny("not on fridays")
    assert "refused this call of bash" in why_denied(before(tmp_path, "raise SystemExit(2)"))


@pytest.mark.parametrize(
    ("program", "problem"),
    [
        ("import sys; sys.exit('broken')", "ended with status 1 (broken)"),
        ("import os; os.kill(os.getpid(), 9)", "was killed by SIGKILL"),
        ("import os; os.killpg(0, 15)", "was killed by SIGTERM"),
        ("print('fine with me')", "printed something that is no decision"),
        ("print('[1]')", "printed something that is no decision"),
        ("print('[' * 60000)", "printed something that is no decision"),
        ('print(\'{"decision": "maybe"}\')', "decided 'maybe', which is none of allow, deny and ask"),
        ("import sys; sys.stdout.buffer.write(b'\\xff')", "not UTF-8"),
        ("print('x' * 5000000)", "printed 5,000,001 bytes, the limit is 4,194,304"),
    ],
)
def test_a_program_that_fails_denies_and_the_reason_says_how(tmp_path: Path, program: str, problem: str) -> None:
    reason = why_denied(before(tmp_path, program))
    assert problem in reason
    assert reason.startswith("the hook ")
    assert reason.endswith(", so bash was not run")


@pytest.mark.parametrize("command", [("no-such-program-anywhere",), ("/",), ("a\0b",)])
def test_a_program_that_cannot_be_started_denies(tmp_path: Path, command: tuple[str, ...]) -> None:
    broken = CommandHook(command=command, session=SessionId("s"), workspace=tmp_path)
    assert "could not be started" in why_denied(broken.before(CALL, TOOL))


def test_a_program_that_hangs_is_killed_with_its_children_and_denies(tmp_path: Path) -> None:
    child = "['sleep', '600']"
    program = f"import subprocess, time; c = subprocess.Popen({child}); print(c.pid, file=open('pid', 'w'), flush=True)"
    reason = why_denied(before(tmp_path, program + "; time.sleep(600)", timeout_s=3.0))
    assert "ran longer than its limit of 3 s" in reason
    assert_gone(int((tmp_path / "pid").read_text()))


def test_a_child_that_keeps_the_pipe_open_does_not_hold_the_answer_up(tmp_path: Path) -> None:
    child = "['sleep', '600']"
    program = f"import subprocess; c = subprocess.Popen({child}); print(c.pid, file=open('pid', 'w'), flush=True)"
    assert before(tmp_path, program) == Allow()
    assert_gone(int((tmp_path / "pid").read_text()))


def assert_gone(pid: int) -> None:
    for _ in range(200):
        if not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            return
        time.sleep(0.02)
    raise AssertionError(f"process {pid} is still there")


def test_endless_output_is_bounded_in_memory_and_time(tmp_path: Path) -> None:
    program = "import os\nwhile True: os.write(1, b'y' * 65536); os.write(2, b'n' * 65536)"
    assert "ran longer" in why_denied(before(tmp_path, program, timeout_s=1.0))


def test_much_on_standard_error_neither_blocks_nor_fails_a_program(tmp_path: Path) -> None:
    assert before(tmp_path, "import sys; sys.stderr.write('x' * 6000000)") == Allow()
    denied = before(tmp_path, "import sys; sys.stderr.write('x' * 6000000); sys.exit(2)")
    assert len(why_denied(denied)) == MOST_OUTPUT_BYTES


def test_a_program_that_reads_nothing_does_not_block(tmp_path: Path) -> None:
    call = LoggedCall(id=CallId("call00001"), name="bash", arguments={"command": "x" * 6_000_000})
    assert hook(tmp_path, "").before(call, TOOL) == Allow()


def test_a_hook_for_other_tools_is_not_run(tmp_path: Path) -> None:
    other = hook(tmp_path, "raise SystemExit(2)", tools=("write", "edit"))
    assert other.before(CALL, TOOL) == Allow()
    assert other.after(CALL, OUTPUT) is None
    assert hook(tmp_path, "raise SystemExit(2)", tools=("bash",)).before(CALL, TOOL) != Allow()


@pytest.mark.parametrize(
    ("printed", "added"),
    [
        ("", None),
        ("  \n", None),
        ("2 warnings\n", "2 warnings"),
        ('{"context": "from json"}', "from json"),
        ('{"warnings": 2}', '{"warnings": 2}'),
    ],
)
def test_what_a_program_prints_after_a_call_is_added(tmp_path: Path, printed: str, added: str | None) -> None:
    assert hook(tmp_path, f"print({printed!r}, end='')").after(CALL, OUTPUT) == added


def test_a_program_sees_the_start_of_a_result_and_the_size_of_the_whole(tmp_path: Path) -> None:
    program = "import sys; print(sys.stdin.read(), file=open('seen', 'w'))"
    hook(tmp_path, program).after(CALL, OUTPUT)
    seen = json.loads((tmp_path / "seen").read_text())
    assert (seen["event"], seen["content"], seen["content_bytes"], seen["is_error"]) == ("after", "one\ntwo", 7, True)
    captured = tmp_path / "capture"
    captured.write_bytes(b"x" * 1_000_000)
    hook(tmp_path, program).after(CALL, ToolOutput(content="exit 0\n", file=captured))
    seen = json.loads((tmp_path / "seen").read_text())
    assert seen["content"] == "exit 0\n" + "x" * (MOST_CONTENT_BYTES - 7)
    assert seen["content_bytes"] == 1_000_007


@pytest.mark.parametrize(
    ("program", "problem"),
    [
        ("import sys; sys.exit('no linter')", "ended with status 1 (no linter)"),
        ("raise SystemExit(2)", "ended with status 2"),
        ("print('x' * 5000000)", "printed 5,000,001 bytes, the limit is 4,194,304"),
    ],
)
def test_a_program_that_fails_after_a_call_adds_nothing_and_is_reported(
    tmp_path: Path, program: str, problem: str
) -> None:
    failing = hook(tmp_path, program)
    with pytest.raises(ToolError, match=r"ended with|printed"):
        failing.after(CALL, OUTPUT)
    added = Hooks(after_hooks=(failing.after,)).after(CALL, OUTPUT)
    assert added.texts == ()
    assert [(failure.hook, failure.problem) for failure in added.failures] == [(failing.name, problem)]


def test_an_empty_command_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="needs a command"):
        CommandHook(command=(), session=SessionId("s"), workspace=tmp_path)


def test_the_hooks_of_a_configuration_run_for_their_tools(tmp_path: Path) -> None:
    python = (sys.executable, "-S", "-E", "-c")
    config = HooksConfig(
        before=(HookCommand(command=(*python, "raise SystemExit(2)"), tools=("bash",)),),
        after=(HookCommand(command=(*python, "print('noted')"), timeout_s=20.0),),
    )
    hooks = command_hooks(config, session=SessionId("s1"), workspace=tmp_path)
    assert isinstance(hooks.before(CALL, TOOL), Deny)
    assert hooks.after(CALL, OUTPUT).texts == ("noted",)
    read = LoggedCall(id=CALL.id, name="read", arguments={})
    assert hooks.before(read, Tool(schema=ToolSchema(name="read", description="", parameters={}), body=body)) == Allow()


def test_a_workspace_that_vanished_denies(tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    assert "could not be started" in why_denied(before(gone, ""))


def test_hooks_leave_no_open_files(tmp_path: Path) -> None:
    def open_files() -> int:
        return len(os.listdir("/proc/self/fd"))  # noqa: PTH208  # a count is all that is wanted

    if not Path("/proc/self/fd").exists():
        pytest.skip("this system does not list open files")
    before(tmp_path, "")
    opened = open_files()
    for _ in range(5):
        before(tmp_path, "print(1)")
    assert open_files() == opened
