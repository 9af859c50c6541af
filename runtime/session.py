"""The embedding API: one conversation with a model about a workspace.

    with Session.open(engine, workspace=Path(".")) as session:
        for event in session.send("What does README.md say?"):
            if isinstance(event, TextDelta):
                print(event.text, end="")

No global state, no printing, no signal handlers. A session belongs to one thread at a time; `cancel` may come from
any. Several sessions may share an engine.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from inspect import GEN_RUNNING, getgeneratorstate
from pathlib import Path
from types import TracebackType
from typing import Self

from ..compaction.plans import operative_plans
from ..kernels.errors import UsageError
from .calls import CallableTool, ChoiceKind, ToolChoice
from .cancel import Cancel
from .engine import Engine, SequenceId
from .events import PlanClosed, PrefixSection, SessionId
from .git_ignore import IgnoreReport
from .mentions import find_mentions, find_missing
from .modes import DEFAULT_MODE
from .pasted import Message, message_of
from .projection import Recovery
from .session_open import Assembled, Resumed, assemble
from .session_settings import SessionHost, SessionSettings
from .store import Store
from .stored_plans import read_session_plans
from .stream import NoticeGiven, SessionOpened, StreamEvent
from .subagent import SUBAGENT_ROUNDS, SubagentReport
from .transcript import Transcript
from .turn import Turn


class Session:
    """A session that is open for writing. Made by `open`; `close` gives its lock and its sequence back."""

    def __init__(self, engine: Engine, assembled: Assembled) -> None:
        """For `open`."""
        self._engine = engine
        self._assembled = assembled
        self._cancel = Cancel()
        self._running: Generator[StreamEvent, None, None] | None = None
        self._closed = False

    @classmethod
    def open(
        cls,
        engine: Engine,
        *,
        workspace: str | Path,
        store: str | Path | None = None,
        resume: str | None = None,
        recompose: bool = False,
        settings: SessionSettings | None = None,
        host: SessionHost | None = None,
    ) -> Session:
        """Open a new session, or the one that `resume` names (an id, its beginning, or ``latest``).

        The store defaults to ``.chapbook`` in the workspace. Raises WorkspaceError, ContextTooSmall with the numbers,
        TemplateRefused, SessionNotFound, LogLocked with the holder, LogDamaged, ModelError where the session was made
        with another model.

        A resume composes the session prefix again. The recorded one stays in force, and the model is told what would
        be different now; with `recompose` the new one takes its place, and what stands behind it is evaluated again.
        That is refused, before anything is written, with NoRoom where the messages do not fit behind it.
        """
        if recompose and resume is None:
            raise UsageError("recompose is for a session that is resumed: a new one has the prefix as it is now")
        assembled = assemble(
            engine,
            workspace=Path(workspace),
            store_folder=None if store is None else Path(store),
            resume=resume,
            recompose=recompose,
            settings=settings or SessionSettings(),
            host=host or SessionHost(),
            make_session=cls,
        )
        return cls(engine, assembled)

    @property
    def id(self) -> SessionId:
        return self._assembled.id

    @property
    def transcript(self) -> Transcript:
        """The session's record: its window, and the fold over its log."""
        return self._assembled.parts.transcript

    @property
    def prefix(self) -> tuple[PrefixSection, ...]:
        """The sections of the session prefix in force."""
        return self._assembled.prefix

    @property
    def store(self) -> Store:
        return self._assembled.store

    @property
    def sequence(self) -> SequenceId:
        """The engine's sequence that holds this session."""
        return self._assembled.sequence

    def offered_tools(self) -> tuple[CallableTool, ...]:
        """Return the tools as the next request would offer them, with the paths and blobs that exist now."""
        return self._assembled.parts.offers.tools()

    @property
    def opened(self) -> SessionOpened:
        """What was opened, as the first event of a stream."""
        return SessionOpened(
            session=self.id,
            model_name=self._engine.info.model_name,
            n_ctx=self._engine.info.n_ctx,
            prefix_tokens=sum(section.tokens for section in self.prefix),
            dialect=self._assembled.parts.dialect.name,
            resumed=self._assembled.resumed is not None,
            mode=self.mode,
        )

    @property
    def recovered(self) -> Recovery | None:
        """What a resume had to append to bring a session that was cut off to rest; None for a new session."""
        return self._assembled.resumed.recovery if self._assembled.resumed else None

    @property
    def resumed(self) -> Resumed | None:
        """What opening the log of a resumed session found."""
        return self._assembled.resumed

    @property
    def ignored(self) -> IgnoreReport | None:
        """What a new session did so that git passes over its store; None for one that was resumed."""
        return self._assembled.ignored

    def send(self, text: str, *, choice: ToolChoice | None = None) -> Iterator[StreamEvent]:
        """Run one turn on a person's message and yield what happens; the last event is `TurnEnded`.

        ``@path`` in the text attaches that file. A message that is too large for the window is stored whole; its
        beginning and end, and a stub, enter the window. Raises, before anything is logged, UsageError for an empty
        message or a choice that cannot be, and NoRoom for a message of which not even the stub fits; later only
        LogError, where the log cannot be written.
        """
        if self._closed:
            raise UsageError("this session is closed; open it again with resume")
        if not text.strip():
            raise UsageError("the message is empty; say what to do")
        self._require_choice(choice)
        self._require_idle()
        if self._running is not None:
            self._running.close()
        self.transcript.recover()
        self._cancel = Cancel()
        parts = self._assembled.parts
        message = message_of(text, gate=parts.gate, budgets=parts.budgets, transcript=self.transcript)
        self._running = self._turn(message, choice or ToolChoice())
        return self._running

    def subagent(
        self,
        task: str,
        *,
        rounds: int = SUBAGENT_ROUNDS,
        tools: tuple[str, ...] | None = None,
        cancel: Cancel | None = None,
    ) -> SubagentReport:
        """Have a child session work on `task`, and return what came of it once it has ended.

        The child has the session prefix of this session and nothing else of it, a log, a window and `rounds` (1 to
        64) of its own, and the same settings, policies and host. `tools` names those that it may call, None: all that
        this session may; `task` is never one of them. It may be called between turns and from a tool's body, on any
        thread; `cancel`, and this session's own, stop it.

        Raises UsageError for an empty task, a tool that is not there or rounds out of bounds, ToolDenied in a
        session that is a subagent itself, NoRoom for a task that does not fit, and LogError.
        """
        if self._closed:
            raise UsageError("this session is closed; open it again with resume")
        return self._assembled.subagents.run(task, rounds=rounds, tools=tools, cancel=cancel)

    @property
    def mode(self) -> str:
        """The mode in force, by the log."""
        return self.transcript.state.mode

    @property
    def pending_mode(self) -> str | None:
        """The mode that was asked for and comes into force next; None where that is the one in force."""
        wanted = self._assembled.parts.pending_mode.wanted
        return None if wanted == self.mode else wanted

    @property
    def modes(self) -> tuple[str, ...]:
        """The names of the modes that there are, ``default`` first."""
        return (DEFAULT_MODE, *(mode.name for mode in self._assembled.parts.modes))

    def set_mode(self, name: str) -> None:
        """Ask for a mode, from any thread: ``plan``, one that is configured, or ``default``. The newest wish counts.

        It comes into force at the next start of a turn or end of a step, and the model is told. Raises UsageError for
        a name that is none.
        """
        if self._closed:
            raise UsageError("this session is closed; open it again with resume")
        parts = self._assembled.parts
        parts.pending_mode.ask(parts.modes.named(name))

    def close_plan(self) -> str | None:
        """End the plan in force, the ledger's and the one that was submitted, between two turns; return its task or
        title, None where there is none. The model is told nothing.

        Raises UsageError while a turn runs, LedgerError and LogError.
        """
        if self._closed:
            raise UsageError("this session is closed; open it again with resume")
        self._require_idle()
        if self._running is not None:
            self._running.close()
        self.transcript.recover()
        closed = self._assembled.parts.desk.close()
        if closed is None:
            plans = [stored.plan for stored in read_session_plans(self.store, self.id)]
            in_force = operative_plans(plans).plan
            if in_force is None:
                return None
            closed = PlanClosed(task=in_force.title)
        self.transcript.record(closed)
        self._assembled.log.make_durable()
        return closed.task

    def cancel(self) -> None:
        """Stop the turn that runs, from any thread; it ends `interrupted`, and what was evaluated is kept. So do the
        subagents that run."""
        self._cancel.set()
        self._assembled.subagents.cancel()

    def close(self) -> None:
        """Interrupt a turn that runs, give the sequence back, close the log. Closing twice does nothing.

        Raises UsageError, and nothing is closed, while another thread is in the turn, or for a tool that runs in it.
        """
        if self._closed:
            return
        self._require_idle()
        self._closed = True
        try:
            if self._running is not None:
                self._running.close()
        finally:
            try:
                self._engine.drop(self.sequence)
            finally:
                self._assembled.log.close()

    def abandon(self) -> None:
        """Close the log at once, from any thread, whatever the turn is doing: for a host whose process ends now."""
        self._closed = True
        self._assembled.log.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def check_integrity(self) -> None:
        """Assert that log, window and engine agree."""
        self.transcript.check_integrity()

    def _require_choice(self, choice: ToolChoice | None) -> None:
        if choice is not None and not isinstance(choice, ToolChoice):
            raise UsageError(f"choice is a ToolChoice, such as ToolChoice(ChoiceKind.NAMED, 'read'), not {choice!r}")
        parts = self._assembled.parts
        # The turn begins in the mode that was asked for last.
        mode = parts.modes.get(parts.pending_mode.wanted or self.mode)
        names = [tool.name for tool in parts.runner.offered_in(mode)]
        if choice is not None and choice.kind is ChoiceKind.NAMED and choice.name not in names:
            why = f"there is no tool {choice.name!r}"
            if mode is not None and choice.name in parts.runner.offered_names:
                why = f"mode {mode.name} does not allow {choice.name!r}"
            raise UsageError(f"{why} to choose; there are {', '.join(names)}")
        if choice is not None and choice.kind is ChoiceKind.REQUIRED and not names:
            raise UsageError("a call is required, and there is no tool that may be called; use auto")

    def _require_idle(self) -> None:
        if self._running is not None and getgeneratorstate(self._running) == GEN_RUNNING:
            raise UsageError("a turn of this session is being played: cancel it, and wait for its end")

    def _turn(self, message: Message, choice: ToolChoice) -> Generator[StreamEvent, None, None]:
        workspace = self._assembled.workspace
        if message.note:
            yield NoticeGiven(producer="gate", text=message.note, to_model=False)
        for missing in find_missing(message.own_words, workspace.has_file):
            yield NoticeGiven(producer="mentions", text=f"there is no file {missing!r} to attach", to_model=False)
        turn = Turn(
            parts=self._assembled.parts,
            cancel=self._cancel,
            choice=choice,
            mentions=find_mentions(message.own_words, workspace.has_file),
        )
        yield from turn.run(message.event)
