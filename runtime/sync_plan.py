"""What to keep of a sequence's memory so that it comes to hold a wanted run with the least work. Pure.

    resident   [ shared ............... | differs ....... )        what the memory holds
    wanted     [ shared ............... | to evaluate .......... )

The logits of the last wanted token have to be at hand afterwards. They come from evaluating it, so a wanted run that
is wholly resident costs one token, unless the logits at the end of the resident run are still there.
"""

from __future__ import annotations

import msgspec

from ..kernels.prefix import common_prefix_length
from ..kernels.tokens import NO_TOKENS, TokenIds
from .engine import MemoryKind, SyncSource


class HeldMemory(msgspec.Struct, frozen=True, kw_only=True):
    """What a sequence's memory holds right now.

    `first_held` is the lowest position of which a sliding-window layer still holds the state; other kinds have 0.
    `snapshot` is the run after which a copy of the state was taken (recurrent and hybrid memory), or nothing.
    """

    kind: MemoryKind
    resident: TokenIds
    logits_at_hand: bool = False
    window_tokens: int = 0
    first_held: int = 0
    snapshot: TokenIds = NO_TOKENS


class SyncPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Keep the first `keep` tokens, brought about by `source`; evaluate the rest of the wanted run."""

    source: SyncSource
    keep: int
    reason: str = ""


def plan_sync(wanted: TokenIds, held: HeldMemory) -> SyncPlan:
    """Return the cheapest way from what is `held` to `wanted`, which is not empty."""
    resident_tokens, wanted_tokens = len(held.resident), len(wanted)
    shared = common_prefix_length(held.resident, wanted)
    if shared == resident_tokens == wanted_tokens and held.logits_at_hand:
        return SyncPlan(source=SyncSource.RESIDENT, keep=shared)
    target = min(shared, wanted_tokens - 1)
    if target == resident_tokens:
        return SyncPlan(source=SyncSource.RESIDENT if target else SyncSource.NOTHING, keep=target)
    cause = _rewind_cause(shared, resident_tokens, wanted_tokens)
    if target == 0:
        return SyncPlan(source=SyncSource.NOTHING, keep=0, reason=cause)
    return _plan_rewind(wanted, held, target=target, cause=cause)


def _rewind_cause(shared: int, resident_tokens: int, wanted_tokens: int) -> str:
    if shared < wanted_tokens:
        return f"token {shared} differs from what is resident ({resident_tokens} tokens)"
    if shared < resident_tokens:
        return f"the wanted run ends before the resident one ({resident_tokens} tokens)"
    return "the logits of the last token are gone"


def _plan_rewind(wanted: TokenIds, held: HeldMemory, *, target: int, cause: str) -> SyncPlan:
    """Plan for dropping the resident tail [target, ...), as far as this kind of memory can."""
    if held.kind is MemoryKind.FULL:
        return SyncPlan(source=SyncSource.REWIND, keep=target, reason=cause)
    if held.kind is MemoryKind.SLIDING:
        # The token at `target` attends to at most the `window_tokens` positions before it: [target - window, target).
        needed = max(0, target - held.window_tokens)
        if held.first_held <= needed:
            return SyncPlan(source=SyncSource.REWIND, keep=target, reason=cause)
        lost = f"; the window before it is gone (holds from token {held.first_held}, needs {needed})"
        return SyncPlan(source=SyncSource.NOTHING, keep=0, reason=cause + lost)
    kept = len(held.snapshot)
    if 0 < kept <= target and common_prefix_length(held.snapshot, wanted) == kept:
        return SyncPlan(source=SyncSource.PARTIAL, keep=kept, reason=cause)
    return SyncPlan(source=SyncSource.NOTHING, keep=0, reason=f"{cause}; {held.kind} memory cannot drop a tail")
