"""How much memory and disk snapshots may take: a stated share of what is free, and never what others need.

memory   a quarter of what is free once the model is loaded; a tenth of all memory stays free whatever was asked
disk     a tenth of what is free or held by the cache already, up to 20 GB; 1 GB stays free whatever was asked

What the cache holds counts as free on disk, so that the budget does not depend on how full the cache is. A megabyte is
a million bytes.
"""

from __future__ import annotations

from typing import Final

import msgspec

from ..sizes import size_text

MEMORY_SHARE_PERCENT: Final = 25
MEMORY_RESERVE_PERCENT: Final = 10
"""Of all memory. Below it a system begins to swap or to drop the pages of the model's own file."""

DISK_SHARE_PERCENT: Final = 10
MOST_DISK_BYTES: Final = 20_000_000_000
DISK_RESERVE_BYTES: Final = 1_000_000_000

MB: Final = 1_000_000


class CacheBudgets(msgspec.Struct, frozen=True, kw_only=True):
    """What snapshots may take, in bytes, and why, for a person. `reserve_bytes` is the memory that stays free."""

    memory_bytes: int
    disk_bytes: int
    memory_reason: str
    disk_reason: str
    reserve_bytes: int


class _Budget(msgspec.Struct, frozen=True):
    size_bytes: int
    reason: str


def plan_budgets(
    *,
    free_memory_bytes: int,
    total_memory_bytes: int,
    free_disk_bytes: int,
    used_by_cache_bytes: int,
    asked_memory_mb: int | None,
    asked_disk_mb: int | None,
) -> CacheBudgets:
    """Return the budgets. `free_memory_bytes` is what is free once the model is loaded.

    `used_by_cache_bytes` is what the cache's folder holds. An asked budget is taken as far as the reserve allows.
    """
    reserve = total_memory_bytes * MEMORY_RESERVE_PERCENT // 100
    kept = f"{size_text(reserve)}, {MEMORY_RESERVE_PERCENT} % of all memory"
    memory = _plan(
        share_bytes=free_memory_bytes * MEMORY_SHARE_PERCENT // 100,
        share_reason=f"{MEMORY_SHARE_PERCENT} % of {size_text(free_memory_bytes)} free memory",
        asked_mb=asked_memory_mb,
        key="cache.memory_mb",
        room_bytes=free_memory_bytes - reserve,
        reserve_reason=f"{kept}, must stay free, and {size_text(free_memory_bytes)} are",
    )
    within = free_disk_bytes + used_by_cache_bytes
    what = f"{size_text(free_disk_bytes)} free on disk and {size_text(used_by_cache_bytes)} held by the cache"
    share = within * DISK_SHARE_PERCENT // 100
    most = f"at most {size_text(MOST_DISK_BYTES)}: " if share > MOST_DISK_BYTES else ""
    disk = _plan(
        share_bytes=min(share, MOST_DISK_BYTES),
        share_reason=f"{most}{DISK_SHARE_PERCENT} % of {what}",
        asked_mb=asked_disk_mb,
        key="cache.disk_mb",
        room_bytes=within - DISK_RESERVE_BYTES,
        reserve_reason=f"{size_text(DISK_RESERVE_BYTES)} of disk must stay free: {what}",
    )
    return CacheBudgets(
        memory_bytes=memory.size_bytes,
        disk_bytes=disk.size_bytes,
        memory_reason=memory.reason,
        disk_reason=disk.reason,
        reserve_bytes=reserve,
    )


def _plan(
    *, share_bytes: int, share_reason: str, asked_mb: int | None, key: str, room_bytes: int, reserve_reason: str
) -> _Budget:
    """Return what was asked, else the share; either way no more than the room that the reserve leaves."""
    wanted, reason = share_bytes, share_reason
    if asked_mb is not None:
        wanted, reason = asked_mb * MB, f"as {key} asks"
    if wanted <= max(0, room_bytes):
        return _Budget(wanted, reason)
    asked = f"{key} asks for {size_text(wanted)}" if asked_mb is not None else f"{share_reason} is {size_text(wanted)}"
    return _Budget(max(0, room_bytes), f"{asked}, but {reserve_reason}")
