"""The `@tool` decorator: a typed Python function becomes a tool, its JSON schema derived from its annotations.

@tool(safe=True)
def word_count(context: ToolContext, path: Annotated[str, Grounded.FILE]) -> str:
    "Count the words of a file."
"""

from __future__ import annotations

import inspect
import re
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, get_args, get_origin, overload

import msgspec

from ...kernels.errors import ToolArgumentsError, ToolError, UsageError
from ..calls import ToolSchema
from .spec import Grounded, Policy, Tool, ToolContext, ToolOutput

TOOL_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")


@overload
def tool(function: Callable[..., str | ToolOutput], /) -> Tool: ...


@overload
def tool(
    *,
    name: str = "",
    description: str = "",
    safe: bool = False,
    writes: bool = False,
    policy: Policy | None = None,
    timeout_s: float = 120.0,
    in_turn: bool = False,
) -> Callable[[Callable[..., str | ToolOutput]], Tool]: ...


def tool(
    function: Callable[..., str | ToolOutput] | None = None,
    /,
    *,
    name: str = "",
    description: str = "",
    safe: bool = False,
    writes: bool = False,
    policy: Policy | None = None,
    timeout_s: float = 120.0,
    in_turn: bool = False,
) -> Tool | Callable[[Callable[..., str | ToolOutput]], Tool]:
    """Make a tool of a function that returns text or a ToolOutput; bare or with options.

    The name defaults to the function's, the description to the first paragraph of its docstring, the policy to ASK
    for a tool that `writes` and ALLOW for others. A first parameter annotated ToolContext is passed the context and
    is no part of the schema; every other one is annotated with a type that msgspec knows, and may carry
    `msgspec.Meta` bounds, a `Grounded` mark and a default. Raises UsageError that names what stands in the way.
    """

    def declare(body: Callable[..., str | ToolOutput]) -> Tool:
        signature, schema = _described(body, name or getattr(body, "__name__", ""), description)
        return Tool(
            schema=schema,
            body=_Body(schema.name, body, signature.arguments, signature.takes_context),
            safe=safe,
            writes=writes,
            in_turn=in_turn,
            policy=policy or (Policy.ASK if writes else Policy.ALLOW),
            timeout_s=timeout_s,
            grounded=signature.grounded,
        )

    return declare if function is None else declare(function)


def _described(function: Callable[..., str | ToolOutput], name: str, description: str) -> tuple[_Signature, ToolSchema]:
    if not TOOL_NAME.fullmatch(name):
        raise UsageError(f"{name!r} cannot name a tool: 1 to 64 of the characters a-z, A-Z, 0-9, _ and -")
    description = description or _first_paragraph(function)
    if not description:
        raise _unfit(name, "it has no docstring; its first paragraph is what the model is told")
    signature = _read_signature(function, name)
    parameters = _parameter_schema(signature.arguments, name)
    return signature, ToolSchema(name=name, description=description, parameters=parameters)


@dataclass(frozen=True, slots=True)
class _Body:
    """Calls the function with arguments converted to its types."""

    name: str
    function: Callable[..., str | ToolOutput]
    arguments: type[msgspec.Struct]
    takes_context: bool

    def __call__(self, context: ToolContext, arguments: Mapping[str, Any], /) -> ToolOutput:
        try:
            values = msgspec.convert(dict(arguments), self.arguments)
        except msgspec.ValidationError as problem:
            message = f"{self.name}: {problem}"
            raise ToolArgumentsError(message, problems=(str(problem),)) from problem
        named = {field_name: getattr(values, field_name) for field_name in self.arguments.__struct_fields__}
        output = self.function(context, **named) if self.takes_context else self.function(**named)
        if isinstance(output, str):
            return ToolOutput(content=output)
        if isinstance(output, ToolOutput):
            return output
        raise ToolError(f"{self.name} returned {type(output).__name__}; a tool returns str or ToolOutput")


@dataclass(slots=True)
class _Signature:
    arguments: type[msgspec.Struct]
    takes_context: bool = False
    grounded: dict[str, Grounded] = field(default_factory=dict)


def _read_signature(function: Callable[..., Any], name: str) -> _Signature:
    if inspect.iscoroutinefunction(function) or inspect.isgeneratorfunction(function):
        raise _unfit(name, "it is a coroutine or generator; a tool is a plain function")
    try:
        hints = typing.get_type_hints(function, include_extras=True)
    except (NameError, TypeError) as problem:
        raise _unfit(name, f"an annotation cannot be resolved: {problem}") from problem
    if "return" in hints and not set(get_args(hints["return"]) or (hints["return"],)) <= {str, ToolOutput}:
        raise _unfit(name, f"it returns {hints['return']}; a tool returns str or ToolOutput")

    fields: list[tuple[str, Any] | tuple[str, Any, Any]] = []
    takes_context, grounded = False, {}
    for position, parameter in enumerate(inspect.signature(function).parameters.values()):
        hint = hints.get(parameter.name)
        if hint is ToolContext:
            if position:
                raise _unfit(name, f"its parameter {parameter.name} is the context, which comes first")
            takes_context = True
            continue
        _check_parameter(parameter, hint, name)
        if (mark := _grounded_mark(hint, name, parameter.name)) is not None:
            grounded[parameter.name] = mark
        has_default = parameter.default is not parameter.empty
        fields.append((parameter.name, hint, parameter.default) if has_default else (parameter.name, hint))
    try:
        struct = msgspec.defstruct(name.replace("-", "_"), fields, kw_only=True, forbid_unknown_fields=True)
    except (TypeError, ValueError) as problem:
        raise _unfit(name, str(problem)) from problem
    return _Signature(struct, takes_context, grounded)


def _check_parameter(parameter: inspect.Parameter, hint: Any, name: str) -> None:
    if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
        raise _unfit(name, f"its parameter {parameter} cannot be passed by name")
    if hint is None:
        raise _unfit(name, f"its parameter {parameter.name} has no annotation")
    if parameter.default is parameter.empty:
        return
    try:
        msgspec.convert(msgspec.to_builtins(parameter.default), hint)
    except (msgspec.ValidationError, TypeError) as problem:
        raise _unfit(name, f"the default of its parameter {parameter.name} does not fit: {problem}") from problem


def _grounded_mark(hint: Any, name: str, parameter: str) -> Grounded | None:
    if get_origin(hint) in (typing.Union, types.UnionType):
        marks = (_grounded_mark(choice, name, parameter) for choice in get_args(hint))
        return next((mark for mark in marks if mark is not None), None)
    if get_origin(hint) is not Annotated:
        return None
    mark = next((mark for mark in get_args(hint)[1:] if isinstance(mark, Grounded)), None)
    if mark is not None and get_args(hint)[0] is not str:
        raise _unfit(name, f"its parameter {parameter} is grounded, which only a str can be")
    return mark


def _parameter_schema(arguments: type[msgspec.Struct], name: str) -> dict[str, Any]:
    try:
        whole = msgspec.json.schema(arguments)
    except TypeError as problem:
        raise _unfit(name, str(problem)) from problem
    definitions = whole.get("$defs", {})
    root = definitions[arguments.__name__]
    compact = {"type": "object", "properties": _inlined(root["properties"], definitions, name, ())}
    if root["required"]:
        compact["required"] = root["required"]
    return compact


def _inlined(node: Any, definitions: Mapping[str, Any], name: str, open_refs: tuple[str, ...]) -> Any:
    """Return `node` with references replaced by what they name, and without what only costs tokens."""
    if isinstance(node, list):
        return [_inlined(item, definitions, name, open_refs) for item in node]
    if not isinstance(node, dict):
        return node
    if "$ref" in node:
        target = node["$ref"].rpartition("/")[2]
        if target in open_refs:
            raise _unfit(name, f"the type {target} contains itself, which has no finite schema")
        # Titles and class docstrings are for the reader of the source; the model is told what Meta says.
        inlined = {key: value for key, value in definitions[target].items() if key not in {"title", "description"}}
        rest = {key: value for key, value in node.items() if key != "$ref"}
        return _inlined({**rest, **inlined}, definitions, name, (*open_refs, target))
    node = _without_default(node)
    return {key: _inlined(value, definitions, name, open_refs) for key, value in node.items()}


def _without_default(node: dict[str, Any]) -> dict[str, Any]:
    """That a value may be left out is said by `required`; null as its default adds no choice that matters."""
    if isinstance(node.get("default"), dict) or "default" not in node:  # a property may be named default
        return node
    rest = {key: value for key, value in node.items() if key not in {"default", "anyOf"}}
    choices = [choice for choice in node.get("anyOf", ()) if node["default"] is not None or choice != {"type": "null"}]
    if len(choices) == 1:
        return {**rest, **choices[0]}
    return {**rest, "anyOf": choices} if choices else rest


def _first_paragraph(function: Callable[..., Any]) -> str:
    text = inspect.getdoc(function) or ""
    return " ".join(text.split("\n\n", 1)[0].split())


def _unfit(name: str, problem: str) -> UsageError:
    return UsageError(f"the function {name} cannot be a tool: {problem}")
