"""The dialects by name, and the choice of one from what a chat template writes itself."""

from __future__ import annotations

import difflib
from typing import NamedTuple

from ...kernels.errors import ConfigError
from .base import Dialect
from .harmony import HarmonyDialect
from .hermes import HermesDialect
from .llama3 import Llama3Dialect
from .mistral import MistralDialect
from .pythonic import PythonicDialect
from .qwen_xml import QwenXmlDialect

HERMES = HermesDialect()

DIALECTS: dict[str, Dialect] = {
    dialect.name: dialect
    for dialect in (
        HERMES,
        Llama3Dialect(),
        MistralDialect(),
        MistralDialect(name="mistral-args", named=True),
        QwenXmlDialect(),
        PythonicDialect(),
        PythonicDialect(name="pythonic-bare", bare=True),
        HarmonyDialect(),
    )
}


class DialectChoice(NamedTuple):
    """A dialect, and why it was chosen, as `doctor` prints it."""

    dialect: Dialect
    reason: str


class _Sign(NamedTuple):
    """Texts that a template must hold for a dialect to be its own."""

    dialect: str
    texts: tuple[str, ...]


# In order, the more special first: Qwen3-Coder and GLM write <tool_call> too, and newer Mistral templates both marks.
_SIGNS = (
    _Sign("harmony", ("<|channel|>", "functions.")),
    _Sign("mistral-args", ("[TOOL_CALLS]", "[ARGS]")),
    _Sign("mistral", ("[TOOL_CALLS]",)),
    _Sign("qwen-xml", ("<function=", "<parameter=")),
    _Sign("pythonic", ("<|tool_call_start|>",)),
    _Sign("pythonic", ("<|tool_list_start|>",)),
    _Sign("hermes", ("<tool_call>",)),
    _Sign("llama3", ("<|python_tag|>",)),
    _Sign("llama3", ("<|start_header_id|>", '"parameters"')),
    _Sign("pythonic-bare", ("[func_name1(",)),
)
# GLM, DeepSeek, Command, Kimi, and Granite or Phi.
_OTHER_FORMS = (
    "<arg_key>",
    "<\uff5ctool\u2581calls\u2581begin\uff5c>",
    "<|START_ACTION|>",
    "<|tool_calls_section_begin|>",
    "<|tool_call|>",
)


def dialect_named(name: str) -> Dialect:
    """Return the dialect of that name. Raises ConfigError with the nearest name where there is none."""
    if name in DIALECTS:
        return DIALECTS[name]
    nearest = difflib.get_close_matches(name, DIALECTS, n=1)
    hint = f"; nearest: {nearest[0]}" if nearest else ""
    raise ConfigError(
        f"no tool-call dialect is named {name!r}; there are {', '.join(DIALECTS)}{hint}",
        key="dialect",
        nearest=nearest[0] if nearest else "",
    )


def choose_dialect(template: str | None) -> DialectChoice:
    """Return the dialect whose markers a template holds; hermes where it holds none that is known."""
    if not template:
        return DialectChoice(HERMES, "the model has no chat template; hermes is the default")
    foreign = next((text for text in _OTHER_FORMS if text in template), None)
    if foreign:
        return DialectChoice(HERMES, f"the template has a form of its own ({foreign}) that is not written here; hermes")
    for sign in _SIGNS:
        if all(text in template for text in sign.texts):
            return DialectChoice(DIALECTS[sign.dialect], f"the template holds {' and '.join(sign.texts)}")
    return DialectChoice(HERMES, "the template holds no marker of a known dialect; hermes is the default")
