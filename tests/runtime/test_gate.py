"""The gate on a real store: what enters, what is stored, what is said where neither can be."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from chapbook.compaction.arrival import LEAST_STUB_TOKENS, REFUSAL_TOKENS
from chapbook.compaction.artifacts import ArtifactStore
from chapbook.runtime.chat_format import Shape
from chapbook.runtime.gate import Admitted, Gate, Offered
from chapbook.runtime.tools.spec import ToolOutput

LIMIT = 600


def count_words(_shape: Shape, text: str) -> int:
    """A count without a model: a token for each four bytes."""
    return -(-len(text.encode()) // 4)


@pytest.fixture
def gate(tmp_path: Path) -> Gate:
    return make_gate(tmp_path)


def make_gate(folder: Path, *, count: Callable[[Shape, str], int] = count_words) -> Gate:
    store = ArtifactStore(folder / "artifacts")
    return Gate(
        store=store, count=count, shown_path=lambda ref: str(ref.path.relative_to(folder)), arrival_tokens=LIMIT
    )


def offered(content: str = "", **output: Any) -> Offered:
    return Offered(source="bash", output=ToolOutput(content=content, **output), limit_tokens=LIMIT)


def stored(gate: Gate, admitted: Admitted) -> bytes:
    assert admitted.artifact is not None
    return gate.store.read(admitted.artifact)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    sizes=st.lists(st.tuples(st.integers(0, 4_000), st.booleans()), max_size=8),
    left_tokens=st.integers(-200, 6_000),
)
def test_what_enters_fits_and_what_does_not_is_whole_in_the_store(
    gate: Gate, sizes: list[tuple[int, bool]], left_tokens: int
) -> None:
    texts = [f"{place}" + "x" * size for place, (size, _) in enumerate(sizes)]
    step = [offered(text, paged=paged) for text, (_, paged) in zip(texts, sizes, strict=True)]
    admitted = gate.admit(step, left_tokens=left_tokens)
    for text, one, entered in zip(texts, step, admitted, strict=True):
        assert entered.tokens == count_words(Shape.TOOL, entered.content)
        assert entered.size_bytes == len(text)
        if entered.content == text:
            assert entered.tokens <= LIMIT
            assert entered.artifact is None
        elif one.output.paged:
            assert (entered.is_error, entered.artifact) == (True, None)
        else:
            assert not entered.is_error
            assert stored(gate, entered).decode() == text
    movable = [one for text, one in zip(texts, admitted, strict=True) if one.content == text and one.tokens > 300]
    assert sum(one.tokens for one in admitted) <= left_tokens or not movable


def test_what_fits_to_the_token_enters_whole_and_one_token_less_stores_the_largest(gate: Gate) -> None:
    step = [offered("a" * 1_000), offered("b" * 2_000), offered("c" * 400)]
    assert [one.artifact for one in gate.admit(step, left_tokens=850)] == [None, None, None]
    tight = gate.admit(step, left_tokens=849)
    assert [one.artifact is None for one in tight] == [True, False, True]


def test_a_limit_is_held_to_the_token(gate: Gate) -> None:
    at, over = gate.admit([offered("a" * 4 * LIMIT), offered("b" * (4 * LIMIT + 1))], left_tokens=99_999)
    assert (at.artifact, at.tokens) == (None, LIMIT)
    assert over.artifact is not None


def test_contents_are_counted_as_their_shape_writes_them(tmp_path: Path) -> None:
    gate = make_gate(tmp_path, count=lambda shape, text: len(text) * (2 if shape is Shape.TOOL else 1))
    as_result = offered("x" * (LIMIT - 100))
    as_message = Offered(source="a message", output=as_result.output, limit_tokens=LIMIT, shape=Shape.USER)
    result, message = gate.admit([as_result, as_message], left_tokens=99_999)
    assert result.artifact is not None
    assert message.artifact is None


def test_a_small_file_enters_as_its_text_and_is_gone(gate: Gate, tmp_path: Path) -> None:
    file = tmp_path / "out"
    file.write_text("three\nlines\nhere\n")
    (admitted,) = gate.admit([offered("[exit 1]", file=file, is_error=True)], left_tokens=9_999)
    assert admitted.content == "[exit 1]\nthree\nlines\nhere\n"
    assert (admitted.artifact, admitted.is_error) == (None, True)
    assert not file.exists()


def test_a_large_file_is_taken_over_and_its_status_line_stands_before_the_stub(gate: Gate, tmp_path: Path) -> None:
    file = tmp_path / "out"
    file.write_bytes(b"line\n" * 100_000)
    (admitted,) = gate.admit([offered("[exit 0]", file=file)], left_tokens=9_999)
    assert admitted.content.startswith("[exit 0]\n[")
    assert admitted.tokens <= 300
    assert stored(gate, admitted) == b"line\n" * 100_000
    assert not file.exists()


def test_a_long_text_beside_a_file_is_stored_with_it(gate: Gate, tmp_path: Path) -> None:
    file = tmp_path / "out"
    file.write_bytes(b"line\n" * 100_000)
    (admitted,) = gate.admit([offered("said " * 10_000, file=file)], left_tokens=9_999)
    assert stored(gate, admitted) == b"said " * 10_000 + b"\n" + b"line\n" * 100_000
    assert admitted.tokens <= 300


def test_what_is_no_text_is_shown_with_marks_and_its_bytes_are_kept(gate: Gate, tmp_path: Path) -> None:
    file = tmp_path / "out"
    file.write_bytes(b"a\xff\0b")
    (admitted,) = gate.admit([offered(file=file)], left_tokens=9_999)
    shown, note = admitted.content.split("\n")
    assert shown == "a\ufffd\ufffdb"
    (ref,) = gate.store.refs()
    assert str(ref.path.relative_to(tmp_path)) in note
    assert gate.store.read(ref.sha256) == b"a\xff\0b"


@pytest.mark.parametrize("what", ["missing", "folder", "link"])
def test_a_file_that_is_none_is_an_error_result_and_nothing_is_touched(what: str, gate: Gate, tmp_path: Path) -> None:
    file, target = tmp_path / "out", tmp_path / "target"
    target.write_text("mine")
    if what == "folder":
        file.mkdir()
    elif what == "link":
        file.symlink_to(target)
    (admitted,) = gate.admit([offered("[exit 0]", file=file)], left_tokens=9_999)
    assert admitted.is_error
    assert "not stored" in admitted.content
    assert target.read_text() == "mine"
    assert list(gate.store.refs()) == []


def test_without_a_store_the_size_is_said_and_a_file_stays_where_it_is(tmp_path: Path) -> None:
    gate = make_gate(tmp_path / "gone")
    file = tmp_path / "out"
    file.write_bytes(b"x" * 50_000)
    in_file, as_text = gate.admit([offered("[exit 0]", file=file), offered("y" * 40_000)], left_tokens=9_999)
    assert "50,000 bytes" in in_file.content
    assert str(file) in in_file.content
    assert "40,000 bytes" in as_text.content
    assert in_file.is_error
    assert as_text.is_error
    assert file.stat().st_size == 50_000
    assert not (tmp_path / "gone").exists()


def test_a_page_that_does_not_fit_is_refused_with_the_numbers_and_never_stored(gate: Gate) -> None:
    page = offered("p" * 2_000, paged=True)
    (admitted,) = gate.admit([page], left_tokens=400)
    assert "500 tokens" in admitted.content
    assert "400 are left" in admitted.content
    assert admitted.tokens <= REFUSAL_TOKENS
    assert list(gate.store.refs()) == []


def test_ten_results_in_little_room_share_it(gate: Gate) -> None:
    step = [offered(f"{place}" + "z" * 9_000) for place in range(10)]
    admitted = gate.admit(step, left_tokens=10 * LEAST_STUB_TOKENS)
    assert sum(one.tokens for one in admitted) <= 10 * LEAST_STUB_TOKENS
    assert all(stored(gate, one) for one in admitted)


def test_the_lead_stands_before_the_content_and_before_the_stub(gate: Gate) -> None:
    hook = Offered(source="a hook", output=ToolOutput(content="c" * 100), limit_tokens=LIMIT, lead="[added]\n")
    large = Offered(source="a hook", output=ToolOutput(content="c" * 9_000), limit_tokens=LIMIT, lead="[added]\n")
    whole, stub = gate.admit([hook, large], left_tokens=9_999)
    assert whole.content == "[added]\n" + "c" * 100
    assert stub.content.startswith("[added]\n[")
    assert stored(gate, stub) == b"c" * 9_000


def test_citations_name_what_is_there_by_its_short_id_and_path(gate: Gate, tmp_path: Path) -> None:
    ref = gate.store.put(b"something")
    found = gate.citations([ref.sha256, ref.sha256[:12], "0" * 64, "../../etc/passwd"])
    assert [(one.id, one.path) for one in found] == [(ref.short_id, str(ref.path.relative_to(tmp_path)))]
