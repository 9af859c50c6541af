"""Fits lines into a number of tokens, by the model's own count."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable
from itertools import accumulate

_CHARACTERS_A_TOKEN = 4
_GUESSES = 4
"""So often the place is guessed from the characters that a token took; then the rest is halved."""


def page_budget(arrival_tokens: int) -> int:
    """Return the tokens that a page of a tool's own making may take, so that with its footer it stays unstubbed."""
    return arrival_tokens * 3 // 4


def pack_lines(lines: Iterable[str], *, budget_tokens: int, count_tokens: Callable[[str], int]) -> list[str]:
    """Return the first lines that fit together; at least the first one. It takes a few counts of about the budget."""
    held = list(lines)
    # ends[n - 1]: the characters of the first n lines.
    ends = list(accumulate(len(line) + 1 for line in held))
    characters = _CHARACTERS_A_TOKEN * budget_tokens
    # `fitting` lines fit, or are the one that there must be; `over` do not, or are one more than there are.
    fitting, over, looks = min(1, len(held)), len(held) + 1, 0
    while over - fitting > 1:
        looks += 1
        size = bisect_right(ends, characters) if looks <= _GUESSES else (fitting + over) // 2
        size = min(max(size, fitting + 1), over - 1)
        tokens = count_tokens("\n".join(held[:size]))
        fitting, over = (size, over) if tokens <= budget_tokens else (fitting, size)
        characters = ends[size - 1] * budget_tokens // max(1, tokens)
    return held[:fitting]


def fit_text(text: str, *, budget_tokens: int, count_tokens: Callable[[str], int]) -> str:
    """Return `text`, or its beginning and end with a mark between them, in at most `budget_tokens` tokens."""
    shown, size = text, len(text)
    while count_tokens(shown) > budget_tokens and size > 1:
        size = size * 3 // 4
        half = size // 2
        shown = f"{text[:half]} … {text[len(text) - half :]}"  # [0, half) and [length - half, length)
    return shown


def fit_prefix(data: bytes, *, budget_tokens: int, count_tokens: Callable[[bytes], int]) -> int:
    """Return a length whose prefix of `data` fits, found in a few counts; at least one byte."""
    length = min(len(data), 8 * max(1, budget_tokens))
    while length > 1:
        tokens = count_tokens(data[:length])
        if tokens <= budget_tokens:
            break
        length = max(1, min(length - 1, length * budget_tokens * 9 // (tokens * 10)))
    return length


def most_that_fit(most: int, fits: Callable[[int], bool]) -> int:
    """Return the largest number from 0 to `most` that fits, where what is larger never fits better; 0 always does."""
    fitting, size = 0, 1
    while size <= most and fits(size):
        fitting, size = size, 2 * size
    # `fitting` fits, `over` does not, or is one more than there are.
    over = min(size, most + 1)
    while over - fitting > 1:
        middle = (fitting + over) // 2
        fitting, over = (middle, over) if fits(middle) else (fitting, middle)
    return fitting
