"""What became of every plan that was submitted for review: told from the session's submissions and their results. Pure.

A plan counts as approved only where the result of its own call says so. What is not answered is pending, and nothing
that happens around it (a mode, a cut, an approval of other bytes) makes more of it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from enum import StrEnum

import msgspec
from msgspec.structs import replace

from .contents import CodeFence, list_contents
from .kinds import Kind
from .quoting import cleaned

TITLE_CHARS = 120
IDENTITY_CHARS = 72
"""Two plans have the same title if so many of its characters are the same."""

OUTLINE_ENTRIES = 12
OUTLINE_CHARS = 60

REMINDER_LABEL = "[chapbook]"
"""Begins every notice of the runtime."""

_OUTLINED_LEVELS = (2, 3)
_BYTE_ORDER_MARK = "\ufeff"
_CLOSING_HASHES = re.compile(r"(?:^|[ \t])#+[ \t]*$")


class PlanVerdict(StrEnum):
    """What a result says. A review that nobody answered has no verdict.

    REJECTED: keep planning. DISMISSED: the user took over. FAILED: the review could not open, nobody decided anything.
    """

    APPROVED = "approved"
    REJECTED = "rejected"
    DISMISSED = "dismissed"
    FAILED = "failed"


class PlanStatus(StrEnum):
    """What a plan is now. CLOSED: it was ended by `/plan done` or another explicit close."""

    APPROVED = "approved"
    REJECTED = "rejected"
    DISMISSED = "dismissed"
    FAILED = "failed"
    PENDING = "pending"
    SUPERSEDED = "superseded"
    CLOSED = "closed"


class PlanPlace(msgspec.Struct, frozen=True):
    """Where a plan was submitted. Every session counts from zero, so a seq alone names no place."""

    session: str
    seq: int


class PlanResult(msgspec.Struct, frozen=True, kw_only=True):
    """A result of a submission, for the call `call_id` of `session`. `feedback` is the reviewer's, or the reason."""

    session: str
    call_id: str
    seq: int
    verdict: PlanVerdict | None = None
    feedback: str = ""

    @property
    def outcome(self) -> PlanVerdict | None:
        """What it comes to: a note given with an approval is feedback, so it is not an approval."""
        if self.verdict is PlanVerdict.APPROVED and self.feedback.strip():
            return PlanVerdict.REJECTED
        return self.verdict


class PlanExchange(msgspec.Struct, frozen=True, kw_only=True):
    """A submission and every result that its call got.

    `artifact` is the hash of its stored bytes, None where they could not be stored. `closed_seq` is the event that
    closed it. `plan_mode_after` is whether plan mode is in force behind its last result, None if that is not known.
    """

    session: str
    seq: int
    call_id: str
    text: str
    artifact: str | None = None
    results: tuple[PlanResult, ...] = ()
    closed_seq: int | None = None
    plan_mode_after: bool | None = None

    @property
    def place(self) -> PlanPlace:
        """Where it was submitted."""
        return PlanPlace(self.session, self.seq)

    @property
    def size_bytes(self) -> int:
        """The size of its text in UTF-8."""
        return len(_encoded(self.text))

    @property
    def result(self) -> PlanResult | None:
        """The result that counts: the last one.

        Where the last one says nothing and one before it did (a call cut off behind its verdict gets a second,
        synthetic result), the two are a tie: a no stands, and a yes stands if plan mode was left.
        """
        results = sorted(self.results, key=lambda result: result.seq)
        said = [result for result in results if result.outcome is not None]
        if not said or results[-1] is said[-1]:
            return results[-1] if results else None
        is_borne_out = said[-1].outcome is not PlanVerdict.APPROVED or self.plan_mode_after is False
        return said[-1] if is_borne_out else results[-1]

    @property
    def verdict(self) -> PlanVerdict | None:
        """What the result that counts says."""
        return None if self.result is None else self.result.outcome

    def has_same_bytes(self, other: PlanExchange) -> bool:
        """Whether it is the same plan: as stored, or as submitted."""
        return self.text == other.text or (self.artifact is not None and self.artifact == other.artifact)


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """A submitted plan and what became of it.

    `title` is for display, empty without a heading. `verdict_line` is the feedback of its result, verbatim.
    """

    exchange: PlanExchange
    title: str
    status: PlanStatus
    verdict_line: str = ""
    superseded_by: PlanPlace | None = None
    outline: tuple[str, ...] = ()


class Operative(msgspec.Struct, frozen=True, kw_only=True):
    """The plan in force. `work_order` is the approved one to carry out: `plan` itself, or one behind a pending `plan`.

    Who closes the plan in force closes both.
    """

    plan: Plan | None = None
    work_order: Plan | None = None

    @property
    def pending(self) -> Plan | None:
        """The plan in force if it is not approved, and so not to be implemented."""
        return None if self.plan is self.work_order else self.plan


def pair_results(submissions: Iterable[PlanExchange], results: Iterable[PlanResult]) -> list[PlanExchange]:
    """Return the submissions with their results, by session and call id, however far apart they are.

    Give it everything that was logged: a part of it would make approved plans pending. A result that stands before a
    submission is none of it.
    """
    by_call: dict[tuple[str, str], list[PlanResult]] = {}
    for result in results:
        by_call.setdefault((result.session, result.call_id), []).append(result)
    paired = []
    for one in submissions:
        found = by_call.get((one.session, one.call_id), [])
        paired.append(replace(one, results=tuple(result for result in found if result.seq > one.seq)))
    return paired


def classify_plans(exchanges: Iterable[PlanExchange], *, path: Sequence[str] | None = None) -> list[Plan]:
    """Return the plans, oldest first: by the place of their session in `path` (root first), then by seq.

    Without a path they are of one session. Raises ValueError where a session is not on the path.

    Superseded is what a later submission of the same title took the place of. A pending plan gives way to any that
    was not FAILED. An approved plan is the work order until another one is approved: a revision that is pending,
    rejected or dismissed leaves it as it is. The same bytes again are the same plan: its last answer counts, so a no
    or a close takes back an earlier yes. Without an answer they are pending, except that a plan that a user dismissed
    or closed is not offered again: it keeps that status, and supersedes nothing.
    """
    rows: list[_Row] = []
    for exchange in _in_causal_order(list(exchanges), path):
        rows.append(_row(exchange, before=rows))
    plans = []
    for at, row in enumerate(rows):
        superseding = next((later for later in rows[at + 1 :] if _supersedes(later, row)), None)
        plans.append(_plan(row, superseding))
    return plans


def operative_plans(plans: Sequence[Plan]) -> Operative:
    """Return the plan in force among all `plans`, oldest first: the newest that is approved or pending.

    Closing an approved one brings none back that is older: who ended it did not ask for the one before.
    """
    closed = [at for at, plan in enumerate(plans) if _was_work_order(plan)]
    # plans[at:] were submitted behind the last work order that was closed.
    at = closed[-1] + 1 if closed else 0
    plans = plans[at:]
    plan = _newest(plans, *_LIVE)
    if plan is None or plan.status is PlanStatus.APPROVED:
        return Operative(plan=plan, work_order=plan)
    return Operative(plan=plan, work_order=_newest(plans, PlanStatus.APPROVED))


def shown(plans: Iterable[Plan], *, session: str, seqs: range) -> list[Plan]:
    """Return the plans that were submitted within `seqs` of a session, as they are: for display, after they were
    classified over everything."""
    return [one for one in plans if one.exchange.session == session and one.exchange.seq in seqs]


def plan_summary(plan: Plan) -> str:
    """Return a plan as a line of a list. Its status stands first, so that no title can claim another one."""
    exchange = plan.exchange
    parts = [plan.status.value, f"seq {exchange.seq}", f"{exchange.size_bytes:,} bytes", plan.title or "(no heading)"]
    if plan.superseded_by is not None:
        session, seq = plan.superseded_by.session, plan.superseded_by.seq
        parts[0] += f" by seq {seq}" + ("" if session == exchange.session else f" of session {session}")
    return " · ".join(parts)


def heading_of(text: str) -> str | None:
    """Return the `#` heading that a text begins with, as on display; None where it begins otherwise."""
    first = next(_headings(text), None)
    if first is None or first.level != 1:
        return None
    before = text.removeprefix(_BYTE_ORDER_MARK).split("\n")[: first.line - 1]
    if any(line.strip() for line in before):
        return None
    return _cut(first.text, TITLE_CHARS)


def outline_of(text: str) -> tuple[str, ...]:
    """Return the `##` and `###` headings outside fences, the latter indented; what is left out is announced."""
    found = [heading for heading in _headings(text) if heading.level in _OUTLINED_LEVELS]
    lines = ["  " * (one.level - 2) + _cut(one.text, OUTLINE_CHARS) for one in found[:OUTLINE_ENTRIES]]
    if len(found) > OUTLINE_ENTRIES:
        lines.append(f"+{len(found) - OUTLINE_ENTRIES} more")
    return tuple(lines)


def strip_reminders(text: str, notices: Iterable[str]) -> str:
    """Return a plan without the runtime's notices that the model copied into it.

    `notices` are those that the session appended, as the model read them. What goes is one of them word for word, from
    its label to its end, on lines of its own, outside code fences. A line that only begins with the label stays, and
    so does a notice that was altered, indented, quoted or fenced: a plan may be about such lines.
    """
    known = {stripped for notice in notices if (stripped := notice.rstrip()).startswith(f"{REMINDER_LABEL} ")}
    longest_first = sorted(known, key=len, reverse=True)
    kept = []
    fence = CodeFence()
    at = 0
    while at < len(text):
        # text[:at] was looked at, and text[at:] begins a line.
        end = at if fence.is_open else _end_of_reminder(text, at, longest_first)
        if end == at:
            end = text.find("\n", at) + 1 or len(text)
            fence.pass_line(text[at:end])
            kept.append(text[at:end])
        at = end
    return "".join(kept)


def _was_work_order(plan: Plan) -> bool:
    return plan.exchange.closed_seq is not None and plan.exchange.verdict is PlanVerdict.APPROVED


def _newest(plans: Sequence[Plan], *statuses: PlanStatus) -> Plan | None:
    return next((one for one in reversed(plans) if one.status in statuses), None)


_LIVE = (PlanStatus.APPROVED, PlanStatus.PENDING)
_ENDED = (PlanStatus.DISMISSED, PlanStatus.CLOSED)
_UNDECIDED = (PlanStatus.PENDING, PlanStatus.FAILED)


class _Heading(msgspec.Struct, frozen=True):
    line: int
    level: int
    text: str


class _Row(msgspec.Struct, frozen=True, kw_only=True):
    """A submission on its own. `offered_again`: nobody answered, and its bytes had been dismissed or closed."""

    exchange: PlanExchange
    title: str
    status: PlanStatus
    offered_again: bool

    def has_title_of(self, other: _Row) -> bool:
        if not (self.title and other.title):
            return self.exchange.has_same_bytes(other.exchange)
        return self.title[:IDENTITY_CHARS] == other.title[:IDENTITY_CHARS]


def _in_causal_order(exchanges: Sequence[PlanExchange], path: Sequence[str] | None) -> list[PlanExchange]:
    sessions = {one.session for one in exchanges}
    if path is None and len(sessions) > 1:
        raise ValueError(f"plans of {len(sessions)} sessions have no order without the path from the root to the last")
    depths = {session: depth for depth, session in enumerate(sessions if path is None else path)}
    strangers = sorted(sessions - depths.keys())
    if strangers:
        raise ValueError(f"plans of sessions that are not on the path: {', '.join(strangers)}")
    return sorted(exchanges, key=lambda one: (depths[one.session], one.seq))


def _row(exchange: PlanExchange, *, before: Sequence[_Row]) -> _Row:
    status = _own_status(exchange)
    offered_again = False
    if status is PlanStatus.PENDING:
        same = (row.status for row in reversed(before) if row.exchange.has_same_bytes(exchange))
        decided = next((earlier for earlier in same if earlier not in _UNDECIDED), None)
        if decided in _ENDED:
            status, offered_again = decided, True
    return _Row(exchange=exchange, title=_title(exchange.text), status=status, offered_again=offered_again)


def _own_status(exchange: PlanExchange) -> PlanStatus:
    verdict = exchange.verdict
    if verdict is not None:
        status = PlanStatus(verdict.value)
    else:
        status = PlanStatus.PENDING if heading_of(exchange.text) else PlanStatus.FAILED
    return PlanStatus.CLOSED if exchange.closed_seq is not None and status in _LIVE else status


def _supersedes(later: _Row, earlier: _Row) -> bool:
    if later.offered_again or not later.has_title_of(earlier):
        return False
    if earlier.status is PlanStatus.PENDING:
        return later.status is not PlanStatus.FAILED
    if earlier.status is not PlanStatus.APPROVED:
        return False
    same_plan = later.exchange.has_same_bytes(earlier.exchange)
    return later.exchange.verdict is PlanVerdict.APPROVED or (same_plan and later.status not in _UNDECIDED)


def _plan(row: _Row, superseding: _Row | None) -> Plan:
    result = row.exchange.result
    return Plan(
        exchange=row.exchange,
        title=_cut(row.title, TITLE_CHARS),
        status=row.status if superseding is None else PlanStatus.SUPERSEDED,
        verdict_line="" if result is None else result.feedback,
        superseded_by=None if superseding is None else superseding.exchange.place,
        outline=outline_of(row.exchange.text),
    )


def _title(text: str) -> str:
    return next((heading.text for heading in _headings(text) if heading.level == 1), "")


def _headings(text: str) -> Iterator[_Heading]:
    """Yield the headings outside fences, without their hashes and what cannot be shown."""
    data = _encoded(text.removeprefix(_BYTE_ORDER_MARK))
    contents = list_contents(
        iter((data,)), Kind.MARKDOWN, most_entries=text.count("\n") + 1, title_chars=max(1, len(data))
    )
    for entry in contents.entries:
        words = entry.title.lstrip("#")
        level = len(entry.title) - len(words)
        shown_words = " ".join(cleaned(_CLOSING_HASHES.sub("", words)).split())
        if shown_words:
            yield _Heading(entry.line, level, shown_words)


def _end_of_reminder(text: str, at: int, notices: Sequence[str]) -> int:
    """Return where the line behind a notice at `at` begins, or `at` if none stands there."""
    for notice in notices:
        end = at + len(notice)
        if text.startswith(notice, at) and (end == len(text) or text.startswith(("\n", "\r\n"), end)):
            return text.find("\n", end) + 1 or len(text)
    return at


def _cut(text: str, limit: int) -> str:
    return text if len(text) <= limit else f"{text[: limit - 1]}…"


def _encoded(text: str) -> bytes:
    # What a model generated may hold half of a surrogate pair.
    return text.encode(errors="replace")
