"""Telling from its calls alone that a turn goes in circles."""

from __future__ import annotations

import enum
import json
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

WINDOW_STEPS = 24
"""Calls of older steps are no evidence."""

TIMES_OVER = 3
LONGEST_CYCLE = 5

COMMAND_TOOL = "bash"


class StepCall(msgspec.Struct, frozen=True, kw_only=True):
    """A call and how it ended; `result_hash` is equal where the results are."""

    name: str
    arguments: Mapping[str, Any]
    result_hash: str
    is_error: bool


class StuckKind(enum.StrEnum):
    """What the evidence is."""

    SAME_CALL = "same call"
    FAILING_COMMAND = "failing command"
    CYCLE = "cycle"


class StuckVerdict(msgspec.Struct, frozen=True, kw_only=True):
    """Evidence of a kind, and the notice that tells the model of it."""

    kind: StuckKind
    hint: str


REPEATED_TAIL_CHARS = 2000
LEAST_REPEATED_CHARS = 240
TIMES_REPEATED = 4


def repeats_itself(reply: str) -> bool:
    """Whether a reply has come to say one thing over and over: its end is the same text, but for numbers, four times.

    The period of the end is found by the prefix function of Knuth, Morris and Pratt on the reversed text.
    """
    end = "".join(character for character in reply[-REPEATED_TAIL_CHARS:] if not character.isdigit())[::-1]
    # borders[i]: the length of the longest proper prefix of end[0, i] that is its suffix too.
    borders = [0] * len(end)
    for at in range(1, len(end)):
        length = borders[at - 1]
        while length and end[at] != end[length]:
            length = borders[length - 1]
        borders[at] = length + (end[at] == end[length])
        period = at + 1 - borders[at]
        if at + 1 >= LEAST_REPEATED_CHARS and at + 1 >= TIMES_REPEATED * period:
            return True
    return False


class StuckDetector:
    """Watches the calls of one turn, step by step.

    The first verdict of a kind is for a hint. A second one of that kind comes only from calls made after the hint (one
    more repetition is enough), so that it means: the hint did not help, the turn is stuck.
    """

    def __init__(self) -> None:
        self._steps: deque[int] = deque(maxlen=WINDOW_STEPS)
        self._signatures: list[str] = []
        self._names: list[str] = []
        self._forgotten = 0
        self._hinted_at: dict[StuckKind, int] = {}

    def observe(self, calls: Sequence[StepCall]) -> StuckVerdict | None:
        """Take in the calls of one step (none for a step without), in order; return the first evidence in them."""
        self._forget_oldest_step()
        self._steps.append(len(calls))
        found: _Cycle | None = None
        for call in calls:
            self._signatures.append(_signature(call))
            self._names.append(call.name)
            found = found or self._cycle_at_end()
        if found is None:
            return None
        self._hinted_at[found.kind] = self._total_calls
        return StuckVerdict(kind=found.kind, hint=found.hint)

    def check_integrity(self) -> None:
        """Assert that what is remembered is the window and no more."""
        assert len(self._steps) <= WINDOW_STEPS
        assert sum(self._steps) == len(self._signatures) == len(self._names)
        assert all(at <= self._total_calls for at in self._hinted_at.values())

    @property
    def _total_calls(self) -> int:
        return self._forgotten + len(self._signatures)

    def _forget_oldest_step(self) -> None:
        if len(self._steps) == WINDOW_STEPS:
            dropped = self._steps[0]
            del self._signatures[:dropped], self._names[:dropped]
            self._forgotten += dropped

    def _cycle_at_end(self) -> _Cycle | None:
        """Return the shortest run that the last calls repeat, unless its kind was hinted at less than a run ago."""
        for length in range(1, LONGEST_CYCLE + 1):
            if not _ends_in_cycle(self._signatures, length):
                continue
            cycle = _Cycle(signature=self._signatures[-1], names=tuple(self._names[-length:]))
            if self._total_calls >= self._hinted_at.get(cycle.kind, 0) + length:
                return cycle
        return None


class _Cycle(msgspec.Struct, frozen=True, kw_only=True):
    """Calls that were made three times over; `signature` is that of the last one."""

    signature: str
    names: tuple[str, ...]

    @property
    def kind(self) -> StuckKind:
        if len(self.names) > 1:
            return StuckKind.CYCLE
        return StuckKind.FAILING_COMMAND if self.signature.startswith(_FAILED) else StuckKind.SAME_CALL

    @property
    def hint(self) -> str:
        names = ", ".join(self.names)
        return {
            StuckKind.SAME_CALL: f"You made the same {names} call {TIMES_OVER} times and got the same result. Use that "
            "result, try something else, or answer now.",
            StuckKind.FAILING_COMMAND: f"The same command failed {TIMES_OVER} times. Read its error and change the "
            "command, try something else, or answer now.",
            StuckKind.CYCLE: f"You repeated the same calls ({names}) {TIMES_OVER} times over with the same results. "
            "Try something else, or answer now.",
        }[self.kind]


_FAILED = "failed "


def _signature(call: StepCall) -> str:
    """Return what makes two calls the same. Of a failing command the output may differ: a time, a process id."""
    if call.name == COMMAND_TOOL and call.is_error:
        return _FAILED + json.dumps(call.arguments.get("command"))
    return "ended " + json.dumps([call.name, dict(call.arguments), call.is_error, call.result_hash], sort_keys=True)


def _ends_in_cycle(signatures: Sequence[str], length: int) -> bool:
    """Whether the last `TIMES_OVER` runs of `length` signatures are equal."""
    span = length * TIMES_OVER
    # [-span, -length) against [-span + length, end): each one equals the one a run later.
    return len(signatures) >= span and signatures[-span:-length] == signatures[length - span :]
