"""`chapbook cache` on real snapshot files, without a model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from chapbook.kernels.tokens import token_ids
from chapbook.runtime.prefix_cache.identity import CacheIdentity
from chapbook.runtime.prefix_cache.snapshot_files import SectionPlan, SnapshotFiles

MB = 1_000_000
IDENTITY = CacheIdentity(
    fingerprint="f", model_name="tiny\x1b[2J llama", memory="full attention", type_k="f16", type_v="q8_0",
    flash_attn="auto", rope="", lora="", build="1",
)  # fmt: skip


@pytest.fixture
def folder(tmp_path):
    """Return where the snapshots are."""
    return tmp_path / "kv"


@pytest.fixture
def keep(folder):
    """Return a function that keeps a run of so many tokens, and returns its file's path."""

    def keep_run(length, *, size=MB, first=0, used=1_700_000_000, pinned=False, identity=IDENTITY):
        files = SnapshotFiles(folder, identity=identity, budget_bytes=10**9, clock=lambda: used)
        tokens = token_ids([first, *range(1, length)])
        with files.begin(tokens, [SectionPlan(tokens=length, partial=False, size_bytes=size)], pinned=pinned) as file:
            file.section(0)[:] = 7
            return file.commit().path

    return keep_run


@pytest.fixture
def cache_command(run, folder):
    """Return a function that runs a command of `chapbook cache` on the folder."""
    return lambda *arguments: run("cache", *arguments, f"--set=cache.folder={folder}")


def flip_byte(path, at):
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def test_an_empty_cache_is_shown_with_its_budgets_and_creates_nothing(cache_command, folder):
    ended = cache_command("stats", "--set=cache.memory_mb=1", "--set=cache.disk_mb=2")
    memory, disk, place = ended.stdout.splitlines()
    assert memory.startswith("memory  1.0 MB: as cache.memory_mb asks")
    assert disk == "disk    2.0 MB: as cache.disk_mb asks"
    assert place == f"folder  {folder}: 0 B in 0 snapshots"
    assert not folder.exists()


def test_stats_show_each_model_and_what_is_no_snapshot(cache_command, keep, folder):
    keep(300, pinned=True)
    aside = keep(500, first=3)
    aside.rename(aside.with_suffix(".bad"))
    (folder / "mine.txt").write_text("not a snapshot")
    told = json.loads(cache_command("stats", "--json").stdout)
    assert (told["files"], len(told["set_aside"]), len(told["others"])) == (1, 1, 1)
    (model,) = told["models"]
    assert model["identity"]["model_name"] == IDENTITY.model_name
    assert (model["files"], model["pinned_files"], model["longest_tokens"]) == (1, 1, 300)
    assert told["size_bytes"] > 2 * MB
    assert told["budgets"]["disk_bytes"] > 0

    shown = cache_command("stats").stdout
    assert "1 file set aside (1.0 MB)" in shown
    assert "1 file of others, not touched" in shown
    assert "tiny\\u001b[2J llama" in shown
    assert "f16, q8_0" in shown
    assert "300 tokens" in shown
    assert "2023-11-1" in shown


def test_stats_and_prune_name_what_they_find_to_be_damaged_and_links(cache_command, keep, tmp_path):
    bad, linked = keep(300), keep(300, first=1)
    flip_byte(bad, 20)
    linked.rename(tmp_path / "away")
    linked.symlink_to(tmp_path / "away")
    shown = cache_command("stats").stdout
    assert f"problem: {bad} is not used, and was set aside: its header is not what was written\n" in shown
    assert f"problem: {linked} is not used: it is a symbolic link\n" in shown
    again = cache_command("stats").stdout
    assert f"set aside earlier, since it was damaged: {bad.with_suffix('.bad')}\n" in again
    flip_byte(worse := keep(300, first=2), 20)
    assert f"problem: {worse} is not used, and was set aside: " in cache_command("prune").stdout
    (link,) = json.loads(cache_command("prune", "--json").stdout)["unusable"]
    assert link["path"] == str(linked)


def test_stats_say_where_the_folder_is_over_its_budget(cache_command, keep):
    keep(300), keep(300, first=1)
    over = "2.0 MB of 1.0 MB: over the budget; the next snapshot, or chapbook cache prune, makes it smaller"
    assert over in cache_command("stats", "--set=cache.disk_mb=1").stdout.splitlines()
    for within in ("--set=cache.disk_mb=3", "--set=cache.disk=false"):
        assert "over the budget" not in cache_command("stats", within).stdout


@pytest.mark.parametrize("command", ["stats", "verify", "prune"])
def test_what_cannot_be_a_folder_of_snapshots_is_an_error(run, command, tmp_path):
    (tmp_path / "file").write_text("")
    for place, what in (("file", "is no folder"), ("file/below", "cannot be made")):
        ended = run("cache", command, f"--set=cache.folder={tmp_path / place}")
        assert (ended.returncode, ended.stdout) == (2, "")
        assert what in ended.stderr


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="it needs a file system that takes no new folder")
def test_a_folder_where_none_can_be_made_is_an_error_unless_the_disk_is_not_used(run):
    ended = run("cache", "verify", "--set=cache.folder=/proc/x")
    assert ended.returncode == 2
    assert "/proc/x is not there and cannot be made" in ended.stderr
    assert run("cache", "stats", "--set=cache.folder=/proc/x", "--set=cache.disk=false").returncode == 0


def test_prune_lets_the_budget_decide_and_says_what_went(cache_command, keep):
    newest = [keep(300, first=first, used=1_700_000_000 + first * 86_400) for first in range(5)][-1]
    assert "nothing to remove" in cache_command("prune").stdout
    ended = cache_command("prune", "--set=cache.disk_mb=2")
    assert ended.stdout.startswith("removed 4 snapshots, 4.0 MB; 1.0 MB are left in ")
    assert newest.exists()
    assert json.loads(cache_command("prune", "--all", "--json").stdout)["held_bytes"] == 0
    assert not newest.exists()


def test_prune_removes_leftovers_whatever_is_kept_and_nothing_that_is_not_its_own(cache_command, keep, folder):
    kept, aside = keep(300), keep(300, first=1)
    aside.rename(aside.with_suffix(".bad"))
    (folder / "mine.txt").write_text("not a snapshot")
    ended = cache_command("prune", "--keep-mb", "50")
    assert ended.stdout.startswith("removed 0 snapshots and 1 file that served nobody, 1.0 MB; 1.0 MB are left")
    assert kept.exists()
    assert (folder / "mine.txt").exists()


def test_prune_without_a_budget_to_prune_to_is_refused(cache_command, keep):
    kept = keep(300)
    ended = cache_command("prune", "--set=cache.disk=false")
    assert (ended.returncode, kept.exists()) == (2, True)
    assert "pass --keep-mb or --all" in ended.stderr
    assert cache_command("prune", "--all", "--keep-mb=1").returncode == 2
    assert cache_command("prune", "--keep-mb=-1").returncode == 2
    assert kept.exists()


def test_verify_proves_every_byte_and_names_what_is_bad(cache_command, keep):
    keep(300)
    bad = keep(300, first=1)
    ended = cache_command("verify")
    assert (ended.returncode, ended.stdout) == (
        0,
        f"2 snapshots, {2 * bad.stat().st_size / MB:.1f} MB: sound to the last byte\n",
    )
    flip_byte(bad, -1)
    ended = cache_command("verify")
    assert ended.returncode == 1
    first, problem = ended.stdout.splitlines()
    assert first.startswith("1 snapshot, ")
    assert problem.startswith(f"problem: {bad} is not used, and was set aside: ")
    assert cache_command("verify").returncode == 0  # it was set aside: what is left is sound


def test_verify_names_a_link_and_lists_all_for_programs(cache_command, keep, tmp_path):
    linked = keep(300)
    linked.rename(tmp_path / "away")
    linked.symlink_to(tmp_path / "away")
    ended = cache_command("verify", "--json")
    assert ended.returncode == 1
    (problem,) = json.loads(ended.stdout)["unusable"]
    assert problem["path"] == str(linked)
    assert "symbolic link" in problem["reason"]
