"""What tests of the archive share: texts of every kind, as tools really print them, and a store to put them in."""

import json
from collections.abc import Callable

import pytest

from chapbook.compaction.artifacts import ArtifactStore

PYTEST_FAILURE = """\
=================================== FAILURES ===================================
______________________________ test_total_of_cart ______________________________

    def test_total_of_cart():
        cart = Cart([Item("tea", 3), Item("cup", 4)])
>       assert cart.total() == 8
E       AssertionError: assert 7 == 8
E        +  where 7 = total()
E        +    where total = <cart.Cart object at 0x7f31c2d1a2b0>.total

tests/shop/test_cart.py:41: AssertionError
=========================== short test summary info ============================
FAILED tests/shop/test_cart.py::test_total_of_cart - AssertionError: assert 7...
================== 1 failed, 3982 passed, 3 skipped in 41.52s ==================
"""


def failing_pytest() -> str:
    """4,000 lines, one failure."""
    start = (
        "============================= test session starts ==============================\n"
        "platform linux -- Python 3.11.9, pytest-8.2.0, pluggy-1.5.0\nrootdir: /srv/shop\ncollected 3986 items\n\n"
    )
    names = ["test_error_handling", "test_no_errors", "test_failed_login_is_refused", "test_total", "test_fatal_path"]
    ran = [f"tests/part_{n % 40}/test_m{n % 97}.py::{names[n % 5]}[{n}] PASSED [{n // 40:3d}%]" for n in range(3980)]
    return start + "\n".join(ran) + "\n\n" + PYTEST_FAILURE


def cargo_output() -> str:
    ran = "".join(f"test parser::tests::case_{n} ... ok\n" for n in range(900))
    return (
        "   Compiling ledger v0.3.1 (/srv/ledger)\n    Finished `test` profile [unoptimized] target(s) in 4.21s\n"
        "     Running unittests src/lib.rs (target/debug/deps/ledger-5f1d0c3be2aa9911)\n\nrunning 901 tests\n"
        f"{ran}test parser::tests::rounds_half_up ... FAILED\n\nfailures:\n\n"
        "---- parser::tests::rounds_half_up stdout ----\n"
        "thread 'parser::tests::rounds_half_up' panicked at src/parser.rs:212:9:\n"
        "assertion `left == right` failed\n  left: 2\n right: 3\n"
        "note: run with `RUST_BACKTRACE=1` environment variable to display a backtrace\n\n\n"
        "failures:\n    parser::tests::rounds_half_up\n\n"
        "test result: FAILED. 900 passed; 1 failed; 0 ignored; 0 measured; 0 filtered out; finished in 0.31s\n\n"
        "error: test failed, to rerun pass `--lib`\n"
    )


def go_output() -> str:
    ran = "".join(f"=== RUN   TestParse{n}\n--- PASS: TestParse{n} (0.00s)\n" for n in range(500))
    return (
        f"{ran}=== RUN   TestRetryStopsOnError\n    retry_test.go:88: got 4 attempts, want 3\n"
        "--- FAIL: TestRetryStopsOnError (0.02s)\nFAIL\nFAIL\texample.org/net/retry\t0.413s\n"
        "ok  \texample.org/net/backoff\t0.101s\nFAIL\n"
    )


def jest_output() -> str:
    ran = "".join(f"  \u2713 adds {n} (1 ms)\n" for n in range(300))
    return (
        f"PASS src/sum.test.js\n{ran}FAIL src/price.test.js\n  \u2715 rounds prices (5 ms)\n\n"
        "  \u25cf rounds prices\n\n    expect(received).toBe(expected) // Object.is equality\n\n"
        "    Expected: 12.35\n    Received: 12.34\n\n      10 | test('rounds prices', () => {\n"
        "    > 11 |   expect(price(12.345)).toBe(12.35);\n         |                         ^\n      12 | });\n\n"
        "      at Object.toBe (src/price.test.js:11:25)\n      at node:internal/process/task_queues:95:5\n\n"
        "Test Suites: 1 failed, 1 passed, 2 total\nTests:       1 failed, 300 passed, 301 total\n"
        "Snapshots:   0 total\nTime:        2.1 s\nRan all test suites.\n"
    )


def java_trace() -> str:
    frames = "".join(f"\tat org.spring.web.Filter{n}.doFilter(Filter{n}.java:{n + 50})\n" for n in range(120))
    return (
        'Exception in thread "main" java.lang.IllegalStateException: cannot start the shop\n'
        f"\tat com.shop.Main.start(Main.java:44)\n{frames}"
        'Caused by: java.sql.SQLException: relation "orders" does not exist\n'
        f"\tat com.shop.db.Orders.load(Orders.java:118)\n{frames}\t... 12 more\n"
    )


def python_trace() -> str:
    frames = "".join(
        f'  File "/srv/app/layer_{n}.py", line {n + 10}, in call_{n}\n    return inner()\n' for n in range(90)
    )
    return (
        f"Traceback (most recent call last):\n{frames}"
        "  File \"/srv/app/config.py\", line 31, in load\n    return values[name]\nKeyError: 'timeout_s'\n\n"
        "During handling of the above exception, another exception occurred:\n\n"
        f"Traceback (most recent call last):\n{frames}"
        '  File "/srv/app/main.py", line 7, in main\n    raise ConfigMissing(name)\n'
        "app.errors.ConfigMissing: timeout_s is not set; add it to app.toml\n"
    )


def gcc_output() -> str:
    warned = "".join(
        f"src/part{n}.c:{n + 3}:17: warning: unused variable 'error_count' [-Wunused-variable]\n"
        f"   {n + 3} |     int error_count = 0;\n      |         ^~~~~~~~~~~\n"
        for n in range(200)
    )
    return (
        f"make[1]: Entering directory '/srv/db'\n{warned}src/btree.c: In function 'split_node':\n"
        "src/btree.c:412:9: error: 'right' undeclared (first use in this function); did you mean 'height'?\n"
        "  412 |         right->count = 0;\n      |         ^~~~~\n      |         height\n"
        "make[1]: *** [Makefile:31: src/btree.o] Error 1\nmake: *** [Makefile:12: all] Error 2\n"
    )


def git_diff() -> str:
    def part(name: str, lines: int) -> str:
        body = "".join(f"-    old_{n} = {n}\n+    new_{n} = {n}\n     kept_{n}\n" for n in range(lines))
        return (
            f"diff --git a/{name} b/{name}\nindex 3b1f2c4..9e77a10 100644\n--- a/{name}\n+++ b/{name}\n"
            f"@@ -1,{2 * lines} +1,{2 * lines} @@ def error():\n{body}"
        )

    return part("src/cart.py", 400) + part("src/item.py", 30) + part("docs/README.md", 5)


def package_json() -> str:
    dependencies = {f"@scope/package-{n}": f"^{n}.2.1" for n in range(140)}
    scripts = {"build": "tsc -p .", "test": "jest --coverage", "lint": "eslint ."}
    manifest = {"name": "shop", "version": "4.2.0", "private": True, "scripts": scripts, "dependencies": dependencies}
    return json.dumps(manifest, indent=2) + "\n"


def geojson() -> str:
    """2 MB in one line."""
    features = [
        {
            "type": "Feature",
            "properties": {"name": f"Parcel {n}", "area": n * 3.5, "owner": None},
            "geometry": {"type": "Polygon", "coordinates": [[[n / 7, n / 9], [n / 5, n / 3], [n / 2, n / 11]]]},
        }
        for n in range(9000)
    ]
    return json.dumps({"type": "FeatureCollection", "features": features, "bbox": [0, 0, 180, 90]})


def json_lines() -> str:
    return "".join(json.dumps({"id": n, "level": "info", "message": f"step {n}"}) + "\n" for n in range(3000))


def csv_table() -> str:
    rows = "".join(f'{n},"Widget ""{n}""","a note\nof two lines, and a comma",{n * 1.5}\n' for n in range(2500))
    return f"id,name,note,price\n{rows}"


def markdown_book() -> str:
    paragraph = "The harbour was quiet, and no error in the ledger had been found that year. " * 12
    chapters = "".join(
        f"## Chapter {n}: of ships\n\n{paragraph}\n\n### The {n}th voyage\n\n{paragraph}\n\n"
        "```sh\n# not a heading\n```\n\n"
        for n in range(1, 60)
    )
    return f"# The Harbour Book\n\nBy nobody.\n\n{chapters}"


def python_source() -> str:
    functions = "".join(
        f"\n\ndef handle_error_{n}(error: str, *, retries: int = 3) -> int:\n    error_count = 0\n"
        f'    if error:\n        raise ValueError("error: {n}")\n    return error_count\n'
        for n in range(300)
    )
    start = '"""How errors are handled."""\n\nimport os\nfrom pathlib import Path\n\n\nclass Handler:\n    pass\n'
    return start + functions


def service_log() -> str:
    """12,000 lines: 10,000 of them one error, and one other."""
    lines = [f"2026-11-30 19:{n % 60:02d}:01,{n % 1000:03d} INFO  shop.http: GET /item/{n} 200" for n in range(2000)]
    lines += [
        f"2026-11-30 20:{n % 60:02d}:02,001 ERROR shop.db: pool {n} is exhausted after {n}ms" for n in range(10000)
    ]
    lines.insert(5000, "2026-11-30 20:11:02,001 CRITICAL shop.disk: no space left on /var/lib/shop")
    return "\n".join(lines) + "\n"


def plain_prose() -> str:
    return "\n".join(f"Sentence {n} of a long tale, in which little happens, and slowly." for n in range(900)) + "\n"


SAMPLES: dict[str, Callable[[], str]] = {
    made.__name__: made
    for made in (
        failing_pytest,
        cargo_output,
        go_output,
        jest_output,
        java_trace,
        python_trace,
        gcc_output,
        git_diff,
        package_json,
        geojson,
        json_lines,
        csv_table,
        markdown_book,
        python_source,
        service_log,
        plain_prose,
    )
}


@pytest.fixture(scope="session")
def sample():
    """Return a function: name of a sample -> its text."""
    return lambda name: SAMPLES[name]()


@pytest.fixture(scope="session")
def stored(tmp_path_factory):
    """Return a function: bytes or text -> the StoredText of it in a real store, open as long as the run."""
    store = ArtifactStore(tmp_path_factory.mktemp("stored") / "artifacts")
    opened = []

    def put(data: bytes | str):
        text = store.open_text(store.put(data if isinstance(data, bytes) else data.encode()))
        opened.append(text)
        return text

    yield put
    for text in opened:
        text.close()


@pytest.fixture
def store(tmp_path):
    return ArtifactStore(tmp_path / "artifacts")
