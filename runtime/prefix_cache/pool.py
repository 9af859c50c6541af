"""The snapshots in memory: whole states, and the rungs between them, within one budget.

Who needs room most lately and most dearly has it: GreedyDual-Size over what a use saves, in tokens, by byte
(`kernels.retention`). Memory that the rest of the machine wants is given back. Not thread-safe: callers hold the
engine's turn.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

from ...kernels.chain import RunName, RunNamer, run_name
from ...kernels.prefix import common_prefix_length
from ...kernels.retention import choose_evictions, greedy_dual_priority, risen_clock
from ...kernels.tokens import TokenIds
from ..sizes import size_text

StateBytes: TypeAlias = NDArray[np.uint8]
"""A state as llama.cpp writes it. Shape: (n,)."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Snapshot:
    """The whole state of a run, and the logits of its last token where they were at hand. Shape: (vocabulary,).

    `cost_tokens` is what would have to be evaluated again without it. `awaits_reply`: whoever went into it has been
    synced, and is about to be asked for its reply.
    """

    tokens: TokenIds
    state: StateBytes
    logits: NDArray[np.float32] | None
    pinned: bool
    cost_tokens: int
    awaits_reply: bool = False

    @property
    def size_bytes(self) -> int:
        return self.state.nbytes + self.tokens.nbytes + (0 if self.logits is None else self.logits.nbytes)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Rung:
    """The part of a state that cannot be rewound, after the first `length` tokens of the run that `name` names."""

    name: RunName
    length: int
    state: StateBytes
    pinned: bool
    cost_tokens: int

    @property
    def size_bytes(self) -> int:
        return self.state.nbytes + len(self.name)


class PoolUsage(msgspec.Struct, frozen=True, kw_only=True):
    """What a pool holds."""

    budget_bytes: int
    held_bytes: int
    snapshots: int
    rungs: int


def new_buffer(size_bytes: int) -> StateBytes:
    """Return a buffer for a state, all zero, whose memory goes back to the system as soon as it is let go of.

    What malloc gives is kept by the process after it is freed, depending on sizes and order: glibc raises the size
    from which it asks the system with each large block that is freed, up to 32 MB.
    """
    if not size_bytes:
        return np.empty(0, dtype=np.uint8)
    # A private mapping on POSIX: a shared one would stay with every child process for as long as it runs.
    flags = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}
    return np.frombuffer(mmap.mmap(-1, size_bytes, **flags), dtype=np.uint8)


class SnapshotPool:
    """Keeps snapshots and rungs within `budget_bytes`, letting go of what is worth least.

    `available_bytes` tells what memory this machine has to give; `reserve_bytes` of it stay free. Where less is free
    the pool gives back what it holds, and takes nothing that would not leave the reserve. `seed` begins the names of
    its runs (`CacheIdentity.seed`).
    """

    def __init__(
        self, budget_bytes: int, *, reserve_bytes: int, seed: bytes, available_bytes: Callable[[], int]
    ) -> None:
        self._budget_bytes, self._reserve_bytes = budget_bytes, reserve_bytes
        self._seed, self._available_bytes = seed, available_bytes
        self._snapshots: dict[RunName, Snapshot] = {}
        self._rungs: dict[RunName, Rung] = {}
        self._priorities: dict[Snapshot | Rung, float] = {}
        self._held_bytes = 0
        self._clock = 0.0
        self._evicted: tuple[Snapshot, ...] = ()
        self._notes: list[str] = []
        self._refusing = False

    def snapshots(self) -> Sequence[Snapshot]:
        """Return the whole states, in no order that means anything."""
        return tuple(self._snapshots.values())

    def rungs_of(self, namer: RunNamer, upto: int) -> tuple[int, ...]:
        """Return the lengths, up to `upto`, of the rungs that the namer's run begins with, ascending."""
        lengths = {rung.length for rung in self._rungs.values() if rung.length <= min(upto, namer.length)}
        return tuple(length for length in sorted(lengths) if namer.name(length) in self._rungs)

    def snapshot(self, name: RunName) -> Snapshot | None:
        """Return the whole state after the run of that name."""
        return self._snapshots.get(name)

    def rung(self, name: RunName) -> Rung | None:
        """Return the rung of that name."""
        return self._rungs.get(name)

    def put(self, snapshot: Snapshot, *, covers: bool = False) -> bool:
        """Take a snapshot; False, and a note, where there is no room. One of the same run is replaced.

        `covers`: this memory rewinds, so the snapshot stands for every beginning of its run; the shorter ones go, but
        for those that stay.
        """
        instead = self._replaced_by(snapshot.tokens, covers=covers)
        if not self._fit(snapshot.size_bytes, to_come_bytes=0, instead=instead):
            return False
        self._add(snapshot)
        self._snapshots[run_name(snapshot.tokens, seed=self._seed)] = snapshot
        return True

    def put_rung(self, rung: Rung) -> bool:
        """Take a rung; False, and a note, where there is no room. One of the same run is replaced."""
        instead = [held for held in (self._rungs.get(rung.name),) if held is not None]
        if not self._fit(rung.size_bytes, to_come_bytes=0, instead=instead):
            return False
        self._add(rung)
        self._rungs[rung.name] = rung
        return True

    def room_for(self, size_bytes: int) -> bool:
        """Whether something of that size, which is not in memory yet, would be taken; a note where it would not."""
        return not self._refuses(size_bytes, to_come_bytes=size_bytes)

    def make_room(self, size_bytes: int, *, run: TokenIds | None = None, covers: bool = False) -> bool:
        """Let go of what stands in the way of something of that size; False, and a note, where that is not enough.

        To be called before the memory for it is asked for: then the process never holds more than the budget, where
        a `put` alone holds what it takes in beside what it lets go of. `run` is that of the snapshot that is about to
        be put, `covers` as for `put`: what it replaces goes first.
        """
        instead = () if run is None else self._replaced_by(run, covers=covers)
        return self._fit(size_bytes, to_come_bytes=size_bytes, instead=instead)

    def touch(self, used: Snapshot | Rung) -> None:
        """Note that something was used. What is not held any more is passed over."""
        if used in self._priorities:
            self._priorities[used] = self._priority(used)

    def drop(self, unwanted: Snapshot | Rung) -> None:
        """Let go of something. What is not held any more is passed over."""
        if unwanted in self._priorities:
            self._remove(unwanted)

    def evicted(self) -> tuple[Snapshot, ...]:
        """Return, once, the snapshots that had to go, so that they can be written to disk.

        Their memory is free when the caller lets go of them. They are kept here until the next ones have to go: so
        ask after each call that makes room.
        """
        evicted, self._evicted = self._evicted, ()
        return evicted

    def resize(self, budget_bytes: int) -> None:
        """Set another budget. What does not fit in it goes."""
        self._budget_bytes = budget_bytes
        self._evict(self._held_bytes - budget_bytes)

    def usage(self) -> PoolUsage:
        """Return what is held."""
        return PoolUsage(
            budget_bytes=self._budget_bytes,
            held_bytes=self._held_bytes,
            snapshots=len(self._snapshots),
            rungs=len(self._rungs),
        )

    def drain_notes(self) -> tuple[str, ...]:
        """Return, once, what a person should know. Refusals in a row give one note."""
        notes, self._notes = tuple(self._notes), []
        return notes

    def recount(self) -> None:
        """Make the account true after an interrupt within a change of it."""
        held: list[Snapshot | Rung] = [*self._snapshots.values(), *self._rungs.values()]
        self._priorities = {each: self._priorities.get(each, self._clock) for each in held}
        self._held_bytes = sum(each.size_bytes for each in held)
        self._evict(self._held_bytes - self._budget_bytes)

    def check_integrity(self) -> None:
        """Assert that the account is true and the budget holds."""
        held: list[Snapshot | Rung] = [*self._snapshots.values(), *self._rungs.values()]
        assert set(held) == set(self._priorities)
        assert len(held) == len(self._priorities)
        assert self._held_bytes == sum(each.size_bytes for each in held) <= self._budget_bytes
        assert all(name == run_name(each.tokens, seed=self._seed) for name, each in self._snapshots.items())
        assert all(name == each.name for name, each in self._rungs.items())
        # Nothing is worth more than if it were used right now.
        assert all(priority <= self._priority(each) for each, priority in self._priorities.items())

    # Room

    def _replaced_by(self, run: TokenIds, *, covers: bool) -> list[Snapshot]:
        """Return what a snapshot of `run` stands in place of."""
        same = self._snapshots.get(run_name(run, seed=self._seed))
        shorter = [held for held in self._snapshots.values() if covers and not stays(held) and _extends(run, held)]
        return shorter if same is None else [same, *shorter]

    def _fit(self, size_bytes: int, *, to_come_bytes: int, instead: Collection[Snapshot | Rung]) -> bool:
        """Make room for `size_bytes`, of which `to_come_bytes` are not in memory yet, in place of `instead`."""
        if self._refuses(size_bytes, to_come_bytes=to_come_bytes):
            return False
        missing = self._missing_bytes() + to_come_bytes
        for each in instead:
            missing -= each.size_bytes
            self._remove(each)
        self._evict(max(missing, self._held_bytes + size_bytes - self._budget_bytes))
        self._refusing = False
        return True

    def _missing_bytes(self) -> int:
        """Return what is missing in the reserve; negative where more is free."""
        return self._reserve_bytes - self._available_bytes()

    def _refuses(self, size_bytes: int, *, to_come_bytes: int) -> bool:
        """Whether something cannot be taken even if all else went. Then that is noted, and the reserve made whole."""
        missing = self._missing_bytes()
        if size_bytes > self._budget_bytes:
            refusal = f"one of {size_text(size_bytes)} does not fit in {size_text(self._budget_bytes)}"
        elif missing + to_come_bytes > self._held_bytes:
            left = self._reserve_bytes - missing - to_come_bytes + self._held_bytes
            refusal = (
                f"with one of {size_text(size_bytes)} and none besides it {size_text(max(0, left))} would be free, and "
                f"{size_text(self._reserve_bytes)} must be"
            )
        else:
            return False
        self._evict(missing)
        # With a budget of 0 there is nothing to be used up: whoever planned it says why.
        if not self._refusing and self._budget_bytes:
            self._notes.append(f"memory for snapshots is used up: {refusal}; cache.memory_mb sets how much there is")
        self._refusing = True
        return True

    def _evict(self, over_bytes: int) -> None:
        """Let go of at least `over_bytes`, of all where less is held."""
        if over_bytes <= 0:
            return
        held = tuple(self._priorities)
        priorities = np.array([self._priorities[each] for each in held], dtype=np.float64)
        going = choose_evictions(
            sizes=np.array([each.size_bytes for each in held], dtype=np.int64),
            priorities=priorities,
            pinned=np.array([stays(each) for each in held], dtype=np.bool_),
            over=over_bytes,
        )
        self._clock = risen_clock(clock=self._clock, gone=priorities[going])
        for index in going:
            self._remove(held[index])
        snapshots = tuple(each for each in (held[index] for index in going) if isinstance(each, Snapshot))
        self._evicted = snapshots or self._evicted

    # The account

    def _add(self, taken: Snapshot | Rung) -> None:
        self._priorities[taken] = self._priority(taken)
        self._held_bytes += taken.size_bytes

    def _remove(self, gone: Snapshot | Rung) -> None:
        del self._priorities[gone]
        self._held_bytes -= gone.size_bytes
        if isinstance(gone, Rung):
            del self._rungs[gone.name]
        else:
            del self._snapshots[run_name(gone.tokens, seed=self._seed)]

    def _priority(self, used: Snapshot | Rung) -> float:
        return greedy_dual_priority(clock=self._clock, cost=used.cost_tokens, size=used.size_bytes)


def stays(held: Snapshot | Rung) -> bool:
    """Whether it goes only after all that does not: it is pinned, or somebody is about to go on from it."""
    return held.pinned or (isinstance(held, Snapshot) and held.awaits_reply)


def _extends(run: TokenIds, shorter: Snapshot) -> bool:
    """Whether a run goes on where that of a snapshot ends."""
    length = len(shorter.tokens)
    return length < len(run) and common_prefix_length(run, shorter.tokens) == length
