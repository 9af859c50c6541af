"""The plan ledger: the steps that an agent committed to, what it said of each, and the rules of both.

Values and pure functions. Nothing here infers: a step is done when the agent marks it so, and a plan that nobody marked
is one that nobody marked.
"""

from __future__ import annotations

import enum
import hashlib
import re
from collections.abc import Sequence
from typing import Annotated, Final, NewType

import msgspec
from msgspec import Meta

from ..kernels.errors import ToolError
from ..kernels.secrets import redact
from .quoting import cleaned, quantity

TaskKey = NewType("TaskKey", str)
"""16 hex digits that stand for the first prompt of a session."""

MOST_STEPS: Final = 40
STEP_CHARS: Final = 200
TASK_CHARS: Final = 400
NOTE_CHARS: Final = 300

_KEY = re.compile(r"[0-9a-f]{16}")
_LONG_RUN = re.compile(r"[A-Za-z0-9_-]{40,}")
_BETWEEN_WORDS = re.compile(r"[^a-z0-9_.-]+")
_LEAST_WORD_CHARS = 3
_STOP_WORD_LIST: Final = (
    "about after all also and any are because been before but can could did does doing done each for from get had has "
    "have her here him his how into its just let like make may more most must need not now one only onto other our out "
    "over own please shall she should some such than that the their them then there these they this those through too "
    "under until use using very want was well were what when where which while who whom why will with would you your "
    "yours"
)
_STOP_WORDS: Final = frozenset(_STOP_WORD_LIST.split())


class StepState(enum.StrEnum):
    """What the agent said last of a step."""

    TODO = "todo"
    DOING = "doing"
    DONE = "done"
    BLOCKED = "blocked"


class LedgerStep(msgspec.Struct, frozen=True, kw_only=True):
    """A step of a plan. `text` and `note` are one line each, as they were given but for white space."""

    id: str
    text: Annotated[str, Meta(min_length=1, max_length=STEP_CHARS)]
    state: StepState = StepState.TODO
    note: Annotated[str, Meta(max_length=NOTE_CHARS)] = ""


class Ledger(msgspec.Struct, frozen=True, kw_only=True):
    """A plan's steps, `s1` to `sn`. `key` and `session` are those of the session that started it.

    `was_marked` says that a step was once in another state than todo; `closed`, that a person ended the plan.
    """

    task: Annotated[str, Meta(min_length=1, max_length=TASK_CHARS)]
    key: TaskKey | None
    session: str
    steps: Annotated[tuple[LedgerStep, ...], Meta(min_length=1, max_length=MOST_STEPS)]
    was_marked: bool = False
    closed: bool = False

    def __post_init__(self) -> None:
        if any(step.id != step_id(place) for place, step in enumerate(self.steps)):
            raise ValueError("the ids of the steps must be s1, s2 and so on")

    @property
    def outstanding(self) -> tuple[LedgerStep, ...]:
        """The steps that are not marked done, those that are blocked among them."""
        return tuple(step for step in self.steps if step.state is not StepState.DONE)

    @property
    def done_count(self) -> int:
        """How many steps are marked done."""
        return len(self.steps) - len(self.outstanding)

    @property
    def is_finished(self) -> bool:
        """Whether nothing is left to go on with: every step is marked done, or a person closed the plan."""
        return self.closed or not self.outstanding

    @property
    def ever_marked(self) -> bool:
        """Whether a step was ever marked: a statement on the ledger, not on the work."""
        return self.was_marked or any(step.state is not StepState.TODO for step in self.steps)

    @property
    def markable_ids(self) -> tuple[str, ...]:
        """The ids that `plan_step` takes; none of a closed plan."""
        return () if self.closed else tuple(step.id for step in self.steps)

    @property
    def next_step(self) -> LedgerStep | None:
        """The step to suggest for marking: the first that is being done, else the first to do. None is blocked."""
        for state in (StepState.DOING, StepState.TODO):
            for step in self.steps:
                if step.state is state:
                    return step
        return None

    def check_integrity(self) -> None:
        """Raise msgspec.ValidationError where a bound or the order of ids does not hold."""
        msgspec.convert(msgspec.to_builtins(self), Ledger)


class Relation(enum.StrEnum):
    """Whether a plan is of this session's task."""

    SAME = "same"
    DIFFERENT = "different"
    UNKNOWN = "unknown"


class Started(msgspec.Struct, frozen=True, kw_only=True):
    """What `plan_start` comes to. `set_aside` is an unfinished plan of another task, to be kept under a name of its own
    before `ledger` is saved; `text` says so, but not where. `discarded` counts the unfinished steps that are gone."""

    ledger: Ledger
    text: str
    set_aside: Ledger | None = None
    discarded: int = 0


class Marked(msgspec.Struct, frozen=True, kw_only=True):
    """What `plan_step` comes to. `step` is the one that was marked, as it is now."""

    ledger: Ledger
    step: LedgerStep
    text: str


def step_id(place: int) -> str:
    """Return the id of the step at `place`, which counts from 0."""
    return f"s{place + 1}"


def task_key(prompt: str) -> TaskKey:
    """Return the key of the task that a session's first prompt sets: the same however it is spaced or cased."""
    collapsed = " ".join(prompt.split()).lower()
    return TaskKey(hashlib.sha256(collapsed.encode("utf-8", "replace")).hexdigest()[:16])


def relation(ledger: Ledger, *, session: str, key: str | None, prompt: str) -> Relation:
    """Say whether `ledger` is of the task of `session`, whose first prompt is `prompt`, with the key `key`.

    A malformed key counts as none. Without a key on both sides words decide, and they can only show that the tasks
    differ, never that they are the same.
    """
    if ledger.session == session:
        return Relation.SAME
    if _is_key(ledger.key) and _is_key(key):
        return Relation.SAME if ledger.key == key else Relation.DIFFERENT
    planned = significant_words(" ".join((ledger.task, *(step.text for step in ledger.steps))))
    asked = significant_words(prompt)
    return Relation.DIFFERENT if planned and asked and not planned & asked else Relation.UNKNOWN


def significant_words(text: str) -> frozenset[str]:
    """Return the words of a text that tell one task from another; none of a text in Chinese."""
    # A full stop belongs to "setup.py" but not to "setup.": at an end it would hide that a word is shared.
    words = (word.strip("._-") for word in _BETWEEN_WORDS.split(text.lower()))
    return frozenset(word for word in words if len(word) >= _LEAST_WORD_CHARS) - _STOP_WORDS


def start_plan(
    current: Ledger | None,
    *,
    task: str,
    steps: Sequence[str],
    replace: bool,
    relation: Relation,
    session: str,
    key: TaskKey | None,
) -> Started:
    """Begin a plan. `current` is the plan that is stored, `relation` how it relates to this session's task.

    Raises ToolError for text that cannot be kept, and where `current` is unfinished and not provably of another task:
    the message hands back its outstanding steps, which is how a resumed session goes on with them.
    """
    unfinished = current if current is not None and not current.is_finished else None
    is_foreign = relation is Relation.DIFFERENT
    if unfinished is not None and not is_foreign and not replace:
        raise ToolError(_hand_back(unfinished, session))
    ledger = Ledger(task=_checked_task(task), key=key, session=session, steps=_checked_steps(steps))
    said = [_planned(len(ledger.steps))]
    if unfinished is None:
        return Started(ledger=ledger, text=said[0])
    left = quantity(len(unfinished.outstanding), "unfinished step")
    if is_foreign:
        said.append(f"The stored plan of another task, with {left}, is set aside.")
        return Started(ledger=ledger, text=" ".join(said), set_aside=unfinished)
    said.append(f"Of the earlier plan {left} {'was' if len(unfinished.outstanding) == 1 else 'were'} discarded.")
    return Started(ledger=ledger, text=" ".join(said), discarded=len(unfinished.outstanding))


def mark_step(ledger: Ledger | None, *, id: str, state: StepState, note: str = "") -> Marked:
    """Say how a step stands. White space and case of an id tell no step from another. Without a note the step keeps the
    one it has; one that is too long is cut, with a mark.

    Raises ToolError where there is no plan (a stored one of another task is none), no such step, or a secret.
    """
    if ledger is None:
        raise ToolError("there is no plan to mark. plan_start, with the task and its steps, begins one")
    if ledger.closed:
        raise ToolError("the plan was closed. plan_start, with the task and its steps, begins another")
    step = next((step for step in ledger.steps if step.id == id.strip().lower()), None)
    if step is None:
        ids = ", ".join(step.id for step in ledger.steps)
        raise ToolError(f"no step {shown(id, limit=20)!r}. The steps are: {ids}")
    kept = _checked_note(note)
    text = f"{step.id} is {'still ' if step.state is state else ''}{state}"
    if len(one_line(note)) > NOTE_CHARS:
        text += f"; its note was cut to {NOTE_CHARS} characters"
    marked = msgspec.structs.replace(step, state=state, note=kept or step.note)
    return Marked(ledger=with_mark(ledger, id=step.id, state=state, note=marked.note), step=marked, text=text)


def with_mark(ledger: Ledger, *, id: str, state: StepState, note: str) -> Ledger:
    """Return the plan with a mark that was accepted once: nothing is judged, and no step of it changes where none has
    that id."""
    steps = (msgspec.structs.replace(step, state=state, note=note) if step.id == id else step for step in ledger.steps)
    return msgspec.structs.replace(
        ledger, steps=tuple(steps), was_marked=ledger.ever_marked or state is not StepState.TODO
    )


def close_plan(ledger: Ledger) -> Ledger:
    """End a plan, whatever its steps say: they stay as they were marked."""
    return msgspec.structs.replace(ledger, closed=True)


def step_line(step: LedgerStep, *, note: bool = True) -> str:
    """Return a step as a list of steps shows it: id, state, text and, if wanted, what was noted."""
    tail = f" ({shown(step.note)})" if note and step.note else ""
    return f"{step.id} [{step.state}] {shown(step.text)}{tail}"


def marking_call(step: LedgerStep) -> str:
    """Return the call that marks a step done, with its arguments as JSON."""
    arguments = msgspec.json.encode({"id": step.id, "state": StepState.DONE.value}).decode()
    return f"plan_step {arguments}"


def one_line(text: str) -> str:
    """Return a text with its white space collapsed, as it can be stored: without lone surrogates."""
    return " ".join(text.encode("utf-8", "replace").decode().split())


def shown(text: str, *, limit: int | None = None) -> str:
    """Return a text without control characters, in at most `limit` characters, a cut marked with an ellipsis."""
    text = cleaned(one_line(text))
    return text if limit is None or len(text) <= limit else text[: limit - 1].rstrip() + "…"


def _is_key(key: str | None) -> bool:
    return key is not None and _KEY.fullmatch(key) is not None


def _planned(count: int) -> str:
    return f"{quantity(count, 'step')} planned: s1{f' to {step_id(count - 1)}' if count > 1 else ''}."


def _hand_back(ledger: Ledger, session: str) -> str:
    """Return the refusal of another plan: what is outstanding, and the two ways on."""
    origin = "" if ledger.session == session else " of an earlier session"
    lines = [
        f"a plan{origin} is unfinished, {ledger.done_count} of {quantity(len(ledger.steps), 'step')} done: "
        f"{shown(ledger.task)}",
        *(step_line(step, note=step.state is StepState.BLOCKED) for step in ledger.outstanding),
    ]
    step = ledger.next_step
    example = f", for example when {step.id} is done: {marking_call(step)}" if step is not None else ""
    lines.append(f"Go on with these steps and mark them with plan_step{example}")
    lines.append('Only if they are to be discarded, call plan_start again with "replace":true')
    return "\n".join(lines)


def _checked_task(task: str) -> str:
    _refuse_secret(task, "the task")
    task = one_line(task)
    if not _says_something(task):
        raise ToolError("the task is empty: say in a sentence what is to be reached")
    if len(task) > TASK_CHARS:
        raise ToolError(f"the task has {len(task)} characters; the limit is {TASK_CHARS}. Say it in short")
    return task


def _checked_steps(steps: Sequence[str]) -> tuple[LedgerStep, ...]:
    if not steps:
        raise ToolError(f"no steps: give 1 to {MOST_STEPS}, each a sentence")
    if len(steps) > MOST_STEPS:
        raise ToolError(f"{len(steps)} steps; the limit is {MOST_STEPS}. Join some of them")
    first_places: dict[str, int] = {}
    kept = []
    for place, given in enumerate(steps):
        _refuse_secret(given, f"step {place + 1}")
        text = one_line(given)
        if not _says_something(text):
            raise ToolError(f"step {place + 1} is empty: say what is to be done, or leave it out")
        if len(text) > STEP_CHARS:
            raise ToolError(
                f"step {place + 1} has {len(text)} characters; the limit is {STEP_CHARS}. Say it in short, or make "
                "two steps of it"
            )
        first = first_places.setdefault(text.casefold(), place)
        if first != place:
            raise ToolError(f"steps {first + 1} and {place + 1} are the same: leave one out, or say how they differ")
        kept.append(LedgerStep(id=step_id(place), text=text))
    return tuple(kept)


def _checked_note(note: str) -> str:
    _refuse_secret(note, "the note")
    note = one_line(note)
    return note if len(note) <= NOTE_CHARS else note[: NOTE_CHARS - 1] + "…"


def _says_something(text: str) -> bool:
    return any(character.isalnum() for character in text)


def _refuse_secret(text: str, where: str) -> None:
    # Looked at as it was given: line ends are part of what a private key looks like.
    kinds = list(redact(text.encode("utf-8", "replace")).counts)
    if not kinds and not any(_mixes_letters_and_digits(run[0]) for run in _LONG_RUN.finditer(text)):
        return
    what = f"a secret ({kinds[0]})" if kinds else "a secret (40 or more letters and digits in a row)"
    raise ToolError(
        f"{where} holds what looks like {what}, which a plan does not keep. Write where it is to be found instead; for "
        "a commit its first 7 characters, for another long name its beginning"
    )


def _mixes_letters_and_digits(run: str) -> bool:
    return any(character.isdigit() for character in run) and any(character.isalpha() for character in run)
