"""Random models of under a megabyte, one for each kind of memory, as GGUF files.

Two layers, 64 wide, a vocabulary of bytes and a few merges: llama.cpp loads them like any other model and prefills
thousands of tokens a second, so that tests and benchmarks of cache mechanics run on real decoding. Their replies
are noise, which makes them the hardest test of a grammar. The bytes of a file are a function of its arguments.
"""

from __future__ import annotations

import enum
import os
import tempfile
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

CHATML_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

WIDTH = 64
LAYERS = 2
HEADS = 4
KV_HEADS = 2
HEAD_WIDTH = WIDTH // HEADS
FEED_FORWARD_WIDTH = 128
SLIDING_WINDOW_TOKENS = 256
SSM_INNER, SSM_STATE, SSM_CONV, SSM_RANK = 128, 16, 4, 4
SHORT_CONV = 3

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6
"""Token types, as the `tokenizer.ggml.token_type` array numbers them."""

Tensors: TypeAlias = dict[str, NDArray[np.float32]]


class TinyKind(enum.StrEnum):
    """The kinds of memory that llama.cpp has, each by the architecture that shows it with the fewest tensors."""

    LLAMA = "llama"
    GEMMA3 = "gemma3"
    MAMBA = "mamba"
    HYBRID = "hybrid"


class TinyVocabulary(msgspec.Struct, frozen=True, kw_only=True):
    """The tokenizer part of a GGUF. `types` number as in `tokenizer.ggml.token_type`; merges for BPE, else scores."""

    model: str
    pre: str
    tokens: tuple[str, ...]
    types: tuple[int, ...]
    merges: tuple[str, ...] = ()
    scores: tuple[float, ...] = ()
    bos: str
    eos: str
    add_bos: bool = False
    add_space_prefix: bool = False


_CONTROLS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_USER_DEFINED = ("<tool_call>", "</tool_call>", "<think>", "</think>", "    ")
_MERGES = (
    "t h", "th e", "Ġ t", "Ġt he", "i n", "e r", "Ġ a", "o n", "r e", "Ċ Ċ", "{ \"", "\" :", "\" }", "} }",
    "x Ā", "> Ċ", "> \"", "> <", "< /", "l l", "c all", "a ll", "Ġ {",
)  # fmt: skip


def byte_characters() -> tuple[str, ...]:
    """Return the 256 characters with which GPT-2's byte-level BPE writes bytes, by byte value.

    Printable Latin-1 bytes stand for themselves, the others for the characters from U+0100 on, in order.
    """
    shown = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = [byte for byte in range(256) if byte not in shown]
    return tuple(chr(byte) if byte in shown else chr(0x100 + hidden.index(byte)) for byte in range(256))


def byte_level_vocabulary(*, pre: str = "gpt-2", add_bos: bool = False) -> TinyVocabulary:
    """Return the default: 256 bytes, a few merges, ChatML's control tokens, and user-defined tool markup."""
    merged: list[str] = []
    merges: list[str] = []
    known = set(byte_characters())
    for merge in _MERGES:
        left, right = merge.split(" ")
        if left in known and right in known:
            merges.append(merge)
            known.add(left + right)
            merged.append(left + right)
    plain = (*byte_characters(), *merged)
    return TinyVocabulary(
        model="gpt2",
        pre=pre,
        tokens=(*plain, *_CONTROLS, *_USER_DEFINED),
        types=(NORMAL,) * len(plain) + (CONTROL,) * len(_CONTROLS) + (USER_DEFINED,) * len(_USER_DEFINED),
        merges=tuple(merges),
        bos="<|endoftext|>",
        eos="<|im_end|>",
        add_bos=add_bos,
    )


def sentencepiece_vocabulary() -> TinyVocabulary:
    """Return a SentencePiece vocabulary that adds a space at the start of text, as Llama 2's does.

    It holds the pieces through which plain text could be merged into its control tokens.
    """
    special = (("<unk>", UNKNOWN), ("<s>", CONTROL), ("</s>", CONTROL), *((text, CONTROL) for text in _CONTROLS))
    bytes_ = tuple((f"<0x{byte:02X}>", BYTE) for byte in range(256))
    joined = ("▁t", "th", "he", "▁the", "in", "er", "on", "▁a", "</", "</s", "s>", "<s", "<|", "|>", "im", "▁▁")
    letters = tuple(chr(code) for code in range(0x21, 0x7F))
    pieces = tuple((text, NORMAL) for text in (*joined, "▁", *letters, "é", "…"))
    user_defined = tuple((text, USER_DEFINED) for text in _USER_DEFINED)
    entries = (*special, *bytes_, *pieces, *user_defined)
    return TinyVocabulary(
        model="llama",
        pre="default",
        tokens=tuple(text for text, _ in entries),
        types=tuple(kind for _, kind in entries),
        scores=tuple(-float(rank) if kind == NORMAL else 0.0 for rank, (_, kind) in enumerate(entries)),
        bos="<s>",
        eos="</s>",
        add_bos=True,
        add_space_prefix=True,
    )


def build_tiny_model(
    kind: TinyKind | str,
    path: Path,
    *,
    vocab: TinyVocabulary | None = None,
    template: str | None = CHATML_TEMPLATE,
    n_ctx_train: int = 32768,
    seed: int = 0,
    extra: Mapping[str, str | int | float | bool] | None = None,
) -> Path:
    """Write the model to `path` and return it. `extra` metadata comes last. Raises OSError where it cannot be written.

    The file appears whole or not at all.
    """
    kind = TinyKind(kind)
    vocabulary = vocab or byte_level_vocabulary()
    architecture = _ARCHITECTURES[kind]
    rng = np.random.default_rng([seed, zlib.crc32(kind.encode())])
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    os.close(handle)
    try:
        writer = _writer(Path(temporary), architecture, vocabulary)
        writer.add_name(f"tiny {kind}")
        writer.add_context_length(n_ctx_train)
        if template is not None:
            writer.add_chat_template(template)
        for key, value in (extra or {}).items():
            _add(writer, key, value)
        for name, tensor in architecture.tensors(rng, len(vocabulary.tokens)).items():
            writer.add_tensor(name, tensor)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        Path(temporary).replace(path)
    finally:
        Path(temporary).unlink(missing_ok=True)
    return path


def tiny_model(kind: TinyKind | str, folder: Path, **options: Any) -> Path:
    """Return the model of this kind and options in `folder`, built at its first use. Safe in parallel processes."""
    name = TinyKind(kind).value
    if options:
        name += f"-{zlib.crc32(msgspec.json.encode(options, order='deterministic')):08x}"
    path = folder / f"{name}.gguf"
    return path if path.exists() else build_tiny_model(kind, path, **options)


class _Architecture(msgspec.Struct, frozen=True):
    """The name that llama.cpp knows, its metadata keys (without the name), and what makes its tensors."""

    name: str
    metadata: Mapping[str, Any]
    tensors: Callable[[np.random.Generator, int], Tensors]


def _writer(path: Path, architecture: _Architecture, vocabulary: TinyVocabulary) -> Any:
    """Return a GGUFWriter that holds what makes the architecture and the vocabulary."""
    from gguf import GGUFWriter  # noqa: PLC0415  (an extra of the benchmarks)

    writer = GGUFWriter(str(path), architecture.name)
    writer.add_block_count(LAYERS)
    writer.add_embedding_length(WIDTH)
    for key, value in architecture.metadata.items():
        _add(writer, f"{architecture.name}.{key}", value)
    writer.add_tokenizer_model(vocabulary.model)
    writer.add_tokenizer_pre(vocabulary.pre)
    writer.add_token_list(list(vocabulary.tokens))
    writer.add_token_types(list(vocabulary.types))
    if vocabulary.merges:
        writer.add_token_merges(list(vocabulary.merges))
    if vocabulary.scores:
        writer.add_token_scores(list(vocabulary.scores))
    writer.add_bos_token_id(vocabulary.tokens.index(vocabulary.bos))
    writer.add_eos_token_id(vocabulary.tokens.index(vocabulary.eos))
    writer.add_add_bos_token(vocabulary.add_bos)
    writer.add_add_space_prefix(vocabulary.add_space_prefix)
    return writer


def _add(writer: Any, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, list(value))


def _random(rng: np.random.Generator, *shape: int, gain: float = 1.0) -> NDArray[np.float32]:
    """Weights that keep the variance of their input, times `gain` squared. Shape: (rows out, columns in)."""
    return rng.standard_normal(shape, dtype=np.float32) * np.float32(gain / np.sqrt(shape[-1]))


def _ones(size: int) -> NDArray[np.float32]:
    return np.ones(size, dtype=np.float32)


def _embedding(rng: np.random.Generator, vocab_size: int) -> Tensors:
    # Embeddings of unit variance and a louder output, so that logits differ by several nats.
    return {
        "token_embd.weight": rng.standard_normal((vocab_size, WIDTH), dtype=np.float32),
        "output.weight": _random(rng, vocab_size, WIDTH, gain=2.0),
        "output_norm.weight": _ones(WIDTH),
    }


def _attention(rng: np.random.Generator, block: str, *, normed: bool = False) -> Tensors:
    # Loud queries and keys make attention pick single tokens: a lost or misplaced one then shows in the logits.
    tensors = {
        f"{block}.attn_norm.weight": _ones(WIDTH),
        f"{block}.attn_q.weight": _random(rng, HEADS * HEAD_WIDTH, WIDTH, gain=1.7),
        f"{block}.attn_k.weight": _random(rng, KV_HEADS * HEAD_WIDTH, WIDTH, gain=1.7),
        f"{block}.attn_v.weight": _random(rng, KV_HEADS * HEAD_WIDTH, WIDTH),
        f"{block}.attn_output.weight": _random(rng, WIDTH, HEADS * HEAD_WIDTH),
    }
    if normed:
        tensors[f"{block}.attn_q_norm.weight"] = _ones(HEAD_WIDTH) * np.float32(1.7)
        tensors[f"{block}.attn_k_norm.weight"] = _ones(HEAD_WIDTH) * np.float32(1.7)
    return tensors


def _feed_forward(rng: np.random.Generator, block: str) -> Tensors:
    return {
        f"{block}.ffn_norm.weight": _ones(WIDTH),
        f"{block}.ffn_gate.weight": _random(rng, FEED_FORWARD_WIDTH, WIDTH),
        f"{block}.ffn_up.weight": _random(rng, FEED_FORWARD_WIDTH, WIDTH),
        f"{block}.ffn_down.weight": _random(rng, WIDTH, FEED_FORWARD_WIDTH),
    }


def _llama_tensors(rng: np.random.Generator, vocab_size: int) -> Tensors:
    tensors = _embedding(rng, vocab_size)
    for layer in range(LAYERS):
        tensors |= _attention(rng, f"blk.{layer}") | _feed_forward(rng, f"blk.{layer}")
    return tensors


def _gemma3_tensors(rng: np.random.Generator, vocab_size: int) -> Tensors:
    tensors = _embedding(rng, vocab_size)
    for layer in range(LAYERS):
        block = f"blk.{layer}"
        tensors |= _attention(rng, block, normed=True) | _feed_forward(rng, block)
        tensors[f"{block}.post_attention_norm.weight"] = _ones(WIDTH)
        tensors[f"{block}.post_ffw_norm.weight"] = _ones(WIDTH)
    return tensors


def _mamba_tensors(rng: np.random.Generator, vocab_size: int) -> Tensors:
    tensors = _embedding(rng, vocab_size)
    decay = -np.tile(np.linspace(0.05, 1.0, SSM_STATE, dtype=np.float32), (SSM_INNER, 1))
    for layer in range(LAYERS):
        block = f"blk.{layer}"
        tensors |= {
            f"{block}.attn_norm.weight": _ones(WIDTH),
            f"{block}.ssm_in.weight": _random(rng, 2 * SSM_INNER, WIDTH),
            f"{block}.ssm_conv1d.weight": _random(rng, SSM_INNER, SSM_CONV),
            f"{block}.ssm_conv1d.bias": np.zeros(SSM_INNER, dtype=np.float32),
            f"{block}.ssm_x.weight": _random(rng, SSM_RANK + 2 * SSM_STATE, SSM_INNER),
            f"{block}.ssm_dt.weight": _random(rng, SSM_INNER, SSM_RANK),
            f"{block}.ssm_dt.bias": np.full(SSM_INNER, -1.0, dtype=np.float32),
            f"{block}.ssm_a": decay,
            f"{block}.ssm_d": _ones(SSM_INNER),
            f"{block}.ssm_out.weight": _random(rng, WIDTH, SSM_INNER),
        }
    return tensors


def _lfm2_tensors(rng: np.random.Generator, vocab_size: int) -> Tensors:
    """The first layer is a short convolution, the second attends."""
    tensors = _embedding(rng, vocab_size)
    tensors["token_embd_norm.weight"] = tensors.pop("output_norm.weight")
    tensors |= _feed_forward(rng, "blk.0") | _feed_forward(rng, "blk.1") | _attention(rng, "blk.1", normed=True)
    tensors |= {
        "blk.0.attn_norm.weight": _ones(WIDTH),
        "blk.0.shortconv.conv.weight": _random(rng, WIDTH, SHORT_CONV),
        "blk.0.shortconv.in_proj.weight": _random(rng, 3 * WIDTH, WIDTH),
        "blk.0.shortconv.out_proj.weight": _random(rng, WIDTH, WIDTH),
    }
    return tensors


_ATTENTION_METADATA = {
    "feed_forward_length": FEED_FORWARD_WIDTH,
    "attention.head_count": HEADS,
    "attention.head_count_kv": KV_HEADS,
    "attention.key_length": HEAD_WIDTH,
    "attention.value_length": HEAD_WIDTH,
    "attention.layer_norm_rms_epsilon": 1e-5,
    "rope.dimension_count": HEAD_WIDTH,
    "rope.freq_base": 10000.0,
}

_ARCHITECTURES: Mapping[TinyKind, _Architecture] = {
    TinyKind.LLAMA: _Architecture("llama", _ATTENTION_METADATA, _llama_tensors),
    TinyKind.GEMMA3: _Architecture(
        "gemma3",
        # A pattern of 2: the first layer has the window, the second attends to everything.
        _ATTENTION_METADATA
        | {"attention.sliding_window": SLIDING_WINDOW_TOKENS, "attention.sliding_window_pattern": LAYERS},
        _gemma3_tensors,
    ),
    TinyKind.MAMBA: _Architecture(
        "mamba",
        {
            "feed_forward_length": 0,
            "attention.head_count": 0,
            "attention.layer_norm_rms_epsilon": 1e-5,
            "ssm.conv_kernel": SSM_CONV,
            "ssm.inner_size": SSM_INNER,
            "ssm.state_size": SSM_STATE,
            "ssm.time_step_rank": SSM_RANK,
        },
        _mamba_tensors,
    ),
    TinyKind.HYBRID: _Architecture(
        "lfm2",
        _ATTENTION_METADATA | {"attention.head_count_kv": [0, KV_HEADS], "shortconv.l_cache": SHORT_CONV},
        _lfm2_tensors,
    ),
}
