"""Taking a reply apart: reasoning, text, and the blocks in which calls are written.

Every dialect finds its own blocks; what lies between them is text. Control tokens reach a parser as their text.
A reply is read once from start to end: where a block cannot be read, reading goes on behind the place where it broke.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..calls import CallProblem, ParsedCall, ParsedReply
from ..chat_format import ReasoningMarks
from ..strict_json import Unreadable, read_whole_json, skip_space

MAX_PROBLEMS = 16
"""A reply with so many unreadable calls is not read further; what remains is text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallBlock:
    """The run [start, end) of a reply in which calls are written."""

    start: int
    end: int
    calls: tuple[ParsedCall, ...] = ()
    problems: tuple[CallProblem, ...] = ()


NextBlock = Callable[[str, int, bool], CallBlock | None]
"""Finds the first block at or behind an offset; the flag says whether only space and reasoning stand before it."""


def take_apart(reply: str, *, reasoning: ReasoningMarks | None, next_block: NextBlock) -> ParsedReply:
    """Return the reasoning, the text and the calls of a reply. A call inside reasoning is not a call.

    Reasoning at the start may be unfinished, and is then all there is; further on it counts only if it is finished.
    """
    thoughts = _leading_thoughts(reply, reasoning)
    position = thoughts[-1].end if thoughts else 0
    shown, calls, problems = list[str](), list[ParsedCall](), list[CallProblem]()
    block = next_block(reply, position, True)
    thought = _next_thought(reply, reasoning, position)
    while block or thought:
        if thought and (block is None or thought.start <= block.start):
            found: _Thought | CallBlock = thought
            thoughts.append(thought)
        else:
            assert block is not None, "the loop goes on while there is one of the two"
            found = block
            calls += block.calls
            problems += block.problems
        shown.append(reply[position : found.start].strip())
        position = found.end
        if block and block.start < position:
            block = next_block(reply, position, False) if len(problems) < MAX_PROBLEMS else None
        if thought and thought.start < position:
            thought = _next_thought(reply, reasoning, position)
    shown.append(reply[position:].strip())
    return ParsedReply(
        text="\n".join(filter(None, shown)),
        reasoning="\n".join(filter(None, (reply[part.inner : part.inner_end].strip() for part in thoughts))),
        calls=tuple(calls),
        problems=tuple(problems),
    )


class _Thought(NamedTuple):
    """The run [start, end) with its marks; [inner, inner_end) without."""

    start: int
    end: int
    inner: int
    inner_end: int


def _leading_thoughts(reply: str, marks: ReasoningMarks | None) -> list[_Thought]:
    found: list[_Thought] = []
    if marks and marks.open_at_start and not reply.startswith(marks.begin, skip_space(reply, 0)):
        found.append(_thought(reply, marks, start=0, inner=0))
    while marks:
        start = skip_space(reply, found[-1].end if found else 0)
        if not reply.startswith(marks.begin, start):
            break
        found.append(_thought(reply, marks, start=start, inner=start + len(marks.begin)))
    return found


def _next_thought(reply: str, marks: ReasoningMarks | None, position: int) -> _Thought | None:
    start = reply.find(marks.begin, position) if marks else -1
    if marks is None or start < 0:
        return None
    thought = _thought(reply, marks, start=start, inner=start + len(marks.begin))
    return thought if thought.end > thought.inner_end else None


def _thought(reply: str, marks: ReasoningMarks, *, start: int, inner: int) -> _Thought:
    inner_end = reply.find(marks.end, inner)
    if inner_end < 0:
        return _Thought(start, len(reply), inner, len(reply))
    return _Thought(start, inner_end + len(marks.end), inner, inner_end)


def call_of(value: Any, raw: str, position: int, *, need_arguments: bool = False) -> ParsedCall:
    """Return the call that a JSON object describes: a name, and arguments as an object or as its JSON text.

    Raises Unreadable, at `position`, where it describes none. Arguments that are left out are none, unless needed.
    """
    if isinstance(value, dict) and isinstance(value.get("function"), dict):
        value = value["function"]
    if not isinstance(value, dict):
        raise Unreadable(f"a call is an object, this is {_kind(value)}", position)
    name = value.get("name", value.get("function"))
    if not isinstance(name, str) or not name:
        raise Unreadable('the call has no "name"', position)
    given = [key for key in ("arguments", "parameters") if key in value]
    if need_arguments and not given:
        raise Unreadable('the call has no "parameters"', position)
    arguments = value[given[0]] if given else None
    if isinstance(arguments, str):
        try:
            arguments = read_whole_json(arguments)
        except Unreadable as broken:
            raise Unreadable(f'"arguments" is a text that is not a JSON object ({broken.problem})', position) from None
    if arguments is not None and not isinstance(arguments, dict):
        raise Unreadable(f'"arguments" must be an object, this is {_kind(arguments)}', position)
    return ParsedCall(name=name, arguments=arguments or {}, raw=raw)


def problem_at(reply: str, start: int, end: int, broken: Unreadable, *, expected: str) -> CallProblem:
    """Return the problem of the block [start, end) with its place in the block, counted from 1."""
    before = reply[start : max(start, min(broken.position, end))]
    line, column = before.count("\n") + 1, len(before) - (before.rfind("\n") + 1) + 1
    return CallProblem(
        raw=reply[start:end], problem=f"{broken.problem} (line {line}, column {column} of the call)", expected=expected
    )


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a text", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")
