"""What an engine may be opened with: the limits of its options, the defaults that depend on the model, its identity."""

from __future__ import annotations

import math
from typing import Final

from ...kernels.errors import UsageError
from ..engine import EngineInfo, MemoryKind
from ..gguf_metadata import GgufMetadata
from ..prefix_cache.identity import CacheIdentity
from ..prefix_cache.options import CacheOptions
from .build_info import build_info
from .loading import ContextOptions, LoadedModel
from .placement import KV_ELEMENT_BYTES

DEFAULT_BATCH_TOKENS: Final = 512
DEFAULT_SEQUENCES: Final = 8
"""Of full attention, where a slot costs nothing: sessions, and what was parked of them."""
DEFAULT_STATES: Final = 2
"""Of any other memory, where every slot has a window or a state of its own, and idle ones move to snapshots."""
MOST_SEQUENCES: Final = 256
"""llama.cpp's LLAMA_MAX_SEQ."""


def check_options(
    *, n_ctx: int | None, n_batch: int, n_ubatch: int, n_sequences: int | None, cache_types: tuple[str, str]
) -> None:
    if n_sequences is not None and not 1 <= n_sequences <= MOST_SEQUENCES:
        raise UsageError(f"n_sequences is {n_sequences}: it is 1 to {MOST_SEQUENCES}")
    if min(n_batch, n_ubatch) < 1 or (n_ctx is not None and n_ctx < 1):
        raise UsageError(f"n_ctx, n_batch and n_ubatch are 1 or more, not {n_ctx}, {n_batch}, {n_ubatch}")
    for name in cache_types:
        if name not in KV_ELEMENT_BYTES:
            raise UsageError(f"{name!r} is no type of KV cache: it is one of {', '.join(KV_ELEMENT_BYTES)}")


SCORES_SHARE: Final = 0.1
"""The share of free memory that attention without the flash kernel may take for its scores."""


def choose_flash_attention(
    metadata: GgufMetadata, *, offloads: bool, type_v: str, n_cells: int, n_ubatch: int, free_bytes: int
) -> bool | None:
    """Return False where plain attention is faster and has room, None to leave it to llama.cpp.

    On a processor the flash kernel costs more as soon as a batch is small: SmolLM2 on two cores at 4,000 tokens decodes
    in 51 ms a token with it and in 31 without, a batch of 24 takes 57 and 25 ms a token, a prefill the same. Without
    it each layer's scores stand in memory: n_ubatch x n_cells x heads, in float32. A quantised V needs it.
    """
    heads = metadata.number(f"{metadata.architecture}.attention.head_count")
    if offloads or heads is None or type_v not in ("f32", "f16", "bf16"):
        return None
    scores_bytes = 4 * n_ubatch * n_cells * heads
    return False if scores_bytes <= SCORES_SHARE * free_bytes else None


def check_cache_options(cache: CacheOptions) -> None:
    if min(cache.memory_mb or 0, cache.disk_mb or 0) < 0:
        raise UsageError(f"memory_mb and disk_mb are 0 or more, not {cache.memory_mb}, {cache.disk_mb}")
    if not 0 <= cache.rest_s < math.inf:
        raise UsageError(f"rest_s is a number of seconds, 0 or more, not {cache.rest_s}")


def default_sequences(kind: MemoryKind) -> int:
    """Return how many sequences hold memory at once where nothing is said."""
    return DEFAULT_SEQUENCES if kind.rewinds else DEFAULT_STATES


def identity_of(info: EngineInfo, model: LoadedModel, options: ContextOptions) -> CacheIdentity:
    flash = {None: "auto", True: "on", False: "off"}[options.flash_attn]
    # Models with two sets of RoPE factors take the long ones where the context is larger than the original one.
    original = model.metadata.number(f"{model.metadata.architecture}.rope.scaling.original_context_length")
    long_factors = original is not None and options.n_cells > original
    return CacheIdentity(
        fingerprint=info.fingerprint,
        model_name=info.model_name,
        memory=f"{info.memory}, every cell kept" if options.swa_full else str(info.memory),
        type_k=options.type_k,
        type_v=options.type_v,
        flash_attn=flash,
        rope="long factors" if long_factors else "",
        lora="",
        build=build_info().identity,
    )
