"""`read`: pages that fit, and from which the whole file can be put together again."""

from __future__ import annotations

import os
import re
import resource
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from chapbook.kernels.errors import ToolError
from chapbook.runtime.cancel import Cancel
from chapbook.runtime.tools.read import DEFAULT_LINES, read
from chapbook.runtime.tools.spec import ToolContext
from chapbook.runtime.tools.workspace import Workspace

MakeContext = Callable[..., ToolContext]
NEXT = re.compile(r"next: offset=(\d+)(?:, column=(\d+))?")


def page_of(context: ToolContext, **arguments: object) -> str:
    return read.body(context, arguments).content


def lines_of(page: str) -> list[str]:
    """Return what the page shows of the file: the text behind the numbers. Lone CRs are part of a line."""
    return [line.split("\t", 1)[1] for line in page.split("\n") if re.match(r"\d+\t", line)]


def footer_of(page: str) -> str:
    return next(line for line in page.split("\n") if line.startswith("["))


def read_on(context: ToolContext, path: str) -> str:
    """Put a file together from its pages, following what each says of the next."""
    text, arguments = "", {"offset": 1}
    for _ in range(10_000):
        page = page_of(context, path=path, **arguments)
        assert context.count_tokens(page) <= context.arrival_tokens
        text += "\n".join(lines_of(page))
        found = NEXT.search(footer_of(page))
        if found is None:
            ends_open = "no newline at the end" in footer_of(page) or "[empty file" in footer_of(page)
            return text if ends_open else f"{text}\n"
        arguments = {"offset": int(found[1]), **({"column": int(found[2])} if found[2] else {})}
        text += "" if found[2] else "\n"
    raise AssertionError("the pages do not end")


def test_a_short_file_is_shown_whole_with_its_numbers(context: ToolContext, workspace: Workspace) -> None:
    (workspace.root / "a.txt").write_text("one\n\n\ttwo\n")
    assert page_of(context, path="a.txt") == "1\tone\n2\t\n3\t\ttwo\n[lines 1-3 of 3]"


def test_the_usual_page_stays_below_the_arrival_threshold(make_context: MakeContext, workspace: Workspace) -> None:
    (workspace.root / "a.py").write_text("".join(f"def function_{n}(argument):\n    return {n}\n" for n in range(2000)))
    for arrival_tokens in (512, 2000, 8000):
        context = make_context(arrival_tokens=arrival_tokens)
        page = page_of(context, path="a.py")
        tokens = context.count_tokens(page)
        assert arrival_tokens * 0.6 < tokens <= arrival_tokens or len(lines_of(page)) == DEFAULT_LINES
        assert f"next: offset={len(lines_of(page)) + 1}" in page
        assert "of 4,000;" in page


def test_at_most_400_lines_come_without_a_limit(make_context: MakeContext, workspace: Workspace) -> None:
    (workspace.root / "a.txt").write_text("x\n" * 5000)
    page = page_of(make_context(arrival_tokens=8000), path="a.txt")
    assert len(lines_of(page)) == 400
    assert footer_of(page) == "[lines 1-400 of 5,000; next: offset=401]"


def test_an_explicit_limit_is_taken_at_its_word(make_context: MakeContext, workspace: Workspace) -> None:
    (workspace.root / "a.txt").write_text("some words in a line\n" * 5000)
    page = page_of(make_context(arrival_tokens=512), path="a.txt", offset=11, limit=1000)
    assert footer_of(page) == "[lines 11-1010 of 5,000; next: offset=1011]"
    assert len(lines_of(page)) == 1000


def test_the_first_page_of_markdown_lists_the_headings_to_come(
    context: ToolContext, make_context: MakeContext, workspace: Workspace
) -> None:
    body = "text\n" * 300
    fenced = "```\n# not a heading\n```\n"
    (workspace.root / "a.md").write_text(f"# One\n{body}## Two `x`\n{fenced}{body}### Three\n{body}{body}#no heading\n")
    page = page_of(context, path="a.md")
    assert page.split("\n")[-2:] == ["[contents after line 400]", "606 ### Three"]
    short = page_of(make_context(arrival_tokens=600), path="a.md")
    assert short.endswith("302 ## Two `x`\n606 ### Three")
    assert "contents" not in page_of(context, path="a.md", offset=300)
    assert "contents" not in page_of(context, path="a.md", limit=5)


def test_the_first_page_of_python_lists_definitions_bounded(make_context: MakeContext, workspace: Workspace) -> None:
    code = "x = 1\n" * 500 + "".join(f"class C{n}:\n    async def method(self): ...\n" for n in range(100))
    (workspace.root / "a.py").write_text(code)
    page = page_of(make_context(arrival_tokens=4000), path="a.py")
    entries = page.split("[contents")[1].split("\n")
    assert entries[0] == " after line 400, 40 of 200]"
    assert entries[1:3] == ["501 class C0", "502     async def method"]
    assert len(entries) == 41


def test_a_line_of_a_megabyte_is_read_in_windows(context: ToolContext, workspace: Workspace) -> None:
    (workspace.root / "a.json").write_text("[" + "12345," * 170_000 + "0]\nsecond\n")
    page = page_of(context, path="a.json")
    assert context.count_tokens(page) <= context.arrival_tokens
    footer = footer_of(page)
    assert re.fullmatch(r"\[line 1, bytes 1-(\d+) of 1,020,003; 2 lines in all; next: offset=1, column=\d+\]", footer)
    end = page_of(context, path="a.json", offset=1, column=1_020_000)
    assert lines_of(end) == [",0]"] or lines_of(end) == ["5,0]"]
    assert "next: offset=2]" in end
    assert lines_of(page_of(context, path="a.json", offset=2)) == ["second"]


TEXT = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=300)
LONG = st.builds(lambda piece, times: piece * times, st.text("ab é日\t", min_size=1, max_size=5), st.integers(1, 900))
LINES = st.lists(st.one_of(TEXT, LONG), max_size=12).map("\n".join)


@given(text=LINES, arrival_tokens=st.sampled_from([200, 512]))
@example(text="\n", arrival_tokens=200)
@example(text="x" * 70_000 + "\n\n" + "é" * 40_000, arrival_tokens=512)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_pages_put_together_are_the_file(
    make_context: MakeContext, workspace: Workspace, text: str, arrival_tokens: int
) -> None:
    if text.split("\n", 1)[0].endswith("\r"):
        text = f"\n{text}"  # line ends of CRLF are told in the footer, and are tested below
    (workspace.root / "a.txt").write_bytes(text.encode())
    if text.startswith("\ufeff"):
        text = text[1:]
    assert read_on(make_context(arrival_tokens=arrival_tokens), "a.txt") == text


def test_hostile_text_comes_through_as_it_is(context: ToolContext, workspace: Workspace, hostile_text: str) -> None:
    (workspace.root / "a.txt").write_bytes(hostile_text.encode())
    page = page_of(context, path="a.txt")
    assert "\n".join(lines_of(page)) == hostile_text
    assert [line for line in page.split("\n") if not re.match(r"\d+\t", line)] == [footer_of(page)]


def test_invalid_utf8_is_shown_with_marks_and_said_so(context: ToolContext, workspace: Workspace) -> None:
    (workspace.root / "a.txt").write_bytes(b"caf\xe9 \xf0\x9f\nok\n")
    page = page_of(context, path="a.txt")
    assert lines_of(page) == ["caf\ufffd \ufffd", "ok"]
    assert "invalid bytes shown as \ufffd" in footer_of(page)


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-16-be", "utf-32"])
def test_a_byte_order_mark_decides_the_encoding(context: ToolContext, workspace: Workspace, encoding: str) -> None:
    text = "grün\n日本\n" * 3
    mark = "\ufeff" if encoding == "utf-16-be" else ""
    (workspace.root / "a.txt").write_bytes((mark + text).encode(encoding))
    page = page_of(context, path="a.txt")
    assert lines_of(page) == text.split("\n")[:-1]
    assert "with a byte order mark" in footer_of(page)


def test_crlf_is_said_and_not_shown(context: ToolContext, workspace: Workspace) -> None:
    (workspace.root / "a.txt").write_bytes(b"one\r\ntwo\r\n")
    assert page_of(context, path="a.txt") == "1\tone\n2\ttwo\n[lines 1-2 of 2; CRLF line ends]"


def test_a_carriage_return_that_ends_no_line_is_shown(context: ToolContext, workspace: Workspace) -> None:
    (workspace.root / "a.txt").write_bytes(b"one\r\n10%\r20%\r\n\r")
    assert lines_of(page_of(context, path="a.txt")) == ["one", "10%\r20%", "\r"]
    for column, shown in ((4, "\r20%"), (5, "20%")):
        assert lines_of(page_of(context, path="a.txt", offset=2, column=column)) == [shown]
    assert lines_of(page_of(context, path="a.txt", offset=3)) == ["\r"]
    assert lines_of(page_of(context, path="a.txt", offset=2, limit=1)) == ["10%\r20%"]


def test_an_empty_file_and_a_missing_newline_are_said(context: ToolContext, workspace: Workspace) -> None:
    (workspace.root / "empty").touch()
    (workspace.root / "open").write_text("x")
    assert page_of(context, path="empty") == "[empty file, 0 bytes]"
    assert page_of(context, path="open") == "1\tx\n[lines 1-1 of 1; no newline at the end]"


def test_a_place_past_the_end_is_refused_with_the_size(context: ToolContext, workspace: Workspace) -> None:
    (workspace.root / "a.txt").write_text("one\ntwo\n")
    (workspace.root / "empty").touch()
    for arguments, problem in (
        ({"path": "a.txt", "offset": 3}, "has 2 lines; offset 3 is past its end"),
        ({"path": "a.txt", "offset": 9, "column": 5}, "has 2 lines; offset 9"),
        ({"path": "a.txt", "offset": 2, "column": 4}, "line 2 of 'a.txt' has 3 bytes; column 4 is past its end"),
        ({"path": "empty", "offset": 2}, "has 0 lines"),
    ):
        with pytest.raises(ToolError, match=problem):
            page_of(context, **arguments)
    assert lines_of(page_of(context, path="a.txt", offset=2, column=3)) == ["o"]


def test_a_binary_file_is_refused_with_its_size_and_a_hint(context: ToolContext, workspace: Workspace) -> None:
    (workspace.root / "a.bin").write_bytes(b"\x7fELF\0\0")
    with pytest.raises(ToolError, match=r"'a\.bin' is binary, 6 bytes; look at it with bash"):
        page_of(context, path="a.bin")


def test_a_nul_further_down_refuses_only_its_own_line(context: ToolContext, workspace: Workspace) -> None:
    (workspace.root / "a.log").write_bytes(b"fine\n" * 20_000 + b"bad\0\n" + b"fine\n")
    assert "next: offset=20001" in page_of(context, path="a.log", offset=19_990)
    with pytest.raises(ToolError, match="NUL in line 20001"):
        page_of(context, path="a.log", offset=20_001)
    assert lines_of(page_of(context, path="a.log", offset=20_002)) == ["fine"]


def test_a_sparse_gigabyte_is_refused_at_once(context: ToolContext, workspace: Workspace) -> None:
    with (workspace.root / "sparse").open("wb") as file:
        file.truncate(1 << 30)
    with pytest.raises(ToolError, match="is binary, 1073741824 bytes"):
        page_of(context, path="sparse")


def test_a_huge_text_is_read_without_being_held(context: ToolContext, workspace: Workspace) -> None:
    with (workspace.root / "big.log").open("wb") as file:
        for _ in range(40):
            file.write(b"a line of some length to be read\n" * 50_000)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    page = page_of(context, path="big.log", offset=1_900_000)
    grown_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert lines_of(page)[0].startswith("a line")
    assert "of 2,000,000;" in page
    assert grown_kb < 16 << 10


def test_a_cancel_ends_the_reading(make_context: MakeContext, workspace: Workspace) -> None:
    (workspace.root / "a.txt").write_text("x\n")
    cancel = Cancel()
    cancel.set()
    with pytest.raises(ToolError, match="cancelled"):
        page_of(make_context(cancel=cancel), path="a.txt")


def test_what_is_no_readable_file_says_what_it_is(context: ToolContext, workspace: Workspace) -> None:
    (workspace.root / "src").mkdir()
    os.mkfifo(workspace.root / "fifo")
    for path, problem in (("src", "is a folder; use list"), ("none", "there is no 'none'"), ("fifo", "FIFO")):
        with pytest.raises(ToolError, match=problem):
            page_of(context, path=path)


def test_reading_leaves_no_handle_open(context: ToolContext, workspace: Workspace) -> None:
    (workspace.root / "a.txt").write_text("x\n")
    (workspace.root / "b.bin").write_bytes(b"\0")
    open_before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(20):
        page_of(context, path="a.txt")
        with pytest.raises(ToolError):
            page_of(context, path="b.bin")
    assert len(list(Path("/proc/self/fd").iterdir())) == open_before
