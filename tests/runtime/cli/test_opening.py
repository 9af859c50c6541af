"""From configuration to a session: the model that is meant, the limits of tools, the counting of tokens."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from chapbook.compaction.artifacts import ArtifactStore
from chapbook.kernels.errors import ModelNotFound, UsageError
from chapbook.runtime.calls import CallId, ChoiceKind, ToolChoice
from chapbook.runtime.cancel import Cancel
from chapbook.runtime.cli.opening import (
    FAST_COUNT_CHARACTERS,
    LargeTextCounter,
    Place,
    cache_options,
    choose_model,
    configured_tools,
    find_session_model,
    fingerprint_of,
    modes_folder,
    parse_tool_choice,
    snapshot_folder,
)
from chapbook.runtime.config import load_config, parse_flag
from chapbook.runtime.events import SessionStart
from chapbook.runtime.llama import open_vocabulary
from chapbook.runtime.models import ModelPlaces
from chapbook.runtime.prefix_cache.options import CacheOptions
from chapbook.runtime.store import Store
from chapbook.runtime.tools.spec import ToolContext
from chapbook.runtime.tools.workspace import Workspace


@pytest.fixture
def places(tmp_path):
    """Return places without a model, and the folder in which one can be put."""
    own = tmp_path / "own"
    own.mkdir()
    return ModelPlaces(own=own)


def started(path):
    return SessionStart(
        session="s", log_format=1, chapbook="0", model_name="tiny", model_path=str(path), template_hash="", n_ctx=512,
        config={}, fingerprint=fingerprint_of(path),
    )  # fmt: skip


def test_the_only_model_there_is_needs_no_name(places, tiny_llama):
    with pytest.raises(ModelNotFound, match="none was found"):
        choose_model(None, places=places)
    shutil.copy(tiny_llama, places.own / "one.gguf")
    assert choose_model(None, places=places) == places.own / "one.gguf"
    shutil.copy(tiny_llama, places.own / "two.gguf")
    with pytest.raises(ModelNotFound, match="2 were found") as raised:
        choose_model(None, places=places)
    assert raised.value.nearest == ("one", "two")


def test_a_session_finds_its_model_again_by_its_fingerprint(places, tiny_llama, tmp_path, workspace):
    first = tmp_path / "first.gguf"
    shutil.copy(tiny_llama, first)
    start = started(first)
    assert find_session_model(start, workspace=workspace, places=places) == first
    first.rename(places.own / "renamed.gguf")
    assert find_session_model(start, workspace=workspace, places=places) == places.own / "renamed.gguf"
    (places.own / "renamed.gguf").write_bytes(b"something else")
    assert find_session_model(start, workspace=workspace, places=places) is None


def test_a_model_that_lies_in_the_workspace_is_not_loaded_unasked(places, tiny_llama, workspace):
    shutil.copy(tiny_llama, workspace / "brought.gguf")
    assert find_session_model(started(workspace / "brought.gguf"), workspace=workspace, places=places) is None


def test_the_configured_limit_holds_for_bash_calls_that_name_none(workspace, tmp_path):
    (bash,) = [tool for tool in configured_tools(bash_timeout_s=1.0) if tool.name == "bash"]
    context = ToolContext(
        workspace=Workspace(workspace, workspace / ".chapbook"),
        cancel=Cancel(),
        call_id=CallId("call00001"),
        capture_folder=tmp_path / "captures",
        arrival_tokens=1000,
        count_tokens=len,
        artifacts=ArtifactStore(tmp_path / "artifacts"),
    )
    assert "timed out after 1 s" in bash.body(context, {"command": "sleep 50"}).content
    assert "timed out" not in bash.body(context, {"command": "sleep 1.2", "timeout": 30}).content


def test_a_large_text_has_the_same_count_as_by_the_tokenizer(smollm2_path):
    small = "def total(prices):\n    return sum(prices)  # 12.50 + 3\n"
    large = small * (FAST_COUNT_CHARACTERS // len(small) + 2)
    with open_vocabulary(smollm2_path) as vocabulary:
        count = LargeTextCounter(smollm2_path, vocabulary)
        for text in (small, large, large):
            assert count(text) == len(vocabulary.tokenize(text, parse_special=False))


def test_a_tool_choice_is_a_kind_or_a_tool():
    assert parse_tool_choice("required") == ToolChoice(ChoiceKind.REQUIRED)
    assert parse_tool_choice("read") == ToolChoice(ChoiceKind.NAMED, "read")
    with pytest.raises(UsageError, match="did you mean none"):
        parse_tool_choice("non")


# The cache


def placed(workspace, *settings):
    """Return a place with these settings alone, whatever the user of this machine has configured."""
    flags = {key: value for setting in settings for key, value in parse_flag(setting).items()}
    loaded = load_config(workspace=None, user_file=workspace / "none.toml", flags=flags)
    return Place(workspace=workspace, store=Store.in_workspace(workspace), loaded=loaded)


def test_by_itself_the_cache_is_in_the_users_cache_folder_for_all_workspaces(workspace, tmp_path):
    options = cache_options(placed(workspace))
    assert options.folder == cache_options(placed(tmp_path)).folder
    assert options == CacheOptions(folder=options.folder, modes_folder=options.modes_folder)
    assert Path(options.folder).parts[-2:] == ("chapbook", "kv")
    assert Path(options.modes_folder) == Path(options.folder).with_name("modes")


def test_the_cache_is_where_and_as_large_as_was_configured(workspace):
    place = placed(workspace, "cache.folder=kept/kv", "cache.memory_mb=64", "cache.disk_mb=100", "cache.rest_s=2")
    assert cache_options(place) == CacheOptions(
        folder=str(workspace / "kept" / "kv"), memory_mb=64, disk_mb=100, rest_s=2.0, modes_folder=str(modes_folder())
    )
    assert snapshot_folder(placed(workspace, "cache.folder=~/kv")) == Path("~/kv").expanduser()


@pytest.mark.parametrize("off", ["cache.disk=false", "cache.disk_mb=0"])
def test_without_disk_there_is_no_folder_to_write_to_and_one_to_look_at(workspace, off):
    place = placed(workspace, off)
    assert cache_options(place).folder is None
    assert snapshot_folder(place).name == "kv"
