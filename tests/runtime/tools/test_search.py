"""`search`: the same lines by either engine, packed, and with the way to the rest."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from chapbook.compaction.matching import compile_pattern
from chapbook.kernels.errors import ContainmentError, ToolError
from chapbook.runtime.cancel import Cancel
from chapbook.runtime.tools.search import find_hits, search, search_tree
from chapbook.runtime.tools.spec import ToolContext
from chapbook.runtime.tools.workspace import Workspace

MakeContext = Callable[..., ToolContext]
RIPGREP = shutil.which("rg")


def found(context: ToolContext, pattern: str, **arguments: object) -> str:
    return search.body(context, {"pattern": pattern, **arguments}).content


def make(root: Path, files: dict[str, str | bytes]) -> None:
    for path, content in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_bytes(content if isinstance(content, bytes) else content.encode())


TREE: dict[str, str | bytes] = {
    ".gitignore": "*.log\nbuild/\n",
    "a.py": "import os\nprint('Needle')\n",
    "src/b.py": "# needle one\n\nneedle two\n",
    "src/.gitignore": "!keep.log\n",
    "src/keep.log": "needle kept\n",
    "src/noise.log": "needle noise\n",
    "src/drop.txt": "nothing here\n",
    "src-x/c.ts": "needle\n",
    "x.log": "needle ignored\n",
    "build/out.py": "needle built\n",
    ".hidden/d.md": "the needle\n",
    ".git/config": "needle in git\n",
    ".chapbook/artifacts/ab/x.txt": "needle stored\n",
    "blob.bin": b"needle\0needle\n",
    "crlf.txt": b"one needle\r\ntwo\r\n",
    "wide.txt": "a needle\n".encode("utf-16"),
    "caf\u00e9.txt": "N\u00c9EDLE n\u00e9edle needle\n",
}


def test_hits_come_sorted_as_path_line_text_without_what_is_ignored(context: ToolContext, workspace: Workspace) -> None:
    make(workspace.root, TREE)
    assert found(context, "needle").split("\n") == [
        ".hidden/d.md:1: the needle",
        "a.py:2: print('Needle')",
        "caf\u00e9.txt:1: N\u00c9EDLE n\u00e9edle needle",
        "crlf.txt:1: one needle",
        "src/b.py:1: # needle one",
        "src/b.py:3: needle two",
        "src/keep.log:1: needle kept",
        "src-x/c.ts:1: needle",
        "wide.txt:1: a needle",
        "[9 hits in 8 files]",
    ]


@pytest.mark.skipif(RIPGREP is None, reason="ripgrep is not installed, and search is the Python walk alone")
@pytest.mark.parametrize(
    "pattern", ["needle", "NEEDLE$", "^needle", "n.edle", "needle (one|two)", "[^a-z]needle", "(a", "\u00c9", "o+", "."]
)
def test_both_engines_find_the_same(context: ToolContext, workspace: Workspace, pattern: str) -> None:
    make(workspace.root, TREE)
    compiled = compile_pattern(pattern)
    for path in (".", "src", "build", ".chapbook", "src/b.py"):
        for glob in (None, "*.{py,ts}", "!*.py"):
            by_walk, by_ripgrep = (
                search_tree(context, compiled, path=path, glob=glob, first=1, ripgrep=program)
                for program in (None, RIPGREP)
            )
            assert by_ripgrep == by_walk, (path, glob)


def test_a_glob_selects_and_an_unusable_one_is_refused(context: ToolContext, workspace: Workspace) -> None:
    make(workspace.root, TREE)
    assert "[1 hits in 1 files]" in found(context, "needle", glob="*.ts")
    assert "[2 hits in 2 files]" in found(context, "needle", glob="*.{ts,md}")
    assert "[3 hits in 2 files]" in found(context, "needle", path="src")
    assert "[2 hits in 1 files]" in found(context, "needle", path="src", glob="b.*")
    with pytest.raises(ToolError, match="more than 64 patterns"):
        found(context, "needle", glob="{a,b}" * 10)


def test_a_pattern_that_does_not_compile_is_taken_literally_and_says_so(
    context: ToolContext, workspace: Workspace
) -> None:
    make(workspace.root, {"a.c": "call(x\nf(a)(?=b)\n"})
    page = found(context, "call(")
    assert page.startswith("a.c:1: call(x\n[not a regular expression (missing ): ")
    assert "taken literally" in page
    assert "a.c:2: f(a)(?=b)" in found(context, "(?=b)")  # RE2 has no lookaround


def test_a_pattern_that_needs_exponential_time_elsewhere_ends_here(context: ToolContext, workspace: Workspace) -> None:
    make(workspace.root, {"a.txt": "a" * 100_000 + "\n"})
    assert found(context, "(a+)+$").endswith("[1 hits in 1 files]")
    assert found(context, "(a*)*b").endswith("[no hits]")
    assert "taken literally" in found(context, "((a{100}){100}){100}")


def test_unusable_patterns_are_refused_with_the_limit(context: ToolContext) -> None:
    with pytest.raises(ToolError, match="empty; use list"):
        found(context, "")
    with pytest.raises(ToolError, match="70000 bytes; the limit is 65536"):
        found(context, "x" * 70_000)


def test_hits_beyond_the_budget_are_counted_and_reached_by_offset(
    make_context: MakeContext, workspace: Workspace
) -> None:
    make(workspace.root, {f"f{n:03}.txt": "word\n" * 50 for n in range(40)})
    context = make_context(arrival_tokens=600)
    seen: list[str] = []
    offset = 1
    while True:
        page = found(context, "word", offset=offset)
        assert context.count_tokens(page) <= 600
        seen += page.split("\n")[:-1]
        following = re.search(r"next: offset=(\d+)", page)
        if following is None:
            break
        offset = int(following[1])
        assert f"[2000 hits in 40 files; these are {len(seen) - page.count(chr(10)) + 1}-{len(seen)};" in page
    assert seen == [f"f{n:03}.txt:{line}: word" for n in range(40) for line in range(1, 51)]
    assert found(context, "word", offset=2001) == "[2000 hits in 40 files; offset 2001 is past the last]"


def test_a_long_line_is_a_window_around_the_hit_that_read_can_open(context: ToolContext, workspace: Workspace) -> None:
    line = "é" * 300_000 + " needle " + "é" * 300_000
    make(workspace.root, {"a.min.js": line})
    page = found(context, "needle")
    column = int(re.search(r"\[column (\d+)\]", page)[1])
    assert len(page) < 300
    assert page.startswith(f"a.min.js:1: [column {column}] …é")
    assert "é needle é" in page
    assert "\ufffd" not in page
    assert column <= 600_001 < column + 200
    shown = line.encode()[column - 1 :].decode()
    assert page.split("…")[1] == shown[: len(page.split("…")[1])]


def test_a_hit_far_down_a_line_over_a_block_keeps_its_column(context: ToolContext, workspace: Workspace) -> None:
    make(workspace.root, {"a.txt": b"first\n" + b"x" * (17 << 20) + b"needle" + b"y" * 500 + b"\nneedle\n"})
    page = found(context, "needle")
    column = int(re.search(r"a\.txt:2: \[column (\d+)\]", page)[1])
    assert column <= (17 << 20) + 1 < column + 200
    assert page.split("\n")[1:] == ["a.txt:3: needle", "[2 hits in 1 files]"]


LINES = st.lists(st.sampled_from(["foo", "Foo bar", "", "x", "éfoo", "foo\r", "\tfoo foo", "a\u2028foo"]), max_size=30)


@given(LINES, st.sampled_from(["foo", "^foo", "foo$", "o+", "^$", "^", "x*", r"\bfoo", "[^x]+", r"foo\nfoo", "é"]))
@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_hits_are_those_of_a_line_by_line_search(workspace: Workspace, lines: list[str], pattern: str) -> None:
    data = "\n".join(lines)
    (workspace.root / "a.txt").write_bytes(data.encode())
    hits = [(hit.line, hit.text) for hit in find_hits(workspace, "a.txt", compile_pattern(pattern), cancel=Cancel())]
    plain = data.replace("\r\n", "\n").split("\n")
    if plain[-1] == "":
        plain.pop()
    by_line = re.compile(pattern, re.IGNORECASE | re.ASCII) if "é" not in pattern else re.compile(pattern)
    assert hits == [(number, line) for number, line in enumerate(plain, 1) if by_line.search(line)]


def test_hostile_text_stays_one_hit_on_one_line(context: ToolContext, workspace: Workspace, hostile_text: str) -> None:
    make(workspace.root, {"a.txt": f"mark {hostile_text}\n"})
    first = hostile_text.split("\n", maxsplit=1)[0]
    assert found(context, "^mark") == f"a.txt:1: mark {first}\n[1 hits in 1 files]"


def test_bytes_that_are_no_text_are_shown_with_marks(context: ToolContext, workspace: Workspace) -> None:
    make(workspace.root, {"a.txt": b"needle \xff\xfe\n" + b"x\n" * 50_000 + b"needle \0 nul\n"})
    assert found(context, "needle").split("\n")[:2] == [
        "a.txt:1: needle \ufffd\ufffd",
        "a.txt:50002: needle \ufffd nul",
    ]


def test_a_binary_file_that_is_named_is_refused_and_one_that_is_met_is_passed(
    context: ToolContext, workspace: Workspace
) -> None:
    make(workspace.root, {"a.bin": b"needle\0", "b.txt": "needle"})
    assert found(context, "needle") == "b.txt:1: needle\n[1 hits in 1 files]"
    with pytest.raises(ToolError, match="is binary"):
        found(context, "needle", path="a.bin")


def test_traps_in_the_tree_are_passed_over(context: ToolContext, workspace: Workspace, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("needle outside")
    make(workspace.root, {"a.txt": "needle"})
    (workspace.root / "leak").symlink_to(tmp_path / "secret")
    (workspace.root / "self").symlink_to(".")
    os.mkfifo(workspace.root / "fifo")
    assert found(context, "needle") == "a.txt:1: needle\n[1 hits in 1 files]"
    with pytest.raises(ContainmentError):
        found(context, "needle", path="leak")
    with pytest.raises(ToolError, match="there is no 'none'"):
        found(context, "needle", path="none")


def test_a_cancel_ends_the_search(make_context: MakeContext, workspace: Workspace) -> None:
    make(workspace.root, {"a.txt": "needle"})
    cancel = Cancel()
    cancel.set()
    for ripgrep in (None, RIPGREP):
        with pytest.raises(ToolError, match="cancelled"):
            search_tree(
                make_context(cancel=cancel), compile_pattern("needle"), path=".", glob=None, first=1, ripgrep=ripgrep
            )
