import ctypes
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chapbook.bench.trained_vocabulary import trained_vocabulary
from chapbook.kernels.bpe import PATTERNS, BpeVocabulary, encode_reference, structural_markers
from chapbook.kernels.runs import PieceSplitter
from chapbook.kernels.tokens import token_ids
from chapbook.runtime.counting import PROOF_CORPUS, Counter, build_counter, find_difference, proof_texts
from chapbook.runtime.gguf import read_gguf

ROOT = Path(__file__).parents[2]


class VocabularyOnly:
    """llama.cpp's tokenizer of a GGUF whose weights stay on disk, behind the same cuts as any tokenizer of chapbook."""

    def __init__(self, llama_cpp, path: Path, markers: tuple[str, ...]) -> None:
        self._llama = llama_cpp
        parameters = llama_cpp.llama_model_default_params()
        parameters.vocab_only = True
        self._model = llama_cpp.llama_model_load_from_file(str(path).encode(), parameters)
        assert self._model
        self._vocabulary = llama_cpp.llama_model_get_vocab(self._model)
        self._splitter = PieceSplitter(markers)
        self.calls = 0

    def tokenize(self, text, *, parse_special):
        self.calls += 1
        ids = []
        for piece in self._splitter.pieces(text):
            data = piece.encode()
            buffer = (ctypes.c_int32 * (len(data) + 8))()
            found = self._llama.llama_tokenize(
                self._vocabulary, data, len(data), buffer, len(buffer), False, parse_special
            )
            assert found >= 0
            ids += buffer[:found]
        return token_ids(ids)

    def detokenize(self, tokens, *, special=True):
        raise NotImplementedError

    def close(self):
        self._llama.llama_model_free(self._model)


def vocabulary_of(metadata) -> BpeVocabulary:
    types = metadata.token_types.tolist()
    return BpeVocabulary("gpt2", metadata.pre_tokenizer, tuple(metadata.tokens), tuple(metadata.merges), types)


@pytest.fixture(scope="module")
def llama():
    import llama_cpp  # noqa: PLC0415 -- loads a library that only these tests need

    # llama.cpp calls back until another callback is set: this one must live as long.
    silence = llama_cpp.llama_log_callback(lambda *_: None)
    llama_cpp.llama_log_set(silence, None)
    yield llama_cpp
    llama_cpp.llama_log_set(llama_cpp.llama_log_callback(), None)


@pytest.fixture(scope="module")
def smollm2(llama, smollm2_path):
    tokenizer = VocabularyOnly(llama, smollm2_path, ())
    yield read_gguf(smollm2_path), tokenizer
    tokenizer.close()


@pytest.fixture(scope="module")
def counter(smollm2) -> Counter:
    return build_counter(*smollm2)


@pytest.fixture
def vocabulary_file(llama, tmp_path):
    """A function that writes a vocabulary as a GGUF and opens it, behind cuts at the structural texts or `markers`."""
    opened = []

    def write(vocabulary: BpeVocabulary, *, model: str = "gpt2", markers: tuple[str, ...] | None = None):
        path = tmp_path / "tiny.gguf"
        writer = gguf.GGUFWriter(path, "llama")
        writer.add_tokenizer_model(model)
        writer.add_tokenizer_pre(vocabulary.pre)
        writer.add_token_list(vocabulary.tokens)
        writer.add_token_types(vocabulary.token_types)
        if model == "gpt2":
            writer.add_token_merges(vocabulary.merges)
        else:
            writer.add_token_scores([0.0] * len(vocabulary.tokens))
        writer.add_context_length(64)
        writer.add_block_count(1)
        writer.add_embedding_length(8)
        writer.add_head_count(1)
        writer.add_feed_forward_length(8)
        writer.add_layer_norm_rms_eps(1e-5)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.close()
        if markers is None:
            markers = structural_markers(vocabulary.user_defined())
        opened.append(VocabularyOnly(llama, path, markers))
        return read_gguf(path), opened[-1]

    yield write
    for tokenizer in opened:
        tokenizer.close()


def test_the_vocabulary_of_smollm2_is_proved(counter):
    assert counter.reason == ""
    assert counter.fast is not None


def test_source_files_have_the_same_ids_both_ways(counter, smollm2):
    folders = [ROOT / name for name in ("kernels", "runtime", "tests")]
    sources = [path.read_text() for folder in folders for path in sorted(folder.rglob("*.py"))]
    assert sum(map(len, sources)) > 100_000
    assert find_difference(counter.fast, smollm2[1], sources) == ""


pieces = st.sampled_from(
    ["the", " there", "'s", "'LL", "12", "  ", "\n", " \n ", "\t", "==", "中文", "é", "e\u0301", "👍🏽", "\u3000",
     "\x85", "<|im_end|>", "<tool_call>", "☃", "it's", "\r\n", "Ⅷ", "٣", "\u00a0", "'\u017f", "İ", "\0"]
)  # fmt: skip
difficult = st.lists(pieces, max_size=30).map("".join)


@given(text=difficult | st.text(max_size=60))
@settings(max_examples=200, deadline=None)
def test_any_text_has_the_same_ids_both_ways(counter, smollm2, text):
    assert counter.fast.encode(text).tolist() == smollm2[1].tokenize(text, parse_special=False).tolist()


def test_the_plain_reference_has_the_same_ids_on_a_real_vocabulary(counter, smollm2):
    vocabulary = vocabulary_of(smollm2[0])
    text = "".join(text[:120] for text in PROOF_CORPUS)
    assert encode_reference(vocabulary, text).tolist() == counter.fast.encode(text).tolist()


ONE_NAME_A_PATTERN = {pattern: pre for pre, pattern in sorted(PATTERNS.items())}.values()


@pytest.mark.parametrize(
    "pre",
    [
        # The other names share these patterns: 8 s for all of them.
        pytest.param(pre, marks=() if pre in ONE_NAME_A_PATTERN else pytest.mark.slow)
        for pre in sorted(PATTERNS)
    ],
)
def test_every_known_pre_tokeniser_is_proved_against_llama_cpp(vocabulary_file, pre):
    vocabulary = trained_vocabulary(pre, user_defined=("<tool_call>", "      ", "  ", "☃"))
    metadata, tokenizer = vocabulary_file(vocabulary)
    counter = build_counter(metadata, tokenizer)
    assert counter.reason == ""
    text = "".join(text[:400] for text in PROOF_CORPUS) + "x<tool_call>      y☃"
    assert np.array_equal(encode_reference(vocabulary, text), tokenizer.tokenize(text, parse_special=False))


@pytest.mark.parametrize("pre", ONE_NAME_A_PATTERN)
def test_random_texts_have_the_same_ids_under_every_pattern(vocabulary_file, pre):
    metadata, tokenizer = vocabulary_file(trained_vocabulary(pre, user_defined=("<tool_call>", "      ", "  ", "☃")))
    counter = build_counter(metadata, tokenizer)

    @given(text=difficult | st.text(max_size=60))
    @settings(max_examples=60, deadline=None)
    def same(text):
        assert counter.fast.encode(text).tolist() == tokenizer.tokenize(text, parse_special=False).tolist()

    same()


def test_a_vocabulary_that_tiktoken_cannot_serve_is_counted_by_the_tokenizer(vocabulary_file):
    whole = trained_vocabulary("gpt-2")
    tokens = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a"]
    pieces = BpeVocabulary("llama", "default", tokens, [], [2, *[6] * 256, 1, 1])
    metadata, tokenizer = vocabulary_file(pieces, model="llama")
    counter = build_counter(metadata, tokenizer)
    assert counter.fast is None
    assert "'llama'" in counter.reason
    assert counter.count("a a") == counter.exact_near("a a", 3) == len(tokenizer.tokenize("a a", parse_special=False))
    unknown = BpeVocabulary("gpt2", "default", whole.tokens, whole.merges, whole.token_types)
    counter = build_counter(*vocabulary_file(unknown))
    assert counter.fast is None
    assert "'default'" in counter.reason


def test_a_vocabulary_whose_ids_differ_falls_back_and_says_where(vocabulary_file):
    vocabulary = trained_vocabulary("gpt-2", user_defined=("<tool_call>",))
    metadata, tokenizer = vocabulary_file(vocabulary, markers=())
    counter = build_counter(metadata, tokenizer)
    assert counter.fast is None
    assert "differ" in counter.reason
    assert "word<tool_call>word" in counter.reason
    # The same merges under another pattern: the corpus must notice that, too.
    wrong = BpeVocabulary("gpt2", "qwen2", vocabulary.tokens, vocabulary.merges, vocabulary.token_types)
    metadata, _ = vocabulary_file(wrong)
    assert "differ" in build_counter(metadata, tokenizer).reason


@given(text=difficult, threshold=st.integers(1, 60))
@settings(deadline=None)
def test_a_count_near_a_threshold_is_taken_by_the_tokenizer_and_only_there(counter, smollm2, text, threshold):
    _, tokenizer = smollm2
    counted = counter.count(text)
    before = tokenizer.calls
    assert counter.exact_near(text, threshold) == counted
    near = abs(counted - threshold) <= threshold / 20
    assert tokenizer.calls - before == (1 if near else 0)


def test_the_proof_holds_the_special_texts_of_the_vocabulary(smollm2):
    assert any("<|im_start|>" in text for text in proof_texts(vocabulary_of(smollm2[0])))
