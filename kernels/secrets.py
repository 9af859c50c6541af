"""Redaction of secrets in text as bytes; one redactor for all that is kept.

Each secret becomes ``[redacted:<kind>:<8 hex>]``, the digits being the first of the SHA-256 of its bytes (of its
UTF-8, whatever the text is encoded in), so that the same secret can be told from another. Redacting again changes
nothing. `secret_patterns` says what a secret looks like.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final

import numpy as np

from .secret_patterns import (
    FORMS,
    HEAD_BYTES,
    TAIL_LOOK_BYTES,
    SecretForm,
    compiled_heads,
    compiled_rest,
    compiled_scout,
    compiled_tail,
    compiled_whole,
)
from .text_encoding import UTF_8, TextEncoding

BLOCK_BYTES: Final = 1 << 19
"""How much a redactor gathers before it looks at it."""


@dataclass(frozen=True, slots=True)
class Redacted:
    """Text without its secrets, and how many of each kind there were."""

    data: bytes
    counts: Mapping[str, int]


def redact(data: bytes, encoding: TextEncoding = UTF_8) -> Redacted:
    """Return `data` without its secrets; `data` itself where there are none."""
    redactor = Redactor(encoding)
    clean = redactor.feed(data) + redactor.finish()
    return Redacted(clean if redactor.changed else data, redactor.counts)


def redact_reference(data: bytes) -> Redacted:
    """The same for UTF-8, with one pattern over the whole."""
    counts: dict[str, int] = {}

    def replace(match: re.Match[bytes]) -> bytes:
        place = match.lastindex
        assert place is not None
        kind = FORMS[place - 1].kind
        counts[kind] = counts.get(kind, 0) + 1
        label = data[match.start() : match.start(place)]
        return label + f"[redacted:{kind}:{hashlib.sha256(match[place]).hexdigest()[:8]}]".encode()

    return Redacted(compiled_whole().sub(replace, data), counts)


@dataclass(slots=True)
class _Secret:
    """A secret that was begun: its digest so far."""

    form: SecretForm
    digest: hashlib._Hash = field(default_factory=hashlib.sha256)


@dataclass(frozen=True, slots=True)
class _Found:
    """A secret's head at units [start, end), or without a form the end of what is decided."""

    start: int
    end: int
    form: SecretForm | None = None


class Redactor:
    """Redacts a text that comes in chunks: all that is given out together is `redact` of the whole.

    It holds less than a megabyte, whatever comes. A secret may be of any length: its beginning decides (labels and all
    that a pattern has to see; a JWT's header up to 8 KiB, a password in a URL up to 1 KiB), and what goes on from
    there is hashed and dropped as it comes. What does not show itself as a secret within HEAD_BYTES is not one.

    UTF-16 and UTF-32 are looked at through one byte for each code unit, so that what is no secret is given out as it
    came, lone surrogates and a cut unit at the end too. `chunks` begin with the byte order mark or behind it.
    """

    def __init__(self, encoding: TextEncoding = UTF_8, *, block_bytes: int = BLOCK_BYTES) -> None:
        self._encoding = encoding
        self._block_bytes = block_bytes
        self._held = bytearray()
        self._given_units = 0  # at the front of what is held, kept for what looks back
        self._secret: _Secret | None = None
        self._counts: dict[str, int] = {}

    @property
    def counts(self) -> Mapping[str, int]:
        """How many secrets of each kind were begun so far."""
        return MappingProxyType(self._counts)

    @property
    def changed(self) -> bool:
        """Whether there was a secret so far."""
        return bool(self._counts)

    def check_integrity(self) -> None:
        """Assert that what is held is bounded, and that a secret which was begun is counted."""
        assert 0 <= self._given_units <= 1
        unit = self._encoding.unit_bytes
        assert self._given_units * unit <= len(self._held) <= max(self._block_bytes, (HEAD_BYTES + 2) * unit)
        assert all(count > 0 for count in self._counts.values())
        assert self._secret is None or self._secret.form.kind in self._counts

    def feed(self, chunk: bytes) -> bytes:
        """Take the next bytes; return what is decided by now, maybe nothing."""
        out = []
        view = memoryview(chunk)
        for start in range(0, len(chunk), BLOCK_BYTES):
            self._held += view[start : start + BLOCK_BYTES]
            if len(self._held) >= self._block_bytes:
                out.append(self._advance(final=False))
        return b"".join(out)

    def finish(self) -> bytes:
        """Return the rest. The next text may be fed then; counts go on."""
        out = self._advance(final=True)
        self._held.clear()
        self._given_units = 0
        return out

    def _advance(self, *, final: bool) -> bytes:
        raw, unit = bytes(self._held), self._encoding.unit_bytes
        view = _one_byte_units(raw, self._encoding)
        out: list[bytes] = []
        at = self._given_units
        while True:
            if self._secret is not None:
                at = self._pass_secret(self._secret, view, at, final=final, out=out)
                if self._secret is not None:
                    break
            found = _next_secret(view, at, final=final)
            out.append(raw[at * unit : found.start * unit])
            at = found.end
            if found.form is None:
                break
            self._begin_secret(found.form, raw[found.start * unit : found.end * unit])
        if final:
            out.append(raw[len(view) * unit :])
        self._given_units = min(at, 1)
        del self._held[: (at - self._given_units) * unit]
        return b"".join(out)

    def _begin_secret(self, form: SecretForm, head: bytes) -> None:
        self._secret = _Secret(form)
        self._counts[form.kind] = self._counts.get(form.kind, 0) + 1
        wide = self._encoding.unit_bytes > 1
        self._secret.digest.update(head.decode(self._encoding.name, "replace").encode() if wide else head)

    def _pass_secret(self, secret: _Secret, view: bytes, at: int, *, final: bool, out: list[bytes]) -> int:
        """Return where the secret ends, with its mark in `out`; or as far as it goes on for sure."""
        tail = compiled_tail(secret.form).match(view, at)
        assert tail is not None, "a tail may be empty"
        secret.digest.update(tail[0])
        if not final and len(view) - tail.end() < TAIL_LOOK_BYTES:
            return tail.end()
        rest = compiled_rest(secret.form).match(view, tail.end())
        assert rest is not None, "a rest may be empty"
        secret.digest.update(rest[0])
        self._secret = None
        mark = f"[redacted:{secret.form.kind}:{secret.digest.hexdigest()[:8]}]"
        out.append(mark.encode(self._encoding.name))
        return rest.end()


def _next_secret(view: bytes, at: int, *, final: bool) -> _Found:
    """Find the first secret from `at` on, as far as it is decided: HEAD_BYTES follow it, or the text ends."""
    scout, heads = compiled_scout(), compiled_heads()
    decided = len(view) if final else max(at, len(view) - HEAD_BYTES)
    while (candidate := scout.search(view, at)) and (start := candidate.start()) < decided:
        if match := heads.match(view, start):
            place = match.lastindex
            assert place is not None
            return _Found(match.start(place), match.end(place), FORMS[place - 1])
        at = start + 1
    return _Found(decided, decided)


def _one_byte_units(raw: bytes, encoding: TextEncoding) -> bytes:
    """Return one byte for each whole code unit: itself where it is ASCII, else 255."""
    if encoding.unit_bytes == 1:
        return raw
    order = ">" if encoding.name.endswith("be") else "<"
    units = np.frombuffer(raw, dtype=f"{order}u{encoding.unit_bytes}", count=len(raw) // encoding.unit_bytes)
    return np.where(units < 128, units, 255).astype(np.uint8).tobytes()
