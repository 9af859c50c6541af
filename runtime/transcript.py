"""The log, the window and the place in the conversation, kept in step.

Every change is written before it counts: the tokens, then the event that cites them, then the window. A write that
fails leaves all three as they were.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from ..kernels.tokens import NO_TOKENS, TokenIds
from .calls import CallId, LoggedCall, Piece
from .composition import Composer, Place, place_after, source_of
from .engine import GenerationReport
from .events import (
    AssistantMessage,
    Author,
    Event,
    Logged,
    Notice,
    RequestHeader,
    SegmentKind,
    StepEnd,
    StepStart,
    StepUsage,
    ToolCallEvent,
    ToolResult,
    TurnEnd,
    TurnEndReason,
    TurnStart,
    UserMessage,
)
from .gate import Admitted
from .session_log import SessionLog
from .window import Segment, Window


class Transcript:
    """One session's record. All that enters the window goes through here."""

    def __init__(self, log: SessionLog, composer: Composer) -> None:
        self._log = log
        self._composer = composer
        self._window = Window()
        self._place = Place()
        self._evaluated: TokenIds = NO_TOKENS
        self._calls_made = 0
        self.turns = 0

    @property
    def window(self) -> Window:
        return self._window

    @property
    def composer(self) -> Composer:
        return self._composer

    @property
    def evaluated(self) -> TokenIds:
        """The last request and its reply: what the next request must repeat."""
        return self._evaluated

    def restore(self, events: Iterable[Logged], tokens: TokenIds) -> None:
        """Take over a log that was read: the window is made from the stored tokens, nothing is tokenised again."""
        for logged in events:
            event = logged.event
            spans = getattr(event, "spans", ())
            self._window = self._window.append(
                Segment(span.kind, tokens[span.offset : span.offset + span.length], source_of(event, span.kind))
                for span in spans
            )
            self._place = place_after(self._place, event)
            if isinstance(event, StepStart | AssistantMessage):
                self._evaluated = self._window.tokens()
            if isinstance(event, ToolCallEvent):
                self._calls_made = max(self._calls_made, int(event.call.id[4:]))
            if isinstance(event, AssistantMessage):
                self._calls_made = max(self._calls_made, *(int(call.id[4:]) for call in event.calls), 0)
            if isinstance(event, TurnStart):
                self.turns = event.turn

    def next_call_id(self) -> CallId:
        """Return an id that no call of the session has: nine characters, counted."""
        self._calls_made += 1
        return CallId(f"call{self._calls_made:05d}")

    def header(self, header: RequestHeader) -> None:
        """Record the session prefix: one span for each section."""
        self._commit(header)

    def start_turn(self) -> int:
        """Record the start of a turn and return its number."""
        self._log.append(TurnStart(turn=self.turns + 1))
        self.turns += 1
        return self.turns

    def end_turn(self, reason: TurnEndReason, *, rounds: int, detail: str = "") -> None:
        """Record the end of the turn, on disk when this returns."""
        self._log.append(TurnEnd(turn=self.turns, reason=reason, rounds=rounds, detail=detail), durable=True)

    def user(self, text: str, *, artifact: str | None = None) -> None:
        """Record a person's message."""
        self._commit(UserMessage(text=text, artifact=artifact))

    def notice(self, *, producer: str, form: str, text: str) -> None:
        """Record a message of the runtime's own, of the user's shape."""
        self._commit(Notice(producer=producer, form=form, text=text))

    def opened_tokens(self) -> int:
        """Return how long the request would be if a reply were opened now."""
        opening = self._composer.compose(self._place, StepStart(turn=0, step=0, window_tokens=0))
        return self._window.token_count + sum(len(segment.tokens) for segment in opening)

    def open_reply(self, *, step: int, continues: bool, tool_choice: str) -> None:
        """Record a request. It is on disk when this returns: intent comes before effect."""
        event = StepStart(
            turn=self.turns,
            step=step,
            window_tokens=self._window.token_count if continues else self.opened_tokens(),
            continues=continues,
            tool_choice=tool_choice,
        )
        self._commit(event, durable=True)
        self._evaluated = self._window.tokens()

    def reply(
        self, report: GenerationReport, *, text: str, reasoning: str = "", calls: Sequence[LoggedCall] = ()
    ) -> None:
        """Record what the model generated, as the tokens that it evaluated."""
        event = AssistantMessage(text=text, reasoning=reasoning, calls=tuple(calls), finish=report.finish)
        source = source_of(event, SegmentKind.MESSAGE)
        self._commit(event, segments=(Segment(SegmentKind.MESSAGE, report.tokens, source),))
        self._evaluated = self._window.tokens()

    def runtime_call(self, call: LoggedCall, pieces: Sequence[Piece]) -> None:
        """Record a call that the runtime makes for a person, spelled as the model would have spelled it."""
        self._commit(AssistantMessage(text="", calls=(call,), author=Author.RUNTIME, pieces=tuple(pieces)))

    def tool_calls(self, calls: Sequence[LoggedCall], *, author: Author = Author.MODEL) -> None:
        """Record that these calls are about to run. On disk when this returns."""
        for call in calls:
            self._log.append(ToolCallEvent(call=call, author=author))
        self._log.make_durable()

    def result(self, call: LoggedCall, admitted: Admitted, *, seconds: float = 0.0, synthetic: bool = False) -> None:
        """Record a call's result as it enters the window."""
        self._commit(
            ToolResult(
                call_id=call.id,
                name=call.name,
                content=admitted.content,
                is_error=admitted.is_error,
                artifact=admitted.artifact,
                size_bytes=admitted.size_bytes,
                seconds=seconds,
                synthetic=synthetic,
            )
        )

    def end_step(self, *, step: int, usage: StepUsage) -> None:
        """Record the account of a step."""
        self._log.append(StepEnd(turn=self.turns, step=step, usage=usage))

    def _commit(self, event: Event, *, segments: tuple[Segment, ...] | None = None, durable: bool = False) -> None:
        made = self._composer.compose(self._place, event) if segments is None else segments
        made = tuple(segment for segment in made if len(segment.tokens))
        spans = tuple(self._log.append_tokens(segment.kind, segment.tokens) for segment in made)
        self._log.append(msgspec.structs.replace(event, spans=spans), durable=durable)
        self._window = self._window.append(made)
        self._place = place_after(self._place, event)

    def check_integrity(self) -> None:
        """Assert that the window is what the stored tokens say."""
        self._window.check_integrity()
        self._log.check_integrity()
