"""From a tool's JSON schema to grammar rules for its values, in JSON or in another literal notation.

A grammar allows a subset of what the schema allows, in one spelling: what it lets through parses, and passes the
check but for the bounds that a grammar cannot express (see `schema`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..kernels.errors import UsageError
from .calls import CallableTool
from .grammar import SPACE, Member, RuleBook, TrieEntry, arrange, either, integer_between, literal, repeat, trie
from .schema import (
    MAX_GROUNDED_VALUES,
    Schema,
    branches,
    choices,
    integer_bounds,
    item_schema,
    refer,
    resolve,
    type_of,
    value_schema,
)

MAX_FREE_DEPTH = 4
"""How deep a value without a schema may nest: a model that opens brackets must come to an end."""

_SURROGATE = re.compile("[\ud800-\udfff]")
_COMMA = f'"," {SPACE}'


@dataclass(frozen=True, slots=True, kw_only=True)
class LiteralForm:
    """How values are spelled. `characters` maps a quote to the GBNF of one character between two of it.

    `spell` returns every spelling of a constant that the grammar should allow.
    """

    true: str
    false: str
    null: str
    characters: Mapping[str, str]
    spell: Callable[[Any], tuple[str, ...]]


_ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False)


def json_text(value: Any) -> str:
    """Return `value` as JSON in one line, the way models write it. Raises ValueError for NaN and infinities."""
    return _ENCODER.encode(value)


_HEX = "[0-9a-fA-F]"
# A code point, or a whole surrogate pair: half of one is a text that cannot be stored.
_UNICODE_ESCAPE = (
    rf'"u" ([0-9a-cA-CefEF] {_HEX}{{3}} | [dD] [0-7] {_HEX}{{2}}'
    rf' | [dD] [89abAB] {_HEX}{{2}} "\\u" [dD] [c-fC-F] {_HEX}{{2}})'
)

JSON_FORM = LiteralForm(
    true="true",
    false="false",
    null="null",
    characters={'"': rf'[^"\\\x00-\x1F] | "\\" (["\\/bfnrt] | {_UNICODE_ESCAPE})'},
    spell=lambda value: (json_text(value),),
)


def usable_values(values: Sequence[str] | None) -> tuple[str, ...]:
    """Return the known values that the grammar can offer: none where there are too many, or no text of UTF-8."""
    if values is None or len(values) > MAX_GROUNDED_VALUES:
        return ()
    return tuple(value for value in values if value.isascii() or not _SURROGATE.search(value))


@dataclass(slots=True)
class SchemaRules:
    """Writes the rules of one schema document into a rule book. `root` is what its references point into."""

    rules: RuleBook
    root: Schema
    form: LiteralForm = JSON_FORM
    _by_reference: dict[tuple[str, tuple[str, ...] | None], str] = field(default_factory=dict)

    def value(self, schema: Any, *, known: Sequence[str] | None = None) -> str:
        """Return a reference to the rule of a value. Its strings are among `known`, where those can be offered.

        Raises UsageError where the schema cannot be read or allows nothing.
        """
        if isinstance(schema, Mapping) and "$ref" in schema:
            return self._referred(schema["$ref"], known)
        schema = resolve(schema, self.root)
        listed = choices(schema)
        if listed is not None:
            return self._constants(listed)
        parts = branches(schema)
        if parts:
            return self.rules.add("either", " | ".join(dict.fromkeys(self.value(part, known=known) for part in parts)))
        return self._of_type(type_of(schema), schema, known)

    def members(
        self, schema: Schema, *, known: Mapping[str, Sequence[str]], lead: Callable[[str], str]
    ) -> list[Member]:
        """Return the members of an object schema; `lead` returns the GBNF of what stands before a property's value."""
        required = schema.get("required", ())
        return [
            Member(f"{lead(key)} {self.value(part, known=known.get(key))}", key in required)
            for key, part in schema.get("properties", {}).items()
        ]

    def object_of(self, schema: Schema, *, known: Mapping[str, Sequence[str]]) -> str:
        """Return a reference to the rule of an object in braces."""
        more = value_schema(schema)
        # Named members that are none, and nothing said of others: what a tool without parameters takes.
        takes_none = "properties" in schema and "additionalProperties" not in schema
        if schema.get("properties") or more is None or takes_none:
            members = self.members(schema, known=known, lead=self._key)
            body = arrange(self.rules, "object", members, separator=_COMMA)
            return self.rules.add("object", _in_brackets("{", body, "}"))
        pair = self.rules.add("pair", f'{self._string({})} ":" {SPACE} {self.value(more)}')
        return self.rules.add("object", _in_brackets("{", _list_of(pair), "}"))

    def _key(self, name: str) -> str:
        return f"{either(literal(f'{spelled}:') for spelled in self.form.spell(name))} {SPACE}"

    def _referred(self, reference: str, known: Sequence[str] | None) -> str:
        key = (reference, None if known is None else tuple(known))
        if key not in self._by_reference:
            target = refer(reference, self.root)
            resolve(target, self.root)  # a reference that leads back to itself is refused here
            name = self._by_reference[key] = self.rules.reserve(reference.rpartition("/")[2])
            self.rules.define(name, self.value(target, known=known))
        return self._by_reference[key]

    def _constants(self, values: Sequence[Any]) -> str:
        if not values:
            raise UsageError("the schema has an empty enum, so that it allows no value at all")
        return trie(self.rules, "constant", (TrieEntry(text) for value in values for text in self.form.spell(value)))

    def _of_type(self, kind: str, schema: Schema, known: Sequence[str] | None) -> str:
        match kind:
            case "string":
                offered = usable_values(known)
                return self.rules.once(offered, lambda: self._constants(offered)) if offered else self._string(schema)
            case "array":
                return self._array(schema, known)
            case "object":
                return self.object_of(schema, known={})
            case "":
                return self._anything(MAX_FREE_DEPTH)
        return self._scalar(kind, schema)

    def _scalar(self, kind: str, schema: Schema) -> str:
        match kind:
            case "integer":
                bounds = integer_bounds(schema)
                return self.rules.add("integer", integer_between(bounds.low, bounds.high))
            case "number":
                return self._number(schema)
            case "boolean":
                return self.rules.add("boolean", f"{literal(self.form.true)} | {literal(self.form.false)}")
            case "null":
                return self.rules.add("null", literal(self.form.null))
        raise UsageError(f"the schema has a type {kind!r}, which JSON Schema does not know")

    def _string(self, schema: Schema) -> str:
        least, most = schema.get("minLength", 0), schema.get("maxLength")
        spelled = []
        for quote, characters in self.form.characters.items():
            character = self.rules.add("char", characters)
            spelled.append(f"{literal(quote)} {repeat(character, least=least, most=most)} {literal(quote)}")
        return self.rules.add("string", " | ".join(spelled))

    def _number(self, schema: Schema) -> str:
        low = schema.get("minimum", schema.get("exclusiveMinimum", -1))
        sign = "" if low >= 0 else '"-"? '
        body = '("0" | [1-9] [0-9]{0,15}) ("." [0-9]{1,15})? ([eE] [+\\x2D]? [0-9]{1,2})?'
        return self.rules.add("number", sign + body)

    def _array(self, schema: Schema, known: Sequence[str] | None) -> str:
        item = self.value(item_schema(schema), known=known)
        items = _list_of(item, least=schema.get("minItems", 0), most=schema.get("maxItems"))
        return self.rules.add("array", _in_brackets("[", items, "]"))

    def _anything(self, depth: int) -> str:
        kinds = ["string", "number", "boolean", "null"]
        options = [self._of_type(kind, {}, None) for kind in kinds]
        if depth:
            inner = self._anything(depth - 1)
            pair = self.rules.add("pair", f'{self._string({})} ":" {SPACE} {inner}')
            options += [_in_brackets("[", _list_of(inner), "]"), _in_brackets("{", _list_of(pair), "}")]
        return self.rules.add("any", " | ".join(options))


def arguments_object(rules: RuleBook, tool: CallableTool, form: LiteralForm = JSON_FORM) -> str:
    """Return a reference to the rule of a tool's arguments as one object."""
    writer = SchemaRules(rules, tool.schema.parameters, form)
    return writer.object_of(resolve(tool.schema.parameters, tool.schema.parameters), known=tool.grounded)


def _in_brackets(opening: str, body: str, closing: str) -> str:
    inside = f"{body} {SPACE}" if body else ""
    return f"{literal(opening)} {SPACE} {inside} {literal(closing)}"


def _list_of(item: str, *, least: int = 0, most: int | None = None) -> str:
    """Return a comma-separated list of `item`; empty where `most` is 0."""
    if most == 0:
        return ""
    more = repeat(f"({_COMMA} {item})", least=max(0, least - 1), most=None if most is None else most - 1)
    return f"{item} {more}" if least else f"({item} {more})?"
