"""The session log: the one place where a session's truth is written, append-only.

``log.jsonl`` holds one event a line, ``tokens.i32`` beside it the evaluated ids that events cite. Tokens go to disk
before the event that cites them. What was acknowledged as durable survives a crash of the machine, what was
acknowledged at all a crash of the process.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self

import msgspec

from ..compaction.durable_files import (
    FOLDER_MODE,
    create_private_file,
    flush_folder,
    flush_to_disk,
    make_private_folder,
    way_out,
    write_all,
)
from ..kernels.errors import LogError, LogWriteFailed
from ..kernels.tokens import TOKEN_BYTES, TokenIds, encode_tokens, hash_tokens
from .events import Event, Logged, SegmentKind, Seq, Span
from .log_format import encode_line
from .log_lock import Holder, SessionLock
from .log_reading import LOG_NAME, TOKENS_NAME, LogScan, read_tokens, scan_log, spans_of
from .log_repair import SideFile, cut_to_valid


class OpenReport(msgspec.Struct, frozen=True, kw_only=True):
    """What opening a log found. `torn` says what was wrong with a last line that was moved away, empty where all was
    well; `moved` are the side files."""

    events: int
    torn: str = ""
    moved: tuple[SideFile, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedLog:
    """A log opened for writing, and what stands in it: fold over the events, and let go of them."""

    log: SessionLog
    events: tuple[Logged, ...]
    tokens: TokenIds
    report: OpenReport


class _Uncertain(Exception):
    """What a file holds is not known any more."""


class _LogEnd(msgspec.Struct, frozen=True):
    """Where the next event goes. One value, so that an interrupt finds all of it from before an append, or after."""

    seq: Seq
    chain: str
    size_bytes: int
    cited_tokens: int


@dataclass(slots=True)
class _AppendFile:
    """An open file that grows. `unsettled`: bytes behind its end may be left of an append that did not come through."""

    path: Path
    file: BinaryIO
    unflushed: bool = True
    unsettled: bool = False

    def append(self, data: bytes, *, at_bytes: int) -> None:
        """Write `data` at the end, which is `at_bytes`. Raises OSError with nothing of it left, or _Uncertain."""
        if self.unsettled:
            self.cut(at_bytes)
        found = os.fstat(self.file.fileno())
        if found.st_size != at_bytes or found.st_nlink == 0:
            raise _Uncertain("it was changed or deleted by something else")
        self.unsettled = self.unflushed = True
        try:
            self.file.seek(at_bytes)
            write_all(self.file, data)
        except OSError:
            self.cut(at_bytes)
            raise

    def cut(self, size_bytes: int) -> None:
        """Take back what stands behind `size_bytes`. Raises _Uncertain."""
        try:
            self.file.truncate(size_bytes)
        except OSError as error:
            raise _Uncertain(f"a part of an append could not be taken back: {error.strerror}") from error
        self.unsettled = False


class SessionLog:
    """A session's log, held by this process for writing from `create` or `open` until `close`. Safe from any thread.

    `clock` gives Unix seconds. `flush` returns once a file descriptor's content is on the disk, and raises OSError.
    """

    def __init__(
        self,
        *,
        folder: Path,
        lock: SessionLock,
        scan: LogScan,
        clock: Callable[[], float],
        flush: Callable[[int], None],
    ) -> None:
        """For `create` and `open`. `scan` is of files that have been cut to what is valid."""
        self.folder = folder
        self._lock, self._clock, self._flush = lock, clock, flush
        self._guard = threading.RLock()
        self._end = _LogEnd(Seq(len(scan.events)), scan.chain, scan.end_bytes, scan.cited_tokens)
        self._token_count = scan.cited_tokens
        self._log, self._tokens = _open_for_append(folder / LOG_NAME), _open_for_append(folder / TOKENS_NAME)
        self._closed_for = ""

    @classmethod
    def create(
        cls,
        folder: Path,
        *,
        clock: Callable[[], float],
        holder: Holder,
        flush: Callable[[int], None] = flush_to_disk,
    ) -> SessionLog:
        """Start an empty log in `folder`, which must not exist.

        Raises LogError where it does, LogLocked, and LogWriteFailed where it cannot be written.
        """
        try:
            make_private_folder(folder.parent)
            folder.mkdir(mode=FOLDER_MODE)
        except FileExistsError as error:
            raise LogError(
                f"there is something at {folder} already: a new session needs a new folder", path=folder
            ) from error
        except OSError as error:
            raise _write_failed(folder, error) from error
        lock = SessionLock(folder, holder)
        try:
            for name in (TOKENS_NAME, LOG_NAME):
                create_private_file(folder / name).close()
            flush_folder(folder)
            flush_folder(folder.parent)
            return cls(folder=folder, lock=lock, scan=scan_log(folder), clock=clock, flush=flush)
        except OSError as error:
            lock.release()
            raise _write_failed(folder, error) from error

    @classmethod
    def open(
        cls,
        folder: Path,
        *,
        clock: Callable[[], float],
        holder: Holder,
        flush: Callable[[int], None] = flush_to_disk,
    ) -> OpenedLog:
        """Open a log for appending. A torn last line, and tokens that nothing cites, are moved to side files.

        The last line also counts as torn where it cites tokens that are not in ``tokens.i32``: the order of writes
        rules that out, unless the machine went down before either was flushed.

        Raises LogLocked, LogDamaged with the line where it is not the last one, UnknownEvent, LogWriteFailed where
        the files cannot be written, LogError where there is no log.
        """
        if not (folder / LOG_NAME).is_file():
            raise LogError(f"there is no session log at {folder / LOG_NAME}", path=folder / LOG_NAME)
        lock = SessionLock(folder, holder)
        try:
            scan = scan_log(folder)
            if scan.fault is not None and not scan.torn:
                raise scan.fault
            moved = cut_to_valid(folder, scan, now=clock())
            log = cls(folder=folder, lock=lock, scan=scan, clock=clock, flush=flush)
        except OSError as error:
            lock.release()
            raise _write_failed(folder, error) from error
        except BaseException:
            lock.release()
            raise
        report = OpenReport(events=len(scan.events), torn=str(scan.fault or ""), moved=moved)
        return OpenedLog(log=log, events=scan.events, tokens=read_tokens(folder, scan.cited_tokens), report=report)

    @property
    def next_seq(self) -> Seq:
        """The seq that the next event will have."""
        return self._end.seq

    @property
    def token_count(self) -> int:
        """How many tokens ``tokens.i32`` holds."""
        return self._token_count

    def append(self, event: Event, *, durable: bool = False) -> Logged:
        """Write one event and return it as a reader will read it. With `durable` it is on the disk on return.

        Its spans must be the runs that `append_tokens` returned since the last event, in order.

        Raises LogWriteFailed, and then the log is as it was after the last event: the append may be tried again, its
        tokens first. Where that is not certain (a flush failed, a part could not be taken back), every further append
        is refused until the log has been closed and opened again.
        """
        with self._guard, self._all_or_nothing():
            self._require_its_tokens(event)
            end = self._end
            try:
                encoded = encode_line(event, seq=end.seq, time=self._clock(), previous_chain=end.chain)
            except (TypeError, ValueError) as error:
                raise self._refusal(f"not appended to {self._log.path}: {error}") from error
            self._write(self._log, encoded.line, at_bytes=end.size_bytes)
            if durable:
                self._flush_both()
            size_bytes = end.size_bytes + len(encoded.line)
            self._end = _LogEnd(Seq(end.seq + 1), encoded.chain, size_bytes, self._token_count)
            self._log.unsettled = False
            return encoded.logged

    def append_tokens(self, kind: SegmentKind, tokens: TokenIds) -> Span:
        """Write a run of ids and return the span for the event that is appended next.

        Raises LogWriteFailed as `append` does: the other runs of that event are taken back too.
        """
        with self._guard, self._all_or_nothing():
            offset = self._token_count
            self._write(self._tokens, encode_tokens(tokens), at_bytes=offset * TOKEN_BYTES)
            self._token_count = offset + len(tokens)
            self._tokens.unsettled = False
            return Span(kind=kind, offset=offset, length=len(tokens), xxh3=hash_tokens(tokens))

    def make_durable(self) -> None:
        """Return once all that was appended is on the disk, the tokens before the log. Raises LogWriteFailed."""
        with self._guard:
            self._require_open()
            self._flush_both()

    def close(self) -> None:
        """Make everything durable, give the lock back. Doing so again is no error. Raises LogWriteFailed."""
        with self._guard:
            try:
                if not self._closed_for:
                    self.make_durable()
            finally:
                self._closed_for = self._closed_for or "it was closed"
                self._log.file.close()
                self._tokens.file.close()
                self._lock.release()

    def check_integrity(self) -> None:
        """Read both files again and assert that they hold what this object believes. Raises LogDamaged, LogError."""
        with self._guard:
            self._require_open()
            scan = scan_log(self.folder)
            if scan.fault is not None:
                raise scan.fault
            assert self._end == _LogEnd(Seq(len(scan.events)), scan.chain, scan.end_bytes, scan.cited_tokens)
            assert scan.end_bytes == scan.log_bytes
            assert self._end.cited_tokens <= self._token_count
            assert scan.token_bytes == self._token_count * TOKEN_BYTES

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _require_open(self) -> None:
        if self._closed_for:
            raise self._refusal(
                f"{self._log.path} takes no more appends: {self._closed_for}. Close the session and open it again"
            )

    @contextmanager
    def _all_or_nothing(self) -> Iterator[None]:
        self._require_open()
        try:
            yield
        except LogWriteFailed:
            self._take_back_tokens()
            raise

    def _take_back_tokens(self) -> None:
        """Cut off the tokens that no event has cited."""
        if self._token_count > self._end.cited_tokens:
            self._tokens.unsettled = True
            self._token_count = self._end.cited_tokens
            # Where this fails they are orphans, which the next append, or the next open, takes away.
            with suppress(_Uncertain):
                self._tokens.cut(self._token_count * TOKEN_BYTES)

    def _require_its_tokens(self, event: Event) -> None:
        spans = spans_of(event)
        if not spans:
            # Runs of an event that was given up, by an interrupt between the two calls.
            self._take_back_tokens()
            return
        cited = self._end.cited_tokens
        for span in spans:
            cited = span.offset + span.length if span.offset == cited else -1
        if cited != self._token_count:
            raise self._refusal(
                f"not appended to {self._log.path}: the event must cite the tokens [{self._end.cited_tokens}, "
                f"{self._token_count}), those that were written since the last one. Append its tokens, then the event"
            )

    def _write(self, target: _AppendFile, data: bytes, *, at_bytes: int) -> None:
        try:
            target.append(data, at_bytes=at_bytes)
        except OSError as error:
            raise _write_failed(target.path, error) from error
        except _Uncertain as error:
            raise self._give_up(target, str(error), error.__cause__) from error

    def _flush_both(self) -> None:
        for target in (self._tokens, self._log):
            if not target.unflushed:
                continue
            try:
                self._flush(target.file.fileno())
            except OSError as error:
                # After a failed flush the system may have dropped what it could not write, and flush well next time.
                with suppress(_Uncertain):
                    self._log.cut(self._end.size_bytes)
                raise self._give_up(target, f"a flush failed: {error.strerror or error}", error) from error
            target.unflushed = False

    def _give_up(self, target: _AppendFile, reason: str, cause: BaseException | None) -> LogWriteFailed:
        self._closed_for = f"{target.path.name}: {reason}"
        return self._refusal(
            f"not written to {target.path}: {reason}. What is on the disk is uncertain, so this log takes no more "
            "appends: close the session and open it again",
            number=cause.errno if isinstance(cause, OSError) else None,
        )

    def _refusal(self, message: str, *, number: int | None = None) -> LogWriteFailed:
        return LogWriteFailed(message, path=self._log.path, errno=number)


def _open_for_append(path: Path) -> _AppendFile:
    if not path.exists():
        create_private_file(path).close()
    return _AppendFile(path, path.open("r+b", buffering=0))


def _write_failed(path: Path, error: OSError) -> LogWriteFailed:
    return LogWriteFailed(f"nothing was written to {path}: {way_out(error)}", path=path, errno=error.errno)
