"""The log, the window and the place in the conversation, kept in step.

Every change is written before it counts: the tokens, then the event that cites them, then the window. A write that
fails leaves all three as they were.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import msgspec

from ..compaction.artifacts import ArtifactRef
from ..kernels.errors import LogWriteFailed
from ..kernels.tokens import NO_TOKENS, TokenIds, concat_tokens
from .calls import CallId, LoggedCall, Piece
from .composition import Composer, Place, place_after, source_of
from .engine import GenerationReport
from .events import (
    AssistantMessage,
    Author,
    Event,
    HeaderReason,
    Logged,
    ModeSet,
    Notice,
    RequestHeader,
    SegmentKind,
    SessionStart,
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
from .log_reading import spans_of
from .projection import Recovery, SessionState, fold, plan_recovery
from .session_log import SessionLog
from .window import Segment, Window


class Transcript:
    """One session's record. All that enters the window goes through here."""

    def __init__(self, log: SessionLog, composer: Composer) -> None:
        self._log = log
        self._composer = composer
        self._window = Window()
        self._place = Place()
        self._state = SessionState()
        self._to_repeat: TokenIds = NO_TOKENS
        # What was evaluated under each session prefix: the last one under the one in force, empty before its first.
        self._runs: list[TokenIds] = [NO_TOKENS]
        self._replaced_tokens = 0
        self._calls_made = 0
        self._notices: list[str] = []
        # Set while a write is under way: an interrupt (Ctrl-C in the host's thread) can leave one half done.
        self._unsettled = False

    @property
    def window(self) -> Window:
        return self._window

    @property
    def state(self) -> SessionState:
        """The fold over the log so far."""
        return self._state

    @property
    def composer(self) -> Composer:
        return self._composer

    @property
    def to_repeat(self) -> TokenIds:
        """What the next request must repeat: the last one and its reply, behind the session prefix in force."""
        return self._to_repeat

    @property
    def replaced(self) -> TokenIds:
        """The last request and its reply where the session prefix was replaced since; else empty."""
        return NO_TOKENS if len(self._runs[-1]) or len(self._runs) == 1 else self._runs[-2]

    @property
    def evaluated(self) -> tuple[TokenIds, ...]:
        """The last request and its reply under each session prefix that had one."""
        return tuple(run for run in self._runs if len(run))

    def notices(self) -> tuple[str, ...]:
        """Return the texts of the notices that stand in the log of this session, as far as it is open."""
        return tuple(self._notices)

    @property
    def turn(self) -> int:
        """The number of the turn in progress, or of the last one."""
        return self._state.last_turn

    def restore(self, events: Iterable[Logged], tokens: TokenIds) -> None:
        """Take over a log that was read: the window is made from the stored tokens, nothing is tokenised again."""
        for logged in events:
            event = logged.event
            self._take_in(
                logged,
                tuple(
                    # [offset, offset + length) of what is stored
                    Segment(span.kind, tokens[span.offset : span.offset + span.length], _source_of(event, index))
                    for index, span in enumerate(spans_of(event))
                ),
            )
        self._calls_made = self._state.last_call_number

    def recover(self, rescued: Mapping[CallId, ArtifactRef] | None = None) -> Recovery:
        """Bring a session that was cut off to rest: every call gets a result, and none is run again.

        `rescued` is what calls had put out before they were cut off.
        """
        recovery = plan_recovery(self._state, rescued)
        for result in recovery.results:
            self._commit(result)
        for event in (recovery.step_end, recovery.turn_end):
            if event is not None:
                self._commit(event)
        if recovery.needed:
            self._log.make_durable()
        return recovery

    def next_call_id(self) -> CallId:
        """Return an id that no call of the session has: nine characters, counted."""
        self._calls_made += 1
        return CallId(f"call{self._calls_made:05d}")

    def begin(self, start: SessionStart, header: RequestHeader) -> None:
        """Record the session and its prefix, one span for each section. On disk when this returns."""
        self._commit(start)
        self._commit(header, durable=True)

    def start_turn(self) -> int:
        """Record the start of a turn and return its number."""
        self._commit(TurnStart(turn=self.turn + 1))
        return self.turn

    def end_turn(self, reason: TurnEndReason, *, rounds: int, detail: str = "") -> None:
        """Record the end of the turn, on disk when this returns."""
        self._commit(TurnEnd(turn=self.turn, reason=reason, rounds=rounds, detail=detail), durable=True)

    def user(self, message: UserMessage) -> None:
        """Record a person's message."""
        self._commit(message)

    def notice(self, notice: Notice) -> None:
        """Record a message of the runtime's own, of the user's shape."""
        self._commit(notice)

    def adopt(self, header: RequestHeader) -> None:
        """Put another session prefix into force, with the messages behind it as they are. On disk when this returns."""
        self._commit(header, durable=True)

    def record(self, event: Event) -> None:
        """Record an event that adds nothing to the window."""
        self._commit(event)

    def set_mode(self, mode: str) -> None:
        """Record that a mode is in force. On disk when this returns."""
        self._commit(ModeSet(mode=mode), durable=True)

    def tokens_with(self, *events: Event) -> int:
        """Return how long the window would be with `events` in it, one after another."""
        place, total = self._place, self._window.token_count
        for event in events:
            total += sum(len(segment.tokens) for segment in self._composer.compose(place, event))
            place = place_after(place, event)
        return total

    def opened_tokens(self, *, before: Sequence[Event] = ()) -> int:
        """Return how long the request would be if a reply were opened now, or behind the events `before`."""
        return self.tokens_with(*before, StepStart(turn=0, step=0, window_tokens=0))

    def open_reply(self, *, step: int, continues: bool, tool_choice: str) -> None:
        """Record a request. It is on disk when this returns: intent comes before effect."""
        event = StepStart(
            turn=self.turn,
            step=step,
            window_tokens=self._window.token_count if continues else self.opened_tokens(),
            continues=continues,
            tool_choice=tool_choice,
        )
        self._commit(event, durable=True)

    def reply(
        self, report: GenerationReport, *, text: str, reasoning: str = "", calls: Sequence[LoggedCall] = ()
    ) -> None:
        """Record what the model generated, as the tokens that it evaluated."""
        event = AssistantMessage(text=text, reasoning=reasoning, calls=tuple(calls), finish=report.finish)
        source = source_of(event, SegmentKind.MESSAGE)
        self._commit(event, segments=(Segment(SegmentKind.MESSAGE, report.tokens, source),))

    def runtime_call(self, call: LoggedCall, pieces: Sequence[Piece]) -> None:
        """Record a call that the runtime makes for a person, spelled as the model would have spelled it."""
        self._commit(AssistantMessage(text="", calls=(call,), author=Author.RUNTIME, pieces=tuple(pieces)))

    def tool_calls(self, calls: Sequence[LoggedCall], *, author: Author = Author.MODEL) -> None:
        """Record that these calls are about to run. On disk when this returns."""
        for call in calls:
            self._commit(ToolCallEvent(call=call, author=author))
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
        self._commit(StepEnd(turn=self.turn, step=step, usage=usage))

    def _commit(self, event: Event, *, segments: tuple[Segment, ...] | None = None, durable: bool = False) -> None:
        if self._unsettled:
            raise LogWriteFailed(
                "this session was interrupted in the middle of a write, so that its log and its window may differ: "
                "close it and resume it",
                path=self._log.folder,
                errno=None,
            )
        made = self._composer.compose(self._place, event) if segments is None else segments
        made = tuple(segment for segment in made if len(segment.tokens))
        self._unsettled = True
        try:
            spans = tuple(self._log.append_tokens(segment.kind, segment.tokens) for segment in made)
            cited = msgspec.structs.replace(event, spans=spans) if spans else event
            logged = self._log.append(cited, durable=durable)
        except LogWriteFailed:
            self._unsettled = False  # the log has taken all of it back
            raise
        self._take_in(logged, made)
        self._unsettled = False

    def _take_in(self, logged: Logged, segments: tuple[Segment, ...]) -> None:
        event = logged.event
        if isinstance(event, RequestHeader) and event.reason is HeaderReason.CHANGE:
            self._replace_prefix(event, segments)
        else:
            self._window = self._window.append(segments)
        if isinstance(event, StepStart) or (isinstance(event, AssistantMessage) and event.author is Author.MODEL):
            self._to_repeat = self._runs[-1] = self._window.tokens()
        self._place = place_after(self._place, logged.event)
        self._state = fold(self._state, logged)
        if isinstance(logged.event, Notice):
            self._notices.append(logged.event.text)

    def _replace_prefix(self, header: RequestHeader, segments: tuple[Segment, ...]) -> None:
        """Put another session prefix before the messages, whose tokens stay as they are: a declared break."""
        length = self._window.prefix_length
        # The old prefix is [0, before) of the window and of all that was evaluated.
        before = self._window.start_of(length)
        self._window = self._window.replace(0, length, segments)
        if len(self._to_repeat):
            self._to_repeat = concat_tokens([*(each.tokens for each in segments), self._to_repeat[before:]])
        if len(self._runs[-1]):
            self._runs.append(NO_TOKENS)
        self._replaced_tokens += before
        self._composer = Composer(self._composer.tokenizer, header.chat_format)

    def check_integrity(self) -> None:
        """Assert that the window is what the stored tokens say."""
        self._window.check_integrity()
        self._log.check_integrity()
        assert self._window.token_count + self._replaced_tokens == self._log.token_count


def _source_of(event: Event, index: int) -> str:
    """Return the name of the segment of an event's span `index`."""
    spans = spans_of(event)
    if isinstance(event, RequestHeader):
        named = [section for section in event.sections if section.tokens]
        return f"prefix: {named[index].name}" if len(named) == len(spans) else "prefix"
    return source_of(event, spans[index].kind)
