"""Cuts transitions out of rendered probes: pure functions on text."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

from .chat_format import ContentForm, Glue, GluePart, Slot
from .transition_probes import EDGE_END, EDGE_START, MIDDLE, Sentinels

END_OF_TURN_TEXTS = (
    "<|im_end|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|end|>",
    "<|call|>",
    "<|return|>",
    "<|end_of_turn|>",
    "<end_of_turn>",
    "<turn|>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<|END_OF_TURN_TOKEN|>",
    "<|eot|>",
    "<|eom|>",
    "<|end_of_message|>",
    "<|end_of_msg|>",
    "<|calls|>",
    "<|flush|>",
    "<|tool_response>",
    "<\uff5cend\u2581of\u2581sentence\uff5c>",
    "<end_of_utterance>",
    "<EOT>",
    "[EOS]",
    "</s>",
)
"""Texts of the tokens at which a generation ends, most of them as llama.cpp's vocabulary loader knows them."""


def text_between(text: str, before: str, after: str) -> str | None:
    """Return what stands between the last `after` and the last `before` ahead of it; None where either is missing."""
    # text[start, end) is the result: start is behind `before`, end is where `after` begins.
    end = text.rfind(after)
    start = text.rfind(before, 0, max(end, 0))
    return None if end < 0 or start < 0 else text[start + len(before) : end]


def text_after(text: str, before: str) -> str | None:
    """Return what follows the last `before`; None where it is missing."""
    start = text.rfind(before)
    return None if start < 0 else text[start + len(before) :]


def is_boundary(text: str, at: int) -> bool:
    """Tell whether a cut at `at` splits no control token: those stand in brackets and hold no line break."""
    return at in (0, len(text)) or text[at - 1] in "\n>]" or text[at] in "\n<["


def shared_start_chars(first: str, second: str) -> int:
    """Return how many characters two texts have in common at their start."""
    pairs = zip(first, second, strict=False)
    return next((at for at, (one, other) in enumerate(pairs) if one != other), min(len(first), len(second)))


def common_start(first: str, second: str) -> str:
    """Return the longest common start that ends at a boundary of both."""
    length = shared_start_chars(first, second)
    while not (is_boundary(first, length) and is_boundary(second, length)):
        length -= 1
    return first[:length]


def common_end(first: str, second: str) -> str:
    """Return the longest common end that begins at a boundary of both."""
    length = shared_start_chars(first[::-1], second[::-1])
    while not (is_boundary(first, len(first) - length) and is_boundary(second, len(second) - length)):
        length -= 1
    return first[len(first) - length :]


def closing_of(glue: str, *, at_end: str | None, eos_text: str) -> str:
    """Return the part of `glue` that closes the message before it.

    `at_end` is what follows that message's content where it is the last one and no generation prompt is asked for.
    Some templates end every render with the EOS, others close a last message with another token than an earlier one.
    """
    for closing in (at_end, at_end.removesuffix(eos_text)) if at_end and eos_text else (at_end,):
        # A template that shows the generation prompt always shows it here too: then `at_end` is no closing.
        if closing and closing != glue and glue.startswith(closing):
            return closing
    for text in (*END_OF_TURN_TEXTS, eos_text):
        if text and glue.startswith(text):
            # [0, behind) is the token and the line breaks that follow it.
            behind = len(glue) - len(glue[len(text) :].lstrip("\n"))
            return glue[:behind]
    return common_start(at_end, glue) if at_end else ""


def drop_written_end(glue: str, *, eos_text: str) -> str:
    """Return `glue` behind a reply without what the model writes itself before it ends its turn.

    Command-R7b closes its answer with ``<|END_RESPONSE|>``, and only then comes the token that ends a generation.
    White space there stays: models that write it and models that do not cannot be told apart.
    """
    start = _end_of_turn(glue, eos_text)
    return glue if start is None or not glue[:start].strip() else glue[start:]


def strip_call(glue: str, *, plain: str | None, eos_text: str) -> str:
    """Return `glue`, learnt behind the last argument of a call, without the rest of that call.

    `plain` is the same transition learnt behind a content: a suffix of `glue` in most templates. In the others the
    turn that holds a call ends in its own way: what counts begins with the first end-of-turn text. Where there is
    none either, the brackets that close the call are taken off.
    """
    if plain is not None and glue.endswith(plain):
        return plain
    start = _end_of_turn(glue, eos_text)
    if start is not None:
        return glue[start:]
    closers = re.match(r"[\s\"'\]})]*(?:</\w+>\s*)*", glue)
    return glue[closers.end() :] if closers else glue


def _end_of_turn(glue: str, eos_text: str) -> int | None:
    """Return where the first end-of-turn text begins."""
    starts = [at for text in {*END_OF_TURN_TEXTS, eos_text} if text and (at := glue.find(text)) >= 0]
    return min(starts, default=None)


def make_glue(text: str, slots: Mapping[str, Slot], sentinels: Sentinels) -> Glue | None:
    """Return `text` as glue with its slots; None where another sentinel is in it (the template moved something)."""
    parts: list[GluePart] = []
    pattern = "|".join(map(re.escape, slots))
    for piece in re.split(f"({pattern})", text) if slots else [text]:
        if piece in slots:
            parts.append(GluePart(slot=slots[piece]))
        elif sentinels.stem in piece:
            return None
        elif piece:
            parts.append(GluePart(text=piece))
    return Glue(tuple(parts))


def literal(text: str) -> Glue:
    """Return glue without slots."""
    return Glue((GluePart(text=text),) if text else ())


def content_form(text: str, index: int, sentinels: Sentinels) -> ContentForm | None:
    """Return what the template did to the edgy content `index` in `text`; None where it is something else.

    A content that is trimmed at one end only counts as not trimmed: what a template drops there is white space.
    """
    middle = text_between(text, sentinels.content(index), sentinels.second(index))
    if middle not in (MIDDLE, _json_text(MIDDLE)):
        return None
    encoded = middle != MIDDLE
    start, end = (_json_text(EDGE_START), _json_text(EDGE_END)) if encoded else (EDGE_START, EDGE_END)
    before, after = text[: text.rfind(sentinels.content(index))], text_after(text, sentinels.second(index)) or ""
    return ContentForm(trimmed=not before.endswith(start) and not after.startswith(end), json_encoded=encoded)


def _json_text(text: str) -> str:
    return json.dumps(text)[1:-1]
