"""Watching a reply for texts as its bytes come in: triggers that open a constrained span, and stop texts. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from .chat_format import ReasoningMarks
from .engine import Trigger


class TextWatch:
    """Finds any of `texts` across the pieces of a reply. Costs the length of a piece plus that of the longest text."""

    def __init__(self, texts: Sequence[str]) -> None:
        self._texts = tuple(text.encode() for text in texts if text)
        self._reach = max(map(len, self._texts), default=1) - 1
        self._tail = b""

    def peek(self, piece: bytes) -> int | None:
        """Return how many bytes of `piece` stand behind the first match to end in it, None without one."""
        joined = self._tail + piece
        # A match ends in `piece`, so it starts at len(tail) - len(text) + 1 at the earliest.
        starts = [(joined.find(text, max(0, len(self._tail) - len(text) + 1)), text) for text in self._texts]
        ends = [start + len(text) for start, text in starts if start >= 0]
        return len(joined) - min(ends) if ends else None

    def feed(self, piece: bytes) -> None:
        """Take `piece` as part of the reply."""
        if self._reach:
            self._tail = (self._tail + piece)[-self._reach :]

    def restart(self) -> None:
        """Forget what came before: the next match lies wholly in what comes."""
        self._tail = b""


class TriggerWatch:
    """Finds triggers; one that is `at_start` only where nothing but white space stands before it in the reply."""

    def __init__(self, triggers: Sequence[Trigger]) -> None:
        self._anywhere = TextWatch([trigger.text for trigger in triggers if not trigger.at_start])
        self._at_start = tuple(trigger.text.encode() for trigger in triggers if trigger.at_start and trigger.text)
        self._head = b""

    def peek(self, piece: bytes) -> int | None:
        """Return how many bytes of `piece` stand behind the trigger that ends in it, None where none does."""
        overshoots = [self._anywhere.peek(piece)]
        if self._at_start:
            head = (self._head + piece).lstrip()
            overshoots += [len(head) - len(text) for text in self._at_start if head.startswith(text)]
        return max((overshoot for overshoot in overshoots if overshoot is not None), default=None)

    def feed(self, piece: bytes) -> None:
        """Take `piece` as part of the free text of the reply."""
        self._anywhere.feed(piece)
        if self._at_start:
            self._head = (self._head + piece).lstrip()
            self._at_start = tuple(text for text in self._at_start if text.startswith(self._head))

    def restart(self) -> None:
        """Go on after a constrained span: the start of the reply is over."""
        self._anywhere.restart()
        self._at_start = ()


class ReasoningWatch:
    """Tells the reasoning in a reply, in which nothing is a trigger, from what is said."""

    def __init__(self, marks: ReasoningMarks | None) -> None:
        self._begin = TextWatch([marks.begin] if marks else [])
        self._end = TextWatch([marks.end] if marks else [])
        self.inside = marks is not None and marks.open_at_start

    def said(self, piece: bytes) -> bytes:
        """Take `piece` as part of the reply; return what of it is not reasoning (a mark that begins some is)."""
        outside = b""
        while piece:
            watch = self._end if self.inside else self._begin
            behind = watch.peek(piece)
            if behind is None:
                watch.feed(piece)
                return outside if self.inside else outside + piece
            watch.restart()
            upto = len(piece) - behind
            outside += b"" if self.inside else piece[:upto]
            piece = piece[upto:]
            self.inside = not self.inside
        return outside
