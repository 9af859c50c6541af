"""Where a message comes from: a line editor at a terminal, plain lines elsewhere."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .opening import state_folder
from .terminal import visible_line, wants_colour

if TYPE_CHECKING:
    from prompt_toolkit import PromptSession
    from prompt_toolkit.completion import CompleteEvent, Completion
    from prompt_toolkit.document import Document
    from prompt_toolkit.history import History
    from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

MOST_COMPLETIONS = 200
_MENTION = re.compile(r"(?:^|(?<=\s))@(\"?)([^\s\"]*)$")


class LeaveChat(Exception):
    """The person wants to leave."""


class PlainLines:
    """Messages from a pipe or file, one a line."""

    def read(self) -> str:
        """Return the next line. Raises LeaveChat at the end."""
        line = sys.stdin.buffer.readline()
        if not line:
            raise LeaveChat
        return line.decode("utf-8", "surrogateescape").rstrip("\r\n")


class LineEditor:
    """Reads messages at a terminal, with a history that outlives the session."""

    def __init__(
        self, *, workspace: Path, commands: tuple[str, ...], note: Callable[[str], None], no_color: bool
    ) -> None:
        self._note = note
        self._session = _prompt_session(workspace=workspace, commands=commands, no_color=no_color)

    def read(self) -> str:
        """Return a message of one or more lines. Raises LeaveChat at Ctrl-D, or Ctrl-C twice on an empty prompt."""
        pressed_before = False
        while True:
            try:
                return self._session.prompt("> ")
            except EOFError:
                raise LeaveChat from None
            except KeyboardInterrupt:
                if pressed_before:
                    raise LeaveChat from None
                pressed_before = True
                self._note("Ctrl-C again leaves, as does Ctrl-D")


def _prompt_session(*, workspace: Path, commands: tuple[str, ...], no_color: bool) -> PromptSession[str]:
    from prompt_toolkit import PromptSession  # noqa: PLC0415  heavy: only where a person types
    from prompt_toolkit.output import ColorDepth  # noqa: PLC0415  with it
    from prompt_toolkit.output.defaults import create_output  # noqa: PLC0415  with it

    return PromptSession(
        history=_history(),
        multiline=True,
        key_bindings=_keys(),
        completer=_completer(workspace, commands),
        complete_while_typing=False,
        prompt_continuation=lambda width, _number, _soft: "." * (width - 1) + " ",
        # The answer may go to a file while the person types at the terminal.
        output=create_output(always_prefer_tty=True),
        color_depth=None if wants_colour(no_color) else ColorDepth.DEPTH_1_BIT,
    )


def _history() -> History:
    """Return the history in the user's state folder, readable by the user alone; one in memory where it cannot be."""
    from prompt_toolkit.history import FileHistory, InMemoryHistory  # noqa: PLC0415  heavy: only where a person types

    path = state_folder() / "history"
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.touch(mode=0o600)
        with path.open("ab"):
            return FileHistory(str(path))
    except OSError:
        return InMemoryHistory()


def _keys() -> KeyBindings:
    from prompt_toolkit.key_binding import KeyBindings  # noqa: PLC0415  heavy: only where a person types

    keys = KeyBindings()

    @keys.add("enter")
    def _send(event: KeyPressEvent) -> None:
        event.current_buffer.validate_and_handle()

    @keys.add("escape", "enter")
    def _new_line(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    @keys.add("c-c")
    def _clear_or_leave(event: KeyPressEvent) -> None:
        if event.current_buffer.text:
            event.current_buffer.reset()
        else:
            event.app.exit(exception=KeyboardInterrupt, style="class:exiting")

    return keys


def _completer(workspace: Path, commands: tuple[str, ...]) -> Any:
    from prompt_toolkit.completion import Completer, Completion  # noqa: PLC0415  heavy: only where a person types

    class ChatCompleter(Completer):
        """Completes @paths of the workspace, and the commands at the start of a message."""

        def get_completions(self, document: Document, complete_event: CompleteEvent) -> Iterable[Completion]:
            del complete_event  # the same whether Tab was pressed or not
            text = document.text_before_cursor
            if text.startswith("/") and not re.search(r"\s", text):
                for name in commands:
                    if name.startswith(text):
                        yield Completion(name, start_position=-len(text))
                return
            mention = _MENTION.search(text)
            if mention is not None:
                for path in matching_paths(workspace, mention[2]):
                    quoted = f'"{path}"' if re.search(r"\s", path) else path
                    # What was typed behind the @, its quote too, gives way to the completion.
                    start = -len(mention[1] + mention[2])
                    yield Completion(quoted, start_position=start, display=visible_line(path))

    return ChatCompleter()


def matching_paths(workspace: Path, start: str) -> list[str]:
    """Return the files and folders (with a slash) that a path which begins like this may mean, hidden ones last.

    Names that hold control characters are left out: such a path cannot be typed.
    """
    folder, slash, prefix = start.rpartition("/")
    root = workspace / folder if slash else workspace
    if ".." in Path(folder).parts or Path(folder).is_absolute():
        return []
    try:
        names = sorted(root.iterdir(), key=lambda path: (path.name.startswith("."), path.name))
    except OSError:
        return []
    found = [
        f"{folder}{slash}{path.name}{'/' if path.is_dir() else ''}"
        for path in names
        if path.name.startswith(prefix) and path.name == visible_line(path.name)
    ]
    return found[:MOST_COMPLETIONS]
