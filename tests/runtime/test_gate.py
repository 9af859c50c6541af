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
    assert not admitted.is_stub
    assert f"artifact id={(admitted.artifact or '')[:12]}]" in note
    assert stored(gate, admitted) == b"a\xff\0b"


def test_of_what_is_no_text_and_too_large_the_bytes_are_stored_and_nothing_else(gate: Gate) -> None:
    data = b"gr\xfc\xdfe \0" * 2_000
    (admitted,) = gate.admit([offered(data.decode("utf-8", "surrogateescape"))], left_tokens=9_999)
    assert admitted.is_stub
    assert stored(gate, admitted) == data
    assert len(list(gate.store.refs())) == 1


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
    assert not admitted.is_stub
    assert "500 tokens" in admitted.content
    assert "400 are left" in admitted.content
    assert admitted.tokens <= REFUSAL_TOKENS
    assert list(gate.store.refs()) == []


@pytest.mark.parametrize("where", ["in a file", "behind a text"])
def test_a_small_output_that_cannot_be_stored_stays_in_its_file(where: str, tmp_path: Path) -> None:
    gate = make_gate(tmp_path / "gone")
    file = tmp_path / "call00001.out"
    file.write_bytes(b"y" * 9_000)
    output = offered(file=file) if where == "in a file" else offered("y" * 9_000, backing=file)
    (admitted,) = gate.admit([output], left_tokens=9_999)
    assert admitted.is_error
    assert f"It is still in {file}." in admitted.content
    assert file.read_bytes() == b"y" * 9_000


def test_the_file_behind_a_text_is_gone_once_the_text_is_in_the_window_or_the_store(gate: Gate, tmp_path: Path) -> None:
    for text in ("short", "long" * 9_000):
        file = tmp_path / "out"
        file.write_text(text)
        (admitted,) = gate.admit([offered(text, backing=file)], left_tokens=9_999)
        assert not admitted.is_error
        assert not file.exists()


@pytest.mark.parametrize("lead", ["status " * 50, "長い状態" * 30])
@pytest.mark.parametrize("left_tokens", [200, 9_999])
def test_what_is_said_beside_a_file_counts_as_a_part_of_the_stub(
    lead: str, left_tokens: int, gate: Gate, tmp_path: Path
) -> None:
    file = tmp_path / "out"
    file.write_bytes(b"line\n" * 100_000)
    (admitted,) = gate.admit([offered(lead, file=file)], left_tokens=left_tokens)
    assert admitted.tokens <= min(300, left_tokens)
    assert stored(gate, admitted).endswith(b"line\nline\n")
    assert lead in admitted.content or stored(gate, admitted).startswith(lead.encode())


def test_an_error_of_the_store_takes_no_more_room_than_a_stub(tmp_path: Path) -> None:
    deep = tmp_path / "/".join(["a" * 200] * 14)
    (admitted,) = make_gate(deep).admit([offered("y" * 9_000)], left_tokens=9_999)
    assert admitted.is_error
    assert admitted.tokens <= 300
    assert "9,000 bytes" in admitted.content


@pytest.mark.parametrize("path", ["a\0b", "x" * 5_000, "/proc/kmsg", "/dev/zero"])
def test_a_path_that_is_none_or_never_ends_costs_the_other_results_nothing(path: str, gate: Gate) -> None:
    good, bad = gate.admit([offered("good"), offered("said", file=Path(path))], left_tokens=9_999)
    assert good.content == "good"
    assert bad.tokens <= 300
    assert "bytes" in bad.content or bad.content == "said\n"


def test_where_not_even_stubs_fit_each_text_is_one_line_and_all_is_stored(gate: Gate) -> None:
    step = [offered(f"{place}" + "z" * 9_000) for place in range(16)] + [offered("p" * 1_000, paged=True)]
    admitted = gate.admit(step, left_tokens=16 * 40)
    assert sum(one.tokens for one in admitted) <= 16 * 40
    assert all(stored(gate, one).startswith(f"{place}".encode()) for place, one in enumerate(admitted[:16]))
    assert admitted[16].is_error


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
