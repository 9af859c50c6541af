"""One flag that stops a prefill, a generation or a tool, from any thread."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Cancel:
    """A cancel request. Once set it stays set; every step of a turn gets its own or shares the turn's."""

    def __init__(self) -> None:
        self._event = threading.Event()
        self._lock = threading.RLock()
        self._listeners: list[Callable[[], None]] = []

    def set(self) -> None:
        """Ask for the stop and tell the listeners, each once. Safe in a signal handler's thread."""
        with self._lock:
            if self._event.is_set():
                return
            self._event.set()
            listeners = list(self._listeners)
        for listener in listeners:
            listener()

    @property
    def is_set(self) -> bool:
        """Whether the stop was asked for."""
        return self._event.is_set()

    def wait(self, timeout_s: float) -> bool:
        """Wait for the request; return whether it came."""
        return self._event.wait(timeout_s)

    @contextmanager
    def listening(self, listener: Callable[[], None]) -> Iterator[None]:
        """Call `listener` at the request while the block runs, at once if it has come already."""
        with self._lock:
            already = self._event.is_set()
            if not already:
                self._listeners.append(listener)
        if already:
            listener()
        try:
            yield
        finally:
            with self._lock:
                if listener in self._listeners:
                    self._listeners.remove(listener)
