"""What the runtime takes of memory above a process that holds the same model and context alone.

Two processes do the same: one runs the forced session, the other evaluates and generates as many tokens in the bare
loop. Both are measured from outside, while they wait. RSS is what is compared: in it stands all that is resident, of
the weights (mapped whole by both) as of Python, of libraries and of the heap. USS leaves out pages that another process
has mapped too, which the weights are or are not, depending on who else runs: it is reported beside it.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import msgspec
import psutil

from .bare_loop import BareParameters
from .child_process import held_process
from .forced_session import HeldSession


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
    """Run both processes one after the other. Raises EngineError where one fails, with what it said.

    Both with flash attention: the scores of plain attention take memory by the size of the batches, which differ.
    """
    parameters = replace(parameters, flash_attn=1)
    with held_process("forced_session", [str(model), *parameters.arguments()]) as session:
        held = msgspec.json.decode(session.said, type=HeldSession)
        with_session = _measure(session.pid)
    counts = [str(held.prefilled), str(held.generated)]
    with held_process("bare_loop", [str(model), *parameters.arguments(), *counts]) as bare:
        alone = _measure(bare.pid)
    return MemoryComparison(session=with_session, bare=alone, tokens=held.prefilled + held.generated)


def _measure(pid: int) -> ProcessMemory:
    memory = psutil.Process(pid).memory_full_info()
    return ProcessMemory(rss_bytes=memory.rss, uss_bytes=memory.uss)
