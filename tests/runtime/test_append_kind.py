"""Append-only or not, by renders of a growing conversation."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from chapbook.runtime.append_kind import append_kind, rerender_cost
from chapbook.runtime.chat_format import AppendKind
from chapbook.runtime.transition_probes import Sentinels, growth

SENTINELS = Sentinels("Zq0000")
SCRIPT = "U R U R"
GLUES = {"UR": "</u><r>", "RU": "</r><u>"}


def grown(render: Callable[[int, int, bool], str]) -> list[str]:
    """Render each step by a function of (message, number of messages, whether a prompt follows the last)."""
    texts = []
    for length, script in enumerate(growth(SCRIPT), start=1):
        prompt = script.endswith(">")
        texts.append("".join(render(index, length, prompt) for index in range(length)) + ("<r>" if prompt else ""))
    return texts


def plain(index: int, _length: int, _prompt: bool) -> str:
    return f"<{'ur'[index % 2]}>{SENTINELS.content(index)}</{'ur'[index % 2]}>"


def kind_of(render: Callable[[int, int, bool], str]) -> AppendKind:
    return append_kind(grown(render), SCRIPT, SENTINELS, lambda before, after: GLUES[before + after])


def test_growth_asks_for_a_reply_behind_everything_but_a_reply() -> None:
    assert growth("U C T R") == ("U>", "U C", "U C T>", "U C T R")


def test_a_template_that_only_appends_is_append_only() -> None:
    assert kind_of(plain) is AppendKind.APPEND_ONLY


def test_what_follows_the_last_content_only_does_not_count() -> None:
    def with_eos(index: int, length: int, prompt: bool) -> str:
        return plain(index, length, prompt) + ("</s>" if index + 1 == length and not prompt else "")

    assert kind_of(with_eos) is AppendKind.APPEND_ONLY


@pytest.mark.parametrize("where", ["head", "reply", "prompt", "glue"])
def test_a_change_of_earlier_text_rewrites(where: str) -> None:
    def render(index: int, length: int, prompt: bool) -> str:
        text = plain(index, length, prompt)
        is_last = index + 1 == length
        if where == "head" and index == 0:
            return f"{length}{text}"
        if where == "reply" and index % 2 and is_last:
            return text.replace("<r>", "<r><think></think>")
        if where == "prompt" and index % 2 and not is_last:
            return text.replace("<r>", "<old r>")
        if where == "glue" and index == 1:
            return text.replace("</r>", "</ r>")
        return text

    assert kind_of(render) is AppendKind.REWRITES


def test_a_prompt_that_is_not_repeated_later_rewrites() -> None:
    texts = grown(plain)
    texts[0] = texts[0].removesuffix("<r>") + "<first r>"
    kind = append_kind(texts, SCRIPT, SENTINELS, lambda before, after: GLUES[before + after])
    assert kind is AppendKind.REWRITES


def test_a_render_that_is_missing_or_holds_no_content_makes_the_kind_unknown() -> None:
    texts: list[str | None] = list(grown(plain))

    def kind(changed: list[str | None]) -> AppendKind:
        return append_kind(changed, SCRIPT, SENTINELS, lambda before, after: GLUES[before + after])

    assert kind([None, *texts[1:]]) is AppendKind.UNKNOWN
    assert kind([*texts[:2], "nothing", texts[3]]) is AppendKind.UNKNOWN


def test_the_cost_counts_what_stands_behind_the_first_change() -> None:
    cost = rerender_cost(["abc", "abcXYZ", "abQ"], ["abcX", "abcXYZ12"])
    # The second request repeats all that was known; the third leaves "ab" of eight characters.
    assert (cost.requests, cost.rewriting_requests, cost.rewritten_chars, cost.sent_chars) == (3, 1, 6, 3)
