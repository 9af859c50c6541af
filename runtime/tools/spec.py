"""What a tool is: its schema, its body, and what it may do. `declare.tool` makes one of a typed function."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from ...kernels.errors import ToolDenied
from ..calls import CallId, ToolSchema
from ..cancel import Cancel

if TYPE_CHECKING:
    from ...compaction.artifacts import ArtifactStore
    from ..plan_desk import PlanDesk
    from ..subagent import RunSubagent, SubagentReport
    from .workspace import Workspace


ARTIFACT_TOOL = "artifact"
"""The tool that stubs name: every session that has tools has it, whatever tools the host brings."""


class Grounded(enum.StrEnum):
    """Marks a parameter whose valid values are known: the grammar offers just those."""

    FILE = "file"
    FOLDER = "folder"
    PATH = "path"
    ARTIFACT = "artifact"
    STEP = "step"


class Citation(msgspec.Struct, frozen=True, kw_only=True):
    """How the model can name a stored blob: by the short id that its stub gives, or by its path."""

    id: str
    path: str


class Policy(enum.StrEnum):
    ALLOW = "allow"
    ASK = "ask"
    DENY = "deny"


class ToolOutput(msgspec.Struct, frozen=True, kw_only=True):
    """What a tool returns: text, or the file that holds an output too large to keep in memory.

    With `file`, `content` is empty or a short line that goes before it (an exit status); the runtime takes the file.
    `backing` is a file that holds what is in `content`: it is removed once that is in the log or the store.
    `paged`: a part of something that stays where it is and can be asked for again, such as lines of an artifact. It is
    never stored a second time: one that does not fit becomes an error with the numbers.
    """

    content: str = ""
    file: Path | None = None
    is_error: bool = False
    paged: bool = False
    backing: Path | None = None


def _no_subagent(*_: object, **__: object) -> SubagentReport:
    raise ToolDenied("subagents belong to a session, and this call is not made in one")


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolContext:
    """What a tool's body may use. `arrival_tokens` is the size over which a result would be stubbed; `artifacts` is
    the store of what was.

    `subagent` runs a subagent of the session (`Session.subagent`), which is cancelled with the call.
    """

    workspace: Workspace
    cancel: Cancel
    call_id: CallId
    capture_folder: Path
    arrival_tokens: int
    count_tokens: Callable[[str], int]
    artifacts: ArtifactStore
    subagent: RunSubagent = _no_subagent
    desk: PlanDesk | None = None


class ToolBody(Protocol):
    """Runs a call whose arguments fit the schema. Raises ToolError for what the model should read."""

    def __call__(self, context: ToolContext, arguments: Mapping[str, Any], /) -> ToolOutput: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """A tool. `safe`: may run beside others. `writes`: changes something, so that it is asked for by default.

    `in_turn`: its body runs on the turn's own thread, since it asks a person. `timeout_s` is when the runtime gives a
    body up; one that has a limit of its own declares a longer one here.
    """

    schema: ToolSchema
    body: ToolBody
    safe: bool = False
    writes: bool = False
    in_turn: bool = False
    policy: Policy = Policy.ALLOW
    timeout_s: float = 120.0
    grounded: Mapping[str, Grounded] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.schema.name
