"""The part of a growing reply that a person may see already: text and reasoning, no call markup.

The parse of the whole reply, by the dialect, has the last word; this only decides what can be shown early. What
could be the beginning of a marker is held back until it is decided.
"""

from __future__ import annotations

import codecs
import enum
from dataclasses import dataclass

from .chat_format import ReasoningMarks
from .engine import Trigger


class _Part(enum.Enum):
    TEXT = enum.auto()
    REASONING = enum.auto()
    CALL = enum.auto()


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """What became visible: text, or reasoning."""

    text: str = ""
    reasoning: str = ""


class ReplyStream:
    """Splits the pieces of one reply as they come. Once a call has begun, nothing more is shown early."""

    def __init__(self, *, triggers: tuple[Trigger, ...], reasoning: ReasoningMarks | None) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._triggers = triggers
        self._reasoning = reasoning
        self._part = _Part.REASONING if reasoning and reasoning.open_at_start else _Part.TEXT
        self._held = ""
        self._text_shown = ""

    @property
    def text_shown(self) -> str:
        """All the text that was shown so far."""
        return self._text_shown

    def feed(self, piece: bytes) -> Shown:
        """Take the next piece; return what it made visible."""
        self._held += self._decoder.decode(piece)
        text, reasoning = "", ""
        while self._part is not _Part.CALL:
            marks = self._marks()
            found = min(((self._held.find(mark), mark) for mark in marks if mark in self._held), default=None)
            upto = found[0] if found else len(self._held) - self._undecided(marks)
            ready, self._held = self._held[:upto], self._held[upto:]
            if self._part is _Part.TEXT:
                text += ready
                self._text_shown += ready
            else:
                reasoning += ready
            if not found:
                break
            self._enter(found[1])
        return Shown(text=text, reasoning=reasoning)

    def _enter(self, mark: str) -> None:
        self._held = self._held[len(mark) :]
        if self._part is _Part.REASONING:
            self._part = _Part.TEXT
        elif self._reasoning and mark == self._reasoning.begin:
            self._part = _Part.REASONING
        else:
            self._part = _Part.CALL

    def _marks(self) -> tuple[str, ...]:
        if self._part is _Part.REASONING:
            return (self._reasoning.end,) if self._reasoning else ()
        opening = (trigger.text for trigger in self._triggers if not trigger.at_start or self._may_open(trigger.text))
        return (*opening, self._reasoning.begin) if self._reasoning else tuple(opening)

    def _may_open(self, text: str) -> bool:
        """Whether what is held may be the reply's first text, and begin with `text`."""
        lead = self._held.lstrip()
        return not self._text_shown.strip() and (lead.startswith(text) or text.startswith(lead))

    def _undecided(self, marks: tuple[str, ...]) -> int:
        """Return the length of the longest end of what is held that begins one of the marks."""
        # A mark of length m can be begun by the last k characters, k in [1, m - 1].
        longest = max((len(mark) for mark in marks), default=0)
        for length in range(min(len(self._held), longest - 1), 0, -1):
            if any(mark.startswith(self._held[-length:]) for mark in marks):
                return length
        return 0
