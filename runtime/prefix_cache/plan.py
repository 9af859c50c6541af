"""What to start from so that a sequence comes to hold a wanted run with the least work. Pure.

    held       [ shared ............... | differs ....... )        a run whose state is held somewhere
    wanted     [ shared ............... | to evaluate .......... )

Whatever is held competes: the sequence's own run, those of other sequences, whole states in memory and on disk. Where
a memory cannot go back to the end of what is shared, a *rung* may be nearer: a copy of the part of the state that
cannot be rewound, put back over a run that holds the rest.

The logits of the last wanted token have to be at hand afterwards. They come from evaluating it, so a wanted run that
is wholly held costs one token, unless the logits at its end are kept with it.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence

import msgspec

from ...kernels.prefix import shared_with_each
from ...kernels.tokens import TokenIds
from ..engine import MemoryKind, SyncSource
from .modes import ALL_MODES, ReuseModes


class Held(enum.Enum):
    """Where a run is held, the cheapest to start from first."""

    OWN = "the sequence itself"
    OTHER = "another sequence"
    MEMORY = "a memory snapshot"
    DISK = "a disk snapshot"


LEAST_GAIN_TOKENS = {Held.OWN: 1, Held.OTHER: 1, Held.MEMORY: 8, Held.DISK: 32}
"""What a run must save over a cheaper one to be worth its copy."""

_SOURCES = {Held.OTHER: SyncSource.FORK, Held.MEMORY: SyncSource.MEMORY, Held.DISK: SyncSource.DISK}
_CHEAPEST_FIRST = {
    # Memory that rewinds shares cells with another sequence; every other kind copies the other's whole state.
    True: (Held.OWN, Held.OTHER, Held.MEMORY, Held.DISK),
    False: (Held.OWN, Held.MEMORY, Held.OTHER, Held.DISK),
}


class HeldRun(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """A run whose state is held. `key` tells the caller which.

    `first_held` is the lowest position of which a sliding-window layer still holds the state; other kinds have 0.
    `rungs` are the lengths of the rungs that are kept with it.
    """

    where: Held
    tokens: TokenIds
    key: int = 0
    logits_at_hand: bool = False
    first_held: int = 0
    rungs: tuple[int, ...] = ()


class SyncPlan(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """Start from `base` (None: from nothing, or from the rung alone), keep the first `keep` tokens, evaluate the rest.

    `rung`: the length of the rung to put back, which equals `keep`; 0 where none is needed.
    """

    source: SyncSource
    keep: int
    base: HeldRun | None = None
    rung: int = 0
    reason: str = ""


class _Way(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    base: HeldRun | None
    keep: int
    rung: int = 0


def plan_sync(
    wanted: TokenIds,
    held: Sequence[HeldRun],
    *,
    kind: MemoryKind,
    window_tokens: int = 0,
    rungs: Sequence[int] = (),
    modes: ReuseModes = ALL_MODES,
) -> SyncPlan:
    """Return the cheapest way from what is `held` to `wanted`, which is not empty.

    The sequence's own run, if it has one, is one of `held`. `rungs` are the lengths, ascending, of those whose tokens
    `wanted` begins with.
    """
    usable = [run for run in held if _in_force(run, modes)]
    shared = [int(tokens) for tokens in shared_with_each(wanted, [run.tokens for run in usable])]
    rungs = rungs if modes.partial_snapshot else ()
    ways = [
        _way(run, tokens, wanted_tokens=len(wanted), kind=kind, window_tokens=window_tokens, rungs=rungs, modes=modes)
        for run, tokens in zip(usable, shared, strict=True)
    ]
    if kind is MemoryKind.RECURRENT:
        # There is no other part of the state: a rung is all of it.
        alone = _highest(rungs, limit=len(wanted) - 1)
        ways.append(_Way(base=None, keep=alone, rung=alone))
    best = _choose(ways, rewinds=kind.rewinds)
    source = _source(best) if best.keep else SyncSource.NOTHING
    reasons: list[str] = []
    if source is not SyncSource.RESIDENT:
        longest = max(zip(shared, usable, strict=True), key=lambda pair: pair[0], default=(0, None))
        reasons = [
            _why_not_on(wanted, usable, shared),
            _why_no_more(best.keep, *longest, wanted_tokens=len(wanted), kind=kind),
        ]
    reason = "; ".join(filter(None, reasons))
    return SyncPlan(source=source, keep=best.keep, base=best.base, rung=best.rung, reason=reason)


def _in_force(run: HeldRun, modes: ReuseModes) -> bool:
    if run.where is Held.OTHER:
        return modes.fork
    if run.where is Held.MEMORY:
        return modes.memory_snapshot
    return run.where is Held.OWN or modes.disk_snapshot


def _way(
    run: HeldRun,
    shared: int,
    *,
    wanted_tokens: int,
    kind: MemoryKind,
    window_tokens: int,
    rungs: Sequence[int],
    modes: ReuseModes,
) -> _Way:
    """Return how far `run`, which shares its first `shared` tokens with what is wanted, leads."""
    held_tokens = len(run.tokens)
    if shared == held_tokens == wanted_tokens and run.logits_at_hand:
        return _Way(base=run, keep=shared)
    target = min(shared, wanted_tokens - 1)
    if target == held_tokens:
        return _Way(base=run, keep=target)
    # The token at `target` attends to at most the `window_tokens` positions before it: [target - window, target).
    in_window = kind is MemoryKind.SLIDING and run.first_held <= max(0, target - window_tokens)
    if modes.rewind and (kind.rewinds or in_window):
        return _Way(base=run, keep=target)
    own_rungs = run.rungs if modes.partial_snapshot else ()
    rung = max(_highest(rungs, limit=target), _highest(own_rungs, limit=target))
    return _Way(base=run, keep=rung, rung=rung)


def _highest(lengths: Sequence[int], *, limit: int) -> int:
    return max((length for length in lengths if length <= limit), default=0)


def _choose(ways: Sequence[_Way], *, rewinds: bool) -> _Way:
    """Return the way that keeps most; one that costs a copy only where it keeps enough more than a cheaper one."""
    best = _Way(base=None, keep=0)
    own, *copies = _CHEAPEST_FIRST[rewinds]
    for where in (own, None, *copies):
        here = [way for way in ways if (way.base.where if way.base is not None else None) is where]
        way = max(here, key=lambda way: way.keep, default=best)
        if way.keep >= best.keep + (1 if where is None else LEAST_GAIN_TOKENS[where]):
            best = way
    return best


def _source(way: _Way) -> SyncSource:
    if way.base is None:
        return SyncSource.PARTIAL
    if way.base.where is not Held.OWN:
        return _SOURCES[way.base.where]
    if way.rung:
        return SyncSource.PARTIAL
    return SyncSource.RESIDENT if way.keep == len(way.base.tokens) else SyncSource.REWIND


def _why_not_on(wanted: TokenIds, usable: Sequence[HeldRun], shared: Sequence[int]) -> str:
    """Say why the sequence's own run cannot simply go on; nothing where it holds nothing."""
    for run, tokens in zip(usable, shared, strict=True):
        held_tokens = len(run.tokens)
        if run.where is not Held.OWN or not held_tokens or (tokens == held_tokens < len(wanted)):
            continue
        if tokens < min(held_tokens, len(wanted)):
            return f"token {tokens} differs from what is resident ({held_tokens} tokens)"
        if tokens < held_tokens:
            return f"the wanted run ends before the resident one ({held_tokens} tokens)"
        return "the logits of the last token are gone"
    return ""


def _why_no_more(keep: int, shared: int, run: HeldRun | None, *, wanted_tokens: int, kind: MemoryKind) -> str:
    """Say why not all of the longest `shared` run is kept; nothing where it is."""
    if run is None or min(shared, wanted_tokens - 1) - keep < LEAST_GAIN_TOKENS[run.where]:
        return ""
    way_back = f"{kind} memory goes back only to where a copy of its state was kept"
    if kind is MemoryKind.SLIDING and run.first_held:
        way_back = f"the window before that is gone (holds from token {run.first_held})"
    if kind.rewinds:
        way_back = "going back is switched off for this model"
    return f"{shared} tokens are shared with {run.where.value}, but {way_back}"
