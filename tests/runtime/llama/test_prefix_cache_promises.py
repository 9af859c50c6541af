"""What the prefix cache promises to sessions, one promise for each test."""

import itertools
import subprocess
import sys
import threading

import msgspec
import numpy as np
import pytest

from chapbook.kernels.tokens import concat_tokens
from chapbook.runtime.bound import COLD_START, explain_difference
from chapbook.runtime.engine import Sampling, SyncPoints, SyncSource
from chapbook.runtime.prefix_cache.modes import ReuseModes
from chapbook.runtime.prefix_cache.options import CacheOptions

KINDS = ("llama", "gemma3", "mamba", "hybrid")
GREEDY = Sampling(temperature=0.0)


def cache_in(folder, **options):
    return CacheOptions(**({"folder": str(folder), "rest_s": 0.0, "memory_mb": 200, "disk_mb": 200} | options))


def run_to_disk(engine, run, *, points=None):
    """Have `run` written to disk as after a turn."""
    sequence = engine.open_sequence()
    engine.sync(sequence, run, **({} if points is None else {"points": points}))
    engine.rest(sequence)
    engine.settle()
    return sequence


@pytest.mark.parametrize("kind", KINDS)
def test_a_new_session_starts_from_the_prefix_of_one_that_has_gone_on(open_engine, random_run, kind):
    engine = open_engine(kind)
    prefix = random_run(300)
    points = SyncPoints(pinned=(300,))
    first, second = engine.open_sequence(), engine.open_sequence()
    engine.sync(first, concat_tokens([prefix, random_run(700, seed=1)]), points=points)
    report = engine.sync(second, concat_tokens([prefix, random_run(50, seed=2)]), points=points)
    assert (report.cached, report.evaluated) == (300, 50)
    sources = {"llama": SyncSource.FORK, "mamba": SyncSource.PARTIAL}
    assert report.source is sources.get(kind, SyncSource.MEMORY)
    engine.check_integrity()


def test_a_fork_on_a_sliding_window_has_all_of_the_window(open_engine, random_run, next_logits):
    engine, run = open_engine("gemma3"), random_run(1000)
    engine.sync(engine.open_sequence(), run)
    # The slot still holds the window of the token at 900; a copy of its state does not.
    assert engine.context.memory.first_held(next(engine.context.cells.holders()).slot) < 900 - 256
    wanted = concat_tokens([run[:900], random_run(5, seed=1)])
    child, fresh = engine.open_sequence(), engine.open_sequence()
    engine.sync(child, wanted)
    mine = next_logits(engine, child)
    engine.sync(fresh, wanted, reuse=False)
    np.testing.assert_allclose(mine, next_logits(engine, fresh), atol=0.02)


def test_of_two_points_near_each_other_going_back_costs_no_more_than_lies_between(open_engine, random_run):
    engine, run = open_engine("hybrid"), random_run(900)
    sequence = engine.open_sequence()
    engine.sync(sequence, run, points=SyncPoints(ring=(500, 510, 800)))
    for end, more in ((510, 10), (500, 0)):
        report = engine.sync(sequence, concat_tokens([run[:end], random_run(5, seed=end)]))
        assert report.evaluated == 5 + more


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_session_went_back_from_can_be_come_back_to(open_engine, random_run, kind):
    engine, run = open_engine(kind), random_run(900)
    sequence = engine.open_sequence()
    engine.sync(sequence, run, points=SyncPoints(ring=(500,)))
    assert engine.sync(sequence, concat_tokens([run[:500], random_run(5, seed=1)])).evaluated == 5
    report = engine.sync(sequence, concat_tokens([run, random_run(7, seed=2)]))
    assert (report.cached, report.evaluated) == (900, 7)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n_sequences", [1, 2])
def test_a_sequence_that_was_swapped_out_can_be_forked(open_engine, random_run, kind, n_sequences):
    engine = open_engine(kind, n_sequences=n_sequences)
    run = random_run(400)
    parent = engine.open_sequence()
    engine.sync(parent, run)
    for seed in range(1, 4):
        engine.sync(engine.open_sequence(), random_run(1500, seed=seed))
    assert engine.residency.state(parent).slot is None
    child = engine.fork(parent, at=400)
    assert np.array_equal(engine.resident(child), run)
    assert engine.sync(child, concat_tokens([run, random_run(30, seed=9)])).evaluated == 30
    assert engine.sync(parent, concat_tokens([run, random_run(40, seed=8)])).evaluated == 40
    engine.check_integrity()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n_sequences", [1, 2])
def test_a_child_and_its_parent_alternate_and_neither_loses_anything(open_engine, random_run, kind, n_sequences):
    engine = open_engine(kind, n_sequences=n_sequences)
    parent = engine.open_sequence()
    engine.sync(parent, random_run(900))
    child = engine.fork(parent, at=900)
    runs = {parent: random_run(900), child: random_run(900)}
    for step in range(8):
        sequence = (child, parent)[step % 2]
        runs[sequence] = concat_tokens([runs[sequence], random_run(60, seed=step + 1)])
        report = engine.sync(sequence, runs[sequence])
        assert (report.cached, report.evaluated) == (len(runs[sequence]) - 60, 60)
        engine.check_integrity()


KILLED_SEED = 8
"""One after whose tokens no kind of tiny model ends its reply within 64 more."""

KILLED = """
import sys, numpy as np
from chapbook.kernels.tokens import token_ids
from chapbook.runtime.engine import Sampling, SyncPoints
from chapbook.runtime.llama import LlamaEngine
from chapbook.runtime.prefix_cache.options import CacheOptions
model, folder = sys.argv[1:]
cache = CacheOptions(folder=folder, memory_mb=200, disk_mb=200, rest_s=0.0)
engine = LlamaEngine.open(model, n_ctx=2048, n_threads=1, cache=cache)
run = token_ids(np.random.default_rng(8).integers(0, 256, size=1000))
sequence = engine.open_sequence()
engine.sync(sequence, run[:600], points=SyncPoints(pinned=(300,), ring=(400, 600)))
assert len(list(engine.generate(sequence, sampling=Sampling(), max_tokens=200, forced=run[600:800]))) == 200
engine.rest(sequence)
engine.settle()
engine.sync(sequence, run, points=SyncPoints(pinned=(300,), ring=(400, 600, 800, 1000)))
greedy = engine.generate(sequence, sampling=Sampling(temperature=0.0), max_tokens=64)
print(*(token.id for token in greedy), flush=True)
sys.stdin.read()
"""


@pytest.fixture
def killed(tiny, tmp_path):
    """Return a function (kind) -> the 64 greedy tokens of a process that was killed after a turn of 800 tokens."""

    def run_and_kill(kind):
        with subprocess.Popen(
            [sys.executable, "-c", KILLED, str(tiny(kind)), str(tmp_path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        ) as process:
            unbroken = [int(number) for number in process.stdout.readline().split()]
            process.kill()
        return unbroken

    return run_and_kill


@pytest.mark.parametrize("kind", KINDS)
def test_a_killed_session_goes_on_from_disk_with_the_reply_of_the_unbroken_one(
    open_engine, random_run, killed, tmp_path, kind
):
    unbroken = killed(kind)
    assert len(unbroken) == 64
    run = random_run(1000, seed=KILLED_SEED)
    engine = open_engine(kind, cache=cache_in(tmp_path))
    sequence = engine.open_sequence()
    report = engine.sync(sequence, run)
    assert (report.source, report.cached, report.evaluated) == (SyncSource.DISK, 800, 200)
    assert np.array_equal(engine.resident(sequence), run)
    assert [token.id for token in engine.generate(sequence, sampling=GREEDY, max_tokens=64)] == unbroken
    # Back to a point before the turn's end, which lies outside of the sliding window.
    back = engine.sync(engine.open_sequence(), concat_tokens([run[:400], random_run(5, seed=3)]))
    assert (back.cached, back.evaluated) == (400, 5)
    engine.check_integrity()


def test_with_its_snapshots_deleted_a_killed_session_is_a_cold_start(open_engine, random_run, killed, tmp_path):
    unbroken = killed("llama")
    for file in tmp_path.rglob("*.kv"):
        file.unlink()
    engine = open_engine("llama", cache=cache_in(tmp_path))
    sequence = engine.open_sequence()
    report = engine.sync(sequence, random_run(1000, seed=KILLED_SEED))
    assert (report.source, report.evaluated) == (SyncSource.NOTHING, 1000)
    assert explain_difference(report, 200) == COLD_START
    assert [token.id for token in engine.generate(sequence, sampling=GREEDY, max_tokens=64)] == unbroken


@pytest.fixture
def evaluated_after(open_engine, random_run, tmp_path):
    """Return a function (kind, **change) -> the report of one token more than is on disk, in an engine of that change.

    After that an engine as it was still finds what is on disk.
    """
    run, longer = random_run(500), random_run(501)

    def sync_in_another(kind, **change):
        writer = open_engine(kind, cache=cache_in(tmp_path))
        run_to_disk(writer, run)
        writer.close()
        other = open_engine(kind, cache=cache_in(tmp_path), **change)
        report = other.sync(other.open_sequence(), longer)
        again = open_engine(kind, cache=cache_in(tmp_path))
        assert again.sync(again.open_sequence(), longer).evaluated == 1
        return report

    return sync_in_another


@pytest.mark.parametrize(
    ("kind", "change", "reason"),
    [
        ("llama", {"type_k": "f32"}, "K type f16, here f32"),
        ("llama", {"type_v": "bf16"}, "V type f16, here bf16"),
        ("llama", {"flash_attn": True}, "flash attention off, here on"),
        ("gemma3", {"swa_full": True}, "memory sliding window, here sliding window, every cell kept"),
        ("mamba", {"model_options": {"seed": 1}}, "model file"),
    ],
)
def test_a_snapshot_of_something_else_is_a_miss_that_says_so(evaluated_after, kind, change, reason):
    report = evaluated_after(kind, **change)
    assert (report.source, report.evaluated) == (SyncSource.NOTHING, 501)
    assert reason in report.reason


@pytest.mark.parametrize("kind", KINDS)
def test_what_was_swapped_out_at_rest_is_written_too(open_engine, random_run, tmp_path, kind):
    engine = open_engine(kind, n_sequences=1, cache=cache_in(tmp_path, rest_s=60.0))
    run = random_run(600)
    first = engine.open_sequence()
    engine.sync(first, run[:100])
    engine.rest(first)
    engine.settle()
    engine.sync(first, run)
    engine.rest(first)
    engine.sync(engine.open_sequence(), random_run(600, seed=1))
    engine.settle()
    another = open_engine(kind, cache=cache_in(tmp_path))
    report = another.sync(another.open_sequence(), random_run(605))
    assert (report.source, report.evaluated) == (SyncSource.DISK, 5)


@pytest.mark.parametrize("kind", ["gemma3", "mamba", "hybrid"])
def test_after_two_restarts_a_session_goes_back_to_points_from_before_the_first(
    open_engine, random_run, tmp_path, kind
):
    run = random_run(900)
    ring = SyncPoints(ring=(200, 300, 600))
    for end in (400, 650, 900):
        with open_engine(kind, cache=cache_in(tmp_path)) as engine:
            run_to_disk(engine, run[:end], points=ring)
    engine = open_engine(kind, cache=cache_in(tmp_path))
    for end in (200, 300, 600):
        report = engine.sync(engine.open_sequence(), concat_tokens([run[:end], random_run(5, seed=end)]))
        assert (report.cached, report.evaluated) == (end, 5)


@pytest.mark.parametrize("kind", KINDS)
def test_making_room_for_a_state_may_let_go_of_the_rung_that_it_needs(open_engine, random_run, kind):
    engine = open_engine(kind, n_sequences=1)
    run = random_run(600)
    sequence = engine.open_sequence()
    engine.sync(sequence, run, points=SyncPoints(ring=(100, 200, 300, 400)))
    other = engine.open_sequence()
    engine.sync(other, random_run(600, seed=1))
    # Room for one whole state, less than for that and all rungs.
    state_bytes = engine.context.memory.state_bytes(engine.residency.state(other).slot, partial=False)
    for budget_bytes in np.linspace(engine.pool.usage().held_bytes, state_bytes, num=6).astype(int):
        engine.pool.resize(int(budget_bytes))
        for end in (300, 200, 100):
            wanted = concat_tokens([run[:end], random_run(5, seed=end)])
            report = engine.sync(sequence, wanted)
            assert report.cached + report.evaluated == end + 5
            engine.sync(other, random_run(600, seed=1))
            engine.check_integrity()


@pytest.mark.parametrize("kind", KINDS)
def test_without_memory_for_snapshots_the_engine_works_and_keeps_none(open_engine, random_run, next_logits, kind):
    engine = open_engine(kind, n_sequences=1, cache=CacheOptions(memory_mb=0))
    run, other = random_run(600), random_run(600, seed=1)
    first, second = engine.open_sequence(), engine.open_sequence()
    engine.sync(first, run, points=SyncPoints(pinned=(300,), ring=(400,)))
    logits = next_logits(engine, first)
    engine.sync(second, other)
    report = engine.sync(first, run)
    assert (report.source, report.evaluated) == (SyncSource.NOTHING, 600)
    assert "evicted" in report.reason
    assert engine.pool.usage().held_bytes == 0
    np.testing.assert_allclose(next_logits(engine, first), logits, atol=0.05)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n_sequences", [1, 2])
def test_a_turn_between_the_sync_and_the_reply_of_another_thread_costs_it_nothing(
    open_engine, random_run, kind, n_sequences
):
    """One decodes at a time, but each thread's sync and reply are torn apart by those of the others."""
    engine = open_engine(kind, n_sequences=n_sequences)
    step = threading.Lock()
    problems, evaluated = [], []

    def session(seed):
        try:
            sequence, run = engine.open_sequence(), random_run(0)
            for turn in range(4):
                run = concat_tokens([run, random_run(150, seed=100 * seed + turn)])
                with step:
                    evaluated.append(engine.sync(sequence, run).evaluated)
                all_have_synced.wait()
                with step:
                    reply = engine.generate(sequence, sampling=GREEDY, max_tokens=9, forced=random_run(9, seed=seed))
                    assert len(list(reply)) == 9
                    run = concat_tokens([run, random_run(9, seed=seed)])
                    assert np.array_equal(engine.resident(sequence), run)
        except Exception as error:
            problems.append(error)
            all_have_synced.abort()

    threads = [threading.Thread(target=session, args=(seed,)) for seed in range(4)]
    all_have_synced = threading.Barrier(len(threads), timeout=60)
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not problems
    assert evaluated == [150] * 16
    engine.check_integrity()


@pytest.fixture
def report_where(open_engine, random_run, tmp_path):
    """Return a function (source, modes) -> the report of a sync that would start from there with all modes on."""
    run = random_run(300)
    branch = concat_tokens([run[:200], random_run(9, seed=1)])
    numbers = itertools.count()

    def rewind(cache):
        engine = open_engine("llama", n_sequences=1, cache=msgspec.structs.replace(cache, memory_mb=0))
        sequence = engine.open_sequence()
        engine.sync(sequence, run)
        return engine.sync(sequence, branch)

    def fork(cache):
        engine = open_engine("llama", cache=cache)
        engine.sync(engine.open_sequence(), run)
        return engine.sync(engine.open_sequence(), branch)

    def memory(cache):
        engine = open_engine("llama", n_sequences=1, cache=cache)
        first = engine.open_sequence()
        engine.sync(first, run)
        engine.sync(engine.open_sequence(), random_run(300, seed=2))
        return engine.sync(first, concat_tokens([run, branch]))

    def disk(cache):
        writer = open_engine("llama", cache=cache)
        run_to_disk(writer, run)
        writer.close()
        assert any(tmp_path.rglob("*.kv")) == cache.modes.disk_snapshot
        engine = open_engine("llama", cache=cache)
        return engine.sync(engine.open_sequence(), concat_tokens([run, branch]))

    def partial(cache):
        engine = open_engine("mamba", cache=cache)
        sequence = engine.open_sequence()
        engine.sync(sequence, run, points=SyncPoints(ring=(200,)))
        return engine.sync(sequence, branch)

    situations = {
        SyncSource.REWIND: rewind,
        SyncSource.FORK: fork,
        SyncSource.MEMORY: memory,
        SyncSource.DISK: disk,
        SyncSource.PARTIAL: partial,
    }
    return lambda source, modes: situations[source](cache_in(tmp_path / str(next(numbers)), modes=modes))


@pytest.mark.parametrize(
    ("mode", "source"),
    [
        ("disk_snapshot", SyncSource.DISK),
        ("rewind", SyncSource.REWIND),
        ("fork", SyncSource.FORK),
        ("memory_snapshot", SyncSource.MEMORY),
        ("partial_snapshot", SyncSource.PARTIAL),
    ],
)
def test_a_mode_that_is_switched_off_is_not_used(report_where, mode, source):
    off = report_where(source, ReuseModes(**{mode: False}))
    assert off.source is not source
    on = report_where(source, ReuseModes())
    assert on.source is source
    assert off.cached + off.evaluated == on.cached + on.evaluated


def test_the_account_of_cells_is_that_of_llama_cpp(open_engine, random_run):
    """A used cell adds a fixed number of bytes to the state of all slots, and four for each further sequence in it."""
    engine = open_engine("llama", n_sequences=4)
    memory, cells = engine.context.memory, engine.context.cells
    sequences = [engine.open_sequence() for _ in range(4)]
    engine.sync(sequences[0], random_run(100))
    bytes_100 = memory.all_cells_bytes()
    engine.sync(sequences[0], random_run(200))
    cell_bytes, rest = divmod(memory.all_cells_bytes() - bytes_100, 100)
    assert rest == 0
    empty_bytes = bytes_100 - 100 * cell_bytes
    random = np.random.default_rng(0)
    for _ in range(40):
        kept = engine.resident(sequences[random.integers(4)])
        kept = kept[: random.integers(0, min(len(kept), 900) + 1)]
        wanted = concat_tokens([kept, random_run(int(random.integers(1, 300)), seed=int(random.integers(99)))])
        engine.sync(sequences[random.integers(4)], wanted)
        shares = sum(len(state.run) for state in cells.holders()) - cells.used
        assert memory.all_cells_bytes() == empty_bytes + cells.used * cell_bytes + 4 * shares
        engine.check_integrity()
    assert cells.used > 200


FORTY_SESSIONS = """
import sys, numpy as np, psutil
from chapbook.kernels.tokens import token_ids
from chapbook.runtime.llama import LlamaEngine
from chapbook.runtime.prefix_cache.options import CacheOptions
engine = LlamaEngine.open(
    sys.argv[1], n_ctx=6144, n_threads=1, type_k="f32", type_v="f32", cache=CacheOptions(memory_mb=64)
)
random = np.random.default_rng(0)
held = []
for _ in range(40):
    engine.sync(engine.open_sequence(), token_ids(random.integers(0, 256, size=5000)))
    held.append(psutil.Process().memory_info().rss)
usage = engine.pool.usage()
print(held[0], max(held), usage.held_bytes, usage.snapshots)
"""


@pytest.mark.slow  # 200,000 tokens are evaluated, so that forty states do not fit in the budget
def test_forty_sessions_take_no_more_memory_than_the_budget(tiny):
    command = [sys.executable, "-c", FORTY_SESSIONS, str(tiny("llama"))]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    baseline, most, held, snapshots = map(int, done.stdout.split())
    print(f"RSS grew by {(most - baseline) / 1e6:.1f} MB, snapshots {snapshots} of {held / 1e6:.1f} MB")
    # The budget was used up, and kept.
    assert 50_000_000 < held <= 64_000_000
    assert snapshots < 40
    assert most - baseline <= 1.1 * 64_000_000


@pytest.mark.parametrize("kind", KINDS)
def test_a_host_that_never_pauses_has_its_turns_written_all_the_same(open_engine, random_run, tmp_path, kind):
    engine = open_engine(kind, n_ctx=4096, cache=CacheOptions(folder=str(tmp_path), rest_s=3600))
    sequence, run = engine.open_sequence(), random_run(1500)
    for end in (500, 1000, 1500):
        engine.sync(sequence, run[:end])
        engine.rest(sequence)
    # All three are more than an eighth longer than what was written, so that none waits for a rest.
    while engine.keeper._is_at_work():
        engine.sync(sequence, run)
        engine.check_integrity()
    lengths = sorted(len(file.tokens) for file in engine.keeper._files.find())
    assert lengths[-1] == 1500
    assert np.array_equal(engine.resident(sequence), run)


@pytest.mark.parametrize("kind", KINDS)
def test_one_session_leaves_few_files_however_many_its_turns(open_engine, random_run, tmp_path, kind):
    engine = open_engine(kind, n_ctx=4096, cache=CacheOptions(folder=str(tmp_path), rest_s=0.0))
    sequence, run = engine.open_sequence(), random_run(3000)
    for end in range(150, 3001, 150):
        engine.sync(sequence, run[:end], points=SyncPoints(pinned=(100,)))
        engine.rest(sequence)
        engine.settle()
    # The run, and the session prefix.
    assert len([*tmp_path.rglob("*.kv")]) == 2
