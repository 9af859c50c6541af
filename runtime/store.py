"""The store of a workspace, ``.chapbook/``: where sessions and artifacts are, and how a session is found again."""

from __future__ import annotations

import enum
import os
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TypeAlias

import msgspec

from ..compaction.artifacts import ArtifactStore
from ..compaction.durable_files import make_private_folder, way_out
from ..kernels.errors import LogDamaged, LogError, SessionNotFound, WorkspaceError
from .events import SessionId, SessionStart
from .git_ignore import IgnoreReport, ignore_folder
from .log_format import FIRST_CHAIN, decode_line
from .log_lock import Holder, holder_of, is_locked
from .log_reading import LOG_NAME, TOKENS_NAME, LogScan, scan_log
from .projection import project
from .session_log import OpenedLog, SessionLog

STORE_NAME = ".chapbook"
LATEST = "latest"
MOST_START_BYTES = 1 << 20
"""A first line that is longer is not that of a session."""

FIRST_LINE_CHARS = 120
MOST_CHOICES = 10

IdMaker: TypeAlias = Callable[[], SessionId]


class SessionCondition(enum.StrEnum):
    """What can be done with a session: the first can be resumed at once, INTERRUPTED after a recovery."""

    AT_REST = "at rest"
    INTERRUPTED = "interrupted"
    LOCKED = "locked"
    DAMAGED = "damaged"
    UNREADABLE = "unreadable"


class SessionSummary(msgspec.Struct, frozen=True, kw_only=True):
    """A line of the list of sessions. Times are Unix seconds. `first_line` is that of the first user message;
    `parent` is set for a subagent; `detail` names the holder, or what is damaged, and `holder_pid` is the holder's
    process. Of a damaged log the rest is what stands before the damage."""

    id: SessionId
    condition: SessionCondition
    started: float = 0.0
    last_event: float = 0.0
    model: str = ""
    first_line: str = ""
    turns: int = 0
    parent: SessionId | None = None
    detail: str = ""
    holder_pid: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CreatedSession:
    """A new session, its log held for writing, and what was done about git."""

    id: SessionId
    log: SessionLog
    ignored: IgnoreReport


def make_session_id(*, now: float, entropy: bytes) -> SessionId:
    """Return an id that sorts by time: ``20260131-235959-9f3a1c``, UTC, and three bytes of `entropy`."""
    return SessionId(f"{datetime.fromtimestamp(now, UTC):%Y%m%d-%H%M%S}-{entropy[:3].hex()}")


class Store:
    """A store folder. Nothing is created before the first write, nothing is kept in memory."""

    def __init__(self, folder: Path, *, workspace: Path) -> None:
        self.folder = folder
        self.workspace = workspace

    @classmethod
    def in_workspace(cls, workspace: Path, *, name: str = STORE_NAME) -> Store:
        """Return the store of a workspace; `name` may be any path, from the workspace if it is relative.

        Raises WorkspaceError where the workspace is not a folder that can be read, or its own store is a link.
        """
        _require_folder(workspace)
        if not os.access(workspace, os.R_OK | os.X_OK):
            raise WorkspaceError(
                f"the workspace {workspace} cannot be read by this user: change its permissions, or name another",
                path=workspace,
            )
        folder = workspace / name
        if name == STORE_NAME and folder.is_symlink():
            raise WorkspaceError(
                f"{folder} is a symbolic link to {folder.readlink()}. A checkout can bring one, and the logs would "
                "be written there: remove it, or name the folder with `store` in your own configuration",
                path=workspace,
            )
        return cls(folder, workspace=workspace)

    @property
    def artifacts(self) -> ArtifactStore:
        """The artifacts of all sessions."""
        return ArtifactStore(self.folder / "artifacts")

    def session_folder(self, session: SessionId) -> Path:
        """Return the folder of a session, which need not exist."""
        return self.folder / "sessions" / session

    def prepare(self) -> IgnoreReport:
        """Create the store, for the owner alone, and have git pass over it. Doing so again changes nothing.

        Raises WorkspaceError where it cannot be written, or the workspace has vanished.
        """
        _require_folder(self.workspace)
        try:
            make_private_folder(self.folder / "sessions")
        except OSError as error:
            raise WorkspaceError(
                f"the session log cannot be kept in {self.folder}: {way_out(error)}",
                path=self.workspace,
            ) from error
        if self.workspace not in self.folder.parents:
            return IgnoreReport()
        return ignore_folder(self.workspace, self.folder.relative_to(self.workspace).as_posix())

    def create_session(self, *, make_id: IdMaker, clock: Callable[[], float], holder: Holder) -> CreatedSession:
        """Start an empty session under a new id. Raises WorkspaceError, LogWriteFailed."""
        ignored = self.prepare()
        session = make_id()
        while self.session_folder(session).exists():
            session = make_id()
        log = SessionLog.create(self.session_folder(session), clock=clock, holder=holder)
        return CreatedSession(id=session, log=log, ignored=ignored)

    def open_session(self, session: SessionId, *, clock: Callable[[], float], holder: Holder) -> OpenedLog:
        """Open a session for writing. Raises as `SessionLog.open`, and SessionNotFound where there is none."""
        if session not in self._ids():
            raise self._not_found(session)
        return SessionLog.open(self.session_folder(session), clock=clock, holder=holder)

    def list_sessions(self) -> tuple[SessionSummary, ...]:
        """Return all sessions that hold an event, the one last written to first. One that is damaged is one of them.

        Takes the time that reading all logs takes.
        """
        found = (self._summary(session) for session in self._ids())
        return tuple(sorted((each for each in found if each is not None), key=lambda each: (-each.last_event, each.id)))

    def find_session(self, query: str) -> SessionId:
        """Return the session that `query` means: an id, the start of one id's time or random part, or ``latest``.

        A subagent is never the latest: it is gone on with by its id, or through its parent.
        Raises SessionNotFound, with the choices, where there is none or more than one.
        """
        if query == LATEST:
            sessions = [each for each in self.list_sessions() if each.parent is None]
            if not sessions:
                raise SessionNotFound(f"no session in {self.folder} holds anything yet: start one")
            return sessions[0].id
        ids = self._ids()
        if query in ids:
            return SessionId(query)
        matches = [each for each in ids if each.startswith(query) or each.rpartition("-")[2].startswith(query)]
        if len(matches) != 1:
            raise self._not_found(query, matches)
        return matches[0]

    def token_files(self, *, fingerprint: str, besides: SessionId) -> tuple[Path, ...]:
        """Return the token files of the other sessions that were made with the model of this fingerprint."""
        others = (self.session_folder(each) for each in self._ids() if each != besides)
        return tuple(folder / TOKENS_NAME for folder in others if _fingerprint_of(folder) == fingerprint)

    def _ids(self) -> list[SessionId]:
        return sorted(SessionId(log.parent.name) for log in (self.folder / "sessions").glob(f"*/{LOG_NAME}"))

    def _not_found(self, query: str, matches: list[SessionId] | None = None) -> SessionNotFound:
        choices = (matches or self._ids())[::-1]
        shown = ", ".join(choices[:MOST_CHOICES])
        if len(choices) > MOST_CHOICES:
            shown += f" and {len(choices) - MOST_CHOICES} more"
        what = f"{len(matches)} sessions begin with {query!r}" if matches else f"no session {query!r} in {self.folder}"
        way_out = f"name one of: {shown}" if choices else "there are none yet: start one"
        return SessionNotFound(f"{what}; {way_out}", choices=tuple(choices))

    def _summary(self, session: SessionId) -> SessionSummary | None:
        folder = self.session_folder(session)
        locked = is_locked(folder)
        try:
            scan = scan_log(folder)
        except LogError as error:
            return SessionSummary(id=session, condition=SessionCondition.UNREADABLE, detail=str(error))
        if not scan.events and scan.fault is None and not locked:
            return None
        return _summarise(session, scan, holder=holder_of(folder) if locked else None, locked=locked)


def _require_folder(workspace: Path) -> None:
    if not workspace.is_dir():
        what = "is not a folder" if workspace.exists() else "does not exist"
        raise WorkspaceError(f"the workspace {workspace} {what}: name an existing folder", path=workspace)


def _summarise(session: SessionId, scan: LogScan, *, locked: bool, holder: Holder | None) -> SessionSummary:
    state = project(scan.events)
    if locked:
        condition, detail = SessionCondition.LOCKED, str(holder or "")
    elif scan.fault is not None and not scan.torn:
        condition = SessionCondition.DAMAGED if isinstance(scan.fault, LogDamaged) else SessionCondition.UNREADABLE
        detail = str(scan.fault)
    else:
        condition = SessionCondition.AT_REST if state.at_rest else SessionCondition.INTERRUPTED
        detail = ""
    first_line = state.first_user_text.strip().partition("\n")[0].strip()
    return SessionSummary(
        id=session,
        condition=condition,
        started=scan.events[0].time if scan.events else 0.0,
        last_event=state.time,
        model="" if state.start is None else state.start.model_name,
        first_line=first_line if len(first_line) <= FIRST_LINE_CHARS else first_line[: FIRST_LINE_CHARS - 1] + "…",
        turns=state.totals.turns,
        parent=None if state.start is None else state.start.parent,
        detail=detail,
        holder_pid=None if holder is None else holder.pid,
    )


def _fingerprint_of(folder: Path) -> str:
    """Return the fingerprint that a session's first line names; empty where it cannot be read."""
    path = folder / LOG_NAME
    if not path.is_file():  # a FIFO would wait for ever
        return ""
    try:
        with path.open("rb") as log:
            first = decode_line(log.readline(MOST_START_BYTES), number=1, previous_chain=FIRST_CHAIN, path=path)
    except (OSError, LogError):
        return ""
    event = first.logged.event
    return event.fingerprint if isinstance(event, SessionStart) else ""
