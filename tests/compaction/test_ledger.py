"""The rules of the plan ledger, each sentence of them."""

import re

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from chapbook.compaction.ledger import (
    Ledger,
    LedgerStep,
    Relation,
    StepState,
    close_plan,
    mark_step,
    relation,
    significant_words,
    start_plan,
    task_key,
)
from chapbook.kernels.errors import ToolError

PROMPT = "Fix the rounding in src/parser.py, then commit."
STEPS = ["find where it rounds", "fix it", "run the tests", "commit"]
TODO, DOING, DONE, BLOCKED = StepState
GITHUB_TOKEN = "ghp_" + "A1b2C3d4E5f6G7h8I9j0" + "K1l2M3n4O5p6Q7r8"
COMMIT = "d6b2c4f0a1" * 4


def begin(current=None, *, steps=STEPS, task="fix the rounding", replace=False, relation=Relation.SAME, session="one"):
    return start_plan(
        current, task=task, steps=steps, replace=replace, relation=relation, session=session, key=task_key(PROMPT)
    )


@pytest.fixture
def ledger():
    return begin().ledger


def marked(ledger, *states):
    for step, state in zip(ledger.steps, states, strict=False):
        ledger = mark_step(ledger, id=step.id, state=state).ledger
    return ledger


def suggested_calls(text):
    """Return the arguments of every call to plan_step that a text prints."""
    return [msgspec.json.decode(arguments) for arguments in re.findall(r"plan_step (\{.*?\})", text)]


def execute(ledger, arguments):
    return mark_step(ledger, id=arguments["id"], state=StepState(arguments["state"]))


# Starting


def test_ids_are_assigned_in_order_and_every_step_begins_as_todo(ledger):
    assert [(step.id, step.text, step.state) for step in ledger.steps] == [
        ("s1", "find where it rounds", TODO),
        ("s2", "fix it", TODO),
        ("s3", "run the tests", TODO),
        ("s4", "commit", TODO),
    ]
    assert begin().text == "4 steps planned: s1 to s4."
    assert begin(steps=["commit"]).text == "1 step planned: s1."
    assert (ledger.task, ledger.key, ledger.session) == ("fix the rounding", task_key(PROMPT), "one")


def test_forty_steps_are_planned_and_forty_one_are_refused_with_the_limit():
    assert begin(steps=[f"step {n}" for n in range(40)]).ledger.steps[-1].id == "s40"
    with pytest.raises(ToolError, match=r"^41 steps; the limit is 40"):
        begin(steps=[f"step {n}" for n in range(41)])


def test_a_step_over_200_characters_is_refused_with_its_number_and_the_limit():
    assert begin(steps=["x" * 200]).ledger.steps[0].text == "x" * 200
    with pytest.raises(ToolError, match=r"^step 2 has 201 characters; the limit is 200"):
        begin(steps=["commit", "y" * 201])


def test_a_task_over_400_characters_is_refused_with_the_limit():
    assert begin(task="x" * 400).ledger.task == "x" * 400
    with pytest.raises(ToolError, match=r"^the task has 401 characters; the limit is 400"):
        begin(task="x" * 401)


@pytest.mark.parametrize("empty", ["", " \n\t", "…", "---", "\u200b"])
def test_an_empty_step_and_an_empty_task_are_refused(empty):
    with pytest.raises(ToolError, match=r"^step 2 is empty"):
        begin(steps=["commit", empty])
    with pytest.raises(ToolError, match=r"^the task is empty"):
        begin(task=empty)


def test_no_steps_are_refused():
    with pytest.raises(ToolError, match=r"^no steps: give 1 to 40"):
        begin(steps=[])


def test_the_same_step_twice_is_refused_with_both_numbers():
    with pytest.raises(ToolError, match=r"^steps 1 and 3 are the same"):
        begin(steps=["Run the tests", "fix it", " run  the TESTS"])


def test_a_step_is_one_line_that_can_be_stored_whatever_it_was_given_as():
    text = begin(steps=["fix\r\n\u2028  it \ud800 now"]).ledger.steps[0].text
    assert text == "fix it ? now"


# Marking


@pytest.mark.parametrize("state", StepState)
def test_a_step_is_marked_with_every_state(ledger, state):
    done = mark_step(ledger, id="s2", state=state)
    assert [step.state for step in done.ledger.steps] == [TODO, state, TODO, TODO]
    assert done.text == ("s2 is still todo" if state is TODO else f"s2 is {state}")


def test_an_unknown_id_is_refused_with_the_ids_that_there_are(ledger):
    with pytest.raises(ToolError, match=r"^no step 's9'. The steps are: s1, s2, s3, s4$"):
        mark_step(ledger, id="s9", state=DONE)


@pytest.mark.parametrize("id", ["S2", " s2\n", "s2"])
def test_an_id_is_known_whatever_its_case_and_the_white_space_around_it(ledger, id):
    done = mark_step(ledger, id=id, state=DONE)
    assert done.step == done.ledger.steps[1] == LedgerStep(id="s2", text="fix it", state=DONE)
    assert done.text == "s2 is done"


@pytest.mark.parametrize("id", ["", "2", "s", "s02", "s2 s3", "\uff532", "fix it"])
def test_what_is_no_id_marks_nothing(ledger, id):
    with pytest.raises(ToolError, match="The steps are: s1, s2, s3, s4"):
        mark_step(ledger, id=id, state=DONE)


def test_a_note_over_300_characters_is_cut_with_a_mark_and_the_state_is_kept(ledger):
    whole = mark_step(ledger, id="s1", state=DONE, note="n" * 300)
    assert whole.ledger.steps[0].note == "n" * 300
    assert whole.text == "s1 is done"
    cut = mark_step(ledger, id="s1", state=DONE, note="n" * 301)
    assert cut.ledger.steps[0] == LedgerStep(id="s1", text=STEPS[0], state=DONE, note="n" * 299 + "…")
    assert cut.text == "s1 is done; its note was cut to 300 characters"


def test_a_note_stays_until_another_is_given(ledger):
    ledger = mark_step(ledger, id="s1", state=BLOCKED, note="no network").ledger
    ledger = mark_step(ledger, id="s1", state=DOING).ledger
    assert ledger.steps[0].note == "no network"
    assert mark_step(ledger, id="s1", state=DONE, note="it is back").ledger.steps[0].note == "it is back"


def test_a_blocked_step_counts_as_outstanding_and_is_not_suggested(ledger):
    ledger = marked(ledger, BLOCKED, DONE)
    assert [step.id for step in ledger.outstanding] == ["s1", "s3", "s4"]
    assert ledger.next_step.id == "s3"
    assert marked(ledger, BLOCKED, BLOCKED, BLOCKED, BLOCKED).next_step is None


def test_a_step_that_is_being_done_is_suggested_first(ledger):
    assert mark_step(ledger, id="s3", state=DOING).ledger.next_step.id == "s3"


def test_ever_marked_stays_true_when_a_mark_is_taken_back(ledger):
    assert not ledger.ever_marked
    assert not marked(ledger, TODO).ever_marked
    assert marked(marked(ledger, DOING), TODO).ever_marked


def test_marking_without_a_plan_says_how_to_begin_one():
    with pytest.raises(ToolError, match=r"^there is no plan to mark. plan_start"):
        mark_step(None, id="s1", state=DONE)


# Another plan


@pytest.mark.parametrize("relation", [Relation.SAME, Relation.UNKNOWN])
def test_against_an_unfinished_plan_of_the_same_or_an_unknown_task_every_outstanding_step_is_handed_back(
    ledger, relation
):
    ledger = mark_step(marked(ledger, DONE, DOING), id="s4", state=BLOCKED, note="no rights").ledger
    with pytest.raises(ToolError) as refused:
        begin(ledger, relation=relation, session="two")
    lines = str(refused.value).splitlines()
    assert lines[0] == "a plan of an earlier session is unfinished, 1 of 4 steps done: fix the rounding"
    assert lines[1:4] == ["s2 [doing] fix it", "s3 [todo] run the tests", "s4 [blocked] commit (no rights)"]
    assert "replace" in lines[-1]


def test_the_call_that_a_refusal_suggests_is_accepted_as_printed(ledger):
    ledger = marked(ledger, DONE, BLOCKED)
    with pytest.raises(ToolError) as refused:
        begin(ledger)
    [arguments] = suggested_calls(str(refused.value))
    assert execute(ledger, arguments).ledger.steps[2].state is DONE


def test_a_refusal_suggests_no_blocked_step(ledger):
    with pytest.raises(ToolError) as refused:
        begin(marked(ledger, *[BLOCKED] * 4))
    assert suggested_calls(str(refused.value)) == []
    assert "s4 [blocked] commit" in str(refused.value)


def test_a_refusal_within_one_session_names_no_earlier_one(ledger):
    with pytest.raises(ToolError, match=r"^a plan is unfinished, 0 of 4 steps done"):
        begin(ledger)


def test_replace_discards_and_reports_how_many_unfinished_steps_were_discarded(ledger):
    started = begin(marked(ledger, DONE), steps=["begin anew"], replace=True)
    assert (started.discarded, started.set_aside) == (3, None)
    assert started.text == "1 step planned: s1. Of the earlier plan 3 unfinished steps were discarded."
    assert [step.text for step in started.ledger.steps] == ["begin anew"]
    assert not started.ledger.ever_marked


def test_replace_with_steps_that_are_refused_discards_nothing(ledger):
    with pytest.raises(ToolError, match="step 1 is empty"):
        begin(ledger, steps=[""], replace=True)


@pytest.mark.parametrize("replace", [False, True])
def test_a_provably_different_task_sets_the_old_plan_aside_and_says_so(ledger, replace):
    old = marked(ledger, DONE)
    started = begin(old, steps=["write a poem"], relation=Relation.DIFFERENT, replace=replace, session="two")
    assert (started.set_aside, started.discarded) == (old, 0)
    assert started.text == "1 step planned: s1. The stored plan of another task, with 3 unfinished steps, is set aside."


@pytest.mark.parametrize("related", Relation)
def test_a_finished_plan_is_superseded_silently(ledger, related):
    finished = marked(ledger, *[DONE] * 4)
    started = begin(finished, steps=["write a poem"], relation=related, session="two")
    assert (started.set_aside, started.discarded, started.text) == (None, 0, "1 step planned: s1.")


def test_a_closed_plan_is_ended_with_its_marks_as_they_were_and_nothing_else_closes_one(ledger):
    closed = close_plan(marked(ledger, DONE, DOING))
    assert [step.state for step in closed.steps] == [DONE, DOING, TODO, TODO]
    assert closed.is_finished
    with pytest.raises(ToolError, match="the plan was closed"):
        mark_step(closed, id="s1", state=DONE)
    assert begin(closed).text == "4 steps planned: s1 to s4."
    finished = marked(ledger, *[DONE] * 4)
    assert not finished.closed
    assert not mark_step(finished, id="s2", state=DOING).ledger.is_finished


# Which task


def test_a_task_key_is_16_hex_digits_of_the_sha_256_of_the_prompt_collapsed_and_lower_cased():
    assert task_key("Fix  the\n tests ") == task_key("fix the tests") == "fb63226511e785db"
    assert task_key("fix the test") != task_key("fix the tests")
    assert re.fullmatch("[0-9a-f]{16}", task_key("\ud800"))


@given(st.text())
def test_a_task_key_does_not_depend_on_white_space(prompt):
    assert task_key(prompt) == task_key(f"\n{'  '.join(prompt.split())}\t")


def related(ledger, *, session="two", prompt=PROMPT, **given_key):
    key = given_key["key"] if given_key else task_key(prompt)
    return relation(ledger, session=session, key=key, prompt=prompt)


def test_within_one_session_the_relation_is_always_same(ledger):
    assert related(ledger, session="one", prompt="Write a poem on harbours") is Relation.SAME


def test_across_sessions_keys_decide_and_words_do_not(ledger):
    assert related(ledger) is Relation.SAME
    assert related(ledger, prompt=PROMPT.upper()) is Relation.SAME
    assert related(ledger, prompt="Fix the rounding in src/parser.py") is Relation.DIFFERENT


MALFORMED = [None, "", "0123456789abcde", "0123456789abcdef0", "0123456789ABCDEF", "0123456789abcdeg", "0" * 16 + "\n"]


@pytest.mark.parametrize("key", MALFORMED)
def test_a_malformed_key_counts_as_none_and_then_words_decide(ledger, key):
    keyless = msgspec.structs.replace(ledger, key=key)
    assert related(keyless) is Relation.UNKNOWN
    assert related(keyless, prompt="Write a poem on harbours") is Relation.DIFFERENT
    assert related(ledger, prompt="Write a poem on harbours", key=key) is Relation.DIFFERENT
    assert related(keyless, key=key) is Relation.UNKNOWN
    assert related(ledger, key=key) is Relation.UNKNOWN


def test_one_significant_word_in_common_makes_it_unknown_also_one_of_a_step(ledger):
    keyless = msgspec.structs.replace(ledger, key=None)
    assert related(keyless, prompt="Commit.") is Relation.UNKNOWN
    assert related(keyless, prompt="Write on where it was that they did all this") is Relation.DIFFERENT


@pytest.mark.parametrize("prompt", ["修复解析器中的舍入错误", "", "do it", "what is this?"])
def test_a_prompt_without_a_significant_word_as_in_chinese_is_unknown(ledger, prompt):
    assert related(msgspec.structs.replace(ledger, key=None), prompt=prompt) is Relation.UNKNOWN


def test_a_plan_in_chinese_without_a_key_is_unknown():
    plan = Ledger(task="修复", key=None, session="one", steps=(LedgerStep(id="s1", text="测试"),))
    assert related(plan, prompt="Write a poem on harbours") is Relation.UNKNOWN


def test_significant_words_have_three_characters_and_are_no_stop_words():
    assert significant_words("Fix THE setup.py, x_1-y of it; ends here. ok") == {"fix", "setup.py", "x_1-y", "ends"}


# Secrets

SECRETS = {
    "github-token": GITHUB_TOKEN,
    "private-key": f"-----BEGIN RSA PRIVATE KEY-----\n{'MIIEpAIBAAKCAQEA1' * 3}\n-----END RSA PRIVATE KEY-----",
    "40 or more letters and digits": "Zz9_-" * 8,
}


@pytest.mark.parametrize("kind", SECRETS)
def test_text_that_looks_like_a_secret_is_refused_with_what_to_write_instead(ledger, kind):
    secret = SECRETS[kind]
    for where, act in {
        "the task": lambda: begin(task=f"use {secret}"),
        "step 2": lambda: begin(steps=["commit", f"use {secret}"]),
        "the note": lambda: mark_step(ledger, id="s1", state=DONE, note=f"used {secret}"),
    }.items():
        with pytest.raises(ToolError) as refused:
            act()
        assert str(refused.value).startswith(f"{where} holds what looks like a secret ({kind}")
        assert "for a commit its first 7 characters" in str(refused.value)
        assert secret not in str(refused.value)


def test_a_commit_is_refused_whole_and_accepted_in_its_short_form(ledger):
    with pytest.raises(ToolError, match="first 7 characters"):
        mark_step(ledger, id="s4", state=DONE, note=f"committed {COMMIT}")
    assert mark_step(ledger, id="s4", state=DONE, note=f"committed {COMMIT[:7]}").ledger.steps[3].state is DONE


def test_a_secret_behind_the_limit_of_a_note_is_refused_too(ledger):
    with pytest.raises(ToolError, match="the note holds"):
        mark_step(ledger, id="s1", state=DONE, note="n " * 140 + GITHUB_TOKEN)


@pytest.mark.parametrize(
    "text",
    ["z" * 60, "1" * 60, "Zz9_-" * 7 + "Zz9_", "a long-named_file/in a/folder.of many.parts/with numb3rs", "sk-learn"],
)
def test_text_that_only_resembles_a_secret_is_accepted(text):
    assert begin(steps=[text]).ledger.steps[0].text == text
