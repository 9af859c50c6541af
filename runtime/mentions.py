"""Finds ``@path`` in what a person wrote: how a file is handed over. Pure: `exists` says which paths are files.

``@README.md`` is the file, ``@README.md:10-40`` its lines 10 to 40, ``@README.md:10`` its line 10,
``@README.md:10-`` what follows from line 10, ``@"a b.md"`` a path with spaces.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import msgspec

Exists: TypeAlias = Callable[[str], bool]


class Mention(msgspec.Struct, frozen=True, kw_only=True):
    """A file in a message, as `read` takes it: lines from `offset` (from 1), `limit` of them or as many as fit."""

    path: str
    offset: int = 1
    limit: int | None = None

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of the `read` call that this mention stands for."""
        lines = {"offset": self.offset} if self.offset > 1 or self.limit is not None else {}
        return {"path": self.path, **lines, **({} if self.limit is None else {"limit": self.limit})}


_LINES = r"(?P<first>\d{1,12})(?P<range>-(?P<last>\d{1,12})?)?"
# Either a quoted path, whose lines may follow the quote, or a run without spaces, quotes and brackets of markup.
_CANDIDATE = re.compile(
    r"@(?:\"(?P<double>[^\"\n]+)\"|'(?P<single>[^'\n]+)'|(?P<run>[^\s\"'`<>|@]+))(?P<after>:\d[\d:-]*)?"
)
# As people write lines, and as compilers write a line and a column.
_WITH_LINES = (re.compile(rf"(?P<path>.+):{_LINES}"), re.compile(rf"(?P<path>.+):{_LINES}:\d+"))
_AFTER_QUOTE = re.compile(f":{_LINES}")
_CLOSING = ".,;:!?)]}*_~…。，、；：！？）】」』"  # noqa: RUF001 (full-width marks close a Chinese sentence)
_LONGEST_RUN = 4096
MOST_TAIL_CHARS = 64
"""How much text in another script may follow a path without a space and still be told from it."""


def find_mentions(text: str, exists: Exists) -> tuple[Mention, ...]:
    """Return the files that `text` mentions, in order, each once."""
    found = (_resolve(candidate, exists) for candidate in _candidates(text))
    return tuple(dict.fromkeys(mention for mention in found if mention is not None))


def find_missing(text: str, exists: Exists) -> tuple[str, ...]:
    """Return what looks like a mention of a file but names none, so that a person can be told of the slip.

    A word after an ``@`` may be anything; it counts if it is quoted, holds a slash or ends in an extension.
    """
    missing = []
    for candidate in _candidates(text):
        quoted = candidate["double"] or candidate["single"]
        path = quoted or candidate["run"].rstrip(_CLOSING)
        if (quoted or "/" in path or re.search(r"\w\.[A-Za-z]\w{0,7}$", path)) and _resolve(candidate, exists) is None:
            missing.append(path)
    return tuple(dict.fromkeys(missing))


def _candidates(text: str) -> Iterator[re.Match[str]]:
    for candidate in _CANDIDATE.finditer(text):
        if not _is_inside_word(text, candidate.start()) and len(candidate.group()) <= _LONGEST_RUN:
            yield candidate


def _is_inside_word(text: str, at: int) -> bool:
    """Whether the ``@`` continues a word, as in an address. Scripts without case set no spaces between words."""
    before = text[at - 1 : at]
    return before in set("._%+-@/\\") or (before.isalnum() and (before.isascii() or before.lower() != before.upper()))


def _resolve(candidate: re.Match[str], exists: Exists) -> Mention | None:
    quoted = candidate["double"] or candidate["single"]
    if quoted:
        lines = _AFTER_QUOTE.match(candidate["after"] or "")
        return _mention(quoted, lines) if exists(quoted) else None
    for path in _shorter_and_shorter(candidate["run"]):
        if exists(path):
            return _mention(path, None)
        for form in _WITH_LINES:
            lines = form.fullmatch(path)
            if lines and exists(lines["path"]):
                return _mention(lines["path"], lines)
    return None


def _shorter_and_shorter(run: str) -> Iterator[str]:
    """Yield the run, without its closing punctuation bit by bit, then without a tail of another script."""
    yield run
    end = len(run)
    while end and run[end - 1] in _CLOSING:
        end -= 1
        yield run[:end]
    for cut in range(end - 1, max(0, end - MOST_TAIL_CHARS), -1):
        if not run[cut].isascii() and run[cut - 1].isascii():
            yield run[:cut].rstrip(_CLOSING)


def _mention(path: str, lines: re.Match[str] | None) -> Mention:
    if lines is None:
        return Mention(path=path)
    first = max(1, int(lines["first"]))
    if lines["range"] is None:
        return Mention(path=path, offset=first, limit=1)
    if lines["last"] is None:
        return Mention(path=path, offset=first)
    last = max(1, int(lines["last"]))
    first, last = min(first, last), max(first, last)
    return Mention(path=path, offset=first, limit=last - first + 1)  # lines [first, last]
