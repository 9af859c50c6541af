"""What a session does with plans: it has one reviewed, keeps the ledger of its steps, and says what is left.

The tools' bodies call it; what they did is taken by the turn, which logs it right after the call's result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from traceback import format_exception_only

from ..compaction.artifacts import ArtifactStore
from ..compaction.ledger import (
    Ledger,
    Relation,
    StepState,
    TaskKey,
    close_plan,
    mark_step,
    relation,
    start_plan,
    task_key,
)
from ..compaction.ledger_file import LedgerFile
from ..compaction.ledger_lines import difference_notice, end_report, foreign_notice, ledger_line, status_text
from ..compaction.plans import PlanVerdict, heading_of, strip_reminders
from ..kernels.errors import ArtifactError, ChapbookError
from .calls import CallId
from .events import (
    Event,
    LedgerSet,
    LedgerStepMarked,
    PlanClosed,
    PlanSubmitted,
    PlanVerdictGiven,
    SessionId,
)
from .log_format import clean_text
from .modes import DEFAULT_MODE, PLAN_MODE, PendingMode
from .plan_review import Reviewed, Reviewer, SubmittedPlan, failed, review_of
from .projection import SessionState
from .tools.spec import ToolOutput


@dataclass(slots=True, kw_only=True)
class PlanDesk:
    """The plans of one session. `state` gives the fold over its log, `notices` the texts of its notices, `record`
    writes an event to it, on the turn's thread."""

    session: SessionId
    state: Callable[[], SessionState]
    notices: Callable[[], Sequence[str]]
    record: Callable[[Event], None]
    artifacts: ArtifactStore
    file: LedgerFile
    pending_mode: PendingMode
    review: Reviewer | None = None
    _stored: Ledger | None = None
    _loaded: bool = False
    _foreign: Ledger | None = None
    _effects: dict[CallId, list[Event]] = field(default_factory=dict)
    _told: list[str] = field(default_factory=list)

    def submit(self, call_id: CallId, text: str) -> ToolOutput:
        """Have a plan reviewed; its bytes are stored before anybody sees it."""
        text = strip_reminders(text, self.notices())
        title = heading_of(text) or ""
        try:
            stored = self.artifacts.put(text.encode("utf-8", "replace"))
        except ArtifactError as error:
            reviewed = failed(f"it could not be stored: {error}")
        else:
            # At once: a person who is asked may look it up meanwhile, and a crash must not lose where it is.
            self.record(
                PlanSubmitted(call_id=call_id, title=title, artifact=stored.sha256, size_bytes=stored.size_bytes)
            )
            reviewed = self._reviewed(SubmittedPlan(title=title, text=text, artifact=stored.sha256))
        feedback = clean_text(reviewed.feedback).text
        self._did(call_id, PlanVerdictGiven(call_id=call_id, verdict=reviewed.verdict, feedback=feedback))
        if reviewed.to_reviewer:
            self._told.append(reviewed.to_reviewer)
        if reviewed.verdict is PlanVerdict.APPROVED:
            self.pending_mode.ask(DEFAULT_MODE)
        return ToolOutput(content=reviewed.text, is_error=reviewed.verdict is not PlanVerdict.APPROVED)

    def _reviewed(self, plan: SubmittedPlan) -> Reviewed:
        if self.state().mode != PLAN_MODE:
            return failed("exit_plan_mode is for plan mode, which is not on. Go on with the task itself.")
        if not plan.title:
            return failed("a plan begins with a # heading. Add one, and submit it again.")
        if self.pending_mode.wanted not in (None, PLAN_MODE):
            return failed("plan mode ends with this step, so no other plan is reviewed in it.")
        if self.review is None:
            return failed("there is nobody to review it here. It is not approved; say so in your answer.")
        try:
            return review_of(self.review(plan))
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # a reviewer is foreign code: one that fails, or is cancelled, decided nothing
            problem = "".join(format_exception_only(error)).strip()
            return failed(f"the review failed ({problem}). Nothing is approved.")

    def start(self, call_id: CallId, *, task: str, steps: Sequence[str], replace: bool) -> ToolOutput:
        """Begin a ledger, or hand back the one that is not finished. Raises ToolError by the ledger's rules."""
        current, key, related = self._current(), self._key, Relation.SAME
        if current is not None:
            related = relation(current, session=self.session, key=key, prompt=self._prompt)
        if self._foreign is not None and current is None:
            current, related = self._foreign, Relation.DIFFERENT
        started = start_plan(
            current, task=task, steps=steps, replace=replace, relation=related, session=self.session, key=key
        )
        text = started.text
        if started.set_aside is not None:
            text += f" It is kept in {self.file.set_aside(started.set_aside).name}."
        self.file.save(started.ledger)
        self._stored, self._foreign = started.ledger, None
        self._did(call_id, LedgerSet(ledger=started.ledger))
        return ToolOutput(content=text)

    def mark(self, call_id: CallId, *, id: str, state: StepState, note: str) -> ToolOutput:
        """Mark a step. Raises ToolError for one that is not there."""
        marked = mark_step(self._current(), id=id, state=state, note=note)
        self.file.save(marked.ledger)
        self._stored = marked.ledger
        step = next(step for step in marked.ledger.steps if step.id == id)
        self._did(call_id, LedgerStepMarked(id=id, state=step.state, note=step.note))
        return ToolOutput(content=marked.text)

    def status(self) -> ToolOutput:
        """Show the ledger."""
        return ToolOutput(content=status_text(self._current()))

    def close(self) -> PlanClosed | None:
        """End the plan in force, as a person asked; None where there is none."""
        current = self._current()
        if current is None or current.closed:
            return None
        self._stored = close_plan(current)
        self.file.save(self._stored)
        return PlanClosed(task=current.task)

    def line(self, *, round: int | None, rounds: int | None, count: Callable[[str], int]) -> str:
        """Return the line that rides on a step's last result; empty without a ledger."""
        return ledger_line(self._current(), round=round, rounds=rounds, count=count)

    def opening_notices(self) -> tuple[str, ...]:
        """Return what is to be said once, when the first turn after opening begins."""
        if self._loaded:
            return ()
        acts = self.state().ledger
        current = self._current()
        difference = difference_notice(acts, current) if acts is not None else ""
        foreign = "" if self._foreign is None else foreign_notice(self._foreign)
        return tuple(text for text in (difference, foreign) if text)

    def end_report(self) -> str:
        """Return what is left, for the person; empty without a ledger."""
        return end_report(self._current())

    def take_effects(self, call_id: CallId) -> tuple[Event, ...]:
        """Return what a call did, once, for the log."""
        return tuple(self._effects.pop(call_id, ()))

    def take_told(self) -> tuple[str, ...]:
        """Return what is to be said to the person, once."""
        told, self._told = tuple(self._told), []
        return told

    @property
    def _prompt(self) -> str:
        return self.state().first_user_text

    @property
    def _key(self) -> TaskKey | None:
        return task_key(self._prompt) if self._prompt else None

    def _current(self) -> Ledger | None:
        """Return the ledger that is this session's: its own, or that of an earlier run of the same task."""
        if not self._loaded:
            self._loaded = True
            try:
                stored = self.file.load().ledger
            except ChapbookError as error:
                self._told.append(str(error))
                stored = None
            if stored is not None:
                related = relation(stored, session=self.session, key=self._key, prompt=self._prompt)
                if related is Relation.DIFFERENT:
                    self._foreign = stored
                else:
                    self._stored = stored
        return self._stored

    def _did(self, call_id: CallId, event: Event) -> None:
        self._effects.setdefault(call_id, []).append(event)
