"""The account of one sequence: which tokens are resident, in which slot and cells, and whether their logits are."""

from __future__ import annotations

import threading
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ...kernels.chain import RunName
from ...kernels.prefix import common_prefix_length
from ...kernels.tokens import TokenIds
from ..cancel import Cancel
from ..engine import PrefillProgress, SequenceId, SyncPoints
from ..prefix_cache.pool import StateBytes
from .library import CancelFlag

if TYPE_CHECKING:
    from .generation import LlamaGeneration

AWAITED_S = 2.0
"""How long a sequence that was synced is kept for its reply against others that want its room."""

CellIds: TypeAlias = "NDArray[np.int64]"


class ResidentRun:
    """A run of tokens and the cells that hold them; it grows at its end and is cut back.

    Cells are numbered by our own account as they are filled; runs that share cells, by a fork, begin with the same
    numbers. Amortised constant time for each token.
    """

    def __init__(self) -> None:
        self._tokens = np.empty(1024, dtype=np.int32)
        self._cells = np.empty(1024, dtype=np.int64)
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def append(self, token: int, cell: int) -> None:
        """Add one token."""
        self._reserve(self._length + 1)
        self._tokens[self._length] = token
        self._cells[self._length] = cell
        self._length += 1

    def extend(self, tokens: TokenIds, first_cell: int) -> None:
        """Add a run of tokens that are held in the cells [first_cell, first_cell + n)."""
        end = self._length + len(tokens)
        self._reserve(end)
        self._tokens[self._length : end] = tokens
        self._cells[self._length : end] = np.arange(first_cell, first_cell + len(tokens), dtype=np.int64)
        self._length = end

    def share(self, other: ResidentRun, length: int) -> None:
        """Become the first `length` tokens of `other`, in the same cells."""
        self._reserve(length)
        self._tokens[:length] = other._tokens[:length]
        self._cells[:length] = other._cells[:length]
        self._length = length

    def truncate(self, length: int) -> None:
        """Keep the first `length` tokens."""
        self._length = min(self._length, length)

    def view(self) -> TokenIds:
        """Return the run without a copy: valid until it next changes."""
        view = self._tokens[: self._length]
        view.flags.writeable = False
        return view

    def copy(self) -> TokenIds:
        """Return the run as a value of its own."""
        tokens = self._tokens[: self._length].copy()
        tokens.flags.writeable = False
        return tokens

    def cells(self) -> CellIds:
        """Return the numbers of its cells, shape (n,): valid until it next changes."""
        return self._cells[: self._length]

    def shared_cells(self, other: ResidentRun) -> int:
        """Return how many cells it has in common with `other`: they are the first ones of both."""
        return common_prefix_length(self.cells(), other.cells())

    def _reserve(self, length: int) -> None:
        if length > len(self._tokens):
            size = max(length, 2 * len(self._tokens))
            self._tokens, self._cells = np.resize(self._tokens, size), np.resize(self._cells, size)


class LastGood:
    """A copy of a recurrent state after the last decode that succeeded: an aborted one spoils the state."""

    __slots__ = ("length", "state")

    def __init__(self, length: int, state: StateBytes) -> None:
        self.length, self.state = length, state


@dataclass(slots=True, eq=False, kw_only=True)
class SyncCall:
    """A sync that is under way: what was asked for, and by which thread.

    `waits`: it has no room until others are done, and may have to give up what it has so far. `wasted_tokens` were
    evaluated before it had to start over.
    """

    thread: threading.Thread
    wanted: TokenIds
    points: SyncPoints
    progress: PrefillProgress | None
    cancel: Cancel | None
    flag: CancelFlag
    waits: bool = False
    wasted_tokens: int = 0

    @property
    def is_cancelled(self) -> bool:
        return self.cancel is not None and self.cancel.is_set


class SequenceState:
    """One sequence. It holds cells only while it has a slot; without one its run is empty.

    `logits_at_hand`: the logits after the last resident token are either live in the context or in `saved_logits`
    (put aside when another sequence decoded). `lost` says why tokens that were resident are not any more.
    `swapped` names the run that went into a memory snapshot to make room. `saved_tokens` of its run are on the disk,
    `pinned_tokens` is the length of its session prefix. `changes` counts what was done to its run. `awaits_reply`: it
    was synced, at `synced_s`, and the reply has not begun; `unanswered` is
    its run where it had to give way before. `user` is the thread that last synced or asked for a reply.
    """

    __slots__ = (
        "__weakref__", "awaits_reply", "busy", "changes", "generation", "id", "last_good", "last_used",
        "logits_at_hand", "lost", "pinned_tokens", "run", "saved_logits", "saved_tokens", "slot", "swapped",
        "synced_s", "unanswered", "user",
    )  # fmt: skip

    def __init__(self, sequence: SequenceId) -> None:
        self.id = sequence
        self.slot: int | None = None
        self.run = ResidentRun()
        self.logits_at_hand = False
        self.saved_logits: NDArray[np.float32] | None = None
        self.last_good: LastGood | None = None
        self.swapped: RunName | None = None
        self.lost = ""
        self.last_used = 0
        self.saved_tokens = 0
        self.pinned_tokens = 0
        self.changes = 0
        self.awaits_reply = False
        self.unanswered: TokenIds | None = None
        self.synced_s = 0.0
        self.user: threading.Thread | None = None
        self.busy: SyncCall | None = None
        self.generation: weakref.ref[LlamaGeneration] | None = None

    @property
    def is_idle(self) -> bool:
        """Whether its memory may be taken: no sync is under way but one that waits, and no reply is being generated."""
        generation = self.generation() if self.generation is not None else None
        return (self.busy is None or self.busy.waits) and (generation is None or generation.is_finished)

    def is_used_elsewhere(self, now_s: float) -> bool:
        """Whether a thread other than this one is at it, or is about to ask for its reply."""
        if self.user is None or self.user is threading.current_thread() or not self.user.is_alive():
            return False
        return not self.is_idle or (self.awaits_reply and now_s - self.synced_s < AWAITED_S)

    def cut(self, length: int) -> None:
        """Note that only the first `length` tokens are resident, and their logits are not at hand."""
        self.run.truncate(length)
        self.saved_tokens = min(self.saved_tokens, length)
        self.changes += 1
        if self.last_good is not None and self.last_good.length > length:
            self.last_good = None
        self.forget_logits()

    def start_over(self) -> None:
        """Note that it has no slot and holds nothing, whoever may share its run."""
        self.slot, self.run = None, ResidentRun()
        self.cut(0)

    def forget_logits(self) -> None:
        """Note that the logits after the last resident token are not at hand."""
        self.logits_at_hand = False
        self.saved_logits = None
