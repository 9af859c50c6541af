"""What a user installs: the files of the wheel, what an import costs, and which way imports go."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from email import message_from_bytes
from email.message import Message
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = ("runtime", "compaction", "kernels", "bench")
EXTRAS = {"llama", "hub", "bench", "test", "lint"}

HEAVY = ("llama_cpp", "jinja2", "tiktoken", "rich", "typer", "click", "prompt_toolkit", "psutil", "pathspec", "re2")
MOST_MODULES = 150
"""It takes 64. numpy alone brings over a hundred, and has to wait for the first use."""


def run(*command: str | Path, folder: Path = ROOT, path: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run a command to its end, `path` put before what Python imports from."""
    environment = os.environ | ({"PYTHONPATH": str(path)} if path else {})
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def build(source: Path, target: Path) -> Path:
    built = run(sys.executable, "-m", "hatchling", "build", "-d", target, folder=source)
    assert built.returncode == 0, built.stderr
    return target


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that holds the wheel and the sdist of this checkout."""
    return build(ROOT, tmp_path_factory.mktemp("built"))


@pytest.fixture(scope="module")
def wheel(built: Path) -> zipfile.ZipFile:
    return zipfile.ZipFile(next(built.glob("*.whl")))


@pytest.fixture(scope="module")
def installed(wheel: zipfile.ZipFile, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder to import from that holds the wheel's files, as pip would lay them out."""
    folder = tmp_path_factory.mktemp("installed")
    wheel.extractall(folder)
    return folder


@pytest.fixture(scope="module")
def metadata(wheel: zipfile.ZipFile) -> Message:
    return message_from_bytes(wheel.read(next(name for name in wheel.namelist() if name.endswith("/METADATA"))))


# The files


def test_the_wheel_holds_the_four_source_folders_and_nothing_else(wheel: zipfile.ZipFile) -> None:
    names = set(wheel.namelist())
    roots = {name.split("/")[0] for name in names}
    assert roots == {"chapbook", next(root for root in roots if root.endswith(".dist-info"))}
    assert {name.split("/")[1] for name in names if name.startswith("chapbook/")} == set(SOURCES)
    for source in SOURCES:
        modules = {f"chapbook/{path.relative_to(ROOT)}" for path in (ROOT / source).rglob("*.py")}
        assert modules <= names
        assert f"chapbook/{source}/py.typed" in names
    assert "chapbook/__init__.py" not in names, "chapbook is a namespace: bench and runtime may come apart one day"


def test_the_wheel_carries_the_licence(wheel: zipfile.ZipFile, metadata: Message) -> None:
    licence = next(name for name in wheel.namelist() if name.endswith("dist-info/licenses/LICENSE"))
    assert wheel.read(licence) == (ROOT / "LICENSE").read_bytes()
    assert metadata["License-Expression"] == "Apache-2.0"


def test_the_metadata_declares_extras_python_and_commands(wheel: zipfile.ZipFile, metadata: Message) -> None:
    assert set(metadata.get_all("Provides-Extra") or ()) == EXTRAS
    assert metadata["Requires-Python"] == ">=3.11"
    required = [line for line in metadata.get_all("Requires-Dist") or () if "extra ==" not in line]
    assert not any("llama" in line for line in required), "llama.cpp is an extra: an embedder may bring another engine"
    entry_points = wheel.read(next(name for name in wheel.namelist() if name.endswith("entry_points.txt"))).decode()
    assert "[console_scripts]\nchapbook = chapbook.runtime.cli:main" in entry_points
    assert "[chapbook.commands]\nbench = chapbook.bench.command:app" in entry_points


def test_the_sdist_builds_the_same_wheel(built: Path, wheel: zipfile.ZipFile, tmp_path: Path) -> None:
    with tarfile.open(next(built.glob("*.tar.gz"))) as archive:
        archive.extractall(tmp_path, filter="data")
    rebuilt = build(next(tmp_path.glob("chapbook-*")), tmp_path / "rebuilt")
    again = zipfile.ZipFile(next(rebuilt.glob("*.whl")))
    assert {entry.filename: entry.CRC for entry in again.infolist()} == {
        entry.filename: entry.CRC for entry in wheel.infolist()
    }


# Importing


def test_every_source_folder_imports_from_the_wheel(installed: Path, tmp_path: Path) -> None:
    program = "import importlib, sys; print(*(importlib.import_module(f'chapbook.{n}').__file__ for n in sys.argv[1:]))"
    imported = run(sys.executable, "-c", program, *SOURCES, folder=tmp_path, path=installed)
    assert imported.returncode == 0, imported.stderr
    assert imported.stdout.split() == [str(installed / "chapbook" / name / "__init__.py") for name in SOURCES]


def test_the_console_script_of_the_wheel_starts(installed: Path, tmp_path: Path) -> None:
    program = (
        "from importlib.metadata import entry_points\n"
        "(script,) = {point for point in entry_points(group='console_scripts') if point.name == 'chapbook'}\n"
        "script.load()()"
    )
    helped = run(sys.executable, "-c", program, "--help", folder=tmp_path, path=installed)
    assert helped.returncode == 0, helped.stderr
    assert "run" in helped.stdout


def test_importing_the_runtime_loads_nothing_heavy(tmp_path: Path) -> None:
    program = "import json, sys, chapbook.runtime; print(json.dumps(sorted(sys.modules)))"
    imported = run(sys.executable, "-c", program, folder=tmp_path)
    modules = json.loads(imported.stdout)
    assert "chapbook.runtime" in modules
    assert [name for name in HEAVY if name in modules] == []
    assert len(modules) <= MOST_MODULES


@pytest.mark.parametrize("name", SOURCES)
def test_bare_names_do_not_leak(name: str) -> None:
    assert importlib.util.find_spec(name) is None, "start the tests as `pytest`: `python -m pytest` adds the root"


# Directions


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    """A copy of the sources, to break rules in."""
    for name in SOURCES:
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, tmp_path / "chapbook" / name, ignore=ignored)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


def lint_imports(folder: Path) -> subprocess.CompletedProcess[str]:
    program = Path(sys.executable).with_name("lint-imports")
    return run(program, "--no-cache", folder=folder, path=folder)


def test_the_import_contracts_are_kept(copied: Path) -> None:
    linted = lint_imports(copied)
    assert linted.returncode == 0, linted.stdout


@pytest.mark.parametrize(
    ("module", "line", "contract"),
    [
        ("kernels/wrong.py", "from ..runtime import engine", "imports go one way"),
        ("compaction/wrong.py", "from ..bench import tiny_models", "imports go one way"),
        ("runtime/wrong.py", "import llama_cpp", "only the llama engine imports llama_cpp"),
        ("bench/wrong.py", "from llama_cpp import llama_cpp", "only the llama engine imports llama_cpp"),
    ],
)
def test_an_import_in_the_wrong_direction_breaks_a_contract(
    copied: Path, module: str, line: str, contract: str
) -> None:
    (copied / "chapbook" / module).write_text(f"{line}\n")
    linted = lint_imports(copied)
    assert linted.returncode == 1
    broken = [row for row in linted.stdout.splitlines() if row.endswith("BROKEN")]
    assert len(broken) == 1, linted.stdout
    assert broken[0].startswith(contract)
