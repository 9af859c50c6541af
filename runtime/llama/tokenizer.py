"""A vocabulary: text to token ids and back, exactly, with content that can never become structure.

llama.cpp's own `llama_tokenize` is exact only with care. What is guarded against here, each seen to happen:

- user-defined tokens match in plain text whether or not it is parsed (see `kernels.runs`), and a SentencePiece
  vocabulary merges plain text into its control tokens (`</s>` becomes the end of the sequence);
- SentencePiece adds a space at the start of every call, and after every special token;
- the search for user-defined tokens is quadratic in their number (runs of four spaces in a text of 1 MB: 226 s), and
  long runs overflow the stack of some pre-tokenisers: so a long text is tokenised in pieces, cut where words begin.
"""

from __future__ import annotations

import ctypes
import re
import threading
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from ...kernels.bpe import structural_markers
from ...kernels.errors import EngineClosed, EngineError
from ...kernels.runs import PieceSplitter, is_safe_cut
from ...kernels.tokens import NO_TOKENS, TokenId, TokenIds, concat_tokens, token_ids
from .library import library

PIECE_CHARACTERS = 4096
"""The longest text that goes to `llama_tokenize` at once."""

_ANCHORS = ("\n", "\x02")
"""Characters that merge with nothing: a text behind one of them gets no space of its own."""

_BPE = 2
_ATTR_UNKNOWN, _ATTR_CONTROL, _ATTR_USER_DEFINED = 1 << 0, 1 << 3, 1 << 4


class LlamaTokenizer:
    """The vocabulary of a loaded model. Thread-safe. It must not be used after its model was freed: see `close`.

    Detokenising gives a text back to the byte, but for U+2581 under SentencePiece, which writes a space so, and for
    bytes that a vocabulary cannot spell.
    """

    def __init__(self, vocab: Any) -> None:
        api = library().api
        self._api = api
        self._vocab = vocab
        self.size: int = api.llama_vocab_n_tokens(vocab)
        self._pieces: list[bytes | None] = [None] * self.size
        # Held during a call, so that the vocabulary is not freed under it.
        self._lock = threading.Lock()
        attributes = [api.llama_vocab_get_attr(vocab, token) for token in range(self.size)]
        self._hidden = frozenset(i for i, attr in enumerate(attributes) if attr & (_ATTR_CONTROL | _ATTR_UNKNOWN))
        self._special = self._special_texts(attributes)
        control = {text for text, token in self._special.items() if attributes[token] & _ATTR_CONTROL}
        structural = set(structural_markers([text for text in self._special if text not in control]))
        # A user-defined token of one character spells only itself, and cannot be cut.
        structural = {text for text in structural if len(text) > 1}
        self.control_texts = tuple(text for text in self._special if text in control or text in structural)
        self.control_ids = {text: self._special[text] for text in self.control_texts}
        self._harmless = {text: token for text, token in self._special.items() if text not in self.control_texts}
        self._forbidden = token_ids(sorted(self.control_ids.values()))
        byte_pair = api.llama_vocab_type(vocab) == _BPE
        # Byte-pair merges never build a control token, and its text is plain where it is not parsed: no cut needed.
        self._splitter = PieceSplitter(structural if byte_pair else self.control_texts)
        self.bos_id = self._id_or_none(api.llama_vocab_bos(vocab))
        self.eos_id = self._id_or_none(api.llama_vocab_eos(vocab))
        self.add_bos = bool(api.llama_vocab_get_add_bos(vocab))
        self.eog_ids = frozenset(
            token for token in {*self._hidden, self.eos_id, api.llama_vocab_eot(vocab)}
            if token is not None and token >= 0 and api.llama_vocab_is_eog(vocab, token)
        )  # fmt: skip
        self._adds_space = self.detokenize(self._call(b"x", parse_special=False)) == b" x"

    def tokenize(self, text: str, *, parse_special: bool) -> TokenIds:
        """See `engine.Tokenizer.tokenize`."""
        if not text:
            return NO_TOKENS
        if parse_special and not self._adds_space:
            return self._call(text.encode(), parse_special=True)
        pieces = (text,) if parse_special else self._splitter.pieces(text)
        if not self._adds_space:
            return concat_tokens([self._plain(piece) for piece in pieces])
        # llama.cpp would add a space behind every token that it finds in the text, so they are found here.
        found = self._special if parse_special else self._harmless
        parts = [part for piece in pieces for part in _split_longest_first(piece, found)]
        return concat_tokens([token_ids((found[part],)) if part in found else self._plain(part) for part in parts])

    def detokenize(self, tokens: TokenIds, *, special: bool = True) -> bytes:
        """See `engine.Tokenizer.detokenize`."""
        ids = tokens.tolist()
        if not special:
            ids = [token for token in ids if token not in self._hidden]
        return b"".join([self.piece(token) for token in ids])

    def piece(self, token: int) -> bytes:
        """Return the bytes of one token; a control token's are its text. Raises EngineError for an id out of range."""
        if not 0 <= token < self.size:
            raise EngineError(f"token id {token} is not in the vocabulary of {self.size} tokens")
        known = self._pieces[token]
        if known is None:
            known = self._pieces[token] = self._piece(token)
        return known

    def text(self, token: TokenId | None) -> str:
        """Return the text of a special token, or the empty string for None."""
        return "" if token is None else self.piece(token).decode("utf-8", "replace")

    def close(self) -> None:
        """Refuse every later call: the model is about to be freed."""
        with self._lock:
            self._vocab = None

    def _id_or_none(self, token: int) -> TokenId | None:
        return TokenId(token) if token >= 0 else None

    def _special_texts(self, attributes: list[int]) -> dict[str, int]:
        """Return the id of every control and user-defined text."""
        texts: dict[str, int] = {}
        for token, attr in enumerate(attributes):
            if attr & (_ATTR_CONTROL | _ATTR_USER_DEFINED):
                raw = self._api.llama_vocab_get_text(self._vocab, token) or b""
                texts.setdefault(raw.decode("utf-8", "replace"), token)
        texts.pop("", None)
        return texts

    def _piece(self, token: int) -> bytes:
        room = 128
        while True:
            buffer = ctypes.create_string_buffer(room)
            with self._lock:
                length = self._api.llama_token_to_piece(self._open_vocab(), token, buffer, room, 0, True)
            if length >= 0:
                return buffer.raw[:length]
            room = -length

    def _plain(self, text: str) -> TokenIds:
        """Tokenise text that holds no structural text whole; check the result, and spell it out if it is not plain."""
        runs = [self._anchored(piece) for piece in _pieces(text)]
        tokens = concat_tokens(runs)
        if not np.isin(tokens, self._forbidden).any():
            return tokens
        # One character at a time cannot be merged into anything: never reached by the vocabularies known.
        return concat_tokens([self._anchored(character) for character in text])

    def _anchored(self, text: str) -> TokenIds:
        if not self._adds_space:
            return self._call(text.encode(), parse_special=False)
        for anchor in _ANCHORS:
            head = self._call(anchor.encode(), parse_special=False)
            whole = self._call((anchor + text).encode(), parse_special=False)
            if np.array_equal(whole[: len(head)], head):
                return token_ids(whole[len(head) :])
        raise EngineError(f"this vocabulary merges {text[:20]!r} with what stands before it")

    def _call(self, data: bytes, *, parse_special: bool) -> TokenIds:
        room = len(data) + 8
        while True:
            buffer = np.empty(room, dtype=np.int32)
            target = ctypes.cast(buffer.ctypes.data, self._api.llama_token_p)
            with self._lock:
                vocab = self._open_vocab()
                count = self._api.llama_tokenize(vocab, data, len(data), target, room, False, parse_special)
            if count >= 0:
                return token_ids(buffer[:count].copy())
            if count < -(1 << 30):
                raise EngineError(f"a text of {len(data):,} bytes is too long for llama_tokenize")
            room = -count

    def _open_vocab(self) -> Any:
        if self._vocab is None:
            raise EngineClosed("this vocabulary was closed with its model")
        return self._vocab


def _split_longest_first(text: str, specials: Mapping[str, int]) -> list[str]:
    """Split at `specials` as llama.cpp does: the longest first, each over the whole of the text."""
    parts = [text]
    for special in sorted(specials, key=len, reverse=True):
        if special in text:
            parts = [
                piece
                for part in parts
                for piece in ((part,) if part in specials else re.split(f"({re.escape(special)})", part))
                if piece
            ]
    return parts


def _pieces(text: str) -> Iterator[str]:
    """Yield `text` in pieces of at most PIECE_CHARACTERS, cut where every pre-tokeniser cuts if it has such a place."""
    begin = 0
    while len(text) - begin > PIECE_CHARACTERS:
        limit = begin + PIECE_CHARACTERS
        end = next((at for at in range(limit, limit - PIECE_CHARACTERS // 2, -1) if is_safe_cut(text, at)), limit)
        yield text[begin:end]
        begin = end
    yield text[begin:]
