"""A workspace's store: its sessions, listed and found; git told to leave it alone; folders that cannot be written."""

import os
import shutil
import subprocess
import sys

import pytest

from chapbook.kernels.errors import SessionNotFound, WorkspaceError
from chapbook.runtime.events import SessionId, SessionStart, TurnEnd, TurnEndReason, TurnStart, UserMessage
from chapbook.runtime.git_ignore import ignore_folder, in_git_checkout
from chapbook.runtime.log_format import LOG_FORMAT
from chapbook.runtime.log_lock import this_process
from chapbook.runtime.log_reading import LOG_NAME
from chapbook.runtime.store import SessionCondition, Store, make_session_id

ME = this_process(now=0.0)


def start(session):
    return SessionStart(
        session=session,
        log_format=LOG_FORMAT,
        chapbook="0.1",
        model_name="tiny",
        model_path="tiny.gguf",
        fingerprint="f",
        template_hash="t",
        n_ctx=512,
        config={},
    )


def add_session(store, name, *, now, events=()):
    created = store.create_session(make_id=lambda: SessionId(name), clock=lambda: now, holder=ME)
    with created.log as log:
        log.append(start(created.id))
        for event in events:
            log.append(event)
    return created


WHOLE_TURN = (
    TurnStart(turn=1),
    UserMessage(text="\n  what is this?\nmore"),
    TurnEnd(turn=1, reason=TurnEndReason.COMPLETED, rounds=1),
)


@pytest.fixture
def store(tmp_path):
    return Store.in_workspace(tmp_path)


def test_ids_sort_by_time_and_differ_within_a_second():
    early, late = (make_session_id(now=now, entropy=b"\xff\0\0") for now in (1_700_000_000, 1_700_000_001))
    assert early == "20231114-221320-ff0000"
    assert early < late
    assert early != make_session_id(now=1_700_000_000, entropy=b"\0\0\1")


def test_an_id_that_is_taken_is_not_taken_again(store):
    ids = iter([SessionId("a"), SessionId("a"), SessionId("b")])
    created = [store.create_session(make_id=lambda: next(ids), clock=lambda: 1.0, holder=ME) for _ in range(2)]
    for each in created:
        each.log.close()
    assert [each.id for each in created] == ["a", "b"]


def test_nothing_is_written_before_the_first_session(store, tmp_path):
    assert store.list_sessions() == ()
    with pytest.raises(SessionNotFound, match="start one"):
        store.find_session("latest")
    assert list(tmp_path.iterdir()) == []


def test_the_list_tells_sessions_apart_and_a_damaged_one_does_not_break_it(store, tmp_path):
    add_session(store, "whole", now=100.0, events=WHOLE_TURN)
    add_session(store, "cut-off", now=200.0, events=WHOLE_TURN[:2])
    add_session(store, "broken", now=300.0, events=WHOLE_TURN)
    add_session(store, "torn", now=50.0, events=WHOLE_TURN)
    broken = store.session_folder(SessionId("broken")) / LOG_NAME
    broken.write_bytes(broken.read_bytes().replace(b"completed", b"comPleted").replace(b"what", b"wHat"))
    with (store.session_folder(SessionId("torn")) / LOG_NAME).open("ab") as log:
        log.write(b'{"seq":')
    (tmp_path / ".chapbook" / "sessions" / "stray-file").write_text("x")
    (tmp_path / ".chapbook" / "sessions" / "empty-folder").mkdir()
    (tmp_path / ".chapbook" / "sessions" / "odd" / LOG_NAME).mkdir(parents=True)
    held = store.create_session(make_id=lambda: SessionId("held"), clock=lambda: 400.0, holder=ME)
    held.log.append(start(held.id))
    listed = {each.id: each for each in store.list_sessions()}
    held.log.close()
    assert list(listed) == ["held", "broken", "cut-off", "whole", "torn", "odd"]
    assert {each: summary.condition for each, summary in listed.items()} == {
        "held": SessionCondition.LOCKED,
        "broken": SessionCondition.DAMAGED,
        "cut-off": SessionCondition.INTERRUPTED,
        "whole": SessionCondition.AT_REST,
        "torn": SessionCondition.AT_REST,
        "odd": SessionCondition.UNREADABLE,
    }
    whole = listed["whole"]
    assert (whole.started, whole.last_event, whole.model, whole.first_line, whole.turns) == (
        100.0,
        100.0,
        "tiny",
        "what is this?",
        1,
    )
    assert "line 3" in listed["broken"].detail
    assert listed["broken"].model == "tiny"
    assert str(os.getpid()) in listed["held"].detail


def test_listing_changes_nothing_and_releases_what_it_looked_at(store):
    created = add_session(store, "a", now=1.0)
    folder = store.session_folder(created.id)
    (folder / "holder.json").write_text("left by a process that died")
    before = {path: path.read_bytes() for path in folder.iterdir()}
    assert [each.condition for each in store.list_sessions()] == [SessionCondition.AT_REST]
    assert {path: path.read_bytes() for path in folder.iterdir()} == before
    store.open_session(created.id, clock=lambda: 1.0, holder=ME).log.close()


def test_a_session_is_found_by_id_by_the_start_of_its_time_or_random_part_or_as_latest(store):
    for name, now in [
        ("20250101-100000-aa1111", 3.0),
        ("20250102-100000-bb2222", 2.0),
        ("20250102-110000-bb3333", 1.0),
    ]:
        add_session(store, name, now=now)
    assert store.find_session("20250102-100000-bb2222") == "20250102-100000-bb2222"
    assert store.find_session("20250101") == "20250101-100000-aa1111"
    assert store.find_session("bb3") == "20250102-110000-bb3333"
    assert store.find_session("latest") == "20250101-100000-aa1111"
    with pytest.raises(SessionNotFound, match="2 sessions begin with 'bb'") as several:
        store.find_session("bb")
    assert several.value.choices == ("20250102-110000-bb3333", "20250102-100000-bb2222")
    with pytest.raises(SessionNotFound, match="name one of: 20250102-110000-bb3333") as none:
        store.find_session("../../etc")
    assert len(none.value.choices) == 3
    with pytest.raises(SessionNotFound):
        store.open_session(SessionId("../sessions/20250101-100000-aa1111"), clock=lambda: 1.0, holder=ME)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (None, b".chapbook/\n"),
        (b"", b".chapbook/\n"),
        (b"*.pyc\n", b"*.pyc\n.chapbook/\n"),
        (b"*.pyc", b"*.pyc\n.chapbook/\n"),
        (b"*.pyc\r\nbuild", b"*.pyc\r\nbuild\r\n.chapbook/\r\n"),
        (b"caf\xe9\n# .chapbook/\n", b"caf\xe9\n# .chapbook/\n.chapbook/\n"),
        (b"a[\n!\n", b"a[\n!\n.chapbook/\n"),
        (b".chapbook\n", b".chapbook\n"),
        (b"/.chapbook/", b"/.chapbook/"),
        (b".*\n", b".*\n"),
        (b".*\n!.chapbook/\n", b".*\n!.chapbook/\n"),
    ],
)
def test_the_first_write_has_git_pass_over_the_store(tmp_path, before, after):
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    path = tmp_path / ".gitignore"
    if before is not None:
        path.write_bytes(before)
    store = Store.in_workspace(tmp_path)
    report = add_session(store, "a", now=1.0).ignored
    assert path.read_bytes() == after
    assert (report.written == path) == (before != after) == ("added .chapbook/" in report.note)
    assert add_session(store, "b", now=1.0).ignored.note == ""
    assert path.read_bytes() == after
    if b"!.chapbook" not in after:
        shown = subprocess.run(["git", "status", "--short", "-uall"], cwd=tmp_path, capture_output=True, check=True)
        assert b".chapbook" not in shown.stdout


def test_outside_of_a_checkout_no_gitignore_appears(store, tmp_path):
    assert add_session(store, "a", now=1.0).ignored.written is None
    assert not (tmp_path / ".gitignore").exists()


def test_a_gitignore_that_is_a_symlink_is_left_alone_and_the_store_ignores_itself(tmp_path):
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_text("x")
    (tmp_path / ".gitignore").symlink_to(elsewhere)
    report = add_session(Store.in_workspace(tmp_path), "a", now=1.0).ignored
    assert report.written == tmp_path / ".chapbook" / ".gitignore"
    assert "symlink" in report.note
    assert elsewhere.read_text() == "x"
    shown = subprocess.run(["git", "status", "--short", "-uall"], cwd=tmp_path, capture_output=True, check=True)
    assert b".chapbook" not in shown.stdout
    assert ignore_folder(tmp_path, ".chapbook").written is None


def test_a_worktree_and_a_subfolder_are_checkouts_and_a_stray_dot_git_is_not(tmp_path):
    (tmp_path / "tree" / "sub").mkdir(parents=True)
    (tmp_path / "tree" / ".git").write_text("gitdir: /elsewhere\n")
    (tmp_path / "stray" / ".git").mkdir(parents=True)
    assert in_git_checkout(tmp_path / "tree" / "sub")
    assert not in_git_checkout(tmp_path / "stray")


def test_a_store_elsewhere_in_the_workspace_is_ignored_by_its_own_path(tmp_path):
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    add_session(Store.in_workspace(tmp_path, name="data/logs"), "a", now=1.0)
    assert (tmp_path / ".gitignore").read_text() == "data/logs/\n"


def test_a_store_outside_of_the_workspace_touches_no_gitignore(tmp_path):
    workspace = tmp_path / "workspace"
    subprocess.run(["git", "init", "-q", workspace], check=True)
    add_session(Store.in_workspace(workspace, name=str(tmp_path / "store")), "a", now=1.0)
    assert (tmp_path / "store" / "sessions" / "a" / LOG_NAME).exists()
    assert [path.name for path in workspace.iterdir()] == [".git"]


def test_a_workspace_that_is_no_folder_is_refused(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(WorkspaceError, match="is not a folder"):
        Store.in_workspace(tmp_path / "file")
    with pytest.raises(WorkspaceError, match="does not exist"):
        Store.in_workspace(tmp_path / "nowhere")


def test_a_store_that_is_a_file_is_refused(store, tmp_path):
    (tmp_path / ".chapbook").write_text("x")
    with pytest.raises(WorkspaceError, match="cannot be kept"):
        store.prepare()


def test_a_workspace_that_vanishes_is_refused(tmp_path):
    (tmp_path / "w").mkdir()
    store = Store.in_workspace(tmp_path / "w")
    (tmp_path / "w").rmdir()
    with pytest.raises(WorkspaceError, match="does not exist"):
        store.prepare()
    assert not (tmp_path / "w").exists()


READ_ONLY = """
import os, sys
from pathlib import Path
from chapbook.kernels.errors import WorkspaceError
from chapbook.runtime.store import Store

if os.getuid() == 0:
    os.setgroups([]), os.setgid(65534), os.setuid(65534)
for attempt in (lambda: Store.in_workspace(Path("read-only")).prepare(), lambda: Store.in_workspace(Path("closed"))):
    try:
        attempt()
    except WorkspaceError as error:
        print(error)
"""


def test_a_workspace_without_permission_is_refused_with_the_way_out(tmp_path):
    (tmp_path / "read-only").mkdir(mode=0o555)
    (tmp_path / "closed").mkdir(mode=0o000)
    for folder in (tmp_path, *tmp_path.parents[:2]):
        folder.chmod(folder.stat().st_mode | 0o055)
    done = subprocess.run([sys.executable, "-c", READ_ONLY], cwd=tmp_path, capture_output=True, text=True, check=True)
    (tmp_path / "closed").chmod(0o700)
    refusals = done.stdout.splitlines()
    assert "permission denied. Make the folder writable" in refusals[0]
    assert "cannot be read by this user" in refusals[1]
    shutil.rmtree(tmp_path / "closed")
