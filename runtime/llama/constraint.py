"""What of a reply is free and what is constrained: triggers watched in our own code, a plain grammar behind them.

llama.cpp's lazy grammars are not used: their patterns take quadratic time, and a token that completes the trigger
and goes on with text that the grammar rejects ends the process.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ...kernels.tokens import NO_TOKENS, TokenIds
from ..engine import Grammar
from ..text_watch import ReasoningWatch, TriggerWatch
from .grammar import CompiledGrammar, GrammarRun, utf8_remainder
from .sampler import Sampler
from .tokenizer import LlamaTokenizer


class ReplyConstraint:
    """Follows a reply token by token; between a trigger and the grammar's end only allowed tokens are chosen."""

    def __init__(self, grammar: Grammar, compiled: CompiledGrammar, tokenizer: LlamaTokenizer) -> None:
        self._grammar = grammar
        self._compiled = compiled
        self._tokenizer = tokenizer
        self._watch = TriggerWatch(grammar.triggers)
        self._reasoning = ReasoningWatch(grammar.reasoning)
        self._run: GrammarRun | None = None

    @property
    def in_span(self) -> bool:
        """Whether the reply stands inside a constrained span."""
        return self._run is not None

    def forced_start(self, so_far: TokenIds) -> TokenIds:
        """Return the tokens of a required trigger that are still to come at the start of the reply."""
        if not self._grammar.required or not self._grammar.triggers:
            return NO_TOKENS
        marks = self._grammar.reasoning
        ending = marks.end if marks is not None and marks.open_at_start else ""
        trigger = self._tokenizer.tokenize(ending + self._grammar.triggers[0].text, parse_special=True)
        opened = len(so_far) <= len(trigger) and np.array_equal(trigger[: len(so_far)], so_far)
        return trigger[len(so_far) :] if opened else NO_TOKENS

    def choose(self, sampler: Sampler, logits: NDArray[np.float32]) -> int:
        """Return a token that the span may go on with. Only inside a span."""
        assert self._run is not None
        return self._run.choose(sampler, logits)

    def replacement(self, token: int) -> TokenIds | None:
        """Return what to emit in place of a free `token`, None where it may stand.

        A token that completes a trigger may hold more text behind it (`>"`). Where the grammar rejects that text, the
        token is replaced by those of its part up to the trigger's end.
        """
        piece = self._tokenizer.piece(token)
        overshoot = None if self._reasoning.inside else self._watch.peek(piece)
        if not overshoot or self._compiled.start().accept_text(piece[-overshoot:]):
            return None
        kept = piece[:-overshoot]
        if utf8_remainder(kept) != b"":
            return None
        return self._tokenizer.tokenize(kept.decode(), parse_special=False)

    def observe(self, token: int) -> None:
        """Take `token` as the next of the reply."""
        if self._run is not None:
            self._advance(self._run, token)
        else:
            self._watch_free(self._reasoning.said(self._tokenizer.piece(token)))

    def close(self) -> None:
        """Free what is held of the grammar."""
        self._leave()

    def _advance(self, run: GrammarRun, token: int) -> None:
        if not run.allows(token):
            # Only a token that was generated under another grammar, before a cut: the rest of it is free text.
            self._leave()
            return
        run.accept(token)
        if run.is_complete:
            self._leave()

    def _watch_free(self, piece: bytes) -> None:
        overshoot = self._watch.peek(piece)
        if overshoot is None:
            self._watch.feed(piece)
            return
        run = self._compiled.start()
        if overshoot and not run.accept_text(piece[-overshoot:]):
            # The trigger stands behind half a character, so that nothing could be cut: it stays text.
            self._watch.feed(piece)
            return
        self._run = run
        if run.is_complete:
            self._leave()

    def _leave(self) -> None:
        if self._run is not None:
            self._run.close()
            self._run = None
            self._watch.restart()
