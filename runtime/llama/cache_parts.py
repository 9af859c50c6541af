"""The parts of the prefix cache of one context, put together: who holds what, what to start from, what is written."""

from __future__ import annotations

from dataclasses import dataclass

from ..prefix_cache.modes import ReuseModes
from ..prefix_cache.pool import Snapshot, SnapshotPool
from ..prefix_cache.snapshot_files import SnapshotFiles
from .context import LlamaContext
from .keeper import Keeper
from .places import Places
from .residency import Residency
from .reuse import Reuse
from .turns import Turns


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheParts:
    """What works on one context. Two sets may, one after the other: the account of slots and cells is the context's."""

    pool: SnapshotPool
    files: SnapshotFiles | None
    keeper: Keeper
    places: Places
    reuse: Reuse
    residency: Residency


def put_together(
    context: LlamaContext,
    turns: Turns,
    pool: SnapshotPool,
    files: SnapshotFiles | None,
    *,
    seed: bytes,
    modes: ReuseModes,
    rest_s: float,
    notes: list[str],
) -> CacheParts:
    """Return the parts, with `pool` in memory and `files` on disk. `notes` is where each puts what a person is told."""

    def spill(snapshot: Snapshot) -> None:
        keeper.spill(snapshot)

    places = Places(context, pool, seed=seed, modes=modes, spill=spill)
    keeper = Keeper(
        context,
        turns,
        places,
        pool,
        files,
        seed=seed,
        modes=modes,
        rest_s=rest_s,
        note=notes.append,
    )
    reuse = Reuse(
        context,
        places,
        pool,
        files,
        seed=seed,
        modes=modes,
        notes=notes,
    )
    residency = Residency(context, turns, places, reuse)
    return CacheParts(pool=pool, files=files, keeper=keeper, places=places, reuse=reuse, residency=residency)
