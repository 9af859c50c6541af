"""What a GGUF must hold before llama.cpp sees it: where these do not hold, it does not fail but ends the process."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from ...kernels.errors import ModelFileError
from ..gguf_metadata import GgufMetadata

MOST_LAYERS = 512
"""llama.cpp's LLAMA_MAX_LAYERS."""

_MOST_WIDTH = 1 << 24


def check_metadata(path: Path, metadata: GgufMetadata) -> None:
    """Raise ModelFileError where the metadata contradicts itself in a way that llama.cpp asserts not to happen."""
    for problem in (_shape_problem(metadata), _vocabulary_problem(metadata)):
        if problem:
            raise ModelFileError(f"{path} is damaged: {problem}. Fetch the file again", path=path)


def _shape_problem(metadata: GgufMetadata) -> str:
    """Return what is wrong with the sizes of the model, empty where nothing is."""
    limits = {
        "block_count": (1, MOST_LAYERS),
        "embedding_length": (1, _MOST_WIDTH),
        "context_length": (1, 1 << 30),
        "attention.head_count": (0, 1 << 16),
        "attention.head_count_kv": (0, 1 << 16),
        "attention.key_length": (1, 1 << 16),
        "attention.value_length": (1, 1 << 16),
        "feed_forward_length": (0, _MOST_WIDTH),
    }
    for key, (least, most) in limits.items():
        for value in _numbers(metadata.values.get(f"{metadata.architecture}.{key}")):
            if not least <= value <= most:
                return f"{key} is {value}, which lies outside {least} to {most}"
    heads = metadata.number(f"{metadata.architecture}.attention.head_count") or 0
    for kv_heads in _numbers(metadata.values.get(f"{metadata.architecture}.attention.head_count_kv")):
        if kv_heads and heads % kv_heads:
            return f"{heads} attention heads cannot share {kv_heads} KV heads"
    return ""


def _vocabulary_problem(metadata: GgufMetadata) -> str:
    """Return what is wrong with the vocabulary, empty where nothing is or there is none."""
    tokens = list(metadata.tokens)
    repeated = next((text for text, count in Counter(tokens).items() if count > 1 and text), None)
    if repeated is not None:
        return f"its vocabulary holds the token {repeated!r} twice"
    for key in ("token_type", "scores"):
        values = metadata.values.get(f"tokenizer.ggml.{key}")
        if isinstance(values, np.ndarray) and len(values) != len(tokens):
            return f"its vocabulary has {len(tokens)} tokens, but {len(values)} entries of {key}"
    return ""


def _numbers(value: Any) -> list[int]:
    if isinstance(value, np.ndarray):
        return [int(number) for number in value.tolist()] if value.dtype.kind in "iu" else []
    return [value] if isinstance(value, int) and not isinstance(value, bool) else []
