"""Fits lines into a number of tokens, by the model's own count."""

from __future__ import annotations

from collections.abc import Callable, Iterable


def page_budget(arrival_tokens: int) -> int:
    """Return the tokens that a page of a tool's own making may take, so that with its footer it stays unstubbed."""
    return arrival_tokens * 3 // 4


def pack_lines(lines: Iterable[str], *, budget_tokens: int, count_tokens: Callable[[str], int]) -> list[str]:
    """Return the first lines that fit together, each counted with its line feed; at least the first one."""
    packed: list[str] = []
    used_tokens = 0
    for line in lines:
        used_tokens += count_tokens(f"{line}\n")
        if packed and used_tokens > budget_tokens:
            break
        packed.append(line)
    # A tokenizer may need more for the whole than for its lines one by one.
    while len(packed) > 1 and count_tokens("\n".join(packed)) > budget_tokens:
        packed.pop()
    return packed


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
