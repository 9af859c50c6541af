"""The lines that tell what went wrong, and those that only look as if they did."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chapbook.compaction.error_classes import ErrorClass, shape_of
from chapbook.compaction.error_lines import ErrorScan


def scan(text: str | bytes, *, block_bytes: int = 1 << 20):
    data = text if isinstance(text, bytes) else text.encode()
    found = ErrorScan()
    for start in range(0, len(data), block_bytes):
        found.feed(data[start : start + block_bytes])
        found.check_integrity()
    return found.finish()


def told(text: str) -> list[str]:
    return [error.text for error in scan(text)]


@pytest.mark.parametrize(
    ("name", "first_lines"),
    [
        (
            "failing_pytest",
            [
                (3999, "FAILED tests/shop/test_cart.py::test_total_of_cart - AssertionError: assert 7..."),
                (3993, "E       AssertionError: assert 7 == 8"),
                (3997, "tests/shop/test_cart.py:41: AssertionError"),
            ],
        ),
        (
            "cargo_output",
            [
                (906, "test parser::tests::rounds_half_up ... FAILED"),
                (911, "thread 'parser::tests::rounds_half_up' panicked at src/parser.rs:212:9:"),
                (912, "assertion `left == right` failed"),
            ],
        ),
        (
            "go_output",
            [
                (1003, "--- FAIL: TestRetryStopsOnError (0.02s)"),
                (1002, "    retry_test.go:88: got 4 attempts, want 3"),
            ],
        ),
        (
            "jest_output",
            [
                (305, "  \u25cf rounds prices"),
                (309, "    Expected: 12.35"),
                (317, "      at Object.toBe (src/price.test.js:11:25)"),
                (310, "    Received: 12.34"),
            ],
        ),
        (
            "java_trace",
            [
                (123, 'Caused by: java.sql.SQLException: relation "orders" does not exist'),
                (124, " at com.shop.db.Orders.load(Orders.java:118)"),
            ],
        ),
        (
            "python_trace",
            [
                (371, "app.errors.ConfigMissing: timeout_s is not set; add it to app.toml"),
                (369, '  File "/srv/app/main.py", line 7, in main'),
                (184, "KeyError: 'timeout_s'"),
            ],
        ),
        (
            "gcc_output",
            [
                (
                    603,
                    "src/btree.c:412:9: error: 'right' undeclared (first use in this function); did you mean 'height'?",
                )
            ],
        ),
    ],
)
def test_what_failed_and_where_comes_first(sample, name, first_lines) -> None:
    found = scan(sample(name))
    assert [(error.line, error.text) for error in found[: len(first_lines)]] == first_lines


@pytest.mark.parametrize("name", ["csv_table", "markdown_book", "plain_prose", "json_lines", "geojson", "package_json"])
def test_texts_without_a_failure_tell_of_none(sample, name) -> None:
    assert scan(sample(name)) == []


@pytest.mark.parametrize(
    "line",
    [
        "0 errors",
        "Found 0 errors in 31 files",
        "no errors found: all is well",
        "error_count=0",
        "errors: 0, warnings: 3",
        "12 passed, 0 failed in 3.2s",
        "=========== 3982 passed, 0 failed, 0 errors in 41.52s ===========",
        "tests/test_x.py::test_error_handling PASSED [ 12%]",
        "PASSED tests/test_x.py::test_error_handling - error: expected",
        "PASS src/error.test.js",
        "test errors::tests::error_is_shown ... ok",
        "ok  \texample.org/errors\t0.1s",
        "test result: ok. 900 passed; 0 failed; 0 ignored",
        "# fail 0",
        "error_count = error_limit",
        "    error = compute(error)",
        "  error: string;",
        "error: str",
        "error?: Error,",
        "if error:",
        "the error was found in time",
        'log.error("could not open")',
        "let errors = vec![];",
        "> quoted mail that says nothing",
        ">   more of the mail",
        "Tests:       301 passed, 301 total",
        "src/a.c:3:17: warning: unused variable 'error'",
        "[INFO] no ERROR seen",
        "class ErrorLine(Struct):",
        "ERROR_LIMIT 12",
        "  Passed CartTests.Failed_orders [3 ms]",
        "  12:3  warning  'error' is assigned a value but never used  no-unused-vars",
        "npm warn deprecated error@1.0.0: fatal bug, upgrade",
        "src/m.py:3:0: C0116: Missing function docstring",
        "src/m.py:3:80: E501 Line too long",
        "1) do this first",
        "GET /500 200",
        "HTTP/1.1 200 OK",
        "\u2716 9 problems (0 errors, 9 warnings)",
        "> Task :error:compileErrorProne UP-TO-DATE",
    ],
)
def test_a_line_that_only_speaks_of_errors_is_none(line) -> None:
    assert told(f"before\n{line}\nafter\n") == []


@pytest.mark.parametrize(
    ("line", "error_class"),
    [
        ("FAILED (failures=1, errors=2)", ErrorClass.SUMMARY),
        ("=== 2 failed, 1 passed in 0.3s ===", ErrorClass.SUMMARY),
        ("2 failed, 1 passed in 0.30s", ErrorClass.SUMMARY),
        ("Tests:       1 failed, 300 passed, 301 total", ErrorClass.SUMMARY),
        ("# fail 2", ErrorClass.SUMMARY),
        ("FAIL: test_total (test_cart.CartTest.test_total)", ErrorClass.FAILURE),
        ("ERROR tests/test_x.py - ImportError: no module", ErrorClass.FAILURE),
        ("not ok 3 - rounds prices", ErrorClass.FAILURE),
        ("[  FAILED  ] Cart.Total (0 ms)", ErrorClass.FAILURE),
        ("a.ts(3,14): error TS2322: Type 'x' is not assignable", ErrorClass.COMPILER),
        ("error[E0308]: mismatched types", ErrorClass.COMPILER),
        ("Main.java:3: error: ';' expected", ErrorClass.COMPILER),
        ("app.py:3: error: Incompatible types  [assignment]", ErrorClass.COMPILER),
        ("main.o: undefined reference to `start'", ErrorClass.COMPILER),
        ("TypeError: Cannot read properties of undefined", ErrorClass.EXCEPTION),
        ("panic: runtime error: index out of range [5] with length 3", ErrorClass.EXCEPTION),
        ("KeyboardInterrupt", ErrorClass.EXCEPTION),
        ("Segmentation fault (core dumped)", ErrorClass.EXCEPTION),
        ("npm ERR! code ELIFECYCLE", ErrorClass.COMPLAINT),
        ("bash: gti: command not found", ErrorClass.COMPLAINT),
        ("ls: cannot access 'x': No such file or directory", ErrorClass.COMPLAINT),
        ("error: failed to push some refs", ErrorClass.COMPLAINT),
        ("prog.py: error: unrecognized arguments: --x", ErrorClass.COMPLAINT),
        ("2026-11-30 10:00:00,001 ERROR shop.db: gone", ErrorClass.ERROR),
        ('{"level":"error","message":"gone"}', ErrorClass.ERROR),
        ("time=10:00 level=error msg=gone", ErrorClass.ERROR),
        ("E1130 10:00:00.1 1 main.go:3] gone", ErrorClass.ERROR),
        ("[error] 12#0: upstream gone", ErrorClass.ERROR),
        ("2026-11-30 10:00:00 CRITICAL no space", ErrorClass.FATAL),
        ("fatal: not a git repository", ErrorClass.COMPLAINT),
        ("npm error code ERESOLVE", ErrorClass.COMPLAINT),
        ('psql:dump.sql:31: ERROR:  duplicate key value violates unique constraint "pk"', ErrorClass.COMPLAINT),
        ("\u2502 Error: Unsupported argument", ErrorClass.COMPLAINT),
        ("cp: cannot open '/etc/x' for reading: Permission denied", ErrorClass.COMPLAINT),
        ("* What went wrong:", ErrorClass.COMPLAINT),
        ("  Failed CartTests.Totals [3 ms]", ErrorClass.FAILURE),
        ("com.acme.CartTest > totals() FAILED", ErrorClass.FAILURE),
        ("1) CartTest::testTotal", ErrorClass.FAILURE),
        ("  7/25 Test #7: cart .........***Failed    0.02 sec", ErrorClass.FAILURE),
        ("  Error Message:", ErrorClass.ASSERTION),
        ("Failed asserting that 3 matches expected 4.", ErrorClass.ASSERTION),
        ('<testcase name="t"><failure message="expected 4 got 3">x</failure></testcase>', ErrorClass.ASSERTION),
        ("Failed!  - Failed:     1, Passed:  4000, Skipped:     0", ErrorClass.SUMMARY),
        ("3000 tests completed, 1 failed", ErrorClass.SUMMARY),
        ("Tests: 9, Assertions: 30, Failures: 1.", ErrorClass.SUMMARY),
        ("\u2716 1501 problems (1 error, 1500 warnings)", ErrorClass.SUMMARY),
        ("  12:3  error  'totl' is not defined  no-undef", ErrorClass.COMPILER),
        ("e: file:///w/src/Cart.kt:12:5 Unresolved reference: totl", ErrorClass.COMPILER),
        ("ERROR in ./src/cart.js 3:0-20", ErrorClass.COMPILER),
        ("Module not found: Error: Can't resolve './totl'", ErrorClass.COMPILER),
        ("src/cart.py:12:4: E0602: Undefined variable 'totl' (undefined-variable)", ErrorClass.COMPILER),
        ("src/cart.py:12:5: F821 Undefined name `totl`", ErrorClass.COMPILER),
        ("cart.go:12:5: undefined: totl (typecheck)", ErrorClass.COMPILER),
        ("PHP Fatal error:  Uncaught TypeError: total(): x in /w/cart.php:3", ErrorClass.EXCEPTION),
        ("cart.rb:3:in `total': undefined method `sum' for nil:NilClass (NoMethodError)", ErrorClass.EXCEPTION),
        ("    org.opentest4j.AssertionFailedError: expected: <4> but was: <3>", ErrorClass.EXCEPTION),
        ("[123.4] Out of memory: Killed process 123 (node) total-vm:1kB", ErrorClass.EXCEPTION),
        ("E/AndroidRuntime( 123): java.lang.NullPointerException", ErrorClass.ERROR),
        ("11-30 10:00:00.123  1234  1250 E ActivityManager: ANR in com.shop", ErrorClass.ERROR),
        ("HTTP/1.1 500 Internal Server Error", ErrorClass.ERROR),
        ('1.2.3.4 - - [30/Nov/2026] "GET /cart HTTP/1.1" 502 12', ErrorClass.ERROR),
        ("Nov 30 10:00:00 host app[3]: <err> cannot bind port 80", ErrorClass.ERROR),
        ("E/AndroidRuntime( 123): FATAL EXCEPTION: main", ErrorClass.FATAL),
    ],
)
def test_each_form_of_an_error_is_known(line, error_class) -> None:
    found = scan(f"before\n{line}\nafter\n")
    assert [(error.error_class, error.line, error.count) for error in found] == [(error_class, 2, 1)]
    assert (found[0].before, found[0].after) == ("before", "after")


def test_ten_thousand_equal_lines_are_one_with_its_count(sample) -> None:
    found = scan(sample("service_log"))
    assert [(error.error_class, error.line, error.count, error.last_line) for error in found] == [
        (ErrorClass.FATAL, 5001, 1, 5001),
        (ErrorClass.ERROR, 2001, 10_000, 12_001),
    ]
    assert found[1].text == "…ERROR shop.db: pool 0 is exhausted after 0ms"


def test_numbers_hexadecimal_ids_and_paths_make_no_new_shape() -> None:
    lines = [
        b"ERROR job 12 at 0x7f31 in /srv/a/b.py failed: id 3f2a9c81d0aa",
        b"ERROR job 7 at 0xab in /tmp/c failed: id 9f",
    ]
    assert shape_of(lines[0]) == shape_of(lines[1])
    assert shape_of(lines[0]) != shape_of(lines[0].replace(b"failed", b"hung"))


def test_a_failed_assertion_outranks_every_line_of_a_log() -> None:
    log = "".join(f"2026-11-30 10:00:00 CRITICAL {word} lost\n" for word in ("disk", "net", "power"))
    many = "".join(f"E       assert {chr(97 + n) * 3} == other\n\n\n\n" for n in range(20))
    found = scan(log + many)
    classes = [error.error_class for error in found]
    assert classes == [ErrorClass.ASSERTION] * 20 + [ErrorClass.FATAL] * 3


def test_the_exception_outranks_its_frames_and_the_last_one_comes_first(sample) -> None:
    found = scan(sample("python_trace") + sample("java_trace"))
    assert found[0].text.startswith("Caused by: java.sql.SQLException")
    assert sum(error.error_class is ErrorClass.LOCATION for error in found) <= 4


def test_what_a_test_logs_is_none_unless_the_test_fails() -> None:
    passed = "=== RUN   TestA\n    a_test.go:3: trying\n--- PASS: TestA (0.0s)\n"
    failed = "=== RUN   TestB\n    b_test.go:4: got 1, want 2\n--- FAIL: TestB (0.0s)\n"
    assert [error.line for error in scan(passed + failed)] == [6, 5]


def test_what_a_test_logged_below_its_result_is_told_by_that_result() -> None:
    passed = "=== RUN   TestA\n--- PASS: TestA (0.0s)\n    a_test.go:3: got the error that was wanted\n"
    failed = "=== RUN   TestB\n--- FAIL: TestB (0.0s)\n    a_test.go:4: got the error that was wanted\n"
    assert [error.line for error in scan(passed + failed + passed)] == [5, 6]
    above = "=== RUN   TestB\n    a_test.go:4: got the error that was wanted\n--- FAIL: TestB (0.0s)\n"
    assert [error.line for error in scan(passed + above + passed)] == [6, 5]


def test_a_rare_grave_line_outranks_what_the_program_went_on_after() -> None:
    handled = "".join(
        f'WARNING got:\nTraceback (most recent call last):\n  File "net.py", line 3, in get\nConnectionError: {n}\n'
        for n in range(800)
    )
    found = scan(f"{handled}2026-11-30 10:00:00 CRITICAL giving up\n{handled}")
    assert found[0].text == "…CRITICAL giving up"
    rare = scan(handled + "KeyError: 'x'\n" + handled)
    assert next(error.text for error in rare if error.error_class is ErrorClass.EXCEPTION) == "KeyError: 'x'"


def test_a_grave_line_of_a_log_stays_behind_the_only_exception() -> None:
    found = scan("CRITICAL giving up\nKeyError: 'x'\n")
    assert [error.error_class for error in found] == [ErrorClass.EXCEPTION, ErrorClass.FATAL]


def test_each_state_of_a_line_that_was_written_over_is_looked_at() -> None:
    progress = "".join(f"\rprogress {n}%" for n in range(9000))
    (found,) = scan(f"{progress}\rerror: block 5 is bad{progress}\ndone\n")
    assert (found.line, found.text) == (1, "error: block 5 is bad")
    (short,) = scan("10%\rerror: block 5 is bad\r20%\n")
    assert short.text == "error: block 5 is bad"


def test_an_error_within_a_line_of_megabytes_is_shown_with_its_column() -> None:
    text = "first\n" + "x" * 3_000_000 + " CRITICAL disk full " + "y" * 2_000_000 + "\nlast ERROR z\n"
    found = scan(text, block_bytes=1 << 20)
    assert [(error.error_class, error.line) for error in found] == [(ErrorClass.FATAL, 2), (ErrorClass.ERROR, 3)]
    assert "CRITICAL disk full" in found[0].text
    assert len(found[0].text) < 200


def test_what_kills_the_run_is_found_behind_a_hundred_thousand_log_errors() -> None:
    noise = "".join(f"ERROR {random.Random(n).randbytes(6).hex()} of pool lost its way\n" for n in range(60_000))
    found = scan(f"{noise}tests/a.py:3: AssertionError\n{noise}FAILED tests/a.py::test_a - assert 1 == 2\n")
    assert [(error.line, error.error_class) for error in found[:2]] == [
        (120_002, ErrorClass.FAILURE),
        (60_001, ErrorClass.LOCATION),
    ]


def test_a_count_that_was_not_taken_to_the_end_is_a_floor() -> None:
    found = ErrorScan()
    for _ in range(8):
        found.feed(b"ERROR pool lost\n" * 10_000)
    (error,) = found.finish()
    assert 5_000 < error.count < 80_000
    assert not found.is_complete


def test_the_end_is_looked_at_closely_even_where_too_much_came_before() -> None:
    noise = b"ERROR pool lost\n"
    found = ErrorScan()
    for _ in range(8):
        found.feed(noise * 10_000)
    found.feed(noise * 5000 + b"ERROR disk gone\n" + noise * 1000)
    assert [error.text for error in found.finish()] == ["ERROR disk gone", "ERROR pool lost"]


def test_many_different_shapes_are_held_in_bounds_and_the_rest_is_counted() -> None:
    words = ["".join(random.Random(n).choices("abcdefgh", k=9)) for n in range(3000)]
    found = ErrorScan()
    found.feed("".join(f"ERROR {word} lost\n" for word in words).encode())
    shown = found.finish()
    found.check_integrity()
    assert len(shown) == 64
    assert len(shown) + found.other_lines == len(set(words))
    assert {words[0], words[-1]} <= {error.text.split()[1] for error in shown}


def plain_line_numbers(text: str) -> list[int]:
    """The reference: the lines of the pieces below that hold an error, by splitting the whole."""
    return [number for number, line in enumerate(text.split("\n"), start=1) if line in ERRORS]


ERRORS = ["ERROR one", "FATAL two", "error: three", "a.c:1:2: error: four"]
pieces = st.lists(st.sampled_from([*ERRORS, "", "fine", "0 errors", "x" * 700, "\u00e9\u00e8"]), max_size=60)


@settings(max_examples=60)
@given(lines=pieces, block_bytes=st.integers(1, 400))
def test_lines_are_numbered_as_by_splitting_whatever_the_blocks_are(lines, block_bytes) -> None:
    text = "\n".join(lines)
    found = scan(text, block_bytes=block_bytes)
    expected = plain_line_numbers(text)
    assert sum(error.count for error in found) == len(expected)
    assert {error.line for error in found} <= set(expected)
    assert max((error.last_line for error in found), default=None) == max(expected, default=None)


@given(data=st.binary(max_size=2000))
def test_any_bytes_are_scanned(data) -> None:
    assert all(error.rank >= 0 for error in scan(data + b"\nERROR \xff" + data))
