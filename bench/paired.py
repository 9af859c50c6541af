"""Ratios that hold on a noisy machine: two things are timed in turn, and each pair gives one ratio. Pure.

What another process takes away hits both of a pair alike, or one of them in one pair and the other in the next. The
median of the ratios therefore says more than any average of times, the more so the shorter a pair is.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import msgspec

CONFIDENCE = 0.95


class Target(msgspec.Struct, frozen=True):
    """What a figure should be."""

    relation: Literal[">=", "<=", ">"]
    limit: float

    def is_met(self, value: float) -> bool:
        """Say whether `value` is as it should be; what is not a number never is."""
        match self.relation:
            case ">=":
                return value >= self.limit
            case "<=":
                return value <= self.limit
            case ">":
                return value > self.limit


class Figure(msgspec.Struct, frozen=True, kw_only=True):
    """One measured number. A `unit` of nothing is a ratio. `met` is None where there is no target.

    For a paired ratio: `low` and `high` bound the median with 95 % confidence, and `of_totals` is the ratio of the
    summed times, in which rare pauses count and the machine's noise with them.
    """

    name: str
    value: float
    unit: str = ""
    target: Target | None = None
    met: bool | None = None
    low: float | None = None
    high: float | None = None
    of_totals: float | None = None
    pairs: int = 0
    note: str = ""


def is_undecided(figure: Figure) -> bool:
    """Say whether the target lies between the bounds, so that chance may have met or missed it."""
    if figure.target is None or figure.low is None or figure.high is None:
        return False
    return figure.low < figure.target.limit <= figure.high


def judged(figure: Figure, target: Target) -> Figure:
    """Return the figure with its target and whether that is met."""
    return msgspec.structs.replace(figure, target=target, met=target.is_met(figure.value))


@dataclass(slots=True)
class PairedTimes:
    """Seconds of ours and of the baseline's, pair by pair."""

    ours_s: list[float] = field(default_factory=list)
    baseline_s: list[float] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.ours_s)

    def add(self, ours_s: float, baseline_s: float) -> None:
        """Take one pair in."""
        self.ours_s.append(ours_s)
        self.baseline_s.append(baseline_s)

    def figure(self, name: str) -> Figure:
        """Return our speed as a share of the baseline's: 1 is as fast, less is slower. Not a number without pairs."""
        if not self.ours_s:
            return Figure(name=name, value=math.nan)
        ratios = sorted(theirs / ours for ours, theirs in zip(self.ours_s, self.baseline_s, strict=True))
        outside = ranks_outside(len(ratios))
        return Figure(
            name=name,
            value=statistics.median(ratios),
            low=ratios[outside],
            high=ratios[-1 - outside],
            of_totals=sum(self.baseline_s) / sum(self.ours_s),
            pairs=len(ratios),
        )


def ranks_outside(n: int) -> int:
    """Return how many of `n` sorted values to leave out at each end so that the rest bounds the median.

    The count of values below the true median is binomial (n, 1/2) whatever their distribution: the most is left out
    with which both tails together stay under 1 - CONFIDENCE. Fewer than six values leave none out, and bound it with
    less confidence.
    """
    tail, outside = 0.0, 0
    while outside < (n - 1) // 2:
        # P(exactly `outside` values lie below the median); by logarithms, since 2 ** n does not fit.
        log_p = math.lgamma(n + 1) - math.lgamma(outside + 1) - math.lgamma(n - outside + 1) - n * math.log(2)
        tail += math.exp(log_p)
        if 2 * tail > 1 - CONFIDENCE:
            break
        outside += 1
    return outside


def time_pair(
    ours: Callable[[], object], baseline: Callable[[], object], *, ours_first: bool, timer: Callable[[], float]
) -> tuple[float, float]:
    """Run both, in the order asked for, and return the seconds of (ours, baseline)."""
    first, second = (ours, baseline) if ours_first else (baseline, ours)
    started_s = timer()
    first()
    between_s = timer()
    second()
    ended_s = timer()
    seconds = between_s - started_s, ended_s - between_s
    return seconds if ours_first else seconds[::-1]
