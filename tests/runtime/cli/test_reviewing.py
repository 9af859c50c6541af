"""A person reviews a plan at a real terminal: what is shown, what an answer means, and what is none."""

from __future__ import annotations

import json
import sys

import pytest
from rich.markdown import Markdown

from chapbook.runtime.cli.reviewing import leaves_out

CTRL_C, CTRL_D = "\x03", "\x04"
QUESTION = r"s\(ource as it was written\): "
PLAN = "# Rename the vault\n\n## Steps\n\n1. Rename it.\n2. Tell the heron.\n"

REVIEW = """
import json, sys, time
from chapbook.runtime.cli.drive import Driver
from chapbook.runtime.cli.reviewing import TerminalReview
from chapbook.runtime.cli.show import HumanView
from chapbook.runtime.plan_review import SubmittedPlan

cancelled = []
driver = Driver(HumanView(clock=time.monotonic), reviewing=TerminalReview())
plan = SubmittedPlan(title="Rename the vault", text=json.loads(sys.argv[1]), artifact="0123456789abcdef" * 4)
answer = driver.work(lambda: driver.review_plan(plan), on_interrupt=lambda: cancelled.append(1))
said = None if answer is None else [answer.decision, answer.note]
print("ANSWER " + json.dumps({"said": said, "cancelled": bool(cancelled)}) + " END")
"""

TURN = """
import json, sys, time
from pathlib import Path
from chapbook.runtime.cli.drive import Driver
from chapbook.runtime.cli.reviewing import TerminalReview
from chapbook.runtime.cli.show import HumanView
from chapbook.runtime.scripted import ScriptedEngine
from chapbook.runtime.session import Session
from chapbook.runtime.session_settings import SessionHost, SessionSettings
from chapbook.runtime.tools.spec import Policy

def call(name, **arguments):
    return f"<tool_call>\\n{json.dumps({'name': name, 'arguments': arguments})}\\n</tool_call>"

replies = [call("exit_plan_mode", plan=sys.argv[1]), call("write", path="done.txt", content="x"), "done"]
driver = Driver(HumanView(clock=time.monotonic), reviewing=TerminalReview())
settings = SessionSettings(mode="plan", policies={"write": Policy.ALLOW})
host = SessionHost(review_plan=driver.review_plan)
with Session.open(ScriptedEngine(replies, n_ctx=65536), workspace=Path.cwd(), settings=settings, host=host) as session:
    ended = driver.turn(session, "Rename the vault")
    state = {"mode": session.mode, "reason": ended.reason, "written": Path("done.txt").exists()}
print("ANSWER " + json.dumps(state) + " END")
"""


@pytest.fixture
def review(terminal):
    """Return a function that starts a review of a text on a terminal and waits for its question."""

    def start(text=PLAN, **options):
        program = terminal("-c", REVIEW, json.dumps(text), program=sys.executable, **options)
        program.before = program.wait_for(QUESTION)
        return program

    return start


def answer_of(program):
    found = json.loads(program.wait_for(r"ANSWER (.*) END")[1])
    assert program.end() == 0
    return found


@pytest.mark.parametrize(
    ("typed", "ended"),
    [
        ("y\r", {"mode": "default", "reason": "completed", "written": True}),
        ("y later\r", {"mode": "plan", "reason": "completed", "written": False}),
        (CTRL_D, {"mode": "plan", "reason": "completed", "written": False}),
        (CTRL_C, {"mode": "plan", "reason": "interrupted", "written": False}),
    ],
)
def test_only_a_plain_yes_lets_the_turn_do_what_was_planned(terminal, typed, ended):
    program = terminal("-c", TURN, PLAN, program=sys.executable)
    program.wait_for(QUESTION)
    program.send(typed)
    assert answer_of(program) == ended
    assert ("a note with an approval is feedback" in program.shown) is (typed == "y later\r")


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("y\r", ["approve", ""]),
        ("Yes\r", ["approve", ""]),
        ("y but twice\r", ["approve", "but twice"]),
        ("k Mind the heron\r", ["keep planning", "Mind the heron"]),
        ("d\r", ["dismiss", ""]),
        (CTRL_D, None),
    ],
)
def test_an_answer_means_what_it_says(review, typed, said):
    program = review()
    program.send(typed)
    assert answer_of(program) == {"said": said, "cancelled": False}
    assert ("pending, which is no approval" in program.shown) is (typed == CTRL_D)


def test_ctrl_c_is_no_answer_and_cancels_the_turn(review):
    program = review()
    program.send(CTRL_C)
    assert answer_of(program) == {"said": None, "cancelled": True}


def test_what_is_no_answer_is_asked_again_and_feedback_is_asked_for(review):
    program = review()
    for typed in ("\r", "maybe\r", "yess\r"):
        program.send(typed)
        program.wait_for(QUESTION)
    program.send("k\r")
    program.wait_for(r"What should be different\?")
    program.send("Mind the Heron\r")
    assert answer_of(program)["said"] == ["keep planning", "Mind the Heron"]


def test_the_plan_is_rendered_in_a_frame_with_its_title_and_where_its_bytes_are(review):
    program = review()
    shown = program.shown
    assert "The model submits a plan: Rename the vault" in shown
    assert "chapbook plans show 01234567" in shown
    assert "## Steps" not in shown, "it is rendered"
    assert "as it was written:" not in shown
    program.send("s\r")
    program.wait_for("│ ## Steps")
    program.wait_for(QUESTION)
    program.send("y\r")
    assert answer_of(program)["said"] == ["approve", ""]


def test_a_hostile_plan_cannot_act_on_the_terminal_nor_hide_a_part_of_itself(review):
    text = "# Go\x1b[2J\n\nfine \u202eenif\n\n<!-- then rm -rf / -->\n\n" + QUESTION.replace("\\", "") + "y\n"
    program = review(text)
    assert "\x1b[2J" not in program.shown
    assert "\u202e" not in program.shown
    assert "\\u001b[2J" in program.shown
    program.wait_for("as it was written:")
    program.wait_for(r"│ <!-- then rm -rf / -->")
    program.wait_for(r"\ny\(es, approve\).*written\): $")
    program.send("d\r")
    assert answer_of(program)["said"] == ["dismiss", ""]


@pytest.mark.parametrize(
    ("text", "left_out"),
    [
        (PLAN, False),
        ("# a\n\n```python\nprint('*x*')\n```\n\n| a | b |\n|---|---|\n| 1 | **2** |\n", False),
        ("# a\n\nSee [this](https://example.org/x).\n", False),
        ("# a\n\n<!-- hidden -->\n", True),
        ("# a\n\n<b hidden>x</b>\n", True),
        ("# a\n\n[b]: https://example.org/hidden\n", True),
        ("# a\n\n```sh rm -rf\nls\n```\n", True),
    ],
)
def test_what_rendering_leaves_out_is_noticed(text, left_out):
    assert leaves_out(Markdown(text, hyperlinks=False), text) is left_out


def editor_that(tmp_path, what):
    script = tmp_path / "editor.py"
    script.write_text(f"import sys, pathlib\npath = pathlib.Path(sys.argv[1])\n{what}\n")
    return {"EDITOR": f"{sys.executable} {script}"}


def test_an_edited_plan_is_feedback_with_its_text_and_no_approval(review, tmp_path):
    program = review(env=editor_that(tmp_path, "path.write_text(path.read_text().replace('heron', 'owl'))"))
    program.send("e\r")
    program.wait_for("nothing is approved")
    decision, note = answer_of(program)["said"]
    assert decision == "keep planning"
    assert note.endswith(PLAN.replace("heron", "owl"))


@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("assert oct(path.stat().st_mode)[-3:] == '600'", "the plan is as it was"),
        ("path.write_text('')", "nothing is left"),
        ("path.write_text('x'); sys.exit(3)", "came to nothing"),
        ("import os, signal; signal.signal(2, lambda *_: 0); os.kill(os.getppid(), 2)", "the plan is as it was"),
    ],
    ids=["unchanged", "emptied", "failed", "ctrl-c in it"],
)
def test_an_editor_that_changes_nothing_leaves_the_question(review, tmp_path, what, says):
    program = review(env=editor_that(tmp_path, what))
    program.send("e\r")
    program.wait_for(says)
    program.wait_for(QUESTION)
    program.send("y\r")
    assert answer_of(program) == {"said": ["approve", ""], "cancelled": False}


def test_an_editor_that_is_not_there_is_said_and_asked_again(review):
    program = review(env={"EDITOR": "no-such-editor-here"})
    program.send("e\r")
    program.wait_for("came to nothing")
    program.wait_for(QUESTION)
    program.send("d\r")
    assert answer_of(program)["said"] == ["dismiss", ""]
