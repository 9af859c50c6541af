"""The events of a session log, as frozen values. What is written on disk and how is `log`'s concern.

Every event that adds tokens to the window cites them as spans of `tokens.i32`. The text from which they can be made
again is in the event too, so that the checker needs nothing but the log and the vocabulary.

The events of which a log has many are not tracked by the garbage collector (``gc=False``): they are trees, and
walking 100,000 of them again and again would make up a third of the time of a resume.
"""

from __future__ import annotations

import enum
from typing import Any, NewType

import msgspec

from ..compaction.ledger import Ledger, StepState
from ..compaction.plans import PlanVerdict
from .calls import CallId, LoggedCall, Piece
from .chat_format import ChatFormat

SessionId = NewType("SessionId", str)
Seq = NewType("Seq", int)


class SegmentKind(enum.StrEnum):
    """What a run of the window is."""

    PREFIX = "prefix"
    MESSAGE = "message"
    GLUE = "glue"
    INDEX = "index"
    STATE = "state"


class Span(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A run in `tokens.i32`: [offset, offset + length), in tokens, with the xxh3 of its bytes."""

    kind: SegmentKind
    offset: int
    length: int
    xxh3: str


class Author(enum.StrEnum):
    """Who made a call or wrote an assistant's message."""

    MODEL = "model"
    RUNTIME = "runtime"


class HeaderReason(enum.StrEnum):
    INITIAL = "initial"
    RESUME = "resume"
    CHANGE = "change"


class TurnEndReason(enum.StrEnum):
    COMPLETED = "completed"
    INTERRUPTED = "interrupted"
    ROUND_CAP = "round_cap"
    STUCK = "stuck"
    NO_ROOM = "no_room"
    ERROR = "error"


class PrefixSection(msgspec.Struct, frozen=True, kw_only=True):
    """A section of the session prefix: its pieces in order, its tokens and their xxh3."""

    name: str
    pieces: tuple[Piece, ...]
    tokens: int
    xxh3: str


class DriftKind(enum.StrEnum):
    ADDED = "added"
    REMOVED = "removed"
    CHANGED = "changed"


class SectionDrift(msgspec.Struct, frozen=True, kw_only=True):
    """A section that would be composed otherwise now, with its tokens then and now."""

    name: str
    before_tokens: int
    after_tokens: int
    kind: DriftKind


class BreakReport(msgspec.Struct, frozen=True, kw_only=True):
    """A break: the first token of the last request that this one does not repeat, and what stands there now."""

    section: str
    token: int


class StepUsage(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The account of one step, in tokens and seconds.

    `bound` comes from the log alone: the request's length less the longest prefix that it shares with any earlier
    request and its reply. `reason` says why more was evaluated, and is empty where evaluated equals it. A
    `declared_break` is where the session prefix was replaced since the last request.
    """

    window: int
    cached: int
    evaluated: int
    generated: int
    bound: int
    moved: int = 0
    source: str = ""
    reason: str = ""
    undeclared_break: BreakReport | None = None
    declared_break: BreakReport | None = None
    ttft_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    peak_rss_bytes: int = 0


class SessionStart(msgspec.Struct, frozen=True, kw_only=True, tag="session/start"):
    session: SessionId
    log_format: int
    chapbook: str
    model_name: str
    model_path: str
    fingerprint: str
    template_hash: str
    n_ctx: int
    config: dict[str, Any]
    parent: SessionId | None = None
    root: SessionId | None = None
    intent: str = "new"


class RequestHeader(msgspec.Struct, frozen=True, kw_only=True, tag="request/header"):
    """The session prefix, and which sections drifted from the one in force before.

    With CHANGE it takes that one's place in the window. With RESUME it adds no tokens and is not in force: it is what
    would be composed now.
    """

    reason: HeaderReason
    dialect: str
    chat_format: ChatFormat
    sections: tuple[PrefixSection, ...]
    tools: tuple[str, ...]
    drifted: tuple[SectionDrift, ...] = ()
    spans: tuple[Span, ...] = ()


class TurnStart(msgspec.Struct, frozen=True, kw_only=True, tag="turn/start"):
    turn: int


class TurnEnd(msgspec.Struct, frozen=True, kw_only=True, tag="turn/end"):
    turn: int
    reason: TurnEndReason
    rounds: int
    detail: str = ""


class StepStart(msgspec.Struct, frozen=True, kw_only=True, gc=False, tag="step/start"):
    """A request: the window as it is, and the glue that opens the reply (none where a cut reply goes on)."""

    turn: int
    step: int
    window_tokens: int
    continues: bool = False
    tool_choice: str = "auto"
    spans: tuple[Span, ...] = ()


class StepEnd(msgspec.Struct, frozen=True, kw_only=True, gc=False, tag="step/end"):
    turn: int
    step: int
    usage: StepUsage


class UserMessage(msgspec.Struct, frozen=True, kw_only=True, gc=False, tag="user/message"):
    """`artifact` names the whole message where `text` is not all of it: a stub stands in it, or it was not UTF-8."""

    text: str
    artifact: str | None = None
    spans: tuple[Span, ...] = ()


class AssistantMessage(msgspec.Struct, frozen=True, kw_only=True, gc=False, tag="assistant/message"):
    """A reply. By the model: its tokens are those of the span. By the runtime: they are made from `pieces`,
    after the glue that opens a reply.

    `text` and `reasoning` are what was parsed of the whole reply so far; a reply that went on after a cut repeats it.
    """

    text: str
    reasoning: str = ""
    calls: tuple[LoggedCall, ...] = ()
    finish: str = ""
    author: Author = Author.MODEL
    pieces: tuple[Piece, ...] = ()
    spans: tuple[Span, ...] = ()


class Notice(msgspec.Struct, frozen=True, kw_only=True, gc=False, tag="notice"):
    """Text authored by the runtime, a message of its own of the user's shape. `text` is as the model reads it, with a
    stub in it where `artifact` names the blob."""

    producer: str
    form: str
    text: str
    artifact: str | None = None
    spans: tuple[Span, ...] = ()


class ModeSet(msgspec.Struct, frozen=True, kw_only=True, gc=False, tag="mode/set"):
    """From here on `mode` is in force."""

    mode: str


class PlanSubmitted(msgspec.Struct, frozen=True, kw_only=True, gc=False, tag="plan/submitted"):
    """A plan was submitted for review by a call; `artifact` holds its bytes. `title` is empty without a heading."""

    call_id: CallId
    title: str
    artifact: str
    size_bytes: int


class PlanVerdictGiven(msgspec.Struct, frozen=True, kw_only=True, gc=False, tag="plan/verdict"):
    """What a review came to; None: nobody answered, and the plan is pending."""

    call_id: CallId
    verdict: PlanVerdict | None
    feedback: str = ""


class PlanClosed(msgspec.Struct, frozen=True, kw_only=True, gc=False, tag="plan/closed"):
    """A person ended the plan in force."""

    task: str


class LedgerSet(msgspec.Struct, frozen=True, kw_only=True, gc=False, tag="ledger/set"):
    """The agent wrote down the steps of a task."""

    ledger: Ledger


class LedgerStepMarked(msgspec.Struct, frozen=True, kw_only=True, gc=False, tag="ledger/step"):
    """The agent marked a step."""

    id: str
    state: StepState
    note: str = ""


class ToolCallEvent(msgspec.Struct, frozen=True, kw_only=True, gc=False, tag="tool/call"):
    """The durable intent: on disk before the tool's body runs."""

    call: LoggedCall
    author: Author = Author.MODEL


class ToolResult(msgspec.Struct, frozen=True, kw_only=True, gc=False, tag="tool/result"):
    """`content` is as the model reads it: the whole result, or a stub where `artifact` names the blob.

    `synthetic`: made up by the runtime for a call whose outcome is not known.
    """

    call_id: CallId
    name: str
    content: str
    is_error: bool = False
    artifact: str | None = None
    size_bytes: int = 0
    seconds: float = 0.0
    synthetic: bool = False
    spans: tuple[Span, ...] = ()


class IgnoredEvent(msgspec.Struct, frozen=True, kw_only=True, tag="ignored"):
    """An event of a newer version that said it may be passed over. `data` is its JSON as written."""

    event_type: str
    data: msgspec.Raw


Event = (
    SessionStart
    | RequestHeader
    | TurnStart
    | TurnEnd
    | StepStart
    | StepEnd
    | UserMessage
    | AssistantMessage
    | Notice
    | ModeSet
    | PlanSubmitted
    | PlanVerdictGiven
    | PlanClosed
    | LedgerSet
    | LedgerStepMarked
    | ToolCallEvent
    | ToolResult
    | IgnoredEvent
)


class Logged(msgspec.Struct, frozen=True, gc=False):
    """An event with its place in the log. `seq` equals its line number, from 0; `time` is Unix seconds."""

    seq: Seq
    time: float
    event: Event
