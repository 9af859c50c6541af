"""Modes: which tools a session may call for now, and what the model is told of it. Pure but for a pending switch.

`default` is the absence of any policy: a session that never leaves it makes the same requests as one without modes.
The catalogue is the same in every mode; the grammar offers what the mode allows, and the runner refuses the rest by
the mode that the log states.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterable, Iterator, Sequence
from difflib import get_close_matches
from typing import NewType

import msgspec

from ..kernels.errors import ConfigError, UsageError
from .log_format import clean_text

ModeName = NewType("ModeName", str)

DEFAULT_MODE = ModeName("default")
PLAN_MODE = ModeName("plan")
MOST_GUIDANCE_CHARS = 4_000
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")

PLAN_TOOLS = (
    "read",
    "search",
    "list",
    "artifact",
    "chapters_search",
    "plan_start",
    "plan_step",
    "plan_status",
    "exit_plan_mode",
)
_PLAN_GUIDANCE = (
    "Look into what was asked and change nothing: tools that write or run commands are refused. When you know what to "
    "do, submit it with exit_plan_mode as a Markdown plan that begins with a # heading; it is reviewed before any of "
    "it is done."
)


class Mode(msgspec.Struct, frozen=True, kw_only=True):
    """A mode: what the model is told when it comes into force, and the only tools that may be called in it."""

    name: ModeName
    guidance: str
    allowed: tuple[str, ...]

    def allows(self, tool: str) -> bool:
        return tool in self.allowed


class Modes:
    """The modes that a session knows besides `default`: `plan`, and what the configuration adds or overrides."""

    def __init__(self, configured: Iterable[Mode] = (), *, known_tools: Sequence[str] = ()) -> None:
        """Raises ConfigError for a mode named `default`, a name twice, guidance that is too long, or a tool that is
        not known. What `plan` allows need not be in the catalogue."""
        self._modes = {PLAN_MODE: Mode(name=PLAN_MODE, guidance=_PLAN_GUIDANCE, allowed=PLAN_TOOLS)}
        seen: set[str] = set()
        for mode in configured:
            _check(mode, seen, known_tools)
            seen.add(mode.name)
            self._modes[mode.name] = mode

    def __iter__(self) -> Iterator[Mode]:
        return iter(self._modes.values())

    def get(self, name: str) -> Mode | None:
        """Return the mode of that name; None for `default` and for one that is not defined: nothing is restricted."""
        return self._modes.get(ModeName(name))

    def named(self, name: str) -> ModeName:
        """Return `name` as that of a mode. Raises UsageError, with the names there are, where it is none."""
        if name != DEFAULT_MODE and ModeName(name) not in self._modes:
            names = (DEFAULT_MODE, *self._modes)
            near = get_close_matches(name, names, n=1)
            hint = f" Did you mean {near[0]}?" if near else ""
            raise UsageError(f"there is no mode {name[:80]!r}; there are {', '.join(names)}.{hint}")
        return ModeName(name)

    def notice(self, in_force: str, *, told: str) -> ModeNotice | None:
        """Return what to tell a model that was last told of the mode `told`; None where that is the one in force."""
        mode = self.get(in_force)
        effective = DEFAULT_MODE if mode is None else mode.name
        if effective == told:
            return None
        if mode is not None:
            return ModeNotice(mode=mode.name, text=f"mode {mode.name}: {mode.guidance}")
        if in_force != DEFAULT_MODE:
            text = f"the mode {in_force} is not defined any more, so nothing is restricted by a mode"
        else:
            text = f"mode {told} is over: all tools may be called again, as far as their policies allow"
        return ModeNotice(mode=DEFAULT_MODE, text=text)


class ModeNotice(msgspec.Struct, frozen=True, kw_only=True):
    """What the model is to be told, and of which mode it then knows."""

    mode: ModeName
    text: str


def refusal_of(mode: Mode, tool: str, *, known_tools: Sequence[str]) -> str:
    """Return what the model reads where a call is not allowed in the mode in force; only `known_tools` are named."""
    allowed = ", ".join(name for name in mode.allowed if name in known_tools) or "nothing"
    return f"not run: mode {mode.name} does not allow {tool}; it allows {allowed}"


class PendingMode:
    """A switch that was asked for and is not in force yet; the newest one counts. From any thread.

    It is applied where nothing is under way: at the start of a turn, at the end of a step.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._wanted: ModeName | None = None

    def ask(self, mode: ModeName) -> None:
        """Ask for `mode`, in place of what was asked for before."""
        with self._lock:
            self._wanted = mode

    @property
    def wanted(self) -> ModeName | None:
        """What was asked for last and is not applied."""
        with self._lock:
            return self._wanted

    def applied(self, mode: ModeName) -> None:
        """Forget the wish for `mode`, now that its event is in the log, unless something else was asked for since."""
        with self._lock:
            if self._wanted == mode:
                self._wanted = None


def _check(mode: Mode, seen: set[str], known_tools: Sequence[str]) -> None:
    key = f"modes.{mode.name}"
    if not _NAME.fullmatch(mode.name):
        raise ConfigError(
            f"modes has the name {mode.name[:80]!r}: a mode's name is 1 to 64 letters, digits, dots, - and _",
            key="modes",
        )
    if mode.name.lower() == DEFAULT_MODE:
        raise ConfigError(f"{key}: default is the absence of a mode, so it has no definition; rename yours", key=key)
    if mode.name in seen:
        raise ConfigError(f"{key} is defined twice; keep one of them", key=key)
    if len(mode.guidance) > MOST_GUIDANCE_CHARS:
        raise ConfigError(
            f"{key}: its guidance has {len(mode.guidance):,} characters, the limit is {MOST_GUIDANCE_CHARS:,}", key=key
        )
    if clean_text(mode.guidance).text != mode.guidance:
        raise ConfigError(f"{key}: its guidance is no UTF-8 text; write it anew", key=key)
    for tool in mode.allowed:
        if tool not in known_tools and tool not in PLAN_TOOLS:
            nearest = "".join(get_close_matches(tool, (*known_tools, *PLAN_TOOLS), n=1))
            hint = f" Did you mean {nearest}?" if nearest else ""
            raise ConfigError(f"{key} allows {tool!r}, which is no tool.{hint}", key=key, nearest=nearest)
