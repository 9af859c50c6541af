"""The session log against crashes, full disks, other writers and flipped bytes."""

import contextlib
import errno
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
from dataclasses import dataclass
from pathlib import Path

import pytest
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from chapbook.kernels.errors import LogDamaged, LogError, LogLocked, LogWriteFailed, UnknownEvent
from chapbook.kernels.tokens import token_ids
from chapbook.runtime.calls import CallId, LoggedCall
from chapbook.runtime.events import Notice, SegmentKind, ToolCallEvent, TurnStart, UserMessage
from chapbook.runtime.log_format import encode_line
from chapbook.runtime.log_lock import Holder, this_process
from chapbook.runtime.log_reading import LOG_NAME, TOKENS_NAME, read_log, scan_log, verify_log
from chapbook.runtime.log_repair import repair_log
from chapbook.runtime.session_log import SessionLog

ME = this_process(now=1_700_000_000.0)


def clock():
    return 1_700_000_000.5


def create(folder, **settings):
    return SessionLog.create(folder, clock=clock, holder=ME, **settings)


def reopen(folder, **settings):
    return SessionLog.open(folder, clock=clock, holder=ME, **settings)


def say(log, text, ids=(), *, durable=False):
    """Append a message with its tokens, in two runs."""
    half = len(ids) // 2
    spans = tuple(
        log.append_tokens(SegmentKind.MESSAGE, token_ids(run)) for run in (ids[:half], ids[half:]) if len(run)
    )
    return log.append(UserMessage(text=text, spans=spans), durable=durable)


def small_log(folder):
    with create(folder) as log:
        log.append(TurnStart(turn=1))
        say(log, "a task, with ünïcode", [1, 2, 3])
        call = LoggedCall(id=CallId("call00001"), name="read", arguments={"path": "a.py", "limit": 3})
        log.append(ToolCallEvent(call=call), durable=True)
        say(log, 'and "quotes"\n', [70_000, -1])
    return folder


def side_files(folder, pattern):
    return [path.read_bytes() for path in sorted(folder.glob(pattern))]


class LogUnderCrashes(RuleBasedStateMachine):
    """A log that loses the machine at any moment. The reference is a list of what was acknowledged.

    A crash keeps, of each file on its own, any number of bytes from what was flushed up to what was written.
    """

    def __init__(self):
        super().__init__()
        memory = Path("/dev/shm")  # flushes cost nothing there
        self.root = Path(tempfile.mkdtemp(prefix="chapbook-log-", dir=memory if memory.is_dir() else None))
        self.log = None
        self.count = 0

    @initialize()
    def start(self):
        self.folder = self.root / "s0"
        self.log = create(self.folder)
        self.acknowledged, self.durable = [], 0
        self.ends = []  # after each event: the bytes of the log, the tokens that are cited
        self.flushed = (0, 0)

    def remember(self, logged, *, durable):
        self.acknowledged.append(logged)
        self.ends.append(((self.folder / LOG_NAME).stat().st_size, self.log.token_count))
        if durable:
            self.note_durable()

    def note_durable(self):
        self.durable = len(self.acknowledged)
        self.flushed = ((self.folder / LOG_NAME).stat().st_size, (self.folder / TOKENS_NAME).stat().st_size)

    @rule(ids=st.lists(st.integers(-(2**31), 2**31 - 1), max_size=12), text=st.text(max_size=20), durable=st.booleans())
    def append(self, ids, text, durable):
        self.remember(say(self.log, text, ids, durable=durable), durable=durable)

    @rule()
    def give_up_an_append_after_its_tokens(self):
        self.log.append_tokens(SegmentKind.GLUE, token_ids([9, 9, 9]))
        self.remember(self.log.append(TurnStart(turn=1)), durable=False)

    @rule(text=st.sampled_from(["\ud800", "a\udcff"]), ids=st.lists(st.integers(0, 9), max_size=3))
    def append_what_cannot_be_written(self, text, ids):
        with pytest.raises(LogWriteFailed):
            say(self.log, text, ids)

    @rule()
    def make_durable(self):
        self.log.make_durable()
        self.note_durable()

    @rule(log_part=st.floats(0, 1), token_part=st.floats(0, 1), pending=st.integers(0, 3), repair=st.booleans())
    def crash(self, log_part, token_part, pending, repair):
        if pending:
            self.log.append_tokens(SegmentKind.MESSAGE, token_ids(range(pending)))
        crashed = self.root / f"s{self.count + 1}"
        self.count += 1
        shutil.copytree(self.folder, crashed)
        kept = []
        for name, flushed, part in zip((LOG_NAME, TOKENS_NAME), self.flushed, (log_part, token_part), strict=True):
            written = (crashed / name).stat().st_size
            kept.append(flushed + round((written - flushed) * part))
            os.truncate(crashed / name, kept[-1])
        before = [(crashed / name).read_bytes() for name in (LOG_NAME, TOKENS_NAME)]
        known = set(crashed.iterdir())
        self.log.close()
        self.folder = crashed
        survivors = next(
            (n for n, (size, cited) in enumerate(self.ends) if size > kept[0] or cited * 4 > kept[1]), len(self.ends)
        )
        assert survivors >= self.durable
        self.recover(survivors, repair=repair)
        for name, pattern, was in zip((LOG_NAME, TOKENS_NAME), ("torn-*", "orphan-*"), before, strict=True):
            moved = [path.read_bytes() for path in crashed.glob(pattern) if path not in known]
            assert (crashed / name).read_bytes() + b"".join(moved) == was

    def recover(self, survivors, *, repair):
        damaged_line = None
        if not repair:
            try:
                opened = reopen(self.folder)
            except LogDamaged as error:
                damaged_line = error.line
        assert damaged_line in (None, survivors + 1)
        if repair or damaged_line:
            assert repair_log(self.folder, clock=clock, holder=ME).events == survivors
            assert repair_log(self.folder, clock=clock, holder=ME).moved == ()
            opened = reopen(self.folder)
            assert opened.report.moved == ()
        assert list(opened.events) == self.acknowledged[:survivors]
        self.log = opened.log
        del self.acknowledged[survivors:], self.ends[survivors:]
        self.log.make_durable()
        self.note_durable()

    @invariant()
    def files_are_what_the_log_believes(self):
        if self.log is not None:
            self.log.check_integrity()
            assert list(scan_log(self.folder).events) == self.acknowledged

    def teardown(self):
        if self.log is not None:
            self.log.close()
        shutil.rmtree(self.root)


TestLogUnderCrashes = LogUnderCrashes.TestCase
TestLogUnderCrashes.settings = settings(
    max_examples=60, stateful_step_count=20, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)

WRITER = textwrap.dedent("""
    import sys, time
    from pathlib import Path
    from chapbook.kernels.tokens import token_ids
    from chapbook.runtime.events import SegmentKind, UserMessage
    from chapbook.runtime.log_lock import this_process
    from chapbook.runtime.session_log import SessionLog

    folder = Path(sys.argv[1])
    now = time.time()
    settings = dict(clock=time.time, holder=this_process(now=now))
    log = SessionLog.open(folder, **settings).log if folder.exists() else SessionLog.create(folder, **settings)
    print("held", flush=True)
    while True:
        seq = log.next_seq
        span = log.append_tokens(SegmentKind.MESSAGE, token_ids(range(seq % 50)))
        log.append(UserMessage(text=f"message {seq} " + "x" * (seq % 3000), spans=(span,)), durable=seq % 4 == 0)
        print(seq, flush=True)
""")


@contextlib.contextmanager
def writer(folder):
    with subprocess.Popen([sys.executable, "-c", WRITER, str(folder)], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout.readline() == "held\n"
            yield process
        finally:
            process.kill()


def test_kill_9_at_a_random_moment_loses_no_acknowledged_event(tmp_path):
    chance, folder, seen = random.Random(5), tmp_path / "s", 0
    for _ in range(3):
        with writer(folder) as process:
            last = seen - 1
            for _ in range(chance.randrange(1, 300)):
                last = int(process.stdout.readline())
            process.send_signal(signal.SIGKILL)
            last = max([last, *(int(line) for line in process.stdout.read().split("\n")[:-1])])
        opened = reopen(folder)
        assert len(opened.events) >= last + 1
        assert all(e.event.text == f"message {e.seq} " + "x" * (e.seq % 3000) for e in opened.events)
        seen = len(opened.events)
        opened.log.check_integrity()
        opened.log.close()
        assert verify_log(folder).intact


def test_a_second_process_is_refused_and_told_who_holds_the_session(tmp_path):
    folder = tmp_path / "s"
    with writer(folder) as process:
        with pytest.raises(LogLocked, match="held by process") as refused:
            reopen(folder)
        assert str(process.pid) in refused.value.holder
        with pytest.raises(LogLocked):
            repair_log(folder, clock=clock, holder=ME)
        assert read_log(folder).torn_bytes >= 0
    reopen(folder).log.close()


def test_a_second_opening_in_the_same_process_is_refused(tmp_path):
    holder = Holder(pid=4321, host="elsewhere", since=0.0, command="chapbook chat")
    with (
        SessionLog.create(tmp_path / "s", clock=clock, holder=holder),
        pytest.raises(LogLocked, match="process 4321 on elsewhere since 1970-01-01 00:00:00 UTC: chapbook chat"),
    ):
        reopen(tmp_path / "s")
    reopen(tmp_path / "s").log.close()


def test_files_are_for_the_owner_alone(tmp_path):
    folder = small_log(tmp_path / "store" / "sessions" / "s")
    assert {oct(path.stat().st_mode & 0o777) for path in folder.iterdir()} == {"0o600"}
    assert {oct(path.stat().st_mode & 0o777) for path in (folder, folder.parent, folder.parent.parent)} == {"0o700"}


def test_an_append_returns_the_event_as_a_reader_reads_it(tmp_path):
    with create(tmp_path / "s") as log:
        call = LoggedCall(id=CallId("call00001"), name="read", arguments={"lines": (1, 2)})
        logged = log.append(ToolCallEvent(call=call))
    assert logged == read_log(tmp_path / "s").events[0]
    assert logged.event.call.arguments == {"lines": [1, 2]}


def test_a_reader_gets_the_ids_of_each_span(tmp_path):
    contents = read_log(small_log(tmp_path / "s"))
    spans = [span for logged in contents.events for span in getattr(logged.event, "spans", ())]
    assert [contents.span(span).tolist() for span in spans] == [[1], [2, 3], [70_000], [-1]]


@pytest.mark.parametrize("name", [LOG_NAME, TOKENS_NAME])
def test_verify_finds_a_flip_in_every_byte(tmp_path, name):
    folder = small_log(tmp_path / "s")
    assert verify_log(folder).intact
    whole = (folder / name).read_bytes()
    for place in range(len(whole)):
        broken = bytearray(whole)
        broken[place] ^= 1 << place % 8
        (folder / name).write_bytes(broken)
        assert not verify_log(folder).intact, place


@given(place=st.integers(0), mask=st.integers(1, 255))
def test_verify_finds_any_other_byte_in_a_log(scratch_log, place, mask):
    broken = bytearray(scratch_log.whole)
    broken[place % len(broken)] ^= mask
    scratch_log.path.write_bytes(broken)
    assert not verify_log(scratch_log.path.parent).intact


@dataclass
class ScratchLog:
    path: Path
    whole: bytes


@pytest.fixture(scope="module")
def scratch_log(tmp_path_factory):
    path = small_log(tmp_path_factory.mktemp("scratch") / "s") / LOG_NAME
    return ScratchLog(path, path.read_bytes())


@pytest.mark.parametrize("change", ["drop", "swap", "double", "cut"])
def test_verify_finds_lines_that_were_moved(tmp_path, change):
    folder = small_log(tmp_path / "s")
    lines = (folder / LOG_NAME).read_bytes().splitlines(keepends=True)
    changed = {
        "drop": [lines[0], *lines[2:]],
        "swap": [lines[1], lines[0], *lines[2:]],
        "double": [lines[0], lines[0], *lines[1:]],
        "cut": [*lines[:-1], lines[-1][:-1]],
    }[change]
    (folder / LOG_NAME).write_bytes(b"".join(changed))
    assert not verify_log(folder).intact


def test_verify_names_a_single_bad_line_and_goes_on_behind_it(tmp_path):
    folder = small_log(tmp_path / "s")
    data = (folder / LOG_NAME).read_bytes().replace(b"a task", b"a mask")
    (folder / LOG_NAME).write_bytes(data)
    verdict = verify_log(folder)
    assert [problem.line for problem in verdict.problems] == [2]
    assert "does not fit its hash" in verdict.problems[0].text


def test_damage_before_the_last_line_refuses_to_open_and_repair_keeps_what_is_valid(tmp_path):
    folder = small_log(tmp_path / "s")
    events = read_log(folder).events
    broken = (folder / LOG_NAME).read_bytes().replace(b"a task", b"a mask")
    (folder / LOG_NAME).write_bytes(broken)
    with pytest.raises(LogDamaged) as damaged:
        reopen(folder)
    assert damaged.value.line == 2
    assert (folder / LOG_NAME).read_bytes() == broken
    report = repair_log(folder, clock=clock, holder=ME)
    assert report.events == 1
    assert "line 2" in report.reason
    assert (folder / LOG_NAME).read_bytes() + side_files(folder, "torn-*")[0] == broken
    assert len(side_files(folder, "orphan-tokens-*")[0]) == 5 * 4
    opened = reopen(folder)
    assert opened.events == events[:1]
    say(opened.log, "goes on", [5])
    opened.log.close()
    assert verify_log(folder).intact


def test_a_last_line_whose_tokens_are_not_there_is_torn_and_said_to_be(tmp_path):
    folder = small_log(tmp_path / "s")
    os.truncate(folder / TOKENS_NAME, 4 * 4)
    opened = reopen(folder)
    assert len(opened.events) == 3
    assert "tokens.i32 ends at 4" in opened.report.torn
    assert opened.tokens.tolist() == [1, 2, 3]
    opened.log.close()


def test_side_files_never_overwrite_each_other(tmp_path):
    folder = small_log(tmp_path / "s")
    for count in range(3):
        with (folder / LOG_NAME).open("ab") as log:
            log.write(b"torn %d" % count)
        opened = reopen(folder)
        assert opened.report.torn
        assert opened.report.moved[0].path.parent == folder
        opened.log.close()
    assert side_files(folder, "torn-*") == [b"torn 0", b"torn 1", b"torn 2"]


def test_a_line_with_the_wrong_number_is_damage_and_verify_goes_on_from_it(tmp_path):
    folder = small_log(tmp_path / "s")
    lines, chain = (folder / LOG_NAME).read_bytes(), scan_log(folder).chain
    for seq in (7, 8):
        encoded = encode_line(TurnStart(turn=1), seq=seq, time=1.0, previous_chain=chain)
        lines, chain = lines + encoded.line, encoded.chain
    (folder / LOG_NAME).write_bytes(lines)
    with pytest.raises(LogDamaged, match=r"line 5 .* carries the number 7, 4 was due"):
        reopen(folder)
    assert [problem.line for problem in verify_log(folder).problems] == [5]


def test_an_unknown_event_refuses_the_load_and_is_never_cut_off(tmp_path):
    folder = small_log(tmp_path / "s")
    before = (folder / LOG_NAME).read_bytes()
    scan = scan_log(folder)
    line = encode_line(Notice(producer="p", form="f", text="t"), seq=4, time=1.0, previous_chain=scan.chain).line
    # The chain is made anew for the changed type, as a newer version would have.
    body = line[:-29].replace(b'"notice"', b'"later/event"')
    chain = xxhash.xxh3_64_hexdigest(scan.chain.encode() + body).encode()
    (folder / LOG_NAME).write_bytes(before + body + b',"chain":"' + chain + b'"}\n')
    for attempt in (reopen, read_log, lambda folder: repair_log(folder, clock=clock, holder=ME)):
        with pytest.raises(UnknownEvent, match="newer") as refused:
            attempt(folder)
        assert (refused.value.line, refused.value.event_type) == (5, "later/event")
    assert [problem.line for problem in verify_log(folder).problems] == [5]
    assert side_files(folder, "torn-*") == []


def test_opening_what_is_not_there_says_so_and_creates_nothing(tmp_path):
    (tmp_path / "empty").mkdir()
    for folder in (tmp_path / "empty", tmp_path / "nowhere"):
        for attempt in (reopen, read_log, verify_log):
            with pytest.raises(LogError, match="no session log"):
                attempt(folder)
    assert list(tmp_path.rglob("*")) == [tmp_path / "empty"]


def test_creating_over_something_is_refused(tmp_path):
    small_log(tmp_path / "s")
    with pytest.raises(LogError, match="already"):
        create(tmp_path / "s")
    assert verify_log(tmp_path / "s").intact


def test_events_must_cite_the_tokens_written_for_them(tmp_path):
    with create(tmp_path / "s") as log:
        first = log.append_tokens(SegmentKind.MESSAGE, token_ids([1, 2]))
        log.append_tokens(SegmentKind.MESSAGE, token_ids([3]))
        with pytest.raises(LogWriteFailed, match=r"must cite the tokens \[0, 3\)"):
            log.append(UserMessage(text="only the first", spans=(first,)))
        assert log.token_count == 0
        with pytest.raises(LogWriteFailed):
            log.append(UserMessage(text="taken back by the failure", spans=(first,)))
        say(log, "whole", [1, 2, 3])
        log.check_integrity()


def test_tokens_are_flushed_before_the_events_that_cite_them_and_only_on_demand(tmp_path):
    names, flushed = {}, []

    def flush(fd):
        flushed.append(names[os.fstat(fd).st_ino])
        os.fsync(fd)

    small_log(tmp_path / "s")
    log = reopen(tmp_path / "s", flush=flush).log
    names.update({(tmp_path / "s" / name).stat().st_ino: name for name in (LOG_NAME, TOKENS_NAME)})
    say(log, "not durable", [1])
    assert flushed == []
    say(log, "durable", [2], durable=True)
    assert flushed == [TOKENS_NAME, LOG_NAME]
    log.append(TurnStart(turn=1), durable=True)
    log.make_durable()
    assert flushed == [TOKENS_NAME, LOG_NAME, LOG_NAME]
    say(log, "made durable by closing", [3])
    log.close()
    assert flushed[3:] == [TOKENS_NAME, LOG_NAME]


def test_a_failed_flush_refuses_appends_until_reopened_and_takes_the_event_back(tmp_path):
    healthy = True

    def flush(fd):
        if not healthy:
            raise OSError(errno.EIO, "Input/output error")
        os.fsync(fd)

    log = create(tmp_path / "s", flush=flush)
    kept = say(log, "kept", [1, 2], durable=True)
    healthy = False
    with pytest.raises(LogWriteFailed, match="open it again") as failed:
        say(log, "not durable", [3], durable=True)
    assert failed.value.errno == errno.EIO
    healthy = True
    with pytest.raises(LogWriteFailed, match="takes no more appends"):
        log.append(TurnStart(turn=1))
    log.close()
    opened = reopen(tmp_path / "s")
    assert opened.events == (kept,)
    assert opened.report.moved == ()
    say(opened.log, "not durable", [3], durable=True)
    opened.log.check_integrity()
    opened.log.close()


@pytest.mark.parametrize("goes_on_with", ["an event without tokens", "an event with tokens"])
def test_an_interrupt_within_an_append_leaves_the_log_usable(tmp_path, goes_on_with):
    interrupts = iter([True])

    def flush(fd):
        if next(interrupts, False):
            raise KeyboardInterrupt
        os.fsync(fd)

    log = create(tmp_path / "s", flush=flush)
    with pytest.raises(KeyboardInterrupt):
        say(log, "interrupted", [1, 2, 3], durable=True)
    if goes_on_with == "an event with tokens":
        # Its tokens come behind those that were given up, so it is refused once; that takes both away.
        with pytest.raises(LogWriteFailed, match="must cite the tokens"):
            say(log, "goes on", [4])
        say(log, "goes on", [4])
    log.append(TurnStart(turn=2))
    log.check_integrity()
    log.close()
    assert verify_log(tmp_path / "s").intact


def test_a_log_that_something_else_changed_takes_no_more_appends(tmp_path):
    log = create(tmp_path / "s")
    log.append(TurnStart(turn=1))
    with (tmp_path / "s" / LOG_NAME).open("ab") as other:
        other.write(b"!")
    with pytest.raises(LogWriteFailed, match="changed or deleted by something else"):
        log.append(TurnStart(turn=2))
    log.close()


def test_a_log_that_was_deleted_takes_no_more_appends(tmp_path):
    log = create(tmp_path / "s")
    shutil.rmtree(tmp_path / "s")
    with pytest.raises(LogWriteFailed, match="changed or deleted"):
        log.append(TurnStart(turn=1))
    log.close()


def test_a_closed_log_takes_no_more_appends(tmp_path):
    log = create(tmp_path / "s")
    log.close()
    log.close()
    with pytest.raises(LogWriteFailed, match="it was closed"):
        log.append(TurnStart(turn=1))


def test_a_full_disk_refuses_the_append_and_nothing_else(small_disk):
    folder = small_disk / "s"
    log = create(folder)
    written = [say(log, "before", [1, 2, 3], durable=True)]
    filler = small_disk / "filler"
    with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
        while file.write(b"x" * 512):
            pass
    with pytest.raises(LogWriteFailed, match="the disk is full") as failed:
        written.extend(say(log, "y" * 700, range(300)) for _ in range(100))
    assert failed.value.errno == errno.ENOSPC
    log.check_integrity()
    with pytest.raises(LogWriteFailed):
        say(log, "z" * 6000, [1])
    log.check_integrity()
    filler.unlink()
    written.append(say(log, "z" * 6000, [1], durable=True))
    log.check_integrity()
    log.close()
    assert list(read_log(folder).events) == written
    assert verify_log(folder).intact


def test_a_file_size_limit_refuses_the_append_and_nothing_else(tmp_path):
    script = textwrap.dedent("""
        import json, resource, sys
        from pathlib import Path
        from chapbook.kernels.errors import LogWriteFailed
        from chapbook.kernels.tokens import token_ids
        from chapbook.runtime.events import SegmentKind, UserMessage
        from chapbook.runtime.log_lock import this_process
        from chapbook.runtime.session_log import SessionLog

        log = SessionLog.create(Path(sys.argv[1]), clock=lambda: 1.0, holder=this_process(now=1.0))

        def say(text, ids):
            span = log.append_tokens(SegmentKind.MESSAGE, token_ids(ids))
            log.append(UserMessage(text=text, spans=(span,)), durable=True)

        def limit(size):
            resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))

        def number_of_failure(text, ids):
            try:
                say(text, ids)
            except LogWriteFailed as error:
                log.check_integrity()
                return error.errno

        say("before", [1])
        limit(1000)
        failures = [number_of_failure("x" * 2000, [2, 3]), number_of_failure("short", range(400))]
        limit(resource.RLIM_INFINITY)
        say("x" * 2000, [2, 3])
        log.close()
        print(json.dumps(failures))
    """)
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "s")], capture_output=True, text=True, check=True
    )
    assert json.loads(done.stdout) == [errno.EFBIG, errno.EFBIG]
    contents = read_log(tmp_path / "s")
    assert [len(logged.event.text) for logged in contents.events] == [6, 2000]
    assert contents.tokens.tolist() == [1, 2, 3]
    assert verify_log(tmp_path / "s").intact
