"""The loop of `chat`: read a message, run a turn, and a few commands that begin with a slash."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from ...compaction.budget import Budgets
from ...kernels.errors import ChapbookError, LogError
from ..calls import ToolChoice
from ..modes import DEFAULT_MODE, PLAN_MODE
from .editor import LeaveChat, LineEditor, PlainLines
from .log import describe_event
from .show import mode_text
from .terminal import visible_line

if TYPE_CHECKING:
    from .turns import Talk

COMMANDS = {
    "/help": "what can be typed here",
    "/plan": "plan mode from the next message on, or with that text; /plan off leaves it, /plan done closes the plan",
    "/mode": "the mode in force, and those there are; /mode NAME asks for one",
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
            text = _command(first, text.strip()[len(first) :].strip(), talk)
            if not text:
                continue
        elif first == text.strip() and first.startswith("/") and first[1:].isalpha():
            note(f"there is no command {first}; /help lists them")
            continue
        try:
            talk.driver.turn(talk.session, text, choice=choice)
        except LogError:
            raise
        except ChapbookError as error:
            note(visible_line(str(error)))


def _command(name: str, rest: str, talk: Talk) -> str:
    """Run a command; what it prints is for the person alone. Returns the message that it leaves to be sent, if any."""
    message = rest if name == "/plan" and rest not in ("", "off", "done") else ""
    commands = {"/help": _help, "/tokens": _tokens, "/log": _log, "/plan": _plan, "/mode": _mode}
    try:
        lines = commands[name](talk, rest)
    except LogError:
        raise
    except ChapbookError as error:
        lines, message = [visible_line(str(error))], ""
    for line in lines:
        talk.view.note(line)
    return message


def _help(_talk: Talk, _rest: str) -> list[str]:
    return [*(f"{name:8} {what}" for name, what in COMMANDS.items()), KEYS]


def _plan(talk: Talk, rest: str) -> list[str]:
    session = talk.session
    if rest == "done":
        closed = session.close_plan()
        return ["there is no plan in force" if closed is None else f"closed: {visible_line(closed)}"]
    if rest == "off":
        wanted = session.pending_mode or session.mode
        if wanted != PLAN_MODE:
            return [f"plan mode is not on; {mode_text(session)}"]
        session.set_mode(DEFAULT_MODE)
    else:
        session.set_mode(PLAN_MODE)
    return [mode_text(session)]


def _mode(talk: Talk, rest: str) -> list[str]:
    if rest:
        talk.session.set_mode(rest)
        return [mode_text(talk.session)]
    return [mode_text(talk.session), f"there are {', '.join(talk.session.modes)}"]


def _tokens(talk: Talk, _rest: str) -> list[str]:
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


def _log(talk: Talk, _rest: str) -> list[str]:
    from ..log_reading import LOG_NAME, scan_log  # noqa: PLC0415  only for this command

    folder = talk.session.store.session_folder(talk.session.id)
    events = scan_log(folder).events
    shown = [describe_event(logged) for logged in events[-EVENTS_SHOWN:]]
    return [*shown, f"{len(events)} events in {visible_line(str(folder / LOG_NAME))}"]
