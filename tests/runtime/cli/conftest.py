"""What tests of the command line share: the installed program as a real process, with pipes or on a terminal."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import pytest

from chapbook.bench.tiny_models import USER_DEFINED, byte_level_vocabulary

PROGRAM = Path(sys.executable).with_name("chapbook")
PATIENCE_S = 60
"""How long to wait for what must come. Generous: a busy machine must not fail a test."""


@dataclass
class Terminal:
    """The program on a pseudo-terminal of its own. `shown` is all that it has written, escape sequences included."""

    process: subprocess.Popen
    handle: int
    shown: str = ""
    _seen: int = 0
    _bytes: bytes = field(default=b"", repr=False)

    def wait_for(self, pattern: str) -> re.Match:
        """Return the next match of `pattern`, behind the one that was waited for last."""
        deadline = time.monotonic() + PATIENCE_S
        while not (found := re.compile(pattern).search(self.shown, self._seen)):
            assert time.monotonic() < deadline, f"{pattern!r} did not come; there was:\n{self.shown}"
            assert self._read(), f"the program ended before {pattern!r} came; there was:\n{self.shown}"
        self._seen = found.end()
        return found

    def send(self, keys: str) -> None:
        """Type `keys`."""
        os.write(self.handle, keys.encode())

    def end(self) -> int:
        """Wait for the program to end and return its exit code."""
        deadline = time.monotonic() + PATIENCE_S
        while self._read():
            assert time.monotonic() < deadline, f"the program did not end; there was:\n{self.shown}"
        return self.process.wait(PATIENCE_S)

    def _read(self) -> bool:
        """Take in what is there, waiting a little. False once the program has closed the terminal."""
        if not select.select([self.handle], [], [], 0.2)[0]:
            return True
        try:
            data = os.read(self.handle, 65536)
        except OSError:
            return False
        self._bytes += data
        self.shown = self._bytes.decode("utf-8", "replace")
        # prompt_toolkit asks the terminal where the cursor is, and waits for the answer.
        if b"\x1b[6n" in data:
            os.write(self.handle, b"\x1b[1;1R")
        return bool(data)


@pytest.fixture
def home(tmp_path):
    """Return a home folder without configuration, models or history."""
    folder = tmp_path / "home"
    folder.mkdir()
    return folder


@pytest.fixture
def workspace(tmp_path):
    """Return a workspace with a README."""
    folder = tmp_path / "workspace"
    folder.mkdir()
    (folder / "README.md").write_text("# chapbook\n\nA chapbook is a small, cheap booklet.\n")
    return folder


@pytest.fixture(scope="session")
def templates(tmp_path_factory):
    """Return a folder that all programs share: what is learnt of a template is learnt once."""
    return tmp_path_factory.mktemp("templates")


@pytest.fixture
def cache(tmp_path, templates):
    """Return a cache folder without snapshots, which would make the next test's first request warm."""
    folder = tmp_path / "cache"
    (folder / "chapbook").mkdir(parents=True)
    (folder / "chapbook" / "templates").symlink_to(templates)
    return folder


@pytest.fixture
def environment(home, cache):
    """Return the environment of a program that finds nothing of the developer's own."""
    kept = {name: os.environ[name] for name in ("PATH", "LANG", "LD_LIBRARY_PATH", "PYTHONPATH") if name in os.environ}
    own = {"HOME": str(home), "XDG_CACHE_HOME": str(cache)}
    return {**kept, **own, "TERM": "xterm-256color", "LC_ALL": "C.UTF-8"}


@pytest.fixture
def start(environment, workspace):
    """Return a function that starts the program in the workspace with pipes."""
    started = []

    def start_program(*arguments, env=None, **options):
        process = subprocess.Popen(
            [PROGRAM, *map(str, arguments)],
            cwd=workspace,
            env=environment | (env or {}),
            **{"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options},
        )
        started.append(process)
        return process

    yield start_program
    for process in started:
        _end(process)


@pytest.fixture
def run(start):
    """Return a function that runs the program to its end: its exit code, and both outputs as text."""

    def run_program(*arguments, typed="", **options):
        process = start(*arguments, **options)
        out, err = process.communicate(typed.encode(), timeout=PATIENCE_S)
        return subprocess.CompletedProcess(arguments, process.returncode, out.decode(), err.decode())

    return run_program


@pytest.fixture
def terminal(environment, workspace):
    """Return a function that starts the program in the workspace on a terminal of 24 rows and 100 columns."""
    opened = []

    def start_program(*arguments, env=None, program=PROGRAM, **streams):
        handle, inner = pty.openpty()
        _resize(inner)
        process = subprocess.Popen(
            [program, *map(str, arguments)],
            cwd=workspace,
            env=environment | (env or {}),
            **{"stdin": inner, "stdout": inner, "stderr": inner, **streams},
            start_new_session=True,
            preexec_fn=_take_terminal,  # noqa: PLW1509  it makes one system call; nothing else opens a terminal
        )
        os.close(inner)
        opened.append((process, handle))
        return Terminal(process, handle)

    yield start_program
    for process, handle in opened:
        _end(process)
        os.close(handle)


@pytest.fixture
def large_file(workspace):
    """Return the name of a file that a tiny model reads for seconds."""
    (workspace / "large.txt").write_text(
        "".join(f"{number} sixty-odd characters of text on a line {'.' * 12}\n" for number in range(220))
    )
    return "large.txt"


@pytest.fixture
def logged(workspace):
    """Return a function (type) -> the data of the newest session's events of that type."""

    def events(kind):
        newest = max((workspace / ".chapbook" / "sessions").iterdir(), key=lambda folder: folder.stat().st_ctime_ns)
        lines = (newest / "log.jsonl").read_text().splitlines()
        return [event["data"] for event in map(json.loads, lines) if event["type"] == kind]

    return events


@pytest.fixture(scope="session")
def tiny_llama(tiny):
    """Return the path of a tiny model: it answers with noise, in a moment. It has no token for the markup of calls."""
    whole = byte_level_vocabulary()
    kept = [index for index, kind in enumerate(whole.types) if kind != USER_DEFINED]
    tokens, types = (tuple(each[index] for index in kept) for each in (whole.tokens, whole.types))
    return tiny("llama", vocab=msgspec.structs.replace(whole, tokens=tokens, types=types))


def _resize(handle):
    import fcntl  # noqa: PLC0415  only where there are terminals
    import struct  # noqa: PLC0415  with it
    import termios  # noqa: PLC0415  with it

    fcntl.ioctl(handle, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 100, 0, 0))


def _take_terminal():
    """Make standard input the controlling terminal, so that Ctrl-C reaches the program as a signal."""
    import fcntl  # noqa: PLC0415  only where there are terminals
    import termios  # noqa: PLC0415  with it

    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


def _end(process):
    if process.poll() is None:
        process.send_signal(signal.SIGKILL)
    for stream in (process.stdin, process.stdout, process.stderr):
        if stream is not None:
            with contextlib.suppress(OSError):
                stream.close()
    process.wait(PATIENCE_S)
