"""The bytes of a snapshot file: where parts lie, what a header may claim, and that no lie in it costs memory."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import msgspec
import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from chapbook.kernels.chain import run_name
from chapbook.kernels.errors import SnapshotUnusable
from chapbook.kernels.tokens import encode_tokens, token_ids
from chapbook.runtime.prefix_cache.identity import CacheIdentity
from chapbook.runtime.prefix_cache.snapshot_format import (
    ALIGNMENT_BYTES,
    MAGIC,
    MAX_TOKENS,
    PREAMBLE_BYTES,
    Section,
    SectionPlan,
    SnapshotHeader,
    check_plan,
    decode_front,
    decode_ids,
    encode_front,
    front_bytes_of,
    hash_bytes,
    layout_of,
    snapshot_path,
)

IDENTITY = CacheIdentity(
    fingerprint="f" * 64,
    model_name="tiny",
    memory="full attention",
    type_k="f16",
    type_v="f16",
    flash_attn="auto",
    rope="",
    lora="",
    build="b1",
)
TOKENS = token_ids(range(100, 420))


def filled(data: bytes) -> bytes:
    return data + bytes(-len(data) % ALIGNMENT_BYTES)


def header_of(tokens=TOKENS, *, rungs=(), sizes=(1000,), **changes):
    """Return a header that is right, but for `changes`."""
    lengths = (len(tokens), *rungs)
    sections = tuple(
        Section(tokens=length, partial=index > 0, size_bytes=size)
        for index, (length, size) in enumerate(zip(lengths, sizes, strict=True))
    )
    header = SnapshotHeader(
        identity=IDENTITY,
        tokens=len(tokens),
        run=run_name(tokens, seed=IDENTITY.seed),
        pinned=False,
        created=1.5,
        ids_xxh3_128=hash_bytes(filled(encode_tokens(tokens))),
        sections=sections,
    )
    return msgspec.structs.replace(header, **changes)


def path_of(tokens=TOKENS, identity=IDENTITY) -> Path:
    return snapshot_path(Path("/cache"), identity=identity, run=run_name(tokens, seed=identity.seed))


def front_with(**changes) -> bytes:
    """Return a front whose hash is right and whose JSON says what a header cannot be built to say."""
    claims = json.loads(msgspec.json.encode(header_of()))
    claims.update(changes)
    text = json.dumps(claims).encode()
    text += b" " * (-(PREAMBLE_BYTES + len(text)) % ALIGNMENT_BYTES)
    hashed = struct.pack("<8sII", MAGIC, 1, len(text))
    return hashed + xxhash.xxh3_128_digest(hashed + text) + text


def test_a_front_comes_back_as_it_was_written():
    header = header_of(rungs=(64, 128), sizes=(1000, 30, 40))
    front = encode_front(header)
    assert front_bytes_of(front[:PREAMBLE_BYTES], path=path_of()) == len(front)
    assert decode_front(front, path=path_of()) == header


def test_the_length_of_a_front_does_not_depend_on_the_hashes():
    header = header_of()
    hashed = msgspec.structs.replace(
        header, sections=tuple(msgspec.structs.replace(one, xxh3_128="e" * 32) for one in header.sections)
    )
    assert len(encode_front(header)) == len(encode_front(hashed))


@given(sizes=st.lists(st.integers(1, 5000), min_size=1, max_size=6), count=st.integers(10, 2000))
def test_parts_are_aligned_and_follow_each_other_without_a_gap(sizes, count):
    tokens = token_ids(range(count))
    header = header_of(tokens, rungs=tuple(range(1, len(sizes))), sizes=tuple(sizes))
    layout = layout_of(len(encode_front(header)), header)
    parts = [layout.front, layout.ids, *layout.sections]
    assert [part.start for part in parts] == [0, *(part.filled for part in parts[:-1])]
    assert [part.stop - part.start for part in layout.sections] == sizes
    assert all(part.start % ALIGNMENT_BYTES == 0 for part in parts)
    assert all(0 <= part.filled - part.stop < ALIGNMENT_BYTES for part in parts)
    assert layout.size_bytes == parts[-1].filled


@given(data=st.data())
def test_a_front_with_any_bit_flipped_is_refused(data):
    front = bytearray(encode_front(header_of(rungs=(64,), sizes=(1000, 30))))
    front[data.draw(st.integers(0, len(front) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises(SnapshotUnusable) as caught:
        decode_front(bytes(front), path=path_of())
    assert caught.value.damaged


@pytest.mark.parametrize("length", [0, 1, PREAMBLE_BYTES - 1])
def test_a_file_that_ends_in_its_preamble_is_refused(length):
    with pytest.raises(SnapshotUnusable, match=f"ends after {length} bytes"):
        front_bytes_of(encode_front(header_of())[:length], path=path_of())


@pytest.mark.parametrize(
    ("preamble", "reason"),
    [
        (struct.pack("<8sII16s", b"GGUF\0\0\0\0", 1, 96, bytes(16)), "does not begin as a snapshot"),
        (struct.pack("<8sII16s", MAGIC, 7, 96, bytes(16)), "format version 7, and this chapbook reads 1"),
        (struct.pack("<8sII16s", MAGIC, 1, 0xFFFFFFE0, bytes(16)), "claims a header of 4294967264 bytes"),
        (struct.pack("<8sII16s", MAGIC, 1, 97, bytes(16)), "claims a header of 97 bytes"),
    ],
    ids=["magic", "version", "4 GB of header", "a header that ends between lines"],
)
def test_a_preamble_that_lies_is_refused_before_anything_is_read(preamble, reason):
    with pytest.raises(SnapshotUnusable, match=reason):
        front_bytes_of(preamble, path=path_of())


def section(**changes):
    return {"tokens": 320, "partial": False, "size_bytes": 1000, "xxh3_128": "0" * 32, **changes}


@pytest.mark.parametrize(
    "claims",
    [
        {"tokens": 2**60, "sections": [section(tokens=2**60)]},
        {"tokens": MAX_TOKENS + 1, "sections": [section(tokens=MAX_TOKENS + 1)]},
        {"tokens": 0, "sections": [section(tokens=0)]},
        {"tokens": -1, "sections": [section(tokens=-1)]},
        {"sections": [section(size_bytes=2**60)]},
        {"sections": [section(size_bytes=-64)]},
        {"sections": [section(size_bytes=0)]},
        {"sections": []},
        {"sections": [section()] + [section(tokens=n % 300 + 1, partial=True) for n in range(5000)]},
        {"sections": [section(tokens=319)]},
        {"sections": [section(partial=True)]},
        {"sections": [section(), section(tokens=320, partial=True)]},
        {"sections": [section(), section(tokens=321, partial=True)]},
        {"sections": [section(), section(tokens=200, partial=True), section(tokens=100, partial=True)]},
        {"sections": [section(), section(tokens=100, partial=True), section(tokens=100, partial=True)]},
        {"sections": [section(xxh3_128="0" * 31)]},
        {"sections": [section(offset=0)]},
        {"created": "yesterday"},
        {"run": None},
        {"identity": {}},
        {"surprise": 1},
    ],
)
def test_a_header_that_claims_what_cannot_be_is_refused(claims):
    with pytest.raises(SnapshotUnusable) as caught:
        decode_front(front_with(**claims), path=path_of())
    assert caught.value.damaged


def test_a_header_in_the_folder_of_another_identity_is_refused():
    other = msgspec.structs.replace(IDENTITY, type_k="q8_0")
    with pytest.raises(SnapshotUnusable, match="opened otherwise"):
        decode_front(encode_front(header_of()), path=path_of(identity=other))


def test_ids_come_back_read_only():
    tokens = decode_ids(filled(encode_tokens(TOKENS)), header_of(), path=path_of())
    np.testing.assert_array_equal(tokens, TOKENS)
    assert not tokens.flags.writeable


@pytest.mark.parametrize(
    ("tokens", "changes", "path"),
    [
        (token_ids(range(101, 421)), {}, path_of()),
        (TOKENS, {"run": "another"}, path_of()),
        (TOKENS, {}, path_of(token_ids([1, 2]))),
    ],
    ids=["other ids", "another name in the header", "another name of the file"],
)
def test_ids_that_are_not_those_of_the_name_are_refused(tokens, changes, path):
    with pytest.raises(SnapshotUnusable):
        decode_ids(filled(encode_tokens(tokens)), header_of(**changes), path=path)


def test_ids_whose_filling_was_changed_are_refused():
    tokens = token_ids(range(3))
    data = bytearray(filled(encode_tokens(tokens)))
    data[-1] = 1
    with pytest.raises(SnapshotUnusable, match="token ids are not what was written"):
        decode_ids(bytes(data), header_of(tokens), path=path_of(tokens))


@pytest.mark.parametrize("lengths", [(99,), (100, 100), (100, 101), (100, 0), (100, 60, 50), (100, 50, 50)], ids=str)
def test_states_that_cannot_stand_in_one_file_are_our_own_fault(lengths):
    sections = [SectionPlan(tokens=n, partial=index > 0, size_bytes=8) for index, n in enumerate(lengths)]
    with pytest.raises(AssertionError):
        check_plan(100, sections)
