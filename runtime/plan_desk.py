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
    shown,
    start_plan,
    task_key,
)
from ..compaction.ledger_file import LedgerFile
from ..compaction.ledger_lines import difference_notice, end_report, foreign_notice, ledger_line, status_text
from ..compaction.plans import PlanVerdict, heading_of, strip_reminders
from ..kernels.errors import ArtifactError, LedgerError, UsageError
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
    _recorded: Ledger | None = None
    _opened: bool = False
    _complaint: str = ""
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
            return failed("a plan begins with a # heading, one of the first level. Add one, and submit it again.")
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
        """Begin a ledger, or hand back the one that is not finished. Raises ToolError by the ledger's rules, and
        LedgerError."""
        current = self._load()
        related = Relation.SAME if current is None else self._relation(current)
        started = start_plan(
            current, task=task, steps=steps, replace=replace, relation=related, session=self.session, key=self._key
        )
        text = started.text
        if started.set_aside is not None:
            text += f" It is kept in {self.file.set_aside(started.set_aside).name}."
        self.file.save(started.ledger)
        self._recorded = started.ledger
        self._did(call_id, LedgerSet(ledger=started.ledger))
        return ToolOutput(content=text)

    def mark(self, call_id: CallId, *, id: str, state: StepState, note: str) -> ToolOutput:
        """Mark a step. Raises ToolError for one that is not there, and LedgerError."""
        current = self._own()
        marked = mark_step(current, id=id, state=state, note=note)
        self.file.save(marked.ledger)
        if current is not None and current != self._acts:
            # Else the log would say that a step was marked, and not of which plan.
            self._did(call_id, LedgerSet(ledger=current))
        self._recorded = marked.ledger
        step = marked.step
        self._did(call_id, LedgerStepMarked(id=step.id, state=step.state, note=step.note))
        return ToolOutput(content=marked.text)

    def status(self) -> ToolOutput:
        """Show the ledger. Raises LedgerError."""
        return ToolOutput(content=status_text(self._own()))

    def step_ids(self) -> tuple[str, ...]:
        """Return the ids of the steps that may be marked now."""
        current = self._seen()
        return () if current is None else current.markable_ids

    def close(self) -> PlanClosed | None:
        """End the plan in force, as a person asked; None where there is none.

        Raises LedgerError, and UsageError where nothing tells yet whether the stored plan is of this session's task.
        """
        current = self._own()
        if current is None or current.closed:
            return None
        if not self._prompt and current.session != self.session:
            raise UsageError(
                f"the stored plan, {shown(current.task, limit=120)}, was begun by session {current.session}, and this "
                "one has no task yet: resume that session to close it"
            )
        self.file.save(close_plan(current))
        self._recorded = None  # from here on the log says it
        return PlanClosed(task=current.task)

    def line(self, *, round: int | None, rounds: int | None, count: Callable[[str], int]) -> str:
        """Return the line that rides on a step's last result; empty without a ledger."""
        return ledger_line(self._shown(), round=round, rounds=rounds, count=count)

    def opening_notices(self) -> tuple[str, ...]:
        """Return what is to be said once, when the first turn after opening begins."""
        if self._opened:
            return ()
        self._opened = True
        stored, told = self._seen(every=True), self.notices()
        foreign = stored if stored is not None and self._relation(stored) is Relation.DIFFERENT else None
        acts = self._acts
        difference = (
            ""
            if acts is None
            else difference_notice(
                acts, None if foreign is not None else stored, set_aside=self.file.set_aside_of(self.session)
            )
        )
        if any(difference in text for text in told):
            difference = ""
        mention = "" if foreign is None else foreign_notice(foreign, told)
        return tuple(text for text in (difference, mention) if text)

    def end_report(self) -> str:
        """Return what is left, for the person; empty without a ledger."""
        return end_report(self._shown())

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

    @property
    def _acts(self) -> Ledger | None:
        """The plan as this session's log has it, or will have it once a call that has just ended is logged."""
        return self._recorded or self.state().ledger

    def _relation(self, ledger: Ledger) -> Relation:
        return relation(ledger, session=self.session, key=self._key, prompt=self._prompt)

    def _load(self) -> Ledger | None:
        """Return the stored plan, whosever it is: read anew each time, since other sessions and people write it too.

        Raises LedgerError.
        """
        loaded = self.file.load()
        if loaded.quarantined is not None:
            moved = f"it was moved to {loaded.quarantined.name}"
            self._told.append(f"{self.file.path} is no plan that can be read: {moved}")
        return loaded.ledger

    def _own(self) -> Ledger | None:
        """Return the ledger that is this session's: its own, or that of another run of the same task."""
        stored = self._load()
        return None if stored is None or self._relation(stored) is Relation.DIFFERENT else stored

    def _seen(self, *, every: bool = False) -> Ledger | None:
        """Return the ledger, of another task too with `every`; none where it cannot be read, which the person is told
        once."""
        try:
            return self._load() if every else self._own()
        except LedgerError as error:
            if str(error) != self._complaint:
                self._complaint = str(error)
                self._told.append(self._complaint)
            return None

    def _shown(self) -> Ledger | None:
        """Return the ledger as far as there is something to say of it: one that others finished does not come back."""
        current = self._seen()
        return None if current is not None and current.is_finished and self._acts is None else current

    def _did(self, call_id: CallId, event: Event) -> None:
        self._effects.setdefault(call_id, []).append(event)
