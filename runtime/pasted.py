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
from .gate import Gate, Offered
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

    Raises NoRoom, with the numbers, where not even the stub of it fits, or where it is too large and cannot be stored;
    ArtifactError where it is not UTF-8 and its bytes cannot be stored.
    """
    clean = clean_text(text)
    left_tokens = budgets.left_tokens(transcript.tokens_with(UserMessage(text="")))
    offered = Offered(
        source="a message",
        output=ToolOutput(content=clean.text),
        limit_tokens=budgets.mention_tokens,
        shape=Shape.USER,
        repeatable=False,
    )
    admitted = gate.admit([offered], left_tokens=left_tokens)[0]
    if admitted.is_error or admitted.tokens > left_tokens:
        raise _no_room(admitted.content if admitted.is_error else "", admitted.tokens, budgets, transcript)
    if admitted.artifact is None:
        original = clean.original_bytes
        artifact = None if original is None else gate.store.put(original, text=False).sha256
        return Message(event=UserMessage(text=admitted.content, artifact=artifact), own_words=clean.text)
    edge_tokens = min(MOST_EDGE_TOKENS, budgets.mention_tokens // 4, (left_tokens - admitted.tokens) // 2 - 2)

    def fits(part: str) -> bool:
        return gate.count(Shape.USER, part) <= edge_tokens

    head, tail = ("", "") if edge_tokens < _LEAST_EDGE_TOKENS else _edges(clean.text, edge_tokens, fits)
    shown = "\n".join(part for part in (head, admitted.content, tail) if part)
    if gate.count(Shape.USER, shown) > left_tokens:
        head, shown, tail = "", admitted.content, ""
    return Message(
        event=UserMessage(text=shown, artifact=admitted.artifact),
        own_words=f"{head}\n{tail}",
        note=f"the message is {admitted.size_bytes:,} bytes, too large for the window: it is stored whole as artifact "
        f"{admitted.artifact[:SHORT_ID_DIGITS]}, and the model reads its beginning, its end and a stub",
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


def _no_room(why: str, message_tokens: int, budgets: Budgets, transcript: Transcript) -> NoRoom:
    held = transcript.window.token_count
    return NoRoom(
        f"this message does not fit: {why or f'even its stub is {message_tokens:,} tokens'}. The window of "
        f"{budgets.n_ctx:,} holds {held:,} already and keeps {budgets.reply_reserve_tokens:,} for the reply, so "
        f"{budgets.left_tokens(held):,} are left. Put the text into a file and attach it with @path, or shorten it.",
        n_ctx=budgets.n_ctx,
        window_tokens=held + message_tokens,
        reply_reserve_tokens=budgets.reply_reserve_tokens,
        by_segment=transcript.window.tokens_by_kind(),
    )
