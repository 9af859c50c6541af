"""What became of every plan: each rule of the truth table, and any history of reviews against a plain account of it."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from chapbook.compaction.plans import (
    IDENTITY_CHARS,
    OUTLINE_CHARS,
    OUTLINE_ENTRIES,
    REMINDER_LABEL,
    TITLE_CHARS,
    Operative,
    Plan,
    PlanExchange,
    PlanPlace,
    PlanResult,
    PlanStatus,
    PlanVerdict,
    classify_plans,
    heading_of,
    operative_plans,
    outline_of,
    pair_results,
    plan_summary,
    shown,
    strip_reminders,
)
from chapbook.runtime.turn import LABEL

APPROVED, REJECTED, DISMISSED, FAILED = PlanVerdict
PLAN = "# Move the cart\n\n## Steps\n1. move it\n"
REVISED = "# Move the cart\n\n## Steps\n1. move it\n2. test it\n"
OTHER = "# Write the docs\n"


class History:
    """A log in the making: submissions, results and closings of sessions, each of which counts from zero."""

    def __init__(self, *path: str) -> None:
        self.path = path or ("root",)
        self.session = self.path[0]
        self._next = dict.fromkeys(self.path, 0)
        self.submissions: list[PlanExchange] = []
        self.results: list[PlanResult] = []

    def _seq(self) -> int:
        self._next[self.session] += 1
        return self._next[self.session] - 1

    def submit(self, text: str = PLAN, verdict: PlanVerdict | None = None, feedback: str = "") -> int:
        """Submit a plan, and answer it at once if a verdict is given. Return the number of the submission."""
        seq = self._seq()
        call_id = f"call{seq:05d}"  # the same in every session
        self.submissions.append(PlanExchange(session=self.session, seq=seq, call_id=call_id, text=text))
        if verdict is not None:
            self.answer(len(self.submissions) - 1, verdict, feedback)
        return len(self.submissions) - 1

    def answer(self, number: int, verdict: PlanVerdict | None, feedback: str = "") -> None:
        self.session = self.submissions[number].session
        call_id = self.submissions[number].call_id
        self.results.append(
            PlanResult(session=self.session, call_id=call_id, seq=self._seq(), verdict=verdict, feedback=feedback)
        )

    def change(self, number: int, **fields: object) -> None:
        self.submissions[number] = PlanExchange(**{**as_fields(self.submissions[number]), **fields})

    def close(self, number: int) -> None:
        self.session = self.submissions[number].session
        self.change(number, closed_seq=self._seq())

    def plans(self) -> list[Plan]:
        return classify_plans(pair_results(self.submissions, self.results), path=self.path)

    def statuses(self) -> list[str]:
        return [plan.status.value for plan in self.plans()]

    def operative(self) -> Operative:
        return operative_plans(self.plans())

    def in_force(self) -> tuple[int | None, int | None]:
        """Return the numbers of the operative plan and of the work order."""
        operative = self.operative()
        places = [one.place for one in self.submissions]
        found = [
            None if plan is None else places.index(plan.exchange.place)
            for plan in (operative.plan, operative.work_order)
        ]
        return found[0], found[1]


def as_fields(exchange: PlanExchange) -> dict[str, object]:
    return {field: getattr(exchange, field) for field in PlanExchange.__struct_fields__}


# The truth table


def test_a_plan_that_was_approved_is_the_operative_one_and_the_work_order() -> None:
    history = History()
    history.submit(PLAN, APPROVED)
    assert history.statuses() == ["approved"]
    assert history.in_force() == (0, 0)
    assert history.operative().pending is None


def test_keep_planning_is_rejected_with_the_feedback_verbatim_and_not_operative() -> None:
    history = History()
    history.submit(PLAN, REJECTED, "  no:\n- test it \n")
    assert history.statuses() == ["rejected"]
    assert history.plans()[0].verdict_line == "  no:\n- test it \n"
    assert history.in_force() == (None, None)


def test_a_plan_whose_user_took_over_is_dismissed_and_not_operative() -> None:
    history = History()
    history.submit(PLAN, DISMISSED)
    assert history.statuses() == ["dismissed"]
    assert history.in_force() == (None, None)


@pytest.mark.parametrize("reason", ["no reviewer", "the reviewer raised KeyError", "not in plan mode"])
def test_a_review_that_could_not_open_is_failed_with_its_reason(reason: str) -> None:
    history = History()
    history.submit(PLAN, FAILED, reason)
    assert history.statuses() == ["failed"]
    assert history.plans()[0].verdict_line == reason
    assert history.in_force() == (None, None)


def test_a_plan_without_a_result_is_pending_and_no_work_order() -> None:
    history = History()
    history.submit()
    assert history.statuses() == ["pending"]
    assert history.in_force() == (0, None)
    pending = history.operative().pending
    assert pending is not None
    assert pending.exchange.seq == 0


def test_a_result_without_an_answer_leaves_the_plan_pending() -> None:
    history = History()
    history.answer(history.submit(), None, "nobody answered")
    assert history.statuses() == ["pending"]


@pytest.mark.parametrize(
    "text", ["Move the cart\n", "", "## Steps\n", "First\n# Move\n", "```\n# Move\n```\n", "# ##\n"]
)
def test_a_plan_that_begins_without_a_heading_is_failed(text: str) -> None:
    history = History()
    history.submit(text)
    assert history.statuses() == ["failed"]


def test_an_approval_counts_before_the_mode_event_is_logged() -> None:
    history = History()
    history.change(history.submit(PLAN, APPROVED), plan_mode_after=True)
    assert history.statuses() == ["approved"]


@pytest.mark.parametrize("plan_mode_after", [None, True, False])
def test_leaving_plan_mode_approves_no_plan(plan_mode_after: bool | None) -> None:
    history = History()
    history.change(history.submit(), plan_mode_after=plan_mode_after)
    history.answer(history.submit(OTHER), None)
    history.change(1, plan_mode_after=plan_mode_after)
    assert history.statuses() == ["pending", "pending"]


@pytest.mark.parametrize(
    ("plan_mode_after", "status"), [(None, "pending"), (True, "pending"), (False, "approved")], ids=str
)
def test_the_mode_breaks_the_tie_between_an_approval_and_a_silent_second_result(
    plan_mode_after: bool | None, status: str
) -> None:
    history = History()
    number = history.submit(PLAN, APPROVED)
    history.answer(number, None, "outcome unknown")
    history.change(number, plan_mode_after=plan_mode_after)
    assert history.statuses() == [status]


@pytest.mark.parametrize("verdict", [REJECTED, DISMISSED, FAILED])
def test_a_silent_second_result_takes_back_no_refusal(verdict: PlanVerdict) -> None:
    history = History()
    history.answer(history.submit(PLAN, verdict, "why"), None, "outcome unknown")
    assert history.statuses() == [verdict.value]
    assert history.plans()[0].verdict_line == "why"


def test_of_results_that_were_delivered_again_the_last_counts_in_any_order_of_reading() -> None:
    history = History()
    number = history.submit(PLAN, REJECTED, "no")
    history.answer(number, APPROVED)
    history.answer(history.submit(OTHER, APPROVED), DISMISSED)
    history.results.reverse()
    assert history.statuses() == ["approved", "dismissed"]


def test_a_note_with_an_approval_is_feedback_and_no_approval() -> None:
    history = History()
    history.submit(PLAN, APPROVED, "but test it")
    history.submit(OTHER, APPROVED, " \n")
    assert history.statuses() == ["rejected", "approved"]
    assert history.plans()[0].verdict_line == "but test it"


def test_results_are_paired_by_call_id_however_near_another_one_is() -> None:
    history = History()
    first, second = history.submit(PLAN), history.submit(OTHER)
    history.answer(second, REJECTED)
    history.answer(first, APPROVED)
    assert history.statuses() == ["approved", "rejected"]


def test_a_result_before_its_call_is_none_of_it() -> None:
    early = PlanResult(session="root", call_id="call00007", seq=3, verdict=APPROVED)
    late = PlanExchange(session="root", seq=7, call_id="call00007", text=PLAN)
    assert classify_plans(pair_results([late], [early]))[0].status is PlanStatus.PENDING


def test_a_cut_between_a_submission_and_its_verdict_leaves_it_approved() -> None:
    history = History()
    first = history.submit(PLAN)
    history.submit(OTHER)
    history.answer(first, APPROVED)
    plans = history.plans()
    assert [plan.status.value for plan in shown(plans, session="root", seqs=range(0, 1))] == ["approved"]
    assert shown(plans, session="root", seqs=range(2, 9)) == []
    assert shown(plans, session="child", seqs=range(0, 9)) == []
    assert shown(plans, session="root", seqs=range(1, 2)) == [plans[1]]


# The same title, the same bytes


def test_an_approved_revision_supersedes_the_approved_plan_of_its_title() -> None:
    history = History()
    history.submit(PLAN, APPROVED)
    history.submit(REVISED, APPROVED)
    assert history.statuses() == ["superseded", "approved"]
    assert history.plans()[0].superseded_by == PlanPlace("root", history.submissions[1].seq)
    assert history.in_force() == (1, 1)


def test_an_approved_plan_stays_the_work_order_while_its_revision_is_pending() -> None:
    history = History()
    history.submit(PLAN, APPROVED)
    number = history.submit(REVISED)
    assert history.statuses() == ["approved", "pending"]
    assert history.in_force() == (1, 0)
    history.answer(number, APPROVED)
    assert history.statuses() == ["superseded", "approved"]


@pytest.mark.parametrize("verdict", [REJECTED, DISMISSED, FAILED])
def test_a_revision_that_is_refused_leaves_the_approved_plan_in_force(verdict: PlanVerdict) -> None:
    history = History()
    history.submit(PLAN, APPROVED)
    history.submit(REVISED, verdict)
    assert history.statuses() == ["approved", verdict.value]
    assert history.in_force() == (0, 0)


@pytest.mark.parametrize("verdict", [None, APPROVED, REJECTED, DISMISSED])
def test_a_pending_plan_is_superseded_by_any_later_review_of_its_title(verdict: PlanVerdict | None) -> None:
    history = History()
    history.submit(PLAN)
    history.submit(REVISED, verdict)
    assert history.statuses()[0] == "superseded"


def test_a_review_that_could_not_open_supersedes_nothing() -> None:
    history = History()
    history.submit(PLAN)
    history.submit(REVISED, FAILED)
    assert history.statuses() == ["pending", "failed"]
    assert history.in_force() == (0, None)


@pytest.mark.parametrize("verdict", [REJECTED, DISMISSED, FAILED])
def test_what_was_refused_keeps_its_status_when_a_revision_comes(verdict: PlanVerdict) -> None:
    history = History()
    history.submit(PLAN, verdict)
    history.submit(REVISED, APPROVED)
    assert history.statuses() == [verdict.value, "approved"]
    assert history.plans()[0].superseded_by is None


def test_another_title_supersedes_nothing_and_the_newest_is_operative() -> None:
    history = History()
    history.submit(PLAN, APPROVED)
    history.submit(OTHER, APPROVED)
    assert history.statuses() == ["approved", "approved"]
    assert history.in_force() == (1, 1)
    history.submit("# A third\n")
    assert history.in_force() == (2, 1)


def test_who_closes_the_plan_in_force_is_left_with_none_and_not_with_the_one_before() -> None:
    history = History()
    history.submit(PLAN, APPROVED)
    history.submit(OTHER, APPROVED)
    history.close(1)
    assert history.in_force() == (None, None)
    assert history.statuses() == ["approved", "closed"], "nobody closed the first one"
    history.submit("# A third\n", APPROVED)
    assert history.in_force() == (2, 2)


def test_what_superseded_a_plan_is_the_first_that_took_its_place() -> None:
    history = History()
    history.submit(PLAN, APPROVED)
    history.submit(REVISED + "a", REJECTED)
    history.submit(REVISED + "b", APPROVED)
    history.submit(REVISED + "c", APPROVED)
    by = [plan.superseded_by and plan.superseded_by.seq for plan in history.plans()]
    assert by == [history.submissions[2].seq, None, history.submissions[3].seq, None]


def test_a_rejected_plan_that_comes_again_unchanged_and_is_approved_is_approved() -> None:
    history = History()
    history.submit(PLAN, REJECTED, "not now")
    history.submit(PLAN, APPROVED)
    assert history.statuses() == ["rejected", "approved"]
    assert history.in_force() == (1, 1)


def test_a_rejected_plan_that_comes_again_unchanged_is_pending_until_somebody_answers() -> None:
    history = History()
    history.submit(PLAN, REJECTED)
    history.submit(PLAN)
    assert history.statuses() == ["rejected", "pending"]


@pytest.mark.parametrize("verdict", [REJECTED, DISMISSED])
def test_a_no_to_the_same_bytes_takes_back_the_approval(verdict: PlanVerdict) -> None:
    history = History()
    history.submit(PLAN, APPROVED)
    history.submit(PLAN, verdict)
    assert history.statuses() == ["superseded", verdict.value]
    assert history.in_force() == (None, None)


def test_an_approved_plan_that_comes_again_outside_plan_mode_stays_the_work_order() -> None:
    history = History()
    history.submit(PLAN, APPROVED)
    history.submit(PLAN, FAILED, "not in plan mode")
    history.submit(PLAN)
    assert history.statuses() == ["approved", "failed", "pending"]
    assert history.in_force() == (2, 0)


def test_a_dismissed_plan_that_comes_again_unchanged_is_not_offered() -> None:
    history = History()
    history.submit(PLAN, DISMISSED)
    history.submit(PLAN, FAILED)
    number = history.submit(PLAN)
    assert history.statuses() == ["dismissed", "failed", "dismissed"]
    assert history.in_force() == (None, None)
    history.answer(number, APPROVED)
    assert history.in_force() == (number, number)


def test_a_plan_that_was_dismissed_and_approved_since_is_pending_where_it_comes_again() -> None:
    history = History()
    history.submit(PLAN, DISMISSED)
    history.submit(PLAN, APPROVED)
    history.submit(PLAN)
    assert history.statuses() == ["dismissed", "approved", "pending"]
    assert history.in_force() == (2, 1)


def test_what_is_offered_again_supersedes_nothing() -> None:
    history = History()
    history.submit(PLAN, DISMISSED)
    history.submit(REVISED)
    history.submit(PLAN)
    assert history.statuses() == ["dismissed", "pending", "dismissed"]
    assert history.in_force() == (1, None)


def test_the_same_stored_bytes_are_the_same_plan_whatever_was_stripped() -> None:
    history = History()
    history.change(history.submit(PLAN, APPROVED), artifact="a" * 64)
    history.change(history.submit(f"{PLAN}[chapbook] round 3 of 4\n", REJECTED), artifact="a" * 64)
    history.change(history.submit(OTHER, APPROVED), artifact=None)
    history.change(history.submit(OTHER + "more\n", REJECTED), artifact=None)
    assert history.statuses() == ["superseded", "rejected", "approved", "rejected"]


def test_plans_without_a_title_supersede_each_other_only_by_their_bytes() -> None:
    history = History()
    history.submit("one\n", APPROVED)
    history.submit("two\n", APPROVED)
    assert history.statuses() == ["approved", "approved"]
    history.submit("one\n", REJECTED)
    assert history.statuses() == ["superseded", "approved", "rejected"]


# Closing


def test_a_closed_plan_is_closed_and_an_answer_does_not_revive_it() -> None:
    history = History()
    number = history.submit(PLAN)
    history.close(number)
    history.answer(number, APPROVED)
    assert history.statuses() == ["closed"]
    assert history.in_force() == (None, None)


@pytest.mark.parametrize("verdict", [REJECTED, DISMISSED, FAILED])
def test_closing_does_not_hide_that_a_plan_was_refused(verdict: PlanVerdict) -> None:
    history = History()
    history.close(history.submit(PLAN, verdict))
    assert history.statuses() == [verdict.value]


@pytest.mark.parametrize("first", [PLAN, REVISED])
def test_closing_an_approved_plan_revives_none_that_it_superseded(first: str) -> None:
    history = History()
    history.submit(first, APPROVED)
    history.close(history.submit(REVISED, APPROVED))
    assert history.statuses() == ["superseded", "closed"]
    assert history.in_force() == (None, None)


def test_closing_a_pending_revision_leaves_the_approved_plan_the_work_order() -> None:
    history = History()
    history.submit(PLAN, APPROVED)
    history.close(history.submit(REVISED))
    assert history.statuses() == ["approved", "closed"]
    assert history.in_force() == (0, 0)


def test_a_finished_plan_that_comes_again_unchanged_stays_closed() -> None:
    history = History()
    history.close(history.submit(PLAN, APPROVED))
    history.submit(PLAN)
    assert history.statuses() == ["closed", "closed"]
    history.submit(REVISED)
    assert history.in_force() == (2, None)


def test_closing_the_pending_copy_of_an_approved_plan_ends_it() -> None:
    history = History()
    history.submit(PLAN, APPROVED)
    history.close(history.submit(PLAN))
    assert history.in_force() == (None, None)


def test_closing_both_plans_in_force_leaves_none() -> None:
    history = History()
    history.submit(PLAN, APPROVED)
    history.submit(REVISED)
    for number in history.in_force():
        assert number is not None
        history.close(number)
    assert history.in_force() == (None, None)


# Ancestor paths


def test_along_a_path_the_child_comes_behind_the_root_whatever_its_seqs() -> None:
    history = History("root", "child")
    for _ in range(5):
        history.submit(OTHER, REJECTED)
    old = history.submit(PLAN, APPROVED)
    history.session = "child"
    new = history.submit(REVISED, APPROVED)
    assert history.submissions[new].seq < history.submissions[old].seq
    history.submissions.reverse()
    plans = history.plans()
    assert [plan.status.value for plan in plans][-2:] == ["superseded", "approved"]
    assert plans[-2].superseded_by == PlanPlace("child", 0)
    assert plan_summary(plans[-2]).startswith("superseded by seq 0 of session child · seq 10 ·")


def test_a_call_id_is_of_its_own_session() -> None:
    history = History("root", "child")
    history.submit(PLAN)
    history.session = "child"
    history.submit(OTHER, APPROVED)
    assert history.statuses() == ["pending", "approved"]


def test_plans_of_several_sessions_need_the_path_that_holds_them() -> None:
    history = History("root", "child")
    history.submit(PLAN)
    history.session = "child"
    history.submit(OTHER)
    with pytest.raises(ValueError, match="2 sessions have no order without the path"):
        classify_plans(history.submissions)
    with pytest.raises(ValueError, match="not on the path: child"):
        classify_plans(history.submissions, path=["root"])
    assert classify_plans([]) == []


# Titles and outlines


@pytest.mark.parametrize(
    ("text", "heading"),
    [
        ("# Move it\nbody", "Move it"),
        ("\n \n   # Move it ##  \n", "Move it"),
        ("\ufeff# Move it\r\n", "Move it"),
        ("\ufeff\n# Move it\n", "Move it"),
        ("# About C#\n", "About C#"),
        ("# a \\#\n", "a \\#"),
        ("#\tMove \x1b[1mit\x1b[0m\u200b  now\n", "Move it now"),
        ("#Move it\n", None),
        ("    # code\n", None),
        ("## Move it\n", None),
        ("Move it\n=====\n", None),
        ("# \u200b\n", None),
        ("text\n\n# Move it\n", None),
        ("~~~\n# Move it\n~~~\n", None),
        ("", None),
    ],
)
def test_the_heading_that_a_plan_begins_with(text: str, heading: str | None) -> None:
    assert heading_of(text) == heading


def test_a_title_is_the_first_heading_outside_fences() -> None:
    exchange = PlanExchange(
        session="root", seq=0, call_id="a", text="intro\n```\n# no\n```\n## Sub\n# Yes #\n# Later\n"
    )
    assert classify_plans([exchange])[0].title == "Yes"


def test_a_title_is_shown_to_120_characters_and_known_by_72() -> None:
    def title(start: str, chars: int) -> str:
        return "# " + start.ljust(chars, "x")

    history = History()
    for text in (title("a", 120), title("a", 121), title("b", 72) + "1", title("b", 72) + "2", title("c", 71) + "1"):
        history.submit(text, APPROVED)
    history.submit(title("c", 71) + "2", APPROVED)
    plans = history.plans()
    assert (IDENTITY_CHARS, TITLE_CHARS) == (72, 120)
    assert [len(plan.title) for plan in plans[:2]] == [120, 120]
    assert [plan.title[-1] for plan in plans[:2]] == ["x", "…"]
    assert history.statuses() == ["superseded", "approved"] * 2 + ["approved"] * 2
    assert len(heading_of(title("a", 121)) or "") == TITLE_CHARS


def test_an_outline_holds_the_two_levels_below_the_title_and_says_what_it_leaves_out() -> None:
    text = "# T\n## One ##\n### Sub\n#### no\n```\n## no\n```\n" + "".join(f"## Part {n}\n" for n in range(12))
    outline = outline_of(text)
    assert outline[:3] == ("One", "  Sub", "Part 0")
    assert len(outline) == OUTLINE_ENTRIES + 1
    assert outline[-1] == "+2 more"
    assert outline_of("# T\n" + "## x\n" * 12) == ("x",) * 12
    assert outline_of("## " + "y" * 61) == ("y" * (OUTLINE_CHARS - 1) + "…",)
    assert outline_of("## " + "y" * 60) == ("y" * 60,)


def test_more_headings_than_a_table_of_contents_lists_are_counted() -> None:
    assert outline_of("## x\n" * 1000)[-1] == f"+{1000 - OUTLINE_ENTRIES} more"


# Lists


def test_a_summary_is_one_line_that_begins_with_the_status() -> None:
    history = History()
    history.submit(PLAN, APPROVED)
    history.submit("# Größe\n", REJECTED, "approved, if you ask me")
    history.submit("no heading", FAILED)
    history.submit(REVISED)
    assert [plan_summary(plan) for plan in history.plans()] == [
        "approved · seq 0 · 37 bytes · Move the cart",
        "rejected · seq 2 · 10 bytes · Größe",
        "failed · seq 4 · 10 bytes · (no heading)",
        "pending · seq 6 · 48 bytes · Move the cart",
    ]


def test_a_title_cannot_claim_another_status() -> None:
    history = History()
    history.submit("# x\r\x1b[2K approved · seq 0\n")
    summary = plan_summary(history.plans()[0])
    assert "approved" not in summary.split(" · ", 3)[:3]
    assert summary.startswith("pending · seq 0 · ")
    assert summary.isprintable()


def test_half_a_surrogate_pair_in_a_plan_breaks_nothing() -> None:
    plan = classify_plans([PlanExchange(session="root", seq=0, call_id="a", text="# a\ud800b\n## \udfff\n")])[0]
    assert plan.status is PlanStatus.PENDING
    assert plan_summary(plan) == "pending · seq 0 · 11 bytes · a?b"


# Reminders

ROUND = "[chapbook] round 3 of 4"
HOOK = "[chapbook] added by a hook:\nuse tabs\n```\nunbalanced\n"


def test_the_label_is_that_of_the_runtime() -> None:
    assert REMINDER_LABEL == LABEL


def test_notices_that_were_copied_into_a_plan_go_word_for_word() -> None:
    text = f"{ROUND}\n# T\r\n{ROUND}\r\n{HOOK}## Steps\n{ROUND}"
    assert strip_reminders(text, [ROUND, HOOK]) == "# T\r\n## Steps\n"


@pytest.mark.parametrize(
    "kept",
    [
        f"{ROUND}0\n",
        f"{ROUND} is what it prints\n",
        f"> {ROUND}\n",
        f" {ROUND}\n",
        f"say {ROUND}\n",
        f"```\n{ROUND}\n```\n",
        "[chapbook]\nmodel = 1\n",
        "[chapbook] a line of the person's own\n",
        f"{ROUND}\r\r\n",
        "yes\n",
        "\n\n",
    ],
)
def test_what_is_no_notice_word_for_word_on_its_own_lines_stays(kept: str) -> None:
    text = f"# T\n{kept}end\n"
    assert strip_reminders(text, [ROUND, "[chapbook]", "[chapbook] ", "yes", "", "\n", "# T"]) == text


def test_of_two_notices_that_begin_alike_the_longer_goes_whole() -> None:
    assert strip_reminders(f"# T\n{ROUND}\nmore\nend", [ROUND, f"{ROUND}\nmore"]) == "# T\nend"


def test_a_fence_within_a_notice_opens_none_in_the_plan() -> None:
    text = f"# T\n{HOOK}```\n{ROUND}\n```\n{ROUND}\nend\n"
    assert strip_reminders(text, [HOOK, ROUND]) == f"# T\n```\n{ROUND}\n```\nend\n"


LINES = st.lists(st.sampled_from(["# T", "own", "```", "~~~", f"{ROUND}x", "[chapbook] own", ""]), max_size=8)


@given(LINES, st.lists(st.integers(0, 8), max_size=3))
def test_only_notices_are_ever_removed(own: list[str], places: list[int]) -> None:
    lines = list(own)
    for place in sorted(places, reverse=True):
        lines.insert(place, ROUND)
    left = strip_reminders("".join(f"{line}\n" for line in lines), [ROUND])
    assert [line for line in left.split("\n")[:-1] if line != ROUND] == own


# Any history, against a plain account of it

TEXTS = (PLAN, REVISED, "# Move the cart\nthird", OTHER, f"{OTHER}more", "no heading")
ACTS = st.lists(
    st.one_of(
        st.tuples(st.just("submit"), st.integers(0, 2), st.sampled_from(TEXTS)),
        st.tuples(st.just("answer"), st.integers(0, 9), st.sampled_from([None, *PlanVerdict]), st.booleans()),
        st.tuples(st.just("close"), st.integers(0, 9)),
        st.tuples(st.just("mode"), st.integers(0, 9), st.booleans()),
    ),
    max_size=24,
)


class Account:
    """The plain account: it goes through the submissions once and holds, for each title, the plan that is approved and
    the draft that is pending."""

    def __init__(self) -> None:
        self.statuses: dict[PlanPlace, str] = {}
        self.standing: dict[str, PlanExchange] = {}
        self.draft: dict[str, PlanExchange] = {}
        self.latest: dict[str, str] = {}

    def go_on(self, one: PlanExchange, answers: list[PlanResult]) -> None:
        said = ""
        for answer in answers:
            if answer.verdict is not None:
                noted = answer.verdict is APPROVED and answer.feedback
                said = "rejected" if noted else answer.verdict.value
            elif said == "approved" and one.plan_mode_after is not False:
                said = ""
        title = one.text.split("\n")[0] if one.text.startswith("#") else one.text
        was_approved = said == "approved"
        if not said:
            said = "pending" if one.text.startswith("#") else "failed"
        if said in ("approved", "pending") and one.closed_seq is not None:
            said = "closed"
        if said == "pending" and self.latest.get(one.text) in ("dismissed", "closed"):
            self.statuses[one.place] = self.latest[one.text]
            return
        self.statuses[one.place] = said
        if said == "failed":
            return
        if said != "pending":
            self.latest[one.text] = said
        self._drop(self.draft, title)
        standing = self.standing.get(title)
        if was_approved or (standing and said != "pending" and standing.text == one.text):
            self._drop(self.standing, title)
        if said in ("approved", "pending"):
            (self.standing if said == "approved" else self.draft)[title] = one

    def _drop(self, held: dict[str, PlanExchange], title: str) -> None:
        if title in held:
            self.statuses[held.pop(title).place] = "superseded"


def acted(acts: list[tuple]) -> History:
    history = History("root", "middle", "child")
    for act, number, *what in acts:
        if act == "submit":
            history.session = history.path[number]
            history.submit(*what)
        elif number < len(history.submissions):
            if act == "close":
                history.close(number)
            elif act == "mode":
                history.change(number, plan_mode_after=what[0])
            else:
                history.answer(number, what[0], "note" if what[1] else "")
    return history


@given(ACTS, st.randoms(use_true_random=False))
@example([("submit", 1, PLAN), ("answer", 0, APPROVED, False), ("submit", 0, REVISED), ("close", 1)], None)
def test_any_history_comes_to_what_the_plain_account_says(acts: list[tuple], random: object) -> None:
    history = acted(acts)
    account = Account()
    in_order = sorted(history.submissions, key=lambda one: (history.path.index(one.session), one.seq))
    for one in in_order:
        of_it = [result for result in history.results if (result.session, result.call_id) == (one.session, one.call_id)]
        account.go_on(one, of_it)
    if random is not None:
        random.shuffle(history.submissions)
        random.shuffle(history.results)
    plans = history.plans()
    assert [plan.exchange.place for plan in plans] == [one.place for one in in_order]
    assert {plan.exchange.place: plan.status.value for plan in plans} == account.statuses
    closed = [at for at, one in enumerate(in_order) if one.closed_seq is not None and one.verdict is APPROVED]
    live = [
        one
        for one in in_order[max(closed, default=-1) + 1 :]
        if one.place in {held.place for held in (*account.standing.values(), *account.draft.values())}
    ]
    approved = [one for one in live if one.place in {held.place for held in account.standing.values()}]
    operative = operative_plans(plans)
    assert (operative.plan and operative.plan.exchange.place) == (live[-1].place if live else None)
    assert (operative.work_order and operative.work_order.exchange.place) == (approved[-1].place if approved else None)


@given(ACTS, st.integers(0, 30), st.integers(0, 30))
def test_in_any_history_nothing_is_shown_as_approved_that_no_result_approved(
    acts: list[tuple], start: int, end: int
) -> None:
    history = acted(acts)
    plans = history.plans()
    approvals = {(one.session, one.call_id) for one in history.results if one.verdict is APPROVED and not one.feedback}
    for plan in plans:
        asked = (plan.exchange.session, plan.exchange.call_id)
        assert (plan.status is PlanStatus.APPROVED) <= (asked in approvals)
        assert ("approved" in plan_summary(plan)) == (plan.status is PlanStatus.APPROVED)
    operative = operative_plans(plans)
    assert operative.work_order is None or operative.work_order.status is PlanStatus.APPROVED
    assert operative.pending is None or operative.pending.status is PlanStatus.PENDING
    for session in history.path:
        cut = shown(plans, session=session, seqs=range(start, end))
        assert cut == [p for p in plans if p.exchange.session == session and start <= p.exchange.seq < end]
    for status in (PlanStatus.APPROVED, PlanStatus.PENDING):
        titles = [plan.title for plan in plans if plan.status is status and plan.title]
        assert len(titles) == len(set(titles))
    assert all((plan.superseded_by is not None) == (plan.status is PlanStatus.SUPERSEDED) for plan in plans)
