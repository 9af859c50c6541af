"""The command line. This module is what starts: it stays light, and turns every error into a message and a code.

Exit codes: 0 done, 1 the turn ended otherwise or the command failed, 2 usage, 130 interrupted.
"""

from __future__ import annotations

import contextlib
import errno
import os
import sys
import threading
import traceback
from pathlib import Path

FAILED, INTERRUPTED = 1, 130
_NO_ROOM = {errno.ENOSPC, errno.EFBIG, errno.EROFS, getattr(errno, "EDQUOT", errno.ENOSPC)}


def main(argv: list[str] | None = None) -> int:
    """Run chapbook with `argv` (by default the process's arguments) and return its exit code."""
    arguments = sys.argv[1:] if argv is None else argv
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # it was closed when we were started
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: PTH123, SIM115  it stays open
    for stream in (sys.stdout, sys.stderr):
        # A terminal or pipe that cannot take a character gets its escape: no text ends a run.
        with contextlib.suppress(AttributeError, ValueError):
            stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]  # it may be something else
    try:
        from .app import run_app  # noqa: PLC0415  Ctrl-C while it is imported is an interrupt like any other

        code = run_app(arguments)
        sys.stdout.flush()
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        code = INTERRUPTED
    except BrokenPipeError:
        code = _after_closed_pipe()
    except Exception as error:
        code = _failed(error, arguments)
    if threading.active_count() > 1 and any(thread.name == "chapbook worker" for thread in threading.enumerate()):
        # It is in a call that has not returned; the interpreter must not be taken down around it.
        os._exit(code)
    return code


def _after_closed_pipe() -> int:
    """Who read our output has gone: nothing more can be said, and saying so would be the traceback."""
    with contextlib.suppress(OSError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return FAILED


def _failed(error: Exception, arguments: list[str]) -> int:
    from ...kernels.errors import ChapbookError  # noqa: PLC0415  this module stays light

    try:
        if isinstance(error, ChapbookError):
            _tell(str(error))
            code = error.exit_code
        elif isinstance(error, OSError) and (error.filename is not None or error.errno in _NO_ROOM):
            _tell(f"{error.filename or 'a file could not be written'}: {error.strerror}")
            code = FAILED
        else:
            _tell(_unexpected(error))
            code = FAILED
        if "--json" in arguments:
            from .json_lines import error_line  # noqa: PLC0415  this module stays light
            from .terminal import print_json  # noqa: PLC0415  with it

            print_json(error_line(error))
            sys.stdout.flush()
    except BrokenPipeError:
        return _after_closed_pipe()
    return code


def _tell(message: str) -> None:
    from .terminal import visible  # noqa: PLC0415  this module stays light

    sys.stderr.write(f"chapbook: {visible(message)}\n")


def _unexpected(error: Exception) -> str:
    """Return the message for a fault of ours, and keep its traceback."""
    if wants_debug():
        traceback.print_exception(error)
        return f"a fault of chapbook, its traceback is above: {type(error).__name__}: {error}"
    try:
        kept = _keep_traceback(error)
    except OSError:
        return f"a fault of chapbook: {type(error).__name__}: {error}. With --debug it shows its traceback"
    return f"a fault of chapbook: {type(error).__name__}: {error}. Its traceback is in {kept}"


def _keep_traceback(error: Exception) -> Path:
    import platformdirs  # noqa: PLC0415  only for a fault

    folder = platformdirs.user_state_path("chapbook") / "faults"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    path = folder / f"fault-{os.getpid()}.txt"
    path.write_text("".join(traceback.format_exception(error)), encoding="utf-8", errors="backslashreplace")
    return path


def wants_debug() -> bool:
    """Whether faults are shown with their traceback: `chapbook --debug`, or CHAPBOOK_DEBUG."""
    return bool(os.environ.get("CHAPBOOK_DEBUG"))
