"""The plans of a store: read from the logs of its sessions and from its artifacts. Takes no lock, writes nothing."""

from __future__ import annotations

import msgspec

from ..compaction.artifacts import ArtifactStore
from ..compaction.plans import Plan, classify_plans
from ..kernels.errors import ArtifactError, LogError
from .events import SessionId
from .log_reading import scan_log
from .plan_projection import ReadText, plan_exchanges
from .store import SessionCondition, Store


class StoredPlan(msgspec.Struct, frozen=True, kw_only=True):
    """A plan and when it was submitted, in Unix seconds."""

    submitted: float
    plan: Plan


class PlansFound(msgspec.Struct, frozen=True, kw_only=True):
    """The plans of a store, the newest first. `problems` name the logs of which not all could be read: what stands
    behind may say more of a plan."""

    plans: tuple[StoredPlan, ...]
    problems: tuple[str, ...] = ()


def read_session_plans(store: Store, session: SessionId) -> list[StoredPlan]:
    """Return the plans of one session, oldest first, by what of its log can be read. Raises LogError."""
    events = scan_log(store.session_folder(session)).events
    times: dict[int, float] = {logged.seq: logged.time for logged in events}
    plans = classify_plans(plan_exchanges(session, events, read_text=reader_of(store.artifacts)))
    return [StoredPlan(submitted=times[plan.exchange.seq], plan=plan) for plan in plans]


def find_plans(store: Store) -> PlansFound:
    """Return every plan of every session. Takes the time that reading all logs twice takes."""
    plans: list[StoredPlan] = []
    problems = []
    for session in store.list_sessions():
        if session.condition in (SessionCondition.DAMAGED, SessionCondition.UNREADABLE):
            problems.append(f"session {session.id} is {session.condition}: {session.detail}")
        try:
            plans += read_session_plans(store, session.id)
        except LogError:
            continue  # none of it can be read, which was said
    newest_first = sorted(plans, key=lambda one: (-one.submitted, -one.plan.exchange.seq))
    return PlansFound(plans=tuple(newest_first), problems=tuple(problems))


def reader_of(artifacts: ArtifactStore) -> ReadText:
    """Return what reads plans: None for one that is not there, or not what was stored."""

    def read_text(sha256: str) -> str | None:
        try:
            return artifacts.read(sha256).decode("utf-8", "replace")
        except ArtifactError:
            return None

    return read_text
