"""A person's message at the gate: one that is too large is stored whole, and its beginning and end stay in the window,
since one of them says what is wanted. Made before the turn begins, so that a refusal leaves nothing behind."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from ..compaction.artifacts import SHORT_ID_DIGITS
from ..compaction.budget import Budgets
from ..kernels.errors import NoRoom
from .chat_format import Shape
from .events import UserMessage
from .gate import Admitted, Gate, Offered
from .log_format import clean_text
from .tools.spec import ToolOutput
from .transcript import Transcript

MOST_EDGE_TOKENS = 512
_LEAST_EDGE_TOKENS = 16
_CHARACTERS_A_TOKEN = 8


class Message(msgspec.Struct, frozen=True, kw_only=True):
    """What enters the log, the part of it that is the person's own words (where mentions count), and what they are to
    be told, empty where the message entered whole."""

    event: UserMessage
    own_words: str
    note: str = ""


def message_of(text: str, *, gate: Gate, budgets: Budgets, transcript: Transcript) -> Message:
    """Return `text` as it can enter the window.

    Raises NoRoom, with the numbers, where not even the stub of it fits, or where it is too large and cannot be stored.
    """
    left_tokens = budgets.left_tokens(transcript.tokens_with(UserMessage(text="")))
    offered = Offered(
        source="a message",
        output=ToolOutput(content=text),
        limit_tokens=budgets.mention_tokens,
        shape=Shape.USER,
        repeatable=False,
        quotes=False,
    )
    admitted = gate.admit([offered], left_tokens=left_tokens)[0]
    if admitted.is_error or admitted.tokens > left_tokens:
        raise _no_room(admitted, budgets, transcript)
    clean = clean_text(text).text
    if not admitted.is_stub:
        return Message(event=UserMessage(text=admitted.content, artifact=admitted.artifact), own_words=clean)
    edge_tokens = min(MOST_EDGE_TOKENS, budgets.mention_tokens // 4, (left_tokens - admitted.tokens) // 2 - 2)

    def fits(part: str) -> bool:
        return gate.count(Shape.USER, part) <= edge_tokens

    head, tail = ("", "") if edge_tokens < _LEAST_EDGE_TOKENS else _edges(clean, edge_tokens, fits)
    shown = "\n".join(part for part in (head, admitted.content, tail) if part)
    if gate.count(Shape.USER, shown) > left_tokens:
        head, shown, tail = "", admitted.content, ""
    return Message(
        event=UserMessage(text=shown, artifact=admitted.artifact),
        own_words=f"{head}\n{tail}",
        note=_note(admitted),
    )


def _note(admitted: Admitted) -> str:
    assert admitted.artifact is not None, "what is a stub has an artifact"
    secrets = f", without {admitted.redacted} secret(s) that were in it" if admitted.redacted else ""
    short_id = admitted.artifact[:SHORT_ID_DIGITS]
    return (
        f"the message, {admitted.size_bytes:,} bytes, is too large for the window: the model reads its beginning, its "
        f"end and a stub. The whole is stored{secrets}: chapbook artifact read {short_id}"
    )


def _edges(text: str, edge_tokens: int, fits: Callable[[str], bool]) -> tuple[str, str]:
    """Return the beginning and the end of `text` that fit, cut at line ends where there are any."""
    span = edge_tokens * _CHARACTERS_A_TOKEN
    head, tail = text[:span], text[-span:]
    while not fits(head):
        head = head[: len(head) * 3 // 4]
    while not fits(tail):
        tail = tail[len(tail) // 4 + 1 :]
    cut = head.rfind("\n")
    start = tail.find("\n")
    return head[:cut] if cut > 0 else f"{head}…", tail[start + 1 :] if 0 <= start < len(tail) - 1 else f"…{tail}"


def _no_room(admitted: Admitted, budgets: Budgets, transcript: Transcript) -> NoRoom:
    held = transcript.window.token_count
    if admitted.is_error:
        why = f"this message does not fit: {admitted.content}"
    else:
        why = (
            f"this message does not fit: even its stub is {admitted.tokens:,} tokens. The window of {budgets.n_ctx:,} "
            f"holds {held:,} already and keeps {budgets.reply_reserve_tokens:,} for the reply, so "
            f"{max(0, budgets.left_tokens(held)):,} are left. Put the text into a file, or shorten it."
        )
    return NoRoom(
        why,
        n_ctx=budgets.n_ctx,
        window_tokens=held + admitted.tokens,
        reply_reserve_tokens=budgets.reply_reserve_tokens,
        by_segment=transcript.window.tokens_by_kind(),
    )
