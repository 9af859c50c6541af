"""A turn as a person reads it, event by event, where standard output is no terminal."""

from __future__ import annotations

import pytest

from chapbook.runtime.calls import CallId, LoggedCall
from chapbook.runtime.cli.show import HumanView
from chapbook.runtime.events import BreakReport, StepUsage, TurnEndReason
from chapbook.runtime.stream import (
    NoticeGiven,
    StepEnded,
    SubagentEvent,
    TextDelta,
    ToolFinished,
    ToolStarted,
    TurnEnded,
)

CALL = LoggedCall(id=CallId("call00001"), name="read", arguments={"path": "a\x1b[2J\nstep 9 · all is well", "limit": 3})
USAGE = StepUsage(window=20, cached=12, evaluated=8, generated=5, bound=8)


def result(**changes):
    values = {"call_id": CALL.id, "name": CALL.name, "content": "x" * 1200, "is_error": False, "artifact": None}
    return ToolFinished(**{**values, "tokens": 300, "seconds": 0.25, **changes})


def ended(text, reason=TurnEndReason.COMPLETED, detail=""):
    return TurnEnded(turn=1, reason=reason, rounds=2, text=text, detail=detail)


@pytest.fixture
def shown(capsys):
    """Return a function that shows events and returns what was written to both outputs."""

    def show(*events):
        view = HumanView(clock=lambda: 0.0)
        for event in events:
            view.show(event)
        return capsys.readouterr()

    return show


def test_what_is_said_before_a_call_is_no_part_of_the_answer(shown):
    written = shown(TextDelta(text="Let me"), TextDelta(text=" look."), ToolStarted(call=CALL), result(),
                    TextDelta(text="It is"), TextDelta(text=" blue."), ended("It is blue."))  # fmt: skip
    assert written.out == "It is blue.\n"
    assert written.err.startswith("Let me look.\ncall read ")
    assert "blue" not in written.err


def test_a_call_is_one_line_with_its_outcome_whatever_its_arguments(shown):
    (line,) = shown(ToolStarted(call=CALL), result()).err.splitlines()
    assert line == "call read path=a\\u001b[2J\\nstep 9 · all is well limit=3 → 300 tokens, 1.2 kB, 0.2 s"
    stub = shown(ToolStarted(call=CALL, by_runtime=True),
                 result(artifact="0123456789abcdef", is_stub=True, size_bytes=78_043, redacted=2)).err  # fmt: skip
    assert stub.startswith("mention read ")
    told = "78.0 kB, stored without 2 secrets: chapbook artifact read 0123456789ab; the model reads 300 tokens of it"
    assert told in " ".join(stub.split())
    failed = shown(ToolStarted(call=CALL), result(content="no such\x9b file\nsecond line", is_error=True)).err
    assert failed.endswith(", error: no such\\u009b file\n")


@pytest.mark.parametrize(
    ("footer", "told"),
    [
        ("[lines 1-71 of 125; next: offset=72]", ", lines 1-71 of 125"),
        ("[lines 1-71 of more than 9000; next: offset=72; CRLF line ends]", ", lines 1-71 of more than 9000"),
        ("[lines 1-2 of 9; next: offset=3]\n[contents after line 2]\n7\t# More", ", lines 1-2 of 9"),
        ("[line 1, bytes 1-50 of 900; 3 lines in all; next: offset=1, column=51]", ", line 1, bytes 1-50 of 900"),
        ("[lines 1-1 of 1]", ""),
        ("[lines 1-1 of 1; no newline at the end]", ""),
    ],
)
def test_a_page_of_a_file_with_more_behind_it_says_which_part_it_is(shown, footer, told):
    content = f"1\t[lines 3-4 of 5; next: offset=6]\n{footer}"
    (line,) = shown(ToolStarted(call=CALL, by_runtime=True), result(content=content)).err.splitlines()
    assert line.endswith(f"→ 300 tokens, {len(content)} B{told}, 0.2 s")
    other = shown(result(content=content, name="bash")).err
    assert "lines" not in other, "what another tool writes is not read's footer"
    assert "lines" not in shown(result(content=content, artifact="0123456789abcdef", is_stub=True)).err


def test_an_undeclared_break_is_loud(shown):
    broken = StepUsage(
        window=20, cached=4, evaluated=16, generated=5, bound=8, undeclared_break=BreakReport(section="user", token=4)
    )
    quiet, loud = (shown(StepEnded(turn=1, step=1, usage=usage)).err for usage in (USAGE, broken))
    assert len(quiet.splitlines()) == 1
    assert loud.splitlines()[1].startswith("UNDECLARED BREAK at token 4, in user: what follows it was evaluated again")


def test_a_turn_that_was_not_completed_says_why(shown):
    assert shown(ended("done")).err == ""
    written = shown(ended("so far", TurnEndReason.STUCK, "the same call\x1b[2J three times"))
    assert written.out == "so far\n"
    assert written.err == "turn ended, stuck: the same call\\u001b[2J three times\n"


def test_notices_are_one_line_each(shown):
    assert shown(NoticeGiven(producer="mentions", text="no file\n'x'")).err == "mentions: no file\\n'x'\n"


def test_a_subagent_is_a_line_for_each_call_step_and_end_and_its_words_are_no_part_of_the_answer(shown):
    inner = (
        TextDelta(text="inner"),
        ToolStarted(call=CALL),
        result(),
        StepEnded(turn=1, step=1, usage=USAGE),
        ended("x"),
    )
    written = shown(*(SubagentEvent(session="the-child", event=event) for event in inner), ended("It is blue."))
    assert written.out == "It is blue.\n"
    call, step, end = written.err.splitlines()
    assert call.startswith("subagent the-child · call read path=a\\u001b[2J")
    assert step.startswith("subagent the-child · step 1 · 20 in window · 12 cached")
    assert end == "subagent the-child · ended, completed, rounds: 2"
