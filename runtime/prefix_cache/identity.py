"""What the KV of a run depends on besides its tokens. Two runs may share KV only where all of this is equal."""

from __future__ import annotations

import msgspec
import xxhash


class CacheIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """A model as it was opened.

    `rope` names what is in force of RoPE overrides and of long-context factors: a state that was restored under
    another RoPE base is accepted by llama.cpp, with wrong logits. `build` is llama.cpp's: its state format has no
    version that would tell.
    """

    fingerprint: str
    model_name: str
    memory: str
    type_k: str
    type_v: str
    flash_attn: str
    rope: str
    lora: str
    build: str

    @property
    def seed(self) -> bytes:
        """16 bytes that differ wherever anything does but the model's name. Begins every chain of block hashes."""
        return xxhash.xxh3_128_digest(msgspec.json.encode(msgspec.structs.replace(self, model_name="")))

    def difference(self, other: CacheIdentity) -> str:
        """Return what of `other` is not as here, for a person: `KV type q8_0, here f16`. Empty where nothing is."""
        return "; ".join(
            f"{_LABELS[field]} {theirs or 'none'}, here {mine or 'none'}"
            for field in _LABELS
            if (mine := getattr(self, field)) != (theirs := getattr(other, field))
        )


_LABELS = {
    "fingerprint": "model file",
    "memory": "memory",
    "type_k": "K type",
    "type_v": "V type",
    "flash_attn": "flash attention",
    "rope": "RoPE",
    "lora": "LoRA",
    "build": "llama.cpp",
}
