"""The measurement of the prefix cache works on every kind of memory, sees what it should see, and can fail."""

import json
import time

import msgspec
import pytest

from chapbook.bench.cache import QUICK, choose_lengths, play_with_one_sequence, run_cache
from chapbook.bench.interleaved import Interleaving, hit_rate_figure, one_sequence_figure, play_interleaved
from chapbook.bench.long_session import GREEDY_TOKENS, Answer, SourceText, most_tokens
from chapbook.bench.report import json_line, report_lines
from chapbook.bench.restarts import Restarts, compare_restarts, restart_figures
from chapbook.bench.session_process import Grown, Job
from chapbook.bench.snapshot_delay import DelayPlan, DelayRace
from chapbook.bench.tiny_models import TinyKind
from chapbook.kernels.errors import UsageError
from chapbook.runtime.cli import main
from chapbook.runtime.engine import MemoryKind
from chapbook.runtime.events import StepUsage
from chapbook.runtime.gguf import read_gguf
from chapbook.runtime.llama import LlamaEngine
from chapbook.runtime.wrapped import ReuselessEngine, WrappedEngine

N_CTX = 2048

FIGURES = [
    "resumed from a disk snapshot",
    "TTFT resumed / cold",
    "the same, with all that opens",
    "TTFT resumed / cold, deleted",
    "resumed, evaluated / bound",
    "resumed, equal greedy tokens",
    "the same, deleted",
    "new session, evaluated / bound",
    "two sessions, hit rate",
    "the same, one sequence",
    "turns, snapshots written",
    "blocks in which one was written",
]
TIMED = {FIGURES[1], FIGURES[2], FIGURES[3], FIGURES[10]}


@pytest.fixture(scope="module")
def templates(tmp_path_factory):
    """Return the folder of what was learnt of templates."""
    return tmp_path_factory.mktemp("templates")


@pytest.fixture
def job(tmp_path, tiny, templates):
    """Return a function (kind) -> the job of growing a session on that tiny model."""

    def make(kind):
        return Job(
            model=tiny(kind),
            folder=tmp_path / "restarts",
            templates=templates,
            n_ctx=N_CTX,
            n_threads=1,
            tokens=most_tokens(N_CTX),
            turn_tokens=600,
            with_tools=False,
        )

    return make


def named(figures):
    return {figure.name: figure for figure in figures}


# Restarts


@pytest.mark.parametrize("kind", TinyKind)
def test_a_killed_session_goes_on_from_disk_as_if_it_had_never_been_broken(job, kind):
    job = job(kind)
    restarts = compare_restarts(job, resumes=1, tell=lambda _: None)
    memory = read_gguf(job.model).memory_kind()
    figures = named(restart_figures(restarts, memory))
    (warm,) = restarts.warm
    assert warm.usage.source == "disk snapshot"
    assert warm.usage.evaluated == warm.usage.bound < 100
    assert warm.usage.cached == restarts.killed.tokens > job.tokens - 200
    assert warm.request == restarts.unbroken.request
    assert warm.reply == restarts.unbroken.reply
    assert len(warm.reply) == GREEDY_TOKENS
    # Another text is answered otherwise: equal replies say something.
    assert restarts.new.reply != warm.reply
    assert restarts.unbroken.usage.source == "resident"
    assert (restarts.cold.usage.source, restarts.cold.usage.cached) == ("nothing", 0)
    assert restarts.cold.usage.evaluated == restarts.cold.usage.window
    assert restarts.new.usage.source == "disk snapshot"
    assert (
        restarts.new.usage.evaluated
        == restarts.new.usage.bound
        == restarts.new.usage.window - restarts.new.usage.cached
    )
    for name in set(figures) - TIMED - {"the same, deleted"}:
        assert figures[name].value == 1.0
        assert figures[name].met


def test_a_cache_that_cannot_be_written_is_seen_and_misses(job):
    job = job(TinyKind.LLAMA)
    job.folder.mkdir()
    job.snapshots.write_text("no folder")
    restarts = compare_restarts(job, resumes=1, tell=lambda _: None)
    figures = named(restart_figures(restarts, MemoryKind.FULL))
    for name in ("resumed from a disk snapshot", "resumed, evaluated / bound", "new session, evaluated / bound"):
        assert figures[name].met is False
    assert figures["resumed from a disk snapshot"].value == 0.0
    assert "not written" in figures["resumed from a disk snapshot"].note
    assert figures["TTFT resumed / cold"].met is False


def answer(*, source="disk snapshot", cached=990, ttft_s=0.1, request=(1, 2), reply=(5,) * GREEDY_TOKENS):
    usage = StepUsage(
        window=1000, cached=cached, evaluated=1000 - cached, generated=GREEDY_TOKENS, bound=10, source=source,
        ttft_s=ttft_s, prefill_s=ttft_s,
    )  # fmt: skip
    return Answer(usage=usage, request=request, reply=reply, cache_notes=(), opened_s=1.0)


def restarts(**changes):
    grown = Grown(tokens=990, turns=1, evaluated=900, bound=900, prefill_s=20.0, cache_notes=())
    as_it_should_be = Restarts(
        killed=grown, unbroken_grown=grown, unbroken=answer(source="resident"), warm=(answer(),) * 3,
        cold=answer(source="nothing", cached=0, ttft_s=20.0), new=answer(),
    )  # fmt: skip
    return msgspec.structs.replace(as_it_should_be, **changes)


def test_what_is_as_it_should_be_meets_every_target():
    figures = named(restart_figures(restarts(), MemoryKind.FULL))
    assert not [name for name, figure in figures.items() if figure.met is False]
    assert figures["TTFT resumed / cold"].value == pytest.approx(0.1 / 20)
    assert figures["the same, with all that opens"].value == pytest.approx(1.1 / 20)
    assert figures["TTFT resumed / cold, deleted"].value == pytest.approx(20 / 20.05)


@pytest.mark.parametrize(
    ("changes", "missed"),
    [
        ({"warm": (answer(source="nothing"), answer(), answer())}, "resumed from a disk snapshot"),
        ({"warm": (answer(ttft_s=0.3),) * 3}, "TTFT resumed / cold"),
        ({"cold": answer(ttft_s=1.0)}, "TTFT resumed / cold, deleted"),
        ({"warm": (answer(cached=989), answer(), answer())}, "resumed, evaluated / bound"),
        ({"warm": (answer(reply=(5,) * 20 + (6,) * 44), answer(), answer())}, "resumed, equal greedy tokens"),
        ({"warm": (answer(request=(1, 3)), answer(), answer())}, "resumed, equal greedy tokens"),
        ({"new": answer(cached=500)}, "new session, evaluated / bound"),
    ],
)
def test_each_thing_that_goes_wrong_misses_its_target_alone(changes, missed):
    figures = restart_figures(restarts(**changes), MemoryKind.FULL)
    assert [figure.name for figure in figures if figure.met is False] == [missed]


def test_equal_tokens_are_counted_up_to_the_first_difference():
    parted = answer(reply=(5,) * 20 + (6,) + (5,) * 43)
    figure = named(restart_figures(restarts(warm=(answer(), parted)), MemoryKind.FULL))["resumed, equal greedy tokens"]
    assert figure.value == 20 / 64
    assert figure.note == "20 of 64"


# Two sessions


@pytest.mark.parametrize("kind", TinyKind)
def test_two_sessions_that_take_turns_evaluate_their_bound(tmp_path, tiny, templates, kind):
    plan = Interleaving(tokens=1200, turn_tokens=500, visits=2, with_tools=False, templates=templates)
    with LlamaEngine.open(tiny(kind), n_ctx=N_CTX, n_threads=1) as engine:
        usages = play_interleaved(engine, tmp_path, plan)
        engine.check_integrity()
    assert len(usages) == 8
    assert all(usage.evaluated == usage.bound < 100 for usage in usages)
    figure = hit_rate_figure(usages)
    assert figure.value == pytest.approx(
        1 - sum(usage.bound for usage in usages) / sum(usage.window for usage in usages)
    )
    assert figure.value > 0.96
    assert one_sequence_figure(usages).met is False


def test_one_sequence_hits_half_of_the_time(tmp_path, templates):
    usages = play_with_one_sequence(MemoryKind.FULL, tmp_path / "one", templates)
    figure = one_sequence_figure(usages)
    assert 0.4 < figure.value < 0.55
    assert figure.met
    assert hit_rate_figure(usages).met is False


def test_an_engine_that_reuses_nothing_hits_nothing(tmp_path, tiny, templates):
    plan = Interleaving(tokens=900, turn_tokens=500, visits=1, with_tools=False, templates=templates)
    with LlamaEngine.open(tiny("llama"), n_ctx=N_CTX, n_threads=1) as engine:
        usages = play_interleaved(ReuselessEngine(engine), tmp_path, plan)
    assert hit_rate_figure(usages).value == 0.0


# The delay


@pytest.fixture
def delay_race(tmp_path, tiny, templates):
    """Return a function (options) -> a race of one round."""
    plan = DelayPlan(tokens=2200, rounds=1, with_tools=False, templates=templates)
    return lambda **options: DelayRace(tiny("llama"), tmp_path / "delay", 4096, 1, plan, **options)


class SlowEngine(WrappedEngine):
    """Sleeps before each sync."""

    def sync(self, sequence, wanted, **options):
        time.sleep(0.5)
        return super().sync(sequence, wanted, **options)


def test_what_delays_the_turns_with_snapshots_is_seen_and_misses(delay_race):
    race = delay_race(around=SlowEngine)
    race.run()
    speed, written = race.figures()
    assert speed.pairs >= 3
    assert speed.value < 0.9
    assert speed.met is False
    assert (written.value, written.met) == (1.0, True)


def test_a_race_in_which_nothing_is_written_shows_nothing(delay_race):
    race = delay_race()
    race.folder.mkdir()
    race.snapshots.write_text("no folder")
    race.run()
    _, written = race.figures()
    assert (written.value, written.met) == (0.0, False)


# Lengths and text


@pytest.mark.parametrize(
    ("asked", "n_ctx", "tokens"),
    [
        ({"trained": 8192}, 8192, 7000),
        ({"trained": 131_072}, 32_768, 28_504),
        ({"trained": None}, 4096, 3416),
        ({"trained": 8192, "n_ctx": 16_384}, 16_384, 14_168),
        ({"trained": 8192, "tokens": 5000}, 8192, 5000),
        ({"trained": 32_768, "tokens": 30_000}, 34_264, 30_000),
        ({"trained": 8192, "tokens": 9000}, 10_477, 9000),
    ],
)
def test_the_lengths_are_what_was_asked_for_completed(asked, n_ctx, tokens):
    lengths = choose_lengths(**{"n_ctx": None, "tokens": None} | asked)
    assert (lengths.n_ctx, lengths.tokens) == (n_ctx, tokens)
    assert most_tokens(n_ctx) >= tokens


@pytest.mark.parametrize("asked", [{"n_ctx": 2048, "tokens": None}, {"n_ctx": 8192, "tokens": 8000}])
def test_lengths_that_do_not_fit_are_refused_with_the_way_out(asked):
    with pytest.raises(UsageError, match="--n-ctx"):
        choose_lengths(trained=8192, **asked)


def test_messages_are_as_long_as_asked_for_and_a_function_of_the_seed(tiny):
    with LlamaEngine.open(tiny("llama"), n_ctx=512, n_threads=1) as engine:
        texts = [SourceText(engine, seed=seed) for seed in (3, 3, 4)]
        first, again, other = ([text.message(tokens) for tokens in (500, 300)] for text in texts)
        lengths = [len(engine.tokenize(message, parse_special=False)) for message in first]
    assert first == again
    assert first != other
    assert first[0][50:] not in first[1]
    assert 350 < lengths[0] <= 500
    assert 150 < lengths[1] <= 300
    assert "@" not in "".join(first)


# The report and the command


@pytest.mark.slow  # every part one after another: five processes and seven engines
def test_the_whole_benchmark_reports_every_figure_as_one_line_of_json(tiny):
    told, found = [], []
    plan = msgspec.structs.replace(QUICK, with_tools=False)
    report = run_cache(tiny("gemma3"), plan=plan, n_ctx=4096, n_threads=1, tell=told.append, found=found.append)
    read = json.loads(json_line(report))
    assert [figure["name"] for figure in read["figures"]] == FIGURES
    assert (read["benchmark"], read["model"]["n_ctx"]) == ("cache", 4096)
    for figure in read["figures"]:
        assert figure["name"] in TIMED or figure["met"] is not False
    lines = report_lines(report)
    assert sum(any(line.startswith(name) for name in FIGURES) for line in lines) == len(FIGURES)
    assert len(told) == 6
    assert tuple(found) == report.figures


def test_the_command_says_its_options_and_which_model_there_is_not(capsys):
    assert main(["bench", "cache", "--help"]) == 0
    shown = capsys.readouterr().out
    for option in ("--model", "--n-ctx", "--tokens", "--quick", "--strict", "--json"):
        assert option in shown
    assert main(["bench", "cache", "--model", "no such model"]) == 2
    assert "no such model" in capsys.readouterr().err
