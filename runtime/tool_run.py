"""Running calls: checked, permitted, side by side where their tools are safe, and always with an outcome.

A body runs on a thread of its own. One that raises, hangs past its limit or ignores a cancel ends as an error result;
the session goes on.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from traceback import format_exception_only

from ..compaction.artifacts import ArtifactStore
from ..kernels.errors import ChapbookError, ToolDenied, ToolError, WorkspaceError
from .arguments import check_arguments
from .calls import CallableTool, CallId, LoggedCall
from .cancel import Cancel
from .hooks import Ask as AskPerson
from .hooks import Deny, Hooks
from .mentions import Mention
from .modes import Mode, refusal_of
from .plan_desk import PlanDesk
from .subagent import RunSubagent
from .tools.catalogue import Catalogue
from .tools.policy import Ask, ToolPolicies
from .tools.spec import Citation, Grounded, Policy, Tool, ToolContext, ToolOutput
from .tools.workspace import Workspace

MOST_AT_ONCE = 10
CANCEL_GRACE_S = 2.0
POLL_S = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class CallOutcome:
    """How a call ended. `ran` is False where its body never started. `context_added` is what hooks gave with it, and
    `hook_problems` why others gave nothing."""

    call: LoggedCall
    output: ToolOutput
    seconds: float
    ran: bool
    context_added: tuple[str, ...] = ()
    hook_problems: tuple[str, ...] = ()


class _Body:
    """One body on its thread: what it returned, or that it has not."""

    def __init__(self, tool: Tool, call: LoggedCall, context: ToolContext, clock: Callable[[], float]) -> None:
        self.call = call
        self.cancel = context.cancel
        self._in_turn = tool.in_turn
        self._clock, self._limit_s = clock, tool.timeout_s
        self._started_s, self._ended_s = clock(), 0.0
        self._stopped_s: float | None = None
        self._done = threading.Event()
        self._output: ToolOutput | None = None
        # A daemon, so that a body that never returns does not keep the process from ending.
        self._thread = threading.Thread(target=self._run, args=(tool, context), name=f"chapbook {call.id}", daemon=True)

    def start(self) -> None:
        self._started_s = self._clock()
        if self._in_turn:
            self._thread.run()
        else:
            self._thread.start()

    def wait(self) -> None:
        self._done.wait(POLL_S)

    def is_settled(self) -> bool:
        """Whether there is no more to wait for: it has ended, or was told to stop and had its grace to do so."""
        if self._done.is_set():
            return True
        now_s = self._clock()
        if now_s - self._started_s > self._limit_s:
            self.cancel.set()
        if self._stopped_s is None and self.cancel.is_set:
            self._stopped_s = now_s
        return self._stopped_s is not None and now_s - self._stopped_s > CANCEL_GRACE_S

    def outcome(self, *, cancelled: bool) -> CallOutcome:
        """Return how it ended, once it is settled."""
        output, ended_s = self._output, self._ended_s
        if output is None:
            ended_s = self._clock()
            why = "the turn was cancelled" if cancelled else f"it ran longer than its limit of {self._limit_s:g} s"
            output = _failed(
                f"{self.call.name} did not end: {why}. Its outcome is unknown: verify before trying again."
            )
        return CallOutcome(call=self.call, output=output, seconds=ended_s - self._started_s, ran=True)

    def _run(self, tool: Tool, context: ToolContext) -> None:
        try:
            # A copy: the call that was logged is what counts, whatever the body does to its arguments.
            output = _well_formed(tool.name, tool.body(context, deepcopy(self.call.arguments)))
        except ChapbookError as error:
            output = _failed(str(error))
        except BaseException as error:  # whatever a tool raises is its result, even SystemExit
            if self._in_turn and isinstance(error, KeyboardInterrupt):
                raise  # it is the host that was interrupted, on whose thread this runs
            output = _failed(f"{tool.name} raised {''.join(format_exception_only(error)).strip()}")
        self._ended_s = self._clock()
        self._output = output
        self._done.set()


def _well_formed(name: str, output: object) -> ToolOutput:
    """Return what a body returned, in plain types; a failure where it is no output."""
    if not isinstance(output, ToolOutput):
        return _failed(f"{name} returned {type(output).__name__}; a body returns a ToolOutput")
    if not (
        isinstance(output.content, str)
        and isinstance(output.file, Path | None)
        and isinstance(output.backing, Path | None)
    ):
        return _failed(f"{name} returned a ToolOutput whose content is no text, or whose file is no path")
    # str() makes a plain text of one of a subclass, such as numpy's.
    return ToolOutput(
        content=str(output.content),
        file=output.file,
        is_error=bool(output.is_error),
        paged=bool(output.paged),
        backing=output.backing,
    )


def _wait_for(bodies: Sequence[_Body], *, turn: Cancel) -> None:
    """Return when all bodies are settled; each has its own limit and grace, whichever comes first in the row."""
    with ExitStack() as listening:
        for body in bodies:
            listening.enter_context(turn.listening(body.cancel.set))
        try:
            while running := [body for body in bodies if not body.is_settled()]:
                running[0].wait()
        except BaseException:  # an interrupt of this thread: what it waited for must not go on unseen
            for body in bodies:
                body.cancel.set()
            raise


@dataclass(frozen=True, slots=True, kw_only=True)
class CallRunner:
    """Runs a session's calls in its workspace. `ask` is the person, None where there is none.

    `withheld` names tools of the catalogue that this session may not call, and says why. `mode` gives the one that the
    log says is in force.
    """

    catalogue: Catalogue
    policies: ToolPolicies
    hooks: Hooks
    workspace: Workspace
    capture_folder: Path
    count_tokens: Callable[[str], int]
    artifacts: ArtifactStore
    clock: Callable[[], float]
    subagent: RunSubagent
    mode: Callable[[], Mode | None] = lambda: None
    desk: PlanDesk | None = None
    ask: Ask | None = None
    withheld: Mapping[str, str] = field(default_factory=dict)

    @property
    def offered(self) -> tuple[Tool, ...]:
        """The tools that may be called here; their policies still hold."""
        return self.offered_in(self.mode())

    def offered_in(self, mode: Mode | None) -> tuple[Tool, ...]:
        """Return the tools that may be called in a mode; None is the default one."""
        usable = (tool for tool in self.catalogue if tool.name not in self.withheld)
        return tuple(tool for tool in usable if mode is None or mode.allows(tool.name))

    @property
    def offered_names(self) -> tuple[str, ...]:
        return tuple(tool.name for tool in self.offered)

    def callable_tools(self, stored: Sequence[Citation] = ()) -> tuple[CallableTool, ...]:
        """Return the tools as the grammar sees them now: with the paths that exist now, the steps of the plan in force,
        and the blobs `stored` that stubs or the person have named. A kind that has too many values to offer is left
        free; a tool that marks steps or looks into artifacts is left out while there are none."""
        values: dict[Grounded, tuple[str, ...]] = {Grounded.ARTIFACT: tuple(each.id for each in stored)}
        kinds = {kind for tool in self.offered for kind in tool.grounded.values()}
        if Grounded.STEP in kinds:
            values[Grounded.STEP] = () if self.desk is None else self.desk.step_ids()
        missing = {kind for kind, known in values.items() if not known}
        for kind in kinds - set(values):
            known = self.workspace.grounded_values(kind)
            if known is not None:
                paths = () if kind is Grounded.FOLDER else tuple(each.path for each in stored)
                values[kind] = (*known, *paths)
        return tuple(
            CallableTool(
                schema=tool.schema,
                grounded={name: values[kind] for name, kind in tool.grounded.items() if kind in values},
            )
            for tool in self.offered
            if missing.isdisjoint(tool.grounded.values())
        )

    def mention_call(self, mention: Mention, call_id: CallId) -> LoggedCall:
        """Return the `read` call that a mention stands for."""
        return LoggedCall(id=call_id, name="read", arguments=mention.arguments())

    def run(
        self,
        calls: Sequence[LoggedCall],
        *,
        before_bodies: Callable[[Sequence[LoggedCall]], None],
        cancel: Cancel,
        arrival_tokens: int,
    ) -> tuple[CallOutcome, ...]:
        """Run calls in order and return their outcomes in order; neighbours whose tools are safe run side by side.

        `before_bodies` is called with the calls whose bodies are about to start. Never raises for a call.
        """
        outcomes: list[CallOutcome] = []
        for group in self._groups(calls):
            outcomes += self._run_group(group, before_bodies, cancel, arrival_tokens)
        return tuple(outcomes)

    def _groups(self, calls: Sequence[LoggedCall]) -> Iterator[list[LoggedCall]]:
        group: list[LoggedCall] = []
        for call in calls:
            tool = self.catalogue.get(call.name)
            safe = tool is not None and tool.safe
            if group and (not safe or len(group) == MOST_AT_ONCE):
                yield group
                group = []
            group.append(call)
            if not safe:
                yield group
                group = []
        if group:
            yield group

    def _run_group(
        self,
        group: Sequence[LoggedCall],
        before_bodies: Callable[[Sequence[LoggedCall]], None],
        cancel: Cancel,
        arrival_tokens: int,
    ) -> list[CallOutcome]:
        settled: dict[CallId, CallOutcome] = {}
        bodies: list[_Body] = []
        for call in group:
            try:
                tool, checked = self._cleared(call, cancel)
            except (ToolError, WorkspaceError) as error:
                settled[call.id] = _refused(call, str(error))
            else:
                bodies.append(_Body(tool, checked, self._context(checked, arrival_tokens), self.clock))
        if bodies:
            before_bodies([body.call for body in bodies])
        for body in bodies:
            body.start()
        _wait_for(bodies, turn=cancel)
        for body in bodies:
            settled[body.call.id] = self._with_context(body.outcome(cancelled=cancel.is_set))
        return [settled[call.id] for call in group]

    def _cleared(self, call: LoggedCall, cancel: Cancel) -> tuple[Tool, LoggedCall]:
        """Return the tool and the call with checked arguments. Raises ToolError where it may not run, WorkspaceError
        where there is nothing to run in: an empty answer would be a lie."""
        if cancel.is_set:
            raise ToolError("not started: the turn was cancelled")
        self.workspace.check()
        tool = self.catalogue.get(call.name)
        if tool is None:
            raise ToolError(f"there is no tool {call.name!r}; there are {', '.join(self.offered_names)}")
        if tool.name in self.withheld:
            raise ToolDenied(self.withheld[tool.name])
        mode = self.mode()
        if mode is not None and not mode.allows(tool.name):
            raise ToolDenied(refusal_of(mode, tool.name, known_tools=self.catalogue.names))
        checked = check_arguments(tool.schema, call.arguments)
        ready = LoggedCall(id=call.id, name=call.name, arguments=checked.arguments, coerced=checked.coerced)
        self._require_permission(tool, ready)
        return tool, ready

    def _require_permission(self, tool: Tool, call: LoggedCall) -> None:
        decision = self.hooks.before(call, tool)
        if isinstance(decision, Deny):
            raise ToolDenied(f"not run, a hook denies it: {decision.reason}")
        asks = Policy.ASK if isinstance(decision, AskPerson) else None
        verdict = self.policies.decide(tool, call, ask=self.ask, hook=asks)
        if not verdict.allowed:
            raise ToolDenied(verdict.reason)

    def _context(self, call: LoggedCall, arrival_tokens: int) -> ToolContext:
        cancel = Cancel()
        return ToolContext(
            workspace=self.workspace,
            cancel=cancel,
            call_id=call.id,
            capture_folder=self.capture_folder,
            arrival_tokens=arrival_tokens,
            count_tokens=self.count_tokens,
            artifacts=self.artifacts,
            subagent=partial(self.subagent, cancel=cancel),
            desk=self.desk,
        )

    def _with_context(self, outcome: CallOutcome) -> CallOutcome:
        added = self.hooks.after(outcome.call, outcome.output)
        problems = tuple(f"{failure.hook}: {failure.problem}" for failure in added.failures)
        return replace(outcome, context_added=added.texts, hook_problems=problems)


def _refused(call: LoggedCall, why: str) -> CallOutcome:
    return CallOutcome(call=call, output=_failed(why), seconds=0.0, ran=False)


def _failed(why: str) -> ToolOutput:
    return ToolOutput(content=why, is_error=True)
