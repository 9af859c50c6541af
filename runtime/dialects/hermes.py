"""Hermes: ``<tool_call>{"name": …, "arguments": …}</tool_call>``. Qwen 2.5 and 3, Hermes, SmolLM; the default.

The form is that of the Hermes 2 Pro prompt format. It is also what a template without tool support is taught, by a
catalogue in the system text.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from ..calls import CallableTool, ParsedReply, Piece, ToolChoice, ToolSchema
from ..chat_format import ReasoningMarks
from ..engine import Grammar, Trigger
from ..grammar import SPACE, RuleBook, literal
from ..schema import describe_members, resolve
from ..strict_json import Unreadable, skip_space
from .json_calls import call_json, call_members, read_calls
from .offer import example_of, offered
from .reading import CallBlock, problem_at, take_apart

OPENING, CLOSING = "<tool_call>", "</tool_call>"

_TAG = re.compile(f"{OPENING}|{CLOSING}")
_LEFTOVERS = re.compile(r"[\s}\]`]*")
_FENCE = re.compile(r"```(?:json)?\s*")


@dataclass(frozen=True, slots=True)
class HermesDialect:
    """Calls as tagged JSON. Satisfies the `Dialect` protocol."""

    name: str = "hermes"

    def grammar(self, tools: Sequence[CallableTool], *, choice: ToolChoice) -> Grammar | None:
        offer = offered(tools, choice)
        if offer is None:
            return None
        rules = RuleBook()
        members = call_members(rules, offer.tools, arguments_key="arguments")
        root = f'{SPACE} "{{" {SPACE} {members} {SPACE} "}}" {SPACE} {literal(CLOSING)}'
        return Grammar(gbnf=rules.render(root), triggers=(Trigger(text=OPENING),), required=offer.required)

    def parse(self, reply: str, *, reasoning: ReasoningMarks | None) -> ParsedReply:
        return take_apart(reply, reasoning=reasoning, next_block=self._next_block)

    def render_call(self, name: str, arguments: dict[str, object]) -> tuple[Piece, ...]:
        body = Piece(f"\n{call_json(name, arguments, arguments_key='arguments')}\n")
        return (Piece(OPENING, markup=True), body, Piece(CLOSING, markup=True))

    def expected_shape(self, tool: ToolSchema | None) -> str:
        return example_of(tool, self.render_call)

    def _next_block(self, reply: str, position: int, _at_start: bool) -> CallBlock | None:
        start = reply.find(OPENING, position)
        if start < 0:
            return None
        body = start
        while reply.startswith(OPENING, body):
            body = skip_space(reply, body + len(OPENING))
        fence = _FENCE.match(reply, body)
        try:
            calls, end = read_calls(reply, fence.end() if fence else body, start=start, separators=",")
            end = _behind_leftovers(reply, end)
        except Unreadable as broken:
            end = _end_of_broken(reply, max(body, broken.position))
            problem = problem_at(reply, start, end, broken, expected=self.expected_shape(None))
            return CallBlock(start=start, end=end, problems=(problem,))
        while reply.startswith(CLOSING, skip_space(reply, end)):
            end = skip_space(reply, end) + len(CLOSING)
        return CallBlock(start=start, end=end, calls=tuple(calls))


def render_catalogue(tools: Sequence[ToolSchema]) -> str:
    """Return the text that teaches a model without tool support: how to call, and a line for each tool.

    Signatures, since a schema in JSON takes about three times as many tokens. The same tools give the same bytes.
    """
    lines = [
        f"- {tool.name}({describe_members(resolve(tool.parameters, tool.parameters), tool.parameters)}): "
        f"{tool.description}"
        for tool in tools
    ]
    return (
        "# Tools\n"
        "To use a tool, write its name and arguments as JSON between tags, then stop; its result comes next:\n"
        f'{OPENING}\n{{"name": "TOOL", "arguments": {{"ARGUMENT": "VALUE"}}}}\n{CLOSING}\n'
        "An argument marked ? may be left out. The tools:\n" + "\n".join(lines)
    )


def _behind_leftovers(reply: str, position: int) -> int:
    """Return the offset behind brackets too many. A missing closing tag is let pass, text before one is not."""
    leftovers = _LEFTOVERS.match(reply, position)
    end = leftovers.end() if leftovers else position
    tag = _TAG.search(reply, end)
    if tag and tag.group() == CLOSING and tag.start() > end:
        raise Unreadable(f"text stands between the JSON object and {CLOSING}", end)
    return end


def _end_of_broken(reply: str, position: int) -> int:
    """Return where a call that broke at `position` ends: behind its closing tag, or before the next call."""
    tag = _TAG.search(reply, position)
    if tag is None:
        return len(reply)
    return tag.end() if tag.group() == CLOSING else tag.start()
