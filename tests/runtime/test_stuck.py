from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chapbook.runtime.stuck import StepCall, StuckDetector, StuckKind, StuckVerdict, repeats_itself

WINDOW = 24


def call(name: str = "read", result: str = "r", *, is_error: bool = False, **arguments: Any) -> StepCall:
    return StepCall(name=name, arguments=arguments, result_hash=result, is_error=is_error)


def failing(command: str, result: str) -> StepCall:
    return call("bash", result, is_error=True, command=command)


def verdicts(steps: Sequence[Sequence[StepCall]]) -> list[StuckKind | None]:
    detector = StuckDetector()
    seen = []
    for step in steps:
        verdict = detector.observe(step)
        detector.check_integrity()
        seen.append(verdict.kind if verdict else None)
    return seen


def test_the_same_call_with_the_same_result_three_times_is_found_and_again_at_the_next_one() -> None:
    same = [[call(path="a")]] * 4
    assert verdicts(same) == [None, None, StuckKind.SAME_CALL, StuckKind.SAME_CALL]


def test_arguments_in_another_order_are_the_same_call() -> None:
    assert verdicts([[call(a=1, b=2)], [call(b=2, a=1)], [call(a=1, b=2)]])[-1] is StuckKind.SAME_CALL


def test_another_result_is_progress() -> None:
    assert verdicts([[call(result=str(i), path="a")] for i in range(20)]) == [None] * 20


def test_reading_a_file_chunk_by_chunk_is_progress() -> None:
    assert verdicts([[call(path="a", offset=i, result="blank")] for i in range(0, 4000, 200)]) == [None] * 20


def test_a_call_between_breaks_the_run_and_a_step_without_calls_does_not() -> None:
    broken = [[call(path="a")], [call(path="a")], [call(path="b")], [call(path="a")]]
    assert verdicts(broken) == [None] * 4
    assert verdicts([[call()], [], [call()], [call()]])[-1] is StuckKind.SAME_CALL


def test_calls_of_one_step_count_one_by_one() -> None:
    assert verdicts([[call(), call(), call(), call(path="b")]]) == [StuckKind.SAME_CALL]


def test_a_failing_command_counts_whatever_it_prints() -> None:
    failures = [[failing("make", f"took {i} s")] for i in range(3)]
    assert verdicts(failures) == [None, None, StuckKind.FAILING_COMMAND]


def test_a_command_that_fails_with_other_options_of_the_call_is_the_same_command() -> None:
    steps = [[call("bash", str(i), is_error=True, command="make", timeout_s=i)] for i in range(3)]
    assert verdicts(steps)[-1] is StuckKind.FAILING_COMMAND


def test_another_tool_that_fails_with_other_results_is_not_a_failing_command() -> None:
    assert verdicts([[call("edit", str(i), is_error=True, command="x")] for i in range(6)]) == [None] * 6


def test_a_command_that_fails_twice_and_then_works_is_progress() -> None:
    steps = [[failing("make", "1")], [failing("make", "1")], [call("bash", "2", command="make")]]
    assert verdicts(steps) == [None] * 3


def test_a_cycle_is_found_after_three_times_over_and_again_after_one_more() -> None:
    steps = [[call(path=path)] for path in "ab" * 5]
    assert [i for i, kind in enumerate(verdicts(steps)) if kind] == [5, 7, 9]


def test_edit_and_test_that_fail_in_a_circle_are_a_cycle_although_the_output_differs() -> None:
    circle = [[call("edit", old="x"), call("bash", str(i), is_error=True, command="make")] for i in range(3)]
    assert verdicts(circle) == [None, None, StuckKind.CYCLE]


def test_a_cycle_that_is_longer_than_five_or_older_than_the_window_is_none() -> None:
    assert verdicts([[call(path=path)] for path in "abcdef" * 4]) == [None] * 24
    quiet: list[list[StepCall]] = [[]] * WINDOW
    assert verdicts([[call()], [call()], *quiet, [call()]])[-1] is None
    assert verdicts([[call()], [call()], *quiet[3:], [call()]])[-1] is StuckKind.SAME_CALL


def test_a_hint_names_the_calls_and_each_kind_has_its_own() -> None:
    detector = StuckDetector()
    hints: list[str] = []
    for step in [*[[call()]] * 3, *[[failing("make", "x")]] * 3, *[[call("list")], [call()]] * 3]:
        verdict = detector.observe(step)
        hints += [verdict.hint] if verdict else []
    assert [hint.split(".")[0] for hint in hints] == [
        "You made the same read call 3 times and got the same result",
        "The same command failed 3 times",
        "You repeated the same calls (list, read) 3 times over with the same results",
    ]


def reference(steps: Sequence[Sequence[str]]) -> list[StuckKind | None]:
    """The whole history again at every step: no state but what was said before."""
    seen: list[StuckKind | None] = []
    said: dict[StuckKind, int] = {}
    for last in range(len(steps)):
        window = steps[max(0, last - WINDOW + 1) : last + 1]
        calls = [name for step in window for name in step]
        before = sum(len(step) for step in steps[: last + 1]) - len(calls)
        first: StuckKind | None = None
        for end in range(len(calls) - len(steps[last]) + 1, len(calls) + 1):
            for length in range(1, 6):
                runs = [calls[end - length * n : end - length * (n - 1)] for n in (3, 2, 1) if end >= length * n]
                kind = StuckKind.SAME_CALL if length == 1 else StuckKind.CYCLE
                if len(runs) == 3 and runs[0] == runs[1] == runs[2] and before + end >= said.get(kind, 0) + length:
                    first = first or kind
        if first:
            said[first] = before + len(calls)
        seen.append(first)
    return seen


@given(st.lists(st.lists(st.sampled_from("ab") | st.sampled_from("abc"), max_size=3), max_size=40))
@settings(deadline=None)
def test_verdicts_are_those_of_a_plain_reference(steps: list[list[str]]) -> None:
    assert verdicts([[call(path=name) for name in step] for step in steps]) == reference(steps)


@given(st.lists(st.sampled_from("abcde"), min_size=2, max_size=5, unique=True), st.integers(0, 4))
@settings(deadline=None)
def test_any_cycle_of_two_to_five_calls_is_found_at_its_third_end(cycle: list[str], start: int) -> None:
    lead = [[call("list", str(i))] for i in range(start)]
    seen = verdicts([*lead, *([call(path=path)] for path in cycle * 3)])
    assert [i for i, kind in enumerate(seen) if kind] == [start + 3 * len(cycle) - 1]


def test_a_verdict_is_a_value() -> None:
    first, second = StuckDetector(), StuckDetector()
    found: list[StuckVerdict | None] = [detector.observe([call()] * 3) for detector in (first, second)]
    assert found[0] == found[1]
    assert found[0] is not None


@pytest.mark.parametrize(
    "reply",
    [
        "\n".join(f"{n}. A chapbook is a small, cheap booklet made to be carried." for n in range(1, 12)),
        "no " * 200,
        "It begins well. " + "Then it says this again and again, the same sentence. " * 9,
    ],
)
def test_a_reply_that_says_one_thing_over_and_over_is_recognised(reply: str) -> None:
    assert repeats_itself(reply)


@pytest.mark.parametrize(
    "reply",
    [
        "",
        "yes yes yes yes yes",
        "\n".join(f"- item {chr(97 + n)}{chr(98 + n)} is about {'xyzw'[n % 4] * (n + 3)}" for n in range(20)),
        "def f(x):\n    return x\n" * 3 + "and that is all of it, with a long ending that is like nothing before " * 2,
    ],
)
def test_a_reply_that_goes_on_is_not_taken_for_one_that_repeats(reply: str) -> None:
    assert not repeats_itself(reply)
