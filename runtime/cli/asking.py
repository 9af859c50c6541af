"""Asking the person at the terminal whether a call may run."""

from __future__ import annotations

import contextlib
import json
import sys
from typing import Any

from ..calls import LoggedCall
from ..tools.spec import Tool
from .terminal import boxed, console

MOST_ROWS = 40
"""More rows of arguments than that are shown on request."""


class TerminalAsk:
    """Asks on standard error and reads the answer from standard input. Call it on the main thread.

    Arguments are shown whole and boxed: nothing in them can look like the question or its answer.
    """

    def __init__(self, *, no_color: bool = False) -> None:
        self._console = console(sys.stderr, no_color=no_color)
        self._always: set[str] = set()

    def __call__(self, tool: Tool, call: LoggedCall) -> bool:
        """Whether the person approves; only a plain yes is one."""
        if tool.name in self._always:
            return True
        rows = [row for name, value in call.arguments.items() for row in self._rows(name, value)]
        self._print(f"The model wants to call {tool.name}:", "bold")
        self._show(rows[:MOST_ROWS])
        if len(rows) > MOST_ROWS:
            self._print(f"  and {len(rows) - MOST_ROWS} more rows: v shows them", "bold")
        while True:
            answer = (read_answer(f"Allow {tool.name}? y(es), N(o), a(lways in this session): ") or "").lower()
            if answer == "v":
                self._show(rows[MOST_ROWS:])
                continue
            if answer in ("a", "always"):
                self._always.add(tool.name)
            return answer in ("y", "yes", "a", "always")

    def _rows(self, name: str, value: Any) -> list[str]:
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        lines = text.split("\n")
        width = self._console.width if self._console.is_terminal else 100
        head = f"{name}: "
        return [
            row
            for number, line in enumerate(lines)
            for row in boxed(f"{head if number == 0 else ' ' * len(head)}{line}", width=width)
        ]

    def _show(self, rows: list[str]) -> None:
        for row in rows:
            self._print(row, "")

    def _print(self, text: str, style: str) -> None:
        from rich.text import Text  # noqa: PLC0415  heavy: only where something is printed

        self._console.print(Text(text, style=style))


def read_answer(question: str) -> str | None:
    """Ask on standard error and return the line that is typed, stripped; None at its end (Ctrl-D)."""
    # What was typed before the question was seen is no answer to it.
    with contextlib.suppress(ImportError, OSError, ValueError):
        import termios  # noqa: PLC0415  not there on Windows

        termios.tcflush(sys.stdin.fileno(), termios.TCIFLUSH)
    sys.stderr.write(question)
    sys.stderr.flush()
    line = sys.stdin.buffer.readline()
    if not line:
        sys.stderr.write("\n")
        return None
    # A terminal may send what is no UTF-8, by its settings or by a paste.
    return line.decode("utf-8", "replace").strip()


def somebody_is_there() -> bool:
    """Whether a person can be asked: both the question and the answer need a terminal."""
    return sys.stdin.isatty() and sys.stderr.isatty()
