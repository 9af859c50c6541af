"""The gate's plan: what enters whole, what becomes a stub."""

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from chapbook.compaction.arrival import Arrival, plan_admission, stub_text
from chapbook.compaction.artifacts import ArtifactRef

STUB_TOKENS = 300

arrivals = st.builds(
    Arrival,
    tokens=st.integers(min_value=0, max_value=20_000),
    limit_tokens=st.integers(min_value=512, max_value=8000),
    over=st.booleans(),
)


@given(st.lists(arrivals, max_size=12), st.integers(min_value=0, max_value=60_000))
def test_nothing_over_its_limit_enters_and_the_rest_fits_unless_only_stubs_are_left(
    step: list[Arrival], left: int
) -> None:
    plan = plan_admission(step, left_tokens=left, stub_tokens=STUB_TOKENS)
    assert len(plan) == len(step)
    for arrival, enters in zip(step, plan, strict=True):
        assert not (enters and (arrival.over or arrival.tokens > arrival.limit_tokens))
    total = sum(a.tokens if enters else STUB_TOKENS for a, enters in zip(step, plan, strict=True))
    smaller_than_a_stub = all(a.tokens <= STUB_TOKENS for a, enters in zip(step, plan, strict=True) if enters)
    assert total <= left or smaller_than_a_stub


@given(st.lists(arrivals, max_size=12), st.integers(min_value=0, max_value=60_000))
def test_the_largest_leave_first(step: list[Arrival], left: int) -> None:
    plan = plan_admission(step, left_tokens=left, stub_tokens=STUB_TOKENS)
    admissible = [
        (a.tokens, enters) for a, enters in zip(step, plan, strict=True) if not a.over and a.tokens <= a.limit_tokens
    ]
    kept = [tokens for tokens, enters in admissible if enters]
    left_out = [tokens for tokens, enters in admissible if not enters]
    assert not kept or not left_out or max(kept) <= max(left_out)


def test_a_stub_names_size_path_edges_and_how_to_read_on() -> None:
    ref = ArtifactRef(sha256="ab" * 32, size_bytes=370_000, path=Path("x"))
    text = stub_text(
        tool="bash",
        arguments="command=cat book.txt",
        ref=ref,
        shown_path=".chapbook/artifacts/ab/abab.txt",
        lines=9000,
        head=["first", "second", "third", "fourth"],
        tail=["before", "x" * 500, "last"],
    )
    for expected in ("370,000 bytes", "9,000 lines", "first", "last", "8,994 lines between", ".chapbook/artifacts/ab"):
        assert expected in text
    assert "fourth" not in text
    assert "x" * 200 not in text


def test_a_stub_of_few_lines_shows_them_once() -> None:
    ref = ArtifactRef(sha256="cd" * 32, size_bytes=5000, path=Path("x"))
    text = stub_text(tool="read", arguments="", ref=ref, shown_path="p", lines=1, head=["one"], tail=["one"])
    assert text.count("one") == 1
