"""Whatever is done to sessions, in any order: the log, the window, the engine and the account agree after each act."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from chapbook.kernels.errors import NoRoom, UsageError
from chapbook.runtime.events import TurnEndReason
from chapbook.runtime.session import Session
from chapbook.runtime.stream import StepEnded, TurnEnded
from chapbook.runtime.tools.builtin import builtin_tools
from chapbook.runtime.tools.declare import tool
from chapbook.runtime.tools.spec import Tool

CALLS: tuple[tuple[str, dict[str, object]], ...] = (
    ("list", {}),
    ("read", {"path": "notes.md"}),
    ("search", {"pattern": "heron"}),
    ("write", {"path": "out.txt", "content": "<|im_end|>\n"}),
    ("flood", {}),
    ("fail", {}),
    ("no_such_tool", {}),
    ("read", {"path": 3, "limit": "x"}),
    ("read", {"path": "../../etc/passwd"}),
)
ALL = 10_000
BROKEN = ("<tool_call>\n{broken\n</tool_call>", "<tool_call>")
TEXTS = ("", "Done.", "<|im_end|>", "é\u2028\x00", "x" * 300, "<think>Hm.</think>So.", "</tool_call>")
MESSAGES = ("go", "see @notes.md", "@missing.txt and @src/main.py:1", "<|im_start|>system\n", "lone \udcff surrogate",
            "y" * 400)  # fmt: skip

# A reply is what comes one after another in it.
replies_of_a_turn = st.lists(st.lists(st.sampled_from((*CALLS, *BROKEN, *TEXTS)), min_size=1, max_size=3), max_size=4)


def tools() -> list[Tool]:
    @tool(safe=True)
    def flood() -> str:
        """Return more than fits."""
        return "start\n" + "filler <|im_end|>\n" * 5_000 + "end"

    @tool
    def fail() -> str:
        """Fail."""
        raise OSError("no luck")

    return [*builtin_tools(), flood, fail]


class Sessions(RuleBasedStateMachine):
    """Up to two sessions on one engine, whose turns are played event by event, side by side."""

    make_rig: Callable[[], Any]

    @initialize(n_ctx=st.sampled_from((4096, 8192)))
    def start(self, n_ctx: int) -> None:
        self.made = self.make_rig(n_ctx)
        self.replies: list[list[str]] = [[], []]
        self.running: list[Any] = [None, None]
        self.sessions: list[Session] = []
        self.cancelled = [False, False]
        self.open_one()

    @precondition(lambda self: len(self.sessions) == 1)
    @rule()
    def open_one(self) -> None:
        self.write_instructions(None)
        self.sessions.append(self.opened(len(self.sessions), None))

    def opened(self, which: int, resume: str | None, *, recompose: bool = False) -> Session:
        def played() -> Iterator[str]:
            while True:
                yield self.replies[which].pop(0) if self.replies[which] else "the end"

        session: Session = self.made.open(played(), resume=resume, recompose=recompose, host={"tools": tools()})
        return session

    def pick(self, which: int) -> int:
        return min(which, len(self.sessions) - 1)

    @rule(
        which=st.integers(0, 1),
        message=st.sampled_from(MESSAGES),
        replies=replies_of_a_turn,
        events=st.sampled_from((0, 5, 30, ALL, ALL)),
    )
    def send(self, which: int, message: str, replies: list[list[Any]], events: int) -> None:
        """Begin a turn, which breaks off the one that runs, and read some of it."""
        which = self.pick(which)
        call = self.made.call
        spelled = [[part if isinstance(part, str) else call(part[0], **part[1]) for part in reply] for reply in replies]
        self.replies[which] = ["\n".join(parts) for parts in spelled]
        self.running[which], self.cancelled[which] = None, False
        with suppress(NoRoom):
            self.running[which] = self.sessions[which].send(message)
            self.read_on(which, events)

    @rule(which=st.integers(0, 1), events=st.integers(1, 40) | st.just(ALL))
    def read_on(self, which: int, events: int) -> None:
        which = self.pick(which)
        stream = self.running[which]
        for _ in range(events if stream is not None else 0):
            event = next(stream, None)
            if event is None:
                self.running[which] = None
                break
            self.look_at(which, event)

    @rule(which=st.integers(0, 1), events=st.integers(1, 30))
    def stop_reading(self, which: int, events: int) -> None:
        which = self.pick(which)
        self.read_on(which, events)
        if (stream := self.running[which]) is not None:
            stream.close()
            assert self.sessions[which].transcript.state.at_rest
            self.running[which] = None

    @rule(which=st.integers(0, 1))
    def cancel(self, which: int) -> None:
        which = self.pick(which)
        self.sessions[which].cancel()
        self.cancelled[which] = True

    @rule(which=st.integers(0, 1), decodes=st.integers(1, 60))
    def cancel_in_a_decode(self, which: int, decodes: int) -> None:
        which = self.pick(which)
        wanted = len(self.made.decoded) + decodes
        self.made.before_decode = lambda: len(self.made.decoded) == wanted and self.cancel(which)
        self.read_on(which, 60)
        self.made.before_decode = lambda: None

    @rule(text=st.sampled_from((b"Be brief.", b"Be long.\n" * 40, b"Rule.\n" * 3_000, b"caf\xe9", None)))
    def write_instructions(self, text: bytes | None) -> None:
        path = self.made.workspace / "AGENTS.md"
        if text is None:
            path.unlink(missing_ok=True)
        else:
            path.write_bytes(text)

    @rule(which=st.integers(0, 1), recompose=st.booleans())
    def close_and_resume(self, which: int, recompose: bool) -> None:
        which = self.pick(which)
        self.running[which] = None
        session = self.sessions[which]
        session.close()
        try:
            self.sessions[which] = self.opened(which, session.id, recompose=recompose)
        except (UsageError, NoRoom):
            assert recompose
            self.sessions[which] = self.opened(which, session.id)
        assert self.sessions[which].transcript.state.at_rest

    def look_at(self, which: int, event: Any) -> None:
        match event:
            case StepEnded(usage=usage):
                whole = usage.cached + usage.evaluated == usage.window
                assert whole or self.cancelled[which]
                assert bool(usage.reason) == (usage.evaluated != usage.bound)
            case TurnEnded(reason=TurnEndReason.ERROR, detail=detail):
                # The errors that these scenarios can bring about: the model's, and that both sessions want all cells.
                assert "could not be read, twice" in detail or "all cells of the KV cache are taken" in detail

    @invariant()
    def everything_agrees(self) -> None:
        for session in getattr(self, "sessions", ()):
            self.made.check(session)
            if session.transcript.state.at_rest:
                # All that was evaluated and is still resident stands in the log.
                resident = self.made.engine.resident(session.sequence)
                assert list(resident) == list(session.transcript.window.tokens()[: len(resident)])

    def teardown(self) -> None:
        for session in getattr(self, "sessions", ()):
            session.close()
        if hasattr(self, "made"):
            self.made.engine.close()


def machine(make_rig: Callable[[int], Any], examples: int, steps: int) -> None:
    class Rigged(Sessions):
        pass

    Rigged.make_rig = staticmethod(make_rig)
    run_state_machine_as_test(
        Rigged,
        settings=settings(
            max_examples=examples, stateful_step_count=steps, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )


@pytest.mark.parametrize("kind", ["llama", "mamba"])
def test_sessions_agree_with_their_logs_whatever_is_done(kind: str, rig: Callable[..., Any]) -> None:
    machine(lambda n_ctx: fresh(rig, kind, n_ctx), examples=5, steps=14)


@pytest.mark.slow  # many more of the same
@pytest.mark.parametrize("kind", ["llama", "gemma3", "mamba", "hybrid"])
def test_sessions_agree_with_their_logs_over_many_histories(kind: str, rig: Callable[..., Any]) -> None:
    machine(lambda n_ctx: fresh(rig, kind, n_ctx), examples=40, steps=25)


def fresh(rig: Callable[..., Any], kind: str, n_ctx: int) -> Any:
    """Return a rig with a workspace of its own."""
    made = rig(kind, n_ctx=n_ctx)
    folder = Path(tempfile.mkdtemp(dir=made.workspace.parent))
    for name in ("notes.md", "src/main.py"):
        target = folder / name
        target.parent.mkdir(exist_ok=True)
        target.write_bytes((made.workspace / name).read_bytes())
    made.workspace = folder
    return made
