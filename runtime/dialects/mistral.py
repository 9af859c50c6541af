"""Mistral: ``[TOOL_CALLS]`` before a list of JSON calls, or before ``name[ARGS]{…}`` in newer models.

The list is the form up to version 7 of their tokenizers (Mistral 7B v0.3 to Small 3.1), the other one that of version
11 and later (Small 3.2, Ministral 3, Devstral 2), which a call id may interrupt: ``name[CALL_ID]…[ARGS]{…}``. Both are
read; the template's markers say which is written.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from ..calls import CallableTool, ParsedCall, ParsedReply, Piece, ToolChoice, ToolSchema
from ..chat_format import ReasoningMarks
from ..engine import Grammar, Trigger
from ..grammar import SPACE, RuleBook, TrieEntry, trie
from ..grammar_json import arguments_object, json_text
from ..strict_json import Unreadable, read_json, skip_space
from .json_calls import MAX_CALLS_IN_LIST, call_json, call_members, read_calls
from .offer import Offer, example_of, offered
from .reading import CallBlock, problem_at, take_apart

OPENING, ARGUMENTS, CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"

_CALL_ID_RULE = "[A-Za-z0-9]{9}"
_NAMED_CALL = re.compile(r"([^\s\[\]{}]+)\s*(?:\[CALL_ID\]\s*[A-Za-z0-9]*\s*)?(?:\[ARGS\])?\s*(?=\{)")


@dataclass(frozen=True, slots=True)
class MistralDialect:
    """Calls behind ``[TOOL_CALLS]``: `named` in the newer form, else as a list. Satisfies the `Dialect` protocol."""

    name: str = "mistral"
    named: bool = False

    def grammar(self, tools: Sequence[CallableTool], *, choice: ToolChoice) -> Grammar | None:
        offer = offered(tools, choice)
        if offer is None:
            return None
        rules = RuleBook()
        root = self._named_root(rules, offer) if self.named else self._list_root(rules, offer)
        return Grammar(gbnf=rules.render(root), triggers=(Trigger(text=OPENING),), required=offer.required)

    def parse(self, reply: str, *, reasoning: ReasoningMarks | None) -> ParsedReply:
        return take_apart(reply, reasoning=reasoning, next_block=self._next_block)

    def render_call(self, name: str, arguments: dict[str, object]) -> tuple[Piece, ...]:
        opening = Piece(OPENING, markup=True)
        if self.named:
            return (opening, Piece(name), Piece(ARGUMENTS, markup=True), Piece(json_text(arguments)))
        return (opening, Piece(f"[{call_json(name, arguments, arguments_key='arguments')}]"))

    def expected_shape(self, tool: ToolSchema | None) -> str:
        return example_of(tool, self.render_call)

    def _list_root(self, rules: RuleBook, offer: Offer) -> str:
        call_id = rules.add("id", f'("," {SPACE} "\\"id\\":" {SPACE} "\\"" {_CALL_ID_RULE} "\\"")?')
        members = call_members(rules, offer.tools, arguments_key="arguments", ending=call_id)
        call = rules.add("call", f'"{{" {SPACE} {members} {SPACE} "}}"')
        return f'" "? "[" {SPACE} {call} ("," {SPACE} {call}){{0,{MAX_CALLS_IN_LIST - 1}}} {SPACE} "]"'

    def _named_root(self, rules: RuleBook, offer: Offer) -> str:
        before = rules.add("arguments", f'("{CALL_ID}" {_CALL_ID_RULE})? "{ARGUMENTS}"')
        entries = (TrieEntry(tool.schema.name, f"{before} {arguments_object(rules, tool)}") for tool in offer.tools)
        return f'" "? {trie(rules, "name", entries)}'

    def _next_block(self, reply: str, position: int, _at_start: bool) -> CallBlock | None:
        start = reply.find(OPENING, position)
        if start < 0:
            return None
        body = start
        while reply.startswith(OPENING, body):
            body = skip_space(reply, body + len(OPENING))
        try:
            named = _NAMED_CALL.match(reply, body)
            if named:
                arguments, end = read_json(reply, named.end())
                calls = [ParsedCall(name=named.group(1), arguments=arguments, raw=reply[start:end])]
            else:
                calls, end = read_calls(reply, body, start=start, separators=",")
        except Unreadable as broken:
            end = reply.find(OPENING, max(body, broken.position))
            end = len(reply) if end < 0 else end
            problem = problem_at(reply, start, end, broken, expected=self.expected_shape(None))
            return CallBlock(start=start, end=end, problems=(problem,))
        return CallBlock(start=start, end=end, calls=tuple(calls))
