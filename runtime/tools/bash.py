"""`bash`: a command in a process tree of its own, captured to a file, with a limit, and never left running.

The command writes to a pipe that a thread empties into the file: were it given the file itself, ``> /dev/stderr``
would truncate what stands there already.

On Linux `confine` runs it: it keeps hold of every process that the command starts and, where the kernel has Landlock,
lets it write only in the workspace. Elsewhere the process group is what can be ended.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, BinaryIO

from msgspec import Meta

from ...kernels.errors import ToolError
from ..gate_intake import BYTES_A_TOKEN
from . import confine
from .captures import capture_path
from .declare import tool
from .spec import ToolContext, ToolOutput

DEFAULT_TIMEOUT_S = 120
MOST_TIMEOUT_S = 600
CAPTURE_LIMIT_BYTES = 1 << 30

_LONGEST_POLL_S = 0.05
_SUPERVISOR_LIMIT_S = 8.0
_DRAIN_LIMIT_S = 2.0


@tool(writes=True, timeout_s=MOST_TIMEOUT_S + 30)
def bash(
    context: ToolContext,
    command: str,
    timeout: Annotated[int, Meta(ge=1, le=MOST_TIMEOUT_S, description="seconds")] = DEFAULT_TIMEOUT_S,
) -> ToolOutput:
    """Run a shell command in the workspace."""
    return run_command(context, command, timeout_s=timeout)


def run_command(
    context: ToolContext, command: str, *, timeout_s: float, capture_limit_bytes: int = CAPTURE_LIMIT_BYTES
) -> ToolOutput:
    """Run a command and return its status line and output; the output as a file where it is large.

    Raises ToolError where there is no bash or the command cannot be passed to it, WorkspaceError where the workspace
    is gone.
    """
    program = shutil.which("bash")
    if program is None:
        raise ToolError("bash is not available on this machine: install it or put it on PATH")
    context.workspace.check()
    capture = capture_path(context.capture_folder, context.call_id)
    with _created(capture) as output:
        try:
            run = _start(context, [program, "-c", command])
        except BaseException:
            capture.unlink()
            raise
        drain = _Drain(run.process, output, capture_limit_bytes)
        drain.start()
        stopped = _wait(run.process, context, drain, timeout_s)
        ending = _settle(run, is_stopped=bool(stopped))
        drain.finish()
    return _result(context, capture, run, ending, stopped or drain.problem)


@dataclass(frozen=True, slots=True)
class _Run:
    """A command that was started: its process or supervisor, and where a supervisor reports (-1: there is none)."""

    process: subprocess.Popen[bytes]
    report_fd: int = -1
    is_confined: bool = False


@dataclass(frozen=True, slots=True)
class _Ending:
    exit_code: int
    left_running: int = 0
    lost_supervisor: bool = False


class _Drain(threading.Thread):
    """Empties a command's pipe into the capture. `problem` says why it stopped before the end, if it did."""

    def __init__(self, process: subprocess.Popen[bytes], output: BinaryIO, limit_bytes: int) -> None:
        super().__init__(name="chapbook capture", daemon=True)
        assert process.stdout is not None
        self.problem = ""
        self._pipe = process.stdout
        self._output = output
        self._left_bytes = limit_bytes
        self._limit_bytes = limit_bytes

    def run(self) -> None:
        """Copy until every writer has closed the pipe, or the limit, or a write that fails."""
        try:
            while data := os.read(self._pipe.fileno(), 1 << 16):
                _write_all(self._output, data[: self._left_bytes])
                self._left_bytes -= len(data)
                if self._left_bytes < 0:
                    limit = f"its output passed {self._limit_bytes} bytes, the limit"
                    self.problem = f"stopped: {limit}; send it to a file and look at parts of that"
                    return
        except OSError as problem:
            self.problem = f"stopped: its output cannot be captured: {problem.strerror}"
            if problem.errno in (errno.ENOSPC, errno.EDQUOT):
                # The session log is on the same disk: a command must not be able to stop the session.
                with contextlib.suppress(OSError):
                    self._output.truncate(0)
                self.problem = "stopped: no room on the disk for its output, which was let go; free some, or print less"

    def finish(self) -> None:
        """Wait for the rest; a process that got away may hold the pipe open, and is not waited for."""
        self.join(_DRAIN_LIMIT_S)
        if not self.is_alive():
            self._pipe.close()


def _created(path: Path) -> BinaryIO:
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0)
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        return os.fdopen(os.open(path, flags, 0o600), "wb", buffering=0)
    except OSError as problem:
        message = f"there is no place for the output, {path.parent}: {problem.strerror}"
        raise ToolError(f"{message}; nothing was run. Free or unlock it, then try again") from problem


def _write_all(output: BinaryIO, data: bytes) -> None:
    while data:
        data = data[output.write(data) :]


def _start(context: ToolContext, command: list[str]) -> _Run:
    environment = dict(os.environ)
    if not _can_supervise():
        return _Run(_spawn(context, command, environment, ()))
    writable: list[str] = []
    if confine.confinement_available():
        temporary = context.capture_folder / "tmp"
        temporary.mkdir(mode=0o700, exist_ok=True)
        environment["TMPDIR"] = str(temporary)
        writable = [str(context.workspace.root), str(temporary), os.devnull]
    report_fd, write_fd = os.pipe()
    try:
        supervisor = [sys.executable, "-I", "-S", confine.__file__, str(write_fd), *writable, "--", *command]
        process = _spawn(context, supervisor, environment, (write_fd,))
    except BaseException:
        os.close(report_fd)
        raise
    finally:
        os.close(write_fd)
    return _Run(process, report_fd, is_confined=bool(writable))


def _can_supervise() -> bool:
    """Whether there is a Linux and a Python to run `confine` with; a frozen host program is not one."""
    return sys.platform == "linux" and bool(sys.executable) and not getattr(sys, "frozen", False)


def _spawn(
    context: ToolContext, command: list[str], environment: dict[str, str], handles: tuple[int, ...]
) -> subprocess.Popen[bytes]:
    try:
        return subprocess.Popen(
            command,
            cwd=context.workspace.root,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            pass_fds=handles,
            start_new_session=os.name == "posix",
        )
    except (ValueError, UnicodeEncodeError) as problem:
        raise ToolError(f"the command cannot be passed to bash: {problem}") from problem
    except OSError as problem:
        context.workspace.check()
        raise ToolError(f"bash cannot be started: {problem.strerror}; put a long command in a file") from problem


def _wait(process: subprocess.Popen[bytes], context: ToolContext, drain: _Drain, timeout_s: float) -> str:
    """Wait for the end; return what the command is to be stopped for, or nothing."""
    deadline_s = time.monotonic() + timeout_s
    pause_s = 0.001
    while process.poll() is None:
        if context.cancel.wait(pause_s):
            return "cancelled"
        if time.monotonic() > deadline_s:
            return f"timed out after {timeout_s:g} s; timeout may be up to {MOST_TIMEOUT_S}"
        if drain.problem:
            return drain.problem
        pause_s = min(_LONGEST_POLL_S, 2 * pause_s)
    return ""


def _settle(run: _Run, *, is_stopped: bool) -> _Ending:
    """End what still runs and return how it ended."""
    if run.report_fd < 0:
        if is_stopped:
            _end_tree(run.process)
        _end_group(run.process.pid)
        return _Ending(_shell_code(run.process.wait()))
    if is_stopped:
        run.process.terminate()
        try:
            run.process.wait(_SUPERVISOR_LIMIT_S)
        except subprocess.TimeoutExpired:
            _end_tree(run.process)
    run.process.wait()
    # The supervisor has ended and no one else holds the other end, so what it wrote is all there.
    report = os.read(run.report_fd, 4096).split()
    os.close(run.report_fd)
    if len(report) < 3:
        if report:
            _end_group(int(report[0]))
        return _Ending(_shell_code(run.process.returncode), lost_supervisor=True)
    return _Ending(int(report[1]), left_running=int(report[2]))


def _shell_code(code: int) -> int:
    return code if code >= 0 else 128 - code


def _end_group(group: int) -> None:
    if os.name == "posix":
        with contextlib.suppress(OSError):
            os.killpg(group, signal.SIGKILL)


def _end_tree(process: subprocess.Popen[bytes]) -> None:
    import psutil  # noqa: PLC0415 (needed only where there is no supervisor, or it hangs)

    with contextlib.suppress(psutil.Error):
        for child in psutil.Process(process.pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                child.kill()
    process.kill()


def _result(context: ToolContext, capture: Path, run: _Run, ending: _Ending, stopped: str) -> ToolOutput:
    is_error = bool(stopped) or ending.exit_code != 0
    notes = [stopped or f"exit {ending.exit_code}"]
    if ending.lost_supervisor and not stopped:
        notes.append("the process that watched it was killed, so others may still run")
    if ending.left_running and not stopped:
        notes.append(f"{ending.left_running} processes left running were ended")
    text = None if capture.stat().st_size > BYTES_A_TOKEN * context.arrival_tokens else _text_of(capture)
    if text is None:
        return ToolOutput(content=f"[{'; '.join(notes)}]", file=capture, is_error=is_error)
    if not text:
        capture.unlink()
        notes.append("no output")
    if is_error and run.is_confined and "Permission denied" in text:
        notes.append("it may write only in the workspace and $TMPDIR")
    status_line = f"[{'; '.join(notes)}]"
    if not text:
        return ToolOutput(content=status_line, is_error=is_error)
    return ToolOutput(content=f"{status_line}\n{text}", is_error=is_error, backing=capture)


def _text_of(capture: Path) -> str | None:
    """Return what was captured; None where it is not all text, so that the file is handed on and no byte is lost."""
    try:
        text = capture.read_bytes().decode()
    except UnicodeDecodeError:
        return None
    return None if "\0" in text else text
