"""What surrounds a session may be hostile or broken: its folder, its store, its tools, an interrupt at any moment."""

import os

import numpy as np
import pytest

from chapbook.kernels.errors import LogWriteFailed, WorkspaceError
from chapbook.runtime.events import TurnEndReason
from chapbook.runtime.hooks import Hooks
from chapbook.runtime.session_settings import SessionSettings
from chapbook.runtime.stream import ToolFinished
from chapbook.runtime.tools.builtin import builtin_tools
from chapbook.runtime.tools.declare import tool
from chapbook.runtime.tools.spec import Tool, ToolOutput


def ends(session, message="go"):
    return list(session.send(message))[-1].reason


@pytest.mark.parametrize(
    "lines",
    ["!", "foo\\", "[z-a]", "x" * 70_000, "[[:alpha:]]", "\n".join(f"name{n}" for n in range(5000))],
    ids=["bang", "backslash", "range", "long", "class", "many"],
)
def test_a_gitignore_that_cannot_be_compiled_loses_its_bad_lines_only(rig, lines):
    made = rig()
    (made.workspace / ".git").mkdir()
    (made.workspace / ".git" / "HEAD").write_text("ref: refs/heads/main\n")
    (made.workspace / ".gitignore").write_text(f"{lines}\nsecret.txt\n")
    (made.workspace / "secret.txt").write_text("hidden")
    with made.open([made.call("list"), "done"]) as session:
        events = list(session.send("go"))
        assert events[-1].reason is TurnEndReason.COMPLETED
        listed = next(event.content for event in events if isinstance(event, ToolFinished))
        assert "notes.md" in listed
        assert "secret.txt" not in next(each.grounded["path"] for each in session.offered_tools() if each.grounded)


def test_a_fifo_in_place_of_a_gitignore_is_left_alone(rig):
    made = rig()
    (made.workspace / ".git").mkdir()
    (made.workspace / ".git" / "HEAD").write_text("ref: refs/heads/main\n")
    os.mkfifo(made.workspace / ".gitignore")
    with made.open(["done"]) as session:
        assert ends(session) is TurnEndReason.COMPLETED


def test_a_session_keeps_its_folder_when_the_process_changes_its_own(rig, monkeypatch, tmp_path_factory):
    made = rig()
    monkeypatch.chdir(made.workspace)
    made.workspace = made.workspace.relative_to(made.workspace)
    elsewhere = tmp_path_factory.mktemp("elsewhere")

    @tool()
    def move() -> str:
        """Go elsewhere."""
        os.chdir(elsewhere)
        return "x\n" * 50_000

    with made.open([made.call("move"), "done"], host={"tools": [*builtin_tools(), move]}) as session:
        events = list(session.send("go"))
        result = next(event for event in events if isinstance(event, ToolFinished))
        assert result.artifact is not None
        assert session.store.artifacts.read(result.artifact) == b"x\n" * 50_000
        assert str(elsewhere) not in result.content
        made.check(session)
    assert list(elsewhere.iterdir()) == []


def test_broken_session_folders_do_not_keep_a_new_session_from_starting(rig):
    made = rig()
    with made.open(["first"]) as session:
        list(session.send("go"))
        sessions = session.store.folder / "sessions"
    for name in ("log.jsonl", "tokens.i32"):
        folder = sessions / f"20000101-000000-fifo{name[0]}"
        folder.mkdir()
        os.mkfifo(folder / name)
    nested = sessions / "20000101-000000-nested"
    nested.mkdir()
    (nested / "log.jsonl").write_bytes(b"[" * 200_000 + b"\n")
    with made.open(["second"]) as session:
        assert ends(session) is TurnEndReason.COMPLETED
        assert {each.id for each in session.store.list_sessions()} >= {session.id}


def test_a_store_that_a_checkout_brought_as_a_link_is_refused(rig, tmp_path_factory):
    made = rig()
    (made.workspace / ".chapbook").symlink_to(tmp_path_factory.mktemp("outside"))
    with pytest.raises(WorkspaceError, match="symbolic link"):
        made.open([])


@pytest.mark.parametrize(
    "output",
    [
        ToolOutput(content=None),
        ToolOutput(content=b"bytes"),
        ToolOutput(content="x", file="a string"),
        ToolOutput(content=np.str_("from numpy")),
        ToolOutput(content="x", is_error="yes"),
        "a bare text",
    ],
    ids=["none", "bytes", "file", "numpy", "flag", "text"],
)
def test_an_output_of_wrong_types_is_a_result_and_the_session_goes_on(rig, output):
    made = rig()
    odd = Tool(schema=builtin_tools()[2].schema, body=lambda _context, _arguments: output)
    with made.open([made.call("list"), "done", "again"], host={"tools": [odd]}, settings=SessionSettings()) as session:
        assert ends(session) is TurnEndReason.COMPLETED
        assert ends(session) is TurnEndReason.COMPLETED
        made.check(session)


def test_a_body_that_changes_its_arguments_changes_nothing_that_was_logged(rig):
    made = rig()

    def body(_context, arguments):
        arguments.clear()
        arguments[1] = object()
        return ToolOutput(content="done")

    odd = Tool(schema=builtin_tools()[2].schema, body=body)
    with made.open(
        [made.call("list", path="src"), "done"], host={"tools": [odd]}, settings=SessionSettings()
    ) as session:
        assert ends(session) is TurnEndReason.COMPLETED
        made.check(session)


def test_a_stub_counts_lines_by_newlines_and_does_not_count_what_it_has_not_read(rig):
    made = rig(n_ctx=16384)

    @tool()
    def long_line() -> str:
        """Return one long line, with other line ends in it."""
        return "a\rb\u2028c" + "x" * 600_000

    with made.open(
        [made.call("long_line"), "done"], host={"tools": [long_line]}, settings=SessionSettings()
    ) as session:
        result = next(event for event in session.send("go") if isinstance(event, ToolFinished))
        assert "600,007 bytes, 1 line," in result.content
        assert "lines" not in result.content


def test_what_a_hook_adds_is_in_the_log_before_the_host_hears_of_the_result(rig):
    made = rig()
    hooks = Hooks(after_hooks=[lambda _call, _output: "mind the gap"])
    with made.open([made.call("list"), "never", "after"], host={"hooks": hooks}) as session:
        for event in session.send("go"):
            if isinstance(event, ToolFinished):
                break
        assert ends(session) is TurnEndReason.COMPLETED
        assert b"mind the gap" in made.engine.detokenize(session.transcript.window.tokens())
        made.check(session)


def test_an_interrupt_in_the_middle_of_a_write_refuses_to_go_on_until_the_session_is_resumed(rig):
    made = rig()
    moments = iter([0.0] * 5)

    def clock():
        try:
            return next(moments)
        except StopIteration:
            raise KeyboardInterrupt from None

    session = made.open([made.call("list"), "done"], host={"clock": clock})
    with pytest.raises(KeyboardInterrupt):
        list(session.send("go"))
    with pytest.raises(LogWriteFailed, match="resume it"):
        list(session.send("go on"))
    session.close()
    with made.open([made.call("list"), "done"], resume="latest") as resumed:
        assert ends(resumed) is TurnEndReason.COMPLETED
        made.check(resumed)
