"""Reviewing a plan: what a reviewer is shown, what they can answer, and what the answer means. Pure.

Only a plain approval approves. No answer is none.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import TypeAlias

import msgspec

from ..compaction.plans import PlanVerdict


class ReviewDecision(enum.StrEnum):
    """What a reviewer decides: do it, go on planning, or leave it to me."""

    APPROVE = "approve"
    KEEP_PLANNING = "keep planning"
    DISMISS = "dismiss"


class ReviewAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """A reviewer's answer; `note` is what the model is to read."""

    decision: ReviewDecision
    note: str = ""


class SubmittedPlan(msgspec.Struct, frozen=True, kw_only=True):
    """A plan as a reviewer sees it. `artifact` names its stored bytes."""

    title: str
    text: str
    artifact: str


Reviewer: TypeAlias = Callable[[SubmittedPlan], ReviewAnswer | None]
"""Asks a person. None is no answer."""


class Reviewed(msgspec.Struct, frozen=True, kw_only=True):
    """What came of a review: the verdict (None: nobody answered), the feedback with it, what the model reads, and what
    the reviewer is to be told."""

    verdict: PlanVerdict | None
    feedback: str
    text: str
    to_reviewer: str = ""


def review_of(answer: ReviewAnswer | None) -> Reviewed:
    """Return what an answer means. An approval with a note is feedback: what was approved is not what was submitted.

    Raises TypeError or ValueError for what is no answer: a reviewer is foreign code.
    """
    if answer is None:
        return Reviewed(
            verdict=None,
            feedback="",
            text="Nobody answered: the plan is pending, which is no approval. Do nothing of it; plan mode is still on.",
        )
    if not (isinstance(answer, ReviewAnswer) and isinstance(answer.note, str)):
        raise TypeError(f"a reviewer returns a ReviewAnswer with a text as its note, or None, not {answer!r}"[:200])
    decision, note = ReviewDecision(answer.decision), answer.note.strip()
    if decision is ReviewDecision.APPROVE and not note:
        return Reviewed(
            verdict=PlanVerdict.APPROVED,
            feedback="",
            text="The plan is approved. From your next reply on plan mode is over: implement it as it stands.",
        )
    if decision is ReviewDecision.DISMISS:
        said = f" They say: {note}" if note else ""
        return Reviewed(
            verdict=PlanVerdict.DISMISSED,
            feedback=note,
            text=f"The user takes over: the plan is dismissed. Do nothing of it, and wait for what they ask.{said}",
        )
    to_reviewer = ""
    if decision is ReviewDecision.APPROVE:
        to_reviewer = "a note with an approval is feedback, so the plan is not approved: the model is to revise it"
    return Reviewed(
        verdict=PlanVerdict.REJECTED,
        feedback=note,
        text=f"Not approved. Go on planning, and submit a revised plan.{f' Feedback: {note}' if note else ''}",
        to_reviewer=to_reviewer,
    )


def failed(why: str) -> Reviewed:
    """Return what came of a review that could not open: nobody decided anything."""
    return Reviewed(verdict=PlanVerdict.FAILED, feedback=why, text=f"The plan was not reviewed: {why}")
