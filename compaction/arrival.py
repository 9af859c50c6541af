"""The arrival gate: what a result may bring into the window, decided before it enters. Pure.

Something too large is put into the artifact store whole, and a stub with its id stands in the window; it never
reaches the model's context, so there is no prefill of it and no later rewrite.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence

import msgspec

MOST_STUB_TOKENS = 300
LEAST_STUB_TOKENS = 128
REFUSAL_TOKENS = 96
"""What the refusal of a page takes at most, with its numbers."""

BRIEF_TOKENS = 48
"""What is over this gains by a line that says where it is, and nothing else."""

MOST_BYTES_PER_TOKEN = 128
"""No token of a known vocabulary is longer (runs of white space are the longest): more bytes than this for each
token of a limit are over it without counting."""

SLICE_CHARACTERS = 1 << 15
_SLACK_TOKENS_PER_CUT = 64


class Form(enum.IntEnum):
    """How a text enters: as it is, as a stub, as a refusal with the numbers (a page of something that stays), or as
    one line where no room is left. A text only ever goes on to a later form."""

    WHOLE = 0
    STUB = 1
    REFUSED = 2
    BRIEF = 3


class Measure(msgspec.Struct, frozen=True, kw_only=True):
    """The tokens of a text: exact, or an estimate for one that is surely over the limit that it was held against."""

    tokens: int
    exact: bool


class Arrival(msgspec.Struct, frozen=True, kw_only=True):
    """One text at the gate, in the form it has so far, with the tokens that this form takes.

    `paged`: a page of something that stays, which is never stored a second time.
    """

    tokens: int
    form: Form = Form.WHOLE
    paged: bool = False


class Leaving(msgspec.Struct, frozen=True, kw_only=True):
    """Which of the texts is to take less room, and in which form."""

    place: int
    form: Form


def measure(text: str, limit_tokens: int, count: Callable[[str], int]) -> Measure:
    """Count `text` exactly, or see early that it is over the limit; then the tokens are extrapolated.

    A cut between two slices can split tokens, so that a sum is over by a few for each cut: what is near the limit is
    counted as one.
    """
    counted, most_tokens = 0, limit_tokens
    size_bytes = len(text.encode("utf-8", "replace"))
    if size_bytes > limit_tokens * MOST_BYTES_PER_TOKEN:
        sample = text[:SLICE_CHARACTERS]
        return Measure(tokens=max(limit_tokens + 1, count(sample) * len(text) // len(sample)), exact=False)
    for start in range(0, len(text), SLICE_CHARACTERS):
        counted += count(text[start : start + SLICE_CHARACTERS])  # [start, start + SLICE_CHARACTERS)
        most_tokens += _SLACK_TOKENS_PER_CUT
        seen = min(len(text), start + SLICE_CHARACTERS)
        if seen < len(text) and counted > most_tokens:
            return Measure(tokens=max(limit_tokens + 1, counted * len(text) // seen), exact=False)
    return Measure(tokens=counted if len(text) <= SLICE_CHARACTERS else count(text), exact=True)


def stub_budget(*, arrival_tokens: int, left_tokens: int, arrivals: int) -> int:
    """Return the tokens that each stub of a step may take: 300, half of the threshold, or a fair share of little room,
    but never less than a stub needs to say where the content is."""
    share = left_tokens // max(1, arrivals)
    return max(LEAST_STUB_TOKENS, min(MOST_STUB_TOKENS, arrival_tokens // 2, share))


def page_share(*, arrival_tokens: int, left_tokens: int, calls: int) -> int:
    """Return the threshold that the bodies of a step's calls are told of, so that the pages they make fit together."""
    return max(LEAST_STUB_TOKENS, min(arrival_tokens, left_tokens // max(1, calls)))


def next_to_leave(arrivals: Sequence[Arrival], *, left_tokens: int, stub_tokens: int) -> Leaving | None:
    """Return which of one step's texts is to take less room next, None where none has to or can.

    The largest that would gain by a stub goes first; pages are refused only when no stub helps any more, and a line
    alone stands for a text only where nothing else helps.
    """
    if sum(arrival.tokens for arrival in arrivals) <= left_tokens:
        return None
    by_size = sorted(range(len(arrivals)), key=lambda place: -arrivals[place].tokens)
    for form, paged, least_tokens in (
        (Form.STUB, False, stub_tokens),
        (Form.REFUSED, True, REFUSAL_TOKENS),
        (Form.BRIEF, None, BRIEF_TOKENS),
    ):
        for place in by_size:
            arrival = arrivals[place]
            is_meant = (
                arrival.form < Form.BRIEF if paged is None else (arrival.form, arrival.paged) == (Form.WHOLE, paged)
            )
            if is_meant and arrival.tokens > least_tokens:
                return Leaving(place=place, form=form)
    return None
