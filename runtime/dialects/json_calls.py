"""Calls written as a JSON object: what the hermes, llama3 and mistral dialects share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ..calls import CallableTool, ParsedCall
from ..grammar import SPACE, RuleBook, TrieEntry, literal, trie
from ..grammar_json import arguments_object, json_text
from ..strict_json import Unreadable, read_json, skip_space
from .reading import call_of

MAX_CALLS_IN_LIST = 8
"""How many calls a grammar allows in one list."""


def call_members(rules: RuleBook, tools: Sequence[CallableTool], *, arguments_key: str, ending: str = "") -> str:
    """Return a reference to the rule of a call's members, the name first; `ending` is the GBNF before the brace."""
    entries = (
        TrieEntry(
            json_text(tool.schema.name),
            f'"," {SPACE} {literal(json_text(arguments_key) + ":")} {SPACE} {arguments_object(rules, tool)} {ending}',
        )
        for tool in tools
    )
    return rules.add("call", f"{literal(json_text('name') + ':')} {SPACE} {trie(rules, 'name', entries)}")


def call_json(name: str, arguments: dict[str, object], *, arguments_key: str) -> str:
    """Return a call as one line of JSON."""
    return json_text({"name": name, arguments_key: arguments})


class CallsRead(NamedTuple):
    """Calls, and the offset behind the last."""

    calls: list[ParsedCall]
    end: int


def read_calls(
    text: str, position: int, *, start: int, separators: str = "", need_arguments: bool = False
) -> CallsRead:
    """Read the JSON calls that follow one another from `position`: objects, the first may be a list; at least one.

    `start` is where the block begins, for the raw text of the first. Raises Unreadable where what follows is no call;
    with `need_arguments` also where a call leaves them out.
    """
    calls: list[ParsedCall] = []
    end = position
    while not calls or text.startswith("{", position):
        read = read_json(text, position)
        members = read.value if isinstance(read.value, list) else [read.value]
        raw = text[start : read.end]
        calls += [call_of(member, raw, position, need_arguments=need_arguments) for member in members]
        if not calls:
            raise Unreadable("the list of calls is empty", position)
        start = end = read.end
        position = skip_space(text, end)
        while position < len(text) and text[position] in separators:
            position = skip_space(text, position + 1)
    return CallsRead(calls, end)
