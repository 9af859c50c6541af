"""A turn for a person to read: the answer on standard output, everything else on standard error.

On a terminal the answer streams. Elsewhere standard output gets the answer alone, when the turn has ended: what the
model said before it called a tool is a part of the account.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from typing import TextIO

from ...compaction.artifacts import SHORT_ID_DIGITS
from ...compaction.quoting import quantity
from ..calls import LoggedCall
from ..engine import SyncSource
from ..events import StepUsage, TurnEndReason
from ..modes import DEFAULT_MODE
from ..session import Session
from ..sizes import size_text
from ..stream import (
    NoticeGiven,
    PrefillProgressed,
    ReasoningDelta,
    SessionOpened,
    StepEnded,
    StreamEvent,
    SubagentEvent,
    TextDelta,
    ToolFinished,
    ToolStarted,
    TurnEnded,
)
from .terminal import clipped, console, visible, visible_line
from .waiting import WaitingLine

QUIET, LOUD, BAD = "dim", "bold red", "red"

MOST_NOTICE_CHARS = 300

_PART_OF_FILE = re.compile(r"^\[(lines? [^;\]]+)(?:; [^;\]]+ in all)?; next: ", re.MULTILINE)
"""What `read` says of a page with more behind it. No line of a file looks like it: they begin with their numbers."""


def ledger_line(step: int, usage: StepUsage) -> str:
    """Return the account of a step in one line. What is cached was resident, where no other origin is named."""
    origin = "" if usage.source in ("", SyncSource.RESIDENT, SyncSource.NOTHING) else f" ({usage.source})"
    parts = [
        f"step {step}",
        f"{usage.window:,} in window",
        f"{usage.cached:,} cached{origin}",
        f"{usage.evaluated:,} evaluated",
        f"{usage.generated:,} generated",
        f"TTFT {usage.ttft_s:.1f} s",
        f"bound {usage.bound:,}",
    ]
    return " · ".join([*parts, usage.reason] if usage.reason else parts)


def call_text(call: LoggedCall) -> str:
    """Return a call as one line: the tool's name and its arguments."""
    return " ".join([call.name, *(f"{name}={value}" for name, value in call.arguments.items())])


class HumanView:
    """Shows turns on the process's standard streams. `clock` gives seconds that never go back."""

    def __init__(self, *, clock: Callable[[], float], no_color: bool = False) -> None:
        self._err = console(sys.stderr, no_color=no_color)
        self._streams_answer = sys.stdout.isatty()
        self._waiting = WaitingLine(self._err, clock=clock)
        self._open_line: TextIO | None = None
        self._held: list[str] = []
        self._calls: dict[str, ToolStarted] = {}
        self._usages: list[StepUsage] = []

    def show(self, event: StreamEvent) -> None:
        """Show one event."""
        match event:
            case PrefillProgressed():
                self._waiting.prefill(event)
            case TextDelta(text=text):
                self._say(text)
            case ReasoningDelta(text=text):
                self._flow(sys.stderr, text)
            case ToolStarted(call=call):
                self._calls[call.id] = event
                self._tell_held()
                self._waiting.running(call.name)
            case ToolFinished():
                self._show_result(event)
            case NoticeGiven(producer=producer, text=text):
                self._show_notice(producer, text, in_lines=producer == "plan" and not event.to_model)
            case StepEnded(step=step, usage=usage):
                self._show_usage(step, usage)
            case TurnEnded():
                self._show_end(event)
            case SubagentEvent():
                self._show_subagent(event)
            case _:
                pass

    def tick(self) -> None:
        self._waiting.tick()

    def clear(self) -> None:
        self._waiting.clear()

    def note(self, text: str, *, style: str = QUIET) -> None:
        """Write one line to standard error; what is not ours in `text` has been made visible."""
        self._line(text, style)

    def opened(self, session: Session, *, placement: str) -> None:
        """Say what was opened, and what opening it found."""
        opened: SessionOpened = session.opened
        what = "resumed" if opened.resumed else "session"
        self.note(f"{visible_line(opened.model_name)} · {placement}")
        self.note(f"{what} {opened.session} · prefix {opened.prefix_tokens:,} tokens · dialect {opened.dialect}")
        if session.mode != DEFAULT_MODE or session.pending_mode is not None:
            self.note(mode_text(session))
        if session.ignored is not None and session.ignored.note:
            self.note(visible_line(session.ignored.note))
        if session.resumed is not None:
            for side in session.resumed.report.moved:
                self.note(f"set aside: {side.size_bytes:,} bytes of {side.cut_from.name}, now in {side.path}")
            if session.resumed.recovery.needed:
                self.note("it was cut off in a turn: that turn counts as interrupted, and no call of it is run again")

    def report(self, session: Session) -> None:
        """The report at the end of a run: what the turn took, what it wrote, and how to go on."""
        steps = len(self._usages)
        if steps:
            evaluated = sum(usage.evaluated for usage in self._usages)
            cached = sum(usage.cached for usage in self._usages)
            generated = sum(usage.generated for usage in self._usages)
            seconds = sum(usage.prefill_s + usage.decode_s for usage in self._usages)
            plural = "" if steps == 1 else "s"
            self.note(
                f"{steps} step{plural} · {cached:,} cached · {evaluated:,} evaluated · {generated:,} generated · "
                f"{seconds:.1f} s in the model"
            )
        state = session.transcript.state
        if state.files_written:
            self.note(f"written: {visible_line(', '.join(state.files_written))}")
        if state.files_uncertain:
            self.note(f"perhaps written, look: {visible_line(', '.join(state.files_uncertain))}", style=BAD)
        self.note(f"to go on: chapbook resume {session.id}")

    def _show_result(self, event: ToolFinished) -> None:
        started = self._calls.pop(event.call_id, None)
        what = event.name if started is None else call_text(started.call)
        who = "mention" if started is not None and started.by_runtime else "call"
        outcome = f"{_stored(event) if event.is_stub else _entered(event)}, {event.seconds:.1f} s"
        if event.is_error:
            first = event.content.strip().partition("\n")[0]
            outcome += f", error: {clipped(visible_line(first))}"
        room = max(20, self._err.width - len(outcome) - len(who) - 8)
        shown = clipped(visible_line(what), min(room, 200))
        self._line(f"{who} {shown} → {outcome}", BAD if event.is_error else QUIET)

    def _show_notice(self, producer: str, text: str, *, in_lines: bool) -> None:
        """Show a notice in one line, or where its lines are ours (a report on a plan) each as one."""
        first, *rest = text.split("\n") if in_lines else [text]
        self.note(f"{producer}: {clipped(visible_line(first), MOST_NOTICE_CHARS)}")
        for line in rest:
            self.note(f"  {clipped(visible_line(line), MOST_NOTICE_CHARS)}")

    def _show_usage(self, step: int, usage: StepUsage) -> None:
        self._usages.append(usage)
        self._line(visible_line(ledger_line(step, usage)), QUIET)
        if usage.declared_break is not None:
            self._line(
                f"the session prefix was replaced: evaluated again from token {usage.declared_break.token:,}", QUIET
            )
        broken = usage.undeclared_break
        if broken is not None:
            self._line(
                f"UNDECLARED BREAK at token {broken.token:,}, in {visible_line(broken.section)}: what follows it was "
                "evaluated again. This is a fault of chapbook; please report it with the session's log.",
                LOUD,
            )

    def _show_subagent(self, event: SubagentEvent) -> None:
        """A line for each call, step and end of a subagent; what it says comes back as the result of its task."""
        match event.event:
            case PrefillProgressed():
                self._waiting.prefill(event.event)
            case ToolStarted(call=call):
                self._line(f"subagent {event.session} · call {clipped(visible_line(call_text(call)))}", QUIET)
                self._waiting.running(call.name)
            case StepEnded(step=step, usage=usage):
                self._line(f"subagent {event.session} · {visible_line(ledger_line(step, usage))}", QUIET)
            case TurnEnded(reason=reason, rounds=rounds):
                self._line(f"subagent {event.session} · ended, {reason}, rounds: {rounds}", QUIET)
            case _:
                pass

    def _say(self, text: str) -> None:
        if self._streams_answer:
            self._flow(sys.stdout, text)
        else:
            self._held.append(text)

    def _tell_held(self) -> None:
        """What was said was not yet the answer: a call follows it."""
        held, self._held = "".join(self._held).strip(), []
        if held:
            self._flow(sys.stderr, held)
            self._end_line()

    def _show_end(self, event: TurnEnded) -> None:
        self._held = []
        if not self._streams_answer and event.text:
            sys.stdout.write(visible_unless_piped(event.text) + "\n")
            sys.stdout.flush()
        if event.reason is not TurnEndReason.COMPLETED:
            detail = f": {visible_line(event.detail)}" if event.detail else ""
            self._line(f"turn ended, {event.reason}{detail}", BAD)
        elif event.detail:
            self._line(event.detail, BAD)
        self._end_line()

    def _flow(self, stream: TextIO, text: str) -> None:
        """Write a piece of running text; it goes on where the last one of that stream ended."""
        self._waiting.clear()
        if self._open_line is not stream:
            self._end_line()
        shown = visible(text)
        stream.write(shown)
        stream.flush()
        if shown:
            self._open_line = None if shown.endswith("\n") else stream

    def _end_line(self) -> None:
        if self._open_line is not None:
            self._open_line.write("\n")
            self._open_line.flush()
            self._open_line = None

    def _line(self, text: str, style: str) -> None:
        from rich.text import Text  # noqa: PLC0415  heavy: only where something is printed

        self._waiting.clear()
        self._end_line()
        self._err.print(Text(text, style=style))


def mode_text(session: Session) -> str:
    """Say which mode is in force, and which one comes next."""
    text = f"mode {visible_line(session.mode)}"
    if session.mode not in session.modes:
        text += ", which is not defined here: nothing is restricted by it"
    return text if session.pending_mode is None else f"{text}; {session.pending_mode} from the next message on"


def _entered(event: ToolFinished) -> str:
    """Say what entered the window whole, and which part of a file it is."""
    size = size_text(len(event.content.encode("utf-8", "replace")))
    part = _PART_OF_FILE.search(event.content) if event.name == "read" and not event.is_error else None
    return f"{event.tokens:,} tokens, {size}" + (f", {part[1]}" if part else "")


def _stored(event: ToolFinished) -> str:
    """Say what was too large, what the model reads of it, and how to look at the whole."""
    secrets = f" without {quantity(event.redacted, 'secret')}" if event.redacted else ""
    short_id = (event.artifact or "")[:SHORT_ID_DIGITS]
    whole = f"{size_text(event.size_bytes)}, stored{secrets}: chapbook artifact read {short_id}"
    return f"{whole}; the model reads {event.tokens:,} tokens of it"


def visible_unless_piped(text: str) -> str:
    """Return a text for standard output: as it is for a program or file that reads it, made visible on a terminal."""
    return visible(text) if sys.stdout.isatty() else text
