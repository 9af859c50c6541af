"""What a dialect is: a model family's own way to write a call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from ..calls import CallableTool, ParsedReply, Piece, ToolChoice, ToolSchema
from ..chat_format import ReasoningMarks
from ..engine import Grammar


class Dialect(Protocol):
    """Renders calls in the model's form, parses them back, and makes an ill-formed call impossible."""

    @property
    def name(self) -> str: ...

    def grammar(self, tools: Sequence[CallableTool], *, choice: ToolChoice) -> Grammar | None:
        """Return the grammar of a call among `tools`; None where none may be made."""

    def parse(self, reply: str, *, reasoning: ReasoningMarks | None) -> ParsedReply:
        """Take a whole reply apart (control tokens shown as text). Never raises: what cannot be read is a problem."""

    def render_call(self, name: str, arguments: dict[str, object]) -> tuple[Piece, ...]:
        """Return a call as the model would have written it: its markup, and its values as plain text."""

    def expected_shape(self, tool: ToolSchema | None) -> str:
        """Return a short well-formed example, to show after a call that could not be read."""
