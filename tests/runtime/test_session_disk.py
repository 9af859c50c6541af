"""A session whose disk fills up, or whose folders vanish: a clear error, an intact log, and a way on."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from chapbook.kernels.errors import EngineClosed, LogWriteFailed, WorkspaceError
from chapbook.runtime.events import TurnEndReason
from chapbook.runtime.log_reading import verify_log
from chapbook.runtime.projection import OUTCOME_UNKNOWN
from chapbook.runtime.session import Session
from chapbook.runtime.stream import StepEnded, TextDelta, ToolFinished
from chapbook.runtime.tools.builtin import builtin_tools
from chapbook.runtime.tools.declare import tool

DISK_BYTES = 512 * 1024


@dataclass
class SmallDisk:
    """A file system of `DISK_BYTES`. When it is full, the last page of a file may still take a little."""

    folder: Path

    def fill(self) -> None:
        with suppress(OSError), (self.folder / "filler").open("wb", buffering=0) as file:
            while True:
                file.write(b"\0" * 4096)

    def free(self) -> None:
        (self.folder / "filler").unlink()


@pytest.fixture
def mount_small() -> Iterator[Callable[[Path], SmallDisk]]:
    """Return a function (folder) -> SmallDisk mounted there, until the test ends."""
    mounted: list[Path] = []

    def mount(folder: Path) -> SmallDisk:
        folder.mkdir(parents=True, exist_ok=True)
        program = shutil.which("mount")
        command = [program or "", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(folder)]
        if program is None or subprocess.run(command, check=False, capture_output=True).returncode:
            pytest.skip("mounting a tmpfs takes root, or a right that this container has not")
        mounted.append(folder)
        return SmallDisk(folder)

    yield mount
    for folder in mounted:
        subprocess.run(["umount", str(folder)], check=True)


def finished(events: list[Any]) -> list[ToolFinished]:
    return [event for event in events if isinstance(event, ToolFinished)]


# A write that crosses a page cannot come through: each of these is longer than one, in tokens of four bytes.
LONG_TEXT = "A sentence of some length. " * 60


@pytest.mark.parametrize("moment", ["message", "reply", "result"])
@pytest.mark.parametrize("way_on", ["the same session", "a resume"])
def test_a_full_disk_stops_the_turn_with_the_way_out_and_the_session_goes_on_once_there_is_space(
    moment: str, way_on: str, rig: Callable[..., Any], mount_small: Callable[[Path], SmallDisk], tmp_path: Path
) -> None:
    made = rig(n_ctx=32768)
    disk = mount_small(tmp_path / "disk")
    store = disk.folder / "store"

    @tool()
    def fill() -> str:
        """Fill the disk."""
        disk.fill()
        return LONG_TEXT

    host = {"tools": [*builtin_tools(), fill]}
    replies = {"message": [], "reply": [LONG_TEXT], "result": [made.call("fill")]}[moment]
    session = made.open(["hello", *replies, made.call("list"), "after"], store=store, host=host)
    list(session.send("hello"))
    with pytest.raises(LogWriteFailed, match=r"the disk is full\. Free some space") as caught:
        stop_at_full_disk(session, disk, moment)
    assert str(caught.value.path).startswith(str(store))
    folder = session.store.session_folder(session.id)
    assert verify_log(folder).intact
    with pytest.raises(LogWriteFailed):
        list(session.send(LONG_TEXT))
    disk.free()
    if way_on == "a resume":
        session.close()
        session = made.open([made.call("list"), "after"], store=store, host=host, resume="latest")
    with session:
        events = list(session.send("Go on."))
        assert events[-1].reason is TurnEndReason.COMPLETED
        assert events[-1].text == "after"
        usages = [event.usage for event in events if isinstance(event, StepEnded)]
        assert usages[1].evaluated == usages[1].bound
        made.check(session)
        window = made.engine.detokenize(session.transcript.window.tokens()).decode()
        assert (OUTCOME_UNKNOWN in window) == (moment == "result")


def stop_at_full_disk(session: Session, disk: SmallDisk, moment: str) -> None:
    if moment == "message":
        disk.fill()
    for event in session.send(LONG_TEXT if moment == "message" else "Go on."):
        if moment == "reply" and isinstance(event, TextDelta):
            disk.fill()


def test_a_result_for_which_there_is_no_space_is_an_error_result_with_its_size(
    rig: Callable[..., Any], mount_small: Callable[[Path], SmallDisk]
) -> None:
    made = rig(n_ctx=16384)

    @tool()
    def flood() -> str:
        """Return much."""
        return "filler\n" * 100_000

    replies = [made.call("flood"), made.call("bash", command="head -c 600000 /dev/zero | tr '\\0' x"), "so be it"]
    with made.open([*replies, made.call("flood"), "better"], host={"tools": [*builtin_tools(), flood]}) as session:
        disk = mount_small(session.store.artifacts.folder)
        disk.fill()
        events = list(session.send("go"))
        assert events[-1].reason is TurnEndReason.COMPLETED
        for result, size in zip(finished(events), ("700,000 bytes", "600,000 bytes"), strict=True):
            assert result.is_error
            assert result.artifact is None
            assert size in result.content
            assert "the disk is full. Free some space" in result.content
        disk.free()
        (disk.folder / "x").write_bytes(b"")
        (disk.folder / "x").unlink()
        made.check(session)
        session.store.artifacts.check_integrity()


def test_a_command_that_fills_the_disk_with_its_output_does_not_stop_the_session(
    rig: Callable[..., Any], mount_small: Callable[[Path], SmallDisk], tmp_path: Path
) -> None:
    made = rig(n_ctx=32768)
    disk = mount_small(tmp_path / "disk")
    replies = [made.call("bash", command="head -c 5000000 /dev/zero | tr '\\0' x"), LONG_TEXT]
    with made.open(replies, store=disk.folder / "store") as session:
        events = list(session.send("go"))
        assert finished(events)[0].is_error
        assert "no room on the disk for its output" in finished(events)[0].content
        assert events[-1].reason is TurnEndReason.COMPLETED
        made.check(session)


@pytest.mark.parametrize("how", ["renamed", "a file"])
def test_a_workspace_that_vanishes_fails_calls_with_its_path_and_nothing_is_made_in_its_place(
    how: str, rig: Callable[..., Any]
) -> None:
    made = rig(n_ctx=16384)
    elsewhere = made.workspace.with_name("elsewhere")

    @tool()
    def vanish() -> str:
        """Take the workspace away, store and all, and return much."""
        made.workspace.rename(elsewhere)
        if how == "a file":
            made.workspace.write_text("not a folder")
        return "filler\n" * 10_000

    replies = [
        made.call("vanish"),
        made.call("list") + made.call("read", path="notes.md") + made.call("search", pattern="heron"),
        made.call("write", path="new/file.txt", content="x") + made.call("bash", command="touch made"),
        "I cannot see it.",
    ]
    host = {"tools": [*builtin_tools(), vanish]}
    with made.open([*replies, made.call("list"), "There it is."], host=host) as session:
        events = list(session.send("go"))
        assert made.workspace.is_file() if how == "a file" else not made.workspace.exists()
        assert events[-1].text == "I cannot see it."
        lost, *results = finished(events)
        assert "70,000 bytes" in lost.content
        assert lost.artifact is None
        assert [result.name for result in results] == ["list", "read", "search", "write", "bash"]
        for result in results:
            assert result.is_error
            assert str(made.workspace) in result.content
            assert ("is not a folder" if how == "a file" else "is not there") in result.content
        if how == "a file":
            made.workspace.unlink()
        elsewhere.rename(made.workspace)
        back = list(session.send("And now? @notes.md"))
        assert back[-1].text == "There it is."
        assert not any(result.is_error for result in finished(back))
        made.check(session)


def test_a_session_whose_workspace_is_gone_can_be_closed_and_resumed_where_it_is_now(rig: Callable[..., Any]) -> None:
    made = rig()
    session = made.open(["before", "after"])
    list(session.send("go"))
    elsewhere = made.workspace.with_name("elsewhere")
    made.workspace.rename(elsewhere)
    list(session.send("go on"))
    session.close()
    with pytest.raises(WorkspaceError, match="name an existing folder"):
        made.open([], resume=session.id)
    with made.open(["at last"], resume=session.id, workspace=elsewhere) as resumed:
        assert list(resumed.send("and on"))[-1].text == "at last"
        made.check(resumed)


def test_a_workspace_that_cannot_be_read_any_more_fails_calls_and_the_session_goes_on(rig: Callable[..., Any]) -> None:
    made = rig()
    with (
        open_to_everyone(made.workspace) as workspace,
        made.open(
            [made.call("list") + made.call("read", path="notes.md"), "no", made.call("read", path="notes.md"), "yes"],
            workspace=workspace,
        ) as session,
    ):
        with unreadable(workspace):
            events = list(session.send("go"))
        assert [result.is_error for result in finished(events)] == [True, True]
        assert all("cannot be read (Permission denied)" in result.content for result in finished(events))
        assert events[-1].text == "no"
        events = list(session.send("again"))
        assert not finished(events)[0].is_error
        made.check(session)


@contextmanager
def open_to_everyone(like: Path) -> Iterator[Path]:
    """Give a copy of a workspace that another user can reach: pytest's own folders are for their owner alone."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        yield shutil.copytree(like, Path(folder) / "workspace")


@contextmanager
def unreadable(workspace: Path) -> Iterator[None]:
    """Take the right to read a folder away, from root too, by being another user for the time."""
    workspace.chmod(0)
    user = os.geteuid()
    if user == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(user)
        workspace.chmod(0o755)


@pytest.mark.parametrize("when", ["between turns", "in a tool"])
def test_a_store_that_is_deleted_stops_the_turn_and_the_session_can_be_closed(
    when: str, rig: Callable[..., Any]
) -> None:
    made = rig()
    store = made.workspace / ".chapbook"

    @tool()
    def delete() -> str:
        """Delete the store."""
        shutil.rmtree(store)
        return "deleted"

    session = made.open(["hello", made.call("delete"), "never said"], host={"tools": [*builtin_tools(), delete]})
    list(session.send("hello"))
    if when == "between turns":
        shutil.rmtree(store)
    with pytest.raises(LogWriteFailed, match=r"changed or deleted.*close the session and open it again"):
        list(session.send("go"))
    with pytest.raises(LogWriteFailed):
        list(session.send("again"))
    with suppress(LogWriteFailed):
        session.close()
    assert not store.exists()
    with made.open(["a new start"]) as fresh:
        assert list(fresh.send("hello"))[-1].text == "a new start"
        made.check(fresh)


def test_a_session_whose_engine_was_closed_first_gives_its_lock_back(rig: Callable[..., Any]) -> None:
    made = rig()
    session = made.open([made.call("list"), "never said"])
    stream = session.send("go")
    for event in stream:
        if isinstance(event, ToolFinished):
            break
    made.engine.close()
    with suppress(EngineClosed):
        session.close()
    again = rig()
    with again.open(["back"], resume=session.id) as resumed:
        assert list(resumed.send("go on"))[-1].text == "back"
        again.decoded_before += [batch for _, batch in made.decoded]
        again.check(resumed)
