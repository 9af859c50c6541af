"""How large a window fits: the trained context, lowered until weights, KV and compute buffers fit in free memory."""

from __future__ import annotations

import os
from typing import Final

import msgspec

from ..gguf_metadata import GgufMetadata

MEMORY_SHARE: Final = 0.8
"""The share of free memory that a model may take."""

FALLBACK_CONTEXT_TOKENS: Final = 4096
"""Where the metadata names no trained context."""

LEAST_CONTEXT_TOKENS: Final = 2048
"""The window is not lowered below this: what is too large then is for llama.cpp to refuse."""

SPARE_CELLS_DIVISOR: Final = 4
"""A quarter of the window in further cells."""

CONTEXT_STEP_TOKENS: Final = 256
"""llama.cpp rounds a window up to a multiple of this."""

KV_ELEMENT_BYTES: Final = {
    "f32": 4.0, "f16": 2.0, "bf16": 2.0, "q8_0": 34 / 32, "q5_1": 24 / 32, "q5_0": 22 / 32, "q4_1": 20 / 32,
    "q4_0": 18 / 32, "iq4_nl": 18 / 32,
}  # fmt: skip
"""Bytes for an element of each cache type (a block of 32 with its scale)."""


class Placement(msgspec.Struct, frozen=True, kw_only=True):
    """The window that was chosen and why. Bytes are estimates.

    `n_cells` are allocated, in `kv_bytes`: those of a full window, and where memory allows a quarter more, for a
    checkpoint that is built beside it and for short sequences that stay resident.
    """

    n_ctx: int
    n_cells: int
    n_ctx_trained: int
    weights_bytes: int
    kv_bytes: int
    compute_bytes: int
    free_bytes: int
    reason: str

    def describe(self) -> str:
        """Return one line for a person."""
        return (
            f"n_ctx {self.n_ctx:,} ({self.reason}): weights {_gb(self.weights_bytes)}, KV {_gb(self.kv_bytes)} for "
            f"{self.n_cells:,} tokens, compute {_gb(self.compute_bytes)}, free {_gb(self.free_bytes)}"
        )


def place(
    metadata: GgufMetadata,
    *,
    asked_n_ctx: int | None,
    free_bytes: int,
    n_ubatch: int,
    n_outputs: int,
    type_k: str = "f16",
    type_v: str = "f16",
) -> Placement:
    """Choose the window. `asked_n_ctx` is taken as it is; the account is given all the same."""
    trained = metadata.context_length_tokens or FALLBACK_CONTEXT_TOKENS
    per_token = kv_bytes_per_token(metadata, type_k=type_k, type_v=type_v)
    compute = _compute_bytes(metadata, n_ubatch=n_ubatch, n_outputs=n_outputs)
    weights = metadata.file_size
    room = int(free_bytes * MEMORY_SHARE) - weights - compute
    if asked_n_ctx is not None:
        chosen, reason = asked_n_ctx, "as asked"
    else:
        fitting = max(0, room // per_token) if per_token else trained
        if trained <= fitting:
            chosen, reason = trained, "the trained context"
        else:
            stepped = fitting // CONTEXT_STEP_TOKENS * CONTEXT_STEP_TOKENS
            chosen = min(trained, max(LEAST_CONTEXT_TOKENS, stepped))
            reason = f"lowered from {trained:,} to fit in {MEMORY_SHARE:.0%} of free memory"
    cells = chosen + chosen // SPARE_CELLS_DIVISOR
    original = metadata.number(f"{metadata.architecture}.rope.scaling.original_context_length") or 0
    # More cells than the window would switch a model with two sets of RoPE factors to its long ones.
    if per_token * cells > room or chosen <= original < cells:
        cells = chosen
    return Placement(
        n_ctx=chosen,
        n_cells=cells,
        n_ctx_trained=trained,
        weights_bytes=weights,
        kv_bytes=per_token * cells,
        compute_bytes=compute,
        free_bytes=free_bytes,
        reason=reason,
    )


def kv_bytes_per_token(metadata: GgufMetadata, *, type_k: str, type_v: str) -> int:
    """Return the bytes of KV for a token, the wider cache type counted for both; 0 where the metadata does not tell."""
    widest = max(KV_ELEMENT_BYTES[type_k], KV_ELEMENT_BYTES[type_v])
    return metadata.kv_bytes_per_token(bytes_per_element=widest) or 0


def physical_cores() -> int:
    """Return how many physical cores this process may use: more threads than that slow decoding down."""
    import psutil  # noqa: PLC0415  (kept out of the import of the package)

    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(psutil.cpu_count(logical=False) or allowed, allowed))


def _compute_bytes(metadata: GgufMetadata, *, n_ubatch: int, n_outputs: int) -> int:
    """Estimate the compute buffers: activations of one ubatch, and the logits of its outputs, in float32."""
    width = metadata.number(f"{metadata.architecture}.embedding_length") or 0
    hidden = metadata.number(f"{metadata.architecture}.feed_forward_length") or 0
    return 4 * (n_ubatch * (6 * width + 3 * hidden) + n_outputs * len(metadata.tokens))


def _gb(count_bytes: int) -> str:
    return f"{count_bytes / 1e9:.2f} GB"
