"""The commands that talk to a model: `run` and `resume` for one turn, `chat` for many."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, NamedTuple

import typer

from ...kernels.errors import ModelNotFound, UsageError
from ..events import SessionStart, TurnEndReason
from ..models import places_of_this_machine
from ..session import Session
from ..store import LATEST
from ..stream import NoticeGiven, TurnEnded
from .asking import TerminalAsk, somebody_is_there
from .drive import INTERRUPTED, Driver
from .json_lines import JsonView
from .opening import (
    Place,
    configured_model,
    find_session_model,
    is_flag,
    open_engine,
    open_place,
    open_session,
    parse_tool_choice,
    read_session_start,
)
from .options import SessionOptions, takes
from .reviewing import TerminalReview
from .show import HumanView

DONE, ENDED_OTHERWISE = 0, 1
MOST_TASK_CHARACTERS = 16 << 20

Task = Annotated[
    str, typer.Argument(metavar="TASK", help="What to do; - reads it from standard input. @path attaches a file.")
]
OptionalTask = Annotated[str | None, typer.Argument(metavar="[TASK]", help="What to do next; without it, chat.")]
SessionName = Annotated[str, typer.Argument(metavar="[SESSION]", help="A session's id, the start of it, or latest.")]
Recompose = Annotated[
    bool, typer.Option("--recompose", help="Adopt system text, tools and instructions as they are now.")
]
AsJson = Annotated[bool, typer.Option("--json", help="One event a line, for programs.")]


@dataclass(frozen=True, slots=True)
class Talk:
    """A session at the command line: open, with who shows it and who drives it."""

    session: Session
    place: Place
    view: HumanView | JsonView
    driver: Driver


@takes(SessionOptions)
def run(task: Task, as_json: AsJson = False, *, options: SessionOptions) -> int:
    """Run one turn on a task, and report."""
    return _one_turn(_task_text(task), options, resume=None, as_json=as_json)


@takes(SessionOptions)
def resume(
    session: SessionName = LATEST,
    task: OptionalTask = None,
    as_json: AsJson = False,
    recompose: Recompose = False,
    *,
    options: SessionOptions,
) -> int:
    """Go on with a session: with a task for one turn, without one as a chat."""
    if task is not None:
        return _one_turn(_task_text(task), options, resume=session, as_json=as_json, recompose=recompose)
    if as_json:
        raise UsageError("--json is for one turn: name the session and give a task")
    return _chat(options, resume=session, recompose=recompose)


@takes(SessionOptions)
def chat(*, options: SessionOptions) -> int:
    """Talk, turn after turn, in a new session."""
    return _chat(options, resume=None)


def _one_turn(task: str, options: SessionOptions, *, resume: str | None, as_json: bool, recompose: bool = False) -> int:
    choice = parse_tool_choice(options.tool_choice)
    with open_talk(options, resume=resume, as_json=as_json, recompose=recompose) as talk:
        ended = talk.driver.turn(talk.session, task, choice=choice)
        talk.view.report(talk.session)
    return exit_code_of(ended)


def _chat(options: SessionOptions, *, resume: str | None, recompose: bool = False) -> int:
    from .chat import chat_loop  # noqa: PLC0415  brings prompt_toolkit

    choice = parse_tool_choice(options.tool_choice)
    with open_talk(options, resume=resume, recompose=recompose) as talk:
        return chat_loop(talk, choice=choice, no_color=options.no_color)


def exit_code_of(ended: TurnEnded) -> int:
    """Return the exit code for a turn that ended."""
    return {TurnEndReason.COMPLETED: DONE, TurnEndReason.INTERRUPTED: INTERRUPTED}.get(ended.reason, ENDED_OTHERWISE)


@contextlib.contextmanager
def open_talk(
    options: SessionOptions, *, resume: str | None, as_json: bool = False, recompose: bool = False
) -> Iterator[Talk]:
    """Open model and session while Ctrl-C is heard, say what was opened, and close both at the end."""
    view = JsonView() if as_json else HumanView(clock=time.monotonic, no_color=options.no_color)
    driver = Driver(view)
    if somebody_is_there() and not as_json:
        driver = Driver(
            view,
            asking=TerminalAsk(no_color=options.no_color),
            reviewing=TerminalReview(no_color=options.no_color),
        )
    place = open_place(options)
    start = None if resume is None else read_session_start(place, resume)
    model, n_ctx = _opened_with(start, place)
    engine = driver.work(lambda: open_engine(model, place, n_ctx=n_ctx))
    with engine:
        session = driver.work(
            lambda: open_session(
                engine,
                place,
                resume=resume,
                recompose=recompose,
                ask=driver.ask,
                review_plan=driver.review_plan,
                on_prefill=driver.on_prefill,
                on_subagent=driver.on_subagent,
            )
        )
        with session:
            if resume is not None and is_flag(place.loaded, "mode"):
                session.set_mode(place.loaded.config.mode)
            view.opened(session, placement=engine.placement.describe())
            yield Talk(session, place, view, driver)
    # Closing the engine writes what is worth keeping.
    for note in engine.take_notes():
        view.show(NoticeGiven(producer="cache", text=note, to_model=False))


class _OpenedWith(NamedTuple):
    """What a session is opened with; `n_ctx` None: as configured."""

    model: Path
    n_ctx: int | None


def _opened_with(start: SessionStart | None, place: Place) -> _OpenedWith:
    """Return the model and window of a session: those it was made with, unless the command line says otherwise."""
    loaded = place.loaded
    if start is None:
        return _OpenedWith(configured_model(place), None)
    model = configured_model(place) if is_flag(loaded, "model") else _model_of(start, place)
    return _OpenedWith(model, None if is_flag(loaded, "engine.n_ctx") else start.n_ctx)


def _model_of(start: SessionStart, place: Place) -> Path:
    """Return the model that a session was made with. Raises ModelNotFound."""
    found = find_session_model(start, workspace=place.workspace, places=places_of_this_machine())
    if found is None:
        raise ModelNotFound(
            f"session {start.session} was made with {start.model_name} ({start.model_path}), which is not on this "
            "machine any more: pass --model with the path of that file",
            name=start.model_name,
        )
    return found


def _task_text(task: str) -> str:
    if task != "-":
        if not task.strip():
            raise UsageError("the task is empty; say what to do")
        return task
    text = sys.stdin.buffer.read(MOST_TASK_CHARACTERS + 1)
    if len(text) > MOST_TASK_CHARACTERS:
        raise UsageError(
            f"standard input holds more than {MOST_TASK_CHARACTERS:,} bytes: put it into a file in the workspace and "
            "attach it with @path"
        )
    return text.decode("utf-8", "surrogateescape")
