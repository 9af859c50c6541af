"""Configuration from three layers: the user's file, the workspace's `chapbook.toml` over it, flags over both.

Three kinds of key add up instead of replacing. Hooks of both files run, the user's first. Tool policies of the two
files meet in the stricter one (deny, then ask, then allow), so that a workspace cannot loosen what the user has
forbidden; a flag decides over both. Modes of all layers are there, a later one in place of an earlier of its name.
"""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from ..kernels.errors import ConfigError, UsageError
from .config_keys import Config, ModeTable, build_config, known_keys, known_sections, read_value, shown, shown_whole
from .config_trust import is_trusted, needs_trust, record_trust
from .modes import PLAN_TOOLS, Modes

WORKSPACE_FILE = "chapbook.toml"
MOST_BYTES = 1_000_000
POLICY_KEYS = ("tools.allow", "tools.ask", "tools.deny")
"""From the loosest to the strictest."""
HOOK_KEYS = ("hooks.before", "hooks.after")
MODES_KEY = "modes"


class Setting(msgspec.Struct, frozen=True, kw_only=True):
    """One key as one layer sets it: a file (`line` counts from 1), or a flag, which has none."""

    key: str
    value: Any
    file: Path | None = None
    line: int | None = None

    @property
    def origin(self) -> str:
        """Where it was set, as a person reads it: `chapbook.toml:3`, `command line`."""
        if self.file is None:
            return "command line"
        return f"{self.file}:{self.line}" if self.line else str(self.file)


class ConfigRow(msgspec.Struct, frozen=True, kw_only=True):
    """A line of `chapbook config`: a key, its value (plain data), and all that contributed to it."""

    key: str
    value: Any
    origins: tuple[str, ...]


class LoadedConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The configuration in force. `settings` holds, for each key that was set, those settings that made its value."""

    config: Config
    settings: Mapping[str, tuple[Setting, ...]]

    def rows(self) -> tuple[ConfigRow, ...]:
        """Return every key with its value and where it came from, in the order of the documentation."""
        return tuple(self._row(name) for name in known_keys())

    def _row(self, name: str) -> ConfigRow:
        value: Any = self.config
        for part in name.split("."):
            value = getattr(value, part)
        origins = tuple(setting.origin for setting in self.settings.get(name, ())) or ("default",)
        return ConfigRow(key=name, value=msgspec.to_builtins(value), origins=origins)

    def check_tools(self, known: Collection[str]) -> None:
        """Refuse a tool name that no tool has: a misspelt `deny` would protect nothing. Raises ConfigError."""
        for name in (*POLICY_KEYS, *HOOK_KEYS, MODES_KEY):
            reserved = PLAN_TOOLS if name == MODES_KEY else ()
            for setting in self.settings.get(name, ()):
                for tool in _tools_named(setting):
                    if tool not in known and tool not in reserved:
                        near = _closest(tool, known)
                        hint = f"; did you mean `{near}`?" if near else f"; there are: {', '.join(sorted(known))}"
                        raise _refusal(setting, f"no tool is named {shown(tool)}{hint}", nearest=near)


def user_config_file(environment: Mapping[str, str]) -> Path:
    """Return the user's configuration file: CHAPBOOK_CONFIG, which must exist, else the platform's place for it."""
    if named := environment.get("CHAPBOOK_CONFIG"):
        if not Path(named).exists():
            raise ConfigError(f"CHAPBOOK_CONFIG names {named}, which does not exist", source="CHAPBOOK_CONFIG")
        return Path(named).absolute()
    import platformdirs  # noqa: PLC0415  only the command line needs it

    return platformdirs.user_config_path("chapbook") / "config.toml"


def load_config(*, workspace: Path | None, user_file: Path, flags: Mapping[str, object]) -> LoadedConfig:
    """Return the configuration in force in `workspace`; None leaves out the workspace's file.

    `flags` maps dotted names to raw values; a value of None is a flag that was not given. Raises ConfigError for an
    unknown key (with the nearest known one), a value that does not fit, a file that cannot be read, and for settings
    of a workspace file that need the user's trust and do not have it.
    """
    files = [_file_settings(user_file, _read_file(user_file))]
    if workspace is not None:
        file = workspace / WORKSPACE_FILE
        content = _read_file(file)
        settings = _file_settings(file, content)
        if not is_trusted(file, content, user_file=user_file):
            _refuse_untrusted(settings, workspace=workspace)
        files.append(settings)
    loaded = _merge([*files, _flag_settings(flags)])
    _refuse_unknown_mode(loaded)
    return loaded


def trust_workspace_file(*, workspace: Path, user_file: Path) -> tuple[Setting, ...]:
    """Trust the workspace's file as it is now; return the settings that needed it, to be shown to the user.

    A program that a hook starts from the workspace is not part of the file: it is trusted as it is when it runs.
    """
    file = workspace / WORKSPACE_FILE
    if not file.exists():
        raise ConfigError(f"there is no {file} to trust", source=str(file))
    content = _read_file(file)
    settings = _file_settings(file, content)
    try:
        record_trust(file, content, user_file=user_file)
    except OSError as error:
        raise ConfigError(f"the trust in {file} cannot be recorded: {error}", source=str(file)) from None
    return tuple(each for each in settings.values() if needs_trust(each.key, each.value, workspace=workspace))


def parse_flag(text: str) -> dict[str, object]:
    """Take `key=value` apart, the value as TOML writes it, or as plain text where it is not TOML."""
    name, equals, value = text.partition("=")
    if not equals:
        raise ConfigError(f"expected key=value, found {shown(text)}", source="command line")
    try:
        return {name.strip(): tomllib.loads(f"value = {value}")["value"]}
    except (ValueError, RecursionError):
        return {name.strip(): value.strip()}


# One layer


def _read_file(file: Path) -> bytes:
    """Return a file's content, nothing where there is no file."""
    try:
        if not file.exists():
            return b""
        if not file.is_file():
            raise ConfigError(f"{file} is not a file", source=str(file))
        with file.open("rb") as opened:
            content = opened.read(MOST_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}", source=str(file)) from None
    if len(content) > MOST_BYTES:
        raise ConfigError(f"{file} is over {MOST_BYTES:,} bytes: this is no configuration", source=str(file))
    return content


def _file_settings(file: Path, content: bytes) -> dict[str, Setting]:
    try:
        text = content.decode("utf-8-sig")
        document = tomllib.loads(text)
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise ConfigError(f"{file}:{line}: not UTF-8 text ({error.reason})", source=str(file)) from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(_syntax_message(file, content, str(error)), source=str(file)) from None
    except RecursionError:
        raise ConfigError(f"{file}: nested too deeply", source=str(file)) from None
    except ValueError as error:  # a number of thousands of digits
        raise ConfigError(f"{file}: {error}", source=str(file)) from None
    found = {
        name: Setting(key=name, value=value, file=file, line=_line_of(name, text)) for name, value in _flatten(document)
    }
    return _checked(found)


def _flag_settings(flags: Mapping[str, object]) -> dict[str, Setting]:
    given = {name: value for name, value in flags.items() if value is not None}
    return _checked({name: Setting(key=name, value=value) for name, value in given.items()})


def _flatten(document: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield dotted names and raw values, one level deep into the known tables and no further."""
    for name, value in document.items():
        if name in known_sections() and isinstance(value, dict):
            for inner, leaf in value.items():
                yield f"{name}.{inner}", leaf
        else:
            yield name, value


def _checked(found: Mapping[str, Setting]) -> dict[str, Setting]:
    """Return the settings with their values read, or refuse the first that does not fit."""
    checked: dict[str, Setting] = {}
    for name, setting in found.items():
        key = known_keys().get(name)
        if key is None:
            raise _unknown(setting)
        try:
            checked[name] = msgspec.structs.replace(setting, value=read_value(key, setting.value))
        except ValueError as error:
            raise _refusal(setting, str(error)) from None
    _refuse_contradiction(checked)
    if MODES_KEY in checked:
        _refuse_bad_modes(checked[MODES_KEY])
    return checked


def _refuse_contradiction(settings: Mapping[str, Setting]) -> None:
    """A tool must not stand in two policies of one layer."""
    first: dict[str, str] = {}
    for name in POLICY_KEYS:
        for tool in settings[name].value if name in settings else ():
            if first.setdefault(tool, name) != name:
                raise _refusal(settings[name], f"`{tool}` is in {first[tool]} too; keep it in one")


def _refuse_bad_modes(setting: Setting) -> None:
    """A mode must have a name of its own, and guidance within its bound. Its tools are looked at with all others."""
    try:
        Modes([table.mode() for table in setting.value], known_tools=_tools_of_modes(setting.value))
    except ConfigError as error:
        raise _refusal(setting, str(error)) from None


def _refuse_unknown_mode(loaded: LoadedConfig) -> None:
    """The mode in which a session begins must be there."""
    modes = Modes([table.mode() for table in loaded.config.modes], known_tools=_tools_of_modes(loaded.config.modes))
    try:
        modes.named(loaded.config.mode)
    except UsageError as error:
        raise _refusal(loaded.settings["mode"][-1], str(error)) from None


def _refuse_untrusted(settings: Mapping[str, Setting], *, workspace: Path) -> None:
    wanting = [each for each in settings.values() if needs_trust(each.key, each.value, workspace=workspace)]
    if wanting:
        listed = "\n".join(f"  {each.origin}: {each.key} = {shown_whole(each.value)}" for each in wanting)
        raise ConfigError(
            f"{wanting[0].file} comes with the workspace and sets what may run programs, permit tools, or read and "
            f"write elsewhere:\n{listed}\nIf you have read it and agree: chapbook config trust. "
            "Without it: take these lines out, or leave the file out with --no-workspace-config.",
            key=wanting[0].key,
            source=wanting[0].origin,
        )


# Layers together


def _merge(layers: list[dict[str, Setting]]) -> LoadedConfig:
    """Return the configuration of the layers, the strongest last."""
    settings: dict[str, tuple[Setting, ...]] = {}
    for layer in layers:
        for name, setting in layer.items():
            adds_up = name in HOOK_KEYS or name in POLICY_KEYS or name == MODES_KEY
            settings[name] = (*settings.get(name, ()), setting) if adds_up else (setting,)
    values: dict[str, Any] = {name: each[-1].value for name, each in settings.items()}
    for name in HOOK_KEYS:
        values[name] = tuple(hook for setting in settings.get(name, ()) for hook in setting.value)
    by_name = {table.name: table for setting in settings.get(MODES_KEY, ()) for table in setting.value}
    values[MODES_KEY] = tuple(by_name.values())
    return LoadedConfig(config=build_config({**values, **_policies(layers)}), settings=settings)


def _policies(layers: list[dict[str, Setting]]) -> dict[str, tuple[str, ...]]:
    """Return each policy's tools: the stricter of the two files, and over them what a flag says."""
    *files, flags = layers
    policy_of: dict[str, str] = {}
    for name in POLICY_KEYS:  # a later, stricter one replaces
        for file in files:
            policy_of.update(dict.fromkeys(file[name].value if name in file else (), name))
    for name in POLICY_KEYS:
        policy_of.update(dict.fromkeys(flags[name].value if name in flags else (), name))
    return {name: tuple(sorted(tool for tool, policy in policy_of.items() if policy == name)) for name in POLICY_KEYS}


# Refusals


def _refusal(setting: Setting, problem: str, *, nearest: str = "") -> ConfigError:
    message = f"{setting.origin}: {setting.key}: {problem}"
    return ConfigError(message, key=setting.key, source=setting.origin, nearest=nearest)


def _unknown(setting: Setting) -> ConfigError:
    if setting.key in known_sections():
        return _refusal(setting, f"expected a table, [{setting.key}], found {shown(setting.value)}")
    leaf = setting.key.rpartition(".")[2]
    elsewhere = [name for name in known_keys() if name.rpartition(".")[2] == leaf]
    near = elsewhere[0] if elsewhere else _closest(setting.key, [*known_keys(), *known_sections()])
    hint = f"did you mean `{near}`?" if near else "`chapbook config --no-workspace-config` lists them"
    return _refusal(setting, f"there is no such key; {hint}", nearest=near)


def _closest(name: str, candidates: Collection[str]) -> str:
    return next(iter(difflib.get_close_matches(name, sorted(candidates), n=1)), "")


def _tools_named(setting: Setting) -> tuple[str, ...]:
    if setting.key in POLICY_KEYS:
        return tuple(setting.value)
    if setting.key == MODES_KEY:
        return _tools_of_modes(setting.value)
    return tuple(tool for hook in setting.value for tool in hook.tools)


def _tools_of_modes(tables: Iterable[ModeTable]) -> tuple[str, ...]:
    return tuple(tool for table in tables for tool in table.tools)


def _syntax_message(file: Path, content: bytes, problem: str) -> str:
    place = re.search(r" \(at line (\d+), column (\d+)\)$", problem)
    if place:
        return f"{file}:{place[1]}:{place[2]}: {problem[: place.start()]}"
    last_line = content.count(b"\n") + 1
    return f"{file}:{last_line}: {problem}"


def _line_of(name: str, text: str) -> int | None:
    """Return the line that sets a key, or the header that comes closest. tomllib does not say; this reads the text.

    Good for a message, not for judging: a multi-line text that looks like an assignment can mislead it.
    """
    table, best_line, best_length = "", None, 0
    for number, line in enumerate(text.splitlines(), start=1):
        header = re.match(r"\s*\[\[?([^\]]+)\]", line)
        assigned = re.match(r"\s*([\w\-.\"' ]+?)\s*=", line)
        if header:
            path = table = _bare(header[1])
        elif assigned:
            path = ".".join(filter(None, (table, _bare(assigned[1]))))
        else:
            continue
        # An assignment inside [[hooks.before]] is part of the key, `engine = {...}` holds it.
        related = f"{name}.".startswith(f"{path}.") or path.startswith(f"{name}.")
        common_length = min(len(path), len(name)) if related else 0
        if common_length > best_length:
            best_line, best_length = number, common_length
    return best_line


def _bare(name: str) -> str:
    """Return a TOML name without its quotes and blanks."""
    return re.sub(r"[\"'\s]", "", name)
