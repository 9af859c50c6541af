"""How a model's template separates messages, as a value: what stands before, between and after contents.

The conversation is never rendered as a whole. A `ChatFormat` is learnt once from a template (`transitions`), is
recorded in the session log, and from then on a message costs its own content and the glue before it.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Mapping

import msgspec

from .calls import Piece


class Shape(enum.StrEnum):
    """What a message looks like to a template."""

    USER = "user"
    REPLY = "reply"
    TOOL = "tool"


class Slot(enum.StrEnum):
    """A value that some templates echo beside a tool's result."""

    TOOL_NAME = "tool_name"
    CALL_ID = "call_id"
    PREVIOUS_TOOL_NAME = "previous_tool_name"
    PREVIOUS_CALL_ID = "previous_call_id"


class GluePart(msgspec.Struct, frozen=True):
    """Literal markup, or a slot to fill in as plain text."""

    text: str = ""
    slot: Slot | None = None


class Glue(msgspec.Struct, frozen=True):
    """What stands between the content of one message and that of the next."""

    parts: tuple[GluePart, ...] = ()

    def pieces(self, slots: Mapping[Slot, str]) -> tuple[Piece, ...]:
        """Return the glue with its slots filled in; a slot without a value is left empty."""
        return tuple(
            Piece(part.text, markup=True) if part.slot is None else Piece(slots.get(part.slot, ""))
            for part in self.parts
        )


class ContentForm(msgspec.Struct, frozen=True, kw_only=True):
    """What the template does to a content of this shape, and so is done to real ones."""

    trimmed: bool = False
    json_encoded: bool = False

    def apply(self, text: str) -> str:
        """Return `text` as the template would have written it."""
        shown = text.strip() if self.trimmed else text
        return json.dumps(shown, ensure_ascii=False)[1:-1] if self.json_encoded else shown


class ReasoningMarks(msgspec.Struct, frozen=True, kw_only=True):
    """How the model marks its reasoning. `open_at_start`: the generation prompt has opened it already."""

    begin: str
    end: str
    open_at_start: bool = False


class AppendKind(enum.StrEnum):
    """What appending a message does to the template's own render of what came before."""

    APPEND_ONLY = "append-only"
    REWRITES = "rewrites history"
    UNKNOWN = "unknown"


class ChatFormat(msgspec.Struct, frozen=True, kw_only=True):
    """The glue of every pair of shapes and the form of every content.

    `origin` is ``template`` or ``chatml``; `fallback_reason` says why a template was not used. `variables` are the
    values that the template could see (frozen at learning), `tools_native` whether it renders a catalogue itself.
    """

    template_hash: str
    origin: str
    fallback_reason: str = ""
    glues: dict[str, Glue]
    forms: dict[str, ContentForm]
    tools_native: bool
    system_native: bool
    append_kind: AppendKind
    reasoning: ReasoningMarks | None = None
    variables: dict[str, str] = {}

    def glue(self, before: Shape, after: Shape) -> Glue:
        """Return what stands between a message of shape `before` and one of shape `after`.

        Every pair has one but (REPLY, REPLY): a reply that goes on after a cut has no glue.
        """
        return self.glues[f"{before}>{after}"]

    def form(self, shape: Shape) -> ContentForm:
        """Return how contents of this shape are written."""
        return self.forms.get(shape, ContentForm())


class PrefixPiece(msgspec.Struct, frozen=True, kw_only=True):
    """One piece of the session prefix in order; `section` groups pieces for the account."""

    section: str
    text: str
    markup: bool
