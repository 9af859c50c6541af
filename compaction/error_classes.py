"""What a line of output tells of a failure: the forms of test runners, compilers, tracebacks and logs.

Forms, not words: ``error`` alone says nothing, since names of tests, variables and counters hold it too.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from enum import StrEnum

_MEMORY_LIMIT_BYTES = 8 << 20


class ErrorClass(StrEnum):
    """What a line tells. A frame of a stack is kept only as the location of what it belongs to."""

    SUMMARY = "summary"
    FAILURE = "failure"
    ASSERTION = "assertion"
    LOCATION = "location"
    COMPILER = "compiler error"
    EXCEPTION = "exception"
    COMPLAINT = "complaint of a program"
    MENTION = "mention"
    FATAL = "fatal"
    ERROR = "error"
    FRAME = "frame"
    PYTHON_FRAME = "python frame"

    def rank(self, place: int) -> int:
        """Return the rank of the `place`-th of its class: the first of each class before the second of any.

        What a test, a compiler or a traceback says outranks every line of a log.
        """
        return _BASE_RANKS[self] + 6 * min(place, 10)

    @property
    def has_frames(self) -> bool:
        """Whether the next frame of a stack says where it was."""
        return self in (ErrorClass.ASSERTION, ErrorClass.EXCEPTION, ErrorClass.FAILURE)


_BASE_RANKS = {
    ErrorClass.FAILURE: 0,
    ErrorClass.COMPILER: 0,
    ErrorClass.ASSERTION: 1,
    ErrorClass.EXCEPTION: 1,
    ErrorClass.LOCATION: 2,
    ErrorClass.SUMMARY: 3,
    ErrorClass.COMPLAINT: 4,
    ErrorClass.MENTION: 5,
    ErrorClass.FATAL: 70,
    ErrorClass.ERROR: 72,
    ErrorClass.FRAME: 200,
    ErrorClass.PYTHON_FRAME: 200,
}

LOG_CLASSES = (ErrorClass.FATAL, ErrorClass.ERROR)
LAST_TEST_RANK = 69
"""The worst rank of what outranks a log line."""

_LEVELS = r"(?:^|[\s\[(|<:])(?:{})(?:[\s\]):|>]|$)"
_LEVEL_FIELDS = r"\b(?:level|lvl|severity)\"?[=:] ?\"?(?:{})\b"
_TYPES = r"(?:str|string|int|bool|any|unknown|object|null|None|nil|true|false|Error|Exception)(?: \| \w+)?"

# RE2 patterns, in the order in which they decide. None: the line tells nothing, whatever else is in it.
_FORMS: tuple[tuple[ErrorClass | None, tuple[str, ...]], ...] = (
    (
        None,
        (
            r"^\s*(?:PASS(?:ED)?|ok|[\x{2713}\x{2714}\x{221a}])(?:\s|:|$)",
            r"\bPASSED\b|\bXFAIL\b|\.\.\. (?:ok|skipped|ignored)$",
            rf"^\s*[\"']?\w*[Ee]rror[\"']?\??: {_TYPES} *[,;={{}})]*(?: .*)?$",
            r"^\s+at (?:node:|java\.|javax\.|sun\.|jdk\.|org\.junit|.*node_modules/)",
        ),
    ),
    (ErrorClass.PYTHON_FRAME, (r'^[\s|]*File "[^"]+", line \d+',)),
    (ErrorClass.FRAME, (r"^\s+at \S.*:\d+|^\s+--> \S+:\d+:\d+",)),
    (
        ErrorClass.SUMMARY,
        (
            r"^\d+ failed\b|^=+ .*\b[1-9]\d* (?:failed|errors?)\b|^FAILED \(|^test result: FAILED|^# fail +[1-9]",
            r"^Tests?(?: Suites)?: .*\b[1-9]\d* failed|^\s*[1-9]\d* failing\b|Tests run:.*(?:Failures|Errors): [1-9]",
            r"\bBUILD FAILED\b|\bBUILD FAILURE\b|^\d+ tests? completed, [1-9]\d* failed|^Failed! +- Failed: +[1-9]",
            r"^Tests: \d+, .*(?:Failures|Errors): [1-9]|% tests passed, [1-9]\d* tests? failed",
            r"problems? \([1-9]\d* errors?,",
        ),
    ),
    (
        ErrorClass.ASSERTION,
        (
            r"^E {2,}\S|^\s+\w+_test\.go:\d+: |\bpanicked at\b|^\s*assertion .*failed|Failure/Error:",
            r"^\s+(?:Expected|Received|expected|received|actual|but was)\b[^:]{0,40}: *\S|^\s+(?:left|right): ",
            r"^[\w./\\-]+:\d+: Failure$|Assertion\b.*\bfailed|^Failed asserting that|^\s*Error Message:$",
            r"<(?:failure|error)\b[^>]* message=",
        ),
    ),
    (ErrorClass.LOCATION, (r"^[\w./\\-]+\.\w+:\d+: \w+$",)),
    (
        ErrorClass.FAILURE,
        (
            r"^(?:FAILED|ERROR) \S+\.\w+(?:::|$| - )|^\s*--- FAIL: |^not ok \d|^(?:FAIL|ERROR): \w.* \(",
            r"^\s*\x{25cf} \S|^test .+ \.\.\. FAILED|^\[  FAILED  \] \S+\.\S|<<< (?:FAILURE|ERROR)!",
            r"^\S+ > .+ FAILED$|^\s+Failed \S+.* \[[\d<].*s\]$|^\d+\) [\w\\]+::\w+",
            r"\*\*\*(?:Failed|Exception|Timeout)\b",
        ),
    ),
    (
        ErrorClass.MENTION,
        (r"^_{3,} \S.* _{3,}$|^> {2,}\S|\bFAILED\b|^FAIL\b|^\s*> *\d+ \||^ *[\x{2715}\x{2717}\x{2718}\x{d7}] ",),
    ),
    (
        ErrorClass.COMPILER,
        (
            r":\d+:(?:\d+:)? (?:fatal |internal )?(?:compiler )?error\b|\(\d+,\d+\): error\b|\berror [A-Z]+\d+: ",
            r"^error\[\w+\]: |undefined reference to|^e: \S|^\s+\d+:\d+ +(?:error|\x{2716}) ",
            r"^ERROR in \S|^Module not found: |:\d+:\d+: (?:E\d{4}|F\d{3,4}|E9\d\d)\b",
            r"^(?:F\d{3}|E9\d\d) \S|^\S+\.go:\d+:\d+: \S",
        ),
    ),
    (
        ErrorClass.EXCEPTION,
        (
            r"^(?:Uncaught )?[\w.$]*(?:Error|Exception|Interrupt|Exit)\b(?: \[\w+\])?(?::\s|:?$)",
            r"^\s+(?:[a-z_]\w*\.)+\w*(?:Error|Exception)(?::\s|:?$| at )|\((?:\w+::)*[A-Z]\w*(?:Error|Exception)\)$",
            r"^(?:PHP )?(?:Fatal|Parse) error: |[Oo]ut of memory: Kill|\boom-kill",
            r"^Exception in |^Caused by: |^panic: |^fatal error: |\bAssertionError\b|Segmentation fault|core dumped",
            r"^Killed$|\bUnhandled\w* .*(?:rejection|exception)",
        ),
    ),
    (
        ErrorClass.COMPLAINT,
        (
            r"^(?:[\w./-]+: )?(?:[Ee]rror|ERROR|FATAL|fatal): \S|npm (?:ERR!|error) |\*\*\* \[.*Error",
            r"^[\x{2502}|] *Error: \S|^\* What went wrong:|: [Cc]ommand not found$",
            r": Permission denied\b|: No such file or directory|: cannot open\b",
            r"^psql:\S*:\d+: (?:ERROR|FATAL): ",
        ),
    ),
    (
        ErrorClass.FATAL,
        (
            _LEVELS.format("FATAL|CRITICAL|SEVERE|PANIC|EMERG") + r"|^F\d{4} \d\d:|[Oo]ut of memory",
            r"^F/\S+ *\(|\bFATAL EXCEPTION\b",
            _LEVEL_FIELDS.format("fatal|critical|panic|FATAL|CRITICAL") + r"|[\[<](?:fatal|crit|emerg|alert)[\]>]",
        ),
    ),
    (
        ErrorClass.ERROR,
        (
            _LEVELS.format("ERROR") + r"|^E\d{4} \d\d:|^E/\S+ *\(|^\d\d-\d\d [\d:.]+ +\d+ +\d+ E ",
            _LEVEL_FIELDS.format("error|ERROR") + r"|[\[<]err(?:or)?[\]>]|command not found$",
            r"\bHTTP/[\d.]+\"? 5\d\d\b|\b5\d\d (?:Internal Server Error|Bad Gateway|Service Unavailable|Gateway Time)",
        ),
    ),
)

_HARMLESS = (
    r"(?i)\b(?:0|no|zero|without)\s+(?:\w+\s+)?(?:errors?|failed|failures?|failing|fatal)\b"
    r"|\b(?:errors?|failed|failures?|fail)(?:_\w+)?\"?\s*[=:]\s*0\b"
)


_SLIGHT = (ErrorClass.ERROR, ErrorClass.COMPLAINT, ErrorClass.MENTION, ErrorClass.FRAME, ErrorClass.PYTHON_FRAME)


class ErrorForms:
    """The forms, compiled by RE2: `candidates` finds lines worth a look, `grave_candidates` without those of logs."""

    def __init__(self) -> None:
        import re2  # noqa: PLC0415 (loads a native library)

        options = re2.Options()
        options.max_mem = _MEMORY_LIMIT_BYTES
        options.log_errors = False
        options.never_nl = True
        told = [(error_class, pattern) for error_class, patterns in _FORMS if error_class for pattern in patterns]
        grave = [pattern for error_class, pattern in told if error_class not in _SLIGHT]
        self.candidates = re2.compile(_anywhere(pattern for _, pattern in told), options)
        self.grave_candidates = re2.compile(_anywhere(grave), options)
        self._harmless = re2.compile(_HARMLESS.encode(), options)
        self._classes = [error_class for error_class, patterns in _FORMS for _ in patterns]
        self._set = re2.Set.SearchSet(options)
        for _, patterns in _FORMS:
            for pattern in patterns:
                self._set.Add(pattern)
        self._set.Add(_HARMLESS)
        self._set.Compile()

    def classify(self, line: bytes) -> ErrorClass | None:
        """Return what a line tells of a failure by its form, if anything."""
        found = self._set.Match(line) or []
        if len(self._classes) in found:
            found = self._set.Match(self._harmless.sub(b"", line)) or []
        first = min(found, default=len(self._classes))
        return self._classes[first] if first < len(self._classes) else None


def _anywhere(patterns: Iterable[str]) -> bytes:
    """Return one pattern for all, to search in lines; what follows a carriage return begins anew."""
    return ("(?m)" + _LINE_START.sub(r"(?:^|\\r)", "|".join(patterns))).encode()


_LINE_START = re.compile(r"(?<!\[)\^")


def depends_on_others(line: bytes) -> bool:
    """Whether the form of a line is met elsewhere too, so that the lines around it decide."""
    return line.startswith(b"> ") or _is_logged_by_go_test(line)


def is_borne_out(line: bytes, before: Sequence[bytes], after: Sequence[bytes]) -> bool:
    """Whether the lines around one that depends on them agree that it tells of a failure."""
    if line.startswith(b"> "):  # quoted mail, unless what was asserted follows
        return any(other.startswith(b"E  ") for other in after)
    # What a test logs: above its result where it is told as it runs, below the result else.
    result = _nearest_mark(reversed(before))
    if not result.startswith(b"--- "):
        result = _nearest_mark(after)
    return not result.startswith((b"--- PASS", b"--- SKIP"))


def _is_logged_by_go_test(line: bytes) -> bool:
    return b"_test.go:" in line and line[:1].isspace()


def _nearest_mark(lines: Iterable[bytes]) -> bytes:
    stripped = (line.lstrip() for line in lines)
    return next((line for line in stripped if line.startswith((b"--- ", b"=== "))), b"")


def exception_after_frames(frame: bytes, after: Sequence[bytes]) -> int:
    """Return how many lines after a frame of a Python traceback its exception stands, 0 where that is not to be seen.

    It is the first line that is indented less than the frames, whatever its class is called.
    """
    indent = _indent(frame)
    for ahead, line in enumerate(after, start=1):
        if not line.strip() or line.lstrip().startswith(b'File "'):
            return 0
        if _indent(line) < indent:
            return ahead if _EXCEPTION_NAME.match(line) else 0
    return 0


def _indent(line: bytes) -> int:
    return len(line) - len(line.lstrip())


_EXCEPTION_NAME = re.compile(rb"\s*[\w.]+(?::|$)")
# A date or a time of day takes a fifth of a short log line's tokens; the line's number tells it apart.
_CLOCK = re.compile(
    r"\W{0,2}(?:\d{4}[-/]\d\d[-/]\d\d[T ]\s*|[A-Z][a-z]{2} [ \d]\d )?"
    r"\d\d:\d\d:\d\d(?:[.,]\d+)?(?:Z|[+-]\d\d:?\d\d)?\W{0,3}\s*"
)
_WORD = re.compile(rb"\w+")
_HEX = re.compile(rb"(?:0x)?[0-9a-fA-F]+")
_NUMBER = re.compile(rb"[0-9]+")


def without_clock(line: str) -> str:
    """Return a line of a log without date and time at its start, the cut marked with an ellipsis."""
    clock = _CLOCK.match(line)
    return f"…{line[clock.end() :]}" if clock and clock.end() < len(line) else line


def without_numbers(line: bytes) -> bytes:
    """Return the line with each number as 0: cheap, and the same for most lines that are alike."""
    return _NUMBER.sub(b"0", line)


def shape_of(line: bytes) -> bytes:
    """Return the line without what changes from one occurrence to the next: numbers, hexadecimal ids and paths."""
    parts = (b"/" if b"/" in part or b"\\" in part else part for part in line.split())
    return b" ".join(part if part.isalpha() else _WORD.sub(_shape_of_word, part) for part in parts)


def _shape_of_word(word: re.Match[bytes]) -> bytes:
    found = word[0]
    if found.isalpha() or not _NUMBER.search(found):
        return found
    return b"#" if _HEX.fullmatch(found) else _NUMBER.sub(b"#", found)
