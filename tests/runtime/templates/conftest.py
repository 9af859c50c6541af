"""Minimal templates of many families, each with the quirks of its own, and what is known of them."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from chapbook.runtime.calls import ToolSchema
from chapbook.runtime.chat_format import AppendKind, ChatFormat
from chapbook.runtime.template_child import make_environment
from chapbook.runtime.template_render import FROZEN_NOW
from chapbook.runtime.transition_probes import ToolsForm, template_request
from chapbook.runtime.transitions import learn_chat_format

APPENDS, REWRITES = AppendKind.APPEND_ONLY, AppendKind.REWRITES


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """What to expect of a template.

    `results`: it has a role for results. `preamble` and `written_end` are what the model itself writes around a
    reply. `content_of_call` is what the template wants as the content of a message with calls, `rounds` how many
    rounds with tools look as the first one does.
    """

    name: str
    bos: str = "<s>"
    eos: str = "</s>"
    kind: AppendKind = APPENDS
    catalogue: bool = False
    system: bool = True
    results: bool = False
    preamble: str = ""
    written_end: str = ""
    content_of_call: str | None = ""
    rounds: int = 9

    @property
    def template(self) -> str:
        return (Path(__file__).parent / f"{self.name}.jinja").read_text("utf-8")


_IM = {"bos": "", "eos": "<|im_end|>"}
_EOT = {"bos": "<|begin_of_text|>", "eos": "<|eot_id|>"}

FAMILIES = (
    Family(name="chatml", **_IM),
    Family(name="smollm2", **_IM),
    Family(name="qwen2_5", **_IM, catalogue=True, results=True),
    Family(name="qwen3", **_IM, catalogue=True, results=True, kind=REWRITES),
    Family(name="qwen3_thinking", **_IM, kind=REWRITES),
    Family(name="llama2", preamble=" "),
    Family(name="llama3_1", **_EOT, catalogue=True, results=True),
    Family(name="llama3_2", **_EOT),
    Family(name="mistral_v3", catalogue=True, results=True, kind=REWRITES),
    Family(name="mistral_small", catalogue=True, results=True, kind=REWRITES),
    Family(name="gemma2", bos="<bos>", eos="<end_of_turn>", system=False),
    Family(name="gemma3", bos="<bos>", eos="<end_of_turn>"),
    Family(name="phi3", bos="", eos="<|endoftext|>"),
    Family(name="phi4", **_IM),
    Family(
        name="gpt_oss",
        bos="<|startoftext|>",
        eos="<|return|>",
        catalogue=True,
        results=True,
        preamble="<|channel|>final<|message|>",
    ),
    Family(
        name="deepseek_r1", bos="<|begin|>", eos="<\uff5cend\u2581of\u2581sentence\uff5c>", results=True, kind=REWRITES
    ),
    Family(name="command_r", bos="<BOS_TOKEN>", eos="<|END_OF_TURN_TOKEN|>", results=True),
    Family(
        name="command_r7b",
        bos="<BOS_TOKEN>",
        eos="<|END_OF_TURN_TOKEN|>",
        catalogue=True,
        results=True,
        preamble="<|START_RESPONSE|>",
        written_end="<|END_RESPONSE|>",
        rounds=1,
    ),
    Family(name="granite", bos="", eos="<|end_of_text|>", catalogue=True, results=True),
    Family(name="glm4", bos="", eos="<|endoftext|>", catalogue=True, results=True),
    Family(name="hermes", bos="<s>", eos="<|im_end|>", catalogue=True, results=True, kind=REWRITES),
    Family(name="lfm2", bos="<|startoftext|>", eos="<|im_end|>", catalogue=True, results=True),
    Family(name="falcon", bos="", eos="<|endoftext|>"),
    Family(name="zephyr"),
    Family(name="vicuna", preamble=" "),
    Family(name="olmo", bos="", eos="<|endoftext|>"),
    Family(name="minicpm"),
    Family(name="nemotron", bos="", eos="\n", catalogue=True, results=True, content_of_call=None),
    Family(name="internlm", eos="<|im_end|>", results=True),
    Family(name="yi", **_IM),
    Family(name="firefunction", **_EOT, catalogue=True, results=True),
    Family(name="kimi", **_IM, catalogue=True, results=True),
)

_PATH = {"type": "object", "properties": {"path": {"type": "string", "description": 'a "path"'}}, "required": ["path"]}
TOOLS = (
    ToolSchema(name="read", description="Read a file.\nWhole files only.", parameters=_PATH),
    ToolSchema(name="list", description="List a folder — its names.", parameters=_PATH),
)

Learn = Callable[[Family], ChatFormat]
Render = Callable[..., str]


@pytest.fixture(scope="session", params=FAMILIES, ids=lambda family: family.name)
def family(request: pytest.FixtureRequest) -> Family:
    """Every family in turn."""
    chosen: Family = request.param
    return chosen


@pytest.fixture(scope="session")
def family_named() -> Callable[[str], Family]:
    return lambda name: next(family for family in FAMILIES if family.name == name)


@pytest.fixture(scope="session")
def cache_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("templates")


@pytest.fixture(scope="session")
def learn(cache_folder: Path) -> Learn:
    """Learn a family's format, in a child process the first time."""
    return cache(
        lambda family: learn_chat_format(
            family.template, bos_text=family.bos, eos_text=family.eos, cache_folder=cache_folder
        )
    )


@pytest.fixture(scope="session")
def tools() -> tuple[ToolSchema, ...]:
    return TOOLS


@pytest.fixture(scope="session")
def render() -> Render:
    """Render a whole conversation by the template itself, in this process: these templates are our own."""
    environment = make_environment(datetime.datetime.fromisoformat(FROZEN_NOW))
    compiled = cache(lambda family: environment.from_string(family.template))

    def render_whole(
        family: Family, messages: Sequence[Mapping[str, Any]], *, with_tools: bool, prompt: bool = True
    ) -> str:
        request = template_request(
            [dict(message) for message in messages],
            tools=ToolsForm.REAL if with_tools else ToolsForm.OMITTED,
            functions=[tool.as_function() for tool in TOOLS] if with_tools else [],
            variables={"bos_token": family.bos, "eos_token": family.eos},
            prompt=prompt,
        )
        text: str = compiled(family).render(request)
        return text

    return render_whole
