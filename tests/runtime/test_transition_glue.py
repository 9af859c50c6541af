"""Cutting glue out of text: pure functions."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from chapbook.runtime.chat_format import GluePart, Slot
from chapbook.runtime.transition_glue import (
    closing_of,
    common_end,
    common_start,
    content_form,
    drop_written_end,
    is_boundary,
    make_glue,
    shared_start_chars,
    strip_call,
    text_after,
    text_between,
)
from chapbook.runtime.transition_probes import Sentinels, choose_sentinels

SENTINELS = Sentinels("Zq0000")
MARKUP = st.lists(st.sampled_from(("<|a|>", "<|b|>", "[X]", "[/X]", "\n", "w", " ")), max_size=6).map("".join)


@given(first=MARKUP, second=MARKUP)
def test_a_common_start_or_end_is_common_and_cuts_no_bracket(first: str, second: str) -> None:
    start, end = common_start(first, second), common_end(first, second)
    assert first.startswith(start)
    assert second.startswith(start)
    assert first.endswith(end)
    assert second.endswith(end)
    for text, at in ((first, len(start)), (second, len(start)), (first, len(first) - len(end))):
        assert is_boundary(text, at)
        assert not text[:at].endswith(("<", "<|", "<|a", "<|a|"))


@given(first=st.text("ab", max_size=6), second=st.text("ab", max_size=6))
def test_the_shared_start_is_the_longest(first: str, second: str) -> None:
    longest = max(n for n in range(min(len(first), len(second)) + 1) if first[:n] == second[:n])
    assert shared_start_chars(first, second) == longest


@given(text=st.text("ab", max_size=5), glue=st.text("<x> ", max_size=5))
def test_what_stands_between_two_sentinels_is_found_behind_earlier_ones(text: str, glue: str) -> None:
    first, second = SENTINELS.content(1), SENTINELS.content(2)
    whole = f"{first}{text}{first}{glue}{second}{text}"
    assert text_between(whole, first, second) == glue
    assert text_after(whole, second) == text
    assert text_between(whole, second, first) is None
    assert text_after(whole, "absent") is None


def test_a_closing_is_what_ends_a_last_message() -> None:
    eos = "</s>"
    assert closing_of("[/INST][INST] ", at_end="[/INST]", eos_text=eos) == "[/INST]"
    assert closing_of("<|end|>\n<|user|>", at_end="<|end|>\n</s>", eos_text=eos) == "<|end|>\n"
    assert closing_of("<|end|><|user|>", at_end="<|return|>", eos_text=eos) == "<|end|>"
    assert closing_of("<|user|>", at_end="", eos_text=eos) == ""
    assert closing_of("<|im_end|>\n<|x|>", at_end="<|im_end|>\n<|x|>", eos_text=eos) == "<|im_end|>\n"
    assert closing_of(" ASSISTANT:", at_end=None, eos_text=eos) == ""


def test_the_rest_of_a_call_is_taken_off() -> None:
    plain = "<|im_end|>\n<|im_start|>tool\n"
    assert strip_call('"}}\n</tool_call>' + plain, plain=plain, eos_text="") == plain
    assert strip_call('"}<|call|><|start|>tool', plain="<|end|><|start|>tool", eos_text="") == "<|call|><|start|>tool"
    assert strip_call('"}[/CALL]<|seen|>\n', plain="<|seen|>\n", eos_text="") == "<|seen|>\n"
    assert strip_call('"}<eot-x><tool>', plain=None, eos_text="<eot-x>") == "<eot-x><tool>"
    assert strip_call('"})\n</call>\nRESULT ', plain=None, eos_text="") == "RESULT "


def test_what_a_model_writes_before_its_end_of_turn_is_dropped_but_white_space_stays() -> None:
    assert drop_written_end("<|END|><|im_end|>x", eos_text="") == "<|im_end|>x"
    assert drop_written_end("\n<|im_end|>x", eos_text="") == "\n<|im_end|>x"
    assert drop_written_end("no end", eos_text="") == "no end"


def test_names_and_ids_become_slots_and_any_other_sentinel_makes_no_glue() -> None:
    slots = {SENTINELS.name(1): Slot.TOOL_NAME, SENTINELS.call_id(1): Slot.CALL_ID}
    text = f"<{SENTINELS.name(1)}>{SENTINELS.call_id(1)}"
    glue = make_glue(text, slots, SENTINELS)
    assert glue is not None
    expected = [GluePart("<"), GluePart(slot=Slot.TOOL_NAME), GluePart(">"), GluePart(slot=Slot.CALL_ID)]
    assert list(glue.parts) == expected
    assert make_glue(text + SENTINELS.name(2), slots, SENTINELS) is None
    assert make_glue(SENTINELS.content(3), {}, SENTINELS) is None
    assert len(SENTINELS.call_id(1)) == 9


def test_a_content_that_is_changed_in_an_unknown_way_has_no_form() -> None:
    edgy = SENTINELS.edgy(1)
    plain = content_form(f"<{edgy}>", 1, SENTINELS)
    assert plain is not None
    assert not plain.trimmed
    trimmed = content_form(f"<{edgy.strip()}>", 1, SENTINELS)
    assert trimmed is not None
    assert trimmed.trimmed
    assert content_form(edgy.upper(), 1, SENTINELS) is None
    assert content_form(edgy.replace('"', "&quot;"), 1, SENTINELS) is None


def test_sentinels_differ_from_everything_in_the_template() -> None:
    assert choose_sentinels("x").stem == "Zq0000"
    assert choose_sentinels("Zq0000", "Zq0001").stem == "Zq0002"
