"""What is shown of a plan ledger: the line in the window, the notices, the report at a turn's end, the status.

Text that an agent wrote is shown on one line, without control characters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Final

from .ledger import Ledger, LedgerStep, StepState, marking_call, shown, step_line
from .quoting import quantity

LINE_TOKENS: Final = 60
NUDGED_TOKENS: Final = 110
ITEM_CHARS: Final = 40
LINE_ITEMS: Final = 2
SECOND_WAY_ROUND: Final = 3
"""From this round on a line without any mark says how to begin anew."""

_ITEM_FORMS: Final = (
    (LINE_ITEMS, ITEM_CHARS),
    (LINE_ITEMS, 24),
    (LINE_ITEMS, 12),
    (1, 24),
    (1, 12),
    (LINE_ITEMS, 0),
    (1, 0),
)
"""How many items with how many characters of each, the fullest first. With none they are ids alone."""

_NOTICE_TASK_CHARS: Final = 120
_SECOND_WAY = 'or, if the steps are not these, plan_start with the real steps and "replace":true'


def ledger_line(ledger: Ledger | None, *, round: int | None, rounds: int | None, count: Callable[[str], int]) -> str:
    """Return the line that rides on a step's last tool result; empty without a ledger, and for a closed plan.

    At most 60 tokens by `count`, 110 where it says how to mark a step, since none ever was. Where that is tight, items
    get shorter, then fewer, then the hint and the round go. `count` is asked for 26 texts at most.
    """
    if ledger is None or ledger.closed:
        return ""
    clause = "" if round is None or rounds is None else f"round {round} of {rounds}"
    for hint in _hints(ledger, round):
        limit_tokens = NUDGED_TOKENS if hint else LINE_TOKENS
        for remaining in _remaining(ledger):
            line = _joined(_done(ledger), remaining, clause, hint)
            if count(line) <= limit_tokens:
                return line
    for line in (_joined(_done(ledger), clause), _done(ledger)):
        if count(line) <= LINE_TOKENS:
            return line
    return ""


def foreign_notice(ledger: Ledger, told: Sequence[str] = ()) -> str:
    """Return what is said once of a stored plan of another task: how many steps are left, of which task.

    Empty for one that is finished, since nothing is to be kept of it, and where the notices `told` mention its task.
    """
    mention = f"outstanding: {shown(ledger.task, limit=_NOTICE_TASK_CHARS)}. It is not part of this task"
    if ledger.is_finished or any(mention in text for text in told):
        return ""
    return (
        f"A plan of another task is stored, {len(ledger.outstanding)} of {quantity(len(ledger.steps), 'step')} "
        f"{mention}; plan_start sets it aside."
    )


def difference_notice(acts: Ledger | None, stored: Ledger | None, *, set_aside: str = "") -> str:
    """Return what is said at a resume where this session's `acts` and the `stored` plan differ; empty where not.

    `set_aside` names the file in which this session's plan was kept when one of another task took its place.
    """
    if acts == stored:
        return ""
    if stored is None and acts is not None and set_aside and not acts.is_finished:
        head = f"This session's plan was set aside in {set_aside}, since a plan of another task was begun"
        return _with_steps(f"{head}. plan_start with its steps begins it again: {_head(acts)}", acts.outstanding)
    if stored is None:
        return "The plan that this session recorded is no longer stored: it is not in force."
    if acts is None or (acts.session, acts.task) != (stored.session, stored.task) or _texts(acts) != _texts(stored):
        return f"The stored plan is not the one that this session recorded. In force is the stored one: {_head(stored)}"
    changed = [
        f"{now.id} is {now.state}, recorded was {before.state}"
        for before, now in zip(acts.steps, stored.steps, strict=True)
        if before.state is not now.state
    ]
    if acts.closed != stored.closed:
        changed.append("it was closed" if stored.closed else "it is open again")
    differs = "; ".join(changed) or "notes"
    return f"The stored plan differs from what this session recorded, and is in force: {differs}."


def end_report(ledger: Ledger | None) -> str:
    """Return what a person is told at a turn's end: which steps are outstanding, and whether any was ever marked.

    It says what the ledger holds, never whether the work is right. Empty without a ledger, and for a closed plan: a
    person has said that nothing of it is left.
    """
    if ledger is None or ledger.closed:
        return ""
    total = quantity(len(ledger.steps), "step")
    if not ledger.ever_marked:
        head = f"no step was ever marked ({total})"
    else:
        head = f"{ledger.done_count} of {total} marked done"
    return _with_steps(head, ledger.outstanding)


def status_text(ledger: Ledger | None) -> str:
    """Return the whole plan, with what was noted."""
    if ledger is None:
        return "there is no plan. plan_start, with the task and its steps, begins one"
    return "\n".join((_head(ledger), *(step_line(step) for step in ledger.steps)))


def _head(ledger: Ledger) -> str:
    closed = ", closed" if ledger.closed else ""
    return f"{shown(ledger.task)} ({ledger.done_count} of {quantity(len(ledger.steps), 'step')} done{closed})"


def _with_steps(head: str, steps: tuple[LedgerStep, ...]) -> str:
    if not steps:
        return head
    return "\n".join((f"{head}; outstanding:", *(f"  {step_line(step)}" for step in steps)))


def _texts(ledger: Ledger) -> list[str]:
    return [step.text for step in ledger.steps]


def _joined(*clauses: str) -> str:
    return " · ".join(clause for clause in clauses if clause)


def _done(ledger: Ledger) -> str:
    return f"plan: {ledger.done_count}/{len(ledger.steps)} done"


def _hints(ledger: Ledger, round: int | None) -> Iterator[str]:
    """Give what to say of marking, the fullest first, and at last nothing."""
    step = ledger.next_step
    if not ledger.ever_marked and step is not None:
        first_way = f"when {step.id} is done: {marking_call(step)}"
        if round is not None and round >= SECOND_WAY_ROUND:
            yield f"{first_way}, {_SECOND_WAY}"
        yield first_way
    yield ""


def _remaining(ledger: Ledger) -> Iterator[str]:
    """Give the clause on what is outstanding, the fullest first.

    What can be worked on comes first; how many are blocked is said in any case.
    """
    outstanding = sorted(ledger.outstanding, key=lambda step: step.state is StepState.BLOCKED)
    if not outstanding:
        yield ""
        return
    blocked = sum(step.state is StepState.BLOCKED for step in outstanding)
    head = f"{len(outstanding)} remaining" + (f", {blocked} blocked" if blocked else "")
    for items, item_chars in _ITEM_FORMS:
        yield f"{head}: {', '.join(_item(step, item_chars) for step in outstanding[:items])}"
    yield head


def _item(step: LedgerStep, item_chars: int) -> str:
    text = f" {shown(step.text, limit=item_chars)}" if item_chars else ""
    return f"{step.id}{text}{' (blocked)' if step.state is StepState.BLOCKED else ''}"
