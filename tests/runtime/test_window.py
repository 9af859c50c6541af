"""The window is a pure value whose account of tokens is exact."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from chapbook.kernels.tokens import token_ids
from chapbook.runtime.events import SegmentKind
from chapbook.runtime.window import Segment, Window

segments = st.builds(
    Segment,
    kind=st.sampled_from(SegmentKind),
    tokens=st.lists(st.integers(min_value=0, max_value=500), max_size=12).map(token_ids),
    source=st.sampled_from(["a", "b"]),
)
windows = st.lists(segments, max_size=8).map(lambda made: Window(tuple(made)))


def flat(window: Window) -> list[int]:
    return [int(t) for s in window.segments for t in s.tokens]


@given(windows, st.lists(segments, max_size=4))
def test_appending_keeps_what_was_there_and_counts_exactly(window: Window, more: list[Segment]) -> None:
    grown = window.append(more)
    grown.check_integrity()
    assert flat(grown) == flat(window) + [int(t) for s in more for t in s.tokens]
    assert grown.token_count == len(flat(grown))
    assert np.array_equal(grown.tokens(), flat(grown))


@given(windows, st.data())
def test_every_token_lies_in_the_segment_that_brought_it(window: Window, data: st.DataObject) -> None:
    if window.token_count == 0:
        with pytest.raises(IndexError):
            window.at(0)
        return
    offset = data.draw(st.integers(min_value=0, max_value=window.token_count - 1))
    found = window.at(offset)
    assert found.segment.tokens[found.offset] == flat(window)[offset]
    assert window.start_of(found.index) + found.offset == offset


@given(windows, windows, st.data())
def test_replacing_a_span_touches_nothing_outside_it(window: Window, other: Window, data: st.DataObject) -> None:
    first = data.draw(st.integers(min_value=0, max_value=len(window.segments)))
    last = data.draw(st.integers(min_value=first, max_value=len(window.segments)))
    replaced = window.replace(first, last, other.segments)
    replaced.check_integrity()
    before = flat(Window(window.segments[:first]))
    after = flat(window.tail(last))
    assert flat(replaced) == before + flat(other) + after


@given(windows, windows)
def test_a_break_is_found_exactly_where_the_first_token_differs(window: Window, other: Window) -> None:
    report = window.broken_from(other.tokens())
    ours, theirs = flat(window), flat(other)
    shared = next(
        (i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), min(len(ours), len(theirs))
    )
    if shared == len(theirs):
        assert report is None
    else:
        assert report is not None
        assert report.token == shared


def test_the_window_tells_how_its_tokens_are_shared_out() -> None:
    window = Window(
        (
            Segment(SegmentKind.PREFIX, token_ids([1, 2, 3]), "p"),
            Segment(SegmentKind.MESSAGE, token_ids([4]), "m"),
            Segment(SegmentKind.GLUE, token_ids([]), "g"),
            Segment(SegmentKind.MESSAGE, token_ids([5, 6]), "m"),
        )
    )
    assert window.tokens_by_kind() == {"prefix": 3, "message": 3}
    assert len(window.segments) == 3
