"""What kind of text a stored blob is, told from samples of its head, middle and tail; a name only breaks a tie."""

from __future__ import annotations

import csv
import io
import re
from collections import Counter
from collections.abc import Iterator
from enum import StrEnum
from itertools import pairwise
from pathlib import PurePath
from typing import TYPE_CHECKING

import msgspec

from .quoting import strip_ansi

if TYPE_CHECKING:
    from .stored_text import StoredText

HEAD_BYTES = 1 << 16
SAMPLE_BYTES = 1 << 14
_CLASSIFIED_CHARS = 400
_MOST_SAMPLED_LINES = 600
_WRITTEN_OVER_BYTES = 4 << 20
_HELD_BYTES = 1 << 20


class Kind(StrEnum):
    """What a stored text is; the value is how it is named to the model."""

    TEXT = "text"
    LOG = "log or test output"
    TRACEBACK = "traceback or compiler output"
    JSON = "JSON"
    MARKDOWN = "Markdown"
    DIFF = "diff"
    CSV = "CSV"
    PYTHON = "Python"
    BINARY = "binary"


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """Parts of a text, without colour codes and line numbers. `numbered`: lines stood behind ``<number>`` and a tab,
    as `read` and ``cat -n`` print them. `whole`: the head is all there is."""

    head: str
    middle: str
    tail: str
    numbered: bool
    whole: bool

    def lines(self) -> list[str]:
        """Return the lines that are not blank, of all three parts, each cut to what is looked at."""
        parts = (self.head,) if self.whole else (self.head, self.middle, self.tail)
        found = []
        for part in parts:
            shown = [line[:_CLASSIFIED_CHARS] for line in part.split("\n") if line and not line.isspace()]
            found += shown[:_MOST_SAMPLED_LINES]
        return found


NUMBERED = re.compile(r"(?m)^ *[0-9]{1,9}\t")
_NUMBERED_BYTES = re.compile(NUMBERED.pattern.encode())
_READ_FOOTER = re.compile(r"(?ms)^\[lines? [0-9].*\Z")
_SUFFIXES = {
    ".md": Kind.MARKDOWN,
    ".markdown": Kind.MARKDOWN,
    ".py": Kind.PYTHON,
    ".pyi": Kind.PYTHON,
    ".csv": Kind.CSV,
    ".tsv": Kind.CSV,
    ".log": Kind.LOG,
    ".diff": Kind.DIFF,
    ".patch": Kind.DIFF,
    ".json": Kind.JSON,
    ".jsonl": Kind.JSON,
    ".ndjson": Kind.JSON,
}


def detect_kind(text: StoredText, *, name: str = "") -> Kind:
    """Return what `text` is by its content. `name` decides where the content says nothing."""
    if text.is_binary:
        return Kind.BINARY
    sample = take_sample(text)
    lines = sample.lines()
    if not lines:
        return Kind.TEXT
    found = _by_content(sample, lines)
    return found or _SUFFIXES.get(PurePath(name).suffix.lower(), Kind.TEXT)


def _by_content(sample: Sample, lines: list[str]) -> Kind | None:
    if looks_like_json(sample.head, whole=sample.whole):
        return Kind.JSON
    if _is_diff(lines):
        return Kind.DIFF
    logged = _share(_LOG_LINE, lines)
    if logged < 0.5 and csv_delimiter(sample.head, whole=sample.whole):
        return Kind.CSV
    scores = {
        Kind.LOG: logged + 0.5 * any(_TEST_RUN.match(line) for line in lines),
        Kind.TRACEBACK: 3 * _share(_TRACE_LINE, lines),
        Kind.MARKDOWN: _markdown_score(sample),
        Kind.PYTHON: _python_score(lines),
    }
    kind = max(scores, key=lambda one: scores[one])
    return kind if scores[kind] >= 0.25 else None


def take_sample(text: StoredText) -> Sample:
    """Read the head, and a part of the middle and of the tail where the head is not all of it."""
    head = first_bytes(text.chunks(), HEAD_BYTES + 1)
    if _is_written_over(head):
        head = first_bytes(last_states(up_to(text.chunks(), _WRITTEN_OVER_BYTES)), HEAD_BYTES + 1)
        whole = len(head) <= HEAD_BYTES and text.ref.size_bytes <= _WRITTEN_OVER_BYTES
    else:
        whole = len(head) <= HEAD_BYTES
    head = head[:HEAD_BYTES]
    middle, tail = (b"", b"") if whole else (_middle(text), tail_bytes(text, SAMPLE_BYTES))
    parts = [_as_shown(part) for part in (head, middle, tail)]
    numbered = _is_numbered(parts[0], parts[2] or parts[0])
    if numbered:
        parts = [NUMBERED.sub("", _READ_FOOTER.sub("", part)) for part in parts]
    return Sample(head=parts[0], middle=parts[1], tail=parts[2], numbered=numbered, whole=whole)


def without_line_numbers(block: bytes) -> bytes:
    """Return whole lines without the numbers before them."""
    return _NUMBERED_BYTES.sub(b"", block)


def first_bytes(chunks: Iterator[bytes], size_bytes: int) -> bytes:
    """Return the first bytes of `chunks`, reading no further than needed."""
    taken = bytearray()
    for chunk in chunks:
        taken += chunk[: size_bytes - len(taken)]
        if len(taken) >= size_bytes:
            break
    return bytes(taken)


def up_to(chunks: Iterator[bytes], size_bytes: int) -> Iterator[bytes]:
    """Yield `chunks` until `size_bytes` bytes have come."""
    for chunk in chunks:
        yield chunk[:size_bytes]
        size_bytes -= len(chunk)
        if size_bytes <= 0:
            break


def last_states(chunks: Iterator[bytes]) -> Iterator[bytes]:
    """Yield a text without the states of its lines that were written over behind a carriage return.

    A line of megabytes without one is given out as it comes.
    """
    pending = b""
    for chunk in chunks:
        *lines, pending = (pending + chunk).split(b"\n")
        if lines:
            yield b"\n".join([*map(_last_state, lines), b""])
        if len(pending) > HEAD_BYTES:
            # A carriage return at the end may belong to a line feed; what was before it stays until more is known.
            pending = _last_state(pending, ended=False)
        if len(pending) > _HELD_BYTES:
            yield pending
            pending = b""
    if pending:
        yield _last_state(pending)


def _last_state(line: bytes, *, ended: bool = True) -> bytes:
    end = len(line.rstrip(b"\r"))
    start = line.rfind(b"\r", 0, end) + 1
    return line[start : end if ended else len(line)]


def _is_written_over(head: bytes) -> bool:
    return head.count(b"\r") > head.count(b"\r\n")


def _as_shown(part: bytes) -> str:
    """Return a part of a text without colour codes, and of what was written over only the last state."""
    if b"\r" in part:
        part = b"".join(last_states(iter((part,))))
    return strip_ansi(part.decode(errors="replace"))


def tail_bytes(text: StoredText, size_bytes: int) -> bytes:
    """Return the last bytes of the text, a line's start where the last lines are short."""
    if text.line_count <= 1 and text.encoding.unit_bytes == 1:
        return first_bytes(text.chunks(skip_bytes=max(0, text.ref.size_bytes - size_bytes)), size_bytes)
    mean_bytes = text.ref.size_bytes // max(1, text.line_count) + 1
    from_line = max(1, text.line_count - size_bytes // mean_bytes)
    kept = b""
    for chunk in text.chunks(from_line=from_line):
        kept = (kept + chunk[-size_bytes:])[-size_bytes:]
    return kept


def _middle(text: StoredText) -> bytes:
    if text.line_count <= 1:
        return first_bytes(text.chunks(skip_bytes=text.ref.size_bytes // 2), SAMPLE_BYTES)
    return first_bytes(text.chunks(from_line=text.line_count // 2), SAMPLE_BYTES)


def _is_numbered(head: str, tail: str) -> bool:
    """Whether lines are numbered one by one, by `read` (its footer ends the text) or padded, as ``cat -n`` does.

    A table whose first column counts its rows has neither.
    """
    lines = head.split("\n", 20)[:20]
    numbers = [int(mark[0]) for line in lines if (mark := NUMBERED.match(line))]
    if len(numbers) < 2 or any(later - number != 1 for number, later in pairwise(numbers)):
        return False
    return lines[0].startswith(" ") or _READ_FOOTER.search(tail) is not None


# JSON

_JSON_START = re.compile(r'\s*(?:\{\s*["}]|\[\s*(?:[\[{"\]]|-?[0-9]|true|false|null))')
_JSON_STRING = re.compile(r'"(?:[^"\\\n]|\\.)*"?')
_JSON_BARE = re.compile(r"(?:[\[\]{}:,\s]|-?[0-9][0-9.eE+-]*|true|false|null|NaN)*+")
_JSON_SHARE = 0.7
_LONGEST_WORD = 5  # a head may be cut within a word


def looks_like_json(head: str, *, whole: bool) -> bool:
    """Whether a text that begins with `head` is JSON, or JSON in lines."""
    head = head.removeprefix("\ufeff")
    if not _JSON_START.match(head):
        return False
    if json_records(head, whole=whole):
        return True
    bare = _JSON_BARE.match(_JSON_STRING.sub("0", head))
    if bare is None or not bare.string[bare.end() + (0 if whole else _LONGEST_WORD) :]:
        return bare is not None
    # Something else may follow the end of the value on a line of its own.
    value = bare[0].rstrip(" \t")
    return value.endswith(("}\n", "]\n")) and bare.end() >= _JSON_SHARE * len(bare.string)


def json_records(head: str, *, whole: bool) -> list[object]:
    """Return the values of a text with a JSON object or array on each line; none where it is not such a text."""
    lines = head.split("\n") if whole else head.split("\n")[:-1]
    lines = [line for line in lines if line and not line.isspace()][:100]
    if len(lines) < 2 or not all(line.lstrip()[0] in "{[" for line in lines):
        return []
    try:
        return [msgspec.json.decode(line) for line in lines]
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return []


# Diffs

_HUNK = re.compile(r"@@+ -[0-9]+(?:,[0-9]+)? .*@@")
_DIFF_LINE = re.compile(
    r"[ +\-]|@@|diff |index |\\ |(?:new|deleted) file|similarity|rename|old mode|commit |Author:|Date:"
)


def _is_diff(lines: list[str]) -> bool:
    if not any(_HUNK.match(line) or line.startswith("diff --git ") for line in lines):
        return False
    return _share(_DIFF_LINE, lines) >= 0.8


# Logs, test output, traces

_LOG_LINE = re.compile(
    r"\[?\(?[0-9]{4}[-/][0-9]{2}[-/][0-9]{2}[T ][0-9]{2}:[0-9]{2}"
    r"|\[?[0-9]{2}:[0-9]{2}:[0-9]{2}\b|[A-Z][a-z]{2} [ 0-9]?[0-9] [0-9]{2}:[0-9]{2}:[0-9]{2} "
    r"|[IWEF][0-9]{4} [0-9]{2}:|\[ *[0-9]+\.[0-9]{3,6}\] "
    r"|\W{0,2}(?:TRACE|DEBUG|INFO|NOTICE|WARN|WARNING|ERROR|FATAL|CRITICAL)\b|(?:debug|info|warn|error)[:\]]"
    r"|.{0,60}\s\[?(?:TRACE|DEBUG|INFO|NOTICE|WARN|WARNING|ERROR|FATAL|CRITICAL)\b|(?:time|level|ts)=\S+ "
    r"|.*\b(?:PASSED|FAILED|SKIPPED|XFAIL|ok)\s*(?:\[ *[0-9]+%\])?$|(?:not )?ok [0-9]+|\s*--- (?:PASS|FAIL|SKIP)"
    r"|=== (?:RUN|PAUSE|CONT)|\s+[✓✔✕✗\u00d7√] |(?:PASS|FAIL)(?:\s|$)|ok\s+\S+\s+(?:[0-9.]+s|\(cached\))"
    r"|\?\s+\S+\s+\[no test files\]|\s+(?:Passed|Failed) \S.* \[.*s\]$|\s*[0-9]+/[0-9]+ Test +#[0-9]+: "
)
_TEST_RUN = re.compile(
    r"=+ test session starts =+|=+ .*\b[0-9]+ (?:passed|failed|error).* in [0-9.]+s"
    r"|test result: |running [0-9]+ tests?$"
    r"|Tests?( Suites)?: +.*[0-9]+ total|TAP version|Ran [0-9]+ tests? in |--- FAIL: |FAILED \(\w+="
    r"|npm (?:ERR!|error) |ok\s+\S+\s+(?:[0-9.]+s|\(cached\))|FAIL\t"
)
_TRACE_LINE = re.compile(
    r'Traceback \(most recent call last\)|\s+File ".+", line [0-9]+|[\w.]+(?:Error|Exception)(?::|$)'
    r"|\s+at .+[(:].*[0-9]+\)?$|Caused by: |Exception in thread |panic: |goroutine [0-9]+ \[|thread '.*' panicked at"
    r"|[^\s:][^:]*:[0-9]+(?::[0-9]+)?: (?:(?:fatal )?error|warning|note)\b|error(?:\[E[0-9]+\])?: |warning: "
    r"|\s+--> .+:[0-9]+:[0-9]+|\S+\([0-9]+,[0-9]+\): (?:error|warning) |make(?:\[[0-9]+\])?: \*\*\* |\s*[0-9]* \|"
)


def _share(pattern: re.Pattern[str], lines: list[str]) -> float:
    return sum(pattern.match(line) is not None for line in lines) / len(lines)


# Markdown and Python

_HEADING = re.compile(r"(#{1,6}) +\S")
_MARKDOWN_LINE = re.compile(
    r"\s*(?:[-*+] |[0-9]{1,3}[.)] |>|`{3,}|~{3,}|\|.*\|\s*$)"
    r"|.*(?:\[[^\]]{1,200}\]\([^)]{1,300}\)|\*\*[^*]{1,200}\*\*|`[^`]{1,80}`)"
)
_CODE_LINE = re.compile(
    r"\s*(?:- )?[\w./$\"'\[\]-]+:(?: +[^\s]{1,60}(?: #.*)?)?$|\s*[\w.$\[\]\"'-]+ *(?:[:+?]?=)|.*[{;]$"
    r"|\s*[}\])]+[;,)]*$"
    r"|\s*(?:if|for|while|case|do|done|fi|esac|then|else|exec|export|echo|set|cd|sudo|source|import|from|def|class"
    r"|return|local|function|include|require|use|var|let|const|fn|pub|int|void|run|apt|pip|mkdir|rm|cp|mv)\b"
    r"(?! [a-z]+ [a-z]+ [a-z]+ [a-z]+)"
)
_PYTHON_LINE = re.compile(
    r"\s*(?:(?:async )?def \w+\(|class \w+.*:|import [\w., ]+$|from [\w.]+ import |@\w|else:|try:"
    r"|(?:if|elif|for|while|with|except)\b.*:$|return\b|raise \w|assert |yield\b|self\.\w+|\"\"\"|[\w.]+ (?:\+=|=) )"
)
_PYTHON_SIGN = re.compile(r"(?:async )?def \w+\(.*|class \w+.*:$|import [\w., ]+$|from [\w.]+ import ")


def _markdown_score(sample: Sample) -> float:
    """Headings over prose and lists; a comment of a program or a configuration stands over its code."""
    lines = [line[:_CLASSIFIED_CHARS] for line in sample.head.split("\n")[:_MOST_SAMPLED_LINES]]
    headings, comments, alone, deeper, told, code, others = 0, 0, 0, 0, 0, 0, 0
    fence, prose = False, False
    for before, line, after in zip(["", *lines], lines, [*lines[1:], ""], strict=False):
        if line.lstrip().startswith(("```", "~~~")):
            fence = not fence
        mark = _HEADING.match(line)
        if fence or not line.strip() or mark:
            prose = False
            if mark and not fence:
                # Two of the same level one upon the other are a comment.
                is_comment = any((other := _HEADING.match(near)) and other[1] == mark[1] for near in (before, after))
                headings, comments = headings + (not is_comment), comments + is_comment
                is_alone = not before.strip() and not after.startswith("#")
                alone += is_alone
                deeper += is_alone and len(mark[1]) > 1
            continue
        # A paragraph is told by its first line; those that follow it belong to it.
        is_code = _CODE_LINE.match(line) is not None
        prose = not is_code and (prose or _MARKDOWN_LINE.match(line) is not None or _is_prose(line))
        others, told, code = others + 1, told + prose, code + is_code
    if not headings or comments > headings or code * 2 > others:
        return 0.0
    marked = _share(_MARKDOWN_LINE, [line for line in lines if line.strip()])
    if alone and ((alone >= 2 and deeper) or marked >= 0.1):
        return 0.4 + marked
    return 0.4 + told / others / 2 if told >= max(1, 0.6 * others) and headings <= 2 * told else 0.0


def _is_prose(line: str) -> bool:
    """Whether a line reads as the first of a paragraph, and not as a command or a setting."""
    words = line.split()
    first = words[0].lstrip("\"'(*_\u201c\u2018\u00ab")
    if not first or not (first[0].isupper() or ord(first[0]) > 0x2E7F):
        return False
    if ord(first[0]) > 0x2E7F:  # scripts without capitals, often without blanks
        return True
    if len(first) > 1 and first.isupper():
        return False
    return len(words) >= 6 or (len(words) >= 2 and line.rstrip()[-1] in ".!?:,;\"')*_\u201d\u2026")


def _python_score(lines: list[str]) -> float:
    signs = sum(_PYTHON_SIGN.match(line) is not None for line in lines)
    return _share(_PYTHON_LINE, lines) if signs >= 1 else 0.0


# Tables

_LONGEST_CELL_CHARS = 4000
_COMMA_CLOCK = re.compile(r"(:[0-9]{2}),([0-9]{3})\b")


def csv_delimiter(head: str, *, whole: bool) -> str:
    """Return what separates the columns of a table that begins with `head`; empty where it is no table.

    A table has the same number of columns in nearly every record. Of two columns it takes more records to tell them
    from sentences with a comma.
    """
    head = _COMMA_CLOCK.sub(r"\1.\2", head)
    for delimiter in "\t,;|":
        rows = csv_rows(head, delimiter, whole=whole)
        if len(rows) < 3:
            continue
        columns, agreeing = Counter(map(len, rows)).most_common(1)[0]
        if columns == 2 and not any(row[-1].strip() for row in rows):  # statements, each with its end
            continue
        cells = [cell for row in rows for cell in row[1:]]
        indented = sum(not row[0].strip() for row in rows)
        spaced = sum(cell.startswith(" ") for cell in cells)
        longest = max(len(cell) for row in rows[:50] for cell in row)
        if columns < 2 or agreeing < 0.9 * len(rows) or (columns == 2 and len(rows) < 5):
            continue
        if indented * 2 > len(rows) or longest > _LONGEST_CELL_CHARS:
            continue
        if delimiter == "\t" or spaced * 2 < len(cells):
            return delimiter
    return ""


def csv_rows(head: str, delimiter: str, *, whole: bool) -> list[list[str]]:
    """Return the complete records at the start of a text, without blank ones; none where the csv module refuses."""
    rows: list[list[str]] = []
    try:
        for row in csv.reader(io.StringIO(head, newline=""), delimiter=delimiter, strict=False):
            if row:
                rows.append(row)
            if len(rows) > 200:
                break
    except csv.Error:
        return []
    if not whole and rows and len(rows) <= 200:
        rows.pop()
    return rows
