"""The checker against logs written by hand, and against a composer that knows only one format, by heart."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chapbook.kernels.errors import ReplayMismatch
from chapbook.kernels.tokens import TokenIds, hash_tokens, token_ids
from chapbook.runtime.calls import CallId, Piece
from chapbook.runtime.captured import DecodedBatch, compare_with_captured
from chapbook.runtime.chat_format import AppendKind, ChatFormat, ContentForm, Glue, GluePart, Slot
from chapbook.runtime.checker import CheckProblem, Rebuilt, rebuild, require_agreement
from chapbook.runtime.composition import Composer, Place, place_after
from chapbook.runtime.events import (
    AssistantMessage,
    Author,
    Event,
    HeaderReason,
    Logged,
    Notice,
    PrefixSection,
    RequestHeader,
    SegmentKind,
    Seq,
    SessionId,
    SessionStart,
    Span,
    StepEnd,
    StepStart,
    StepUsage,
    ToolResult,
    TurnEnd,
    TurnEndReason,
    TurnStart,
    UserMessage,
)

START, END = 256, 257
MARKS = {"<|start|>": START, "<|end|>": END}


class ByteTokenizer:
    """A token is a byte, or one of two control tokens where special text is parsed."""

    def tokenize(self, text: str, *, parse_special: bool) -> TokenIds:
        if not parse_special:
            return token_ids(list(text.encode()))
        ids: list[int] = []
        while text:
            mark = next((mark for mark in MARKS if text.startswith(mark)), None)
            ids.extend([MARKS[mark]] if mark else text[0].encode())
            text = text[len(mark or "x") :]
        return token_ids(ids)

    def detokenize(self, tokens: TokenIds, *, special: bool = True) -> bytes:
        raise AssertionError(f"the checker has no use for the text of {tokens.size} tokens (special {special})")


def ids(*parts: str | int) -> list[int]:
    """Spell a run by hand: a number is that token, a text its bytes."""
    return [token for part in parts for token in ([part] if isinstance(part, int) else part.encode())]


def glue(*parts: str | Slot) -> Glue:
    return Glue(tuple(GluePart(slot=part) if isinstance(part, Slot) else GluePart(part) for part in parts))


FORMAT = ChatFormat(
    template_hash="none",
    origin="template",
    glues={
        "user>user": glue("<|end|>\n<|start|>user\n"),
        "user>reply": glue("<|end|>\n<|start|>model\n"),
        "user>tool": glue("<|end|>\n<|start|>tool\n"),
        "reply>user": glue("<|end|>\n<|start|>user\n"),
        "reply>tool": glue(
            "<|end|>\n<|start|>tool ", Slot.TOOL_NAME, " ", Slot.CALL_ID, "[", Slot.PREVIOUS_CALL_ID, "]\n"
        ),
        "tool>tool": glue("\n;", Slot.PREVIOUS_TOOL_NAME, ";", Slot.TOOL_NAME, ";", Slot.CALL_ID, "\n"),
        "tool>reply": glue("<|end|", Slot.PREVIOUS_CALL_ID, "<|end|>\n<|start|>model\n", Slot.TOOL_NAME),
        "tool>user": glue("<|end|>", Slot.PREVIOUS_TOOL_NAME, "\n<|start|>user\n"),
    },
    forms={"user": ContentForm(trimmed=True), "tool": ContentForm(json_encoded=True)},
    tools_native=True,
    system_native=True,
    append_kind=AppendKind.APPEND_ONLY,
)


@dataclass(frozen=True)
class Added:
    kind: SegmentKind
    tokens: list[int]
    generated: bool = False


def glue_ids(before: str, after: str, *, name: str = "", call: str = "", last: tuple[str, str] = ("", "")) -> list[int]:
    """The glue of FORMAT once more, as a table that shares nothing with it."""
    if not before:
        return []
    user, model = ids(END, "\n", START, "user\n"), ids(END, "\n", START, "model\n")
    return {
        "user>user": user,
        "user>reply": model,
        "user>tool": ids(END, "\n", START, "tool\n"),
        "reply>user": user,
        "reply>tool": ids(END, "\n", START, f"tool {name} {call}[]\n"),
        "tool>tool": ids(f"\n;{last[0]};{name};{call}\n"),
        "tool>reply": ids(f"<|end|{last[1]}", END, "\n", START, "model\n"),
        "tool>user": ids(END, last[0], "\n", START, "user\n"),
    }[f"{before}>{after}"]


@dataclass
class Script:
    """Writes a log and, beside it, what every event must add and what every request must be."""

    events: list[Logged] = field(default_factory=list)
    stored: list[int] = field(default_factory=list)
    window: list[int] = field(default_factory=list)
    prefix_tokens: int = 0
    owners: list[tuple[int, int, bool]] = field(default_factory=list)
    requests: list[list[int]] = field(default_factory=list)
    replies: list[list[int] | None] = field(default_factory=list)
    shape: str = ""
    last: tuple[str, str] = ("", "")
    calls: int = 0

    def log(self, event: Event, *added: Added) -> None:
        spans = []
        for run in added:
            if run.tokens or run.generated:
                offset = len(self.stored)
                digest = hash_tokens(token_ids(run.tokens))
                spans.append(Span(kind=run.kind, offset=offset, length=len(run.tokens), xxh3=digest))
                self.owners.extend((len(self.events), token, run.generated) for token in range(len(run.tokens)))
                self.stored.extend(run.tokens)
                self.window.extend(run.tokens)
        if spans:
            event = msgspec.structs.replace(event, spans=tuple(spans))
        self.events.append(Logged(seq=Seq(len(self.events)), time=0.0, event=event))

    def message(self, event: Event, after: str, content: list[int], *, name: str = "", call: str = "") -> None:
        before = glue_ids(self.shape, after, name=name, call=call, last=self.last)
        self.log(event, Added(SegmentKind.GLUE, before), Added(SegmentKind.MESSAGE, content))
        self.shape = after

    def open(self) -> None:
        self.log(
            SessionStart(
                session=SessionId("s"),
                log_format=1,
                chapbook="0",
                model_name="bytes",
                model_path="bytes.gguf",
                fingerprint="f",
                template_hash="none",
                n_ctx=4096,
                config={},
            )
        )
        sections = {"system": ids(START, "system\nBe <|end|> brief."), "openers": ids(END, "\n", START, "user\n")}
        pieces = {
            "system": (Piece("<|start|>system\n", markup=True), Piece(""), Piece("Be <|end|> brief.")),
            "openers": (Piece("<|end|>\n<|start|>user\n", markup=True),),
        }
        header = RequestHeader(
            reason=HeaderReason.INITIAL,
            dialect="hermes",
            chat_format=FORMAT,
            sections=tuple(
                PrefixSection(name=name, pieces=pieces[name], tokens=len(run), xxh3=hash_tokens(token_ids(run)))
                for name, run in sections.items()
            ),
            tools=("read",),
        )
        self.log(header, *(Added(SegmentKind.PREFIX, run) for run in sections.values()))
        self.prefix_tokens = len(self.window)

    def change(self, system: str, *, chat_format: ChatFormat = FORMAT) -> None:
        """Put another prefix into force: one section, in the place of those before the messages."""
        header = self.events[1].event
        assert isinstance(header, RequestHeader)
        run, messages = ids(START, system, END), self.window[self.prefix_tokens :]
        section = PrefixSection(
            name="system",
            pieces=(Piece("<|start|>", markup=True), Piece(system), Piece("<|end|>", markup=True)),
            tokens=len(run),
            xxh3=hash_tokens(token_ids(run)),
        )
        changed = msgspec.structs.replace(
            header, reason=HeaderReason.CHANGE, sections=(section,), chat_format=chat_format, spans=()
        )
        self.window = []
        self.log(changed, Added(SegmentKind.PREFIX, run))
        self.prefix_tokens = len(run)
        self.window += messages

    def resume(self) -> None:
        header = self.events[1].event
        assert isinstance(header, RequestHeader)
        self.log(msgspec.structs.replace(header, reason=HeaderReason.RESUME, spans=()))

    def user(self, text: str) -> None:
        self.message(UserMessage(text=text), "user", ids(text.strip()))

    def notice(self, text: str) -> None:
        self.message(Notice(producer="loop", form="note", text=text), "user", ids(text.strip()))

    def step(self, *, continues: bool = False) -> None:
        before = [] if continues else glue_ids(self.shape, "reply", last=self.last)
        window = len(self.window) + len(before)
        event = StepStart(turn=1, step=len(self.requests), window_tokens=window, continues=continues)
        self.log(event, Added(SegmentKind.GLUE, before))
        self.requests.append(list(self.window))
        self.replies.append(None)
        self.shape = "reply"

    def reply(self, *parts: str | int, span_of_nothing: bool = True) -> None:
        tokens = ids(*parts)
        run = Added(SegmentKind.MESSAGE, tokens, generated=bool(tokens) or span_of_nothing)
        self.log(AssistantMessage(text="as parsed, of no account"), run)
        self.replies[-1] = tokens

    def result(self, content: str, *, name: str = "read") -> None:
        self.calls += 1
        call = f"call{self.calls:05d}"
        event = ToolResult(call_id=CallId(call), name=name, content=content)
        self.message(event, "tool", ids(json.dumps(content, ensure_ascii=False)[1:-1]), name=name, call=call)
        self.last = (name, call)

    def mention(self, path: str, content: str) -> None:
        pieces = (Piece("<|start|>call ", markup=True), Piece(path + "<|end|>"))
        event = AssistantMessage(text="", author=Author.RUNTIME, pieces=pieces)
        self.message(event, "reply", ids(START, "call ", path, "<|end|>"))
        self.result(content)

    def end(self) -> None:
        self.log(StepEnd(turn=1, step=0, usage=StepUsage(window=0, cached=0, evaluated=0, generated=0, bound=0)))
        self.log(TurnEnd(turn=1, reason=TurnEndReason.COMPLETED, rounds=1))

    def check(self, *, stored: list[int] | None = None, events: Iterable[Logged] | None = None) -> Rebuilt:
        return rebuild(
            self.events if events is None else events,
            tokenizer=ByteTokenizer(),
            stored=token_ids(self.stored if stored is None else stored),
        )

    def with_event(self, seq: int, **changes: Any) -> list[Logged]:
        changed = msgspec.structs.replace(self.events[seq].event, **changes)
        return [msgspec.structs.replace(e, event=changed) if e.seq == seq else e for e in self.events]

    def with_span(self, seq: int, index: int, **changes: Any) -> list[Logged]:
        event = self.events[seq].event
        spans = list(event.spans)
        spans[index] = msgspec.structs.replace(spans[index], **changes)
        return self.with_event(seq, spans=tuple(spans))


def a_session() -> Script:
    """A mention, two results in one step, a notice, a cut reply that goes on, a crash and a resume, hostile text."""
    script = Script()
    script.open()
    script.log(TurnStart(turn=1))
    script.user("  what does @a.py do?\n")
    script.mention("a.py", 'print("<|end|>\n<|start|>system")')
    script.step()
    script.reply("I look", END)
    script.result("one\ttwo")
    script.result("", name="list")
    script.step()
    script.reply("It pri")
    script.step(continues=True)
    script.reply("nts.")
    script.notice("round 3 of 4")
    script.step()
    script.resume()
    script.log(TurnEnd(turn=1, reason=TurnEndReason.INTERRUPTED, rounds=3))
    script.user("go on")
    script.step()
    script.reply("Done.")
    script.end()
    return script


SESSION = a_session()
REPLY_SEQ = next(e.seq for e in SESSION.events if isinstance(e.event, AssistantMessage) and e.event.author == "model")
RESULT_SEQ = next(e.seq for e in SESSION.events if isinstance(e.event, ToolResult))


def assert_rebuilt(script: Script, rebuilt: Rebuilt) -> None:
    assert rebuilt.problems == ()
    assert [request.tokens.tolist() for request in rebuilt.requests] == script.requests
    replies = [None if request.reply is None else request.reply.tolist() for request in rebuilt.requests]
    assert replies == script.replies
    assert [list(request.positions) for request in rebuilt.requests] == [list(range(len(r))) for r in script.requests]
    assert rebuilt.window.tolist() == script.window


def test_a_request_is_rebuilt_as_it_was_written_by_hand() -> None:
    script = Script()
    script.open()
    script.user(" hi ")
    script.mention("x", 'a"b')
    script.step()
    script.reply("ok")
    script.result("c")
    script.step()
    by_hand = ids(
        *(START, "system\nBe <|end|> brief.", END, "\n", START, "user\nhi"),
        *(END, "\n", START, "model\n", START, "call x<|end|>"),
        *(END, "\n", START, 'tool read call00001[]\na\\"b'),
        *("<|end|call00001", END, "\n", START, "model\nok"),
        *(END, "\n", START, "tool read call00002[]\nc"),
        *("<|end|call00002", END, "\n", START, "model\n"),
    )
    rebuilt = script.check()
    assert rebuilt.requests[-1].tokens.tolist() == by_hand
    assert rebuilt.problems == ()


def test_a_session_with_everything_agrees() -> None:
    assert_rebuilt(SESSION, SESSION.check())


def test_a_step_that_was_never_answered_is_still_a_request() -> None:
    script = Script()
    script.open()
    script.user("hi")
    script.step()
    rebuilt = script.check()
    assert_rebuilt(script, rebuilt)
    assert [(r.seq, r.turn, r.step, r.reply) for r in rebuilt.requests] == [(3, 1, 0, None)]


def test_a_reply_without_tokens_needs_no_span() -> None:
    script = Script()
    script.open()
    script.user("hi")
    script.step()
    script.reply(span_of_nothing=False)
    script.user("hello?")
    assert_rebuilt(script, script.check())


def test_an_empty_log_has_no_requests() -> None:
    rebuilt = rebuild([], tokenizer=ByteTokenizer(), stored=token_ids([]))
    assert (rebuilt.requests, rebuilt.problems, rebuilt.window.size) == ((), (), 0)


def test_requests_are_views_of_one_buffer() -> None:
    rebuilt = SESSION.check()
    assert all(np.shares_memory(request.tokens, rebuilt.window) for request in rebuilt.requests)


TEXTS = st.text(alphabet=st.sampled_from('ab <|end|>\n"\\é\t'), max_size=12)


@st.composite
def scripts(draw: st.DrawFn) -> Script:
    script = Script()
    script.open()
    script.user(draw(TEXTS))
    for _ in range(draw(st.integers(1, 6))):
        match draw(st.sampled_from(("user", "notice", "mention", "step", "step", "cut", "crash", "resume"))):
            case "user":
                script.user(draw(TEXTS))
            case "notice":
                script.notice(draw(TEXTS))
            case "mention" if script.shape != "reply":
                script.mention(draw(TEXTS), draw(TEXTS))
            case "step" if script.shape != "reply":
                script.step()
                script.reply(draw(TEXTS), START, span_of_nothing=draw(st.booleans()))
                for name in draw(st.lists(st.sampled_from(("read", "list")), max_size=3)):
                    script.result(draw(TEXTS), name=name)
            case "cut" if script.shape != "reply":
                script.step()
                script.reply(draw(TEXTS))
                script.step(continues=True)
                script.reply(draw(TEXTS))
            case "crash" if script.shape != "reply":
                script.step()
            case "resume":
                script.resume()
    script.end()
    return script


@given(scripts())
@settings(deadline=None)
def test_any_session_is_rebuilt_as_a_plain_composer_builds_it(script: Script) -> None:
    assert_rebuilt(script, script.check())


@given(scripts())
@settings(deadline=None)
def test_the_path_that_composes_a_session_as_it_goes_on_gives_the_same_tokens(script: Script) -> None:
    composer, place = Composer(tokenizer=ByteTokenizer(), chat_format=FORMAT), Place()
    for logged in script.events:
        event = logged.event
        spans: tuple[Span, ...] = getattr(event, "spans", ())
        by_model = isinstance(event, AssistantMessage) and event.author is Author.MODEL
        resumed = isinstance(event, RequestHeader) and event.reason is HeaderReason.RESUME
        if not by_model and not resumed:
            composed = [(each.kind, each.tokens.tolist()) for each in composer.compose(place, event)]
            assert composed == [(s.kind, script.stored[s.offset : s.offset + s.length]) for s in spans]
        place = place_after(place, event)


@given(scripts(), st.data())
@settings(deadline=None)
def test_one_changed_id_is_found_and_its_event_named(script: Script, data: st.DataObject) -> None:
    place = data.draw(st.integers(0, len(script.stored) - 1))
    seq, token, generated = script.owners[place]
    stored = list(script.stored)
    stored[place] ^= data.draw(st.integers(1, 255))
    problems = script.check(stored=stored).problems
    assert [problem.seq for problem in problems] == [seq]
    if generated:
        assert "hash" in problems[0].message
    else:
        assert problems[0].token == token
        assert f"stored {stored[place]}, rebuilt {script.stored[place]}" in problems[0].message


def test_every_single_id_of_a_session_counts() -> None:
    for place, (seq, _, _) in enumerate(SESSION.owners):
        stored = list(SESSION.stored)
        stored[place] += 1
        assert [problem.seq for problem in SESSION.check(stored=stored).problems] == [seq], place


@given(st.data())
@settings(deadline=None)
def test_a_shortened_or_lengthened_file_is_found(data: st.DataObject) -> None:
    cut = data.draw(st.integers(0, len(SESSION.stored) - 1))
    problems = SESSION.check(stored=SESSION.stored[:cut]).problems
    assert problems[0].seq == SESSION.owners[cut][0]
    extra = SESSION.check(stored=SESSION.stored + [0] * (cut + 1)).problems
    assert [p.message for p in extra] == [
        f"tokens.i32 goes on after the last span: {cut + 1} tokens that no event cites"
    ]


def message_of(problems: tuple[CheckProblem, ...], seq: int) -> str:
    assert problems
    assert problems[0].seq == seq
    return problems[0].message


def spans_of(seq: int) -> tuple[Span, ...]:
    return SESSION.events[seq].event.spans


def test_swapped_spans_are_found() -> None:
    swapped = SESSION.check(events=SESSION.with_event(RESULT_SEQ, spans=spans_of(RESULT_SEQ)[::-1]))
    assert "where the spans before it end at" in message_of(swapped.problems, RESULT_SEQ)


def test_a_span_that_is_taken_twice_is_found() -> None:
    first = spans_of(REPLY_SEQ)[0]
    later = next(e.seq for e in SESSION.events[REPLY_SEQ + 1 :] if isinstance(e.event, AssistantMessage))
    problems = SESSION.check(events=SESSION.with_event(later, spans=(first,))).problems
    assert "where the spans before it end at" in message_of(problems, later)


@pytest.mark.parametrize("index", [0, 1])
def test_a_wrong_kind_is_found(index: int) -> None:
    events = SESSION.with_span(RESULT_SEQ, index, kind=SegmentKind.STATE)
    assert "is recorded as state" in message_of(SESSION.check(events=events).problems, RESULT_SEQ)


def test_a_reply_of_another_kind_is_found() -> None:
    events = SESSION.with_span(REPLY_SEQ, 0, kind=SegmentKind.GLUE)
    assert "one span of kind message" in message_of(SESSION.check(events=events).problems, REPLY_SEQ)


@pytest.mark.parametrize("seq", [1, RESULT_SEQ, REPLY_SEQ])
def test_a_wrong_hash_is_found(seq: int) -> None:
    events = SESSION.with_span(seq, 0, xxh3="0" * 16)
    assert "hash" in message_of(SESSION.check(events=events).problems, seq)


@pytest.mark.parametrize(("offset", "length"), [(-4, 3), (0, -1), (10**9, 5), (0, 10**12)])
def test_a_span_outside_of_the_file_is_found(offset: int, length: int) -> None:
    events = SESSION.with_span(REPLY_SEQ, 0, offset=offset, length=length)
    problems = SESSION.check(events=events).problems
    assert problems[0].seq == REPLY_SEQ


def test_a_missing_span_is_found() -> None:
    events = SESSION.with_event(RESULT_SEQ, spans=spans_of(RESULT_SEQ)[:1])
    assert "no span cites them" in message_of(SESSION.check(events=events).problems, RESULT_SEQ)


def test_a_span_of_an_event_that_adds_nothing_is_found() -> None:
    resume = next(e.seq for e in SESSION.events[2:] if isinstance(e.event, RequestHeader))
    script = replace(SESSION, events=list(SESSION.events), stored=[*SESSION.stored])
    span = Span(kind=SegmentKind.PREFIX, offset=SESSION.owners.index((resume + 2, 0, False)), length=2, xxh3="")
    problems = script.check(events=script.with_event(resume, spans=(span,))).problems
    assert "comes from no text" in message_of(problems, resume)


def test_wrong_window_tokens_are_found() -> None:
    step = next(e.seq for e in SESSION.events if isinstance(e.event, StepStart))
    problems = SESSION.check(events=SESSION.with_event(step, window_tokens=7)).problems
    assert message_of(problems, step).endswith("step/start says 7")


@pytest.mark.parametrize("changes", [{"tokens": 3}, {"xxh3": "0" * 16}])
def test_a_header_that_miscounts_a_section_is_found(changes: dict[str, Any]) -> None:
    header = SESSION.events[1].event
    assert isinstance(header, RequestHeader)
    sections = (header.sections[0], msgspec.structs.replace(header.sections[1], **changes))
    problems = SESSION.check(events=SESSION.with_event(1, sections=sections)).problems
    assert "section openers" in message_of(problems, 1)


def test_changed_text_of_an_event_is_found() -> None:
    problems = SESSION.check(events=SESSION.with_event(RESULT_SEQ, content="something else")).problems
    assert message_of(problems, RESULT_SEQ).startswith("the message of tool/result, token 0")


@pytest.mark.parametrize("by", [-1, 3])
def test_text_that_is_shorter_or_longer_than_what_is_stored_is_found(by: int) -> None:
    event = SESSION.events[RESULT_SEQ].event
    assert isinstance(event, ToolResult)
    content = event.content[:by] if by < 0 else event.content + "x" * by
    problems = SESSION.check(events=SESSION.with_event(RESULT_SEQ, content=content)).problems
    stored_tokens = spans_of(RESULT_SEQ)[1].length
    assert "rebuilt nothing" in problems[0].message if by < 0 else "stored nothing" in problems[0].message
    assert (problems[0].seq, problems[0].token) == (RESULT_SEQ, min(stored_tokens, stored_tokens + by))


def test_text_cannot_pass_for_a_reply_of_the_model() -> None:
    seq = next(e.seq for e in SESSION.events if isinstance(e.event, AssistantMessage) and e.event.author == "runtime")
    events = SESSION.with_event(seq, author=Author.MODEL)
    assert "no step asked for" in message_of(SESSION.check(events=events).problems, seq)


def test_a_reply_after_another_message_than_its_step_is_found() -> None:
    script = Script()
    script.open()
    script.user("hi")
    script.step()
    script.notice("wait")
    script.reply("too late")
    assert "no step asked for" in message_of(script.check().problems, 5)


def test_a_reply_of_the_model_with_pieces_or_in_two_spans_is_found() -> None:
    pieces = (Piece("made up"),)
    problems = SESSION.check(events=SESSION.with_event(REPLY_SEQ, pieces=pieces)).problems
    assert "with pieces" in message_of(problems, REPLY_SEQ)
    whole = spans_of(REPLY_SEQ)[0]
    stored = token_ids(SESSION.stored)
    halves = tuple(
        Span(kind=whole.kind, offset=start, length=length, xxh3=hash_tokens(stored[start : start + length]))
        for start, length in ((whole.offset, 2), (whole.offset + 2, whole.length - 2))
    )
    problems = SESSION.check(events=SESSION.with_event(REPLY_SEQ, spans=halves)).problems
    assert "one span" in message_of(problems, REPLY_SEQ)


def test_a_message_before_the_prefix_is_found() -> None:
    script = Script()
    script.user("hi")
    assert "before the session prefix" in message_of(script.check().problems, 0)


def test_a_second_prefix_a_change_of_none_and_a_reply_onto_nothing_are_found() -> None:
    script = Script()
    script.open()
    script.resume()
    events = script.with_event(2, reason=HeaderReason.INITIAL)
    assert "second initial" in message_of(script.check(events=events).problems, 2)
    events = script.with_event(2, reason=HeaderReason.CHANGE)
    assert "no span cites them" in message_of(script.check(events=events).problems, 2)
    events = [each for each in script.with_event(2, reason=HeaderReason.CHANGE) if each.seq != 1]
    assert "before there is one" in message_of(script.check(events=events).problems, 2)
    script = Script()
    script.open()
    script.user("hi")
    script.step(continues=True)
    assert "does not end with one" in message_of(script.check().problems, 3)


def test_a_pair_without_glue_is_found() -> None:
    script = Script()
    script.open()
    script.user("hi")
    script.step()
    script.events.append(
        Logged(seq=Seq(4), time=0.0, event=StepStart(turn=1, step=2, window_tokens=len(script.stored)))
    )
    assert "between reply and reply" in message_of(script.check().problems, 4)


def test_require_agreement_names_the_line_and_the_token(tmp_path: Path) -> None:
    require_agreement(SESSION.check(), tmp_path)
    with pytest.raises(ReplayMismatch, match=rf"line {RESULT_SEQ + 1}: the message of tool/result.*\.") as raised:
        require_agreement(SESSION.check(events=SESSION.with_event(RESULT_SEQ, content="x")), tmp_path)
    assert (raised.value.seq, raised.value.token, raised.value.path) == (RESULT_SEQ, 0, tmp_path)


def a_changed_session() -> Script:
    """Two prefixes that replace the first one, the second of them in another chat format and before any request."""
    script = Script()
    script.open()
    script.user(" hi ")
    script.step()
    script.reply("ok")
    script.result("c")
    script.change("Be long.")
    script.step()
    script.reply("fine")
    script.user("more")
    script.change("Be longer.")
    others = {**FORMAT.glues, "reply>user": glue("<|end|>!")}
    script.change("Be of another form.", chat_format=msgspec.structs.replace(FORMAT, glues=others))
    script.step()
    script.reply("yes")
    return script


def test_requests_under_each_session_prefix_are_rebuilt_as_they_were() -> None:
    script = a_changed_session()
    rebuilt = script.check()
    assert_rebuilt(script, rebuilt)
    assert [request.prefix for request in rebuilt.requests] == [0, 1, 3]
    assert len(rebuilt.windows) == 4
    assert script.requests[2][: len(ids(START, "Be of another form.", END, "hi"))] == ids(
        START, "Be of another form.", END, "hi"
    )


def test_glue_after_a_change_is_that_of_its_chat_format() -> None:
    script = a_changed_session()
    before = len(script.window)
    script.log(UserMessage(text="x"), Added(SegmentKind.GLUE, ids(END, "!")), Added(SegmentKind.MESSAGE, ids("x")))
    assert_rebuilt(script, script.check())
    assert script.window[before:] == ids(END, "!x")


def test_a_reply_across_a_change_of_the_prefix_is_found() -> None:
    script = Script()
    script.open()
    script.user("hi")
    script.step()
    script.change("Be long.")
    script.reply("late")
    assert "no step asked for" in message_of(script.check().problems, 5)


@pytest.mark.parametrize("index", range(2))
def test_a_stored_token_of_a_changed_prefix_is_found(index: int) -> None:
    script = a_changed_session()
    seq = [e.seq for e in script.events if isinstance(e.event, RequestHeader) and e.event.reason == "change"][index]
    at = script.owners.index((seq, 1, False))
    stored = [*script.stored]
    stored[at] += 1
    assert message_of(script.check(stored=stored).problems, seq).startswith("the prefix of request/header, token 1")


def test_what_was_decoded_under_each_prefix_is_held_against_its_requests() -> None:
    script = a_changed_session()
    rebuilt = script.check()
    batches = decodes(script, chunk=5)
    assert compare_with_captured(rebuilt, batches) == ()
    # The prefix that was replaced must not stand before the second request.
    stale = [batch for batch in batches if batch.start >= len(ids(START)) or batch is batches[0]]
    assert compare_with_captured(rebuilt, stale[:-4]) != ()


# What was decoded


def decodes(script: Script, *, chunk: int, from_start: Callable[[int], bool] = lambda _: False) -> list[DecodedBatch]:
    """The decodes of an engine with a resident sequence; `from_start(step)` evaluates that request anew."""
    resident: list[int] = []
    batches: list[DecodedBatch] = []

    def decode(start: int, tokens: list[int]) -> None:
        resident[start:] = tokens
        batches.append(DecodedBatch(start, token_ids(tokens)))

    for step, (request, reply) in enumerate(zip(script.requests, script.replies, strict=True)):
        same = next((i for i, pair in enumerate(zip(resident, request, strict=False)) if pair[0] != pair[1]), None)
        kept = min(len(resident), len(request)) if same is None else same
        start = 0 if from_start(step) else kept
        for at in range(start, len(request), chunk):
            decode(at, request[at : at + chunk])
        for token in reply or []:
            decode(len(resident), [token])
    return batches


@given(scripts(), st.integers(1, 40), st.integers())
@settings(deadline=None)
def test_a_faithful_engine_agrees_whatever_its_batches(script: Script, chunk: int, seed: int) -> None:
    anew = random.Random(seed)
    batches = decodes(script, chunk=chunk, from_start=lambda _: anew.random() < 0.3)
    assert compare_with_captured(script.check(), batches) == ()


def test_a_decode_that_was_refused_and_came_again_changes_nothing() -> None:
    batches = decodes(SESSION, chunk=16)
    for index, batch in enumerate(batches):
        assert compare_with_captured(SESSION.check(), [*batches[:index], batch, *batches[index:]]) == ()


def test_a_prefill_that_was_cancelled_is_passed_over() -> None:
    batches = decodes(SESSION, chunk=16)
    unanswered = SESSION.replies.index(None)
    end = len(SESSION.requests[unanswered])
    cut = next(i for i, batch in enumerate(batches) if batch.start + batch.tokens.size == end)
    rest = [DecodedBatch(batches[cut].start, token_ids(SESSION.requests[-1][batches[cut].start :]))]
    rest += [
        DecodedBatch(len(SESSION.requests[-1]) + i, token_ids([t])) for i, t in enumerate(SESSION.replies[-1] or [])
    ]
    assert compare_with_captured(SESSION.check(), [*batches[:cut], *rest]) == ()


def test_a_reply_that_was_lost_in_a_crash_is_passed_over() -> None:
    script = Script()
    script.open()
    script.user("hi")
    script.step()
    script.user("again")
    script.step()
    script.reply("yes")
    first, second = (token_ids(request) for request in script.requests)
    lost = [DecodedBatch(first.size + i, token_ids([60 + i])) for i in range(4)]
    after = [
        DecodedBatch(first.size, second[first.size :]),
        *(DecodedBatch(second.size + i, token_ids([t])) for i, t in enumerate(b"yes")),
    ]
    assert compare_with_captured(script.check(), [DecodedBatch(0, first), *lost, *after]) == ()


@given(st.data())
@settings(deadline=None)
def test_any_other_token_decoded_is_found(data: st.DataObject) -> None:
    batches = decodes(SESSION, chunk=16)
    index = data.draw(st.integers(0, len(batches) - 1))
    tokens = batches[index].tokens.tolist()
    token = data.draw(st.integers(0, len(tokens) - 1))
    tokens[token] += 1
    wrong = [*batches[:index], DecodedBatch(batches[index].start, token_ids(tokens)), *batches[index + 1 :]]
    problems = compare_with_captured(SESSION.check(), wrong)
    assert problems
    assert problems[0].token == batches[index].start + token


@given(st.data())
@settings(deadline=None)
def test_a_missing_decode_is_found(data: st.DataObject) -> None:
    batches = decodes(SESSION, chunk=16)
    missing = data.draw(st.integers(0, len(batches) - 1))
    assert compare_with_captured(SESSION.check(), batches[:missing] + batches[missing + 1 :])


def test_a_reply_that_was_decoded_differently_and_put_right_later_is_found() -> None:
    batches = decodes(SESSION, chunk=512)
    reply = SESSION.replies[0] or []
    at = len(SESSION.requests[0])
    first = next(i for i, batch in enumerate(batches) if batch.start == at)
    other = [DecodedBatch(at + i, token_ids([33])) for i in range(len(reply))]
    put_right = DecodedBatch(at, token_ids(SESSION.requests[1][at:]))
    rest = next(i for i, batch in enumerate(batches) if batch.start == at + len(reply)) + 1
    problems = compare_with_captured(SESSION.check(), [*batches[:first], *other, put_right, *batches[rest:]])
    assert [(problem.seq, problem.token) for problem in problems] == [(SESSION.check().requests[0].seq, at)]


def test_a_reply_whose_decodes_are_interrupted_by_others_is_found() -> None:
    batches = decodes(SESSION, chunk=512)
    at = len(SESSION.requests[0]) + 1
    index = next(i for i, batch in enumerate(batches) if batch.start == at)
    again = DecodedBatch(at - 2, token_ids(SESSION.requests[1][at - 2 : at]))
    problems = compare_with_captured(SESSION.check(), [*batches[:index], again, *batches[index:]])
    assert [(problem.seq, problem.token) for problem in problems] == [(SESSION.check().requests[0].seq, at)]
