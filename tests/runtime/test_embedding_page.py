"""The snippets of docs/embedding.md and of the README, run as they stand on a tiny model."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args

import pytest

from chapbook.runtime import (
    CacheOptions,
    LlamaEngine,
    SessionHost,
    SessionSettings,
    StreamEvent,
    ToolFinished,
    TurnEnded,
    TurnEndReason,
)
from chapbook.runtime.events import StepUsage
from chapbook.runtime.stream import SessionOpened

ROOT = Path(__file__).parents[2]
SNIPPET = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@pytest.fixture
def run_page(tiny: Callable[..., Path], tmp_path: Path) -> Iterator[Callable[[str], dict[str, Any]]]:
    """Return a function that runs the snippets of a page, in order, and returns the names that they leave."""
    (tmp_path / "README.md").write_text("# chapbook\n\nA chapbook is a small, cheap booklet.\n")
    (tmp_path / "model.gguf").symlink_to(tiny("llama"))

    def run(page: str) -> dict[str, Any]:
        text = (ROOT / page).read_text(encoding="utf-8")
        names: dict[str, Any] = {"__name__": page}
        for found in SNIPPET.finditer(text):
            # Behind the lines above it, so that a traceback names the line of the page.
            code = "\n" * text.count("\n", 0, found.start(1)) + found[1]
            exec(compile(code, str(ROOT / page), "exec"), names)
        return names

    with contextlib.chdir(tmp_path):
        yield run


def test_the_snippets_of_the_embedding_page_run_and_do_what_the_page_says(
    run_page: Callable[[str], dict[str, Any]], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    names = run_page("docs/embedding.md")
    assert names["engine"].residency.is_closed
    assert list((tmp_path / "kv").glob("*/*.kv")), "what was at rest is on the disk"
    counted = [event.content for event in names["events"] if isinstance(event, ToolFinished)]
    assert counted, "a call of it was forced"
    # A random model calls on until its reply is cut, in the middle of a call perhaps.
    assert re.fullmatch(r"\d+ words", counted[0]), counted
    assert isinstance(names["ended"], TurnEnded)
    assert len(names["answers"]) == 2
    assert (tmp_path / ".chapbook" / "sessions" / names["report"].session).is_dir()
    said = capsys.readouterr().out
    assert " cached (nothing), " in said
    assert any((tmp_path / ".chapbook" / "artifacts").glob("*/*.txt")), "the message that was too large is stored"


def test_the_snippet_of_the_readme_runs(run_page: Callable[[str], dict[str, Any]]) -> None:
    event = run_page("README.md")["event"]
    assert isinstance(event, TurnEnded)


def test_the_embedding_page_names_every_option_setting_event_and_figure() -> None:
    page = (ROOT / "docs" / "embedding.md").read_text(encoding="utf-8")
    options = [name for name in inspect.signature(LlamaEngine.open).parameters if name not in ("path", "cache")]
    structs = [*CacheOptions.__struct_fields__, *SessionSettings.__struct_fields__, *StepUsage.__struct_fields__]
    host = [field.name for field in dataclasses.fields(SessionHost)]
    events = [event.__name__ for event in get_args(StreamEvent) if event is not SessionOpened]
    assert [name for name in (*options, *structs, *host, *events) if f"`{name}`" not in page] == []
    assert [reason for reason in TurnEndReason if reason not in page] == []
