"""Llama 3: bare JSON ``{"name": …, "parameters": …}``, at times behind ``<|python_tag|>``.

The form is that of the chat templates of Llama 3.1, 3.2 and 3.3. A reply that begins with a brace is held to be a
call, and constrained to be one; a JSON object further on, or one that a remote engine wrote freely, is a call if it
has both a name and parameters.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from ..calls import CallableTool, ParsedReply, Piece, ToolChoice, ToolSchema
from ..chat_format import ReasoningMarks
from ..engine import Grammar, Trigger
from ..grammar import SPACE, RuleBook
from ..strict_json import Unreadable, skip_space
from .json_calls import call_json, call_members, read_calls
from .offer import example_of, offered
from .reading import CallBlock, problem_at, take_apart

PYTHON_TAG = "<|python_tag|>"

_CALL_BEGINS = re.compile(r'<\|python_tag\|>\s*\{|\{\s*"(?:name|type|function)"\s*:')
_ARGUMENTS = re.compile(r'"(?:parameters|arguments)"\s*:')


@dataclass(frozen=True, slots=True)
class Llama3Dialect:
    """Calls as bare JSON. Satisfies the `Dialect` protocol."""

    name: str = "llama3"

    def grammar(self, tools: Sequence[CallableTool], *, choice: ToolChoice) -> Grammar | None:
        offer = offered(tools, choice)
        if offer is None:
            return None
        rules = RuleBook()
        root = f'{SPACE} {call_members(rules, offer.tools, arguments_key="parameters")} {SPACE} "}}"'
        triggers = (Trigger(text="{", at_start=True), Trigger(text=f"{PYTHON_TAG}{{"))
        return Grammar(gbnf=rules.render(root), triggers=triggers, required=offer.required)

    def parse(self, reply: str, *, reasoning: ReasoningMarks | None) -> ParsedReply:
        return take_apart(reply, reasoning=reasoning, next_block=self._next_block)

    def render_call(self, name: str, arguments: dict[str, object]) -> tuple[Piece, ...]:
        return (Piece(call_json(name, arguments, arguments_key="parameters")),)

    def expected_shape(self, tool: ToolSchema | None) -> str:
        return example_of(tool, self.render_call)

    def _next_block(self, reply: str, position: int, at_start: bool) -> CallBlock | None:
        first = skip_space(reply, position) if at_start else -1
        while found := _CALL_BEGINS.search(reply, position):
            start, tagged = found.start(), reply.startswith(PYTHON_TAG, found.start())
            body = reply.index("{", start)
            try:
                calls, end = read_calls(reply, body, start=start, separators=";,", need_arguments=not tagged)
            except Unreadable as broken:
                if tagged or (start == first and _ARGUMENTS.search(reply, body)):
                    problem = problem_at(reply, start, len(reply), broken, expected=self.expected_shape(None))
                    return CallBlock(start=start, end=len(reply), problems=(problem,))
                position = max(body + 1, broken.position)
                continue
            return CallBlock(start=start, end=end, calls=tuple(calls))
        return None
