"""The walk: what .gitignore leaves, as git sees it; links, loops and depth."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from hypothesis import example, given, settings
from hypothesis import strategies as st

from chapbook.runtime.tools.walk import DEPTH_LIMIT, IgnoreCheck, TreeWalk
from chapbook.runtime.tools.workspace import Workspace


def make(root: Path, *paths: str) -> None:
    for path in paths:
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text("x")


def files(workspace: Workspace, base: str = ".") -> list[str]:
    return [entry.path for entry in TreeWalk(workspace, base) if not entry.is_folder]


def test_entries_come_sorted_folder_by_folder(workspace: Workspace) -> None:
    make(workspace.root, "b/z", "b/a", "a.txt", "b-c", "B", "b/a2/x")
    assert [entry.path for entry in TreeWalk(workspace)] == ["B", "a.txt", "b", "b/a", "b/a2", "b/a2/x", "b/z", "b-c"]


def test_nested_rules_win_over_outer_ones_and_an_ignored_folder_is_not_entered(workspace: Workspace) -> None:
    make(
        workspace.root,
        "a.log",
        "keep.log",
        "src/a.log",
        "src/keep.log",
        "out/keep.log",
        "src/out/x",
        "root/x",
        "src/root/x",
    )
    (workspace.root / ".gitignore").write_text("*.log\nout/\n/root\n!keep.log\n")
    (workspace.root / "src/.gitignore").write_text("keep.log\n!a.log\n")
    assert files(workspace) == [".gitignore", "keep.log", "src/.gitignore", "src/a.log", "src/root/x"]


def test_a_folder_that_is_named_is_walked_though_it_is_ignored(workspace: Workspace) -> None:
    make(workspace.root, "build/a.o", "build/x.log", "src/x.log", "src/a")
    (workspace.root / ".gitignore").write_text("build\n*.log\n")
    assert files(workspace, "build") == ["build/a.o", "build/x.log"]
    assert files(workspace, "src") == ["src/a"]


def test_ignored_entries_can_be_shown_but_are_not_entered(workspace: Workspace) -> None:
    make(workspace.root, "build/a.o", "a")
    (workspace.root / ".gitignore").write_text("build\n")
    shown = [(entry.path, entry.ignored) for entry in TreeWalk(workspace, show_ignored=True)]
    assert shown == [(".gitignore", False), ("a", False), ("build", True)]


def test_git_the_store_links_and_special_files_are_passed_over(workspace: Workspace) -> None:
    make(workspace.root, ".git/config", ".chapbook/log.jsonl", "sub/.git/config", "a")
    (workspace.root / "link").symlink_to("a")
    (workspace.root / "up").symlink_to("..")
    (workspace.root / "self").symlink_to(".")
    os.mkfifo(workspace.root / "fifo")
    assert [entry.path for entry in TreeWalk(workspace)] == ["a", "sub"]


def test_names_that_no_call_can_hold_are_counted(workspace: Workspace) -> None:
    make(workspace.root, "a", "tab\there", "back\\..\\slash")
    os.close(os.open(os.fsencode(workspace.root) + b"/\xff\xfe", os.O_CREAT))
    walk = TreeWalk(workspace)
    assert [entry.path for entry in walk] == ["a"]
    assert walk.unnameable == 3


def test_a_tree_deeper_than_the_limit_is_cut_and_says_so(workspace: Workspace) -> None:
    deep = workspace.root
    for _ in range(DEPTH_LIMIT + 1):
        deep /= "d"
    deep.mkdir(parents=True)
    (deep / "x").touch()
    walk = TreeWalk(workspace)
    assert len(list(walk)) == DEPTH_LIMIT
    assert not walk.complete


def test_a_gitignore_that_leads_out_or_is_no_text_rules_nothing(workspace: Workspace, tmp_path: Path) -> None:
    make(workspace.root, "a", "b/a")
    (tmp_path / "rules").write_text("a\n")
    (workspace.root / ".gitignore").symlink_to(tmp_path / "rules")
    os.mkfifo(workspace.root / "b/.gitignore")
    assert files(workspace) == ["a", "b/a"]


NAMES = st.sampled_from(["a", "b", "ab", "c.log", "d"])
RULES = st.sampled_from(
    ["a", "b/", "/a", "*.log", "!a", "!b/", "!*.log", "a/b", "**/d", "d/**", "!/a/b", "# x", "", "[ab]", "?", "a*"]
)


@example(paths=[["b", "a", "b"]], ignores={"": ["a", "!b/"]})
@given(
    paths=st.lists(st.lists(NAMES, min_size=1, max_size=4), min_size=1, max_size=12),
    ignores=st.dictionaries(st.sampled_from(["", "a", "b", "a/b"]), st.lists(RULES, max_size=4), max_size=3),
)
@settings(max_examples=20, deadline=None)
def test_what_is_left_is_what_git_leaves(
    tmp_path_factory: object, paths: list[list[str]], ignores: dict[str, list[str]]
) -> None:
    root: Path = tmp_path_factory.mktemp("walk")
    for parts in paths:
        path = root.joinpath(*parts)
        if any(parent.is_file() for parent in path.parents) or path.is_dir():
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    for folder, lines in ignores.items():
        if (root / folder).is_dir():
            (root / folder / ".gitignore").write_text("\n".join(lines))
    subprocess.run(["git", "init", "-q", str(root)], check=True)
    (root / ".git/info/exclude").write_text("")
    listed = subprocess.run(
        ["git", "-c", "core.excludesFile=", "ls-files", "-z", "--others", "--exclude-standard"],
        cwd=root,
        capture_output=True,
        check=True,
    )
    expected = {name.decode() for name in listed.stdout.split(b"\0") if name}
    workspace = Workspace(root)
    assert set(files(workspace)) == expected
    check = IgnoreCheck(workspace, ".")
    everything = [path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file()]
    assert {path for path in everything if not path.startswith(".git/") and not check.ignores_file(path)} == expected
