"""The file of a holder: whose it is, what becomes of a bad one, and that it is always one writer's whole output.

Run as a script this file is a child process: `write` saves plans of its own over and over, `limited` saves one where
files may not grow.
"""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from chapbook.compaction.ledger import (
    Ledger,
    LedgerStep,
    Relation,
    StepState,
    mark_step,
    relation,
    start_plan,
    task_key,
)
from chapbook.compaction.ledger_file import LedgerFile, Loaded, find_ledgers, holder_name
from chapbook.kernels.errors import LedgerError, ToolError

NOON = 1_800_000_000.0  # 2027-01-15 08:00:00 UTC
SECRET = "ghp_" + "A1b2C3d4E5f6G7h8I9j0" + "K1l2M3n4O5p6Q7r8"
SHORT_SECRET = "sk_live_" + "A1b2C3d4E5"


def file_of(folder, holder=None, *, pid=7):
    return LedgerFile(Path(folder), holder=holder, clock=lambda: NOON, pid=pid)


def plan(name="one", count=3, **fields):
    steps = tuple(LedgerStep(id=f"s{n + 1}", text=f"step {n + 1} of {name}") for n in range(count))
    return Ledger(task=f"task {name}", key=task_key(name), session=name, steps=steps, **fields)


def names(folder):
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def test_what_is_saved_is_loaded_by_the_next(tmp_path):
    ledger = mark_step(plan(), id="s2", state=StepState.BLOCKED, note="no rights").ledger
    file_of(tmp_path).save(ledger)
    file_of(tmp_path).check_integrity()
    assert file_of(tmp_path).load() == Loaded(ledger=ledger)
    assert names(tmp_path) == ["plan.json"]


def test_without_a_file_there_is_no_plan_and_loading_creates_nothing(tmp_path):
    for holder in (None, "bob"):
        assert file_of(tmp_path, holder).load() == Loaded()
        assert file_of(tmp_path / "no store", holder).load() == Loaded()
    assert list(tmp_path.iterdir()) == []


# Holders


def test_two_holders_in_one_workspace_do_not_see_each_others_plan(tmp_path):
    holders = [None, "ada", "bob", "Bob 2", "bob.corrupt"]
    for holder in holders:
        file_of(tmp_path, holder).save(plan(str(holder)))
    for holder in holders:
        assert file_of(tmp_path, holder).load().ledger == plan(str(holder))
    file_of(tmp_path, "ada").path.write_bytes(b"{")
    assert file_of(tmp_path, "ada").load().ledger is None
    assert file_of(tmp_path, "bob").load().ledger == plan("bob")


@pytest.mark.parametrize("holder", [None, "pid-1", "pid-40123"])
def test_no_holder_and_one_that_names_a_process_use_the_default_file(tmp_path, holder):
    assert file_of(tmp_path, holder).path == tmp_path / "plan.json"


@pytest.mark.parametrize(
    ("holder", "name"),
    [
        ("bob", "bob"),
        ("Ada.L_2-x", "Ada.L_2-x"),
        ("a b/c", "a-b-c"),
        ("../../etc/passwd", "etc-passwd"),
        ("..", "worker"),
        ("-rf", "rf"),
        (".-.hidden", "hidden"),
        ("", "worker"),
        ("审查", "worker"),
        ("审查 ada", "ada"),
        ("x" * 41, "x" * 40),
        ("." * 50 + "y" * 50, "y" * 40),
        ("pid-", "pid-"),
        ("pid-1x", "pid-1x"),
        ("nul\0\n", "nul-"),
    ],
)
def test_a_named_holder_has_a_file_of_its_sanitised_name(tmp_path, holder, name):
    assert file_of(tmp_path, holder).path == tmp_path / "plans" / f"{name}.json"


@given(holder=st.text())
def test_whatever_a_holder_is_called_its_file_lies_in_the_folder_of_plans(holder):
    name = holder_name(holder)
    assert 1 <= len(name) <= 40
    assert name.isascii()
    assert name.replace("-", "").replace(".", "").replace("_", "").isalnum() or not name.strip("._-")
    assert name[0] not in ".-"
    assert holder_name(name) == name


# A file that is no plan

NO_PLANS = {
    "empty": b"",
    "torn": msgspec.json.encode(plan())[:-9],
    "no text": b"\xff\xfe\0",
    "another type": b"[1]",
    "no steps": msgspec.json.encode(plan()).replace(b'"steps":[', b'"steps":[],"stops":['),
    "an unknown state": msgspec.json.encode(plan()).replace(b'"todo"', b'"skipped"', 1),
    "an id out of order": msgspec.json.encode(plan()).replace(b'"s2"', b'"s4"'),
    "too long a step": msgspec.json.encode(plan()).replace(b"step 1", b"step 1" * 40),
    "too many steps": msgspec.json.encode(plan(count=41)),
    "deeply nested": b'{"x":' + b"[" * 100_000,
    "too large": msgspec.json.encode(plan())[:-1] + b',"more":"' + b"x" * (1 << 18) + b'"}',
}


@pytest.mark.parametrize("holder", [None, "bob"])
@pytest.mark.parametrize("data", NO_PLANS.values(), ids=NO_PLANS)
def test_a_file_that_does_not_parse_is_moved_aside_and_the_session_goes_on(tmp_path, data, holder):
    file = file_of(tmp_path, holder)
    file.save(plan())
    file.path.write_bytes(data)
    loaded = file.load()
    assert loaded.ledger is None
    assert loaded.quarantined == file.path.with_name(f"{file.path.stem}.corrupt-20270115-080000.json")
    assert loaded.quarantined.read_bytes() == data
    assert file.load() == Loaded()
    file.save(plan("two"))
    assert file.load().ledger == plan("two")


def test_a_second_bad_file_within_a_second_does_not_take_the_place_of_the_first(tmp_path):
    file = file_of(tmp_path)
    for data in (b"1", b"2", b"3"):
        file.path.write_bytes(data)
        assert file.load().quarantined.read_bytes() == data
    assert names(tmp_path) == [f"plan.corrupt-20270115-080000{number}.json" for number in ("-2", "-3", "")]


def test_a_plan_with_a_field_of_a_later_version_or_a_malformed_key_is_still_a_plan(tmp_path):
    data = msgspec.json.encode(plan())[:-1] + b',"later":1}'
    (tmp_path / "plan.json").write_bytes(data.replace(task_key("one").encode(), b"malformed"))
    loaded = file_of(tmp_path).load().ledger
    assert loaded == msgspec.structs.replace(plan(), key="malformed")
    assert relation(loaded, session="two", key=task_key("one"), prompt="task one") is Relation.UNKNOWN


# Links and other things that have the name


def test_a_link_that_has_the_name_is_moved_aside_and_never_followed(tmp_path):
    store, outside = tmp_path / "store", tmp_path / "outside.json"
    store.mkdir()
    outside.write_bytes(msgspec.json.encode(plan("outside")))
    file = file_of(store)
    file.path.symlink_to(outside)
    file.save(plan())
    assert not file.path.is_symlink()
    assert file.load().ledger == plan()
    file.path.unlink()
    file.path.symlink_to(outside)
    loaded = file.load()
    assert loaded.ledger is None
    assert loaded.quarantined.is_symlink()
    assert msgspec.json.decode(outside.read_bytes(), type=Ledger) == plan("outside")


def test_a_folder_of_plans_that_is_a_link_is_refused_for_reading_and_writing(tmp_path):
    store, outside = tmp_path / "store", tmp_path / "outside"
    store.mkdir()
    file_of(tmp_path, "bob").save(plan())
    (tmp_path / "plans").rename(outside)
    (store / "plans").symlink_to(outside)
    file = file_of(store, "bob")
    before = (outside / "bob.json").read_bytes()
    for act in (file.load, lambda: file.save(plan("two")), lambda: file.set_aside(plan("two"))):
        with pytest.raises(
            LedgerError, match=r"plans is a symbolic link or a file, not a folder of the store. Remove it"
        ):
            act()
    assert names(outside) == ["bob.json"]
    assert (outside / "bob.json").read_bytes() == before


def test_a_file_in_the_place_of_the_folder_of_plans_is_refused(tmp_path):
    (tmp_path / "plans").write_bytes(b"")
    for act in (file_of(tmp_path, "bob").load, lambda: file_of(tmp_path, "bob").save(plan())):
        with pytest.raises(LedgerError, match="not a folder of the store"):
            act()


def test_a_folder_and_a_pipe_that_have_the_name_are_moved_aside(tmp_path):
    file = file_of(tmp_path)
    file.path.mkdir()
    assert file.load().quarantined.is_dir()
    os.mkfifo(file.path)
    assert file.load().quarantined.is_fifo()
    file.save(plan())
    assert file.load().ledger == plan()


# Writing


def test_files_are_for_the_owner_alone(tmp_path):
    file = file_of(tmp_path, "bob")
    file.path.parent.mkdir(mode=0o700)
    file.path.write_bytes(b"{}")
    file.path.chmod(0o644)
    file.save(plan())
    aside = file.set_aside(plan())
    assert {path.stat().st_mode & 0o777 for path in (file.path, aside)} == {0o600}


def test_a_plan_is_set_aside_under_a_name_of_its_own_and_can_be_put_back(tmp_path):
    file = file_of(tmp_path)
    file.save(plan("old"))
    paths = [file.set_aside(plan("old")), file.set_aside(plan("older"))]
    assert [path.name for path in paths] == [
        "plan.set-aside-20270115-080000-7.json",
        "plan.set-aside-20270115-080000-7-2.json",
    ]
    file.save(plan("new"))
    assert file.load().ledger == plan("new")
    paths[0].rename(file.path)
    assert file.load().ledger == plan("old")


def test_what_is_saved_has_no_secret_even_where_the_rules_were_passed_by(tmp_path):
    steps = (
        LedgerStep(id="s1", text=f"use {SECRET}", note=f"used {SECRET}"),
        LedgerStep(id="s2", text="x" * 180 + f" {SHORT_SECRET}", state=StepState.DONE),
    )
    file = file_of(tmp_path)
    leaky = Ledger(task=f"with {SECRET}", key=None, session="one", steps=steps)
    file.save(leaky)
    aside = file.set_aside(leaky)
    assert not any(part in path.read_bytes() for path in (file.path, aside) for part in (b"ghp_", b"sk_live_"))
    loaded = file.load().ledger
    assert loaded.task.startswith("with [redacted:github-token:")
    assert loaded.steps[0].note.startswith("used [redacted:github-token:")
    assert loaded.steps[1].text == "x" * 180 + " [redacted:stripe-k…"  # the mark is longer than what it stands for
    file.check_integrity()


def test_a_secret_that_a_person_wrote_into_a_file_is_not_shown(tmp_path):
    file = file_of(tmp_path)
    file.save(plan())
    file.path.write_bytes(file.path.read_bytes().replace(b"step 1", SECRET.encode()))
    (found,) = find_ledgers(tmp_path)
    for ledger in (found.ledger, file.load().ledger):
        assert "redacted" in ledger.steps[0].text
        assert SECRET not in str(ledger)
    assert SECRET.encode() in file.path.read_bytes(), "looking changes nothing"


def test_a_temporary_file_of_a_killed_writer_is_in_nobodys_way(tmp_path):
    (tmp_path / ".tmp-7-1").write_bytes(b"half")
    file_of(tmp_path).save(plan())
    assert file_of(tmp_path).load().ledger == plan()
    assert (tmp_path / ".tmp-7-1").read_bytes() == b"half"


def test_a_store_that_is_gone_is_refused_and_not_made_anew(tmp_path):
    for holder in (None, "bob"):
        with pytest.raises(LedgerError, match=r"cannot be saved: the store is gone \(moved or deleted\)"):
            file_of(tmp_path / "gone", holder).save(plan())
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_refused_with_the_way_out_and_the_old_file_is_as_it_was(small_disk):
    file = file_of(small_disk)
    file.save(plan())
    before = file.path.read_bytes()
    with (small_disk / "filling").open("wb", buffering=0) as filling, suppress(OSError):
        while filling.write(bytes(4096)):
            pass
    for act, what in ((lambda: file.save(plan("two")), "saved"), (lambda: file.set_aside(plan("two")), "set aside")):
        with pytest.raises(LedgerError, match=rf"plan\.json cannot be {what}: the disk is full. Free some") as refused:
            act()
        assert (refused.value.errno, refused.value.path) == (errno.ENOSPC, file.path)
    assert file.path.read_bytes() == before
    assert names(small_disk) == ["filling", "plan.json"]


def test_a_read_only_disk_is_refused_with_the_way_out_and_the_plan_can_be_read(small_disk):
    file, other = file_of(small_disk), file_of(small_disk, "bob")
    file.save(plan())
    other.save(plan())
    other.path.write_bytes(b"{")
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    with pytest.raises(LedgerError, match="cannot be saved: the file system is read-only"):
        file.save(plan("two"))
    assert file.load().ledger == plan()
    with pytest.raises(LedgerError, match="cannot be read: the file system is read-only"):
        other.load()  # no plan, and it cannot be moved aside


def test_a_file_size_limit_leaves_the_old_file(tmp_path):
    file = file_of(tmp_path)
    file.save(plan())
    done = subprocess.run(
        [sys.executable, __file__, "limited", str(tmp_path)], capture_output=True, text=True, check=True
    )
    assert f"{errno.EFBIG} the plan in {file.path} cannot be saved" in done.stdout
    assert "ulimit" in done.stdout
    assert file.load().ledger == plan()
    assert names(tmp_path) == ["plan.json"]


# Sessions


def test_twelve_runs_of_one_task_resume_each_others_outstanding_steps(tmp_path):
    prompt = "Rename the twelve chapters."
    given_steps = [f"rename chapter {n + 1}" for n in range(12)]
    for run in range(12):
        file, session = file_of(tmp_path, pid=run), f"run {run}"
        current = file.load().ledger
        related = Relation.SAME
        if current is not None:
            related = relation(current, session=session, key=task_key(prompt), prompt=prompt)
        new_plan = {"task": prompt, "steps": given_steps, "session": session, "key": task_key(prompt)}
        if run == 0:
            current = start_plan(current, **new_plan, replace=False, relation=related).ledger
        else:
            with pytest.raises(ToolError) as refused:
                start_plan(current, **new_plan, replace=False, relation=related)
            handed_back = [line.split()[0] for line in str(refused.value).splitlines() if "[todo]" in line]
            assert handed_back == [f"s{n + 1}" for n in range(run, 12)]
        file.save(mark_step(current, id=f"s{run + 1}", state=StepState.DONE).ledger)
        file.check_integrity()
    assert file_of(tmp_path).load().ledger.is_finished


WRITES = 30


def test_ten_processes_writing_at_once_leave_one_writers_whole_file(tmp_path):
    file = file_of(tmp_path)
    file.save(plan("writer 0"))
    writers = [subprocess.Popen([sys.executable, __file__, "write", str(tmp_path), str(n)]) for n in range(10)]
    seen = set()
    while any(writer.poll() is None for writer in writers):
        loaded = file.load()
        assert loaded.quarantined is None
        assert loaded.ledger == plan(loaded.ledger.session, len(loaded.ledger.steps))
        seen.add(loaded.ledger.session)
    assert [writer.returncode for writer in writers] == [0] * 10
    assert seen <= {f"writer {n}" for n in range(10)}
    assert names(tmp_path) == ["plan.json"]
    file.check_integrity()


# What the child does


def write(folder, number):
    """Save plans of this writer's own, of many sizes."""
    file = file_of(folder, pid=os.getpid())
    for n in range(WRITES):
        file.save(plan(f"writer {number}", 1 + (n * 7 + int(number)) % 40))


def save_limited(folder):
    """Save a plan where no file may have more than 100 bytes."""
    import resource  # noqa: PLC0415 - not there on every platform

    resource.setrlimit(resource.RLIMIT_FSIZE, (100, resource.RLIM_INFINITY))
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        file_of(folder).save(plan("two"))
    except LedgerError as error:
        print(error.errno, error)


if __name__ == "__main__":
    {"write": write, "limited": save_limited}[sys.argv[1]](*sys.argv[2:])
