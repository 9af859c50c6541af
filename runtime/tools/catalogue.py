"""The tools of a session: an order that never changes, a name for each, a rendering that is the same in every run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import msgspec

from ...kernels.errors import UsageError
from ..calls import ToolSchema
from .declare import TOOL_NAME
from .spec import Tool


class Catalogue:
    """Tools in registration order. It is part of the session prefix, so it does not change once made."""

    def __init__(self, tools: Iterable[Tool]) -> None:
        """Raises UsageError where a name is taken twice or is not one (`TOOL_NAME`)."""
        self._tools: dict[str, Tool] = {}
        for tool in tools:
            if not TOOL_NAME.fullmatch(tool.name):
                raise UsageError(f"{tool.name!r} cannot name a tool: 1 to 64 of the characters a-z, A-Z, 0-9, _ and -")
            if tool.name in self._tools:
                raise UsageError(f"two tools are named {tool.name}; rename one of them")
            self._tools[tool.name] = tool

    def __iter__(self) -> Iterator[Tool]:
        return iter(self._tools.values())

    def __len__(self) -> int:
        return len(self._tools)

    def __contains__(self, name: object) -> bool:
        return name in self._tools

    def get(self, name: str) -> Tool | None:
        """Return the tool of that name, if there is one."""
        return self._tools.get(name)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._tools)

    def schemas(self) -> tuple[ToolSchema, ...]:
        """Return the schemas in registration order."""
        return tuple(tool.schema for tool in self)


def render_schemas(schemas: Iterable[ToolSchema]) -> str:
    """Return the schemas as compact JSON, one line each, in the form that templates expect; byte-identical always."""
    return "\n".join(msgspec.json.encode(schema.as_function()).decode() for schema in schemas)
