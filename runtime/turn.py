"""One turn: from a user's message to the agent at rest.

turn/start → mentions → [ step/start → sync → generate → assistant/message → calls → results → step/end ]* → turn/end
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from hashlib import sha256

import msgspec

from ..compaction.arrival import page_share
from ..compaction.budget import Budgets
from ..compaction.plans import REMINDER_LABEL
from ..kernels.errors import ChapbookError, LogError, NoRoom
from ..kernels.tokens import NO_TOKENS, TokenIds, concat_tokens
from .calls import CallProblem, ChoiceKind, LoggedCall, ParsedReply, ToolChoice
from .cancel import Cancel
from .chat_format import Shape
from .dialects.base import Dialect
from .engine import Engine, FinishReason, GenerationReport
from .events import Author, Event, Notice, StepUsage, ToolResult, TurnEndReason, UserMessage
from .gate import Admitted, Gate, Offered, call_arguments
from .mentions import Mention
from .modes import Modes, PendingMode
from .offers import Offers
from .plan_desk import PlanDesk
from .prefix_watch import PrefixWatch
from .projection import MODE_PRODUCER
from .request import Asked, Requester, was_cut
from .stream import (
    NoticeGiven,
    StepEnded,
    StreamEvent,
    TextDelta,
    ToolFinished,
    ToolStarted,
    TurnEnded,
    TurnStarted,
)
from .stuck import StepCall, StuckDetector, repeats_itself
from .tool_run import CallOutcome, CallRunner
from .tools.spec import ToolOutput
from .transcript import Transcript

LABEL = REMINDER_LABEL
"""Begins every notice, so that the model can tell the runtime from the person."""

UNREADABLE_CALL = "unreadable_call"
"""The name under which the result of a call that could not be read is logged."""


LINE_SLACK_TOKENS = 2
"""What a line behind a result may take beyond its own count, by a token that is cut otherwise where they meet."""

_CUT = "the last reply was cut at its token limit"
_REPEATS = "the last reply was cut at its token limit and not continued, since it repeats itself"
_SILENT = "the model said nothing"


class _TurnOver(Exception):
    """Ends the turn from any depth."""

    def __init__(self, reason: TurnEndReason, detail: str = "") -> None:
        super().__init__(detail)
        self.reason, self.detail = reason, detail


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnLimits:
    """`rounds` is how many replies a turn may take, `continuations` how often a cut one may go on."""

    rounds: int = 24
    continuations: int = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnParts:
    """What a turn works with: the session's own parts."""

    engine: Engine
    transcript: Transcript
    requester: Requester
    dialect: Dialect
    runner: CallRunner
    gate: Gate
    offers: Offers
    budgets: Budgets
    limits: TurnLimits
    modes: Modes
    pending_mode: PendingMode
    desk: PlanDesk
    prefix: PrefixWatch


@dataclass(slots=True, kw_only=True)
class Turn:
    """Runs one turn. `mentions` are the files that the person attached."""

    parts: TurnParts
    cancel: Cancel
    choice: ToolChoice
    mentions: Sequence[Mention] = ()
    _rounds: int = 0
    _steps: int = 0
    _last_text: str = ""
    _shortfall: str = ""
    _unreadable_seen: set[str] = field(default_factory=set)
    _seen: list[StepCall] = field(default_factory=list)
    _hinted: set[str] = field(default_factory=set)
    _stuck: StuckDetector = field(default_factory=StuckDetector)

    def run(self, message: UserMessage) -> Generator[StreamEvent, None, None]:
        """Run the turn; the last event is `TurnEnded`. A host that stops iterating interrupts it.

        Raises LogError where the log cannot be written: what was written before stands.
        """
        transcript = self.parts.transcript
        number = transcript.start_turn()
        try:
            yield TurnStarted(turn=number)
            yield from self._switch_mode()
            yield from self.parts.prefix.tell(gate=self.parts.gate, left_tokens=partial(self._left_before, message))
            transcript.user(message)
            yield from self._open_plans()
            yield from self._attach()
            yield from self._work()
            end = _TurnOver(TurnEndReason.COMPLETED, self._shortfall or ("" if self._last_text else _SILENT))
        except _TurnOver as over:
            end = over
        except NoRoom as error:
            end = _TurnOver(TurnEndReason.NO_ROOM, str(error))
        except LogError:
            raise
        except ChapbookError as error:
            end = _TurnOver(TurnEndReason.ERROR, str(error))
        except GeneratorExit:
            transcript.recover()
            self.parts.requester.rest()
            raise
        transcript.end_turn(end.reason, rounds=self._rounds, detail=end.detail)
        self.parts.requester.rest()
        yield from self._tell_person(self.parts.desk.end_report())
        yield TurnEnded(turn=number, reason=end.reason, rounds=self._rounds, text=self._last_text, detail=end.detail)

    def _attach(self) -> Iterator[StreamEvent]:
        """Make the calls that the person's mentions stand for, one after another."""
        for mention in self.mentions:
            call = self.parts.runner.mention_call(mention, self.parts.transcript.next_call_id())
            self.parts.transcript.runtime_call(call, self.parts.dialect.render_call(call.name, call.arguments))
            yield from self._run_calls((call,), author=Author.RUNTIME)

    def _work(self) -> Iterator[StreamEvent]:
        limits = self.parts.limits
        for self._rounds in range(1, limits.rounds + 1):
            yield from self._tell_round()
            reply = yield from self._reply()
            yield from self._run_calls(reply.calls, problems=reply.parsed.problems)
            yield from self._end_step(reply.usage)
            if self.cancel.is_set:
                raise _TurnOver(TurnEndReason.INTERRUPTED, "cancelled while its calls ran")
            if not reply.calls and not reply.parsed.problems:
                return
            self._refuse_repeated(reply.parsed.problems)
            yield from self._look_whether_stuck()
        raise _TurnOver(TurnEndReason.ROUND_CAP, f"the turn took all of its {limits.rounds} rounds")

    def _reply(self) -> Generator[StreamEvent, None, _Reply]:
        """Ask for one reply; one that is cut at its token limit goes on in further steps."""
        so_far = NO_TOKENS
        for continuation in range(self.parts.limits.continuations + 1):
            self.parts.requester.check_room(continues=continuation > 0)
            self._steps += 1
            answer = yield from self.parts.requester.request(
                Asked(
                    step=self._steps,
                    grammar=self.parts.offers.grammar(self._choice()),
                    tool_choice=self._choice().name or self._choice().kind,
                    cancel=self.cancel,
                    so_far=so_far,
                    keep=partial(self._keep, so_far),
                )
            )
            if answer.report is None:
                yield from self._end_step(answer.usage)
                raise _TurnOver(TurnEndReason.INTERRUPTED, "cancelled during the prefill")
            so_far = concat_tokens((so_far, answer.report.tokens))
            goes_on = was_cut(answer) and continuation < self.parts.limits.continuations
            self._shortfall = _CUT if was_cut(answer) else ""
            if goes_on and repeats_itself(self._text_of(so_far)):
                goes_on, self._shortfall = False, _REPEATS
            reply = self._record(answer.report, so_far=so_far, usage=answer.usage, whole=not goes_on)
            if answer.report.finish is FinishReason.CANCELLED:
                yield from self._end_step(answer.usage)
                raise _TurnOver(TurnEndReason.INTERRUPTED, "cancelled during the reply")
            if not goes_on:
                break
            yield from self._end_step(answer.usage)
        rest = _unshown(reply.parsed.text, answer.text_shown)
        if rest:
            yield TextDelta(text=rest)
        return reply

    def _record(self, report: GenerationReport, *, so_far: TokenIds, usage: StepUsage, whole: bool) -> _Reply:
        """Write a reply to the log. Calls count only in a whole one."""
        text = self._text_of(so_far)
        parsed = self.parts.dialect.parse(text, reasoning=self.parts.transcript.composer.chat_format.reasoning)
        if self.choice.kind is ChoiceKind.NONE:
            # Without a grammar a model can still write a call; it was told to answer, and nothing runs.
            parsed = msgspec.structs.replace(parsed, calls=(), problems=())
        calls: tuple[LoggedCall, ...] = ()
        if whole and report.finish is not FinishReason.CANCELLED:
            calls = tuple(
                LoggedCall(id=self.parts.transcript.next_call_id(), name=call.name, arguments=call.arguments)
                for call in parsed.calls
            )
        self.parts.transcript.reply(report, text=parsed.text, reasoning=parsed.reasoning, calls=calls)
        self._last_text = parsed.text
        return _Reply(parsed=parsed, calls=calls, usage=usage)

    def _keep(self, so_far: TokenIds, report: GenerationReport, usage: StepUsage) -> None:
        """Record a reply that was broken off: what was evaluated stays, as after a cancel."""
        self._record(report, so_far=concat_tokens((so_far, report.tokens)), usage=usage, whole=False)
        self.parts.transcript.end_step(step=self._steps, usage=usage)

    def _text_of(self, tokens: TokenIds) -> str:
        return self.parts.engine.detokenize(tokens).decode("utf-8", "replace")

    def _run_calls(
        self,
        calls: Sequence[LoggedCall],
        *,
        problems: Sequence[CallProblem] = (),
        author: Author = Author.MODEL,
    ) -> Iterator[StreamEvent]:
        """Run a reply's calls and commit their results in call order, through the gate together."""
        if not calls and not problems:
            return
        by_runtime = author is Author.RUNTIME
        for call in calls:
            yield ToolStarted(call=call, by_runtime=by_runtime)
        limit_tokens = self._arrival_tokens(author)
        outcomes = [self._unreadable(problem) for problem in problems]
        if calls:
            page_tokens = page_share(
                arrival_tokens=limit_tokens, left_tokens=self._left_tokens(calls), calls=len(calls)
            )
            ran = self.parts.runner.run(
                calls,
                before_bodies=lambda started: self.parts.transcript.tool_calls(started, author=author),
                cancel=self.cancel,
                arrival_tokens=page_tokens,
            )
            outcomes = [*ran, *outcomes]
        yield from self._commit(outcomes, author=author)

    def _commit(self, outcomes: Sequence[CallOutcome], *, author: Author) -> Iterator[StreamEvent]:
        limit_tokens = self._arrival_tokens(author)
        transcript = self.parts.transcript
        offered = [_offered(one, limit_tokens) for one in outcomes]
        added = [_offered_by_hook(one, context, limit_tokens) for one in outcomes for context in one.context_added]
        left_tokens = self._left_tokens([one.call for one in outcomes], notices=len(added))
        line = self._ledger_line() if author is Author.MODEL else ""
        if line:
            left_tokens -= self.parts.gate.count(Shape.TOOL, f"\n{line}") + LINE_SLACK_TOKENS
        admitted = self.parts.gate.admit([*offered, *added], left_tokens=left_tokens)
        results = list(admitted[: len(offered)])
        if line and sum(one.tokens for one in admitted) <= left_tokens:
            results[-1] = self.parts.gate.with_line(results[-1], line)
        self._seen = [_seen(one, entering) for one, entering in zip(outcomes, results, strict=True)]
        # All of them are in the log before the host hears of one: it may stop reading at any event.
        for one, entering in zip(outcomes, results, strict=True):
            # What a result says has happened is in the log before it.
            for effect in self.parts.desk.take_effects(one.call.id):
                transcript.record(effect)
            transcript.result(one.call, entering, seconds=one.seconds)
        notices = [_hook_notice(entering) for entering in admitted[len(offered) :]]
        for notice in notices:
            transcript.notice(notice)
        for one, entering in zip(outcomes, results, strict=True):
            yield _finished(one, entering)
        for notice in notices:
            yield NoticeGiven(producer=notice.producer, text=notice.text)
        for problem in (problem for one in outcomes for problem in one.hook_problems):
            yield NoticeGiven(producer="hook", text=problem, to_model=False)
        yield from self._tell_person(*self.parts.desk.take_told())

    def _ledger_line(self) -> str:
        """Return the line that rides on the step's last result; empty without a ledger."""
        line = self.parts.desk.line(round=self._rounds, rounds=self.parts.limits.rounds, count=self._line_tokens)
        return f"[{line}]" if line else ""

    def _line_tokens(self, line: str) -> int:
        """Count a ledger's line as it stands behind a result."""
        return self.parts.gate.count(Shape.TOOL, f"\n[{line}]")

    def _left_tokens(self, calls: Sequence[LoggedCall], *, notices: int = 0) -> int:
        """Return what the results of `calls`, and so many notices, may take besides their own markup."""
        framing: list[Event] = [
            *(ToolResult(call_id=call.id, name=call.name, content="") for call in calls),
            *(Notice(producer="hook", form="context", text="") for _ in range(notices)),
        ]
        return self.parts.budgets.left_tokens(self.parts.transcript.opened_tokens(before=framing))

    def _left_before(self, message: UserMessage, notice: Notice) -> int:
        """Return what the text of a notice may take that stands before the person's message."""
        return self.parts.budgets.left_tokens(self.parts.transcript.opened_tokens(before=[notice, message]))

    def _unreadable(self, problem: CallProblem) -> CallOutcome:
        call = LoggedCall(id=self.parts.transcript.next_call_id(), name=UNREADABLE_CALL, arguments={})
        content = f"This call could not be read: {problem.problem}. Write it like this: {problem.expected}"
        return CallOutcome(call=call, output=ToolOutput(content=content, is_error=True), seconds=0.0, ran=False)

    def _refuse_repeated(self, problems: Sequence[CallProblem]) -> None:
        """End the turn where the same unreadable call comes again: each is explained once."""
        for problem in problems:
            if problem.problem in self._unreadable_seen:
                raise _TurnOver(TurnEndReason.ERROR, f"the model's call could not be read, twice: {problem.problem}")
            self._unreadable_seen.add(problem.problem)

    def _look_whether_stuck(self) -> Iterator[StreamEvent]:
        verdict = self._stuck.observe(self._seen)
        if verdict is None:
            return
        if verdict.kind in self._hinted:
            raise _TurnOver(TurnEndReason.STUCK, verdict.hint)
        self._hinted.add(verdict.kind)
        yield from self._notice(Notice(producer="stuck", form="hint", text=f"{LABEL} {verdict.hint}"))

    def _tell_round(self) -> Iterator[StreamEvent]:
        """State the round in the last quarter, so that the model can spend the last ones on what was asked."""
        rounds = self.parts.limits.rounds
        if rounds > 1 and self._rounds > rounds - rounds // 4:
            text = f"{LABEL} round {self._rounds} of {rounds}"
            yield from self._notice(Notice(producer="rounds", form="line", text=text))

    def _notice(self, notice: Notice) -> Iterator[StreamEvent]:
        self.parts.transcript.notice(notice)
        yield NoticeGiven(producer=notice.producer, text=notice.text)

    def _end_step(self, usage: StepUsage) -> Iterator[StreamEvent]:
        self.parts.transcript.end_step(step=self._steps, usage=usage)
        yield StepEnded(turn=self.parts.transcript.turn, step=self._steps, usage=usage)
        yield from self._switch_mode()

    def _open_plans(self) -> Iterator[StreamEvent]:
        """Say once what of plans on the disk concerns this session."""
        for text in self.parts.desk.opening_notices():
            yield from self._notice(Notice(producer="plan", form="opening", text=f"{LABEL} {text}"))
        yield from self._tell_person(*self.parts.desk.take_told())

    def _tell_person(self, *texts: str) -> Iterator[StreamEvent]:
        for text in texts:
            if text:
                yield NoticeGiven(producer="plan", text=text, to_model=False)

    def _switch_mode(self) -> Iterator[StreamEvent]:
        """Bring the mode into force that was asked for last, and tell the model where it knows of another one."""
        transcript, pending = self.parts.transcript, self.parts.pending_mode
        wanted = pending.wanted
        if wanted is not None:
            if wanted != transcript.state.mode:
                transcript.set_mode(wanted)
            pending.applied(wanted)
        state = transcript.state
        notice = self.parts.modes.notice(state.mode, told=state.told_mode)
        if notice is not None:
            yield from self._notice(Notice(producer=MODE_PRODUCER, form=notice.mode, text=f"{LABEL} {notice.text}"))

    def _choice(self) -> ToolChoice:
        """A required call is required of the first reply only: else the turn could not end."""
        forced = self.choice.kind in (ChoiceKind.REQUIRED, ChoiceKind.NAMED)
        return ToolChoice() if forced and self._rounds > 1 else self.choice

    def _arrival_tokens(self, author: Author) -> int:
        budgets = self.parts.budgets
        return budgets.mention_tokens if author is Author.RUNTIME else budgets.arrival_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class _Reply:
    parsed: ParsedReply
    calls: tuple[LoggedCall, ...]
    usage: StepUsage


def _offered(outcome: CallOutcome, limit_tokens: int) -> Offered:
    call = outcome.call
    return Offered(
        source=call.name if outcome.ran else f"{call.name}, which was not run",
        arguments=call_arguments(call),
        output=outcome.output,
        limit_tokens=limit_tokens,
        repeatable=outcome.ran,
    )


def _offered_by_hook(outcome: CallOutcome, context: str, limit_tokens: int) -> Offered:
    return Offered(
        source=f"a hook of {outcome.call.name}",
        output=ToolOutput(content=context),
        limit_tokens=limit_tokens,
        lead=f"{LABEL} added by a hook:\n",
        shape=Shape.USER,
        repeatable=False,
    )


def _hook_notice(entering: Admitted) -> Notice:
    return Notice(producer="hook", form="context", text=entering.content, artifact=entering.artifact)


def _seen(outcome: CallOutcome, entering: Admitted) -> StepCall:
    """Return a call as the stuck detector sees it: with what the model read of its result."""
    return StepCall(
        name=outcome.call.name,
        arguments=outcome.call.arguments,
        result_hash=sha256(entering.content.encode()).hexdigest(),
        is_error=entering.is_error,
    )


def _finished(outcome: CallOutcome, entering: Admitted) -> ToolFinished:
    return ToolFinished(
        call_id=outcome.call.id,
        name=outcome.call.name,
        content=entering.content,
        is_error=entering.is_error,
        artifact=entering.artifact,
        is_stub=entering.is_stub,
        size_bytes=entering.size_bytes,
        redacted=entering.redacted,
        tokens=entering.tokens,
        seconds=outcome.seconds,
    )


def _unshown(text: str, shown: str) -> str:
    """Return what of the parsed text was not shown while it came."""
    seen = shown.strip()
    return text[len(seen) :] if text.startswith(seen) else ""
