"""Budgets of the prefix cache: shares of what is free, and the reserves that hold whatever was asked."""

from __future__ import annotations

import shutil

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from chapbook.runtime.prefix_cache.budget import plan_budgets
from chapbook.runtime.prefix_cache.machine import budgets_of_this_machine, free_disk_bytes
from chapbook.runtime.prefix_cache.options import CacheOptions

GB, MB = 1_000_000_000, 1_000_000


def plan(**changes):
    machine = {
        "free_memory_bytes": 6 * GB,
        "total_memory_bytes": 16 * GB,
        "free_disk_bytes": 50 * GB,
        "used_by_cache_bytes": 0,
        "asked_memory_mb": None,
        "asked_disk_mb": None,
    }
    return plan_budgets(**{**machine, **changes})


def test_by_itself_a_quarter_of_free_memory_and_a_tenth_of_free_disk():
    budgets = plan()
    assert (budgets.memory_bytes, budgets.disk_bytes, budgets.reserve_bytes) == (1500 * MB, 5 * GB, 1600 * MB)
    assert budgets.memory_reason == "25 % of 6.00 GB free memory"
    assert budgets.disk_reason == "10 % of 50.00 GB free on disk and 0 B held by the cache"


@pytest.mark.parametrize(
    ("free_mb", "asked_mb", "budget_mb"),
    [(4000, None, 1000), (1000, None, 200), (900, None, 100), (800, None, 0), (300, None, 0), (0, None, 0),
     (1000, 150, 150), (1000, 2000, 200), (300, 64, 0), (4000, 3000, 3000), (4000, 4000, 3200), (4000, 0, 0)],
)  # fmt: skip
def test_an_8_gb_laptop_is_left_a_tenth_of_its_memory(free_mb, asked_mb, budget_mb):
    budgets = plan(free_memory_bytes=free_mb * MB, total_memory_bytes=8 * GB, asked_memory_mb=asked_mb)
    assert budgets.memory_bytes == budget_mb * MB
    assert free_mb * MB - budgets.memory_bytes >= min(free_mb * MB, 800 * MB)


def test_a_budget_that_was_lowered_says_from_what_and_why():
    short = {"free_memory_bytes": GB, "total_memory_bytes": 8 * GB}
    reserve = "but 800.0 MB, 10 % of all memory, must stay free, and 1.00 GB are"
    assert plan(**short).memory_reason == f"25 % of 1.00 GB free memory is 250.0 MB, {reserve}"
    assert plan(**short, asked_memory_mb=2000).memory_reason == f"cache.memory_mb asks for 2.00 GB, {reserve}"
    assert plan(**short, asked_memory_mb=200).memory_reason == "as cache.memory_mb asks"
    full = plan(free_disk_bytes=500 * MB, used_by_cache_bytes=2 * GB, asked_disk_mb=3000)
    assert full.disk_bytes == 1500 * MB
    assert full.disk_reason == (
        "cache.disk_mb asks for 3.00 GB, but 1.00 GB of disk must stay free: "
        "500.0 MB free on disk and 2.00 GB held by the cache"
    )


@pytest.mark.parametrize(
    ("free_gb", "asked_mb", "budget_mb"),
    [(500, None, 20_000), (200, None, 20_000), (100, None, 10_000), (1, None, 0), (500, 100_000, 100_000), (5, 0, 0)],
)
def test_disk_is_taken_up_to_20_gb_by_itself_and_more_only_where_asked(free_gb, asked_mb, budget_mb):
    assert plan(free_disk_bytes=free_gb * GB, asked_disk_mb=asked_mb).disk_bytes == budget_mb * MB


def test_the_cap_is_named_where_it_holds():
    assert plan(free_disk_bytes=500 * GB).disk_reason.startswith("at most 20.00 GB: 10 % of 500.00 GB")


amounts = st.integers(0, 64 * GB)
asked = st.none() | st.integers(0, 80_000)


@given(held=st.integers(0, 30 * GB), free=st.integers(0, 900 * GB), asked_mb=asked)
def test_the_disk_budget_does_not_depend_on_how_full_the_cache_is(held, free, asked_mb):
    empty = plan(free_disk_bytes=free + held, asked_disk_mb=asked_mb)
    assert plan(free_disk_bytes=free, used_by_cache_bytes=held, asked_disk_mb=asked_mb).disk_bytes == empty.disk_bytes


@given(free=amounts, total=amounts, asked_mb=asked)
def test_whatever_is_asked_the_reserve_stays_free_and_no_more_is_kept_back_than_that(free, total, asked_mb):
    budgets = plan(free_memory_bytes=free, total_memory_bytes=total, asked_memory_mb=asked_mb)
    assert budgets.reserve_bytes == total // 10
    wanted = free // 4 if asked_mb is None else asked_mb * MB
    assert budgets.memory_bytes == max(0, min(wanted, free - total // 10))


def test_what_this_machine_has_is_measured(tmp_path):
    asked = CacheOptions(folder=str(tmp_path / "not" / "there" / "yet"), memory_mb=1, disk_mb=1)
    budgets = budgets_of_this_machine(asked, used_by_cache_bytes=0)
    assert (budgets.memory_bytes, budgets.disk_bytes) == (MB, MB)
    assert budgets.reserve_bytes == psutil.virtual_memory().total // 10


def test_without_a_folder_nothing_is_planned_on_disk():
    budgets = budgets_of_this_machine(CacheOptions(disk_mb=5000), used_by_cache_bytes=0)
    assert (budgets.disk_bytes, budgets.disk_reason) == (0, "snapshots on disk are off")


def test_free_disk_is_that_of_the_nearest_folder_that_is_there(tmp_path):
    told = free_disk_bytes(tmp_path / "a" / "b")
    assert abs(told - shutil.disk_usage(tmp_path).free) < GB
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(NotADirectoryError):
        free_disk_bytes(file / "kv")
    unusable = CacheOptions(folder=str(file / "kv"))
    assert budgets_of_this_machine(unusable, used_by_cache_bytes=0).disk_bytes == 0
