"""`chapbook chat` on a real terminal, and without one."""

from __future__ import annotations

import stat

import pytest

SMALL = "--n-ctx=8192", "--max-reply-tokens=24", "--seed=1", "--tool-choice=none", "--set=turn.continuations=0"
LONG = "--n-ctx=32768", "--max-reply-tokens=24", "--seed=1", "--tool-choice=none", "--set=arrival_tokens=26000"
CTRL_C, CTRL_D, ALT_ENTER, ENTER, TAB, UP = "\x03", "\x04", "\x1b\r", "\r", "\t", "\x1b[A"
PROMPT = r"\x1b\[0m>"
LEDGER = (
    r"step 1 · [\d,]+ in window · [\d,]+ cached(?: \([a-z ]+\))? · [\d,]+ evaluated"
    r" · [\d,]+ generated · TTFT [\d.]+ s · bound [\d,]+"
)


@pytest.fixture
def chat(terminal, tiny_llama):
    """Return a chat that waits for its first message."""
    program = terminal("chat", "--model", tiny_llama, *SMALL)
    program.wait_for(PROMPT)
    return program


def leave(program):
    program.wait_for(PROMPT)
    program.send(CTRL_D)
    assert program.end() == 0


@pytest.mark.slow  # it starts the program several times
@pytest.mark.parametrize(
    ("typed", "message"),
    [
        (f"first line{ALT_ENTER}second line", "first line\nsecond line"),
        ("first line\x1b\rsecond line", "first line\nsecond line"),
        ("\x1b[200~pasted one\npasted two\x1b[201~", "pasted one\npasted two"),
        (f"dropped{CTRL_C}sent", "sent"),
    ],
    ids=["alt-enter", "escape enter", "paste", "ctrl-c clears the line"],
)
def test_what_is_typed_is_the_message(chat, logged, typed, message):
    chat.send(typed)
    chat.send(ENTER)
    chat.wait_for(LEDGER)
    leave(chat)
    assert [event["text"] for event in logged("user/message")] == [message]


def test_tab_completes_a_path_of_the_workspace(chat, logged):
    chat.send(f"look at @READ{TAB}")
    chat.wait_for(r"ME\.md")
    chat.send(ENTER)
    chat.wait_for(LEDGER)
    leave(chat)
    assert [event["text"] for event in logged("user/message")] == ["look at @README.md"]


@pytest.mark.slow  # it starts the program several times
def test_the_history_outlives_the_session_and_is_the_users_alone(terminal, tiny_llama, logged, home):
    for keys in ("remember this", UP):
        program = terminal("chat", "--model", tiny_llama, *SMALL)
        program.wait_for(PROMPT)
        program.send(keys + ENTER)
        program.wait_for(LEDGER)
        leave(program)
        assert [event["text"] for event in logged("user/message")] == ["remember this"]
    (history,) = home.rglob("chapbook/history")
    assert stat.S_IMODE(history.stat().st_mode) == 0o600


def test_ctrl_c_cancels_the_step_and_not_the_program(terminal, tiny_llama, logged, large_file):
    program = terminal("chat", "--model", tiny_llama, *LONG)
    program.wait_for(PROMPT)
    program.send(f"read @{large_file}" + ENTER)
    program.wait_for("mention read")
    program.send(CTRL_C)
    program.wait_for("turn ended, interrupted: cancelled during the prefill")
    program.wait_for(PROMPT)
    program.send("/tokens" + ENTER)
    program.wait_for(r"window [\d,]+ of 32,768 tokens")
    leave(program)
    assert [event["reason"] for event in logged("turn/end")] == ["interrupted"]


def test_ctrl_c_on_an_empty_prompt_leaves_at_the_second_time(chat):
    chat.send(CTRL_C)
    chat.wait_for("Ctrl-C again leaves")
    chat.wait_for(PROMPT)
    chat.send(CTRL_C)
    assert chat.end() == 0


def test_commands_stay_out_of_the_history_of_the_session(chat, logged):
    for command, shown in (("/help", "Alt-Enter"), ("/tokens", "reply reserve"), ("/log", "session/start")):
        chat.send(command + ENTER)
        chat.wait_for(shown)
        chat.wait_for(PROMPT)
    chat.send("/quit" + ENTER)
    assert chat.end() == 0
    assert logged("user/message") == []


def test_a_message_that_is_too_large_is_stored_and_the_person_is_told(chat, logged):
    chat.send("\x1b[200~" + "too long " * 1000 + "\x1b[201~")
    chat.send(ENTER)
    chat.wait_for("The whole is stored")
    chat.wait_for(LEDGER)
    leave(chat)
    (message,) = logged("user/message")
    assert message["artifact"]
    assert message["text"].startswith("too long too long")


def test_without_a_terminal_each_line_is_a_message(run, tiny_llama, logged):
    ended = run("chat", "--model", tiny_llama, *SMALL, typed="one\n\ntwo @README.md\n/quit\nthree\n")
    assert ended.returncode == 0, ended.stderr
    assert [event["text"] for event in logged("user/message")] == ["one", "two @README.md"]
    assert len(ended.stdout.splitlines()) >= 2
    assert "\x1b" not in ended.stderr


@pytest.mark.slow  # it starts the program several times
def test_resume_without_a_task_goes_on_as_a_chat(run, tiny_llama, logged):
    assert run("run", "--model", tiny_llama, *SMALL, "one").returncode == 0
    ended = run("resume", *SMALL, typed="two\n")
    assert ended.returncode == 0, ended.stderr
    assert [event["text"] for event in logged("user/message")] == ["one", "two"]


@pytest.mark.slow  # it starts the program several times
def test_a_session_that_a_chat_holds_is_not_written_to_by_another_process(chat, run):
    ended = run("resume", "latest", "and I")
    assert ended.returncode == 1
    assert f"held by process {chat.process.pid}" in ended.stderr
    leave(chat)
