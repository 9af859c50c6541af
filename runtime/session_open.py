"""Putting a session together: from an engine, a folder and settings to parts that work with each other."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TypeAlias

import msgspec

from ..compaction.budget import Budgets
from ..compaction.ledger_file import LedgerFile
from ..kernels.errors import ModelError, SessionNotFound
from ..kernels.tokens import NO_TOKENS, TokenIds
from .bound import BoundAccount
from .chat_format import Shape
from .composition import Composer
from .dialects import dialect_named
from .engine import Engine, EngineInfo, SequenceId
from .events import Logged, PrefixSection, RequestHeader, SessionId, SessionStart
from .gate import Gate
from .git_ignore import IgnoreReport
from .hooks import Hooks
from .log_format import LOG_FORMAT
from .log_lock import this_process
from .modes import DEFAULT_MODE, Mode, Modes, PendingMode
from .offers import Offers
from .plan_desk import PlanDesk
from .prefix_source import PrefixSource
from .prefix_watch import PrefixWatch
from .projection import Recovery, project
from .request import Requester
from .session_log import OpenReport, SessionLog
from .session_prefix import require_room
from .session_settings import SessionHost, SessionSettings
from .store import Store, make_session_id
from .stream import PrefillProgressed
from .subagent import ChildSession, OpenChild, Parent, Subagents, depth_refusal
from .tool_run import CallRunner
from .tools.builtin import builtin_tools, optional_tools, with_artifact
from .tools.captures import rescue_captures
from .tools.catalogue import Catalogue
from .tools.policy import ToolPolicies, check_usable, withheld_tools
from .tools.spec import ARTIFACT_TOOL, Policy
from .tools.task import task as task_tool
from .tools.workspace import Workspace
from .transcript import Transcript
from .turn import TurnLimits, TurnParts


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumed:
    """What a resume found in the log and had to append."""

    report: OpenReport
    recovery: Recovery


@dataclass(frozen=True, slots=True, kw_only=True)
class Assembled:
    """A session's parts."""

    id: SessionId
    store: Store
    workspace: Workspace
    log: SessionLog
    sequence: SequenceId
    prefix: tuple[PrefixSection, ...]
    parts: TurnParts
    subagents: Subagents
    resumed: Resumed | None = None
    ignored: IgnoreReport | None = None


MakeSession: TypeAlias = Callable[[Engine, Assembled], ChildSession]
"""Makes a session of its parts; it is `Session` itself, which this module does not know."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Opened:
    """A log that is held for writing, with what stands in it."""

    id: SessionId
    log: SessionLog
    events: tuple[Logged, ...] = ()
    tokens: TokenIds = field(default_factory=lambda: NO_TOKENS)
    report: OpenReport | None = None
    ignored: IgnoreReport | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _World:
    """What everything is made of."""

    engine: Engine
    store: Store
    workspace: Workspace
    catalogue: Catalogue
    prefix: PrefixSource
    settings: SessionSettings
    host: SessionHost
    make_session: MakeSession


def assemble(
    engine: Engine,
    *,
    workspace: Path,
    store_folder: Path | None,
    resume: str | None,
    recompose: bool,
    settings: SessionSettings,
    host: SessionHost,
    make_session: MakeSession,
) -> Assembled:
    """Open or resume a session. What it raises is said by `Session.open`; nothing stays locked behind an error.

    `make_session` makes the sessions of its subagents.
    """
    # Absolute from here on: the host, or a tool, may change the process's working folder.
    workspace = workspace.absolute()
    if store_folder is None:
        store = Store.in_workspace(workspace)
    else:
        store = Store(store_folder.absolute(), workspace=workspace)
    contained = Workspace(workspace, store.folder)
    tools = builtin_tools() if host.tools is None else with_artifact(host.tools)
    catalogue = Catalogue([*tools, *optional_tools(subagents=settings.subagents)])
    world = _World(
        engine=engine,
        store=store,
        workspace=contained,
        catalogue=catalogue,
        prefix=PrefixSource(
            engine=engine,
            workspace=contained,
            catalogue=catalogue,
            system=settings.system,
            instructions=settings.instructions,
            template=None if settings.template == "chatml" else engine.info.chat_template,
            dialect=settings.dialect,
            cache_folder=host.cache_folder,
        ),
        settings=settings,
        host=host,
        make_session=make_session,
    )
    return _assemble(world, resume=resume, recompose=recompose, parent=None)


def _assemble(world: _World, *, resume: str | None, recompose: bool, parent: Parent | None) -> Assembled:
    engine, store = world.engine, world.store
    ToolPolicies(world.settings.policies).check_names(world.catalogue)
    check_usable(world.settings.usable_tools, world.catalogue)
    modes = Modes(world.settings.modes, known_tools=world.catalogue.names)
    first_mode = modes.named(world.settings.mode)
    fresh = None
    if resume is None:
        fresh = _header_of_new_session(world) if parent is None else parent.header_for_child()
    sequence, opened = engine.open_sequence(), None
    try:
        opened = _open_log(world, resume)
        header = fresh or _recorded_header(opened, engine.info)
        transcript = Transcript(opened.log, Composer(engine, header.chat_format))
        watch = PrefixWatch(source=world.prefix, transcript=transcript)
        resumed = None
        if fresh is not None:
            transcript.begin(_session_start(opened.id, world, header, parent), header)
            if first_mode != DEFAULT_MODE:
                transcript.set_mode(first_mode)
        else:
            resumed = _resume(world, opened, transcript, watch, recompose=recompose)
            header = transcript.state.header or header
        subagents = _subagents(world, header, transcript, modes)
        parts = _parts(world, header, transcript, subagents, modes, watch=watch, session=opened.id, sequence=sequence)
    except BaseException:
        engine.drop(sequence)
        if opened is not None:
            opened.log.close()
        raise
    return Assembled(
        id=opened.id,
        store=store,
        workspace=world.workspace,
        log=opened.log,
        sequence=sequence,
        prefix=header.sections,
        parts=parts,
        subagents=subagents,
        resumed=resumed,
        ignored=opened.ignored,
    )


def _header_of_new_session(world: _World) -> RequestHeader:
    """Compose the session prefix. Raises ContextTooSmall where the window has no room behind it."""
    header = world.prefix.compose(world.prefix.read())
    budgets = _budgets(world, header.sections)
    require_room(budgets.n_ctx, prefix=header.sections, smallest_tokens=budgets.smallest_window_tokens)
    return header


def _open_log(world: _World, resume: str | None) -> _Opened:
    host, store = world.host, world.store
    holder = this_process(now=host.clock())
    if resume is None:
        created = store.create_session(
            make_id=lambda: make_session_id(now=host.clock(), entropy=host.entropy(3)), clock=host.clock, holder=holder
        )
        return _Opened(id=created.id, log=created.log, ignored=created.ignored)
    session = store.find_session(resume)
    found = store.open_session(session, clock=host.clock, holder=holder)
    return _Opened(id=session, log=found.log, events=found.events, tokens=found.tokens, report=found.report)


def _recorded_header(opened: _Opened, info: EngineInfo) -> RequestHeader:
    """Return the prefix in force of a session that was read. Raises ModelError where the model is another one."""
    state = project(opened.events)
    if state.start is None or state.header is None:
        raise SessionNotFound(
            f"session {opened.id} was cut off before its first message was possible; start a new one", choices=()
        )
    if state.start.fingerprint != info.fingerprint:
        raise ModelError(
            f"session {opened.id} was made with {state.start.model_name} ({state.start.model_path}), and its tokens "
            f"are that model's; this is {info.model_name}. Resume it with that model, or start a new session."
        )
    return state.header


def _resume(world: _World, opened: _Opened, transcript: Transcript, watch: PrefixWatch, *, recompose: bool) -> Resumed:
    """Bring a session that was read to rest, and record what of its prefix drifted, or adopt it as it is now."""
    transcript.restore(opened.events, opened.tokens)
    adopted = watch.adoptable(lambda header: _budgets(world, header.sections)) if recompose else None
    rescued = rescue_captures(world.store.session_folder(opened.id), world.store.artifacts)
    recovery = transcript.recover(rescued)
    if adopted is not None:
        watch.adopt(adopted)
    watch.look()
    return Resumed(report=opened.report or OpenReport(events=0), recovery=recovery)


def _session_start(session: SessionId, world: _World, header: RequestHeader, parent: Parent | None) -> SessionStart:
    from importlib.metadata import version  # noqa: PLC0415  # 15 ms that only an opening session needs

    info = world.engine.info
    return SessionStart(
        session=session,
        log_format=LOG_FORMAT,
        chapbook=version("chapbook"),
        model_name=info.model_name,
        model_path=info.model_path,
        fingerprint=info.fingerprint,
        template_hash=header.chat_format.template_hash,
        n_ctx=info.n_ctx,
        config=msgspec.to_builtins(world.settings),
        parent=None if parent is None else parent.start.session,
        root=session if parent is None else parent.start.root or parent.start.session,
        intent="new" if parent is None else "subagent",
    )


def _subagents(world: _World, header: RequestHeader, transcript: Transcript, modes: Modes) -> Subagents:
    start = transcript.state.start
    assert start is not None, "a session that is open has begun"
    return Subagents(
        open_child=_child_opener(
            world, Parent(start=start, header=header), mode=lambda: modes.get(transcript.state.mode)
        ),
        refusal=depth_refusal(start),
        on_event=world.host.on_subagent,
    )


def _child_opener(world: _World, parent: Parent, *, mode: Callable[[], Mode | None]) -> OpenChild:
    """Return what opens the subagents of a session: all as in the parent, in its mode, but for what was asked."""
    usable = world.settings.usable_tools

    def open_child(
        *, rounds: int, tools: tuple[str, ...] | None, on_prefill: Callable[[PrefillProgressed], None] | None
    ) -> ChildSession:
        if tools is None:
            tools = usable
        elif usable is not None:
            tools = tuple(name for name in tools if name in usable)
        settings = msgspec.structs.replace(world.settings, rounds=rounds, usable_tools=tools, mode=DEFAULT_MODE)
        in_force = mode()
        if in_force is not None:
            # Whatever mode the child comes into later, it may never call more than its parent's mode allows now.
            allowed = tuple(name for name in tools or world.catalogue.names if in_force.allows(name))
            settings = msgspec.structs.replace(settings, usable_tools=allowed, mode=in_force.name)
        child = replace(world, settings=settings, host=replace(world.host, on_prefill=on_prefill))
        return world.make_session(world.engine, _assemble(child, resume=None, recompose=False, parent=parent))

    return open_child


def _parts(
    world: _World,
    header: RequestHeader,
    transcript: Transcript,
    subagents: Subagents,
    modes: Modes,
    *,
    watch: PrefixWatch,
    session: SessionId,
    sequence: SequenceId,
) -> TurnParts:
    engine, store, settings, host = world.engine, world.store, world.settings, world.host
    budgets = _budgets(world, header.sections)
    count = host.count_tokens or (lambda text: len(engine.tokenize(text, parse_special=False)))
    forms = header.chat_format

    def count_as(shape: Shape, text: str) -> int:
        return count(forms.form(shape).apply(text))

    artifacts = store.artifacts
    pending_mode = PendingMode()
    start = transcript.state.start
    child = start is not None and start.parent is not None
    desk = PlanDesk(
        session=session,
        state=lambda: transcript.state,
        notices=transcript.notices,
        artifacts=artifacts,
        file=LedgerFile(store.folder, holder=session if child else settings.holder, clock=host.clock, pid=os.getpid()),
        pending_mode=pending_mode,
        review=host.review_plan,
    )
    bound = BoundAccount(store.token_files(fingerprint=engine.info.fingerprint, besides=session))
    for run in transcript.evaluated:
        bound.add(run, reply=NO_TOKENS)
    requester = Requester(
        engine=engine,
        sequence=sequence,
        transcript=transcript,
        budgets=budgets,
        bound=bound,
        sampling=settings.sampling or engine.default_sampling(),
        max_reply_tokens=settings.max_reply_tokens,
        clock=host.timer,
        on_prefill=host.on_prefill,
    )
    refusals = {task_tool.name: subagents.refusal} if settings.subagents and subagents.refusal else {}
    runner = CallRunner(
        catalogue=world.catalogue,
        policies=ToolPolicies(settings.policies),
        hooks=host.hooks if isinstance(host.hooks, Hooks) else host.hooks(session),
        workspace=world.workspace,
        capture_folder=store.session_folder(session),
        count_tokens=partial(count_as, Shape.TOOL),
        artifacts=artifacts,
        clock=host.timer,
        subagent=subagents.run,
        mode=lambda: modes.get(transcript.state.mode),
        desk=desk,
        ask=host.ask,
        withheld=withheld_tools(world.catalogue, settings.usable_tools, refusals),
    )
    gate = Gate(
        store=artifacts,
        count=count_as,
        shown_path=lambda ref: world.workspace.shown(ref.path),
        arrival_tokens=budgets.arrival_tokens,
        queryable=_may_look_into_artifacts(world),
    )
    dialect = dialect_named(header.dialect)
    return TurnParts(
        engine=engine,
        transcript=transcript,
        requester=requester,
        dialect=dialect,
        runner=runner,
        gate=gate,
        offers=Offers(dialect=dialect, runner=runner, gate=gate, transcript=transcript),
        budgets=budgets,
        limits=TurnLimits(rounds=settings.rounds, continuations=settings.continuations),
        modes=modes,
        pending_mode=pending_mode,
        desk=desk,
        prefix=watch,
    )


def _budgets(world: _World, prefix: Sequence[PrefixSection]) -> Budgets:
    return Budgets(
        n_ctx=world.engine.info.n_ctx,
        prefix_tokens=sum(section.tokens for section in prefix),
        arrival_override=world.settings.arrival_tokens,
    )


def _may_look_into_artifacts(world: _World) -> bool:
    tool = world.catalogue.get(ARTIFACT_TOOL)
    policy = Policy.DENY if tool is None else ToolPolicies(world.settings.policies).policy_of(tool)
    return policy is Policy.ALLOW or (policy is Policy.ASK and world.host.ask is not None)
