"""Cutting a session's files back to what is valid. Nothing is deleted: what is cut goes to a side file first."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from ..compaction.durable_files import flush_to_disk, way_out, write_new_file
from ..kernels.errors import LogWriteFailed, UnknownEvent
from ..kernels.tokens import TOKEN_BYTES
from .log_lock import Holder, SessionLock
from .log_reading import LOG_NAME, TOKENS_NAME, LogScan, scan_log


class SideFile(msgspec.Struct, frozen=True, kw_only=True):
    """Where the end of a file was moved to, its size, and from which byte of the file it was cut."""

    path: Path
    size_bytes: int
    cut_from: Path
    cut_at_bytes: int


class RepairReport(msgspec.Struct, frozen=True, kw_only=True):
    """What `repair_log` did. `events` are left; `reason` says what was wrong, and is empty where nothing was."""

    events: int
    reason: str = ""
    moved: tuple[SideFile, ...] = ()


def repair_log(folder: Path, *, clock: Callable[[], float], holder: Holder) -> RepairReport:
    """Cut a session's log after its last valid line; move the rest, and tokens that nothing cites, to side files.

    Doing so again changes nothing. Raises LogLocked, LogWriteFailed, and UnknownEvent: a line that is intact but
    from a newer version is not cut.
    """
    lock = SessionLock(folder, holder)
    try:
        scan = scan_log(folder)
        if isinstance(scan.fault, UnknownEvent):
            raise scan.fault
        moved = cut_to_valid(folder, scan, now=clock())
    finally:
        lock.release()
    return RepairReport(events=len(scan.events), reason=str(scan.fault or ""), moved=moved)


def cut_to_valid(folder: Path, scan: LogScan, *, now: float) -> tuple[SideFile, ...]:
    """Cut both files to what `scan` found valid. The session's lock must be held. Raises LogWriteFailed."""
    stamp = datetime.fromtimestamp(now, UTC).strftime("%Y%m%dT%H%M%SZ")
    # The log first: a crash between the two leaves tokens that nothing cites, never a citation of what is not there.
    cuts = (
        _cut(folder / LOG_NAME, scan.end_bytes, side_name=f"torn-{stamp}-%d.jsonl"),
        _cut(folder / TOKENS_NAME, scan.cited_tokens * TOKEN_BYTES, side_name=f"orphan-tokens-{stamp}-%d.i32"),
    )
    return tuple(side for side in cuts if side is not None)


def _cut(path: Path, at_bytes: int, *, side_name: str) -> SideFile | None:
    try:
        if not path.exists():
            return None
        with path.open("r+b") as file:
            file.seek(at_bytes)
            rest = file.read()
            if not rest:
                return None
            side = _write_side_file(path.parent, side_name, rest)
            file.truncate(at_bytes)
            flush_to_disk(file.fileno())
    except OSError as error:
        raise LogWriteFailed(
            f"the end of {path} could not be set aside, and is as it was: {way_out(error)}",
            path=path,
            errno=error.errno,
        ) from error
    return SideFile(path=side, size_bytes=len(rest), cut_from=path, cut_at_bytes=at_bytes)


def _write_side_file(folder: Path, name: str, data: bytes) -> Path:
    count = 0
    while True:
        path = folder / (name % count)
        try:
            write_new_file(path, data)
        except FileExistsError:
            count += 1
            continue
        return path
