"""Qwen XML: ``<function=…><parameter=…>`` inside ``<tool_call>``. Qwen3-Coder, Qwen3.5.

The form is that of the chat template of Qwen3-Coder. Values stand between their tags as they are, without escapes, so
that every one is read as text; the check of arguments gives it the type that the schema wants. A value that holds the
closing tag cannot be written in this dialect.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..calls import CallableTool, ParsedCall, ParsedReply, Piece, ToolChoice, ToolSchema
from ..chat_format import ReasoningMarks
from ..engine import Grammar, Trigger
from ..grammar import Member, RuleBook, TrieEntry, arrange, either, literal, trie
from ..grammar_json import SchemaRules, json_text, usable_values
from ..schema import branches, choices, resolve, type_of
from ..strict_json import Unreadable, skip_space
from .offer import example_of, offered
from .reading import CallBlock, problem_at, take_apart

OPENING, CLOSING = "<tool_call>", "</tool_call>"
FUNCTION, FUNCTION_END = "<function=", "</function>"
PARAMETER, PARAMETER_END = "<parameter=", "</parameter>"

_NEWLINE = literal("\n")
_VALUE_END = f"\n{PARAMETER_END}\n"
_CONTROL = r"\x00-\x08\x0B\x0C\x0E-\x1F"
_BEGINS = re.compile(rf"(?:{OPENING}\s*)+(?:{FUNCTION})?|{FUNCTION}")
_TAG_NAME = re.compile(r"([^<>\n]+)>")
_ENDS = re.compile(rf"{CLOSING}|{OPENING}")


@dataclass(frozen=True, slots=True)
class QwenXmlDialect:
    """Calls as tags. Satisfies the `Dialect` protocol."""

    name: str = "qwen-xml"

    def grammar(self, tools: Sequence[CallableTool], *, choice: ToolChoice) -> Grammar | None:
        offer = offered(tools, choice)
        if offer is None:
            return None
        rules = RuleBook()
        text = _text_until_closed(rules)
        entries = (TrieEntry(f"{tool.schema.name}>\n", _parameters(rules, tool, text=text)) for tool in offer.tools)
        ending = literal(f"{FUNCTION_END}\n{CLOSING}")
        root = f'"\\n"? {literal(FUNCTION)} {trie(rules, "name", entries)} {ending}'
        return Grammar(gbnf=rules.render(root), triggers=(Trigger(text=OPENING),), required=offer.required)

    def parse(self, reply: str, *, reasoning: ReasoningMarks | None) -> ParsedReply:
        return take_apart(reply, reasoning=reasoning, next_block=self._next_block)

    def render_call(self, name: str, arguments: dict[str, object]) -> tuple[Piece, ...]:
        values = "".join(f"{PARAMETER}{key}>\n{_value_text(value)}{_VALUE_END}" for key, value in arguments.items())
        body = Piece(f"\n{FUNCTION}{name}>\n{values}{FUNCTION_END}\n")
        return (Piece(OPENING, markup=True), body, Piece(CLOSING, markup=True))

    def expected_shape(self, tool: ToolSchema | None) -> str:
        return example_of(tool, self.render_call)

    def _next_block(self, reply: str, position: int, _at_start: bool) -> CallBlock | None:
        found = _BEGINS.search(reply, position)
        if found is None:
            return None
        start = found.start()
        try:
            if not found.group().endswith(FUNCTION):
                raise Unreadable(f"{OPENING} is not followed by {FUNCTION}NAME>", found.end())
            call, end = _read_function(reply, found.end(), start)
        except Unreadable as broken:
            ending = _ENDS.search(reply, max(found.end(), broken.position))
            end = len(reply) if ending is None else ending.end() if ending.group() == CLOSING else ending.start()
            problem = problem_at(reply, start, end, broken, expected=self.expected_shape(None))
            return CallBlock(start=start, end=end, problems=(problem,))
        while reply.startswith((FUNCTION_END, CLOSING), skip_space(reply, end)):
            end = reply.index(">", end) + 1
        return CallBlock(start=start, end=end, calls=(call,))


def _read_function(reply: str, position: int, start: int) -> tuple[ParsedCall, int]:
    """Read from behind ``<function=`` to before the closing tags."""
    name, position = _read_name(reply, position)
    arguments: dict[str, Any] = {}
    while reply.startswith(PARAMETER, position := skip_space(reply, position)):
        key, value_start = _read_name(reply, position + len(PARAMETER))
        value_end = reply.find(PARAMETER_END, value_start)
        if value_end < 0:
            raise Unreadable(f"the parameter {key!r} is not closed by {PARAMETER_END}", value_start)
        if key in arguments:
            raise Unreadable(f"the parameter {key!r} occurs twice", position)
        arguments[key] = reply[value_start:value_end].removeprefix("\n").removesuffix("\n")
        position = value_end + len(PARAMETER_END)
    if position < len(reply) and not reply.startswith((FUNCTION_END, CLOSING), position):
        raise Unreadable(f"neither {PARAMETER}NAME> nor {FUNCTION_END} follows", position)
    return ParsedCall(name=name, arguments=arguments, raw=reply[start:position]), position


def _read_name(reply: str, position: int) -> tuple[str, int]:
    found = _TAG_NAME.match(reply, position)
    if found is None:
        raise Unreadable("a tag has no name, or is not closed by >", position)
    return found.group(1).strip(), found.end()


def _value_text(value: object) -> str:
    text = value if isinstance(value, str) else json_text(value)
    return text.replace(PARAMETER_END, f"&lt;{PARAMETER_END[1:]}")  # or it would end here, and forge another


def _parameters(rules: RuleBook, tool: CallableTool, *, text: str) -> str:
    root = tool.schema.parameters
    schema = resolve(root, root)
    writer = SchemaRules(rules, root)
    members = []
    for key, part in schema.get("properties", {}).items():
        value = _value(writer, part, tool.grounded.get(key)) or text
        members.append(Member(f"{literal(f'{PARAMETER}{key}>')} {_NEWLINE} {value}", key in schema.get("required", ())))
    return arrange(rules, "parameters", members, separator="")


def _value(writer: SchemaRules, schema: Any, known: Sequence[str] | None) -> str:
    """Return the GBNF of a value and its closing tag; empty where any text will do."""
    schema = resolve(schema, writer.root)
    listed = choices(schema)
    if listed is not None:
        return _constants(writer.rules, listed)
    parts = [_value(writer, part, known) for part in branches(schema)]
    if parts:
        return either(parts) if all(parts) else ""  # where one part takes any text, nothing tells the others from it
    if type_of(schema) in ("string", ""):
        offered = usable_values(known)
        return writer.rules.once(("known", offered), lambda: _constants(writer.rules, offered)) if offered else ""
    return f"{writer.value(schema, known=known)} {literal(_VALUE_END)}"


def _constants(rules: RuleBook, values: Sequence[Any]) -> str:
    texts = (value if isinstance(value, str) else json_text(value) for value in values)
    return trie(rules, "constant", (TrieEntry(f"{text}{_VALUE_END}") for text in texts))


def _text_until_closed(rules: RuleBook) -> str:
    """Return a reference to rules for any text up to and with the first closing tag.

    One rule for each length of the tag's beginning that was just read. Its first character occurs in it only once, so
    a mismatch leaves at most that one.
    """
    first = PARAMETER_END[0]
    names = [rules.reserve("text") for _ in PARAMETER_END]
    for index, expected in enumerate(PARAMETER_END):
        go_on = names[index + 1] if index + 1 < len(names) else _NEWLINE
        options = [f"{literal(expected)} {go_on}", f"[^{first}{expected}{_CONTROL}] {names[0]}"]
        if index:
            options.append(f"{literal(first)} {names[1]}")
        rules.define(names[index], " | ".join(options))
    return names[0]
