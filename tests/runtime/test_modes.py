"""Modes by themselves: which there are, what is allowed, what a model is told of them, which wish counts."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chapbook.kernels.errors import ConfigError, UsageError
from chapbook.runtime.modes import (
    DEFAULT_MODE,
    MOST_GUIDANCE_CHARS,
    PLAN_MODE,
    PLAN_TOOLS,
    Mode,
    ModeName,
    Modes,
    PendingMode,
    refusal_of,
)

TOOLS = ("read", "write", "bash")
REVIEW = Mode(name=ModeName("review"), guidance="Only read.", allowed=("read",))


def test_plan_is_there_and_allows_no_tool_that_changes_anything() -> None:
    plan = Modes().get("plan")
    assert plan is not None
    assert plan.allowed == PLAN_TOOLS
    assert not any(plan.allows(tool) for tool in ("bash", "write", "edit", "task"))
    assert plan.allows("exit_plan_mode")


def test_a_configured_mode_is_added_and_one_of_the_same_name_replaces_plan() -> None:
    own = Mode(name=PLAN_MODE, guidance="Think.", allowed=("read",))
    modes = Modes([REVIEW, own], known_tools=TOOLS)
    assert modes.get("review") == REVIEW
    assert modes.get("plan") == own
    assert [mode.name for mode in modes] == ["plan", "review"]


@pytest.mark.parametrize(
    ("mode", "says"),
    [
        (Mode(name=DEFAULT_MODE, guidance="", allowed=()), "default is the absence of a mode"),
        (Mode(name=ModeName("Default"), guidance="", allowed=()), "default is the absence of a mode"),
        (Mode(name=ModeName(""), guidance="", allowed=()), "a mode's name is"),
        (Mode(name=ModeName("x\n"), guidance="", allowed=()), "a mode's name is"),
        (Mode(name=ModeName("x" * 65), guidance="", allowed=()), "a mode's name is"),
        (Mode(name=ModeName("x"), guidance="g\ud800", allowed=()), "no UTF-8"),
        (Mode(name=ModeName("x"), guidance="", allowed=("raed",)), "no tool. Did you mean read?"),
        (Mode(name=ModeName("x"), guidance="g" * (MOST_GUIDANCE_CHARS + 1), allowed=()), "4,001 characters"),
    ],
)
def test_a_mode_that_cannot_be_is_refused_at_load(mode: Mode, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        Modes([mode], known_tools=TOOLS)
    with pytest.raises(ConfigError, match="defined twice"):
        Modes([REVIEW, REVIEW], known_tools=TOOLS)


def test_a_name_that_is_no_mode_is_refused_at_the_call_with_those_there_are() -> None:
    with pytest.raises(UsageError, match=r"no mode 'plam'; there are default, plan. Did you mean plan"):
        Modes().named("plam")
    assert Modes().named("default") == DEFAULT_MODE


def test_default_and_what_is_not_defined_restrict_nothing() -> None:
    assert Modes().get("default") is None
    assert Modes().get("gone") is None


def test_a_model_is_told_what_it_does_not_know_and_nothing_else() -> None:
    modes = Modes([REVIEW], known_tools=TOOLS)
    assert modes.notice("default", told="default") is None
    assert modes.notice("plan", told="plan") is None
    entered = modes.notice("review", told="default")
    assert entered is not None
    assert entered.mode == "review"
    assert "Only read." in entered.text
    left = modes.notice("default", told="plan")
    assert left is not None
    assert left.mode == "default"
    assert "mode plan is over" in left.text


def test_of_a_mode_that_is_not_defined_any_more_a_model_is_told_once() -> None:
    notice = Modes().notice("review", told="review")
    assert notice is not None
    assert "not defined any more" in notice.text
    assert Modes().notice("review", told=notice.mode) is None


def test_a_refusal_names_the_mode_and_what_may_be_called() -> None:
    assert refusal_of(REVIEW, "bash", known_tools=["read", "bash"]).endswith("does not allow bash; it allows read")


names = st.sampled_from([ModeName(name) for name in ("default", "plan", "review")])


@given(st.lists(st.tuples(st.sampled_from(["ask", "apply"]), names), max_size=20))
def test_the_newest_wish_counts_until_it_is_applied(acts: list[tuple[str, ModeName]]) -> None:
    pending, wanted = PendingMode(), None
    for act, mode in acts:
        if act == "ask":
            pending.ask(mode)
            wanted = mode
        else:
            pending.applied(mode)
            wanted = None if wanted == mode else wanted
        assert pending.wanted == wanted
