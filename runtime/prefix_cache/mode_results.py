"""What the self-test of the reuse modes found, kept for each model as it was opened, so that a failing mode stays off.

One small JSON file for each `CacheIdentity`: another model file, number type or build of llama.cpp is not tested yet.
A file that cannot be read, or is of another format, counts as no result.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path

import msgspec

from ...compaction.durable_files import make_private_folder, publish, write_all
from .identity import CacheIdentity
from .modes import ALL_MODES, ReuseModes

FORMAT = 1
"""To be raised when what is tested changes: older results then count no more."""

_MOST_BYTES = 64 * 1024
"""Of a file that can be one of ours."""


class Outcome(enum.StrEnum):
    """What came of a test. NOT_APPLICABLE: this memory has no such mode. NOT_TESTED: something else was missing."""

    PASSED = "passed"
    FAILED = "failed"
    NOT_APPLICABLE = "not applicable"
    NOT_TESTED = "not tested"


class ModeResult(msgspec.Struct, frozen=True, kw_only=True):
    """What came of the test of one mode, a field of `ReuseModes`.

    `source` says where `cached` tokens came from. Compared with a fresh run, `agreement` is the share of positions with
    the same likeliest token, `difference` the mean difference of the log-probabilities of the likeliest and
    `divergence` the Kullback-Leibler divergence, both in nats; a tail is moved there and back for that. `loss_worse`:
    how much worse a text is foretold behind a moved tail than behind the same tokens evaluated, in nats.
    """

    mode: str
    outcome: Outcome
    reason: str = ""
    source: str = ""
    cached: int = 0
    agreement: float | None = None
    difference: float | None = None
    divergence: float | None = None
    loss_worse: float | None = None

    @property
    def name(self) -> str:
        """The mode as a person reads it."""
        return self.mode.replace("_", " ")


class ModeResults(msgspec.Struct, frozen=True, kw_only=True):
    """The results of one self-test. `tested` is when, in Unix seconds."""

    identity: CacheIdentity
    tested: float
    results: tuple[ModeResult, ...]
    format: int = FORMAT

    @property
    def failed(self) -> tuple[ModeResult, ...]:
        return tuple(result for result in self.results if result.outcome is Outcome.FAILED)

    @property
    def modes(self) -> ReuseModes:
        """All modes but those that failed."""
        return ReuseModes(**{result.mode: False for result in self.failed})

    @property
    def date(self) -> str:
        """When it was tested, as a person reads it."""
        return datetime.fromtimestamp(self.tested).strftime("%Y-%m-%d %H:%M")

    def notes(self) -> tuple[str, ...]:
        """Return what a person should know at open: nothing where no mode failed."""
        if not self.failed:
            return ()
        names = ", ".join(result.name for result in self.failed)
        return (
            f"off for this model, since its self-test of {self.date} failed: {names}. "
            f"`chapbook doctor --self-test` tests again",
        )


def load_modes(folder: Path, identity: CacheIdentity) -> ReuseModes:
    """Return the modes in force for a model as it was opened: all where nothing is known."""
    known = load_results(folder, identity)
    return ALL_MODES if known is None else known.modes


def load_results(folder: Path, identity: CacheIdentity) -> ModeResults | None:
    """Return what is known of a model as it was opened. Never raises."""
    found = _read(_path(folder, identity))
    return found if found is not None and found.identity.seed == identity.seed else None


def all_results(folder: Path) -> tuple[ModeResults, ...]:
    """Return all that is known, of whatever model, the latest first. Never raises."""
    paths: list[Path] = []
    with suppress(OSError):
        paths = sorted(folder.glob("*.json"))
    found = [results for path in paths if (results := _read(path)) is not None]
    return tuple(sorted(found, key=lambda results: -results.tested))


def save_results(folder: Path, results: ModeResults) -> None:
    """Keep results in place of earlier ones. Raises OSError."""
    make_private_folder(folder)
    with publish(_path(folder, results.identity)) as file:
        write_all(file, msgspec.json.format(msgspec.json.encode(results)))


def _path(folder: Path, identity: CacheIdentity) -> Path:
    return folder / f"{identity.seed.hex()}.json"


def _read(path: Path) -> ModeResults | None:
    try:
        with path.open("rb") as file:
            data = file.read(_MOST_BYTES)
        results = msgspec.json.decode(data, type=ModeResults)
    except (OSError, msgspec.MsgspecError, UnicodeError):
        return None
    return results if results.format == FORMAT and _names_modes(results.results) and _is_date(results) else None


def _names_modes(results: Sequence[ModeResult]) -> bool:
    return all(result.mode in ReuseModes.__struct_fields__ for result in results)


def _is_date(results: ModeResults) -> bool:
    try:
        return bool(results.date)
    except (ValueError, OverflowError, OSError):
        return False
