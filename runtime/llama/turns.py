"""A lock that is handed on in the order of asking, so that sessions on one engine take turns.

A plain lock is retaken at once by the thread that has just released it: one that generates in a loop would keep every
other waiting until its reply ends.
"""

from __future__ import annotations

import threading
from collections import deque


class Turns:
    """A fair mutual exclusion, used as a context manager. Not reentrant."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._taken = False
        self._waiting: deque[threading.Lock] = deque()

    def __enter__(self) -> None:
        with self._guard:
            if not self._taken:
                self._taken = True
                return
            gate = threading.Lock()
            gate.acquire()
            self._waiting.append(gate)
        try:
            gate.acquire()
        except BaseException:
            self._give_up(gate)
            raise

    def __exit__(self, *_: object) -> None:
        with self._guard:
            if self._waiting:
                # It stays taken: it now belongs to the first that waits.
                self._waiting.popleft().release()
            else:
                self._taken = False

    def _give_up(self, gate: threading.Lock) -> None:
        """Stop waiting after an interrupt; a turn that came at the same moment is passed on."""
        with self._guard:
            if gate in self._waiting:
                self._waiting.remove(gate)
                return
        self.__exit__()
