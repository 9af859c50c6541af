"""The way of a content into the store: redacted, and surveyed as it will be, in one pass and in bounded memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import BinaryIO

import msgspec

from ..kernels.secrets import Redactor
from ..kernels.text_encoding import HEAD_BYTES, TextEncoding, detect_encoding
from .blob_index import CHUNK_BYTES, Survey, Surveyed


class Passed(msgspec.Struct, frozen=True, kw_only=True):
    """What came through. `redacted` says how many secrets of each kind did not; without any, nothing was changed."""

    found: Surveyed
    redacted: Mapping[str, int]


def redact_through(
    source: BinaryIO, *, lead: bytes = b"", write: Callable[[bytes], object] = lambda _piece: None
) -> Passed:
    """Redact an open file from its start, with `lead`, UTF-8 text, before its own; give what comes of it to `write`."""
    head = source.read(HEAD_BYTES)
    encoding = detect_encoding(head)
    redactor, survey = Redactor(encoding), Survey()
    for chunk in _with_lead(source, head, lead, encoding):
        redacted = redactor.feed(chunk)
        survey.feed(redacted)
        write(redacted)
    rest = redactor.finish()
    survey.feed(rest)
    write(rest)
    return Passed(found=survey.finish(), redacted={kind: count for kind, count in redactor.counts.items() if count})


def _with_lead(source: BinaryIO, head: bytes, lead: bytes, encoding: TextEncoding) -> Iterator[bytes]:
    # A text has one encoding, so the lead takes that of the file; a mark is one only at the very start.
    if encoding.unit_bytes > 1:
        lead = lead.decode(errors="replace").encode(encoding.name)
    mark_bytes = len(encoding.mark)
    yield head[:mark_bytes] + lead + head[mark_bytes:]
    yield from iter(lambda: source.read(CHUNK_BYTES), b"")
