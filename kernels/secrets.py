"""Redaction of secrets in text as bytes; one redactor for all that is kept.

Each secret becomes ``[redacted:<kind>:<8 hex>]``, the digits being the first of the SHA-256 of its bytes (of its
UTF-8, whatever the text is encoded in), so that the same secret can be told from another. Redacting again changes
nothing. `secret_patterns` says what a secret looks like.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final

import numpy as np

from .secret_patterns import (
    ESCAPE_BYTES,
    FORMS,
    HEAD_BYTES,
    TAIL_LOOK_BYTES,
    SecretForm,
    compiled_escapes,
    compiled_heads,
    compiled_rest,
    compiled_scout,
    compiled_tail,
    compiled_whole,
    compiled_written_escape,
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
    view = _view(data, behind=b"", final=True)
    counts: dict[str, int] = {}
    out, given = [], 0
    for match in compiled_whole().finditer(view.text):
        place = match.lastindex
        assert place is not None
        kind = FORMS[place - 1].kind
        counts[kind] = counts.get(kind, 0) + 1
        out.append(data[given : view.unit_at(match.start(place))])
        out.append(f"[redacted:{kind}:{hashlib.sha256(match[place]).hexdigest()[:8]}]".encode())
        given = view.unit_at(match.end(place) - 1) + 1
    return Redacted(b"".join([*out, data[given:]]), counts)


@dataclass(frozen=True, slots=True)
class _View:
    """A text as it is looked at: one byte for each code unit, without a terminal's codes.

    `gaps` are the places in `text` where units are hidden, `hidden` how many there are up to each of them.
    """

    text: bytes
    gaps: list[int]
    hidden: list[int]

    def unit_at(self, place: int) -> int:
        """Return which unit stands at a place; at the end of `text` the first that was not looked at."""
        return place + self.hidden[bisect_right(self.gaps, place) - 1]


def _view(units: bytes, *, behind: bytes, final: bool) -> _View:
    """Hide what ESCAPE_BYTES or the end of the text follow; `behind` was given out and stands before the units."""
    end = len(units) if final else max(0, len(units) - ESCAPE_BYTES)
    if b"\x1b" not in units and not compiled_written_escape().search(units):
        return _View(behind + units[:end], [0], [-len(behind)])
    pieces = compiled_escapes().split(units)  # text, escape, whether words are parted; and so on
    seen = [b"" if parted is None else b"\x1b" for parted in pieces[2::3]]
    texts, escapes, shown = (np.fromiter(map(len, part), dtype=np.int64) for part in (pieces[::3], pieces[1::3], seen))
    ends = np.cumsum(texts[:-1] + escapes)
    count = int(np.searchsorted(ends - escapes, end))
    hidden = np.cumsum(escapes - shown) - len(behind)
    pieces[1::3], pieces[2::3] = seen, [b""] * len(seen)
    last = units[int(ends[count - 1]) if count else 0 : end]
    return _View(
        b"".join([behind, *pieces[: 3 * count], last]),
        [0, *(ends - hidden)[:count].tolist()],
        [-len(behind), *hidden[:count].tolist()],
    )


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

    It holds less than a megabyte, and a few where a text is all colour codes. A secret may be of any length: its
    beginning decides (labels and all that a pattern has to see; a JWT's header up to 8 KiB, a password in a URL up to
    1 KiB), and what goes on from there is hashed and dropped as it comes. What does not show itself as a secret within
    HEAD_BYTES is not one.

    UTF-16 and UTF-32 are looked at through one byte for each code unit, so that what is no secret is given out as it
    came, lone surrogates and a cut unit at the end too. `chunks` begin with the byte order mark or behind it.
    """

    def __init__(self, encoding: TextEncoding = UTF_8, *, block_bytes: int = BLOCK_BYTES) -> None:
        self._encoding = encoding
        self._block_bytes = block_bytes
        self._held = bytearray()
        self._look_bytes = block_bytes
        self._behind = b""  # the last unit that was looked at and is not held, for what looks back
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
        assert len(self._behind) <= 1
        plain = not {0x1B, 0x5C} & set(self._held)
        undecided = HEAD_BYTES + ESCAPE_BYTES if plain else 2 * HEAD_BYTES * ESCAPE_BYTES
        assert len(self._held) <= max(self._block_bytes, undecided * self._encoding.unit_bytes)
        assert all(count > 0 for count in self._counts.values())
        assert self._secret is None or self._secret.form.kind in self._counts

    def feed(self, chunk: bytes) -> bytes:
        """Take the next bytes; return what is decided by now, maybe nothing."""
        out = []
        view = memoryview(chunk)
        for start in range(0, len(chunk), BLOCK_BYTES):
            self._held += view[start : start + BLOCK_BYTES]
            if len(self._held) >= self._look_bytes:
                out.append(self._advance(final=False))
        return b"".join(out)

    def finish(self) -> bytes:
        """Return the rest. The next text may be fed then; counts go on."""
        out = self._advance(final=True)
        self._held.clear()
        self._behind = b""
        return out

    def _advance(self, *, final: bool) -> bytes:
        raw, unit = bytes(self._held), self._encoding.unit_bytes
        view = _view(units := _one_byte_units(raw, self._encoding), behind=self._behind, final=final)
        out: list[bytes] = []
        at, given = len(self._behind), 0
        while True:
            if self._secret is not None:
                end = self._pass_secret(self._secret, view, at, raw, final=final, out=out)
                given = view.unit_at(end - 1) + 1 if end > at else given
                at = end
                if self._secret is not None:
                    break
            found = _next_secret(view.text, at, final=final)
            start = view.unit_at(found.start)
            out.append(raw[given * unit : start * unit])
            at, given = found.end, start
            if found.form is None:
                break
            given = view.unit_at(found.end - 1) + 1
            self._secret = _Secret(found.form)
            self._counts[found.form.kind] = self._counts.get(found.form.kind, 0) + 1
            self._secret.digest.update(self._utf_8(view, found.start, found.end, raw))
        if final:
            out.append(raw[len(units) * unit :])
        self._behind = view.text[max(0, at - 1) : at]
        del self._held[: given * unit]
        self._look_bytes = self._block_bytes if len(self._held) < BLOCK_BYTES else 2 * len(self._held)
        return b"".join(out)

    def _utf_8(self, view: _View, start: int, end: int, raw: bytes) -> bytes:
        """Return what is seen from place `start` to `end`, in UTF-8."""
        seen, unit = view.text[start:end], self._encoding.unit_bytes
        if unit == 1 or seen.isascii():
            return seen
        units = [view.unit_at(place) * unit for place in range(start, end)]
        return b"".join(raw[at : at + unit] for at in units).decode(self._encoding.name, "replace").encode()

    def _pass_secret(self, secret: _Secret, view: _View, at: int, raw: bytes, *, final: bool, out: list[bytes]) -> int:
        """Return where the secret ends, with its mark in `out`; or as far as it goes on for sure."""
        tail = compiled_tail(secret.form).match(view.text, at)
        assert tail is not None, "a tail may be empty"
        end = tail.end()
        secret.digest.update(self._utf_8(view, at, end, raw))
        if not final and len(view.text) - end < TAIL_LOOK_BYTES:
            return end
        rest = compiled_rest(secret.form).match(view.text, end)
        assert rest is not None, "a rest may be empty"
        secret.digest.update(self._utf_8(view, end, rest.end(), raw))
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
