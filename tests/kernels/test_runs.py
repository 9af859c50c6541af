import re
from itertools import accumulate

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from chapbook.kernels.runs import (
    LONG_RUN_CHARS,
    PieceSplitter,
    halve,
    is_safe_cut,
    split_long_runs,
    split_long_runs_reference,
)

# Long runs of few kinds, so that runs over small limits are the rule.
stretches = st.tuples(st.sampled_from("a=1 \n'\t漢。é\u0301\x1c\x85\u3000"), st.integers(1, 12)).map(
    lambda x: x[0] * x[1]
)
texts = st.lists(stretches, max_size=12).map("".join) | st.text(max_size=60)
limits = st.integers(2, 20)


def longest_run(text: str) -> int:
    return max((len(run) for run in re.findall(r"\S+|\s+", text)), default=0)


@given(texts, limits)
def test_pieces_concatenate_to_the_text_and_none_holds_a_run_over_the_limit(text, limit):
    pieces = split_long_runs(text, limit=limit)
    assert "".join(pieces) == text
    assert all(pieces)
    assert all(longest_run(piece) <= limit for piece in pieces)


@given(texts, limits)
@example("a" * 6 + "=" * 6, 8)
def test_pieces_are_those_of_the_plain_walk(text, limit):
    assert split_long_runs(text, limit=limit) == split_long_runs_reference(text, limit=limit)


@given(texts, limits)
def test_a_text_without_a_long_run_is_one_piece(text, limit):
    if longest_run(text) <= limit:
        assert split_long_runs(text, limit=limit) == ((text,) if text else ())


def test_the_runs_that_crash_tokenisers_are_cut_at_the_limit():
    for run in ("a" * 1_000_000, " " * 1_000_000, "\n" * 1_000_000):
        pieces = split_long_runs(run)
        assert {len(piece) for piece in pieces[:-1]} == {LONG_RUN_CHARS}
        assert "".join(pieces) == run


def test_text_in_a_script_without_spaces_is_cut_before_its_punctuation():
    text = "这是一个没有空格的长句子。" * 1_000
    pieces = split_long_runs(text)
    assert len(pieces) > 1
    assert all(piece.startswith("。") for piece in pieces[1:])


def test_a_contraction_and_a_mark_stay_with_their_letter():
    assert not is_safe_cut("it's", 2)
    assert not is_safe_cut("e\u0301", 1)
    assert is_safe_cut("a=", 1)
    assert not is_safe_cut("=a", 1)


def test_a_limit_that_leaves_no_room_is_refused():
    with pytest.raises(ValueError, match="at least 2"):
        split_long_runs("abc", limit=1)


@given(st.text(min_size=2, max_size=50))
def test_halves_are_both_shorter_and_make_up_the_text(text):
    left, right = halve(text)
    assert left + right == text
    assert left
    assert right


markers = st.lists(st.text("<|>ab ", min_size=1, max_size=4), max_size=4)


@given(st.text("<|>ab ", max_size=40), markers, limits)
def test_no_piece_holds_a_marker_or_a_long_run(text, markers, limit):
    splitter = PieceSplitter(markers, run_limit_chars=limit)
    pieces = splitter.pieces(text)
    assert "".join(pieces) == text
    assert all(longest_run(piece) <= limit for piece in pieces)
    assert splitter.markers == {marker for marker in markers if len(marker) > 1}
    assert not any(marker in piece for piece in pieces for marker in splitter.markers)


@given(st.text("<|>ab ", max_size=40), markers)
def test_a_text_is_cut_after_the_first_character_of_each_marker_and_nowhere_else(text, markers):
    starts = {at for marker in markers if len(marker) > 1 for at in range(len(text)) if text.startswith(marker, at)}
    cuts = list(accumulate(len(piece) for piece in PieceSplitter(markers).pieces(text)))
    assert cuts == [*(start + 1 for start in sorted(starts)), len(text)] if text else cuts == []
