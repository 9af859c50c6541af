"""ChatML as a value: the format of a model without a template, or with one that cannot be used."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from .chat_format import AppendKind, ChatFormat, ContentForm, Glue, Shape
from .transition_glue import literal

_OPEN = "<|im_start|>"
_CLOSE = "<|im_end|>\n"

USER_OPENING = f"{_OPEN}user\n"
SYSTEM_OPENING = f"{_OPEN}system\n"
SYSTEM_CLOSING = _CLOSE


class ResultWrapper(msgspec.Struct, frozen=True, kw_only=True):
    """What stands around a tool's result inside a user message, where a template has no role for results."""

    before: str = "<tool_response>\n"
    after: str = "\n</tool_response>"


def pair(before: Shape, after: Shape) -> str:
    """Return the key of a pair of shapes in `ChatFormat.glues`."""
    return f"{before}>{after}"


def wrapped_result_glues(
    *, user_reply: str, reply_user: str, user_user: str, wrapper: ResultWrapper
) -> Mapping[str, Glue]:
    """Return the glues of results that are written into user messages; results in a row share one message."""
    user, reply, tool = Shape.USER, Shape.REPLY, Shape.TOOL
    return {
        pair(user, tool): literal(user_user + wrapper.before),
        pair(reply, tool): literal(reply_user + wrapper.before),
        pair(tool, tool): literal(f"{wrapper.after}\n{wrapper.before}"),
        pair(tool, reply): literal(wrapper.after + user_reply),
        pair(tool, user): literal(wrapper.after + user_user),
    }


def chatml_format(*, template_hash: str, fallback_reason: str, wrapper: ResultWrapper | None = None) -> ChatFormat:
    """Return ChatML as a chat format. `fallback_reason` is empty where there was no template to begin with."""
    user_reply, next_user = f"{_CLOSE}{_OPEN}assistant\n", _CLOSE + USER_OPENING
    results = wrapped_result_glues(
        user_reply=user_reply, reply_user=next_user, user_user=next_user, wrapper=wrapper or ResultWrapper()
    )
    return ChatFormat(
        template_hash=template_hash,
        origin="chatml",
        fallback_reason=fallback_reason,
        glues={
            pair(Shape.USER, Shape.REPLY): literal(user_reply),
            pair(Shape.REPLY, Shape.USER): literal(next_user),
            pair(Shape.USER, Shape.USER): literal(next_user),
            **results,
        },
        forms={shape: ContentForm() for shape in Shape},
        tools_native=False,
        system_native=True,
        append_kind=AppendKind.APPEND_ONLY,
    )
