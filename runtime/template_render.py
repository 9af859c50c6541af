"""Renders untrusted chat templates in a child process that is held by limits (`template_child`)."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from ..kernels.errors import TemplateRefused

FROZEN_NOW = "2024-07-26T12:00:00"
"""What a template reads as the time: the date that Llama 3's template falls back to. A real one in the prefix would
cost a cold prefill each day."""

CPU_S = 2
MEMORY_BYTES = 1 << 30
OUTPUT_CHARS = 16 << 20
TIMEOUT_S = 30.0
"""Wall time: far above the CPU limit, since a busy machine is not the template's fault."""

# What an interpreter needs to start; whoever breaks out of the sandbox finds no secrets in the rest.
_ENVIRONMENT_NAMES = ("PATH", "SYSTEMROOT", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "PYTHONHOME", "PYTHONPATH", "TZ")

WAY_OUT = 'Set `template = "chatml"` in the configuration to go on without it.'


class RenderResult(msgspec.Struct, frozen=True):
    """One request's outcome: `text`, or None and the template's reason to refuse."""

    text: str | None = None
    refusal: str = ""


class _Outcome(msgspec.Struct, frozen=True):
    results: tuple[RenderResult, ...] = ()
    hostile: str = ""


def render_all(
    template: str, requests: Sequence[Mapping[str, Any]], *, timeout_s: float = TIMEOUT_S, now: str = FROZEN_NOW
) -> tuple[RenderResult, ...]:
    """Render `template` once for each request (its variables: messages, tools…), all in one child process.

    Returns as many results as requests. Raises TemplateRefused where the template breaks a limit (2 s of CPU, 1 GB
    of memory, 16 M characters of output over all requests, `timeout_s` of wall time) or leaves the sandbox.
    """
    job = {
        # Without the entry for the working folder, which may be a stranger's.
        "import_path": [entry for entry in sys.path if entry],
        "template": template,
        "requests": requests,
        "now": now,
        "cpu_s": CPU_S,
        "memory_bytes": MEMORY_BYTES,
        "output_chars": OUTPUT_CHARS,
    }
    output = _run_child(msgspec.json.encode(job), timeout_s=timeout_s)
    try:
        outcome = msgspec.json.decode(output, type=_Outcome)
    except msgspec.DecodeError as error:
        raise _refused("its render process wrote something else than results") from error
    if outcome.hostile:
        raise _refused(outcome.hostile)
    if len(outcome.results) != len(requests):
        raise _refused("its render process left out results")
    return outcome.results


def _refused(reason: str) -> TemplateRefused:
    return TemplateRefused(f"The model's chat template is refused: {reason}. {WAY_OUT}")


def _run_child(job: bytes, *, timeout_s: float) -> bytes:
    """Run the child on `job` and return its output. Raises TemplateRefused where it does not end well."""
    # In JSON a character takes at most 12 bytes (an escaped surrogate pair).
    limit_bytes = 12 * OUTPUT_CHARS + (1 << 20)
    environment = {name: os.environ[name] for name in _ENVIRONMENT_NAMES if name in os.environ}
    with tempfile.TemporaryFile() as job_file:
        job_file.write(job)
        job_file.seek(0)
        child = subprocess.Popen(
            # -P: this folder's own modules must not stand before the standard library's.
            [sys.executable, "-P", str(Path(__file__).with_name("template_child.py"))],
            stdin=job_file,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
        )
    timed_out = threading.Event()

    def end_late_child() -> None:
        timed_out.set()
        child.kill()

    timer = threading.Timer(timeout_s, end_late_child)
    timer.start()
    try:
        assert child.stdout is not None
        with child.stdout as pipe:
            output = pipe.read(limit_bytes + 1)
        if len(output) > limit_bytes:
            raise _refused("its output is too long")
        code = child.wait()
    finally:
        timer.cancel()
        child.kill()
        child.wait()
    if timed_out.is_set():
        raise _refused(f"it takes longer than {timeout_s:g} s")
    if code:
        raise _refused(_why_it_died(code))
    return output


def _why_it_died(code: int) -> str:
    """Return a reason for a child's exit code; a negative one is the signal that ended it."""
    if hasattr(signal, "SIGXCPU") and code == -signal.SIGXCPU:
        return f"it takes more than {CPU_S} s of CPU time"
    return f"its render process died ({f'signal {-code}' if code < 0 else f'exit code {code}'})"
