"""The arrival gate: what a result may bring into the window, decided before it enters.

Planning is pure. Something too large is put into the artifact store whole, and a stub with its path stands in the
window; it never reaches the model's context, so there is no prefill of it and no later rewrite.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from .artifacts import ArtifactRef

STUB_LINE_CHARS = 160
STUB_EDGE_LINES = 3


class Arrival(msgspec.Struct, frozen=True, kw_only=True):
    """One result at the gate. `tokens` is exact, or a floor for what is too large to count (`over` is then set)."""

    tokens: int
    limit_tokens: int
    over: bool = False


def plan_admission(arrivals: Sequence[Arrival], *, left_tokens: int, stub_tokens: int) -> tuple[bool, ...]:
    """Return for each of one step's results whether it enters whole.

    Over its limit it does not. Of the others the largest leave first, until all that enters and the stubs of what
    does not fit in `left_tokens`.
    """
    whole = [not arrival.over and arrival.tokens <= arrival.limit_tokens for arrival in arrivals]

    def total() -> int:
        return sum(arrival.tokens if enters else stub_tokens for arrival, enters in zip(arrivals, whole, strict=True))

    by_size = sorted(range(len(arrivals)), key=lambda place: -arrivals[place].tokens)
    for place in by_size:
        if total() <= left_tokens:
            break
        if whole[place] and arrivals[place].tokens > stub_tokens:
            whole[place] = False
    return tuple(whole)


def stub_text(
    *,
    tool: str,
    arguments: str,
    ref: ArtifactRef,
    shown_path: str,
    lines: int,
    head: Sequence[str],
    tail: Sequence[str],
) -> str:
    """Return the text that stands for an artifact: what it is, its edges, its path, and how to read on.

    `head` and `tail` are the first and last lines as they are; each is shown up to `STUB_LINE_CHARS` characters.
    """
    first = [_clip(line) for line in head[:STUB_EDGE_LINES]]
    last = [_clip(line) for line in tail[len(tail) - min(len(tail), STUB_EDGE_LINES, max(0, lines - len(first))) :]]
    hidden = lines - len(first) - len(last)
    between = [f"… {hidden:,} lines between …"] if hidden > 0 else []
    return "\n".join(
        (
            f"[stored whole, not shown: {ref.size_bytes:,} bytes, {lines:,} lines, from {tool} {_clip(arguments)}]",
            *first,
            *between,
            *last,
            f"[{ref.sha256[:12]} · read it by parts: read path={shown_path} offset=1 limit=100, or search in it. "
            f"Running {tool} again only makes it again.]",
        )
    )


def _clip(line: str) -> str:
    clean = line.rstrip("\r\n")
    return clean if len(clean) <= STUB_LINE_CHARS else clean[:STUB_LINE_CHARS] + "…"
