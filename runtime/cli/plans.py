"""`chapbook plans`: what was submitted for review and what became of it; `chapbook plan`: the ledger of its steps."""

from __future__ import annotations

import os
import sys
import time
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from ...compaction.artifacts import SHORT_ID_DIGITS
from ...compaction.ledger_file import FoundLedger, LedgerFile, find_ledgers
from ...compaction.ledger_lines import status_text
from ...compaction.plans import Plan, plan_summary
from ...kernels.errors import SessionNotFound, UsageError
from ..sizes import size_text
from ..store import Store
from ..stored_plans import PlansFound, StoredPlan, find_plans
from .opening import open_place
from .options import PlaceOptions, takes
from .show import visible_unless_piped
from .terminal import print_columns, print_json, visible, visible_line

plans = typer.Typer(
    help="List the plans that were submitted, or show one.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    add_completion=False,
)
plan = typer.Typer(
    help="Show the ledger of a plan's steps.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    add_completion=False,
)
LEAST_DIGITS = 8
"""Of an artifact's hash, as the store takes them."""

AsJson = Annotated[bool, typer.Option("--json", help="For programs.")]


@plan.callback()
def _plan() -> None:
    """Show the ledger of a plan's steps."""


@plans.command("list")
@takes(PlaceOptions)
def list_plans(as_json: AsJson = False, *, options: PlaceOptions) -> None:
    """List every plan of every session with its status, the newest first."""
    store = open_place(options).store
    found = _found(store)
    if as_json:
        print_json([_for_programs(one) for one in found.plans])
    elif not found.plans:
        sys.stderr.write(
            f"no plan was submitted in {visible_line(str(store.folder))} yet: chapbook run --plan asks for one\n"
        )
    else:
        rows = [
            (
                _status(one.plan),
                _when(one.submitted),
                one.plan.exchange.session,
                str(one.plan.exchange.seq),
                size_text(one.plan.exchange.size_bytes),
                (one.plan.exchange.artifact or "")[:SHORT_ID_DIGITS],
                one.plan.title or "(no heading)",
            )
            for one in found.plans
        ]
        heads = ("status", "submitted", "session", "seq", "size", "artifact", "title")
        print_columns(heads, rows, no_color=options.no_color)


@plans.command("show")
@takes(PlaceOptions)
def show_plan(
    which: Annotated[str, typer.Argument(metavar="ID", help="The plan's artifact, by 8 or more digits; or a session.")],
    seq: Annotated[
        int | None, typer.Argument(metavar="[SEQ]", help="Which plan of the session; else its last.")
    ] = None,
    as_json: AsJson = False,
    *,
    options: PlaceOptions,
) -> None:
    """Show a plan as it was submitted on standard output, and what became of it on standard error."""
    store = open_place(options).store
    found = _found(store).plans
    one = _chosen(store, found, which, seq)
    if as_json:
        print_json({**_for_programs(one), "text": one.plan.exchange.text})
        return
    exchange = one.plan.exchange
    # The status first and last, and on another stream: no text can take its place.
    sys.stderr.write(f"{visible_line(f'session {exchange.session} · {plan_summary(one.plan)}')}\n")
    if one.plan.verdict_line:
        sys.stderr.write(f"feedback: {visible(one.plan.verdict_line)}\n")
    sys.stderr.flush()
    ends_line = exchange.text.endswith("\n") or not sys.stdout.isatty()
    sys.stdout.write(visible_unless_piped(exchange.text) + ("" if ends_line else "\n"))
    sys.stdout.flush()
    verdict = one.plan.exchange.verdict
    was = f"; it had been {verdict}" if verdict is not None and one.plan.exchange.closed_seq is not None else ""
    sys.stderr.write(f"this plan is {_status(one.plan)}{_MEANING.get(one.plan.status, '')}{was}\n")
    for other in _same_bytes(found, one):
        exchange = other.plan.exchange
        said = f"the same bytes: {_status(other.plan)}, session {exchange.session}, seq {exchange.seq}"
        sys.stderr.write(visible_line(said) + "\n")


@plan.command("status")
@takes(PlaceOptions)
def status(as_json: AsJson = False, *, options: PlaceOptions) -> None:
    """Show the ledger of this workspace and holder (plan.holder), and name the others."""
    place = open_place(options)
    folder, holder = place.store.folder, place.loaded.config.plan.holder
    own_path = LedgerFile(folder, holder=holder, clock=time.time, pid=os.getpid()).path
    found = find_ledgers(folder)
    own = next((each for each in found if each.path == own_path), FoundLedger(path=own_path))
    others = [each for each in found if each.path != own_path]
    if as_json:
        print_json({"holder": holder, "path": own.path, "ledger": own.ledger, "others": others})
        return
    if own in found and own.ledger is None:
        text = f"{own.path} is no plan that can be read: the next session moves it aside"
    else:
        text = status_text(own.ledger)
    sys.stdout.write(visible(text) + "\n")
    if own.ledger is not None:
        sys.stdout.write(f"begun by session {visible_line(own.ledger.session)}\n")
    for each in others:
        sys.stdout.write(visible_line(f"another: {_shown_path(each.path, folder)}: {_gist(each)}") + "\n")


_MEANING = {
    "pending": ": it is not approved",
    "failed": ": nobody decided anything",
    "rejected": ": it is not approved",
}


def _found(store: Store) -> PlansFound:
    found = find_plans(store)
    for problem in found.problems:
        sys.stderr.write(visible_line(f"{problem}; its plans are shown by what stands before") + "\n")
    return found


def _chosen(store: Store, found: tuple[StoredPlan, ...], which: str, seq: int | None) -> StoredPlan:
    """Return the plan that is meant, of several the newest. Raises UsageError, SessionNotFound."""
    if seq is None and len(which) >= LEAST_DIGITS:
        for one in found:
            if (one.plan.exchange.artifact or "").startswith(which.lower()):
                return one
    try:
        session = store.find_session(which)
    except SessionNotFound as error:
        raise UsageError(f"{which[:80]!r} is neither the artifact of a plan nor a session: {error}") from error
    of_session = [one for one in found if one.plan.exchange.session == session]
    for one in of_session:
        if seq in (None, one.plan.exchange.seq):
            return one
    seqs = ", ".join(str(one.plan.exchange.seq) for one in of_session)
    where = f"at seq {seq}" if seq is not None else "at all"
    raise UsageError(f"session {session} submitted no plan {where}" + (f"; it did at {seqs}" if seqs else ""))


def _same_bytes(found: tuple[StoredPlan, ...], one: StoredPlan) -> list[StoredPlan]:
    """Return the other submissions of what was submitted."""
    artifact = one.plan.exchange.artifact
    return [each for each in found if each is not one and artifact and each.plan.exchange.artifact == artifact]


def _status(one: Plan) -> str:
    by = one.superseded_by
    return one.status.value if by is None else f"{one.status.value} by seq {by.seq}"


def _for_programs(one: StoredPlan) -> dict[str, Any]:
    exchange, by = one.plan.exchange, one.plan.superseded_by
    return {
        "session": exchange.session,
        "seq": exchange.seq,
        "submitted": one.submitted,
        "status": one.plan.status,
        "title": one.plan.title,
        "artifact": exchange.artifact,
        "size_bytes": exchange.size_bytes,
        "feedback": one.plan.verdict_line,
        "superseded_by": by and {"session": by.session, "seq": by.seq},
        "verdict": exchange.verdict,
        "closed_seq": exchange.closed_seq,
        "outline": one.plan.outline,
    }


def _gist(found: FoundLedger) -> str:
    ledger = found.ledger
    if ledger is None:
        return "no plan that can be read"
    closed = ", closed" if ledger.closed else ""
    return f"{ledger.task} ({ledger.done_count} of {len(ledger.steps)} done{closed}; session {ledger.session})"


def _shown_path(path: Path, folder: Path) -> str:
    return path.relative_to(folder).as_posix()


def _when(unix_s: float) -> str:
    return datetime.fromtimestamp(unix_s).strftime("%Y-%m-%d %H:%M")
