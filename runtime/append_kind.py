"""Tells whether appending a message changes what a template rendered before, and what that would have cost."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import msgspec

from .chat_format import AppendKind
from .transition_glue import shared_start_chars
from .transition_probes import Sentinels

ExpectedGlue = Callable[[str, str], str]
"""Takes two shapes (``U``, ``R``, ``T``) and returns the glue between them, with the slots of call 1 filled in."""


class RerenderCost(msgspec.Struct, frozen=True, kw_only=True):
    """What rendering a sample conversation anew for each request would have cost, in characters.

    `rewritten_chars` were evaluated already and stand behind the first changed character of a later request;
    `sent_chars` is the length of the last request, which transitions evaluate once.
    """

    requests: int
    rewriting_requests: int
    rewritten_chars: int
    sent_chars: int


def append_kind(grown: Sequence[str | None], script: str, sentinels: Sentinels, glue: ExpectedGlue) -> AppendKind:
    """Compare the renders of a growing conversation with each other and with the glues.

    `grown[k]` is the render after message k of `script` (`transition_probes.growth`). A render that was refused
    makes the kind unknown. Behind the generation prompt and before the end of a turn a template may show what the
    model writes there itself.
    """
    shapes = script.split()
    cut = [None if text is None else _segments(text, shapes[: k + 1], sentinels) for k, text in enumerate(grown)]
    whole = cut[-1]
    if whole is None or any(segments is None for segments in cut):
        return AppendKind.UNKNOWN
    for k, segments in enumerate(cut):
        assert segments is not None
        # segments[:-1] stand before a content; the last one is the end of the render.
        if segments[:-1] != whole[: len(segments) - 1]:
            return AppendKind.REWRITES
        if shapes[k] in "UT" and k + 1 < len(shapes) and not whole[len(segments) - 1].startswith(segments[-1]):
            return AppendKind.REWRITES
    fits = all(_fits(segment, way, glue) for segment, way in zip(whole[1:-1], _ways(shapes), strict=True))
    return AppendKind.APPEND_ONLY if fits else AppendKind.REWRITES


def _segments(text: str, shapes: Sequence[str], sentinels: Sentinels) -> list[str] | None:
    """Return what stands before, between and behind the contents; None where one is missing. Calls have none."""
    segments, start = [], 0
    for index, shape in enumerate(shapes):
        if shape == "C":
            continue
        content = sentinels.content(index)
        end = text.find(content, start)
        if end < 0:
            return None
        segments.append(text[start:end])
        start = end + len(content)
    return [*segments, text[start:]]


def _ways(shapes: Sequence[str]) -> list[str]:
    """Return the shapes from each content to the next: ``UR``, ``RU``, or ``UCT`` where a call lies between."""
    contents = [index for index, shape in enumerate(shapes) if shape != "C"]
    return ["".join(shapes[first : last + 1]) for first, last in pairwise(contents)]


def _fits(segment: str, way: str, glue: ExpectedGlue) -> bool:
    if "C" in way:
        return segment.startswith(glue(way[0], "R")) and segment.endswith(glue("R", way[-1]))
    expected = glue(way[0], way[-1])
    if way[-1] == "R":
        return segment.startswith(expected)
    return segment.endswith(expected) if way[0] == "R" else segment == expected


def rerender_cost(requests: Sequence[str], replies: Sequence[str]) -> RerenderCost:
    """Compare each request with what was evaluated before it.

    `requests[n]` is a whole render with the generation prompt, `replies[n]` the same conversation up to the end of
    the reply to it.
    """
    rewriting = rewritten = 0
    for known_request, known_reply, request in zip(requests, replies, requests[1:], strict=False):
        # [0, kept) of a known text is repeated by the request.
        lost = max(len(known) - shared_start_chars(known, request) for known in (known_request, known_reply))
        rewriting += lost > 0
        rewritten += lost
    return RerenderCost(
        requests=len(requests),
        rewriting_requests=rewriting,
        rewritten_chars=rewritten,
        sent_chars=len(requests[-1]) if requests else 0,
    )
