"""Snapshot files: written, found, loaded, replaced, kept within a budget, and explained."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from chapbook.kernels.errors import SnapshotError, SnapshotRefused, SnapshotUnusable, SnapshotWriteFailed

AUDITED: list[tuple[str, object]] | None = None


def audit(event, arguments):
    if AUDITED is not None and event in ("open", "os.scandir"):
        AUDITED.append((event, arguments[0]))


sys.addaudithook(audit)


@pytest.fixture
def audited():
    """Give the list of all opens and scans while the test runs: a hook cannot be taken away, so it is switched."""
    global AUDITED  # noqa: PLW0603  (a hook cannot be taken away again)
    AUDITED = []
    yield AUDITED
    AUDITED = None


def test_what_one_process_writes_another_finds_and_loads(snapshots):
    tokens = snapshots.tokens(1000)
    written = snapshots.write(snapshots.files(), tokens, rungs=(256, 700), pinned=True)
    files = snapshots.files()
    (found,) = files.find()
    np.testing.assert_array_equal(found.tokens, tokens)
    assert (found.path, found.rungs, found.pinned) == (written.path, (256, 700), True)
    assert found.created == found.used == snapshots.now
    assert found.size_bytes == written.size_bytes == found.path.stat().st_size
    snapshots.check_loaded(files, found)
    files.check_integrity()


def test_nothing_is_created_before_the_first_write(snapshots):
    files = snapshots.files()
    tokens = snapshots.tokens(300)
    assert files.find() == ()
    assert not files.holds(tokens)
    assert files.miss_reason(tokens) == ""
    assert files.usage().files == files.prune(keep_bytes=0).snapshots == files.verify().sound_files == 0
    with pytest.raises(SnapshotRefused):
        snapshots.files(budget_bytes=100).begin(tokens, snapshots.plan(tokens), pinned=False)
    assert not snapshots.folder.parent.exists()


@pytest.mark.skipif(os.name != "posix", reason="modes are of POSIX")
def test_files_and_folders_are_for_their_owner_alone(snapshots):
    file = snapshots.write(snapshots.files(), snapshots.tokens(300))
    assert file.path.stat().st_mode & 0o777 == 0o600
    assert {folder.stat().st_mode & 0o777 for folder in (file.path.parent, snapshots.folder)} == {0o700}


def test_a_part_of_a_file_can_be_loaded_by_itself(snapshots):
    files = snapshots.files()
    tokens = snapshots.tokens(600)
    file = snapshots.write(files, tokens, rungs=(100, 500))
    np.testing.assert_array_equal(files.load_state(file), snapshots.state(tokens, 5000))
    np.testing.assert_array_equal(files.load_rung(file, 500), snapshots.state(tokens[:500], 500))
    with pytest.raises(KeyError):
        files.load_rung(file, 101)


def test_a_listing_of_an_unchanged_folder_is_one_scan_and_opens_nothing(snapshots, audited):
    files = snapshots.files()
    for seed in range(3):
        snapshots.write(files, snapshots.tokens(300, seed=seed))
    snapshots.now += 1
    files.load(files.find()[0])
    reader = snapshots.files()
    reader.find()
    for unchanged in (files, reader):
        audited.clear()
        assert len(unchanged.find()) == 3
        assert [event for event, _ in audited] == ["os.scandir"]


def test_loading_makes_a_file_the_last_used_one(snapshots):
    files = snapshots.files()
    first, second = (snapshots.write(files, snapshots.tokens(300, seed=seed)) for seed in range(2))
    snapshots.now += 60
    files.load_state(first)
    assert [file.path for file in files.find()] == [first.path, second.path]
    assert [file.used for file in snapshots.files().find()] == [snapshots.now, snapshots.now - 60]


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_a_state_is_mapped_where_memory_is_short_and_survives_the_file(snapshots):
    file = snapshots.write(snapshots.files(), snapshots.tokens(300), rungs=(64,))

    def is_mapped():
        return str(file.path) in Path("/proc/self/maps").read_text()

    ample = snapshots.files(free_memory=lambda: 10**9)
    state = ample.load_state(file)
    assert not is_mapped()
    short = snapshots.files(free_memory=lambda: 6000)
    rung = short.load_rung(file, 64)
    assert not is_mapped()
    mapped = short.load_state(file)
    assert is_mapped()
    assert not mapped.flags.writeable
    file.path.unlink()
    np.testing.assert_array_equal(mapped, state)
    np.testing.assert_array_equal(rung, snapshots.state(file.tokens[:64], 500))


def test_a_longer_run_replaces_the_shorter_ones_that_it_covers(snapshots):
    files = snapshots.files()
    for length in (100, 200, 300):
        snapshots.write(files, snapshots.tokens(length))
    snapshots.write(files, snapshots.tokens(150, seed=1))
    snapshots.write(snapshots.files(identity=snapshots.identity(build="b2")), snapshots.tokens(120))
    snapshots.write(files, snapshots.tokens(400), rungs=(200,))
    assert sorted(len(file.tokens) for file in files.find()) == [100, 150, 300, 400]
    snapshots.write(files, snapshots.tokens(500), covers=True)
    assert sorted(len(file.tokens) for file in files.find()) == [150, 500]
    assert files.usage().files == 3
    files.check_integrity()


def test_a_pinned_file_stays_beside_longer_ones_and_stays_pinned(snapshots):
    files = snapshots.files()
    prefix = snapshots.tokens(100)
    snapshots.write(files, prefix, pinned=True)
    snapshots.write(files, snapshots.tokens(400), covers=True)
    snapshots.write(files, prefix, pinned=False)
    assert {len(file.tokens): file.pinned for file in files.find()} == {100: True, 400: False}


def test_a_run_is_held_by_its_exact_tokens_and_identity(snapshots):
    files = snapshots.files()
    snapshots.write(files, snapshots.tokens(300))
    assert files.holds(snapshots.tokens(300))
    assert not files.holds(snapshots.tokens(299))
    assert not files.holds(snapshots.tokens(300, seed=1))
    assert not snapshots.files(identity=snapshots.identity(rope="x2")).holds(snapshots.tokens(300))


def test_an_abandoned_file_leaves_nothing(snapshots):
    files = snapshots.files()
    tokens = snapshots.tokens(300)
    pending = files.begin(tokens, snapshots.plan(tokens), pinned=False)
    assert len(snapshots.names()) == 1
    pending.abandon()
    pending.abandon()
    with pytest.raises(ZeroDivisionError), files.begin(tokens, snapshots.plan(tokens), pinned=False):
        _ = 1 // 0
    assert snapshots.names() == []


@pytest.mark.parametrize("step", ["created", "allocated", "hashed", "flushed"])
def test_an_error_at_any_step_leaves_nothing_and_says_what_could_not_be_done(snapshots, step):
    def fail(reached):
        if reached == step:
            raise OSError(28, "No space left on device")

    with pytest.raises(
        SnapshotWriteFailed, match=r"a snapshot of 8\.8 kB cannot be written: the disk is full"
    ) as caught:
        snapshots.write(snapshots.files(on_step=fail), snapshots.tokens(300), state_bytes=7000)
    assert caught.value.errno == 28
    assert snapshots.names() == []


def test_a_writer_whose_temporary_file_was_taken_away_fails_cleanly(snapshots):
    files = snapshots.files()
    tokens = snapshots.tokens(300)
    with files.begin(tokens, snapshots.plan(tokens), pinned=False) as pending:
        next(snapshots.folder.rglob(".tmp-*")).unlink()
        with pytest.raises(SnapshotWriteFailed):
            pending.commit()
    assert snapshots.names() == []


def test_the_budget_holds_over_all_identities_and_the_least_used_goes_first(snapshots):
    budget = 32_000
    other = snapshots.files(identity=snapshots.identity(model_name="other", fingerprint="0"), budget_bytes=budget)
    files = snapshots.files(budget_bytes=budget)
    written = []
    for seed in range(8):
        snapshots.now += 100
        written.append(snapshots.write(other if seed % 2 else files, snapshots.tokens(300, seed=seed)))
        assert files.usage().size_bytes <= budget
        snapshots.now += 100
        snapshots.check_loaded(files, written[0])
    assert 4 <= budget / written[0].size_bytes < 5, "the test needs a budget for four files"
    left = {file.path for one in (files, other) for file in one.find()}
    assert left == {file.path for file in (written[0], *written[5:])}


def test_of_files_used_alike_the_one_with_fewest_tokens_in_its_bytes_goes_first(snapshots):
    files = snapshots.files(budget_bytes=60_000)
    snapshots.write(files, snapshots.tokens(3000, seed=1), state_bytes=10_000)
    snapshots.write(files, snapshots.tokens(300, seed=2), state_bytes=20_000)
    snapshots.write(files, snapshots.tokens(300, seed=3), state_bytes=10_000)
    assert sorted(len(file.tokens) for file in files.find()) == [300, 300, 3000]
    snapshots.write(files, snapshots.tokens(300, seed=4), state_bytes=10_000)
    assert {int(file.tokens[0]) for file in files.find()} == {int(snapshots.tokens(1, seed=n)[0]) for n in (1, 3, 4)}


def test_pinned_files_are_the_last_to_go(snapshots):
    files = snapshots.files(budget_bytes=18_000)
    pinned = snapshots.write(files, snapshots.tokens(300), pinned=True)
    for seed in (1, 2, 3):
        snapshots.now += 1000
        snapshots.write(files, snapshots.tokens(300, seed=seed))
        assert pinned.path in {file.path for file in files.find()}
    snapshots.write(files, snapshots.tokens(300, seed=4), state_bytes=14_000)
    assert [len(file.header.sections) for file in files.find()] == [1]
    assert not pinned.path.exists()


def test_a_run_makes_room_by_its_own_shorter_files_first(snapshots):
    files = snapshots.files(budget_bytes=20_000)
    snapshots.write(files, snapshots.tokens(300, seed=1))
    snapshots.now += 1000
    snapshots.write(files, snapshots.tokens(300))
    snapshots.write(files, snapshots.tokens(400), state_bytes=6000)
    assert sorted(len(file.tokens) for file in files.find()) == [300, 400]
    assert files.holds(snapshots.tokens(300, seed=1))


def test_what_is_over_the_budget_is_refused_with_the_numbers_and_nothing_is_touched(snapshots):
    files = snapshots.files(budget_bytes=20_000)
    snapshots.write(files, snapshots.tokens(300))
    before = snapshots.names()
    tokens = snapshots.tokens(300, seed=1)
    with pytest.raises(SnapshotRefused, match=r"may take 20\.0 kB on disk. Raise cache.disk_mb") as caught:
        files.begin(tokens, snapshots.plan(tokens, state_bytes=20_000), pinned=False)
    assert caught.value.budget_bytes == 20_000
    assert caught.value.size_bytes > 20_000
    assert caught.value.free_bytes > 0
    assert snapshots.names() == before


def test_what_would_fill_the_disk_is_refused_with_the_numbers(snapshots):
    tokens = snapshots.tokens(300)
    with pytest.raises(SnapshotRefused, match="are free on the disk, and 5 % of that must stay free"):
        snapshots.files(budget_bytes=1 << 50).begin(tokens, snapshots.plan(tokens, state_bytes=1 << 40), pinned=False)
    assert not snapshots.folder.exists()


def test_files_that_others_are_writing_count_and_stay(snapshots):
    files = snapshots.files(budget_bytes=20_000)
    first = snapshots.tokens(300)
    with files.begin(first, snapshots.plan(first, state_bytes=12_000), pinned=False) as pending:
        second = snapshots.tokens(300, seed=1)
        with pytest.raises(SnapshotRefused, match="are being written by others"):
            snapshots.files(budget_bytes=20_000).begin(second, snapshots.plan(second), pinned=False)
        snapshots.files().prune(keep_bytes=0)
        snapshots.fill(pending, first, snapshots.plan(first, state_bytes=12_000))
        pending.commit()
    assert files.holds(first)


def test_a_folder_that_cannot_be_made_is_an_error_with_the_way_out(snapshots):
    snapshots.folder.parent.mkdir()
    snapshots.folder.write_text("not a folder")
    tokens = snapshots.tokens(300)
    with pytest.raises(SnapshotWriteFailed):
        snapshots.files().begin(tokens, snapshots.plan(tokens), pinned=False)
    assert snapshots.files().find() == ()


def test_a_linked_folder_is_neither_read_nor_written(snapshots, tmp_path):
    file = snapshots.write(snapshots.files(), snapshots.tokens(300))
    file.path.parent.rename(tmp_path / "elsewhere")
    file.path.parent.symlink_to(tmp_path / "elsewhere")
    files = snapshots.files()
    assert files.find() == ()
    tokens = snapshots.tokens(400)
    with pytest.raises(SnapshotWriteFailed, match="is a link"):
        files.begin(tokens, snapshots.plan(tokens), pinned=False)
    assert len(list((tmp_path / "elsewhere").iterdir())) == 1


def test_a_miss_names_what_differs_in_the_identity(snapshots):
    other = snapshots.files(identity=snapshots.identity(type_k="q8_0"))
    snapshots.write(other, snapshots.tokens(5120))
    snapshots.write(snapshots.files(), snapshots.tokens(300))
    reason = snapshots.files().miss_reason(snapshots.tokens(6000))
    assert reason == "a snapshot of the first 5,120 tokens is there, but with K type q8_0, here f16"


def test_a_miss_names_the_token_at_which_the_nearest_run_parts(snapshots):
    files = snapshots.files()
    snapshots.write(files, snapshots.tokens(1312))
    wanted = snapshots.tokens(2000).copy()
    wanted[1200] += 1
    assert files.miss_reason(wanted) == "the longest snapshot parts from this run at token 1,200"


def test_a_miss_names_a_run_that_goes_on_beyond_the_wanted_one(snapshots):
    files = snapshots.files()
    snapshots.write(files, snapshots.tokens(1312))
    reason = files.miss_reason(snapshots.tokens(1000))
    assert reason == "the nearest snapshot holds this run and goes on to token 1,312"


def test_a_miss_has_no_reason_where_little_is_shared_or_all_is_used(snapshots):
    files = snapshots.files()
    snapshots.write(files, snapshots.tokens(1000))
    wanted = snapshots.tokens(1000).copy()
    wanted[63] += 1
    assert files.miss_reason(wanted) == ""
    assert files.miss_reason(snapshots.tokens(1001)) == ""


def test_usage_counts_by_identity_and_names_what_is_no_snapshot(snapshots):
    files = snapshots.files(budget_bytes=123_456)
    snapshots.write(files, snapshots.tokens(300))
    snapshots.write(files, snapshots.tokens(500), pinned=True)
    big = snapshots.write(snapshots.files(identity=snapshots.identity(model_name="big", build="b2")),
                          snapshots.tokens(64), state_bytes=50_000)  # fmt: skip
    (snapshots.folder / "notes.txt").write_text("mine")
    (big.path.parent / "x.bad").write_bytes(bytes(100))
    usage = files.usage()
    assert (usage.files, usage.budget_bytes) == (3, 123_456)
    assert [
        (one.identity.model_name, one.files, one.pinned_files, one.longest_tokens) for one in usage.by_identity
    ] == [
        ("big", 1, 0, 64),
        ("tiny", 2, 1, 500),
    ]
    assert usage.size_bytes == sum(one.size_bytes for one in usage.by_identity) + 100
    assert [file.path.name for file in usage.set_aside] == ["x.bad"]
    assert [file.path.name for file in usage.others] == ["notes.txt"]


def test_prune_removes_leftovers_first_then_what_is_worth_least_and_nothing_of_others(snapshots):
    files = snapshots.files()
    old = snapshots.write(files, snapshots.tokens(300))
    snapshots.now += 1000
    new = snapshots.write(files, snapshots.tokens(300, seed=1))
    (snapshots.folder / "notes.txt").write_text("mine")
    (old.path.parent / "x.bad").write_bytes(bytes(100))
    (old.path.parent / ".tmp-1-x").write_bytes(bytes(50))
    report = files.prune(keep_bytes=10**9)
    assert (report.snapshots, report.leftovers, report.freed_bytes) == (0, 2, 150)
    report = files.prune(keep_bytes=new.size_bytes)
    assert (report.snapshots, report.leftovers, report.held_bytes) == (1, 0, new.size_bytes)
    assert [file.path for file in files.find()] == [new.path]
    assert files.prune(keep_bytes=0).held_bytes == 0
    assert snapshots.names() == ["notes.txt"]


def test_threads_that_write_load_find_and_prune_at_once_never_see_a_wrong_state(snapshots):
    files = snapshots.files(budget_bytes=80_000)
    stop, problems = threading.Event(), []

    def work(number: int):
        rng = np.random.default_rng(number)
        try:
            for _ in range(25):
                tokens = snapshots.tokens(int(rng.integers(100, 400)), seed=int(rng.integers(0, 4)))
                try:
                    snapshots.write(files, tokens, covers=bool(rng.integers(0, 2)), rungs=(64,))
                    for file in files.find():
                        snapshots.check_loaded(files, file)
                except SnapshotError as error:
                    if isinstance(error, SnapshotUnusable) and error.damaged:
                        problems.append(error)
        except BaseException as error:
            problems.append(error)
        stop.set()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    while not stop.wait(0.02):
        files.prune(keep_bytes=40_000)
        files.check_integrity()
    for thread in threads:
        thread.join()
    assert problems == []
    files.check_integrity()
    assert files.take_notes() == ()
    assert files.usage().size_bytes <= 80_000
