"""What the runtime takes of memory above a process that holds the same model and context alone.

Two processes do the same: one runs the forced session, the other evaluates and generates as many tokens in the bare
loop. Both are measured from outside, while they wait. RSS is what is compared: in it stands all that is resident, of
the weights (mapped whole by both) as of Python, of libraries and of the heap. USS leaves out pages that another process
has mapped too, which the weights are or are not, depending on who else runs: it is reported beside it.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import msgspec
import psutil

from ..kernels.errors import EngineError
from .bare_loop import BareParameters
from .forced_session import HeldSession

STDERR_SHOWN_BYTES = 2000
END_S = 20.0
"""How long a process may take to end by itself."""


class ProcessMemory(msgspec.Struct, frozen=True, kw_only=True):
    """Resident, and resident in this process alone."""

    rss_bytes: int
    uss_bytes: int


class MemoryComparison(msgspec.Struct, frozen=True, kw_only=True):
    """The two processes, each holding `tokens` tokens."""

    session: ProcessMemory
    bare: ProcessMemory
    tokens: int

    @property
    def own_rss_bytes(self) -> int:
        return self.session.rss_bytes - self.bare.rss_bytes

    @property
    def own_uss_bytes(self) -> int:
        return self.session.uss_bytes - self.bare.uss_bytes


def compare_memory(model: Path, parameters: BareParameters) -> MemoryComparison:
    """Run both processes one after the other. Raises EngineError where one fails, with what it said."""
    with _held("forced_session", [str(model), *parameters.arguments()]) as (session, said):
        held = msgspec.json.decode(said, type=HeldSession)
        with_session = _measure(session)
    counts = [str(held.prefilled), str(held.generated)]
    with _held("bare_loop", [str(model), *parameters.arguments(), *counts]) as (bare, _):
        alone = _measure(bare)
    return MemoryComparison(session=with_session, bare=alone, tokens=held.prefilled + held.generated)


@contextlib.contextmanager
def _held(module: str, arguments: list[str]) -> Iterator[tuple[psutil.Process, bytes]]:
    """Run a module of this package until it has said one line; it ends with the context."""
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
            yield psutil.Process(process.pid), said
        finally:
            process.stdin.close()
            # It takes its folder away first.
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(END_S)
            process.kill()


def _end_of(errors: IO[bytes]) -> str:
    errors.seek(0)
    return errors.read()[-STDERR_SHOWN_BYTES:].decode("utf-8", "replace").strip()


def _measure(process: psutil.Process) -> ProcessMemory:
    memory = process.memory_full_info()
    return ProcessMemory(rss_bytes=memory.rss, uss_bytes=memory.uss)
