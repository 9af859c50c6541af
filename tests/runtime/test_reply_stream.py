"""What a person sees of a reply while it grows: never markup, never less than the text in the end."""

from hypothesis import given
from hypothesis import strategies as st

from chapbook.runtime.chat_format import ReasoningMarks
from chapbook.runtime.engine import Trigger
from chapbook.runtime.reply_stream import ReplyStream, Shown

THINK = ReasoningMarks(begin="<think>", end="</think>")
CALL = (Trigger(text="<tool_call>"),)
BARE = (Trigger(text="{", at_start=True),)


def fed(stream: ReplyStream, reply: str, sizes: list[int]) -> Shown:
    data, text, reasoning = reply.encode(), "", ""
    for size in [*sizes, len(data)]:
        shown = stream.feed(data[:size])
        text, reasoning, data = text + shown.text, reasoning + shown.reasoning, data[size:]
    return Shown(text=text, reasoning=reasoning)


cuts = st.lists(st.integers(min_value=1, max_value=5), max_size=40)


@given(before=st.text(alphabet="ab <tool_>é", max_size=20), cut=cuts)
def test_text_before_a_call_is_shown_and_the_call_is_not(before: str, cut: list[int]) -> None:
    shown = fed(ReplyStream(triggers=CALL, reasoning=None), before + '<tool_call>{"name": 1}</tool_call>after', cut)
    assert shown.text == before


@given(thought=st.text(alphabet="ab </>kè", max_size=20), answer=st.text(alphabet="cd <", max_size=20), cut=cuts)
def test_reasoning_and_text_are_told_apart_wherever_the_pieces_end(thought: str, answer: str, cut: list[int]) -> None:
    stream = ReplyStream(triggers=CALL, reasoning=THINK)
    shown = fed(stream, f"<think>{thought}</think>{answer}.", cut)
    assert shown.reasoning == thought
    assert shown.text == answer + "."


@given(cut=cuts)
def test_reasoning_that_the_prompt_has_opened_needs_no_mark(cut: list[int]) -> None:
    marks = ReasoningMarks(begin="<think>", end="</think>", open_at_start=True)
    shown = fed(ReplyStream(triggers=(), reasoning=marks), "because</think>yes", cut)
    assert (shown.reasoning, shown.text) == ("because", "yes")


@given(cut=cuts)
def test_a_brace_opens_a_call_at_the_start_and_is_text_later(cut: list[int]) -> None:
    assert fed(ReplyStream(triggers=BARE, reasoning=None), ' \n{"name": 1}', cut).text.strip() == ""
    assert fed(ReplyStream(triggers=BARE, reasoning=None), "see {x} there.", cut).text == "see {x} there."


def test_a_character_cut_in_two_is_shown_whole() -> None:
    stream = ReplyStream(triggers=(), reasoning=None)
    euro = "€".encode()
    assert stream.feed(euro[:2]).text == ""
    assert stream.feed(euro[2:]).text == "€"
