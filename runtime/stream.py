"""What a session tells its host while a turn runs: one value for each thing that happened, in order.

The same values are the lines of ``chapbook run --json`` (msgspec JSON, the type under ``type``).
"""

from __future__ import annotations

import msgspec

from .calls import LoggedCall
from .events import SessionId, StepUsage, TurnEndReason


class SessionOpened(msgspec.Struct, frozen=True, kw_only=True, tag="session/open"):
    session: SessionId
    model_name: str
    n_ctx: int
    prefix_tokens: int
    dialect: str
    resumed: bool = False
    mode: str = "default"


class TurnStarted(msgspec.Struct, frozen=True, kw_only=True, tag="turn/start"):
    turn: int


class StepStarted(msgspec.Struct, frozen=True, kw_only=True, tag="step/start"):
    turn: int
    step: int
    window_tokens: int


class PrefillProgressed(msgspec.Struct, frozen=True, kw_only=True, tag="prefill"):
    """Between two batches of a prefill; handed to the host's `on_prefill`, since a sync is one call."""

    evaluated_tokens: int
    total_tokens: int
    seconds: float


class TextDelta(msgspec.Struct, frozen=True, kw_only=True, tag="text"):
    text: str


class ReasoningDelta(msgspec.Struct, frozen=True, kw_only=True, tag="reasoning"):
    text: str


class ToolStarted(msgspec.Struct, frozen=True, kw_only=True, tag="tool/call"):
    """`by_runtime`: a mention, not the model."""

    call: LoggedCall
    by_runtime: bool = False


class ToolFinished(msgspec.Struct, frozen=True, kw_only=True, tag="tool/result"):
    """`content` is as the model reads it, `tokens` long. Where it `is_stub`, the whole, `size_bytes` long, is
    `artifact`, without its `redacted` secrets; an artifact of what is no stub holds the bytes of what is not all text.
    """

    call_id: str
    name: str
    content: str
    is_error: bool
    artifact: str | None
    tokens: int
    seconds: float
    is_stub: bool = False
    size_bytes: int = 0
    redacted: int = 0


class NoticeGiven(msgspec.Struct, frozen=True, kw_only=True, tag="notice"):
    """Said by the runtime. With `to_model` it stands in the window, else it is for the host alone."""

    producer: str
    text: str
    to_model: bool = True


class StepEnded(msgspec.Struct, frozen=True, kw_only=True, tag="step/end"):
    turn: int
    step: int
    usage: StepUsage


class TurnEnded(msgspec.Struct, frozen=True, kw_only=True, tag="turn/end"):
    """`text` is what the agent said last; `detail` says why a turn that was not completed ended, or what the
    last reply of one that was falls short of."""

    turn: int
    reason: TurnEndReason
    rounds: int
    text: str
    detail: str = ""


class SubagentEvent(msgspec.Struct, frozen=True, kw_only=True, tag="subagent"):
    """An event of the subagent `session`; handed to the host's `on_subagent`, beside the parent's own stream."""

    session: SessionId
    event: StreamEvent


StreamEvent = (
    SessionOpened
    | TurnStarted
    | StepStarted
    | PrefillProgressed
    | TextDelta
    | ReasoningDelta
    | ToolStarted
    | ToolFinished
    | NoticeGiven
    | StepEnded
    | TurnEnded
    | SubagentEvent
)
