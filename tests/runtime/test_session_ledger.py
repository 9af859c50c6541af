"""The ledger through whole sessions: several of them on one plan, people and disks that interfere, what it costs."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from chapbook.compaction.ledger import StepState
from chapbook.compaction.ledger_file import LedgerFile
from chapbook.kernels.errors import LedgerError, UsageError
from chapbook.runtime.chat_format import Shape
from chapbook.runtime.events import Notice, ToolResult
from chapbook.runtime.log_reading import read_log
from chapbook.runtime.session import Session
from chapbook.runtime.session_settings import SessionSettings
from chapbook.runtime.stream import NoticeGiven
from chapbook.runtime.tools.spec import Policy

PROMPT = "Rename the vault"
ALLOWED = dict.fromkeys(("write", "edit", "bash"), Policy.ALLOW)


def events_of(session: Session) -> list[Any]:
    return [logged.event for logged in read_log(session.store.session_folder(session.id)).events]


def settings(**changes: Any) -> SessionSettings:
    return SessionSettings(policies=ALLOWED, **changes)


def results_of(session: Session) -> list[ToolResult]:
    return [event for event in events_of(session) if isinstance(event, ToolResult)]


def told_of(events: list[Any]) -> list[str]:
    """Return what a turn told the person of plans."""
    return [event.text for event in events if isinstance(event, NoticeGiven) and not event.to_model]


def notices_of(session: Session) -> list[str]:
    return [event.text for event in events_of(session) if isinstance(event, Notice) and event.producer == "plan"]


def states(session: Session) -> list[str]:
    stored = LedgerFile(session.store.folder, holder=None, clock=lambda: 0.0, pid=1).load().ledger
    assert stored is not None
    return [step.state.value for step in stored.steps]


def start(made: Any, *steps: str, task: str = "Rename", **more: Any) -> str:
    return str(made.call("plan_start", task=task, steps=list(steps), **more))


def mark(made: Any, id: str, state: str = "done", **more: Any) -> str:
    return str(made.call("plan_step", id=id, state=state, **more))


# Several sessions of one plan


def test_a_mark_keeps_what_another_session_of_the_task_marked_meanwhile(rig: Callable[..., Any]) -> None:
    made = rig()
    with made.open([start(made, "one", "two", "three"), "ok", mark(made, "s2"), "ok"], settings=settings()) as first:
        list(first.send(PROMPT))
        with made.open([mark(made, "s1"), "ok"], settings=settings()) as second:
            list(second.send(PROMPT))
            made.check(second)
        list(first.send("go on"))
        made.check(first)
        assert states(first) == ["done", "done", "todo"]
        assert "2/3 done" in results_of(first)[-1].content
        assert notices_of(first) == [], "what others did is told when a session is opened, not at each turn"


def test_a_plan_that_a_person_closed_elsewhere_is_not_opened_again_by_a_mark(rig: Callable[..., Any]) -> None:
    made = rig()
    with made.open([start(made, "one"), "ok", mark(made, "s1"), "ok"], settings=settings()) as first:
        list(first.send(PROMPT))
        with made.open(["ok"], settings=settings()) as second:
            list(second.send(PROMPT))
            assert second.close_plan() == "Rename"
        list(first.send("go on"))
        result = results_of(first)[-1]
        assert result.is_error
        assert "the plan was closed" in result.content
        stored = LedgerFile(first.store.folder, holder=None, clock=lambda: 0.0, pid=1).load().ledger
        assert stored is not None
        assert stored.closed


def test_a_session_whose_plan_another_one_replaced_marks_the_stored_one_and_can_be_resumed(
    rig: Callable[..., Any],
) -> None:
    made = rig()
    with made.open([start(made, "one"), "ok"], settings=settings()) as first:
        list(first.send(PROMPT))
        first.close_plan()
    with made.open([start(made, "other one", "other two"), "ok"], settings=settings()) as second:
        list(second.send(PROMPT))
    with made.open([mark(made, "s1", note="seen"), "ok"], resume=first.id, settings=settings()) as again:
        list(again.send("go on"))
        made.check(again)
        assert not results_of(again)[-1].is_error
    with made.open(["ok"], resume=first.id, settings=settings()) as last:
        assert last.transcript.state.ledger is not None
        assert [(step.text, step.state) for step in last.transcript.state.ledger.steps] == [
            ("other one", StepState.DONE),
            ("other two", StepState.TODO),
        ]
        list(last.send("go on"))
        assert len(notices_of(last)) == 1, "the difference is told once; what was marked since is of the stored plan"


def test_twelve_runs_of_one_task_resume_each_others_outstanding_steps(rig: Callable[..., Any]) -> None:
    made = rig()
    steps = [f"rename chapter {number}" for number in range(1, 13)]
    for run in range(12):
        replies = [start(made, *steps, task="Rename the chapters"), mark(made, f"s{run + 1}"), "ok"]
        with made.open(replies, settings=settings()) as session:
            list(session.send("Rename the twelve chapters."))
            started, marked = results_of(session)
            made.check(session)
            assert started.is_error == (run > 0)
            handed_back = re.findall(r"^(s\d+) \[todo\] (.*)", started.content, re.MULTILINE)
            assert handed_back == ([(f"s{n + 1}", steps[n]) for n in range(run, 12)] if run else [])
            assert not marked.is_error
            assert f"{run + 1}/12 done" in marked.content
            assert session.transcript.state.ledger is not None, "the log says what this session did"
            assert session.transcript.state.ledger.done_count == run + 1
    assert states(session) == ["done"] * 12
    with made.open([made.call("list", path="."), "ok"], settings=settings()) as session:
        told = told_of(list(session.send("Rename the twelve chapters.")))
        assert "plan" not in results_of(session)[-1].content, "a finished plan does not come back"
        assert told == []


def test_a_foreign_plan_and_a_difference_are_told_once_however_often_a_session_is_resumed(
    rig: Callable[..., Any],
) -> None:
    made = rig()
    with made.open([start(made, "one", "two", task="Paint the fence"), "ok"], settings=settings()) as first:
        list(first.send("Paint the fence"))
    with made.open(["ok"], settings=settings()) as second:
        list(second.send("Count all birds"))
        assert len(notices_of(second)) == 1
    with made.open([mark(made, "s1"), "ok"], settings=settings()) as other:
        list(other.send("Paint the fence"))
    for _ in range(2):
        for session_id, count in ((first.id, 1), (second.id, 1)):
            with made.open(["ok"], resume=session_id, settings=settings()) as session:
                list(session.send("go on"))
                assert len(notices_of(session)) == count


def test_two_holders_in_one_workspace_do_not_see_each_others_plan(rig: Callable[..., Any]) -> None:
    made = rig()
    look = made.call("plan_status")
    with made.open([start(made, "one"), "ok"], settings=settings(holder="ada")) as session:
        list(session.send(PROMPT))
    for holder, seen in (("bob", "there is no plan"), (None, "there is no plan"), ("ada", "s1 [todo] one")):
        with made.open([look, "ok"], settings=settings(holder=holder)) as session:
            told = told_of(list(session.send(PROMPT)))
            assert seen in results_of(session)[-1].content
            assert notices_of(session) == []
            assert bool(told) == (holder == "ada")


def test_a_plan_that_a_foreign_one_replaced_is_said_to_be_set_aside_and_the_foreign_one_not_to_be_in_force(
    rig: Callable[..., Any],
) -> None:
    made = rig()
    with made.open([start(made, "one"), "ok"], settings=settings()) as first:
        list(first.send(PROMPT))
    with made.open([start(made, "buy paint", task="Paint"), "ok"], settings=settings()) as second:
        list(second.send("Count all birds"))
    with made.open(["ok"], resume=first.id, settings=settings()) as first:
        list(first.send("go on"))
        gone, foreign = notices_of(first)
        assert "set aside in plan.set-aside-" in gone
        assert "A plan of another task is stored" in foreign
        assert "buy paint" not in gone + foreign


def test_a_plan_that_a_person_opened_again_in_the_file_is_marked_in_file_and_log(rig: Callable[..., Any]) -> None:
    made = rig()
    with made.open([start(made, "one"), "ok", mark(made, "s1"), "ok"], settings=settings()) as session:
        list(session.send(PROMPT))
        session.close_plan()
        path = session.store.folder / "plan.json"
        path.write_bytes(path.read_bytes().replace(b'"closed":true', b'"closed":false'))
        list(session.send("go on"))
        assert states(session) == ["done"]
        acts = session.transcript.state.ledger
        assert acts is not None
        assert (acts.closed, acts.done_count) == (False, 1)


# Files that people and disks change


@pytest.mark.parametrize("kind", ["text", "newer", "link", "folder"])
def test_a_file_that_is_no_plan_is_moved_aside_and_the_person_is_told_where_to(
    kind: str, rig: Callable[..., Any]
) -> None:
    made = rig()
    with made.open([start(made, "one"), "ok"], settings=settings()) as first:
        list(first.send(PROMPT))
    path = first.store.folder / "plan.json"
    data = path.read_bytes()
    path.unlink()
    match kind:
        case "text":
            path.write_bytes(data.replace(b'"todo"', b'"Done"'))
        case "newer":
            path.write_bytes(data.replace(b'"steps":[', b'"steps":{},"stages":['))
        case "link":
            path.symlink_to(made.workspace / "notes.md")
        case _:
            path.mkdir()
    with made.open([start(made, "anew"), "ok"], settings=settings()) as second:
        told = told_of(list(second.send(PROMPT)))
        made.check(second)
        assert not results_of(second)[-1].is_error
    (aside,) = second.store.folder.glob("plan.corrupt-*.json")
    assert any(aside.name in text and "no plan" in text for text in told)


def refused_by(file: LedgerFile) -> None:
    raise LedgerError(f"the plan in {file.path} cannot be read: an error of the disk", path=file.path, errno=5)


def test_a_plan_that_cannot_be_read_is_not_overwritten(rig: Callable[..., Any]) -> None:
    made = rig()
    replies = [start(made, "one"), "ok", start(made, "anew"), mark(made, "s1"), made.call("plan_status"), "ok"]
    with made.open(replies, settings=settings()) as session:
        list(session.send(PROMPT))
        path = session.store.folder / "plan.json"
        before = path.read_bytes()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(LedgerFile, "load", refused_by)
            told = told_of(list(session.send("go on")))
        refused = results_of(session)[1:]
        assert [result.is_error for result in refused] == [True] * 3
        assert all("cannot be read" in result.content for result in refused)
        assert not any("cannot be read" in text for text in told[1:]), "the person is told once"
        assert path.read_bytes() == before
        made.check(session)
        list(session.send("and now"))


def test_a_close_that_cannot_be_saved_closes_nothing_and_can_be_asked_for_again(rig: Callable[..., Any]) -> None:
    made = rig()
    with made.open([start(made, "one"), "ok"], settings=settings()) as session:
        list(session.send(PROMPT))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(LedgerFile, "save", lambda file, _ledger: refused_by(file))
            with pytest.raises(LedgerError):
                session.close_plan()
        assert session.close_plan() == "Rename"
        assert session.close_plan() is None


def test_a_close_before_the_first_turn_takes_no_notice_away(rig: Callable[..., Any]) -> None:
    made = rig()
    with made.open([start(made, "one", task="Paint the fence"), "ok"], settings=settings()) as first:
        list(first.send("Paint the fence"))
    with made.open(["ok"], settings=settings()) as second:
        list(second.send("Count all birds"))
    path = second.store.folder / "plan.json"
    path.write_bytes(path.read_bytes().replace(b"Paint the fence", b"Paint the gate"))
    with made.open(["ok"], resume=second.id, settings=settings()) as second:
        assert second.close_plan() is None, "a foreign plan is not this session's to close"
        list(second.send("go on"))
        assert len(notices_of(second)) == 2


def test_what_was_asked_for_before_the_task_was_known_does_not_make_a_foreign_plan_ones_own(
    rig: Callable[..., Any],
) -> None:
    made = rig()
    with made.open([start(made, "one"), "ok"], settings=settings()) as first:
        list(first.send(PROMPT))
    path = first.store.folder / "plan.json"
    with made.open([made.call("plan_status"), "ok"], settings=settings()) as second:
        before = path.read_bytes()
        with pytest.raises(UsageError):
            second.close_plan()
        list(second.send("Count all birds"))
        assert "there is no plan" in results_of(second)[-1].content
        assert path.read_bytes() == before


def test_a_secret_that_a_person_wrote_into_the_file_does_not_reach_the_model(rig: Callable[..., Any]) -> None:
    made = rig()
    secret = "ghp_" + "A1b2C3d4E5f6G7h8I9j0" + "K1l2M3n4O5p6Q7r8"
    with made.open([start(made, "one"), "ok"], settings=settings()) as first:
        list(first.send(PROMPT))
    path = first.store.folder / "plan.json"
    path.write_bytes(path.read_bytes().replace(b'"one"', f'"use {secret}"'.encode()))
    replies = [made.call("plan_status"), mark(made, "s1", "doing"), "ok"]
    with made.open(replies, settings=settings()) as second:
        list(second.send(PROMPT))
        assert "redacted" in results_of(second)[0].content
        assert secret not in (second.store.session_folder(second.id) / "log.jsonl").read_text()


def test_after_a_person_closed_the_plan_nothing_of_it_is_reported_as_left(rig: Callable[..., Any]) -> None:
    made = rig()
    with made.open([start(made, "one", "two"), "ok", "fine"], settings=settings()) as session:
        assert any("ever marked" in text for text in told_of(list(session.send(PROMPT))))
        session.close_plan()
        assert told_of(list(session.send("thanks"))) == []
    with made.open(["ok"], settings=settings()) as session:
        assert told_of(list(session.send(PROMPT))) == []


# What small models write


BAD_STARTS = {
    "steps must be string[]": {"task": "Rename", "steps": "one, two"},
    "steps[0] must be string": {"task": "Rename", "steps": [{"text": "one"}]},
    "steps[1] must be string": {"task": "Rename", "steps": ["one", 2]},
    "steps is required": {"task": "Rename"},
    "no steps: give 1 to 40": {"task": "Rename", "steps": []},
    "41 steps; the limit is 40": {"task": "Rename", "steps": [f"number {n}" for n in range(41)]},
    "step 1 has 201 characters": {"task": "Rename", "steps": ["修" * 201]},
    "task must be string": {"task": 5, "steps": ["one"]},
    "there is no argument states": {"task": "Rename", "steps": ["one"], "states": ["todo"]},
    "replace must be boolean": {"task": "Rename", "steps": ["one"], "replace": "yes"},
    "step 1 holds what looks like a secret": {"task": "Rename", "steps": ["use ghp_" + "A1b2C3d4E5f6G7h8I9" * 2]},
}
BAD_MARKS = {
    "id must be string": {"id": 1, "state": "done"},
    "no step 'step 1'": {"id": "step 1", "state": "done"},
    "id is required": {"state": "done"},
    "did you mean done": {"id": "s1", "state": "Done"},
    'state must be "blocked"': {"id": "s1", "state": "completed"},
    "note must be string": {"id": "s1", "state": "done", "note": ["seen"]},
    "the note holds what looks like a secret": {"id": "s1", "state": "done", "note": "a1" * 20},
}


def test_what_is_badly_written_is_refused_with_what_is_wrong_and_changes_nothing(rig: Callable[..., Any]) -> None:
    made = rig(n_ctx=16384)
    starts = [made.call("plan_start", **arguments) for arguments in BAD_STARTS.values()]
    marks = "".join(made.call("plan_step", **arguments) for arguments in BAD_MARKS.values())
    good = made.call("plan_start", task="Rename", steps='["one", "<|im_end|>\\u001b[31m two"]')
    with made.open([*starts, "ok", good, marks, "ok"], settings=settings()) as session:
        list(session.send(PROMPT))
        assert not (session.store.folder / "plan.json").exists()
        list(session.send("again"))
        made.check(session)
        results = results_of(session)
        assert [result.is_error for result in results] == [True] * 11 + [False] + [True] * 7
        for says, result in zip(BAD_STARTS, results, strict=False):
            assert says in result.content
        for says, result in zip(BAD_MARKS, results[12:], strict=True):
            assert says in result.content
        assert states(session) == ["todo", "todo"]


# Ids that the grammar offers


def offered_ids(session: Session) -> tuple[str, ...] | None:
    """Return the ids that `plan_step` may name; None where it is not offered."""
    for tool in session.offered_tools():
        if tool.schema.name == "plan_step":
            return tuple(tool.grounded["id"])
    return None


def test_the_grammar_offers_the_ids_of_the_plan_in_force_and_no_marking_without_one(rig: Callable[..., Any]) -> None:
    made = rig()
    with made.open([start(made, "one", "two"), "ok"], settings=settings()) as first:
        assert offered_ids(first) is None
        list(first.send(PROMPT))
        assert offered_ids(first) == ("s1", "s2")
        first.close_plan()
        assert offered_ids(first) is None
    with made.open([start(made, "one", "two", "three"), "ok"], settings=settings()) as second:
        list(second.send(PROMPT))
        assert offered_ids(second) == ("s1", "s2", "s3")
    with made.open(["ok"], settings=settings()) as foreign:
        list(foreign.send("Count all birds"))
        assert offered_ids(foreign) is None


# What the line costs


LONG_STEP = "read the failing tests of the invoice parser, and find out where the total of a line is rounded, {}"


SMOLLM2 = pytest.param("smollm2", marks=pytest.mark.slow(reason="a real model reads the prefix on one thread"))


@pytest.mark.parametrize("model", ["llama", "gemma3", SMOLLM2])
def test_the_line_costs_60_tokens_of_the_window_at_most_110_with_a_nudge(model: str, rig: Callable[..., Any]) -> None:
    made = rig(model)
    steps = [LONG_STEP.format(number) for number in range(5)]
    reads = [made.call("read", path="notes.md", limit=1)] * 3
    marks = [mark(made, "s1", "blocked"), *reads[:1], mark(made, "s1"), *reads[:1]]
    with made.open([start(made, *steps), *reads, *marks, "ok"], settings=settings()) as session:
        list(session.send(PROMPT))
        made.check(session)
        form = session.transcript.composer.chat_format.form(Shape.TOOL)
        nudged = 0
        for result in results_of(session):
            content, _, line = result.content.rpartition("\n")
            assert line.startswith("[plan: ")
            with_line, without = (
                len(made.engine.tokenize(form.apply(text), parse_special=False)) for text in (result.content, content)
            )
            nudged += "plan_step {" in line
            assert with_line - without <= (110 if "plan_step {" in line else 60)
        assert nudged == 4


@pytest.mark.parametrize("filler", [0, 28])
def test_the_line_is_left_out_where_there_is_no_room_for_it(filler: int, rig: Callable[..., Any]) -> None:
    made = rig(n_ctx=4096)
    replies = [start(made, "one"), *[made.call("read", path="notes.md", limit=1, offset=n) for n in range(1, 23)], "ok"]
    with made.open(replies, settings=settings()) as session:
        list(session.send(PROMPT + " x" * filler))
        made.check(session)
        left_tokens = session._assembled.parts.budgets.left_tokens(session.transcript.opened_tokens())
        lines = ["[plan:" in result.content for result in results_of(session)]
        assert all(lines[:-2])
        assert left_tokens >= 0 or not lines[-1]


def test_without_a_ledger_the_requests_are_those_of_a_workspace_without_one(rig: Callable[..., Any]) -> None:
    windows = []
    for kind in ("none", "foreign and finished", "other holder"):
        made = rig()
        if kind != "none":
            other = {} if kind.startswith("foreign") else {"holder": "ada"}
            with made.open([start(made, "one"), mark(made, "s1"), "ok"], settings=settings(**other)) as session:
                list(session.send("Paint the fence"))
        replies = [made.call("list", path="."), "ok"]
        with made.open(replies, settings=settings()) as session:
            list(session.send(PROMPT))
            windows.append(session.transcript.window.tokens().tolist())
    assert windows[0] == windows[1] == windows[2]
