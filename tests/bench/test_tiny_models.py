import subprocess
import sys

import pytest

from chapbook.bench.tiny_models import (
    TinyKind,
    build_tiny_model,
    byte_level_vocabulary,
    sentencepiece_vocabulary,
    tiny_model,
)
from chapbook.runtime.engine import MemoryKind
from chapbook.runtime.gguf import read_gguf


@pytest.mark.parametrize("kind", TinyKind)
def test_a_model_is_small_and_the_same_bytes_for_the_same_arguments(tmp_path, kind):
    first = build_tiny_model(kind, tmp_path / "first.gguf").read_bytes()
    second = build_tiny_model(kind, tmp_path / "second.gguf").read_bytes()
    other = build_tiny_model(kind, tmp_path / "other.gguf", seed=1).read_bytes()
    assert len(first) < 1_000_000
    assert first == second != other
    assert len(other) == len(first)


def test_each_kind_has_the_memory_that_it_is_for(tiny):
    kinds = {kind: read_gguf(tiny(kind.value)).memory_kind() for kind in TinyKind}
    assert kinds == {
        TinyKind.LLAMA: MemoryKind.FULL,
        TinyKind.GEMMA3: MemoryKind.SLIDING,
        TinyKind.MAMBA: MemoryKind.RECURRENT,
        TinyKind.HYBRID: MemoryKind.HYBRID,
    }


def test_vocabulary_template_and_context_are_what_was_asked_for(tmp_path):
    path = build_tiny_model(
        "llama",
        tmp_path / "model.gguf",
        vocab=sentencepiece_vocabulary(),
        template=None,
        n_ctx_train=1234,
        extra={"general.sampling.temp": 0.5},
    )
    metadata = read_gguf(path)
    assert (metadata.tokenizer_model, metadata.chat_template) == ("llama", None)
    assert metadata.context_length_tokens == 1234
    assert metadata.values["general.sampling.temp"] == 0.5
    assert tuple(metadata.tokens) == sentencepiece_vocabulary().tokens


def test_every_token_of_a_vocabulary_is_there_once():
    for vocabulary in (byte_level_vocabulary(), sentencepiece_vocabulary()):
        assert len(set(vocabulary.tokens)) == len(vocabulary.tokens) == len(vocabulary.types)


def test_a_cached_model_is_built_once_for_each_set_of_options(tmp_path):
    first = tiny_model("llama", tmp_path)
    stamp = first.stat().st_mtime_ns
    assert tiny_model(TinyKind.LLAMA, tmp_path) == first
    assert first.stat().st_mtime_ns == stamp
    assert tiny_model("llama", tmp_path, seed=1) != first
    assert tiny_model("llama", tmp_path, vocab=sentencepiece_vocabulary()) != first
    assert len([*tmp_path.iterdir()]) == 3


def test_processes_that_build_the_same_model_leave_one_whole_file(tmp_path):
    script = (
        "import sys; from pathlib import Path; from chapbook.bench.tiny_models import tiny_model; "
        "print(tiny_model('llama', Path(sys.argv[1])))"
    )
    runs = [subprocess.Popen([sys.executable, "-c", script, tmp_path], stdout=subprocess.PIPE) for _ in range(3)]
    for run in runs:
        run.communicate(timeout=60)
        assert run.returncode == 0
    (path,) = tmp_path.iterdir()
    assert len(read_gguf(path).tensors) == 21


def test_a_folder_that_is_not_there_is_an_error_and_leaves_nothing(tmp_path):
    with pytest.raises(FileNotFoundError):
        build_tiny_model("llama", tmp_path / "missing" / "model.gguf")
