"""Line indexes beside blobs: made anew whenever they are not exactly right; and the report on a whole store."""

import subprocess

import pytest

from chapbook.compaction.artifacts import ArtifactStore
from chapbook.kernels.errors import ArtifactError

LARGE = b"a line of text\n" * 100_000


def test_large_blobs_have_an_index_beside_them_for_the_owner_alone(store, tmp_path):
    (tmp_path / "captured").write_bytes(LARGE + b"x")
    for stored in (store.put(LARGE), store.adopt(tmp_path / "captured"), store.put(b"small")):
        index = stored.path.with_suffix(".idx")
        assert index.exists() == (stored.size_bytes > 1 << 20)
        if index.exists():
            assert index.stat().st_mode & 0o777 == 0o600
            assert index.stat().st_size < 16 * (stored.size_bytes // 65536 + 1) + 200
    assert len(list(store.refs())) == 3


@pytest.mark.parametrize("damage", [None, b"", b"x" * 10_000, 0, 8, 20, 60, 79, 100, -1])
def test_an_index_that_is_missing_damaged_or_of_another_blob_is_made_anew(store, damage):
    stored = store.put(LARGE)
    index = stored.path.with_suffix(".idx")
    whole = index.read_bytes()
    if damage is None:
        index.unlink()
    elif isinstance(damage, bytes):
        index.write_bytes(damage)
    else:
        changed = bytearray(whole)
        changed[damage] ^= 0x40
        index.write_bytes(changed)
    if damage is not None:
        problem = (index, "it is not the line index of its blob. It is made anew at the next read")
        assert store.verify().problems == (problem,)
    with store.open_text(store.find(stored.sha256)) as text:
        assert text.line_count == 100_000
    assert index.read_bytes() == whole
    other = store.put(LARGE[::-1])
    index.write_bytes(other.path.with_suffix(".idx").read_bytes())
    with store.open_text(stored) as text:
        assert b"".join(text.chunks(from_line=100_000)) == b"a line of text\n"
    assert index.read_bytes() == whole
    assert store.verify().problems == ()


def test_no_index_is_made_of_a_blob_that_has_changed(store):
    stored = store.put(LARGE)
    index = stored.path.with_suffix(".idx")
    index.unlink()
    with stored.path.open("r+b") as file:
        file.write(b"A")
    with pytest.raises(ArtifactError, match="is not what was stored"):
        store.open_text(stored)
    assert not index.exists()
    with stored.path.open("r+b") as file:
        file.truncate(1_400_000)
    with pytest.raises(ArtifactError, match="1400000 bytes"):
        store.open_text(store.find(stored.sha256))


def test_an_index_that_cannot_be_written_is_kept_in_memory(small_disk):
    store = ArtifactStore(small_disk / "artifacts", index_from_bytes=1000)
    stored = store.put(b"one\ntwo\n" * 1000)
    index = stored.path.with_suffix(".idx")
    index.unlink()
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    with store.open_text(stored) as text:
        assert text.line_count == 2000
    assert not index.exists()
    store.check_integrity()
    subprocess.run(["mount", "-o", "remount,rw", small_disk], check=True)
    with stored.path.open("r+b") as file:
        file.write(b"ONE")
    with store.open_text(stored) as text, pytest.raises(ArtifactError, match="have changed"):
        next(text.chunks())  # its block tells: it was not hashed whole, and not indexed anew
    with pytest.raises(ArtifactError, match="is not what was stored"):
        ArtifactStore(store.folder, index_from_bytes=1000).open_text(stored)


def test_a_blob_fits_where_its_index_does_not(small_disk):
    store = ArtifactStore(small_disk / "artifacts", index_from_bytes=1000)
    stored = store.put(b"x\n" * 32_500)  # all of 16 pages
    assert list(store.folder.rglob("*.*")) == [stored.path]
    with store.open_text(stored) as text:
        assert text.line_count == 32_500
    store.check_integrity()


def test_verification_tells_what_is_sound_what_is_not_and_what_was_left(store):
    empty = store.verify()
    assert (empty.sound_blobs, empty.sound_bytes, empty.problems, empty.unfinished) == (0, 0, (), (0, 0))
    sound, large, changed = store.put(b"sound"), store.put(LARGE), store.put(b"changed")
    changed.path.write_bytes(b"CHANGED")
    (store.folder / "notes.txt").write_text("no blob")
    (store.folder / "00").mkdir(exist_ok=True)
    misplaced = store.folder / "00" / f"{'f' * 64}.txt"
    misplaced.write_text("")
    orphan = store.folder / "00" / f"{'0' * 64}.idx"
    orphan.write_bytes(b"")
    (store.folder / "00" / ".tmp-abc").write_bytes(b"half a blo")
    (sound.path.parent / ".tmp-def").write_bytes(b"h")
    report = store.verify()
    assert (report.sound_blobs, report.sound_bytes) == (2, 5 + large.size_bytes)
    assert (report.unfinished.files, report.unfinished.bytes) == (2, 11)
    said = dict(report.problems)
    assert set(said) == {changed.path, store.folder / "notes.txt", misplaced, orphan}
    assert said[changed.path].startswith("it is not what was stored, its bytes now have the SHA-256")
    assert said[orphan] == "a line index without its blob. It can be removed"
    with pytest.raises(ArtifactError):
        store.check_integrity()
