"""The account of one sequence: which tokens are resident, in which slot, and whether their logits are at hand."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ...kernels.tokens import NO_TOKENS, TokenIds
from ..engine import SequenceId
from .memory import StateCopy

if TYPE_CHECKING:
    from .generation import LlamaGeneration


class ResidentRun:
    """A run of tokens that grows by one at a time and is cut back; amortised constant time for each token."""

    def __init__(self) -> None:
        self._buffer = np.empty(1024, dtype=np.int32)
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def append(self, token: int) -> None:
        """Add one token."""
        if self._length == len(self._buffer):
            self._buffer = np.resize(self._buffer, 2 * len(self._buffer))
        self._buffer[self._length] = token
        self._length += 1

    def extend(self, tokens: TokenIds) -> None:
        """Add a run of tokens."""
        wanted = self._length + len(tokens)
        if wanted > len(self._buffer):
            self._buffer = np.resize(self._buffer, max(wanted, 2 * len(self._buffer)))
        self._buffer[self._length : wanted] = tokens
        self._length = wanted

    def truncate(self, length: int) -> None:
        """Keep the first `length` tokens."""
        self._length = min(self._length, length)

    def view(self) -> TokenIds:
        """Return the run without a copy: valid until it next changes."""
        view = self._buffer[: self._length]
        view.flags.writeable = False
        return view

    def copy(self) -> TokenIds:
        """Return the run as a value of its own."""
        tokens = self._buffer[: self._length].copy()
        tokens.flags.writeable = False
        return tokens


class Snapshot:
    """A copy of the state that cannot be rewound, taken after `tokens`."""

    __slots__ = ("state", "tokens")

    def __init__(self, tokens: TokenIds, state: StateCopy) -> None:
        self.tokens, self.state = tokens, state


class SequenceState:
    """One open sequence. It holds memory only while it has a slot; without one its run is empty.

    `logits_at_hand`: the logits after the last resident token are either live in the context or in `saved_logits`
    (put aside when another sequence decoded). `lost` says why tokens that were resident are not any more.
    """

    __slots__ = (
        "__weakref__", "busy", "generation", "id", "last_used", "logits_at_hand", "lost", "run", "saved_logits",
        "slot", "snapshot",
    )  # fmt: skip

    def __init__(self, sequence: SequenceId) -> None:
        self.id = sequence
        self.slot: int | None = None
        self.run = ResidentRun()
        self.logits_at_hand = False
        self.saved_logits: NDArray[np.float32] | None = None
        self.snapshot: Snapshot | None = None
        self.lost = ""
        self.last_used = 0
        self.busy = False
        self.generation: weakref.ref[LlamaGeneration] | None = None

    @property
    def snapshot_tokens(self) -> TokenIds:
        """The run after which the snapshot was taken; empty without one."""
        return self.snapshot.tokens if self.snapshot is not None else NO_TOKENS

    @property
    def is_idle(self) -> bool:
        """Whether its memory may be taken: no sync is under way, and no reply is being generated."""
        generation = self.generation() if self.generation is not None else None
        return not self.busy and (generation is None or generation.is_finished)

    def forget_logits(self) -> None:
        """Note that the logits after the last resident token are not at hand."""
        self.logits_at_hand = False
        self.saved_logits = None

    def forget(self) -> None:
        """Note that nothing is resident."""
        self.run.truncate(0)
        self.forget_logits()
        self.snapshot = None
