"""What whoever opens an engine may decide about its cache."""

from __future__ import annotations

import msgspec

from .modes import ALL_MODES, ReuseModes


class CacheOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Budgets, place and modes. A budget of None derives from what is free, 0 keeps nothing.

    Without a `folder` nothing is on disk. `rest_s` is how long the engine must have been idle after a turn before the
    copy of that turn's state is made. In `modes_folder` are the results of self-tests (`mode_results`): a mode that
    failed with this model and this build is off, whatever `modes` says.
    """

    memory_mb: int | None = None
    disk_mb: int | None = None
    folder: str | None = None
    rest_s: float = 0.5
    modes: ReuseModes = ALL_MODES
    modes_folder: str | None = None
