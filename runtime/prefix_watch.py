"""Watches what a session prefix is composed of: a change is recorded, and told once; the prefix in force stays.

Only a resume that asks for it (`adopt`) puts another prefix into force.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from msgspec.structs import replace

from ..compaction.budget import Budgets
from ..compaction.plans import REMINDER_LABEL
from ..kernels.errors import ChapbookError, NoRoom
from .chat_format import Shape
from .events import HeaderReason, Notice, RequestHeader, UserMessage
from .gate import Admitted, Gate, Offered
from .prefix_drift import INSTRUCTIONS, concerns_model, describe_drift, header_drift
from .prefix_source import FileMark, PrefixSource
from .projection import PREFIX_PRODUCER, plan_recovery
from .session_prefix import require_room
from .stream import NoticeGiven
from .tools.spec import ToolOutput
from .transcript import Transcript


@dataclass(slots=True, kw_only=True)
class PrefixWatch:
    """One session's prefix, against what it would be now."""

    source: PrefixSource
    transcript: Transcript
    _mark: FileMark | None = None
    _instructions: str | None = None
    _for_host: list[str] = field(default_factory=list)
    _failed: str = ""
    _no_room_said: bool = False

    def look(self) -> None:
        """Compose again if the instructions may have changed since the last look, and record a drift that is new.

        What cannot be composed is for the host to know; the session goes on with the prefix that it has.
        Raises LogError alone.
        """
        try:
            mark = self.source.mark()
            if mark == self._mark:
                return
            self._instructions = self.source.read()
            fresh = self.source.compose(self._instructions)
        except ChapbookError as error:
            self._say_failed(str(error))
            return
        self._mark, self._failed = mark, ""
        state = self.transcript.state
        in_force = state.header
        assert in_force is not None, "a session that is open has a prefix"
        new = header_drift(state.composed_header or in_force, fresh)
        if not new:
            return
        drifted = header_drift(in_force, fresh)
        self.transcript.record(replace(fresh, reason=HeaderReason.RESUME, drifted=drifted))
        names = [drift.name for drift in new]
        if not concerns_model(names):
            self._for_host.append(
                f"{describe_drift(in_force, fresh, names)}. What the session began with stays in force"
            )

    def tell(self, *, gate: Gate, left_tokens: Callable[[Notice], int]) -> Iterator[NoticeGiven]:
        """Look, and tell the model, once, of what drifted. `left_tokens` is what the text of a notice may take.

        The instructions as they are now stand in it, or a stub of them.
        """
        self.look()
        for text in self._for_host:
            yield NoticeGiven(producer=PREFIX_PRODUCER, text=text, to_model=False)
        self._for_host.clear()
        state = self.transcript.state
        in_force, now = state.header, state.composed_header
        if in_force is None or now is None:
            return
        names = [drift.name for drift in header_drift(state.told_header or in_force, now)]
        if not concerns_model(names):
            return
        left = left_tokens(Notice(producer=PREFIX_PRODUCER, form="drift", text=""))
        admitted = self._admitted(in_force, now, names, gate=gate, left_tokens=left)
        if admitted.is_error or admitted.tokens > left:
            yield from self._say_no_room(describe_drift(in_force, now, names))
            return
        notice = Notice(producer=PREFIX_PRODUCER, form="drift", text=admitted.content, artifact=admitted.artifact)
        self.transcript.notice(notice)
        yield NoticeGiven(producer=notice.producer, text=notice.text)

    def adoptable(self, budgets: Callable[[RequestHeader], Budgets]) -> RequestHeader | None:
        """Return the prefix as it is now, for `adopt`; None where it is the one in force. Nothing is written.

        Raises ContextTooSmall or NoRoom, with the numbers, where the window has no room for it and the messages, and
        what stands in the way of composing it.
        """
        fresh = self.source.compose(self.source.read())
        state = self.transcript.state
        assert state.header is not None, "a session that is open has a prefix"
        drifted = header_drift(state.header, fresh)
        if not drifted:
            return None
        budget = budgets(fresh)
        require_room(budget.n_ctx, prefix=fresh.sections, smallest_tokens=budget.smallest_window_tokens)
        before_tokens = sum(section.tokens for section in state.header.sections)
        opened = self.transcript.opened_tokens(before=[*plan_recovery(state).results, UserMessage(text="")])
        _require_room_for_messages(opened - before_tokens, before_tokens=before_tokens, budget=budget)
        return replace(fresh, reason=HeaderReason.CHANGE, drifted=drifted)

    def adopt(self, header: RequestHeader) -> None:
        """Put what `adoptable` returned into force. On disk when this returns."""
        in_force = self.transcript.state.header
        assert in_force is not None, "a session that is open has a prefix"
        said = describe_drift(in_force, header, [drift.name for drift in header.drifted])
        self.transcript.adopt(header)
        self._for_host.append(f"a new session prefix is in force: {said}. What stands behind it is evaluated again")

    def _admitted(
        self, in_force: RequestHeader, now: RequestHeader, names: list[str], *, gate: Gate, left_tokens: int
    ) -> Admitted:
        head = (
            f"{REMINDER_LABEL} since this session began: {describe_drift(in_force, now, names)}. "
            "What it began with stays in force."
        )
        shows = INSTRUCTIONS in names and self._instructions is not None
        offered = Offered(
            source=self.source.instructions if shows else "a notice",
            output=ToolOutput(content=self._instructions or "" if shows else head),
            limit_tokens=gate.arrival_tokens,
            lead=f"{head} {self.source.instructions} says now:\n" if shows else "",
            shape=Shape.USER,
            repeatable=False,
        )
        return gate.admit([offered], left_tokens=left_tokens)[0]

    def _say_failed(self, why: str) -> None:
        """Say once why it cannot be composed; what stands in the way may be gone at the next look."""
        self._mark = self._instructions = None
        if why != self._failed:
            self._failed = why
            self._for_host.append(f"the session prefix stays as it was recorded, since it cannot be made anew: {why}")

    def _say_no_room(self, what: str) -> Iterator[NoticeGiven]:
        if not self._no_room_said:
            self._no_room_said = True
            text = f"the model was not told, for want of room or of a place to store it: {what}"
            yield NoticeGiven(producer=PREFIX_PRODUCER, text=text, to_model=False)


def _require_room_for_messages(messages_tokens: int, *, before_tokens: int, budget: Budgets) -> None:
    opened = budget.prefix_tokens + messages_tokens
    if opened <= budget.usable_tokens:
        return
    raise NoRoom(
        f"the session prefix would be {budget.prefix_tokens:,} tokens now, {before_tokens:,} were recorded: with the "
        f"{messages_tokens:,} of the messages the next request would be {opened:,}, and with a reply reserve of "
        f"{budget.reply_reserve_tokens:,} the window of {budget.n_ctx:,} takes {budget.usable_tokens:,}. Nothing was "
        "changed: resume without recompose, or with a larger n_ctx, or shorten the instructions.",
        n_ctx=budget.n_ctx,
        window_tokens=opened,
        reply_reserve_tokens=budget.reply_reserve_tokens,
        by_segment={"prefix": budget.prefix_tokens, "messages": messages_tokens},
    )
