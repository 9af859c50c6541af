"""Which sequences are resident: places, eviction, and bringing a sequence to a wanted run.

Callers of everything but `sync` hold the engine's turn; `sync` takes it for one chunk at a time.
"""

from __future__ import annotations

import itertools
import time
from typing import TypeAlias

import numpy as np

from ...kernels.errors import DecodeFailed, EngineClosed, EngineError
from ...kernels.tokens import TokenIds, token_ids
from ..cancel import Cancel
from ..engine import MemoryKind, PrefillProgress, SequenceId, SyncReport, SyncSource
from ..sync_plan import HeldMemory, SyncPlan, plan_sync
from .context import Decoded, LlamaContext
from .library import CancelFlag
from .sequence import SequenceState
from .turns import Turns

Sequences: TypeAlias = "dict[SequenceId, SequenceState]"

EVICTED = "evicted to make room for another sequence"


class Residency:
    """The open sequences of a context. `n_places` of them hold memory at once; the others start over at their sync."""

    def __init__(
        self,
        context: LlamaContext,
        turns: Turns,
        *,
        kind: MemoryKind,
        window_tokens: int,
        n_places: int,
        n_batch: int,
    ) -> None:
        self._context, self._turns = context, turns
        self._kind, self._window_tokens, self._n_batch = kind, window_tokens, n_batch
        self._n_places = n_places
        self._free_slots = list(range(n_places))
        self._sequences: Sequences = {}
        self._ids = itertools.count()
        self._ticks = itertools.count(1)
        self.is_closed = False

    def check_open(self) -> None:
        """Raise EngineClosed after `close`."""
        if self.is_closed:
            raise EngineClosed("the engine was closed: open the model again")

    def open(self) -> SequenceState:
        """Return a new sequence; it gets its place at its first sync."""
        state = SequenceState(SequenceId(next(self._ids)))
        self._sequences[state.id] = state
        return state

    def state(self, sequence: SequenceId) -> SequenceState:
        """Return an open sequence. Raises EngineError where it is not open, EngineClosed after `close`."""
        self.check_open()
        state = self._sequences.get(sequence)
        if state is None:
            raise EngineError(f"sequence {sequence} is not open: it was dropped, or belongs to another engine")
        return state

    def drop(self, sequence: SequenceId) -> None:
        """Forget a sequence and free its place. Does nothing where it is not open."""
        state = self._sequences.get(sequence)
        if state is None or self.is_closed:
            return
        if state.busy:
            raise EngineError(f"sequence {sequence} is being synced by another thread: cancel that first")
        end_generation(state)
        self._vacate(state)
        del self._sequences[sequence]

    def close(self) -> None:
        """End every reply and refuse what comes later."""
        for state in self._sequences.values():
            end_generation(state)
        self.is_closed = True

    def decode_one(self, state: SequenceState, token: int) -> Decoded:
        """Evaluate one token of a reply, evicting idle sequences where that makes the room."""
        while (outcome := self._context.decode_one(state, token)) is Decoded.NO_ROOM:
            self._evict_for(state)
        return outcome

    def decode(self, state: SequenceState, tokens: TokenIds, *, last_logits: bool, all_logits: bool = False) -> Decoded:
        """Evaluate at most `n_batch` tokens, evicting idle sequences where that makes the room."""
        while (
            outcome := self._context.decode(state, tokens, last_logits=last_logits, all_logits=all_logits)
        ) is Decoded.NO_ROOM:
            self._evict_for(state)
        return outcome

    def sync(
        self,
        sequence: SequenceId,
        wanted: TokenIds,
        *,
        progress: PrefillProgress | None,
        cancel: Cancel | None,
    ) -> SyncReport:
        """See `engine.Engine.sync`."""
        started_s = time.perf_counter()
        flag = CancelFlag()
        with self._turns:
            state = self.state(sequence)
            end_generation(state)
            if state.busy:
                raise EngineError(f"sequence {sequence} is being synced by another thread: a session has one thread")
            state.busy = True
        try:
            with (cancel or Cancel()).listening(flag.set):
                with self._turns:
                    plan = self._prepare(state, wanted)
                done = self._prefill(state, wanted, progress=progress, cancel=cancel, flag=flag)
        finally:
            state.busy = False
        return SyncReport(
            cached=plan.keep,
            evaluated=max(0, len(state.run) - plan.keep),
            source=plan.source,
            seconds=time.perf_counter() - started_s,
            cancelled=not done,
            reason=plan.reason,
        )

    def check_integrity(self) -> None:
        """Compare the account of every sequence with what llama.cpp holds. Raises AssertionError where they differ."""
        memory = self._context.memory
        slots = [state.slot for state in self._sequences.values() if state.slot is not None]
        assert sorted(slots + self._free_slots) == list(range(self._n_places)), (slots, self._free_slots)
        for slot in self._free_slots:
            assert memory.held_tokens(slot) == 0, f"slot {slot} is free, but holds {memory.held_tokens(slot)} tokens"
        for state in self._sequences.values():
            held = memory.held_tokens(state.slot) if state.slot is not None else 0
            assert held == len(state.run), f"{held} tokens are held, {len(state.run)} accounted for"
            if self._kind is MemoryKind.FULL and held:
                assert state.slot is not None
                assert memory.first_held(state.slot) == 0
            if state.logits_at_hand:
                assert self._context.is_live(state) != (state.saved_logits is not None)
            else:
                assert not self._context.is_live(state)
                assert state.saved_logits is None

    def _prepare(self, state: SequenceState, wanted: TokenIds) -> SyncPlan:
        """Bring what is resident to a prefix of `wanted`, and say what that took."""
        state.last_used = next(self._ticks)
        slot = self._place(state)
        self._settle_interrupted(state, slot)
        resident = state.run.view()
        plan = plan_sync(
            wanted,
            HeldMemory(
                kind=self._kind,
                resident=resident,
                logits_at_hand=state.logits_at_hand,
                window_tokens=self._window_tokens,
                first_held=max(0, self._context.memory.first_held(slot)),
                snapshot=state.snapshot_tokens,
            ),
        )
        lost, state.lost = state.lost, ""
        if not plan.keep:
            reason = plan.reason or lost
            self._context.clear(state)
            return SyncPlan(source=SyncSource.NOTHING, keep=0, reason=reason)
        if plan.keep == len(resident):
            return plan
        restored = plan.source is SyncSource.PARTIAL
        if self._context.restore(state) if restored else self._context.rewind(state, plan.keep):
            return plan
        return SyncPlan(source=SyncSource.NOTHING, keep=0, reason=f"{plan.reason}; llama.cpp could not go back to it")

    def _settle_interrupted(self, state: SequenceState, slot: int) -> None:
        """Bring memory and account together where an interrupt (Ctrl-C) struck between a decode and its account."""
        held, accounted = self._context.memory.held_tokens(slot), len(state.run)
        if held == accounted:
            return
        if self._kind is MemoryKind.FULL and held > accounted and self._context.rewind(state, accounted):
            return
        self._context.clear(state)
        state.lost = "an interrupt during a decode left it uncertain what is resident"

    def _prefill(
        self,
        state: SequenceState,
        wanted: TokenIds,
        *,
        progress: PrefillProgress | None,
        cancel: Cancel | None,
        flag: CancelFlag,
    ) -> bool:
        """Evaluate what is missing of `wanted`, one chunk in each turn. Say whether it was brought to its end."""
        start = len(state.run)
        total = len(wanted)
        if progress is not None and start < total:
            progress(0, total - start)
        while (begin := len(state.run)) < total:
            end = min(begin + self._n_batch, total)
            with self._turns:
                self.check_open()
                self._context.arm(flag)
                if (cancel is not None and cancel.is_set) or not self._chunk(state, wanted, begin, end):
                    return False
            if progress is not None:
                progress(end - start, total - start)
        return True

    def _chunk(self, state: SequenceState, wanted: TokenIds, begin: int, end: int) -> bool:
        last = end == len(wanted)
        if self.decode(state, wanted[begin:end], last_logits=last) is Decoded.CANCELLED:
            return False
        self._context.take_snapshot(state)
        if last and not np.isfinite(self._context.logits(state)).all():
            raise DecodeFailed(
                "the model's logits are not numbers: its weights are damaged, or do not fit this architecture. "
                "Fetch the file again",
                code=0,
                position=end - 1,
            )
        return True

    def _place(self, state: SequenceState) -> int:
        """Return the slot of a sequence, taking that of the least recently used idle one if there is no free one."""
        if state.slot is None:
            if not self._free_slots:
                self._evict_for(state, places=True)
            state.slot = self._free_slots.pop()
        return state.slot

    def _evict_for(self, state: SequenceState, *, places: bool = False) -> None:
        """Take the memory of the least recently used idle sequence. Raises DecodeFailed where every one is in use."""
        idle = [
            other
            for other in self._sequences.values()
            if other is not state and other.slot is not None and other.is_idle and (places or len(other.run))
        ]
        if not idle:
            what = f"all {self._n_places} places" if places else "all cells of the KV cache"
            raise DecodeFailed(
                f"{what} are taken by sequences in use: open the engine with more n_sequences or n_ctx, or wait "
                f"for a reply to end",
                code=1,
                position=len(state.run),
            )
        victim = min(idle, key=lambda other: other.last_used)
        if len(victim.run):
            victim.lost = EVICTED
        self._vacate(victim)

    def _vacate(self, state: SequenceState) -> None:
        if state.slot is not None:
            self._context.clear(state)
            self._free_slots.append(state.slot)
            state.slot = None


def end_generation(state: SequenceState) -> None:
    """End the reply of a sequence that is still being generated; its tokens so far stay resident."""
    generation = state.generation() if state.generation is not None else None
    if generation is not None:
        generation.abandon()
    state.generation = None


def check_run(wanted: TokenIds, *, n_ctx: int, vocab_size: int) -> None:
    """Raise EngineError where `wanted` is empty, longer than the window, or no run of this vocabulary."""
    if not len(wanted):
        raise EngineError("a request has one token at least")
    if len(wanted) > n_ctx:
        raise EngineError(f"{len(wanted):,} tokens do not fit in the window of {n_ctx:,}")
    check_ids(wanted, vocab_size=vocab_size)


def check_ids(tokens: TokenIds, *, vocab_size: int) -> None:
    """Raise EngineError where an id is not in the vocabulary: llama.cpp would refuse the whole batch."""
    if len(tokens) and (int(tokens.min()) < 0 or int(tokens.max()) >= vocab_size):
        bad = token_ids(tokens[(tokens < 0) | (tokens >= vocab_size)])
        raise EngineError(f"token id {bad[0]} is not in the vocabulary of {vocab_size} tokens")
