"""What is shown of each kind of text."""

import gzip
import io
import json
import random
import re
import sqlite3
import struct
import tarfile
import tracemalloc
import zipfile

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chapbook.compaction.kinds import Kind, detect_kind
from chapbook.compaction.preview_binary import describe_binary
from chapbook.compaction.preview_json import close_json
from chapbook.compaction.preview_table import count_records
from chapbook.compaction.previews import best_line, in_order, preview_lines
from chapbook.compaction.quoting import PreviewLine, cleaned, clipped, entries_left, quoted


def best(text, kind=None, *, count=8) -> list[str]:
    """The lines of the lowest ranks, in document order."""
    lines = preview_lines(text, kind or detect_kind(text))
    kept = sorted(range(len(lines)), key=lambda place: lines[place].rank)[:count]
    return [lines[place].text for place in sorted(kept)]


def quotations(text, kind: Kind) -> list[PreviewLine]:
    return [line for line in preview_lines(text, kind) if line.line and line.lines]


# Text and logs


def test_plain_text_shows_its_first_and_last_lines_by_turns(stored, sample) -> None:
    lines = sorted(preview_lines(stored(sample("plain_prose")), Kind.TEXT), key=lambda line: line.rank)
    assert [line.line for line in lines[:6]] == [1, 900, 2, 899, 3, 898]
    assert lines[1].text == "900: Sentence 899 of a long tale, in which little happens, and slowly."


def test_blank_lines_are_passed_over_and_leave_no_gap(stored) -> None:
    text = stored("\n\nfirst\n\n\nsecond\n" + "x\n" * 99 + "\nlast\n\n\n")
    shown = quotations(text, Kind.TEXT)
    assert [(line.text, line.lines) for line in shown[:2]] == [("3: first", 3), ("6: second", 1)]
    assert (shown[-1].text, shown[-1].lines) == ("107: last", 3)


def test_a_failure_amid_plain_text_is_shown_behind_its_first_and_last_line(stored, sample) -> None:
    text = stored(sample("plain_prose") + "src/a.c:3:1: error: expected ';'\n" + sample("plain_prose"))
    assert "901: src/a.c:3:1: error: expected ';'" in best(text, Kind.TEXT, count=3)


def test_test_output_shows_the_failure_its_assertion_and_its_location(stored, sample) -> None:
    assert best(stored(sample("failing_pytest")), count=4) == [
        "3993: E       AssertionError: assert 7 == 8",
        "3994: E        +  where 7 = total()",
        "3997: tests/shop/test_cart.py:41: AssertionError",
        "3999: FAILED tests/shop/test_cart.py::test_total_of_cart - AssertionError: assert 7...",
    ]


@pytest.mark.parametrize("spelled", ["CRLF", "colours", "UTF-16"])
def test_a_failure_is_found_at_its_line_whatever_the_spelling(stored, sample, spelled) -> None:
    plain = sample("failing_pytest")
    data = {
        "CRLF": plain.replace("\n", "\r\n"),
        "colours": re.sub(r"(?m)^(.+)$", "\x1b[1;31m\\1\x1b[0m\x1b[K", plain),
        "UTF-16": plain.encode("utf-16"),
    }[spelled]
    text = stored(data)
    assert detect_kind(text) is Kind.LOG
    assert best(text) == best(stored(plain))


def test_what_read_printed_is_quoted_by_the_line_of_the_artifact(stored) -> None:
    inner = ["x = 1"] * 40 + [
        "Traceback (most recent call last):",
        '  File "a.py", line 3, in f',
        "    g()",
        "KeyError: 1",
    ]
    printed = "".join(f"{number}\t{line}\n" for number, line in enumerate(inner, start=401)) + "[lines 401-444 of 900]"
    assert "44: KeyError: 1" in best(stored(printed), Kind.TRACEBACK, count=3)


def test_an_error_line_is_quoted_with_the_line_around_it_that_matters(stored, sample) -> None:
    shown = best(stored(sample("gcc_output")), count=5)
    assert "602: src/btree.c: In function 'split_node':" in shown
    assert "604:   412 |  right->count = 0;" in shown


def test_many_alike_take_one_line_with_their_count(stored, sample) -> None:
    shown = best(stored(sample("service_log")), count=3)
    assert "2001 [x10,000, last at 12001]: …ERROR shop.db: pool 0 is exhausted after 0ms" in shown
    assert "5001: …CRITICAL shop.disk: no space left on /var/lib/shop" in shown


@pytest.mark.parametrize("kind", [Kind.TEXT, Kind.LOG, Kind.JSON, Kind.CSV, Kind.MARKDOWN, Kind.DIFF, Kind.PYTHON])
def test_one_line_of_megabytes_shows_its_head_and_its_tail(stored, kind) -> None:
    shown = preview_lines(stored("start " + "x" * 5_000_000 + " end"), kind)
    assert shown[0].text.startswith("1: start xxx")
    assert shown[0].text.endswith("x…")
    assert shown[1].text.startswith("line 1 ends: …xx")
    assert shown[1].text.endswith("x end")
    assert len(shown) == 2


def amid(line: str, odd: str, *, count: int = 2500) -> str:
    return "".join(f"{line.format(n)}\n" for n in range(count)) + f"{odd}\n" + f"{line.format(7)}\n" * count


@pytest.mark.parametrize("line", ["item number {} of the list done", "/srv/x{}/y.dat", "{} INFO fine"])
def test_the_one_line_of_another_shape_is_shown_whatever_it_says(stored, line) -> None:
    text = stored(amid(line, "quorum of the ring vanished"))
    shown = preview_lines(text, detect_kind(text))
    assert best_line(shown) == 2501
    assert "2501: quorum of the ring vanished" in best(text, count=3)


def test_rare_lines_rank_behind_known_failures_and_before_the_edges(stored) -> None:
    text = stored(amid("{} INFO fine", "the ring vanished\n9 INFO fine\n\n9 INFO fine\nKeyError: 'x'"))
    ranked = [line.line for line in sorted(preview_lines(text, Kind.LOG), key=lambda line: line.rank) if line.line]
    assert ranked[0] == 2505
    assert ranked.index(2501) < ranked.index(1)
    assert ranked.index(2501) < ranked.index(2)


def test_an_even_text_tells_of_the_errors_of_a_log_and_prose_does_not(stored) -> None:
    told = "the report [ERROR] is closed"
    assert f"2501: {told}" in best(stored(amid("copied {}", told)), Kind.TEXT, count=3)
    prose = "".join(" ".join(random.Random(n).choices("abcdefghijkl", k=12)) + "\n" for n in range(900))
    assert not any(told in line.text for line in preview_lines(stored(f"{prose}{told}\n{prose}"), Kind.TEXT))


def test_the_best_line_is_the_failure_and_none_where_only_statements_are(stored, sample) -> None:
    text = stored(sample("plain_prose") + "src/a.c:3:1: error: expected ';'\n" + sample("plain_prose"))
    assert best_line(preview_lines(text, Kind.TEXT)) == 901
    assert best_line(preview_lines(stored(sample("plain_prose")), Kind.TEXT)) == 1
    assert best_line([PreviewLine("object, 2 keys", 0)]) == best_line([]) == 0


@pytest.mark.parametrize("end", ["\n", ""])
def test_lines_written_over_show_their_last_states_and_those_around_them(stored, end) -> None:
    progress = "\r".join(f"progress {n}%" for n in range(20_000))
    text = stored(f"Collecting\n{progress}\nInstalled\n{progress}{end}")
    assert [line.text for line in preview_lines(text, Kind.TEXT)] == [
        "1: Collecting",
        "2: progress 19999%",
        "3: Installed",
        "4: progress 19999%",
    ]


def test_of_a_few_very_long_lines_each_is_shown_with_its_start_and_end(stored) -> None:
    text = stored(f"one {'x' * 100_000} ONE\ntwo\nthree {'y' * 100_000} THREE\n")
    shown = [line.text for line in preview_lines(text, Kind.TEXT)]
    assert [line[:12] for line in shown] == ["1: one xxxxx", "line 1 ends:", "2: two", "3: three yyy", "line 3 ends:"]
    assert (shown[1][-5:], shown[4][-7:]) == ("x ONE", "y THREE")
    assert len(shown[0]) > 240


def test_an_error_within_a_very_long_line_stands_between_its_start_and_its_end(stored) -> None:
    text = stored(f"start {'x' * 100_000} a.c:3:1: error: lost {'y' * 100_000} end\nlast\n")
    shown = [line.text for line in preview_lines(text, Kind.TEXT)]
    assert [line.split(": ")[0] for line in shown] == ["1", shown[1].split(": ")[0], "line 1 ends", "2"]
    assert shown[1].startswith("1 (column ")
    assert "error: lost" in shown[1]


def test_what_follows_a_colon_ranks_next_to_its_line(stored) -> None:
    text = stored(
        amid("{} INFO fine", "* What went wrong:\nno such task\n9 INFO fine\nKeyError: 'x'\nE       assert 1")
    )
    assert "2502: no such task" in best(text, Kind.LOG, count=5)


# What is not of the text's kind


FOREIGN = {
    "csv_table": Kind.CSV,
    "git_diff": Kind.DIFF,
    "json_lines": Kind.JSON,
    "package_json": Kind.JSON,
    "markdown_book": Kind.MARKDOWN,
    "python_source": Kind.PYTHON,
}


@pytest.mark.parametrize("name", FOREIGN)
def test_an_end_of_another_kind_is_shown(stored, sample, name) -> None:
    text = stored(sample(name) + "job ended early by its owner\n")
    assert detect_kind(text) is FOREIGN[name]
    assert f"{text.line_count}: job ended early by its owner" in best(text, count=5)


@pytest.mark.parametrize("name", FOREIGN)
def test_a_traceback_behind_a_structured_text_is_shown(stored, sample, name) -> None:
    trace = 'Traceback (most recent call last):\n  File "x.py", line 3, in f\n    g()\nOops: gone\n'
    text = stored(sample(name) + trace + "bye\n")
    assert detect_kind(text) is FOREIGN[name]
    assert f"{text.line_count - 1}: Oops: gone" in best(text, count=5)


@pytest.mark.parametrize("name", ["csv_table", "json_lines"])
@pytest.mark.parametrize("line", ["ERROR: export aborted", "the ring vanished"])
def test_a_line_amid_records_that_is_none_is_shown(stored, sample, name, line) -> None:
    text = sample(name).replace("note\nof two lines, and", "note of")
    data = stored(f"{text}{line}\n" + "\n".join(text.split("\n")[1:]))
    assert any(shown.endswith(f": {line}") for shown in best(data, count=5))


@pytest.mark.parametrize("name", FOREIGN)
def test_a_text_that_is_all_of_its_kind_shows_no_error(stored, sample, name) -> None:
    text = stored(sample(name))
    shown = [line.line for line in preview_lines(text, FOREIGN[name]) if line.line and line.lines]
    last = len(sample(name).rstrip().split("\n"))
    assert set(shown) <= {1, last}


def test_rows_and_records_that_hold_words_of_errors_are_not_foreign(stored) -> None:
    table = "id\tlevel\ttext\n" + "".join(f"{n}\tERROR\terror: {n}\n" for n in range(900))
    assert not any(line.line for line in preview_lines(stored(table), Kind.CSV))
    pretty = json.dumps({"a": [{"error: x": "KeyError: 'y'"} for _ in range(900)]}, indent=1)
    assert not any(line.line for line in preview_lines(stored(pretty), Kind.JSON))


def test_a_traceback_quoted_within_a_document_is_not_at_its_end(stored, sample) -> None:
    quoted_trace = "```\nTraceback (most recent call last):\n  File \"a\", line 1\nKeyError: 'x'\n```\n\n"
    text = stored(quoted_trace + sample("markdown_book"))
    assert not any("KeyError" in line.text for line in preview_lines(text, Kind.MARKDOWN))


def test_entries_say_of_how_many_they_are(stored, sample) -> None:
    for name, total in (("python_source", 301), ("markdown_book", 119), ("git_diff", 3)):
        text = stored(sample(name))
        shown = preview_lines(text, detect_kind(text))
        entries = [line for line in shown if line.entries]
        assert entries_left(entries[:2]) == total - 2
    assert entries_left([PreviewLine("1: x", 0, 1)]) == 0


@pytest.mark.parametrize("kind", [kind for kind in Kind if kind is not Kind.BINARY])
@pytest.mark.parametrize("data", ["", "\n" * 5000, "  \n\t\n", "one", b"\xff\xfe", "\x1b[31m\x1b[0m\n", "\r\r\r\n"])
def test_a_text_with_nothing_in_it_shows_little_and_fails_nowhere(stored, kind, data) -> None:
    assert len(preview_lines(stored(data), kind)) <= 2


# Markdown, Python, diffs


def test_markdown_shows_the_top_of_its_contents_with_true_lines(stored, sample) -> None:
    text = sample("markdown_book")
    shown = best(stored(text), count=4)
    assert shown == ["119 headings", "1: # The Harbour Book", "5: ## Chapter 1: of ships", "17: ## Chapter 2: of ships"]
    for line in preview_lines(stored(text), Kind.MARKDOWN)[1:]:
        assert f"{line.line}: {text.splitlines()[line.line - 1]}" == line.text


def test_headings_of_the_upper_levels_are_kept_where_there_are_many(stored) -> None:
    text = "".join(f"### deep {n}\n\n" for n in range(5000)) + "# The end\n"
    lines = preview_lines(stored(text), Kind.MARKDOWN)
    assert lines[0].text == "5,001 headings"
    assert lines[-1].text == "10001: # The end"
    assert len(lines) < 70


def test_python_shows_its_top_definitions_first(stored, sample) -> None:
    text = stored(sample("python_source") + "\n\nclass Last:\n    def method(self):\n        pass\n")
    lines = sorted(preview_lines(text, Kind.PYTHON), key=lambda line: line.rank)
    assert [line.text for line in lines[:3]] == ["303 definitions", "7: class Handler", "11: def handle_error_0"]
    assert not any("method" in line.text for line in lines[:60])


def test_a_diff_shows_its_files_with_counts(stored, sample) -> None:
    assert best(stored(sample("git_diff"))) == [
        "3 files changed, +435 -435",
        "1: src/cart.py +400 -400",
        "1206: src/item.py +30 -30",
        "1301: docs/README.md +5 -5",
    ]


def test_a_unified_diff_without_git_names_its_files_too(stored) -> None:
    text = "--- a.txt\t2026-01-01\n+++ a.txt\t2026-01-02\n@@ -1,2 +1,3 @@\n-old\n+new\n+more\n same\n" * 3
    lines = best(stored(text), Kind.DIFF)
    assert lines[:2] == ["3 files changed, +6 -3", "1: a.txt +2 -1"]


def test_counts_of_a_diff_hold_across_the_blocks_that_it_is_read_in(stored) -> None:
    part = "diff --git a/x b/x\n--- a/x\n+++ b/x\n@@ -1,9 +1,9 @@\n" + "-a\n+b\n" * 900 + "+c\n"
    times = 700
    assert len(part) * times > 3 << 20
    shown = best(stored(part * times), Kind.DIFF, count=2)
    assert shown == [f"{times} files changed, +{901 * times:,} -{900 * times:,}", "1: x +901 -900"]


# JSON


def test_an_object_shows_its_keys_with_types_and_lengths(stored, sample) -> None:
    shown = best(stored(sample("package_json")))
    assert shown[:3] == ["object, 5 keys", '"name": "shop"', '"version": "4.2.0"']
    assert '"scripts": object of 3 {build: string, test: string, lint: string}' in shown
    assert any(line.startswith('"dependencies": object of 140 {@scope/package-0: string') for line in shown)


def test_an_array_within_an_object_shows_the_shape_of_its_elements(stored, sample) -> None:
    shown = best(stored(sample("geojson")))
    assert '"features": array, 9,000 of {type: string, properties: object, geometry: object}' in shown
    assert '"bbox": array, 4 of number' in shown


def test_an_array_shows_which_keys_its_elements_have(stored) -> None:
    text = json.dumps([{"id": n, **({"note": None} if n % 2 else {})} for n in range(900)])
    shown = best(stored(text), Kind.JSON)
    assert shown[:3] == ["array, 900 elements", "each: {id: number, note?: null}", 'first: {"id":0}']


def test_json_lines_show_the_number_of_records_and_their_keys(stored, sample) -> None:
    assert best(stored(sample("json_lines"))) == [
        "JSON lines, 3,000 records",
        "each: {id: number, level: string, message: string}",
        '1: {"id": 0, "level": "info", "message": "step 0"}',
        '3000: {"id": 2999, "level": "info", "message": "step 2999"}',
    ]


def test_errors_among_json_records_of_a_log_are_shown(stored, sample) -> None:
    text = sample("json_lines") + '{"id": 9, "level": "error", "message": "disk gone"}\n' + sample("json_lines")
    shown = best(stored(text), count=3)
    assert shown == [
        "JSON lines, 6,001 records",
        "each: {id: number, level: string, message: string}",
        '3001: {"id": 9, "level": "error", "message": "disk gone"}',
    ]


def test_json_too_large_to_parse_is_told_from_its_head(stored) -> None:
    text = json.dumps({"rows": [{"id": n, "text": "x" * 100} for n in range(50_000)], "end": 1})
    shown = best(stored(text), Kind.JSON)
    assert "too large to parse whole; from its first 262,144 characters:" in shown[0]
    assert re.fullmatch(r'"rows": array, 2,\d\d\d\+ of \{id: number, text: string\}', shown[2])


def test_json_that_does_not_parse_says_so_and_shows_what_does(stored) -> None:
    shown = best(stored('{"a": [1, 2, 3], "b": {"c": tru'), Kind.JSON)
    assert shown[0].startswith("not valid JSON as a whole: ")
    assert '"a": array, 3+ of number' in shown


@pytest.mark.parametrize("text", ["[" * 200_000, '{"a":' * 100_000, '[{"a":' * 3000 + "1" + "}]" * 3000])
def test_json_nested_too_deeply_is_no_failure(stored, text) -> None:
    assert preview_lines(stored(text), Kind.JSON)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
    max_leaves=12,
)


@given(value=st.lists(json_values) | st.dictionaries(st.text(max_size=4), json_values), cut=st.integers(1, 400))
def test_a_head_of_json_closed_is_json(value, cut) -> None:
    head = json.dumps(value, ensure_ascii=False)[:cut]
    msgspec.json.decode(close_json(head))


def test_a_head_of_json_that_ends_within_a_string_is_closed_before_it() -> None:
    assert msgspec.json.decode(close_json('{"a": {"b": 1}, "c": "[{x')) == {"a": {"b": 1}}


# Tables


def test_a_table_shows_header_columns_rows_first_and_last(stored, sample) -> None:
    assert best(stored(sample("csv_table")), count=4) == [
        "4 columns, separated by commas; 2,500 rows and a header",
        "header: id,name,note,price",
        'row 1: 0,Widget "0",a note\u23ceof two lines, and a comma,0.0',
        'row 2,500: 2499,Widget "2499",a note\u23ceof two lines, and a comma,3748.5',
    ]


def test_a_small_table_shows_each_row_once(stored) -> None:
    text = "name\tage\n" + "".join(f"p{n}\t{n}\n" for n in range(8))
    rows = [line.text for line in preview_lines(stored(text), Kind.CSV)][2:]
    assert rows == [f"row {n + 1}: p{n} | {n}" for n in range(8)]


@given(
    rows=st.lists(st.lists(st.text(alphabet='a,"\n ', max_size=5), min_size=2, max_size=3), max_size=12),
    line_end=st.sampled_from(["\n", "\r\n"]),
    chunk_bytes=st.integers(1, 50),
    ended=st.booleans(),
)
def test_records_are_counted_as_the_csv_module_writes_them(rows, line_end, chunk_bytes, ended) -> None:
    import csv  # noqa: PLC0415 (the reference, used here only)

    written = io.StringIO()
    csv.writer(written, lineterminator=line_end).writerows(rows)
    data = written.getvalue().encode()
    data = data if ended else data.removesuffix(line_end.encode())
    chunks = [data[start : start + chunk_bytes] for start in range(0, len(data), chunk_bytes)]
    assert count_records(iter(chunks)) == len(rows)


# Binary content


def png(width: int, height: int) -> bytes:
    return b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR" + struct.pack(">II", width, height) + b"\x08\x02\0\0\0" + bytes(40)


def jpeg(width: int, height: int) -> bytes:
    return (
        b"\xff\xd8\xff\xe0\0\x10JFIF\0"
        + bytes(9)
        + b"\xff\xc0\0\x11\x08"
        + struct.pack(">HH", height, width)
        + bytes(9)
    )


def zip_archive() -> bytes:
    target = io.BytesIO()
    with zipfile.ZipFile(target, "w") as archive:
        archive.writestr("report.txt", "x" * 100)
    return target.getvalue()


def tar_archive() -> bytes:
    target = io.BytesIO()
    with tarfile.open(fileobj=target, mode="w") as archive:
        archive.addfile(tarfile.TarInfo("folder/first.txt"))
    return target.getvalue()


def sqlite_file(folder) -> bytes:
    path = folder / "a.db"
    with sqlite3.connect(path) as database:
        database.execute("create table t (a)")
    database.close()
    return path.read_bytes()


def test_binary_formats_are_told_by_their_magic_numbers(tmp_path, tiny) -> None:
    gzipped = io.BytesIO()
    with gzip.GzipFile("notes.txt", "wb", fileobj=gzipped) as file:
        file.write(b"x")
    assert describe_binary(png(640, 480)) == "PNG image, 640 x 480"
    assert describe_binary(jpeg(32, 16)) == "JPEG image, 32 x 16"
    assert describe_binary(b"GIF89a" + struct.pack("<HH", 3, 4)) == "GIF image, 3 x 4"
    assert describe_binary(zip_archive()) == "zip archive, first entry report.txt"
    assert describe_binary(gzipped.getvalue()) == "gzip data of notes.txt"
    assert describe_binary(tar_archive()) == "tar archive, first entry folder/first.txt"
    assert describe_binary(b"%PDF-1.7\n%\xe2\xe3") == "PDF document, version 1.7"
    assert re.fullmatch(r"SQLite database, 2 pages of [\d,]+ bytes", describe_binary(sqlite_file(tmp_path)))
    assert describe_binary(b"\0asm\1\0\0\0") == "WebAssembly module, version 1"
    assert (
        describe_binary(b"\x7fELF\2\1\1" + bytes(9) + struct.pack("<HH", 3, 62)) == "ELF 64-bit shared object, x86-64"
    )
    model = tiny("llama").read_bytes()[:64]
    assert re.fullmatch(r"GGUF model, version 3, \d+ tensors, \d+ metadata entries", describe_binary(model))
    assert describe_binary(b"\x01\x02\x03\x04") == ""


def test_binary_content_is_described_with_its_size(stored) -> None:
    assert best(stored(png(640, 480)))[0] == "PNG image, 640 x 480, 69 bytes"
    unknown = best(stored(b"\x01\0\x02 a readable string \0\x03" + bytes(50)))
    assert unknown[0] == "unknown format, 74 bytes"
    assert "strings:  a readable string" in unknown


def test_zeros_are_noted(stored) -> None:
    assert [line.text for line in preview_lines(stored(bytes(3_000_000)), Kind.BINARY)] == [
        "3,000,000 bytes, all of them zero"
    ]
    begun = preview_lines(stored(bytes(2_000_000) + b"\1" * 10), Kind.BINARY)
    assert [line.text for line in begun] == ["unknown format, 2,000,010 bytes", "the first 2,000,000 bytes are zero"]


@given(
    st.binary(max_size=64),
    st.sampled_from([b"\x89PNG\r\n\x1a\n", b"GGUF", b"\x7fELF", b"PK\x03\x04", b"\x1f\x8b", b""]),
)
def test_a_truncated_header_is_no_failure(data, magic) -> None:
    assert describe_binary(magic + data) or not magic


# All kinds


def test_what_is_shown_holds_no_control_characters_and_is_clipped() -> None:
    line = "\x1b[31mred\x1b[0m\x07 \x1b]0;title\x07\u202ebidi\u200b\x00 tab\tend\x85" + "x" * 400
    shown = quoted(line)
    assert shown.startswith("red bidi tab end x")
    assert shown.endswith("x…")
    assert len(shown) == 161


def test_a_line_written_over_by_a_progress_bar_shows_its_last_state() -> None:
    assert cleaned("10%\r20%\r100% done\r\n") == "100% done"


@given(st.text(max_size=400), st.integers(0, 400), st.integers(1, 100))
def test_a_clip_holds_what_matters_and_marks_its_cuts(line, around, limit) -> None:
    shown = clipped(line, around=around, limit=limit)
    assert len(shown) <= limit + 2
    if len(line) > limit:
        assert shown.strip("…") in line or "…" in line
        assert shown.startswith("…") or shown.endswith("…")
        if around < len(line):
            assert line[around] in shown


lines_of_text = st.lists(
    st.sampled_from(
        ["# head", "## sub", "```", "E   assert 1", "ERROR x", '{"a": 1}', "a,b,c", "def f():", "+x", "@@ -1 +1 @@"]
    )
    | st.text(max_size=30),
    max_size=40,
)


@settings(max_examples=150)
@given(lines=lines_of_text, kind=st.sampled_from(list(Kind)), line_end=st.sampled_from(["\n", "\r\n", "\r"]))
def test_any_text_of_any_kind_has_a_preview_whose_quotations_are_its_lines(stored, lines, kind, line_end) -> None:
    text = stored(line_end.join(lines))
    shown = preview_lines(text, kind)
    assert in_order(list(shown)) == shown
    for line in shown:
        assert len(line.text) < 400
        assert not re.search(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]", line.text)
        assert 0 <= line.line <= text.line_count
        if line.line and line.lines:
            assert line.line + line.lines <= text.line_count + 1 + (line.lines > 1)


def test_a_large_text_is_previewed_in_bounded_memory(stored) -> None:
    rng = random.Random(5)
    line = "2026-11-30 10:00:00 INFO {}\n"
    text = stored("".join(line.format(rng.getrandbits(200)) for _ in range(200_000)) + "ERROR last\n")
    assert text.ref.size_bytes > 15_000_000
    tracemalloc.start()
    try:
        shown = preview_lines(text, Kind.LOG)
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert any("ERROR last" in line.text for line in shown)
    assert peak_bytes < 8 << 20
