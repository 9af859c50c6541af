"""Kernels against their plain references: `pytest bench/`. Ratios matter, times depend on the machine.

pytest collects this file by its path, so its imports are absolute.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from chapbook.bench.trained_vocabulary import trained_vocabulary
from chapbook.kernels.bpe import BpeCounter, build_bpe_counter, encode_reference
from chapbook.kernels.chain import RunName, RunNamer, chain_hashes, chain_hashes_reference, longest_named, run_name
from chapbook.kernels.line_index import LineIndex, index_lines, index_lines_reference
from chapbook.kernels.prefix import common_prefix_length, common_prefix_length_reference, shared_with_each
from chapbook.kernels.retention import choose_evictions, choose_evictions_reference
from chapbook.kernels.runs import split_long_runs, split_long_runs_reference
from chapbook.kernels.secrets import redact, redact_reference
from chapbook.kernels.text_encoding import UTF_8, TextEncoding
from chapbook.kernels.tokens import TokenIds, token_ids

WINDOW_TOKENS = 32_768
SEED = bytes(range(16))
TEXT = "def there(other):\n    return other == 'the cat'  # 1234 中文字, it's\n" * 500
BASE64 = "TWFuIGlzIGRpc3Rpbmd1aXNoZWQ+" * 2_000

kernel_or_reference = pytest.mark.parametrize("which", ["kernel", "reference"])


@kernel_or_reference
@pytest.mark.parametrize("differ_at", [10, WINDOW_TOKENS - 1])
def test_common_prefix(benchmark: Any, which: str, differ_at: int) -> None:
    measured = common_prefix_length if which == "kernel" else common_prefix_length_reference
    resident = token_ids(np.arange(WINDOW_TOKENS))
    wanted = token_ids(np.where(np.arange(WINDOW_TOKENS) == differ_at, -1, resident))
    assert benchmark(measured, resident, wanted) == differ_at


@pytest.mark.parametrize("which", ["kernel", "in turn"])
@pytest.mark.parametrize("shared", [40, 2_000, WINDOW_TOKENS - 1])
@pytest.mark.parametrize("count", [1, 200])
def test_shared_with_each(benchmark: Any, which: str, shared: int, count: int) -> None:
    wanted = token_ids(np.arange(WINDOW_TOKENS))
    differing = np.where(np.arange(WINDOW_TOKENS) == shared, -1, wanted)
    runs = [token_ids(differing) for _ in range(count)]

    def in_turn(wanted: TokenIds, runs: list[TokenIds]) -> list[int]:
        return [common_prefix_length(wanted, run) for run in runs]

    assert list(benchmark(shared_with_each if which == "kernel" else in_turn, wanted, runs)) == [shared] * count


@kernel_or_reference
def test_chain_hashes(benchmark: Any, which: str) -> None:
    measured = chain_hashes if which == "kernel" else chain_hashes_reference
    tokens = token_ids(np.arange(WINDOW_TOKENS))
    assert benchmark(measured, tokens, seed=SEED).shape == (WINDOW_TOKENS // 256, 16)


def test_longest_named(benchmark: Any) -> None:
    """Names of 1,000 runs, a hundred of them beginnings of the wanted one: without a reference, since it opens none."""
    tokens = token_ids(np.arange(WINDOW_TOKENS))
    namer = RunNamer(tokens, seed=SEED)
    others = [token_ids([-1, *range(9 * length)]) for length in range(900)]
    names: set[RunName] = {namer.name(20 * length) for length in range(1, 101)}
    names.update(run_name(run, seed=SEED) for run in others)
    assert benchmark(lambda: longest_named(RunNamer(tokens, seed=SEED), names)) == 2_000


@kernel_or_reference
def test_choose_evictions(benchmark: Any, which: str) -> None:
    measured = choose_evictions if which == "kernel" else choose_evictions_reference
    scattered = (np.arange(1_000) * 7_919) % 1_000
    gone = benchmark(
        measured, sizes=scattered + 1, priorities=scattered.astype(float), pinned=scattered % 10 == 0, over=50_000
    )
    assert 0 < len(gone) < 1_000


@kernel_or_reference
@pytest.mark.parametrize("text", [TEXT, BASE64], ids=["source", "base64"])
def test_split_long_runs(benchmark: Any, which: str, text: str) -> None:
    measured = split_long_runs if which == "kernel" else split_long_runs_reference
    assert "".join(benchmark(measured, text)) == text


@kernel_or_reference
def test_bpe(benchmark: Any, which: str) -> None:
    vocabulary = trained_vocabulary("llama-bpe")
    counter = build_bpe_counter(vocabulary)
    assert isinstance(counter, BpeCounter)
    encode: Callable[[str], Any] = (
        counter.encode if which == "kernel" else lambda text: encode_reference(vocabulary, text)
    )
    ids = benchmark(encode, TEXT[:3_000])
    assert ids.tolist() == counter.encode(TEXT[:3_000]).tolist()


@kernel_or_reference
@pytest.mark.parametrize(
    "unit",
    [TEXT.encode(), BASE64.encode(), b"sk-", b"eyJ", b"?token=a", b"-----BEGIN PRIVATE KEY-----"],
    ids=["source", "base64", "sk-", "eyJ", "token=", "key"],
)
def test_redact(benchmark: Any, which: str, unit: bytes) -> None:
    """A megabyte of ordinary text, and of what a secret begins with: MB/s is 1 / seconds."""
    data = (unit * (1_000_000 // len(unit) + 1))[:1_000_000]
    found = benchmark(redact if which == "kernel" else redact_reference, data)
    assert found.data == data


@kernel_or_reference
@pytest.mark.parametrize("encoding", [UTF_8, TextEncoding(name="utf-16-le")], ids=lambda encoding: encoding.name)
def test_index_lines(benchmark: Any, which: str, encoding: TextEncoding) -> None:
    data = (TEXT * 12).encode(encoding.name)[:1_000_000]
    index: LineIndex = benchmark(index_lines if which == "kernel" else index_lines_reference, data, encoding)
    assert index.feeds == data.decode(encoding.name, "ignore").count("\n")
