"""The supervisor as a program of its own, and what it says of the machine."""

from __future__ import annotations

import errno
import os
import subprocess
import sys

import pytest

from chapbook.runtime.tools import confine

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the supervisor is Linux only")


def supervise(*command: str, writable: tuple[str, ...] = ()) -> tuple[list[int], str]:
    """Run the supervisor; return the numbers of its report and what the command printed."""
    receive, send = os.pipe()
    run = subprocess.run(
        [sys.executable, "-I", "-S", confine.__file__, str(send), *writable, "--", *command],
        pass_fds=(send,),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    os.close(send)
    with os.fdopen(receive) as report:
        return [int(number) for number in report.read().split()], run.stdout


@pytest.mark.parametrize(("script", "code"), [("exit 0", 0), ("exit 7", 7), ("kill -9 $$", 137), ("kill -15 $$", 143)])
def test_the_report_gives_the_group_the_exit_code_and_what_was_ended(script: str, code: int) -> None:
    (group, exit_code, ended), output = supervise("sh", "-c", f"echo $$; {script}")
    assert (exit_code, ended) == (code, 0)
    assert output == f"{group}\n"


def test_a_command_that_is_not_there_is_said() -> None:
    (_, exit_code, _), output = supervise("/no/such/program")
    assert exit_code == 126
    assert "cannot run /no/such/program" in output


def test_a_command_that_cannot_be_confined_is_not_run() -> None:
    (_, exit_code, _), output = supervise("echo", "ran", writable=("/no/such/folder",))
    assert exit_code == 126
    assert "ran" not in output.replace("cannot run", "")


@pytest.mark.skipif(not confine.confinement_available(), reason="this kernel has no Landlock")
def test_confinement_covers_folders_and_single_files() -> None:
    (_, _, _), output = supervise(
        "sh", "-c", "echo > /dev/null && echo null; echo > /dev/full; echo x > /tmp/no", writable=(os.devnull,)
    )
    assert output.startswith("null\n")
    assert output.count(os.strerror(errno.EACCES)) == 2
