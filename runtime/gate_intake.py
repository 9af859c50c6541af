"""What a tool handed over, as the gate works with it: text that can stand in a window, or a file too large for one.

Nothing is removed here before it is certain where the content is.
"""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from .log_format import clean_text
from .tools.spec import ToolOutput

BYTES_A_TOKEN = 16
"""A file of fewer bytes than this for each token of its limit may enter as text, and is read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Intake:
    """An output taken in. `text` is all of it, clean; or it is in `file`, and `lead` is what was said beside it.

    `original` holds the bytes of a text in which something had to be replaced. `on_disk` is the file that holds the
    output until it is let go of, None where there never was one.
    """

    size_bytes: int
    text: str = ""
    original: bytes | None = None
    file: Path | None = None
    lead: str = ""
    on_disk: Path | None = None

    def let_go(self) -> None:
        """Remove the file that an output came in, now that the output is elsewhere."""
        if self.on_disk is not None:
            with suppress(OSError, ValueError):
                self.on_disk.unlink()


def take_in(output: ToolOutput, *, limit_tokens: int) -> Intake:
    """Return what `output` is; a file of up to `BYTES_A_TOKEN` for each token of its limit is read. Never raises.

    A link, a FIFO and what is no regular file are left for the store to refuse.
    """
    if output.file is None:
        return _text(output.content, on_disk=output.backing)
    size_bytes = _size_of(output.file)
    if size_bytes is None or size_bytes > limit_tokens * BYTES_A_TOKEN:
        lead = clean_text(output.content).text
        return Intake(size_bytes=size_bytes or 0, file=output.file, lead=lead, on_disk=output.file)
    try:
        data = _read(output.file, size_bytes)
    except OSError:
        return Intake(
            size_bytes=size_bytes, file=output.file, lead=clean_text(output.content).text, on_disk=output.file
        )
    text = data.decode("utf-8", "surrogateescape")
    return _text(f"{output.content}\n{text}" if output.content else text, on_disk=output.file)


def _text(content: str, *, on_disk: Path | None) -> Intake:
    clean = clean_text(content)
    text, original = clean.text, clean.original_bytes
    size_bytes = len(text.encode()) if original is None else len(original)
    if "\0" in text:
        original = original or text.encode()
        text = text.replace("\0", "\ufffd")
    return Intake(size_bytes=size_bytes, text=text, original=original, on_disk=on_disk)


def _size_of(file: Path) -> int | None:
    """Return the size of a regular file; None where it is none, or cannot be looked at."""
    try:
        status = file.lstat()
    except (OSError, ValueError):
        return None
    return status.st_size if stat.S_ISREG(status.st_mode) else None


def _read(file: Path, size_bytes: int) -> bytes:
    """Read no more than the size that the file had: those of /proc say 0, and some of them never end."""
    handle = os.open(file, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0))
    with os.fdopen(handle, "rb") as opened:
        return opened.read(size_bytes) if size_bytes else b""
