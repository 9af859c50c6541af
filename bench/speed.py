"""What the engine and the session cost above bare llama.cpp, as ratios within one run.

The engine and the baseline take turns, token by token in a reply and prompt by prompt in a prefill, so that whatever
else the machine does slows both (see `paired`). Absolute speeds are no figure here.
"""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path

import msgspec
import numpy as np

from ..kernels.errors import UsageError
from ..kernels.tokens import TokenIds, concat_tokens, token_ids
from ..runtime.calls import CallableTool, ToolChoice
from ..runtime.dialects import dialect_named
from ..runtime.engine import Engine, Grammar, MemoryKind, Sampling, SequenceId
from ..runtime.tools.builtin import builtin_tools
from ..runtime.wrapped import ReuselessEngine
from .bare_loop import BareLoop, BareParameters
from .forced_session import DIALECT, SessionCost, played_session
from .memory import MemoryComparison, compare_memory
from .paired import Figure, PairedTimes, Target, judged, time_pair
from .played_turn import reuse_target
from .report import BenchReport, make_report
from .tiny_models import TinyKind, build_tiny_model

DECODE_TARGET = Target(">=", 0.97)
PREFILL_TARGET = Target(">=", 0.98)
MEMORY_TARGET = Target("<=", 60.0)
NO_REUSE_TARGET = Target(">", 5.0)
NO_BREAK_TARGET = Target("<=", 0.0)

DEFAULT_CONTEXT_TOKENS = 8192
"""The window where none is asked for. The loops take less than 2,000 tokens, the session up to 5,000 (by bytes)."""

MOST_REPLIES = 20
"""How often a model that ends its replies early is asked to go on in one round."""


class SpeedPlan(msgspec.Struct, frozen=True, kw_only=True):
    """How much is measured. In each round the prompt is evaluated at once, then `additions` are, each of
    `addition_tokens`, then `reply_tokens` are generated in each way.

    The prompt is longer than a batch of 512, so that it is evaluated in two. It takes seconds, in which a busy machine
    does much; an addition is short, so that its ratio is sure, and about the least that a step of a session evaluates.
    """

    rounds: int = 12
    prompt_tokens: int = 640
    additions: int = 16
    addition_tokens: int = 16
    reply_tokens: int = 32

    @property
    def needed_tokens(self) -> int:
        """The window that the loops take: the text, and the replies after it with what is put between them."""
        return self.text_tokens + 3 * (self.reply_tokens + MOST_REPLIES)

    @property
    def text_tokens(self) -> int:
        """The prompt and what is added to it."""
        return self.prompt_tokens + self.additions * self.addition_tokens


QUICK = SpeedPlan(rounds=2, reply_tokens=8)


class ReplyWay(msgspec.Struct, frozen=True, kw_only=True):
    """One way to generate. The baseline samples alike, and knows nothing of a grammar."""

    name: str
    sampling: Sampling
    grammar: Grammar | None = None


def reply_ways(default: Sampling) -> tuple[ReplyWay, ...]:
    """Return greedy, the default sampler chain, and this one with triggers watched as in every step of a session."""
    tools = tuple(CallableTool(schema=tool.schema) for tool in builtin_tools())
    seeded = msgspec.structs.replace(default, seed=1)
    return (
        ReplyWay(name="decode, greedy", sampling=Sampling(temperature=0.0)),
        ReplyWay(name="decode, default sampling", sampling=seeded),
        ReplyWay(
            name="decode, tools offered",
            sampling=seeded,
            grammar=dialect_named(DIALECT).grammar(tools, choice=ToolChoice()),
        ),
    )


@dataclass(slots=True)
class LoopRace:
    """The engine and the bare loop, side by side on the same tokens.

    After `run`, `figures` are the ratios, and `start_of_reply` what a reply costs before its first token.
    """

    engine: Engine
    bare: BareLoop
    plan: SpeedPlan
    timer: Callable[[], float] = time.perf_counter
    _prompts: PairedTimes = field(default_factory=PairedTimes)
    _additions: PairedTimes = field(default_factory=PairedTimes)
    _starts: PairedTimes = field(default_factory=PairedTimes)
    _replies: dict[str, PairedTimes] = field(default_factory=dict)

    def run(self) -> None:
        """Measure. Raises UsageError where the window is too small."""
        n_ctx = self.engine.info.n_ctx
        if n_ctx < self.plan.needed_tokens:
            raise UsageError(
                f"a window of {n_ctx:,} tokens is too small: the loops take {self.plan.needed_tokens:,}; "
                f"pass a larger --n-ctx"
            )
        ways = reply_ways(self.engine.default_sampling())
        text = self._text()
        self._warm_up(text)
        for number in range(self.plan.rounds):
            sequence = self.engine.open_sequence()
            self._evaluate(sequence, text, ours_first=number % 2 == 0)
            for way in ways:
                self._reply(sequence, way, self._replies.setdefault(way.name, PairedTimes()))
            self.engine.drop(sequence)

    def figures(self) -> tuple[Figure, ...]:
        """Return the ratios, each with its target."""
        return (
            *(judged(times.figure(name), DECODE_TARGET) for name, times in self._replies.items()),
            judged(self._prompts.figure(f"prefill, {self.plan.prompt_tokens} tokens"), PREFILL_TARGET),
            judged(self._additions.figure(f"prefill, {self.plan.addition_tokens} more"), PREFILL_TARGET),
        )

    def start_of_reply(self) -> Figure:
        """Return the milliseconds by which the engine is later with a reply's first token, at the median."""
        more_s = np.subtract(self._starts.ours_s, self._starts.baseline_s)
        return Figure(
            name="start of a reply", value=1000 * float(np.median(more_s)), unit="ms more", pairs=len(self._starts)
        )

    def _text(self) -> TokenIds:
        """Return the text of this module as tokens, over and over until there are enough."""
        tokens = self.engine.tokenize(Path(__file__).read_text(encoding="utf-8"), parse_special=False)
        return token_ids(np.resize(tokens, self.plan.text_tokens))

    def _warm_up(self, text: TokenIds) -> None:
        """Let both allocate what they do at their first batch."""
        sequence = self.engine.open_sequence()
        self.engine.sync(sequence, text[:64])
        self.bare.clear()
        self.bare.prefill(text[:64])
        self.engine.drop(sequence)

    def _evaluate(self, sequence: SequenceId, text: TokenIds, *, ours_first: bool) -> None:
        """Evaluate the prompt, then one addition after another."""
        self.bare.clear()
        ends = range(self.plan.prompt_tokens, len(text) + 1, self.plan.addition_tokens)
        for begin, end in pairwise((0, *ends)):
            pair = time_pair(
                partial(self.engine.sync, sequence, text[:end]),
                partial(self.bare.prefill, text[begin:end]),
                ours_first=ours_first,
                timer=self.timer,
            )
            (self._additions if begin else self._prompts).add(*pair)
            ours_first = not ours_first

    def _reply(self, sequence: SequenceId, way: ReplyWay, times: PairedTimes) -> None:
        """Add `reply_tokens` pairs, each of one token; a model that ends a reply early goes on with another."""
        wanted = len(times) + self.plan.reply_tokens
        for _ in range(MOST_REPLIES):
            self._race(sequence, way, times, most=wanted - len(times))
            if len(times) >= wanted:
                return
            resident = self.engine.resident(sequence)
            self.engine.sync(sequence, concat_tokens((resident, resident[:1])))
            self.bare.prefill(resident[:1])

    def _race(self, sequence: SequenceId, way: ReplyWay, times: PairedTimes, *, most: int) -> None:
        """Generate up to `most` tokens behind a first one, which comes from logits at hand: nothing is evaluated."""
        history = self.engine.resident(sequence)
        started_s = self.timer()
        generation = self.engine.generate(sequence, sampling=way.sampling, max_tokens=most + 1, grammar=way.grammar)
        ours = iter(generation)
        ended = next(ours, None) is None
        ours_started_s = self.timer()
        theirs = self.bare.reply(way.sampling, history)
        next(theirs)
        self._starts.add(ours_started_s - started_s, self.timer() - ours_started_s)

        def step() -> None:
            nonlocal ended
            ended = next(ours, None) is None

        for index in range(most):
            pair = time_pair(step, lambda: next(theirs), ours_first=index % 2 == 0, timer=self.timer)
            if ended:
                break
            times.add(*pair)
        generation.close()
        theirs.close()


def session_figures(cost: SessionCost, memory: MemoryKind) -> tuple[Figure, ...]:
    """Return what a session evaluated against its bound, and the time that was neither the engine's nor a tool's."""
    steps = len(cost.usages)
    return (
        judged(
            Figure(
                name="evaluated / bound",
                value=cost.evaluated / cost.bound,
                note=f"{cost.evaluated:,} of {cost.bound:,} tokens in {steps} steps",
            ),
            reuse_target(memory),
        ),
        judged(Figure(name="undeclared prefix breaks", value=cost.undeclared_breaks), NO_BREAK_TARGET),
        Figure(
            name="runtime's own time, a step",
            value=1000 * cost.own_s / steps,
            unit="ms",
            note=f"{cost.own_s / cost.seconds:.1%} of the session, the engine {cost.engine_s / cost.seconds:.1%}",
        ),
    )


def no_reuse_figure(cost: SessionCost) -> Figure:
    """Return the same ratio of the same session where nothing is reused: it shows that the harness can see that."""
    ratio = cost.evaluated / cost.bound
    note = f"a tiny model, {cost.evaluated:,} of {cost.bound:,} tokens"
    return judged(Figure(name="the same, reuse switched off", value=ratio, note=note), NO_REUSE_TARGET)


def memory_figures(compared: MemoryComparison) -> tuple[Figure, ...]:
    """Return the runtime's own memory in MB of a million bytes."""
    rss, uss = compared.own_rss_bytes / 1e6, compared.own_uss_bytes / 1e6
    note = f"RSS {compared.session.rss_bytes / 1e6:,.0f} with a session, {compared.bare.rss_bytes / 1e6:,.0f} without"
    return (
        judged(Figure(name="runtime's own memory", value=rss, unit="MB", note=note), MEMORY_TARGET),
        Figure(name="the same by USS", value=uss, unit="MB"),
    )


def play(engine: Engine) -> SessionCost:
    """Run the forced session once."""
    with played_session(engine) as cost:
        return cost


def play_without_reuse(*, n_threads: int) -> SessionCost:
    """Run the forced session on a tiny model, evaluating every request whole: a real one would take many minutes."""
    from ..runtime.llama import LlamaEngine  # noqa: PLC0415  (loads llama.cpp)

    with tempfile.TemporaryDirectory(prefix="chapbook-bench-") as folder:
        model = build_tiny_model(TinyKind.LLAMA, Path(folder) / "tiny.gguf")
        with LlamaEngine.open(model, n_ctx=DEFAULT_CONTEXT_TOKENS, n_threads=n_threads) as engine:
            return play(ReuselessEngine(engine))


def run_speed(
    path: Path, *, plan: SpeedPlan, n_ctx: int, n_threads: int | None = None, tell: Callable[[str], None]
) -> BenchReport:
    """Measure all of it on the model at `path`; `tell` hears what is being done. Takes minutes on a processor.

    Raises ModelError, UsageError where `n_ctx` is too small, EngineError where a process to measure fails.
    """
    from ..runtime.llama import LlamaEngine  # noqa: PLC0415  (loads llama.cpp)

    with LlamaEngine.open(path, n_ctx=n_ctx, n_threads=n_threads) as engine:
        parameters = BareParameters.of_engine(engine)
        tell("a session of twenty steps")
        info, cost = engine.info, play(engine)
        with contextlib.closing(BareLoop(path, parameters)) as bare:
            tell(f"the loops, {plan.rounds} rounds")
            race = LoopRace(engine, bare, plan)
            race.run()
    tell("a session without reuse, on a tiny model")
    without_reuse = play_without_reuse(n_threads=parameters.n_threads)
    tell("memory, in two processes")
    compared = compare_memory(path, parameters)
    figures = (
        *race.figures(),
        race.start_of_reply(),
        *session_figures(cost, info.memory),
        no_reuse_figure(without_reuse),
        *memory_figures(compared),
    )
    return make_report("speed", figures, info=info, parameters=parameters)
