"""Moving a tail: the tokens behind a span that is replaced take other positions, and are not evaluated again.

    before   [ prefix: keep | span: dropped | tail ....... )
    after    [ prefix: keep | inserted ......... | tail ....... )

With full attention in every layer each token has a cell of its own: its key is turned to the new position, its value
stays as it is. This is an approximation: keys and values of the tail were computed behind the span, and remember a
little of it. `reuse_tests` measures what that costs on a given model.

What is held afterwards is not what evaluating these tokens gives, so it must serve nobody else: a caller clears the
sequence before it is forked, parked or written to disk, or sees to it by other means.
"""

from __future__ import annotations

import enum

from ...kernels.tokens import TokenIds
from .context import Decoded, LlamaContext
from .sequence import SequenceState


class TailMove(enum.Enum):
    """What came of it. All but DONE leave the sequence as it was.

    SHARED: another sequence holds cells of the tail, and would move with it. NO_ROOM: `inserted` needs more cells
    than are free: evict idle sequences first. CANCELLED: the flag that the context is armed with was set.
    """

    DONE = enum.auto()
    SHARED = enum.auto()
    NO_ROOM = enum.auto()
    CANCELLED = enum.auto()


def move_tail(
    context: LlamaContext, state: SequenceState, scratch: SequenceState, *, keep: int, dropped: int, inserted: TokenIds
) -> TailMove:
    """Replace the tokens [keep, keep + dropped) of a sequence by `inserted`; the tail behind them moves along.

    A tail is one token at least: its last one is evaluated, so that its logits are at hand. `scratch` is a sequence
    of the caller's with a slot and nothing in it: llama.cpp decodes into no gap, so `inserted` is evaluated there. It
    has lost its slot after DONE, and is empty otherwise. Cells for `dropped` and `inserted` are needed at once.

    The caller holds the engine's turn, and has asked `context.can_move_tails`. Raises DecodeFailed; the sequence is
    as it was then, or empty.
    """
    begin = keep + dropped
    tail_tokens = len(state.run) - begin
    assert context.can_move_tails
    assert scratch.slot is not None
    assert min(keep, dropped) >= 0 < tail_tokens
    if context.cells.exclusive(state, begin=begin) < tail_tokens:
        return TailMove.SHARED
    try:
        context.share(state, scratch, keep)
        outcome = _evaluate(context, scratch, inserted)
        if outcome is not Decoded.DONE:
            return TailMove.CANCELLED if outcome is Decoded.CANCELLED else TailMove.NO_ROOM
        _exchange(context, state, scratch, keep=keep, begin=begin)
    finally:
        if scratch.slot is not None:
            context.clear(scratch)
    return TailMove.DONE


def _evaluate(context: LlamaContext, scratch: SequenceState, inserted: TokenIds) -> Decoded:
    for start in range(0, len(inserted), context.n_batch):
        outcome = context.decode(scratch, inserted[start : start + context.n_batch], last_logits=False)
        if outcome is not Decoded.DONE:
            return outcome
    return Decoded.DONE


def _exchange(context: LlamaContext, state: SequenceState, scratch: SequenceState, *, keep: int, begin: int) -> None:
    """Put the tail [begin, ...) behind what `scratch` holds, and give that to `state`."""
    last = state.run.copy()[-1:]
    saved, pinned = min(state.saved_tokens, keep), min(state.pinned_tokens, keep)
    context.rewind(state, len(state.run) - 1)
    context.take_tail(state, scratch, begin=begin)
    context.cells.give_back(state)
    context.cells.hand_over(scratch, state)
    state.run, scratch.run = scratch.run, state.run
    state.saved_tokens, state.pinned_tokens = saved, pinned
    # Keys are turned by this decode: were it aborted, nobody could tell which of them.
    context.arm(None)
    try:
        outcome = context.decode(state, last, last_logits=True)
        assert outcome is Decoded.DONE, "the cell of the last token was freed just now"
    except BaseException:
        context.clear(state)
        raise
