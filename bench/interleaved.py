"""Two sessions on one engine that take turns: how much of each request is still held from the last time."""

from __future__ import annotations

import contextlib
from collections import Counter
from pathlib import Path

import msgspec

from ..runtime.engine import Engine
from ..runtime.events import StepUsage
from ..runtime.session import Session
from .long_session import NO_CALLS, ReadingEngine, SourceText, grow, open_long_session
from .paired import Figure, Target, judged
from .played_turn import play_turn

HIT_TARGET = Target(">=", 0.99)
ONE_SEQUENCE_TARGET = Target("<=", 0.6)
"""One that holds a single sequence finds nothing at the first step of a visit, and what that left at the second."""

STEPS_A_VISIT = 2
"""Steps that a session makes before the other one has its turn: a call and the answer to its result make two."""

PROMPT = "Go on."


class Interleaving(msgspec.Struct, frozen=True, kw_only=True):
    """The sessions grow to `tokens` each, by messages of `turn_tokens`, and are visited `visits` times after that."""

    tokens: int
    turn_tokens: int
    visits: int
    with_tools: bool
    templates: Path


def play_interleaved(engine: Engine, folder: Path, plan: Interleaving) -> tuple[StepUsage, ...]:
    """Return the steps of both sessions after they have grown, in turn."""
    reading = ReadingEngine(engine)
    usages: list[StepUsage] = []
    with contextlib.ExitStack() as stack:
        sessions: list[Session] = []
        for number in range(2):
            workspace = folder / f"session{number}"
            workspace.mkdir(parents=True)
            session = stack.enter_context(
                open_long_session(reading, workspace, templates=plan.templates, with_tools=plan.with_tools)
            )
            sessions.append(session)
        texts = [SourceText(reading, seed=seed) for seed in range(2)]
        lengths = range(plan.turn_tokens, plan.tokens + plan.turn_tokens, plan.turn_tokens)
        for length in lengths:
            for session, text in zip(sessions, texts, strict=True):
                grow(session, text, tokens=min(length, plan.tokens), turn_tokens=plan.turn_tokens)
        for _ in range(plan.visits):
            for session in sessions:
                for _ in range(STEPS_A_VISIT):
                    usages += play_turn(session, PROMPT, choice=NO_CALLS).usages
    return tuple(usages)


def hit_rate_figure(usages: tuple[StepUsage, ...]) -> Figure:
    """Return what of the requests was held, and of what an engine would hold that forgets nothing."""
    window = sum(usage.window for usage in usages)
    best = 1 - sum(usage.bound for usage in usages) / window
    value = sum(usage.cached for usage in usages) / window
    note = f"best possible {best:.4f}; {_sources(usages)}"
    return judged(Figure(name="two sessions, hit rate", value=value, note=note), HIT_TARGET)


def one_sequence_figure(usages: tuple[StepUsage, ...]) -> Figure:
    """Return the same of an engine that holds one sequence and keeps nothing: it shows that misses are seen."""
    value = sum(usage.cached for usage in usages) / sum(usage.window for usage in usages)
    note = f"a tiny model, nothing kept; {_sources(usages)}"
    return judged(Figure(name="the same, one sequence", value=value, note=note), ONE_SEQUENCE_TARGET)


def _sources(usages: tuple[StepUsage, ...]) -> str:
    counts = Counter(usage.source for usage in usages)
    return f"{len(usages)} steps: " + ", ".join(f"{count} {source}" for source, count in counts.most_common())
