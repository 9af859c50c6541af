import ctypes
import struct
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from chapbook.kernels.errors import ModelFileError
from chapbook.runtime.architectures import memory_kind, sliding_window_tokens
from chapbook.runtime.engine import MemoryKind
from chapbook.runtime.gguf import MAX_PAIRS, MAX_STRINGS, TYPE_BLOCKS, fingerprint, read_gguf

TOKENS = ["<s>", "a", "é", "漢", "", "Ġthe"]
RUNS_IN_ONE_FOLDER = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)


def write_model(path: Path, *, alignment: int | None = None, tensors: int = 3, **changes) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("tiny")
    writer.add_context_length(512)
    writer.add_block_count(2)
    writer.add_embedding_length(64)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(TOKENS)
    writer.add_token_merges(["a b"])
    writer.add_token_types([3, 1, 1, 1, 1, 1])
    writer.add_chat_template("{{ messages }}")
    writer.add_float32("x.float", 0.5)
    writer.add_float64("x.double", 1e300)
    writer.add_bool("x.yes", True)
    writer.add_int8("x.int8", -8)
    writer.add_uint64("x.uint64", 2**64 - 1)
    writer.add_array("x.floats", [0.5, 1.5])
    writer.add_array("x.bools", [True, False])
    for key, value in changes.items():
        writer.add_string(key, value)
    if alignment:
        writer.add_custom_alignment(alignment)
    for number in range(tensors):
        writer.add_tensor(f"blk.{number}.w", np.arange(96 + number, dtype=np.float32).reshape(1, -1))
    writer.add_tensor("blk.q", np.zeros((4, 34), dtype=np.uint8), raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "tiny.gguf")


def refused(path: Path, data: bytes) -> ModelFileError:
    path.write_bytes(data)
    with pytest.raises(ModelFileError) as caught:
        read_gguf(path)
    assert caught.value.path == path
    return caught.value


def header(n_tensors: int, n_pairs: int, body: bytes = b"", *, version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, n_tensors, n_pairs) + body


def string(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


def test_every_value_is_what_was_written(model):
    metadata = read_gguf(model)
    values = metadata.values
    assert metadata.version == 3
    assert values["x.float"] == 0.5
    assert values["x.double"] == 1e300
    assert values["x.yes"] is True
    assert values["x.int8"] == -8
    assert values["x.uint64"] == 2**64 - 1
    assert values["x.floats"].tolist() == [0.5, 1.5]
    assert values["x.bools"].tolist() == [True, False]
    assert list(metadata.tokens) == [metadata.tokens[i] for i in range(6)] == TOKENS
    assert metadata.tokens[-1] == "Ġthe"
    assert metadata.tokens[1:3] == ["a", "é"]
    assert list(metadata.merges) == ["a b"]
    assert metadata.token_types.tolist() == [3, 1, 1, 1, 1, 1]
    assert (metadata.architecture, metadata.name, metadata.chat_template) == ("llama", "tiny", "{{ messages }}")
    assert (metadata.tokenizer_model, metadata.pre_tokenizer) == ("gpt2", "gpt-2")
    assert metadata.context_length_tokens == 512
    assert metadata.kv_bytes_per_token() == 2 * 2 * (16 + 16) * 2
    assert metadata.split_count == 1
    with pytest.raises(IndexError):
        metadata.tokens[6]


@pytest.mark.parametrize("alignment", [None, 8, 1024])
def test_the_tensor_index_points_at_the_data(tmp_path, alignment):
    path = write_model(tmp_path / "m.gguf", alignment=alignment)
    metadata = read_gguf(path)
    assert metadata.file_size == path.stat().st_size
    data = path.read_bytes()
    for number, tensor in enumerate(metadata.tensors[:3]):
        assert (tensor.name, tensor.shape, tensor.ggml_type) == (f"blk.{number}.w", (96 + number, 1), 0)
        start = metadata.data_offset + tensor.offset_bytes
        assert start % (alignment or 32) == 0
        assert np.array_equal(np.frombuffer(data, np.float32, 96 + number, start), np.arange(96 + number))
    assert metadata.tensors[3].size_bytes == 4 * 34


@pytest.mark.slow  # the gguf package takes 9 s to read the vocabulary
def test_the_reader_agrees_with_the_gguf_package_on_a_real_model(smollm2_path):
    metadata = read_gguf(smollm2_path)
    reader = gguf.GGUFReader(smollm2_path)
    ours = {key: getattr(value, "tolist", lambda value=value: value)() for key, value in metadata.values.items()}
    fields = {key: field for key, field in reader.fields.items() if not key.startswith("GGUF.")}
    assert ours.keys() == fields.keys()
    for key, field in fields.items():
        value = ours[key]
        assert (list(value) if field.types[0] == gguf.GGUFValueType.ARRAY else value) == field.contents()
    assert metadata.data_offset == reader.data_offset
    assert [
        (t.name, t.shape, t.ggml_type, t.size_bytes, metadata.data_offset + t.offset_bytes) for t in metadata.tensors
    ] == [(t.name, tuple(t.shape.tolist()), int(t.tensor_type), t.n_bytes, t.data_offset) for t in reader.tensors]


def test_the_block_sizes_are_those_of_the_library():
    import llama_cpp  # noqa: PLC0415 -- loads a library that only this test needs

    folder = Path(llama_cpp.__file__).parent / "lib"
    suffix = {"darwin": "dylib", "win32": "dll"}.get(sys.platform, "so")
    library = ctypes.CDLL(str(next(folder.glob(f"*ggml-base.{suffix}"))))
    library.ggml_type_size.restype = ctypes.c_size_t
    library.ggml_blck_size.restype = ctypes.c_int64
    for ggml_type, (elements, size) in TYPE_BLOCKS.items():
        assert (library.ggml_blck_size(ggml_type), library.ggml_type_size(ggml_type)) == (elements, size), ggml_type


def test_version_2_is_read_and_others_are_refused_with_what_to_do(tmp_path, model):
    path = tmp_path / "m.gguf"
    data = model.read_bytes()
    path.write_bytes(data[:4] + struct.pack("<I", 2) + data[8:])
    assert read_gguf(path).version == 2
    assert "version 1" in str(refused(path, data[:4] + struct.pack("<I", 1) + data[8:]))
    assert "version 4" in str(refused(path, data[:4] + struct.pack("<I", 4) + data[8:]))
    assert "big-endian" in str(refused(path, data[:4] + struct.pack(">I", 3) + data[8:]))


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "empty"),
        (b"GG", "not a GGUF"),
        (b"PK\x03\x04....", "zip"),
        (b"version https://git-lfs.github.com/spec/v1\n", "git lfs pull"),
        (b"<!DOCTYPE html>", "web page"),
        (b"tjgg....", "convert"),
        (b"GGUF", "ends at byte 4"),
        (header(0, 2**60), "1,152,921,504,606,846,976 key-value pairs"),
        (header(2**60, 0), "tensors"),
        (header(0, MAX_PAIRS + 1), f"{MAX_PAIRS:,} is the limit"),
        (header(0, 1000), "more than the 0 bytes left"),
        (header(0, 1, struct.pack("<Q", 2**60) + bytes(40)), "reaches to byte"),
        (header(0, 1, string(b"") + bytes(40)), "empty"),
        (header(0, 1, string(b"k") + struct.pack("<I", 13) + bytes(40)), "value type 13"),
        (header(0, 1, string(b"k") + struct.pack("<IQ", 8, 2**63) + bytes(40)), "reaches to byte"),
        (header(0, 1, string(b"k") + struct.pack("<IIQ", 9, 4, 2**62) + bytes(40)), "reaches to byte"),
        (header(0, 1, string(b"k") + struct.pack("<IIQ", 9, 8, 2**60) + bytes(40)), f"{MAX_STRINGS:,} is the limit"),
        (header(0, 1, string(b"k") + struct.pack("<IIQ", 9, 8, 2) + struct.pack("<QQ", 0, 2**60)), "reaches to byte"),
        (header(0, 1, string(b"k") + struct.pack("<IIQIQ", 9, 9, 1, 9, 1) + bytes(40)), "arrays of numbers"),
        (header(0, 2, 2 * (string(b"k") + struct.pack("<IB", 0, 1))), "there twice"),
        (header(0, 1, string(b"general.alignment") + struct.pack("<II", 4, 3)), "power of 2"),
        (header(0, 1, string(b"general.alignment") + struct.pack("<II", 4, 0)), "power of 2"),
        (header(1, 0, string(b"t") + struct.pack("<I", 2**31) + bytes(40)), "4 is the limit"),
        (header(1, 0, string(b"t") + struct.pack("<IQQIQ", 2, 2**63, 2**63, 0, 0)), "incomplete"),
        (header(1, 0, string(b"t") + struct.pack("<IQIQ", 1, 33, 8, 0)), "whole blocks of 32"),
        (header(1, 0, string(b"t") + struct.pack("<IQIQ", 1, 1, 999, 2**63)), "incomplete"),
        (header(2, 0, 2 * (string(b"t") + struct.pack("<IQIQ", 1, 1, 0, 0)) + bytes(64)), "same name"),
    ],
)
def test_a_broken_or_hostile_file_is_refused_with_the_reason(tmp_path, data, words):
    error = refused(tmp_path / "m.gguf", data)
    assert words in str(error)
    assert error.offset is not None
    assert 0 <= error.offset <= len(data)


def test_a_sparse_file_of_empty_strings_costs_no_more_than_the_limits(tmp_path):
    path = tmp_path / "m.gguf"
    with path.open("wb") as file:
        file.write(header(0, 1, string(b"k") + struct.pack("<IQ", 8, 1 << 40)))
        file.truncate(1 << 41)
    with pytest.raises(ModelFileError, match="is the limit"):
        read_gguf(path)


def test_a_missing_file_a_folder_and_an_endless_one_are_refused(tmp_path):
    for path, words in (
        (tmp_path / "none.gguf", "there is no file"),
        (tmp_path, "not a file"),
        (Path("/dev/zero"), "not a file"),
    ):
        with pytest.raises(ModelFileError, match=words):
            read_gguf(path)
    with pytest.raises(ModelFileError, match="cannot be read"):
        read_gguf(Path("a\0b"))


def test_missing_tensor_data_is_found_out_from_the_index(tmp_path, model):
    data = model.read_bytes()
    metadata = read_gguf(model)
    last = metadata.tensors[-1]
    whole = metadata.data_offset + last.offset_bytes + last.size_bytes
    path = tmp_path / "m.gguf"
    path.write_bytes(data[:whole])
    read_gguf(path)
    error = refused(path, data[: whole - 1])
    assert f"{whole - 1:,} of {whole:,} bytes" in str(error)
    assert error.offset == whole - 1


@given(data=st.data())
@RUNS_IN_ONE_FOLDER
def test_a_truncated_file_is_always_refused(tmp_path, model, data):
    whole = model.read_bytes()
    metadata = read_gguf(model)
    end = metadata.data_offset + metadata.tensors[-1].offset_bytes + metadata.tensors[-1].size_bytes
    refused(tmp_path / "m.gguf", whole[: data.draw(st.integers(0, end - 1))])


@given(data=st.data())
@settings(RUNS_IN_ONE_FOLDER, max_examples=300)
def test_no_damage_to_a_header_raises_anything_but_a_model_file_error(tmp_path, model, data):
    whole = bytearray(model.read_bytes())
    end = read_gguf(model).header_bytes
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, end - 1))
        damage = data.draw(
            st.binary(min_size=1, max_size=8) | st.sampled_from([b"\xff" * 8, b"\0" * 8, struct.pack("<Q", 2**60)])
        )
        whole[at : at + len(damage)] = damage
    path = tmp_path / "m.gguf"
    path.write_bytes(whole)
    try:
        metadata = read_gguf(path)
    except ModelFileError:
        return
    # What was read although it is damaged must still be usable without surprise.
    assert len(list(metadata.tokens)) == len(metadata.tokens)
    metadata.memory_kind()
    metadata.kv_bytes_per_token()
    assert len(fingerprint(path, metadata)) == 32


def test_the_fingerprint_changes_with_metadata_size_and_weights_and_not_with_the_path(tmp_path, model):
    original = fingerprint(model, read_gguf(model))
    assert original == fingerprint(model, read_gguf(model))
    changed = {
        "renamed": write_model(tmp_path / "a.gguf"),
        "more metadata": write_model(tmp_path / "b.gguf", **{"general.author": "x"}),
        "other metadata of the same size": write_model(tmp_path / "f.gguf", **{"general.author": "y"}),
        "more tensors": write_model(tmp_path / "c.gguf", tensors=4),
    }
    longer = tmp_path / "d.gguf"
    longer.write_bytes(model.read_bytes() + b"\0")
    weights = tmp_path / "e.gguf"
    data = bytearray(model.read_bytes())
    data[-100] ^= 1
    weights.write_bytes(data)
    changed |= {"longer": longer, "other weights": weights}
    prints = {what: fingerprint(path, read_gguf(path)) for what, path in changed.items()}
    assert prints.pop("renamed") == original
    assert len({original, *prints.values()}) == 1 + len(prints)


def test_the_fingerprint_of_a_model_of_80_mb_reads_a_small_part_of_it(smollm2_path, tmp_path):
    metadata = read_gguf(smollm2_path)
    data = bytearray(smollm2_path.read_bytes())
    original = fingerprint(smollm2_path, metadata)
    step = (len(data) - metadata.data_offset - 4096) / 63
    copy = tmp_path / "m.gguf"
    for offset, same in (
        (0, False),
        (4096, True),
        (int(step) - 10, True),
        (int(step) + 10, False),
        (len(data) - metadata.data_offset - 1, False),
    ):
        data[metadata.data_offset + offset] ^= 1
        copy.write_bytes(data)
        assert (fingerprint(copy, metadata) == original) is same, offset
        data[metadata.data_offset + offset] ^= 1


@pytest.mark.parametrize(
    ("architecture", "values", "kind", "window"),
    [
        ("llama", {}, MemoryKind.FULL, 0),
        ("llama", {"attention.sliding_window": 4096}, MemoryKind.FULL, 0),
        ("qwen2", {"attention.sliding_window": 4096}, MemoryKind.FULL, 0),
        ("phi3", {"attention.sliding_window": 2047}, MemoryKind.FULL, 0),
        ("gemma3", {"attention.sliding_window": 512}, MemoryKind.SLIDING, 512),
        ("gemma3", {"attention.sliding_window": 0}, MemoryKind.FULL, 0),
        ("gemma3", {}, MemoryKind.FULL, 0),
        ("gemma2", {}, MemoryKind.SLIDING, 4096),
        ("gpt-oss", {"attention.sliding_window": 128}, MemoryKind.SLIDING, 128),
        ("llama4", {}, MemoryKind.SLIDING, 8192),
        ("llama4", {"attention.sliding_window": 0}, MemoryKind.FULL, 0),
        ("smallthinker", {"attention.sliding_window": 100}, MemoryKind.SLIDING, 4096),
        ("smallthinker", {}, MemoryKind.FULL, 0),
        ("exaone4", {"block_count": 64}, MemoryKind.SLIDING, 4096),
        ("exaone4", {"block_count": 65, "nextn_predict_layers": 1}, MemoryKind.SLIDING, 4096),
        ("exaone4", {"block_count": 30, "attention.sliding_window": 4096}, MemoryKind.FULL, 0),
        ("mamba", {}, MemoryKind.RECURRENT, 0),
        ("rwkv7", {"attention.sliding_window": 4096}, MemoryKind.RECURRENT, 0),
        ("jamba", {}, MemoryKind.HYBRID, 0),
        ("qwen35", {}, MemoryKind.HYBRID, 0),
        ("lfm2", {"attention.sliding_window": 64}, MemoryKind.HYBRID, 64),
        ("", {}, MemoryKind.FULL, 0),
        ("of tomorrow", {}, MemoryKind.FULL, 0),
    ],
)
def test_the_memory_kind_follows_the_architecture_and_not_a_window_that_is_ignored(architecture, values, kind, window):
    def number(key):
        return values.get(key.removeprefix(f"{architecture}."))

    assert memory_kind(architecture, number) is kind
    assert sliding_window_tokens(architecture, number) == window


def test_the_kv_cache_of_smollm2_takes_what_llama_cpp_allocates_for_it(smollm2_path):
    # 94 MB for 4,096 tokens: 30 layers of 3 heads, 64 wide, keys and values of 2 bytes.
    assert read_gguf(smollm2_path).kv_bytes_per_token() == 30 * 3 * (64 + 64) * 2


def test_a_model_with_recurrent_memory_only_has_no_kv_cache_that_grows(tiny):
    assert read_gguf(tiny("mamba")).kv_bytes_per_token() == 0


@pytest.mark.parametrize(
    ("kind", "memory"),
    [
        ("llama", MemoryKind.FULL),
        ("gemma3", MemoryKind.SLIDING),
        ("mamba", MemoryKind.RECURRENT),
        ("hybrid", MemoryKind.HYBRID),
    ],
)
def test_the_tiny_models_have_the_memory_that_they_are_made_for(tiny, kind, memory):
    assert read_gguf(tiny(kind)).memory_kind() is memory
