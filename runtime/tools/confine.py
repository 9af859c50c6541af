"""Runs a command as a tree of processes that writes only where it may, and that ends as a whole. Linux.

This file is a program too: ``python -I -S confine.py REPORT_FD [WRITABLE ...] -- COMMAND ...``. It needs nothing but
the standard library and imports nothing of chapbook, so that it starts in milliseconds and without threads. It takes
in every orphan of the command (a child subreaper), so that double forks and new sessions do not get away, ends what
is left when the command ends or SIGTERM comes, and writes to REPORT_FD the command's process group, its exit code
(128 + n for signal n), and how many processes it had to end.

Landlock stops writes, truncation, moves, hard links and links that lead out, and, from ABI 6, signals to processes
outside. It does not stop chmod or touch of existing files, reading, or the network; and what lies below an allowed
folder cannot be left out, so `.git` and a store in the workspace can be written. With it come no setuid programs.
Numbers from linux/landlock.h, linux/prctl.h.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import stat
import struct
import sys
import time
from collections.abc import Iterator

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_QUERY_VERSION = 1
_RULE_PATH_BENEATH = 1
_SET_PDEATHSIG, _SET_CHILD_SUBREAPER, _SET_NO_NEW_PRIVS = 1, 36, 38

_WRITE_FILE, _TRUNCATE, _REFER = 1 << 1, 1 << 14, 1 << 13
# REMOVE_DIR, REMOVE_FILE, MAKE_CHAR, MAKE_DIR, MAKE_REG, MAKE_SOCK, MAKE_FIFO, MAKE_BLOCK, MAKE_SYM: bits 4 to 12.
_CHANGE_FOLDER = sum(1 << bit for bit in range(4, 13))
_SCOPE_SIGNAL = 1 << 1

_GRACE_S = 0.1
_GIVE_UP_S = 5.0  # a process in uninterruptible sleep does not end, whatever it is sent
_CANNOT_RUN = 126


def landlock_version() -> int:
    """Return the ABI version of this kernel's Landlock, 0 where there is none or it is switched off."""
    if sys.platform != "linux":
        return 0
    return max(0, _system_call(_CREATE_RULESET, None, ctypes.c_size_t(0), ctypes.c_uint32(_QUERY_VERSION)))


def confinement_available() -> bool:
    """Whether commands can be confined on this machine."""
    return landlock_version() > 0


def describe_confinement() -> str:
    """Return one line for a person on what holds commands back here."""
    version = landlock_version()
    if version:
        return f"Landlock ABI {version}: a command writes only in the workspace and its temporary folder"
    return "no Landlock here: a command can write wherever you can, so approve it before it runs"


def forbid_writes_outside(writable: list[str]) -> None:
    """Confine this process and its children, for good. `writable`: folders, and files such as /dev/null.

    Raises OSError where the kernel refuses; the process is then not confined.
    """
    version = landlock_version()
    folder_rights = _WRITE_FILE | _CHANGE_FOLDER | (_REFER if version >= 2 else 0) | (_TRUNCATE if version >= 3 else 0)
    file_rights = folder_rights & (_WRITE_FILE | _TRUNCATE)
    # struct landlock_ruleset_attr: handled_access_fs; from ABI 4 handled_access_net; from ABI 6 scoped.
    attributes = struct.pack("=QQQ", folder_rights, 0, _SCOPE_SIGNAL if version >= 6 else 0)
    size = 24 if version >= 6 else 8
    ruleset = _checked(_system_call(_CREATE_RULESET, attributes, ctypes.c_size_t(size), ctypes.c_uint32(0)))
    for path in writable:
        handle = os.open(path, os.O_PATH | os.O_CLOEXEC)
        rights = folder_rights if stat.S_ISDIR(os.fstat(handle).st_mode) else file_rights
        rule = struct.pack("=Qi", rights, handle)
        _checked(_system_call(_ADD_RULE, ruleset, _RULE_PATH_BENEATH, rule, ctypes.c_uint32(0)))
        os.close(handle)
    _control(_SET_NO_NEW_PRIVS, 1)
    _checked(_system_call(_RESTRICT_SELF, ruleset, ctypes.c_uint32(0)))
    os.close(ruleset)


class _Stop(Exception):
    pass


def main(arguments: list[str]) -> None:
    """Run the command of the command line, and leave as it left."""
    report_fd = int(arguments[0])
    split = arguments.index("--")
    _control(_SET_CHILD_SUBREAPER, 1)
    _control(_SET_PDEATHSIG, signal.SIGTERM)
    os.set_inheritable(report_fd, False)
    status: int | None = None
    command = 0
    try:
        signal.signal(signal.SIGTERM, _raise_stop)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())  # the host's thread may have blocked it
        command = os.fork()
        if command == 0:
            _become(arguments[split + 1 :], writable=arguments[1:split])
        os.write(report_fd, f"{command}\n".encode())
        while status is None:
            ended, raw_status = os.waitpid(-1, 0)
            status = raw_status if ended == command else None
    except _Stop:
        pass
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    ended_count = _end_all()
    exit_code = -signal.SIGTERM if status is None else os.waitstatus_to_exitcode(status)
    os.write(report_fd, f"{exit_code if exit_code >= 0 else 128 - exit_code}\n{ended_count}\n".encode())


def _become(command: list[str], *, writable: list[str]) -> None:
    """Turn this child into the command, in a session and process group of its own."""
    try:
        os.setsid()
        for number in (signal.SIGTERM, signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(number, signal.SIG_DFL)
        if writable:
            forbid_writes_outside(writable)
        os.execvp(command[0], command)
    except OSError as problem:
        os.write(2, f"chapbook: cannot run {command[0]}: {problem}\n".encode())
    os._exit(_CANNOT_RUN)


def _end_all() -> int:
    """End every process below this one: SIGTERM, a grace, SIGKILL until none is left. Return how many there were."""
    started_s = time.monotonic()
    seen: set[int] = set()
    while time.monotonic() - started_s < _GIVE_UP_S:
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            break
        kill = time.monotonic() - started_s > _GRACE_S
        for process in _descendants():
            if kill or process not in seen:
                _signal(process, signal.SIGKILL if kill else signal.SIGTERM)
            seen.add(process)
        time.sleep(0.005)
    return len(seen)


def _descendants() -> list[int]:
    """Return the processes below this one that have not ended, by the parents that /proc gives."""
    children: dict[int, list[int]] = {}
    for parent, process in _parents():
        children.setdefault(parent, []).append(process)
    found = []
    pending = [os.getpid()]
    while pending:
        below = children.get(pending.pop(), [])
        found += below
        pending += below
    return found


def _parents() -> Iterator[tuple[int, int]]:
    with os.scandir("/proc") as entries:
        for entry in entries:
            if not entry.name.isdigit():
                continue
            with contextlib.suppress(OSError), open(f"{entry.path}/stat", "rb") as file:  # noqa: PTH123 (starts faster)
                # "pid (name) state parent …": the name may hold anything, parentheses too.
                state, parent = file.read().rpartition(b")")[2].split()[:2]
                if state != b"Z":
                    yield int(parent), int(entry.name)


def _signal(process: int, number: int) -> None:
    with contextlib.suppress(OSError):
        os.kill(process, number)


def _raise_stop(_number: int, _frame: object) -> None:
    raise _Stop


def _control(option: int, value: int) -> None:
    _checked(ctypes.CDLL(None, use_errno=True).prctl(option, ctypes.c_ulong(value), 0, 0, 0))


def _system_call(number: int, *arguments: object) -> int:
    return int(ctypes.CDLL(None, use_errno=True).syscall(ctypes.c_long(number), *arguments))


def _checked(result: int) -> int:
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result


if __name__ == "__main__":
    main(sys.argv[1:])
