"""Snapshot files that are not what was written: never used, set aside or ignored, and named with the reason."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from chapbook.kernels.errors import SnapshotRefused, SnapshotUnusable
from chapbook.runtime.prefix_cache.snapshot_index import TEMPORARY_PREFIX


def flip(path: Path, offset: int, bit: int = 0) -> None:
    """Flip a bit in place, and leave size and time as they were."""
    status = path.stat()
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1 << bit]))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


@pytest.fixture(scope="module")
def one_file(tmp_path_factory, snapshot_rig):
    """Return a rig with one file, and that file's bytes."""
    rig = snapshot_rig(tmp_path_factory.mktemp("damage") / "kv")
    file = rig.write(rig.files(), rig.tokens(70), rungs=(10, 30), state_bytes=650)
    return rig, file, file.path.read_bytes()


def put(rig, file, data: bytes) -> None:
    shutil.rmtree(rig.folder)
    file.path.parent.mkdir(parents=True)
    file.path.write_bytes(data)


@given(data=st.data())
@settings(max_examples=150)
def test_any_damage_is_found_whether_it_came_before_or_after_the_listing(one_file, data):
    rig, file, sound = one_file
    kind = data.draw(st.sampled_from(["flip", "cut", "append", "swap", "zero"]))
    at = data.draw(st.integers(0, len(sound) - 1))
    damaged = bytearray(sound)
    if kind == "flip":
        damaged[at] ^= 1 << data.draw(st.integers(0, 7))
    elif kind == "cut":
        del damaged[at:]
    elif kind == "append":
        damaged += data.draw(st.binary(min_size=1, max_size=200))
    elif kind == "swap":
        size = data.draw(st.integers(1, 200))
        damaged[:size], damaged[at : at + size] = damaged[at : at + size], damaged[:size]
    else:
        damaged[at : at + 64] = bytes(len(damaged[at : at + 64]))
    if bytes(damaged) == sound:
        return
    put(rig, file, sound)
    listed_before = rig.files()
    (before,) = listed_before.find()
    file.path.write_bytes(damaged)
    with pytest.raises(SnapshotUnusable):
        listed_before.load(before)
    put(rig, file, bytes(damaged))
    files = rig.files()
    for found in files.find():
        with pytest.raises(SnapshotUnusable):
            files.load(found)
    assert files.find() == ()
    assert not file.path.exists()
    assert file.path.with_suffix(".bad").read_bytes() == damaged
    put(rig, file, bytes(damaged))
    (unusable,) = rig.files().verify().unusable
    assert unusable.path == file.path
    assert unusable.reason


def test_every_single_byte_of_a_file_is_under_a_hash(one_file):
    rig, file, sound = one_file
    put(rig, file, sound)
    files = rig.files()
    for at in range(len(sound)):
        flip(file.path, at, at % 8)
        assert files.verify().sound_files == 0, f"byte {at} may be anything"
        file.path.with_suffix(".bad").rename(file.path)
        flip(file.path, at, at % 8)
    assert files.verify().sound_files == 1


def test_a_damaged_rung_is_no_reason_not_to_use_the_state(snapshots):
    files = snapshots.files()
    file = snapshots.write(files, snapshots.tokens(300), rungs=(100,))
    flip(file.path, file.layout.sections[1].start)
    np.testing.assert_array_equal(files.load_state(file), snapshots.state(file.tokens, 5000))
    with pytest.raises(SnapshotUnusable, match="its state after 100 tokens is not what was written") as caught:
        files.load_rung(file, 100)
    assert caught.value.damaged
    assert snapshots.names() == [file.path.with_suffix(".bad").name]


def test_damage_is_found_in_a_mapped_file_too(snapshots):
    files = snapshots.files(free_memory=lambda: 0)
    file = snapshots.write(files, snapshots.tokens(300))
    flip(file.path, file.size_bytes - 1)
    with pytest.raises(SnapshotUnusable, match="not what was written"):
        files.load_state(file)
    assert files.find() == ()


def test_a_file_whose_header_is_bad_is_set_aside_at_once_and_named_once(snapshots):
    file = snapshots.write(snapshots.files(), snapshots.tokens(300))
    flip(file.path, 8)
    files = snapshots.files()
    assert files.find() == files.find() == ()
    (note,) = files.take_notes()
    assert "format version 0, and this chapbook reads 1" in note
    assert files.take_notes() == ()
    assert [one.path.suffix for one in files.usage().set_aside] == [".bad"]


def test_usage_counts_what_it_has_just_set_aside(snapshots):
    file = snapshots.write(snapshots.files(), snapshots.tokens(300))
    flip(file.path, 8)
    usage = snapshots.files().usage()
    assert [one.path for one in usage.set_aside] == [file.path.with_suffix(".bad")]
    assert (usage.files, usage.size_bytes, usage.others) == (0, file.size_bytes, ())


def test_a_bad_file_that_cannot_be_renamed_is_named_once_and_not_used(snapshots):
    file = snapshots.write(snapshots.files(), snapshots.tokens(300))
    file.path.with_suffix(".bad").mkdir()
    (file.path.with_suffix(".bad") / "x").touch()
    files = snapshots.files()
    (found,) = files.find()
    flip(file.path, found.layout.sections[0].start)
    with pytest.raises(SnapshotUnusable):
        files.load(found)
    assert file.path.exists()
    assert files.find() == ()
    assert not files.holds(found.tokens)
    flip(file.path, 0)
    another = snapshots.files()
    assert another.find() == another.find() == ()
    assert len(another.take_notes()) == 1
    another.check_integrity()


def test_a_file_in_the_folder_of_another_identity_is_set_aside(snapshots):
    file = snapshots.write(snapshots.files(), snapshots.tokens(300))
    other = snapshots.files(identity=snapshots.identity(type_v="q4_0"))
    there = snapshots.write(other, snapshots.tokens(70)).path.parent / file.path.name
    shutil.copy(file.path, there)
    assert len(other.find()) == 1
    assert "it is of tiny as that is opened otherwise" in other.take_notes()[0]
    assert there.with_suffix(".bad").exists()


def test_a_file_under_the_name_of_another_run_is_set_aside(snapshots):
    files = snapshots.files()
    file = snapshots.write(files, snapshots.tokens(300))
    other = snapshots.write(files, snapshots.tokens(300, seed=1))
    shutil.copy(file.path, other.path)
    with pytest.raises(SnapshotUnusable, match="name is not that of its tokens"):
        files.load(other)
    assert [one.path for one in files.find()] == [file.path]


def make_link(path, sound):
    sound.rename(sound.with_name("target"))
    path.symlink_to(sound.with_name("target"))


def make_fifo(path, sound):
    sound.unlink()
    os.mkfifo(path)


def make_folder(path, sound):
    sound.unlink()
    path.mkdir()


def give_away(path, sound):  # noqa: ARG001  (all of them are called alike)
    os.chown(path, 12345, -1)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (make_link, "it is a symbolic link"),
        (make_fifo, "it is no regular file"),
        (make_folder, "it is no regular file"),
        pytest.param(
            give_away,
            "it belongs to user 12345",
            marks=pytest.mark.skipif(getattr(os, "geteuid", lambda: 1)() != 0, reason="only root gives files away"),
        ),
    ],
)
def test_what_is_not_our_file_is_ignored_with_the_reason_and_left_alone(snapshots, change, reason):
    files = snapshots.files()
    file = snapshots.write(files, snapshots.tokens(300))
    change(file.path, file.path)
    before = snapshots.names()
    with pytest.raises(SnapshotUnusable, match=reason) as caught:
        files.load(file)
    assert not caught.value.damaged
    another = snapshots.files()
    assert another.find() == another.find() == ()
    assert [reason in note for note in another.take_notes()] == [True]
    assert [(one.path, one.reason) for one in another.verify().unusable] == [(file.path, reason)]
    assert another.prune(keep_bytes=0).snapshots == 0
    assert snapshots.names() == before


def test_a_vanished_file_is_unusable_and_nothing_is_set_aside(snapshots):
    files = snapshots.files()
    file = snapshots.write(files, snapshots.tokens(300))
    file.path.unlink()
    with pytest.raises(SnapshotUnusable, match="it is gone") as caught:
        files.load_state(file)
    assert not caught.value.damaged
    assert snapshots.names() == []


def test_a_file_that_another_process_replaced_is_not_taken_for_the_listed_one(snapshots):
    files = snapshots.files()
    file = snapshots.write(files, snapshots.tokens(300), rungs=(100,))
    snapshots.now += 5
    snapshots.write(snapshots.files(), snapshots.tokens(300), rungs=(200,))
    with pytest.raises(SnapshotUnusable, match="another has taken its place"):
        files.load_rung(file, 100)
    (again,) = files.find()
    assert again.rungs == (200,)
    snapshots.check_loaded(files, again)


def test_a_file_with_a_hole_of_a_terabyte_is_refused_by_its_size(snapshots):
    file = snapshots.write(snapshots.files(), snapshots.tokens(300))
    os.truncate(file.path, 1 << 40)
    files = snapshots.files()
    assert files.find() == ()
    assert "1,099,511,627,776 bytes" in files.take_notes()[0]


class SnapshotMachine(RuleBasedStateMachine):
    """Two processes on one folder, against a plain account of what was written and what was damaged."""

    make_rig = None

    @initialize(budget=st.sampled_from([25_000, 60_000]))
    def open(self, budget):
        self.rig, self.budget = type(self).make_rig(), budget
        self.identities = [self.rig.identity(), self.rig.identity(build="b2")]
        self.reopen(0)
        self.reopen(1)
        self.damaged: set[Path] = set()

    @rule(which=st.integers(0, 1))
    def reopen(self, which):
        if not hasattr(self, "processes"):
            self.processes = [None, None]
        self.processes[which] = self.rig.files(budget_bytes=self.budget, identity=self.identities[which])

    @rule(
        which=st.integers(0, 1),
        run=st.tuples(st.integers(2, 400), st.integers(0, 2)),
        flags=st.tuples(st.booleans(), st.booleans()),
        size=st.sampled_from([100, 3000, 30_000]),
    )
    def write(self, which, run, flags, size):
        self.rig.now += 10
        length, seed = run
        pinned, covers = flags
        files, tokens = self.processes[which], self.rig.tokens(length, seed=seed)
        how = {"pinned": pinned, "covers": covers, "rungs": (length // 2,), "state_bytes": size}
        if size > self.budget:
            with pytest.raises(SnapshotRefused):
                self.rig.write(files, tokens, **how)
            return
        self.damaged.discard(self.rig.write(files, tokens, **how).path)
        assert files.holds(tokens)
        assert files.usage().size_bytes <= self.budget

    @rule(which=st.integers(0, 1), choice=st.integers(0, 9))
    def load(self, which, choice):
        files = self.processes[which]
        found = files.find()
        if not found:
            return
        file = found[choice % len(found)]
        self.rig.now += 10
        if file.path in self.damaged:
            with pytest.raises(SnapshotUnusable):
                files.load(file)
            assert not file.path.exists()
        else:
            self.rig.check_loaded(files, file)
            assert files.find()[0].path == file.path

    @precondition(lambda self: any(process.find() for process in self.processes))
    @rule(data=st.data())
    def damage(self, data):
        files = [file for process in self.processes for file in process.find()]
        file = data.draw(st.sampled_from(files))
        if file.path not in self.damaged:
            flip(file.path, data.draw(st.integers(0, file.size_bytes - 1)))
            self.damaged.add(file.path)

    @rule(which=st.integers(0, 1))
    def remove_behind_its_back(self, which):
        found = self.processes[which].find()
        if found:
            found[-1].path.unlink()

    @rule(which=st.integers(0, 1), keep=st.sampled_from([0, 10_000, 10**9]))
    def prune(self, which, keep):
        report = self.processes[which].prune(keep_bytes=keep)
        assert report.held_bytes == self.processes[which].usage().size_bytes <= keep

    @rule(which=st.integers(0, 1))
    def leave_a_temporary_file(self, which):
        folder = self.rig.folder / self.identities[which].seed.hex()
        if folder.is_dir():
            (folder / f"{TEMPORARY_PREFIX}999-x").write_bytes(bytes(10))

    @rule()
    def verify(self):
        there = {path for path in self.damaged if path.exists()}
        assert {one.path for one in self.processes[0].verify().unusable} == there

    @invariant()
    def each_process_knows_what_is_there(self):
        for process in self.processes:
            process.check_integrity()
        self.damaged = {path for path in self.damaged if path.exists()}


def test_two_processes_and_damage_at_any_time(tmp_path_factory, snapshot_rig):
    class Machine(SnapshotMachine):
        make_rig = staticmethod(lambda: snapshot_rig(tmp_path_factory.mktemp("machine") / "kv"))

    run_state_machine_as_test(Machine, settings=settings(max_examples=30, stateful_step_count=25))
