"""What a session's prefix is composed of, and the header that it gives now."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from ..kernels.errors import ToolError
from .chat_format import ChatFormat
from .composition import Composer
from .dialects import choose_dialect, dialect_named
from .engine import Engine
from .events import HeaderReason, RequestHeader
from .session_prefix import PrefixInputs, compose_prefix, read_instructions
from .tools.catalogue import Catalogue
from .tools.workspace import Workspace
from .transitions import learn_chat_format


class FileMark(msgspec.Struct, frozen=True, kw_only=True):
    """By what a file that was changed is told, without reading it. All None: there is none.

    `ctime_ns` tells where the time of the last change was set back, or whether it may be read.
    """

    mtime_ns: int | None = None
    ctime_ns: int | None = None
    size_bytes: int | None = None
    inode: int | None = None


@dataclass(slots=True, kw_only=True)
class PrefixSource:
    """Composes the session prefix from what holds now; shared by a session and its subagents, on any thread.

    `instructions` names the project's file, `template` is None where the engine's is not used.
    """

    engine: Engine
    workspace: Workspace
    catalogue: Catalogue
    system: str
    instructions: str
    template: str | None
    dialect: str | None
    cache_folder: Path | None
    _guard: threading.Lock = field(default_factory=threading.Lock)
    _chat_format: ChatFormat | None = None
    _last: tuple[str | None, RequestHeader] | None = None

    def mark(self) -> FileMark:
        """Return what tells whether the instructions have changed since they were read."""
        try:
            status = self.workspace.resolve(self.instructions).real.stat()
        except (OSError, ToolError):
            return FileMark()  # what no tool may open is as if it were not there
        return FileMark(
            mtime_ns=status.st_mtime_ns,
            ctime_ns=status.st_ctime_ns,
            size_bytes=status.st_size,
            inode=status.st_ino,
        )

    def read(self) -> str | None:
        """Return the instructions as they are. Raises as `read_instructions`."""
        return read_instructions(self.workspace, self.instructions)

    def compose(self, instructions: str | None) -> RequestHeader:
        """Return the header of a new session with these instructions; at once where they are those of the last call.

        Raises UsageError for a dialect that is not known or a tool that cannot be offered, TemplateRefused.
        """
        with self._guard:
            if self._last is None or self._last[0] != instructions:
                self._last = (instructions, self._composed(instructions))
            return self._last[1]

    def _composed(self, instructions: str | None) -> RequestHeader:
        info, template = self.engine.info, self.template
        dialect = dialect_named(self.dialect) if self.dialect else choose_dialect(template).dialect
        if self._chat_format is None:
            self._chat_format = learn_chat_format(
                template, bos_text=info.bos_text, eos_text=info.eos_text, cache_folder=self.cache_folder
            )
        sections = compose_prefix(
            PrefixInputs(system=self.system, instructions=instructions, tools=self.catalogue.schemas()),
            template=template,
            composer=Composer(self.engine, self._chat_format),
            info=info,
            cache_folder=self.cache_folder,
        )
        return RequestHeader(
            reason=HeaderReason.INITIAL,
            dialect=dialect.name,
            chat_format=self._chat_format,
            sections=sections,
            tools=self.catalogue.names,
        )
