"""Where a text is cut before it is tokenised, so that every tokeniser sees the same pieces and no dangerous one.

Two kinds of cut, both decided by the text alone, so that ids are deterministic:

- *markers*: texts that a vocabulary turns into one structural id even when control tokens are not parsed (llama.cpp
  matches USER_DEFINED tokens whatever `parse_special` says). A cut after the first character of each keeps it text.
- *long runs*: 1,024 characters without white space, or of nothing but white space. Measured on llama.cpp as bundled
  by llama-cpp-python 0.3.36: the pre-tokenisers that go through `std::regex` (tekken, gpt-4o, deepseek, default,
  poro, bailing) recurse once a character and overflow an 8 MB stack between 16,384 and 30,000 characters, a 512 kB
  stack between 1,536 and 2,000. tiktoken panics on a run of a million spaces.

A run is cut at a *safe place* where it has one near its limit: after a letter and before a character that is no
letter, mark or apostrophe. Every pattern of `bpe` starts a new word there, so the ids are those of the uncut text.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable
from itertools import pairwise

LONG_RUN_CHARS = 1_024


def split_long_runs(text: str, *, limit: int = LONG_RUN_CHARS) -> tuple[str, ...]:
    """Return pieces that concatenate to `text`, none with a run of more than `limit` characters (at least 2).

    A text without such a run is one piece; an empty text is none.
    """
    if limit < 2:
        raise ValueError(f"the limit of a run is at least 2 characters, not {limit}")
    if not text:
        return ()
    if not _may_hold_long_run(text, limit):
        return (text,)
    pieces = []
    start = 0
    for run in re.finditer(rf"(?<!\S)\S{{{limit + 1},}}|(?<!\s)\s{{{limit + 1},}}", text):
        at = run.start()
        # [at, run.end()) is the rest of the run; [start, at) holds no long run.
        while run.end() - at > limit:
            at = _cut_place(text, at, at + limit)
            pieces.append(text[start:at])
            start = at
    pieces.append(text[start:])
    return tuple(pieces)


def split_long_runs_reference(text: str, *, limit: int = LONG_RUN_CHARS) -> tuple[str, ...]:
    """The same, by walking the characters and looking for the end of each run."""
    pieces = [""] if text else []
    at = 0
    while at < len(text):
        end = at
        while end < len(text) and text[end].isspace() == text[at].isspace():
            end += 1
        while end - at > limit:
            safe = [cut for cut in range(at + limit // 2, at + limit + 1) if is_safe_cut(text, cut)]
            cut = safe[-1] if safe else at + limit
            pieces[-1] += text[at:cut]
            pieces.append("")
            at = cut
        pieces[-1] += text[at:end]
        at = end
    return tuple(pieces)


def is_safe_cut(text: str, at: int) -> bool:
    """Whether a cut before character `at` (0 < at < len(text)) falls where every pre-tokeniser cuts anyway."""
    after = text[at]
    return (
        text[at - 1].isalpha()
        and not after.isalpha()
        and after != "'"
        and not unicodedata.category(after).startswith("M")
    )


def halve(text: str) -> tuple[str, str]:
    """Return two parts of a text of at least 2 characters, cut at a safe place in its second quarter, or the middle."""
    at = _cut_place(text, 0, len(text) // 2)
    return text[:at], text[at:]


class PieceSplitter:
    """Cuts markers and long runs; one for each vocabulary, and the same one for every tokeniser of it."""

    __slots__ = ("_first_chars", "_lengths", "_markers", "_run_limit_chars")

    def __init__(self, markers: Iterable[str] = (), *, run_limit_chars: int = LONG_RUN_CHARS) -> None:
        """`markers` of one character cannot be cut and are left as they are."""
        self._markers = frozenset(marker for marker in markers if len(marker) > 1)
        self._lengths = sorted({len(marker) for marker in self._markers})
        firsts = "".join(sorted({re.escape(marker[0]) for marker in self._markers}))
        self._first_chars = re.compile(f"[{firsts}]") if firsts else None
        self._run_limit_chars = run_limit_chars

    @property
    def markers(self) -> frozenset[str]:
        """The texts that no piece holds."""
        return self._markers

    def pieces(self, text: str) -> tuple[str, ...]:
        """Return pieces that concatenate to `text`; none holds a marker or a long run."""
        parts = split_long_runs(text, limit=self._run_limit_chars)
        return parts if self._first_chars is None else tuple(piece for part in parts for piece in self._cut(part))

    def _cut(self, text: str) -> list[str]:
        starts = self._first_chars.finditer(text) if self._first_chars else ()
        cuts = [
            found.start() + 1
            for found in starts
            if any(text[found.start() : found.start() + length] in self._markers for length in self._lengths)
        ]
        return [text[start:end] for start, end in pairwise([0, *cuts, len(text)])]


def _may_hold_long_run(text: str, limit: int) -> bool:
    # A run longer than `limit` covers a whole aligned window of half of it, so looking at windows is enough, and
    # `split` and `isspace` stop at the first character that settles the matter.
    window = (limit + 1) // 2
    for start in range(0, len(text) - window + 1, window):
        part = text[start : start + window]
        if part.isspace() or part.split(None, 1)[0] == part:
            return True
    return False


def _cut_place(text: str, start: int, end: int) -> int:
    """Return the last safe cut in [middle of start and end, end], or `end`."""
    for at in range(end, max(start + (end - start) // 2, 1) - 1, -1):
        if is_safe_cut(text, at):
            return at
    return end
