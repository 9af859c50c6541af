"""What doctor says of a template."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from chapbook.runtime.chat_format import AppendKind
from chapbook.runtime.template_report import TemplateDescription, describe_template
from chapbook.runtime.transitions import learn_chat_format


@pytest.fixture
def describe(learn: Any, family_named: Callable[[str], Any]) -> Callable[[str], TemplateDescription]:
    def of(name: str) -> TemplateDescription:
        family = family_named(name)
        return describe_template(family.template, learn(family), bos_text=family.bos, eos_text=family.eos)

    return of


Describe = Callable[[str], TemplateDescription]


@pytest.mark.parametrize("name", ["smollm2", "qwen2_5", "llama3_1", "gpt_oss", "gemma2", "phi3", "nemotron"])
def test_rendering_an_append_only_template_anew_costs_nothing(describe: Describe, name: str) -> None:
    found = describe(name)
    assert found.append_kind is AppendKind.APPEND_ONLY
    assert found.rerender is not None
    assert (found.rerender.rewriting_requests, found.rerender.rewritten_chars) == (0, 0)
    assert found.rerender.requests >= 4
    assert found.rerender.sent_chars > 500


def test_a_catalogue_that_moves_costs_everything_behind_it(describe: Describe) -> None:
    cost = describe("mistral_small").rerender
    assert cost is not None
    assert cost.rewriting_requests == 3
    assert cost.rewritten_chars > cost.sent_chars / 2


def test_a_dropped_think_block_costs_the_last_answer(describe: Describe) -> None:
    found = describe("qwen3")
    assert found.rerender is not None
    assert 0 < found.rerender.rewritten_chars < 1000
    assert found.reasoning == "<think>…</think>"


def test_chatml_has_nothing_to_compare_with() -> None:
    chat_format = learn_chat_format(None, bos_text="", eos_text="", cache_folder=None)
    assert describe_template(None, chat_format, bos_text="", eos_text="").rerender is None
