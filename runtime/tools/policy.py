"""Who decides whether a call may run: allow, ask or deny, for each tool."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import msgspec

from ...kernels.errors import ConfigError, UsageError
from ..calls import LoggedCall
from .catalogue import Catalogue
from .spec import ARTIFACT_TOOL, Policy, Tool

Ask: TypeAlias = Callable[[Tool, LoggedCall], bool]
"""Asks a person. Only True is approval: no answer, or an exception, is not."""


class Decision(msgspec.Struct, frozen=True):
    """Whether the call may run; `reason` is what the model reads where it may not."""

    allowed: bool
    reason: str = ""


class ToolPolicies:
    """The policy of every tool: what the configuration says, else what the tool itself declares."""

    def __init__(self, overrides: Mapping[str, Policy] | None = None) -> None:
        self._overrides = dict(overrides or {})

    def check_names(self, catalogue: Catalogue) -> None:
        """Raise ConfigError where a policy is set for a tool that is not there."""
        for name in self._overrides:
            if name not in catalogue:
                nearest = next(iter(difflib.get_close_matches(name, catalogue.names, n=1)), "")
                hint = f"did you mean {nearest}?" if nearest else f"the tools are {', '.join(catalogue.names)}"
                raise ConfigError(f"there is no tool {name!r} to set a policy for; {hint}", key=name, nearest=nearest)

    def policy_of(self, tool: Tool) -> Policy:
        """Return the policy in force."""
        return self._overrides.get(tool.name, tool.policy)

    def decide(self, tool: Tool, call: LoggedCall, *, ask: Ask | None, hook: Policy | None = None) -> Decision:
        """Decide on one call; `ask` is None where there is nobody to ask.

        What a `hook` says of this call stands in for the policy, but lifts no DENY.
        """
        policy = self.policy_of(tool)
        if hook is not None and policy is not Policy.DENY:
            policy = hook
        match policy:
            case Policy.ALLOW:
                return Decision(True)
            case Policy.DENY:
                return Decision(False, f"{tool.name} is denied by policy; work without it")
            case Policy.ASK if ask is None:
                flag = f"--allow {tool.name}"
                return Decision(
                    False, f"{tool.name} needs approval and nobody is here to give it; {flag} would allow it"
                )
        return self._ask(tool, call, ask)

    def _ask(self, tool: Tool, call: LoggedCall, ask: Ask | None) -> Decision:
        try:
            approved = ask is not None and ask(tool, call) is True
        except Exception as problem:
            return Decision(False, f"asking for approval of {tool.name} failed ({problem}), which is not approval")
        if approved:
            return Decision(True)
        return Decision(False, f"the user did not approve this call of {tool.name}")


def check_usable(names: Sequence[str] | None, catalogue: Catalogue) -> None:
    """Raise UsageError where a tool that is to be usable is not there."""
    for name in names or ():
        if name not in catalogue:
            raise UsageError(f"there is no tool {name!r} that could be used; there are {', '.join(catalogue.names)}")


def withheld_tools(
    catalogue: Catalogue, usable: Sequence[str] | None, refusals: Mapping[str, str]
) -> Mapping[str, str]:
    """Return the tools of the catalogue that a session may not call, and why; `usable` None: all may be.

    `refusals` holds what is withheld whatever is usable. The tool that looks into what was stored is never withheld:
    a stub names it.
    """
    may_call = ", ".join(usable or ()) or "no tool"
    reasons = {
        name: f"{name} may not be called in this session, which may call {may_call}; work without it"
        for name in catalogue.names
        if usable is not None and name not in usable and name != ARTIFACT_TOOL
    }
    return {**reasons, **refusals}
