"""One reply as it is generated: choose a token, hand it out, evaluate it, in that order.

The caller sees a token before it is evaluated; evaluating it comes with asking for the next. So a reply that is
stopped between two tokens has the one in hand dropped, and what is resident is always the run that was synced and the
tokens of the report. The engine's turn is held for one step at a time: other sessions decode in between.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack
from typing import cast

from ...kernels.errors import EngineError
from ...kernels.tokens import TokenId, TokenIds, token_ids
from ..cancel import Cancel
from ..engine import FinishReason, GeneratedToken, GenerationReport
from ..text_watch import TextWatch
from .constraint import ReplyConstraint
from .context import Decoded, LlamaContext
from .library import CancelFlag
from .residency import Residency
from .sampler import Sampler
from .sequence import SequenceState
from .tokenizer import LlamaTokenizer
from .turns import Turns


class LlamaGeneration:
    """See `engine.Generation`. It is its own iterator."""

    def __init__(
        self,
        residency: Residency,
        context: LlamaContext,
        tokenizer: LlamaTokenizer,
        turns: Turns,
        sequence: SequenceState,
        *,
        max_tokens: int,
        sampler: Sampler | None,
        constraint: ReplyConstraint | None,
        stop: TextWatch | None,
        queued: TokenIds,
        cancel: Cancel | None,
    ) -> None:
        """`queued` tokens come first, unsampled; without a `sampler` the reply ends with them."""
        self._residency, self._context, self._tokenizer = residency, context, tokenizer
        self._turns, self._sequence = turns, sequence
        self._max_tokens = max_tokens
        self._sampler, self._constraint, self._stop = sampler, constraint, stop
        self._queued = deque(queued.tolist())
        self._cancel = cancel
        self._flag = CancelFlag()
        self._listening = ExitStack()
        if cancel is not None:
            self._listening.enter_context(cancel.listening(self._flag.set))
        self._synced_tokens = len(sequence.run)
        self._in_hand: int | None = None
        self._ends_after: FinishReason | None = None
        self._eog_ids = tokenizer.eog_ids
        self._started_s = time.perf_counter()
        self._first_token_s = 0.0
        self._report: GenerationReport | None = None

    def __iter__(self) -> Iterator[GeneratedToken]:
        return self

    def __next__(self) -> GeneratedToken:
        if self._report is not None:
            raise StopIteration
        with self._turns:
            try:
                token = self._step()
            except BaseException:
                self.abandon()
                raise
        if token is None:
            raise StopIteration
        if not self._first_token_s:
            self._first_token_s = time.perf_counter() - self._started_s
        return token

    @property
    def is_finished(self) -> bool:
        """Whether the report is set."""
        return self._report is not None

    @property
    def report(self) -> GenerationReport:
        """See `engine.Generation.report`."""
        if self._report is None:
            raise EngineError("the reply is not finished: exhaust the iterator, or close it, before the report")
        return self._report

    def close(self) -> None:
        """See `engine.Generation.close`."""
        if self._report is None:
            with self._turns:
                self.abandon()

    def abandon(self) -> None:
        """End the reply where it stands. The caller holds the engine's turn."""
        if self._report is None:
            self._finish(FinishReason.CANCELLED)

    def _step(self) -> GeneratedToken | None:
        """Evaluate the token in hand and choose the next; None at the end of the reply."""
        if self._report is not None:
            return None
        self._residency.check_open()
        ending = FinishReason.EOG
        token = None
        if not self._evaluate_in_hand() or (self._cancel is not None and self._cancel.is_set and not self._ends_after):
            ending = FinishReason.CANCELLED
        elif self._ends_after is not None:
            ending = self._ends_after
        elif len(self._sequence.run) - self._synced_tokens >= self._max_tokens:
            ending = FinishReason.LENGTH
        else:
            token = self._next_token()
        if token is None:
            self._finish(ending)
            return None
        return self._take(token)

    def _evaluate_in_hand(self) -> bool:
        token, self._in_hand = self._in_hand, None
        if token is None:
            return True
        # A recurrent state does not survive an abort: there a cancel waits for the end of the token, and loses nothing.
        self._context.arm(self._flag if self._context.survives_abort else None)
        return self._residency.decode_one(self._sequence, token) is Decoded.DONE

    def _next_token(self) -> int | None:
        """Return the next token of the reply, None where it ends here."""
        if self._queued:
            token: int = self._queued.popleft()
            if self._sampler is not None:
                self._sampler.accept(token)
            return token
        if self._sampler is None:
            return None
        if self._constraint is not None and self._constraint.in_span:
            token = self._constraint.choose(self._sampler, self._context.logits(self._sequence))
            self._sampler.accept(token)
            return token
        token = self._sample(self._sampler)
        if token in self._eog_ids:
            return None
        replacement = self._constraint.replacement(token) if self._constraint is not None else None
        if replacement is None:
            return token
        self._sampler.take_back(self._sequence.run.view())
        self._queued.extend(replacement.tolist())
        return self._next_token()

    def _sample(self, sampler: Sampler) -> int:
        context = self._context
        if context.is_live(self._sequence):
            return sampler.sample_live(context.pointer)
        token = sampler.pick(context.logits(self._sequence))
        sampler.accept(token)
        return token

    def _take(self, token: int) -> GeneratedToken:
        piece = self._tokenizer.piece(token)
        if self._constraint is not None:
            self._constraint.observe(token)
        if self._stop is not None:
            if self._stop.peek(piece) is not None:
                self._ends_after = FinishReason.STOP
            self._stop.feed(piece)
        self._in_hand = token
        return GeneratedToken(cast("TokenId", token), piece)

    def _finish(self, reason: FinishReason) -> None:
        # What is resident beyond the synced run is the reply. Less than that, where a recurrent state was lost.
        reply = token_ids(self._sequence.run.view()[self._synced_tokens :].copy())
        self._report = GenerationReport(
            finish=reason,
            tokens=reply,
            seconds=time.perf_counter() - self._started_s,
            first_token_s=self._first_token_s,
        )
        self._listening.close()
        if self._constraint is not None:
            self._constraint.close()
        if self._sampler is not None:
            self._sampler.close()
