"""Snapshot files among processes: killed at any step, writing the same run, deleting while others load, a full disk.

Run as a script this file is the child: it does the deed that it is named until it is done, or killed.
"""

from __future__ import annotations

import importlib.util
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from chapbook.kernels.errors import SnapshotRefused, SnapshotUnusable, SnapshotWriteFailed
from chapbook.runtime.prefix_cache.snapshot_locks import is_abandoned

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="signals, file locks and limits as on Linux")

STEPS = ("created", "allocated", "hashed", "flushed", "renamed", "done")
DIRTY = ("created", "allocated", "hashed", "flushed")
"""Steps after which a killed writer leaves a temporary file."""


@pytest.fixture
def child() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Return a function (folder, *deed) that starts this file as a script. None outlives the test."""
    started = []

    def start(folder: Path, *arguments: str) -> subprocess.Popen[str]:
        command = [sys.executable, __file__, str(folder), *arguments]
        started.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
        return started[-1]

    yield start
    for process in started:
        if process.poll() is None:
            kill(process)


def said(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def finish(process: subprocess.Popen[str]) -> str:
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    return output.strip()


def kill(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGKILL)
    process.communicate()


@pytest.mark.parametrize("step", STEPS)
def test_a_writer_killed_at_any_step_leaves_no_wrong_file_and_its_leftovers_go(child, snapshots, step):
    files = snapshots.files(clock=time.time)
    snapshots.write(files, snapshots.tokens(300))
    process = child(snapshots.folder, "write", step, "400")
    assert said(process) == step
    temporary = list(snapshots.folder.rglob(".tmp-*"))
    assert len(temporary) == (step in DIRTY)
    assert not any(is_abandoned(path, now=time.time() + 10**6) for path in temporary), "its writer lives"
    kill(process)
    lengths = sorted(len(file.tokens) for file in files.find())
    assert lengths == {"renamed": [300, 400], "done": [400]}.get(step, [300])
    for file in files.find():
        snapshots.check_loaded(files, file)
    assert files.verify().unusable == ()
    snapshots.write(files, snapshots.tokens(200, seed=1))
    assert not list(snapshots.folder.rglob(".tmp-*"))
    snapshots.write(files, snapshots.tokens(500), covers=True)
    assert sorted(len(file.tokens) for file in files.find()) == [200, 500]


def test_prune_removes_what_a_killed_writer_left_and_not_what_a_living_one_writes(child, snapshots):
    killed, living = (child(snapshots.folder, "write", "allocated", length) for length in ("300", "400"))
    assert said(killed) == said(living) == "allocated"
    kill(killed)
    files = snapshots.files(clock=time.time)
    assert files.prune(keep_bytes=0).leftovers == 1
    assert len(snapshots.names()) == 1
    kill(living)
    assert files.prune(keep_bytes=0).leftovers == 1
    assert snapshots.names() == []


def test_two_processes_that_write_the_same_run_both_end_with_a_right_file(child, snapshots):
    writers = [child(snapshots.folder, "repeat", str(number)) for number in range(2)]
    files = snapshots.files(clock=time.time)
    while any(writer.poll() is None for writer in writers):
        for file in files.find():
            try:
                snapshots.check_loaded(files, file)
            except SnapshotUnusable as error:
                assert not error.damaged, error  # noqa: PT017 - may be replaced, must not be damaged
    assert [finish(writer) for writer in writers] == ["done", "done"]
    (file,) = files.find()
    snapshots.check_loaded(files, file)
    assert snapshots.names() == [file.path.name]
    assert files.take_notes() == ()


def test_two_processes_stay_within_the_budget_together(child, snapshots):
    writers = [child(snapshots.folder, "crowd", str(number)) for number in range(2)]
    files = snapshots.files(clock=time.time)
    most = 0
    while any(writer.poll() is None for writer in writers):
        most = max(most, files.usage().size_bytes)
    assert [finish(writer) for writer in writers] == ["done", "done"]
    assert 0 < most <= 60_000
    assert files.verify().unusable == ()


def test_files_deleted_while_they_are_loaded_give_the_right_state_or_none(child, snapshots):
    process = child(snapshots.folder, "delete")
    assert process.stdin is not None
    for free_memory in (10**9, 0, 10**9, 0):
        files = snapshots.files(clock=time.time, free_memory=lambda free=free_memory: free)
        for seed in range(8):
            snapshots.write(files, snapshots.tokens(300, seed=seed), state_bytes=300_000)
        found = files.find()
        process.stdin.write("go\n")
        process.stdin.flush()
        for file in found:
            try:
                np.testing.assert_array_equal(files.load_state(file), snapshots.state(file.tokens, 300_000))
            except SnapshotUnusable as error:
                assert error.reason == "it is gone"  # noqa: PT017 - either outcome is right
        assert said(process) == "deleted"
        assert files.find() == ()
        assert files.take_notes() == ()


@pytest.fixture
def small_disk(tmp_path):
    """Give a folder on a file system of 1 MB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = shutil.which("mount")
    command = [mount or "mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
    if mount is None or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("no file system can be mounted here: the limit on the size of files is tested instead")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_full_disk_is_refused_with_the_numbers_and_makes_way_once_there_is_room(small_disk, snapshot_rig):
    snapshots = snapshot_rig(small_disk / "kv")
    files = snapshots.files()
    first = snapshots.write(files, snapshots.tokens(300), state_bytes=500_000)
    (small_disk / "of others").write_bytes(bytes(400_000))
    tokens = snapshots.tokens(300, seed=1)
    before = snapshots.names()
    with pytest.raises(SnapshotRefused, match="are free on the disk") as caught:
        files.begin(tokens, snapshots.plan(tokens, state_bytes=620_000), pinned=False)
    assert caught.value.free_bytes < 200_000
    assert snapshots.names() == before
    second = snapshots.write(files, tokens, state_bytes=450_000)
    assert [file.path for file in files.find()] == [second.path], "the older one made way"
    assert not first.path.exists()
    snapshots.check_loaded(files, second)


def test_a_disk_that_fills_up_before_the_file_is_allocated_is_an_error_and_no_crash(small_disk, snapshot_rig):
    snapshots = snapshot_rig(small_disk / "kv")

    def fill_disk(step):
        if step == "created":
            (small_disk / "of others").write_bytes(bytes(shutil.disk_usage(small_disk).free))

    with pytest.raises(SnapshotWriteFailed, match=r"a snapshot of .* cannot be written: the disk is full"):
        snapshots.write(snapshots.files(on_step=fill_disk), snapshots.tokens(300), state_bytes=500_000)
    assert snapshots.names() == []


def test_a_limit_on_the_size_of_files_is_an_error_and_no_crash(child, snapshots):
    process = child(snapshots.folder, "limited")
    assert "larger than this process may write (ulimit -f)" in finish(process)
    assert snapshots.names() == []


def main(folder: Path, deed: str, *arguments: str) -> None:
    """Do one deed as a process of its own."""
    spec = importlib.util.spec_from_file_location("rig", Path(__file__).with_name("conftest.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["rig"] = module
    spec.loader.exec_module(module)
    rig = module.SnapshotRig(folder)

    if deed == "write":
        stop_at, length = arguments

        def stop(step: str) -> None:
            if step == stop_at:
                print(step, flush=True)
                signal.pause()

        files = rig.files(clock=time.time, on_step=stop)
        rig.write(files, rig.tokens(int(length)), rungs=(100,), covers=True)
    elif deed == "repeat":
        files = rig.files(clock=time.time)
        for _ in range(40):
            rig.write(files, rig.tokens(300), rungs=(100 + int(arguments[0]),))
        print("done")
    elif deed == "crowd":
        files = rig.files(clock=time.time, budget_bytes=60_000)
        for number in range(40):
            rig.write(files, rig.tokens(200 + number, seed=int(arguments[0])), state_bytes=8000)
        print("done")
    elif deed == "delete":
        for _ in sys.stdin:
            for path in folder.rglob("*.kv"):
                path.unlink()
            print("deleted", flush=True)
    elif deed == "limited":
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
        try:
            rig.write(rig.files(), rig.tokens(300), state_bytes=200_000)
        except SnapshotWriteFailed as error:
            print(error)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
    os._exit(0)
