"""What `doctor` says of a model's template: what it can do, and what rendering it anew would have cost."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from .append_kind import RerenderCost, rerender_cost
from .calls import ToolSchema
from .chat_format import AppendKind, ChatFormat
from .template_render import render_all
from .transition_probes import CALL_FORMS, CallForm, ToolsForm, template_request
from .transitions import given_variables

_PATH = {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}
_SAMPLE_TOOLS = (
    ToolSchema(name="read", description="Read a file of the workspace.", parameters=_PATH),
    ToolSchema(name="list", description="List the files of a folder.", parameters=_PATH),
)
_SAMPLE_ID = "call00001"
_FILE = "\n".join(f"{number:3}  total = total + value_{number}" for number in range(1, 41))
_PLAIN_SAMPLE: tuple[tuple[str, str], ...] = (
    ("system", "You work in a folder of files. Look before you answer, and answer briefly."),
    ("user", "What does the file sum.py compute? I expect it to add up a column of numbers, but I am not sure."),
    ("assistant", "It adds up forty values, one line for each, and keeps the sum in the name total."),
    ("user", "Could the same be written with a loop?"),
    ("assistant", "Yes: put the values into a list, go through it, and add each one to the total."),
    ("user", "Then do so, please."),
    ("assistant", "Done. The file is four lines long now, and prints the same sum."),
    ("user", "Thank you. Which test covers it?"),
)


class TemplateDescription(msgspec.Struct, frozen=True, kw_only=True):
    """A template for a person to read. `rerender` is None where it does not render the sample conversation."""

    origin: str
    fallback_reason: str
    append_kind: AppendKind
    tools_native: bool
    system_native: bool
    reasoning: str
    variables: dict[str, str]
    rerender: RerenderCost | None


def describe_template(
    template: str | None, chat_format: ChatFormat, *, bos_text: str, eos_text: str
) -> TemplateDescription:
    """Describe `template`, from which `chat_format` was learnt. Raises TemplateRefused where it is hostile."""
    reasoning = chat_format.reasoning
    variables = {**given_variables(chat_format), "bos_token": bos_text, "eos_token": eos_text}
    tools = ToolsForm.REAL if chat_format.tools_native else ToolsForm.OMITTED
    used = template if chat_format.origin == "template" else None
    return TemplateDescription(
        origin=chat_format.origin,
        fallback_reason=chat_format.fallback_reason,
        append_kind=chat_format.append_kind,
        tools_native=chat_format.tools_native,
        system_native=chat_format.system_native,
        reasoning=f"{reasoning.begin}…{reasoning.end}" if reasoning else "",
        variables=dict(chat_format.variables),
        rerender=_measure(used, tools, variables) if used is not None else None,
    )


def _measure(template: str, tools: ToolsForm, variables: Mapping[str, Any]) -> RerenderCost | None:
    """Render the sample request by request, with a tool's result in it if the template takes one in some form."""
    plain = (_messages(_PLAIN_SAMPLE), _messages(_PLAIN_SAMPLE[1:]))
    samples = [*(_with_call(form) for form in CALL_FORMS), *plain]
    jobs = [_growth_requests(sample, tools, variables) for sample in samples]
    results = iter(render_all(template, [request for job in jobs for request in job]))
    for sample, job in zip(samples, jobs, strict=True):
        texts = [next(results).text for _ in job]
        if all(text is not None for text in texts):
            return _cost(sample, [text or "" for text in texts])
    return None


def _messages(turns: Sequence[tuple[str, str]]) -> list[dict[str, Any]]:
    return [{"role": role, "content": content} for role, content in turns]


def _with_call(form: CallForm) -> list[dict[str, Any]]:
    """Return the sample with a call and its result before the first reply."""
    arguments = {"path": "sum.py"}
    function = {"name": "read", "arguments": json.dumps(arguments) if form.arguments_as_text else arguments}
    call = {"id": _SAMPLE_ID, "type": "function", "function": function}
    rounds: list[dict[str, Any]] = [
        {"role": "assistant", "content": form.content, "tool_calls": [call]},
        {"role": "tool", "name": "read", "tool_call_id": _SAMPLE_ID, "content": _FILE},
    ]
    plain = _messages(_PLAIN_SAMPLE)
    return [*plain[:2], *rounds, *plain[2:]]


def _growth_requests(
    sample: Sequence[Mapping[str, Any]], tools: ToolsForm, variables: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """Return a render for each message but the system's: with the generation prompt unless the model wrote it."""
    functions = [tool.as_function() for tool in _SAMPLE_TOOLS]
    return [
        template_request(
            [dict(message) for message in sample[: last + 1]],
            tools=tools,
            functions=functions if tools is ToolsForm.REAL else [],
            variables=variables,
            prompt=sample[last]["role"] != "assistant",
        )
        for last in _grown(sample)
    ]


def _grown(sample: Sequence[Mapping[str, Any]]) -> list[int]:
    return [index for index, message in enumerate(sample) if message["role"] != "system"]


def _cost(sample: Sequence[Mapping[str, Any]], texts: Sequence[str]) -> RerenderCost:
    """Take the renders apart into requests and what was known after each one's reply."""
    requests: list[str] = []
    replies: list[str] = []
    for last, text in zip(_grown(sample), texts, strict=True):
        if sample[last]["role"] != "assistant":
            requests.append(text)
            continue
        # What the model wrote ends with its content; of a call, which the template spells, nothing is assumed.
        content = sample[last]["content"] or ""
        written = text.rfind(content) + len(content) if content and content in text else 0
        replies.append(text[:written])
    return rerender_cost(requests, replies)
