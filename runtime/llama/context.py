"""A llama.cpp context: one decode call, the logits that it leaves behind, and its abort flag.

The logits of a context belong to whichever sequence decoded last. They are put aside before another one decodes, so
that sessions which take turns find theirs unharmed. Callers hold the engine's turn.
"""

from __future__ import annotations

import ctypes
import enum
from collections.abc import Collection
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...kernels.errors import DecodeFailed
from ...kernels.tokens import TokenIds, token_ids
from ..engine import MemoryKind, OnDecode
from ..prefix_cache.pool import StateBytes
from .batch import TokenBatch
from .cells import Cells
from .library import CancelFlag, library
from .memory import ContextMemory
from .sequence import LastGood, SequenceState

NO_ROOM_CODE, _ABORTED = 1, 2
"""What `llama_decode` returns where there are no cells or slots, and where it was aborted."""

_RECURRENT_KINDS = frozenset({MemoryKind.RECURRENT, MemoryKind.HYBRID})


class Decoded(enum.Enum):
    """How a decode ended. With NO_ROOM nothing was evaluated, and an idle sequence may be evicted for it."""

    DONE = enum.auto()
    CANCELLED = enum.auto()
    NO_ROOM = enum.auto()


class LlamaContext:
    """Evaluates tokens of one sequence at a time and keeps its account true, whatever happens in between."""

    def __init__(
        self,
        pointer: Any,
        *,
        owner: object,
        cells: Cells,
        vocab_size: int,
        kind: MemoryKind,
        window_tokens: int,
        n_batch: int,
        on_decode: OnDecode | None,
    ) -> None:
        """`owner` frees the pointer when the last reference to it goes: whoever works on the context keeps it."""
        self.pointer, self._owner = pointer, owner
        self.cells = cells
        self.memory = ContextMemory(pointer)
        self._api = library().api
        self._vocab_size = vocab_size
        self.kind, self.window_tokens = kind, window_tokens
        self.n_batch = n_batch
        self._batch = TokenBatch(n_batch)
        self._on_decode = on_decode
        self._live: SequenceState | None = None
        self._armed: CancelFlag | None = None
        self._never = CancelFlag()

    @property
    def survives_abort(self) -> bool:
        """Whether an aborted decode leaves what was resident before it as it was."""
        return self.kind not in _RECURRENT_KINDS

    @property
    def can_move_tails(self) -> bool:
        """Whether a tail can take other positions without being evaluated again.

        Not with a sliding window, though every cell be kept (`swa_full`): llama.cpp takes one that is out of the window
        for a free one as soon as it looks for room in the middle of a run (measured).
        """
        return self.kind is MemoryKind.FULL and not self.window_tokens and self.memory.can_shift

    def arm(self, flag: CancelFlag | None) -> None:
        """Let `flag` abort what is decoded from now on. Each operation has its own: a late cancel harms no other."""
        flag = flag or self._never
        if flag is not self._armed:
            self._api.llama_set_abort_callback(self.pointer, library().on_abort, flag.address)
            self._armed = flag

    def decode_one(self, sequence: SequenceState, token: int) -> Decoded:
        """Evaluate one token after the resident ones; its logits are at hand afterwards."""
        position = len(sequence.run)
        assert sequence.slot is not None
        self._claim(sequence)
        self._batch.fill_one(token, slot=sequence.slot, position=position)
        if self._on_decode is not None:
            self._on_decode(sequence.id, token_ids((token,)), position)
        code = self._api.llama_decode(self.pointer, self._batch.raw)
        if code == 0:
            sequence.run.append(token, self.cells.fill(1))
            sequence.logits_at_hand = True
            self._live = sequence
            return Decoded.DONE
        return self._settle(sequence, token_ids((token,)), code)

    def decode(
        self, sequence: SequenceState, tokens: TokenIds, *, last_logits: bool, all_logits: bool = False
    ) -> Decoded:
        """Evaluate at most `n_batch` tokens after the resident ones."""
        position = len(sequence.run)
        assert sequence.slot is not None
        self._claim(sequence)
        self._batch.fill(tokens, slot=sequence.slot, start=position, all_logits=all_logits, last_logits=last_logits)
        if self._on_decode is not None:
            self._on_decode(sequence.id, token_ids(tokens.copy()), position)
        code = self._api.llama_decode(self.pointer, self._batch.raw)
        if code == 0:
            sequence.run.extend(tokens, self.cells.fill(len(tokens)))
            sequence.logits_at_hand = last_logits or all_logits
            self._live = sequence if sequence.logits_at_hand else None
            return Decoded.DONE
        return self._settle(sequence, tokens, code)

    def is_live(self, sequence: SequenceState) -> bool:
        """Whether the context's own logits are those after the last resident token of `sequence`."""
        return self._live is sequence

    def logits(self, sequence: SequenceState) -> NDArray[np.float32]:
        """Return the logits after the last resident token, shape (vocab_size,). A view: use it before decoding on."""
        if self._live is sequence:
            return self.output(-1)
        assert sequence.saved_logits is not None
        return sequence.saved_logits

    def output(self, row: int) -> NDArray[np.float32]:
        """Return the logits of one row of the last decode, -1 for its last one. A view."""
        pointer = self._api.llama_get_logits_ith(self.pointer, row)
        assert pointer
        return np.ctypeslib.as_array(ctypes.cast(pointer, ctypes.POINTER(ctypes.c_float)), (self._vocab_size,))

    def keep_last_good(self, sequence: SequenceState) -> None:
        """Copy what a recurrent state is now: the only way back from an aborted decode. Else it does nothing."""
        if self.survives_abort:
            return
        assert sequence.slot is not None
        state = self.memory.copy_state(sequence.slot, partial=True)
        sequence.last_good = LastGood(len(sequence.run), state) if state is not None else None

    def rewind(self, sequence: SequenceState, keep: int) -> bool:
        """Forget everything from position `keep` on; where this fails nothing at all is left. `plan` decides."""
        assert sequence.slot is not None
        if keep and self.memory.drop_tail(sequence.slot, keep):
            self._cut(sequence, keep)
            return True
        self.clear(sequence)
        return keep == 0

    def share(self, source: SequenceState, target: SequenceState, length: int) -> None:
        """Let `target`, which has a slot and an empty run, hold the first `length` tokens of `source` too."""
        assert source.slot is not None
        assert target.slot is not None
        assert length <= len(source.run)
        self.memory.share(source.slot, target.slot, length)
        target.run.share(source.run, length)
        target.changes += 1

    def take_tail(self, source: SequenceState, target: SequenceState, *, begin: int) -> None:
        """Let `target` go on with the tokens of [begin, ...) of `source`, in their cells; `source` is empty then.

        No other sequence shares these cells. Positions are right at once, keys from the next decode on.
        """
        assert source.slot is not None
        assert target.slot is not None
        tail, position = source.run.copy()[begin:], len(target.run)
        # The account first: where an interrupt strikes between here and the end, more is held than is accounted for,
        # which the next sync finds and forgets.
        self._cut(source, 0)
        self.memory.drop_head(source.slot, begin)
        if position != begin:
            self.memory.shift(source.slot, begin, position - begin)
        self.memory.share_tail(source.slot, target.slot, position)
        self.memory.clear(source.slot)
        target.run.extend(tail, self.cells.fill(len(tail)))
        target.changes += 1
        self.forget(target)

    def restore_whole(self, sequence: SequenceState, tokens: TokenIds, state: StateBytes) -> bool:
        """Put a whole state after `tokens` into a sequence with an empty run; where it fails nothing is left."""
        assert sequence.slot is not None
        if not self.memory.restore_whole(sequence.slot, state, tokens=len(tokens)):
            self.memory.clear(sequence.slot)
            return False
        sequence.run.extend(tokens, self.cells.fill(len(tokens)))
        sequence.changes += 1
        return True

    def restore_partial(self, sequence: SequenceState, state: StateBytes, *, length: int, tokens: TokenIds) -> bool:
        """Go back to a partial state after the first `length` of `tokens`; where it fails nothing is left.

        The resident run shares these tokens, unless the partial state is all there is (recurrent memory).
        """
        assert sequence.slot is not None
        restored = self.memory.restore_partial(sequence.slot, state, position=length)
        if not restored:
            self.clear(sequence)
            return False
        held = min(len(sequence.run), length)
        self._cut(sequence, held)
        sequence.run.extend(tokens[held:length], self.cells.fill(length - held))
        return True

    def clear(self, sequence: SequenceState) -> None:
        """Forget all of a sequence; it keeps its slot."""
        if sequence.slot is not None:
            self.memory.clear(sequence.slot)
        self._cut(sequence, 0)

    def forget(self, sequence: SequenceState) -> None:
        """Note that the context's logits are those of `sequence` no more."""
        if self._live is sequence:
            self._live = None
        sequence.forget_logits()

    def repair(self, sequences: Collection[SequenceState]) -> None:
        """Make all accounts true after an interrupt within a change of them."""
        self.cells.repair(sequences, self.memory, rewinds=self.kind.rewinds)
        for sequence in sequences:
            if sequence.logits_at_hand and self._live is not sequence and sequence.saved_logits is None:
                sequence.forget_logits()
            elif not sequence.logits_at_hand:
                self.forget(sequence)
        if self._live is not None and self._live not in sequences:
            self._live = None

    def _cut(self, sequence: SequenceState, length: int) -> None:
        self.cells.let_go(sequence, keep=length)
        self.forget(sequence)
        sequence.cut(length)

    def _claim(self, sequence: SequenceState) -> None:
        """Put the logits of another sequence aside, and note that those of this one are about to change."""
        live = self._live
        if live is not None and live is not sequence:
            live.saved_logits = self.output(-1).copy()
        self._live = None
        sequence.forget_logits()

    def _settle(self, sequence: SequenceState, tokens: TokenIds, code: int) -> Decoded:
        """Make the account true after a decode of `tokens` that did not succeed.

        An abort keeps the ubatches that were finished. On a recurrent state the position then overstates what was
        computed, so that it has to go back to the last good one.
        """
        if code == NO_ROOM_CODE:
            return Decoded.NO_ROOM
        position = len(sequence.run)
        if not self.survives_abort:
            self._back_to_last_good(sequence)
        else:
            assert sequence.slot is not None
            held = self.memory.held_tokens(sequence.slot)
            if position <= held <= position + len(tokens):
                sequence.run.extend(tokens, self.cells.fill(len(tokens)))
                self._cut(sequence, held)
            else:
                # It held something else than was accounted for, which is what the decode failed of.
                self.clear(sequence)
        if code == _ABORTED:
            return Decoded.CANCELLED
        raise DecodeFailed(
            f"llama_decode failed with code {code} at token {position}; what was evaluated before is kept. "
            f"If it fails again, a smaller n_ctx or n_ubatch takes less memory",
            code=code,
            position=position,
        )

    def _back_to_last_good(self, sequence: SequenceState) -> None:
        good = sequence.last_good
        if good is None:
            self.clear(sequence)
            return
        self.restore_partial(sequence, good.state, length=good.length, tokens=sequence.run.copy())
