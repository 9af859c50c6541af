"""What self-tests found, on disk: kept for one model as it was opened, and ignored where it is not to be trusted."""

from __future__ import annotations

import os

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chapbook.runtime.prefix_cache.identity import CacheIdentity
from chapbook.runtime.prefix_cache.mode_results import (
    FORMAT,
    ModeResult,
    ModeResults,
    Outcome,
    all_results,
    load_modes,
    load_results,
    save_results,
)
from chapbook.runtime.prefix_cache.modes import ALL_MODES, ReuseModes

IDENTITY = CacheIdentity(
    fingerprint="f" * 16, model_name="tiny", memory="full attention", type_k="f16", type_v="f16", flash_attn="auto",
    rope="", lora="", build="b1",
)  # fmt: skip
PASSED = ModeResult(
    mode="rewind", outcome=Outcome.PASSED, source="rewind", cached=159, agreement=1.0, difference=0.0, divergence=0.0
)
FAILED = ModeResult(mode="memory_snapshot", outcome=Outcome.FAILED, reason="0.3 nats off")
OTHERS = (
    ModeResult(mode="partial_snapshot", outcome=Outcome.NOT_APPLICABLE, reason="none needed"),
    ModeResult(mode="disk_snapshot", outcome=Outcome.NOT_TESTED, reason="the disk is full"),
)


def results(*of_modes, identity=IDENTITY, tested=1_000_000.0):
    return ModeResults(identity=identity, tested=tested, results=of_modes or (PASSED, FAILED, *OTHERS))


def only_file(folder):
    (path,) = folder.iterdir()
    return path


def test_what_was_saved_is_there_again_and_only_what_failed_is_off(tmp_path):
    folder = tmp_path / "not" / "there" / "yet"
    save_results(folder, results())
    assert load_results(folder, IDENTITY) == results()
    assert load_modes(folder, IDENTITY) == ReuseModes(memory_snapshot=False)
    assert load_modes(folder, IDENTITY).off == ("memory snapshot",)
    assert oct(only_file(folder).stat().st_mode & 0o777) == "0o600"


def test_a_later_test_takes_the_place_of_an_earlier_one(tmp_path):
    save_results(tmp_path, results())
    save_results(tmp_path, results(PASSED, tested=2_000_000.0))
    assert load_modes(tmp_path, IDENTITY) == ALL_MODES
    assert [each.tested for each in all_results(tmp_path)] == [2_000_000.0]


def test_where_nothing_is_known_every_mode_is_on(tmp_path):
    assert load_modes(tmp_path / "none", IDENTITY) == ALL_MODES
    assert all_results(tmp_path / "none") == ()


@pytest.mark.parametrize("field", ["fingerprint", "memory", "type_k", "type_v", "flash_attn", "rope", "lora", "build"])
def test_another_model_number_type_or_build_is_not_tested_yet(tmp_path, field):
    save_results(tmp_path, results())
    other = msgspec.structs.replace(IDENTITY, **{field: "another"})
    assert load_modes(tmp_path, other) == ALL_MODES
    save_results(tmp_path, results(PASSED, identity=other, tested=2.0))
    assert load_modes(tmp_path, IDENTITY) == ReuseModes(memory_snapshot=False)
    assert [each.identity for each in all_results(tmp_path)] == [IDENTITY, other]


def test_a_file_under_the_name_of_another_model_does_not_count(tmp_path):
    other = msgspec.structs.replace(IDENTITY, build="b2")
    save_results(tmp_path, results())
    only_file(tmp_path).rename(tmp_path / f"{other.seed.hex()}.json")
    assert load_results(tmp_path, other) is None


@pytest.mark.parametrize(
    "change",
    [
        {"format": FORMAT - 1},
        {"format": FORMAT + 1},
        {"results": [{"mode": "telepathy", "outcome": "failed"}]},
        {"results": [{"mode": "rewind", "outcome": "perhaps"}]},
        {"results": 3},
        {"tested": 1e300},
        {"tested": "yesterday"},
        {"identity": {}},
    ],
    ids=str,
)
def test_another_format_or_strange_content_is_ignored(tmp_path, change):
    save_results(tmp_path, results())
    path = only_file(tmp_path)
    path.write_bytes(msgspec.json.encode(msgspec.json.decode(path.read_bytes()) | change))
    assert load_results(tmp_path, IDENTITY) is None
    assert all_results(tmp_path) == ()


@pytest.mark.skipif(os.name != "posix", reason="no links to nowhere")
def test_what_is_no_file_is_ignored(tmp_path):
    path = tmp_path / f"{IDENTITY.seed.hex()}.json"
    path.mkdir()
    (tmp_path / "dangling.json").symlink_to(tmp_path / "nowhere")
    assert load_modes(tmp_path, IDENTITY) == ALL_MODES
    assert all_results(tmp_path) == ()


@settings(max_examples=60)
@given(cut=st.integers(0, 400), noise=st.binary(max_size=20))
def test_a_damaged_file_is_never_an_error(tmp_path_factory, cut, noise):
    folder = tmp_path_factory.mktemp("modes")
    save_results(folder, results())
    path = only_file(folder)
    path.write_bytes(path.read_bytes()[:cut] + noise)
    assert load_modes(folder, IDENTITY) == ALL_MODES


def test_what_failed_is_named_with_the_date_and_the_way_out():
    (note,) = results(FAILED, msgspec.structs.replace(FAILED, mode="moved_tail")).notes()
    assert "failed: memory snapshot, moved tail." in note
    assert "of 1970-01-" in note
    assert "doctor --self-test" in note
    assert results(PASSED, *OTHERS).notes() == ()


def test_modes_of_two_origins_are_on_where_both_say_so():
    both = ReuseModes(rewind=False).and_also(ReuseModes(fork=False))
    assert both == ReuseModes(rewind=False, fork=False)
    assert ReuseModes.only("fork").off == tuple(name for name in ALL_MODES_NAMES if name != "fork")


ALL_MODES_NAMES = tuple(name.replace("_", " ") for name in ReuseModes.__struct_fields__)
