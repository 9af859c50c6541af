from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from chapbook.kernels.errors import ConfigError
from chapbook.runtime.config import (
    LoadedConfig,
    load_config,
    parse_flag,
    trust_workspace_file,
    user_config_file,
)
from chapbook.runtime.config_keys import Config, HookCommand, known_keys, known_sections
from chapbook.runtime.engine import Sampling
from chapbook.runtime.tools.spec import Policy

DOCUMENTATION = Path(__file__).parents[2] / "docs" / "config.md"


class Place:
    """A workspace and a user's folder on disk."""

    def __init__(self, root: Path) -> None:
        self.workspace, self.user_file = root / "workspace", root / "user" / "config.toml"
        self.workspace.mkdir(parents=True)
        self.user_file.parent.mkdir()

    @property
    def workspace_file(self) -> Path:
        return self.workspace / "chapbook.toml"

    def load(self, **flags: object) -> LoadedConfig:
        dotted = {name.replace("__", "."): value for name, value in flags.items()}
        return load_config(workspace=self.workspace, user_file=self.user_file, flags=dotted)

    def refusal(self, text: str) -> str:
        self.workspace_file.write_text(text)
        with pytest.raises(ConfigError) as caught:
            self.load()
        assert caught.value.exit_code == 2
        return str(caught.value).replace(f"{self.workspace}{os.sep}", "")


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


# Layers


def test_without_files_every_key_has_its_default(place: Place) -> None:
    loaded = place.load()
    assert loaded.config == Config()
    assert {row.origins for row in loaded.rows()} == {("default",)}
    assert [row.key for row in loaded.rows()] == list(known_keys())


def test_workspace_wins_over_user_and_a_flag_over_both_and_each_row_says_which(place: Place) -> None:
    place.user_file.write_text("[turn]\nrounds = 10\ncontinuations = 1\n[engine]\nn_ctx = 2048\n")
    place.workspace_file.write_text("turn.rounds = 20\nengine = { n_ctx = 4096 }\n")
    loaded = place.load(engine__n_ctx=8192, engine__n_batch=None)
    origins = {row.key: (row.value, row.origins) for row in loaded.rows()}
    assert origins["turn.rounds"] == (20, (f"{place.workspace_file}:1",))
    assert origins["turn.continuations"] == (1, (f"{place.user_file}:3",))
    assert origins["engine.n_ctx"] == (8192, ("command line",))
    assert origins["engine.n_batch"] == (None, ("default",))
    assert (loaded.config.turn.rounds, loaded.config.engine.n_ctx) == (20, 8192)


def test_auto_takes_a_value_of_the_user_back(place: Place) -> None:
    place.user_file.write_text("engine.n_ctx = 2048\ndialect = 'llama3'\n")
    place.workspace_file.write_text("engine.n_ctx = 'auto'\ndialect = 'auto'\n")
    config = place.load().config
    assert (config.engine.n_ctx, config.dialect) == (None, None)


def test_the_workspace_file_can_be_left_out(place: Place) -> None:
    place.workspace_file.write_text("this is [ not toml")
    loaded = load_config(workspace=None, user_file=place.user_file, flags={})
    assert loaded.config == Config()


def test_rows_are_plain_data_for_machines(place: Place) -> None:
    place.user_file.write_text('[[hooks.after]]\ncommand = ["true"]\n')
    rows = {row["key"]: row for row in msgspec.json.decode(msgspec.json.encode(place.load().rows()))}
    assert rows["hooks.after"]["value"] == [{"command": ["true"], "tools": [], "timeout_s": 10.0}]
    assert rows["hooks.after"]["origins"] == [f"{place.user_file}:1"]


def test_sampling_replaces_only_what_is_set(place: Place) -> None:
    place.user_file.write_text("[sampling]\ntemperature = 0\nmax_reply_tokens = 100\n")
    base = Sampling(top_k=7, seed=1)
    assert place.load().config.sampling.over(base) == Sampling(top_k=7, seed=1, temperature=0.0)


def test_hooks_of_both_files_run_the_users_first(place: Place) -> None:
    place.user_file.write_text('[[hooks.before]]\ncommand = ["mine"]\n')
    place.workspace_file.write_text('[[hooks.before]]\ncommand = ["theirs", "x"]\ntools = ["bash"]\n')
    trust_workspace_file(workspace=place.workspace, user_file=place.user_file)
    assert place.load().config.hooks.before == (
        HookCommand(command=("mine",)),
        HookCommand(command=("theirs", "x"), tools=("bash",)),
    )


# Policies

POLICIES = {"tools.allow": Policy.ALLOW, "tools.ask": Policy.ASK, "tools.deny": Policy.DENY}
one_layer = st.dictionaries(st.sampled_from(["read", "bash", "write"]), st.sampled_from(list(POLICIES)))


def as_lists(policy_of: Mapping[str, str]) -> dict[str, list[str]]:
    lists: dict[str, list[str]] = {name: [] for name in POLICIES}
    for tool, name in policy_of.items():
        lists[name].append(tool)
    return lists


def as_toml(policy_of: Mapping[str, str]) -> str:
    return "".join(f"{name} = {tools!r}\n" for name, tools in as_lists(policy_of).items())


@given(user=one_layer, workspace=one_layer, flags=one_layer)
def test_the_stricter_file_holds_and_a_flag_decides_over_both(
    tmp_path_factory: pytest.TempPathFactory, user: dict[str, str], workspace: dict[str, str], flags: dict[str, str]
) -> None:
    place = Place(tmp_path_factory.mktemp("policies"))
    place.user_file.write_text(as_toml(user))
    place.workspace_file.write_text(as_toml(workspace))
    trust_workspace_file(workspace=place.workspace, user_file=place.user_file)
    loaded = load_config(workspace=place.workspace, user_file=place.user_file, flags=as_lists(flags))
    strictness = list(POLICIES)
    expected = {
        tool: POLICIES[flags.get(tool) or max((f[tool] for f in (user, workspace) if tool in f), key=strictness.index)]
        for tool in {*user, *workspace, *flags}
    }
    assert loaded.config.tools.policies() == expected


def test_an_untrusted_workspace_can_forbid_but_not_loosen(place: Place) -> None:
    place.user_file.write_text('[tools]\ndeny = ["bash"]\nallow = ["write"]\n')
    place.workspace_file.write_text('[tools]\nask = ["bash", "write"]\ndeny = ["edit"]\n')
    policies = place.load().config.tools.policies()
    assert policies == {"bash": Policy.DENY, "write": Policy.ASK, "edit": Policy.DENY}


def test_modes_of_both_files_are_there_and_the_workspaces_stands_for_the_users_of_its_name(place: Place) -> None:
    table = "[[modes]]\nname = '{}'\nguidance = '{}'\ntools = ['read', 'task']\n"
    place.user_file.write_text(table.format("reading", "of the user") + table.format("mine", "kept"))
    place.workspace_file.write_text(table.format("reading", "of the workspace"))
    trust_workspace_file(workspace=place.workspace, user_file=place.user_file)
    config = place.load(mode="mine").config
    assert [(mode.name, mode.guidance) for mode in config.session_modes()] == [
        ("reading", "of the workspace"),
        ("mine", "kept"),
    ]
    assert config.session_modes()[0].allowed == ("read",), "there is no task here"
    assert place.load(tools__task=True).config.session_modes()[0].allowed == ("read", "task")


def test_a_mode_to_begin_in_that_is_not_there_is_refused_with_those_there_are(place: Place) -> None:
    place.user_file.write_text("turn.rounds = 3\nmode = 'plam'\n")
    with pytest.raises(
        ConfigError, match=r"config.toml:2: mode: there is no mode 'plam'; there are default, plan."
    ) as caught:
        place.load()
    assert caught.value.key == "mode"
    with pytest.raises(ConfigError, match="command line: mode: there is no mode 'reading'"):
        place.load(mode="reading")


def test_a_misspelt_tool_of_a_mode_is_refused_where_it_stands_and_one_of_a_later_version_is_not(place: Place) -> None:
    place.user_file.write_text("[[modes]]\nname = 'a'\nguidance = 'x'\ntools = ['chapters_search', 'raed']\n")
    with pytest.raises(
        ConfigError, match=r"config.toml:1: modes: no tool is named \"raed\"; did you mean `read`"
    ) as caught:
        place.load().check_tools(["read", "bash"])
    assert caught.value.key == "modes"


def test_a_tool_in_two_lists_of_one_file_is_refused(place: Place) -> None:
    message = place.refusal('[tools]\nask = ["bash"]\ndeny = ["bash"]\n')
    assert message == "chapbook.toml:3: tools.deny: `bash` is in tools.ask too; keep it in one"


def test_a_misspelt_tool_is_refused_where_it_stands(place: Place) -> None:
    place.workspace_file.write_text('[tools]\ndeny = ["bahs"]\n')
    with pytest.raises(ConfigError, match=r"chapbook\.toml:2: .*\"bahs\"; did you mean `bash`\?") as caught:
        place.load().check_tools(["bash", "read"])
    assert caught.value.nearest == "bash"
    place.workspace_file.write_text('[tools]\ndeny = ["bash"]\n')
    place.load().check_tools(["bash", "read"])


def test_a_policy_for_a_tool_that_is_off_waits_until_it_is_on(place: Place) -> None:
    place.user_file.write_text('[tools]\ndeny = ["task", "bash"]\n')
    assert place.load().config.tools.policies() == {"bash": Policy.DENY}
    place.user_file.write_text('[tools]\ntask = true\ndeny = ["task", "bash"]\n')
    assert place.load().config.tools.policies() == {"bash": Policy.DENY, "task": Policy.DENY}


def test_a_misspelt_tool_in_a_hook_is_refused(place: Place) -> None:
    place.user_file.write_text('[[hooks.before]]\ncommand = ["no"]\ntools = ["zzz"]\n')
    with pytest.raises(ConfigError, match=r'hooks.before: no tool is named "zzz"; there are: bash, read'):
        place.load().check_tools(["read", "bash"])


# Trust


@pytest.mark.parametrize(
    "text",
    [
        'tools.allow = ["bash"]',
        '[[hooks.before]]\ncommand = ["curl", "example.org"]',
        'hooks.after = [{ command = ["true"] }]',
        'store = "/elsewhere"',
        'model = "models/evil.gguf"',
        'model = "hf:owner/repo/file"',
        'model = "at-hand"',
        'cache.folder = "/elsewhere"',
        'cache.folder = "auto"',
        "cache.disk = true",
        "cache.disk_mb = 100000",
        'cache.disk_mb = "auto"',
        "[[modes]]\nname = 'plan'\nguidance = 'Go.'\ntools = ['bash']",
        'mode = "default"',
    ],
)
def test_a_workspace_file_that_reaches_out_is_refused_until_it_is_trusted(place: Place, text: str) -> None:
    (place.workspace / "at-hand").write_text("a model file that came with the repository")
    message = place.refusal(text)
    assert message.startswith("chapbook.toml comes with the workspace")
    assert "chapbook config trust" in message
    assert "--no-workspace-config" in message
    assert text.partition(" = ")[0].strip("[]").partition("]")[0] in message

    shown = trust_workspace_file(workspace=place.workspace, user_file=place.user_file)
    assert len(shown) == 1
    place.load()


def test_what_reaches_nothing_needs_no_trust(place: Place) -> None:
    place.workspace_file.write_text(
        'model = "smollm2"\ninstructions = "docs/RULES.md"\ntools = { allow = [], deny = ["bash"] }\nturn.rounds = 64\n'
        "cache = { disk = false, disk_mb = 0, memory_mb = 64 }\nmode = 'plan'\nplan.holder = 'reviewer'\n"
    )
    assert place.load().config.model == "smollm2"


def test_trust_ends_with_any_change_of_the_file(place: Place) -> None:
    place.workspace_file.write_text('tools.allow = ["read"]\n')
    trust_workspace_file(workspace=place.workspace, user_file=place.user_file)
    assert place.load().config.tools.allow == ("read",)
    assert "comes with the workspace" in place.refusal('tools.allow = ["read", "bash"]\n')


def test_trust_in_one_workspace_is_not_trust_in_a_copy_of_it(place: Place, tmp_path: Path) -> None:
    place.workspace_file.write_text('tools.allow = ["read"]\n')
    trust_workspace_file(workspace=place.workspace, user_file=place.user_file)
    copy = tmp_path / "copy"
    copy.mkdir()
    (copy / "chapbook.toml").write_bytes(place.workspace_file.read_bytes())
    with pytest.raises(ConfigError, match="comes with the workspace"):
        load_config(workspace=copy, user_file=place.user_file, flags={})


def test_the_user_and_a_flag_are_trusted_as_they_are(place: Place) -> None:
    place.user_file.write_text('store = "/elsewhere"\ntools.allow = ["bash"]\n')
    assert place.load(model="./x.gguf").config.tools.allow == ("bash",)


def test_trusting_a_file_that_is_not_there_or_is_wrong_is_refused(place: Place) -> None:
    with pytest.raises(ConfigError, match=r"there is no .*chapbook.toml to trust"):
        trust_workspace_file(workspace=place.workspace, user_file=place.user_file)
    place.workspace_file.write_text("hoks.before = []")
    with pytest.raises(ConfigError, match="no such key"):
        trust_workspace_file(workspace=place.workspace, user_file=place.user_file)


# Bad input


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("n_ctx = 1", "chapbook.toml:1: n_ctx: there is no such key; did you mean `engine.n_ctx`?"),
        ("[turn]\n\nroundz = 3", "chapbook.toml:3: turn.roundz: there is no such key; did you mean `turn.rounds`?"),
        ("[engin]\nx = 1", "chapbook.toml:1: engin: there is no such key; did you mean `engine`?"),
        ("qqqq = 1", "chapbook.toml:1: qqqq: there is no such key; `chapbook config --no-workspace-config` lists them"),
        ("engine = 5", "chapbook.toml:1: engine: expected a table, [engine], found 5"),
        ("turn.rounds = 65", "chapbook.toml:1: turn.rounds: expected a whole number from 1 to 64, found 65"),
        ("turn.rounds = '8'", 'chapbook.toml:1: turn.rounds: expected a whole number from 1 to 64, found "8"'),
        ("turn.rounds = true", "chapbook.toml:1: turn.rounds: expected a whole number from 1 to 64, found true"),
        ("sampling.top_p = nan", 'chapbook.toml:1: sampling.top_p: expected a number from 0 to 1 or "auto", found nan'),
        ("template = 'x'", 'chapbook.toml:1: template: expected "chatml" or "auto", found "x"'),
        ("model = ''", 'chapbook.toml:1: model: expected a text that is not empty or "auto", found ""'),
        (
            "cache.memory_mb = -1",
            'chapbook.toml:1: cache.memory_mb: expected a whole number from 0 to 100,000,000 or "auto", found -1',
        ),
        (
            "[[modes]]\nname = 'a'\nguidance = 'x'",
            "chapbook.toml:1: modes: expected a list of tables with `name`, `guidance` and `tools` (Object missing "
            'required field `tools` - at `$[0]`), found [{"name":"a","guidance":"x"}]',
        ),
        (
            "turn.rounds = 3\n[[modes]]\nname = 'default'\nguidance = 'x'\ntools = []",
            "chapbook.toml:2: modes: modes.default: default is the absence of a mode, so it has no definition; rename "
            "yours",
        ),
        (
            "[[modes]]\nname = 'a'\nguidance = 'x'\ntools = []\n[[modes]]\nname = 'a'\nguidance = 'y'\ntools = []",
            "chapbook.toml:1: modes: modes.a is defined twice; keep one of them",
        ),
        ("cache.rest_s = 3601", "chapbook.toml:1: cache.rest_s: expected a number from 0 to 3,600, found 3601"),
        ("store = 1979-05-27", 'chapbook.toml:1: store: expected a text that is not empty, found "1979-05-27"'),
        (
            "instructions = '../x.md'",
            'chapbook.toml:1: instructions: expected a relative path inside the workspace, found "../x.md"',
        ),
        (
            "[[hooks.before]]\ncomand = ['x']",
            "chapbook.toml:1: hooks.before: expected a list of tables with `command`, and if wanted `tools` and "
            '`timeout_s` (Object contains unknown field `comand` - at `$[0]`), found [{"comand":["x"]}]',
        ),
    ],
)  # fmt: skip
def test_a_bad_file_is_refused_with_the_place_and_what_was_expected(place: Place, text: str, message: str) -> None:
    assert place.refusal(text) == message


@pytest.mark.parametrize(
    ("text", "place_of_error"),
    [("a = [1,\n2", "2"), ("[turn]\nrounds 5\n", "2:8"), ("turn.rounds = 1\nturn.rounds = 2\n", "2:16")],
)
def test_a_syntax_error_names_its_line_and_column(place: Place, text: str, place_of_error: str) -> None:
    assert place.refusal(text).startswith(f"chapbook.toml:{place_of_error}: ")


def test_a_bad_flag_is_refused_too(place: Place) -> None:
    with pytest.raises(ConfigError, match=r"command line: turn.roundz: there is no such key.*`turn.rounds`") as caught:
        place.load(turn__roundz=1)
    assert (caught.value.key, caught.value.nearest) == ("turn.roundz", "turn.rounds")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"model = 'x'\n\xff\xfe", "chapbook.toml:2: not UTF-8 text"),
        (b"#" * 1_000_001, "chapbook.toml is over 1,000,000 bytes"),
        (b"x = " + b"[" * 100_000, "chapbook.toml: nested too deeply"),
    ],
)
def test_a_file_that_is_no_configuration_is_refused(place: Place, content: bytes, message: str) -> None:
    place.workspace_file.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        place.load()
    assert message in str(caught.value)


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo], ids=["folder", "pipe"])
def test_a_workspace_file_that_is_no_file_is_refused_at_once(place: Place, make: Callable[[Path], None]) -> None:
    make(place.workspace_file)
    with pytest.raises(ConfigError, match=r"chapbook.toml is not a file"):
        place.load()


def test_an_unreadable_file_is_refused(place: Place) -> None:
    place.user_file.write_text("model = 'x'")
    place.user_file.chmod(0)
    # Root may read all: the load runs as another user where this is root.
    program = (
        "import os, sys; from pathlib import Path; from chapbook.runtime.config import load_config\n"
        "from chapbook.kernels.errors import ConfigError\n"
        "user_file = Path(sys.argv[1])\n"
        "os.geteuid() or os.seteuid(65534)\n"
        "try: load_config(workspace=None, user_file=user_file, flags={})\n"
        "except ConfigError as error: print(error)\n"
    )
    run = subprocess.run([sys.executable, "-c", program, place.user_file], capture_output=True, text=True, check=True)
    assert "cannot be read: Permission denied" in run.stdout


def test_a_byte_order_mark_and_windows_line_ends_are_fine(place: Place) -> None:
    place.workspace_file.write_bytes(b"\xef\xbb\xbf[turn]\r\nrounds = 7\r\n")
    assert place.load().config.turn.rounds == 7


tables = st.recursive(
    st.one_of(st.integers(), st.floats(), st.text(), st.booleans(), st.dates()),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=5), inner, max_size=3)),
    max_leaves=5,
)


def refusal_of(*, user_file: Path, flags: Mapping[str, object]) -> str | None:
    """Return the refusal's message, None where all was accepted; then it must encode."""
    try:
        loaded = load_config(workspace=None, user_file=user_file, flags=flags)
    except ConfigError as error:
        return str(error)
    msgspec.json.encode(loaded.rows())
    return None


@given(name=st.one_of(st.sampled_from([*known_keys(), *known_sections()]), st.text(max_size=20)), value=tables)
def test_any_flag_loads_or_is_a_config_error(name: str, value: object) -> None:
    message = refusal_of(user_file=Path("/nonexistent/config.toml"), flags={name: value})
    assert name in known_keys() if message is None else f"command line: {name}: " in message


@given(content=st.one_of(st.binary(max_size=60), st.text(alphabet="[]{}=.,\"'#\n amodeltrunsg1", max_size=60)))
def test_any_file_loads_or_is_a_config_error(tmp_path_factory: pytest.TempPathFactory, content: bytes | str) -> None:
    file = tmp_path_factory.getbasetemp() / "any.toml"
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    message = refusal_of(user_file=file, flags={})
    assert message is None or message.startswith(str(file))


# Flags and places


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("engine.n_ctx=4096", {"engine.n_ctx": 4096}),
        ('tools.deny=["bash"]', {"tools.deny": ["bash"]}),
        ("engine.flash_attn = true", {"engine.flash_attn": True}),
        ("model=smollm2", {"model": "smollm2"}),
        ("model=a=b", {"model": "a=b"}),
    ],
)
def test_a_set_flag_takes_toml_or_plain_text(text: str, expected: dict[str, object]) -> None:
    assert parse_flag(text) == expected


def test_a_set_flag_without_a_value_is_refused() -> None:
    with pytest.raises(ConfigError, match="expected key=value"):
        parse_flag("engine.n_ctx")


def test_the_users_file_is_named_by_the_environment_or_the_platform(tmp_path: Path) -> None:
    mine = tmp_path / "mine.toml"
    with pytest.raises(ConfigError, match=r"CHAPBOOK_CONFIG names .*mine.toml, which does not exist"):
        user_config_file({"CHAPBOOK_CONFIG": str(mine)})
    mine.write_text("")
    assert user_config_file({"CHAPBOOK_CONFIG": str(mine)}) == mine
    assert user_config_file({}).parts[-2:] == ("chapbook", "config.toml")


# Documentation


def documented_keys() -> dict[str, tuple[str, str]]:
    rows = [line.split(" | ") for line in DOCUMENTATION.read_text().splitlines() if line.startswith("| `")]
    return {row[0].strip("| `"): (row[1], row[2]) for row in rows}


def test_the_documentation_has_every_key_with_its_values_and_default() -> None:
    def written(default: object) -> str:
        return "auto" if default is None else msgspec.json.encode(default).decode()

    assert documented_keys() == {name: (key.expected, written(key.default)) for name, key in known_keys().items()}


def test_what_needs_trust_is_shown_whole_whatever_its_length(
    tmp_path: Path,
) -> None:
    guidance = "Answer briefly. " * 40
    (tmp_path / "chapbook.toml").write_text(
        f'[[modes]]\nname = "reading"\nguidance = "{guidance}"\ntools = ["read", "bash"]\n'
    )
    with pytest.raises(ConfigError) as refused:
        load_config(workspace=tmp_path, user_file=tmp_path / "none" / "config.toml", flags={})
    assert '"tools":["read","bash"]' in str(refused.value)
