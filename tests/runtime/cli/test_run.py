"""`chapbook run` and `resume` as processes: what goes where, exit codes, interrupts, bad input."""

from __future__ import annotations

import json
import re
import resource
import signal
import subprocess
import time

import pytest

SMALL = "--n-ctx=8192", "--max-reply-tokens=24", "--seed=1", "--tool-choice=none", "--set=turn.continuations=0"
LONG = "--n-ctx=32768", "--max-reply-tokens=24", "--seed=1", "--tool-choice=none", "--set=arrival_tokens=26000"
LEDGER = re.compile(
    r"^step \d+ · [\d,]+ in window · [\d,]+ cached(?: \([a-z ]+\))? · [\d,]+ evaluated"
    r" · [\d,]+ generated · TTFT [\d.]+ s · bound [\d,]+"
)
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
STYLE = re.compile(r"\x1b\[[\d;]*m")


@pytest.fixture
def run_small(run, tiny_llama):
    """Return a function that runs one turn on the tiny model."""
    return lambda *arguments, **options: run("run", "--model", tiny_llama, *SMALL, *arguments, **options)


def events_of(output):
    return [json.loads(line) for line in output.splitlines()]


def test_the_answer_alone_is_on_standard_output(run_small, logged):
    ended = run_small("What is a chapbook? @README.md:1-3")
    assert ended.returncode == 0, ended.stderr
    (message,) = [event for event in logged("assistant/message") if event["author"] == "model"]
    assert ended.stdout == message["text"] + "\n"


def test_everything_else_is_on_standard_error(run_small):
    shown = run_small("What is a chapbook? @README.md:1-3").stderr.splitlines()
    assert "n_ctx 8,192 (as asked)" in shown[0]
    assert shown[2].startswith("mention read path=README.md offset=1 limit=3 → ")
    assert LEDGER.match(shown[3])
    assert shown[-1].startswith("to go on: chapbook resume ")


def test_the_task_is_read_from_standard_input(run_small, logged):
    assert run_small("-", typed="two\nlines\n").returncode == 0
    assert [event["text"] for event in logged("user/message")] == ["two\nlines\n"]


def test_a_cache_that_cannot_be_written_is_said_once_and_the_answer_comes_all_the_same(run_small, tmp_path):
    (tmp_path / "file").write_text("x")
    ended = run_small("Say something.", "--set", f"cache.folder={tmp_path / 'file'}")
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.strip()
    (said,) = [line for line in ended.stderr.splitlines() if line.startswith("cache: ")]
    assert "was not written" in said
    assert "file" in said
    assert "cache: " not in run_small("Say something.", "--set", "cache.disk=false").stderr


def test_json_lines_are_the_events_of_the_turn(run_small):
    ended = run_small("--json", "What is a chapbook? @README.md:1-3")
    assert ended.returncode == 0, ended.stderr
    events = events_of(ended.stdout)
    assert [event["type"] for event in events][:2] == ["session/open", "turn/start"]
    assert events[-1]["type"] == "turn/end"
    (usage,) = [event["usage"] for event in events if event["type"] == "step/end"]
    assert usage.keys() >= {"cached", "evaluated", "generated", "bound", "undeclared_break", "ttft_s", "prefill_s"}
    assert usage["evaluated"] == usage["bound"] == usage["window"]
    text = "".join(event["text"] for event in events if event["type"] == "text")
    assert text.strip() == events[-1]["text"]


def test_a_failed_run_says_so_in_json_too(run):
    ended = run("run", "--json", "--model", "nosuch.gguf", "hello")
    assert ended.returncode == 2
    (error,) = events_of(ended.stdout)
    assert error["type"] == "error"
    assert error["kind"] == "ModelNotFound"
    assert "nosuch.gguf" in error["message"]
    assert f"chapbook: {error['message']}\n" == ended.stderr


@pytest.mark.slow  # it starts the program several times
def test_resume_takes_the_model_and_the_window_of_the_session(run_small, run, logged):
    assert run_small("one").returncode == 0
    ended = run("resume", "latest", "two", "--max-reply-tokens=8", "--tool-choice=none", "--json")
    assert ended.returncode == 0, ended.stderr
    opened = events_of(ended.stdout)[0]
    assert (opened["n_ctx"], opened["resumed"]) == (8192, True)
    assert [event["text"] for event in logged("user/message")] == ["one", "two"]


def test_a_turn_that_ends_otherwise_ends_with_1_and_says_why(run, tiny_llama):
    small = [flag for flag in SMALL if not flag.startswith("--tool-choice")]
    ended = run(
        "run", "--model", tiny_llama, *small, "--tool-choice=read", "--max-reply-tokens=400", "--rounds=1", "go"
    )
    assert ended.returncode == 1, ended.stdout
    assert "turn ended, round_cap: the turn took all of its 1 rounds" in ended.stderr
    assert re.search(r"^call read .*path=README.md.* → \d+ tokens, ", ended.stderr, re.MULTILINE)


@pytest.mark.slow  # it starts the program several times
def test_nobody_to_ask_means_deny_and_names_the_flag(run, tiny_llama):
    small = [flag for flag in SMALL if not flag.startswith("--tool-choice")]
    forced = *small, "--tool-choice=read", "--max-reply-tokens=400", "--rounds=1"
    asked = run("run", "--model", tiny_llama, *forced, "--ask=read", "go")
    assert "error: read needs approval and nobody is here to give it; --allow read would allow it" in asked.stderr
    denied = run("run", "--model", tiny_llama, *forced, "--deny=read", "go")
    assert "error: read is denied by policy" in denied.stderr


@pytest.mark.slow  # it starts the program several times
@pytest.mark.slow  # it starts the program several times
@pytest.mark.parametrize("key", ["y", "n"])
def test_a_person_is_asked_on_the_terminal(terminal, tiny_llama, logged, key):
    program = terminal(
        "run", "--model", tiny_llama, "--n-ctx=8192", "--seed=1", "--tool-choice=read", "--ask=read", "--rounds=1",
        "--max-reply-tokens=400", "go",
    )  # fmt: skip
    program.wait_for(r"The model wants to call read:")
    program.wait_for(r"│ path: README\.md")
    program.wait_for(r"Allow read\?")
    program.send(f"{key}\r")
    program.wait_for("turn ended, round_cap")
    assert program.end() == 1
    (result,) = logged("tool/result")
    assert ("did not approve" in result["content"]) == (key == "n")


def test_ctrl_c_at_a_question_is_no_approval(terminal, tiny_llama, logged):
    program = terminal(
        "run", "--model", tiny_llama, "--n-ctx=8192", "--seed=1", "--tool-choice=read", "--ask=read",
        "--max-reply-tokens=400", "go",
    )  # fmt: skip
    program.wait_for(r"Allow read\?")
    program.send("\x03")
    assert program.end() == 130
    (result,) = logged("tool/result")
    assert result["is_error"]
    assert [event["reason"] for event in logged("turn/end")] == ["interrupted"]


@pytest.mark.slow  # it starts the program several times
def test_an_interrupt_in_a_prefill_ends_with_130_and_leaves_a_log_that_goes_on(
    start, run, tiny_llama, large_file, logged
):
    program = start("run", "--json", "--model", tiny_llama, *LONG, f"read @{large_file}")
    for line in program.stdout:
        if json.loads(line)["type"] == "prefill":
            break
    program.send_signal(signal.SIGINT)
    rest, _ = program.communicate(timeout=60)
    assert program.returncode == 130
    assert events_of(rest.decode())[-1]["reason"] == "interrupted"
    verified = run("log", "verify")
    assert verified.returncode == 0, verified.stdout
    resumed = run("resume", "latest", "go on", "--max-reply-tokens=8", "--tool-choice=none")
    assert resumed.returncode == 0, resumed.stderr
    assert run("log", "verify").returncode == 0
    assert [event["reason"] for event in logged("turn/end")] == ["interrupted", "completed"]


@pytest.mark.slow  # it starts the program several times
def test_a_second_interrupt_leaves_at_once_and_the_log_is_whole(start, run, tiny_llama, logged, tmp_path):
    small = [flag for flag in SMALL if not flag.startswith("--tool-choice")]
    begun = tmp_path / "begun"
    waits = f"--set=hooks.before=[{{command=['sh','-c','touch {begun}; sleep 60'],timeout_s=60}}]"
    program = start(
        "run", "--json", "--model", tiny_llama, *small, "--tool-choice=read", "--max-reply-tokens=400", waits, "go"
    )
    while not begun.exists():
        assert program.poll() is None
        time.sleep(0.02)
    program.send_signal(signal.SIGINT)
    with pytest.raises(subprocess.TimeoutExpired):
        program.wait(1)  # the hook does not listen to the cancel
    program.send_signal(signal.SIGINT)
    assert program.wait(30) == 130
    assert run("log", "verify").returncode == 0
    assert logged("turn/end") == []
    resumed = run("resume", "latest", "go on", "--max-reply-tokens=8", "--tool-choice=none")
    assert resumed.returncode == 0, resumed.stderr
    assert "no call of it is run again" in resumed.stderr


@pytest.mark.slow  # it starts the program several times
def test_a_closed_pipe_is_no_traceback(start, run, tiny_llama):
    program = start("run", "--json", "--model", tiny_llama, *SMALL, "go")
    program.stdout.readline()
    program.stdout.close()
    program.stdout = None
    _, err = program.communicate(timeout=60)
    assert program.returncode == 1
    assert b"Traceback" not in err
    assert run("log", "verify").returncode == 0


@pytest.mark.slow  # it starts the program several times
def test_the_log_is_whole_after_a_write_that_failed(run, start, tiny_llama, workspace):
    def little_room():
        resource.setrlimit(resource.RLIMIT_FSIZE, (16_000, 16_000))

    (workspace / "some.txt").write_text("a line of text\n" * 150)
    flags = "run", "--model", tiny_llama, "--n-ctx=16384", *SMALL[1:]
    assert run(*flags, "what there is to learn of the template is learnt now").returncode == 0
    program = start(*flags, "@some.txt @some.txt:2 @some.txt:3-9 @README.md", preexec_fn=little_room)
    _, err = program.communicate(timeout=60)
    assert program.returncode == 1
    assert b"chapbook: nothing was written to" in err
    assert b"Traceback" not in err
    verified = run("log", "verify")
    assert verified.returncode == 0, verified.stdout


# Hostile text


def test_a_model_that_writes_control_characters_cannot_act_on_the_terminal(terminal, tiny_llama):
    program = terminal(
        "run", "--model", tiny_llama, "--n-ctx=8192", "--max-reply-tokens=3000", "--seed=3", "--tool-choice=none",
        "--set=sampling.top_k=0", "--set=sampling.top_p=1", "--set=sampling.min_p=0", "--temperature=3", "go",
        stderr=subprocess.DEVNULL,
    )  # fmt: skip
    assert program.end() in (0, 1)
    assert re.search(r"\\u00[01][0-9a-f]", program.shown), "the noise held no control character: take another seed"
    assert not CONTROL.search(program.shown.replace("\r\n", "\n"))


@pytest.mark.slow  # it starts the program several times
def test_no_color_means_no_styles(terminal, tiny_llama):
    coloured = terminal("run", "--model", tiny_llama, *SMALL, "go")
    coloured.end()
    assert STYLE.search(coloured.shown)
    for arguments, variables in (([], {"NO_COLOR": "1"}), (["--no-color"], {})):
        plain = terminal("run", "--model", tiny_llama, *SMALL, *arguments, "go", env=variables)
        assert plain.end() == 0
        assert not STYLE.search(plain.shown)


def test_a_bar_with_an_estimate_stands_for_a_long_prefill(terminal, tiny_llama, large_file):
    program = terminal("run", "--model", tiny_llama, *LONG, f"read @{large_file}")
    program.wait_for(r"reading .*of [\d,]+ tokens · \d+ s left")
    program.send("\x03")
    assert program.end() == 130


# Bad input


@pytest.fixture
def broken_models(tmp_path, tiny_llama):
    """Return models that cannot be used, by what is wrong with them."""
    whole = tiny_llama.read_bytes()
    contents = {"truncated": whole[: len(whole) // 2], "no GGUF": b"hello, I am a text\n", "empty": b""}
    paths = {}
    for name, content in contents.items():
        paths[name] = tmp_path / f"{name}.gguf"
        paths[name].write_bytes(content)
    return {**paths, "missing": tmp_path / "missing.gguf", "a folder": tmp_path}


@pytest.mark.parametrize("wrong", ["truncated", "no GGUF", "empty", "missing", "a folder"])
def test_a_model_that_cannot_be_used_is_one_message_and_2(run, broken_models, wrong):
    ended = run("run", "--model", broken_models[wrong], "hello")
    assert ended.returncode == 2
    assert str(broken_models[wrong]) in ended.stderr
    assert ended.stderr.startswith("chapbook: ")
    assert ended.stdout == ""


def test_a_window_too_small_for_the_prefix_says_the_numbers(run, tiny_llama):
    ended = run("run", "--model", tiny_llama, "--n-ctx=1024", "hello")
    assert ended.returncode == 2
    assert re.search(r"n_ctx is 1,024; the session prefix alone is [\d,]+ tokens .*at least [\d,]+", ended.stderr)
    assert run("sessions", "--json").stdout == "[]\n"


@pytest.mark.parametrize("wrong", ["a file", "missing"])
def test_a_workspace_that_is_no_folder_is_one_message_and_2(run, tiny_llama, workspace, wrong):
    path = workspace / ("README.md" if wrong == "a file" else "nosuch")
    ended = run("run", "--model", tiny_llama, "-C", path, "hello")
    assert ended.returncode == 2
    assert ended.stderr.startswith(f"chapbook: the workspace {path} ")


def test_a_working_folder_that_has_vanished_is_one_message_and_2(environment, tmp_path, start):
    gone = tmp_path / "gone"
    gone.mkdir()
    program = subprocess.Popen(
        ["sh", "-c", 'cd gone && rmdir ../gone && exec "$0" run hello', str(start("--version").args[0])],
        cwd=tmp_path,
        env=environment,
        stderr=subprocess.PIPE,
    )
    _, err = program.communicate(timeout=60)
    assert program.returncode == 2, err
    assert err.startswith(b"chapbook: the workspace")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--set", "engine.nctx=1"], "did you mean `engine.n_ctx`?"),
        (["--rounds", "100"], "turn.rounds: expected a whole number from 1 to 64"),
        (["--allow", "bsh"], "did you mean `bash`?"),
        (["--tool-choice", "reed"], "did you mean read?"),
        (["--dialect", "klingon"], "dialect: expected one of"),
    ],
)
def test_a_setting_that_cannot_be_is_one_message_and_2(run, tiny_llama, arguments, expected):
    ended = run("run", "--model", tiny_llama, *arguments, "hello")
    assert ended.returncode == 2
    assert expected in ended.stderr
    assert len(ended.stderr.splitlines()) == 1


@pytest.mark.slow  # it starts the program several times
def test_an_unknown_key_in_the_workspaces_file_names_the_nearest(run, tiny_llama, workspace):
    (workspace / "chapbook.toml").write_text("[engine]\nnctx = 4096\n")
    ended = run("run", "--model", tiny_llama, "hello")
    assert ended.returncode == 2
    assert "chapbook.toml:2: engine.nctx: there is no such key; did you mean `engine.n_ctx`?" in ended.stderr
    assert run("run", "--model", tiny_llama, *SMALL, "--no-workspace-config", "hello").returncode == 0


def test_without_a_model_the_choice_is_listed(run, home, tiny_llama):
    own = home / ".local" / "share" / "chapbook" / "models"
    own.mkdir(parents=True)
    for name in ("one", "two"):
        (own / f"{name}.gguf").write_bytes(tiny_llama.read_bytes() + name.encode())
    ended = run("run", "hello")
    assert ended.returncode == 2
    assert "no model was named and" in ended.stderr
    assert "  one  (" in ended.stderr
