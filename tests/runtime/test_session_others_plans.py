"""Two sessions with a plan each in one workspace: neither loses its own without a word, nor ends the other's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from chapbook.kernels.errors import UsageError
from chapbook.runtime.events import Notice
from chapbook.runtime.log_reading import read_log


def test_a_resume_names_the_file_of_a_plan_that_was_set_aside_and_the_steps_that_were_left(
    rig: Callable[..., Any],
) -> None:
    made = rig()
    started = made.call("plan_start", task="Paint the fence", steps=["buy red paint", "paint it"])
    with made.open([started, made.call("plan_step", id="s1", state="done"), "ok"]) as first:
        list(first.send("Paint the fence"))
    with made.open([made.call("plan_start", task="Count", steps=["count herons"]), "ok"]) as second:
        list(second.send("Count all birds of the lake"))
        (aside,) = second.store.folder.glob("plan.set-aside-*.json")
    with made.open(["ok"], resume=first.id) as first:
        list(first.send("go on"))
        made.check(first)
        events = [logged.event for logged in read_log(first.store.session_folder(first.id)).events]
    told = [event.text for event in events if isinstance(event, Notice) and event.producer == "plan"]
    (notice,) = [text for text in told if "set aside in" in text]
    assert aside.name in notice
    assert "s2 [todo] paint it" in notice
    assert "red paint" not in notice
    assert "no longer stored" not in "".join(told)


def test_a_session_that_has_no_task_yet_closes_no_plan_of_another_one(rig: Callable[..., Any]) -> None:
    made = rig()
    started = made.call("plan_start", task="Paint the fence", steps=["buy red paint"])
    with made.open([started, "ok"]) as first:
        list(first.send("Paint the fence"))
    with made.open(["ok"]) as second, pytest.raises(UsageError, match=f"begun by session {first.id}"):
        second.close_plan()
    with made.open([], resume=first.id) as first:
        assert first.close_plan() == "Paint the fence"
