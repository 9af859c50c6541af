"""A sparse file through the gate, in a process of its own: `python -m chapbook.bench.gate_process FOLDER BYTES`.

It says by how many bytes its peak of resident memory grew, and keeps everything until standard input ends.
"""

from __future__ import annotations

import resource
import sys
from pathlib import Path

from ..runtime.gate import Offered
from ..runtime.tools.spec import ToolOutput
from .gate import open_gate


def main(folder: Path, size_bytes: int) -> None:
    """Admit a small file first, so that what is loaded once is not counted; then the large one."""
    gate = open_gate(folder / "store", len)
    peaks = []
    for name, size in (("small", 4 << 20), ("large", size_bytes)):
        file = folder / name
        with file.open("wb") as sparse:
            sparse.truncate(size)
        output = ToolOutput(file=file)
        admitted = gate.admit([Offered(source="bash", output=output, limit_tokens=4000)], left_tokens=20_000)[0]
        assert admitted.artifact is not None, admitted.content
        peaks.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024))
    sys.stdout.write(f"{peaks[1] - peaks[0]}\n")
    sys.stdout.flush()
    sys.stdin.read()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
