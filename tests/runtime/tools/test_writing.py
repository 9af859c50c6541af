"""`write` and `edit`: exact, whole or not at all."""

from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from chapbook.kernels.errors import ContainmentError, ToolError
from chapbook.runtime.tools.spec import ToolContext
from chapbook.runtime.tools.workspace import Workspace
from chapbook.runtime.tools.writing import EDIT_LIMIT_BYTES, edit, write


def wrote(context: ToolContext, path: str, content: str) -> str:
    return write.body(context, {"path": path, "content": content}).content


def edited(context: ToolContext, old: str, new: str, **more: object) -> str:
    return edit.body(context, {"path": "a.txt", "old": old, "new": new, **more}).content


def test_a_file_is_created_with_its_folders_and_then_overwritten(context: ToolContext, workspace: Workspace) -> None:
    assert wrote(context, "new/deep/a.txt", "one\ntwo") == "created new/deep/a.txt: 2 lines, 7 bytes"
    assert wrote(context, "new/deep/a.txt", "é\n") == "overwrote new/deep/a.txt: 1 lines, 3 bytes"
    assert wrote(context, "new/deep/a.txt", "") == "overwrote new/deep/a.txt: 0 lines, 0 bytes"
    assert (workspace.root / "new/deep/a.txt").read_bytes() == b""


def test_content_that_no_file_can_hold_is_refused(context: ToolContext, workspace: Workspace) -> None:
    with pytest.raises(ToolError, match="content holds half a surrogate pair at character 1"):
        wrote(context, "a.txt", "x\ud800")
    with pytest.raises(ContainmentError):
        wrote(context, ".git/hooks/pre-commit", "#!/bin/sh\n")
    assert not list(workspace.root.iterdir())


def test_an_edit_replaces_the_one_place(context: ToolContext, workspace: Workspace) -> None:
    (workspace.root / "a.txt").write_text("one\ntwo\nthree\n")
    (workspace.root / "a.txt").chmod(0o750)
    assert edited(context, "two\nth", "2\nTh") == "edited a.txt: 1 replaced, at line 2"
    assert (workspace.root / "a.txt").read_text() == "one\n2\nThree\n"
    assert (workspace.root / "a.txt").stat().st_mode & 0o777 == 0o750


def test_an_edit_that_fits_several_places_is_refused_with_the_lines(context: ToolContext, workspace: Workspace) -> None:
    (workspace.root / "a.txt").write_text("x = 1\ny = 1\nz = 1\n")
    with pytest.raises(ToolError, match=r"old is 3 times in 'a\.txt', at lines 1, 2, 3; nothing was changed"):
        edited(context, " = 1", " = 2")
    assert edited(context, " = 1", " = 2", replace_all=True) == "edited a.txt: 3 replaced, at lines 1, 2, 3"
    assert (workspace.root / "a.txt").read_text() == "x = 2\ny = 2\nz = 2\n"


def test_places_that_overlap_are_not_one_place(context: ToolContext, workspace: Workspace) -> None:
    (workspace.root / "a.txt").write_text("aaa")
    with pytest.raises(ToolError, match="old is 2 times"):
        edited(context, "aa", "b")


def test_many_places_are_counted_and_not_all_named(context: ToolContext, workspace: Workspace) -> None:
    (workspace.root / "a.txt").write_text("x\n" * 500)
    with pytest.raises(ToolError, match=r"old is 500 times in 'a.txt', at lines 1, 2, .*, 20 and 480 more"):
        edited(context, "x", "y")


@pytest.mark.parametrize(
    ("old", "hint"),
    [
        ("def  f( ):\n  return 1", "Lines 2-3 differ in white space only"),
        ("2\tdef f( ):\n3\t    return 1", "It is at line 2 without the line numbers"),
        ("    retrun 1", "The closest line is 3: return 1"),
        ("nothing like it at all", "Read the file and copy the text exactly"),
        ("  \n\n\n", "It is white space only"),
    ],
)
def test_a_near_miss_says_where(context: ToolContext, workspace: Workspace, old: str, hint: str) -> None:
    (workspace.root / "a.txt").write_text("import os\ndef f( ):\n    return 1\n")
    with pytest.raises(ToolError, match=r"old is not in 'a\.txt'; nothing was changed") as refused:
        edited(context, old, "x")
    assert hint in str(refused.value)


def test_line_ends_of_the_file_are_kept(context: ToolContext, workspace: Workspace) -> None:
    (workspace.root / "a.txt").write_bytes(b"one\r\ntwo\r\nthree\r\n")
    edited(context, "two\nthree", "2\n2b\n3")
    assert (workspace.root / "a.txt").read_bytes() == b"one\r\n2\r\n2b\r\n3\r\n"
    edited(context, "one", "0\n1")
    assert (workspace.root / "a.txt").read_bytes() == b"0\r\n1\r\n2\r\n2b\r\n3\r\n"


def test_a_place_with_the_other_line_ends_is_found(context: ToolContext, workspace: Workspace) -> None:
    (workspace.root / "a.txt").write_bytes(b"one\nb\r\nc\r\n")
    edited(context, "b\nc", "B\nC")
    assert (workspace.root / "a.txt").read_bytes() == b"one\nB\r\nC\r\n"
    (workspace.root / "a.txt").write_bytes(b"one\r\nb\nc\n")
    edited(context, "b\nc", "B\nC")
    assert (workspace.root / "a.txt").read_bytes() == b"one\r\nB\nC\n"


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-32"])
def test_encoding_and_byte_order_mark_are_kept(context: ToolContext, workspace: Workspace, encoding: str) -> None:
    (workspace.root / "a.txt").write_bytes("grün\n日本\n".encode(encoding))
    edited(context, "日本", "ñandú")
    assert (workspace.root / "a.txt").read_bytes() == "grün\nñandú\n".encode(encoding)


@given(before=st.binary(max_size=40), after=st.binary(max_size=40))
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_bytes_that_are_not_edited_stay_as_they_are(
    context: ToolContext, workspace: Workspace, before: bytes, after: bytes
) -> None:
    before, after = (part.replace(b"\0", b"").replace(b"\r", b"") for part in (b"." + before, after))
    (workspace.root / "a.txt").write_bytes(before + b"<old>" + after)
    edited(context, "<old>", "new", replace_all=b"<old>" in before + after)
    if b"<old>" not in before + after:
        assert (workspace.root / "a.txt").read_bytes() == before + b"new" + after


def test_what_cannot_be_edited_says_why_and_is_left_alone(context: ToolContext, workspace: Workspace) -> None:
    target = workspace.root / "a.txt"
    target.write_bytes(b"a\0b")
    with pytest.raises(ToolError, match="is binary"):
        edited(context, "a", "b")
    target.write_bytes("x".encode("utf-16") + b"\x00\xd8")
    with pytest.raises(ToolError, match="not valid utf-16-le"):
        edited(context, "x", "y")
    target.write_bytes(b"x" * (EDIT_LIMIT_BYTES + 1))
    with pytest.raises(ToolError, match=f"over {EDIT_LIMIT_BYTES} bytes"):
        edited(context, "x", "y")
    assert target.stat().st_size == EDIT_LIMIT_BYTES + 1
    target.write_bytes(b"x" * 100_000)
    with pytest.raises(ToolError, match="result would have over"):
        edited(context, "x", "y" * 1000, replace_all=True)
    for old, new, problem in (("", "y", "old is empty"), ("x", "x", "are the same"), ("x", "\udc80", "new holds half")):
        with pytest.raises(ToolError, match=problem):
            edited(context, old, new)
    assert target.read_bytes() == b"x" * 100_000
    assert os.listdir(workspace.root) == ["a.txt"]  # noqa: PTH208 (names are what is compared)


def test_an_edit_of_a_missing_file_or_through_a_trap_is_refused(context: ToolContext, workspace: Workspace) -> None:
    with pytest.raises(ToolError, match=r"there is no 'a\.txt'"):
        edited(context, "a", "b")
    (workspace.root / "a.txt").symlink_to("/etc/hostname")
    with pytest.raises(ContainmentError):
        edited(context, "a", "b")
