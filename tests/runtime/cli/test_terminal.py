"""What may reach a terminal, and how a person is asked."""

from __future__ import annotations

import json
import re
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chapbook.runtime.cli.show import ledger_line
from chapbook.runtime.cli.terminal import boxed, clipped, visible, visible_line
from chapbook.runtime.events import StepUsage

UNSAFE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
HOSTILE = "rm -rf x\x1b[2K\rls\nAllow bash? y(es)\u202e\x9b2J" + " " * 300 + "Allow bash? yes"


@given(st.text(st.characters(), max_size=60))
def test_no_text_can_act_on_a_terminal(text):
    assert not UNSAFE.search(visible(text))
    line = visible_line(text)
    assert not UNSAFE.search(line)
    assert not set(line) & {"\n", "\t"}


@given(st.text(st.characters(exclude_categories=["Cc", "Cf", "Cs", "Zl", "Zp"])))
def test_a_harmless_text_is_shown_as_it_is(text):
    assert visible(text) == visible_line(text) == text


@given(st.dictionaries(st.text(), st.text()))
def test_json_on_a_terminal_is_still_that_json(value):
    assert json.loads(visible(json.dumps(value, ensure_ascii=False))) == value


@given(st.text(max_size=400), st.integers(20, 120))
def test_each_row_of_a_box_begins_with_the_mark(text, width):
    rows = list(boxed(text, width=width))
    assert all(row.startswith("  │ ") for row in rows)
    assert "".join(row.removeprefix("  │ ") for row in rows) == visible_line(text)


def test_a_cut_is_marked():
    assert clipped("abcdef", 4) == "abc…"
    assert clipped("abcd", 4) == "abcd"


def test_the_ledger_line_gives_the_reason_of_a_difference():
    usage = StepUsage(window=4812, cached=4655, evaluated=157, generated=41, bound=157, ttft_s=0.86)
    line = "step 3 · 4,812 in window · 4,655 cached · 157 evaluated · 41 generated · TTFT 0.9 s · bound 157"
    assert ledger_line(3, usage) == line
    more = StepUsage(window=10, cached=0, evaluated=10, generated=1, bound=3, reason="7 more than the bound: evicted")
    assert ledger_line(1, more).endswith(" · bound 3 · 7 more than the bound: evicted")


ASK = f"""
from chapbook.runtime.cli.asking import TerminalAsk
from chapbook.runtime.calls import CallId, LoggedCall
from chapbook.runtime.tools.builtin import builtin_tools
ask = TerminalAsk(no_color=True)
bash = next(tool for tool in builtin_tools() if tool.name == "bash")
for command in ({HOSTILE!r}, "\\n".join(map(str, range(100)))):
    print("approved", ask(bash, LoggedCall(id=CallId("call00001"), name="bash", arguments={{"command": command}})))
"""


@pytest.fixture
def ask(terminal):
    """Return a program that asks about two hostile calls."""
    return terminal("-c", ASK, program=sys.executable)


def test_arguments_cannot_fake_the_question(ask):
    ask.wait_for(r"Allow bash\? y\(es\), N\(o\)[^:]*: ")
    shown = ask.shown.replace("\r\n", "\n")
    assert not UNSAFE.search(shown)
    lines = shown.splitlines()
    assert [line for line in lines if line.startswith("Allow bash?")] == lines[-1:]
    assert all(line.startswith("  │ ") for line in lines[1:-1])
    ask.send("\r")
    ask.wait_for("approved False")


def test_always_holds_for_that_tool_in_the_session(ask):
    ask.wait_for("a\\(lways")
    ask.send("a\r")
    ask.wait_for("approved True")
    ask.wait_for("approved True")
    assert ask.end() == 0


def test_a_long_argument_is_announced_and_shown_on_request(ask):
    ask.wait_for("a\\(lways")
    ask.send("n\r")
    ask.wait_for("approved False")
    ask.wait_for("and 60 more rows: v shows them")
    ask.wait_for("a\\(lways")
    ask.send("v\r")
    ask.wait_for("│ +99")
    ask.wait_for("a\\(lways")
    ask.send("yes\r")
    ask.wait_for("approved True")


def test_what_was_typed_before_the_question_is_no_answer(terminal):
    program = terminal("-c", f"print('typing', flush=True); import time; time.sleep(1){ASK}", program=sys.executable)
    program.wait_for("typing")
    program.send("a\r")
    program.wait_for("a\\(lways")
    program.send("n\r")
    program.wait_for("approved False")
