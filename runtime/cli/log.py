"""`chapbook log`: show a session's events, verify that they are what happened, repair what a crash left."""

from __future__ import annotations

import sys
import time
from datetime import datetime
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from ...compaction.quoting import quantity
from ...kernels.errors import ChapbookError
from ..events import (
    AssistantMessage,
    Author,
    Event,
    IgnoredEvent,
    LedgerSet,
    LedgerStepMarked,
    Logged,
    ModeSet,
    Notice,
    PlanClosed,
    PlanSubmitted,
    PlanVerdictGiven,
    RequestHeader,
    SessionStart,
    StepEnd,
    StepStart,
    ToolCallEvent,
    ToolResult,
    TurnEnd,
    TurnStart,
    UserMessage,
)
from ..log_lock import this_process
from ..log_reading import LOG_NAME, LogVerdict, scan_log, verify_log
from ..log_repair import repair_log
from ..models import places_of_this_machine, resolve_model
from ..prefix_drift import drift_text
from ..store import LATEST
from .opening import Place, find_session_model, fingerprint_of, open_place
from .options import ModelOptions, PlaceOptions, takes
from .show import call_text, ledger_line
from .terminal import clipped, print_json, visible, visible_line

MOST_PROBLEMS = 20

log = typer.Typer(
    help="Show, verify or repair a session's log.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    add_completion=False,
)
SessionName = Annotated[str, typer.Argument(metavar="[SESSION]", help="A session's id, the start of it, or latest.")]
AsJson = Annotated[bool, typer.Option("--json", help="For programs.")]


@log.command("show")
@takes(PlaceOptions)
def show(session: SessionName = LATEST, as_json: AsJson = False, *, options: PlaceOptions) -> int:
    """List a session's events; with --json the lines of its log as they were written."""
    folder = _folder(open_place(options), session)
    scan = scan_log(folder)
    if as_json:
        with (folder / LOG_NAME).open("rb") as file:
            text = file.read(scan.end_bytes).decode("utf-8", "replace")
        sys.stdout.write(visible(text) if sys.stdout.isatty() else text)
    else:
        for logged in scan.events:
            sys.stdout.write(describe_event(logged) + "\n")
    if scan.fault is None:
        return 0
    sys.stderr.write(f"{visible_line(str(scan.fault))}\nwhat follows is not shown; `chapbook log verify` says more\n")
    return 0 if scan.torn else 1


@log.command("verify")
@takes(ModelOptions)
def verify(session: SessionName = LATEST, as_json: AsJson = False, *, options: ModelOptions) -> int:
    """Prove that a log is whole, and that its text gives the tokens that the model was given."""
    place = open_place(options)
    folder = _folder(place, session)
    verdict = verify_log(folder)
    if verdict.intact:
        outcome = _check_tokens(folder, place, options.model)
    else:
        outcome = Outcome(proved=(), problems=("its tokens were not checked against its text: the log is not whole",))
    problems = [*(problem.text for problem in verdict.problems), *outcome.problems]
    if as_json:
        print_json(
            {
                "session": folder.name,
                "events": verdict.events,
                "cited_tokens": verdict.cited_tokens,
                "orphan_bytes": verdict.orphan_bytes,
                "proved": [*_proved(verdict), *outcome.proved],
                "problems": problems,
            }
        )
    else:
        for line in [*_proved(verdict), *outcome.proved]:
            sys.stdout.write(f"{visible_line(line)}\n")
        for line in problems[:MOST_PROBLEMS]:
            sys.stdout.write(f"problem: {visible_line(line)}\n")
        if len(problems) > MOST_PROBLEMS:
            sys.stdout.write(f"and {len(problems) - MOST_PROBLEMS} more; --json lists all\n")
        if not verdict.intact:
            sys.stdout.write("`chapbook log repair` cuts the log after its last valid line, and deletes nothing\n")
    return 1 if problems else 0


@log.command("repair")
@takes(PlaceOptions)
def repair(session: SessionName = LATEST, as_json: AsJson = False, *, options: PlaceOptions) -> int:
    """Cut a log after its last valid line; what is cut is moved to a side file."""
    folder = _folder(open_place(options), session)
    report = repair_log(folder, clock=time.time, holder=this_process(now=time.time()))
    if as_json:
        print_json(report)
        return 0
    if not report.moved:
        sys.stdout.write(f"nothing to repair: {report.events} events, all valid\n")
        return 0
    if report.reason:
        sys.stdout.write(f"{visible_line(report.reason)}\n")
    for side in report.moved:
        sys.stdout.write(
            f"moved {side.size_bytes:,} bytes of {side.cut_from.name}, from byte {side.cut_at_bytes:,} on, to "
            f"{visible_line(str(side.path))}\n"
        )
    sys.stdout.write(f"{report.events} events are left\n")
    return 0


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What checking the tokens proved, and what it could not."""

    proved: tuple[str, ...]
    problems: tuple[str, ...]


def _folder(place: Place, query: str) -> Path:
    return place.store.session_folder(place.store.find_session(query))


def _proved(verdict: LogVerdict) -> list[str]:
    if not verdict.intact:
        return []
    lines = [
        f"{verdict.events:,} events, each of them as it was written (numbers, hash chain)",
        f"{verdict.cited_tokens:,} tokens in tokens.i32, each cited once and as it was written (hashes)",
    ]
    if verdict.orphan_bytes:
        lines.append(f"{verdict.orphan_bytes:,} bytes behind them are cited by no event: an append that was cut off")
    return lines


def _check_tokens(folder: Path, place: Place, named: str | None) -> Outcome:
    """Rebuild every request from the log's text with the vocabulary of its model, and compare."""
    from ..checker import rebuild  # noqa: PLC0415  brings numpy
    from ..llama import open_vocabulary  # noqa: PLC0415  brings llama.cpp
    from ..log_reading import read_log  # noqa: PLC0415  brings numpy

    contents = read_log(folder)
    start = contents.events[0].event if contents.events else None
    if not isinstance(start, SessionStart):
        return Outcome(proved=(), problems=("it does not begin with session/start: its model is not known",))
    places = places_of_this_machine()
    if named is not None:
        path: Path | None = resolve_model(named, places=places)
        if path is not None and fingerprint_of(path) != start.fingerprint:
            return _not_checked(start, f"{path} is another model")
    else:
        path = find_session_model(start, workspace=place.workspace, places=places)
    if path is None:
        return _not_checked(start, "that model is not on this machine")
    try:
        vocabulary = open_vocabulary(path)
    except ChapbookError as error:
        return _not_checked(start, str(error))
    with vocabulary:
        rebuilt = rebuild(contents.events, tokenizer=vocabulary, stored=contents.tokens)
    generated = sum(
        span.length
        for logged in contents.events
        if isinstance(logged.event, AssistantMessage) and logged.event.author is Author.MODEL
        for span in logged.event.spans
    )
    problems = tuple(f"line {problem.seq + 1}: {problem.message}" for problem in rebuilt.problems)
    requests = quantity(len(rebuilt.requests), "request")
    proved = (
        f"{requests} rebuilt from the text of the log, token for token: "
        f"{len(contents.tokens) - generated:,} tokens made again with the vocabulary of {start.model_name}, "
        f"{generated:,} that the model generated taken as they are"
    )
    return Outcome(proved=() if problems else (proved,), problems=problems)


def _not_checked(start: SessionStart, why: str) -> Outcome:
    problem = (
        f"its tokens were not checked against its text: {why}. The session was made with {start.model_name} "
        f"({start.model_path}, fingerprint {start.fingerprint}); pass --model with the path of that file"
    )
    return Outcome(proved=(), problems=(problem,))


def describe_event(logged: Logged) -> str:
    """Return one line for an event: its number, time, type, and what a person wants to know of it."""
    event = logged.event
    when = datetime.fromtimestamp(logged.time).strftime("%H:%M:%S")
    tokens = sum(span.length for span in getattr(event, "spans", ()))
    kind = event.event_type if isinstance(event, IgnoredEvent) else event.__struct_config__.tag
    added = f" [+{tokens:,} tokens]" if tokens else ""
    return visible_line(f"{logged.seq:>5} {when} {kind:<17} {_gist(event)}{added}".rstrip())


def _gist(event: Event) -> str:  # noqa: PLR0911 -- a line for each type of event
    match event:
        case SessionStart():
            of = f" · subagent of {event.parent}" if event.parent else ""
            return f"{event.session} · {event.model_name} · n_ctx {event.n_ctx:,} · chapbook {event.chapbook}{of}"
        case RequestHeader():
            sections = ", ".join(f"{section.name} {section.tokens:,}" for section in event.sections)
            drifted = f" · drifted: {drift_text(event.drifted)}" if event.drifted else ""
            return f"{event.reason} · dialect {event.dialect} · {sections}{drifted}"
        case TurnStart() | TurnEnd():
            end = f" · {event.reason} · {event.detail}".rstrip(" ·") if isinstance(event, TurnEnd) else ""
            return f"turn {event.turn}{end}"
        case StepStart():
            return f"step {event.step} · {event.window_tokens:,} in window" + (" · goes on" if event.continues else "")
        case StepEnd():
            return ledger_line(event.step, event.usage)
        case UserMessage() | Notice():
            return clipped(event.text)
        case AssistantMessage():
            calls = "".join(f" → {call_text(call)}" for call in event.calls)
            return clipped(f"{event.text}{calls}".strip())
        case ToolCallEvent():
            return f"{event.call.id} {clipped(call_text(event.call))}"
        case ToolResult():
            return f"{event.call_id} {'error: ' if event.is_error else ''}{clipped(event.content)}"
    return _plan_gist(event)


def _plan_gist(event: Event) -> str:  # noqa: PLR0911 -- a line for each type of event
    match event:
        case ModeSet():
            return event.mode
        case PlanSubmitted():
            return f"{event.call_id} {clipped(event.title) or '(no heading)'} · artifact {event.artifact[:8]}"
        case PlanVerdictGiven():
            return clipped(f"{event.call_id} {event.verdict or 'no answer'} · {event.feedback}".rstrip(" ·"))
        case PlanClosed():
            return clipped(event.task)
        case LedgerSet():
            return clipped(f"{len(event.ledger.steps)} steps · {event.ledger.task}")
        case LedgerStepMarked():
            return clipped(f"{event.id} {event.state} · {event.note}".rstrip(" ·"))
    return ""
