"""What the prefix cache is worth: a restart, a new session, two sessions on one engine, and what snapshots cost.

Ratios within one run. Token counts repeat on any machine; seconds are set against seconds of the same run.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

import msgspec

from ..kernels.errors import UsageError
from ..runtime.engine import MemoryKind
from ..runtime.events import StepUsage
from ..runtime.gguf import read_gguf
from ..runtime.prefix_cache.options import CacheOptions
from .bare_loop import BareParameters
from .interleaved import Interleaving, hit_rate_figure, one_sequence_figure, play_interleaved
from .long_session import LAST_TURN_TOKENS, most_tokens
from .paired import Figure
from .report import BenchReport, make_report
from .restarts import compare_restarts, restart_figures
from .session_process import Job
from .snapshot_delay import DelayPlan, DelayRace
from .tiny_models import TinyKind, build_tiny_model

MOST_CONTEXT_TOKENS = 32_768
"""The window where none is asked for is the trained one, but no more than this: a cold prefill of it takes minutes."""

LEAST_CONTEXT_TOKENS = 4096
"""Less is no window for sessions of some thousand tokens."""

BESIDE_CONTEXT_TOKENS = 8192
"""The window in which two sessions take turns, and in which the delay is measured."""

_TINY_KINDS = {
    MemoryKind.FULL: TinyKind.LLAMA,
    MemoryKind.SLIDING: TinyKind.GEMMA3,
    MemoryKind.RECURRENT: TinyKind.MAMBA,
    MemoryKind.HYBRID: TinyKind.HYBRID,
}


class CachePlan(msgspec.Struct, frozen=True, kw_only=True):
    """How much is measured: how often the killed session is resumed (1 to 3 times), the length of the two sessions that
    take turns and how often each is visited, and how often sessions are played to see the delay.

    Without tools the session prefix is short enough for a model whose tokens are bytes.
    """

    resumes: int = 3
    turn_tokens: int = 1000
    interleaved_tokens: int = 4000
    visits: int = 4
    delay_rounds: int = 2
    with_tools: bool = True

    def interleaving(self, n_ctx: int, templates: Path) -> Interleaving:
        """Return how the two sessions are played in a window of `n_ctx`."""
        # What is left is for the visits.
        tokens = min(self.interleaved_tokens, most_tokens(n_ctx) * 7 // 8)
        return Interleaving(
            tokens=tokens,
            turn_tokens=self.turn_tokens,
            visits=self.visits,
            with_tools=self.with_tools,
            templates=templates,
        )

    def delay(self, n_ctx: int, templates: Path) -> DelayPlan:
        """Return how the delay is measured in a window of `n_ctx`."""
        return DelayPlan(
            tokens=most_tokens(n_ctx), rounds=self.delay_rounds, with_tools=self.with_tools, templates=templates
        )


QUICK = CachePlan(resumes=1, interleaved_tokens=3000, visits=2, delay_rounds=1)


class Lengths(msgspec.Struct, frozen=True, kw_only=True):
    """The window, and how long the session gets in it."""

    n_ctx: int
    tokens: int


def choose_lengths(*, trained: int | None, n_ctx: int | None, tokens: int | None) -> Lengths:
    """Return what was asked for, completed: `tokens` alone get the window that they need.

    A window that is asked for is taken as it is, and the session fills it but for what a reply and a question need.
    Raises UsageError for a window that is too small, or for more tokens than fit.
    """
    if n_ctx is None:
        n_ctx = min(trained or LEAST_CONTEXT_TOKENS, MOST_CONTEXT_TOKENS)
        if tokens is not None and tokens > most_tokens(n_ctx):
            # The reply reserve is an eighth, at most 4,096: n - n // 8 >= needed, or n - 4,096 >= needed.
            needed = tokens + LAST_TURN_TOKENS
            n_ctx = min(8 * (needed - 1) // 7 + 1, needed + 4096)
    if n_ctx < LEAST_CONTEXT_TOKENS:
        raise UsageError(
            f"a window of {n_ctx:,} tokens is too small: pass an --n-ctx of {LEAST_CONTEXT_TOKENS:,} or more"
        )
    most = most_tokens(n_ctx)
    if tokens is not None and tokens > most:
        raise UsageError(
            f"{tokens:,} tokens do not fit: a window of {n_ctx:,} takes a session of {most:,}, pass a larger --n-ctx"
        )
    return Lengths(n_ctx=n_ctx, tokens=most if tokens is None else tokens)


def run_cache(
    path: Path,
    *,
    plan: CachePlan,
    n_ctx: int | None = None,
    tokens: int | None = None,
    n_threads: int | None = None,
    tell: Callable[[str], None],
    found: Callable[[Figure], None] = lambda _: None,
) -> BenchReport:
    """Measure all of it on the model at `path`. Takes many minutes on a processor: `tell` hears what is being done, and
    `found` each figure as soon as it is there.

    Raises ModelError, UsageError as `choose_lengths` does, EngineError where a process to measure fails.
    """
    from ..runtime.llama import LlamaEngine  # noqa: PLC0415  (loads llama.cpp)

    metadata = read_gguf(path)
    lengths = choose_lengths(trained=metadata.context_length_tokens, n_ctx=n_ctx, tokens=tokens)
    memory = metadata.memory_kind()
    beside = min(lengths.n_ctx, BESIDE_CONTEXT_TOKENS)
    figures: list[Figure] = []

    def take(*new: Figure) -> None:
        figures.extend(new)
        for figure in new:
            found(figure)

    with tempfile.TemporaryDirectory(prefix="chapbook-bench-") as name:
        folder, templates = Path(name), Path(name) / "templates"
        job = Job(
            model=path,
            folder=folder / "restarts",
            templates=templates,
            n_ctx=lengths.n_ctx,
            n_threads=n_threads,
            tokens=lengths.tokens,
            turn_tokens=plan.turn_tokens,
            with_tools=plan.with_tools,
        )
        take(*restart_figures(compare_restarts(job, resumes=plan.resumes, tell=tell), memory))
        tell("two sessions that take turns")
        with LlamaEngine.open(path, n_ctx=beside, n_threads=n_threads) as engine:
            info, parameters = engine.info, BareParameters.of_engine(engine)
            both = play_interleaved(engine, folder / "interleaved", plan.interleaving(beside, templates))
        take(hit_rate_figure(both))
        tell("the same with one sequence, on a tiny model")
        take(one_sequence_figure(play_with_one_sequence(memory, folder / "one", templates)))
        tell(f"turns with snapshots on disk and without, {plan.delay_rounds} rounds")
        race = DelayRace(path, folder / "delay", beside, n_threads, plan.delay(beside, templates))
        race.run()
        take(*race.figures())
    # The window of the restarts is what the report is of; the others are played in one of 8,192.
    info = msgspec.structs.replace(info, n_ctx=lengths.n_ctx)
    return make_report("cache", tuple(figures), info=info, parameters=parameters)


def play_with_one_sequence(memory: MemoryKind, folder: Path, templates: Path) -> tuple[StepUsage, ...]:
    """Have two sessions take turns on an engine that holds one sequence and keeps nothing else: a tiny model with the
    same kind of memory, since a real one would evaluate for many minutes."""
    from ..runtime.llama import LlamaEngine  # noqa: PLC0415  (loads llama.cpp)

    folder.mkdir()
    model = build_tiny_model(_TINY_KINDS[memory], folder / "tiny.gguf")
    cache = CacheOptions(memory_mb=0)
    plan = Interleaving(tokens=2000, turn_tokens=1000, visits=2, with_tools=False, templates=templates)
    with LlamaEngine.open(model, n_ctx=LEAST_CONTEXT_TOKENS, n_sequences=1, cache=cache) as engine:
        return play_interleaved(engine, folder, plan)
