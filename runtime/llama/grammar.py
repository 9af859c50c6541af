"""A GBNF grammar in force. Every token is checked before llama.cpp's sampler sees it.

That sampler throws C++ exceptions, which end the process, where it accepts a token that the grammar rejects, the end
of generation inside a call, or anything after the end of the grammar. It also reads UTF-8 leniently (it accepts
overlong and unfinished characters, and stops reading a token at a NUL), so those are refused here.
"""

from __future__ import annotations

import re
import weakref
from collections import OrderedDict
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...kernels.errors import GrammarError
from .library import library
from .sampler import Candidates, Sampler
from .tokenizer import LlamaTokenizer

TOP_CANDIDATES = 1024
"""How many of the most likely tokens are tried before the whole vocabulary."""

MAX_NESTING = 256
"""Groups within groups of a GBNF text. llama.cpp's parser recurses; 20,000 end the process."""

_COMPILED_KEPT = 8
_LITERALS = re.compile(r'"(?:[^"\\]|\\.)*"|\[(?:[^\]\\]|\\.)*\]|#[^\n]*')


class GrammarShelf:
    """Compiled grammars, the last few kept: a step's grammar is compiled once and cloned for each call."""

    def __init__(self, tokenizer: LlamaTokenizer, vocab: Any) -> None:
        self._tokenizer = tokenizer
        self._vocab = vocab
        self._compiled: OrderedDict[str, CompiledGrammar] = OrderedDict()

    def get(self, gbnf: str) -> CompiledGrammar:
        """Return the compiled grammar. Raises GrammarError where llama.cpp does not accept it."""
        compiled = self._compiled.pop(gbnf, None) or CompiledGrammar(gbnf, self._tokenizer, self._vocab)
        self._compiled[gbnf] = compiled
        while len(self._compiled) > _COMPILED_KEPT:
            self._compiled.popitem(last=False)
        return compiled


class CompiledGrammar:
    """A parsed grammar that is never advanced, only cloned."""

    def __init__(self, gbnf: str, tokenizer: LlamaTokenizer, vocab: Any) -> None:
        if not gbnf.strip() or "\0" in gbnf:
            raise GrammarError("a grammar is GBNF text with a rule `root`, without NUL characters", gbnf=gbnf)
        if _nesting(gbnf) > MAX_NESTING:
            raise GrammarError(f"the grammar nests more than {MAX_NESTING} groups: flatten it into rules", gbnf=gbnf)
        if not tokenizer.eog_ids:
            raise GrammarError("this vocabulary has no end-of-generation token, which grammars need", gbnf=gbnf)
        loaded = library()
        loaded.listen()
        pointer = loaded.api.llama_sampler_init_grammar(vocab, gbnf.encode(), b"root")
        if not pointer:
            details = "; ".join(loaded.log.recent()) or "no details"
            raise GrammarError(f"llama.cpp does not accept the grammar ({details})", gbnf=gbnf)
        self.gbnf = gbnf
        self.tokenizer = tokenizer
        self._pointer = pointer
        # llama.cpp matches a control token by its text, so that one could stand inside a string.
        self.barred = frozenset(token for text, token in tokenizer.control_ids.items() if text not in gbnf)
        self._finalizer = weakref.finalize(self, loaded.api.llama_sampler_free, pointer)

    def start(self) -> GrammarRun:
        """Return the grammar at its beginning."""
        return GrammarRun(self, library().api.llama_sampler_clone(self._pointer))


class GrammarRun:
    """A grammar part of the way through one constrained span."""

    def __init__(self, compiled: CompiledGrammar, pointer: Any) -> None:
        self._api = library().api
        self._compiled = compiled
        self._tokenizer = compiled.tokenizer
        self._pointer = pointer
        self._finalizer = weakref.finalize(self, self._api.llama_sampler_free, pointer)
        self._single = Candidates(1)
        self._eog = next(iter(self._tokenizer.eog_ids))
        self._unfinished = b""
        self.is_complete = self._llama_allows(self._eog)

    def clone(self) -> GrammarRun:
        """Return a run at the same place that advances on its own."""
        clone = GrammarRun(self._compiled, self._api.llama_sampler_clone(self._pointer))
        clone._unfinished = self._unfinished
        return clone

    def allows(self, token: int) -> bool:
        """Whether the span may go on with `token`."""
        return not self.is_complete and self._is_text(token) and self._llama_allows(token)

    def accept(self, token: int) -> None:
        """Advance by a token for which `allows` was just true."""
        rest = utf8_remainder(self._unfinished + self._tokenizer.piece(token))
        assert rest is not None
        self._unfinished = rest
        self._api.llama_sampler_accept(self._pointer, token)
        self.is_complete = self._llama_allows(self._eog)

    def accept_text(self, text: bytes) -> bool:
        """Advance by `text` if the span may go on with all of it; say whether it did. Spans nothing on False."""
        if utf8_remainder(text) != b"":
            return False
        trial = self.clone()
        tokens = self._tokenizer.tokenize(text.decode(), parse_special=False).tolist()
        for token in tokens:
            if not trial.allows(token):
                return False
            trial.accept(token)
        for token in tokens:
            self.accept(token)
        return True

    def choose(self, sampler: Sampler, logits: NDArray[np.float32]) -> int:
        """Return what the chain picks among the tokens that the grammar allows; it is not accepted yet.

        One check is enough where the model agrees with the grammar. Raises GrammarError where no token is allowed.
        """
        token = sampler.pick(logits)
        if self.allows(token):
            return token
        if len(logits) > TOP_CANDIDATES:
            top = np.argpartition(logits, -TOP_CANDIDATES)[-TOP_CANDIDATES:].astype(np.int32)
            allowed = self._allowed(sampler.candidates, top, logits)
            if allowed.size:
                return sampler.pick(logits, among=allowed)
        allowed = self._allowed(sampler.candidates, sampler.candidates.all_ids, logits)
        if not allowed.size:
            raise GrammarError(
                "the grammar came to a place where no token of this vocabulary fits", gbnf=self._compiled.gbnf
            )
        return sampler.pick(logits, among=allowed)

    def close(self) -> None:
        """Free it."""
        self._finalizer()

    def _allowed(
        self, candidates: Candidates, ids: NDArray[np.int32], logits: NDArray[np.float32]
    ) -> NDArray[np.int32]:
        """Return those of `ids` that the grammar allows, in order."""
        candidates.fill(ids, logits[ids])
        self._api.llama_sampler_apply(self._pointer, candidates.reference)
        kept = ids[np.isfinite(candidates.logits())]
        return np.array([token for token in kept.tolist() if self._is_text(token)], dtype=np.int32)

    def _is_text(self, token: int) -> bool:
        """Whether a token continues valid UTF-8 text, and is no structure that the grammar does not name."""
        piece = self._tokenizer.piece(token)
        if token in self._compiled.barred or not piece or b"\0" in piece:
            return False
        if not self._unfinished and piece.isascii():
            return True
        return utf8_remainder(self._unfinished + piece) is not None

    def _llama_allows(self, token: int) -> bool:
        self._single.fill(np.array((token,), dtype=np.int32), np.zeros(1, dtype=np.float32))
        self._api.llama_sampler_apply(self._pointer, self._single.reference)
        return bool(np.isfinite(self._single.logits()[0]))


def utf8_remainder(data: bytes) -> bytes | None:
    """Return the unfinished character at the end of `data` (empty where there is none), None where it is no UTF-8."""
    for cut in range(4):
        # A character has at most 4 bytes, so at most 3 are unfinished.
        try:
            data[: len(data) - cut].decode()
        except UnicodeDecodeError as error:
            if error.reason != "unexpected end of data":
                return None
        else:
            return data[len(data) - cut :] if cut else b""
    return None


def _nesting(gbnf: str) -> int:
    """Return how deep the groups of a GBNF text nest."""
    depth = deepest = 0
    for character in _LITERALS.sub("", gbnf):
        depth += (character == "(") - (character == ")")
        deepest = max(deepest, depth)
    return deepest
