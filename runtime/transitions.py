"""Learns a model's chat format from its template, once: what stands between two messages, whatever came before.

A template is never used to render a conversation. It is probed with sentinels in a child process, and the text
between two sentinels is the transition of that pair of shapes (the method, and what 70 public templates need, is in
`transition_probes` and `template_split`).
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping
from pathlib import Path

import msgspec

from .chat_format import ChatFormat
from .chatml import ResultWrapper, chatml_format
from .template_cache import cache_key, load_cached, store_cached
from .template_render import FROZEN_NOW, render_all
from .template_split import CannotSplit, Renders, split_template
from .transition_probes import choose_sentinels, probe_requests

_log = logging.getLogger(__name__)

LEARNER_VERSION = 1
"""Goes up with every change of what is learnt, so that a cached format of an older version is not used."""

TemplateVariable = bool | int | str

_SWITCHES = (
    "enable_thinking",
    "thinking",
    "thinking_mode",
    "thinking_budget",
    "reasoning_effort",
    "reasoning_strength",
    "preserve_thinking",
    "clear_thinking",
    "date_string",
    "current_date",
    "model_identity",
    "builtin_tools",
    "custom_tools",
    "tools_in_user_message",
    "documents",
)
_UNSET = "unset"
_NOW = "strftime_now"


def learn_chat_format(
    template: str | None,
    *,
    bos_text: str,
    eos_text: str,
    cache_folder: Path | None,
    result_wrapper: ResultWrapper | None = None,
    variables: Mapping[str, TemplateVariable] | None = None,
) -> ChatFormat:
    """Return how `template` separates messages; ChatML where there is none, or where it cannot be split.

    The texts of BOS and EOS are the vocabulary's. `result_wrapper` is for templates without a role for results.
    `variables` are further values that the template may look at (``enable_thinking``); they are frozen in the
    format. Raises TemplateRefused where the template is hostile (`template_render.render_all`).
    """
    wrapper = result_wrapper or ResultWrapper()
    given = dict(variables or {})
    key = cache_key("format", LEARNER_VERSION, template, bos_text, eos_text, wrapper, given)
    if template is None or not template.strip():
        return chatml_format(template_hash=key, fallback_reason="", wrapper=wrapper)
    chat_format = load_cached(cache_folder, key, value_type=ChatFormat)
    if chat_format is None or chat_format.template_hash != key:
        chat_format = _learn(template, key, bos_text=bos_text, eos_text=eos_text, wrapper=wrapper, given=given)
        store_cached(cache_folder, key, chat_format)
    if chat_format.fallback_reason:
        _log.warning("The model's chat template is not used, ChatML is: %s.", chat_format.fallback_reason)
    return chat_format


def _learn(
    template: str,
    key: str,
    *,
    bos_text: str,
    eos_text: str,
    wrapper: ResultWrapper,
    given: Mapping[str, TemplateVariable],
) -> ChatFormat:
    sentinels = choose_sentinels(template, bos_text, eos_text, json.dumps(given))
    requests = probe_requests(sentinels, variables={**given, "bos_token": bos_text, "eos_token": eos_text})
    results = render_all(template, list(requests.values()))
    renders = Renders(results=dict(zip(requests, results, strict=True)), sentinels=sentinels, eos_text=eos_text)
    learnt = split_template(template, renders, template_hash=key, wrapper=wrapper)
    if isinstance(learnt, CannotSplit):
        return chatml_format(template_hash=key, fallback_reason=learnt.reason, wrapper=wrapper)
    return msgspec.structs.replace(learnt, variables=_frozen(template, given))


def _frozen(template: str, given: Mapping[str, TemplateVariable]) -> dict[str, str]:
    """Return what the template could see, as JSON texts; a known switch that it asks for and did not get is unset."""
    asked = {name: _UNSET for name in _SWITCHES if re.search(rf"\b{name}\b", template)}
    return {_NOW: FROZEN_NOW, **asked, **{name: json.dumps(value) for name, value in given.items()}}


def given_variables(chat_format: ChatFormat) -> dict[str, TemplateVariable]:
    """Return the variables that were given to `learn_chat_format`, for another render of the same template."""
    return {
        name: json.loads(value) for name, value in chat_format.variables.items() if name != _NOW and value != _UNSET
    }
