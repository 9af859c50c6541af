"""Hooks around tools: what may stop a call before it runs, and what may add to its result.

An embedder passes Python callables. `command_hook.CommandHook` makes both kinds of a program of the user's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import msgspec

from ..kernels.errors import ChapbookError
from .calls import LoggedCall
from .tools.spec import Tool, ToolOutput


class Allow(msgspec.Struct, frozen=True):
    """The hook has nothing against the call. The tool's policy still holds: a hook approves nothing."""


class Deny(msgspec.Struct, frozen=True):
    """The call does not run; the model reads the reason."""

    reason: str


class Ask(msgspec.Struct, frozen=True):
    """A person decides, whatever the tool's policy; `reason` is shown to them."""

    reason: str = ""


HookDecision: TypeAlias = Allow | Deny | Ask

BeforeHook = Callable[[LoggedCall, Tool], HookDecision]
"""Called with checked arguments before a tool's body. Whatever it raises denies the call."""

AfterHook = Callable[[LoggedCall, ToolOutput], str | None]
"""Called with what a body returned. Its text goes to the model after the results of the step, None adds nothing."""


class HookFailure(msgspec.Struct, frozen=True, kw_only=True):
    """An `after` hook that added nothing because it failed, and how."""

    hook: str
    problem: str


class AddedContext(msgspec.Struct, frozen=True, kw_only=True):
    """What the `after` hooks of a call gave, in order, and those that failed."""

    texts: tuple[str, ...] = ()
    failures: tuple[HookFailure, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Hooks:
    """A session's hooks, called in order, from the thread that runs the turn."""

    before_hooks: Sequence[BeforeHook] = ()
    after_hooks: Sequence[AfterHook] = ()

    def before(self, call: LoggedCall, tool: Tool) -> HookDecision:
        """Return the first denial, else the first wish to ask, else Allow. Never raises for a hook."""
        wish: HookDecision = Allow()
        for hook in self.before_hooks:
            decision = _decide(hook, call, tool)
            if isinstance(decision, Deny):
                return decision
            if isinstance(wish, Allow):
                wish = decision
        return wish

    def after(self, call: LoggedCall, output: ToolOutput) -> AddedContext:
        """Return what the hooks add to a call's result. Never raises for a hook."""
        texts: list[str] = []
        failures: list[HookFailure] = []
        for hook in self.after_hooks:
            try:
                text = hook(call, output)
                if not isinstance(text, str | None):
                    raise TypeError(f"it returned {type(text).__name__}, not a text or None")
            except Exception as error:  # a hook is foreign code: it may not end a session
                failures.append(HookFailure(hook=hook_name(hook), problem=_said(error)))
            else:
                texts += [text] if text else []
        return AddedContext(texts=tuple(texts), failures=tuple(failures))


def hook_name(hook: BeforeHook | AfterHook) -> str:
    """Return the name by which messages call a hook."""
    owner = getattr(hook, "__self__", hook)
    name = getattr(owner, "name", None) or getattr(hook, "__qualname__", None) or type(hook).__name__
    return str(name)


def _decide(hook: BeforeHook, call: LoggedCall, tool: Tool) -> HookDecision:
    try:
        decision = hook(call, tool)
    except Exception as error:  # a check that fails has not passed
        return Deny(f"the hook {hook_name(hook)} failed, so {call.name} was not run: {_said(error)}")
    if not isinstance(decision, Allow | Deny | Ask):
        return Deny(
            f"the hook {hook_name(hook)} returned {type(decision).__name__}, not Allow, Deny or Ask, so {call.name} "
            "was not run"
        )
    return decision


def _said(error: Exception) -> str:
    return str(error) if isinstance(error, ChapbookError) else f"{type(error).__name__}: {error}"
