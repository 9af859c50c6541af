"""The gate's plan: what leaves the window, how much of a text is counted, how little room is shared out."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from chapbook.compaction.arrival import (
    BRIEF_TOKENS,
    LEAST_STUB_TOKENS,
    MOST_BYTES_PER_TOKEN,
    MOST_STUB_TOKENS,
    REFUSAL_TOKENS,
    SLICE_CHARACTERS,
    Arrival,
    Form,
    Leaving,
    measure,
    next_to_leave,
    page_share,
    stub_budget,
)

STUB_TOKENS = 300

steps = st.lists(st.builds(Arrival, tokens=st.integers(0, 9_000), paged=st.booleans()), max_size=12)


SIZES = {Form.STUB: STUB_TOKENS, Form.REFUSED: REFUSAL_TOKENS, Form.BRIEF: BRIEF_TOKENS}


def left_after(step: list[Arrival], left_tokens: int) -> list[Arrival]:
    """Let leave what is named until nothing is, as the gate does, with stubs and refusals of full size."""
    for _ in range(2 * len(step) + 1):
        leaving = next_to_leave(step, left_tokens=left_tokens, stub_tokens=STUB_TOKENS)
        if leaving is None:
            return step
        was = step[leaving.place]
        assert leaving.form > was.form
        step = [*step]
        step[leaving.place] = Arrival(tokens=SIZES[leaving.form], form=leaving.form, paged=was.paged)
    raise AssertionError("it never came to an end")


@given(steps, st.integers(-100, 60_000))
def test_what_stays_fits_unless_only_lines_are_left(step: list[Arrival], left_tokens: int) -> None:
    ended = left_after(step, left_tokens)
    assert sum(one.tokens for one in ended) <= left_tokens or all(one.tokens <= BRIEF_TOKENS for one in ended)


@given(steps, st.integers(-100, 60_000))
def test_nothing_leaves_where_all_fits_and_each_form_waits_for_the_one_before(
    step: list[Arrival], left_tokens: int
) -> None:
    ended = left_after(step, left_tokens)
    if sum(one.tokens for one in step) <= left_tokens:
        assert ended == step
    whole = [one for one in ended if one.form is Form.WHOLE]
    if any(one.form in (Form.REFUSED, Form.BRIEF) for one in ended):
        assert all(one.tokens <= STUB_TOKENS for one in whole if not one.paged)
    if any(one.form is Form.BRIEF for one in ended):
        assert all(one.tokens <= REFUSAL_TOKENS for one in whole if one.paged)


@given(steps, st.integers(0, 60_000))
def test_the_largest_leave_first(step: list[Arrival], left_tokens: int) -> None:
    step = [Arrival(tokens=one.tokens) for one in step]
    ended = left_after(step, left_tokens)
    kept = [one.tokens for one in ended if one.form is Form.WHOLE]
    gone = [before.tokens for before, after in zip(step, ended, strict=True) if after.form is not Form.WHOLE]
    assert not kept or not gone or max(kept) <= max(gone)


def test_a_step_that_fits_exactly_keeps_everything_and_one_token_less_moves_the_largest() -> None:
    step = [Arrival(tokens=400), Arrival(tokens=1_000), Arrival(tokens=600)]
    assert next_to_leave(step, left_tokens=2_000, stub_tokens=STUB_TOKENS) is None
    leaving = next_to_leave(step, left_tokens=1_999, stub_tokens=STUB_TOKENS)
    assert leaving == Leaving(place=1, form=Form.STUB)


def words(text: str) -> int:
    return len(text.split())


@given(st.text(alphabet="ab \n", max_size=3_000), st.integers(1, 400))
def test_a_text_of_one_slice_is_counted_exactly_or_is_surely_over(text: str, limit_tokens: int) -> None:
    measured = measure(text, limit_tokens, len)
    if measured.exact:
        assert measured.tokens == len(text)
    else:
        assert len(text) > limit_tokens * MOST_BYTES_PER_TOKEN
        assert measured.tokens > limit_tokens


def test_a_text_near_its_limit_is_counted_whole_however_many_slices_it_has() -> None:
    text = "word " * (2 * SLICE_CHARACTERS // 5)  # a slice cuts a word in two
    exact = words(text)
    for limit_tokens in (exact - 1, exact, exact + 1):
        measured = measure(text, limit_tokens, words)
        assert (measured.exact, measured.tokens) == (True, exact)


def test_a_text_far_over_its_limit_is_not_read_to_its_end() -> None:
    counted: list[int] = []

    def count(text: str) -> int:
        counted.append(len(text))
        return len(text) // 4

    text = "x" * (40 * SLICE_CHARACTERS)
    measured = measure(text, 20_000, count)
    assert not measured.exact
    assert sum(counted) <= 4 * SLICE_CHARACTERS
    assert abs(measured.tokens - len(text) // 4) <= len(text) // 100


@given(st.integers(512, 8_000), st.integers(-500, 60_000), st.integers(1, 20))
def test_stubs_and_pages_share_little_room_and_never_pass_their_own_limits(arrival: int, left: int, many: int) -> None:
    budget = stub_budget(arrival_tokens=arrival, left_tokens=left, arrivals=many)
    assert LEAST_STUB_TOKENS <= budget <= min(MOST_STUB_TOKENS, arrival // 2)
    share = page_share(arrival_tokens=arrival, left_tokens=left, calls=many)
    assert LEAST_STUB_TOKENS <= share <= arrival
    if left >= many * LEAST_STUB_TOKENS:
        assert budget * many <= left
        assert share * many <= max(left, many * LEAST_STUB_TOKENS)
