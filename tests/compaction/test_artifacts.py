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
from chapbook.kernels.secrets import redact


def files_of(folder):
    return sorted(path for path in folder.rglob("*") if path.is_file())


SECRET = b"ghp_" + b"A1b2C3d4E5f6G7h8I9j0" + b"K1l2M3n4O5p6Q7r8"
PIECES = {"a": b"a", "newline": b"\n", "é": "é".encode(), "invalid": b"\xff", "long": b"x" * 70_000}
PIECES["secret"] = b" " + SECRET + b" "
CONTENTS = st.lists(st.sampled_from(sorted(PIECES)), max_size=6).map(
    lambda names: b"".join(PIECES[name] for name in names)
)


class StoreUnderUse(RuleBasedStateMachine):
    """The reference is a dictionary of contents by hash."""

    def __init__(self):
        super().__init__()
        memory = Path("/dev/shm")  # flushes cost nothing there
        self.root = Path(tempfile.mkdtemp(prefix="chapbook-artifacts-", dir=memory if memory.is_dir() else None))
        self.store = ArtifactStore(self.root / "store", index_from_bytes=50_000)
        self.contents, self.names = {}, set()

    def remember(self, stored, data, *, text):
        data, counts = redact(data).data, dict(redact(data).counts)
        assert stored.redacted == counts
        self.contents[stored.sha256] = data
        self.names.add(stored.path)
        assert stored.sha256 == hashlib.sha256(data).hexdigest()
        assert stored.size_bytes == len(data)
        try:
            data.decode()
        except UnicodeDecodeError:
            text = False
        suffix = "txt" if text else "bin"
        assert stored.path == self.root / "store" / stored.sha256[:2] / f"{stored.sha256}.{suffix}"

    @rule(data=CONTENTS, text=st.booleans())
    def put(self, data, text):
        self.remember(self.store.put(data, text=text), data, text=text)

    @rule(data=CONTENTS, lead=st.just(b"") | CONTENTS, text=st.booleans())
    def adopt(self, data, lead, text):
        file = self.root / "captured"
        file.write_bytes(data)
        self.remember(self.store.adopt(file, lead=lead, text=text), lead + data, text=text)
        assert not file.exists()

    @rule(data=st.data())
    def damage_and_store_again(self, data):
        if self.names:
            path = data.draw(st.sampled_from(sorted(self.names)))
            path.write_bytes(path.read_bytes() + b"!")
            with pytest.raises(ArtifactError, match="is not what was stored"):
                self.store.check_integrity()
            self.store.put(self.contents[path.stem], text=path.suffix == ".txt")

    @rule(data=st.data(), damage=st.sampled_from(["remove", "cut", "change", "another's"]))
    def damage_an_index(self, data, damage):
        indexes = sorted(self.root.rglob("*.idx"))
        if indexes:
            path = data.draw(st.sampled_from(indexes))
            whole = path.read_bytes()
            if damage == "remove":
                path.unlink()
            elif damage == "cut":
                path.write_bytes(whole[:-1])
            elif damage == "change":
                path.write_bytes(whole[:90] + bytes([whole[90] ^ 1]) + whole[91:])
            else:
                path.write_bytes(data.draw(st.sampled_from(indexes)).read_bytes())
            self.read_a_line_of(path.stem)

    @rule(data=st.data())
    def read_a_line(self, data):
        if self.contents:
            self.read_a_line_of(data.draw(st.sampled_from(sorted(self.contents))))

    def read_a_line_of(self, sha256):
        content = self.contents[sha256]
        with self.store.open_text(self.store.lookup(sha256[:20])) as text:
            text.check_integrity()
            lines = content.split(b"\n")
            assert text.line_count == len(lines) - (not lines[-1])
            assert b"".join(text.chunks(from_line=len(lines))) == lines[-1]

    @invariant()
    def every_content_is_there_once_for_each_name_and_nothing_else(self):
        self.store.check_integrity()
        assert {sha256: self.store.read(sha256) for sha256 in self.contents} == self.contents
        assert self.names == {ref.path for ref in self.store.refs()}
        indexes = {path.with_suffix(".idx") for path in self.names if len(self.contents[path.stem]) >= 50_000}
        files = set(files_of(self.root / "store"))
        assert self.names <= files <= self.names | indexes
        assert not any(SECRET in path.read_bytes() for path in files)

    def teardown(self):
        shutil.rmtree(self.root)


TestStoreUnderUse = StoreUnderUse.TestCase
TestStoreUnderUse.settings = settings(max_examples=30, stateful_step_count=10, deadline=None)


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
    assert files_of(store.folder) == [ref.path.with_suffix(".idx"), ref.path]


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


def test_a_full_disk_leaves_nothing_half_written(small_disk, tmp_path):
    store = ArtifactStore(small_disk / "artifacts")
    kept = store.put(b"k" * 1000)
    captured = tmp_path / "captured"
    for content in (b"y" * 200_000, SECRET + b"\n" + b"y" * (199_999 - len(SECRET))):
        captured.write_bytes(content)
        for attempt in (lambda data=content: store.put(data), lambda: store.adopt(captured)):
            with pytest.raises(ArtifactError, match=r"200,000 bytes .* the disk is full") as refused:
                attempt()
            assert refused.value.size_bytes == 200_000
        assert files_of(small_disk) == [kept.path]
        assert captured.read_bytes() == content
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


# --- Redaction.


@pytest.mark.parametrize("name", ["utf-8", "utf-16", "utf-16-le", "utf-16-be", "utf-32"])
@pytest.mark.parametrize("way", ["put", "adopt", "adopt with a lead"])
def test_a_secret_is_nowhere_in_the_store_in_whatever_encoding(store, tmp_path, name, way):
    text = f"a line of text\ntoken {SECRET.decode()}\nthe last line\n"
    lead = f"lead {SECRET.decode()}\n" if way == "adopt with a lead" else ""
    if way == "put":
        stored = store.put(text.encode(name))
    else:
        (tmp_path / "captured").write_bytes(text.encode(name))
        stored = store.adopt(tmp_path / "captured", lead=lead.encode())
    assert stored.redacted == {"github-token": 2 if lead else 1}
    content = store.read(stored.sha256)
    assert content.decode(name) == redact((lead + text).encode()).data.decode()
    assert SECRET.decode().encode(name.removesuffix("-le")) not in content
    assert "ghp_" not in content.decode(name)
    assert not (tmp_path / "captured").exists()
    again = store.put(content)
    assert (again.sha256, again.redacted) == (stored.sha256, {})


def test_a_secret_across_a_read_boundary_is_redacted(store, tmp_path):
    captured = tmp_path / "captured"
    for boundary in (1 << 16, 1 << 19, 1 << 20, (1 << 20) + (1 << 16)):
        data = b"x " * ((boundary - 10) // 2) + SECRET + b" end" * 1000
        captured.write_bytes(data)
        adopted = store.adopt(captured)
        assert adopted.sha256 == store.put(data).sha256 == hashlib.sha256(redact(data).data).hexdigest()
        assert adopted.redacted == {"github-token": 1}


def test_a_file_with_a_secret_is_not_moved_into_the_store(store, tmp_path):
    captured = tmp_path / "captured"
    captured.write_bytes(SECRET + b"\n")
    inode = captured.stat().st_ino
    with captured.open("rb"):  # holds the inode
        assert store.adopt(captured).path.stat().st_ino != inode
        assert not captured.exists()


@pytest.mark.parametrize("mark", [True, False])
@pytest.mark.parametrize("name", ["utf-8", "utf-16-le", "utf-16-be"])
def test_a_lead_stands_in_the_text_of_the_file_behind_its_mark(store, tmp_path, name, mark):
    start = "\ufeff" if mark else ""
    (tmp_path / "captured").write_bytes(f"{start}first line é\nsecond\n".encode(name))
    stored = store.adopt(tmp_path / "captured", lead="exit 1 ü\n".encode())
    assert store.read(stored.sha256).decode(name) == f"{start}exit 1 ü\nfirst line é\nsecond\n"
    with store.open_text(stored) as text:
        assert text.encoding.name == name
        assert b"".join(text.chunks(from_line=2)).decode() == "first line é\nsecond\n"


def test_adopting_a_blob_of_the_store_leaves_it_there(store):
    stored = store.put(b"in the store")
    assert store.adopt(stored.path) == stored
    assert store.read(stored.sha256) == b"in the store"


def test_a_store_that_is_deleted_in_mid_session_is_made_again_in_its_own_folder_only(store, tmp_path):
    home = tmp_path / "workspace"
    home.mkdir()
    store = ArtifactStore(home / "artifacts")
    large = b"a line of text\n" * 100_000
    stored = store.put(large)
    with store.open_text(stored) as text:
        shutil.rmtree(store.folder)
        assert len(b"".join(text.chunks())) == len(large)  # what is open stays
    for attempt in (lambda: store.lookup(stored.sha256), lambda: store.read(stored.sha256)):
        with pytest.raises(ArtifactError, match=f"no artifact {stored.sha256} in {store.folder}"):
            attempt()
    with pytest.raises(ArtifactError, match=r"1,500,000 bytes .* No such file") as refused:
        store.open_text(stored)
    assert refused.value.size_bytes == stored.size_bytes
    assert list(store.refs()) == []
    assert store.put(b"again").path.exists()
    shutil.rmtree(home)
    (tmp_path / "captured").write_bytes(b"captured")
    for attempt in (lambda: store.put(b"again"), lambda: store.adopt(tmp_path / "captured")):
        with pytest.raises(ArtifactError, match=r"bytes in .* the folder that holds the store is gone"):
            attempt()
    assert not home.exists()
    assert (tmp_path / "captured").read_bytes() == b"captured"


def test_a_large_file_is_stored_and_read_in_little_memory(tmp_path):
    script = """
import resource, sys
from pathlib import Path
from chapbook.compaction.artifacts import ArtifactStore

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> (20 if sys.platform == "darwin" else 10)

root = Path(sys.argv[1])
store = ArtifactStore(root / "artifacts")
with store.open_text(store.put(b"warm up\\n" * 200_000)) as text:
    b"".join(text.chunks(from_line=150_000))
before = peak()
for lead in (b"", b"a lead, so that it is copied\\n"):
    with (root / "captured").open("wb") as file:
        file.seek(256 << 20)
        file.write(b"\\nthe last line\\n")
    stored = store.adopt(root / "captured", lead=lead)
    stored.path.with_suffix(".idx").unlink()
    with store.open_text(stored) as text:
        assert b"".join(text.chunks(from_line=text.line_count)) == b"the last line\\n"
        assert sum(map(len, text.chunks())) == stored.size_bytes
    stored.path.unlink()
print(peak() - before)
"""
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 32


def test_a_file_that_is_still_written_to_is_refused_and_stays_where_it_is(store: ArtifactStore, tmp_path: Path) -> None:
    file = tmp_path / "growing"
    file.write_bytes(b"line\n" * 1_000)
    with file.open("ab", buffering=0) as writer:
        real, calls = os.fsync, []

        def fsync(handle: int) -> None:
            """The file grows between the pass over it and its move: as it is flushed."""
            calls.append(handle)
            if len(calls) == 1:
                writer.write(b"more\n")
            real(handle)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "fsync", fsync)
            with pytest.raises(ArtifactError, match="was written to while it was stored"):
                store.adopt(file)
    assert file.read_bytes() == b"line\n" * 1_000 + b"more\n"
    assert list(store.refs()) == []
