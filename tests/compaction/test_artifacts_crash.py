"""A writer that is killed at any line of the store's code, in a process of its own.

Run as a script this file is the child: for n = 1, 2, … it forks, does the work there with every executed line counted,
and has itself killed at the n-th; then it looks at what was left, and does the work again.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from chapbook.compaction import artifacts, blob_files, blob_index, durable_files, intake, stored_text
from chapbook.compaction.artifacts import ArtifactRef, ArtifactStore
from chapbook.kernels.secrets import redact

TRACED = {module.__file__ for module in (artifacts, blob_files, blob_index, durable_files, intake, stored_text)}
SECRET = b"ghp_" + b"A1b2C3d4E5f6G7h8I9j0" + b"K1l2M3n4O5p6Q7r8"
PLAIN = b"a line of text\n" * 10_000
LEAD = b"exit 1\n"


class Work:
    """One way of using the store in `root`, the file to adopt being in `source_folder`."""

    def __init__(self, name: str, root: Path, source_folder: Path) -> None:
        self.name = name
        self.root = root
        self.store = ArtifactStore(root / "artifacts", index_from_bytes=1000)
        self.source = source_folder / f"captured-{os.getpid()}"
        self.data = PLAIN[:70_000] + SECRET + PLAIN[70_000:] if "secret" in name else PLAIN
        self.lead = LEAD if "lead" in name else b""
        self.content = redact(self.lead + self.data).data
        self.sha256 = hashlib.sha256(self.content).hexdigest()

    def prepare(self) -> None:
        shutil.rmtree(self.root, ignore_errors=True)
        self.root.mkdir()
        self.store.put(b"an older blob")
        if "adopt" in self.name:
            self.source.write_bytes(self.data)
        if "index" in self.name:
            self.store.put(self.data).path.with_suffix(".idx").unlink()
        if "damaged" in self.name:
            self.store.put(self.data).path.write_bytes(b"damaged")

    def do(self) -> ArtifactRef:
        if "adopt" in self.name:
            return self.store.adopt(self.source, lead=self.lead)
        if "put" in self.name:
            return self.store.put(self.data)
        with self.store.open_text(self.store.find(self.sha256)) as text:
            return text.ref

    def check_after_kill(self) -> None:
        """Every name has its whole content; no secret is anywhere; the file to adopt is there, or its blob is."""
        problems = [problem for problem in self.store.verify().problems if "damaged" not in self.name]
        assert problems == []
        blobs = {ref.sha256 for ref in self.store.refs()}
        assert blobs <= {self.sha256, hashlib.sha256(b"an older blob").hexdigest()}
        files = [path.read_bytes() for path in self.store.folder.rglob("*") if path.is_file()]
        assert not any(b"ghp_" in data for data in files)
        if "adopt" in self.name:
            is_stored = self.sha256 in blobs and self.store.read(self.sha256) == self.content
            assert is_stored or self.source.read_bytes() == self.data

    def do_again(self) -> None:
        if "adopt" in self.name and not self.source.exists():
            self.source.write_bytes(self.data)  # the caller did not learn that it was stored
        ref = self.do()
        assert ref.sha256 == self.sha256
        assert self.store.read(self.sha256) == self.content
        assert not self.source.exists()
        assert ref.path.with_suffix(".idx").exists()
        self.store.check_integrity()


def killed_at(line: int, work: Callable[[], object]) -> bool:
    """Do the work in a fork that is killed before it executes the n-th line of the store; False if it came through."""
    pid = os.fork()
    if pid == 0:
        left = line

        def trace(frame: FrameType, event: str, _argument: Any) -> Any:
            nonlocal left
            if event == "call":
                return trace if frame.f_code.co_filename in TRACED else None
            if event == "line":
                left -= 1
                if left == 0:
                    os.kill(os.getpid(), signal.SIGKILL)
            return trace

        sys.settrace(trace)
        work()
        sys.settrace(None)
        os._exit(0)
    _, status = os.waitpid(pid, 0)
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL
        return True
    assert status == 0
    return False


def main(name: str, root: str, source_folder: str, step: int) -> None:
    work = Work(name, Path(root), Path(source_folder))
    line = 1
    while True:
        work.prepare()
        was_killed = killed_at(line, work.do)
        work.check_after_kill()
        work.do_again()
        if not was_killed:
            break
        line += step
    print(line)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]))


WORKS = [
    "put",
    "put a secret",
    "put over a damaged blob",
    "adopt",
    "adopt a secret",
    "adopt with a lead",
    "adopt from another file system",
    "index anew",
]


def run_child(name: str, tmp_path: Path, *, step: int) -> int:
    """Return at how many executed lines the work was done."""
    memory = Path("/dev/shm")  # flushes cost nothing there
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as root:
        elsewhere = "another file system" in name
        source_folder = tmp_path if elsewhere else Path(root)
        if elsewhere and source_folder.stat().st_dev == Path(root).stat().st_dev:
            pytest.skip("no second file system here")
        command = [sys.executable, __file__, name, f"{root}/workspace", str(source_folder), str(step)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


@pytest.mark.parametrize("name", WORKS)
def test_a_writer_that_is_killed_leaves_whole_blobs_or_none(name: str, tmp_path: Path) -> None:
    assert run_child(name, tmp_path, step=7) > 60


@pytest.mark.slow  # some 1,800 forks
@pytest.mark.parametrize("name", WORKS)
def test_a_writer_killed_at_any_line_leaves_whole_blobs_or_none(name: str, tmp_path: Path) -> None:
    assert run_child(name, tmp_path, step=1) > 60
