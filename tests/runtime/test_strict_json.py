"""Strict JSON: as the standard reader, but for what would be lost."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chapbook.runtime.strict_json import MAX_VALUE_DEPTH, Unreadable, read_json, read_whole_json

JSON_VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False, allow_infinity=False), st.text()),
    lambda inner: st.one_of(st.lists(inner), st.dictionaries(st.text(), inner)),
    max_leaves=8,
)


@given(
    value=JSON_VALUES,
    before=st.text(max_size=5),
    after=st.sampled_from(["", " ", "}", "</x>", " 1"]),
    ascii_only=st.booleans(),
)
def test_a_value_is_read_where_it_stands_and_no_further(value, before, after, ascii_only):
    text = json.dumps(value, ensure_ascii=ascii_only)
    after = after if not isinstance(value, int | float) else f" {after}"
    assert read_json(f"{before}{text}{after}", len(before)) == (value, len(before) + len(text))


@given(value=JSON_VALUES)
def test_a_whole_text_may_have_space_around_it_and_nothing_else(value):
    text = json.dumps(value)
    assert read_whole_json(f" \n{text}\n ") == value
    with pytest.raises(Unreadable):
        read_whole_json(f"{text} x")


@pytest.mark.parametrize(
    "text",
    ["", "{", "{'a': 1}", '{"a": 1, "a": 1}', "NaN", "-Infinity", "1e999", "9" * 5_000, r'"\ud800"', r'{"\udfff": 1}',
     "[" * 100_000, "[" * (MAX_VALUE_DEPTH + 1) + "]" * (MAX_VALUE_DEPTH + 1)],
    ids=lambda text: text[:12],
)  # fmt: skip
def test_what_is_ambiguous_or_unusable_is_refused_behind_where_reading_began(text):
    with pytest.raises(Unreadable) as raised:
        read_json(f"abc{text}", 3)
    assert 3 <= raised.value.position <= len(text) + 3


def test_the_deepest_value_allowed_and_raw_newlines_pass():
    text = "[" * MAX_VALUE_DEPTH + "1" + "]" * MAX_VALUE_DEPTH
    assert read_json(text, 0).end == len(text)
    assert read_json('"a\nb\tc"', 0).value == "a\nb\tc"
    assert read_json(r'"\ud83d\ude00"', 0).value == "\U0001f600"
