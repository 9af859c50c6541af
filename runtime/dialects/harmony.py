"""Harmony: messages in channels, a call being one that is addressed to a function. gpt-oss.

``<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{…}<|call|>``, from OpenAI's description of the
format; the chat template of gpt-oss writes the recipient before the channel instead. ``<|call|>`` and ``<|return|>``
end the generation, so that a reply does not hold them. ``analysis`` is reasoning; ``final``, and ``commentary``
without a recipient, is text.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from ..calls import CallableTool, CallProblem, ParsedCall, ParsedReply, Piece, ToolChoice, ToolSchema
from ..chat_format import ReasoningMarks
from ..engine import Grammar, Trigger
from ..grammar import RuleBook, TrieEntry, literal, trie
from ..grammar_json import arguments_object, json_text
from ..strict_json import Unreadable, read_json, skip_space
from .offer import example_of, offered
from .reading import MAX_PROBLEMS, call_of, problem_at

START, CHANNEL, CONSTRAIN, MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"

_RECIPIENT = "to=functions."
_TRIGGERS = (
    Trigger(text=f"{CHANNEL}commentary {_RECIPIENT}"),
    Trigger(text=f"{CHANNEL}analysis {_RECIPIENT}"),
    Trigger(text=f"{START}assistant {_RECIPIENT}"),
    Trigger(text=_RECIPIENT, at_start=True),
)
_HEADER_RULE = (
    f'("{CHANNEL}" ("commentary" | "analysis"))? (" "? "{CONSTRAIN}" " "? "json" | " json")? {literal(MESSAGE)}'
)
_MARK = re.compile(r"<\|(?:start|channel|end|call|return)\|>")
_CLOSING = re.compile(r"\s*<\|(?:end|call|return)\|>")
_HEADER = re.compile(
    r"\s*(?=<\|start\|>|<\|channel\|>|to=)"
    r"(?P<header>(?:<\|start\|>)?[^<]{0,200}(?:<\|channel\|>[^<]{0,200}){0,2}(?:<\|constrain\|>[^<]{0,100})?)<\|message\|>"
)
_ADDRESSED = re.compile(r"to=functions\.([^\s<]+)")
_ANALYSIS = re.compile(r"<\|channel\|>\s*analysis")


@dataclass(frozen=True, slots=True)
class HarmonyDialect:
    """Calls as addressed messages. Satisfies the `Dialect` protocol."""

    name: str = "harmony"

    def grammar(self, tools: Sequence[CallableTool], *, choice: ToolChoice) -> Grammar | None:
        offer = offered(tools, choice)
        if offer is None:
            return None
        rules = RuleBook()
        header = rules.add("header", _HEADER_RULE)
        entries = (TrieEntry(tool.schema.name, f"{header} {arguments_object(rules, tool)}") for tool in offer.tools)
        return Grammar(gbnf=rules.render(trie(rules, "name", entries)), triggers=_TRIGGERS, required=offer.required)

    def parse(self, reply: str, *, reasoning: ReasoningMarks | None) -> ParsedReply:  # noqa: ARG002 - channels say it
        """Take a reply apart by its channels, which say what is reasoning: the marks are not needed."""
        text, thoughts, calls, problems = list[str](), list[str](), list[ParsedCall](), list[CallProblem]()
        position = 0
        while position < len(reply) and len(problems) < MAX_PROBLEMS:
            header = _HEADER.match(reply, position)
            body = header.end() if header else position
            addressed = _ADDRESSED.search(header.group("header")) if header else None
            if addressed:
                try:
                    call, end = _read_call(reply, position, body, name=addressed.group(1))
                    calls.append(call)
                except Unreadable as broken:
                    end = _end_of_message(reply, max(body, broken.position))
                    problems.append(problem_at(reply, position, end, broken, expected=self.expected_shape(None)))
            elif header or not (mark := _MARK.match(reply, position)):
                end = _end_of_message(reply, body)
                hidden = header and _ANALYSIS.search(header.group("header"))
                (thoughts if hidden else text).append(reply[body:end].strip())
            else:
                end = _end_of_message(reply, mark.end())  # a header that never came to its message
            closing = _CLOSING.match(reply, end)
            position = closing.end() if closing else end
        return ParsedReply(
            text="\n".join(filter(None, text)),
            reasoning="\n".join(filter(None, thoughts)),
            calls=tuple(calls),
            problems=tuple(problems),
        )

    def render_call(self, name: str, arguments: dict[str, object]) -> tuple[Piece, ...]:
        return (
            Piece(CHANNEL, markup=True),
            Piece(f"commentary {_RECIPIENT}{name} "),
            Piece(CONSTRAIN, markup=True),
            Piece("json"),
            Piece(MESSAGE, markup=True),
            Piece(json_text(arguments)),
        )

    def expected_shape(self, tool: ToolSchema | None) -> str:
        return example_of(tool, self.render_call)


def _read_call(reply: str, start: int, body: int, *, name: str) -> tuple[ParsedCall, int]:
    read = read_json(reply, skip_space(reply, body))
    return call_of({"name": name, "arguments": read.value}, reply[start : read.end], body), read.end


def _end_of_message(reply: str, position: int) -> int:
    found = _MARK.search(reply, position)
    return found.start() if found else len(reply)
