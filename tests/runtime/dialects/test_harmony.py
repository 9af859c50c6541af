"""Harmony: the channel says what a message is, its address whether it is a call."""

from __future__ import annotations

import pytest

from chapbook.runtime.dialects.harmony import HarmonyDialect

DIALECT = HarmonyDialect()
CALL = '<|message|>{"path": "a"}'


def read(reply: str):
    parsed = DIALECT.parse(reply, reasoning=None)
    return [(call.name, call.arguments) for call in parsed.calls], parsed.text, parsed.reasoning


@pytest.mark.parametrize(
    "reply",
    [
        f"<|channel|>commentary to=functions.read <|constrain|>json{CALL}",
        f"<|channel|>commentary to=functions.read <|constrain|>json{CALL}<|call|>",
        f"<|channel|>commentary to=functions.read<|constrain|>json{CALL}",
        f"<|channel|>commentary to=functions.read{CALL}",
        f"<|channel|>analysis to=functions.read code{CALL}",
        f" to=functions.read<|channel|>commentary json{CALL}",
        f"<|start|>assistant to=functions.read<|channel|>commentary json{CALL}",
    ],
)
def test_every_place_of_the_address_is_read(reply):
    assert read(reply) == ([("read", {"path": "a"})], "", "")


def test_channels_become_reasoning_text_and_calls():
    reply = (
        "<|channel|>analysis<|message|>The user wants a.<|end|>"
        "<|start|>assistant<|channel|>commentary<|message|>I will read it.<|end|>"
        f"<|start|>assistant<|channel|>commentary to=functions.read <|constrain|>json{CALL}<|call|>"
        "<|start|>assistant<|channel|>final<|message|>Done.<|return|>"
    )
    assert read(reply) == ([("read", {"path": "a"})], "I will read it.\nDone.", "The user wants a.")


def test_a_call_inside_reasoning_is_not_a_call():
    thought = "<|channel|>analysis<|message|>Maybe to=functions.read {}<|end|>"
    reply = f"{thought}<|start|>assistant<|channel|>final<|message|>No."
    assert read(reply) == ([], "No.", "Maybe to=functions.read {}")


def test_reasoning_without_an_end_is_all_there_is():
    assert read("<|channel|>analysis<|message|>still at it") == ([], "", "still at it")


def test_a_reply_without_channels_is_text():
    assert read("Just an answer, to=functions.x.") == ([], "Just an answer, to=functions.x.", "")
    assert read("Text<|channel|>commentary to=functions.read" + CALL)[:2] == ([("read", {"path": "a"})], "Text")


def test_a_header_that_breaks_off_shows_nothing():
    assert read("<|channel|>analysis<|message|>x<|end|><|start|>assistant<|chan") == ([], "", "x")
    assert read("<|channel|>final") == ([], "", "")


def test_markup_inside_the_json_does_not_end_the_call():
    calls, text, _ = read('<|channel|>commentary to=functions.w<|message|>{"t": "<|end|><|start|>x"}<|call|>after')
    assert calls == [("w", {"t": "<|end|><|start|>x"})]
    assert text == "after"


def test_arguments_that_cannot_be_read_are_a_problem():
    parsed = DIALECT.parse('<|channel|>commentary to=functions.read<|message|>{"path": }<|call|>', reasoning=None)
    (problem,) = parsed.problems
    assert "not valid JSON" in problem.problem
    assert "to=functions.TOOL" in problem.expected
    assert parsed.calls == ()
    assert DIALECT.parse("<|channel|>commentary to=functions.read<|message|>[1]", reasoning=None).problems
