"""What was decoded for a session, held against the requests that the checker rebuilt from its log."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..kernels.tokens import TokenIds
from .checker import CheckProblem, Rebuilt, RebuiltRequest, first_difference


@dataclass(frozen=True, slots=True, eq=False)
class DecodedBatch:
    """What one `llama_decode` of the session's sequence was given: `tokens` at positions from `start` on.

    It overwrites what stood from `start` on, so a rewind shows as a batch that starts below the end of the one before.
    """

    start: int
    tokens: TokenIds


def compare_with_captured(
    rebuilt: Rebuilt, captured: Sequence[DecodedBatch], *, elsewhere: Sequence[Sequence[DecodedBatch]] = ()
) -> tuple[CheckProblem, ...]:
    """Hold the requests of a log against everything that was decoded for its session, in order.

    For each request with a reply there must be a moment, after the reply before it, at which the KV of the sequence
    held the request exactly, followed by the decodes of its reply and nothing else. A request without one was cut off
    (a cancel, a crash): what was decoded for it is passed over, since the next request must hold all the same.
    A batch that repeats the one before it changes nothing: it was refused for want of room, and came again.
    A sequence may begin with what it did not decode itself: a fork, or a snapshot. It must have been decoded as it is
    before, by the session or `elsewhere`, which holds what was decoded for each other sequence.
    """
    captured = _without_repeats(captured)
    under = [_all_moments(window, captured, elsewhere) for window in rebuilt.windows]
    problems: list[CheckProblem] = []
    now = 0
    for request in rebuilt.requests:
        if request.reply is None:
            continue
        moments = under[request.prefix]
        wanted, end = request.tokens.size, request.tokens.size + request.reply.size
        ready = [index for index in range(now, len(moments)) if moments[index].is_head(wanted)]
        reached = [_follow(moments, captured, index, end) for index in ready]
        replied = next((index for index in reached if moments[index].held == end), None)
        if replied is not None:
            now = replied
        elif reached:
            now = max(reached, key=lambda index: moments[index].held)
            problems.append(_other_reply(request, request.reply, moments[now].held))
        else:
            problems.append(_never_held(request, moments[now:]))
    return tuple(problems)


def _all_moments(
    window: TokenIds, captured: Sequence[DecodedBatch], elsewhere: Sequence[Sequence[DecodedBatch]]
) -> list[_Moment]:
    known, before = 0, -1
    # A sequence elsewhere may itself begin with what yet another one decoded.
    while known > before:
        before = known
        agreed = (moment.agreed for batches in elsewhere for moment in _moments(window, batches, known=before))
        known = max(agreed, default=0)
    return _moments(window, captured, known=known)


@dataclass(frozen=True, slots=True)
class _Moment:
    """After a decode: the KV held `held` tokens, of which the first `agreed` are those of the rebuilt window."""

    held: int
    agreed: int

    def is_head(self, length: int) -> bool:
        return self.held == length <= self.agreed


def _without_repeats(captured: Sequence[DecodedBatch]) -> list[DecodedBatch]:
    kept: list[DecodedBatch] = []
    for batch in captured:
        if not kept or kept[-1].start != batch.start or first_difference(kept[-1].tokens, batch.tokens) is not None:
            kept.append(batch)
    return kept


def _moments(window: TokenIds, captured: Sequence[DecodedBatch], *, known: int) -> list[_Moment]:
    """Return what was held after each batch. The first `known` tokens of the window were decoded elsewhere."""
    moments = [_Moment(0, 0)]
    for batch in captured:
        # The KV holds [0, start) as it was, or restored if it held less, then [start, end) from the batch.
        end = batch.start + batch.tokens.size
        restored = batch.start > moments[-1].held
        agreed = min(known if restored else moments[-1].agreed, batch.start)
        if agreed == batch.start:
            different = first_difference(batch.tokens, window[batch.start : end])
            agreed = end if different is None else batch.start + different
        moments.append(_Moment(end, agreed))
        known = max(known, agreed)
    return moments


def _follow(moments: Sequence[_Moment], captured: Sequence[DecodedBatch], ready: int, end: int) -> int:
    """Return the last moment to which decodes that agree lead from moment `ready`, each where the one before ended."""
    index = ready
    # Moment i + 1 is the one after batch i.
    while (
        moments[index].held < end
        and index < len(captured)
        and captured[index].start == moments[index].held
        and moments[index + 1].is_head(moments[index + 1].held)
    ):
        index += 1
    return index


def _never_held(request: RebuiltRequest, moments: Sequence[_Moment]) -> CheckProblem:
    wanted = request.tokens.size
    long_enough = (moment for moment in moments if moment.held >= wanted)
    nearest = next(long_enough, max(moments, key=lambda moment: moment.held))
    token = min(nearest.agreed, wanted)
    return CheckProblem(
        seq=request.seq,
        token=token,
        message=f"turn {request.turn}, step {request.step}: the request of {wanted} tokens was never held as it is; "
        f"what was decoded agrees up to token {token}",
    )


def _other_reply(request: RebuiltRequest, reply: TokenIds, agreed: int) -> CheckProblem:
    return CheckProblem(
        seq=request.seq,
        token=agreed,
        message=f"turn {request.turn}, step {request.step}: the reply of {reply.size} tokens is not what was "
        f"decoded after the request of {request.tokens.size}: they agree up to token {agreed}",
    )
