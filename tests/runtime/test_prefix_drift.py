"""Which sections of a session prefix drifted, to the token."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from chapbook.kernels.tokens import hash_tokens, token_ids
from chapbook.runtime.calls import Piece
from chapbook.runtime.chat_format import AppendKind, ChatFormat, ContentForm, Glue, GluePart
from chapbook.runtime.events import DriftKind, HeaderReason, PrefixSection, RequestHeader, SectionDrift
from chapbook.runtime.prefix_drift import concerns_model, describe_drift, drift_between, header_drift


def section(name: str, text: str) -> PrefixSection:
    tokens = token_ids(list(text.encode()))
    return PrefixSection(name=name, pieces=(Piece(text),), tokens=len(tokens), xxh3=hash_tokens(tokens))


CHAT_FORMAT = ChatFormat(
    template_hash="none",
    origin="template",
    glues={"user>reply": Glue((GluePart("|"),))},
    forms={},
    tools_native=True,
    system_native=True,
    append_kind=AppendKind.APPEND_ONLY,
)


def header(*sections: PrefixSection, tools: tuple[str, ...] = (), dialect: str = "hermes") -> RequestHeader:
    return RequestHeader(
        reason=HeaderReason.INITIAL, dialect=dialect, chat_format=CHAT_FORMAT, sections=sections, tools=tools
    )


PREFIXES = st.lists(
    st.builds(section, st.sampled_from(("glue", "system", "catalogue", "instructions")), st.text("ab", max_size=3)),
    max_size=6,
)


def as_tokens(prefix: list[PrefixSection]) -> list[tuple[str, str]]:
    return [(each.name, each.pieces[0].text) for each in prefix if each.tokens]


@given(PREFIXES, PREFIXES)
def test_drifts_add_up_to_the_difference_and_are_none_only_where_nothing_differs(
    recorded: list[PrefixSection], fresh: list[PrefixSection]
) -> None:
    drifts = drift_between(recorded, fresh)
    assert (drifts == ()) is (as_tokens(recorded) == as_tokens(fresh))
    difference = sum(each.tokens for each in fresh) - sum(each.tokens for each in recorded)
    assert sum(drift.after_tokens - drift.before_tokens for drift in drifts) == difference
    assert len({drift.name for drift in drifts}) == len(drifts)


@given(PREFIXES, PREFIXES)
def test_each_drift_counts_all_of_its_section_on_both_sides_and_its_kind_follows(
    recorded: list[PrefixSection], fresh: list[PrefixSection]
) -> None:
    for drift in drift_between(recorded, fresh):
        before = [text for name, text in as_tokens(recorded) if name == drift.name]
        after = [text for name, text in as_tokens(fresh) if name == drift.name]
        assert (drift.before_tokens, drift.after_tokens) == (len("".join(before)), len("".join(after)))
        kinds = {(True, True): DriftKind.CHANGED, (False, True): DriftKind.ADDED, (True, False): DriftKind.REMOVED}
        assert drift.kind is kinds[bool(before), bool(after)]


@given(PREFIXES, PREFIXES)
def test_the_way_back_is_the_same_drift_the_other_way_round(
    recorded: list[PrefixSection], fresh: list[PrefixSection]
) -> None:
    there = {(each.name, each.before_tokens, each.after_tokens) for each in drift_between(recorded, fresh)}
    back = {(each.name, each.after_tokens, each.before_tokens) for each in drift_between(fresh, recorded)}
    assert there == back


def test_a_section_of_which_one_of_two_parts_changed_is_one_drift() -> None:
    before = [section("glue", "<a>"), section("system", "Be brief."), section("glue", "<b>")]
    after = [section("glue", "<a>"), section("system", "Be brief."), section("glue", "<bcd>")]
    expected = SectionDrift(name="glue", before_tokens=6, after_tokens=8, kind=DriftKind.CHANGED)
    assert drift_between(before, after) == (expected,)


def test_sections_in_another_order_have_all_changed() -> None:
    one, other = section("system", "ab"), section("catalogue", "c")
    drifts = drift_between([one, other], [other, one])
    assert [(drift.name, drift.before_tokens, drift.after_tokens, drift.kind) for drift in drifts] == [
        ("system", 2, 2, "changed"),
        ("catalogue", 1, 1, "changed"),
    ]


def test_a_section_that_is_cut_into_other_pieces_with_the_same_tokens_has_not_drifted() -> None:
    whole = section("system", "Be brief.")
    assert drift_between([whole], [msgspec.structs.replace(whole, pieces=(Piece("Be "), Piece("brief.")))]) == ()


def test_a_difference_between_messages_or_in_the_form_of_calls_is_named_and_has_no_tokens() -> None:
    other = msgspec.structs.replace(CHAT_FORMAT, forms={"tool": ContentForm(trimmed=True)})
    fresh = msgspec.structs.replace(header(dialect="llama3"), chat_format=other)
    drifts = header_drift(header(), fresh)
    assert [(drift.name, drift.before_tokens, drift.after_tokens) for drift in drifts] == [
        ("chat format", 0, 0),
        ("dialect", 0, 0),
    ]
    assert describe_drift(header(), fresh, [drift.name for drift in drifts]) == (
        "markup between messages changed; form of tool calls changed"
    )
    learnt_anew = msgspec.structs.replace(CHAT_FORMAT, template_hash="other", fallback_reason="otherwise said")
    assert header_drift(header(), msgspec.structs.replace(header(), chat_format=learnt_anew)) == ()


@pytest.mark.parametrize(
    ("names", "concerns"),
    [(["glue", "chat format", "dialect"], False), (["glue", "instructions"], True), (["catalogue"], True), ([], False)],
)
def test_markup_alone_is_nothing_to_tell_a_model(names: list[str], concerns: bool) -> None:
    assert concerns_model(names) is concerns


def test_a_drift_is_said_with_its_tokens_and_the_tools_that_came_and_went() -> None:
    before = header(section("catalogue", "read look"), section("instructions", "abc"), tools=("read", "look"))
    after = header(section("catalogue", "read write now"), section("system", "x"), tools=("read", "write", "now"))
    names = [drift.name for drift in header_drift(before, after)]
    assert describe_drift(before, after, names) == (
        "tool catalogue changed, +5 tokens (new: write, now; gone: look); project instructions removed, -3 tokens; "
        "system text added, +1 tokens"
    )
    assert describe_drift(before, before, ["instructions"]) == "project instructions as before again"


def test_of_many_tools_that_came_twenty_are_named() -> None:
    tools = tuple(f"t{number}" for number in range(25))
    fresh = header(section("catalogue", "x"), tools=tools)
    assert describe_drift(header(), fresh, ["catalogue"]).endswith("t18, t19 and 5 more)")
