"""The schemas of the tools that later parts of chapbook bring, with their real text.

They are here so that the cost of the session prefix is measured with the whole default tool set from the first
version on. None of them can be called, and none is told to a model.
"""

from __future__ import annotations

from typing import Any

from ..calls import ToolSchema

_TEXT = {"type": "string"}
_NUMBER = {"type": "integer", "minimum": 1}


def _schema(name: str, description: str, required: tuple[str, ...] = (), **properties: dict[str, Any]) -> ToolSchema:
    parameters: dict[str, Any] = {"type": "object", "properties": properties}
    if required:
        parameters["required"] = list(required)
    return ToolSchema(name=name, description=description, parameters=parameters)


RESERVED_SCHEMAS: tuple[ToolSchema, ...] = (
    _schema(
        "chapters_search",
        "Search earlier chapters, plans and rules.",
        ("query",),
        query=_TEXT,
        max_tokens=_NUMBER,
        kind={"enum": ["chapter", "plan", "rule"]},
    ),
    _schema("chapters_segment", "Propose chapters for the session so far."),
    _schema(
        "chapters_continue",
        "Archive chapters and go on in a fresh window.",
        ("ranges", "title"),
        ranges={"type": "array", "items": {"type": "array", "items": {"type": "integer"}}},
        title=_TEXT,
        note=_TEXT,
        keep={"type": "array", "items": {"type": "integer"}, "description": "results to keep inline, by seq"},
    ),
)
