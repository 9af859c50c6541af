"""Small BPE vocabularies, trained on the spot: real merges for tests and kernel benchmarks, without a model."""

from __future__ import annotations

import collections
import random
from itertools import pairwise

from ..kernels.bpe import PATTERNS, USER_DEFINED, BpeVocabulary
from .tiny_models import byte_characters

_TRAINING_TEXT = (
    "the then there their other another mother the cat sat on the mat and then ran; it's they'll we've 1234 12 999\n\n"
    "    def there(other):\n        return other == 'the'  # été naïve 中文中文字\n"
    "    <div><span></span></div>  == != >=\n"
)


def trained_vocabulary(
    pre: str, *, merges: int = 150, user_defined: tuple[str, ...] = (), without: bytes = b""
) -> BpeVocabulary:
    """Train a byte-level BPE vocabulary the textbook way: again and again, the most frequent pair becomes a token.

    `user_defined` texts become USER_DEFINED tokens, the bytes in `without` get none. The ids are shuffled, since real
    vocabularies do not number tokens by rank either; the result is a function of the arguments.
    """
    import regex  # type: ignore[import-untyped]  # noqa: PLC0415 -- comes with tiktoken

    characters = byte_characters()
    words = collections.Counter(regex.findall(PATTERNS[pre], _TRAINING_TEXT))
    split = {word: [characters[byte] for byte in word.encode()] for word in words}
    pairs: list[tuple[str, str]] = []
    for _ in range(merges):
        counts: collections.Counter[tuple[str, str]] = collections.Counter()
        for word, symbols in split.items():
            for pair in pairwise(symbols):
                counts[pair] += words[word]
        if not counts:
            break
        best = max(counts, key=lambda pair: (counts[pair], pair))
        pairs.append(best)
        split = {word: _merged(symbols, best) for word, symbols in split.items()}
    tokens = [characters[byte] for byte in range(256) if byte not in without]
    tokens += dict.fromkeys(left + right for left, right in pairs)
    random.Random(7).shuffle(tokens)
    types = [1] * len(tokens) + [USER_DEFINED] * len(user_defined)
    return BpeVocabulary("gpt2", pre, [*tokens, *user_defined], [f"{left} {right}" for left, right in pairs], types)


def _merged(symbols: list[str], pair: tuple[str, str]) -> list[str]:
    merged: list[str] = []
    for symbol in symbols:
        if merged and (merged[-1], symbol) == pair:
            merged[-1] += symbol
        else:
            merged.append(symbol)
    return merged
