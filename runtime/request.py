"""One model request: the budget before it, the sync, the generation, and the account after it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator
from dataclasses import dataclass

import msgspec

from ..compaction.budget import Budgets
from ..kernels.errors import NoRoom
from ..kernels.tokens import NO_TOKENS, TokenIds
from .bound import BoundAccount, explain_difference
from .cancel import Cancel
from .engine import (
    Engine,
    FinishReason,
    Generation,
    GenerationReport,
    Grammar,
    PrefillProgress,
    Sampling,
    SequenceId,
    SyncReport,
)
from .events import StepUsage
from .reply_stream import ReplyStream
from .stream import NoticeGiven, PrefillProgressed, ReasoningDelta, StepStarted, StreamEvent, TextDelta
from .transcript import Transcript

OnPrefill = Callable[[PrefillProgressed], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What a request asks for. `so_far` is the reply that it goes on with after a cut; empty for a new one.

    `keep` takes what was generated, and the account, where the reply is broken off by an error or by a host that
    stops reading.
    """

    step: int
    grammar: Grammar | None
    tool_choice: str
    cancel: Cancel
    so_far: TokenIds
    keep: Callable[[GenerationReport, StepUsage], None]

    @property
    def continues(self) -> bool:
        return len(self.so_far) > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelReply:
    """What came back. `report` is None where the prefill was cancelled."""

    report: GenerationReport | None
    text_shown: str
    usage: StepUsage


class Requester:
    """Makes a session's requests on its sequence, and keeps the account of what each cost."""

    def __init__(
        self,
        *,
        engine: Engine,
        sequence: SequenceId,
        transcript: Transcript,
        budgets: Budgets,
        bound: BoundAccount,
        sampling: Sampling,
        max_reply_tokens: int | None,
        clock: Callable[[], float],
        on_prefill: OnPrefill | None = None,
    ) -> None:
        self._engine = engine
        self._sequence = sequence
        self._transcript = transcript
        self._budgets = budgets
        self._bound = bound
        self._sampling = sampling
        self._max_reply_tokens = max_reply_tokens
        self._clock = clock
        self._on_prefill = on_prefill

    def check_room(self, *, continues: bool = False) -> None:
        """Raise NoRoom, with the tokens by segment, where the next request would not leave the reply reserve."""
        window = self._transcript.window
        opened = window.token_count if continues else self._transcript.opened_tokens()
        if opened <= self._budgets.usable_tokens:
            return
        by_segment = window.tokens_by_kind()
        shares = ", ".join(f"{kind} {tokens:,}" for kind, tokens in by_segment.items())
        raise NoRoom(
            f"the next request would be {opened:,} tokens; with a reply reserve of "
            f"{self._budgets.reply_reserve_tokens:,} the window of {self._budgets.n_ctx:,} takes "
            f"{self._budgets.usable_tokens:,}. In the window: {shares}. Start a new session, or open the model with "
            f"a larger n_ctx.",
            n_ctx=self._budgets.n_ctx,
            window_tokens=opened,
            reply_reserve_tokens=self._budgets.reply_reserve_tokens,
            by_segment=by_segment,
        )

    def request(self, asked: Asked) -> Generator[StreamEvent, None, ModelReply]:
        """Make one request; yields what a person may see as it comes. `check_room` comes first."""
        transcript = self._transcript
        to_repeat, replaced = transcript.to_repeat, transcript.replaced
        transcript.open_reply(step=asked.step, continues=asked.continues, tool_choice=asked.tool_choice)
        request, points = transcript.window.tokens(), transcript.window.points()
        broken = transcript.window.broken_from(to_repeat)
        declared = transcript.window.broken_from(replaced)
        bound = self._bound.bound(request)
        yield StepStarted(turn=transcript.turn, step=asked.step, window_tokens=len(request))
        started_s = self._clock()
        sync = self._engine.sync(
            self._sequence, request, points=points, progress=self._progress(started_s), cancel=asked.cancel
        )
        # What a cancel cut off was not evaluated, and bounds no later request.
        self._bound.add(request[: sync.cached + sync.evaluated], reply=NO_TOKENS)
        for note in sync.notes:
            yield NoticeGiven(producer="cache", text=note, to_model=False)

        def settle(report: GenerationReport | None) -> StepUsage:
            if report is not None:
                self._bound.add(request, reply=report.tokens)
            usage = self._usage(len(request), sync=sync, report=report, bound=bound)
            return msgspec.structs.replace(usage, undeclared_break=broken, declared_break=declared)

        if sync.cancelled:
            return ModelReply(report=None, text_shown="", usage=settle(None))
        generation = self._generate(asked, room_tokens=self._budgets.n_ctx - len(request))
        try:
            text_shown = yield from self._show(generation, asked)
        except BaseException:
            generation.close()
            asked.keep(generation.report, settle(generation.report))
            raise
        return ModelReply(report=generation.report, text_shown=text_shown, usage=settle(generation.report))

    def rest(self) -> None:
        """Note that the turn has ended: what is resident is worth keeping across a restart."""
        self._engine.rest(self._sequence)

    def _generate(self, asked: Asked, *, room_tokens: int) -> Generation:
        return self._engine.generate(
            self._sequence,
            sampling=self._sampling,
            max_tokens=min(self._max_reply_tokens or self._budgets.reply_reserve_tokens, room_tokens),
            grammar=asked.grammar,
            so_far=asked.so_far,
            cancel=asked.cancel,
        )

    def _show(self, generation: Generation, asked: Asked) -> Generator[StreamEvent, None, str]:
        """Yield what a person may see of a reply as it comes; return all the text that was shown."""
        reply = ReplyStream(
            triggers=asked.grammar.triggers if asked.grammar else (),
            reasoning=self._transcript.composer.chat_format.reasoning,
        )
        if len(asked.so_far):
            reply.feed(self._engine.detokenize(asked.so_far))
        for token in generation:
            shown = reply.feed(token.piece)
            if shown.reasoning:
                yield ReasoningDelta(text=shown.reasoning)
            if shown.text:
                yield TextDelta(text=shown.text)
        return reply.text_shown

    def _progress(self, started_s: float) -> PrefillProgress | None:
        on_prefill = self._on_prefill
        if on_prefill is None:
            return None

        def tell(evaluated: int, total: int) -> None:
            on_prefill(
                PrefillProgressed(evaluated_tokens=evaluated, total_tokens=total, seconds=self._clock() - started_s)
            )

        return tell

    def _usage(
        self,
        window_tokens: int,
        *,
        sync: SyncReport,
        report: GenerationReport | None,
        bound: int,
    ) -> StepUsage:
        return StepUsage(
            window=window_tokens,
            cached=sync.cached,
            evaluated=sync.evaluated,
            generated=len(report.tokens) if report else 0,
            bound=bound,
            source=sync.source,
            reason=explain_difference(sync, bound),
            ttft_s=sync.seconds + (report.first_token_s if report else 0.0),
            prefill_s=sync.seconds,
            decode_s=report.seconds if report else 0.0,
            peak_rss_bytes=peak_rss_bytes(),
        )


def peak_rss_bytes() -> int:
    """Return the most resident memory this process has had; 0 where the system does not tell."""
    if sys.platform == "win32":
        return 0
    import resource  # noqa: PLC0415  # not there on Windows

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return int(peak if sys.platform == "darwin" else peak * 1024)  # macOS counts bytes, Linux KiB


def was_cut(reply: ModelReply) -> bool:
    """Whether the reply ended at its token limit."""
    return reply.report is not None and reply.report.finish is FinishReason.LENGTH
