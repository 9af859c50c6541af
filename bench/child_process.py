"""Running a module of this package as a process of its own until it has said one line on standard output."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import IO

from ..kernels.errors import EngineError

STDERR_SHOWN_BYTES = 2000
END_S = 20.0
"""How long a process may take to end by itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldProcess:
    """A process that has said its line, and waits until its standard input ends."""

    pid: int
    said: bytes
    _process: subprocess.Popen[bytes]

    def kill(self) -> None:
        """End it at once, with nothing done any more (SIGKILL)."""
        self._process.kill()
        self._process.wait()


@contextlib.contextmanager
def held_process(module: str, arguments: Sequence[str]) -> Iterator[HeldProcess]:
    """Run `module` of this package; it ends with the context. Raises EngineError where it ended before, with what it
    said."""
    # -P: the folder that this is called in is no place to import from.
    command = [sys.executable, "-P", "-m", f"{__package__}.{module}", *arguments]
    with (
        tempfile.TemporaryFile() as errors,
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors) as process,
    ):
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            said = process.stdout.readline()
            if not said:
                process.wait()
                raise EngineError(f"a process to measure ended with {process.returncode}: {_end_of(errors)}")
            yield HeldProcess(pid=process.pid, said=said, _process=process)
        finally:
            process.stdin.close()
            # It takes its folder away first.
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(END_S)
            process.kill()


def _end_of(errors: IO[bytes]) -> str:
    errors.seek(0)
    return errors.read()[-STDERR_SHOWN_BYTES:].decode("utf-8", "replace").strip()
