"""Policies: who is asked, and what counts as an answer."""

from __future__ import annotations

import pytest

from chapbook.kernels.errors import ConfigError
from chapbook.runtime.calls import CallId, LoggedCall
from chapbook.runtime.tools.builtin import builtin_tools
from chapbook.runtime.tools.catalogue import Catalogue
from chapbook.runtime.tools.policy import Decision, ToolPolicies
from chapbook.runtime.tools.spec import Policy, Tool

CATALOGUE = Catalogue(builtin_tools())


def decide(name: str, policies: ToolPolicies, **options: object) -> Decision:
    tool = CATALOGUE.get(name)
    assert tool is not None
    call = LoggedCall(id=CallId("call00001"), name=name, arguments={})
    return policies.decide(tool, call, **{"ask": None, **options})


def yes(_tool: Tool, _call: LoggedCall) -> bool:
    return True


def test_by_default_reading_is_allowed_and_what_writes_is_asked_for() -> None:
    policies = {tool.name: ToolPolicies().policy_of(tool) for tool in CATALOGUE}
    assert policies == {
        **dict.fromkeys(("read", "search", "list", "artifact"), Policy.ALLOW),
        **dict.fromkeys(("plan_start", "plan_step", "plan_status", "exit_plan_mode"), Policy.ALLOW),
        **dict.fromkeys(("write", "edit", "bash"), Policy.ASK),
    }


@pytest.mark.parametrize("name", ["write", "edit", "bash"])
def test_with_nobody_to_ask_the_call_is_denied_and_the_flag_named(name: str) -> None:
    decision = decide(name, ToolPolicies())
    assert not decision.allowed
    assert f"--allow {name}" in decision.reason


def test_only_true_is_approval() -> None:
    assert decide("bash", ToolPolicies(), ask=yes).allowed
    for answer in (False, None, 0, 1, "yes"):
        decision = decide("bash", ToolPolicies(), ask=lambda _tool, _call, answer=answer: answer)
        assert not decision.allowed
        assert "did not approve" in decision.reason


def test_an_ask_that_fails_is_no_approval() -> None:
    def broken(_tool: Tool, _call: LoggedCall) -> bool:
        raise EOFError("terminal closed")

    decision = decide("bash", ToolPolicies(), ask=broken)
    assert not decision.allowed
    assert "terminal closed" in decision.reason


def test_configuration_stands_over_the_default() -> None:
    policies = ToolPolicies({"bash": Policy.ALLOW, "read": Policy.DENY})
    assert decide("bash", policies).allowed
    assert not decide("read", policies, ask=yes).allowed
    assert "denied by policy" in decide("read", policies, ask=yes).reason


def test_a_hook_stands_in_for_the_policy_but_lifts_no_denial() -> None:
    assert decide("bash", ToolPolicies(), hook=Policy.ALLOW).allowed
    assert not decide("read", ToolPolicies(), hook=Policy.ASK).allowed
    assert not decide("read", ToolPolicies(), hook=Policy.DENY, ask=yes).allowed
    assert not decide("bash", ToolPolicies({"bash": Policy.DENY}), hook=Policy.ALLOW, ask=yes).allowed


def test_a_policy_for_no_tool_is_an_error_that_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean bash") as refused:
        ToolPolicies({"bahs": Policy.ALLOW}).check_names(CATALOGUE)
    assert (refused.value.key, refused.value.nearest) == ("bahs", "bash")
    with pytest.raises(ConfigError, match="the tools are read, search"):
        ToolPolicies({"qqq": Policy.ALLOW}).check_names(CATALOGUE)
    ToolPolicies({"bash": Policy.ALLOW}).check_names(CATALOGUE)
