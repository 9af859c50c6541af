"""Reading a session's two files: every line checked against its chain, every span against ``tokens.i32``.

A reader needs no lock. It takes the size of the log first and reads the tokens after, and tokens are written before
the event that cites them, so that what it sees is a state that the log has been in.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import msgspec
import xxhash

from ..kernels.errors import LogDamaged, LogError, UnknownEvent
from ..kernels.tokens import TOKEN_BYTES, TokenIds, decode_tokens
from .events import Event, HeaderReason, Logged, Span
from .log_format import FIRST_CHAIN, decode_line, stated_chain

LOG_NAME = "log.jsonl"
TOKENS_NAME = "tokens.i32"

# Within a text every quotation mark is escaped, so that neither stands in one.
_HEADER_MARK = b'"type":"request/header","data":{"reason":'
_CHANGE_MARK = _HEADER_MARK + b'"change"'


class LogScan(msgspec.Struct, frozen=True, kw_only=True):
    """The lines of a log up to the first that cannot be used, `fault` being why.

    [0, `end_bytes`) of the log holds `events`, [0, `cited_tokens`) of the tokens all that they cite; `log_bytes` and
    `token_bytes` are the sizes of the files. `torn`: the fault is in the last line, as a crash leaves it.
    """

    events: tuple[Logged, ...]
    chain: str
    end_bytes: int
    log_bytes: int
    cited_tokens: int
    token_bytes: int
    fault: LogDamaged | UnknownEvent | None = None
    torn: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LogContents:
    """A log as a reader sees it. `torn_bytes` of an unfinished last line are left out."""

    events: tuple[Logged, ...]
    tokens: TokenIds
    torn_bytes: int

    def span(self, span: Span) -> TokenIds:
        """Return the ids that `span` cites."""
        return self.tokens[span.offset : span.offset + span.length]


class LogProblem(msgspec.Struct, frozen=True, kw_only=True):
    """Something that is not as it was written. `line` counts from 1."""

    line: int
    text: str


class LogVerdict(msgspec.Struct, frozen=True, kw_only=True):
    """What `verify_log` found. `orphan_bytes` at the end of ``tokens.i32`` are cited by no event: no problem, but the
    mark of an append that did not come to its end."""

    events: int
    cited_tokens: int
    orphan_bytes: int
    problems: tuple[LogProblem, ...]

    @property
    def intact(self) -> bool:
        """Whether every line and every cited token is what was written."""
        return not self.problems


class _Line(msgspec.Struct, frozen=True):
    number: int
    end_bytes: int
    chain: str
    logged: Logged | None
    cited_tokens: int | None
    fault: LogDamaged | UnknownEvent | None


class _HeaderData(msgspec.Struct, frozen=True):
    reason: HeaderReason
    spans: tuple[Span, ...] = ()


class _HeaderLine(msgspec.Struct, frozen=True):
    data: _HeaderData


class _Files(msgspec.Struct, frozen=True):
    log: BinaryIO
    log_bytes: int
    tokens: bytes
    path: Path


def scan_log(folder: Path) -> LogScan:
    """Read a session's files up to the first fault. Raises LogError where there is no log, or it cannot be read."""
    events: list[Logged] = []
    chain, end_bytes, cited_tokens, fault, torn = FIRST_CHAIN, 0, 0, None, False
    with _open_files(folder) as files:
        for line in _lines(files):
            if line.fault is not None or line.logged is None:
                fault = line.fault
                torn = isinstance(fault, LogDamaged) and line.end_bytes == files.log_bytes
                break
            events.append(line.logged)
            chain, end_bytes, cited_tokens = line.chain, line.end_bytes, line.cited_tokens or 0
    return LogScan(
        events=tuple(events),
        chain=chain,
        end_bytes=end_bytes,
        log_bytes=files.log_bytes,
        cited_tokens=cited_tokens,
        token_bytes=len(files.tokens),
        fault=fault,
        torn=torn,
    )


def read_log(folder: Path) -> LogContents:
    """Read a session's log, which another process may be writing to.

    Raises LogDamaged and UnknownEvent with the line, LogError where there is no log.
    """
    scan = scan_log(folder)
    if scan.fault is not None and not scan.torn:
        raise scan.fault
    return LogContents(
        events=scan.events,
        tokens=read_tokens(folder, scan.cited_tokens),
        torn_bytes=scan.log_bytes - scan.end_bytes,
    )


def read_tokens(folder: Path, count: int) -> TokenIds:
    """Return the first `count` ids of a session's ``tokens.i32``."""
    return decode_tokens(_read_tokens_file(folder)[: count * TOKEN_BYTES])


def verify_log(folder: Path) -> LogVerdict:
    """Check every line of a session's log, past the first fault too. A torn last line is a problem like any other.

    Raises LogError where there is no log, or it cannot be read.
    """
    problems: list[LogProblem] = []
    events, cited_tokens = 0, 0
    with _open_files(folder) as files:
        for line in _lines(files):
            events += 1
            cited_tokens = line.cited_tokens or cited_tokens
            if line.fault is not None:
                problems.append(LogProblem(line=line.number, text=str(line.fault)))
    return LogVerdict(
        events=events,
        cited_tokens=cited_tokens,
        orphan_bytes=max(0, len(files.tokens) - cited_tokens * TOKEN_BYTES),
        problems=tuple(problems),
    )


def replaced_prefixes(folder: Path) -> tuple[range, ...]:
    """Return where in ``tokens.i32`` each session prefix of a session stands, in order; none where it has one alone.

    The log is searched for their headers and not read or checked otherwise. One that cannot be read has none.
    """
    path = folder / LOG_NAME
    try:
        if not path.is_file() or not path.stat().st_size:  # a FIFO would wait for ever
            return ()
        with path.open("rb") as log, mmap.mmap(log.fileno(), 0, access=mmap.ACCESS_READ) as data:
            if data.find(_CHANGE_MARK) < 0:
                return ()
            lines = [line for line in iter(data.readline, b"") if _HEADER_MARK in line]
        headers = [msgspec.json.decode(line, type=_HeaderLine).data for line in lines]
    except (OSError, ValueError, msgspec.MsgspecError):
        return ()
    spans = [header.spans for header in headers if header.spans]
    return tuple(range(each[0].offset, each[-1].offset + each[-1].length) for each in spans)


def spans_of(event: Event) -> tuple[Span, ...]:
    """Return the spans that an event cites; an event that was passed over cites none."""
    return getattr(event, "spans", ())


@contextmanager
def _open_files(folder: Path) -> Iterator[_Files]:
    path = folder / LOG_NAME
    for file in (path, folder / TOKENS_NAME):
        if file.exists() and not file.is_file():
            raise LogError(f"{file} is not a regular file: move it away", path=file)
    try:
        with path.open("rb") as log:
            size = log.seek(0, 2)
            log.seek(0)
            yield _Files(log, size, _read_tokens_file(folder), path)
    except FileNotFoundError as error:
        raise LogError(f"there is no session log at {path}", path=path) from error
    except OSError as error:
        raise LogError(f"the session log {path} cannot be read: {error.strerror or error}", path=path) from error


def _read_tokens_file(folder: Path) -> bytes:
    try:
        return (folder / TOKENS_NAME).read_bytes()
    except FileNotFoundError:
        # Not an error by itself: the first line that cites a token will say what is missing.
        return b""
    except OSError as error:
        path = folder / TOKENS_NAME
        raise LogError(f"the tokens {path} cannot be read: {error.strerror or error}", path=path) from error


def _lines(files: _Files) -> Iterator[_Line]:
    """Give every line. After a fault it goes on from the chain, the number and the offset that are stated next."""
    seq, chain, end = 0, FIRST_CHAIN, 0
    cited: int | None = 0
    tokens = memoryview(files.tokens)
    for number, raw in enumerate(files.log, start=1):
        line = raw if end + len(raw) <= files.log_bytes else raw[: files.log_bytes - end]
        if not line:
            return
        end += len(line)
        logged, fault = None, None
        try:
            decoded = decode_line(line, number=number, previous_chain=chain, path=files.path)
            logged, chain = decoded.logged, decoded.chain
            due, seq = seq, logged.seq
            if seq != due:
                raise LogDamaged(
                    f"line {number} of {files.path} carries the number {seq}, {due} was due",
                    path=files.path,
                    line=number,
                )
            problem = _span_problem(logged.event, tokens, cited)
            if problem:
                raise LogDamaged(f"line {number} of {files.path} cites {problem}", path=files.path, line=number)
            spans = spans_of(logged.event)
            cited = spans[-1].offset + spans[-1].length if spans else cited
        except (LogDamaged, UnknownEvent) as error:
            fault = error
            chain = stated_chain(line) or chain
            cited = None
        seq += 1
        yield _Line(number, end, chain, logged, cited, fault)


def _span_problem(event: Event, tokens: memoryview, cited: int | None) -> str:
    """Return what is wrong with the spans of `event`: each must start where the one before it ended, at `cited`
    (None: not known), so that every token that is cited is covered by a hash once."""
    for span in spans_of(event):
        # The span is [offset, offset + length) in tokens, so [start, end) in bytes.
        start, end = span.offset * TOKEN_BYTES, (span.offset + span.length) * TOKEN_BYTES
        run = f"the tokens [{span.offset}, {span.offset + span.length}), but"
        if not 0 <= start <= end <= len(tokens):
            return f"{run} {TOKENS_NAME} ends at {len(tokens) // TOKEN_BYTES}"
        if cited is not None and span.offset != cited:
            return f"{run} the last span before them ends at {cited}"
        if xxhash.xxh3_64_hexdigest(tokens[start:end]) != span.xxh3:
            return f"{run} those in {TOKENS_NAME} are not the ones that were written"
        cited = span.offset + span.length
    return ""
