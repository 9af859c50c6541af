import numpy as np
import pytest
import regex
from hypothesis import given, settings
from hypothesis import strategies as st

from chapbook.bench.tiny_models import byte_characters
from chapbook.bench.trained_vocabulary import trained_vocabulary
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

FAMILIES = ("gpt-2", "smollm", "llama-bpe", "qwen2", "qwen35")
MARKUP = ("<tool_call>", "</tool_call>", "      ", "   ", "  ", "#")
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


def counter(vocabulary: BpeVocabulary) -> BpeCounter:
    built = build_bpe_counter(vocabulary)
    assert isinstance(built, BpeCounter)
    return built


@pytest.fixture(scope="module")
def vocabularies() -> dict[str, BpeVocabulary]:
    return {pre: trained_vocabulary(pre, user_defined=MARKUP) for pre in FAMILIES}


@pytest.fixture(scope="module")
def counters(vocabularies) -> dict[str, BpeCounter]:
    return {pre: counter(vocabulary) for pre, vocabulary in vocabularies.items()}


@pytest.mark.parametrize("pre", FAMILIES)
@given(text=texts)
@settings(max_examples=60)
def test_ids_are_those_of_merging_pair_by_pair(vocabularies, counters, pre, text):
    assert counters[pre].encode(text).tolist() == encode_reference(vocabularies[pre], text).tolist()


@given(text=texts)
def test_the_count_is_the_length_of_the_ids(counters, text):
    assert counters["smollm"].count(text) == len(counters["smollm"].encode(text))


@pytest.mark.parametrize("pattern", sorted(set(PATTERNS.values())))
@given(text=st.text(max_size=60))
@settings(max_examples=60)
def test_every_pattern_is_total(pattern, text):
    assert "".join(regex.findall(pattern, text)) == text


@given(text=texts)
def test_decoding_the_ids_gives_the_bytes_of_the_text(vocabularies, counters, text):
    vocabulary = vocabularies["llama-bpe"]
    bytes_of = {char: byte for byte, char in enumerate(byte_characters())}
    decoded = b""
    for id in counters["llama-bpe"].encode(text).tolist():
        token = vocabulary.tokens[id]
        decoded += token.encode() if vocabulary.token_types[id] == USER_DEFINED else bytes(map(bytes_of.get, token))
    assert decoded == text.encode()


def test_structural_markup_in_a_text_stays_text_and_white_space_tokens_are_used(vocabularies, counters):
    vocabulary = vocabularies["gpt-2"]
    ids = counters["gpt-2"].encode("a<tool_call>b      c#")
    tokens = [vocabulary.tokens[id] for id in ids]
    assert "<tool_call>" not in tokens
    assert "      " in tokens
    assert structural_markers(vocabulary.user_defined()) == ("</tool_call>", "<tool_call>", "#")


def test_a_byte_without_a_token_is_dropped():
    vocabulary = trained_vocabulary("gpt-2", without=b"\x00\xff")
    assert len(counter(vocabulary).encode("a\0b")) == 2
    assert counter(vocabulary).encode("a\0b").tolist() == encode_reference(vocabulary, "a\0b").tolist()


def test_ids_are_read_only_and_of_32_bits(counters):
    ids = counters["gpt-2"].encode("the cat")
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
        ({"tokens": ["▁a"], "merges": ["▁ a"], "token_types": []}, "'▁'"),
    ],
)
def test_an_unsupported_vocabulary_is_a_result_that_says_why(vocabularies, changes, reason):
    whole = vocabularies["gpt-2"]
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
