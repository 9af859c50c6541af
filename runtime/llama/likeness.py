"""How alike two runs are: what the model holds likely at each position, and how it differs. For self-tests.

Callers hold the engine's turn. Only the likeliest tokens of each position are kept: with a large vocabulary a row of
logits is a megabyte.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from ...kernels.tokens import TokenIds
from .context import LlamaContext
from .loading import OUTPUTS_MOST
from .residency import Residency
from .sequence import SequenceState

T = TypeVar("T")

LIKELIEST = 8


@dataclass(frozen=True, slots=True, eq=False)
class Foretold:
    """The likeliest tokens at each position, the first one the likeliest, and their log-probabilities.

    Shapes: (positions, LIKELIEST).
    """

    ids: NDArray[np.int64]
    scores: NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Likeness:
    """How near a run is to a reference. See `mode_results.ModeResult`."""

    agreement: float
    difference: float
    divergence: float


class Reader:
    """Evaluates tokens after what a sequence holds, and reads what the model foretells."""

    def __init__(self, context: LlamaContext, residency: Residency) -> None:
        self._context, self._residency = context, residency

    def foretell(self, state: SequenceState, tokens: TokenIds) -> Foretold:
        """Evaluate `tokens` and return what is likely after each."""

        def read(_position: int, scores: NDArray[np.float64]) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
            ids = np.argsort(-scores, kind="stable")[:LIKELIEST]
            return ids, scores[ids]

        read_rows = self._each(state, tokens, read)
        return Foretold(np.stack([ids for ids, _ in read_rows]), np.stack([scores for _, scores in read_rows]))

    def compare(self, state: SequenceState, tokens: TokenIds, reference: Foretold) -> Likeness:
        """Evaluate the tokens that the reference was foretold at, and compare."""
        same: list[bool] = []

        def read(position: int, scores: NDArray[np.float64]) -> NDArray[np.float64]:
            ids = reference.ids[position]
            same.append(int(scores.argmax()) == int(ids[0]))
            likeliest: NDArray[np.float64] = scores[ids]
            return likeliest

        scores = np.stack(self._each(state, tokens, read))
        return Likeness(
            agreement=float(np.mean(same)),
            difference=float(np.abs(scores - reference.scores).mean()),
            divergence=_divergence(reference.scores, scores),
        )

    def loss(self, state: SequenceState, tokens: TokenIds) -> float:
        """Evaluate `tokens` and return the mean loss of all but the first, in nats."""
        following = tokens[1:].tolist()
        # Row i foretells token i + 1; the last row foretells none of them.
        losses = self._each(state, tokens[:-1], lambda position, scores: float(-scores[following[position]]))
        return float(np.mean(losses))

    def _each(self, state: SequenceState, tokens: TokenIds, read: Callable[[int, NDArray[np.float64]], T]) -> list[T]:
        """Evaluate `tokens` and return what `read` makes of each position's log-probabilities. Shape: (vocab_size,)."""
        found: list[T] = []
        self._context.arm(None)
        for start in range(0, len(tokens), OUTPUTS_MOST):
            part = tokens[start : start + OUTPUTS_MOST]
            self._residency.decode(state, part, last_logits=True, all_logits=True)
            found += [read(start + row, _log_softmax(self._context.output(row))) for row in range(len(part))]
        return found


def _divergence(reference: NDArray[np.float64], scores: NDArray[np.float64]) -> float:
    """Return the mean Kullback-Leibler divergence from the reference, all but the likeliest tokens taken together."""
    p, q = np.exp(reference), np.exp(scores)
    rest_p, rest_q = (np.maximum(1.0 - each.sum(axis=1), 1e-12) for each in (p, q))
    of_each: NDArray[np.float64] = (p * (reference - scores)).sum(axis=1) + rest_p * np.log(rest_p / rest_q)
    return float(of_each.mean())


def _log_softmax(logits: NDArray[np.float32]) -> NDArray[np.float64]:
    shifted = logits.astype(np.float64) - float(logits.max())
    scores: NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum())
    return scores
