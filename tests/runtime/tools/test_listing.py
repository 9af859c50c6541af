"""`list`: sorted, with sizes, bounded, and with the way to the rest."""

from __future__ import annotations

import os
import re
from collections.abc import Callable

import pytest

from chapbook.kernels.errors import ContainmentError, ToolError
from chapbook.runtime.tools.listing import list_folder
from chapbook.runtime.tools.spec import ToolContext
from chapbook.runtime.tools.workspace import Workspace

MakeContext = Callable[..., ToolContext]


def listed(context: ToolContext, **arguments: object) -> list[str]:
    return list_folder.body(context, arguments).content.split("\n")


@pytest.fixture
def tree(workspace: Workspace) -> Workspace:
    for folder in ("src/deep", "build", ".git", ".chapbook"):
        (workspace.root / folder).mkdir(parents=True)
    for path, size in (("README.md", 12), ("src/a.py", 3), ("src/deep/b.py", 0), ("build/out", 5), (".git/HEAD", 1)):
        (workspace.root / path).write_bytes(b"x" * size)
    (workspace.root / ".gitignore").write_text("build\n")
    return workspace


def test_a_folder_is_listed_as_paths_that_other_tools_take(context: ToolContext, tree: Workspace) -> None:
    assert listed(context) == [".gitignore 6", "README.md 12", "build/ (ignored)", "src/", "[4 entries]"]
    assert listed(context, path="src") == ["src/a.py 3", "src/deep/", "[2 entries]"]
    assert listed(context, path="build") == ["build/out 5", "[1 entries]"]
    assert tree.has_file("src/a.py")


def test_depth_goes_further_down(context: ToolContext, tree: Workspace) -> None:
    assert tree.root.is_dir()
    assert listed(context, depth=2)[-4:] == ["src/", "src/a.py 3", "src/deep/", "[6 entries]"]
    assert listed(context, depth=99)[-2:] == ["src/deep/b.py 0", "[7 entries]"]


def test_a_large_folder_comes_in_pages_with_the_total(make_context: MakeContext, workspace: Workspace) -> None:
    for number in range(1000):
        (workspace.root / f"file{number:04}").touch()
    context = make_context(arrival_tokens=1000)
    seen: list[str] = []
    offset = 1
    while offset:
        page = listed(context, offset=offset)
        assert context.count_tokens("\n".join(page)) <= 1000
        seen += page[:-1]
        assert "1000 entries" in page[-1]
        following = re.search(r"next: offset=(\d+)", page[-1])
        offset = int(following[1]) if following else 0
    assert seen == [f"file{number:04} 0" for number in range(1000)]
    assert listed(context, offset=1001) == ["[1000 entries; offset 1001 is past the last]"]


def test_an_empty_folder_and_names_that_cannot_be_shown_are_said(context: ToolContext, workspace: Workspace) -> None:
    assert listed(context) == ["[empty folder]"]
    os.close(os.open(os.fsencode(workspace.root) + b"/\xff", os.O_CREAT))
    assert listed(context) == [
        "[empty folder; 1 left out: their names are not UTF-8 or hold control characters; bash sees them]"
    ]


def test_what_is_no_folder_says_what_it_is(context: ToolContext, tree: Workspace) -> None:
    (tree.root / "up").symlink_to("..")
    with pytest.raises(ToolError, match=r"'README\.md' is a file; use read"):
        listed(context, path="README.md")
    with pytest.raises(ToolError, match="there is no folder 'none'"):
        listed(context, path="none")
    with pytest.raises(ContainmentError):
        listed(context, path="up")
