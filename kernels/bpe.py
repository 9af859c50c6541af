"""Byte-level BPE on tiktoken, built from the vocabulary of a GGUF: counts large texts without a model.

The rules are those of `llm_tokenizer_bpe` in llama.cpp's `llama-vocab.cpp` (as bundled by llama-cpp-python 0.3.36):
USER_DEFINED tokens are split off first, longest first; the rest is cut into words by the pre-tokeniser's pattern;
each word is merged by rank. tiktoken ranks byte strings where llama.cpp ranks pairs, which gives the same ids for
vocabularies that were trained as BPE, and is proved for each vocabulary before it is trusted (`runtime.counting`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from types import MappingProxyType

import numpy as np

from .runs import PieceSplitter, halve
from .tokens import TokenIds, concat_tokens, token_ids

CONTROL, USER_DEFINED = 3, 4
"""Of the `tokenizer.ggml.token_type` numbers; llama.cpp matches a USER_DEFINED token in any text."""

_GPT2 = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
# llama.cpp splits single digits off first and applies the GPT-2 pattern between them, so white space before a digit
# ends a text of its own and stays whole.
_DIGITS_FIRST = r"\p{N}|'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?[^\s\p{L}\p{N}]+|\s+(?=\p{N})|\s+(?!\S)|\s+"
_LLAMA3 = (
    r"'(?:[sStTmMdD]|[rR][eE]|[vV][eE]|[lL][lL])|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_QWEN35 = _QWEN2.replace(r"\p{L}+", r"[\p{L}\p{M}]+").replace(r"[^\s\p{L}\p{N}]", r"[^\s\p{L}\p{M}\p{N}]")

_LLAMA3_WHOLE_WORDS_FIRST = "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2 glm4"
PATTERNS: Mapping[str, str] = MappingProxyType(
    {
        pre: pattern
        for pattern, names in (
            (_GPT2, "gpt-2 mpt olmo jais trillion granite-docling phi-2 gigachat a.x-4.0 mellum exaone4"),
            (_DIGITS_FIRST, "smollm starcoder refact command-r codeshell exaone minerva-7b mellum2"),
            (_LLAMA3, f"{_LLAMA3_WHOLE_WORDS_FIRST} dbrx smaug-bpe chatglm-bpe"),
            (_QWEN2, "qwen2 deepseek-r1-qwen kormo megrez stablelm2 hunyuan solar-open grok-2"),
            (_QWEN35, "qwen35"),
        )
        for pre in names.split()
    }
)
"""`tokenizer.ggml.pre` to the pattern of its words. Each is total: tiktoken drops what a pattern does not match."""

_WHOLE_WORDS_FIRST = frozenset(_LLAMA3_WHOLE_WORDS_FIRST.split())
"""Where llama.cpp takes a word that is a token as it stands (`ignore_merges`); tiktoken always does."""


@dataclass(frozen=True, slots=True)
class BpeVocabulary:
    """A vocabulary as the metadata of a GGUF holds it.

    `model` is `tokenizer.ggml.model`, `pre` is `tokenizer.ggml.pre`; `tokens` and `merges` are texts in the byte-level
    alphabet, a merge being two of them with a space between; `token_types` is one number a token, or empty.
    """

    model: str
    pre: str
    tokens: Sequence[str]
    merges: Sequence[str]
    token_types: Sequence[int]

    def user_defined(self) -> tuple[str, ...]:
        """Return the texts of the USER_DEFINED tokens, longest first."""
        texts = self.of_types(USER_DEFINED)
        return tuple(sorted(texts, key=lambda text: len(text.encode()), reverse=True))

    def of_types(self, *types: int) -> list[str]:
        """Return the texts of the tokens that have one of these types, none empty."""
        return [text for text, kind in zip(self.tokens, self.token_types, strict=False) if text and kind in types]


@dataclass(frozen=True, slots=True)
class BpeUnsupported:
    """A vocabulary that tiktoken cannot count for, and why."""

    reason: str


def structural_markers(user_defined: Sequence[str]) -> tuple[str, ...]:
    """Return those USER_DEFINED texts that content must not turn into one id: all but runs of white space."""
    return tuple(text for text in user_defined if text.replace("▁", " ").strip())


def build_bpe_counter(vocabulary: BpeVocabulary) -> BpeCounter | BpeUnsupported:
    """Return a counter for the vocabulary, or why there is none. Takes 0.2 s for 49,000 merges."""
    if vocabulary.model != "gpt2":
        return BpeUnsupported(f"the vocabulary is of the kind {vocabulary.model!r}, not byte-level BPE (gpt2)")
    if vocabulary.pre not in PATTERNS:
        return BpeUnsupported(f"the pre-tokeniser {vocabulary.pre!r} has no known pattern")
    merged_texts = [merge.replace(" ", "", 1) for merge in vocabulary.merges]
    id_of = {text: id for id, text in enumerate(vocabulary.tokens)}
    rank_texts = tuple(dict.fromkeys([*_BYTE_TO_CHAR, *merged_texts]))
    for text in rank_texts[256:]:
        if text not in id_of:
            return BpeUnsupported(f"the merge that makes {text!r} has no token")
    try:
        rank_bytes = _bytes_of(rank_texts)
    except UnicodeEncodeError as error:
        return BpeUnsupported(f"a merge holds {error.object[error.start]!r}, which stands for no byte")
    user_defined = vocabulary.user_defined()
    return BpeCounter(
        pattern=PATTERNS[vocabulary.pre],
        ranks={merged: rank for rank, merged in enumerate(rank_bytes)},
        # Missing byte tokens are -1: llama.cpp drops such bytes, and so does `encode`.
        id_of_rank=np.array([id_of.get(text, -1) for text in rank_texts], dtype=np.int32),
        user_defined={text: id_of[text] for text in user_defined},
        splitter=PieceSplitter(structural_markers(user_defined)),
    )


class BpeCounter:
    """Encodes as `llama_tokenize(parse_special=False)` does behind the same `PieceSplitter`. Safe in threads."""

    __slots__ = ("_encoding", "_id_of_rank", "_splitter", "_whole_tokens")

    def __init__(
        self,
        *,
        pattern: str,
        ranks: dict[bytes, int],
        id_of_rank: TokenIds,
        user_defined: Mapping[str, int],
        splitter: PieceSplitter,
    ) -> None:
        """`ranks` are 0 to n, `id_of_rank` has shape (n + 1,); `user_defined` maps texts, longest first, to ids."""
        import tiktoken  # noqa: PLC0415 -- 50 ms that only counting needs

        self._encoding = tiktoken.Encoding("gguf", pat_str=pattern, mergeable_ranks=ranks, special_tokens={})
        self._id_of_rank = id_of_rank
        self._splitter = splitter
        # What the splitter does not cut, llama.cpp turns into its id: white space, and markers of one character.
        self._whole_tokens = {
            text: token_ids([id]) for text, id in user_defined.items() if text not in splitter.markers
        }

    def encode(self, text: str) -> TokenIds:
        """Return the ids of `text` as plain text: no BOS, no control token whatever it says."""
        return concat_tokens(list(self._encoded_parts(text)))

    def count(self, text: str) -> int:
        """Return how many ids `encode` gives."""
        return sum(len(part) for part in self._encoded_parts(text))

    def _encoded_parts(self, text: str) -> Iterator[TokenIds]:
        for piece in self._splitter.pieces(text):
            for fragment in split_whole_tokens(piece, self._whole_tokens):
                yield self._whole_tokens[fragment] if fragment in self._whole_tokens else self._encode_words(fragment)

    def _encode_words(self, text: str) -> TokenIds:
        try:
            ranks = self._encoding.encode_ordinary(text)
        except BaseException as error:
            # tiktoken's panics are BaseExceptions of a class that cannot be imported.
            if type(error).__name__ != "PanicException" or len(text) < 2:
                raise
            return concat_tokens([self._encode_words(half) for half in halve(text)])
        ids = self._id_of_rank[ranks]
        return token_ids(ids[ids >= 0])


def split_whole_tokens(text: str, tokens: Mapping[str, object]) -> list[str]:
    """Return `text` cut around each of `tokens`, which come longest first; the occurrences are parts of their own.

    All of one token are split off before the next is looked for (llama.cpp's `tokenizer_st_partition`).
    """
    parts = [text] if text else []
    for token in tokens:
        if token in text:
            parts = [cut for part in parts for cut in ([part] if part in tokens else _split_around(part, token))]
    return parts


def _split_around(text: str, token: str) -> Iterator[str]:
    first, *rest = text.split(token)
    if first:
        yield first
    for part in rest:
        yield token
        if part:
            yield part


def _byte_alphabet() -> tuple[str, ...]:
    """Return the character that stands for each byte: printable Latin-1 itself, the others from U+0100 on (GPT-2)."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return tuple(chr(byte if byte in printable else next(others)) for byte in range(256))


_BYTE_TO_CHAR = _byte_alphabet()
_CHAR_TO_LATIN1 = {ord(char): byte for byte, char in enumerate(_BYTE_TO_CHAR)}
_SEPARATOR = "\uffff"


def _bytes_of(texts: Sequence[str]) -> list[bytes]:
    """Return the bytes that texts of the byte alphabet stand for. Raises UnicodeEncodeError on other characters."""
    # One translation of all texts at once is ten times faster than one for each.
    return [text.encode("latin-1") for text in _SEPARATOR.join(texts).translate(_CHAR_TO_LATIN1).split(_SEPARATOR)]


def encode_reference(vocabulary: BpeVocabulary, text: str) -> TokenIds:
    """The ids of `BpeCounter.encode` by the textbook: pairs merged one at a time, lowest rank first, then leftmost.

    Slow: for tests. `vocabulary` must be one that `build_bpe_counter` supports.
    """
    import regex  # type: ignore[import-untyped]  # noqa: PLC0415 -- comes with tiktoken; only tests call this

    ranks: dict[tuple[str, ...], int] = {}
    for rank, merge in enumerate(vocabulary.merges):
        ranks.setdefault(tuple(merge.split(" ")), rank)
    id_of = {token: id for id, token in enumerate(vocabulary.tokens)}
    user_defined = vocabulary.user_defined()
    splitter = PieceSplitter(structural_markers(user_defined))
    whole = {token: id_of[token] for token in user_defined if token not in splitter.markers}
    ids: list[int] = []
    for piece in splitter.pieces(text):
        for fragment in split_whole_tokens(piece, whole):
            if fragment in whole:
                ids.append(whole[fragment])
                continue
            for word in regex.findall(PATTERNS[vocabulary.pre], fragment):
                symbols = [_BYTE_TO_CHAR[byte] for byte in word.encode()]
                if vocabulary.pre in _WHOLE_WORDS_FIRST and "".join(symbols) in id_of:
                    symbols = ["".join(symbols)]
                ids += [id_of[symbol] for symbol in _merge_reference(symbols, ranks) if symbol in id_of]
    return token_ids(ids)


def _merge_reference(symbols: list[str], ranks: Mapping[tuple[str, ...], int]) -> list[str]:
    while True:
        ranked = [(ranks[pair], at) for at, pair in enumerate(pairwise(symbols)) if pair in ranks]
        if not ranked:
            return symbols
        _, at = min(ranked)
        symbols = [*symbols[:at], symbols[at] + symbols[at + 1], *symbols[at + 2 :]]
