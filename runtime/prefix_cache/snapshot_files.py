"""Snapshots on disk for one model as it was opened: found by their tokens, checked before use, kept within a budget."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

import msgspec

from ...compaction.durable_files import make_private_folder, way_out
from ...kernels.chain import run_name
from ...kernels.errors import SnapshotUnusable, SnapshotWriteFailed
from ...kernels.prefix import common_prefix_length
from ...kernels.tokens import TokenIds
from .identity import CacheIdentity
from .machine import free_disk_bytes, free_memory_bytes
from .pool import StateBytes
from .snapshot_folder import FolderUsage, PruneReport, VerifyReport, folder_usage, prune_folder, verify_folder
from .snapshot_format import (
    NO_HASH,
    Section,
    SectionPlan,
    SnapshotHeader,
    check_plan,
    encode_front,
    layout_of,
    snapshot_path,
)
from .snapshot_index import SnapshotIndex
from .snapshot_locks import folder_turn
from .snapshot_reading import FileStamp, SnapshotFile, opened, read_sections
from .snapshot_room import is_superseded, plan_removals, remove, survey_room
from .snapshot_writing import OnStep, PendingSnapshot

__all__ = ["LoadedSnapshot", "PendingSnapshot", "SectionPlan", "SnapshotFile", "SnapshotFiles"]

LEAST_EXPLAINED_TOKENS: Final = 64
"""Runs that share fewer tokens than this are no reason to speak of: many begin with the same few."""

MAPPED_ABOVE_SHARE: Final = 0.5
"""A state that would take more of the free memory than this is mapped from its file instead."""


class LoadedSnapshot(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """The states of a file: the whole one, and the rungs by their lengths. Read-only."""

    state: StateBytes
    rungs: Mapping[int, StateBytes]


class SnapshotFiles:
    """The snapshot files of one identity in a folder that other processes and other identities use too.

    Thread-safe: what it knows of the folder is behind one lock, which is never held while a state is read or written.
    Nothing is created before the first `begin`.
    """

    def __init__(
        self,
        folder: Path,
        *,
        identity: CacheIdentity,
        budget_bytes: int,
        clock: Callable[[], float],
        free_memory: Callable[[], int] = free_memory_bytes,
        on_step: OnStep = lambda _: None,
    ) -> None:
        """`budget_bytes` is for the whole folder. `clock` gives Unix seconds; `free_memory` bytes."""
        self.folder, self.identity, self.budget_bytes = folder, identity, budget_bytes
        self._clock, self._free_memory, self._on_step = clock, free_memory, on_step
        self._seed = identity.seed
        self._own_folder = folder / self._seed.hex()
        self._index = SnapshotIndex(folder)

    def find(self) -> tuple[SnapshotFile, ...]:
        """Return the files of this identity whose headers and ids are right, the last used first.

        Damaged ones are set aside; `take_notes` says so.
        """
        return self._index.files_in(self._own_folder)

    def holds(self, tokens: TokenIds) -> bool:
        """Return whether there is a usable file of exactly this run. Its states are not looked at."""
        path = self._path_of(tokens)
        return any(file.path == path for file in self.find())

    def load(self, file: SnapshotFile) -> LoadedSnapshot:
        """Return all states of a file, their hashes found right. It counts as used now.

        Raises SnapshotUnusable with the reason; a damaged file is set aside.
        """
        state, *rungs = self._read(file, range(len(file.header.sections)))
        return LoadedSnapshot(state=state, rungs=dict(zip(file.rungs, rungs, strict=True)))

    def load_state(self, file: SnapshotFile) -> StateBytes:
        """Return the state after the whole run, as `load` does."""
        return self._read(file, [0])[0]

    def load_rung(self, file: SnapshotFile, tokens: int) -> StateBytes:
        """Return the rung at `tokens`, one of `file.rungs`, as `load` does."""
        return self._read(file, [file.section_at(tokens)])[0]

    def condemn(self, file: SnapshotFile, reason: str) -> str:
        """Set a file aside that is whole, but turned out to be of no use. Return what there is to say of it."""
        try:
            with opened(file.path):
                raise SnapshotUnusable(reason, path=file.path, damaged=True)
        except SnapshotUnusable as error:
            self._index.refuse(file)
            return str(error)

    def begin(self, tokens: TokenIds, sections: Sequence[SectionPlan], *, pinned: bool) -> PendingSnapshot:
        """Make room for a snapshot and return its file, to be filled. `sections`: the state, then rungs, ascending.

        A run that is pinned already stays so. Raises SnapshotRefused where budget or disk are too small for it, and
        SnapshotWriteFailed where it cannot be written; nothing is left of it then.
        """
        check_plan(len(tokens), sections)
        path = self._path_of(tokens)
        header = SnapshotHeader(
            identity=self.identity,
            tokens=len(tokens),
            run=path.stem,
            pinned=pinned or any(file.pinned and file.path == path for file in self.find()),
            created=self._clock(),
            ids_xxh3_128=NO_HASH,
            sections=tuple(
                Section(tokens=plan.tokens, partial=plan.partial, size_bytes=plan.size_bytes) for plan in sections
            ),
        )
        with folder_turn(self.folder):
            self._make_room(tokens, header)
            return PendingSnapshot(path, header, tokens, on_commit=self._committed, on_step=self._on_step)

    def miss_reason(self, wanted: TokenIds) -> str:
        """Return why no file holds more of `wanted`, for a person. Empty where none shares 64 tokens with it."""
        shared = {file: common_prefix_length(file.tokens, wanted) for file in self._index.survey().files}
        own = {file: length for file, length in shared.items() if file.path.parent == self._own_folder}
        mine = max(own, key=lambda file: own[file], default=None)
        best = max(shared, key=lambda file: shared[file], default=None)
        if best is None or shared[best] < LEAST_EXPLAINED_TOKENS:
            return ""
        if mine is None or own[mine] < shared[best]:
            difference = self.identity.difference(best.identity)
            return f"a snapshot of the first {shared[best]:,} tokens is there, but with {difference}"
        if own[mine] == len(wanted) < len(mine.tokens):
            return f"the nearest snapshot holds this run and goes on to token {len(mine.tokens):,}"
        if any(len(file.tokens) == length == own[mine] for file, length in own.items()):
            return ""
        return f"the longest snapshot parts from this run at token {own[mine]:,}"

    def take_notes(self) -> tuple[str, ...]:
        """Return what was found damaged or was ignored since the last call, for a person."""
        return tuple(str(unusable) for unusable in self._index.take_unusable())

    def usage(self) -> FolderUsage:
        """Return what the folder holds, of every identity."""
        return folder_usage(self._index, budget_bytes=self.budget_bytes)

    def prune(self, *, keep_bytes: int) -> PruneReport:
        """Remove leftovers, then the files worth least until at most `keep_bytes` are held, of every identity."""
        return prune_folder(self._index, keep_bytes=keep_bytes, clock=self._clock)

    def verify(self) -> VerifyReport:
        """Check every byte of every file of every identity; damaged ones are set aside."""
        return verify_folder(self.folder)

    def check_integrity(self) -> None:
        """Assert that what is known of the folder is what was found there, and that nobody else may read it."""
        self._index.check_integrity()
        for file in self.find():
            assert file.identity == self.identity or file.identity.seed == self._seed
        if os.name == "posix" and self._own_folder.exists():
            assert self._own_folder.stat().st_mode & 0o077 == 0

    def _path_of(self, tokens: TokenIds) -> Path:
        return snapshot_path(self.folder, identity=self.identity, run=run_name(tokens, seed=self._seed))

    def _read(self, file: SnapshotFile, sections: Sequence[int]) -> list[StateBytes]:
        payload_bytes = sum(file.header.sections[index].size_bytes for index in sections)
        mapped = payload_bytes > MAPPED_ABOVE_SHARE * self._free_memory()
        try:
            with opened(file.path) as handle:
                states = read_sections(handle, file, sections, mapped=mapped)
                used_ns = round(self._clock() * 1e9)
                # A folder that may only be read still serves.
                with suppress(OSError):
                    os.utime(handle.fileno() if os.utime in os.supports_fd else file.path, ns=(used_ns, used_ns))
                stamp = FileStamp.of(os.fstat(handle.fileno()))
        except SnapshotUnusable as error:
            if error.damaged:
                self._index.refuse(file)
            raise
        self._index.keep(msgspec.structs.replace(file, stamp=stamp))
        return states

    def _make_room(self, tokens: TokenIds, header: SnapshotHeader) -> None:
        try:
            room = survey_room(self._index.survey(), now=self._clock(), coming=tokens)
            removals = plan_removals(
                room,
                size_bytes=layout_of(len(encode_front(header)), header).size_bytes,
                budget_bytes=self.budget_bytes,
                free_bytes=free_disk_bytes(self.folder),
                folder=self.folder,
            )
            make_private_folder(self._own_folder)
            if self._own_folder.is_symlink():
                raise NotADirectoryError(0, f"{self._own_folder} is a link. Remove it")
        except OSError as error:
            message = f"a snapshot cannot be written to {self._own_folder}: {way_out(error)}"
            raise SnapshotWriteFailed(message, path=self._own_folder, errno=error.errno) from error
        remove(removals)

    def _committed(self, file: SnapshotFile, covers: bool) -> None:
        self._index.keep(file)
        rungs = set(file.rungs)
        shorter = [one for one in self.find() if is_superseded(one, file.tokens)]
        remove([one for one in shorter if covers or len(one.tokens) in rungs])
