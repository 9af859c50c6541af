from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from chapbook.kernels.tokens import NO_TOKENS, encode_tokens, token_ids
from chapbook.runtime import bound as bound_module
from chapbook.runtime.bound import BoundAccount, explain_difference
from chapbook.runtime.engine import SyncReport, SyncSource


def shared(a: list[int], b: list[int]) -> int:
    length = 0
    while length < min(len(a), len(b)) and a[length] == b[length]:
        length += 1
    return length


def brute_force(request: list[int], runs: list[list[int]]) -> int:
    return len(request) - max((shared(request, run) for run in runs), default=0)


def write(path: Path, tokens: list[int]) -> Path:
    path.write_bytes(encode_tokens(token_ids(tokens)))
    return path


RUNS = st.lists(st.integers(0, 1), max_size=6)


@given(st.lists(st.tuples(RUNS, RUNS), max_size=12))
@settings(deadline=None)
def test_the_bound_over_own_requests_is_that_of_brute_force(asked: list[tuple[list[int], list[int]]]) -> None:
    account = BoundAccount()
    runs: list[list[int]] = []
    for request, reply in asked:
        assert account.bound(token_ids(request)) == brute_force(request, runs)
        account.add(token_ids(request), reply=token_ids(reply))
        account.check_integrity()
        runs.append(request + reply)


class AmongOtherSessions(RuleBasedStateMachine):
    """Requests that extend the last one, or do not, among sessions whose files grow."""

    folder: Path

    def __init__(self) -> None:
        super().__init__()
        self.paths = [self.folder / f"{index}.i32" for index in range(3)]
        for path in self.paths:
            path.unlink(missing_ok=True)
        self.account = BoundAccount(self.paths)
        self.files: dict[int, list[int]] = {}
        self.runs: list[list[int]] = []
        self.window: list[int] = []

    @rule(index=st.integers(0, 2), tokens=RUNS, like_us=st.integers(0, 12))
    def another_session_grows(self, index: int, tokens: list[int], like_us: int) -> None:
        held = self.files.setdefault(index, [])
        held += self.window[len(held) :][:like_us] + tokens
        write(self.paths[index], held)

    @rule(tokens=RUNS, reply=RUNS)
    def the_window_grows(self, tokens: list[int], reply: list[int]) -> None:
        self.window += tokens
        self.ask(reply)

    @precondition(lambda self: self.window)
    @rule(data=st.data(), tokens=RUNS, reply=RUNS)
    def the_window_is_rewound(self, data: st.DataObject, tokens: list[int], reply: list[int]) -> None:
        self.window = self.window[: data.draw(st.integers(0, len(self.window)))] + tokens
        self.ask(reply)

    def ask(self, reply: list[int]) -> None:
        request = token_ids(self.window)
        assert self.account.bound(request) == brute_force(self.window, [*self.runs, *self.files.values()])
        self.account.add(request, reply=token_ids(reply))
        self.runs.append(self.window + reply)
        self.window = self.window + reply

    @invariant()
    def is_whole(self) -> None:
        self.account.check_integrity()


def test_the_bound_among_growing_sessions_is_that_of_brute_force(tmp_path: Path) -> None:
    machine = type("InFolder", (AmongOtherSessions,), {"folder": tmp_path})
    machine.TestCase.settings = settings(deadline=None, max_examples=60, stateful_step_count=20)
    machine.TestCase("runTest").runTest()


def test_sessions_that_agree_over_several_reads_are_followed_to_the_end(tmp_path: Path) -> None:
    long = [i % 7 for i in range(3 * bound_module.READ_TOKENS)]
    account = BoundAccount([write(tmp_path / "a", [*long[:-5], 9]), write(tmp_path / "b", long[:100])])
    assert account.bound(token_ids(long)) == 5


def test_a_session_that_agrees_again_after_it_parted_counts_up_to_there(tmp_path: Path) -> None:
    request = [0] * (3 * bound_module.READ_TOKENS)
    account = BoundAccount([write(tmp_path / "a", [*request[:10], 1, *request[11:]])])
    assert account.bound(token_ids(request)) == len(request) - 10


@pytest.mark.parametrize("what", ["missing", "a folder", "empty", "a torn token", "unreadable"])
def test_a_file_that_cannot_be_used_holds_nothing(tmp_path: Path, what: str) -> None:
    path = tmp_path / "tokens.i32"
    match what:
        case "a folder":
            path.mkdir()
        case "empty":
            path.touch()
        case "a torn token":
            path.write_bytes(b"\1\0\0")
        case "unreadable":
            write(path, [1, 2])
            path.chmod(0)
            if os.access(path, os.R_OK):
                pytest.skip("this user may read everything")
    assert BoundAccount([path]).bound(token_ids([1, 2, 3])) == 3


def test_a_torn_token_at_the_end_is_left_out_until_it_is_whole(tmp_path: Path) -> None:
    path = write(tmp_path / "a", [1, 2])
    account = BoundAccount([path])
    with path.open("ab") as file:
        file.write(b"\3\0")
    assert account.bound(token_ids([1, 2, 3])) == 1
    with path.open("ab") as file:
        file.write(b"\0\0")
    assert account.bound(token_ids([1, 2, 3])) == 0


def test_more_sessions_than_a_process_may_open_files(tmp_path: Path) -> None:
    paths = [write(tmp_path / str(index), [1, index]) for index in range(3000)]
    assert BoundAccount(paths).bound(token_ids([1, 2999, 5])) == 1


def report(evaluated: int, *, reason: str = "", cancelled: bool = False) -> SyncReport:
    return SyncReport(
        cached=0, evaluated=evaluated, source=SyncSource.NOTHING, seconds=0.0, cancelled=cancelled, reason=reason
    )


def test_a_difference_is_explained_and_none_is_not() -> None:
    assert explain_difference(report(7, reason="any"), 7) == ""
    assert explain_difference(report(9, reason="the window slid"), 7) == "2 more than the bound: the window slid"
    assert explain_difference(report(9), 0) == "cold start"
    warm = msgspec.structs.replace(report(9), source=SyncSource.RESIDENT)
    more = "9 more than the bound: what earlier requests asked for is held no more"
    assert explain_difference(warm, 0).startswith(more)
    assert explain_difference(report(3, cancelled=True), 7) == "cancelled after 3 of at least 7 tokens"
    assert explain_difference(report(3), 7).startswith("4 fewer than the bound")
    from_disk = msgspec.structs.replace(report(3), source=SyncSource.DISK)
    assert explain_difference(from_disk, 7).endswith("a disk snapshot held more")
    known_whole = msgspec.structs.replace(report(1), source=SyncSource.DISK)
    assert explain_difference(known_whole, 0) == "the last token again, for what follows it"


def test_nothing_is_below_an_empty_request() -> None:
    assert BoundAccount().bound(NO_TOKENS) == 0


@given(st.lists(st.tuples(RUNS.filter(bool), RUNS), min_size=1, max_size=4), RUNS, RUNS)
def test_each_prefix_of_another_session_counts_with_the_messages_behind_it(
    tmp_path_factory: pytest.TempPathFactory,
    stretches: list[tuple[list[int], list[int]]],
    request: list[int],
    more: list[int],
) -> None:
    folder = tmp_path_factory.mktemp("session")
    stored: list[int] = []
    lines, runs, messages = [], [], []
    for index, (prefix, grown) in enumerate(stretches):
        span = {"kind": "prefix", "offset": len(stored), "length": len(prefix), "xxh3": ""}
        header = {"reason": "change" if index else "initial", "spans": [span]}
        lines.append({"seq": index, "time": 0.5, "type": "request/header", "data": header, "chain": ""})
        messages += grown
        stored += prefix + grown
        runs.append(prefix + messages)
    if len(stretches) == 1:
        runs = [stored]
    (folder / "log.jsonl").write_bytes(b"\n".join(msgspec.json.encode(line) for line in lines))
    account = BoundAccount([write(folder / "tokens.i32", stored)])
    assert account.bound(token_ids(request)) == brute_force(request, runs)
    assert account.bound(token_ids(request + more)) == brute_force(request + more, runs)
    for run in runs:
        assert account.bound(token_ids(run)) == 0
