"""Tool calls as values: what a model asked for, how a message is spelled in pieces, what a request may choose."""

from __future__ import annotations

import enum
from typing import Any, NewType

import msgspec

CallId = NewType("CallId", str)
"""Nine characters (some templates demand it), counted by the runtime: ``call00001``."""


class Piece(msgspec.Struct, frozen=True):
    """A piece of a message. `markup` is structure (special tokens are parsed in it), the rest is plain text."""

    text: str
    markup: bool = False


class ToolSchema(msgspec.Struct, frozen=True, kw_only=True):
    """What the model is told of a tool. `parameters` is a JSON schema of the subset that `grammar` supports."""

    name: str
    description: str
    parameters: dict[str, Any]

    def as_function(self) -> dict[str, Any]:
        """Return the form that chat templates expect."""
        return {
            "type": "function",
            "function": {"name": self.name, "description": self.description, "parameters": self.parameters},
        }


class CallableTool(msgspec.Struct, frozen=True, kw_only=True):
    """A tool as the grammar sees it in one request: its schema, and the values known to be valid.

    `grounded` maps a property to all its valid values (a path that exists, an id); a property that is not in it is
    bounded by the schema alone.
    """

    schema: ToolSchema
    grounded: dict[str, tuple[str, ...]] = {}


class ChoiceKind(enum.StrEnum):
    AUTO = "auto"
    REQUIRED = "required"
    NONE = "none"
    NAMED = "named"


class ToolChoice(msgspec.Struct, frozen=True):
    """Whether this request may, must or must not call a tool; `name` only with NAMED."""

    kind: ChoiceKind = ChoiceKind.AUTO
    name: str = ""


class ParsedCall(msgspec.Struct, frozen=True, kw_only=True):
    """A call as written by the model. Arguments are not yet checked against the schema."""

    name: str
    arguments: dict[str, Any]
    raw: str


class CallProblem(msgspec.Struct, frozen=True, kw_only=True):
    """A call that could not be read. `problem` says what is wrong, `expected` shows the shape."""

    raw: str
    problem: str
    expected: str


class ParsedReply(msgspec.Struct, frozen=True, kw_only=True):
    """A reply taken apart. `text` is what a person reads: no reasoning, no call markup, no control text."""

    text: str
    reasoning: str = ""
    calls: tuple[ParsedCall, ...] = ()
    problems: tuple[CallProblem, ...] = ()


class LoggedCall(msgspec.Struct, frozen=True, kw_only=True):
    """A call with its id and checked arguments. `coerced` has a line for each argument whose type was changed."""

    id: CallId
    name: str
    arguments: dict[str, Any]
    coerced: tuple[str, ...] = ()
