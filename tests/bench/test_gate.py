"""The measurement of the arrival gate works, sees what it should see, and can fail."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from chapbook.bench.bare_loop import BareLoop, BareParameters
from chapbook.bench.gate import GATE_TARGET, MB, GatePlan, gate_figure, memory_figure, run_gate, text_blocks
from chapbook.bench.report import json_line

PLAN = GatePlan(rounds=1, text_bytes=MB // 2, blob_bytes=2 * MB, reads=2)


def test_it_gives_a_figure_for_each_target_and_a_line_of_json(tiny: Callable[..., Path]) -> None:
    told: list[str] = []
    report = run_gate(tiny("llama"), plan=PLAN, tell=told.append)
    assert [figure.name for figure in report.figures] == [
        "gate / llama_tokenize, time",
        "lines near the end of an artifact",
        "the same as a page of the tool",
        "RSS growth, sparse file",
    ]
    assert all(figure.value >= 0 for figure in report.figures)
    assert len(told) == 3
    assert json.loads(json_line(report))["benchmark"] == "gate"


def test_a_gate_that_counts_all_of_a_text_misses_its_target(tiny: Callable[..., Path], tmp_path: Path) -> None:
    bare = BareLoop(tiny("llama"), BareParameters(n_ctx=256, n_batch=64, n_ubatch=64, n_threads=1))

    def slow_count(text: str) -> int:
        return sum(bare.tokenize(text.encode()) for _ in range(60)) // 60

    figure = gate_figure(tmp_path / "store", bare, slow_count, PLAN)
    assert figure.target == GATE_TARGET
    assert figure.met is False


def test_memory_is_that_of_the_process_that_admits_the_file(tmp_path: Path) -> None:
    figure = memory_figure(tmp_path / "memory", GatePlan(blob_bytes=64 * MB))
    assert figure.unit == "MB"
    assert 0 <= figure.value < 64


@pytest.mark.parametrize("size_bytes", [1, 1_000, 400_000])
def test_the_text_has_the_size_that_was_asked_for_and_lines_of_its_own(size_bytes: int) -> None:
    text = b"".join(text_blocks(size_bytes, seed=3))
    assert len(text) == size_bytes
    lines = text.split(b"\n")
    assert len(set(lines)) == len(lines)
