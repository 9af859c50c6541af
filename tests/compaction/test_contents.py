"""Tables of contents: what is listed, at which line and byte, for any way that a text comes in chunks."""

from __future__ import annotations

import difflib
import json
import re

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from chapbook.compaction.contents import MOST_ENTRIES, TITLE_CHARS, Contents, list_contents
from chapbook.compaction.json_contents import LISTED_DEPTH, JsonScan
from chapbook.compaction.kinds import Kind


def contents(text: str | bytes, kind: Kind, *, chunk_bytes: int = 1 << 16, **options: object) -> Contents:
    data = text.encode() if isinstance(text, str) else text
    chunks = (data[at : at + chunk_bytes] for at in range(0, len(data), chunk_bytes))
    return list_contents(chunks, kind, **options)


def listed(text: str | bytes, kind: Kind, **options: object) -> list[tuple[int, str]]:
    return [(entry.line, entry.title) for entry in contents(text, kind, **options).entries]


MARKDOWN = """# One
##not a heading
```sh
# comment
~~~
```
  ## Two `x` ##
~~~~
# in tildes
~~~
# still
~~~~~
```inline``` code
### Three
    # code
####### seven
"""


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
@pytest.mark.parametrize("chunk_bytes", [1, 7, 1 << 16])
def test_headings_are_listed_outside_fences_only(newline: str, chunk_bytes: int) -> None:
    text = MARKDOWN.replace("\n", newline)
    assert listed(text, Kind.MARKDOWN, chunk_bytes=chunk_bytes) == [
        (1, "# One"),
        (7, "## Two `x` ##"),
        (14, "### Three"),
    ]


def test_definitions_keep_their_indentation() -> None:
    code = "import x\nclass A(B):\n    async def f(self):\n        classes = 1\ndef größe(): ...\nundefined = 2\n"
    assert listed(code, Kind.PYTHON) == [(2, "class A"), (3, "    async def f"), (5, "def größe")]


def test_a_kind_without_contents_lists_nothing() -> None:
    assert contents("# a\n" * 3, Kind.LOG).total == 0


def test_entries_and_titles_are_bounded_and_what_is_left_out_is_told() -> None:
    text = "".join(f"# {'long ' * 40}{number}\n" for number in range(1000))
    found = contents(text, Kind.MARKDOWN)
    assert (len(found.entries), found.total, found.skipped, found.titles_cut) == (MOST_ENTRIES, 1000, 0, True)
    assert {len(entry.title) for entry in found.entries} == {TITLE_CHARS}
    later = contents(text, Kind.MARKDOWN, from_line=901)
    assert (later.entries[0].line, later.total, later.skipped) == (901, 100, 900)


def test_a_line_longer_than_memory_is_wanted_for_is_passed_over() -> None:
    text = f"# {'x' * 3_000_000}\n# Two\n{'y' * 3_000_000}\n# Three"
    assert [line for line, _ in listed(text, Kind.MARKDOWN)] == [1, 2, 4]


def test_the_numbers_that_read_puts_before_lines_are_passed_over() -> None:
    numbered = "".join(f"{number}\t{line}\n" for number, line in enumerate(MARKDOWN.split("\n"), start=40))
    assert listed(numbered, Kind.MARKDOWN, numbered=True) == listed(MARKDOWN, Kind.MARKDOWN)
    value = json.dumps({"a": 1, "b": [1, 2]}, indent=1)
    numbered = "".join(f"{number}\t{line}\n" for number, line in enumerate(value.split("\n"), start=1))
    assert listed(numbered, Kind.JSON, numbered=True) == listed(value, Kind.JSON)


def test_a_pass_that_is_stopped_says_how_far_it_came() -> None:
    looks = iter([False, False, True])
    found = contents("# x\n" * 60_000, Kind.MARKDOWN, is_stopped=lambda: next(looks))
    assert found.looked_to_line is not None
    assert contents("# x\n", Kind.MARKDOWN).looked_to_line is None


# Diffs

LINES = st.lists(st.sampled_from(["a", "b", "", "-- a", "++ b", "@@ -1 +1 @@", "diff --git a/q b/q", "-"]), max_size=30)


@given(st.lists(st.tuples(LINES, LINES), max_size=4))
@settings(max_examples=100, deadline=None)
def test_a_diff_has_its_files_and_hunks_whatever_its_lines_look_like(pairs: list[tuple[list[str], list[str]]]) -> None:
    lines, expected = [], []
    for number, (old, new) in enumerate(pairs):
        diff = list(difflib.unified_diff(old, new, f"a/f{number}.txt", f"b/f{number}.txt", lineterm="", n=1))
        places = _hunk_places(diff)
        if diff:
            expected.append((len(lines) + 1, f"f{number}.txt"))
        expected += [(len(lines) + at + 1, f"  {diff[at]}") for at in places]
        lines += diff
    assert listed("\n".join(lines), Kind.DIFF, most_entries=1000) == expected


def _hunk_places(diff: list[str]) -> list[int]:
    places, at = [], 2
    while at < len(diff):
        places.append(at)
        sizes = re.match(r"@@ -\d+(?:,(\d+))? \+\d+(?:,(\d+))? @@", diff[at])
        old, new = (int(size or 1) for size in sizes.groups(default="1"))
        at += 1
        while old or new:
            old -= diff[at][0] in "- "
            new -= diff[at][0] in "+ "
            at += 1
    return places


def test_names_of_a_git_diff_are_those_of_the_new_files() -> None:
    text = """diff --git a/old name.py b/new name.py
similarity index 90%
--- a/old name.py
+++ b/new name.py
@@ -1 +1 @@ def f
-a
+b
\\ No newline at end of file
diff --git a/gone b/gone
deleted file mode 100644
--- a/gone
+++ /dev/null
@@ -1 +0,0 @@
-x
diff --git "a/\\303\\251" "b/\\303\\251"
Binary files differ
--- plain.c\t2026-01-01
+++ plain.c\t2026-01-02
@@ -1,99 +1,99 @@
 cut short
diff --git a/z b/z
"""
    assert listed(text.replace("Binary files differ\n", "Binary files differ\n@@@ -1 -1 +1 @@@\n"), Kind.DIFF) == [
        (1, "new name.py"),
        (5, "  @@ -1 +1 @@ def f"),
        (9, "gone"),
        (13, "  @@ -1 +0,0 @@"),
        (15, "\\303\\251"),
        (17, "  @@@ -1 -1 +1 @@@"),
        (18, "plain.c"),
        (20, "  @@ -1,99 +1,99 @@"),
        (22, "z"),
    ]


# JSON

KEYS = st.text(st.sampled_from('ab"\\{}[]:,é\n'), min_size=1, max_size=5)
VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-99, 99), KEYS),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYS, inner, max_size=4),
    max_leaves=25,
)
ROOTS = st.one_of(st.lists(VALUES, max_size=5), st.dictionaries(KEYS, VALUES, max_size=5))


def reference(value: object, depth: int = 0, name: str = "", *, lists: bool = True) -> list[str]:
    """Return the titles by walking the value."""
    indent, named = "  " * depth, f"{name}: " if name else ""
    if not isinstance(value, dict | list):
        return [f"{indent}{' '.join((named + json.dumps(value, ensure_ascii=False)).split())}"]
    is_object = isinstance(value, dict)
    title = f"{'object' if is_object else 'array'} of {len(value)}"
    if is_object and value and not lists and depth < LISTED_DEPTH:
        title += f": {', '.join(_escaped(key) for key in value)}"
    found = [f"{indent}{' '.join((named + title).split())}"]
    if lists and depth < LISTED_DEPTH:
        inner = value.items() if is_object else enumerate(value)
        for key, below in inner:
            if is_object or isinstance(below, dict | list):
                shown = _escaped(key) if is_object else f"[{key}]"
                below_lists = is_object and isinstance(below, dict) and depth + 1 < LISTED_DEPTH
                found += reference(below, depth + 1, shown, lists=below_lists)
    return found


def _escaped(key: str) -> str:
    return json.dumps(key, ensure_ascii=False)[1:-1]


@given(ROOTS, st.sampled_from([None, 0, 2]), st.integers(1, 40))
@example({"a\\": {'\\"': [1, {"b": []}]}}, None, 1)
@settings(max_examples=150, deadline=None)
def test_json_lists_keys_and_lengths_as_a_walk_of_the_value_does(
    value: object, indent: int | None, chunk_bytes: int
) -> None:
    text = json.dumps(value, indent=indent, ensure_ascii=False)
    assert [title for _, title in listed(text, Kind.JSON, chunk_bytes=chunk_bytes)] == reference(value)


@given(ROOTS, st.sampled_from([None, 0, 2]), st.integers(1, 40))
@settings(max_examples=100, deadline=None)
def test_each_json_entry_is_where_it_says(value: object, indent: int | None, chunk_bytes: int) -> None:
    data = json.dumps(value, indent=indent, ensure_ascii=False).encode()
    scan = JsonScan()
    entries = []
    for at in range(0, len(data), chunk_bytes):
        entries += scan.feed(data[at : at + chunk_bytes])
        scan.check_integrity()
    scan.finish()
    lines = data.split(b"\n")
    for entry in entries:
        found = lines[entry.place.line - 1][entry.place.column - 1 :].decode()
        is_keyed = entry.name and not re.fullmatch(r"\[\d+\]", entry.name)
        assert found.startswith(f'"{entry.name}"' if is_keyed else ("{", "[")) or found.startswith('"['), entry
    assert [entry.place for entry in entries] == sorted(entry.place for entry in entries)


@given(st.text(st.sampled_from('{}[]",:\\a\n 1'), max_size=200), st.integers(1, 30))
@settings(max_examples=200, deadline=None)
def test_what_is_no_json_is_never_an_error(text: str, chunk_bytes: int) -> None:
    scan = JsonScan()
    for at in range(0, len(text), chunk_bytes):
        list(scan.feed(text[at : at + chunk_bytes].encode()))
        scan.check_integrity()
    scan.finish()


def test_what_is_cut_off_is_said_not_to_be_closed() -> None:
    assert listed('{"a": [1, 2', Kind.JSON) == [(1, "object of 0, not closed"), (1, "  a: array of 1, not closed")]


def test_json_lines_are_listed_one_by_one() -> None:
    text = '{"id": 1, "tags": []}\n{"id": 2}\n{"id": 3, "x": {"y": 1}}\n'
    titles = [(1, "object of 2"), (1, "  id: 1"), (1, "  tags: array of 0")]
    assert listed(text, Kind.JSON) == [*titles, (2, "object of 1: id"), (3, "object of 2: id, x")]


def test_entries_in_one_line_have_columns_from_which_the_list_goes_on() -> None:
    text = json.dumps({f"key{number}": number for number in range(50)})
    whole = contents(text, Kind.JSON)
    assert [entry.column for entry in whole.entries[:3]] == [0, 2, 13]
    rest = contents(text, Kind.JSON, from_column=whole.entries[20].column)
    assert rest.entries == whole.entries[20:]
    assert (rest.skipped, rest.total) == (20, 31)
