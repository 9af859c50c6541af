"""What is shown of a plan ledger: forms, limits in tokens, and calls that are accepted as printed."""

import re
from functools import cache

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chapbook.compaction.ledger import (
    Ledger,
    LedgerStep,
    Relation,
    StepState,
    close_plan,
    mark_step,
    start_plan,
    task_key,
)
from chapbook.compaction.ledger_lines import (
    difference_notice,
    end_report,
    foreign_notice,
    ledger_line,
    status_text,
)
from chapbook.runtime.llama import open_vocabulary

TODO, DOING, DONE, BLOCKED = StepState
WORDS = ["read it", "find it", "fix it", "test it", "say it", "update README", "commit"]


def plan(*states, texts=WORDS, **fields):
    steps = tuple(
        LedgerStep(id=f"s{n + 1}", text=text, state=states[n] if n < len(states) else TODO)
        for n, text in enumerate(texts)
    )
    return Ledger(task="fix the rounding", key=task_key("fix"), session="one", steps=steps, **fields)


def by_words(text):
    return len(text.split())


def by_bytes(text):
    return len(text.encode())


def line(ledger, *, round=6, rounds=8, count=by_words):
    return ledger_line(ledger, round=round, rounds=rounds, count=count)


@pytest.fixture(scope="module")
def by_tokens(smollm2_path):
    """Counts as a real model does; what is asked for twice is counted once."""
    with open_vocabulary(smollm2_path) as vocabulary:
        yield cache(lambda text: len(vocabulary.tokenize(text, parse_special=False)))


# The line


def test_the_line_has_done_remaining_with_ids_and_round():
    ledger = plan(*[DONE] * 5)
    assert line(ledger) == "plan: 5/7 done · 2 remaining: s6 update README, s7 commit · round 6 of 8"


@pytest.mark.parametrize(("round", "rounds"), [(None, 8), (6, None), (None, None)])
def test_the_round_clause_is_left_out_when_a_number_is_unknown(round, rounds):
    ledger = plan(*[DONE] * 6)
    assert line(ledger, round=round, rounds=rounds) == "plan: 6/7 done · 1 remaining: s7 commit"


def test_the_line_shows_two_outstanding_items_at_most_and_40_characters_of_each():
    ledger = plan(DONE, texts=["read it", "x" * 40, "y" * 41, "commit"])
    shown = line(ledger)
    assert shown == f"plan: 1/4 done · 3 remaining: s2 {'x' * 40}, s3 {'y' * 39}… · round 6 of 8"


def test_there_is_no_line_without_a_ledger_nor_for_a_closed_plan():
    assert line(None) == ""
    assert line(close_plan(plan(DONE))) == ""


def test_the_line_of_a_finished_plan_says_only_that_all_is_done():
    assert line(plan(*[DONE] * 7)) == "plan: 7/7 done · round 6 of 8"


def test_a_blocked_step_says_so_and_counts_as_outstanding():
    ledger = plan(*[DONE] * 5, BLOCKED, BLOCKED)
    assert line(ledger, round=None) == (
        "plan: 5/7 done · 2 remaining, 2 blocked: s6 update README (blocked), s7 commit (blocked)"
    )


def test_what_can_be_worked_on_is_shown_before_what_is_blocked():
    ledger = plan(BLOCKED, BLOCKED, DONE, DONE, DONE, DONE)
    assert line(ledger, round=None) == "plan: 4/7 done · 3 remaining, 2 blocked: s7 commit, s1 read it (blocked)"


def test_while_nothing_is_marked_the_line_names_the_verb_with_real_arguments():
    assert line(plan(), round=1).endswith(' · round 1 of 8 · when s1 is done: plan_step {"id":"s1","state":"done"}')
    assert "plan_step" not in line(plan(DOING))
    assert "plan_step" not in line(plan(was_marked=True))
    assert "plan_start" not in line(plan(), round=2)
    assert "plan_start" not in line(plan(), round=None)


@pytest.mark.parametrize("round", [3, 8])
def test_from_round_3_the_line_names_the_second_way_out_too(round):
    shown = line(plan(), round=round)
    assert 'plan_step {"id":"s1","state":"done"}' in shown
    assert shown.endswith('plan_start with the real steps and "replace":true')


def test_the_call_that_a_line_suggests_is_accepted_as_printed_and_the_line_goes_on_from_there():
    ledger = plan()
    [arguments] = re.findall(r"plan_step (\{.*?\})", line(ledger))
    call = msgspec.json.decode(arguments)
    ledger = mark_step(ledger, id=call["id"], state=StepState(call["state"])).ledger
    assert line(ledger).startswith("plan: 1/7 done · 6 remaining: s2 find it, s3 fix it")


def test_the_second_way_out_is_accepted_as_it_is_described():
    assert '"replace":true' in line(plan())
    started = start_plan(
        plan(), task="t", steps=["the real one"], replace=True, relation=Relation.SAME, session="one", key=None
    )
    assert started.discarded == 7


def test_text_of_a_step_cannot_break_the_line_nor_colour_it():
    ledger = plan(texts=["a\x1b[31m red\u202e text\u200b"], was_marked=True)
    assert line(ledger, round=None) == "plan: 0/1 done · 1 remaining: s1 a red text"


ENGLISH = "read the failing tests of the invoice parser and find out where the total is rounded"
HARD_TEXTS = {
    "english": [f"{ENGLISH} {n}" for n in range(40)],
    "chinese": [f"修复解析器中的舍入错误并运行所有测试以确认没有回归问题出现在其他模块{n}" for n in range(40)],
    "symbols": [f"{n}x9!zK2#pL0@vB5$mN8^cR1&wT4*yH6(jF3)dS?gA-kE+q=Z%%x|~`" for n in range(40)],
    "emoji": [f"a{n}{'👩‍👩‍👧‍👦🏴‍☠️' * 9}" for n in range(40)],
}


@pytest.mark.parametrize("texts", HARD_TEXTS.values(), ids=HARD_TEXTS)
@pytest.mark.parametrize("states", [[], [DONE], [BLOCKED] * 40], ids=["unmarked", "marked", "blocked"])
@pytest.mark.parametrize("round", [1, 3, 64, 10**40])
def test_the_line_has_60_tokens_at_most_110_with_a_nudge_by_a_real_vocabulary(by_tokens, texts, states, round):
    ledger = plan(*states, texts=texts)
    shown = ledger_line(ledger, round=round, rounds=max(round, 64), count=by_tokens)
    assert by_tokens(shown) <= (60 if states else 110)
    assert shown.startswith("plan: ")
    if round <= 64:
        assert ("plan_step" in shown) == (not states)
        assert f"· round {round} of 64" in shown
        assert "remaining" in shown
        assert ("plan_start" in shown) == (not states and round >= 3)


def test_english_steps_lose_nothing_to_the_limit_of_a_real_vocabulary(by_tokens):
    item = f"{ENGLISH[:39]}…"
    marked = plan(DONE, texts=HARD_TEXTS["english"])
    assert line(marked, count=by_tokens) == f"plan: 1/40 done · 39 remaining: s2 {item}, s3 {item} · round 6 of 8"
    assert f"s1 {item}, s2 {item} · round 6 of 8 · when s1" in line(plan(texts=HARD_TEXTS["english"]), count=by_tokens)


def test_where_tokens_are_bytes_items_get_shorter_then_fewer_then_the_rest_goes():
    texts = ["abcdefghijklmnop", "b", "c"]
    shown = [
        ledger_line(plan(DONE, texts=texts), round=2, rounds=rounds, count=by_bytes) for rounds in (8, 10**7, 10**40)
    ]
    assert shown == [
        "plan: 1/3 done · 2 remaining: s2 b, s3 c · round 2 of 8",
        "plan: 1/3 done · 2 remaining: s2 b · round 2 of 10000000",
        "plan: 1/3 done",
    ]


@given(
    states=st.lists(st.sampled_from(StepState), max_size=40),
    texts=st.lists(st.text(min_size=1, max_size=200), min_size=1, max_size=40),
    round=st.none() | st.integers(1, 10**30),
    tokens_a_byte=st.sampled_from([1, 2, 100]),
)
@settings(max_examples=150)
def test_whatever_a_token_is_the_line_is_one_line_within_its_limit_for_a_few_counts(
    states, texts, round, tokens_a_byte
):
    ledger = plan(*states, texts=texts)
    asked = []

    def count(text):
        asked.append(text)
        return len(text.encode("utf-8", "surrogatepass")) * tokens_a_byte

    shown = ledger_line(ledger, round=round, rounds=round, count=count)
    assert count(shown) <= (110 if "plan_step {" in shown else 60)
    assert len(shown.splitlines()) == (1 if shown else 0)
    assert len(asked) <= 27  # one of them asked here


# Notices


def test_a_foreign_plan_is_mentioned_by_count_and_task_without_its_steps():
    assert foreign_notice(plan(DONE, BLOCKED)) == (
        "A plan of another task is stored, 6 of 7 steps outstanding: fix the rounding. It is not part of this task; "
        "plan_start sets it aside."
    )
    assert not any(text in foreign_notice(plan()) for text in WORDS)


def test_a_foreign_plan_is_mentioned_once_for_each_task_whatever_was_marked_since():
    told = [f"[chapbook] {foreign_notice(plan())}"]
    assert foreign_notice(plan(DONE), told) == ""
    other = msgspec.structs.replace(plan(), task="paint the fence")
    assert "paint the fence" in foreign_notice(other, told)


def test_a_foreign_plan_that_is_finished_or_closed_is_not_mentioned():
    assert foreign_notice(plan(*[DONE] * 7)) == ""
    assert foreign_notice(close_plan(plan())) == ""


def test_where_file_and_events_agree_there_is_no_notice():
    assert difference_notice(plan(DONE), plan(DONE)) == ""
    assert difference_notice(None, None) == ""


def test_where_file_and_events_differ_a_notice_says_in_what_and_that_the_file_is_in_force():
    assert difference_notice(plan(DOING), plan(DONE, BLOCKED)) == (
        "The stored plan differs from what this session recorded, and is in force: s1 is done, recorded was doing; s2 "
        "is blocked, recorded was todo."
    )
    assert "it was closed" in difference_notice(plan(), close_plan(plan()))
    assert "it is open again" in difference_notice(close_plan(plan()), plan())
    noted = mark_step(plan(DONE), id="s1", state=DONE, note="seen").ledger
    assert difference_notice(plan(DONE, was_marked=True), noted).endswith("in force: notes.")


def test_where_the_file_has_another_plan_or_none_a_notice_says_so():
    other = msgspec.structs.replace(plan(DONE), session="two")
    for acts in (None, other, plan(texts=["read it"])):
        assert difference_notice(acts, plan()) == (
            "The stored plan is not the one that this session recorded. In force is the stored one: fix the rounding "
            "(0 of 7 steps done)"
        )
    assert "no longer stored" in difference_notice(plan(), None)


# Reports


def test_the_end_report_lists_what_is_outstanding():
    ledger = mark_step(plan(*[DONE] * 5), id="s7", state=BLOCKED, note="no rights").ledger
    assert end_report(ledger) == (
        "5 of 7 steps marked done; outstanding:\n  s6 [todo] update README\n  s7 [blocked] commit (no rights)"
    )
    assert end_report(plan(*[DONE] * 7)) == "7 of 7 steps marked done"


def test_the_end_report_tells_never_marked_from_not_finished():
    assert end_report(plan(texts=["read it"])) == (
        "no step was ever marked (1 step); outstanding:\n  s1 [todo] read it"
    )
    assert end_report(plan(texts=["read it"], was_marked=True)).startswith("0 of 1 step marked done")


def test_of_a_closed_plan_nothing_is_reported_as_outstanding():
    assert end_report(close_plan(plan(DONE, texts=WORDS[:2]))) == ""
    assert end_report(close_plan(plan())) == ""


@given(states=st.lists(st.sampled_from(StepState), max_size=7))
def test_the_end_report_never_says_whether_the_work_is_right(states):
    report = end_report(plan(*states)).lower()
    assert not re.search(r"right|correct|wrong|fail|success|complete|finished|incomplete", report)


def test_without_a_ledger_there_is_no_report():
    assert end_report(None) == ""


def test_the_status_shows_every_step_with_its_state_and_note():
    ledger = mark_step(plan(DONE, texts=WORDS[:2]), id="s2", state=DOING, note="in parser.py").ledger
    assert status_text(ledger) == (
        "fix the rounding (1 of 2 steps done)\ns1 [done] read it\ns2 [doing] find it (in parser.py)"
    )
    assert status_text(close_plan(ledger)).startswith("fix the rounding (1 of 2 steps done, closed)\n")
    assert "plan_start" in status_text(None)
