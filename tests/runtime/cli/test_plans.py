"""Modes and plans at the command line: flags, the commands of a chat, and the lists of what was submitted."""

from __future__ import annotations

import json
import os

import pytest

from chapbook.compaction.ledger import Relation, start_plan
from chapbook.compaction.ledger_file import LedgerFile
from chapbook.runtime.plan_review import ReviewAnswer, ReviewDecision
from chapbook.runtime.scripted import ScriptedEngine
from chapbook.runtime.session import Session
from chapbook.runtime.session_settings import SessionHost, SessionSettings

SMALL = "--n-ctx=8192", "--max-reply-tokens=8", "--seed=1", "--tool-choice=none", "--set=turn.continuations=0"
PLAN = "# Rename the vault\n\n1. Rename it \u202e\x1b[2J now.\n"
APPROVE = ReviewAnswer(decision=ReviewDecision.APPROVE)
KEEP = ReviewAnswer(decision=ReviewDecision.KEEP_PLANNING, note="Mind the heron.")


def submit(workspace, *answers, plan=PLAN):
    """Play a session in the workspace that submits a plan once for each answer; return its id."""
    call = f"<tool_call>\n{json.dumps({'name': 'exit_plan_mode', 'arguments': {'plan': plan}})}\n</tool_call>"
    left = list(answers)
    engine = ScriptedEngine([reply for _ in answers for reply in (call, "done")], n_ctx=65_536)
    host = SessionHost(review_plan=lambda _plan: left.pop(0))
    with Session.open(engine, workspace=workspace, host=host, settings=SessionSettings(mode="plan")) as session:
        for _ in answers:
            session.set_mode("plan")
            list(session.send("Rename the vault"))
        return session.id


# The lists


def test_plans_are_listed_newest_first_with_their_status_and_nothing_in_them_acts(run, terminal, workspace):
    first = submit(workspace, KEEP, None)
    second = submit(workspace, APPROVE, plan="# Rename\x1b[2J it\n")
    listed = json.loads(run("plans", "list", "--json").stdout)
    assert [(one["session"], one["status"]) for one in listed] == [
        (second, "approved"),
        (first, "pending"),
        (first, "rejected"),
    ]
    assert listed[2]["feedback"] == "Mind the heron."
    program = terminal("plans", "list", "--no-color")
    assert program.end() == 0
    assert "\x1b" not in program.shown
    assert program.shown.splitlines()[1].startswith("approved")


@pytest.mark.parametrize("by", ["artifact", "session and seq", "session"])
def test_a_plan_is_shown_byte_for_byte_with_its_verdict_beside_it(run, workspace, by):
    session = submit(workspace, KEEP)
    (listed,) = json.loads(run("plans", "list", "--json").stdout)
    which = {"artifact": [listed["artifact"][:10]], "session and seq": [session, listed["seq"]], "session": ["latest"]}
    ended = run("plans", "show", *which[by])
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == PLAN
    assert ended.stderr.startswith(f"session {session} · rejected · seq {listed['seq']}")
    assert "feedback: Mind the heron." in ended.stderr
    assert "this plan is rejected: it is not approved" in ended.stderr
    assert json.loads(run("plans", "show", "--json", *which[by]).stdout)["text"] == PLAN


def test_on_a_terminal_a_plan_that_is_shown_cannot_act(terminal, workspace):
    submit(workspace, None)
    program = terminal("plans", "show", "latest")
    assert program.end() == 0
    assert "\x1b" not in program.shown
    assert "\\u202e\\u001b[2J now." in program.shown
    assert "this plan is pending: it is not approved" in program.shown


def test_a_plan_that_is_not_there_is_one_message_with_what_there_is(run, workspace):
    ended = run("plans", "list")
    assert (ended.returncode, ended.stdout) == (0, "")
    assert "no plan was submitted" in ended.stderr
    session = submit(workspace, None)
    for arguments in (["0123456789abcdef"], [session, "99"]):
        ended = run("plans", "show", *arguments)
        assert ended.returncode == 2
        assert "Traceback" not in ended.stderr
    assert "it did at" in ended.stderr


# The ledger


def save(workspace, *, holder, task, steps=("one", "two")):
    folder = workspace / ".chapbook"
    folder.mkdir(exist_ok=True)
    ledger = start_plan(
        None, task=task, steps=list(steps), replace=False, relation=Relation.SAME, session="s", key=None
    ).ledger
    LedgerFile(folder, holder=holder, clock=lambda: 0.0, pid=1).save(ledger)


def test_the_ledger_is_that_of_the_holder_and_the_others_are_named_without_their_steps(run, workspace):
    save(workspace, holder=None, task="Rename\x1b[2J")
    save(workspace, holder="painter", task="Paint", steps=("buy red",))
    (workspace / ".chapbook" / "plans" / "torn.json").write_text("{")
    shown = run("plan", "status").stdout
    assert "s1" in shown
    assert "\x1b" not in shown
    assert "another: plans/painter.json: Paint (0 of 1 done; session s)" in shown
    assert "buy red" not in shown
    assert "another: plans/torn.json: no plan that can be read" in shown
    told = json.loads(run("plan", "status", "--json", "--set", "plan.holder=painter").stdout)
    assert (told["holder"], told["ledger"]["task"]) == ("painter", "Paint")
    assert [other["path"].rpartition("/")[2] for other in told["others"]] == ["plan.json", "torn.json"]
    assert (workspace / ".chapbook" / "plans" / "torn.json").exists(), "looking moves nothing"


@pytest.mark.parametrize("kind", ["folder", "link", "newer", "text"])
def test_a_file_that_is_no_plan_is_named_and_left_where_it_is(run, workspace, kind):
    save(workspace, holder=None, task="Rename")
    path = workspace / ".chapbook" / "plan.json"
    data = path.read_bytes()
    path.unlink()
    match kind:
        case "folder":
            path.mkdir()
        case "link":
            (workspace / "elsewhere").write_bytes(data)
            path.symlink_to(workspace / "elsewhere")
        case "newer":
            path.write_bytes(data.replace(b'"todo"', b'"skipped"'))
        case _:
            path.write_bytes(b"\xff\0")
    shown = run("plan", "status")
    assert shown.returncode == 0
    assert shown.stdout == f"{path} is no plan that can be read: the next session moves it aside\n"
    assert os.path.lexists(path)


def test_without_a_ledger_it_says_so(run):
    assert run("plan", "status").stdout.startswith("there is no plan")


# Flags and the commands of a chat


@pytest.mark.slow  # it starts the program several times
@pytest.mark.parametrize("flags", [["--plan"], ["--mode", "plan"], ["--set", "mode=plan"]])
def test_a_run_begins_in_the_mode_that_is_named(run, tiny_llama, logged, flags):
    ended = run("run", "--json", "--model", tiny_llama, *SMALL, *flags, "go")
    assert ended.returncode == 0, ended.stderr
    assert json.loads(ended.stdout.splitlines()[0])["mode"] == "plan"
    assert [event["mode"] for event in logged("mode/set")] == ["plan"]
    assert [event["producer"] for event in logged("notice")] == ["mode"]


@pytest.mark.slow  # it starts the program several times
def test_a_resume_keeps_its_mode_unless_a_flag_names_one(run, tiny_llama, logged):
    assert run("run", "--model", tiny_llama, *SMALL, "--plan", "go").returncode == 0
    ended = run("resume", "latest", "on", *SMALL)
    assert "mode plan" in ended.stderr
    ended = run("resume", "latest", "on", *SMALL, "--mode=default")
    assert "mode plan; default from the next message on" in ended.stderr
    assert [event["mode"] for event in logged("mode/set")] == ["plan", "default"]


def test_a_mode_that_is_not_there_is_refused_before_a_model_is_loaded(run):
    ended = run("run", "--model", "nosuch.gguf", "--mode", "plam", "go")
    assert ended.returncode == 2
    assert "mode: there is no mode 'plam'; there are default, plan. Did you mean plan?" in ended.stderr
    ended = run("run", "--model", "nosuch.gguf", "--mode", "default", "--plan", "go")
    assert ended.returncode == 2
    assert "give one of them" in ended.stderr


def test_in_a_chat_only_the_message_of_plan_enters_the_session(run, tiny_llama, logged):
    typed = [
        "/plan", "/plan off", "/plan look at @README.md", "/mode", "/mode nothing", "/plan off", "/plan off",
        "/plan done", "hello",
    ]  # fmt: skip
    ended = run("chat", "--model", tiny_llama, *SMALL, typed="\n".join(typed) + "\n")
    assert ended.returncode == 0, ended.stderr
    assert [event["text"] for event in logged("user/message")] == ["look at @README.md", "hello"]
    assert [event["mode"] for event in logged("mode/set")] == ["plan", "default"]
    assert [event["producer"] for event in logged("notice")] == ["mode", "mode"]
    for said in (
        "mode default; plan from the next message on",
        "mode plan\n",
        "there are default, plan",
        "there is no mode 'nothing'",
        "mode plan; default from the next message on",
        "plan mode is not on",
        "there is no plan in force",
    ):
        assert said in ended.stderr


def test_plan_done_closes_the_plan_that_a_resumed_session_submitted(run, tiny_llama, workspace, logged):
    assert run("run", "--model", tiny_llama, *SMALL, "--plan", "go").returncode == 0
    save(workspace, holder=None, task="go")
    ended = run("resume", *SMALL, typed="/plan done\n/plan done\n")
    assert ended.returncode == 0, ended.stderr
    assert "closed: go\n" in ended.stderr
    assert "there is no plan in force" in ended.stderr
    assert [event["task"] for event in logged("plan/closed")] == ["go"]
    assert logged("user/message") != []
    assert "closed" in run("plan", "status").stdout
    assert "plan/closed       go" in run("log", "show").stdout
