"""A lock that is handed on in the order of asking, so that sessions on one engine take turns.

A plain lock is retaken at once by the thread that has just released it: one that generates in a loop would keep every
other waiting until its reply ends.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import Final

PATIENCE_S: Final = 1.0
"""How long a turn is waited for before it is looked whether whoever has it still lives."""


class Turns:
    """A fair mutual exclusion, used as a context manager. Not reentrant.

    An interrupt (Ctrl-C) may strike between the end of a turn and its handing on. So a thread that finds itself at
    turn already goes on with that one, and one that has ended is passed over.
    """

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._owner: threading.Thread | None = None
        self._waiting: deque[tuple[threading.Thread, threading.Lock]] = deque()

    def __enter__(self) -> None:
        me = threading.current_thread()
        with self._guard:
            if self._owner is None or self._owner is me:
                self._owner = me
                return
            gate = threading.Lock()
            gate.acquire()
            self._waiting.append((me, gate))
        try:
            while not gate.acquire(timeout=PATIENCE_S):
                self._pass_over_the_ended()
        except BaseException:
            self._give_up(me, gate)
            raise

    def try_enter(self) -> bool:
        """Take the turn if nobody has it; `with` then goes on with it. Say whether it is this thread's."""
        me = threading.current_thread()
        with self._guard:
            if self._owner is None:
                self._owner = me
            return self._owner is me

    def __exit__(self, *_: object) -> None:
        with self._guard:
            self._hand_on()

    def _hand_on(self) -> None:
        """Give the turn to the first that waits. The caller holds the guard."""
        self._owner = None
        if self._waiting:
            self._owner, gate = self._waiting.popleft()
            gate.release()

    def _pass_over_the_ended(self) -> None:
        with self._guard:
            if self._owner is None or not self._owner.is_alive():
                self._hand_on()

    def _give_up(self, me: threading.Thread, gate: threading.Lock) -> None:
        """Stop waiting after an interrupt; a turn that came at the same moment is passed on."""
        with self._guard:
            if (me, gate) in self._waiting:
                self._waiting.remove((me, gate))
            elif self._owner is me:
                self._hand_on()
