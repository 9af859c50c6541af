"""A hook that is a program: JSON on its standard input, its exit status and standard output are the answer.

The input is one object: `event` (``before`` or ``after``), `tool`, `arguments`, `call_id`, `session`, `workspace`; for
``after`` also `is_error`, `content` (at most `MOST_CONTENT_BYTES` of it) and `content_bytes`, the size of the whole.

========  ===========================================  =====================================================
exit      before                                       after
========  ===========================================  =====================================================
0         nothing printed: allow; else                 what it printed is added: plain text, or
          ``{"decision": "allow|deny|ask",             ``{"context": "..."}``
          "reason": "..."}``
2         deny; standard error is the reason           nothing added, reported
other     deny; the reason says what happened          nothing added, reported
========  ===========================================  =====================================================

A program that does not start, runs too long or prints too much is like any other exit status.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import tempfile
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import msgspec

from ..kernels.errors import ToolError, UsageError
from .calls import LoggedCall
from .config_keys import HookCommand, HooksConfig
from .events import SessionId
from .hooks import Allow, Ask, Deny, HookDecision, Hooks
from .tools.spec import Tool, ToolOutput

MOST_OUTPUT_BYTES = 4 << 20
MOST_CONTENT_BYTES = 64 * 1024

DENIES = 2
"""The exit status by which a program denies."""

DRAIN_GRACE_S = 1.0
"""How long to wait for the rest of an output whose program has ended: another process may hold the pipe open."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandHook:
    """Runs `command` (not in a shell) in the workspace for calls of `tools`, of every tool where that is empty."""

    command: tuple[str, ...]
    session: SessionId
    workspace: Path
    tools: frozenset[str] = frozenset()
    timeout_s: float = 10.0

    def __post_init__(self) -> None:
        if not self.command:
            raise UsageError("a hook needs a command: the program and its arguments, one text each")

    @property
    def name(self) -> str:
        return shlex.join(self.command)

    def before(self, call: LoggedCall, tool: Tool) -> HookDecision:
        """Return what the program decides; a program that fails has decided to deny."""
        if self.tools and tool.name not in self.tools:
            return Allow()
        try:
            ended = self._run(self._input("before", call))
            if ended.exit_status == DENIES:
                reason = ended.errors.decode("utf-8", "replace").strip()
                return Deny(reason or f"the hook {self.name} refused this call of {call.name}")
            return _decision(_printed(ended))
        except ToolError as error:
            return Deny(f"the hook {self.name} {error}, so {call.name} was not run")

    def after(self, call: LoggedCall, output: ToolOutput) -> str | None:
        """Return what the program adds to a result, None for nothing. Raises ToolError where it failed."""
        if self.tools and call.name not in self.tools:
            return None
        shown = _bounded(output)
        about = {"content": shown.text, "content_bytes": shown.whole_bytes, "is_error": output.is_error}
        return _context(_printed(self._run(self._input("after", call) | about))) or None

    def _input(self, event: str, call: LoggedCall) -> dict[str, Any]:
        return {
            "event": event,
            "tool": call.name,
            "arguments": call.arguments,
            "call_id": call.id,
            "session": self.session,
            "workspace": str(self.workspace),
        }

    def _run(self, about: dict[str, Any]) -> _Ended:
        try:
            return _run(self.command, json.dumps(about).encode(), folder=self.workspace, timeout_s=self.timeout_s)
        except (OSError, ValueError) as error:
            raise ToolError(f"could not be started ({error})") from error


def command_hooks(config: HooksConfig, *, session: SessionId, workspace: Path) -> Hooks:
    """Return the hooks that a configuration names, for one session."""

    def hooks(commands: Sequence[HookCommand]) -> list[CommandHook]:
        return [
            CommandHook(
                command=one.command,
                session=session,
                workspace=workspace,
                tools=frozenset(one.tools),
                timeout_s=one.timeout_s,
            )
            for one in commands
        ]

    return Hooks(
        before_hooks=tuple(hook.before for hook in hooks(config.before)),
        after_hooks=tuple(hook.after for hook in hooks(config.after)),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ended:
    """How a program ended; a negative status is the signal that killed it."""

    exit_status: int
    output: bytes
    output_bytes: int
    errors: bytes


@dataclass(frozen=True, slots=True)
class _Bounded:
    text: str
    whole_bytes: int


def _bounded(output: ToolOutput) -> _Bounded:
    """Return the start of an output and the size of the whole, without reading more of its file than is shown."""
    data = output.content.encode("utf-8", "replace")
    whole_bytes = len(data)
    if output.file is not None:
        with suppress(OSError), output.file.open("rb") as file:
            data += file.read(MOST_CONTENT_BYTES)
            whole_bytes += os.fstat(file.fileno()).st_size
    return _Bounded(data[:MOST_CONTENT_BYTES].decode("utf-8", "replace"), whole_bytes)


def _printed(ended: _Ended) -> str:
    """Return what a program printed that ended well. Raises ToolError, its message going on from the hook's name."""
    if ended.exit_status < 0:
        raise ToolError(f"was killed by {_signal_name(-ended.exit_status)}")
    if ended.exit_status:
        said = ended.errors.decode("utf-8", "replace").strip()
        raise ToolError(f"ended with status {ended.exit_status}" + (f" ({said})" if said else ""))
    if ended.output_bytes > MOST_OUTPUT_BYTES:
        raise ToolError(f"printed {ended.output_bytes:,} bytes, the limit is {MOST_OUTPUT_BYTES:,}")
    try:
        return ended.output.decode().strip()
    except UnicodeDecodeError as error:
        raise ToolError("printed something that is not UTF-8") from error


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


class _Answer(msgspec.Struct, frozen=True):
    decision: str
    reason: str = ""


class _Context(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    context: str


def _decision(printed: str) -> HookDecision:
    if not printed:
        return Allow()
    try:
        answer = msgspec.json.decode(printed, type=_Answer)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ToolError(f"printed something that is no decision ({error}): {_start_of(printed)}") from error
    match answer.decision:
        case "allow":
            return Allow()
        case "ask":
            return Ask(answer.reason)
        case "deny":
            return Deny(answer.reason or "a hook denied it and gave no reason")
    raise ToolError(f"decided {_start_of(answer.decision)!r}, which is none of allow, deny and ask")


def _context(printed: str) -> str:
    try:
        return msgspec.json.decode(printed, type=_Context).context
    except (msgspec.MsgspecError, RecursionError):
        return printed


def _start_of(text: str) -> str:
    return text if len(text) <= 200 else f"{text[:200]}…"


class _Drain:
    """Reads a pipe to its end on a thread of its own and keeps the start of it."""

    def __init__(self, pipe: IO[bytes]) -> None:
        self.kept = bytearray()
        self.total_bytes = 0
        self._pipe = pipe
        self._thread = threading.Thread(target=self._read, name="chapbook hook output", daemon=True)
        self._thread.start()

    def _read(self) -> None:
        with self._pipe:
            while data := self._pipe.read(MOST_OUTPUT_BYTES):
                self.kept += data[: MOST_OUTPUT_BYTES - len(self.kept)]
                self.total_bytes += len(data)

    def wait(self) -> bytes:
        self._thread.join(DRAIN_GRACE_S)
        return bytes(self.kept)


def _run(command: Sequence[str], given: bytes, *, folder: Path, timeout_s: float) -> _Ended:
    """Run a program in a process group of its own; nothing of the group is left afterwards.

    Raises OSError and ValueError where it does not start, ToolError where it runs too long.
    """
    # A file, not a pipe: a program that does not read its input must not block us.
    with tempfile.TemporaryFile() as standard_input:
        standard_input.write(given)
        standard_input.seek(0)
        process = subprocess.Popen(
            command,
            stdin=standard_input,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            cwd=folder,
            start_new_session=True,
        )
    assert process.stdout is not None
    assert process.stderr is not None
    output, errors = _Drain(process.stdout), _Drain(process.stderr)
    try:
        exit_status = process.wait(timeout_s)
    except subprocess.TimeoutExpired as error:
        raise ToolError(f"ran longer than its limit of {timeout_s:g} s") from error
    finally:
        _kill_group(process)
    return _Ended(exit_status=exit_status, output=output.wait(), output_bytes=output.total_bytes, errors=errors.wait())


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    if hasattr(os, "killpg"):
        # PermissionError: macOS, where only a zombie is left of the group.
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
    else:
        process.kill()
    process.wait()
