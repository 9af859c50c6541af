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
from chapbook.kernels.prefix import common_prefix_length, common_prefix_length_reference
from chapbook.kernels.runs import split_long_runs, split_long_runs_reference
from chapbook.kernels.tokens import token_ids

WINDOW_TOKENS = 32_768
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
