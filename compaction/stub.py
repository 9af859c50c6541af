"""What stands in the window for a stored result: what it is, the best of it that fits, and how to look into it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from .artifacts import ArtifactRef
from .contents import has_contents
from .kinds import Kind
from .previews import best_line
from .quoting import PreviewLine, cleaned, clipped, entries_left, quantity

LEAST_BUDGET_TOKENS = 128
_LINE_CHARS = (256, 100, 60)
_ENOUGH_LINES = 2
_SOURCE_CHARS = 40
_ARGUMENTS_CHARS = (100, 40, 0)
_MOST_LINES = 63
_EXTRA_TRIES = 6
_LINES_BEFORE = 5


class StubFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What a stub says of an artifact. `source` is a tool's name, or a phrase for what no tool made, in which case
    `repeatable` is False. `tokens` is exact or, where `tokens_exact` is False, a guess. `redacted` counts secrets.
    Where it is not `queryable`, no tool of the session looks into it, and its path is named instead."""

    source: str
    arguments: str
    ref: ArtifactRef
    shown_path: str
    lines: int
    tokens: int
    tokens_exact: bool
    kind: Kind
    redacted: int
    repeatable: bool = True
    queryable: bool = True


@dataclass(frozen=True, slots=True)
class _Frame:
    header: str
    footer: str

    def around(self, shown: Sequence[str]) -> str:
        return "\n".join(part for part in (self.header, *shown, self.footer) if part)


def write_stub(
    facts: StubFacts, preview: Sequence[PreviewLine], *, budget_tokens: int, count: Callable[[str], int]
) -> str:
    """Return a stub of at most `budget_tokens` tokens by `count`, which is asked for a few dozen texts at most.

    Of the preview the lowest ranks are kept, in their order, with the number of lines left out between quotations. From
    `LEAST_BUDGET_TOKENS` on the size, the artifact's id and how to query it always fit, at no less than a character for
    each token.
    """
    by_rank = sorted(range(len(preview)), key=lambda place: preview[place].rank)[:_MOST_LINES]
    frame = _choose_frame(facts, _queries(facts, preview), budget_tokens, count)
    kept: list[int] = []
    for line_chars in _LINE_CHARS:

        def text_of(places: Sequence[int], line_chars: int = line_chars) -> str:
            shown = _shown([preview[place] for place in sorted(places)], line_chars)
            return frame.around(shown)

        kept = _pack(by_rank, lambda places: count(text_of(places)) <= budget_tokens)
        if len(kept) >= min(_ENOUGH_LINES, len(preview)):
            break
    return text_of(kept)


def _pack(by_rank: Sequence[int], fits: Callable[[Sequence[int]], bool]) -> list[int]:
    """Return as many of the first places as fit together, and of the next few those that still fit."""
    # Invariant: by_rank[:least] fits or is empty, by_rank[:most] does not fit or is more than there is.
    least, most = 0, len(by_rank) + 1
    while most - least > 1:
        middle = (least + most) // 2
        least, most = (middle, most) if fits(by_rank[:middle]) else (least, middle)
    kept = list(by_rank[:least])
    for place in by_rank[least + 1 : least + 1 + _EXTRA_TRIES]:
        if fits([*kept, place]):
            kept.append(place)
    return kept


def _choose_frame(facts: StubFacts, queries: str, budget_tokens: int, count: Callable[[str], int]) -> _Frame:
    """Return the fullest header and footer that leave the preview room; the shortest where none do."""
    for argument_chars in _ARGUMENTS_CHARS:
        frame = _Frame(_header(facts, argument_chars), _footer(facts, queries))
        if count(frame.around(())) <= budget_tokens * 3 // 5:
            return frame
    frame = _Frame(_header(facts, 0), f"[{queries}]")
    if count(frame.around(())) <= budget_tokens * 4 // 5:
        return frame
    return _Frame("", f"[{facts.ref.size_bytes:,} bytes stored; {_shortest(facts)}]")


def _header(facts: StubFacts, argument_chars: int) -> str:
    about = "" if facts.tokens_exact else "about "
    parts = [
        f"{facts.ref.size_bytes:,} bytes",
        quantity(facts.lines, "line"),
        f"{about}{quantity(facts.tokens, 'token')}",
        facts.kind.value,
    ]
    if facts.redacted:
        parts.append(f"{quantity(facts.redacted, 'secret')} redacted")
    arguments = clipped(cleaned(facts.arguments), limit=argument_chars) if argument_chars else ""
    origin = f"{_source(facts)} {arguments}".rstrip()
    return f"[too large, stored whole: {', '.join(parts)}; from {origin}]"


def _footer(facts: StubFacts, queries: str) -> str:
    again = f"; running {_source(facts)} again only makes it again" if facts.repeatable else ""
    return f"[{queries}{again}]"


def _queries(facts: StubFacts, preview: Sequence[PreviewLine]) -> str:
    """Return the calls that look into the artifact, those that give something for its kind."""
    if not facts.queryable:
        return f"no tool of this session looks into it; artifact {facts.ref.short_id}, path {cleaned(facts.shown_path)}"
    toc = "action=toc, " if has_contents(facts.kind) else ""
    read = f"action=read offset={_line_to_read_from(preview)}"
    return f"artifact id={facts.ref.short_id} {toc}action=search query=…, {read}"


def _shortest(facts: StubFacts) -> str:
    if not facts.queryable:
        return f"artifact {facts.ref.short_id}"
    return f"artifact id={facts.ref.short_id} action=search query=…, action=read"


def _line_to_read_from(preview: Sequence[PreviewLine]) -> int:
    """Return where reading helps most: a little before what is quoted first of all, else the beginning."""
    return max(1, best_line(preview) - _LINES_BEFORE)


def _source(facts: StubFacts) -> str:
    return clipped(cleaned(facts.source), limit=_SOURCE_CHARS)


def _shown(preview: Sequence[PreviewLine], line_chars: int) -> list[str]:
    """Return the lines as they stand in a stub, with what is left out between two quotations.

    Lines [1, passed) are quoted or left out. A text cannot end the preview: no line of it begins as ours.
    """
    shown: list[str] = []
    passed = 0
    for line in preview:
        if line.line and line.lines:
            shown += _gap(line.line - passed) if passed else []
            passed = max(passed, line.line + line.lines)
        text = clipped(cleaned(line.text), limit=line_chars)
        shown.append(f" {text}" if text.startswith("[") else text)
    left = entries_left(preview)
    return [*shown, f"… {left:,} more"] if left else shown


def _gap(lines: int) -> list[str]:
    if lines <= 1:  # the numbers beside a single one say which it is
        return ["…"] if lines == 1 else []
    return [f"… {quantity(lines, 'line')} …"]
