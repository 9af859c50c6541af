"""`chapbook cache`: the budgets of the prefix cache and what it holds on disk; making it smaller; checking it.

No model is loaded for this.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from ...compaction.quoting import quantity
from ...kernels.errors import UsageError
from ..prefix_cache.budget import MB, CacheBudgets
from ..prefix_cache.machine import budgets_of_this_machine
from ..prefix_cache.mode_results import all_results
from ..prefix_cache.snapshot_folder import FolderUsage, folder_usage, prune_folder, verify_folder
from ..prefix_cache.snapshot_index import OtherFile, SnapshotIndex, UnusableFile
from ..sizes import size_text
from .opening import Place, cache_options, modes_folder, open_place, snapshot_folder
from .options import PlaceOptions, takes
from .terminal import print_columns, print_json, visible_line

MOST_PROBLEMS = 20

cache = typer.Typer(
    help="Show, shrink or check what is kept of evaluated tokens.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    add_completion=False,
)
AsJson = Annotated[bool, typer.Option("--json", help="For programs.")]


@cache.command("stats")
@takes(PlaceOptions)
def stats(as_json: AsJson = False, *, options: PlaceOptions) -> None:
    """Show the budgets with their reasons, and what is on disk, model by model."""
    place = open_place(options)
    index = SnapshotIndex(_folder(place))
    budgets = _budgets(place, index)
    usage = folder_usage(index, budget_bytes=budgets.disk_bytes)
    unusable = index.take_unusable()
    failed = [results for results in all_results(modes_folder()) if results.failed]
    if as_json:
        print_json(_stats_for_programs(budgets, usage, unusable) | {"failed_self_tests": failed})
        return
    lines = [
        f"memory  {size_text(budgets.memory_bytes)}: {budgets.memory_reason} (a model that is loaded leaves less)",
        f"disk    {size_text(budgets.disk_bytes)}: {budgets.disk_reason}",
        f"folder  {usage.folder}: {size_text(usage.size_bytes)} in {_snapshots(usage.files)}{_besides(usage)}",
        *_over_budget(usage),
        *_named(unusable),
        *_set_aside_before(usage, unusable),
        *(f"{results.identity.model_name}: {note}" for results in failed for note in results.notes()),
    ]
    for line in lines:
        sys.stdout.write(f"{visible_line(line)}\n")
    if usage.by_identity:
        heads = ("model", "memory", "K, V", "snapshots", "pinned", "size", "longest run", "last used")
        sys.stdout.write("\n")
        print_columns(heads, _rows(usage), no_color=options.no_color)


@cache.command("prune")
@takes(PlaceOptions)
def prune(
    as_json: AsJson = False,
    keep_mb: Annotated[int | None, typer.Option(min=0, help="Keep this many megabytes.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="Keep no snapshot.")] = False,
    *,
    options: PlaceOptions,
) -> None:
    """Remove what serves nobody, then the snapshots worth least, down to the budget or to --keep-mb."""
    place = open_place(options)
    index = SnapshotIndex(_folder(place))
    keep_bytes = _keep_bytes(place, index, keep_mb=keep_mb, everything=everything)
    report = prune_folder(index, keep_bytes=keep_bytes, clock=time.time)
    if as_json:
        print_json(msgspec.structs.asdict(report) | {"unusable": index.take_unusable()})
        return
    removed = f"removed {_snapshots(report.snapshots)}, {size_text(report.freed_bytes)}"
    if report.leftovers:
        removed = (
            f"removed {_snapshots(report.snapshots)} and {_files(report.leftovers)} that served nobody, "
            f"{size_text(report.freed_bytes)}"
        )
    left = f"{size_text(report.held_bytes)} are left in {visible_line(str(index.folder))}"
    sys.stdout.write(f"{removed if report.freed_bytes else 'nothing to remove'}; {left}\n")
    for line in _named(index.take_unusable()):
        sys.stdout.write(f"{visible_line(line)}\n")


@cache.command("verify")
@takes(PlaceOptions)
def verify(as_json: AsJson = False, *, options: PlaceOptions) -> int:
    """Read every snapshot on disk, and hold every byte against its hash. Ends with 1 where one must not be used."""
    report = verify_folder(_folder(open_place(options)))
    # What another process removed in the meantime is no problem; what is damaged was renamed, and is one.
    problems = [each for each in report.unusable if each.damaged or os.path.lexists(each.path)]
    if as_json:
        print_json(msgspec.structs.replace(report, unusable=tuple(problems)))
    else:
        sys.stdout.write(f"{_snapshots(report.sound_files)}, {size_text(report.sound_bytes)}: sound to the last byte\n")
        for line in _named(problems):
            sys.stdout.write(f"{visible_line(line)}\n")
    return 1 if problems else 0


def _folder(place: Place) -> Path:
    """Return the folder of snapshots, which need not be there yet. Raises UsageError where it cannot be one."""
    folder = snapshot_folder(place)
    way_out = "set cache.folder to a folder that this user can write to"
    if not os.path.lexists(folder):
        above = next(each for each in folder.parents if os.path.lexists(each))
        # A file system without any room, such as /proc, takes no new folder whatever its permissions say.
        can_be_made = above.is_dir() and os.access(above, os.W_OK | os.X_OK) and shutil.disk_usage(above).total > 0
        if not can_be_made and cache_options(place).folder is not None:
            raise UsageError(f"the folder for snapshots {folder} is not there and cannot be made: {way_out}")
    elif not folder.is_dir():
        raise UsageError(f"{folder} is no folder, so there can be no snapshots in it: {way_out}")
    elif not os.access(folder, os.R_OK | os.X_OK):
        raise UsageError(f"the folder for snapshots {folder} cannot be read by this user: {way_out}")
    return folder


def _budgets(place: Place, index: SnapshotIndex) -> CacheBudgets:
    return budgets_of_this_machine(cache_options(place), used_by_cache_bytes=index.survey().held_bytes)


def _keep_bytes(place: Place, index: SnapshotIndex, *, keep_mb: int | None, everything: bool) -> int:
    if everything and keep_mb is not None:
        raise UsageError("--all keeps nothing: leave out --keep-mb, or --all")
    if everything or keep_mb is not None:
        return (keep_mb or 0) * MB
    if cache_options(place).folder is None:
        raise UsageError("snapshots on disk are off, so there is no budget to prune to: pass --keep-mb or --all")
    return _budgets(place, index).disk_bytes


def _stats_for_programs(budgets: CacheBudgets, usage: FolderUsage, unusable: Sequence[UnusableFile]) -> dict[str, Any]:
    def listed(files: tuple[OtherFile, ...]) -> list[dict[str, Any]]:
        return [{"path": each.path, "size_bytes": each.size_bytes} for each in files]

    return {
        "budgets": budgets,
        "folder": usage.folder,
        "files": usage.files,
        "size_bytes": usage.size_bytes,
        "models": usage.by_identity,
        "set_aside": listed(usage.set_aside),
        "temporary": listed(usage.temporary),
        "others": listed(usage.others),
        "unusable": [str(each) for each in unusable],
    }


def _rows(usage: FolderUsage) -> list[tuple[str, ...]]:
    return [
        (
            each.identity.model_name,
            each.identity.memory,
            f"{each.identity.type_k}, {each.identity.type_v}",
            f"{each.files:,}",
            f"{each.pinned_files:,}",
            size_text(each.size_bytes),
            f"{each.longest_tokens:,} tokens",
            datetime.fromtimestamp(each.used).strftime("%Y-%m-%d %H:%M"),
        )
        for each in usage.by_identity
    ]


def _besides(usage: FolderUsage) -> str:
    """Say what else is in the folder."""
    kinds = ((usage.set_aside, "set aside"), (usage.temporary, "being written or left behind"))
    counted = [
        f"{_files(len(files))} {what} ({size_text(sum(each.size_bytes for each in files))})"
        for files, what in kinds
        if files
    ]
    foreign = [f"{_files(len(usage.others))} of others, not touched"] if usage.others else []
    return "".join(f"; {each}" for each in [*counted, *foreign])


def _over_budget(usage: FolderUsage) -> Iterator[str]:
    """Say so where the folder holds more than it may. Without a budget there is nothing to be over."""
    if 0 < usage.budget_bytes < usage.size_bytes:
        yield (
            f"{size_text(usage.size_bytes)} of {size_text(usage.budget_bytes)}: over the budget; the next snapshot, or "
            "chapbook cache prune, makes it smaller"
        )


def _named(unusable: Sequence[UnusableFile]) -> Iterator[str]:
    """Name the files that a look found to be of no use."""
    for each in unusable[:MOST_PROBLEMS]:
        aside = ", and was set aside" if each.damaged and not os.path.lexists(each.path) else ""
        yield f"problem: {each.path} is not used{aside}: {each.reason}"
    if len(unusable) > MOST_PROBLEMS:
        yield f"and {len(unusable) - MOST_PROBLEMS} more; --json lists all"


def _set_aside_before(usage: FolderUsage, unusable: Sequence[UnusableFile]) -> Iterator[str]:
    """Name the files that were set aside before this look, whose reasons were told then."""
    now = {each.path.stem for each in unusable}
    before = [each for each in usage.set_aside if each.path.stem not in now]
    for each in before[:MOST_PROBLEMS]:
        yield f"set aside earlier, since it was damaged: {each.path}"
    if len(before) > MOST_PROBLEMS:
        yield f"and {len(before) - MOST_PROBLEMS} more; --json lists all"


def _snapshots(count: int) -> str:
    return quantity(count, "snapshot")


def _files(count: int) -> str:
    return quantity(count, "file")
