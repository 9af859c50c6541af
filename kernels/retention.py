"""What to let go of a cache: GreedyDual-Size (Cao and Irani, Cost-Aware WWW Proxy Caching Algorithms, 1997).

At each use an entry gets the priority clock + cost / size; the lowest priority goes first, and the clock rises to the
highest priority that went. So what costs little to make again for the room it takes goes early, and so does what has
not been used for long, since newer priorities start from a later clock. The unit of cost is the caller's.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def greedy_dual_priority(*, clock: float, cost: float, size: float) -> float:
    """Return the priority of an entry that is used now. Raises ValueError where cost < 0 or size <= 0."""
    if not (cost >= 0 and size > 0):
        raise ValueError(f"an entry costs at least 0 and has a size above 0, not {cost} and {size}")
    return clock + cost / size


def risen_clock(*, clock: float, gone: NDArray[np.float64]) -> float:
    """Return the clock after entries of these priorities went. Shape: (n,), n >= 0."""
    return float(np.max(gone, initial=clock))


def choose_evictions(
    *, sizes: NDArray[np.int64], priorities: NDArray[np.float64], pinned: NDArray[np.bool_], over: int
) -> NDArray[np.intp]:
    """Return the indices of what goes, in the order in which it goes. Shapes: (n,) each, to (m,), m <= n.

    The lowest priority goes first, the lower index among equals, until at least `over` is free (in the unit of
    `sizes`, none of them negative); pinned entries only once all others are gone. All go where even that is too little.
    """
    if over <= 0:
        return np.empty(0, dtype=np.intp)
    order = np.lexsort((priorities, pinned))
    freed = np.cumsum(sizes[order])
    # freed never falls: [0, enough) holds less than `over`, so the entry at `enough` is the last that has to go.
    enough = int(np.searchsorted(freed, over))
    return order[: enough + 1]


def choose_evictions_reference(
    *, sizes: NDArray[np.int64], priorities: NDArray[np.float64], pinned: NDArray[np.bool_], over: int
) -> NDArray[np.intp]:
    """The same by looking for the next one to go, one at a time."""
    left = list(range(len(sizes)))
    gone: list[int] = []
    while left and sum(int(sizes[index]) for index in gone) < over:
        lowest = min(left, key=lambda index: (bool(pinned[index]), float(priorities[index]), index))
        left.remove(lowest)
        gone.append(lowest)
    return np.array(gone, dtype=np.intp)
