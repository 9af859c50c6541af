"""Pythonic: ``[f(a=1), g(b="x")]``, in LFM2 between ``<|tool_call_start|>`` and ``<|tool_call_end|>``.

The form is that of the LFM2 chat templates, one of which writes JSON calls between the same tags: both are read.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..calls import CallableTool, ParsedCall, ParsedReply, Piece, ToolChoice, ToolSchema
from ..chat_format import ReasoningMarks
from ..engine import Grammar, Trigger
from ..grammar import RuleBook, TrieEntry, arrange, literal, trie
from ..grammar_json import SchemaRules
from ..schema import resolve
from ..strict_json import Unreadable, skip_space
from .json_calls import MAX_CALLS_IN_LIST, read_calls
from .offer import example_of, offered
from .python_literals import PYTHON_FORM, python_text, read_literal, skip_comma
from .reading import CallBlock, problem_at, take_apart

OPENING, CLOSING = "<|tool_call_start|>", "<|tool_call_end|>"

_SEPARATOR = '"," " "?'
_NAME = re.compile(r"([^\s()\[\]{}='\",<>]+)\s*\(")
_KEY = re.compile(r"([^\s()\[\]{}='\",<>]+)\s*=\s*")
_LIST_BEGINS = re.compile(r"\[\s*[^\s()\[\]{}='\",<>]+\(")


@dataclass(frozen=True, slots=True)
class PythonicDialect:
    """Calls as a list of Python calls; `bare` without the tags around it. Satisfies the `Dialect` protocol."""

    name: str = "pythonic"
    bare: bool = False

    def grammar(self, tools: Sequence[CallableTool], *, choice: ToolChoice) -> Grammar | None:
        offer = offered(tools, choice)
        if offer is None:
            return None
        rules = RuleBook()
        entries = (TrieEntry(f"{tool.schema.name}(", f'{_keywords(rules, tool)} ")"') for tool in offer.tools)
        call = rules.add("call", trie(rules, "name", entries))
        root = f'{call} ({_SEPARATOR} {call}){{0,{MAX_CALLS_IN_LIST - 1}}} "]"'
        trigger = Trigger(text="[", at_start=True) if self.bare else Trigger(text=f"{OPENING}[")
        return Grammar(gbnf=rules.render(root), triggers=(trigger,), required=offer.required)

    def parse(self, reply: str, *, reasoning: ReasoningMarks | None) -> ParsedReply:
        return take_apart(reply, reasoning=reasoning, next_block=self._next_block)

    def render_call(self, name: str, arguments: dict[str, object]) -> tuple[Piece, ...]:
        keywords = ", ".join(f"{key}={python_text(value)}" for key, value in arguments.items())
        call = Piece(f"[{name}({keywords})]")
        return (call,) if self.bare else (Piece(OPENING, markup=True), call, Piece(CLOSING, markup=True))

    def expected_shape(self, tool: ToolSchema | None) -> str:
        return example_of(tool, self.render_call)

    def _next_block(self, reply: str, position: int, at_start: bool) -> CallBlock | None:
        start = reply.find(OPENING, position)
        bare = skip_space(reply, position) if self.bare and at_start else -1
        if bare >= 0 and _LIST_BEGINS.match(reply, bare):
            start = body = bare
        elif start >= 0:
            body = skip_space(reply, start + len(OPENING))
        else:
            return None
        try:
            calls, end = _read_block(reply, body, start)
        except Unreadable as broken:
            closing = reply.find(CLOSING, max(body, broken.position))
            end = len(reply) if closing < 0 else closing + len(CLOSING)
            problem = problem_at(reply, start, end, broken, expected=self.expected_shape(None))
            return CallBlock(start=start, end=end, problems=(problem,))
        while reply.startswith(CLOSING, skip_space(reply, end)):
            end = skip_space(reply, end) + len(CLOSING)
        return CallBlock(start=start, end=end, calls=tuple(calls))


def _read_block(text: str, position: int, start: int) -> tuple[list[ParsedCall], int]:
    """Read a list of calls, in Python or in JSON, or one call without the list."""
    inner = skip_space(text, position + 1)
    if text.startswith("{", position) or (text.startswith("[", position) and text.startswith("{", inner)):
        return read_calls(text, position, start=start, separators=",")
    if not text.startswith("[", position):
        call, end = _read_call(text, position, start)
        return [call], end
    calls: list[ParsedCall] = []
    position = inner
    while not text.startswith("]", position):
        call, end = _read_call(text, position, start)
        calls.append(call)
        start, position = end, skip_comma(text, end, closing="]")
    if not calls:
        raise Unreadable("the list of calls is empty", position)
    return calls, position + 1


def _read_call(text: str, position: int, start: int) -> tuple[ParsedCall, int]:
    found = _NAME.match(text, position)
    if found is None:
        raise Unreadable("a call must be NAME(ARGUMENT=VALUE, …)", position)
    arguments: dict[str, Any] = {}
    position = skip_space(text, found.end())
    while not text.startswith(")", position):
        key = _KEY.match(text, position)
        if key is None or key.group(1) in arguments:
            raise Unreadable("an argument must be written ARGUMENT=VALUE, and once", position)
        arguments[key.group(1)], position = read_literal(text, key.end())
        position = skip_comma(text, position, closing=")")
    return ParsedCall(name=found.group(1), arguments=arguments, raw=text[start : position + 1]), position + 1


def _keywords(rules: RuleBook, tool: CallableTool) -> str:
    root = tool.schema.parameters
    members = SchemaRules(rules, root, PYTHON_FORM).members(
        resolve(root, root), known=tool.grounded, lead=lambda key: literal(f"{key}=")
    )
    return arrange(rules, "keywords", members, separator=_SEPARATOR)
