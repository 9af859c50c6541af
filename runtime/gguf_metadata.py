"""What the header of a GGUF file says of its model. `gguf.read_gguf` makes these values."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias, overload

import numpy as np
from numpy.typing import NDArray

from .architectures import attention_layers_heads, memory_kind, sliding_window_tokens
from .engine import MemoryKind


class StringArray(Sequence[str]):
    """Strings that stay bytes in the header until one is asked for. Bytes that are no UTF-8 come as U+FFFD."""

    __slots__ = ("_header", "_starts")

    def __init__(self, header: bytearray, starts: array[int]) -> None:
        """String i is header[starts[i] : starts[i + 1] - 8]; 8 bytes of length stand before each."""
        self._header, self._starts = header, starts

    def __len__(self) -> int:
        return len(self._starts) - 1

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        at = range(len(self))[index]
        return self._header[self._starts[at] : self._starts[at + 1] - 8].decode("utf-8", "replace")

    def __iter__(self) -> Iterator[str]:
        header = self._header
        start = self._starts[0]
        for following in self._starts[1:]:
            yield header[start : following - 8].decode("utf-8", "replace")
            start = following


MetadataValue: TypeAlias = "bool | int | float | str | StringArray | NDArray[Any]"


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor. `shape` has the fastest dimension first; `offset_bytes` counts from the start of the tensor data.

    `size_bytes` is None for a ggml type that this version does not know.
    """

    name: str
    shape: tuple[int, ...]
    ggml_type: int
    offset_bytes: int
    size_bytes: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufMetadata:
    """The header of a GGUF file: [0, header_bytes) is metadata and tensor infos, the data starts at `data_offset`."""

    version: int
    values: Mapping[str, MetadataValue] = field(repr=False)
    tensors: tuple[TensorInfo, ...] = field(repr=False)
    header_bytes: int
    data_offset: int
    file_size: int

    def text(self, key: str) -> str | None:
        """Return a value that is a string, None where there is none of that name or it is something else."""
        value = self.values.get(key)
        return value if isinstance(value, str) else None

    def number(self, key: str) -> int | None:
        """Return a value that is an integer; the largest where there is one for each layer."""
        value = self.values.get(key)
        if isinstance(value, np.ndarray) and value.size and value.dtype.kind in "iu":
            return int(value.max())
        return value if isinstance(value, int) and not isinstance(value, bool) else None

    def strings(self, key: str) -> Sequence[str]:
        """Return an array of strings, empty where there is none."""
        value = self.values.get(key)
        return value if isinstance(value, StringArray) else ()

    @property
    def architecture(self) -> str:
        """`general.architecture`, empty where it is missing."""
        return self.text("general.architecture") or ""

    @property
    def name(self) -> str:
        """`general.name`, empty where it is missing."""
        return self.text("general.name") or ""

    @property
    def chat_template(self) -> str | None:
        """The Jinja text of the default chat template."""
        return self.text("tokenizer.chat_template")

    @property
    def context_length_tokens(self) -> int | None:
        """The context that the model was trained for."""
        return self.number(f"{self.architecture}.context_length")

    @property
    def sliding_window_tokens(self) -> int:
        """The window that llama.cpp gives the model's sliding layers, 0 where it uses none."""
        return sliding_window_tokens(self.architecture, self.number)

    def memory_kind(self) -> MemoryKind:
        """Return what kind of memory llama.cpp keeps for the model."""
        return memory_kind(self.architecture, self.number)

    def kv_bytes_per_token(self, *, bytes_per_element: float = 2.0) -> int | None:
        """Return how much the KV cache grows by a token, None where the metadata does not tell.

        An upper bound: sliding layers count as if they kept every token. `bytes_per_element` is 2 for float16.
        """
        heads = attention_layers_heads(self.architecture, self.values, self.number)
        if not heads:
            return heads
        key, value = self._head_width("key_length"), self._head_width("value_length")
        return None if key is None or value is None else int(heads * (key + value) * bytes_per_element)

    def _head_width(self, key: str) -> int | None:
        """Return the elements of a head's key or value: as named, else the embedding over the heads."""
        named = self.number(f"{self.architecture}.attention.{key}")
        embedding = self.number(f"{self.architecture}.embedding_length")
        heads = self.number(f"{self.architecture}.attention.head_count")
        return named if named is not None else embedding // heads if embedding and heads else None

    @property
    def tokenizer_model(self) -> str:
        """`tokenizer.ggml.model`: gpt2 for byte-level BPE, llama for SentencePiece, and others."""
        return self.text("tokenizer.ggml.model") or ""

    @property
    def pre_tokenizer(self) -> str:
        """`tokenizer.ggml.pre`, empty where it is missing."""
        return self.text("tokenizer.ggml.pre") or ""

    @property
    def tokens(self) -> Sequence[str]:
        """The text of each token, by id."""
        return self.strings("tokenizer.ggml.tokens")

    @property
    def merges(self) -> Sequence[str]:
        """The merges of a BPE vocabulary, in order."""
        return self.strings("tokenizer.ggml.merges")

    @property
    def token_types(self) -> NDArray[Any]:
        """The type of each token (1 normal, 2 unknown, 3 control, 4 user-defined, 5 unused, 6 byte), or empty."""
        value = self.values.get("tokenizer.ggml.token_type")
        return value if isinstance(value, np.ndarray) else np.empty(0, dtype=np.int32)

    @property
    def split_count(self) -> int:
        """In how many files the model comes."""
        return max(1, self.number("split.count") or 1)
