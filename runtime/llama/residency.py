"""The open sequences of a context, and bringing one to a wanted run.

Callers of everything but `sync` hold the engine's turn; `sync` takes it for one chunk at a time.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeAlias

import numpy as np

from ...kernels.chain import parse_run_name
from ...kernels.errors import DecodeFailed, EngineClosed, EngineError
from ...kernels.tokens import TokenIds, concat_tokens, token_ids
from ..cancel import Cancel
from ..engine import MemoryKind, PrefillProgress, SequenceId, SyncPoints, SyncReport, SyncSource
from ..prefix_cache.plan import SyncPlan
from .context import NO_ROOM_CODE, Decoded, LlamaContext
from .library import CancelFlag
from .places import PARKED, Places
from .reuse import Reuse
from .sequence import SequenceState, SyncCall
from .turns import Turns

Sequences: TypeAlias = "dict[SequenceId, SequenceState]"

WAIT_S = 0.002
"""How long a sync waits before it looks again whether others have made room."""

LEAST_RING_TOKENS = 64
"""Points that are nearer to each other are passed over: each ends a batch."""


class _RoomTaken(Exception):
    """There is no room as long as other threads are at it."""


class Residency:
    """The open sequences of a context. Any number may be open; as many hold memory at once as there are slots."""

    def __init__(self, context: LlamaContext, turns: Turns, places: Places, reuse: Reuse) -> None:
        self._context, self._turns, self._places, self._reuse = context, turns, places, reuse
        self._sequences: Sequences = {}
        self._ids = itertools.count()
        self._unsettled = False
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
        """Forget a sequence; what it holds is parked for others. Does nothing where it is not open."""
        state = self._sequences.get(sequence)
        if state is None or self.is_closed:
            return
        if state.busy is not None:
            raise EngineError(f"sequence {sequence} is being synced by another thread: cancel that first")
        end_generation(state)
        with self._change():
            del self._sequences[sequence]
            self._places.park(state)

    def fork(self, sequence: SequenceId, *, at: int) -> SequenceState:
        """Return a new sequence that starts from the first `at` tokens of another, as far as that can be shared."""
        parent = self.held(self.state(sequence))
        if not 0 < at <= len(parent):
            raise EngineError(f"sequence {sequence} holds {len(parent)} tokens: it cannot be forked at {at}")
        child = self.open()
        # What is wanted later is longer, so that all `at` tokens may be kept.
        wanted = concat_tokens([parent[:at], token_ids([0])])
        self._places.touch(child)
        try:
            with self._change():
                self._reuse.start(child, wanted)
        except BaseException:
            self.drop(child.id)
            raise
        return child

    def held(self, state: SequenceState) -> TokenIds:
        """Return the run that a sequence holds, in its cells or in the memory snapshot into which it was swapped."""
        snapshot = self._places.swapped(state)
        if snapshot is None or state.swapped is None:
            return state.run.copy()
        return snapshot.tokens[: parse_run_name(state.swapped)]

    def ready(self, state: SequenceState) -> bool:
        """Say whether the logits to go on from are at hand; a sequence that was swapped out is brought back."""
        if state.logits_at_hand:
            return True
        with self._change():
            return self._reuse.bring_back(state)

    def take_notes(self) -> tuple[str, ...]:
        """Return, once, what a person should know of the cache."""
        return self._reuse.take_notes()

    def close(self) -> None:
        """End every reply and refuse what comes later."""
        for state in self._sequences.values():
            end_generation(state)
        self.is_closed = True

    def decode_one(self, state: SequenceState, token: int) -> Decoded:
        """Evaluate one token of a reply, evicting idle sequences where that makes the room."""
        with self._change():
            self._places.make_room(state, 1)
            while (outcome := self._context.decode_one(state, token)) is Decoded.NO_ROOM:
                self._places.evict_one(state)
        return outcome

    def decode(self, state: SequenceState, tokens: TokenIds, *, last_logits: bool, all_logits: bool = False) -> Decoded:
        """Evaluate at most `n_batch` tokens, evicting idle sequences where that makes the room."""
        with self._change():
            self._places.make_room(state, len(tokens))
            while (
                outcome := self._context.decode(state, tokens, last_logits=last_logits, all_logits=all_logits)
            ) is Decoded.NO_ROOM:
                self._places.evict_one(state)
        return outcome

    def sync(
        self,
        sequence: SequenceId,
        wanted: TokenIds,
        *,
        points: SyncPoints,
        reuse: bool,
        progress: PrefillProgress | None,
        cancel: Cancel | None,
    ) -> SyncReport:
        """See `engine.Engine.sync`."""
        started_s = time.perf_counter()
        call = SyncCall(
            thread=threading.current_thread(),
            wanted=wanted,
            points=points,
            progress=progress,
            cancel=cancel,
            flag=CancelFlag(),
        )
        with self._turns:
            state = self.state(sequence)
        try:
            with self._turns:
                # It may have been dropped since the line above.
                self.state(sequence)
                end_generation(state)
                # One of this thread's own is what an interrupt has left of it.
                if state.busy is not None and state.busy.thread is not call.thread:
                    raise EngineError(f"sequence {sequence} is being synced by another thread: a session has one")
                state.busy, state.user = call, call.thread
                state.awaits_reply, state.unanswered = False, None
            with (cancel or Cancel()).listening(call.flag.set):
                plan, done = self._carry_through(call, state, reuse=reuse)
            with self._turns:
                state.awaits_reply, state.synced_s = done, time.monotonic()
                notes = self._reuse.take_notes()
        finally:
            if state.busy is call:
                state.busy = None
        return SyncReport(
            cached=max(0, plan.keep - call.wasted_tokens),
            evaluated=call.wasted_tokens + max(0, len(state.run) - plan.keep),
            source=plan.source,
            seconds=time.perf_counter() - started_s,
            cancelled=not done,
            reason=plan.reason,
            notes=notes,
        )

    def _carry_through(self, call: SyncCall, state: SequenceState, *, reuse: bool) -> tuple[SyncPlan, bool]:
        """Do what a sync asks for, and wait where all room is used by other threads. Say whether it was done."""
        while True:
            plan = SyncPlan(source=SyncSource.NOTHING, keep=0, reason="cancelled while it waited for room")
            try:
                with self._turns, self._change(), self._waiting_for_others(state):
                    self.check_open()
                    call.waits = False
                    plan = self._prepare(state, call, reuse=reuse)
                return plan, self._prefill(call, state)
            except _RoomTaken:
                pass
            with self._turns:
                call.wasted_tokens += max(0, len(state.run) - plan.keep)
                call.waits = True
            if call.is_cancelled:
                return SyncPlan(source=plan.source, keep=len(state.run), reason=plan.reason), False
            time.sleep(WAIT_S)

    @contextmanager
    def _waiting_for_others(self, state: SequenceState) -> Iterator[None]:
        """Turn a lack of room into _RoomTaken where other threads have it, and will give it back. Within a turn."""
        try:
            yield
        except DecodeFailed as error:
            now_s = time.monotonic()
            others = (other for other in self._sequences.values() if other is not state)
            if error.code == NO_ROOM_CODE and any(other.is_used_elsewhere(now_s) for other in others):
                raise _RoomTaken from error
            raise

    def check_integrity(self) -> None:
        """Compare the account of every sequence with what llama.cpp holds. Raises AssertionError where they differ."""
        memory, cells = self._context.memory, self._context.cells
        cells.check_integrity()
        holders = {state.slot: state for state in cells.holders()}
        for slot in range(cells.n_slots):
            held = memory.held_tokens(slot)
            accounted = len(holders[slot].run) if slot in holders else 0
            assert held == accounted, f"slot {slot}: {held} tokens are held, {accounted} accounted for"
            if self._context.kind is MemoryKind.FULL and held:
                assert memory.first_held(slot) == 0
        owned = {id(state) for state in self._sequences.values()}
        for state in (*self._sequences.values(), *holders.values()):
            assert state.slot is None or holders[state.slot] is state
            assert state.slot is not None or not len(state.run)
            assert (id(state) in owned) == (state.id != PARKED)
            assert state.saved_tokens <= len(state.run)
            if state.logits_at_hand:
                assert self._context.is_live(state) or state.saved_logits is not None
            else:
                assert not self._context.is_live(state)
                assert state.saved_logits is None

    @contextmanager
    def _change(self) -> Iterator[None]:
        """Guard a change of several accounts: where an interrupt (Ctrl-C) breaks it off, the next one repairs them."""
        if self._unsettled:
            self._repair()
        self._unsettled = True
        try:
            yield
        except Exception:
            self._unsettled = False
            raise
        self._unsettled = False

    def _repair(self) -> None:
        states = dict.fromkeys([*self._sequences.values(), *self._context.cells.holders()])
        open_ones = set(self._sequences.values())
        for state in states:
            if state not in open_ones:
                state.id = PARKED
        self._reuse.repair(list(states))

    def _prepare(self, state: SequenceState, call: SyncCall, *, reuse: bool) -> SyncPlan:
        """Bring what is resident to a prefix of what is wanted, and say what that took."""
        wanted, points = call.wanted, call.points
        self._places.touch(state)
        state.pinned_tokens = max((length for length in points.pinned if length <= len(wanted)), default=0)
        if reuse:
            plan = self._reuse.start(state, wanted)
        else:
            self._places.require_slot(state)
            self._context.clear(state)
            state.swapped = None
            plan = SyncPlan(source=SyncSource.NOTHING, keep=0, reason="reuse is switched off")
        self._reuse.take_rung(state, pinned=len(state.run) in points.pinned, cost_tokens=LEAST_RING_TOKENS)
        self._context.keep_last_good(state)
        self._places.relieve(state)
        return plan

    def _prefill(self, call: SyncCall, state: SequenceState) -> bool:
        """Evaluate what is missing, one chunk in each turn. Say whether it was brought to its end."""
        wanted, points, progress = call.wanted, call.points, call.progress
        start = since = len(state.run)
        total = len(wanted)
        if progress is not None and start < total:
            progress(0, total - start)
        stops = [] if self._context.kind.rewinds else choose_stops(points, start=start, end=total)
        while (begin := len(state.run)) < total:
            end = min(begin + self._context.n_batch, next((stop for stop in stops if stop > begin), total), total)
            with self._turns:
                self.check_open()
                if state.busy is not call:
                    raise EngineError(f"sequence {state.id} was synced anew while it was being synced")
                self._context.arm(call.flag)
                with self._waiting_for_others(state):
                    if call.is_cancelled or not self._chunk(state, wanted, begin, end):
                        return False
                if end in stops or end == total:
                    with self._change():
                        self._keep_point(state, pinned=end in points.pinned, cost_tokens=end - since)
                    since = end
            if progress is not None:
                progress(end - start, total - start)
        return True

    def _keep_point(self, state: SequenceState, *, pinned: bool, cost_tokens: int) -> None:
        self._reuse.take_rung(state, pinned=pinned, cost_tokens=cost_tokens)
        if pinned:
            self._reuse.take_pinned(state)

    def _chunk(self, state: SequenceState, wanted: TokenIds, begin: int, end: int) -> bool:
        last = end == len(wanted)
        if self.decode(state, wanted[begin:end], last_logits=last) is Decoded.CANCELLED:
            return False
        self._context.keep_last_good(state)
        if last and not np.isfinite(self._context.logits(state)).all():
            raise DecodeFailed(
                "the model's logits are not numbers: its weights are damaged, or do not fit this architecture. "
                "Fetch the file again",
                code=0,
                position=end - 1,
            )
        return True


def choose_stops(points: SyncPoints, *, start: int, end: int) -> list[int]:
    """Return the points in (start, end) at which a batch ends: the pinned ones, and the others where they are not
    crowded, the earlier of two: what goes back to the later one then evaluates less than `LEAST_RING_TOKENS` again."""
    pinned = set(points.pinned)
    stops: list[int] = []
    last = start
    for point in sorted(pinned.union(points.ring)):
        if start < point < end and (point in pinned or point - last >= LEAST_RING_TOKENS):
            stops.append(point)
            last = point
    return stops


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
