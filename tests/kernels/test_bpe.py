import collections
import random
from itertools import pairwise

import numpy as np
import pytest
import regex
from hypothesis import given, settings
from hypothesis import strategies as st

from chapbook.kernels.bpe import (
    PATTERNS,
    USER_DEFINED,
    BpeCounter,
    BpeUnsupported,
    BpeVocabulary,
    build_bpe_counter,
    encode_reference,
    split_whole_tokens,
    structural_markers,
)
from chapbook.kernels.runs import PieceSplitter

TRAINING_TEXT = (
    "the then there their other another mother the cat sat on the mat and then ran; it's they'll we've 1234 12 999\n\n"
    "    def there(other):\n        return other == 'the'  # été naïve 中文中文字\n"
    "    <div><span></span></div>  == != >=\n"
)
CHARS = [chr(b) if b in {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)} else "" for b in range(256)]
unseen = iter(range(0x100, 0x200))
CHARS = [char or chr(next(unseen)) for char in CHARS]


def trained(pre: str, *, merges: int = 150, user_defined: tuple[str, ...] = (), without: bytes = b"") -> BpeVocabulary:
    """Train a byte-level BPE vocabulary the textbook way: again and again, the most frequent pair becomes a token."""
    words = collections.Counter(regex.findall(PATTERNS[pre], TRAINING_TEXT * 3))
    split = {word: tuple(CHARS[byte] for byte in word.encode()) for word in words}
    pairs = []
    for _ in range(merges):
        counts = collections.Counter()
        for word, symbols in split.items():
            for pair in pairwise(symbols):
                counts[pair] += words[word]
        if not counts:
            break
        best = max(counts, key=lambda pair: (counts[pair], pair))
        pairs.append(best)
        for word, symbols in split.items():
            split[word] = tuple(merge_all(symbols, best))
    tokens = [CHARS[byte] for byte in range(256) if byte not in without] + list(dict.fromkeys(a + b for a, b in pairs))
    # Ids in another order than ranks, as in real vocabularies with control tokens in front.
    random.Random(7).shuffle(tokens)
    types = [1] * len(tokens) + [USER_DEFINED] * len(user_defined)
    return BpeVocabulary("gpt2", pre, [*tokens, *user_defined], [f"{a} {b}" for a, b in pairs], types)


def merge_all(symbols, pair):
    at = 0
    while at < len(symbols):
        if symbols[at : at + 2] == pair:
            yield "".join(pair)
            at += 2
        else:
            yield symbols[at]
            at += 1


def counter(vocabulary: BpeVocabulary) -> BpeCounter:
    built = build_bpe_counter(vocabulary)
    assert isinstance(built, BpeCounter)
    return built


FAMILIES = ("gpt-2", "smollm", "llama-bpe", "qwen2", "qwen35")
MARKUP = ("<tool_call>", "</tool_call>", "      ", "   ", "  ", "#")
VOCABULARIES = {pre: trained(pre, user_defined=MARKUP) for pre in FAMILIES}
COUNTERS = {pre: counter(vocabulary) for pre, vocabulary in VOCABULARIES.items()}
words = st.sampled_from(
    [
        "the",
        " there",
        "'s",
        "12",
        "  ",
        "\n",
        " \n ",
        "\t",
        "=",
        "中",
        "é",
        "e\u0301",
        "👍",
        "<tool_call>",
        "#",
        " ",
        "x",
        "\0",
    ]
)
texts = st.lists(words, max_size=25).map("".join) | st.text(max_size=40)


@pytest.mark.parametrize("pre", FAMILIES)
@given(text=texts)
@settings(max_examples=60)
def test_ids_are_those_of_merging_pair_by_pair(pre, text):
    assert COUNTERS[pre].encode(text).tolist() == encode_reference(VOCABULARIES[pre], text).tolist()


@given(texts)
def test_the_count_is_the_length_of_the_ids(text):
    assert COUNTERS["smollm"].count(text) == len(COUNTERS["smollm"].encode(text))


@pytest.mark.parametrize("pattern", sorted(set(PATTERNS.values())))
@given(text=st.text(max_size=60))
@settings(max_examples=60)
def test_every_pattern_is_total(pattern, text):
    assert "".join(regex.findall(pattern, text)) == text


@given(texts)
def test_decoding_the_ids_gives_the_bytes_of_the_text(text):
    vocabulary = VOCABULARIES["llama-bpe"]
    bytes_of = {char: byte for byte, char in enumerate(CHARS)}
    decoded = b""
    for id in COUNTERS["llama-bpe"].encode(text).tolist():
        token = vocabulary.tokens[id]
        decoded += token.encode() if vocabulary.token_types[id] == USER_DEFINED else bytes(map(bytes_of.get, token))
    assert decoded == text.encode()


def test_structural_markup_in_a_text_stays_text_and_white_space_tokens_are_used():
    vocabulary = VOCABULARIES["gpt-2"]
    ids = COUNTERS["gpt-2"].encode("a<tool_call>b      c#")
    tokens = [vocabulary.tokens[id] for id in ids]
    assert "<tool_call>" not in tokens
    assert "      " in tokens
    assert structural_markers(vocabulary.user_defined()) == ("</tool_call>", "<tool_call>", "#")


def test_a_byte_without_a_token_is_dropped():
    vocabulary = trained("gpt-2", without=b"\x00\xff")
    assert len(counter(vocabulary).encode("a\0b")) == 2
    assert counter(vocabulary).encode("a\0b").tolist() == encode_reference(vocabulary, "a\0b").tolist()


def test_ids_are_read_only_and_of_32_bits():
    ids = COUNTERS["gpt-2"].encode("the cat")
    assert ids.dtype == np.int32
    assert not ids.flags.writeable


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"model": "llama"}, "'llama'"),
        ({"pre": "tekken"}, "'tekken'"),
        ({"pre": ""}, "''"),
        ({"merges": ["a b", "Q Z Z"]}, "no token"),
        ({"merges": ["▁ a"]}, "no token"),
        ({"tokens": ["▁a", *CHARS], "merges": ["▁ a"], "token_types": []}, "'▁'"),
    ],
)
def test_an_unsupported_vocabulary_is_a_result_that_says_why(changes, reason):
    whole = VOCABULARIES["gpt-2"]
    fields = {name: changes.get(name, getattr(whole, name)) for name in whole.__slots__}
    built = build_bpe_counter(BpeVocabulary(**fields))
    assert isinstance(built, BpeUnsupported)
    assert reason in built.reason


def test_a_panic_of_tiktoken_is_caught_and_the_text_encoded_in_halves():
    # A splitter that lets runs through brings the panic about (a stack overflow in the regular expression).
    counter = BpeCounter(
        pattern=PATTERNS["gpt-2"],
        ranks={bytes([byte]): byte for byte in range(256)},
        id_of_rank=np.arange(256, dtype=np.int32),
        user_defined={},
        splitter=PieceSplitter(run_limit_chars=1 << 30),
    )
    assert counter.count(" " * 1_000_000) == 1_000_000


@given(st.text("ab ", max_size=20), st.lists(st.text("ab ", min_size=1, max_size=3), max_size=4, unique=True))
def test_whole_tokens_are_split_off_longest_first(text, tokens):
    ordered = dict.fromkeys(sorted(tokens, key=len, reverse=True))
    parts = split_whole_tokens(text, ordered)
    assert "".join(parts) == text
    assert all(parts)
    for part in parts:
        assert part in ordered or not any(token in part for token in ordered)
