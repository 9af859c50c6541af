"""Where a command's output is captured, and what becomes of one that a crash left behind."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from ...compaction.artifacts import ArtifactStore, Stored
from ...kernels.errors import ArtifactError
from ..calls import CallId

_SUFFIX = ".out"


def capture_path(folder: Path, call_id: CallId) -> Path:
    """Return the file that takes the output of a call."""
    return folder / f"{call_id}{_SUFFIX}"


def rescue_captures(folder: Path, store: ArtifactStore) -> dict[CallId, Stored]:
    """Store what calls that never got a result had put out; nothing of it is left beside the log, unredacted.

    One that cannot be stored stays where it is, for the next time.
    """
    rescued: dict[CallId, Stored] = {}
    for file in sorted(folder.glob(f"call*{_SUFFIX}")):
        with suppress(ArtifactError, OSError):
            if file.stat().st_size:
                rescued[CallId(file.name.removesuffix(_SUFFIX))] = store.adopt(file)
            else:
                file.unlink()
    return rescued
