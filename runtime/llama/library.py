"""The llama.cpp library: loaded once, its log routed into Python's.

Nothing is loaded until `library()` is called. A ctypes callback that llama.cpp still holds must stay referenced, or
the process crashes at the next log line: the value returned by `library()` keeps it for good.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import os
import sys
from collections import deque
from pathlib import Path
from typing import Any

from ...kernels.errors import ModelLoadError

LOG_LINES_KEPT = 40
"""Warnings and errors that a failed load shows at most."""

_LEVELS = {1: logging.DEBUG, 2: logging.INFO, 3: logging.WARNING, 4: logging.ERROR}
_CONTINUES = 5


class LlamaLog:
    """Collects llama.cpp's log lines into the logger ``chapbook.llama``, and keeps the last warnings and errors."""

    def __init__(self) -> None:
        self._logger = logging.getLogger("chapbook.llama")
        self._recent: deque[str] = deque(maxlen=LOG_LINES_KEPT)
        self._level = logging.INFO

    def receive(self, level: int, text: bytes | None, _user_data: object) -> None:
        """Take one piece of a line. llama.cpp calls this from any thread; it must not raise."""
        if level != _CONTINUES:
            self._level = _LEVELS.get(level, logging.DEBUG)
        if self._level < logging.WARNING and not self._logger.isEnabledFor(self._level):
            return
        line = (text or b"").decode("utf-8", "replace").rstrip()
        if not line or line == ".":
            return
        if self._level >= logging.WARNING:
            self._recent.append(line)
        # llama.cpp warns of things that concern its own command line; what matters here is raised as an error.
        self._logger.log(min(self._level, logging.INFO), line)

    def clear(self) -> None:
        """Forget the lines so far: what comes next belongs to one operation."""
        self._recent.clear()

    def recent(self) -> tuple[str, ...]:
        """Return the last warnings and errors, oldest first."""
        return tuple(self._recent)


class Library:
    """`api` is the low-level module of llama_cpp; `log` its log; `on_abort` a C function to use as abort callback.

    The abort callback is the C library's own `atoi` over a buffer: it returns 1 once the buffer holds ``1``. One
    written in Python would take the interpreter's lock 515 times for each ubatch.
    """

    def __init__(self) -> None:
        _prepare_openmp()
        try:
            from llama_cpp import llama_cpp as c_api  # noqa: PLC0415  (heavy, and an extra)
        except (ImportError, OSError, RuntimeError) as error:
            raise ModelLoadError(
                f"llama.cpp cannot be loaded: {error}. Install it with: pip install 'chapbook[llama]'",
                path=Path(),
            ) from error
        self.api: Any = c_api
        self.log = LlamaLog()
        self._log_callback = c_api.llama_log_callback(self.log.receive)
        self.listen()
        c_api.llama_backend_init()
        runtime = ctypes.CDLL("msvcrt" if sys.platform == "win32" else None)
        self.on_abort = ctypes.cast(runtime.atoi, c_api.ggml_abort_callback)

    def listen(self) -> None:
        """Forget earlier log lines and take those that come.

        Called before everything that may fail, since the log of llama.cpp is one for the process: whoever else uses it
        may have taken it, and a callback of theirs that is gone by now would crash the process.
        """
        self.api.llama_log_set(self._log_callback, None)
        self.log.clear()


@functools.cache
def library() -> Library:
    """Return the library, loading it at the first call. Raises ModelLoadError where it is not installed or broken."""
    return Library()


def _prepare_openmp() -> None:
    """Shorten OpenMP's busy waiting, which starves decoding as soon as another process wants the processor.

    Measured on two cores: 80 to 105 tokens/s idle by default, 27 beside one busy process and now and then 0.3;
    with this 75 to 81 and 17 to 29. Set OMP_WAIT_POLICY or GOMP_SPINCOUNT to have it otherwise.
    """
    if sys.platform == "linux" and "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "1000")


class CancelFlag:
    """The buffer that the abort callback reads; `set` makes a running `llama_decode` return at once."""

    def __init__(self) -> None:
        self._buffer = ctypes.create_string_buffer(b"0", 4)
        self.address = ctypes.cast(self._buffer, ctypes.c_void_p)

    def set(self) -> None:
        self._buffer[0] = b"1"
