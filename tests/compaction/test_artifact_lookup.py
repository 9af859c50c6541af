"""What names a blob, and what does not: nothing that a model or a person cites leads out of the store."""

import hashlib
import os

import pytest

from chapbook.compaction.artifacts import ArtifactRef, ArtifactStore
from chapbook.kernels.errors import ArtifactError


def test_a_citation_is_a_hash_the_start_of_one_or_a_path(store):
    stored = store.put(b"cited")
    digits = stored.sha256
    name = f"{digits[:2]}/{digits}.txt"
    for citation in (
        digits,
        digits.upper(),
        digits[:8],
        digits[:12].upper(),
        str(stored.path),
        name,
        f"artifacts/{name}",
        f"./artifacts//{name}",
        f"{store.folder.parent.name}/artifacts/{name}",
    ):
        found = store.lookup(citation)
        assert (found.sha256, found.size_bytes, found.path) == (digits, 5, stored.path)


def test_a_store_behind_a_link_is_cited_by_either_path(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "linked").symlink_to(tmp_path / "real")
    store = ArtifactStore(tmp_path / "linked" / "artifacts")
    stored = store.put(b"cited")
    assert store.lookup(str(stored.path)).path == store.lookup(str(stored.path.resolve())).path == stored.path


def bad_citations(store, digits):
    name = f"{digits[:2]}/{digits}.txt"
    return [
        "",
        digits[:7],
        digits + "0",
        digits[:11] + "g",
        digits + "\n",
        f"{digits}.txt",
        f"../{store.folder.name}/{name}",
        f"{digits[:2]}/../{name}",
        f"{store.folder}/../{store.folder.name}/{name}",
        f"/{name}",
        f"elsewhere/{name}",
        f"/etc/{name}",
        f"00/{digits}.txt",
        f"{digits[:2]}/{digits}.idx",
        f"{digits[:2]}/{digits}.txt\0",
        f"x/{name}" * 1000,
        "/etc/passwd",
        "~/.ssh/id_rsa",
        "*" * 8,
        "?" * 64,
        "é" * 8,
        "\uff11" * 8,  # full-width digits
        "\ud800" * 8,
    ]


def test_whatever_else_is_refused_and_says_what_is_accepted(store):
    digits = store.put(b"cited").sha256
    for citation in bad_citations(store, digits):
        with pytest.raises(ArtifactError, match="names no artifact: give 8 to 64 hex digits") as refused:
            store.lookup(citation)
        assert len(str(refused.value)) < 500


def test_a_miss_names_the_place_and_an_ambiguous_start_lists_what_it_could_be(store):
    with pytest.raises(ArtifactError, match=f"no artifact 0123abcd in {store.folder}"):
        store.lookup("0123ABCD")
    kept = store.put(b"kept").sha256
    with pytest.raises(ArtifactError, match=f"no artifact {kept[:9]}"):
        store.lookup(kept[:9] + ("0" if kept[9] != "0" else "1") * 3)
    # Names are enough for looking up: nobody can make contents with hashes this close.
    (store.folder / "ab").mkdir(exist_ok=True)
    names = [f"abcdef01{number:056x}" for number in range(7)]
    for name in names:
        (store.folder / "ab" / f"{name}.txt").write_bytes(b"")
    (store.folder / "ab" / f"{names[0]}.bin").write_bytes(b"")
    with pytest.raises(ArtifactError, match="7 artifacts begin with abcdef01: ") as refused:
        store.lookup("abcdef01")
    assert [name for name in names if name in str(refused.value)] == names[:5]
    assert store.lookup(names[0]).path.suffix == ".txt"


def test_links_and_pipes_in_the_store_are_not_followed(store, tmp_path):
    outside = tmp_path / "outside"
    outside.write_bytes(b"outside")
    digits = hashlib.sha256(b"outside").hexdigest()
    stored = store.put(b"inside")

    def refuse(path):
        ref = ArtifactRef(sha256=path.stem, size_bytes=7, path=path)
        for attempt in (lambda: store.lookup(path.stem), lambda: store.read(path.stem), lambda: store.open_text(ref)):
            with pytest.raises(ArtifactError, match=r"no artifact|link|not a regular file"):
                attempt()
        assert path.stem not in {ref.sha256 for ref in store.refs()}
        assert path in {problem.path for problem in store.verify().problems}

    link = store.folder / digits[:2] / f"{digits}.txt"
    link.parent.mkdir(exist_ok=True)
    link.symlink_to(outside)
    refuse(link)
    link.unlink()
    os.mkfifo(link)
    refuse(link)
    link.unlink()
    assert store.put(b"outside").path == link
    stored.path.parent.rename(tmp_path / "moved")
    stored.path.parent.symlink_to(tmp_path / "moved")
    for attempt in (lambda: store.read(stored.sha256), lambda: store.open_text(stored)):
        with pytest.raises(ArtifactError, match="is a symbolic link"):
            attempt()
    with pytest.raises(ArtifactError, match="no artifact"):
        store.lookup(stored.sha256)


def test_a_link_under_a_blobs_name_is_replaced_and_its_target_left_alone(store, tmp_path):
    (tmp_path / "target").write_bytes(b"target")
    stored = store.put(b"content")
    stored.path.unlink()
    stored.path.symlink_to(tmp_path / "target")
    assert store.put(b"content") == stored
    assert not stored.path.is_symlink()
    assert (tmp_path / "target").read_bytes() == b"target"


def test_a_reference_to_a_file_elsewhere_is_not_opened(store, tmp_path):
    (tmp_path / "secret").write_bytes(b"outside")
    ref = ArtifactRef(sha256=hashlib.sha256(b"outside").hexdigest(), size_bytes=7, path=tmp_path / "secret")
    with pytest.raises(ArtifactError, match="is not a blob of"):
        store.open_text(ref)
