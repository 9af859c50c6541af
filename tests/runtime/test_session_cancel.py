"""A turn that is broken off at any moment: what was evaluated stays, and is accounted for."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from chapbook.kernels.errors import EngineError
from chapbook.runtime.events import AssistantMessage, StepEnd, TurnEnd, TurnEndReason
from chapbook.runtime.log_reading import read_log
from chapbook.runtime.session import Session
from chapbook.runtime.stream import StepEnded, StepStarted, TextDelta, ToolFinished, ToolStarted
from chapbook.runtime.tools.builtin import builtin_tools
from chapbook.runtime.tools.declare import tool
from chapbook.runtime.tools.spec import ToolContext

KINDS = ("llama", "gemma3", "mamba", "hybrid")
LONG_MESSAGE = "Read this and remember it: " + "many words " * 100
BATCH_TOKENS = 64


def usages_of(events: list[Any]) -> list[Any]:
    return [event.usage for event in events if isinstance(event, StepEnded)]


def logged(session: Session, kind: type) -> list[Any]:
    return [
        each.event for each in read_log(session.store.session_folder(session.id)).events if isinstance(each.event, kind)
    ]


def check_next_turn(made: Any, session: Session, *, resident_tokens: int, logged_tokens: int) -> None:
    """Assert that the next turn begins from what was resident, and that the steps after it are at the bound again.

    `logged_tokens` is what the log knows to have been evaluated of the broken request and its reply: not in the bound.
    """
    assert len(made.engine.resident(session.sequence)) == resident_tokens
    first, second = usages_of(list(session.send("And now?")))
    assert first.cached == resident_tokens
    assert first.bound == first.window - logged_tokens
    assert first.cached + first.evaluated == first.window
    assert bool(first.reason) == (first.evaluated != first.bound)
    assert (second.evaluated, second.cached) == (second.bound, first.window + first.generated)
    made.check(session)


def at_decode(made: Any, number: int, act: Callable[[], object]) -> None:
    """Have `act` called right before the n-th decode from now."""
    wanted = len(made.decoded) + number
    made.before_decode = lambda: act() if len(made.decoded) == wanted else None


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("moment", ["in a batch", "between batches"])
def test_a_prefill_that_is_cancelled_keeps_the_batches_that_were_evaluated(
    kind: str, moment: str, rig: Callable[..., Any]
) -> None:
    made = rig(kind, n_ctx=16384, n_batch=BATCH_TOKENS)

    def on_prefill(step: Any) -> None:
        if moment == "between batches" and made.in_long_message and step.evaluated_tokens >= 5 * BATCH_TOKENS:
            session.cancel()

    with made.open(["hello", made.call("list"), "Here."], host={"on_prefill": on_prefill}) as session:
        made.in_long_message = False
        (before,) = usages_of(list(session.send("hello")))
        made.in_long_message = True
        if moment == "in a batch":
            at_decode(made, 6, session.cancel)
        events = list(session.send(LONG_MESSAGE))
        made.in_long_message = False
        assert events[-1].reason is TurnEndReason.INTERRUPTED
        (cut,) = usages_of(events)
        assert cut.cached == before.window + before.generated
        assert cut.evaluated == 5 * BATCH_TOKENS
        assert cut.reason == f"cancelled after {cut.evaluated} of at least {cut.bound} tokens"
        held = cut.cached + cut.evaluated
        check_next_turn(made, session, resident_tokens=held, logged_tokens=held)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("how", ["cancelled", "cancelled in a decode", "not read on"])
def test_a_reply_that_is_broken_off_stays_as_far_as_it_was_evaluated(
    kind: str, how: str, rig: Callable[..., Any]
) -> None:
    made = rig(kind, n_ctx=16384)
    with made.open(["x" * 100, made.call("list"), "Here."]) as session:
        stream = session.send("Say x.")
        deltas = 0
        for event in stream:
            deltas += isinstance(event, TextDelta)
            if how == "cancelled in a decode" and deltas == 1:
                at_decode(made, 30, session.cancel)
            elif deltas == 30 and how == "cancelled":
                session.cancel()
            elif deltas == 30 and how == "not read on":
                break
        stream.close()
        reply = logged(session, AssistantMessage)[-1]
        assert reply.finish == "cancelled"
        assert 20 < reply.spans[0].length < 100
        assert set(reply.text) == {"x"}
        (usage,) = (event.usage for event in logged(session, StepEnd))
        assert usage.generated == reply.spans[0].length
        assert usage.evaluated == usage.bound
        assert logged(session, TurnEnd)[-1].reason is TurnEndReason.INTERRUPTED
        whole = usage.window + usage.generated
        check_next_turn(made, session, resident_tokens=whole, logged_tokens=whole)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("error", [KeyboardInterrupt, EngineError])
def test_an_interrupt_of_the_thread_or_a_failing_engine_loses_nothing_of_a_reply(
    kind: str, error: type[BaseException], rig: Callable[..., Any]
) -> None:
    made = rig(kind, n_ctx=16384)

    def fail() -> None:
        raise error("now")

    with made.open(["x" * 100, made.call("list"), "Here."]) as session:
        events = []
        try:
            for event in session.send("Say x."):
                events.append(event)
                if len(events) == 10:
                    at_decode(made, 30, fail)
        except KeyboardInterrupt:
            assert error is KeyboardInterrupt
        else:
            assert events[-1].reason is TurnEndReason.ERROR
            assert events[-1].detail == "now"
        reply = logged(session, AssistantMessage)[-1]
        (usage,) = (event.usage for event in logged(session, StepEnd))
        assert 20 < reply.spans[0].length == usage.generated < 100
        whole = usage.window + usage.generated
        check_next_turn(made, session, resident_tokens=whole, logged_tokens=whole)


def test_a_call_that_was_broken_off_is_not_run(rig: Callable[..., Any]) -> None:
    made = rig()
    with made.open([made.call("write", path="out.txt", content="x" * 50), made.call("list"), "Here."]) as session:
        events = []
        for event in session.send("Write."):
            events.append(event)
            if isinstance(event, StepStarted):
                at_decode(made, 40, session.cancel)
        assert events[-1].reason is TurnEndReason.INTERRUPTED
        assert not any(isinstance(event, TextDelta | ToolStarted) for event in events)
        assert logged(session, AssistantMessage)[-1].calls == ()
        assert not (made.workspace / "out.txt").exists()
        list(session.send("And now?"))
        made.check(session)


def test_a_cancel_before_the_first_event_and_one_without_a_turn_harm_nothing(rig: Callable[..., Any]) -> None:
    made = rig()
    with made.open([made.call("list"), "Here."]) as session:
        session.cancel()
        stream = session.send("go @notes.md")
        session.cancel()
        events = list(stream)
        assert events[-1].reason is TurnEndReason.INTERRUPTED
        assert ["not started" in event.content for event in events if isinstance(event, ToolFinished)] == [True]
        session.cancel()
        first, second = usages_of(list(session.send("And now?")))
        assert first.evaluated == first.window
        assert second.evaluated == second.bound
        made.check(session)


def test_a_tool_that_is_cancelled_ends_the_turn_and_the_next_one_repeats_nothing(rig: Callable[..., Any]) -> None:
    made = rig()
    started = threading.Event()

    @tool()
    def endless(context: ToolContext) -> str:
        """Run until cancelled."""
        started.set()
        context.cancel.wait(60)
        return "I was cancelled"

    replies = [made.call("endless") + made.call("list"), made.call("list"), "Here."]
    with made.open(replies, host={"tools": [*builtin_tools(), endless]}) as session:
        cancel = threading.Thread(target=lambda: (started.wait(60), session.cancel()))
        cancel.start()
        events = list(session.send("go"))
        cancel.join()
        assert events[-1].reason is TurnEndReason.INTERRUPTED
        contents = [event.content for event in events if isinstance(event, ToolFinished)]
        assert contents[0] == "I was cancelled"
        assert "not started" in contents[1]
        (usage,) = usages_of(events)
        first, second = usages_of(list(session.send("And now?")))
        for step, last in ((first, usage), (second, first)):
            assert step.cached == last.window + last.generated
            assert step.evaluated == step.bound
        made.check(session)
