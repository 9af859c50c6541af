"""The one way of text into the window: counted as it will be tokenised, and stored where it is too large.

Results of tools, what hooks add, what a person pastes: all of it passes here, and what the transcript takes of it is
an `Admitted`. The decision is `compaction.arrival`'s; this module does the effects. A blob is on disk before any
event cites it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeAlias

from ..compaction.arrival import Arrival, Form, Measure, measure, next_to_leave, stub_budget
from ..compaction.artifacts import ArtifactRef, ArtifactStore, Stored
from ..compaction.kinds import detect_kind
from ..compaction.packing import fit_text
from ..compaction.previews import preview_lines
from ..compaction.quoting import quantity
from ..compaction.stub import StubFacts, write_stub
from ..kernels.errors import ArtifactError
from .calls import LoggedCall
from .chat_format import Shape
from .gate_intake import Intake, take_in
from .tools.spec import Citation, ToolOutput

Count: TypeAlias = Callable[[Shape, str], int]
"""The exact tokens of a text as the content of a message of that shape."""

_SAMPLE_CHARACTERS = 1 << 14


@dataclass(frozen=True, slots=True, kw_only=True)
class Offered:
    """A text at the gate, as a tool's output, and the limit that holds for it. `lead` stands before it in any form.

    `repeatable`: whether running its source makes it again. `quotes`: whether its stub shows the beginning and end of
    plain text.
    """

    source: str
    output: ToolOutput
    limit_tokens: int
    arguments: str = ""
    lead: str = ""
    shape: Shape = Shape.TOOL
    repeatable: bool = True
    quotes: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Admitted:
    """What enters the window, `tokens` long. Made by a `Gate` alone.

    Where it `is_stub`, the whole, `size_bytes` long, is `artifact`, without its `redacted` secrets. An artifact of
    what is no stub holds the bytes of a text that was not all text.
    """

    content: str
    is_error: bool
    artifact: str | None
    size_bytes: int
    tokens: int
    is_stub: bool = False
    redacted: int = 0


@dataclass(slots=True)
class _Entering:
    """One text on its way: what was offered, what was found of it, what of it enters so far, and the whole once it is
    stored."""

    offered: Offered
    intake: Intake
    measured: Measure
    admitted: Admitted
    form: Form = Form.WHOLE
    stored: Stored | None = None

    @property
    def arrival(self) -> Arrival:
        return Arrival(tokens=self.admitted.tokens, form=self.form, paged=self.offered.output.paged)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gate:
    """Admits the outputs of one step together. `shown_path` is how a tool names a blob; `queryable`: whether the model
    can call the tool that looks into one."""

    store: ArtifactStore
    count: Count
    shown_path: Callable[[ArtifactRef], str]
    arrival_tokens: int
    queryable: bool = True

    def citations(self, hashes: Iterable[str]) -> tuple[Citation, ...]:
        """Return how tools name the blobs of these hashes, or beginnings of hashes; one that is gone is left out."""
        found: dict[str, Citation] = {}
        for name in hashes:
            with suppress(ArtifactError):
                ref = self.store.lookup(name)
                found[ref.sha256] = Citation(id=ref.short_id, path=self.shown_path(ref))
        return tuple(found.values())

    def admit(self, offered: Sequence[Offered], *, left_tokens: int) -> tuple[Admitted, ...]:
        """Decide over all the outputs of one step together; what enters takes at most `left_tokens`, unless not even a
        line for each fits.

        Never raises for an output: a store that cannot be written becomes an error result with the size of what did
        not enter, and a file that was to be taken over stays where it was.
        """
        budget = stub_budget(arrival_tokens=self.arrival_tokens, left_tokens=left_tokens, arrivals=len(offered))
        entering = [self._arrived(one) for one in offered]
        for one in entering:
            if not one.measured.exact or one.measured.tokens > one.offered.limit_tokens:
                self._leave(one, Form.REFUSED if one.offered.output.paged else Form.STUB, budget, left_tokens)
        while True:
            leaving = next_to_leave([one.arrival for one in entering], left_tokens=left_tokens, stub_tokens=budget)
            if leaving is None:
                break
            self._leave(entering[leaving.place], leaving.form, budget, left_tokens)
        for one in entering:
            if one.form is Form.WHOLE:
                one.intake.let_go()
        return tuple(one.admitted for one in entering)

    def with_line(self, admitted: Admitted, line: str) -> Admitted:
        """Return a result with a line of the runtime's own behind it, for which room was kept."""
        content = f"{admitted.content}\n{line}"
        return replace(admitted, content=content, tokens=self.count(Shape.TOOL, content))

    def _arrived(self, offered: Offered) -> _Entering:
        """Take an output in, with its bytes stored where it is not all text."""
        intake = take_in(offered.output, limit_tokens=offered.limit_tokens)
        artifact, redacted, content = None, 0, intake.text
        if intake.original is not None and not offered.output.paged:
            try:
                stored = self.store.put(intake.original, text=False)
                artifact, redacted = stored.sha256, _redacted(stored)
                content += f"\n[not UTF-8 text in places; its bytes: artifact id={stored.short_id}{_without(redacted)}]"
            except ArtifactError as error:
                content += f"\n[not UTF-8 text in places; its bytes could not be stored: {error}]"
        content = offered.lead + content

        def count(text: str) -> int:
            return self.count(offered.shape, text)

        if intake.file is not None:
            measured = Measure(tokens=offered.limit_tokens + 1, exact=False)
        else:
            measured = measure(content, offered.limit_tokens, count)
        admitted = Admitted(
            content=content,
            is_error=offered.output.is_error,
            artifact=artifact,
            size_bytes=intake.size_bytes,
            tokens=measured.tokens,
            redacted=redacted,
        )
        return _Entering(offered, intake, measured, admitted)

    def _leave(self, one: _Entering, form: Form, budget: int, left_tokens: int) -> None:
        """Put what takes less room in the place of a text."""
        was, one.form = one.form, form
        if form is Form.REFUSED:
            self._refuse(one, _page_refusal(one, left_tokens), budget)
        elif one.stored is None and (was is not Form.WHOLE or (form is Form.BRIEF and one.offered.output.paged)):
            self._refuse(one, f"[not shown: no room is left; {one.intake.size_bytes:,} bytes]", budget)
        else:
            try:
                self._enter_stored(one, form, budget)
            except (ArtifactError, OSError, ValueError) as error:
                self._refuse(one, _not_stored(one, error), budget)

    def _enter_stored(self, one: _Entering, form: Form, budget: int) -> None:
        """Let a stub enter, or a line, of what is stored by now."""
        lead = self._shown_lead(one, budget)
        if one.stored is None:
            one.stored = self._keep(one.intake, lead)
        stub = _brief(one, one.stored) if form is Form.BRIEF else self._stub(one, one.stored, lead, budget)
        one.admitted = replace(
            one.admitted,
            content=stub,
            artifact=one.stored.sha256,
            tokens=self.count(one.offered.shape, stub),
            is_stub=True,
            redacted=_redacted(one.stored),
        )

    def _refuse(self, one: _Entering, text: str, budget: int) -> None:
        """Let an error of our own enter, cut to what a stub may take."""
        shape = one.offered.shape
        text = fit_text(text, budget_tokens=budget, count_tokens=lambda part: self.count(shape, part))
        one.admitted = replace(one.admitted, content=text, is_error=True, artifact=None, tokens=self.count(shape, text))

    def _keep(self, intake: Intake, shown_lead: str) -> Stored:
        """Store all of an output; what it left on the disk is let go of once it is there."""
        if intake.file is not None:
            lead = b"" if shown_lead else intake.lead.encode("utf-8", "replace")
            return self.store.adopt(intake.file, lead=lead + b"\n" if lead else b"")
        stored = self.store.put(intake.original or intake.text.encode("utf-8", "replace"))
        intake.let_go()
        return stored

    def _shown_lead(self, one: _Entering, budget: int) -> str:
        """Return what a body said beside its file, if it is short enough to stand before the stub."""
        lead = one.intake.lead
        return f"{lead}\n" if lead and self.count(one.offered.shape, lead) <= budget // 4 else ""

    def _stub(self, one: _Entering, stored: Stored, shown_lead: str, budget: int) -> str:
        offered, intake = one.offered, one.intake
        lead = offered.lead + shown_lead
        with self.store.open_text(stored) as text:
            kind = detect_kind(text)
            tokens = one.measured if intake.file is None else self._estimate(text.chunks(), stored.size_bytes)
            facts = StubFacts(
                source=offered.source,
                arguments=offered.arguments,
                ref=stored,
                shown_path=self.shown_path(stored),
                lines=text.line_count,
                tokens=tokens.tokens,
                tokens_exact=tokens.exact,
                kind=kind,
                redacted=_redacted(stored),
                repeatable=offered.repeatable,
                queryable=self.queryable,
            )
            preview = preview_lines(text, kind) if offered.quotes else ()
        return lead + write_stub(
            facts, preview, budget_tokens=budget, count=lambda text: self.count(offered.shape, lead + text)
        )

    def _estimate(self, chunks: Iterable[bytes], size_bytes: int) -> Measure:
        """Extrapolate the tokens of a blob from its beginning."""
        sample = next(iter(chunks), b"")[:_SAMPLE_CHARACTERS].decode("utf-8", "replace")
        counted = self.count(Shape.TOOL, sample)
        return Measure(tokens=counted * size_bytes // max(1, len(sample.encode())), exact=False)


def call_arguments(call: LoggedCall) -> str:
    """Return a call's arguments on one line, for a stub's first one."""
    return ", ".join(f"{name}={value}" for name, value in call.arguments.items())


def _redacted(stored: Stored) -> int:
    return sum(stored.redacted.values())


def _without(redacted: int) -> str:
    return f", without {quantity(redacted, 'secret')}" if redacted else ""


def _brief(one: _Entering, ref: ArtifactRef) -> str:
    stored = f"{ref.size_bytes:,} bytes, artifact id={ref.short_id}"
    return f"{one.offered.lead}[stored, no room is left to show it: {stored}]"


def _page_refusal(one: _Entering, left_tokens: int) -> str:
    return (
        f"not shown: this page is {one.measured.tokens:,} tokens; {max(0, left_tokens):,} are left in the window, and "
        f"at most {one.offered.limit_tokens:,} may enter at once. Ask for less of it: nothing of it is lost."
    )


def _not_stored(one: _Entering, error: Exception) -> str:
    file: Path | None = one.intake.on_disk
    still_there = "" if file is None else f" It is still in {file}."
    return (
        f"{one.offered.lead}{one.offered.source} gave {one.intake.size_bytes:,} bytes: too large to show, and not "
        f"stored.{still_there} {error}"
    )
