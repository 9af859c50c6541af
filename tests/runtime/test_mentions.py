"""Mentions: which words of a message hand a file over."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chapbook.runtime.mentions import Mention, find_mentions, find_missing

FILES = {"README.md", "src/main.py", "a b.md", "Makefile", "x.c", "odd:10", "résumé.txt", "a.b"}


def mentions(text: str) -> list[tuple[str, int, int | None]]:
    return [(found.path, found.offset, found.limit) for found in find_mentions(text, FILES.__contains__)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("@README.md", [("README.md", 1, None)]),
        ("What is in @README.md?", [("README.md", 1, None)]),
        ("(see @src/main.py), please", [("src/main.py", 1, None)]),
        ("see @README.md... or @Makefile.", [("README.md", 1, None), ("Makefile", 1, None)]),
        ("**@README.md**", [("README.md", 1, None)]),
        ("@README.md:10-40", [("README.md", 10, 31)]),
        ("@README.md:10-40.", [("README.md", 10, 31)]),
        ("@README.md:10", [("README.md", 10, 1)]),
        ("@README.md:10: what is this?", [("README.md", 10, 1)]),
        ("@README.md:10-", [("README.md", 10, None)]),
        ("@README.md:40-10", [("README.md", 10, 31)]),
        ("@README.md:0-3", [("README.md", 1, 3)]),
        ("error at @src/main.py:10:5", [("src/main.py", 10, 1)]),
        ('@"a b.md"', [("a b.md", 1, None)]),
        ('@"a b.md":2-3', [("a b.md", 2, 2)]),
        ("@'a b.md' and more", [("a b.md", 1, None)]),
        ("@odd:10", [("odd:10", 1, None)]),
        ("@odd:10:2", [("odd:10", 2, 1)]),
        ("看@README.md的第一行", [("README.md", 1, None)]),
        ("看@README.md。", [("README.md", 1, None)]),
        ("@résumé.txt", [("résumé.txt", 1, None)]),
        ("@README.md @README.md", [("README.md", 1, None)]),
        ("@README.md @README.md:2", [("README.md", 1, None), ("README.md", 2, 1)]),
        ("@README.md\n@x.c", [("README.md", 1, None), ("x.c", 1, None)]),
    ],
)
def test_a_mention_is_found(text: str, expected: list[tuple[str, int, int | None]]) -> None:
    assert mentions(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        "me@a.b",
        "first.last@README.md",
        "naïveté@README.md",
        "http://host/@README.md",
        "@@README.md",
        "@dataclass",
        "@src/main.p",
        "@src/main.py2",
        "@missing.md:10-20",
        "@",
        "@ README.md",
        '@"missing file.md"',
        "README.md",
        "@" + "a" * 10_000,
    ],
)
def test_what_only_looks_like_a_mention_is_text(text: str) -> None:
    assert mentions(text) == []


def test_a_slip_in_a_path_is_told_and_a_decorator_is_not() -> None:
    text = '@src/mian.py @README.md @dataclass @"no such" @missing.md, me@x.org'
    assert find_missing(text, FILES.__contains__) == ("src/mian.py", "no such", "missing.md")


@pytest.mark.parametrize(
    ("mention", "arguments"),
    [
        (Mention(path="a"), {"path": "a"}),
        (Mention(path="a", offset=3), {"path": "a", "offset": 3}),
        (Mention(path="a", limit=2), {"path": "a", "offset": 1, "limit": 2}),
    ],
)
def test_a_mention_becomes_the_arguments_of_read(mention: Mention, arguments: dict[str, object]) -> None:
    assert mention.arguments() == arguments


@given(st.text(alphabet="@a.b:-1 \"'()/é。", max_size=60))
def test_any_text_gives_only_files_that_exist_and_lines_from_one_on(text: str) -> None:
    for found in find_mentions(text, {"a", "b", "a.b", "a b", "a/b"}.__contains__):
        assert found.path in text
        assert found.offset >= 1
        assert found.limit is None or found.limit >= 1


@given(
    st.sampled_from(sorted(FILES)),
    st.integers(1, 99_999),
    st.integers(0, 999),
    st.sampled_from(["", " ", "(", "看", "\n"]),
    st.sampled_from(["", " ", ")", ".", "?!", "。"]),
)
def test_a_mention_with_lines_is_found_between_any_neighbours(
    path: str, first: int, more: int, before: str, after: str
) -> None:
    text = f'{before}@"{path}":{first}-{first + more}{after}'
    assert mentions(text) == [(path, first, more + 1)]
