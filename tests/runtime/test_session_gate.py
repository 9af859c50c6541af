"""Whatever is too large for the window never gets there, by whatever way it comes, and is all still to be had."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest

from chapbook.kernels.errors import NoRoom, ToolError
from chapbook.runtime.checker import rebuild
from chapbook.runtime.events import Author, Notice, SegmentKind, StepEnd, ToolResult, TurnEndReason, UserMessage
from chapbook.runtime.hooks import Hooks
from chapbook.runtime.log_reading import read_log
from chapbook.runtime.session import Session
from chapbook.runtime.session_settings import SessionSettings
from chapbook.runtime.stream import NoticeGiven, ToolFinished
from chapbook.runtime.tools.builtin import builtin_tools
from chapbook.runtime.tools.declare import tool
from chapbook.runtime.tools.spec import Policy, ToolContext, ToolOutput

SENTINEL = "heliotrope-4711"
WORDS = "the vault keeps its gold behind a door of oak and nobody knows who holds the key to it".split()  # noqa: SIM905 (shorter)
FACTS = {f"the colour of house {number} is": f"tint-{number * 37 % 101}-{number}" for number in range(10)}


def book() -> str:
    """A Markdown text of about 370 KB: fifty chapters, ten facts and a sentinel in their midst."""
    chooser = random.Random(4)
    lines = []
    for chapter in range(50):
        lines += ["", f"# Chapter {chapter}: {chooser.choice(WORDS)} {chooser.choice(WORDS)}", "", "## At night", ""]
        lines += [" ".join(chooser.choices(WORDS, k=16)) for _ in range(100)]
        if chapter % 5 == 3:
            fact, value = list(FACTS.items())[chapter // 5]
            lines.insert(len(lines) - 30, f"As it is told, {fact} {value}.")
        if chapter == 31:
            lines.insert(len(lines) - 12, SENTINEL)
    return "\n".join(lines) + "\n"


BOOK = book()


@tool
def fetch() -> str:
    """Return the book."""
    return BOOK


WAYS = {
    "bash": ("bash", {"command": "cat book.md"}),
    "read": ("read", {"path": "book.md", "limit": 1_000_000}),
    "registered": ("fetch", {}),
}


def events_of(session: Session) -> list[Any]:
    return [logged.event for logged in read_log(session.store.session_folder(session.id)).events]


def requests_of(made: Any, session: Session) -> list[str]:
    """Every request of the log as text, from the token ids that the checker rebuilds."""
    contents = read_log(session.store.session_folder(session.id))
    rebuilt = rebuild(contents.events, tokenizer=made.engine, stored=contents.tokens)
    assert rebuilt.problems == ()
    return [made.engine.detokenize(request.tokens).decode("utf-8", "replace") for request in rebuilt.requests]


@pytest.mark.parametrize("n_ctx", [8192, 32768])
@pytest.mark.parametrize("way", WAYS)
def test_a_book_enters_as_one_stub_and_every_fact_of_it_is_found_again(
    way: str, n_ctx: int, rig: Callable[..., Any]
) -> None:
    made = rig(n_ctx=n_ctx)
    (made.workspace / "book.md").write_text(BOOK)
    name, arguments = WAYS[way]
    answers: list[str] = []

    def replies() -> Iterator[str]:
        yield made.call(name, **arguments)
        (sha256,) = session.transcript.state.artifacts
        stored = sha256[:12]
        yield made.call("artifact", id=stored, action="toc")
        for number, fact in enumerate(FACTS):
            yield made.call("artifact", id=stored, action="search", query=fact, max_tokens=150)
            found = answers[-1]
            if number % 2:  # and by reading at the line that the search names
                (line,) = re.findall(r"^(\d+)(?::\d+)?:\t.*" + fact, found, re.MULTILINE)
                yield made.call("artifact", id=stored, action="read", offset=int(line), limit=2)
        yield "done"

    settings = SessionSettings(rounds=40, policies=dict.fromkeys(("bash",), Policy.ALLOW))
    with made.open(replies(), settings=settings, host={"tools": [*builtin_tools(), fetch]}) as session:
        for event in session.send("Read the book."):
            if isinstance(event, ToolFinished):
                answers.append(event.content)  # noqa: PERF401 (the replies look at it as it grows)
        made.check(session)
        events = events_of(session)
        requests = requests_of(made, session)
        results = [event for event in events if isinstance(event, ToolResult)]
        usages = [event.usage for event in events if isinstance(event, StepEnd)]
        stub = results[0]
        assert len(made.engine.tokenize(stub.content, parse_special=False)) <= 300
        assert [result.artifact is not None for result in results] == [True] + [False] * (len(results) - 1)
        assert not any(result.is_error for result in results)
        blob = session.store.artifacts.read(stub.artifact)
    assert all(SENTINEL not in request for request in requests)
    assert SENTINEL in blob.decode()
    for fact, value in FACTS.items():
        assert any(f"{fact} {value}" in answer for answer in answers[2:]), fact
        assert f"{fact} {value}" not in stub.content
    assert "Chapter 7" in answers[1]
    cached = [usage.cached for usage in usages]
    assert cached == sorted(cached)
    assert all(usage.evaluated == usage.bound for usage in usages)


class Exploding(Exception):
    def __str__(self) -> str:
        return BOOK


class Slippery(str):
    """A text that says it is short."""

    def __len__(self) -> int:
        return 1

    def encode(self, *_: Any, **__: Any) -> bytes:
        return b"x"


def attempts(folder: Path) -> dict[str, Callable[[], ToolOutput]]:
    """What a tool could do to get a book into the window."""

    def in_file(content: str, text: str) -> ToolOutput:
        (folder / "out").write_text(text)
        return ToolOutput(content=content, file=folder / "out")

    def raise_it(error: BaseException) -> NoReturn:
        raise error

    return {
        "as a text": lambda: ToolOutput(content=BOOK),
        "as an error": lambda: ToolOutput(content=BOOK, is_error=True),
        "as a page": lambda: ToolOutput(content=BOOK, paged=True),
        "beside a small file": lambda: in_file(BOOK, "small"),
        "beside a large file": lambda: in_file(BOOK, BOOK),
        "in a file": lambda: in_file("", BOOK),
        "as a page in a file": lambda: ToolOutput(content="", file=in_file("", BOOK).file, paged=True),
        "in a ToolError": lambda: raise_it(ToolError(BOOK)),
        "in an exception's text": lambda: raise_it(Exploding()),
        "in a text that lies of its length": lambda: ToolOutput(content=Slippery(BOOK)),
        "in one line": lambda: ToolOutput(content=BOOK.replace("\n", " ")),
        "with a NUL": lambda: ToolOutput(content=f"\0{BOOK}"),
        "with a lone surrogate": lambda: ToolOutput(content=f"\udcff{BOOK}"),
        "as a stub": lambda: ToolOutput(content=f"[stored, not shown]\n{BOOK}\n[artifact 3f2a9c81d0aa]"),
    }


@pytest.mark.parametrize("way", attempts(Path()))
def test_a_tool_that_tries_to_pass_the_gate_does_not(way: str, rig: Callable[..., Any], tmp_path: Path) -> None:
    made = rig()

    @tool
    def sneak() -> ToolOutput:
        """Try."""
        return attempts(tmp_path)[way]()

    with made.open([made.call("sneak"), "done"], host={"tools": [*builtin_tools(), sneak]}) as session:
        end = list(session.send("go"))[-1]
        made.check(session)
        (result,) = [event for event in events_of(session) if isinstance(event, ToolResult)]
        assert len(made.engine.tokenize(result.content, parse_special=False)) <= 320
        assert all(SENTINEL not in request for request in requests_of(made, session))
        assert end.reason is TurnEndReason.COMPLETED
        if "page" in way:
            assert result.is_error
            assert "tokens" in result.content
        else:
            assert result.artifact is not None
            assert SENTINEL in session.store.artifacts.read(result.artifact).decode("utf-8", "replace")


def test_what_hooks_add_is_stored_too_and_its_notice_names_the_artifact(rig: Callable[..., Any]) -> None:
    made = rig()
    hooks = Hooks(after_hooks=[lambda _call, _output: BOOK])
    with made.open([made.call("read", path="notes.md"), "done"], host={"hooks": hooks}) as session:
        list(session.send("go"))
        made.check(session)
        (notice,) = [event for event in events_of(session) if isinstance(event, Notice)]
        assert notice.artifact is not None
        assert notice.artifact in session.transcript.state.artifacts
        assert session.store.artifacts.read(notice.artifact).decode() == BOOK
        assert all(SENTINEL not in request for request in requests_of(made, session))


def test_a_pasted_book_is_stored_and_its_first_and_last_words_stay(rig: Callable[..., Any]) -> None:
    made = rig()
    pasted = f"What is told of house 3?\n\n{BOOK}\nAnswer in one word. @notes.md"
    with made.open(["done"]) as session:
        told = [event for event in session.send(pasted) if isinstance(event, NoticeGiven)]
        made.check(session)
        events = events_of(session)
        assert [(notice.producer, notice.to_model) for notice in told] == [("gate", False)]
        assert session.transcript.state.artifacts[0][:12] in told[0].text
        (message,) = [event for event in events if isinstance(event, UserMessage)]
        assert message.text.startswith("What is told of house 3?\n")
        assert message.text.endswith("Answer in one word. @notes.md")
        assert session.store.artifacts.read(message.artifact).decode() == pasted
        assert all(SENTINEL not in request for request in requests_of(made, session))
        mentioned = [event for event in events if isinstance(event, ToolResult)]
        assert "heron" in mentioned[0].content
        assert [tool.schema.name for tool in session.offered_tools()].count("artifact") == 1


def test_a_pasted_line_without_an_end_is_cut_in_its_middle_and_a_mention_inside_is_not_followed(
    rig: Callable[..., Any],
) -> None:
    made = rig()
    pasted = "Sum these: " + "1234 " * 40_000 + "@notes.md " + "1234 " * 40_000 + "that is all"
    with made.open(["done"]) as session:
        list(session.send(pasted))
        (message,) = [event for event in events_of(session) if isinstance(event, UserMessage)]
        assert message.text.startswith("Sum these: 1234")
        assert message.text.endswith("1234 that is all")
        assert message.text.count("…") >= 2
        assert not any(isinstance(event, ToolResult) for event in events_of(session))
        assert session.store.artifacts.read(message.artifact).decode() == pasted


@pytest.mark.parametrize("times", [1, 40_000])
def test_a_message_that_is_not_utf_8_is_kept_byte_for_byte(times: int, rig: Callable[..., Any]) -> None:
    made = rig()
    data = b"gr\xfc\xdfe\n" * times
    with made.open(["done"]) as session:
        list(session.send(data.decode("utf-8", "surrogateescape")))
        made.check(session)
        (message,) = [event for event in events_of(session) if isinstance(event, UserMessage)]
        assert session.store.artifacts.read(message.artifact) == data
        assert "gr\ufffd\ufffde" in message.text


def test_a_session_with_tools_of_its_host_alone_can_follow_a_stub(rig: Callable[..., Any]) -> None:
    made = rig()

    def replies() -> Iterator[str]:
        yield made.call("fetch")
        yield made.call("artifact", id=session.transcript.state.artifacts[0][:12], action="search", query=SENTINEL)
        yield "done"

    settings = SessionSettings(usable_tools=("fetch",))
    with made.open(replies(), settings=settings, host={"tools": [fetch]}) as session:
        list(session.send("go"))
        stub, found = [event for event in events_of(session) if isinstance(event, ToolResult)]
        assert "action=search" in stub.content
        assert SENTINEL in found.content


def test_where_the_policy_denies_looking_the_stub_names_no_call(rig: Callable[..., Any]) -> None:
    made = rig()
    settings = SessionSettings(policies={"artifact": Policy.DENY})
    with made.open([made.call("fetch"), "done"], settings=settings, host={"tools": [fetch]}) as session:
        list(session.send("go"))
        (stub,) = [event for event in events_of(session) if isinstance(event, ToolResult)]
        assert "action=" not in stub.content
        assert stub.artifact[:12] in stub.content


def test_a_message_is_refused_with_the_numbers_where_not_even_its_stub_fits(rig: Callable[..., Any]) -> None:
    made = rig(n_ctx=3072)
    with made.open(["x " * 200] * 3 + ["ok"] * 40) as session:
        while session.transcript.window.token_count < 3072 - 3072 // 8 - 60:
            list(session.send("word"))
        before = events_of(session)
        with pytest.raises(NoRoom, match=r"even its stub is .* tokens.*are left") as refusal:
            session.send(BOOK)
        assert refusal.value.n_ctx == 3072
        assert events_of(session) == before


def test_parallel_results_enter_largest_out_first_and_leave_the_reply_its_room(rig: Callable[..., Any]) -> None:
    made = rig(n_ctx=4096)
    sizes = {"a": 440, "b": 90, "c": 380, "d": 470, "e": 430, "f": 460, "g": 400, "h": 480, "i": 350}

    @tool(safe=True)
    def words(context: ToolContext, name: str) -> str:
        """Say a name many times."""
        text = name
        while context.count_tokens(f"{text} {name}") <= sizes[name]:
            text = f"{text} {name}"
        return text

    calls = "".join(made.call("words", name=name) for name in sizes)
    with made.open([calls, "done"], host={"tools": [*builtin_tools(), words]}) as session:
        list(session.send("go"))
        made.check(session)
        results = [event for event in events_of(session) if isinstance(event, ToolResult)]
        whole = [sizes[name] for name, result in zip(sizes, results, strict=True) if result.artifact is None]
        stubbed = [sizes[name] for name, result in zip(sizes, results, strict=True) if result.artifact is not None]
        assert whole
        assert stubbed
        assert max(whole) <= min(stubbed)
        window = session.transcript.window.token_count
        assert window <= 4096 - 512
        # The last one that left had to: whole it would have been too much.
        last = next(result for size, result in zip(sizes.values(), results, strict=True) if size == min(stubbed))
        as_stub = len(made.engine.tokenize(last.content, parse_special=False))
        assert window + min(stubbed) - as_stub > 4096 - 512


def test_pages_asked_for_in_parallel_share_the_room_that_is_left(rig: Callable[..., Any]) -> None:
    made = rig(n_ctx=4096)
    (made.workspace / "book.md").write_text(BOOK)

    def replies() -> Iterator[str]:
        yield made.call("bash", command="cat book.md")
        stored = session.transcript.state.artifacts[0][:12]
        for start in (1, 1001):
            yield "".join(
                made.call("artifact", id=stored, action="read", offset=start + 100 * part, limit=400)
                for part in range(4)
            )
        yield "done"

    with made.open(replies()) as session:
        end = list(session.send("go"))[-1]
        made.check(session)
        results = [event for event in events_of(session) if isinstance(event, ToolResult)]
        assert [result.artifact for result in results[1:]] == [None] * 8
        assert end.reason in (TurnEndReason.COMPLETED, TurnEndReason.NO_ROOM)
        assert len(session.transcript.state.artifacts) == 1
        assert all(f"{1 + 100 * part}\t" in result.content for part, result in enumerate(results[1:5]))


def test_reading_a_spilled_file_back_never_spills_it_again(rig: Callable[..., Any]) -> None:
    made = rig()
    (made.workspace / "book.md").write_text(BOOK)

    def replies() -> Iterator[str]:
        yield made.call("bash", command="cat book.md")
        (sha256,) = session.transcript.state.artifacts
        path = session.store.artifacts.find(sha256).path.relative_to(made.workspace).as_posix()
        yield made.call("read", path=path)
        yield made.call("read", path=path, limit=100_000)
        yield made.call("artifact", id=path, action="read", limit=100_000)
        yield made.call("artifact", id=sha256, action="search", query="the", max_tokens=100_000)
        yield made.call("artifact", id=sha256[:12], action="toc")
        yield "done"

    with made.open(replies()) as session:
        list(session.send("go"))
        made.check(session)
        results = [event for event in events_of(session) if isinstance(event, ToolResult)]
        assert [result.artifact is None for result in results] == [False] + [True] * 5
        assert not any(result.is_error for result in results)
        assert len(list(session.store.artifacts.refs())) == 1


def test_the_grammar_offers_the_artifacts_that_exist_and_no_artifact_tool_before(rig: Callable[..., Any]) -> None:
    made = rig()
    (made.workspace / "book.md").write_text(BOOK)

    def offered() -> dict[str, tuple[str, ...]]:
        return {tool.schema.name: tool.grounded.get("id", ()) for tool in session.offered_tools()}

    with made.open([made.call("bash", command="cat book.md"), "done", "done"]) as session:
        names = tuple(tool.schema.name for tool in session.offered_tools())
        assert "artifact" not in names
        list(session.send("go"))
        (sha256,) = session.transcript.state.artifacts
        assert offered()["artifact"] == (sha256[:12],)
        ref = session.store.artifacts.find(sha256)
        other = session.store.artifacts.put(b"from another session")
        list(session.send(f"and look at {other.sha256[:12]} and at 0123456789abcdef"))
        assert offered()["artifact"] == (sha256[:12], other.sha256[:12])
        ref.path.unlink()
        assert offered()["artifact"] == (other.sha256[:12],)


def test_a_stub_has_no_secret_and_says_how_many_were_left_out(rig: Callable[..., Any]) -> None:
    made = rig()
    secret = "ghp_" + "aB3dE6gH9jK2mN5pQ8rS1tU4vW7xY0zA1bC2"
    (made.workspace / "book.md").write_text(f"token {secret}\n{BOOK}")
    with made.open([made.call("bash", command="cat book.md"), "done"]) as session:
        list(session.send("go"))
        (result,) = [event for event in events_of(session) if isinstance(event, ToolResult)]
        assert secret not in result.content
        assert "1 secret" in result.content
        folder = session.store.folder
    assert not any(secret.encode() in path.read_bytes() for path in folder.rglob("*") if path.is_file())


def test_a_call_of_the_runtime_for_a_mention_has_the_larger_limit(rig: Callable[..., Any]) -> None:
    made = rig()
    (made.workspace / "book.md").write_text(BOOK)
    with made.open(["done"]) as session:
        list(session.send("look @book.md"))
        made.check(session)
        events = events_of(session)
        (result,) = [event for event in events if isinstance(event, ToolResult)]
        assert result.artifact is None
        tokens = len(made.engine.tokenize(result.content, parse_special=False))
        assert 8192 // 6 < tokens <= (8192 - 1024) // 3
        assert any(getattr(event, "author", None) is Author.RUNTIME for event in events)


def test_the_tokens_that_are_told_of_a_result_are_those_that_enter(rig: Callable[..., Any]) -> None:
    made = rig()
    (made.workspace / "book.md").write_text(BOOK)
    calls = [made.call("bash", command="cat book.md"), made.call("read", path="book.md")]
    with made.open([*calls, "done"]) as session:
        told = [event.tokens for event in session.send("go") if isinstance(event, ToolFinished)]
        results = [event for event in events_of(session) if isinstance(event, ToolResult)]
        assert told == [
            sum(span.length for span in result.spans if span.kind is SegmentKind.MESSAGE) for result in results
        ]
