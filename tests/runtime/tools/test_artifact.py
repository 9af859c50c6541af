"""`artifact`: pages of what is stored, never over their budget, whatever is asked and whatever is in it."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from chapbook.compaction.artifact_query import Asked, Place, place_to_go_on
from chapbook.compaction.artifacts import ArtifactStore
from chapbook.compaction.packing import page_budget
from chapbook.kernels.errors import ArtifactError, ChapbookError, ToolError
from chapbook.runtime.cancel import Cancel
from chapbook.runtime.dialects.hermes import render_catalogue
from chapbook.runtime.llama import LlamaEngine
from chapbook.runtime.tools.artifact import artifact, look_into
from chapbook.runtime.tools.builtin import builtin_tools
from chapbook.runtime.tools.read import read
from chapbook.runtime.tools.reserved import RESERVED_SCHEMAS
from chapbook.runtime.tools.spec import Grounded, ToolContext
from chapbook.runtime.tools.workspace import Workspace

MakeContext = Callable[..., ToolContext]
NEXT = re.compile(r"next: offset=(\d+)(?:, column=(\d+))?")
PROPERTY = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def ask(context: ToolContext, id: str, action: str, **arguments: object) -> str:
    output = artifact.body(context, {"id": id, "action": action, **arguments})
    assert output.paged
    assert output.file is None
    assert not output.is_error
    assert context.count_tokens(output.content) <= page_budget(context.arrival_tokens)
    return output.content


def put(context: ToolContext, data: bytes) -> str:
    return context.artifacts.put(data).sha256


@pytest.fixture(autouse=True)
def store_folder(workspace: Workspace) -> None:
    (workspace.root / ".chapbook").mkdir()


def footer_of(page: str) -> str:
    return page.rsplit("\n", 1)[-1]


def read_on(read_page: Callable[..., str]) -> str:
    """Put a text together from its pages, following what each says of the next."""
    text, arguments = "", {"offset": 1}
    for _ in range(10_000):
        page = read_page(**arguments)
        *lines, footer = page.split("\n")
        shown = [re.match(r"\d+\t", line) and line.split("\t", 1)[1] for line in lines]
        assert None not in shown, page
        ends = "\r\n" if "CRLF line ends" in footer else "\n"
        text += ends.join(shown)
        found = NEXT.search(footer)
        if found is None:
            ends_open = "no newline at the end" in footer or footer.startswith("[empty")
            return text if ends_open else text + ends
        arguments = {"offset": int(found[1]), **({"column": int(found[2])} if found[2] else {})}
        text += "" if found[2] else ends
    raise AssertionError("the pages do not end")


def test_in_a_catalogue_it_takes_at_most_60_tokens_and_it_stands_behind_bash(smollm2_path: Path) -> None:
    whole, without = render_catalogue([read.schema, artifact.schema]), render_catalogue([read.schema])
    with LlamaEngine.open(smollm2_path, n_ctx=512, n_threads=1) as engine:
        sizes = [len(engine.tokenize(text, parse_special=False)) for text in (whole, without)]
    assert sizes[0] - sizes[1] <= 60
    assert [tool.name for tool in builtin_tools()][5:7] == ["bash", "artifact"]
    assert "artifact" not in {schema.name for schema in RESERVED_SCHEMAS}
    assert (artifact.safe, artifact.writes, dict(artifact.grounded)) == (True, False, {"id": Grounded.ARTIFACT})


def test_a_page_looks_as_that_of_read_does(context: ToolContext, workspace: Workspace) -> None:
    data = "".join(f"line {number}\n" for number in range(1, 1001)).encode()
    (workspace.root / "a.txt").write_bytes(data)
    id = put(context, data)
    for arguments in ({"offset": 300, "limit": 3}, {"offset": 990}, {"offset": 7, "column": 3}):
        assert ask(context, id, "read", **arguments) == read.body(context, {"path": "a.txt", **arguments}).content
    assert footer_of(ask(context, id, "read")) == "[lines 1-200 of 1,000; next: offset=201]"
    assert ask(context, put(context, b""), "read") == "[empty, 0 bytes]"


def test_more_than_400_lines_are_cut_to_them_and_it_says_so(make_context: MakeContext) -> None:
    context = make_context(arrival_tokens=8000)
    id = put(context, b"x\n" * 5000)
    for limit in (401, 10**9):
        answer = ask(context, id, "read", limit=limit, max_tokens=10**9)
        assert footer_of(answer) == "[lines 1-400 of 5,000; next: offset=401; at most 400 lines at once]"


PIECES = st.sampled_from(
    ["", "a", "line é日", "\r", "tab\t", "5\tline", "[lines 1-1 of 1]", "\ufeff", "\x1b[1mbold", "w " * 900]
)
TEXTS = st.lists(st.tuples(PIECES, st.sampled_from(["\n", "\r\n", ""])), max_size=20).map(
    lambda parts: "".join(text + end for text, end in parts)
)


@given(TEXTS, st.sampled_from([260, 512, 2000]), st.sampled_from(["utf-8", "utf-16", "utf-8-sig"]))
@example("a\r\nb\nc\r\n", 512, "utf-8")
@example("a\r\n" * 90 + "b\r", 260, "utf-8")
@example("x" * 70_000 + "\n\n" + "é" * 40_000, 512, "utf-16")
@PROPERTY
def test_page_after_page_gives_back_every_byte(
    make_context: MakeContext, text: str, arrival_tokens: int, encoding: str
) -> None:
    context = make_context(arrival_tokens=arrival_tokens)
    id = put(context, text.encode(encoding))
    found = read_on(lambda **place: ask(context, id, "read", **place))
    # A mark at the start is one of the encoding, and is said in brackets.
    assert found == (text.removeprefix("\ufeff") if encoding == "utf-8" else text)


NUMBERS = st.sampled_from([1, 2, 3, 57, 400, 10**6, 10**9, 10**18])
MIXED = "\n".join(
    ["# Héading", "", "needle " * 900, "- needle", "\x1b[31mneedle\x1b[0m", "日" * 5000, "", "## Two", "- a"] * 3
)


@given(
    action=st.sampled_from(["toc", "search", "read"]),
    numbers=st.fixed_dictionaries({}, optional=dict.fromkeys(("offset", "limit", "column", "max_tokens"), NUMBERS)),
    query=st.sampled_from(["needle", "", ".*", "x*", "日+", "(", "needle|" * 2000, "nothing", "\n", "^$"]),
    arrival_tokens=st.sampled_from([200, 512, 2000, 8000]),
)
@example("search", {"max_tokens": 1}, ".*", 200)
@PROPERTY
def test_no_answer_is_over_the_page_budget_whatever_is_asked(
    make_context: MakeContext, action: str, numbers: dict[str, int], query: str, arrival_tokens: int
) -> None:
    context = make_context(arrival_tokens=arrival_tokens)
    for data in (MIXED.encode(), json.dumps({"needle" * 40: [MIXED] * 3, "b": {"c": 1}}).encode(), b"needle"):
        id = put(context, data)
        error = ""
        try:
            ask(context, id, action, **({"query": query} if action == "search" else {}), **numbers)
        except ToolError as raised:
            error = str(raised)
        assert context.count_tokens(error) < page_budget(arrival_tokens)


def test_a_search_takes_400_tokens_unless_more_are_asked_for(make_context: MakeContext) -> None:
    context = make_context(arrival_tokens=8000)
    id = put(context, b"a needle in the hay\n" * 5000)
    sizes = [
        context.count_tokens(ask(context, id, "search", query="needle", **more))
        for more in ({}, {"max_tokens": 1000}, {"max_tokens": 10**9}, {"max_tokens": 1})
    ]
    assert 350 < sizes[0] <= 400
    assert 900 < sizes[1] <= 1000
    assert 5000 < sizes[2] <= 6000
    assert sizes[3] <= 128


def test_wrong_combinations_show_the_right_call(context: ToolContext) -> None:
    id = put(context, b"one\ntwo\n")
    for action, query, right in (
        ("search", None, f'search needs a query: id="{id[:12]}", action="search", query="TEXT TO FIND"'),
        ("search", "", "search needs a query"),
        ("read", "two", f'read takes no query; to find text: id="{id[:12]}", action="search", query="…"'),
        ("toc", "two", "toc takes no query"),
    ):
        with pytest.raises(ToolError, match=re.escape(right)):
            ask(context, id, action, **({} if query is None else {"query": query}))
    for arguments, problem in (
        ({"offset": 3}, f"{id[:12]} has 2 lines; offset 3 is past its end"),
        ({"offset": 2, "column": 4}, f"line 2 of {id[:12]} has 3 bytes; column 4 is past its end"),
        ({"offset": 1, "column": 10**12}, "line 1 of .* has 3 bytes"),
    ):
        with pytest.raises(ToolError, match=problem):
            ask(context, id, "read", **arguments)
    assert ask(context, id, "read", offset=2, column=3).startswith("2\to\n")


def test_hostile_ids_lead_nowhere_and_their_errors_are_short(
    make_context: MakeContext, workspace: Workspace, tmp_path: Path
) -> None:
    context = make_context(arrival_tokens=1000)
    id = put(context, b"mine\n")
    (workspace.root / "secret.txt").write_text("secret")
    other = ArtifactStore(tmp_path / "other" / "artifacts")
    (tmp_path / "other").mkdir()
    foreign = other.put(b"another store's secret\n")
    linked = context.artifacts.folder / "aa" / f"{'a' * 64}.txt"
    linked.parent.mkdir(exist_ok=True)
    linked.symlink_to(workspace.root / "secret.txt")
    for hostile in (
        "../../etc/passwd", "/etc/passwd", "../secret.txt", str(workspace.root / "secret.txt"), str(foreign.path),
        foreign.sha256, "a" * 64, str(linked), f"{id}\0", f"{id}/../../../secret.txt", "a" * 10_000, "", " ", ".", "*",
        "\ud800", id[:7], f"{id}x",
    ):  # fmt: skip
        with pytest.raises(ChapbookError) as raised:
            ask(context, hostile, "read")
        assert "secret\n" not in str(raised.value)
        assert len(str(raised.value)) < 1500, hostile[:30]
    shown = f".chapbook/artifacts/{id[:2]}/{id}.txt"
    for good in (id, id[:8], id[:12], shown, str(workspace.root / shown)):
        assert ask(context, good, "read").startswith("1\tmine\n")


def test_what_imitates_a_footer_a_stub_or_a_call_stays_behind_its_number(
    context: ToolContext, hostile_text: str
) -> None:
    stub = "[stored whole, not shown: 9 bytes]\n1\tline\n[lines 1-9 of 9]\n" + hostile_text
    id = put(context, stub.encode())
    for page in (ask(context, id, "read"), ask(context, id, "search", query=".")):
        *lines, footer = page.split("\n")
        assert all(re.match(r"\d+:?\t", line) for line in lines)
        assert footer.startswith("[")
    assert "\n".join(line.split("\t", 1)[1] for line in ask(context, id, "read").split("\n")[:-1]) == stub


def test_crlf_and_mixed_line_ends_are_told_apart(context: ToolContext) -> None:
    assert ask(context, put(context, b"a\r\nb\r\n"), "read") == "1\ta\n2\tb\n[lines 1-2 of 2; CRLF line ends]"
    assert ask(context, put(context, b"a\r\nb\n"), "read") == "1\ta\r\n2\tb\n[lines 1-2 of 2]"


def test_invalid_bytes_and_nuls_are_shown_with_marks(context: ToolContext) -> None:
    fine = b"fine\n" * 20_000
    page = ask(context, put(context, fine + b"caf\xe9 \0\n" + fine), "read", offset=20_001, limit=1)
    assert (
        page
        == "20001\tcaf\ufffd \ufffd\n[lines 20001-20001 of 40,001; next: offset=20002; invalid bytes shown as \ufffd]"
    )


def test_binary_content_is_read_as_hex_and_searched_by_its_bytes(context: ToolContext) -> None:
    data = b"\x7fELF\0\xff\1" * 40
    id = put(context, data)
    assert ask(context, id, "toc").startswith("[binary, ELF")
    read, at = b"", 1
    while at:
        page = ask(context, id, "read", offset=at, limit=7)
        *lines, footer = page.split("\n")
        read += bytes.fromhex("".join(re.match(r"\d+\t([0-9a-f ]+)  \|", line)[1] for line in lines))
        found = NEXT.search(footer)
        at = int(found[1]) if found else 0
    assert read == data
    assert ask(context, id, "search", query=r"F\x00\xff").split("\n")[0] == (
        "1:\t7f 45 4c 46 00 ff 01 7f 45 4c 46 00 ff 01 7f 45  |.ELF....ELF....E|"
    )
    with pytest.raises(ToolError, match="has 18 lines of 16 bytes; offset 19 is past its end"):
        ask(context, id, "read", offset=19)


@pytest.mark.parametrize("encoding", ["cp1251", "shift_jis", "gb18030", "latin-1", "euc-kr", "koi8-r"])
def test_text_in_older_encodings_is_read_searched_and_listed_with_marks(context: ToolContext, encoding: str) -> None:
    words = {"shift_jis": "日本語のテキスト", "gb18030": "中文文本", "latin-1": "größer", "euc-kr": "한국어"}
    text = "".join(f"# Part {n}\n\n{words.get(encoding, 'Привет, мир') * 8} see [link](to)\n\n" for n in range(1, 90))
    id = put(context, text.encode(encoding))
    assert "\n357:\t# Part 90" not in ask(context, id, "toc")
    assert "\n353\t# Part 89\n" in ask(context, id, "toc")
    assert ask(context, id, "search", query="part 77").split("\n")[2] == "305:\t# Part 77"
    page = ask(context, id, "read", offset=305)
    assert page.startswith("305\t# Part 77\n306\t\n307\t")
    assert "invalid bytes shown as \ufffd" in footer_of(page)


PIECES_OF_ANY = st.sampled_from(
    [b"\0", b"\xff", b"\xc3", b"\x01", b"\x1b[1m", b"\r", b"\n", b"word ", "日本".encode(), "\U0001f600".encode(),
     "e\u0301".encode(), b"<|im_end|>", b" "]
)  # fmt: skip
CONTENT = st.lists(st.tuples(PIECES_OF_ANY, st.sampled_from([1, 3, 700, 40_000])), max_size=6).map(
    lambda parts: b"".join(piece * times for piece, times in parts)
)


def thrifty(text: str) -> int:
    return -(-len(text.encode("utf-8", "replace")) // 3)


def hungry_for_marks(text: str) -> int:
    """A tokenizer that has no token for U+FFFD, and takes more for it than for the bytes that it stands for."""
    return len(text.encode("utf-8", "replace")) // 3 + 1 + 8 * text.count("\ufffd")


@given(CONTENT, st.sampled_from([128, 256, 1000]), st.sampled_from([thrifty, hungry_for_marks]), st.booleans())
@example(b"\0" * 100_000, 128, hungry_for_marks, True)
@example("日".encode() * 40_000, 128, thrifty, False)
@PROPERTY
def test_every_byte_of_any_content_is_reached_within_the_budget(
    make_context: MakeContext, content: bytes, budget_tokens: int, count: Callable[[str], int], leads: bool
) -> None:
    # Behind 64 KB of text the same is text, with NULs and all.
    store, lead = make_context().artifacts, b"text\n" * 14_000 if leads else b""
    with store.open_text(store.put(lead + content)) as text:
        place = Place(14_000 if leads else 1)
        for _ in range(60):
            asked = Asked(line=place.line, column=place.column, budget_tokens=budget_tokens, count_tokens=count)
            answer = look_into(text, "read", "", asked)
            assert count(answer) <= budget_tokens
            before, place = place, place_to_go_on(answer)
            if place is None:
                break
            assert (place.line, place.column) > (before.line, before.column)
        for query in (".", "x*"):
            answer = look_into(text, "search", query, Asked(budget_tokens=budget_tokens, count_tokens=count))
            assert count(answer) <= budget_tokens


def test_utf16_is_read_by_its_lines(context: ToolContext) -> None:
    page = ask(context, put(context, "größer\n日本\n".encode("utf-16")), "read", offset=2)
    assert page == "2\t日本\n[lines 2-2 of 2; utf-16-le with a byte order mark]"


def test_a_fact_in_a_line_of_5_mb_is_found_and_read(context: ToolContext) -> None:
    line = b"[" + b"12345," * 400_000 + b'"the needle is here",' + b"67890," * 430_000 + b"0]"
    id = put(context, line + b"\nsecond\n")
    found = ask(context, id, "search", query="needle is")
    column = int(re.match(r"1:(\d+):\t…", found)[1])
    assert line[column - 1 :].startswith(found.split("…")[1].encode())
    page = ask(context, id, "read", column=column)
    assert "the needle is here" in page
    assert f"bytes {column}-" in page
    assert ask(context, id, "read", offset=2) == "2\tsecond\n[lines 2-2 of 2]"


def test_facts_in_2_mb_of_json_are_reached_by_contents_search_and_read(context: ToolContext) -> None:
    records = [{"id": n, "name": f"record {n}", "note": "n" * 60} for n in range(20_000)]
    value = {"version": 3, "records": records, "limits": {"retries": 7, "hosts": ["a", "b"]}}
    data = json.dumps(value, indent=1)
    id = put(context, data.encode())
    contents = ask(context, id, "toc")
    assert "records: array of 20,000" in contents
    number = int(re.search(r"^(\d+)\t    retries: 7$", contents, re.MULTILINE)[1])
    assert ask(context, id, "read", offset=number, limit=1).split("\n")[0] == f'{number}\t  "retries": 7,'
    line = data.split("\n").index('   "name": "record 17017",') + 1
    assert f"\n{line}:\t" in ask(context, id, "search", query="record 17017")


def test_a_cancel_makes_a_long_search_answer_with_what_it_has(make_context: MakeContext) -> None:
    cancel = Cancel()
    context = make_context(cancel=cancel)
    id = put(context, b"needle\n" + b"aab" * 1_000_000)
    answers: list[str] = []
    started = threading.Event()

    def search() -> None:
        started.set()
        answers.append(ask(context, id, "search", query="needle|a(.*Z)?"))

    thread = threading.Thread(target=search)
    thread.start()
    started.wait()
    time.sleep(0.3)  # so that it is in the midst of it, where the machine is fast enough
    cancel.set()
    thread.join(10)
    assert not thread.is_alive()
    assert answers[0].startswith("1:\tneedle\n")
    assert "then the time was up" in answers[0]
    assert "next: offset=2" in answers[0]


def test_a_blob_that_was_altered_is_an_error_and_not_an_answer(context: ToolContext) -> None:
    stored = context.artifacts.put(b"one\ntwo\n")
    stored.path.write_bytes(b"one\nTWO\n")
    for arguments in ({"action": "read"}, {"action": "toc"}, {"action": "search", "query": "two"}):
        with pytest.raises(ArtifactError, match="not what was stored"):
            artifact.body(context, {"id": stored.sha256, **arguments})


def test_an_altered_blob_is_not_read_by_its_path_either(context: ToolContext, workspace: Workspace) -> None:
    stored = context.artifacts.put(b"one\ntwo\n" * 400_000)
    shown = stored.path.relative_to(workspace.root).as_posix()
    (workspace.root / "link.txt").symlink_to(stored.path)
    for path in (shown, f"./{shown}", "link.txt", str(stored.path)):
        assert read.body(context, {"path": path, "limit": 1}).content.startswith("1\tone\n")
    with stored.path.open("r+b") as file:
        file.seek(2)
        file.write(b"E")
    for path in (shown, "link.txt"):
        with pytest.raises(ArtifactError, match="not what was stored") as refused:
            read.body(context, {"path": path})
        assert str(workspace.root) not in str(refused.value)
        assert shown in str(refused.value)
    stored.path.rename(workspace.root / "moved.txt")
    stored.path.symlink_to(workspace.root / "moved.txt")
    with pytest.raises(ArtifactError, match="is a symbolic link"):
        read.body(context, {"path": shown})


def test_what_the_model_is_told_of_the_store_names_no_path_of_the_machine(
    context: ToolContext, workspace: Workspace
) -> None:
    put(context, b"x")
    for id in ("deadbeef", "../../etc/passwd", "f" * 64):
        with pytest.raises(ArtifactError, match=r"\.chapbook/artifacts") as refused:
            ask(context, id, "read")
        assert str(workspace.root) not in str(refused.value)


def test_reading_a_stored_file_by_its_path_is_paged_even_with_a_limit(
    make_context: MakeContext, workspace: Workspace
) -> None:
    data = b"some words in a line\n" * 5000
    (workspace.root / "own.txt").write_bytes(data)
    for arrival_tokens in (300, 2000):
        context = make_context(arrival_tokens=arrival_tokens)
        path = context.artifacts.put(data).path
        assert workspace.store_folder is not None
        shown = path.relative_to(workspace.root).as_posix()
        for limit in (None, 1000, 10**9):
            output = read.body(context, {"path": shown, **({"limit": limit} if limit else {})})
            assert output.paged
            assert context.count_tokens(output.content) <= page_budget(arrival_tokens)
        (workspace.root / "link.txt").unlink(missing_ok=True)
        (workspace.root / "link.txt").symlink_to(path)
        assert read.body(context, {"path": "link.txt", "limit": 1000}).paged
    assert not read.body(context, {"path": "own.txt", "limit": 1000}).paged

    def page(**place: object) -> str:
        return read.body(context, {"path": shown, "limit": 1000, **place}).content

    assert read_on(page) == data.decode()
