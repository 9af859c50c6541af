"""GBNF as it is written, against llama.cpp's own reading of it."""

from __future__ import annotations

import itertools
import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chapbook.kernels.errors import UsageError
from chapbook.runtime.grammar import (
    MAX_MEMBERS_IN_ANY_ORDER,
    Member,
    RuleBook,
    TrieEntry,
    arrange,
    integer_between,
    literal,
    repeat,
    trie,
)

LINES = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=20)
FEW = settings(max_examples=40, deadline=None)


@FEW
@given(text=LINES, other=LINES)
def test_a_literal_matches_its_text_and_no_other(matcher, text, other):
    gbnf = f"root ::= {literal(text)}\n"
    assert matcher.accepts(gbnf, text)
    assert matcher.accepts(gbnf, other) == (other == text)


@FEW
@given(texts=st.lists(st.text('ab/.é"\\\n', max_size=6), min_size=1, max_size=12), other=st.text("ab/.é", max_size=6))
def test_a_trie_matches_its_entries_and_nothing_else(matcher, texts, other):
    rules = RuleBook()
    gbnf = rules.render(f"{trie(rules, 'path', (TrieEntry(text, literal('!')) for text in texts))}")
    rules.check_integrity()
    assert all(matcher.accepts(gbnf, f"{text}!") for text in texts)
    assert matcher.accepts(gbnf, f"{other}!") == (other in texts)
    assert not matcher.accepts(gbnf, f"{texts[0]}!!")


def test_a_trie_of_two_thousand_paths_compiles_and_offers_just_them(matcher):
    chooser = random.Random(7)
    folders = ["src", "tests", "lib", "café", 'quo"te', "back\\slash", "a b"]
    paths = ["/".join(chooser.choices(folders, k=chooser.randint(1, 5))) + f"/file_{n}.py" for n in range(2_000)]
    rules = RuleBook()
    gbnf = rules.render(trie(rules, "path", (TrieEntry(json.dumps(path, ensure_ascii=False)) for path in paths)))
    rules.check_integrity()
    assert matcher.compiles(gbnf)
    for path in chooser.sample(paths, 100):
        assert matcher.accepts(gbnf, json.dumps(path, ensure_ascii=False))
        assert not matcher.accepts(gbnf, json.dumps(path[:-1], ensure_ascii=False))


def test_entries_that_are_prefixes_of_one_another_do_not_nest_python_calls(matcher):
    rules = RuleBook()
    gbnf = rules.render(trie(rules, "chain", (TrieEntry("a" * length, literal(".")) for length in range(1, 1_500))))
    assert matcher.accepts(gbnf, "a" * 700 + ".")
    assert not matcher.accepts(gbnf, "a" * 1_500 + ".")


def test_equal_tails_of_a_trie_share_their_rules():
    rules, apart = RuleBook(), RuleBook()
    trie(rules, "path", [TrieEntry(f"{head}{tail}") for head in "abcdef" for tail in ("1.py", "2.py", "3.py")])
    trie(apart, "path", [TrieEntry(f"{head}{tail}") for head in "abcdef" for tail in (f"1{head}", f"2{head}")])
    assert rules.render("x").count("\n") < apart.render("x").count("\n")


@FEW
@given(
    required=st.lists(st.booleans(), min_size=1, max_size=MAX_MEMBERS_IN_ANY_ORDER),
    order=st.lists(st.integers(0, MAX_MEMBERS_IN_ANY_ORDER - 1), max_size=6),
)
def test_few_members_come_in_any_order_each_once_and_the_required_ones_always(matcher, required, order):
    rules = RuleBook()
    members = [Member(literal(f"m{index}"), needed) for index, needed in enumerate(required)]
    gbnf = rules.render(f'"(" {arrange(rules, "set", members, separator=literal(","))} ")"')
    rules.check_integrity()
    fits = len(set(order)) == len(order) and all(index < len(required) for index in order)
    complete = all(index in order for index, needed in enumerate(required) if needed)
    assert matcher.accepts(gbnf, f"({','.join(f'm{index}' for index in order)})") == (fits and complete)


@FEW
@given(required=st.lists(st.booleans(), min_size=6, max_size=9), data=st.data())
def test_many_members_come_in_their_order(matcher, required, data):
    rules = RuleBook()
    members = [Member(literal(f"m{index}"), needed) for index, needed in enumerate(required)]
    gbnf = rules.render(f'"(" {arrange(rules, "row", members, separator=literal(","))} ")"')
    chosen = [index for index, needed in enumerate(required) if needed or data.draw(st.booleans())]
    assert matcher.accepts(gbnf, f"({','.join(f'm{index}' for index in chosen)})")
    swapped = [*chosen[1:], *chosen[:1]]
    assert matcher.accepts(gbnf, f"({','.join(f'm{index}' for index in swapped)})") == (swapped == chosen)
    without = [index for index in chosen if index != chosen[0]] if chosen else []
    left_out = [index for index, needed in enumerate(required) if needed and index not in without]
    assert matcher.accepts(gbnf, f"({','.join(f'm{index}' for index in without)})") == (not left_out)


ENDS = st.one_of(st.none(), st.integers(-1_200, 1_200), st.integers(-(10**9), 10**9))


@settings(max_examples=100, deadline=None)
@given(low=ENDS, high=ENDS, data=st.data())
def test_an_integer_range_matches_its_numbers_and_no_others(matcher, low, high, data):
    if low is not None and high is not None and low > high:
        low, high = high, low
    near = [end + step for end in (low, high) if end is not None for step in (-1, 0, 1)]
    number = data.draw(st.one_of(st.integers(-2_000, 2_000), st.integers(), *([st.sampled_from(near)] if near else [])))
    inside = (low is None or number >= low) and (high is None or number <= high)
    if inside and abs(number) >= 10**16:
        return  # further than any grammar of ours goes
    gbnf = f"root ::= {integer_between(low, high)}\n"
    assert matcher.accepts(gbnf, str(number)) == inside
    assert not matcher.accepts(gbnf, f"0{number}")


def test_small_ranges_are_exact(matcher):
    for low, high in itertools.product(range(-12, 13, 4), range(-11, 125, 17)):
        if low <= high:
            gbnf = f"root ::= {integer_between(low, high)}\n"
            matched = [number for number in range(-30, 140) if matcher.accepts(gbnf, str(number))]
            assert matched == [number for number in range(-30, 140) if low <= number <= high], (low, high)


def test_a_range_that_holds_nothing_is_refused_with_its_ends():
    with pytest.raises(UsageError, match="minimum 5 is over its maximum 4"):
        integer_between(5, 4)


def test_repetition_is_bounded_and_never_over_what_llama_cpp_takes(matcher):
    bounded = f"root ::= {repeat('[a]', least=2, most=4)}\n"
    assert [length for length in range(7) if matcher.accepts(bounded, "a" * length)] == [2, 3, 4]
    far = f"root ::= {repeat('[a]', least=1, most=50_000)}\n"
    assert matcher.accepts(far, "a" * 60)


@given(bodies=st.lists(st.sampled_from(['"a"', '"b"', "[0-9]", '"x" | "y"']), max_size=12))
def test_a_rule_book_gives_equal_bodies_one_name(bodies):
    rules = RuleBook()
    names = [rules.add("some rule!", body) for body in bodies]
    rules.check_integrity()
    assert len(set(names)) == len(set(bodies))
    assert len(rules.render("x").splitlines()) == len(set(bodies)) + 2  # with root and white space


def test_integrity_fails_where_a_rule_is_missing():
    rules = RuleBook()
    rules.add("outer", f'"a" {rules.reserve("inner")}')
    with pytest.raises(AssertionError, match="not defined"):
        rules.check_integrity()
