"""The loop of `chat`: read a message, run a turn, and a few commands that begin with a slash."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from ...compaction.budget import Budgets
from ...kernels.errors import ChapbookError, LogError
from ..calls import ToolChoice
from .editor import LeaveChat, LineEditor, PlainLines
from .log import describe_event
from .terminal import visible_line

if TYPE_CHECKING:
    from .turns import Talk

COMMANDS = {
    "/help": "what can be typed here",
    "/tokens": "the window by kind of segment, and the budgets",
    "/log": "the last events of the session's log, and where it is",
    "/quit": "leave; the session can be resumed",
}
EVENTS_SHOWN = 20
KEYS = (
    "Enter sends, Alt-Enter (or Esc, Enter) begins a new line, pasted lines stay together. @path attaches a file, "
    "@path:10-40 lines of it; Tab completes. Ctrl-C cancels what runs; on an empty prompt, twice, it leaves, as does "
    "Ctrl-D."
)


def chat_loop(talk: Talk, *, choice: ToolChoice, no_color: bool) -> int:
    """Read messages and run turns until the person leaves. Returns the exit code. Raises LogError."""
    note: Callable[[str], None] = talk.view.note
    reader: LineEditor | PlainLines
    if sys.stdin.isatty():
        reader = LineEditor(workspace=talk.place.workspace, commands=tuple(COMMANDS), note=note, no_color=no_color)
        note("/help says what can be typed here")
    else:
        reader = PlainLines()
    while True:
        try:
            text = reader.read()
        except LeaveChat:
            note(f"to go on: chapbook resume {talk.session.id}")
            return 0
        if not text.strip():
            continue
        first = text.split()[0]
        if first in COMMANDS:
            if first == "/quit":
                note(f"to go on: chapbook resume {talk.session.id}")
                return 0
            _command(first, talk)
            continue
        if first == text.strip() and first.startswith("/") and first[1:].isalpha():
            note(f"there is no command {first}; /help lists them")
            continue
        try:
            talk.driver.turn(talk.session, text, choice=choice)
        except LogError:
            raise
        except ChapbookError as error:
            note(visible_line(str(error)))


def _command(name: str, talk: Talk) -> None:
    lines = {"/help": _help, "/tokens": _tokens, "/log": _log}[name](talk)
    for line in lines:
        talk.view.note(line)


def _help(_talk: Talk) -> list[str]:
    return [*(f"{name:8} {what}" for name, what in COMMANDS.items()), KEYS]


def _tokens(talk: Talk) -> list[str]:
    window, opened = talk.session.transcript.window, talk.session.opened
    budgets = Budgets(
        n_ctx=opened.n_ctx,
        prefix_tokens=opened.prefix_tokens,
        arrival_override=talk.place.loaded.config.arrival_tokens,
    )
    return [
        f"window {window.token_count:,} of {budgets.n_ctx:,} tokens",
        *(f"  {kind:8} {tokens:>9,}" for kind, tokens in window.tokens_by_kind().items()),
        f"  reply reserve {budgets.reply_reserve_tokens:,}, left {budgets.left_tokens(window.token_count):,}; "
        f"a result over {budgets.arrival_tokens:,} is stored, a message over {budgets.mention_tokens:,}",
    ]


def _log(talk: Talk) -> list[str]:
    from ..log_reading import LOG_NAME, scan_log  # noqa: PLC0415  only for this command

    folder = talk.session.store.session_folder(talk.session.id)
    events = scan_log(folder).events
    shown = [describe_event(logged) for logged in events[-EVENTS_SHOWN:]]
    return [*shown, f"{len(events)} events in {visible_line(str(folder / LOG_NAME))}"]
