"""An engine that is closed, let go of, or still in use when its process ends: nothing crashes, nothing hangs."""

import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from chapbook.kernels.errors import EngineClosed
from chapbook.kernels.tokens import concat_tokens
from chapbook.runtime.engine import Sampling, SyncSource
from chapbook.runtime.prefix_cache.options import CacheOptions
from chapbook.runtime.prefix_cache.snapshot_files import SectionPlan

GREEDY = Sampling(temperature=0.0)

PROGRAM = """
import sys, threading, time
import numpy as np
from chapbook.kernels.tokens import token_ids
from chapbook.runtime.llama import LlamaEngine
from chapbook.runtime.prefix_cache.options import CacheOptions
from chapbook.runtime.prefix_cache.snapshot_files import SectionPlan

run = token_ids(np.random.default_rng(0).integers(0, 256, size=6000))

def open_engine():
    cache = CacheOptions(folder=sys.argv[2], rest_s=0.0)
    return LlamaEngine.open(sys.argv[1], n_ctx=8192, n_threads=1, n_batch=64, n_ubatch=64, cache=cache)

def let_go():
    engine = open_engine()
    sequence = engine.open_sequence()
    engine.sync(sequence, run[:2000])
    engine.rest(sequence)

def leave_a_thread_in_it():
    engine = open_engine()
    def work():
        while True:
            engine.sync(engine.open_sequence(), run, reuse=False)
    threading.Thread(target=work, daemon=True).start()
    time.sleep(0.3)
    return engine

kept = {"let go": let_go, "left in use": leave_a_thread_in_it}[sys.argv[3]]()
print("end")
"""


@pytest.mark.parametrize("how", ["let go", "left in use"])
def test_a_process_that_ends_without_closing_its_engine_ends_well(tiny, tmp_path, how):
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tiny("llama")), str(tmp_path), how],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (ended.returncode, ended.stdout) == (0, "end\n"), ended.stderr
    # What was at rest is written, though nobody waited for it.
    assert bool([*tmp_path.rglob("*.kv")]) == (how == "let go")


def test_closing_while_other_threads_sync_ends_their_syncs_and_no_more(open_engine, random_run):
    engine = open_engine("llama", n_ctx=8192, n_batch=64, n_ubatch=64)
    ended = []

    def work(seed):
        try:
            while True:
                engine.sync(engine.open_sequence(), random_run(3000, seed=seed))
        except EngineClosed as error:
            ended.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    time.sleep(0.2)
    engine.close()
    for thread in threads:
        thread.join(60)
    assert len(ended) == 3


def test_a_state_that_llama_cpp_refuses_is_set_aside_with_the_reason(open_engine, random_run, tmp_path):
    cache = CacheOptions(folder=str(tmp_path))
    run = random_run(600)
    engine = open_engine("llama", cache=cache)
    # Whole by every hash, and no state of this model.
    files = engine.keeper._files

    pending = files.begin(run, [SectionPlan(tokens=600, partial=False, size_bytes=5000)], pinned=False)
    pending.section(0)[:] = np.arange(5000) % 251
    pending.commit()
    sequence = engine.open_sequence()
    report = engine.sync(sequence, concat_tokens([run, random_run(5, seed=1)]))
    assert (report.source, report.evaluated) == (SyncSource.NOTHING, 605)
    assert any("llama.cpp refuses its state" in note for note in report.notes)
    assert not [*tmp_path.rglob("*.kv")]
    engine.check_integrity()


def test_a_sequence_that_gave_way_before_its_reply_has_it_all_the_same(open_engine, random_run):
    for kind, memory_mb in (("llama", 0), ("gemma3", 0), ("mamba", 0), ("hybrid", 0), ("llama", 50)):
        engine = open_engine(kind, n_sequences=1, cache=CacheOptions(memory_mb=memory_mb))
        first, second = engine.open_sequence(), engine.open_sequence()
        engine.sync(first, random_run(10))
        engine.sync(second, random_run(10))
        forced = random_run(5, seed=2)
        assert [token.id for token in engine.generate(first, sampling=GREEDY, max_tokens=9, forced=forced)] == [*forced]
        assert np.array_equal(engine.resident(first), concat_tokens([random_run(10), forced]))
        assert len(engine.score(second, random_run(3), given=random_run(9, seed=3))) == 3
