"""The choice of a dialect from the markers that the families' templates hold."""

from __future__ import annotations

import pytest

from chapbook.kernels.errors import ConfigError
from chapbook.runtime.dialects import DIALECTS, choose_dialect, dialect_named


@pytest.mark.parametrize(
    ("markers", "name"),
    [
        ("<tools></tools> within <tool_call></tool_call> XML tags", "hermes"),
        ("<tool_call>\\n<function=' ~ name ~ '>\\n<parameter=", "qwen-xml"),
        ("[AVAILABLE_TOOLS] [TOOL_CALLS] [", "mistral"),
        ("[TOOL_CALLS]' + name + '[ARGS]", "mistral-args"),
        ("[TOOL_CALLS]' + name + '[CALL_ID]' + id + '[ARGS]", "mistral-args"),
        ('<|start_header_id|> Respond in the format {"name": function name, "parameters": dictionary', "llama3"),
        ("Environment: ipython <|python_tag|>", "llama3"),
        ("List of tools: <|tool_list_start|>[", "pythonic"),
        ("<|tool_call_start|>[' + calls + ']<|tool_call_end|>", "pythonic"),
        ("[func_name1(params_name1=params_value1)]", "pythonic-bare"),
        ("<|start|>assistant to=functions.' + name + '<|channel|>commentary json<|message|>", "harmony"),
        ("<tool_call>{name}\\n<arg_key>", "hermes"),
        ("{% for m in messages %}<|im_start|>{{ m.role }}", "hermes"),
        ("", "hermes"),
        (None, "hermes"),
    ],
)
def test_a_template_names_its_dialect_by_its_markers(markers, name):
    choice = choose_dialect(markers)
    assert choice.dialect.name == name
    assert choice.reason


def test_a_form_that_is_not_written_here_is_named_in_the_reason():
    assert "<arg_key>" in choose_dialect("<tool_call><arg_key>").reason


def test_every_dialect_is_found_by_its_name():
    assert all(dialect_named(name) is dialect and dialect.name == name for name, dialect in DIALECTS.items())
    assert {"hermes", "llama3", "mistral", "qwen-xml", "pythonic", "harmony"} <= DIALECTS.keys()


def test_an_unknown_name_is_refused_with_the_nearest():
    with pytest.raises(ConfigError, match="nearest: hermes") as raised:
        dialect_named("hermess")
    assert raised.value.nearest == "hermes"
