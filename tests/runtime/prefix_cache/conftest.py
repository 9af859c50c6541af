"""What tests of snapshot files share: a folder, a clock set by hand, and states whose bytes tell what they are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from chapbook.kernels.tokens import TokenIds, hash_tokens, token_ids
from chapbook.runtime.prefix_cache.identity import CacheIdentity
from chapbook.runtime.prefix_cache.snapshot_files import PendingSnapshot, SectionPlan, SnapshotFile, SnapshotFiles


@dataclass
class SnapshotRig:
    """Several identities' snapshots in one folder."""

    folder: Path
    now: float = 1_000_000.0

    @staticmethod
    def identity(**changes: str) -> CacheIdentity:
        """Return an identity that differs from the usual one in `changes`."""
        usual = {"fingerprint": "f" * 16, "model_name": "tiny", "memory": "full attention", "type_k": "f16",
                 "type_v": "f16", "flash_attn": "auto", "rope": "", "lora": "", "build": "b1"}  # fmt: skip
        return CacheIdentity(**{**usual, **changes})

    @staticmethod
    def tokens(length: int, *, seed: int = 0) -> TokenIds:
        """Return the first `length` tokens of one long run for each seed."""
        return token_ids(np.random.default_rng(seed).integers(0, 49_152, 40_000)[:length])

    @staticmethod
    def state(tokens: TokenIds, size_bytes: int) -> np.ndarray:
        """Return the bytes that stand for the state after `tokens`: always the same for the same run."""
        seed = int(hash_tokens(tokens), 16)
        return np.random.default_rng(seed).integers(0, 256, size_bytes, dtype=np.uint8)

    def files(self, *, budget_bytes: int = 10**9, identity: CacheIdentity | None = None, **more: Any) -> SnapshotFiles:
        """Return the files as another process sees them."""
        return SnapshotFiles(
            self.folder,
            identity=identity or self.identity(),
            budget_bytes=budget_bytes,
            clock=more.pop("clock", lambda: self.now),
            **more,
        )

    @staticmethod
    def plan(tokens: TokenIds, *, rungs: Sequence[int] = (), state_bytes: int = 5000) -> list[SectionPlan]:
        """Return the sections of a run: its state, and rungs of a tenth of its size."""
        whole = SectionPlan(tokens=len(tokens), partial=False, size_bytes=state_bytes)
        return [whole, *(SectionPlan(tokens=n, partial=True, size_bytes=state_bytes // 10) for n in rungs)]

    def fill(self, pending: PendingSnapshot, tokens: TokenIds, plan: Sequence[SectionPlan]) -> None:
        """Fill all sections."""
        for index, section in enumerate(plan):
            pending.section(index)[:] = self.state(tokens[: section.tokens], section.size_bytes)

    def write(self, files: SnapshotFiles, tokens: TokenIds, *, pinned: bool = False, covers: bool = False,
              rungs: Sequence[int] = (), state_bytes: int = 5000) -> SnapshotFile:  # fmt: skip
        """Write a snapshot of a run."""
        plan = self.plan(tokens, rungs=rungs, state_bytes=state_bytes)
        with files.begin(tokens, plan, pinned=pinned) as pending:
            self.fill(pending, tokens, plan)
            return pending.commit(covers=covers)

    def check_loaded(self, files: SnapshotFiles, file: SnapshotFile) -> None:
        """Load a file and assert that every state is that of its tokens."""
        loaded = files.load(file)
        states = {len(file.tokens): loaded.state, **loaded.rungs}
        assert tuple(loaded.rungs) == file.rungs
        for section in file.header.sections:
            expected = self.state(file.tokens[: section.tokens], section.size_bytes)
            np.testing.assert_array_equal(states[section.tokens], expected)
            assert not states[section.tokens].flags.writeable

    def names(self) -> list[str]:
        """Return the names of all files below the folder, sorted."""
        return sorted(path.name for path in self.folder.rglob("*") if not path.is_dir() or path.is_symlink())


@pytest.fixture
def snapshots(tmp_path: Path) -> SnapshotRig:
    return SnapshotRig(tmp_path / "cache" / "kv")


@pytest.fixture(scope="session")
def snapshot_rig() -> type[SnapshotRig]:
    return SnapshotRig
