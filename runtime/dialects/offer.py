"""What a request offers to the model: which tools, and whether it must call one. And the example of a call."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from ...kernels.errors import UsageError
from ..calls import CallableTool, ChoiceKind, Piece, ToolChoice, ToolSchema
from ..schema import Schema, branches, choices, integer_bounds, resolve, type_of

_PLACEHOLDER = "…"


class Offer(NamedTuple):
    """The tools that may be called, at least one, and whether one must be."""

    tools: tuple[CallableTool, ...]
    required: bool


def offered(tools: Sequence[CallableTool], choice: ToolChoice) -> Offer | None:
    """Return what `choice` leaves of `tools`; None where no call may be made.

    Raises UsageError where a call is demanded and no tool can answer.
    """
    if choice.kind is ChoiceKind.NONE:
        return None
    if choice.kind is ChoiceKind.NAMED:
        tools = [tool for tool in tools if tool.schema.name == choice.name] or _refuse(tools, choice.name)
    if tools:
        return Offer(tuple(tools), choice.kind is not ChoiceKind.AUTO)
    if choice.kind is ChoiceKind.REQUIRED:
        raise UsageError("tool_choice is required, but no tool may be called here; use auto, or allow one")
    return None


def _refuse(tools: Sequence[CallableTool], name: str) -> list[CallableTool]:
    names = [tool.schema.name for tool in tools]
    nearest = difflib.get_close_matches(name, names, n=1)
    hint = f"; nearest: {nearest[0]}" if nearest else ""
    raise UsageError(f"tool_choice names {name!r}, which may not be called here; it may be {', '.join(names)}{hint}")


def example_of(tool: ToolSchema | None, render_call: Callable[[str, dict[str, object]], tuple[Piece, ...]]) -> str:
    """Return a short call in the form of `render_call`: the tool's required arguments with placeholders."""
    if tool is None:
        pieces = render_call("TOOL", {"ARGUMENT": "VALUE"})
    else:
        schema = resolve(tool.parameters, tool.parameters)
        shown = schema.get("required") or list(schema.get("properties", {}))[:1]
        properties = schema.get("properties", {})
        pieces = render_call(tool.name, {key: _example_value(properties.get(key), tool.parameters) for key in shown})
    return "".join(piece.text for piece in pieces)


def _example_value(schema: Any, root: Schema) -> object:
    schema = resolve(schema, root)
    listed = choices(schema)
    if listed:
        return listed[0]
    parts = branches(schema)
    if parts:
        return _example_value(parts[0], root)
    kind = type_of(schema)
    if kind in ("integer", "number"):
        bounds = integer_bounds(schema)
        return bounds.low if bounds.low is not None else min(1, 1 if bounds.high is None else bounds.high)
    plain: dict[str, object] = {"boolean": True, "null": None, "array": [], "object": {}}
    return plain.get(kind, _PLACEHOLDER)
