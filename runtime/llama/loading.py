"""Opening a GGUF: our own checks first, then llama.cpp, with every NULL turned into an error that shows its log."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import msgspec

from ...kernels.errors import ModelLoadError
from ..engine import MemoryKind
from ..gguf import read_gguf
from ..gguf_metadata import GgufMetadata
from .file_checks import check_metadata
from .library import library
from .placement import CONTEXT_STEP_TOKENS, KV_ELEMENT_BYTES
from .tokenizer import LlamaTokenizer

OUTPUTS_MOST = 64
"""Rows of logits that one decode may give. More than the context was made for ends the process."""


class ContextOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How the context is made. `n_cells` of KV are shared by `n_sequences`; `flash_attn` None lets llama.cpp choose."""

    n_cells: int
    n_batch: int
    n_ubatch: int
    n_threads: int
    n_sequences: int
    type_k: str
    type_v: str
    flash_attn: bool | None
    swa_full: bool


class LoadedModel:
    """A model's pointers, freed together and once: at `close`, or with the last reference."""

    def __init__(self, path: Path, metadata: GgufMetadata, pointer: Any) -> None:
        api = library().api
        self.path, self.metadata, self.pointer = path, metadata, pointer
        self.context: Any = None
        self._owned = [(api.llama_model_free, pointer)]
        self._finalizer = weakref.finalize(self, _free, self._owned)
        # At the end of the process another thread may still be in llama.cpp: the engine sees to that.
        self._finalizer.atexit = False
        self.vocab = api.llama_model_get_vocab(pointer)
        if not self.vocab or not api.llama_vocab_type(self.vocab) or api.llama_vocab_n_tokens(self.vocab) <= 0:
            raise ModelLoadError(f"{path} holds no vocabulary, so that no text can be given to it", path=path)

    def open_context(self, options: ContextOptions) -> None:
        """Make the context. Raises ModelLoadError where llama.cpp refuses it."""
        loaded = library()
        api = loaded.api
        loaded.listen()
        context = api.llama_init_from_model(self.pointer, _context_params(api, options))
        if not context:
            raise ModelLoadError(
                f"llama.cpp could not make a context of {options.n_cells:,} tokens for {self.path}"
                f"{_details(loaded.log.recent())}. A smaller n_ctx takes less memory",
                path=self.path,
                details=loaded.log.recent(),
            )
        self.context = context
        self._owned.insert(0, (api.llama_free, context))

    def close(self) -> None:
        """Free context and model. Closing twice does nothing."""
        self._finalizer()


class Vocabulary(LlamaTokenizer):
    """The vocabulary of a GGUF without its weights."""

    def __init__(self, model: LoadedModel) -> None:
        super().__init__(model.vocab)
        self._model = model
        self.metadata = model.metadata

    def close(self) -> None:
        """Free it; later calls raise EngineClosed."""
        super().close()
        self._model.close()

    def __enter__(self) -> Vocabulary:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def open_vocabulary(path: Path) -> Vocabulary:
    """Open the vocabulary of the GGUF at `path`, in a fraction of a second and without its weights.

    Raises ModelFileError where the file is no whole GGUF, ModelLoadError where llama.cpp refuses it.
    """
    return Vocabulary(load_model(path, vocab_only=True))


def load_model(path: Path, *, vocab_only: bool = False, n_gpu_layers: int | None = None) -> LoadedModel:
    """Load the model at `path`. `n_gpu_layers` None or -1 offloads all layers where the build can.

    Raises ModelFileError where the file is no whole GGUF, ModelLoadError where llama.cpp refuses it.
    """
    metadata = read_gguf(path)
    check_metadata(path, metadata)
    loaded = library()
    api = loaded.api
    params = api.llama_model_default_params()
    params.vocab_only = vocab_only
    offloads = not vocab_only and bool(api.llama_supports_gpu_offload())
    params.n_gpu_layers = (-1 if n_gpu_layers is None else n_gpu_layers) if offloads else 0
    loaded.listen()
    pointer = api.llama_model_load_from_file(str(path).encode("utf-8", "surrogateescape"), params)
    if not pointer:
        raise ModelLoadError(
            f"llama.cpp could not load {path}{_details(loaded.log.recent())}", path=path, details=loaded.log.recent()
        )
    model = LoadedModel(path, metadata, pointer)
    if not vocab_only and (api.llama_model_has_encoder(pointer) or not api.llama_model_has_decoder(pointer)):
        model.close()
        raise ModelLoadError(f"{path} is not a decoder-only language model, so that it cannot hold a chat", path=path)
    return model


def memory_kind(model: LoadedModel) -> MemoryKind:
    """Return what the model's memory can do.

    With `swa_full` a sliding window has room for every cell and mostly rewinds, but is no full attention: where room is
    looked for, llama.cpp takes cells that are out of the window. What is held says whether it does (`first_held`).
    """
    api = library().api
    if api.llama_model_is_recurrent(model.pointer):
        return MemoryKind.RECURRENT
    if api.llama_model_is_hybrid(model.pointer):
        return MemoryKind.HYBRID
    if api.llama_model_n_swa(model.pointer) > 0:
        return MemoryKind.SLIDING
    return MemoryKind.FULL


def _context_params(api: Any, options: ContextOptions) -> Any:
    params = api.llama_context_default_params()
    params.n_ctx = -(-options.n_cells // CONTEXT_STEP_TOKENS) * CONTEXT_STEP_TOKENS
    params.n_batch = options.n_batch
    params.n_ubatch = options.n_ubatch
    params.n_seq_max = options.n_sequences
    params.n_outputs_max = OUTPUTS_MOST
    params.n_threads = params.n_threads_batch = options.n_threads
    params.type_k, params.type_v = _ggml_type(api, options.type_k), _ggml_type(api, options.type_v)
    params.flash_attn_type = -1 if options.flash_attn is None else int(options.flash_attn)
    params.swa_full = options.swa_full
    params.kv_unified = True
    params.no_perf = True
    return params


def _ggml_type(api: Any, name: str) -> int:
    assert name in KV_ELEMENT_BYTES, name
    # The binding does not name this one; ggml.h does.
    return 30 if name == "bf16" else int(getattr(api, f"GGML_TYPE_{name.upper()}"))


def _details(lines: tuple[str, ...]) -> str:
    return f" ({'; '.join(lines[-3:])})" if lines else ""


def _free(owned: list[tuple[Any, Any]]) -> None:
    """Free in order: the context before its model."""
    for free, pointer in owned:
        free(pointer)
    owned.clear()
