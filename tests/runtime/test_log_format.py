"""The lines of a session log: what goes in comes out, what cannot is refused, what changed is noticed."""

import json
import math
from pathlib import Path

import msgspec
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from chapbook.kernels.errors import LogDamaged, UnknownEvent
from chapbook.runtime.calls import CallId, LoggedCall, Piece
from chapbook.runtime.chat_format import AppendKind, ChatFormat, ContentForm, Glue, GluePart, Slot
from chapbook.runtime.events import (
    AssistantMessage,
    DriftKind,
    HeaderReason,
    IgnoredEvent,
    Notice,
    PrefixSection,
    RequestHeader,
    SectionDrift,
    SegmentKind,
    SessionId,
    SessionStart,
    Span,
    StepEnd,
    StepStart,
    StepUsage,
    ToolCallEvent,
    ToolResult,
    TurnEnd,
    TurnEndReason,
    TurnStart,
    UserMessage,
)
from chapbook.runtime.log_format import (
    FIRST_CHAIN,
    LOG_FORMAT,
    MOST_NESTING,
    CleanText,
    clean_json,
    clean_text,
    decode_line,
    encode_line,
)

PATH = Path("log.jsonl")

texts = st.text()
floats = st.floats(allow_nan=False, allow_infinity=False)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | floats | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=8,
)
spans = st.lists(
    st.builds(
        Span,
        kind=st.sampled_from(SegmentKind),
        offset=st.integers(0, 2**40),
        length=st.integers(0, 2**20),
        xxh3=st.just("0" * 16),
    ),
    max_size=3,
).map(tuple)
calls = st.builds(
    LoggedCall, id=st.just(CallId("call00001")), name=texts, arguments=st.dictionaries(texts, json_values, max_size=3)
)
pieces = st.lists(st.builds(Piece, texts, markup=st.booleans()), max_size=2).map(tuple)
chat_format = ChatFormat(
    template_hash="abc",
    origin="template",
    glues={"user>reply": Glue((GluePart("<|im_start|>"), GluePart(slot=Slot.TOOL_NAME)))},
    forms={"user": ContentForm(trimmed=True)},
    tools_native=True,
    system_native=True,
    append_kind=AppendKind.APPEND_ONLY,
)
events = st.one_of(
    st.builds(
        SessionStart,
        session=st.just(SessionId("s")),
        log_format=st.just(LOG_FORMAT),
        chapbook=texts,
        model_name=texts,
        model_path=texts,
        fingerprint=texts,
        template_hash=texts,
        n_ctx=st.integers(1, 10**6),
        config=st.dictionaries(texts, json_values, max_size=3),
    ),
    st.builds(
        RequestHeader,
        reason=st.sampled_from(HeaderReason),
        dialect=texts,
        chat_format=st.just(chat_format),
        sections=st.lists(
            st.builds(PrefixSection, name=texts, pieces=pieces, tokens=st.integers(0, 99), xxh3=texts), max_size=2
        ).map(tuple),
        tools=st.lists(texts, max_size=3).map(tuple),
        drifted=st.just((SectionDrift(name="tools", before_tokens=1, after_tokens=0, kind=DriftKind.REMOVED),)),
        spans=spans,
    ),
    st.builds(TurnStart, turn=st.integers(0, 99)),
    st.builds(TurnEnd, turn=st.integers(0, 99), reason=st.sampled_from(TurnEndReason), rounds=st.just(1), detail=texts),
    st.builds(StepStart, turn=st.just(1), step=st.just(1), window_tokens=st.integers(0, 10**6), spans=spans),
    st.builds(
        StepEnd,
        turn=st.just(1),
        step=st.just(1),
        usage=st.builds(
            StepUsage,
            window=st.just(1),
            cached=st.just(2),
            evaluated=st.just(3),
            generated=st.just(4),
            bound=st.just(5),
            ttft_s=floats,
        ),
    ),
    st.builds(UserMessage, text=texts, artifact=st.none() | texts, spans=spans),
    st.builds(AssistantMessage, text=texts, calls=st.lists(calls, max_size=2).map(tuple), pieces=pieces, spans=spans),
    st.builds(Notice, producer=texts, form=texts, text=texts, spans=spans),
    st.builds(ToolCallEvent, call=calls),
    st.builds(ToolResult, call_id=st.just(CallId("call00001")), name=texts, content=texts, seconds=floats, spans=spans),
    st.builds(IgnoredEvent, event_type=st.just("later/event"), data=st.just(msgspec.Raw(b'{"a":[1]}'))),
)


def decode(line, *, previous_chain=FIRST_CHAIN, number=1):
    return decode_line(line, number=number, previous_chain=previous_chain, path=PATH)


@given(event=events, seq=st.integers(0, 2**40), time=floats, previous=st.sampled_from([FIRST_CHAIN, "f" * 16]))
def test_an_event_comes_back_as_it_went_in(event, seq, time, previous):
    encoded = encode_line(event, seq=seq, time=time, previous_chain=previous)
    decoded = decode(encoded.line, previous_chain=previous)
    assert decoded.logged == encoded.logged
    assert decoded.chain == encoded.chain
    assert (decoded.logged.seq, decoded.logged.time, decoded.logged.event) == (seq, time, event)
    assert encoded.line.count(b"\n") == 1


@given(event=events)
def test_a_line_is_json_that_names_its_type_once_and_ends_with_its_chain(event):
    encoded = encode_line(event, seq=7, time=1.5, previous_chain=FIRST_CHAIN)
    envelope = json.loads(encoded.line)
    expected = ["seq", "time", "type", "data", "chain"]
    if isinstance(event, IgnoredEvent):
        expected.insert(3, "ignorable")
    assert list(envelope) == expected
    assert "type" not in envelope["data"]
    assert encoded.line.endswith(f',"chain":"{encoded.chain}"}}\n'.encode())


@given(event=events, place=st.integers(0), mask=st.integers(1, 255))
def test_any_changed_byte_is_noticed(event, place, mask):
    line = bytearray(encode_line(event, seq=0, time=1.0, previous_chain=FIRST_CHAIN).line)
    line[place % len(line)] ^= mask
    with pytest.raises(LogDamaged, match=r"line 1 of log\.jsonl"):
        decode(bytes(line))


def test_a_line_does_not_fit_behind_another_chain():
    line = encode_line(TurnStart(turn=1), seq=0, time=1.0, previous_chain=FIRST_CHAIN).line
    with pytest.raises(LogDamaged, match="does not fit its hash"):
        decode(line, previous_chain="1" * 16)


@pytest.mark.parametrize("line", [b"", b"\n", b"{}\n", b"\0" * 100, b'"}\n', b',"chain":"0123456789abcdef"}\n'])
def test_what_is_no_line_is_damage(line):
    with pytest.raises(LogDamaged):
        decode(line)


def test_an_unknown_event_is_refused_unless_it_says_that_it_may_be_passed_over():
    ignorable = IgnoredEvent(event_type="later/event", data=msgspec.Raw(b'{"x":1}'))
    line = encode_line(ignorable, seq=3, time=1.0, previous_chain=FIRST_CHAIN).line
    assert decode(line).logged.event == ignorable
    with pytest.raises(UnknownEvent, match="later/event") as refused:
        decode(_written_by_another(line, b'"ignorable":true,', b""), number=4)
    assert refused.value.line == 4


def test_a_known_event_of_another_form_is_refused_as_unknown():
    line = encode_line(TurnStart(turn=1), seq=0, time=1.0, previous_chain=FIRST_CHAIN).line
    with pytest.raises(UnknownEvent, match="another form"):
        decode(_written_by_another(line, b'{"turn":1}', b'{"turn":"one"}'))


def test_a_log_of_a_later_format_is_refused():
    start = SessionStart(
        session=SessionId("s"),
        log_format=LOG_FORMAT + 1,
        chapbook="9",
        model_name="m",
        model_path="",
        fingerprint="f",
        template_hash="t",
        n_ctx=1,
        config={},
    )
    line = _written_by_another(
        encode_line(
            msgspec.structs.replace(start, log_format=LOG_FORMAT), seq=0, time=1.0, previous_chain=FIRST_CHAIN
        ).line,
        b'"log_format":%d' % LOG_FORMAT,
        b'"log_format":%d' % (LOG_FORMAT + 1),
    )
    with pytest.raises(UnknownEvent, match=f"log format {LOG_FORMAT + 1}"):
        decode(line)


def _written_by_another(line, old, new):
    """Change a line as a writer would have written it, chain included. Shorter than the encoder: it is its check."""
    body = line[: line.rindex(b',"chain"')].replace(old, new)
    return body + b',"chain":"' + xxhash.xxh3_64_hexdigest(FIRST_CHAIN.encode() + body).encode() + b'"}\n'


def nested(depth):
    value = 1
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"a": math.nan}, r"tool/call\.'call'\.'arguments'\.'a' is nan"),
        ({"a": [1.0, -math.inf]}, r"'a'\.1 is -inf"),
        ({"a": "\ud800"}, "does not encode as UTF-8"),
        ({"a\udcff": 1}, "does not encode as UTF-8"),
        ({"a": nested(MOST_NESTING)}, "nested deeper than 100"),
        ({"a": nested(100_000)}, "nested deeper than 100"),
    ],
)
def test_what_json_would_not_give_back_is_refused_with_its_place(arguments, problem):
    event = ToolCallEvent(call=LoggedCall(id=CallId("call00001"), name="read", arguments=arguments))
    with pytest.raises(ValueError, match=problem):
        encode_line(event, seq=0, time=1.0, previous_chain=FIRST_CHAIN)


def test_a_clock_that_is_not_finite_is_refused():
    with pytest.raises(ValueError, match="the clock says nan"):
        encode_line(TurnStart(turn=1), seq=0, time=math.nan, previous_chain=FIRST_CHAIN)


@given(data=st.binary(max_size=40))
def test_bytes_that_are_not_utf_8_are_replaced_in_the_text_and_handed_back(data):
    clean = clean_text(data.decode("utf-8", "surrogateescape"))
    assert clean.text == data.decode("utf-8", "replace")
    try:
        data.decode()
    except UnicodeDecodeError:
        assert clean.original_bytes == data
    else:
        assert clean.original_bytes is None


@given(text=st.text(max_size=20))
def test_text_that_encodes_is_left_alone(text):
    assert clean_text(text) == CleanText(text=text)


def test_escaped_bytes_that_are_utf_8_after_all_become_their_character():
    assert clean_text("caf\udcc3\udca9") == CleanText(text="café")


@given(before=texts, after=texts)
def test_a_lone_surrogate_becomes_a_replacement_mark_and_its_bytes_are_handed_back(before, after):
    text = f"{before}\ud800{after}"
    clean = clean_text(text)
    assert clean.text.encode().decode().count("\ufffd") > text.count("\ufffd")
    assert clean.original_bytes.decode("utf-8", "surrogatepass") == text


@given(
    value=st.recursive(
        st.floats() | st.text(st.characters(categories=["Cs", "L"])) | st.integers() | st.booleans() | st.none(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(st.characters(categories=["Cs", "L"])), inner),
        max_leaves=6,
    )
)
def test_a_cleaned_value_can_be_written(value):
    call = LoggedCall(id=CallId("call00001"), name="f", arguments={"value": clean_json(value)})
    encoded = encode_line(ToolCallEvent(call=call), seq=0, time=1.0, previous_chain=FIRST_CHAIN)
    assert encoded.logged.event.call == call


def test_cleaning_refuses_a_value_that_is_nested_too_deep():
    with pytest.raises(ValueError, match="nested deeper"):
        clean_json(nested(5_000))
