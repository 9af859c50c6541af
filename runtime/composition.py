"""From messages to segments, one message at a time: the incremental path of the window.

Nothing that stands in the window is rendered or tokenised again. A message costs its own content and the glue
between it and the message before. One piece is one call of the tokenizer, so that ids never depend on neighbours.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from ..kernels.tokens import TokenIds, concat_tokens, hash_tokens
from .calls import Piece
from .chat_format import ChatFormat, PrefixPiece, Shape, Slot
from .engine import Tokenizer
from .events import (
    AssistantMessage,
    Author,
    Event,
    HeaderReason,
    Notice,
    PrefixSection,
    RequestHeader,
    SegmentKind,
    StepStart,
    ToolResult,
    UserMessage,
)
from .window import Segment


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where the conversation stands: the shape of its last message, and what that one's slots were."""

    shape: Shape | None = None
    tool_name: str = ""
    call_id: str = ""


@dataclass(frozen=True, slots=True)
class Composer:
    """Composes messages in one chat format with one vocabulary. Glue is tokenised once for each pair of shapes."""

    tokenizer: Tokenizer
    chat_format: ChatFormat
    _glue_tokens: dict[Piece, TokenIds] = field(default_factory=dict)

    def compose(self, place: Place, event: Event) -> tuple[Segment, ...]:
        """Return the segments that `event` adds behind `place`; empty ones are left out.

        An event that says nothing to the model adds none. Not for a model's reply: its tokens are those that were
        evaluated.
        """
        content: tuple[Piece, ...] = ()
        match event:
            case RequestHeader(reason=HeaderReason.RESUME):
                return ()
            case RequestHeader(sections=sections):
                return tuple(
                    Segment(SegmentKind.PREFIX, self.tokens_of(section.pieces), f"prefix: {section.name}")
                    for section in sections
                )
            case UserMessage(text=text) | Notice(text=text):
                content = (Piece(self.chat_format.form(Shape.USER).apply(text)),)
            case ToolResult(content=text):
                content = (Piece(self.chat_format.form(Shape.TOOL).apply(text)),)
            case AssistantMessage(pieces=pieces):
                content = pieces
            case StepStart():
                pass
            case _:
                return ()
        made = (
            Segment(SegmentKind.GLUE, self.tokens_of(self._glue(place, event)), source_of(event, SegmentKind.GLUE)),
            Segment(SegmentKind.MESSAGE, self.tokens_of(content), source_of(event, SegmentKind.MESSAGE)),
        )
        return tuple(segment for segment in made if len(segment.tokens))

    def tokens_of(self, pieces: Iterable[Piece]) -> TokenIds:
        """Tokenise pieces, each by itself; only in markup are special tokens parsed (promise 10)."""
        return concat_tokens([self._piece_tokens(piece) for piece in pieces])

    def _piece_tokens(self, piece: Piece) -> TokenIds:
        if not piece.markup:
            return self.tokenizer.tokenize(piece.text, parse_special=False)
        if piece not in self._glue_tokens:
            self._glue_tokens[piece] = self.tokenizer.tokenize(piece.text, parse_special=True)
        return self._glue_tokens[piece]

    def _glue(self, place: Place, event: Event) -> tuple[Piece, ...]:
        after = place_after(place, event)
        continues = isinstance(event, StepStart) and event.continues
        if place.shape is None or after.shape is None or continues:
            return ()
        return self.chat_format.glue(place.shape, after.shape).pieces(
            {
                Slot.TOOL_NAME: after.tool_name,
                Slot.CALL_ID: after.call_id,
                Slot.PREVIOUS_TOOL_NAME: place.tool_name,
                Slot.PREVIOUS_CALL_ID: place.call_id,
            }
        )


def compose_sections(pieces: Sequence[PrefixPiece], composer: Composer) -> tuple[PrefixSection, ...]:
    """Group the pieces of a session prefix into sections, in order; pieces of one name that touch are one section."""
    grouped: list[tuple[str, list[Piece]]] = []
    for piece in pieces:
        if not grouped or grouped[-1][0] != piece.section:
            grouped.append((piece.section, []))
        grouped[-1][1].append(Piece(piece.text, markup=piece.markup))
    sections = []
    for name, members in grouped:
        tokens = composer.tokens_of(members)
        sections.append(PrefixSection(name=name, pieces=tuple(members), tokens=len(tokens), xxh3=hash_tokens(tokens)))
    return tuple(sections)


def place_after(place: Place, event: Event) -> Place:
    """Return where the conversation stands after an event that is in the log already."""
    match event:
        case UserMessage() | Notice():
            return Place(shape=Shape.USER)
        case StepStart() | AssistantMessage():
            return Place(shape=Shape.REPLY)
        case ToolResult(name=name, call_id=call_id):
            return Place(shape=Shape.TOOL, tool_name=name, call_id=call_id)
        case _:
            return place


def source_of(event: Event, kind: SegmentKind) -> str:
    """Return the name that a segment of this event has in reports."""
    match event:
        case AssistantMessage(author=Author.MODEL):
            return "reply"
        case StepStart():
            return "opening of the reply"
        case AssistantMessage():
            named = "call by the runtime"
        case ToolResult(name=name, call_id=call_id):
            named = f"result of {name} {call_id}"
        case Notice(producer=producer):
            named = f"notice by {producer}"
        case _:
            named = "user message"
    return f"before the {named}" if kind is SegmentKind.GLUE else named
