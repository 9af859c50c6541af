"""A turn for a program to read: one event a line of JSON on standard output, its type under `type`."""

from __future__ import annotations

import sys

from ..session import Session
from ..stream import StreamEvent
from .terminal import print_json


class JsonView:
    """Writes each event as it comes, `session/open` first."""

    def show(self, event: StreamEvent) -> None:
        print_json(event)
        sys.stdout.flush()

    def opened(self, session: Session, *, placement: str) -> None:
        """Write the line that opens the stream."""
        del placement  # a person's line: what it says is in `chapbook doctor --json`
        self.show(session.opened)

    def report(self, session: Session) -> None:
        """Nothing: a program has seen every step."""

    def tick(self) -> None:
        """Nothing: only what happens is written."""

    def note(self, text: str) -> None:
        """Say it to the person, who is not the one that reads the events."""
        sys.stderr.write(text + "\n")

    def clear(self) -> None:
        """Nothing stands for the moment only."""


def error_line(error: BaseException) -> dict[str, str]:
    """Return the line for a run that could not go on: `kind` is the name of the error in the tree of errors."""
    return {"type": "error", "kind": type(error).__name__, "message": str(error)}
