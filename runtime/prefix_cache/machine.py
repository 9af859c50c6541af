"""What of this machine's memory and disk is free: the measurements that budgets are planned from."""

from __future__ import annotations

import shutil
from contextlib import suppress
from pathlib import Path

import msgspec

from .budget import CacheBudgets, plan_budgets
from .options import CacheOptions


def free_memory_bytes() -> int:
    """Return the memory that can be had without swapping."""
    import psutil  # noqa: PLC0415  kept out of the import of the package

    return int(psutil.virtual_memory().available)


def free_disk_bytes(folder: Path) -> int:
    """Return what this user may still write where `folder` is, or would be made. Raises OSError."""
    for place in (folder, *folder.parents):
        with suppress(FileNotFoundError):
            return shutil.disk_usage(place).free
    raise FileNotFoundError(f"there is no {folder}, nor any folder that it would be in")


def budgets_of_this_machine(options: CacheOptions, *, used_by_cache_bytes: int) -> CacheBudgets:
    """Return the budgets by what is free right now: to be asked once the model is loaded.

    `used_by_cache_bytes` is what the folder holds; the folder need not be there yet. Without one there is none on disk.
    """
    import psutil  # noqa: PLC0415  kept out of the import of the package

    folder = options.folder
    budgets = plan_budgets(
        free_memory_bytes=free_memory_bytes(),
        total_memory_bytes=int(psutil.virtual_memory().total),
        free_disk_bytes=0 if folder is None else _told_free_disk_bytes(Path(folder)),
        used_by_cache_bytes=used_by_cache_bytes,
        asked_memory_mb=options.memory_mb,
        asked_disk_mb=0 if folder is None else options.disk_mb,
    )
    return budgets if folder else msgspec.structs.replace(budgets, disk_reason="snapshots on disk are off")


def _told_free_disk_bytes(folder: Path) -> int:
    """Return the same, 0 where it cannot be told."""
    try:
        return free_disk_bytes(folder)
    except OSError:
        return 0
