"""Rules that hold for the files of the repository themselves."""

from __future__ import annotations

import re
import subprocess
from itertools import pairwise
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MOST_LINES = 450
MOST_FILE_BYTES = 500_000

EXEMPTION = re.compile(r"#\s*(noqa(?::\s*[A-Z]+\d+(?:,\s*[A-Z]+\d+)*)?|type:\s*ignore(?:\[[\w\-, ]+\])?|pragma:[\w ]+)")


def tracked_files() -> list[Path]:
    """Return the files that git knows of; skip where this is no clone."""
    if not (ROOT / ".git").exists():
        pytest.skip("not a git clone: there is no list of files to check")
    # CI may run as another user than the one who cloned.
    command = ["git", "-c", "safe.directory=*", "ls-files", "-z"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, check=True).stdout.decode()
    return [ROOT / name for name in listed.split("\0") if name and (ROOT / name).is_file()]


def python_files() -> list[Path]:
    return [path for path in tracked_files() if path.suffix == ".py"]


def named(path: Path, line: int) -> str:
    return f"{path.relative_to(ROOT)}:{line}"


def test_no_source_module_is_longer_than_its_limit() -> None:
    sources = [path for path in python_files() if path.relative_to(ROOT).parts[0] != "tests"]
    lengths = {str(path.relative_to(ROOT)): len(path.read_text(encoding="utf-8").splitlines()) for path in sources}
    assert len(lengths) > 10
    assert {name: lines for name, lines in lengths.items() if lines > MOST_LINES} == {}


def test_nothing_generated_and_nothing_large_is_committed() -> None:
    generated = {".gguf", ".whl", ".so", ".dll", ".dylib", ".pyc", ".gz", ".zip"}
    files = tracked_files()
    assert [path for path in files if path.suffix in generated] == []
    assert [path for path in files if path.stat().st_size > MOST_FILE_BYTES] == []


def test_no_path_of_a_developers_machine_is_committed() -> None:
    personal = re.compile(rf"{re.escape(str(ROOT))}\b|/(?:home|Users)/(?!user\b|me\b|you\b|someone\b)\w+|/tmp/lab\b")
    found = [
        f"{named(path, number)}: {match[0]}"
        for path in tracked_files()
        for number, line in enumerate(path.read_bytes().decode("utf-8", "replace").splitlines(), start=1)
        for match in personal.finditer(line)
        if path != Path(__file__)
    ]
    assert found == []


def test_every_exemption_from_a_check_has_its_reason_beside_it() -> None:
    bare = [
        named(path, number)
        for path in python_files()
        for number, (above, line) in enumerate(pairwise(["", *path.read_text(encoding="utf-8").splitlines()]), start=1)
        if path != Path(__file__) and not gives_reason(line, above=above)
    ]
    assert bare == []


def gives_reason(line: str, *, above: str) -> bool:
    """Whether a line without exemption, or one with words behind the exemption or in a comment right above."""
    exemption = EXEMPTION.search(line)
    if exemption is None or above.lstrip().startswith("#"):
        return True
    return bool(re.search(r"\w{2}", EXEMPTION.sub("", line[exemption.start() :])))


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("x = 1", True),
        ("import x  # noqa: E402", False),
        ("import x  # noqa: E402  the path is set above", True),
        ("import x  # type: ignore[import-untyped]  # noqa: E402", False),
        ("import x  # type: ignore[import-untyped]  # noqa: E402 - it has no types", True),
    ],
)
def test_the_check_tells_a_reason_from_none(line: str, reason: bool) -> None:
    assert gives_reason(line, above="") is reason


def test_every_ignored_rule_of_the_linter_has_its_reason_beside_it() -> None:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    ruff = text[text.index("[tool.ruff.lint]") :]
    ignored = re.search(r"^ignore = \[\n(.*?)^\]", ruff, re.MULTILINE | re.DOTALL)
    assert ignored
    lines = ignored[1].splitlines()
    for section in re.findall(r"^\[tool\.ruff\.lint\.per-file-ignores\]\n((?:.+\n)*)", ruff, re.MULTILINE):
        lines += [line for line in section.splitlines() if not line.startswith("#")]
    assert [line for line in lines if not re.search(r"#\s*\w+", line)] == []


def test_the_licence_is_apache_2() -> None:
    licence = (ROOT / "LICENSE").read_text(encoding="utf-8")
    assert "Apache License" in licence
    assert "Version 2.0, January 2004" in licence


def test_the_readme_names_the_two_commands_that_set_up_and_run() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert "git clone" in readme
    assert "make run" in readme


def test_the_changelog_says_what_the_version_or_the_next_one_brings() -> None:
    version = re.search(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(encoding="utf-8"), re.MULTILINE)
    assert version
    headings = re.findall(r"^## \[?([^\]\s]+)", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert {version[1], "Unreleased"} & set(headings)


@pytest.mark.parametrize("name", ["runtime", "compaction", "kernels", "bench"])
def test_the_link_tree_leads_to_the_source_folders(name: str) -> None:
    link = ROOT / "tests" / "_import_root" / "chapbook" / name
    assert link.is_symlink(), "this checkout has lost its symbolic links: clone with git -c core.symlinks=true"
    assert link.resolve() == ROOT / name
    assert not link.readlink().is_absolute()


def test_the_ci_script_can_be_started() -> None:
    assert (ROOT / ".ci" / "run").stat().st_mode & 0o111
