"""A whole folder of snapshots, of every model: what it holds, making it smaller, and checking all of it.

No model need be loaded: `chapbook cache stats | prune | verify` are these functions.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec

from ...kernels.errors import SnapshotUnusable
from .identity import CacheIdentity
from .snapshot_index import OtherFile, SnapshotIndex, UnusableFile
from .snapshot_locks import folder_turn
from .snapshot_reading import SnapshotFile, check_sections, opened, read_header
from .snapshot_room import remove, survey_room


class IdentityUsage(msgspec.Struct, frozen=True, kw_only=True):
    """What is held of one model as it was opened. `used` is when any of it last was, in Unix seconds."""

    identity: CacheIdentity
    files: int
    pinned_files: int
    size_bytes: int
    longest_tokens: int
    used: float


class FolderUsage(msgspec.Struct, frozen=True, kw_only=True):
    """What a folder holds. `size_bytes` counts against the budget; `others` do not, and are never touched."""

    folder: Path
    files: int
    size_bytes: int
    budget_bytes: int
    by_identity: tuple[IdentityUsage, ...]
    set_aside: tuple[OtherFile, ...]
    temporary: tuple[OtherFile, ...]
    others: tuple[OtherFile, ...]


class PruneReport(msgspec.Struct, frozen=True, kw_only=True):
    """What was removed: snapshots, and files that served nobody. `held_bytes` is what is left."""

    snapshots: int
    leftovers: int
    freed_bytes: int
    held_bytes: int


class VerifyReport(msgspec.Struct, frozen=True, kw_only=True):
    """What was found right to the last byte, and what was not, with the reasons."""

    sound_files: int
    sound_bytes: int
    unusable: tuple[UnusableFile, ...]


def folder_usage(index: SnapshotIndex, *, budget_bytes: int) -> FolderUsage:
    """Return what the folder holds, the identity with the most bytes first."""
    survey = index.survey()
    by_seed: dict[bytes, list[SnapshotFile]] = {}
    for file in survey.files:
        by_seed.setdefault(file.identity.seed, []).append(file)
    usages = [_identity_usage(files) for files in by_seed.values()]
    return FolderUsage(
        folder=index.folder,
        files=len(survey.files),
        size_bytes=survey.held_bytes,
        budget_bytes=budget_bytes,
        by_identity=tuple(sorted(usages, key=lambda usage: -usage.size_bytes)),
        set_aside=survey.set_aside,
        temporary=survey.temporary,
        others=survey.others,
    )


def prune_folder(index: SnapshotIndex, *, keep_bytes: int, clock: Callable[[], float]) -> PruneReport:
    """Remove what serves nobody, then the files worth least until at most `keep_bytes` are held, pinned ones last."""
    with folder_turn(index.folder):
        room = survey_room(index.survey(), now=clock())
        planned = room.removals(room.held_bytes - keep_bytes, at_least=room.useless)
        leftovers = remove(planned[: room.useless])
        snapshots = remove(planned[room.useless :])
    freed_bytes = sum(file.size_bytes for file in (*leftovers, *snapshots))
    return PruneReport(
        snapshots=len(snapshots),
        leftovers=len(leftovers),
        freed_bytes=freed_bytes,
        held_bytes=room.held_bytes - freed_bytes,
    )


def verify_folder(folder: Path) -> VerifyReport:
    """Read every file of every identity whole. Damaged ones are set aside. No file counts as used for this."""
    index = SnapshotIndex(folder)
    files = index.survey().files
    unusable = list(index.take_unusable())
    sound_files = sound_bytes = 0
    for file in files:
        try:
            with opened(file.path) as handle:
                check_sections(handle, read_header(handle, file.path))
        except SnapshotUnusable as error:
            unusable.append(UnusableFile.of(error))
            continue
        sound_files += 1
        sound_bytes += file.size_bytes
    return VerifyReport(sound_files=sound_files, sound_bytes=sound_bytes, unusable=tuple(unusable))


def _identity_usage(files: list[SnapshotFile]) -> IdentityUsage:
    return IdentityUsage(
        identity=files[0].identity,
        files=len(files),
        pinned_files=sum(file.pinned for file in files),
        size_bytes=sum(file.size_bytes for file in files),
        longest_tokens=max(len(file.tokens) for file in files),
        used=max(file.used for file in files),
    )
