"""The probe conversations from which a template's transitions are learnt, as plain values.

Contents, tool names and call ids are sentinels: words that occur nowhere else, so that what stands between two of
them in a render is the template's own. Templates differ in what they accept, so each probe exists in every form that
some public template needs, and all are rendered in one child process.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from .calls import ToolSchema

Message = dict[str, Any]

EDGE_START = " \n\t "
EDGE_END = "\t\n "
MIDDLE = '"q"\\\n'
"""What is put around and into a content to see whether a template trims or escapes it."""


class Sentinels(msgspec.Struct, frozen=True):
    """Words that the template and its inputs do not hold. Letters and digits only, so that no escaping changes one."""

    stem: str

    def content(self, index: int) -> str:
        """Return the content of message `index` (two digits at most, so that no sentinel begins another)."""
        return f"{self.stem}c{index:02d}z"

    def second(self, index: int) -> str:
        """Return the second word of an edgy content."""
        return f"{self.stem}s{index:02d}z"

    def edgy(self, index: int) -> str:
        """Return a content with edges to trim and characters to escape."""
        return EDGE_START + self.content(index) + MIDDLE + self.second(index) + EDGE_END

    def argument(self, call: int) -> str:
        """Return the value of the only argument of call `call`."""
        return f"{self.stem}a{call:02d}z"

    def name(self, call: int) -> str:
        """Return the name of the tool that call `call` is for."""
        return f"{self.stem}n{call:02d}z"

    def call_id(self, call: int) -> str:
        """Return the id of call `call`: 9 characters, which Mistral's templates demand."""
        return f"{self.stem}i{call:02d}"[-9:].rjust(9, "0")

    @property
    def description(self) -> str:
        """The description of every tool: where it shows, the template renders a catalogue."""
        return f"{self.stem}d00z"


def choose_sentinels(*texts: str) -> Sentinels:
    """Return sentinels whose stem is in none of `texts`; the same for the same texts."""
    number = 0
    while any(f"Zq{number:04d}" in text for text in texts):
        number += 1
    return Sentinels(f"Zq{number:04d}")


class ToolsForm(enum.StrEnum):
    """How a template is told that there are no tools, or that there are."""

    OMITTED = "omitted"
    EMPTY = "empty"
    NONE = "none"
    REAL = "real"


class CallForm(msgspec.Struct, frozen=True, kw_only=True):
    """How a call is put to a template: arguments as an object or as JSON text, content empty or None."""

    arguments_as_text: bool = False
    content: str | None = ""

    @property
    def label(self) -> str:
        return f"{'text' if self.arguments_as_text else 'object'}-{'none' if self.content is None else 'empty'}"


CALL_FORMS = tuple(
    CallForm(arguments_as_text=as_text, content=content) for as_text in (False, True) for content in ("", None)
)


class Probe(enum.StrEnum):
    """The probe conversations: U user, R reply, C call, T tool result, S system; the last with the edgy content."""

    OPENING = "U>"
    CHAT = "U R U>"
    USER_END = "U R U"
    REPLY_END = "U R"
    TWO_USERS = "U R U U>"
    SYSTEM = "S U>"
    USER_FORM = "U R U~>"
    REPLY_FORM = "U R~ U>"
    SYSTEM_FORM = "S~ U>"
    # Without a call before it: what a result looks like where the reply's content carries the call.
    PLAIN_RESULT = "U R T>"
    PLAIN_RESULT_END = "U R T"
    PLAIN_RESULTS = "U R T T>"
    PLAIN_RESULT_USER = "U R T U>"
    PLAIN_RESULT_FORM = "U R T~>"


class CallProbe(enum.StrEnum):
    """The probe conversations that hold a call; CC is one message with two."""

    RESULT = "U C T>"
    RESULT_END = "U C T"
    RESULTS = "U CC T T>"
    RESULTS_OF_ONE = "U C T T>"
    RESULT_USER = "U C T U>"
    RESULT_FORM = "U C T~>"


CHAT_SAMPLE = "U R U R U R U R"
TOOL_SAMPLE = "U R U C T R U R U R"
"""What is grown message by message, to see whether appending changes what a template rendered before."""


def probe_requests(sentinels: Sentinels, *, variables: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return every request to render, by its label (`label`)."""
    requests: dict[str, dict[str, Any]] = {}
    for tools in ToolsForm:
        for name, script in _chat_scripts():
            messages = script_messages(script, sentinels, call_form=CALL_FORMS[0])
            requests[label(tools, name)] = request(messages, script, tools, sentinels, variables)
        for form in CALL_FORMS:
            for name, script in _call_scripts(tools):
                messages = script_messages(script, sentinels, call_form=form)
                requests[label(tools, name, form)] = request(messages, script, tools, sentinels, variables)
    return requests


def label(tools: ToolsForm, name: str, form: CallForm | None = None) -> str:
    """Return the name of a probe in one form."""
    return f"{tools} | {name}" if form is None else f"{tools} | {form.label} | {name}"


def growth(script: str) -> tuple[str, ...]:
    """Return the script after each of its messages; a generation prompt follows unless a reply is last."""
    shapes = script.split()
    grown = []
    for length in range(1, len(shapes) + 1):
        ends_in_reply = shapes[length - 1] in ("R", "C")
        grown.append(" ".join(shapes[:length]) + ("" if ends_in_reply else ">"))
    return tuple(grown)


def _chat_scripts() -> Iterator[tuple[str, str]]:
    for probe in Probe:
        yield probe, probe
    for script in growth(CHAT_SAMPLE):
        yield script, script


def _call_scripts(tools: ToolsForm) -> Iterator[tuple[str, str]]:
    for probe in CallProbe:
        yield probe, probe
    if tools in (ToolsForm.OMITTED, ToolsForm.REAL):
        for script in growth(TOOL_SAMPLE):
            if "C" in script:
                yield script, script


def script_messages(script: str, sentinels: Sentinels, *, call_form: CallForm) -> list[Message]:
    """Return the messages of a script; the content of the n-th message (from 0) is sentinel n."""
    messages: list[Message] = []
    calls = results = 0
    for index, shape in enumerate(script.removesuffix(">").split()):
        content = sentinels.edgy(index) if shape.endswith("~") else sentinels.content(index)
        match shape.removesuffix("~"):
            case "S":
                messages.append({"role": "system", "content": content})
            case "U":
                messages.append({"role": "user", "content": content})
            case "R":
                messages.append({"role": "assistant", "content": content})
            case "T":
                results += 1
                messages.append(_result(content, results, sentinels))
            case called:
                numbers = range(calls + 1, calls + 1 + len(called))
                calls += len(called)
                entries = [_call(number, sentinels, as_text=call_form.arguments_as_text) for number in numbers]
                messages.append({"role": "assistant", "content": call_form.content, "tool_calls": entries})
    return messages


def _call(number: int, sentinels: Sentinels, *, as_text: bool) -> dict[str, Any]:
    arguments = {"path": sentinels.argument(number)}
    function = {"name": sentinels.name(number), "arguments": json.dumps(arguments) if as_text else arguments}
    return {"id": sentinels.call_id(number), "type": "function", "function": function}


def _result(content: str, number: int, sentinels: Sentinels) -> Message:
    return {
        "role": "tool",
        "name": sentinels.name(number),
        "tool_call_id": sentinels.call_id(number),
        "content": content,
    }


def request(
    messages: Sequence[Message],
    script: str,
    tools: ToolsForm,
    sentinels: Sentinels,
    variables: Mapping[str, Any],
) -> dict[str, Any]:
    """Return the variables of one render; a script that ends in ``>`` asks for the generation prompt."""
    real = [_probe_tool(number, sentinels).as_function() for number in (1, 2)] if tools is ToolsForm.REAL else []
    return template_request(messages, tools=tools, functions=real, variables=variables, prompt=script.endswith(">"))


def template_request(
    messages: Sequence[Message],
    *,
    tools: ToolsForm,
    functions: Sequence[Mapping[str, Any]],
    variables: Mapping[str, Any],
    prompt: bool,
) -> dict[str, Any]:
    """Return the variables of one render. `functions` are the catalogue's entries where `tools` is REAL."""
    built: dict[str, Any] = {
        **variables,
        "messages": list(messages),
        "add_generation_prompt": prompt,
        # As text, which firefunction's template takes its catalogue from.
        "functions": json.dumps(functions, indent=2, ensure_ascii=False),
    }
    if tools is not ToolsForm.OMITTED:
        built["tools"] = None if tools is ToolsForm.NONE else list(functions)
    return built


def _probe_tool(number: int, sentinels: Sentinels) -> ToolSchema:
    path = {"type": "string", "description": "A path."}
    parameters = {"type": "object", "properties": {"path": path}, "required": ["path"]}
    return ToolSchema(name=sentinels.name(number), description=sentinels.description, parameters=parameters)
