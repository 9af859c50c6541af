"""Sessions, people and damage that come one after another to one plan's file, against a small model of it."""

import dataclasses
import re
import tempfile
from pathlib import Path

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from chapbook.compaction.ledger import (
    Ledger,
    Relation,
    StepState,
    close_plan,
    mark_step,
    relation,
    start_plan,
    task_key,
)
from chapbook.compaction.ledger_file import LedgerFile
from chapbook.kernels.errors import ToolError


@dataclasses.dataclass
class Model:
    """A plan as a plain record."""

    task: str
    states: list[str]
    texts: list[str]
    ever_marked: bool = False
    closed: bool = False

    @property
    def outstanding(self):
        return [f"s{n + 1}" for n, state in enumerate(self.states) if state != "done"]

    @property
    def is_finished(self):
        return self.closed or not self.outstanding


TASKS = ["repair rounding", "compose verses", "sort harbours"]
STEP_LISTS = st.lists(st.sampled_from(["alpha", "beta", "gamma", "delta", "", "x" * 201]), max_size=4)


class LedgerMachine(RuleBasedStateMachine):
    """Sessions that come one after another to one file, and do there what a model, a person or a disk may do."""

    def __init__(self):
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.file = LedgerFile(Path(self.folder.name), holder=None, clock=lambda: 1_800_000_000.0, pid=7)
        self.sessions = 0
        self.model = None
        self.aside = []
        self.damaged = 0
        self.resume(TASKS[0])

    def teardown(self):
        self.folder.cleanup()

    @property
    def stored(self):
        return self.file.load().ledger

    @property
    def relation(self):
        return relation(self.stored, session=self.session, key=task_key(self.task), prompt=self.task)

    @rule(task=st.sampled_from(TASKS))
    def resume(self, task):
        """Begin a session, of the task that is planned or of another."""
        self.sessions += 1
        self.session, self.task = f"session {self.sessions}", task

    @rule(steps=STEP_LISTS, replace=st.booleans())
    def start(self, steps, replace):
        current = self.stored
        related = self.relation if current else Relation.UNKNOWN
        is_good = bool(steps) and len(set(steps)) == len(steps) and all(0 < len(step) <= 200 for step in steps)
        blocks = self.model is not None and not self.model.is_finished
        is_foreign = blocks and self.model.task != self.task
        hands_back = blocks and not is_foreign and not replace
        plan = {"task": self.task, "steps": steps, "replace": replace}
        if hands_back or not is_good:
            with pytest.raises(ToolError) as refused:
                start_plan(current, **plan, relation=related, session=self.session, key=task_key(self.task))
            handed_back = re.findall(r"^(s\d+) \[", str(refused.value), re.MULTILINE)
            assert handed_back == (self.model.outstanding if hands_back else [])
            return
        started = start_plan(current, **plan, relation=related, session=self.session, key=task_key(self.task))
        assert started.discarded == (len(self.model.outstanding) if blocks and not is_foreign else 0)
        assert (started.set_aside is not None) == is_foreign
        if started.set_aside is not None:
            self.aside.append((self.file.set_aside(started.set_aside), started.set_aside))
        self.file.save(started.ledger)
        self.model = Model(task=self.task, states=["todo"] * len(steps), texts=steps)

    @rule(number=st.integers(1, 5), state=st.sampled_from(StepState))
    def mark(self, number, state):
        is_good = self.model is not None and not self.model.closed and number <= len(self.model.states)
        if not is_good:
            with pytest.raises(ToolError):
                mark_step(self.stored, id=f"s{number}", state=state)
            return
        done = mark_step(self.stored, id=f"s{number}", state=state)
        self.file.save(done.ledger)
        self.model.states[number - 1] = state.value
        self.model.ever_marked |= state is not StepState.TODO

    @precondition(lambda self: self.model is not None)
    @rule()
    def close(self):
        self.file.save(close_plan(self.stored))
        self.model.closed = True

    @rule(data=st.sampled_from([b"", b"{", b"[]", b'{"task":"t","key":null,"session":"s","steps":[]}']))
    def damage(self, data):
        self.file.path.write_bytes(data)
        quarantined = self.file.load().quarantined
        assert quarantined.read_bytes() == data
        self.damaged += 1
        self.model = None

    @invariant()
    def file_and_model_agree(self):
        self.file.check_integrity()
        stored = self.stored
        assert (stored is None) == (self.model is None)
        if stored is None:
            return
        stored.check_integrity()
        assert [step.state.value for step in stored.steps] == self.model.states
        assert [step.text for step in stored.steps] == self.model.texts
        assert (stored.task, stored.closed, stored.ever_marked) == (
            self.model.task,
            self.model.closed,
            self.model.ever_marked,
        )
        assert (stored.is_finished, [step.id for step in stored.outstanding]) == (
            self.model.is_finished,
            self.model.outstanding,
        )

    @invariant()
    def nothing_that_was_moved_is_lost(self):
        assert len(list(self.file.path.parent.glob("plan.corrupt-*.json"))) == self.damaged
        assert len({path for path, _ in self.aside}) == len(self.aside)
        assert all(msgspec.json.decode(path.read_bytes(), type=Ledger) == ledger for path, ledger in self.aside)


LedgerMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)
test_ledger_against_a_model = LedgerMachine.TestCase
