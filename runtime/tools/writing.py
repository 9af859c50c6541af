"""`write` and `edit`: a file is replaced whole or not at all, and an edit is exact or refused."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

from ...kernels.errors import ToolError
from .declare import tool
from .spec import Grounded, ToolContext
from .text_file import TextFormat, binary_file, read_format

EDIT_LIMIT_BYTES = 16 << 20
RESULT_LIMIT_CHARACTERS = 64 << 20
NEAR_MISS_LINES = 2000
LINES_NAMED = 20

_LINE_NUMBER = re.compile(r"^\d+ ")


@tool(writes=True)
def write(context: ToolContext, path: str, content: str) -> str:
    """Create or overwrite a file, with its folders."""
    _check_encodable(content=content)
    data = content.encode()
    existed = context.workspace.replace_file(path, data)
    lines = content.count("\n") + (not content.endswith("\n") and content != "")
    return f"{'overwrote' if existed else 'created'} {path}: {lines} lines, {len(data)} bytes"


@tool(writes=True)
def edit(
    context: ToolContext,
    path: Annotated[str, Grounded.FILE],
    old: Annotated[str, Meta(description="exact text, found once")],
    new: str,
    replace_all: bool = False,
) -> str:
    """Replace text in a file."""
    _check_encodable(old=old, new=new)
    if not old:
        raise ToolError("old is empty; give the exact text to replace, or use write for a whole file")
    if old == new:
        raise ToolError("old and new are the same; nothing to change")
    file = _read_editable(context, path)
    wanted, replacement = file.spelled(old, new)
    count = file.text.count(wanted)
    places = _first_places(file.text, wanted)
    if not places:
        raise ToolError(f"old is not in {path!r}; nothing was changed. {_near_miss(file.text, old)}")
    where = _lines(file.text, places, max(count, len(places)))
    if len(places) > 1 and not replace_all:
        raise ToolError(
            f"old is {max(count, len(places))} times in {path!r}, at {where}; nothing was changed. "
            "Give more of the text around one of them, or set replace_all"
        )
    if len(file.text) + count * (len(replacement) - len(wanted)) > RESULT_LIMIT_CHARACTERS:
        raise ToolError(f"the result would have over {RESULT_LIMIT_CHARACTERS} characters; nothing was changed")
    context.workspace.replace_file(path, file.encoded(file.text.replace(wanted, replacement)))
    return f"edited {path}: {count} replaced, at {where}"


@dataclass(frozen=True, slots=True)
class _EditableFile:
    """A file's whole text, held so that writing it back gives the same bytes."""

    text: str
    format: TextFormat

    def spelled(self, old: str, new: str) -> tuple[str, str]:
        """Return both with the line ends of this file; with the other ones if `old` is only there that way."""
        with_crlf = _with_crlf(old), _with_crlf(new)
        first, second = (with_crlf, (old, new)) if self.format.crlf else ((old, new), with_crlf)
        return second if first[0] not in self.text and second[0] in self.text else first

    def encoded(self, text: str) -> bytes:
        """Return the file's bytes with this text in it."""
        encoding = self.format.encoding
        return encoding.mark + text.encode(encoding.name, _errors(encoding.name))


def _read_editable(context: ToolContext, path: str) -> _EditableFile:
    """Raises ToolError where the file is binary, over EDIT_LIMIT_BYTES, or would not survive a round trip."""
    with context.workspace.open_file(path) as opened:
        data = opened.read(EDIT_LIMIT_BYTES + 1)
        if len(data) > EDIT_LIMIT_BYTES:
            limit = f"over {EDIT_LIMIT_BYTES} bytes, the limit of edit"
            raise ToolError(f"{path!r} is {limit}; change it with bash (sed, or a script)")
        opened.seek(0)
        text_format = read_format(opened, path=path, size_bytes=len(data))
    encoding = text_format.encoding
    try:
        text = data[len(encoding.mark) :].decode(encoding.name, _errors(encoding.name))
    except UnicodeDecodeError as problem:
        raise ToolError(f"{path!r} is not valid {encoding.name}; an edit would change more than asked for") from problem
    if "\0" in text:
        raise binary_file(path, len(data))
    return _EditableFile(text, text_format)


def _errors(encoding: str) -> str:
    # Bytes that are no UTF-8 become lone surrogates and come back as they were.
    return "surrogateescape" if encoding == "utf-8" else "strict"


def _check_encodable(**texts: str) -> None:
    for name, text in texts.items():
        try:
            text.encode()
        except UnicodeEncodeError as problem:
            message = f"{name} holds half a surrogate pair at character {problem.start}, which no file can hold"
            raise ToolError(f"{message}; give the whole character") from problem


def _with_crlf(text: str) -> str:
    return re.sub(r"(?<!\r)\n", "\r\n", text)


def _first_places(text: str, wanted: str) -> list[int]:
    """Return where `wanted` starts first, overlapping places too: either of two that overlap could be meant."""
    places: list[int] = []
    at = text.find(wanted)
    while at >= 0 and len(places) < LINES_NAMED:
        places.append(at)
        at = text.find(wanted, at + 1)
    return places


def _lines(text: str, places: list[int], total: int) -> str:
    numbers = dict.fromkeys(str(text.count("\n", 0, place) + 1) for place in places)
    more = f" and {total - len(places)} more" if total > len(places) else ""
    return f"line{'s' if len(numbers) > 1 else ''} {', '.join(numbers)}{more}"


def _near_miss(text: str, old: str) -> str:
    """Say where something like `old` stands, so that the next try can be exact."""
    if not old.strip():
        return "It is white space only; give text around it."
    lines = text.split("\n")
    wanted = [" ".join(line.split()) for line in old.strip().split("\n")]
    numbered = [_LINE_NUMBER.sub("", line) for line in wanted]
    plain = [" ".join(line.split()) for line in lines]
    if numbered != wanted and (at := _find_run(plain, numbered)):
        return f"It is at line {at} without the line numbers; leave those out."
    if at := _find_run(plain, wanted):
        last = at + len(wanted) - 1
        return f"Lines {at}-{last} differ in white space only; copy them as read shows them."
    close = difflib.get_close_matches(wanted[0], plain[:NEAR_MISS_LINES], n=1) if wanted[0] else []
    if close:
        return f"The closest line is {plain.index(close[0]) + 1}: {close[0][:200]}"
    return "Read the file and copy the text exactly."


def _find_run(lines: list[str], wanted: list[str]) -> int:
    """Return the number of the first line from which `wanted` follows, ends being parts of lines; 0 if nowhere."""
    for at in range(len(lines) - len(wanted) + 1):
        if len(wanted) == 1:
            if wanted[0] in lines[at]:
                return at + 1
        elif (
            lines[at].endswith(wanted[0])
            and lines[at + len(wanted) - 1].startswith(wanted[-1])
            and lines[at + 1 : at + len(wanted) - 1] == wanted[1:-1]
        ):
            return at + 1
    return 0
