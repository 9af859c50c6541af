from hypothesis import given
from hypothesis import strategies as st

from chapbook.runtime.chat_format import ReasoningMarks
from chapbook.runtime.engine import Trigger
from chapbook.runtime.text_watch import ReasoningWatch, TextWatch, TriggerWatch

short = st.text(alphabet="ab ", min_size=1, max_size=4)


def first_end(pieces, texts):
    """Return (piece, bytes of it behind the first match to end), by looking at the whole text after each byte."""
    whole = b""
    for number, piece in enumerate(pieces):
        for at in range(len(piece)):
            whole += piece[at : at + 1]
            if any(whole.endswith(text.encode()) for text in texts):
                return number, len(piece) - at - 1
    return None


def watched(watch, pieces):
    for number, piece in enumerate(pieces):
        overshoot = watch.peek(piece)
        if overshoot is not None:
            return number, overshoot
        watch.feed(piece)
    return None


@given(texts=st.lists(short, min_size=1, max_size=3), pieces=st.lists(short.map(str.encode), max_size=8))
def test_a_text_is_found_where_its_last_byte_comes(texts, pieces):
    assert watched(TextWatch(texts), pieces) == first_end(pieces, texts)
    assert watched(TriggerWatch([Trigger(text=text) for text in texts]), pieces) == first_end(pieces, texts)


@given(text=st.text(alphabet="ab{", min_size=1, max_size=4), pieces=st.lists(short.map(str.encode), max_size=8))
def test_a_trigger_at_the_start_is_found_behind_white_space_only(text, pieces):
    found = watched(TriggerWatch([Trigger(text=text, at_start=True)]), pieces)
    whole = b"".join(pieces)
    if not whole.lstrip().startswith(text.encode()):
        assert found is None
    else:
        number, overshoot = found
        seen = b"".join(pieces[: number + 1])
        assert seen[: len(seen) - overshoot].lstrip() == text.encode()


def test_a_trigger_at_the_start_is_over_after_the_first_span():
    watch = TriggerWatch([Trigger(text="{", at_start=True), Trigger(text="<")])
    assert watch.peek(b" {") == 0
    watch.restart()
    assert watch.peek(b"{") is None
    assert watch.peek(b"{<x") == 1


MARKS = ReasoningMarks(begin="<think>", end="</think>")


@given(cuts=st.lists(st.integers(1, 6), max_size=30), thought=st.text(alphabet="a<thik/>", max_size=12))
def test_what_is_said_is_what_stands_outside_the_marks(cuts, thought):
    reply = f"b<think>{thought}</think>said".encode()
    watch, rest, said = ReasoningWatch(MARKS), reply, b""
    for size in [*cuts, len(reply)]:
        said += watch.said(rest[:size])
        rest = rest[size:]
    assert said.endswith(reply.split(b"</think>", 1)[1])
    assert not watch.inside


def test_without_marks_all_is_said():
    assert ReasoningWatch(None).said(b"<think>x") == b"<think>x"
