"""What llama.cpp keeps of the past for each architecture, told from a GGUF's metadata.

Read from the sources bundled with llama-cpp-python 0.3.36: `llm_arch_is_recurrent` and `llm_arch_is_hybrid` in
`llama-arch.cpp`, and the `swa_type` and `n_swa` that each `load_arch_hparams` in `models/*.cpp` sets. A sliding
window in the metadata of any other architecture is ignored by llama.cpp (qwen2, llama for Mistral), and Phi-3's is
switched off there, so these models keep every token.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from .engine import MemoryKind

Number = Callable[[str], int | None]
"""Looks an integer up in the metadata by its full key."""

_RECURRENT = frozenset({"mamba", "mamba2", "rwkv6", "rwkv6qwen2", "rwkv7", "arwkv7"})
_HYBRID = frozenset(
    {
        "bailingmoe3",
        "deepseek4",
        "falcon-h1",
        "glm5-next",
        "granitehybrid",
        "jamba",
        "kimi-k3",
        "kimi-linear",
        "lfm2",
        "lfm2moe",
        "minimax-01",
        "nemotron_h",
        "nemotron_h_moe",
        "plamo2",
        "qwen35",
        "qwen35moe",
        "qwen3next",
        "qwen4exp",
    }
)
_SLIDING = frozenset(
    {
        "afmoe",
        "cohere2",
        "cohere2moe",
        "dots3note",
        "exaone-moe",
        "exaone4",
        "gemma2",
        "gemma3",
        "gemma3n",
        "gemma4",
        "gpt-oss",
        "granite_swa",
        "laguna",
        "llama4",
        "maple",
        "mellum",
        "mimo2",
        "muse-glimmer",
        "olmo2",
        "plamo3",
        "smallthinker",
        "spark2_5",
        "step35",
    }
)
_LLAMA4_CHUNK_TOKENS = 8_192
_SMALLTHINKER_WINDOW_TOKENS = 4_096
_DEFAULT_WINDOW_TOKENS = {"exaone-moe": 128, "exaone4": 4_096, "gemma2": 4_096}
_EXAONE4_SLIDING_LAYERS = 64


def memory_kind(architecture: str, number: Number) -> MemoryKind:
    """Return what kind of memory llama.cpp makes for a model of this architecture."""
    if architecture in _RECURRENT:
        return MemoryKind.RECURRENT
    if architecture in _HYBRID:
        return MemoryKind.HYBRID
    return MemoryKind.SLIDING if sliding_window_tokens(architecture, number) else MemoryKind.FULL


def sliding_window_tokens(architecture: str, number: Number) -> int:
    """Return the window of the sliding layers, 0 where llama.cpp uses none.

    llama4's is a chunk of 8,192 whatever the metadata says, unless it says 0; smallthinker's is 4,096 where there is
    one; exaone4 slides only with 64 layers; gemma2's default is 4,096; an lfm2 may slide in its attention layers.
    """
    named = number(f"{architecture}.attention.sliding_window")
    if architecture == "llama4":
        return 0 if named == 0 else _LLAMA4_CHUNK_TOKENS
    if architecture == "smallthinker":
        return _SMALLTHINKER_WINDOW_TOKENS if named else 0
    if architecture == "exaone4" and _layers(architecture, number) != _EXAONE4_SLIDING_LAYERS:
        return 0
    if architecture in _SLIDING or architecture in {"lfm2", "deepseek4"}:
        return max(0, named if named is not None else _DEFAULT_WINDOW_TOKENS.get(architecture, 0))
    return 0


def attention_layers_heads(architecture: str, values: Mapping[str, Any], number: Number) -> int | None:
    """Return the KV heads of all attention layers together, None where the metadata does not tell.

    Recurrent layers have none: by an array with a 0 for them, or every `full_attention_interval`-th one attends.
    """
    layers = _layers(architecture, number)
    if architecture in _RECURRENT:
        return 0
    if layers is None or number(f"{architecture}.attention.kv_lora_rank"):
        # Latent attention keeps one compressed vector a layer, in a form that differs between versions.
        return None
    heads = values.get(f"{architecture}.attention.head_count_kv", number(f"{architecture}.attention.head_count"))
    if isinstance(heads, np.ndarray) and heads.dtype.kind in "iu":
        return int(heads[:layers].sum())
    if not isinstance(heads, int):
        return None
    interval = number(f"{architecture}.full_attention_interval") or 1
    return heads * (layers // max(1, interval))


def _layers(architecture: str, number: Number) -> int | None:
    """Return the layers that run for a prediction: without those that only draft (`nextn_predict_layers`)."""
    blocks = number(f"{architecture}.block_count")
    return None if blocks is None else max(0, blocks - (number(f"{architecture}.nextn_predict_layers") or 0))
