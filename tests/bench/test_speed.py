"""The benchmark works, sees what it should see, and can fail. Real speeds are not asserted."""

import json
import time

import numpy as np
import pytest

from chapbook.bench.bare_loop import BareLoop, BareParameters
from chapbook.bench.forced_session import SessionCost, given_replies
from chapbook.bench.memory import MemoryComparison, ProcessMemory, compare_memory
from chapbook.bench.paired import Figure, PairedTimes, Target, judged
from chapbook.bench.report import json_line, make_report, report_lines
from chapbook.bench.speed import (
    QUICK,
    LoopRace,
    SpeedPlan,
    memory_figures,
    no_reuse_figure,
    play,
    run_speed,
    session_figures,
)
from chapbook.kernels.errors import EngineError, ModelLoadError, UsageError
from chapbook.kernels.tokens import token_ids
from chapbook.runtime.cli import main
from chapbook.runtime.engine import MemoryKind, Sampling
from chapbook.runtime.events import BreakReport, StepUsage
from chapbook.runtime.llama import LlamaEngine
from chapbook.runtime.wrapped import WrappedEngine

SHORT = SpeedPlan(rounds=3, prompt_tokens=80, additions=4, reply_tokens=4)
SLEEP_S = 0.05
"""Longer by far than a token of a tiny model, on a busy machine too."""

FIGURES = [
    "decode, greedy",
    "decode, default sampling",
    "decode, tools offered",
    "prefill, 640 tokens",
    "prefill, 16 more",
    "start of a reply",
    "evaluated / bound",
    "undeclared prefix breaks",
    "runtime's own time, a step",
    "the same, reuse switched off",
    "runtime's own memory",
    "the same by USS",
]


class SlowEngine(WrappedEngine):
    """Sleeps before each sync and each token."""

    def sync(self, sequence, wanted, **options):
        time.sleep(SLEEP_S)
        return super().sync(sequence, wanted, **options)

    def generate(self, sequence, **options):
        return SlowGeneration(super().generate(sequence, **options))


class SlowGeneration:
    def __init__(self, generation):
        self.generation = generation
        self.close = generation.close

    def __iter__(self):
        for token in self.generation:
            time.sleep(SLEEP_S)
            yield token


@pytest.fixture
def engine(tiny):
    with LlamaEngine.open(tiny("llama"), n_ctx=8192, n_threads=1) as opened:
        yield opened


@pytest.fixture
def bare_loop():
    """Return a function (engine) -> a bare loop on the same model with the same parameters."""
    opened = []

    def make(engine, path=None):
        parameters = BareParameters.of_engine(engine)
        opened.append(BareLoop(path or engine.info.model_path, parameters))
        return opened[-1]

    yield make
    for loop in opened:
        loop.close()


# The baseline


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(temperature=0.0),
        Sampling(seed=5),
        Sampling(seed=5, repeat_penalty=1.3, repeat_last_n=8),
    ],
    ids=["greedy", "default", "penalties"],
)
@pytest.mark.parametrize("kind", ["llama", "gemma3", "mamba"])
def test_the_baseline_does_the_same_work_token_for_token(tiny, bare_loop, kind, sampling):
    with LlamaEngine.open(tiny(kind), n_ctx=2048, n_threads=1, n_batch=64) as engine:
        prompt = token_ids(np.random.default_rng(0).integers(0, 256, size=150))
        sequence = engine.open_sequence()
        engine.sync(sequence, prompt)
        ours = [token.id for token in engine.generate(sequence, sampling=sampling, max_tokens=20)]
        loop = bare_loop(engine)
        loop.prefill(prompt)
        reply = loop.reply(sampling, prompt)
        theirs = [next(reply) for _ in ours]
        reply.close()
    assert len(ours) > 1
    assert ours == theirs


def test_a_cleared_baseline_starts_over(engine, bare_loop):
    loop = bare_loop(engine)
    prompt = token_ids(range(40))
    replies = []
    for _ in range(2):
        loop.clear()
        loop.prefill(prompt)
        reply = loop.reply(None)
        replies.append([next(reply) for _ in range(10)])
        reply.close()
    assert replies[0] == replies[1]


def test_a_model_that_does_not_load_is_said(tmp_path):
    (tmp_path / "no.gguf").write_bytes(b"GGUF nothing")
    with pytest.raises(ModelLoadError, match=r"no\.gguf"):
        BareLoop(tmp_path / "no.gguf", BareParameters(256, 64, 64, 1))


# The race


def test_a_slower_engine_is_seen_and_misses(engine, bare_loop):
    race = LoopRace(SlowEngine(engine), bare_loop(engine), SHORT)
    race.run()
    figures = race.figures()
    assert len(figures) == 5
    for figure in figures:
        assert figure.value < 0.9, figure
        assert figure.met is False
    assert race.start_of_reply().value > 1000 * SLEEP_S / 2


def test_a_slower_baseline_is_seen_too(engine, bare_loop):
    class SlowLoop:
        def __init__(self, loop):
            self.loop, self.clear = loop, loop.clear

        def prefill(self, tokens):
            time.sleep(SLEEP_S)
            self.loop.prefill(tokens)

        def reply(self, sampling, history):
            for token in self.loop.reply(sampling, history):
                time.sleep(SLEEP_S)
                yield token

    race = LoopRace(engine, SlowLoop(bare_loop(engine)), SHORT)
    race.run()
    assert all(figure.value > 1.1 and figure.met for figure in race.figures())


def test_every_pair_is_one_token_and_every_round_as_many(engine, bare_loop):
    race = LoopRace(engine, bare_loop(engine), SHORT)
    race.run()
    *replies, prompts, additions = race.figures()
    assert [figure.pairs for figure in replies] == [SHORT.rounds * SHORT.reply_tokens] * 3
    assert prompts.pairs == SHORT.rounds
    assert additions.pairs == SHORT.rounds * SHORT.additions
    engine.check_integrity()


def test_a_reply_that_ends_early_goes_on_with_another_and_its_end_is_no_token(engine, bare_loop):
    class BriefEngine(WrappedEngine):
        def generate(self, sequence, **options):
            return super().generate(sequence, **options | {"max_tokens": 2})

    race = LoopRace(BriefEngine(engine), bare_loop(engine), SHORT)
    race.run()
    for figure in race.figures()[:3]:
        assert figure.pairs == SHORT.rounds * SHORT.reply_tokens
        # An end takes less than a microsecond: counted as a token it would be a hundred times as fast.
        assert figure.value < 20


def test_both_stand_at_the_same_depth_all_the_time(engine, bare_loop):
    loop = bare_loop(engine)
    apart = []

    class WatchedEngine(WrappedEngine):
        def generate(self, sequence, **options):
            apart.append(abs(len(self.resident(sequence)) - loop.held_tokens))
            return super().generate(sequence, **options)

    LoopRace(WatchedEngine(engine), loop, SHORT).run()
    assert len(apart) >= 3 * SHORT.rounds
    # One more for each reply that the model ends early: the baseline has evaluated a token beside the last choice.
    assert max(apart) <= len(apart) - 3 * SHORT.rounds


def test_a_window_that_is_too_small_is_refused_with_what_it_takes(tiny, bare_loop):
    with LlamaEngine.open(tiny("llama"), n_ctx=512, n_threads=1) as small, pytest.raises(UsageError, match="--n-ctx"):
        LoopRace(small, bare_loop(small), SpeedPlan()).run()


# The session


def test_the_forced_session_evaluates_its_bound_in_twenty_steps(engine):
    cost = play(engine)
    figures = {figure.name: figure for figure in session_figures(cost, MemoryKind.FULL)}
    assert len(cost.usages) == len(given_replies()) == 20
    assert figures["evaluated / bound"].value == 1.0
    assert figures["evaluated / bound"].met
    assert figures["undeclared prefix breaks"].met
    assert 0 < cost.engine_s < cost.seconds
    assert cost.own_s > 0
    assert no_reuse_figure(cost).met is False


@pytest.mark.parametrize(("memory", "met"), [(MemoryKind.FULL, False), (MemoryKind.SLIDING, True)])
def test_what_is_evaluated_twice_or_breaks_undeclared_is_missed(memory, met):
    broken = StepUsage(
        window=1000, cached=0, evaluated=1000, generated=1, bound=985,
        undeclared_break=BreakReport(section="tools", token=7),
    )  # fmt: skip
    cost = SessionCost(usages=(broken,), seconds=4.0, engine_s=2.0, tools_s=1.0)
    evaluated, breaks, own = session_figures(cost, memory)
    assert evaluated.value == 1000 / 985
    assert evaluated.met is met
    assert breaks.met is False
    assert own.value == 1000.0


def test_a_session_that_does_not_come_to_its_end_is_no_measurement(tiny):
    with (
        LlamaEngine.open(tiny("llama"), n_ctx=4096, n_threads=1) as small,
        pytest.raises(UsageError, match="did not come to its end"),
    ):
        play(small)


# The report


@pytest.mark.slow  # the session four times over, in two processes of its own and once without reuse
def test_the_whole_benchmark_reports_every_figure_as_one_line_of_json(tiny):
    told = []
    report = run_speed(tiny("llama"), plan=QUICK, n_ctx=8192, n_threads=1, tell=told.append)
    read = json.loads(json_line(report))
    assert [figure["name"] for figure in read["figures"]] == FIGURES
    assert {"benchmark", "chapbook", "commit", "llama_cpp_python", "machine", "missed", "model"} < set(read)
    assert read["model"]["n_ctx"] == 8192
    assert read["model"]["n_threads"] == 1
    assert read["machine"]["cores"] >= 1
    assert read["missed"] == [figure["name"] for figure in read["figures"] if figure["met"] is False]
    by_name = {figure["name"]: figure for figure in read["figures"]}
    assert by_name["runtime's own memory"]["met"] is True
    assert by_name["runtime's own memory"]["value"] > 0
    assert by_name["the same, reuse switched off"]["met"] is True
    assert by_name["evaluated / bound"]["value"] == 1.0
    lines = report_lines(report)
    shown = [line for line in lines if any(line.startswith(name) for name in FIGURES)]
    assert len(shown) == len(FIGURES)
    for line, figure in zip(shown, read["figures"], strict=True):
        assert ("MISSED" in line) == (figure["met"] is False)
    assert len(told) == 4


def test_memory_is_the_difference_of_the_two_processes_and_has_a_limit():
    compared = MemoryComparison(
        session=ProcessMemory(rss_bytes=461_000_000, uss_bytes=300_000_000),
        bare=ProcessMemory(rss_bytes=400_000_000, uss_bytes=290_000_000),
        tokens=100,
    )
    rss, uss = memory_figures(compared)
    assert (rss.value, rss.met) == (61.0, False)
    assert (uss.value, uss.met) == (10.0, None)


def test_a_process_that_fails_is_reported_with_what_it_said(tmp_path):
    (tmp_path / "no.gguf").write_bytes(b"nothing")
    with pytest.raises(EngineError, match="GGUF"):
        compare_memory(tmp_path / "no.gguf", BareParameters(256, 64, 64, 1))


# The command


def test_the_command_names_its_benchmarks_and_their_options(capsys):
    assert main(["bench", "--help"]) == 0
    assert "speed" in capsys.readouterr().out
    assert main(["bench", "speed", "--help"]) == 0
    shown = capsys.readouterr().out
    for option in ("--model", "--n-ctx", "--rounds", "--quick", "--strict", "--json"):
        assert option in shown


def test_the_report_shows_what_is_missed_and_json_says_null_for_no_number(engine):
    figures = (
        Figure(name="good", value=1.0, target=Target(">=", 0.97), met=True),
        Figure(name="bad", value=0.5, target=Target(">=", 0.97), met=False),
        judged(PairedTimes().figure("none"), Target(">=", 0.97)),
    )
    report = make_report("speed", figures, info=engine.info, parameters=BareParameters(8192, 512, 512, 1))
    assert report.missed == ("bad", "none")
    shown = {line.split()[0]: line for line in report_lines(report) if line}
    assert "met" in shown["good"].split()
    assert "MISSED" in shown["bad"].split()
    assert "MISSED" in shown["none"].split()
    read = json.loads(json_line(report))
    assert [figure["value"] for figure in read["figures"]] == [1.0, 0.5, None]
    assert {"benchmark", "chapbook", "commit", "llama_cpp_python", "machine", "missed", "model"} < set(read)


def test_the_command_says_which_model_there_is_not(capsys):
    assert main(["bench", "speed", "--model", "no such model"]) == 2
    assert "no such model" in capsys.readouterr().err
