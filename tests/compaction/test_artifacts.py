"""The artifact store: content under its own hash, whole or not at all, verified when read."""

import errno
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from chapbook.compaction.artifacts import ArtifactStore
from chapbook.kernels.errors import ArtifactError


@pytest.fixture
def store(tmp_path):
    return ArtifactStore(tmp_path / "artifacts")


def files_of(folder):
    return sorted(path for path in folder.rglob("*") if path.is_file())


class StoreUnderUse(RuleBasedStateMachine):
    """The reference is a dictionary of contents by hash."""

    def __init__(self):
        super().__init__()
        memory = Path("/dev/shm")  # flushes cost nothing there
        self.root = Path(tempfile.mkdtemp(prefix="chapbook-artifacts-", dir=memory if memory.is_dir() else None))
        self.store = ArtifactStore(self.root / "store")
        self.contents, self.names = {}, set()

    def remember(self, ref, data, *, text):
        self.contents[ref.sha256] = data
        self.names.add(ref.path)
        assert ref.sha256 == hashlib.sha256(data).hexdigest()
        assert ref.size_bytes == len(data)
        try:
            data.decode()
        except UnicodeDecodeError:
            text = False
        assert ref.path == self.root / "store" / ref.sha256[:2] / f"{ref.sha256}.{'txt' if text else 'bin'}"

    @rule(data=st.binary(max_size=8) | st.text(max_size=4).map(str.encode), text=st.booleans())
    def put(self, data, text):
        self.remember(self.store.put(data, text=text), data, text=text)

    @rule(data=st.binary(max_size=8) | st.text(max_size=4).map(str.encode), text=st.booleans())
    def adopt(self, data, text):
        file = self.root / "captured"
        file.write_bytes(data)
        self.remember(self.store.adopt(file, text=text), data, text=text)
        assert not file.exists()

    @rule(data=st.data())
    def damage_and_store_again(self, data):
        if self.names:
            path = data.draw(st.sampled_from(sorted(self.names)))
            path.write_bytes(path.read_bytes() + b"!")
            with pytest.raises(ArtifactError, match="is not what was stored"):
                self.store.check_integrity()
            self.store.put(self.contents[path.stem], text=path.suffix == ".txt")

    @invariant()
    def every_content_is_there_once_for_each_name_and_nothing_else(self):
        self.store.check_integrity()
        assert {sha256: self.store.read(sha256) for sha256 in self.contents} == self.contents
        assert set(files_of(self.root / "store")) == self.names == {ref.path for ref in self.store.refs()}

    def teardown(self):
        shutil.rmtree(self.root)


TestStoreUnderUse = StoreUnderUse.TestCase
TestStoreUnderUse.settings = settings(max_examples=20, stateful_step_count=10, deadline=None)


def test_files_are_for_the_owner_alone(store, tmp_path):
    captured = tmp_path / "captured"
    captured.write_text("adopted")
    captured.chmod(0o644)
    paths = [store.put(b"put").path, store.adopt(captured).path]
    assert {oct(path.stat().st_mode & 0o777) for path in paths} == {"0o600"}
    assert {oct(path.stat().st_mode & 0o777) for path in (store.folder, *(p.parent for p in paths))} == {"0o700"}


def test_a_large_file_is_moved_and_not_copied(store, tmp_path):
    captured = tmp_path / "captured"
    captured.write_bytes("é".encode() * 700_000)  # a chunk ends within a character
    inode = captured.stat().st_ino
    ref = store.adopt(captured)
    assert ref.path.stat().st_ino == inode
    assert ref.path.suffix == ".txt"
    assert ref.size_bytes == 1_400_000


def test_a_file_on_another_file_system_is_copied_and_its_old_name_goes(store):
    memory = Path("/dev/shm")
    if not memory.is_dir() or memory.stat().st_dev == store.folder.parent.stat().st_dev:
        pytest.skip("no second file system here")
    with tempfile.NamedTemporaryFile(dir=memory, delete=False) as file:
        file.write(b"x" * 3_000_000)
    ref = store.adopt(Path(file.name))
    assert not Path(file.name).exists()
    assert store.read(ref.sha256) == b"x" * 3_000_000
    assert files_of(store.folder) == [ref.path]


def test_only_regular_files_are_adopted(store, tmp_path):
    (tmp_path / "target").write_text("x")
    (tmp_path / "link").symlink_to(tmp_path / "target")
    os.mkfifo(tmp_path / "pipe")
    for name in ("link", "pipe", "."):
        with pytest.raises(ArtifactError, match="not a regular file"):
            store.adopt(tmp_path / name)
    with pytest.raises(ArtifactError, match="No such file"):
        store.adopt(tmp_path / "nowhere")
    assert (tmp_path / "target").read_text() == "x"


@pytest.mark.parametrize("name", ["", "../../etc/passwd", "A" * 64, "a" * 63, "a" * 64 + "\n"])
def test_what_is_no_hash_is_refused(store, name):
    with pytest.raises(ArtifactError, match="is not a SHA-256"):
        store.read(name)


def test_a_blob_that_is_not_there_is_refused(store):
    with pytest.raises(ArtifactError, match="no artifact"):
        store.read("0" * 64)


def test_a_changed_blob_is_not_read(store):
    ref = store.put(b"what was stored")
    ref.path.write_bytes(b"what was stoled")
    with pytest.raises(ArtifactError, match="15 bytes") as refused:
        store.read(ref.sha256)
    assert refused.value.path == ref.path


def test_an_open_blob_starts_at_its_beginning(store):
    ref = store.put(b"line 1\nline 2\n")
    with store.open(ref.sha256) as file:
        assert file.readline() == b"line 1\n"


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 64 KB. Where mounting is refused the test is skipped: the file size limit is tested anyway."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = shutil.which("mount")
    if mount is None or subprocess.run([mount, "-t", "tmpfs", "-o", "size=64k", "tmpfs", disk], check=False).returncode:
        pytest.skip("mounting a small file system is not allowed here")
    yield disk
    subprocess.run(["umount", "--lazy", disk], check=True)  # a test that failed may have files open


def test_a_full_disk_leaves_nothing_half_written(small_disk, tmp_path):
    store = ArtifactStore(small_disk / "artifacts")
    kept = store.put(b"k" * 1000)
    captured = tmp_path / "captured"
    captured.write_bytes(b"y" * 200_000)
    for attempt in (lambda: store.put(b"x" * 200_000), lambda: store.adopt(captured)):
        with pytest.raises(ArtifactError, match=r"200,000 bytes .* the disk is full") as refused:
            attempt()
        assert refused.value.size_bytes == 200_000
    assert files_of(small_disk) == [kept.path]
    assert captured.stat().st_size == 200_000
    store.put(b"z" * 1000)
    store.check_integrity()


def test_a_read_only_disk_is_refused_with_the_way_out(small_disk):
    store = ArtifactStore(small_disk / "artifacts")
    kept = store.put(b"kept")
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    with pytest.raises(ArtifactError, match=r"3 bytes .* read-only"):
        store.put(b"new")
    assert store.put(b"kept") == kept
    assert store.read(kept.sha256) == b"kept"


def test_a_file_size_limit_leaves_nothing_half_written(tmp_path):
    script = """
import resource, sys
from pathlib import Path
from chapbook.compaction.artifacts import ArtifactStore
from chapbook.kernels.errors import ArtifactError

resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
try:
    ArtifactStore(Path(sys.argv[1])).put(b"x" * 5000)
except ArtifactError as error:
    print(error.__cause__.errno, error)
"""
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, check=True)
    assert done.stdout.startswith(f"{errno.EFBIG} an artifact of 5,000 bytes")
    assert files_of(tmp_path) == []
