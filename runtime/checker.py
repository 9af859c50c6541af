"""The independent checker: what every request was, rebuilt from the log and the vocabulary alone.

It takes from `tokens.i32` the spans that the model generated and nothing else. All other text is tokenised again from
the events and compared with what was stored. It shares no code with the path that composes the window as a session
goes on: only the vocabulary, the chat format and the events, so that a fault of that path cannot hide here too.

The rules of composition are in docs/session-log.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path

import msgspec
import numpy as np

from ..kernels.errors import ReplayMismatch
from ..kernels.tokens import TokenIds, concat_tokens, hash_tokens
from .calls import Piece
from .chat_format import ChatFormat, Shape, Slot
from .engine import Tokenizer
from .events import (
    AssistantMessage,
    Author,
    Event,
    HeaderReason,
    Logged,
    Notice,
    PrefixSection,
    RequestHeader,
    SegmentKind,
    Seq,
    Span,
    StepStart,
    ToolResult,
    UserMessage,
)


class CheckProblem(msgspec.Struct, frozen=True, kw_only=True):
    """Something that is not as the log says. `token` counts from the start of the span, or of the request in a
    comparison with what was decoded."""

    seq: Seq
    token: int
    message: str


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RebuiltRequest:
    """A request: `tokens` at `positions`, and the `reply` that the model generated (None where none was logged).

    `seq` is the step/start. `tokens` is a view of the buffer that the requests under one session prefix share;
    `prefix` counts those, from 0.
    """

    seq: Seq
    turn: int
    step: int
    tokens: TokenIds
    positions: range
    reply: TokenIds | None
    prefix: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rebuilt:
    """Every request of a log in order, the window as it was left under each session prefix, and what did not agree."""

    requests: tuple[RebuiltRequest, ...]
    windows: tuple[TokenIds, ...]
    problems: tuple[CheckProblem, ...]

    @property
    def window(self) -> TokenIds:
        """The window as the log leaves it."""
        return self.windows[-1]


def rebuild(events: Iterable[Logged], *, tokenizer: Tokenizer, stored: TokenIds) -> Rebuilt:
    """Rebuild every request of a log; `stored` is the whole of its `tokens.i32`, shape (n,).

    Every stored span but the model's own is compared token for token with what its event's text gives; offsets,
    lengths, kinds, hashes and the counts that events state are checked as well. Nothing is raised for a log that does
    not agree: the problems are in the result, in the order of the log.
    """
    rebuilding = _Rebuilding(tokenizer=tokenizer, stored=stored)
    last = Seq(0)
    for logged in events:
        rebuilding.take(logged)
        last = logged.seq
    rebuilding.finish(last)
    return rebuilding.result()


def require_agreement(rebuilt: Rebuilt, path: Path) -> None:
    """Raise ReplayMismatch with the first problem of `rebuilt`; `path` is the log that it was rebuilt from."""
    if not rebuilt.problems:
        return
    first = rebuilt.problems[0]
    more = f" ({len(rebuilt.problems) - 1} more after it)" if len(rebuilt.problems) > 1 else ""
    raise ReplayMismatch(
        f"{path}: line {first.seq + 1}: {first.message}{more}. The session cannot go on from tokens that its log does "
        "not explain: start a new session; the log stays as it is.",
        path=path,
        seq=first.seq,
        token=first.token,
    )


@dataclass(frozen=True, slots=True)
class _Run:
    """Tokens that an event adds."""

    kind: SegmentKind
    tokens: TokenIds


@dataclass(slots=True)
class _Asked:
    """A step/start: the request is [0, `length`) of the buffer of its session prefix, [`length`, `reply_end`) its
    reply, if there is one."""

    seq: Seq
    turn: int
    step: int
    length: int
    prefix: int
    reply_end: int | None = None


@dataclass(slots=True)
class _Rebuilding:
    """The walk over the events. `cited` is how much of `stored` the spans have covered so far, in tokens.

    `runs` make up the window of `length` tokens, the first `prefix_runs` of them the session prefix; `windows` are
    those as they were left under the prefixes before it.
    """

    tokenizer: Tokenizer
    stored: TokenIds
    chat_format: ChatFormat | None = None
    shape: Shape | None = None
    last_result: ToolResult | None = None
    cited: int = 0
    length: int = 0
    runs: list[TokenIds] = field(default_factory=list)
    prefix_runs: int = 0
    windows: list[TokenIds] = field(default_factory=list)
    asked: list[_Asked] = field(default_factory=list)
    awaiting_reply: bool = False
    problems: list[CheckProblem] = field(default_factory=list)

    def take(self, logged: Logged) -> None:
        seq, event = logged.seq, logged.event
        if isinstance(event, AssistantMessage) and event.author is Author.MODEL:
            self._take_reply(seq, event)
            return
        composed = self._compose(event)
        spans: tuple[Span, ...] = getattr(event, "spans", ())
        if isinstance(composed, str):
            self._problem(seq, 0, composed)
            self._stored_runs(seq, spans)
            return
        behind = self._leave_prefix() if _replaces_prefix(event) else []
        self._agree(seq, event, composed, spans)
        if isinstance(event, RequestHeader) and event.reason is not HeaderReason.RESUME:
            self._check_sections(seq, event.sections, composed)
            self.prefix_runs = len(self.runs)
            self._append(behind)
        elif isinstance(event, StepStart):
            self._take_request(seq, event)

    def finish(self, seq: Seq) -> None:
        if self.cited < self.stored.size:
            extra = self.stored.size - self.cited
            self._problem(seq, 0, f"tokens.i32 goes on after the last span: {extra} tokens that no event cites")

    def result(self) -> Rebuilt:
        windows = (*self.windows, concat_tokens(self.runs))
        requests = tuple(
            RebuiltRequest(
                seq=asked.seq,
                turn=asked.turn,
                step=asked.step,
                tokens=windows[asked.prefix][: asked.length],
                positions=range(asked.length),
                reply=None if asked.reply_end is None else windows[asked.prefix][asked.length : asked.reply_end],
                prefix=asked.prefix,
            )
            for asked in self.asked
        )
        return Rebuilt(requests=requests, windows=windows, problems=tuple(self.problems))

    # What an event adds

    def _compose(self, event: Event) -> tuple[_Run, ...] | str:
        """Return the runs that `event` adds, or why they cannot be told."""
        composed: tuple[_Run, ...] | str = ()
        match event:
            case RequestHeader():
                composed = self._compose_header(event)
            case UserMessage() | Notice():
                composed = self._compose_message(Shape.USER, (Piece(self._formed(Shape.USER, event.text)),))
            case ToolResult():
                content = (Piece(self._formed(Shape.TOOL, event.content)),)
                composed = self._compose_message(Shape.TOOL, content, result=event)
                self.last_result = event
            case AssistantMessage():
                composed = self._compose_message(Shape.REPLY, event.pieces)
            case StepStart(continues=False):
                composed = self._compose_message(Shape.REPLY, ())
            case StepStart() if self.shape is not Shape.REPLY:
                composed = "a step goes on with a reply, but the window does not end with one"
        return composed

    def _compose_header(self, header: RequestHeader) -> tuple[_Run, ...] | str:
        match header.reason:
            case HeaderReason.RESUME:
                return ()
            case HeaderReason.CHANGE if self.chat_format is None:
                return "a change of the session prefix before there is one"
            case HeaderReason.INITIAL if self.chat_format is not None:
                return "a second initial session prefix in one log"
        self.chat_format = header.chat_format
        return tuple(_Run(SegmentKind.PREFIX, self._tokenize(section.pieces)) for section in header.sections)

    def _leave_prefix(self) -> list[TokenIds]:
        """Begin a window under another session prefix; return the messages, which stand behind that one too."""
        self.windows.append(concat_tokens(self.runs))
        behind = self.runs[self.prefix_runs :]
        self.runs, self.length, self.awaiting_reply = [], 0, False
        return behind

    def _compose_message(
        self, shape: Shape, content: Iterable[Piece], *, result: ToolResult | None = None
    ) -> tuple[_Run, ...] | str:
        """Return the glue before a message of `shape`, and its content."""
        if self.chat_format is None:
            return "a message before the session prefix: its glue is not known"
        glue: tuple[Piece, ...] = ()
        if self.shape is not None:
            if f"{self.shape}>{shape}" not in self.chat_format.glues:
                return f"the chat format has nothing that stands between {self.shape} and {shape}"
            glue = self.chat_format.glue(self.shape, shape).pieces(self._slots(result))
        self.shape = shape
        self.awaiting_reply = False
        return (
            _Run(SegmentKind.GLUE, self._tokenize(glue)),
            _Run(SegmentKind.MESSAGE, self._tokenize(content)),
        )

    def _slots(self, result: ToolResult | None) -> dict[Slot, str]:
        slots: dict[Slot, str] = {}
        if result is not None:
            slots |= {Slot.TOOL_NAME: result.name, Slot.CALL_ID: result.call_id}
        if self.shape is Shape.TOOL and self.last_result is not None:
            slots[Slot.PREVIOUS_TOOL_NAME] = self.last_result.name
            slots[Slot.PREVIOUS_CALL_ID] = self.last_result.call_id
        return slots

    def _formed(self, shape: Shape, text: str) -> str:
        return text if self.chat_format is None else self.chat_format.form(shape).apply(text)

    def _tokenize(self, pieces: Iterable[Piece]) -> TokenIds:
        return concat_tokens(
            [self.tokenizer.tokenize(piece.text, parse_special=piece.markup) for piece in pieces if piece.text]
        )

    # What the log says of it

    def _agree(self, seq: Seq, event: Event, composed: Sequence[_Run], spans: Sequence[Span]) -> None:
        """Append what `event` adds, and hold its spans against it. A span of no tokens adds nothing, so it is free."""
        kept = [pair for pair in zip(spans, self._stored_runs(seq, spans), strict=True) if pair[0].length]
        added = [run for run in composed if run.tokens.size]
        self._append([run.tokens for run in added])
        for run, pair in zip_longest(added, kept):
            if pair is None:
                self._problem(seq, 0, f"{_what(event, run.kind)} is {run.tokens.size} tokens, and no span cites them")
            elif run is None:
                self._problem(seq, 0, f"{_what(event, pair[0].kind)} of {pair[0].length} tokens comes from no text")
            else:
                self._compare(seq, event, run, *pair)

    def _compare(self, seq: Seq, event: Event, run: _Run, span: Span, kept: TokenIds) -> None:
        what = _what(event, run.kind)
        token = first_difference(run.tokens, kept)
        if span.kind is not run.kind:
            self._problem(seq, 0, f"{what} is recorded as {span.kind}")
        elif token is not None:
            shown = f"stored {_id_at(kept, token)}, rebuilt {_id_at(run.tokens, token)}"
            self._problem(seq, token, f"{what}, token {token} of {span.length}: {shown}")
        elif span.xxh3 != hash_tokens(run.tokens):
            self._problem(seq, 0, f"{what}: its hash {span.xxh3} is not that of its {span.length} tokens")

    def _take_reply(self, seq: Seq, event: AssistantMessage) -> None:
        """Take a reply of the model from `stored`: the only tokens that are not made again."""
        kept = list(zip(event.spans, self._stored_runs(seq, event.spans), strict=True))
        if not self.awaiting_reply:
            self._problem(seq, 0, "a reply of the model that no step asked for")
        if event.pieces:
            self._problem(seq, 0, "a reply of the model with pieces: its tokens are those of its span")
        if len(kept) > 1 or any(span.kind is not SegmentKind.MESSAGE for span, _ in kept):
            self._problem(seq, 0, "a reply of the model must be one span of kind message")
        for span, tokens in kept:
            if tokens.size == span.length and span.xxh3 != hash_tokens(tokens):
                self._problem(seq, 0, f"{_what(event, span.kind)}: its hash {span.xxh3} is not that of its tokens")
        self._append([tokens for _, tokens in kept])
        if self.awaiting_reply:
            self.asked[-1].reply_end = self.length
        self.shape, self.awaiting_reply = Shape.REPLY, False

    def _take_request(self, seq: Seq, event: StepStart) -> None:
        if event.window_tokens != self.length:
            self._problem(seq, 0, f"the request is {self.length} tokens, step/start says {event.window_tokens}")
        self.asked.append(_Asked(seq, event.turn, event.step, self.length, prefix=len(self.windows)))
        self.awaiting_reply = True

    def _check_sections(self, seq: Seq, sections: Sequence[PrefixSection], composed: Sequence[_Run]) -> None:
        for section, run in zip(sections, composed, strict=True):
            if section.tokens != run.tokens.size:
                self._problem(
                    seq, 0, f"section {section.name} is {run.tokens.size} tokens, its header says {section.tokens}"
                )
            elif section.xxh3 != hash_tokens(run.tokens):
                self._problem(seq, 0, f"section {section.name}: its hash {section.xxh3} is not that of its tokens")

    def _stored_runs(self, seq: Seq, spans: Sequence[Span]) -> list[TokenIds]:
        """Return what `spans` cite, cut at the end of `stored`; they must tile it in order."""
        runs = []
        for span in spans:
            if span.offset != self.cited or span.length < 0:
                self._problem(
                    seq,
                    0,
                    f"a {span.kind} span of {span.length} tokens at offset {span.offset}, "
                    f"where the spans before it end at {self.cited}",
                )
            # [offset, end): a span that lies outside of the file gives what there is of it, at worst nothing.
            offset = max(span.offset, 0)
            end = offset + max(span.length, 0)
            if end > self.stored.size:
                self._problem(
                    seq,
                    max(self.stored.size - offset, 0),
                    f"a {span.kind} span ends at {end}, tokens.i32 at {self.stored.size}",
                )
            runs.append(self.stored[offset:end])
            self.cited = end
        return runs

    def _append(self, runs: Sequence[TokenIds]) -> None:
        self.runs.extend(runs)
        self.length += sum(run.size for run in runs)

    def _problem(self, seq: Seq, token: int, message: str) -> None:
        self.problems.append(CheckProblem(seq=seq, token=token, message=message))


def _replaces_prefix(event: Event) -> bool:
    return isinstance(event, RequestHeader) and event.reason is HeaderReason.CHANGE


def _what(event: Event, kind: SegmentKind) -> str:
    return f"the {kind} of {event.__struct_config__.tag}"


def _id_at(run: TokenIds, index: int) -> str:
    return str(run[index]) if index < run.size else "nothing"


def first_difference(left: TokenIds, right: TokenIds) -> int | None:
    """Return the first index at which two runs differ, the shorter one's length where it is a prefix, or None."""
    shared = min(left.size, right.size)
    different = np.flatnonzero(left[:shared] != right[:shared])
    if different.size:
        return int(different[0])
    return shared if left.size != right.size else None
