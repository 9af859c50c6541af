"""`bash`: whatever a command does, it ends, nothing of it is left, and what it printed is there."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from chapbook.kernels.errors import ToolArgumentsError, ToolError, WorkspaceError
from chapbook.runtime.cancel import Cancel
from chapbook.runtime.tools import confine
from chapbook.runtime.tools.bash import bash, run_command
from chapbook.runtime.tools.spec import Policy, ToolContext, ToolOutput
from chapbook.runtime.tools.workspace import Workspace

pytestmark = pytest.mark.skipif(os.name != "posix", reason="bash and process groups are POSIX")

MakeContext = Callable[..., ToolContext]
CONFINED = confine.confinement_available()
needs_landlock = pytest.mark.skipif(not CONFINED, reason="this kernel has no Landlock; the fallback is tested below")
needs_signal_scope = pytest.mark.skipif(
    confine.landlock_version() < 6, reason="before Landlock ABI 6 a command may signal what is not its own"
)


# A host process of its own: its first argument is the workspace; `run` prints a result.
HOST = """
import sys
from pathlib import Path
from chapbook.compaction.artifacts import ArtifactStore
from chapbook.runtime.cancel import Cancel
from chapbook.runtime.tools.bash import run_command
from chapbook.runtime.tools.confine import describe_confinement
from chapbook.runtime.tools.spec import ToolContext
from chapbook.runtime.tools.workspace import Workspace

root = Path(sys.argv[1])

def run(command, timeout_s):
    context = ToolContext(workspace=Workspace(root), cancel=Cancel(), call_id="call00001", arrival_tokens=500,
                          capture_folder=root / "captures", count_tokens=len,
                          artifacts=ArtifactStore(root / "artifacts"))
    print(run_command(context, command, timeout_s=timeout_s).content)

"""

# Makes Landlock's system call 444 unknown to this process and its children, as on a kernel without it, by a filter
# of four instructions: load the number; if it is 444, errno ENOSYS; else allow.
WITHOUT_LANDLOCK = """
import ctypes, struct
steps = ((0x20, 0, 0, 0), (0x15, 0, 1, 444), (0x06, 0, 0, 0x00050000 | 38), (0x06, 0, 0, 0x7FFF0000))
code = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *step) for step in steps))
filter = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(steps), ctypes.addressof(code)))
libc = ctypes.CDLL(None, use_errno=True)
assert libc.prctl(38, 1, 0, 0, 0) == 0
assert libc.prctl(22, 2, ctypes.c_void_p(ctypes.addressof(filter)), 0, 0) == 0, ctypes.get_errno()
"""


def run(context: ToolContext, command: str, *, timeout_s: float = 20, **limits: int) -> ToolOutput:
    return run_command(context, command, timeout_s=timeout_s, **limits)


@pytest.fixture
def mark() -> Iterator[str]:
    """A number that only processes of this test sleep for; none of them may be left at its end."""
    number = f"9{os.getpid()}{time.monotonic_ns() % 10_000}"
    yield number
    left = sleepers(number)
    for process in left:
        process.kill()
    assert not left


def sleepers(mark: str) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter(["cmdline", "status"]):
        arguments = process.info["cmdline"] or []
        if arguments == ["sleep", mark] and process.info["status"] != psutil.STATUS_ZOMBIE:
            found.append(process)
    return found


def test_status_comes_first_and_then_what_was_printed(context: ToolContext, workspace: Workspace) -> None:
    output = bash.body(context, {"command": "pwd; echo err >&2; echo a"})
    printed = f"{workspace.root}\nerr\na\n"
    assert (output.content, output.is_error, output.file) == (f"[exit 0]\n{printed}", False, None)
    assert output.backing is not None
    assert output.backing.read_text() == printed, "it is there until the runtime has what was printed"
    output.backing.unlink()
    assert run(context, "exit 3") == ToolOutput(content="[exit 3; no output]", is_error=True)
    assert run(context, "kill -TERM $$").content == "[exit 143; no output]"
    assert not list(context.capture_folder.glob("*.out"))


def test_the_same_command_gives_the_same_result(context: ToolContext) -> None:
    assert run(context, "ls; false") == run(context, "ls; false")


def test_what_goes_to_dev_stderr_truncates_nothing(context: ToolContext) -> None:
    assert run(context, "echo one; echo two > /dev/stderr; echo three > /dev/stdout").content == (
        "[exit 0]\none\ntwo\nthree\n"
    )


def test_standard_input_is_closed_and_there_is_no_terminal(context: ToolContext) -> None:
    assert run(context, "cat; read x; echo $?; echo x > /dev/tty || echo none").content.endswith("none\n")


def test_the_environment_is_inherited(context: ToolContext) -> None:
    assert run(context, 'test "$PATH" = "' + os.environ["PATH"] + '"').content.startswith("[exit 0")


def test_hostile_output_is_text(context: ToolContext, workspace: Workspace, hostile_text: str) -> None:
    (workspace.root / "a.txt").write_text(hostile_text)
    assert run(context, "cat a.txt").content == f"[exit 0]\n{hostile_text}"


@pytest.mark.parametrize("data", [rb"a\xffb", rb"a\0b"])
def test_bytes_that_are_no_text_are_handed_on_in_their_file(context: ToolContext, data: bytes) -> None:
    output = run(context, f"printf '{data.decode()}'")
    assert output.content == "[exit 0]"
    assert output.file is not None
    assert output.file.read_bytes() in (b"a\xffb", b"a\0b")


def test_a_large_output_is_handed_on_as_a_file(context: ToolContext) -> None:
    output = run(context, "head -c 100000000 /dev/zero | tr '\\0' x; exit 4")
    assert output.content == "[exit 4]"
    assert output.is_error
    assert output.file is not None
    assert output.file.stat().st_size == 100_000_000
    assert output.file.stat().st_mode & 0o777 == 0o600
    output.file.unlink()


def test_output_past_the_limit_ends_the_command_and_is_kept_up_to_it(context: ToolContext, mark: str) -> None:
    output = run(context, f"sleep {mark} & yes", capture_limit_bytes=3_000_000)
    assert output.is_error
    assert output.content.startswith("[stopped: its output passed 3000000 bytes, the limit; send it to a file")
    assert output.file is not None
    assert output.file.stat().st_size == 3_000_000


def test_a_command_past_its_time_is_ended_with_all_its_children(context: ToolContext, mark: str) -> None:
    output = run(context, f"echo before; sleep {mark} & (trap '' TERM; sleep {mark}; sleep {mark})", timeout_s=0.5)
    assert output.content == "[timed out after 0.5 s; timeout may be up to 600]\nbefore\n"
    assert output.is_error


@pytest.mark.parametrize(
    "command",
    [
        "sleep {0}",
        "trap '' TERM INT HUP; sleep {0}; sleep {0}",
        "setsid sleep {0} & wait",
        "(setsid sh -c 'trap \"\" TERM; sleep {0}; sleep {0}' &) ; sleep {0}",
        "sleep {0} | sleep {0}",
    ],
)
def test_a_cancel_ends_everything(make_context: MakeContext, mark: str, command: str) -> None:
    cancel = Cancel()

    def cancel_once_it_runs() -> None:
        while not sleepers(mark):
            time.sleep(0.01)
        cancel.set()

    watcher = threading.Thread(target=cancel_once_it_runs)
    watcher.start()
    output = run(make_context(cancel=cancel), command.format(mark))
    watcher.join()
    assert output == ToolOutput(content="[cancelled; no output]", is_error=True)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux lets a supervisor take in orphans")
@pytest.mark.parametrize(
    "command",
    [
        "sleep {0} &",
        "nohup sleep {0} > /dev/null 2>&1 &",
        "setsid sleep {0} &",
        "(setsid sh -c 'sleep {0} & sleep {0}' > /dev/null 2>&1 &)",
        "(trap '' TERM; sleep {0} & sleep {0}) & disown -a",
    ],
)
def test_what_is_left_running_is_ended_and_said(context: ToolContext, mark: str, command: str) -> None:
    output = run(context, f"{command.format(mark)}\nuntil pgrep -f '^sleep {mark}' > /dev/null; do :; done; echo done")
    assert "left running were ended]\ndone\n" in output.content
    assert not output.is_error


def test_a_command_that_kills_its_own_process_group_ends_alone(context: ToolContext) -> None:
    assert run(context, "echo a; kill -9 0; echo b").content == "[exit 137]\na\n"


@needs_signal_scope
def test_a_command_can_signal_neither_its_supervisor_nor_a_stranger(context: ToolContext, mark: str) -> None:
    stranger = subprocess.Popen(["sleep", mark])
    try:
        output = run(context, f"kill -9 $PPID; kill -9 {stranger.pid}; echo alive")
        assert stranger.poll() is None
    finally:
        stranger.kill()
        stranger.wait()
    assert output.content.count("Operation not permitted") == 2
    assert output.content.endswith("alive\n")


def test_a_supervisor_that_dies_takes_the_command_with_it(make_context: MakeContext, mark: str) -> None:
    def kill_the_supervisor() -> None:
        while not (found := sleepers(mark)):
            time.sleep(0.01)
        os.kill(found[0].parents()[1].pid, 9)

    killer = threading.Thread(target=kill_the_supervisor)
    killer.start()
    output = run(make_context(), f"sleep {mark}; true")
    killer.join()
    assert output.is_error
    assert "the process that watched it was killed" in output.content


def test_a_host_that_is_killed_leaves_no_command_behind(workspace: Workspace, mark: str) -> None:
    command = f"sleep {mark} & (setsid sleep {mark} &); wait"
    host = psutil.Popen([sys.executable, "-c", HOST + "run(sys.argv[2], 60)", workspace.root, command])
    while len(sleepers(mark)) < 2:
        assert host.poll() is None
        time.sleep(0.02)
    host.kill()
    host.wait()
    for _ in range(500):
        if not sleepers(mark):
            return
        time.sleep(0.02)
    pytest.fail("the command outlived its host")


def test_two_commands_at_once_do_not_meet(make_context: MakeContext, workspace: Workspace) -> None:
    results: dict[int, str] = {}

    def work(number: int) -> None:
        other = Workspace(workspace.root)
        base = make_context(on=other)
        context = ToolContext(
            workspace=other,
            cancel=Cancel(),
            call_id=f"call{number:05}",
            capture_folder=base.capture_folder,
            arrival_tokens=2000,
            count_tokens=base.count_tokens,
            artifacts=base.artifacts,
        )
        results[number] = run(context, f"for i in 1 2 3; do echo {number}; sleep 0.01; done").content

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {number: "[exit 0]\n" + f"{number}\n" * 3 for number in range(6)}


@pytest.mark.parametrize(
    ("command", "problem"),
    [("echo a\0b", "cannot be passed"), ("echo \ud800", "cannot be passed"), ("#" * 200_000, "put a long command")],
)
def test_a_command_that_cannot_be_passed_is_refused(context: ToolContext, command: str, problem: str) -> None:
    with pytest.raises(ToolError, match=problem):
        run(context, command)
    assert not list(context.capture_folder.glob("*.out"))


def test_without_a_place_for_its_output_nothing_is_run(context: ToolContext, workspace: Workspace) -> None:
    context.capture_folder.parent.mkdir()
    context.capture_folder.write_text("a file in its place")
    with pytest.raises(ToolError, match=r"no place for the output.*nothing was run"):
        run(context, "touch ran")
    assert not (workspace.root / "ran").exists()


def test_the_limit_of_the_timeout_is_in_the_schema_and_kept(context: ToolContext) -> None:
    assert bash.schema.parameters["properties"]["timeout"]["maximum"] == 600
    assert bash.timeout_s > 600
    assert bash.policy is Policy.ASK
    with pytest.raises(ToolArgumentsError, match="<= 600"):
        bash.body(context, {"command": "true", "timeout": 601})


def test_a_workspace_that_is_gone_is_said(context: ToolContext, workspace: Workspace) -> None:
    workspace.root.rmdir()
    with pytest.raises(WorkspaceError, match="is not there"):
        run(context, "true")


def test_running_leaves_no_handle_and_no_zombie(context: ToolContext) -> None:
    run(context, "true")
    handles = len(list(Path("/proc/self/fd").iterdir()))
    for command in ("true", "sleep 5 &", "exit 1"):
        run(context, command)
    with pytest.raises(ToolError):
        run(context, "a\0")
    assert len(list(Path("/proc/self/fd").iterdir())) == handles
    assert not psutil.Process().children()


@needs_landlock
@pytest.mark.parametrize(
    "command",
    [
        "echo x > {outside}/new",
        "echo x >> {outside}/file",
        ": > {outside}/file",
        "truncate -s 0 {outside}/file",
        "mkdir {outside}/folder",
        "rm {outside}/file",
        "mv {outside}/file ./taken",
        "mv inside {outside}/moved",
        "ln {outside}/file hard && echo x > hard",
        "ln -s {outside}/file soft && echo x > soft",
        "bash -c 'setsid bash -c \"echo x > {outside}/new\"'",
        "python3 -c \"import os; os.rename('inside', '{outside}/moved')\"",
    ],
)
def test_nothing_outside_the_workspace_is_written(
    context: ToolContext, workspace: Workspace, tmp_path: Path, command: str
) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "file").write_text("kept")
    (workspace.root / "inside").write_text("x")
    run(context, command.format(outside=outside))
    assert [path.name for path in outside.iterdir()] == ["file"]
    assert (outside / "file").read_text() == "kept"


@needs_landlock
def test_the_workspace_and_a_temporary_folder_can_be_written(context: ToolContext, workspace: Workspace) -> None:
    output = run(
        context, "echo x > a; mkdir b; ln a b/ && mktemp; mv a b/c; rm -r b; echo > /dev/null; git init -q . && echo ok"
    )
    assert output.content.endswith("ok\n")
    assert str(context.capture_folder / "tmp") in output.content
    assert (workspace.root / ".git").is_dir()


@needs_landlock
def test_a_denied_write_says_where_writing_is_possible(context: ToolContext, tmp_path: Path) -> None:
    output = run(context, f"touch {tmp_path}/x")
    assert "it may write only in the workspace and $TMPDIR" in output.content


@pytest.mark.skipif(sys.platform != "linux", reason="the filter is of Linux")
def test_without_landlock_a_command_writes_where_it_can_and_the_machine_is_described_so(
    workspace: Workspace, tmp_path: Path
) -> None:
    program = f"{HOST}{WITHOUT_LANDLOCK}print(describe_confinement())\nrun(sys.argv[2], 20)"
    command = f"echo ${{TMPDIR:-unset}}; echo x > {tmp_path}/outside; (setsid sleep 9 &)"
    host = subprocess.run(
        [sys.executable, "-c", program, workspace.root, command],
        env={name: value for name, value in os.environ.items() if name != "TMPDIR"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert host.stdout.split("\n")[:3] == [
        "no Landlock here: a command can write wherever you can, so approve it before it runs",
        "[exit 0; 1 processes left running were ended]",
        "unset",
    ], host.stderr
    assert (tmp_path / "outside").read_text() == "x\n"


def test_without_a_python_to_supervise_with_the_process_group_is_ended(workspace: Workspace, mark: str) -> None:
    program = f"{HOST}sys.executable = ''\nfor command in sys.argv[2:]: run(command, 0.7)"
    commands = ["echo a; exit 3", f"sleep {mark} & echo b", f"(trap '' TERM; sleep {mark}) & sleep {mark}", "kill -9 0"]
    host = subprocess.run(
        [sys.executable, "-c", program, workspace.root, *commands], capture_output=True, text=True, check=True
    )
    # A shell that is ended may have said "Terminated" of its own child before, or not.
    told = [
        line.replace("; no output", "") for line in host.stdout.split("\n") if line in ("a", "b") or line[:1] == "["
    ]
    assert told == [
        "[exit 3]",
        "a",
        "[exit 0]",
        "b",
        "[timed out after 0.7 s; timeout may be up to 600]",
        "[exit 137]",
    ]
