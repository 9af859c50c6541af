"""What a text is, by its content."""

import json
import re
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chapbook.compaction.kinds import Kind, detect_kind, last_states, take_sample

EXPECTED = {
    "failing_pytest": Kind.LOG,
    "cargo_output": Kind.LOG,
    "go_output": Kind.LOG,
    "jest_output": Kind.LOG,
    "java_trace": Kind.TRACEBACK,
    "python_trace": Kind.TRACEBACK,
    "gcc_output": Kind.TRACEBACK,
    "git_diff": Kind.DIFF,
    "package_json": Kind.JSON,
    "geojson": Kind.JSON,
    "json_lines": Kind.JSON,
    "csv_table": Kind.CSV,
    "markdown_book": Kind.MARKDOWN,
    "python_source": Kind.PYTHON,
    "service_log": Kind.LOG,
    "plain_prose": Kind.TEXT,
}


def in_colour(text: str) -> str:
    return re.sub(r"(?m)^(.+)$", "\x1b[1;31m\\1\x1b[0m", text)


def as_read_prints_it(text: str) -> str:
    lines = text.split("\n")[:900]
    return "\n".join(f"{number}\t{line}" for number, line in enumerate(lines, 1)) + f"\n[lines 1-{len(lines)} of 9999]"


@pytest.mark.parametrize("name", EXPECTED)
def test_each_kind_is_told_by_its_content(stored, sample, name) -> None:
    assert detect_kind(stored(sample(name))) is EXPECTED[name]


@pytest.mark.parametrize("name", EXPECTED)
def test_a_misleading_name_does_not_outweigh_the_content(stored, sample, name) -> None:
    misleading = "notes.md" if EXPECTED[name] is not Kind.TEXT else "notes.txt"
    assert detect_kind(stored(sample(name)), name=misleading) is EXPECTED[name]


@pytest.mark.parametrize("name", EXPECTED)
@pytest.mark.parametrize(
    "spelled",
    [
        lambda text: text.replace("\n", "\r\n"),
        in_colour,
        lambda text: text.encode("utf-16"),
        lambda text: text.encode("utf-16-le"),
        lambda text: b"\xef\xbb\xbf" + text.encode(),
    ],
    ids=["CRLF", "colours", "UTF-16 with a mark", "UTF-16 without", "UTF-8 with a mark"],
)
def test_the_kind_does_not_depend_on_line_ends_colours_or_encoding(stored, sample, name, spelled) -> None:
    assert detect_kind(stored(spelled(sample(name)))) is EXPECTED[name]


@pytest.mark.parametrize("name", [name for name in EXPECTED if name != "geojson"])
def test_numbered_lines_as_read_prints_them_are_looked_through(stored, sample, name) -> None:
    text = stored(as_read_prints_it(sample(name)))
    assert take_sample(text).numbered
    assert detect_kind(text) is EXPECTED[name]


@pytest.mark.parametrize("name", ["markdown_book", "failing_pytest", "csv_table"])
def test_some_invalid_bytes_change_nothing(stored, sample, name) -> None:
    data = sample(name).encode()
    assert detect_kind(stored(data[:3000] + b"\xff\xe9 \xc3" + data[3000:])) is EXPECTED[name]


@pytest.mark.parametrize("data", [b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR", b"\0" * 5000, zlib.compress(b"x" * 10) + bytes(64)])
def test_what_is_no_text_is_binary(stored, data) -> None:
    assert detect_kind(stored(data), name="a.md") is Kind.BINARY


@pytest.mark.parametrize("text", ["", "\n" * 5000, "   \n\t\n", "x" * 5_000_000, "one line"])
def test_content_that_says_nothing_is_text_unless_its_name_says_more(stored, text) -> None:
    assert detect_kind(stored(text)) is Kind.TEXT


def test_a_name_decides_where_the_content_says_nothing(stored) -> None:
    text = stored("some words\nand some more\n")
    named = {name: detect_kind(text, name=name) for name in ("a.md", "A.PY", "x.log", "b.csv", "c.patch", "d.txt")}
    assert list(named.values()) == [Kind.MARKDOWN, Kind.PYTHON, Kind.LOG, Kind.CSV, Kind.DIFF, Kind.TEXT]


@pytest.mark.parametrize(
    "text",
    [
        "Dear Ann, hello\nWell, good\nSo, fine\nYes, ok\nNo, never\nThen, bye\n",
        "# set -x\n# the port\nport = 8080\n# the host\nhost = a\n",
        "#!/bin/sh\n# Start it.\nexec server --port 80\n",
        "[1] see the note\n[2] and the other\n",
        "{ shell: function }\n",
        "int main(void) {\n    int error = 0;\n    return error;\n}\n" * 50,
        "# A\n## B\n# C\nx = 1\n## D\ny = 2\n" * 9,
        "".join(f"the job began at 10:00:{n},{n}7\n" for n in range(10, 60)),
        "- milk\n- eggs\n+ bread\n",
    ],
)
def test_look_alikes_are_plain_text(stored, text) -> None:
    assert detect_kind(stored(text)) is Kind.TEXT


def test_tables_with_tabs_semicolons_and_a_counting_first_column_are_tables(stored) -> None:
    for delimiter in "\t;|":
        text = "".join(f"{n}{delimiter}name {n}{delimiter}{n * 2}\n" for n in range(1, 60))
        assert detect_kind(stored(text)) is Kind.CSV, delimiter


def test_a_log_of_pythons_own_form_is_no_table_for_its_commas(stored) -> None:
    text = "".join(f"2026-11-30 19:14:{n:02d},{n * 7:03d} started job\n" for n in range(60))
    assert detect_kind(stored(text)) is Kind.LOG


def test_json_beyond_what_is_looked_at_is_still_json(stored) -> None:
    text = json.dumps([{"key": 'a\\"b' * 30, "n": n} for n in range(3000)], indent=1)
    assert detect_kind(stored(text)) is Kind.JSON


PARAGRAPH = "The ship sailed on. It was late, and nobody spoke.\nThe second line of it."


@pytest.mark.parametrize(
    "part",
    [
        f"# Chapter {{}}\n\n{PARAGRAPH}\n\n",
        f"## Sub {{}}\n{PARAGRAPH}\n",
        "## Sub {}\n- one thing\n- another thing\n",
        "# Kapitel {}\n\u00c4pfel sind rot, und die Birne ist es nicht.\n",
        "# \u7b2c{}\u7ae0\n\u8239\u5728\u6d77\u4e0a\u822a\u884c\u3002\n",
    ],
    ids=["chapters only", "no blank lines", "lists", "German", "Chinese"],
)
def test_headings_over_prose_or_lists_make_it_markdown_without_blank_lines_around_them(stored, part) -> None:
    assert detect_kind(stored("".join(part.format(n) for n in range(90)))) is Kind.MARKDOWN


@pytest.mark.parametrize(
    "part",
    [
        "# Install part {}\napt-get install -y part{}\ncp a b\n",
        "# Build {}\n./configure --prefix=/usr\nmake -j4\nmake install\n\n",
        '# Part {}\n\npart{}:\n  - name: x\n  - image: "y"\n',
        "# The service of {} runs here.\nservice{}:\n  image: nginx\n  ports:\n    - 80:80\n",
        "# Step {}\nRUN apt-get install -y foo{}\nCOPY a b\n",
        "# Whether {}\nPermitRootLogin no\nPort {}\n",
        "# Load {}\nx{} <- read.csv('a')\nprint(x)\n",
        "# Copyright {}, all of us.\n# You may use it as you like.\n\nset(NAME_{} x)\n",
    ],
    ids=["shell", "make", "YAML", "compose", "Dockerfile", "sshd", "R", "CMake"],
)
def test_comments_over_code_and_settings_are_no_headings(stored, part) -> None:
    assert detect_kind(stored("".join(part.format(n, n) for n in range(90)))) is Kind.TEXT


def test_comments_upon_comments_over_prose_are_no_headings(stored) -> None:
    text = "# Copyright, all of us.\n# You may use it.\n" + "The rest of this is told in words.\n\n# Note\n"
    assert detect_kind(stored(text)) is Kind.TEXT


@pytest.mark.parametrize(
    "value", ['{"a": {"b": [1, 2, 3, 4, 5, 6, 7]}}', "[\n  1,\n  2,\n  3,\n  4,\n  5,\n  6,\n  7\n]"]
)
def test_json_with_a_line_behind_its_end_is_json_and_words_behind_it_are_not(stored, value) -> None:
    assert detect_kind(stored(f"{value}\ncurl: gone\n")) is Kind.JSON
    assert detect_kind(stored(f"{value} is what it gave\n")) is Kind.TEXT


def test_comments_of_python_are_no_headings(stored) -> None:
    text = "".join(
        f"# The value of {n} is kept here.\nvalue_{n} = f({n})\n\n\ndef g_{n}():\n    pass\n" for n in range(90)
    )
    assert detect_kind(stored(text)) is Kind.PYTHON


@pytest.mark.parametrize("result", ["0.3s", "(cached)"])
def test_what_go_test_prints_for_packages_is_test_output_and_no_table(stored, result) -> None:
    text = "".join(f"ok  \texample.org/p{n}\t{result}\n" for n in range(90)) + "FAIL\texample.org/q\t0.1s\n"
    assert detect_kind(stored(text)) is Kind.LOG


def test_statements_that_end_with_a_semicolon_are_no_table(stored) -> None:
    text = "".join(f"INSERT INTO t VALUES ({n} + 1);\n" for n in range(90))
    assert detect_kind(stored(text)) is Kind.TEXT


def test_the_sample_of_lines_that_were_written_over_holds_their_last_states(stored) -> None:
    progress = "".join(f"\rprogress {n}%" for n in range(20_000))
    sample = take_sample(stored(f"start{progress}\r\nsecond\nthird{progress}\n"))
    assert sample.whole
    assert sample.head == "progress 19999%\nsecond\nprogress 19999%\n"


def test_of_megabytes_of_states_in_one_line_only_the_last_is_given() -> None:
    chunks = [b"\rprogress %07d" % n * 10_000 for n in range(20)]
    assert list(last_states(iter([*chunks, b"\r\n"]))) == [b"progress 0000019\n"]


@given(
    lines=st.lists(st.text(alphabet="ab\r", max_size=8), min_size=1, max_size=8),
    ended=st.booleans(),
    chunk_bytes=st.integers(1, 9),
)
def test_last_states_are_those_a_terminal_leaves_whatever_the_chunks_are(lines, ended, chunk_bytes) -> None:
    data = "\n".join(lines).encode() + b"\n" * ended
    chunks = (data[start : start + chunk_bytes] for start in range(0, len(data), chunk_bytes))
    plain = [line.rstrip("\r").rsplit("\r", 1)[-1] for line in lines]
    assert b"".join(last_states(chunks)) == "\n".join(plain).encode() + b"\n" * ended


def test_a_diff_quoted_in_a_document_leaves_it_a_document(stored, sample) -> None:
    fenced = "\n".join(sample("git_diff").split("\n")[:30])
    assert detect_kind(stored(f"{sample('markdown_book')}\n```diff\n{fenced}\n```\n")) is Kind.MARKDOWN


@given(data=st.binary(max_size=3000) | st.text(max_size=2000).map(str.encode))
def test_any_content_has_a_kind(stored, data) -> None:
    assert detect_kind(stored(data)) in Kind
