"""What the session prefix costs with the whole default tool set, and that it is the same bytes everywhere.

Run as a script this file prints the prefix of a session with the model and in the workspace that it is given.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from chapbook.runtime.engine import Engine, EngineInfo
from chapbook.runtime.events import PrefixSection
from chapbook.runtime.llama import LlamaEngine
from chapbook.runtime.session import Session
from chapbook.runtime.session_settings import SessionHost
from chapbook.runtime.tools.builtin import builtin_tools
from chapbook.runtime.tools.reserved import RESERVED_SCHEMAS
from chapbook.runtime.tools.spec import Tool, ToolOutput
from chapbook.runtime.wrapped import WrappedEngine

MOST_TOKENS = 1500
RESERVED = tuple(Tool(schema=schema, body=lambda _context, _arguments: ToolOutput()) for schema in RESERVED_SCHEMAS)
TEMPLATES = Path(__file__).parent / "templates"


class Templated(WrappedEngine):
    """An engine whose model has another chat template."""

    def __init__(self, engine: Engine, template: str) -> None:
        super().__init__(engine)
        self._template = template

    @property
    def info(self) -> EngineInfo:
        return msgspec.structs.replace(self.engine.info, chat_template=self._template)


def prefix_of(engine: Engine, workspace: Path) -> tuple[PrefixSection, ...]:
    host = SessionHost(tools=[*builtin_tools(), *RESERVED])
    with Session.open(engine, workspace=workspace, host=host) as session:
        return session.prefix


if __name__ == "__main__":
    with LlamaEngine.open(Path(sys.argv[1]), n_ctx=4096, n_threads=1) as model:
        sys.stdout.buffer.write(msgspec.json.encode(prefix_of(model, Path(sys.argv[2]))))


@pytest.fixture(scope="module")
def smollm2(smollm2_path: Path) -> Iterator[LlamaEngine]:
    with LlamaEngine.open(smollm2_path, n_ctx=4096, n_threads=1) as engine:
        yield engine


def sizes(prefix: tuple[PrefixSection, ...]) -> dict[str, int]:
    return {section.name: section.tokens for section in prefix}


def test_the_prefix_with_all_fourteen_tools_is_at_most_1500_tokens(smollm2: LlamaEngine, tmp_path: Path) -> None:
    assert len(builtin_tools()) + len(RESERVED) == 14
    prefix = prefix_of(smollm2, tmp_path)
    assert sum(sizes(prefix).values()) <= MOST_TOKENS, sizes(prefix)
    text = "".join(piece.text for section in prefix for piece in section.pieces)
    assert all(f"- {tool.name}(" in text for tool in (*builtin_tools(), *RESERVED))


@pytest.mark.parametrize("name", ["qwen2_5", "qwen3", "hermes", "lfm2", "mistral_v3"])
def test_it_is_too_where_the_template_renders_the_tools_itself(name: str, smollm2: LlamaEngine, tmp_path: Path) -> None:
    template = (TEMPLATES / f"{name}.jinja").read_text("utf-8")
    prefix = prefix_of(Templated(smollm2, template), tmp_path)
    catalogue = "".join(piece.text for section in prefix if section.name == "catalogue" for piece in section.pieces)
    assert all(f'"{tool.name}"' in catalogue for tool in (*builtin_tools(), *RESERVED))
    assert sum(sizes(prefix).values()) <= MOST_TOKENS, sizes(prefix)


@pytest.fixture
def printed(smollm2_path: Path, tmp_path: Path) -> Callable[..., bytes]:
    """Return a function (workspace name, cwd, **environment) -> the prefix, as another process composes it."""

    def run(workspace: str, cwd: Path, **environment: str) -> bytes:
        folder = tmp_path / workspace
        folder.mkdir()
        (folder / f"{workspace}.txt").write_text(workspace)
        command = [sys.executable, __file__, str(smollm2_path), str(folder)]
        keep = {key: value for key, value in os.environ.items() if not key.startswith(("LC_", "LANG", "TZ", "PYTHON"))}
        return subprocess.run(command, cwd=cwd, env=keep | environment, capture_output=True, check=True).stdout

    return run


def test_it_is_the_same_bytes_in_another_process_place_time_zone_language_and_workspace(
    printed: Callable[..., bytes], tmp_path: Path, smollm2: LlamaEngine
) -> None:
    one = printed("one", tmp_path, PYTHONHASHSEED="1", TZ="UTC", LC_ALL="C")
    other = printed("another workspace", Path("/"), PYTHONHASHSEED="2", TZ="Asia/Tokyo", LC_ALL="tr_TR.UTF-8",
                    USER="someone else", HOME=str(tmp_path))  # fmt: skip
    assert one == other
    (tmp_path / "here").mkdir()
    assert msgspec.json.decode(one, type=tuple[PrefixSection, ...]) == prefix_of(smollm2, tmp_path / "here")
