"""A test of the loaded model on this machine: going back and evaluating again must give what a fresh run gives."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
import numpy as np
from numpy.typing import NDArray

from ...kernels.errors import UsageError
from ...kernels.tokens import TokenIds, concat_tokens
from .engine import LlamaEngine

GIVEN_TOKENS, TESTED_TOKENS, DROPPED_TOKENS = 160, 64, 96
LEAST_AGREEMENT = 0.95
"""The share of positions whose likeliest token must be the same."""
MOST_DIFFERENCE = 0.02
"""How far the log-probabilities of the likeliest tokens may be off, in nats, on average: with equal batches a rewound
run is equal to the bit on a processor (measured), and one wrong token among 160 shows as 0.3 on SmolLM2."""
MOST_DIFFERENCE_ANEW = 0.2
"""The same for a memory that cannot go back: its batches are other ones, which round otherwise (0.08 on SmolLM2)."""
LIKELIEST = 8

_TEXT = """\
A chapbook was a small booklet, printed cheaply on one sheet that was folded into eight, twelve or sixteen pages.
Pedlars carried them from village to village, together with ribbons and needles, and sold them for a penny. They held
ballads, almanacs, tales of giants and of robbers, prayers, riddles and advice on how to keep bees. Few of those who
bought them owned another book. The woodcuts were used again and again: the same picture of a ship stood for the Armada
in one and for Noah in the next. Printers set the type in a hurry, and spelled as they pleased.

def total(prices: list[int], *, rebate: float = 0.0) -> float:
    \"\"\"Return the sum of the prices, less the rebate.\"\"\"
    return sum(prices) * (1.0 - rebate)

| year | titles | price |
|------|--------|-------|
| 1712 | 31     | 1d    |
| 1740 | 118    | 1d    |
"""


class RewindTest(msgspec.Struct, frozen=True, kw_only=True):
    """What came of it. `agreement` is the share of positions with the same likeliest token, `difference` the mean
    difference of the log-probabilities of the likeliest, in nats; `rewound` how many tokens were kept, 0 for a model
    whose memory cannot go back and so evaluates from the start."""

    positions: int
    agreement: float
    difference: float
    rewound: int
    passed: bool


def run_rewind_test(engine: LlamaEngine) -> RewindTest:
    """Compare a rewound run with a fresh one at `TESTED_TOKENS` positions, while nobody else uses the engine.

    Raises UsageError for a window that is too small.
    """
    needed = GIVEN_TOKENS + max(TESTED_TOKENS, DROPPED_TOKENS)
    if engine.info.n_ctx < needed:
        raise UsageError(f"the self-test needs a window of {needed} tokens, and n_ctx is {engine.info.n_ctx}")
    text = engine.tokenize(_TEXT * 3, parse_special=False)
    given, tested = text[:GIVEN_TOKENS], text[GIVEN_TOKENS : GIVEN_TOKENS + TESTED_TOKENS]
    dropped = text[:DROPPED_TOKENS]
    # The same batches in both, and one run at a time: other cells and other sizes of a batch round otherwise.
    before = given[:-1]
    fresh = _run(engine, (before, given), tested)
    rewound = _run(engine, (before, concat_tokens((given, dropped)), given), tested)
    agreement = float((fresh.scores.argmax(axis=1) == rewound.scores.argmax(axis=1)).mean())
    likeliest = np.argsort(-fresh.scores, axis=1)[:, :LIKELIEST]
    off = np.take_along_axis(fresh.scores - rewound.scores, likeliest, axis=1)
    difference = float(np.abs(off).mean())
    limit = MOST_DIFFERENCE if rewound.cached else MOST_DIFFERENCE_ANEW
    return RewindTest(
        positions=len(tested),
        agreement=agreement,
        difference=difference,
        rewound=rewound.cached,
        passed=agreement >= LEAST_AGREEMENT and difference <= limit,
    )


@dataclass(frozen=True, slots=True)
class _Scored:
    """Log-probabilities, shape (tokens, vocab_size), and what the last sync kept."""

    scores: NDArray[np.float32]
    cached: int


def _run(engine: LlamaEngine, syncs: tuple[TokenIds, ...], tokens: TokenIds) -> _Scored:
    """Sync a sequence of its own to each run in turn, evaluate `tokens` in one batch and score what may follow each."""
    sequence = engine.open_sequence()
    try:
        cached = [engine.sync(sequence, wanted).cached for wanted in syncs][-1]
        engine.context.arm(None)
        engine.residency.decode(engine.residency.state(sequence), tokens, last_logits=True, all_logits=True)
        rows = np.stack([engine.context.output(row) for row in range(len(tokens))])
    finally:
        engine.drop(sequence)
    shifted = rows - rows.max(axis=1, keepdims=True)
    return _Scored(scores=shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True)), cached=cached)
