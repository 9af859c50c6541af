"""A short table of contents of a file that was not shown whole: headings of Markdown, definitions of Python."""

from __future__ import annotations

import re
from collections.abc import Iterator

ENTRY_LIMIT = 40
TITLE_LIMIT = 80
SOURCE_LIMIT_BYTES = 4 << 20

_HEADING = re.compile(r"#{1,6}[ \t]+\S")
_FENCE = re.compile(r" {0,3}(`{3,}|~{3,})")
_DEFINITION = re.compile(r"\s*(?:async\s+def|def|class)\s+\w+")


def list_contents(path: str, text: str, *, after_line: int) -> tuple[list[str], int]:
    """Return ``line title`` for entries past `after_line`, at most ENTRY_LIMIT, and how many there are in all."""
    lower = path.lower()
    if lower.endswith((".md", ".markdown")):
        entries = _headings(text)
    elif lower.endswith((".py", ".pyi")):
        entries = _definitions(text)
    else:
        return [], 0
    later = [f"{number} {_clipped(title)}" for number, title in entries if number > after_line]
    return later[:ENTRY_LIMIT], len(later)


def _headings(text: str) -> Iterator[tuple[int, str]]:
    fence = ""
    for number, line in enumerate(text.split("\n"), start=1):
        mark = _FENCE.match(line)
        if mark and not fence:
            fence = mark[1]
        elif mark and mark[1].startswith(fence) and not line.strip().strip(fence[0]):
            fence = ""
        elif not fence and _HEADING.match(line):
            yield number, line


def _definitions(text: str) -> Iterator[tuple[int, str]]:
    for number, line in enumerate(text.split("\n"), start=1):
        if _DEFINITION.match(line):
            yield number, line.split("(", 1)[0].rstrip(": \r")


def _clipped(title: str) -> str:
    title = title.rstrip()
    return title if len(title) <= TITLE_LIMIT else f"{title[: TITLE_LIMIT - 1]}…"
