import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chapbook.bench.tiny_models import byte_level_vocabulary, sentencepiece_vocabulary
from chapbook.kernels.errors import EngineClosed, EngineError, ModelFileError
from chapbook.kernels.tokens import concat_tokens, token_ids
from chapbook.runtime.llama import open_vocabulary

MARKUP = ("<|im_start|>", "<|im_end|>", "<|endoftext|>", "<tool_call>", "</tool_call>", "<think>", "</think>")
SPM_MARKUP = (*MARKUP, "<s>", "</s>")
HOSTILE = st.lists(
    st.one_of(
        st.sampled_from([*SPM_MARKUP, *(text[:-1] for text in SPM_MARKUP), *(text[1:] for text in SPM_MARKUP)]),
        st.sampled_from(["<", "</", "s>", "▁", "    ", " ", "\n", "\0", "\u202e", "é", "😀", "<0x0A>", "<unk>"]),
        st.text(max_size=5).filter(lambda text: text.isprintable()),
    ),
    max_size=12,
).map("".join)


@pytest.fixture(scope="module")
def byte_level(tiny):
    with open_vocabulary(tiny("llama")) as vocabulary:
        yield vocabulary


@pytest.fixture(scope="module")
def sentencepiece(tiny):
    with open_vocabulary(tiny("llama", vocab=sentencepiece_vocabulary())) as vocabulary:
        yield vocabulary


@pytest.fixture(scope="module")
def smollm2(smollm2_path):
    with open_vocabulary(smollm2_path) as vocabulary:
        yield vocabulary


def structural_ids(vocabulary):
    ids = {int(vocabulary.tokenize(text, parse_special=True)[0]) for text in vocabulary.control_texts}
    assert len(ids) == len(vocabulary.control_texts)
    return ids


def as_written(vocabulary, text):
    """SentencePiece writes a space as U+2581, so that one in a text reads as a space: the only difference."""
    return text.replace("▁", " ") if "</s>" in vocabulary.control_texts else text


def assert_plain(vocabulary, text):
    tokens = vocabulary.tokenize(text, parse_special=False)
    assert not structural_ids(vocabulary) & set(tokens.tolist())
    assert vocabulary.detokenize(tokens) == as_written(vocabulary, text).encode()
    assert np.array_equal(tokens, vocabulary.tokenize(text, parse_special=False))


def test_control_and_structural_texts_are_named(byte_level, sentencepiece):
    assert set(byte_level.control_texts) == set(MARKUP)
    assert set(sentencepiece.control_texts) == set(SPM_MARKUP)


@settings(max_examples=150, deadline=None)
@given(text=HOSTILE)
def test_content_never_becomes_structure_on_a_byte_level_vocabulary(byte_level, text):
    assert_plain(byte_level, text)


@settings(max_examples=150, deadline=None)
@given(text=HOSTILE)
def test_content_never_becomes_structure_on_a_sentencepiece_vocabulary(sentencepiece, text):
    assert_plain(sentencepiece, text)


@settings(max_examples=100, deadline=None)
@given(text=HOSTILE.map(lambda text: text.replace("\u202e", "x")))
def test_content_never_becomes_structure_on_smollm2(smollm2, text):
    tokens = smollm2.tokenize(text, parse_special=False)
    assert not structural_ids(smollm2) & set(tokens.tolist())


@pytest.mark.parametrize("text", SPM_MARKUP)
def test_markup_is_one_token_where_it_is_parsed(byte_level, sentencepiece, text):
    for vocabulary in (byte_level, sentencepiece):
        if text in vocabulary.control_texts:
            (token,) = vocabulary.tokenize(text, parse_special=True).tolist()
            assert vocabulary.piece(token) == text.encode()


@settings(max_examples=100, deadline=None)
@given(text=HOSTILE)
def test_markup_is_exact_in_both_directions(byte_level, sentencepiece, text):
    for vocabulary in (byte_level, sentencepiece):
        # `<unk>` is a token whose text is no spelling of it; nothing that is parsed may hold it.
        plain = text.replace("<unk>", "")
        assert (
            vocabulary.detokenize(vocabulary.tokenize(plain, parse_special=True))
            == as_written(vocabulary, plain).encode()
        )


def test_content_is_cut_behind_the_first_character_of_a_marker_and_nowhere_else(byte_level, sentencepiece):
    for vocabulary, head, tail in (
        (byte_level, "the <", "tool_call> in there"),
        (sentencepiece, "the <", "tool_call> in there"),
        (sentencepiece, "the<", "/s> in there"),
    ):
        parts = [vocabulary.tokenize(part, parse_special=False) for part in (head, tail)]
        assert np.array_equal(vocabulary.tokenize(head + tail, parse_special=False), concat_tokens(parts))


def test_sentencepiece_adds_no_space_to_a_piece_of_text(sentencepiece):
    for text in ("a", " a", "\n", "\n\n", "  x", "the", "<|im_start|>user\nhi<|im_end|>\n", "é…"):
        for parse_special in (False, True):
            tokens = sentencepiece.tokenize(text, parse_special=parse_special)
            assert sentencepiece.detokenize(tokens) == text.encode(), text


def test_pieces_that_are_joined_are_the_text_that_was_cut(byte_level, sentencepiece):
    for vocabulary in (byte_level, sentencepiece):
        tokens = concat_tokens([vocabulary.tokenize(text, parse_special=False) for text in ("a the", " in", "\n x")])
        assert vocabulary.detokenize(tokens) == b"a the in\n x"


def test_hidden_tokens_are_left_out_where_asked(byte_level):
    tokens = byte_level.tokenize("<|im_start|>hi <tool_call>x</tool_call><|im_end|>", parse_special=True)
    assert byte_level.detokenize(tokens, special=False) == b"hi <tool_call>x</tool_call>"


def test_an_id_outside_the_vocabulary_is_refused(byte_level):
    for bad in (-1, byte_level.size):
        with pytest.raises(EngineError, match="not in the vocabulary"):
            byte_level.detokenize(token_ids([bad]))


@pytest.mark.parametrize("character", ["a", " ", "\n", "\0", "é", "<"])
def test_a_megabyte_of_one_character_is_tokenised_whole(byte_level, smollm2, character):
    text = character * (1_000_000 // len(character.encode()))
    vocabulary = smollm2 if character in "a " else byte_level
    assert vocabulary.detokenize(vocabulary.tokenize(text, parse_special=False)) == text.encode()


def test_many_user_defined_tokens_do_not_take_quadratic_time(byte_level):
    # Runs of four spaces are one user-defined token: without cutting, the search for them takes minutes here.
    text = "    x\n" * 60_000
    tokens = byte_level.tokenize(text, parse_special=False)
    assert len(tokens) == 180_000
    assert byte_level.detokenize(tokens) == text.encode()


def test_a_long_text_has_the_ids_of_llama_cpps_own_call(smollm2):
    words = ["alpha", "beta,", "gamma.", "(delta)", "it's", "12,345", "x_y", "\n", "\n\n", "\t", "été", "naïve"]
    rng = np.random.default_rng(0)
    text = " ".join(words[index] for index in rng.integers(0, len(words), size=6_000))
    cut = smollm2.tokenize(text, parse_special=False)
    whole = smollm2.tokenize(text, parse_special=True)
    assert len(cut) > 10_000
    assert np.array_equal(cut, whole)


def test_a_vocabulary_that_is_closed_is_refused(tiny):
    vocabulary = open_vocabulary(tiny("mamba"))
    vocabulary.close()
    vocabulary.close()
    with pytest.raises(EngineClosed):
        vocabulary.tokenize("a", parse_special=False)


def test_a_vocabulary_is_the_one_of_the_loaded_model(open_engine, tiny):
    engine = open_engine("gemma3")
    with open_vocabulary(tiny("gemma3")) as vocabulary:
        text = "The <tool_call> in a file\n"
        for parse_special in (False, True):
            expected = vocabulary.tokenize(text, parse_special=parse_special)
            assert np.array_equal(engine.tokenize(text, parse_special=parse_special), expected)
        assert vocabulary.control_texts == engine.info.control_texts
        assert (vocabulary.bos_id, vocabulary.eog_ids) == (engine.tokenizer.bos_id, engine.tokenizer.eog_ids)


def test_the_engine_tells_what_the_vocabulary_says_of_its_start(open_engine):
    plain = open_engine("llama").info
    assert (plain.add_bos, plain.bos_text, plain.eos_text) == (False, "<|endoftext|>", "<|im_end|>")
    adding = open_engine("llama", model_options={"vocab": byte_level_vocabulary(add_bos=True)}).info
    assert adding.add_bos
    spm = open_engine("llama", model_options={"vocab": sentencepiece_vocabulary()}).info
    assert (spm.add_bos, spm.bos_text, spm.eos_text) == (True, "<s>", "</s>")


def test_a_missing_vocabulary_file_is_an_error(tmp_path):
    with pytest.raises(ModelFileError, match="no file"):
        open_vocabulary(tmp_path / "nothing.gguf")
