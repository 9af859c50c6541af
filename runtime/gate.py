"""The one way of text into the window: counted as it will be tokenised, and stored where it is too large.

Results of tools, what hooks add, what a person pastes: all of it passes here, and what the transcript takes of it is
an `Admitted`. The decision is `compaction.arrival`'s; this module does the effects. A blob is on disk before any
event cites it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TypeAlias

import msgspec

from ..compaction.arrival import (
    Arrival,
    Form,
    Measure,
    measure,
    next_to_leave,
    stub_budget,
)
from ..compaction.artifacts import ArtifactRef, ArtifactStore, Stored
from ..compaction.kinds import detect_kind
from ..compaction.previews import preview_lines
from ..compaction.stub import StubFacts, write_stub
from ..kernels.errors import ArtifactError
from .calls import LoggedCall
from .chat_format import Shape
from .log_format import clean_text
from .tools.spec import Citation, ToolOutput

Count: TypeAlias = Callable[[Shape, str], int]
"""The exact tokens of a text as the content of a message of that shape."""

MOST_LEAD_BYTES = 400
"""What a body says beside a file is shown before its stub up to this; what is longer is stored with the file."""

_SMALL_FILE_BYTES_A_TOKEN = 16
_SAMPLE_CHARACTERS = 1 << 14


@dataclass(frozen=True, slots=True, kw_only=True)
class Offered:
    """A text at the gate, as a tool's output, and the limit that holds for it. `lead` stands before it in any form.

    `repeatable`: whether running its source makes it again.
    """

    source: str
    output: ToolOutput
    limit_tokens: int
    arguments: str = ""
    lead: str = ""
    shape: Shape = Shape.TOOL
    repeatable: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Admitted:
    """What enters the window: the content as it is, or a stub with its artifact. Made by a `Gate` alone."""

    content: str
    is_error: bool
    artifact: str | None
    size_bytes: int
    tokens: int


@dataclass(slots=True)
class _Entering:
    """One text on its way: what was offered, and what of it enters so far."""

    offered: Offered
    measured: Measure
    admitted: Admitted
    form: Form = Form.WHOLE

    @property
    def arrival(self) -> Arrival:
        return Arrival(tokens=self.admitted.tokens, form=self.form, paged=self.offered.output.paged)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gate:
    """Admits the outputs of one step together. `shown_path` is how a tool names a blob."""

    store: ArtifactStore
    count: Count
    shown_path: Callable[[ArtifactRef], str]
    arrival_tokens: int

    def citations(self, hashes: Iterable[str]) -> tuple[Citation, ...]:
        """Return how tools name the blobs of these hashes, or beginnings of hashes; one that is gone is left out."""
        found: dict[str, Citation] = {}
        for name in hashes:
            with suppress(ArtifactError):
                ref = self.store.lookup(name)
                found[ref.sha256] = Citation(id=ref.short_id, path=self.shown_path(ref))
        return tuple(found.values())

    def admit(self, offered: Sequence[Offered], *, left_tokens: int) -> tuple[Admitted, ...]:
        """Decide over all the outputs of one step together; what enters takes at most `left_tokens`, unless not even
        the stubs fit.

        Never raises for an output: a store that cannot be written becomes an error result with the size of what did
        not enter.
        """
        entering = [self._arrived(one) for one in offered]
        budget = stub_budget(arrival_tokens=self.arrival_tokens, left_tokens=left_tokens, arrivals=len(entering))
        for one in entering:
            if not one.measured.exact or one.measured.tokens > one.offered.limit_tokens:
                self._leave(one, budget, left_tokens)
        while True:
            arrivals = [one.arrival for one in entering]
            place = next_to_leave(arrivals, left_tokens=left_tokens, stub_tokens=budget)
            if place is None:
                return tuple(one.admitted for one in entering)
            self._leave(entering[place], budget, left_tokens)

    def _arrived(self, offered: Offered) -> _Entering:
        offered = self._readable(_inlined(offered))
        output = offered.output
        if output.file is not None:
            measured = Measure(tokens=offered.limit_tokens + 1, exact=False)
        else:
            shown = offered.lead + output.content
            measured = measure(shown, offered.limit_tokens, lambda text: self.count(offered.shape, text))
        content = offered.lead + output.content if output.file is None else ""
        return _Entering(
            offered,
            measured,
            Admitted(
                content=content,
                is_error=output.is_error,
                artifact=None,
                size_bytes=_size_bytes(output),
                tokens=measured.tokens,
            ),
        )

    def _readable(self, offered: Offered) -> Offered:
        """Replace what is no text; the bytes as they came are stored, and their path is said."""
        clean = clean_text(offered.output.content)
        text, original = clean.text, clean.original_bytes
        if "\0" in text:
            original = original or text.encode()
            text = text.replace("\0", "\ufffd")
        if original is not None:
            try:
                kept = f"the bytes as they came: {self.shown_path(self.store.put(original, text=False))}"
            except ArtifactError as error:
                kept = f"the bytes as they came could not be stored: {error}"
            text = f"{text}\n[not UTF-8 text in places; {kept}]"
        return replace(offered, output=msgspec.structs.replace(offered.output, content=text))

    def _leave(self, one: _Entering, budget: int, left_tokens: int) -> None:
        """Put a stub in the place of a text, or a refusal where it is a page."""
        if one.offered.output.paged:
            one.form, content, artifact, is_error = Form.REFUSED, _page_refusal(one, left_tokens), None, True
        else:
            one.form = Form.STUB
            try:
                stored = self._keep(one.offered)
                content, artifact = self._stub(one, stored, budget), stored.sha256
                is_error = one.offered.output.is_error
            except (ArtifactError, OSError) as error:
                content, artifact, is_error = _not_stored(one, error), None, True
        one.admitted = replace(
            one.admitted,
            content=content,
            is_error=is_error,
            artifact=artifact,
            tokens=self.count(one.offered.shape, content),
        )

    def _keep(self, offered: Offered) -> Stored:
        output = offered.output
        if output.file is None:
            return self.store.put(output.content.encode("utf-8", "replace"))
        lead = b"" if _is_short(output.content) else output.content.encode("utf-8", "replace") + b"\n"
        return self.store.adopt(output.file, lead=lead)

    def _stub(self, one: _Entering, stored: Stored, budget: int) -> str:
        offered, output = one.offered, one.offered.output
        lead = offered.lead
        if output.file is not None and output.content and _is_short(output.content):
            lead += f"{output.content}\n"

        def count(text: str) -> int:
            return self.count(offered.shape, lead + text)

        with self.store.open_text(stored) as text:
            kind = detect_kind(text)
            tokens = one.measured if output.file is None else self._estimate(text.chunks(), stored.size_bytes)
            facts = StubFacts(
                source=offered.source,
                arguments=offered.arguments,
                ref=stored,
                shown_path=self.shown_path(stored),
                lines=text.line_count,
                tokens=tokens.tokens,
                tokens_exact=tokens.exact,
                kind=kind,
                redacted=sum(stored.redacted.values()),
                repeatable=offered.repeatable,
            )
            preview = preview_lines(text, kind)
        return lead + write_stub(facts, preview, budget_tokens=budget, count=count)

    def _estimate(self, chunks: Iterable[bytes], size_bytes: int) -> Measure:
        """Extrapolate the tokens of a blob from its beginning."""
        sample = next(iter(chunks), b"")[:_SAMPLE_CHARACTERS].decode("utf-8", "replace")
        counted = self.count(Shape.TOOL, sample)
        return Measure(tokens=counted * size_bytes // max(1, len(sample.encode())), exact=False)


def call_arguments(call: LoggedCall) -> str:
    """Return a call's arguments on one line, for a stub's first one."""
    return ", ".join(f"{name}={value}" for name, value in call.arguments.items())


def _inlined(offered: Offered) -> Offered:
    """Return an output in a small file as text, since it may enter whole; the file is then gone."""
    output = offered.output
    if output.file is None:
        return offered
    try:
        # A link or a FIFO is left for the store to refuse.
        if not output.file.is_file() or output.file.is_symlink():
            return offered
        if output.file.stat().st_size > offered.limit_tokens * _SMALL_FILE_BYTES_A_TOKEN:
            return offered
        text = output.file.read_bytes().decode("utf-8", "surrogateescape")
        output.file.unlink()
    except OSError:
        return offered
    content = f"{output.content}\n{text}" if output.content else text
    return replace(offered, output=msgspec.structs.replace(output, content=content, file=None))


def _is_short(lead: str) -> bool:
    return len(lead.encode("utf-8", "replace")) <= MOST_LEAD_BYTES


def _size_bytes(output: ToolOutput) -> int:
    if output.file is None:
        return len(output.content.encode("utf-8", "replace"))
    try:
        return output.file.stat().st_size
    except OSError:
        return 0


def _page_refusal(one: _Entering, left_tokens: int) -> str:
    return (
        f"not shown: this page is {one.measured.tokens:,} tokens; {max(0, left_tokens):,} are left in the window, and "
        f"at most {one.offered.limit_tokens:,} may enter at once. Ask for less of it: nothing of it is lost."
    )


def _not_stored(one: _Entering, error: Exception) -> str:
    file = one.offered.output.file
    still_there = "" if file is None or not file.is_file() else f". It is still in {file}"
    return (
        f"{one.offered.lead}{one.offered.source} gave {one.admitted.size_bytes:,} bytes: too large to show, and not "
        f"stored: {error}{still_there}"
    )
