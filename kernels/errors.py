"""The one tree of errors. It lives in the lowest layer, since every layer raises from it.

    ChapbookError                         exit code 1
    ├── UsageError                        exit code 2: what the caller asked for cannot be
    │   ├── ConfigError                   unknown key, wrong type, unreadable file
    │   ├── WorkspaceError                not a folder, unreadable, vanished
    │   ├── SessionNotFound               no session of that id in the store
    │   └── ModelError
    │       ├── ModelNotFound             no such file or listed name
    │       ├── ModelFileError            not a GGUF, truncated, malformed
    │       ├── ModelLoadError            llama.cpp refused it
    │       └── ContextTooSmall           the session prefix leaves no room
    ├── EngineError
    │   ├── DecodeFailed                  llama_decode returned an error
    │   ├── GrammarError                  a grammar that llama.cpp does not accept
    │   └── EngineClosed                  used after close
    ├── TemplateRefused                   a chat template that is hostile or cannot be split
    ├── NoRoom                            a request over the budget, with the numbers by segment
    ├── LogError
    │   ├── LogLocked                     another process holds the session
    │   ├── LogDamaged                    a line that is not what was written
    │   ├── LogWriteFailed                disk full, permission
    │   ├── UnknownEvent                  written by a newer chapbook
    │   └── ReplayMismatch                the checker rebuilt something else
    ├── ArtifactError                     the artifact store cannot be written, or a blob is not what it was
    ├── LedgerError                       the file of a plan's steps cannot be read or written
    ├── SnapshotError                     becomes a note, never ends a turn
    │   ├── SnapshotUnusable              a file that is damaged, of another model, gone, or not ours to read
    │   ├── SnapshotRefused               larger than the budget or the disk allow, with the numbers
    │   └── SnapshotWriteFailed           disk full, permission
    └── ToolError                         becomes an error result, never ends a session
        ├── ContainmentError              a path that a rule refuses
        ├── ToolDenied                    policy, hook, or nobody to ask
        └── ToolArgumentsError            arguments that do not fit the schema

A message says what was wrong, what the limit is and what to do. Numbers are attributes.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path


class ChapbookError(Exception):
    """Root of every error that chapbook raises on purpose."""

    exit_code = 1


class UsageError(ChapbookError):
    """What the caller asked for cannot be done as asked."""

    exit_code = 2


class ConfigError(UsageError):
    """A configuration that cannot be used. `key` is dotted; `nearest` is the known key closest to an unknown one."""

    def __init__(self, message: str, *, key: str = "", source: str = "", nearest: str = "") -> None:
        super().__init__(message)
        self.key, self.source, self.nearest = key, source, nearest


class WorkspaceError(UsageError):
    """The workspace is not a folder that can be worked in."""

    def __init__(self, message: str, *, path: Path) -> None:
        super().__init__(message)
        self.path = path


class SessionNotFound(UsageError):
    """No session of that id in the store, or several. `choices` are the ids that could be meant, newest first."""

    def __init__(self, message: str, *, choices: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.choices = choices


class ModelError(UsageError):
    """A model that cannot be used."""


class ModelNotFound(ModelError):
    """No file and no listed model of that name. `nearest` holds listed names that are close."""

    def __init__(self, message: str, *, name: str, nearest: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.name, self.nearest = name, nearest


class ModelFileError(ModelError):
    """A file that is not a whole GGUF. `offset` is where reading failed, in bytes."""

    def __init__(self, message: str, *, path: Path, offset: int | None = None) -> None:
        super().__init__(message)
        self.path, self.offset = path, offset


class ModelLoadError(ModelError):
    """llama.cpp refused the model or the context. `details` holds its last log lines."""

    def __init__(self, message: str, *, path: Path, details: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.path, self.details = path, details


class ContextTooSmall(ModelError):
    """The window is too small for the session prefix and one reply."""

    def __init__(self, message: str, *, n_ctx: int, prefix_tokens: int, needed_tokens: int) -> None:
        super().__init__(message)
        self.n_ctx, self.prefix_tokens, self.needed_tokens = n_ctx, prefix_tokens, needed_tokens


class EngineError(ChapbookError):
    """The engine failed at its work."""


class DecodeFailed(EngineError):
    """`llama_decode` returned `code` at `position`."""

    def __init__(self, message: str, *, code: int, position: int) -> None:
        super().__init__(message)
        self.code, self.position = code, position


class GrammarError(EngineError):
    """llama.cpp does not accept this grammar."""

    def __init__(self, message: str, *, gbnf: str) -> None:
        super().__init__(message)
        self.gbnf = gbnf


class EngineClosed(EngineError):
    """The engine was used after `close()`."""


class TemplateRefused(ChapbookError):
    """A chat template that is hostile, too slow, too large, or that cannot be split into transitions."""


class NoRoom(ChapbookError):
    """A request that would overrun the window. `by_segment` maps a segment kind to its tokens."""

    def __init__(
        self,
        message: str,
        *,
        n_ctx: int,
        window_tokens: int,
        reply_reserve_tokens: int,
        by_segment: Mapping[str, int],
    ) -> None:
        super().__init__(message)
        self.n_ctx, self.window_tokens = n_ctx, window_tokens
        self.reply_reserve_tokens, self.by_segment = reply_reserve_tokens, dict(by_segment)


class LogError(ChapbookError):
    """The session log cannot be read, written or trusted. `path` is the file."""

    def __init__(self, message: str, *, path: Path) -> None:
        super().__init__(message)
        self.path = path


class LogLocked(LogError):
    """Another process holds the session. `holder` says which, as far as it is known."""

    def __init__(self, message: str, *, path: Path, holder: str) -> None:
        super().__init__(message, path=path)
        self.holder = holder


class LogDamaged(LogError):
    """Line `line` (from 1) is not what was written."""

    def __init__(self, message: str, *, path: Path, line: int) -> None:
        super().__init__(message, path=path)
        self.line = line


class LogWriteFailed(LogError):
    """An append did not reach the disk; `errno` says why. Nothing of it is in the log."""

    def __init__(self, message: str, *, path: Path, errno: int | None) -> None:
        super().__init__(message, path=path)
        self.errno = errno


class UnknownEvent(LogError):
    """An event type that this version does not know, and that may not be passed over."""

    def __init__(self, message: str, *, path: Path, line: int, event_type: str) -> None:
        super().__init__(message, path=path)
        self.line, self.event_type = line, event_type


class ReplayMismatch(LogError):
    """The checker rebuilt other tokens than those stored. `seq` is the event, `token` the offset in its span."""

    def __init__(self, message: str, *, path: Path, seq: int, token: int) -> None:
        super().__init__(message, path=path)
        self.seq, self.token = seq, token


class ArtifactError(ChapbookError):
    """The artifact store cannot be written, or a blob is not what it was. `size_bytes` is that of the content."""

    def __init__(self, message: str, *, path: Path, size_bytes: int | None = None) -> None:
        super().__init__(message)
        self.path, self.size_bytes = path, size_bytes


class LedgerError(ChapbookError):
    """The file of a plan's steps cannot be read or written; it is as it was. `path` is the file, `errno` says why."""

    def __init__(self, message: str, *, path: Path, errno: int | None) -> None:
        super().__init__(message)
        self.path, self.errno = path, errno


class SnapshotError(ChapbookError):
    """A snapshot file cannot be read or written; the tokens are evaluated instead. `path` is the file or its folder."""

    def __init__(self, message: str, *, path: Path) -> None:
        super().__init__(message)
        self.path = path


class SnapshotUnusable(SnapshotError):
    """A file that must not be used. `damaged`: it is a file of ours that will never be of use, so it was set aside."""

    def __init__(self, reason: str, *, path: Path, damaged: bool) -> None:
        super().__init__(f"the snapshot {path.name} is not used: {reason}", path=path)
        self.reason, self.damaged = reason, damaged


class SnapshotRefused(SnapshotError):
    """No room for a snapshot. `free_bytes` is what is free on the disk. Nothing was removed for it."""

    def __init__(self, message: str, *, path: Path, size_bytes: int, budget_bytes: int, free_bytes: int) -> None:
        super().__init__(message, path=path)
        self.size_bytes, self.budget_bytes, self.free_bytes = size_bytes, budget_bytes, free_bytes


class SnapshotWriteFailed(SnapshotError):
    """A snapshot did not reach the disk; `errno` says why. Nothing is left of it."""

    def __init__(self, message: str, *, path: Path, errno: int | None) -> None:
        super().__init__(message, path=path)
        self.errno = errno


class ToolError(ChapbookError):
    """A call that failed; its message is the error result that the model reads."""


class ContainmentError(ToolError):
    """A path that `rule` refuses."""

    def __init__(self, message: str, *, path: str, rule: str) -> None:
        super().__init__(message)
        self.path, self.rule = path, rule


class ToolDenied(ToolError):
    """Policy, a hook or the lack of a person refused the call."""


class ToolArgumentsError(ToolError):
    """Arguments that do not fit the schema. `problems` holds one line for each."""

    def __init__(self, message: str, *, problems: tuple[str, ...]) -> None:
        super().__init__(message)
        self.problems = problems
