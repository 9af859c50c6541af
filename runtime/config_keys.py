"""Every configuration key: its type, its bounds and its default, in one typed value.

A key's name is the path to its field (`engine.n_ctx`). A field that is None is decided when the session opens; the
text "auto" sets it back to that. `docs/config.md` explains each key, and a test compares it with this module.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Mapping
from pathlib import PurePath
from typing import Annotated, Any, Literal, TypeAlias, get_type_hints

import msgspec
from msgspec import Meta, inspect

from .engine import Sampling
from .modes import DEFAULT_MODE, Mode, ModeName
from .tools.spec import Policy

KvType: TypeAlias = Literal["f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl"]
DialectName: TypeAlias = Literal[
    "hermes", "llama3", "mistral", "mistral-args", "qwen-xml", "pythonic", "pythonic-bare", "harmony"
]
Text: TypeAlias = Annotated[str, Meta(min_length=1)]
ToolName: TypeAlias = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_.-]+$")]

AUTO = "auto"
MOST_SHOWN = 80


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """How llama.cpp holds the model."""

    n_ctx: Annotated[int, Meta(ge=128, le=16_777_216)] | None = None
    n_gpu_layers: Annotated[int, Meta(ge=-1, le=10_000)] | None = None
    n_threads: Annotated[int, Meta(ge=1, le=1024)] | None = None
    n_batch: Annotated[int, Meta(ge=1, le=65_536)] | None = None
    n_ubatch: Annotated[int, Meta(ge=1, le=65_536)] | None = None
    type_k: KvType | None = None
    type_v: KvType | None = None
    flash_attn: bool | None = None
    openmp_spin: Annotated[int, Meta(ge=0, le=1_000_000_000)] = 1000


class SamplingConfig(msgspec.Struct, frozen=True, kw_only=True):
    """How a token is chosen. What is None is taken from the model's file, else from the runtime's defaults."""

    temperature: Annotated[float, Meta(ge=0, le=10)] | None = None
    top_k: Annotated[int, Meta(ge=0, le=1_000_000)] | None = None
    top_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    repeat_penalty: Annotated[float, Meta(gt=0, le=10)] | None = None
    repeat_last_n: Annotated[int, Meta(ge=0, le=1_000_000)] | None = None
    seed: Annotated[int, Meta(ge=0, le=4_294_967_294)] | None = None
    max_reply_tokens: Annotated[int, Meta(ge=1, le=16_777_216)] | None = None

    def over(self, base: Sampling) -> Sampling:
        """Return `base` with the values that are set here."""
        named = {name: getattr(self, name) for name in base.__struct_fields__}
        return msgspec.structs.replace(base, **{name: value for name, value in named.items() if value is not None})


class TurnConfig(msgspec.Struct, frozen=True, kw_only=True):
    """How far a turn may go."""

    rounds: Annotated[int, Meta(ge=1, le=64)] = 24
    continuations: Annotated[int, Meta(ge=0, le=10)] = 3


class ToolsConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Policies by tool name. After loading, a tool is in one of the three lists at most."""

    allow: tuple[ToolName, ...] = ()
    ask: tuple[ToolName, ...] = ()
    deny: tuple[ToolName, ...] = ()
    bash_timeout_s: Annotated[float, Meta(ge=1, le=600)] = 120.0
    task: bool = False

    def policies(self) -> dict[str, Policy]:
        """Return the policy of each tool that is named here and in force; every other tool keeps its own."""
        named = ((Policy.ALLOW, self.allow), (Policy.ASK, self.ask), (Policy.DENY, self.deny))
        return {tool: policy for policy, tools in named for tool in tools if self.task or tool != "task"}


class PlanConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Whose ledger of steps it is, where several work in one workspace; None: the workspace's own."""

    holder: Text | None = None


class ModeTable(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A mode: what the model is told when it comes into force, and the tools that it may call then."""

    name: ToolName
    guidance: Text
    tools: tuple[ToolName, ...]

    def mode(self) -> Mode:
        """Return it as a session takes it."""
        return Mode(name=ModeName(self.name), guidance=self.guidance, allowed=self.tools)


class CacheConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What is kept of evaluated tokens besides the window in use. A budget of None derives from what is free."""

    memory_mb: Annotated[int, Meta(ge=0, le=100_000_000)] | None = None
    disk_mb: Annotated[int, Meta(ge=0, le=100_000_000)] | None = None
    folder: Text | None = None
    disk: bool = True
    rest_s: Annotated[float, Meta(ge=0, le=3600)] = 0.5


class HookCommand(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A program run around tool calls, without a shell. Without `tools` it is run for every tool."""

    command: Annotated[tuple[Text, ...], Meta(min_length=1)]
    tools: tuple[ToolName, ...] = ()
    timeout_s: Annotated[float, Meta(gt=0, le=600)] = 10.0


class HooksConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Programs run before a tool call (they may deny it) and after one (they may add to what the model reads)."""

    before: tuple[HookCommand, ...] = ()
    after: tuple[HookCommand, ...] = ()


class Config(msgspec.Struct, frozen=True, kw_only=True):
    """The whole configuration."""

    model: Text | None = None
    store: Text = ".chapbook"
    instructions: Text = "AGENTS.md"
    dialect: DialectName | None = None
    template: Literal["chatml"] | None = None
    arrival_tokens: Annotated[int, Meta(ge=256, le=16_777_216)] | None = None
    mode: ToolName = DEFAULT_MODE
    modes: tuple[ModeTable, ...] = ()
    engine: EngineConfig = EngineConfig()
    sampling: SamplingConfig = SamplingConfig()
    turn: TurnConfig = TurnConfig()
    tools: ToolsConfig = ToolsConfig()
    plan: PlanConfig = PlanConfig()
    cache: CacheConfig = CacheConfig()
    hooks: HooksConfig = HooksConfig()

    def session_modes(self) -> tuple[Mode, ...]:
        """Return the configured modes; `task` counts only where there is that tool."""
        modes = (table.mode() for table in self.modes)
        if self.tools.task:
            return tuple(modes)
        return tuple(
            msgspec.structs.replace(mode, allowed=tuple(tool for tool in mode.allowed if tool != "task"))
            for mode in modes
        )


class Key(msgspec.Struct, frozen=True, kw_only=True):
    """One key. `expected` says in words which values fit."""

    name: str
    annotation: Any
    default: Any
    optional: bool
    expected: str


_IN_OTHER_WORDS = {
    "instructions": "a relative path inside the workspace",
    "mode": "the name of a mode",
    "modes": "a list of tables with `name`, `guidance` and `tools`",
}


@functools.cache
def known_keys() -> Mapping[str, Key]:
    """Return every key by its dotted name, in the order of `Config`."""
    keys: dict[str, Key] = {}
    for name, annotation in get_type_hints(Config, include_extras=True).items():
        default = getattr(Config(), name)
        if not isinstance(default, msgspec.Struct):
            keys[name] = _key(name, annotation, default)
            continue
        for field, inner in get_type_hints(annotation, include_extras=True).items():
            keys[f"{name}.{field}"] = _key(f"{name}.{field}", inner, getattr(default, field))
    return types.MappingProxyType(keys)


def known_sections() -> frozenset[str]:
    """Return the names of the tables that hold keys."""
    return frozenset(name.partition(".")[0] for name in known_keys() if "." in name)


def _key(name: str, annotation: Any, default: Any) -> Key:
    described = inspect.type_info(annotation)
    optional = isinstance(described, inspect.UnionType) and described.includes_none
    expected = _IN_OTHER_WORDS.get(name) or _in_words(described)
    return Key(name=name, annotation=annotation, default=default, optional=optional, expected=expected)


def read_value(key: Key, value: object) -> Any:
    """Return a raw value (as TOML or a flag gives it) as the key's type. Raises ValueError with what was expected."""
    if key.optional and value == AUTO:
        return None
    try:
        read = msgspec.convert(value, key.annotation)
    except msgspec.ValidationError as error:
        inside = f" ({error})" if "$" in str(error) else ""
        raise ValueError(f"expected {key.expected}{inside}, found {shown(value)}") from None
    if key.name == "instructions" and not _lies_inside(read):
        raise ValueError(f"expected {key.expected}, found {shown(value)}")
    return read


def _lies_inside(path: str) -> bool:
    return not PurePath(path).is_absolute() and ".." not in PurePath(path).parts


def shown(value: object) -> str:
    """Return a value as TOML would write it, shortened where it is long."""
    text = shown_whole(value)
    return text if len(text) <= MOST_SHOWN else f"{text[:MOST_SHOWN]}..."


def shown_whole(value: object) -> str:
    """Return a value as TOML would write it, however long: where a person is to agree to it."""
    value = AUTO if value is None else value
    return msgspec.json.encode(value, enc_hook=str).decode() if not isinstance(value, float) else str(value)


def build_config(values: Mapping[str, Any]) -> Config:
    """Return the configuration with these values by dotted name; a key that is not named has its default."""
    top = {name: value for name, value in values.items() if "." not in name}
    for section in known_sections():
        fields = {name.partition(".")[2]: value for name, value in values.items() if name.startswith(f"{section}.")}
        top[section] = msgspec.structs.replace(getattr(Config(), section), **fields)
    return Config(**top)


def _in_words(described: inspect.Type) -> str:
    """Say which values fit a type."""
    words = "a text that is not empty"
    match described:
        case inspect.Metadata(type=inner):
            words = _in_words(inner)
        case inspect.UnionType(types=members):
            named = [_in_words(member) for member in members if not isinstance(member, inspect.NoneType)]
            words = " or ".join([*named, f'"{AUTO}"'])
        case inspect.LiteralType(values=values):
            words = ("one of " if len(values) > 1 else "") + ", ".join(f'"{value}"' for value in values)
        case inspect.IntType() | inspect.FloatType():
            words = _number_in_words(described)
        case inspect.BoolType():
            words = "true or false"
        case inspect.VarTupleType(item_type=inspect.StructType()):
            words = "a list of tables with `command`, and if wanted `tools` and `timeout_s`"
        case inspect.VarTupleType():
            words = "a list of tool names"
    return words


def _number_in_words(described: inspect.IntType | inspect.FloatType) -> str:
    kind = "a whole number" if isinstance(described, inspect.IntType) else "a number"
    if described.gt is not None:
        return f"{kind} above {described.gt:,} and up to {described.le:,}"
    return f"{kind} from {described.ge:,} to {described.le:,}"
