"""A writer of a plan's file that is killed at every executed line in turn. Run as a script this file is the child."""

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import msgspec

from chapbook.compaction import durable_files, ledger_file
from chapbook.compaction.ledger import Ledger, LedgerStep
from chapbook.compaction.ledger_file import LedgerFile


def plan(name, count):
    steps = tuple(LedgerStep(id=f"s{n + 1}", text=f"step {n + 1} of {name}") for n in range(count))
    return Ledger(task=f"task {name}", key=None, session=name, steps=steps)


TRACED = {ledger_file.__file__, durable_files.__file__}


def killed_at(line, work):
    """Do the work in a fork that is killed before it executes the n-th line; return whether it was."""
    pid = os.fork()
    if pid == 0:
        left = line

        def trace(frame, event, _argument):
            nonlocal left
            if event == "call":
                return trace if frame.f_code.co_filename in TRACED else None
            left -= event == "line"
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return trace

        sys.settrace(trace)
        work()
        sys.settrace(None)
        os._exit(0)
    _, status = os.waitpid(pid, 0)
    assert os.WIFSIGNALED(status) or status == 0
    return os.WIFSIGNALED(status)


def crash(folder):
    """Have a plan of another task set aside and replaced, at every line of it; then have a bad file moved aside."""
    old, new, bad = plan("old", 40), plan("new", 2), b"{"
    file = LedgerFile(Path(folder), holder=None, clock=lambda: 1_800_000_000.0, pid=os.getpid())

    def supersede():
        file.set_aside(old)
        file.save(new)

    line, was_killed = 1, True
    while was_killed:
        for path in Path(folder).iterdir():
            path.unlink()
        file.save(old)
        was_killed = killed_at(line, supersede)
        stored = file.load().ledger
        assert stored in ((old, new) if was_killed else (new,))
        aside = [msgspec.json.decode(path.read_bytes(), type=Ledger) for path in Path(folder).glob("plan.set-aside-*")]
        assert aside == [old] or (aside == [] and stored == old)
        file.path.write_bytes(bad)
        killed_at(line, file.load)
        kept = [path for path in Path(folder).glob("plan*.json") if path.read_bytes() == bad]
        assert len(kept) == 1
        line += 1
    print(line)


def test_a_writer_that_is_killed_at_any_line_leaves_the_old_file_or_the_new():
    memory = Path("/dev/shm")  # flushes cost nothing there
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as folder:
        done = subprocess.run([sys.executable, __file__, folder], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 80


if __name__ == "__main__":
    crash(sys.argv[1])
