"""What the installed llama.cpp is and what it can use, as it tells itself."""

from __future__ import annotations

import importlib.metadata

import msgspec

from .library import library


class BuildInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A build of llama.cpp. `features` are those of its system info that are on, in its order."""

    llama_cpp_python: str
    llama_cpp: str
    features: tuple[str, ...]
    gpu_offload: bool
    mmap: bool
    mlock: bool

    @property
    def identity(self) -> str:
        """What tells this build from others."""
        return f"{self.llama_cpp} ({self.llama_cpp_python})"


def build_info() -> BuildInfo:
    """Return what llama.cpp says of itself. Raises ModelLoadError where it is not installed or does not load."""
    api = library().api
    system_info = api.llama_print_system_info().decode("utf-8", "replace")
    switches = (part.rpartition(":")[2].partition("=") for part in system_info.split("|"))
    return BuildInfo(
        llama_cpp_python=importlib.metadata.version("llama-cpp-python"),
        llama_cpp=api.llama_version().decode("utf-8", "replace") if hasattr(api, "llama_version") else "",
        features=tuple(name.strip() for name, _, value in switches if value.strip() not in ("", "0")),
        gpu_offload=bool(api.llama_supports_gpu_offload()),
        mmap=bool(api.llama_supports_mmap()),
        mlock=bool(api.llama_supports_mlock()),
    )
