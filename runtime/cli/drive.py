"""Work on a thread of its own, while the main thread shows what happens, asks what is to be asked, and hears Ctrl-C.

Python runs signal handlers on the main thread, between two of its own instructions: a main thread that decodes would
notice Ctrl-C seconds late. So it only waits here, and everything that touches the terminal happens on it.
"""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from ..calls import LoggedCall, ToolChoice
from ..plan_review import ReviewAnswer, Reviewer, SubmittedPlan
from ..session import Session
from ..stream import PrefillProgressed, StreamEvent, SubagentEvent, TurnEnded
from ..tools.spec import Tool

POLL_S = 0.05
INTERRUPTED = 130

Result = TypeVar("Result")


class View(Protocol):
    """Shows a turn. Called on the main thread."""

    def show(self, event: StreamEvent) -> None:
        """Show one event."""

    def tick(self) -> None:
        """Nothing happened for a moment: keep what shows the passing of time alive."""

    def note(self, text: str) -> None:
        """Say something that is no event."""

    def clear(self) -> None:
        """Take away what only stands for the moment, so that something else can write."""


@dataclass(frozen=True, slots=True)
class _Question:
    """What a person is asked on the main thread; `unanswered` is what it means that they do not answer."""

    put: Callable[[], Any]
    unanswered: Any
    answer: Future[Any] = field(default_factory=Future)


@dataclass(frozen=True, slots=True)
class _Ended:
    """The work came to its end: what it returned, or raised."""

    value: Any = None
    error: BaseException | None = None


class Driver:
    """Runs work for a command. `asking` and `reviewing` ask the person at the terminal, None where there is none."""

    def __init__(
        self,
        view: View,
        *,
        asking: Callable[[Tool, LoggedCall], bool] | None = None,
        reviewing: Reviewer | None = None,
    ) -> None:
        self._view = view
        self._asking = asking
        self._reviewing = reviewing
        self._queue: queue.SimpleQueue[StreamEvent | _Question | _Ended] = queue.SimpleQueue()
        self._presses = 0
        self._person_is_asked = False

    @property
    def ask(self) -> Callable[[Tool, LoggedCall], bool] | None:
        """For the session: asks from its thread and waits for the answer; None where there is nobody to ask."""
        return None if self._asking is None else self._ask_from_worker

    @property
    def review_plan(self) -> Reviewer | None:
        """The same for a plan: no answer is None."""
        return None if self._reviewing is None else self._review_from_worker

    def on_prefill(self, event: PrefillProgressed) -> None:
        """For the session: has the progress of a prefill shown."""
        self._queue.put(event)

    def on_subagent(self, event: SubagentEvent) -> None:
        """For the session: has what a subagent does shown."""
        self._queue.put(event)

    def turn(self, session: Session, text: str, *, choice: ToolChoice | None = None) -> TurnEnded:
        """Run one turn and show it. Ctrl-C cancels it; a second one ends the process with the log closed."""

        def work() -> TurnEnded:
            ended: TurnEnded | None = None
            for event in session.send(text, choice=choice):
                self._queue.put(event)
                ended = event if isinstance(event, TurnEnded) else None
            assert ended is not None, "a turn that raises nothing ends with TurnEnded"
            return ended

        return self.work(work, on_interrupt=session.cancel, on_leave=session.abandon)

    def work(
        self,
        work: Callable[[], Result],
        *,
        on_interrupt: Callable[[], None] | None = None,
        on_leave: Callable[[], None] = lambda: None,
    ) -> Result:
        """Run `work` on a thread and return what it returns, or raise what it raises.

        `on_interrupt` is called at the first Ctrl-C; None: the first one ends the process, as every second one does.
        """
        thread = threading.Thread(target=self._run, args=(work,), name="chapbook worker", daemon=True)
        self._presses = 0
        with self._hearing_interrupts(on_interrupt):
            try:
                thread.start()
                ended = self._show_until_ended(told=on_interrupt is None)
            except KeyboardInterrupt:
                self._leave(on_leave)
            except BaseException:
                # What shows the turn has failed (a closed pipe): the turn must not go on unseen.
                if on_interrupt is not None:
                    on_interrupt()
                self._wait_until_ended()
                raise
        thread.join()
        if ended.error is not None:
            raise ended.error
        result: Result = ended.value
        return result

    def _run(self, work: Callable[[], object]) -> None:
        try:
            ended = _Ended(value=work())
        except BaseException as error:  # it is raised again on the main thread
            ended = _Ended(error=error)
        self._queue.put(ended)

    def _show_until_ended(self, *, told: bool) -> _Ended:
        while True:
            if self._presses and not told:
                told = True
                self._view.note("cancelling; Ctrl-C again leaves at once")
            try:
                item = self._queue.get(timeout=POLL_S)
            except queue.Empty:
                self._view.tick()
                continue
            if isinstance(item, _Ended):
                self._view.clear()
                return item
            if isinstance(item, _Question):
                self._answer(item)
            else:
                self._view.show(item)

    def _wait_until_ended(self) -> None:
        while not isinstance(item := self._queue.get(), _Ended):
            if isinstance(item, _Question):
                item.answer.set_result(item.unanswered)

    def _ask_from_worker(self, tool: Tool, call: LoggedCall) -> bool:
        asking = self._asking
        return asking is not None and self._answered(_Question(lambda: asking(tool, call), unanswered=False)) is True

    def _review_from_worker(self, plan: SubmittedPlan) -> ReviewAnswer | None:
        reviewing = self._reviewing
        if reviewing is None:
            return None
        answer: ReviewAnswer | None = self._answered(_Question(lambda: reviewing(plan), unanswered=None))
        return answer

    def _answered(self, question: _Question) -> Any:
        self._queue.put(question)
        return question.answer.result()

    def _answer(self, question: _Question) -> None:
        answer = question.unanswered
        try:
            self._view.clear()
            self._person_is_asked = True
            if not self._presses:
                answer = question.put()
        except KeyboardInterrupt:
            pass  # the turn is cancelled by now; no answer is not approval
        finally:
            self._person_is_asked = False
            question.answer.set_result(answer)

    @contextlib.contextmanager
    def _hearing_interrupts(self, on_interrupt: Callable[[], None] | None) -> Iterator[None]:
        def heard(_number: int, _frame: object) -> None:
            self._presses += 1
            if on_interrupt is None or self._presses > 1:
                raise KeyboardInterrupt
            on_interrupt()
            if self._person_is_asked:
                raise KeyboardInterrupt

        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = signal.signal(signal.SIGINT, heard)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)

    def _leave(self, on_leave: Callable[[], None]) -> None:
        """End the process now: the worker may be in a call that does not return for long."""
        with contextlib.suppress(Exception):
            on_leave()
        with contextlib.suppress(Exception):
            self._view.clear()
            self._view.note("interrupted")
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(INTERRUPTED)
