"""The commands that look: sessions, models, prefix, log, config, doctor; and what holds for every command."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from chapbook.runtime.scripted import ScriptedEngine
from chapbook.runtime.session import Session

PROGRAM = Path(sys.executable).with_name("chapbook")
SMALL = "--n-ctx=8192", "--max-reply-tokens=24", "--seed=1", "--tool-choice=none", "--set=turn.continuations=0"


@pytest.fixture(scope="module")
def recorded(tmp_path_factory, tiny_llama):
    """Return a store with one session of one turn, made once."""
    folder = tmp_path_factory.mktemp("recorded")
    (folder / "README.md").write_text("# chapbook\n")
    subprocess.run(
        [PROGRAM, "run", "--model", tiny_llama, *SMALL, "look\x1b[2J at @README.md"],
        cwd=folder,
        env={"HOME": str(folder)},
        capture_output=True,
        check=True,
    )
    return folder / ".chapbook"


@pytest.fixture
def session(recorded, workspace):
    """Return the folder of a session with one turn."""
    shutil.copytree(recorded, workspace / ".chapbook")
    (folder,) = (workspace / ".chapbook" / "sessions").iterdir()
    return folder


def lines_of(ended):
    return ended.stdout.splitlines()


def test_sessions_are_listed_and_what_they_began_with_is_harmless(run, terminal, session):
    (listed,) = json.loads(run("sessions", "--json").stdout)
    assert (listed["id"], listed["condition"], listed["turns"]) == (session.name, "at rest", 1)
    program = terminal("sessions", "--no-color")
    program.end()
    assert session.name in program.shown
    assert "look\\u001b[2J at @README.md" in program.shown
    assert "\x1b" not in program.shown


def test_a_session_that_is_held_shows_the_process_in_its_row_and_the_whole_holder_below(run, workspace):
    engine = ScriptedEngine(["one"], n_ctx=65_536)
    with Session.open(engine, workspace=workspace) as session:
        list(session.send("first"))
        _, row, below = lines_of(run("sessions"))
        (listed,) = json.loads(run("sessions", "--json").stdout)
    assert re.search(rf"  locked \(process {os.getpid()}\)  1  ", row)
    assert below == f"{session.id} is locked: {listed['detail']}"
    assert listed["detail"].startswith(f"process {os.getpid()} on ")
    assert listed["holder_pid"] == os.getpid()


def test_subagents_stand_below_their_session(run, workspace):
    engine = ScriptedEngine(["one", "child", "two"], n_ctx=65_536)
    with Session.open(engine, workspace=workspace) as first, Session.open(engine, workspace=workspace) as second:
        list(first.send("first"))
        child = first.subagent("the task").session
        list(second.send("second"))
    listed = [line.split("  ")[0] for line in lines_of(run("sessions"))[1:]]
    assert listed == [second.id, first.id, f"└ {child}"]
    assert f"subagent of {first.id}" in run("log", "show", child).stdout
    assert "model" in run("sessions", "--set", 'tools.deny=["task"]').stdout, "a policy may name it while it is off"


@pytest.mark.slow  # it starts the program several times
def test_models_are_listed_with_their_place(run, home, tiny_llama):
    own = home / ".local" / "share" / "chapbook" / "models"
    own.mkdir(parents=True)
    shutil.copy(tiny_llama, own / "mine.gguf")
    listed = {model["name"]: model for model in json.loads(run("models", "--json").stdout)}
    assert listed["mine"]["path"] == str(own / "mine.gguf")
    assert any(line.split()[0] == "mine" and str(own) in line for line in lines_of(run("models")))
    assert run("run", "--model", "mine", *SMALL, "hello").returncode == 0


# The prefix


@pytest.mark.slow  # it starts the program several times
def test_the_prefix_is_the_same_in_every_run_and_workspace_and_within_its_budget(run, smollm2_path, tmp_path):
    other = tmp_path / "elsewhere"
    other.mkdir()
    (other / "notes.txt").write_text("other files\n")
    outputs = {run("prefix", "--json", "--model", smollm2_path, *place).stdout for place in ([], [], ["-C", other])}
    (output,) = outputs
    told = json.loads(output)
    assert 0 < told["in_force_tokens"] < told["tokens"] <= 1500
    assert sum(section["tokens"] for section in told["sections"]) == told["tokens"]
    assert all(section["name"] and section["hash"] for section in told["sections"])


@pytest.mark.slow  # it starts the program several times
def test_the_prefix_in_force_is_what_a_session_has(run, tiny_llama, workspace):
    (workspace / "AGENTS.md").write_text("Write tests first.\n")
    told = json.loads(run("prefix", "--json", "--model", tiny_llama).stdout)
    opened = json.loads(lines_of(run("run", "--json", "--model", tiny_llama, *SMALL, "hello"))[0])
    assert told["in_force_tokens"] == opened["prefix_tokens"]
    assert "instructions" in [section["name"] for section in told["sections"]]


def test_the_prefix_says_which_tools_are_reserved(run, tiny_llama):
    shown = run("prefix", "--model", tiny_llama).stdout
    assert "11 tools in force: read, search, list, write, edit, bash, artifact, plan_start" in shown
    assert "3 reserved for later, counted and not told to a model yet: chapters_search" in shown
    total, alone = (
        int(re.search(pattern, shown)[1].replace(",", ""))
        for pattern in (r"total with the reserved tools +([\d,]+)", r"without those: its prefix is ([\d,]+) tokens")
    )
    assert alone < total


# The log


def test_the_log_is_shown_line_by_line_or_as_it_was_written(run, session):
    raw = (session / "log.jsonl").read_text()
    assert run("log", "show", "--json").stdout == raw
    shown = lines_of(run("log", "show", session.name[-6:]))
    assert len(shown) == len(raw.splitlines())
    assert "user/message" in shown[3]
    assert "look\\u001b[2J at @README.md" in shown[3]


@pytest.mark.usefixtures("session")
def test_verify_says_what_it_proved(run):
    ended = run("log", "verify")
    assert ended.returncode == 0
    assert "\n1 request rebuilt from the text of the log, token for token" in ended.stdout


def test_verify_finds_one_changed_id_outside_of_what_the_model_generated(run, session):
    tokens = session / "tokens.i32"
    data = bytearray(tokens.read_bytes())
    data[400] ^= 1
    tokens.write_bytes(data)
    ended = run("log", "verify", "--json")
    assert ended.returncode == 1
    assert json.loads(ended.stdout)["problems"]


@pytest.mark.slow  # it starts the program several times
def test_verify_without_the_model_says_what_it_could_not_check(run, tiny_llama, tmp_path):
    away = tmp_path / "away.gguf"
    shutil.copy(tiny_llama, away)
    assert run("run", "--model", away, *SMALL, "hello").returncode == 0
    away.unlink()
    ended = run("log", "verify")
    assert ended.returncode == 1
    assert "each of them as it was written" in ended.stdout
    assert "problem: its tokens were not checked against its text: that model is not on this machine" in ended.stdout
    assert run("log", "verify", "--model", tiny_llama).returncode == 0
    resumed = run("resume", "latest", "go on")
    assert resumed.returncode == 2
    assert "not on this machine any more: pass --model" in resumed.stderr


@pytest.mark.slow  # it starts the program several times
def test_repair_moves_what_is_damaged_and_deletes_nothing(run, session):
    log = session / "log.jsonl"
    whole = log.read_bytes()
    lines = whole.splitlines(keepends=True)
    log.write_bytes(b"".join([*lines[:5], b"damaged " + lines[5], *lines[6:]]))
    verified = run("log", "verify")
    assert verified.returncode == 1
    assert "line 6" in verified.stdout
    assert run("log", "show").returncode == 1
    repaired = run("log", "repair")
    assert repaired.returncode == 0
    assert "5 events are left" in repaired.stdout
    assert log.read_bytes() == b"".join(lines[:5])
    assert any(b"damaged " in side.read_bytes() for side in session.glob("torn-*"))
    assert "nothing to repair" in run("log", "repair").stdout
    assert run("log", "verify").returncode == 0


def test_a_session_that_is_not_there_is_one_message_with_the_choices(run, session):
    ended = run("log", "show", "nosuch")
    assert ended.returncode == 2
    assert session.name in ended.stderr


# Configuration


def test_config_shows_every_key_with_its_origin(run, workspace):
    (workspace / "chapbook.toml").write_text("[sampling]\nseed = 7\n")
    rows = {row["key"]: row for row in json.loads(run("config", "--json", "--set", "turn.rounds=3").stdout)}
    assert rows["sampling.seed"]["value"] == 7
    assert rows["sampling.seed"]["origins"] == [f"{workspace}/chapbook.toml:2"]
    assert rows["turn.rounds"]["origins"] == ["command line"]
    assert rows["model"] == {"key": "model", "value": None, "origins": ["default"]}


@pytest.mark.slow  # it starts the program several times
def test_a_workspace_that_permits_tools_waits_for_trust(run, workspace, tiny_llama):
    (workspace / "chapbook.toml").write_text('[tools]\nallow = ["bash"]\n')
    ended = run("run", "--model", tiny_llama, *SMALL, "hello")
    assert ended.returncode == 2
    assert "chapbook config trust" in ended.stderr
    trusted = run("config", "trust")
    assert trusted.returncode == 0
    assert 'tools.allow = ["bash"]' in trusted.stdout
    assert run("run", "--model", tiny_llama, *SMALL, "hello").returncode == 0


# The doctor


@pytest.mark.slow  # it starts the program several times
def test_doctor_tells_what_there_is(run, tiny_llama):
    ended = run("doctor", "--json", "--self-test", "--n-ctx=512", "--model", tiny_llama)
    told = json.loads(ended.stdout)
    assert ended.returncode == 0
    assert told["problems"] == []
    assert told["llama_cpp"]["llama_cpp_python"]
    assert (told["model"]["name"], told["model"]["memory"]) == ("tiny llama", "full attention")
    assert told["model"]["placement"]["n_ctx"] == 512
    assert told["model"]["template"]["append_kind"] == "append-only"
    outcomes = {result["mode"]: result["outcome"] for result in told["self_test"]["results"]}
    assert outcomes == dict.fromkeys(outcomes, "passed") | {"partial_snapshot": "not applicable"}
    assert told["self_test"]["identity"]["fingerprint"] == told["model"]["fingerprint"]
    shown = run("doctor", "--model", tiny_llama).stdout
    assert re.search(r"moved tail +passed: .*, text behind it foretold \d\.\d{3} nats (better|worse)\n", shown)
    for part in ("machine", "llama.cpp", "GPU offload", "ripgrep", "fingerprint", "dialect", "appending"):
        assert part in shown
    assert re.search(r"self-test of \d{4}-\d\d-\d\d \d\d:\d\d\n  rewind +passed: 159 tokens reused", shown)
    other = run("doctor", "--model", tiny_llama, "--set", "engine.type_k=q8_0").stdout
    assert "not done yet" in other


def test_doctor_tests_every_mode_of_reuse_and_says_which_a_memory_has_not(run, tiny):
    ended = run("doctor", "--self-test", "--n-ctx=512", "--model", tiny("mamba"))
    assert ended.returncode == 0, ended.stdout
    assert ended.stderr.splitlines()[-4:] == [
        f"testing: {mode}" for mode in ("fork", "memory snapshot", "disk snapshot", "partial snapshot")
    ]
    for line in (
        r"rewind +not applicable: recurrent memory cannot drop a tail",
        r"partial snapshot +passed: 159 tokens reused, the likeliest token the same at 100%, 0\.0000 nats off",
        r"moved tail +not applicable: ",
    ):
        assert re.search(line, ended.stdout)


def test_a_mode_that_failed_is_named_by_doctor_and_cache_stats_and_off_in_a_run(run, tiny_llama, cache):
    told = json.loads(run("doctor", "--json", "--self-test", "--n-ctx=512", "--model", tiny_llama).stdout)
    (path,) = (
        path for path in (cache / "chapbook" / "modes").iterdir() if told["model"]["fingerprint"] in path.read_text()
    )
    known = json.loads(path.read_text())
    known["results"][0] |= {"outcome": "failed", "reason": "it was 3 nats off"}
    path.write_text(json.dumps(known))
    try:
        ended = run("doctor", "--model", tiny_llama)
        assert ended.returncode == 1
        assert re.search(r"rewind +FAILED, and off; it was 3 nats off; 159 tokens reused", ended.stdout)
        assert "problem: rewind does not work with this model" in ended.stdout
        assert "tiny llama: off for this model, since its self-test of" in run("cache", "stats").stdout
        assert (
            json.loads(run("cache", "stats", "--json").stdout)["failed_self_tests"][0]["results"][0]["mode"] == "rewind"
        )
        ended = run("run", "--model", tiny_llama, *SMALL, "hello")
        assert "off for this model, since its self-test of" in ended.stderr
    finally:
        path.unlink()
    assert run("doctor", "--model", tiny_llama).returncode == 0


def test_a_self_test_whose_result_cannot_be_kept_says_so(run, tiny_llama, home):
    blocked = home / "blocked"
    blocked.write_text("not a folder")
    ended = run("doctor", "--self-test", "--n-ctx=512", "--model", tiny_llama, env={"XDG_CACHE_HOME": str(blocked)})
    assert ended.returncode == 1
    assert "passed: 159 tokens reused" in ended.stdout
    assert re.search(r"problem: the results cannot be kept in .*blocked", ended.stdout)


# Every command


@pytest.fixture
def plugin(tmp_path):
    """Return a function (name, code) that installs a command, and the environment in which it is found."""
    site = tmp_path / "site"

    def install(name, code):
        info = site / f"{name}_package-1.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}-package\nVersion: 1\n")
        (info / "entry_points.txt").write_text(f"[chapbook.commands]\n{name} = {name}_module:main\n")
        (site / f"{name}_module.py").write_text(code)
        return {"PYTHONPATH": str(site)}

    return install


def test_a_plugin_that_lacks_a_package_breaks_no_other_command(run, plugin):
    found = plugin("broken", "import a_package_that_is_not_there\n")
    assert "broken" in run("--help", env=found).stdout
    assert run("config", env=found).returncode == 0
    ended = run("broken", env=found)
    assert ended.returncode == 2
    assert "a_package_that_is_not_there" in ended.stderr
    assert "pip install 'broken-package[broken]'" in ended.stderr


def test_a_plugin_is_called_with_its_arguments(run, plugin):
    found = plugin("hello", "def main(name: str, times: int = 1) -> int:\n    print(name * times)\n    return 7\n")
    ended = run("hello", "ho", "--times", "3", env=found)
    assert (ended.stdout, ended.returncode) == ("hohoho\n", 7)


def test_a_fault_is_a_short_message_and_its_traceback_is_kept(run, plugin, home):
    found = plugin("faulty", "def main() -> None:\n    raise RuntimeError('it is \\x1b[2J broken')\n")
    ended = run("faulty", env=found)
    assert ended.returncode == 1
    assert ended.stderr.startswith(
        "chapbook: a fault of chapbook: RuntimeError: it is \\u001b[2J broken. Its traceback"
    )
    (kept,) = home.rglob("faults/*.txt")
    assert str(kept) in ended.stderr
    assert "in main" in kept.read_text()
    assert "in main" in run("--debug", "faulty", env=found).stderr


@pytest.mark.slow  # it starts the program several times
@pytest.mark.parametrize(
    ("arguments", "code"), [(["--version"], 0), (["--help"], 0), (["run", "--help"], 0), (["nosuch"], 2), (["run"], 2)]
)
def test_usage_ends_with_its_code(run, arguments, code):
    assert run(*arguments).returncode == code


def test_help_imports_nothing_heavy():
    code = (
        "import sys; from chapbook.runtime.cli import main; main(['--help']); "
        "print([name for name in ('llama_cpp', 'numpy', 'rich', 'prompt_toolkit', 'jinja2') if name in sys.modules])"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.splitlines()[-1] == "[]"
