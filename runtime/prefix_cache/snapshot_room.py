"""Room in a folder of snapshots: what has to go for a new file, or for a smaller budget.

First what nobody can use (set aside, left behind by a writer that is gone), then shorter ones of the run that is
coming, then by what a file is worth, pinned ones last. What other processes are writing is counted, and stays.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

import msgspec
import numpy as np

from ...kernels.errors import SnapshotRefused
from ...kernels.prefix import common_prefix_length
from ...kernels.retention import choose_evictions, greedy_dual_priority
from ...kernels.tokens import TokenIds
from ..sizes import size_text
from .snapshot_index import OtherFile, Survey
from .snapshot_locks import is_abandoned
from .snapshot_reading import SnapshotFile

DISK_RESERVE_SHARE: Final = 0.05
"""Of what is free on the disk, this stays free."""

DAY_S: Final = 86_400.0
"""By how much later a file must have been used to be worth as much as one that holds twice the tokens in its bytes."""

Removable = SnapshotFile | OtherFile


class Room(msgspec.Struct, frozen=True, kw_only=True):
    """What may go of a folder, in the order in which it should.

    The first `stale` of them were left behind by a writer, the first `useless` serve nobody.
    """

    held_bytes: int
    order: tuple[Removable, ...]
    stale: int
    useless: int

    def removals(self, over_bytes: int, *, at_least: int) -> tuple[Removable, ...]:
        """Return the first `at_least`, and what else must go so that `over_bytes` become free, as far as they can."""
        freed, count = 0, 0
        while count < len(self.order) and (count < at_least or freed < over_bytes):
            freed += self.order[count].size_bytes
            count += 1
        return self.order[:count]


def survey_room(survey: Survey, *, now: float, coming: TokenIds | None = None) -> Room:
    """Return what may go, for a run that is `coming` or for a smaller budget. `now` in Unix seconds."""
    stale = tuple(file for file in survey.temporary if is_abandoned(file.path, now=now))
    order = _by_worth(survey.files)
    if coming is not None:
        order.sort(key=lambda file: not is_superseded(file, coming))
    return Room(
        held_bytes=survey.held_bytes,
        order=(*stale, *survey.set_aside, *order),
        stale=len(stale),
        useless=len(stale) + len(survey.set_aside),
    )


def plan_removals(
    room: Room, *, size_bytes: int, budget_bytes: int, free_bytes: int, folder: Path
) -> tuple[Removable, ...]:
    """Return what must go so that a file of `size_bytes` fits the budget and the disk.

    Raises SnapshotRefused, with the numbers, where it would not fit whatever went.
    """
    needed_bytes = math.ceil(size_bytes / (1 - DISK_RESERVE_SHARE))
    freeable_bytes = sum(file.size_bytes for file in room.order)
    fixed_bytes = room.held_bytes - freeable_bytes
    if size_bytes + fixed_bytes > budget_bytes:
        writing = f", of which {size_text(fixed_bytes)} are being written by others" if fixed_bytes else ""
        problem = f"the cache may take {size_text(budget_bytes)} on disk{writing}. Raise cache.disk_mb to keep it"
    elif needed_bytes > free_bytes + freeable_bytes:
        problem = f"{size_text(free_bytes)} are free on the disk, and 5 % of that must stay free. Free some space"
    else:
        over_bytes = max(room.held_bytes + size_bytes - budget_bytes, needed_bytes - free_bytes)
        return room.removals(over_bytes, at_least=room.stale)
    message = f"a snapshot of {size_text(size_bytes)} is not written: {problem}"
    raise SnapshotRefused(message, path=folder, size_bytes=size_bytes, budget_bytes=budget_bytes, free_bytes=free_bytes)


def is_superseded(file: SnapshotFile, longer: TokenIds) -> bool:
    """Return whether a file is unpinned and its run is a proper prefix of `longer` (of the same identity)."""
    length = len(file.tokens)
    return not file.pinned and length < len(longer) and common_prefix_length(file.tokens, longer) == length


def remove(files: Sequence[Removable]) -> tuple[Removable, ...]:
    """Remove files; return those that are gone by our doing. What another process removed first does not matter."""
    gone = []
    for file in files:
        with suppress(OSError):
            file.path.unlink()
            gone.append(file)
    return tuple(gone)


def _by_worth(files: Sequence[SnapshotFile]) -> list[SnapshotFile]:
    """Return files, the one worth least first: by when it was used and the tokens that its bytes hold."""
    if not files:
        return []
    sizes = np.array([file.size_bytes for file in files], dtype=np.int64)
    bytes_per_token = int(sizes.sum()) / sum(len(file.tokens) for file in files)
    priorities = [
        greedy_dual_priority(
            clock=file.used / DAY_S, cost=len(file.tokens) * bytes_per_token, size=float(file.size_bytes)
        )
        for file in files
    ]
    order = choose_evictions(
        sizes=sizes,
        priorities=np.array(priorities, dtype=np.float64),
        pinned=np.array([file.pinned for file in files], dtype=np.bool_),
        over=int(sizes.sum()),
    )
    return [files[index] for index in order.tolist()]
