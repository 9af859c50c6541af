"""The one way of a tool's output into the window: counted, and put into the artifact store where it is too large.

The decision is `compaction.arrival`'s; this module does the effects. The blob is on disk before any event cites it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from ..compaction.arrival import Arrival, plan_admission, stub_text
from ..compaction.artifacts import ArtifactRef, ArtifactStore
from ..kernels.errors import ArtifactError
from .calls import LoggedCall
from .log_format import clean_text
from .tools.spec import ToolOutput

MOST_BYTES_PER_TOKEN = 128
"""No token of a known vocabulary is longer (runs of white space are the longest): more bytes than this for each
token of the limit are over it without counting."""

EDGE_BYTES = 4096
"""How much of each end of a stored output is looked at for a stub's first and last lines."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Offered:
    """A call's output at the gate, and the limit that holds for it."""

    call: LoggedCall
    output: ToolOutput
    limit_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Admitted:
    """What enters the window for a call: the content as it is, or a stub with its artifact."""

    content: str
    is_error: bool
    artifact: str | None
    size_bytes: int
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Gate:
    """Admits the outputs of one step. `count` is exact near any threshold; `shown_path` is how a tool names a blob."""

    store: ArtifactStore
    count: Callable[[str], int]
    shown_path: Callable[[ArtifactRef], str]
    stub_limit_tokens: int = 300

    def paths_of(self, artifacts: Iterable[str]) -> tuple[str, ...]:
        """Return how tools name these blobs, so that a grammar can offer them; one that is gone is left out."""
        found = []
        for sha256 in artifacts:
            with suppress(ArtifactError):
                found.append(self.shown_path(self.store.find(sha256)))
        return tuple(found)

    def admit(self, offered: Sequence[Offered], *, left_tokens: int) -> tuple[Admitted, ...]:
        """Decide over all the outputs of one step together. Never raises for an output: a store that cannot be
        written becomes an error result with the size of what was lost to the window."""
        offered = [self._readable(one) for one in offered]
        arrivals = [self._measure(one) for one in offered]
        whole = plan_admission(arrivals, left_tokens=left_tokens, stub_tokens=self.stub_limit_tokens)
        return tuple(
            self._enter(one, arrival) if enters else self._stub(one)
            for one, arrival, enters in zip(offered, arrivals, whole, strict=True)
        )

    def _readable(self, offered: Offered) -> Offered:
        """Replace what does not encode as UTF-8; the bytes as they came are stored, and their path is said."""
        clean = clean_text(offered.output.content)
        if clean.original_bytes is None:
            return replace(offered, output=msgspec.structs.replace(offered.output, content=clean.text))
        try:
            kept = f"the bytes as they came: {self.shown_path(self.store.put(clean.original_bytes, text=False))}"
        except ArtifactError as error:
            kept = f"the bytes as they came could not be stored: {error}"
        content = f"{clean.text}\n[not UTF-8 in places; {kept}]"
        return replace(offered, output=msgspec.structs.replace(offered.output, content=content))

    def _measure(self, offered: Offered) -> Arrival:
        limit = offered.limit_tokens
        size_bytes = _size_bytes(offered.output)
        if offered.output.file is not None or size_bytes > limit * MOST_BYTES_PER_TOKEN:
            return Arrival(tokens=limit + 1, limit_tokens=limit, over=True)
        return Arrival(tokens=self.count(offered.output.content), limit_tokens=limit)

    def _enter(self, offered: Offered, arrival: Arrival) -> Admitted:
        output = offered.output
        return Admitted(
            content=output.content,
            is_error=output.is_error,
            artifact=None,
            size_bytes=_size_bytes(output),
            tokens=arrival.tokens,
        )

    def _stub(self, offered: Offered) -> Admitted:
        output = offered.output
        size_bytes = _size_bytes(output)
        try:
            ref = self._keep(output)
            edges = _edges(ref.path)
        except (ArtifactError, OSError) as error:
            content = f"{offered.call.name} gave {size_bytes:,} bytes: too large to show, and not stored: {error}"
            return Admitted(
                content=content, is_error=True, artifact=None, size_bytes=size_bytes, tokens=self.count(content)
            )
        content = stub_text(
            tool=offered.call.name,
            arguments=", ".join(f"{name}={value}" for name, value in offered.call.arguments.items()),
            ref=ref,
            shown_path=self.shown_path(ref),
            lines=edges.lines,
            head=edges.head,
            tail=edges.tail,
        )
        if output.file is not None and output.content:
            content = f"{output.content}\n{content}"
        return Admitted(
            content=content,
            is_error=output.is_error,
            artifact=ref.sha256,
            size_bytes=size_bytes,
            tokens=self.count(content),
        )

    def _keep(self, output: ToolOutput) -> ArtifactRef:
        if output.file is not None:
            return self.store.adopt(output.file)
        return self.store.put(output.content.encode("utf-8", "replace"))


def _size_bytes(output: ToolOutput) -> int:
    if output.file is None:
        return len(output.content.encode("utf-8", "replace"))
    try:
        return output.file.stat().st_size
    except OSError:
        return 0


@dataclass(frozen=True, slots=True)
class _Edges:
    head: list[str]
    tail: list[str]
    lines: int


def _edges(path: Path) -> _Edges:
    """Read the first and last lines of a blob and count its lines, without holding it in memory.

    A line ends at a newline and nowhere else, as `read` counts. One that the edge cuts is marked with an ellipsis.
    """
    newlines, last = 0, b"\n"
    with path.open("rb") as blob:
        head = blob.read(EDGE_BYTES)
        blob.seek(0)
        while chunk := blob.read(1 << 20):
            newlines += chunk.count(b"\n")
            last = chunk[-1:]
        size_bytes = blob.tell()
        blob.seek(max(0, size_bytes - EDGE_BYTES))
        tail = blob.read()
    first = _lines_of(head)
    if size_bytes > EDGE_BYTES and not head.endswith(b"\n"):
        first = first[:-1] if len(first) > 1 else [first[0] + "…"]
    end = _lines_of(tail)
    if size_bytes > EDGE_BYTES and len(end) > 1:
        end = end[1:]
    elif size_bytes > EDGE_BYTES:
        end = ["…" + end[0]]
    return _Edges(first, end, newlines + (last != b"\n"))


def _lines_of(data: bytes) -> list[str]:
    return data.decode("utf-8", "replace").removesuffix("\n").split("\n")
