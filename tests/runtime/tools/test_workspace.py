"""Containment: nothing that a tool names leads out of the workspace, and every refusal names its rule."""

from __future__ import annotations

import ctypes
import os
import shutil
import socket
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from chapbook.kernels.errors import ContainmentError, ToolError, WorkspaceError
from chapbook.runtime.tools.containment import Rule
from chapbook.runtime.tools.spec import Grounded
from chapbook.runtime.tools.workspace import Workspace

SECRET = b"outside"


def names(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


@pytest.fixture
def tree(workspace: Workspace, tmp_path: Path) -> Workspace:
    """A workspace with every kind of trap, beside a file that must not be read."""
    (tmp_path / "secret").write_bytes(SECRET)
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "secret").write_bytes(SECRET)
    root = workspace.root
    for folder in (".git/hooks", "sub/.git", "src", ".chapbook/artifacts"):
        (root / folder).mkdir(parents=True)
    (root / ".git/config").write_text("[core]\n")
    (root / "src/a.py").write_text("print()\n")
    (root / "link.py").symlink_to("src/a.py")
    (root / "absolute_link.py").symlink_to(root / "src/a.py")
    (root / "leak").symlink_to("../secret")
    (root / "leaks").symlink_to(tmp_path / "outside")
    (root / "dangling").symlink_to("/nowhere/at/all")
    (root / "to_git").symlink_to(".git")
    (root / "to_store").symlink_to(".chapbook")
    (root / "loop").symlink_to("loop")
    (root / "ping").symlink_to("pong")
    (root / "pong").symlink_to("ping")
    os.mkfifo(root / "fifo")
    (root / "to_null").symlink_to("/dev/null")
    return workspace


REFUSALS = [
    ("", Rule.EMPTY),
    ("  ", Rule.EMPTY),
    ("a" * 5000, Rule.TOO_LONG),
    ("a\0b", Rule.CONTROL_CHARACTER),
    ("a\nb", Rule.CONTROL_CHARACTER),
    ("a\x1b[2Jb", Rule.CONTROL_CHARACTER),
    ("a\x85b", Rule.CONTROL_CHARACTER),
    ("a\udcffb", Rule.NOT_UTF8),
    ("..", Rule.PARENT_FOLDER),
    ("../secret", Rule.PARENT_FOLDER),
    ("src/../../secret", Rule.PARENT_FOLDER),
    ("src/../src/a.py", Rule.PARENT_FOLDER),
    ("..\\secret", Rule.PARENT_FOLDER),
    ("/etc/passwd", Rule.OUTSIDE),
    ("/", Rule.OUTSIDE),
    ("leak", Rule.OUTSIDE),
    ("leaks", Rule.OUTSIDE),
    ("leaks/secret", Rule.OUTSIDE),
    ("leaks/new/file", Rule.OUTSIDE),
    ("dangling", Rule.OUTSIDE),
    ("to_null", Rule.OUTSIDE),
    ("loop", Rule.SYMLINK_LOOP),
    ("loop/file", Rule.SYMLINK_LOOP),
    ("ping", Rule.SYMLINK_LOOP),
    ("fifo", Rule.SPECIAL_FILE),
    ("NUL", Rule.DEVICE_NAME),
    ("src/con.txt", Rule.DEVICE_NAME),
    ("Com1", Rule.DEVICE_NAME),
    ("lpt¹ .x", Rule.DEVICE_NAME),
    ("aux/file", Rule.DEVICE_NAME),
]
WRITE_REFUSALS = [
    (".git/config", Rule.GIT_FOLDER),
    (".git/hooks/post-commit", Rule.GIT_FOLDER),
    (".git", Rule.GIT_FOLDER),
    ("sub/.git/config", Rule.GIT_FOLDER),
    ("new/.git/config", Rule.GIT_FOLDER),
    (".GIT/config", Rule.GIT_FOLDER),
    (".git./config", Rule.GIT_FOLDER),
    (".g\u200cit/config", Rule.GIT_FOLDER),
    ("GIT~1/config", Rule.GIT_FOLDER),
    ("to_git/config", Rule.GIT_FOLDER),
    (".chapbook/log.jsonl", Rule.STORE),
    (".chapbook", Rule.STORE),
    ("to_store/artifacts/x", Rule.STORE),
]


@pytest.mark.parametrize(("path", "rule"), REFUSALS)
def test_a_path_that_breaks_a_rule_is_refused_by_its_name(tree: Workspace, path: str, rule: Rule) -> None:
    for writing in (False, True):
        with pytest.raises(ContainmentError) as refused:
            tree.resolve(path, writing=writing)
        assert refused.value.rule == rule
    with pytest.raises(ContainmentError), tree.open_file(path):
        pytest.fail("opened")
    with pytest.raises(ContainmentError):
        tree.replace_file(path, b"x")
    assert not tree.has_file(path)


@pytest.mark.parametrize(("path", "rule"), WRITE_REFUSALS)
def test_what_belongs_to_git_or_the_store_is_never_written(tree: Workspace, path: str, rule: Rule) -> None:
    tree.resolve(path)
    with pytest.raises(ContainmentError) as refused:
        tree.replace_file(path, b"x")
    assert refused.value.rule == rule
    assert (tree.root / ".git/config").read_text() == "[core]\n"


@pytest.mark.parametrize("path", ["src/a.py", "./src//a.py", "link.py", "absolute_link.py"])
def test_what_lies_inside_can_be_named_in_every_way(tree: Workspace, path: str) -> None:
    for name in (path, str(tree.root / path)):
        assert tree.resolve(name).relative == "src/a.py"
        with tree.open_file(name) as file:
            assert file.read() == b"print()\n"


def test_the_workspace_may_be_reached_through_a_link(tree: Workspace, tmp_path: Path) -> None:
    (tmp_path / "here").symlink_to(tree.root)
    linked = Workspace(tmp_path / "here")
    for name in ("src/a.py", str(tmp_path / "here/src/a.py"), str(tree.root / "src/a.py")):
        assert linked.resolve(name).relative == "src/a.py"


def test_names_that_only_look_like_git_or_a_device_are_free(tree: Workspace) -> None:
    for path in (".gitignore", ".github/x.yml", "git/x", "console.txt", "auxiliary", "com10", "a:b"):
        assert not tree.replace_file(path, b"x"), path
    (tree.root / "aux.c").write_text("int aux;\n")  # a file that is there is a file
    with tree.open_file("aux.c") as file:
        assert file.read() == b"int aux;\n"


def test_a_socket_and_a_device_are_no_regular_files(tree: Workspace) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        here = Path.cwd()
        os.chdir(tree.root)  # the address of a socket holds 107 bytes
        try:
            listener.bind("socket")
        finally:
            os.chdir(here)
        with pytest.raises(ContainmentError) as refused:
            tree.resolve("socket")
    assert refused.value.rule == Rule.SPECIAL_FILE
    if os.geteuid() == 0:
        os.mknod(tree.root / "null", stat.S_IFCHR | 0o666, os.makedev(1, 3))
        with pytest.raises(ContainmentError) as refused:
            tree.replace_file("null", b"x")
        assert refused.value.rule == Rule.SPECIAL_FILE


INSIDE = ["src", "a.py", "link.py", "to_git", "", ".", "~", "$HOME", "new"]
TRAPS = ["..", "leak", "leaks", "secret", "loop", "dangling", "outside", "/etc", "passwd", "proc", "self", "root"]
SPELLINGS = ["\\", "..\\..", "C:", "file:", "%2e%2e", "\u2024\u2024", "…"]
COMPONENTS = st.sampled_from(INSIDE + TRAPS + SPELLINGS)


@given(
    parts=st.lists(COMPONENTS | st.text(max_size=6), max_size=7),
    prefix=st.sampled_from(["", "/", "//", "{root}/", "{root}/../", "{root}x/", "./"]),
)
@example(parts=["etc", "passwd"], prefix="/")
@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_path_at_all_opens_or_changes_what_lies_outside(tree: Workspace, parts: list[str], prefix: str) -> None:
    path = prefix.replace("{root}", str(tree.root)) + "/".join(parts)
    try:
        resolved = tree.resolve(path)
    except (ContainmentError, ToolError):
        return
    assert Path(os.path.realpath(resolved.real)).is_relative_to(tree.root)
    try:
        with tree.open_file(path) as file:
            assert file.read() != SECRET
    except ToolError:
        pass


def test_a_link_planted_after_the_check_leads_nowhere(tree: Workspace, tmp_path: Path) -> None:
    """A folder is swapped with a link that leads out, over and over, while its file is read and written."""
    folder, link = tree.root / "swap", tree.root / "bait"
    folder.mkdir()
    (folder / "secret").write_bytes(b"inside")
    link.symlink_to(tmp_path / "outside")
    exchange = ctypes.CDLL(None).renameat2
    stop = threading.Event()

    def swap() -> None:
        while not stop.is_set():
            exchange(-100, os.fsencode(folder), -100, os.fsencode(link), 2)  # AT_FDCWD, RENAME_EXCHANGE

    swapper = threading.Thread(target=swap)
    swapper.start()
    read = 0
    try:
        for _ in range(400):
            try:
                with tree.open_file("swap/secret") as file:
                    assert file.read() == b"inside"
                read += 1
                tree.replace_file("swap/secret", b"inside")
            except ToolError:
                continue
    finally:
        stop.set()
        swapper.join()
    assert (tmp_path / "outside/secret").read_bytes() == SECRET
    assert names(tmp_path / "outside") == ["secret"]
    assert read


def test_a_workspace_that_cannot_be_worked_in_says_what_it_is(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path, what in (("missing", "is not there"), ("file", "is not a folder")):
        with pytest.raises(WorkspaceError, match=what) as refused:
            Workspace(tmp_path / path)
        assert refused.value.path == tmp_path / path
        assert refused.value.exit_code == 2
        assert "give a folder" in str(refused.value)


def test_a_workspace_that_may_not_be_read_says_so(tmp_path: Path) -> None:
    locked = tmp_path / "locked"
    locked.mkdir(mode=0o300)
    receive, send = os.pipe()
    child = os.fork()
    if child == 0:
        if os.geteuid() == 0:
            os.setuid(65534)  # root may read everything
        try:
            Workspace(locked)
        except WorkspaceError as refused:
            os.write(send, str(refused).encode())
        os._exit(0)
    os.close(send)
    os.waitpid(child, 0)
    with os.fdopen(receive) as report:
        assert "locked cannot be read (Permission denied)" in report.read()


def test_a_workspace_that_vanishes_is_named_at_the_next_use(tree: Workspace) -> None:
    shutil.rmtree(tree.root)
    for use in (lambda: tree.replace_file("a", b""), lambda: tree.open_file("a").__enter__()):
        with pytest.raises(WorkspaceError, match="is not there"):
            use()


def test_a_missing_file_and_a_folder_are_told_apart(tree: Workspace) -> None:
    with pytest.raises(ToolError, match=r"there is no 'src/b\.py'"), tree.open_file("src/b.py"):
        pytest.fail("opened")
    with pytest.raises(ToolError, match="is a folder"), tree.open_file("src"):
        pytest.fail("opened")
    with pytest.raises(ToolError, match=r"a part of 'src/a\.py/x' is a file"), tree.open_file("src/a.py/x"):
        pytest.fail("opened")
    with pytest.raises(ToolError, match="longer than this file system allows"), tree.open_file("b" * 300):
        pytest.fail("opened")


def test_a_write_makes_folders_keeps_the_mode_and_leaves_nothing_else(tree: Workspace) -> None:
    assert not tree.replace_file("new/deep/x.sh", b"one")
    (tree.root / "new/deep/x.sh").chmod(0o755)
    assert tree.replace_file("new/deep/x.sh", b"two")
    target = tree.root / "new/deep/x.sh"
    assert target.read_bytes() == b"two"
    assert stat.S_IMODE(target.stat().st_mode) == 0o755
    assert names(target.parent) == ["x.sh"]


def test_a_write_through_a_link_changes_its_target_and_keeps_the_link(tree: Workspace) -> None:
    tree.replace_file("link.py", b"new")
    assert (tree.root / "link.py").is_symlink()
    assert (tree.root / "src/a.py").read_bytes() == b"new"


def test_a_write_where_none_can_be_says_so_and_changes_nothing(tree: Workspace) -> None:
    (tree.root / "src/a.py").chmod(0o444)
    with pytest.raises(ToolError, match="read-only"):
        tree.replace_file("src/a.py", b"x")
    with pytest.raises(ToolError, match="is a folder"):
        tree.replace_file("src", b"x")
    with pytest.raises(ToolError, match="is the workspace itself"):
        tree.replace_file(".", b"x")
    with pytest.raises(ToolError, match="is a file, not a folder"):
        tree.replace_file("src/a.py/b", b"x")
    assert (tree.root / "src/a.py").read_text() == "print()\n"


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 KB, which only root can mount."""
    mount = tmp_path / "small"
    mount.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "none", str(mount)], capture_output=True, check=False
    )
    if made.returncode:
        pytest.skip("mounting a tmpfs takes root; the child with a file size limit covers the rest")
    yield mount
    subprocess.run(["umount", str(mount)], check=True)


def test_a_full_disk_leaves_the_old_file_whole(small_disk: Path) -> None:
    workspace = Workspace(small_disk)
    workspace.replace_file("a.txt", b"old" * 100)
    with pytest.raises(ToolError, match=r"no room on the disk for 'a\.txt'.*nothing was changed"):
        workspace.replace_file("a.txt", bytes(1 << 17))
    assert (small_disk / "a.txt").read_bytes() == b"old" * 100
    assert names(small_disk) == ["a.txt"]


def test_a_write_that_stops_half_way_leaves_the_old_file_whole(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"old")
    program = """
import resource, signal, sys
from chapbook.kernels.errors import ToolError
from chapbook.runtime.tools.workspace import Workspace
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
try:
    Workspace(sys.argv[1]).replace_file("a.txt", bytes(5000))
except ToolError as refused:
    print(refused)
"""
    run = subprocess.run([sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, check=True)
    assert "no room on the disk for 'a.txt'" in run.stdout
    assert (tmp_path / "a.txt").read_bytes() == b"old"
    assert names(tmp_path) == ["a.txt"]


def test_grounded_values_are_what_can_be_named_sorted_and_bounded(tree: Workspace) -> None:
    (tree.root / ".gitignore").write_text("*.log\nbuild/\n")
    (tree.root / "x.log").write_text("")
    (tree.root / "build").mkdir()
    (tree.root / "build/out").write_text("")
    os.close(os.open(os.fsencode(tree.root) + b"/bad\xff", os.O_CREAT))
    (tree.root / "new\nline").write_text("")
    files = (".gitignore", "src/a.py")
    assert tree.list_files(limit=2) == files
    assert tree.grounded_values(Grounded.FILE) == files
    assert tree.grounded_values(Grounded.FILE, limit=1) is None
    assert tree.grounded_values(Grounded.FOLDER) == (".", "src", "sub")
    assert tree.grounded_values(Grounded.PATH) == (".", ".gitignore", "src", "src/a.py", "sub")
    for path in files:
        assert tree.has_file(path)


def test_more_files_than_the_grammar_takes_are_not_offered(workspace: Workspace) -> None:
    for number in range(2001):
        (workspace.root / f"f{number:04}").touch()
    assert workspace.grounded_values(Grounded.FILE) is None
    (workspace.root / "f0000").unlink()
    values = workspace.grounded_values(Grounded.FILE)
    assert values is not None
    assert len(values) == 2000


def test_where_folders_have_no_handles_the_rules_are_the_same(tree: Workspace) -> None:
    program = """
import os, sys
os.supports_dir_fd.discard(os.open)  # as on Windows
from chapbook.kernels.errors import ToolError
from chapbook.runtime.tools.workspace import Workspace
workspace = Workspace(sys.argv[1], sys.argv[1] + "/.chapbook")
print(workspace.replace_file("new/deep/x.txt", b"one"), workspace.replace_file("new/deep/x.txt", b"two"))
with workspace.open_file("new/deep/x.txt") as file:
    print(file.read())
print(workspace.list_files(limit=9), os.listdir(sys.argv[1] + "/new/deep"))
for path in ("leak", "leaks/secret", ".git/config", "fifo", "src"):
    try:
        workspace.replace_file(path, b"x")
    except ToolError as refused:
        print(getattr(refused, "rule", "no rule"))
"""
    run = subprocess.run([sys.executable, "-c", program, tree.root], capture_output=True, text=True, check=False)
    assert run.stdout.split("\n")[:-1] == [
        "False True",
        "b'two'",
        "('new/deep/x.txt', 'src/a.py') ['x.txt']",
        *("outside the workspace", "outside the workspace", "write under .git", "not a regular file", "no rule"),
    ], run.stderr
