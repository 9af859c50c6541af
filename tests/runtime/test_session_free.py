"""SmolLM2 with replies of its own: where a call is demanded, what it writes is a call that can be run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from chapbook.runtime.calls import ChoiceKind, ToolChoice
from chapbook.runtime.engine import Sampling
from chapbook.runtime.events import AssistantMessage, ToolResult
from chapbook.runtime.log_reading import read_log
from chapbook.runtime.session import Session
from chapbook.runtime.session_settings import SessionSettings
from chapbook.runtime.tools.listing import list_folder
from chapbook.runtime.tools.read import read
from chapbook.runtime.turn import UNREADABLE_CALL

REQUIRED = ToolChoice(ChoiceKind.REQUIRED)
DEMANDS = [
    ("What is in this folder?", REQUIRED),
    ("Read the notes.", ToolChoice(ChoiceKind.NAMED, "read")),
    ("Read the program.", ToolChoice(ChoiceKind.NAMED, "read")),
    ("Look into src.", ToolChoice(ChoiceKind.NAMED, "list")),
]


@pytest.mark.slow  # a real model
def test_a_call_that_is_demanded_is_well_formed_and_names_a_path_that_exists(rig: Callable[..., Any]) -> None:
    made = rig("smollm2", n_threads=None)
    # Tools without free text: a small model may write on in one until the reply is full.
    host = {"tools": [read, list_folder]}
    settings = SessionSettings(rounds=1, max_reply_tokens=200, sampling=Sampling(temperature=0.8, seed=1))
    with made.open(None, settings=settings, host=host) as session:
        for message, choice in DEMANDS:
            before = len(logged(session))
            list(session.send(message, choice=choice))
            events = logged(session)[before:]
            calls = [call for event in events if isinstance(event, AssistantMessage) for call in event.calls]
            assert calls
            assert UNREADABLE_CALL not in {event.name for event in events if isinstance(event, ToolResult)}
            for call in calls:
                assert call.name in ([choice.name] if choice.name else ["read", "list"])
                assert (made.workspace / call.arguments.get("path", ".")).exists(), call
        usages = made.check(session)
    assert [usage.evaluated for usage in usages] == [usage.bound for usage in usages]


def logged(session: Session) -> list[Any]:
    return [each.event for each in read_log(session.store.session_folder(session.id)).events]
