"""What a session can be told, and what its host brings."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from .engine import Sampling
from .events import SessionId
from .hooks import Hooks
from .modes import DEFAULT_MODE, Mode
from .plan_review import Reviewer
from .request import OnPrefill
from .session_prefix import SYSTEM_TEXT
from .subagent import OnSubagent
from .tools.policy import Ask
from .tools.spec import Policy, Tool


class SessionSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What a session can be told; it is recorded in the log. None: decided at open, from the model and the window.

    `subagents` puts the tool `task` into the catalogue. `usable_tools` names the tools that may be called, None: all;
    the others stay in the catalogue, so that the session prefix is the same. `modes` are added to `plan`, or replace
    it; `mode` is the one in which a new session begins. `holder` names whose ledger of steps it is, where several work
    in one workspace.
    """

    sampling: Sampling | None = None
    max_reply_tokens: int | None = None
    rounds: int = 24
    continuations: int = 3
    arrival_tokens: int | None = None
    dialect: str | None = None
    template: str | None = None
    instructions: str = "AGENTS.md"
    system: str = SYSTEM_TEXT
    policies: dict[str, Policy] = {}
    subagents: bool = False
    usable_tools: tuple[str, ...] | None = None
    modes: tuple[Mode, ...] = ()
    mode: str = DEFAULT_MODE
    holder: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionHost:
    """What the host brings: its tools, its hooks, a person to ask, and the world (clocks, ids, a cache folder).

    `tools` None: the built-in ones; to others the one that looks into artifacts is added. `count_tokens` None: the
    engine's tokenizer. `cache_folder` holds what was learnt of templates, None keeps nothing. `hooks` may also be a
    function that makes them for the session's id. `clock` gives Unix seconds, `timer` seconds that never go back.
    `on_subagent` is told what a subagent does, on the thread on which it runs; so is `ask` asked.
    """

    tools: Sequence[Tool] | None = None
    hooks: Hooks | Callable[[SessionId], Hooks] = field(default_factory=Hooks)
    ask: Ask | None = None
    review_plan: Reviewer | None = None
    on_prefill: OnPrefill | None = None
    on_subagent: OnSubagent | None = None
    count_tokens: Callable[[str], int] | None = None
    cache_folder: Path | None = None
    clock: Callable[[], float] = time.time
    timer: Callable[[], float] = time.monotonic
    entropy: Callable[[int], bytes] = secrets.token_bytes
