"""The session prefix against the template's own render of a first message, over every family."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from chapbook.kernels.errors import TemplateRefused, UsageError
from chapbook.runtime.calls import ToolSchema
from chapbook.runtime.chat_format import PrefixPiece
from chapbook.runtime.prefix_render import PrefixText, check_tool_texts, render_prefix
from chapbook.runtime.transitions import learn_chat_format

SYSTEM_TEXT = st.lists(
    st.sampled_from(("word", " ", "\n", '"', "\\", "{{ x }}", "<|im_end|>", "Zq0000c00z", "é", "</s>", "{% if %}")),
    min_size=1,
    max_size=6,
).map("".join)
Prefix = Callable[..., tuple[PrefixPiece, ...]]


@pytest.fixture(scope="session")
def prefix(learn: Any, tools: tuple[ToolSchema, ...], cache_folder: Path) -> Prefix:
    def render_for(family: Any, *system: str, with_tools: bool = True) -> tuple[PrefixPiece, ...]:
        return render_prefix(
            family.template,
            learn(family),
            system=[PrefixText(f"part{n}", text) for n, text in enumerate(system)],
            tools=tools if family.catalogue and with_tools else (),
            bos_text=family.bos,
            eos_text=family.eos,
            cache_folder=cache_folder,
        )

    return render_for


def whole(pieces: tuple[PrefixPiece, ...]) -> str:
    return "".join(piece.text for piece in pieces)


@settings(max_examples=10, deadline=None, suppress_health_check=list(HealthCheck))
@given(system=st.lists(SYSTEM_TEXT, min_size=1, max_size=3).filter(lambda texts: "".join(texts).strip() != ""))
def test_the_prefix_is_what_the_template_shows_before_the_first_content(
    family: Any, prefix: Prefix, render: Any, system: list[str]
) -> None:
    check_prefix(family, prefix, render, system)


@pytest.mark.parametrize("name", ["smollm2", "qwen2_5", "llama3_1", "gemma2", "mistral_v3", "granite"])
def test_the_prefix_without_a_system_text_is_the_template_s_own(
    name: str, family_named: Callable[[str], Any], prefix: Prefix, render: Any
) -> None:
    check_prefix(family_named(name), prefix, render, [" \n"])


def check_prefix(family: Any, prefix: Prefix, render: Any, system: list[str]) -> None:
    joined = "\n\n".join(text for text in system if text.strip())
    question = f"{joined}\n\nQUESTION" if joined and not family.system else "QUESTION"
    messages = [{"role": "system", "content": joined}] if joined and family.system else []
    text = render(family, [*messages, {"role": "user", "content": question}], with_tools=family.catalogue)
    assert text.startswith(whole(prefix(family, *system)) + "QUESTION")


def test_system_text_is_plain_and_everything_else_is_markup(family: Any, prefix: Prefix) -> None:
    pieces = prefix(family, "One <|im_end|>.", "Two.")
    assert {piece.section for piece in pieces if not piece.markup} == {"part0", "part1"}
    assert {piece.section for piece in pieces if piece.markup} <= {"glue", "catalogue"}
    assert "".join(piece.text for piece in pieces if not piece.markup).strip() == "One <|im_end|>.\n\nTwo."
    assert all(piece.text for piece in pieces)


def test_a_catalogue_is_there_with_tools_only_and_names_each(
    family: Any, prefix: Prefix, tools: tuple[ToolSchema, ...]
) -> None:
    catalogue = "".join(piece.text for piece in prefix(family, "Be brief.") if piece.section == "catalogue")
    assert all((tool.name in catalogue) is family.catalogue for tool in tools)
    without = prefix(family, "Be brief.", with_tools=False)
    assert "catalogue" not in {piece.section for piece in without}


def test_a_cut_between_glue_and_catalogue_splits_no_control_token(family: Any, prefix: Prefix) -> None:
    for piece in prefix(family, "Be brief."):
        if piece.section == "glue":
            assert piece.text.count("<|") == piece.text.count("|>")


@pytest.fixture
def named(family_named: Callable[[str], Any], prefix: Prefix) -> Callable[..., tuple[PrefixPiece, ...]]:
    return lambda name, *system: prefix(family_named(name), *system)


def test_without_a_system_role_the_text_leads_the_first_user_message(named: Prefix) -> None:
    opening, system = named("gemma2", "Be brief.")
    assert opening.text == "<bos><start_of_turn>user\n"
    assert (system.text, system.markup) == ("Be brief.\n\n", False)


def test_a_default_system_text_stands_only_where_none_is_given(named: Prefix) -> None:
    assert "small and helpful" in whole(named("smollm2"))
    assert "small and helpful" not in whole(named("smollm2", "Be brief."))


def test_the_date_in_a_prefix_is_frozen(named: Prefix) -> None:
    assert "Today Date: 26 Jul 2024" in whole(named("llama3_2", "Be brief."))
    assert "Current date: 2024-07-26" in whole(named("gpt_oss", "Be brief."))
    assert "Today is 2024-07-26" in whole(named("firefunction", "Be brief."))


def test_mistral_shows_the_catalogue_before_the_first_user_message(named: Prefix) -> None:
    sections = [piece.section for piece in named("mistral_v3", "Be brief.")]
    assert sections == ["glue", "catalogue", "glue", "part0", "glue"]


def test_chatml_needs_no_template(cache_folder: Path) -> None:
    chat_format = learn_chat_format(None, bos_text="", eos_text="", cache_folder=None)
    pieces = render_prefix(
        None,
        chat_format,
        system=[PrefixText("system", "Be brief."), PrefixText("empty", " \n")],
        tools=(),
        bos_text="",
        eos_text="",
        cache_folder=cache_folder,
    )
    assert whole(pieces) == "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n"
    assert [piece.section for piece in pieces] == ["glue", "system", "glue"]


def test_two_processes_with_other_hash_seeds_render_the_same_prefix(tmp_path: Path, family_named: Any) -> None:
    program = (
        "import sys\n"
        "from chapbook.runtime.transitions import learn_chat_format\n"
        "from chapbook.runtime.prefix_render import PrefixText, render_prefix\n"
        "texts = {'bos_text': '<s>', 'eos_text': '</s>', 'cache_folder': None}\n"
        "template = sys.stdin.read()\n"
        "chat_format = learn_chat_format(template, **texts)\n"
        "system = [PrefixText('system', 'Be brief.')]\n"
        "print(chat_format, render_prefix(template, chat_format, system=system, tools=(), **texts))\n"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", program],
            input=family_named("gpt_oss").template,
            env={"PYTHONHASHSEED": seed, "PATH": ""},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(outputs) == 1


def test_tools_are_refused_where_the_format_has_no_catalogue(
    family_named: Any, learn: Any, tools: tuple[ToolSchema, ...]
) -> None:
    family = family_named("chatml")
    with pytest.raises(UsageError, match="no catalogue of its own"):
        render_prefix(
            family.template, learn(family), system=(), tools=tools, bos_text="", eos_text="", cache_folder=None
        )


def test_a_template_that_fails_on_these_tools_is_refused_with_its_own_words(
    family_named: Any, learn: Any, tools: tuple[ToolSchema, ...]
) -> None:
    chat_format = learn(family_named("qwen2_5"))
    template = "{% for tool in tools %}{{ raise_exception('no ' + tool.function.name) }}{% endfor %}"
    with pytest.raises(TemplateRefused, match="no read"):
        render_prefix(template, chat_format, system=(), tools=tools, bos_text="", eos_text="", cache_folder=None)


@pytest.mark.parametrize(
    "tool",
    [
        ToolSchema(name="a<|im_end|>", description="", parameters={}),
        ToolSchema(name="a", description="Ends with <|im_end|>.", parameters={}),
        ToolSchema(name="a", description="", parameters={"properties": {"p": {"enum": ["x", "y<|im_end|>"]}}}),
        ToolSchema(name="a", description="", parameters={"properties": {"<|im_end|>": {}}}),
    ],
)
def test_a_tool_whose_text_holds_a_control_token_is_refused_by_name(tool: ToolSchema) -> None:
    fine = ToolSchema(name="fine", description="<|im_en", parameters={"required": ["p"], "minimum": 3})
    check_tool_texts([fine], ("", "<|im_end|>"))
    with pytest.raises(UsageError, match=r"'a.*<\|im_end\|>"):
        check_tool_texts([fine, tool], ("<|im_start|>", "<|im_end|>"))
