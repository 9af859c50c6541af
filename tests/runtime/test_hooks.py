from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from chapbook.kernels.errors import ToolError
from chapbook.runtime.calls import CallId, LoggedCall, ToolSchema
from chapbook.runtime.hooks import Allow, Ask, Deny, HookDecision, HookFailure, Hooks
from chapbook.runtime.tools.spec import Tool, ToolContext, ToolOutput


def body(_context: ToolContext, _arguments: Mapping[str, Any]) -> ToolOutput:
    raise AssertionError("no hook runs a tool")


TOOL = Tool(schema=ToolSchema(name="bash", description="", parameters={}), body=body)
CALL = LoggedCall(id=CallId("call00001"), name="bash", arguments={"command": "ls"})
OUTPUT = ToolOutput(content="a.py", is_error=False)


def allows(_call: LoggedCall, _tool: Tool) -> HookDecision:
    return Allow()


def asks(_call: LoggedCall, _tool: Tool) -> HookDecision:
    return Ask("first")


def asks_too(_call: LoggedCall, _tool: Tool) -> HookDecision:
    return Ask("second")


def denies(call: LoggedCall, tool: Tool) -> HookDecision:
    return Deny(f"{tool.name} {call.arguments['command']}")


def raises(_call: LoggedCall, _tool: Tool) -> HookDecision:
    raise KeyError("rules")


def test_without_hooks_all_is_allowed_and_nothing_added() -> None:
    assert Hooks().before(CALL, TOOL) == Allow()
    assert Hooks().after(CALL, OUTPUT).texts == ()


def test_a_denial_wins_over_a_wish_to_ask_and_that_over_allow() -> None:
    assert Hooks(before_hooks=(allows, asks, denies, raises)).before(CALL, TOOL) == Deny("bash ls")
    assert Hooks(before_hooks=(allows, asks, asks_too)).before(CALL, TOOL) == Ask("first")
    assert Hooks(before_hooks=(allows, allows)).before(CALL, TOOL) == Allow()


def test_nothing_runs_after_a_denial() -> None:
    ran: list[str] = []

    def notes(call: LoggedCall, _tool: Tool) -> HookDecision:
        ran.append(call.name)
        return Allow()

    Hooks(before_hooks=(notes, denies, notes)).before(CALL, TOOL)
    assert ran == ["bash"]


def test_a_before_hook_that_raises_denies_and_is_named() -> None:
    decision = Hooks(before_hooks=(allows, raises)).before(CALL, TOOL)
    assert decision == Deny("the hook raises failed, so bash was not run: KeyError: 'rules'")


def test_a_before_hook_that_decides_nothing_denies() -> None:
    def forgets(_call: LoggedCall, _tool: Tool) -> Any:
        return None

    decision = Hooks(before_hooks=(forgets,)).before(CALL, TOOL)
    assert isinstance(decision, Deny)
    assert "returned NoneType, not Allow, Deny or Ask" in decision.reason


def test_after_hooks_add_in_order_and_a_failing_one_is_reported_and_adds_nothing() -> None:
    def counts(_call: LoggedCall, output: ToolOutput) -> str | None:
        return f"{len(output.content)} characters"

    def silent(_call: LoggedCall, _output: ToolOutput) -> str | None:
        return None

    def breaks(_call: LoggedCall, _output: ToolOutput) -> str | None:
        raise ToolError("no linter here")

    def returns_a_number(_call: LoggedCall, _output: ToolOutput) -> Any:
        return 3

    added = Hooks(after_hooks=(breaks, counts, silent, returns_a_number, counts)).after(CALL, OUTPUT)
    assert added.texts == ("4 characters", "4 characters")
    assert [failure.problem for failure in added.failures] == [
        "no linter here",
        "TypeError: it returned int, not a text or None",
    ]
    assert isinstance(added.failures[0], HookFailure)
    assert added.failures[0].hook.endswith("breaks")
