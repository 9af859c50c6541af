import logging
import subprocess
import sys

import numpy as np
import pytest

from chapbook.kernels.errors import DecodeFailed, ModelFileError, ModelLoadError, UsageError
from chapbook.kernels.tokens import token_ids
from chapbook.runtime.engine import Sampling
from chapbook.runtime.gguf import fingerprint, read_gguf
from chapbook.runtime.llama import LlamaEngine, open_vocabulary
from chapbook.runtime.prefix_cache.options import CacheOptions


@pytest.fixture
def model_bytes(tiny):
    return tiny("llama").read_bytes()


def assert_refused(path, error, match):
    for opening in (LlamaEngine.open, open_vocabulary):
        with pytest.raises(error, match=match):
            opening(path)


def test_a_missing_file_a_folder_and_an_empty_file_are_errors(tmp_path):
    assert_refused(tmp_path / "missing.gguf", ModelFileError, "no file")
    assert_refused(tmp_path, ModelFileError, "not a file")
    empty = tmp_path / "empty.gguf"
    empty.write_bytes(b"")
    assert_refused(empty, ModelFileError, "empty")


def test_a_file_that_is_no_gguf_or_ends_early_is_an_error(tmp_path, model_bytes):
    path = tmp_path / "model.gguf"
    path.write_bytes(b"<html>not found</html>")
    assert_refused(path, ModelFileError, "web page")
    for kept in (5, 100, 5_000, len(model_bytes) // 2, len(model_bytes) - 1):
        path.write_bytes(model_bytes[:kept])
        assert_refused(path, ModelFileError, str(path))


def test_damage_anywhere_in_the_header_is_an_error_or_loads_and_never_a_crash(tmp_path, model_bytes):
    # In a process of its own, since a crash is what is looked for.
    script = """
import sys
from pathlib import Path
import numpy as np
from chapbook.kernels.errors import ModelError
from chapbook.kernels.tokens import token_ids
from chapbook.runtime.llama import LlamaEngine
model = Path(sys.argv[1]).read_bytes()
path = Path(sys.argv[2])
random = np.random.default_rng(int(sys.argv[3]))
outcomes = []
for _ in range(40):
    damaged = bytearray(model)
    # The metadata before the vocabulary's texts, and the tensor index after them.
    at = int(random.integers(4, 900))
    damaged[at] ^= 1 << int(random.integers(8))
    path.write_bytes(damaged)
    try:
        with LlamaEngine.open(path, n_ctx=256, n_threads=1) as engine:
            outcomes.append("loaded")
    except ModelError as error:
        outcomes.append(type(error).__name__)
print(",".join(outcomes))
"""
    source, target = tmp_path / "source.gguf", tmp_path / "damaged.gguf"
    source.write_bytes(model_bytes)
    run = subprocess.run(
        [sys.executable, "-c", script, source, target, "1"], capture_output=True, text=True, timeout=120, check=False
    )
    assert run.returncode == 0, run.stderr[-2000:]
    outcomes = set(run.stdout.strip().split(","))
    assert "ModelFileError" in outcomes
    assert outcomes <= {"loaded", "ModelFileError", "ModelLoadError"}


def test_weights_that_are_noise_are_an_error_at_the_first_request(tmp_path, model_bytes, tiny):
    metadata = read_gguf(tiny("llama"))
    size = len(model_bytes) - metadata.data_offset
    noise = np.random.default_rng(0).integers(0, 256, size=size, dtype=np.uint8).tobytes()
    path = tmp_path / "noise.gguf"
    path.write_bytes(model_bytes[: metadata.data_offset] + noise)
    with LlamaEngine.open(path, n_ctx=256) as engine, pytest.raises(DecodeFailed, match="not numbers"):
        engine.sync(engine.open_sequence(), token_ids([1, 2, 3]))


def test_an_architecture_that_llama_cpp_does_not_know_is_an_error_with_its_words(tmp_path, model_bytes):
    path = tmp_path / "model.gguf"
    path.write_bytes(model_bytes.replace(b"llama", b"lluma"))
    with pytest.raises(ModelLoadError, match="lluma") as caught:
        LlamaEngine.open(path)
    assert any("unknown model architecture" in line for line in caught.value.details)


@pytest.mark.parametrize(
    "options",
    [
        {"n_ctx": 0},
        {"n_sequences": 0},
        {"n_sequences": 257},
        {"n_batch": -1},
        {"type_k": "q9"},
        {"cache": CacheOptions(memory_mb=-1)},
        {"cache": CacheOptions(rest_s=-0.5)},
    ],
)
def test_an_option_out_of_range_is_an_error(tiny, options):
    with pytest.raises(UsageError):
        LlamaEngine.open(tiny("llama"), **options)


def test_a_context_that_cannot_be_made_is_an_error_that_says_what_helps(tiny):
    # A quantised V cache needs flash attention.
    with pytest.raises(ModelLoadError, match="smaller n_ctx"):
        LlamaEngine.open(tiny("llama"), n_ctx=256, type_k="f16", type_v="q4_0", flash_attn=False)


def test_cache_types_and_batches_can_be_chosen(tiny):
    with LlamaEngine.open(
        tiny("llama"), n_ctx=500, n_batch=100, n_ubatch=80, type_k="f32", type_v="f32", n_threads=1
    ) as engine:
        assert engine.info.n_ctx == 500
        sequence = engine.open_sequence()
        calls = []
        engine.sync(sequence, token_ids(range(250)), progress=lambda *call: calls.append(call))
        assert calls == [(0, 250), (100, 250), (200, 250), (250, 250)]
        engine.check_integrity()


def test_the_info_is_that_of_the_file(tiny):
    path = tiny("llama", n_ctx_train=1000)
    with LlamaEngine.open(path, n_threads=1) as engine:
        info = engine.info
        assert info.model_name == "tiny llama"
        assert info.fingerprint == fingerprint(path, read_gguf(path))
        assert (info.n_ctx, info.n_ctx_trained) == (1000, 1000)
        assert info.vocab_size == len(read_gguf(path).tokens)
        assert "<|im_start|>" in info.chat_template
        assert engine.placement.reason == "the trained context"


def test_sampling_comes_from_the_file_where_it_names_it(tiny):
    named = {
        "general.sampling.temp": 0.25,
        "general.sampling.top_k": 7,
        "general.sampling.penalty_repeat": 1.5,
        "general.sampling.min_p": -1.0,
    }
    with LlamaEngine.open(tiny("llama", extra=named), n_ctx=256, n_threads=1) as engine:
        assert engine.default_sampling() == Sampling(temperature=0.25, top_k=7, repeat_penalty=1.5)
    with LlamaEngine.open(tiny("llama"), n_ctx=256, n_threads=1) as engine:
        assert engine.default_sampling() == Sampling()


def test_the_log_of_llama_cpp_goes_to_our_logger_and_not_to_the_terminal(tiny, caplog, capfd):
    with caplog.at_level(logging.DEBUG, logger="chapbook.llama"):
        LlamaEngine.open(tiny("llama"), n_ctx=256, n_threads=1).close()
    assert any("n_ctx" in record.message for record in caplog.records)
    assert capfd.readouterr() == ("", "")


def test_importing_the_engine_loads_no_library():
    script = "import sys, chapbook.runtime.llama; print('llama_cpp' in sys.modules, 'psutil' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert run.stdout.split() == ["False", "False"]


def test_an_engine_that_is_forgotten_is_freed_without_a_crash(tiny):
    script = """
import sys
from pathlib import Path
from chapbook.kernels.tokens import token_ids
from chapbook.runtime.engine import Grammar, Sampling, Trigger
from chapbook.runtime.llama import LlamaEngine
for _ in range(3):
    engine = LlamaEngine.open(Path(sys.argv[1]), n_ctx=256, n_threads=1)
    sequence = engine.open_sequence()
    engine.sync(sequence, token_ids([1, 2, 3]))
    grammar = Grammar(gbnf='root ::= "abc"', triggers=(Trigger(text="x"),), required=True)
    generation = engine.generate(sequence, sampling=Sampling(), max_tokens=20, grammar=grammar)
    next(generation), next(generation)
print("done")
"""
    run = subprocess.run(
        [sys.executable, "-c", script, tiny("llama")], capture_output=True, text=True, timeout=60, check=False
    )
    assert (run.returncode, run.stdout.strip()) == (0, "done"), run.stderr
