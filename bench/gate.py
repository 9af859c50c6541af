"""What the arrival gate costs: against tokenising what it keeps out, in memory, and in reading back what it stored.

The gate and `llama_tokenize` take turns on the same text, each time a new one, so that nothing was stored before. The
memory is that of a process of its own, which admits a sparse file of 1 GB (see `gate_process`).
"""

from __future__ import annotations

import contextlib
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import msgspec

from ..compaction.artifacts import ArtifactStore
from ..compaction.budget import Budgets
from ..compaction.durable_files import make_private_folder
from ..runtime.calls import CallId
from ..runtime.cancel import Cancel
from ..runtime.gate import Gate, Offered
from ..runtime.tools.artifact import artifact
from ..runtime.tools.spec import ToolContext, ToolOutput
from ..runtime.tools.workspace import Workspace
from .bare_loop import BareLoop, BareParameters
from .child_process import held_process
from .paired import Figure, PairedTimes, Target, judged, time_pair
from .report import BenchReport, make_report

GATE_TARGET = Target("<=", 0.25)
READ_TARGET = Target("<=", 10.0)
MEMORY_TARGET = Target("<=", 32.0)
MB = 1 << 20

_WORDS = (
    "the",
    "session",
    "window",
    "holds",
    "tokens",
    "of",
    "each",
    "message",
    "while",
    "a",
    "store",
    "keeps",
    "them",
)
_LINES_A_BLOCK = 4096


class GatePlan(msgspec.Struct, frozen=True, kw_only=True):
    """How much is measured: `rounds` pairs on texts of `text_bytes`, `reads` near the end of `blob_bytes`."""

    rounds: int = 8
    text_bytes: int = 10 * MB
    blob_bytes: int = 1024 * MB
    reads: int = 100


QUICK = GatePlan(rounds=2, text_bytes=MB, blob_bytes=8 * MB, reads=5)


def run_gate(path: Path, *, plan: GatePlan, tell: Callable[[str], None]) -> BenchReport:
    """Measure all of it with the vocabulary of the model at `path`; `tell` hears what is being done.

    Takes a minute, and 3 GB of the disk where temporary files are. Raises ModelError, ArtifactError where the disk is
    full, EngineError where the process to measure fails.
    """
    from ..runtime.llama import LlamaEngine  # noqa: PLC0415  (loads llama.cpp)

    with contextlib.ExitStack() as stack:
        engine = stack.enter_context(LlamaEngine.open(path, n_ctx=2048))
        parameters = BareParameters.of_engine(engine)
        bare = stack.enter_context(contextlib.closing(BareLoop(path, parameters)))
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="chapbook-bench-")))

        def count(text: str) -> int:
            return len(engine.tokenize(text, parse_special=False))

        tell(f"the gate on texts of {plan.text_bytes // MB} MB, {plan.rounds} rounds")
        figures = [gate_figure(folder / "gate", bare, count, plan)]
        tell(f"reading an artifact of {plan.blob_bytes // MB} MB")
        figures += read_figures(folder / "read", count, plan)
        tell(f"admitting a sparse file of {plan.blob_bytes // MB} MB, in a process")
        figures.append(memory_figure(folder / "memory", plan))
        return make_report("gate", tuple(figures), info=engine.info, parameters=parameters)


def gate_figure(folder: Path, bare: BareLoop, count: Callable[[str], int], plan: GatePlan) -> Figure:
    """Time the gate against `llama_tokenize`, on another text in each round."""
    times = PairedTimes()
    gate = open_gate(folder, count)
    for number in range(plan.rounds):
        text = b"".join(text_blocks(plan.text_bytes, seed=number))
        offered = Offered(
            source="bash", output=ToolOutput(content=text.decode()), limit_tokens=gate.arrival_tokens, arguments="cat"
        )
        ours_s, baseline_s = time_pair(
            partial(gate.admit, [offered], left_tokens=28_000),
            partial(bare.tokenize, text),
            ours_first=number % 2 == 0,
            timer=time.perf_counter,
        )
        times.add(baseline_s, ours_s)  # swapped: the figure is the gate's time as a share of the tokenizer's
    return judged(times.figure("gate / llama_tokenize, time"), GATE_TARGET)


def read_figures(folder: Path, count: Callable[[str], int], plan: GatePlan) -> list[Figure]:
    """Time the tool's reads in the last hundredth of a large artifact, opened anew for each."""
    store = open_store(folder)
    file = folder / "large.txt"
    with file.open("wb") as written:
        for block in text_blocks(plan.blob_bytes, seed=0):
            written.write(block)
    ref = store.adopt(file)
    with store.open_text(ref) as text:
        lines = text.line_count
    budgets = Budgets(n_ctx=32_768, prefix_tokens=0)
    context = ToolContext(
        workspace=Workspace(folder),
        cancel=Cancel(),
        call_id=CallId("call00001"),
        capture_folder=folder,
        arrival_tokens=budgets.arrival_tokens,
        count_tokens=count,
        artifacts=store,
    )
    chooser = random.Random(1)
    whole_ms, pages_ms = [], []
    for _ in range(plan.reads):
        line = lines - chooser.randrange(200, max(201, lines // 100))
        started_s = time.perf_counter()
        with store.open_text(store.lookup(ref.sha256[:12])) as text:
            next(text.chunks(from_line=line))
        pages_ms.append(1000 * (time.perf_counter() - started_s))
        started_s = time.perf_counter()
        output = artifact.body(context, {"id": ref.sha256[:12], "action": "read", "offset": line, "limit": 200})
        whole_ms.append(1000 * (time.perf_counter() - started_s))
        assert f"{line}\t" in output.content, "the page does not begin at the line that was asked for"
    size = f"{plan.reads} reads in the last hundredth of {plan.blob_bytes // MB:,} MB, {lines:,} lines"
    return [
        judged(
            Figure(name="lines near the end of an artifact", value=statistics.median(pages_ms), unit="ms", note=size),
            READ_TARGET,
        ),
        Figure(
            name="the same as a page of the tool",
            value=statistics.median(whole_ms),
            unit="ms",
            note="200 lines, as many as fit by the tokenizer's count",
        ),
    ]


def memory_figure(folder: Path, plan: GatePlan) -> Figure:
    """Return by how much a process grew that admitted a sparse file, from its first admission on."""
    folder.mkdir(parents=True)
    with held_process("gate_process", [str(folder), str(plan.blob_bytes)]) as process:
        grown_bytes = msgspec.json.decode(process.said, type=int)
    return judged(Figure(name="RSS growth, sparse file", value=grown_bytes / MB, unit="MB"), MEMORY_TARGET)


def open_store(folder: Path) -> ArtifactStore:
    """Return a store in `folder`, which is created."""
    make_private_folder(folder)
    return ArtifactStore(folder / "artifacts")


def open_gate(folder: Path, count: Callable[[str], int]) -> Gate:
    """Return a gate as a session with a window of 32,768 tokens has one."""
    store = open_store(folder)
    return Gate(
        store=store,
        count=lambda _shape, text: count(text),
        shown_path=lambda ref: str(ref.path),
        arrival_tokens=Budgets(n_ctx=32_768, prefix_tokens=0).arrival_tokens,
    )


def text_blocks(size_bytes: int, *, seed: int) -> Iterator[bytes]:
    """Yield text of numbered lines in blocks, of `size_bytes` in all."""
    chooser = random.Random(seed)
    lines = [" ".join(chooser.choices(_WORDS, k=chooser.randint(4, 16))) for _ in range(_LINES_A_BLOCK)]
    number = 0
    while size_bytes > 0:
        block = "".join(f"{number + at} [{seed}] {line}\n" for at, line in enumerate(lines)).encode()[:size_bytes]
        number += _LINES_A_BLOCK
        size_bytes -= len(block)
        yield block
