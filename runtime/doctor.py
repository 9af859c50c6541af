"""What `chapbook doctor` finds out: of this machine, of the llama.cpp build, of a model.

Nothing here loads a model's weights; the header, the vocabulary and the template tell all that is told.
"""

from __future__ import annotations

import importlib.metadata
import platform
import shutil
from pathlib import Path

import msgspec

from ..kernels.errors import TemplateRefused
from .counting import build_counter
from .dialects import choose_dialect, dialect_named
from .gguf import fingerprint, read_gguf
from .gguf_metadata import GgufMetadata
from .llama import Placement, open_vocabulary
from .llama.loading import OUTPUTS_MOST
from .llama.placement import kv_bytes_per_token, physical_cores, place
from .prefix_cache.machine import free_memory_bytes
from .template_report import TemplateDescription, describe_template
from .tools.confine import confinement_available, describe_confinement
from .transitions import learn_chat_format

PACKAGES = (
    "llama-cpp-python", "numpy", "msgspec", "tiktoken", "jinja2", "typer", "rich", "prompt_toolkit", "psutil",
    "huggingface_hub",
)  # fmt: skip
"""Packages whose versions matter for a fault that someone reports; those that are not installed are left out."""

_NOTED_CPU_FLAGS = (
    "avx", "avx2", "f16c", "fma", "bmi2", "avx512f", "avx512_vnni", "avx_vnni", "amx_tile", "asimd", "asimddp", "i8mm",
    "sve",
)  # fmt: skip
_DEFAULT_UBATCH = 512


class MachineReport(msgspec.Struct, frozen=True, kw_only=True):
    """The machine. `cpu_flags` are the instruction sets that matter for llama.cpp, where the system tells them."""

    chapbook: str
    python: str
    system: str
    packages: dict[str, str]
    cores: int
    cpu_flags: tuple[str, ...]
    memory_bytes: int
    free_memory_bytes: int
    landlock: bool
    confinement: str
    ripgrep: str


class ModelReport(msgspec.Struct, frozen=True, kw_only=True):
    """A model file. `counter` says why counts do not come from tiktoken, and is empty where they do.

    `template_problem` says why a template is refused; `template` is None then.
    """

    name: str
    path: str
    fingerprint: str
    architecture: str
    size_bytes: int
    files: int
    memory: str
    sliding_window_tokens: int
    n_ctx_trained: int | None
    kv_bytes_per_token: int
    vocab_size: int
    tokenizer: str
    counter: str
    dialect: str
    dialect_reason: str
    template: TemplateDescription | None
    template_problem: str
    placement: Placement


class ModelQuestions(msgspec.Struct, frozen=True, kw_only=True):
    """How the model would be opened. None: as the engine decides by itself."""

    n_ctx: int | None = None
    n_ubatch: int | None = None
    type_k: str | None = None
    type_v: str | None = None
    dialect: str | None = None
    template: str | None = None
    cache_folder: Path | None = None


def examine_machine() -> MachineReport:
    """Look at this machine. Never raises."""
    import psutil  # noqa: PLC0415  kept out of the import of the package

    return MachineReport(
        chapbook=_version("chapbook"),
        python=platform.python_version(),
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        packages={name: version for name in PACKAGES if (version := _version(name))},
        cores=physical_cores(),
        cpu_flags=_cpu_flags(),
        memory_bytes=int(psutil.virtual_memory().total),
        free_memory_bytes=free_memory_bytes(),
        landlock=confinement_available(),
        confinement=describe_confinement(),
        ripgrep=shutil.which("rg") or "",
    )


def examine_model(path: Path, asked: ModelQuestions) -> ModelReport:
    """Look at a model without loading it. Raises ModelFileError, ModelLoadError."""
    metadata = read_gguf(path)
    types = asked.type_k or "f16", asked.type_v or "f16"
    chatml = asked.template == "chatml"
    chosen = choose_dialect(None if chatml else metadata.chat_template)
    forced = dialect_named(asked.dialect) if asked.dialect else None
    with open_vocabulary(path) as vocabulary:
        described = _describe_template(
            None if chatml else metadata.chat_template,
            bos_text=vocabulary.text(vocabulary.bos_id),
            eos_text=vocabulary.text(vocabulary.eos_id),
            cache_folder=asked.cache_folder,
        )
        counter = build_counter(metadata, vocabulary)
        vocab_size = vocabulary.size
    return ModelReport(
        name=metadata.name or path.stem,
        path=str(path),
        fingerprint=fingerprint(path, metadata),
        architecture=metadata.architecture,
        size_bytes=metadata.file_size,
        files=metadata.split_count,
        memory=metadata.memory_kind(),
        sliding_window_tokens=metadata.sliding_window_tokens,
        n_ctx_trained=metadata.context_length_tokens,
        kv_bytes_per_token=kv_bytes_per_token(metadata, type_k=types[0], type_v=types[1]),
        vocab_size=vocab_size,
        tokenizer=f"{metadata.tokenizer_model} {metadata.pre_tokenizer}".strip(),
        counter=counter.reason,
        dialect=forced.name if forced else chosen.dialect.name,
        dialect_reason="set in the configuration" if forced else chosen.reason,
        template=None if isinstance(described, str) else described,
        template_problem=described if isinstance(described, str) else "",
        placement=_placement(metadata, asked, types),
    )


def _placement(metadata: GgufMetadata, asked: ModelQuestions, types: tuple[str, str]) -> Placement:
    return place(
        metadata,
        asked_n_ctx=asked.n_ctx,
        free_bytes=free_memory_bytes(),
        n_ubatch=asked.n_ubatch or _DEFAULT_UBATCH,
        n_outputs=OUTPUTS_MOST,
        type_k=types[0],
        type_v=types[1],
    )


def _describe_template(
    template: str | None, *, bos_text: str, eos_text: str, cache_folder: Path | None
) -> TemplateDescription | str:
    """Return what there is to say of the template, or why it is refused."""
    try:
        chat_format = learn_chat_format(template, bos_text=bos_text, eos_text=eos_text, cache_folder=cache_folder)
        return describe_template(template, chat_format, bos_text=bos_text, eos_text=eos_text)
    except TemplateRefused as error:
        return str(error)


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _cpu_flags() -> tuple[str, ...]:
    """Return the instruction sets that Linux names; nothing elsewhere."""
    try:
        with Path("/proc/cpuinfo").open(encoding="utf-8", errors="replace") as file:
            line = next((line for line in file if line.startswith(("flags", "Features"))), "")
    except OSError:
        return ()
    known = set(line.partition(":")[2].split())
    return tuple(flag for flag in _NOTED_CPU_FLAGS if flag in known)
