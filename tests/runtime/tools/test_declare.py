"""The decorator: what becomes a tool, what its schema says, and what cannot be one."""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Annotated, Any

import msgspec
import pytest

from chapbook.kernels.errors import ToolArgumentsError, ToolError, UsageError
from chapbook.runtime.tools.declare import tool
from chapbook.runtime.tools.spec import Grounded, Policy, ToolContext, ToolOutput


class Colour(enum.StrEnum):
    RED = "red"
    BLUE = "blue"


class Point(msgspec.Struct):
    """A docstring for readers of the source, not for the model."""

    x: int
    y: int = 0


class Tree(msgspec.Struct):
    children: list[Tree]


@tool(safe=True)
def paint(  # noqa: PLR0917 (called by name)
    context: ToolContext,
    path: Annotated[str, Grounded.FILE],
    colour: Annotated[Colour, msgspec.Meta(description="which")],
    times: Annotated[int, msgspec.Meta(ge=1, le=9)] = 1,
    points: list[Point] = [],  # noqa: B006 (never changed; a mutable default is what authors write)
    folder: Annotated[str, Grounded.FOLDER] | None = None,
) -> str:
    """Paint a file,
    on two lines.

    What a reader of the source wants to know besides.
    """
    return f"{context.call_id} {path} {colour.name} {times} {points} {folder}"


def test_a_schema_holds_types_and_bounds_and_nothing_that_only_costs_tokens() -> None:
    point = {"type": "object", "properties": {"x": {"type": "integer"}, "y": {"type": "integer"}}, "required": ["x"]}
    assert paint.schema.parameters == {
        "type": "object",
        "properties": {
            "path": {"type": "string"},
            "colour": {"description": "which", "enum": ["blue", "red"]},
            "times": {"type": "integer", "minimum": 1, "maximum": 9},
            "points": {"type": "array", "items": point},
            "folder": {"type": "string"},
        },
        "required": ["path", "colour"],
    }
    assert list(paint.schema.parameters["properties"]) == ["path", "colour", "times", "points", "folder"]


def test_name_description_marks_and_policy_come_from_the_function() -> None:
    assert (paint.name, paint.schema.description) == ("paint", "Paint a file, on two lines.")
    assert paint.grounded == {"path": Grounded.FILE, "folder": Grounded.FOLDER}
    assert (paint.safe, paint.writes, paint.policy) == (True, False, Policy.ALLOW)


def test_a_tool_that_writes_is_asked_for_unless_told_otherwise() -> None:
    @tool(writes=True)
    def one() -> str:
        """Write."""
        return ""

    @tool(name="other-name", description="Another.", writes=True, policy=Policy.DENY, timeout_s=7)
    def two() -> str:
        return ""

    assert one.policy is Policy.ASK
    assert (two.name, two.schema.description, two.policy, two.timeout_s) == ("other-name", "Another.", Policy.DENY, 7)
    assert two.schema.parameters == {"type": "object", "properties": {}}


def test_a_body_gets_values_of_its_types_and_its_defaults(context: ToolContext) -> None:
    output = paint.body(context, {"path": "a", "colour": "red", "points": [{"x": 1}], "folder": None})
    assert output == ToolOutput(content="call00001 a RED 1 [Point(x=1, y=0)] None")


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"colour": "red"}, "missing required field `path`"),
        ({"path": "a", "colour": "green"}, "Invalid enum value 'green'"),
        ({"path": "a", "colour": "red", "times": 10}, "Expected `int` <= 9"),
        ({"path": "a", "colour": "red", "size": 1}, "unknown field `size`"),
    ],
)
def test_arguments_that_do_not_fit_are_refused_with_the_problem(
    context: ToolContext, arguments: dict[str, Any], problem: str
) -> None:
    with pytest.raises(ToolArgumentsError, match=f"paint: .*{problem}") as refused:
        paint.body(context, arguments)
    assert problem in refused.value.problems[0]


def test_a_tool_may_return_an_output_and_nothing_else(context: ToolContext) -> None:
    @tool
    def good() -> ToolOutput:
        """Fail."""
        return ToolOutput(content="no", is_error=True)

    @tool
    def bad():
        """Return a number."""
        return 3

    assert good.body(context, {}).is_error
    with pytest.raises(ToolError, match="bad returned int"):
        bad.body(context, {})


def no_docstring() -> str:
    return ""


def no_annotation(path) -> str:
    """Doc."""
    return str(path)


def unknown_annotation(path: Missing) -> str:  # noqa: F821  a name that is nowhere, on purpose
    """Doc."""
    return path


def many(*paths: str) -> str:
    """Doc."""
    return str(paths)


def any_options(**options: str) -> str:
    """Doc."""
    return str(options)


def only_by_place(path: str, /) -> str:
    """Doc."""
    return path


def context_last(path: str, context: ToolContext) -> str:
    """Doc."""
    return f"{path}{context}"


def wrong_default(count: int = "three") -> str:
    """Doc."""
    return str(count)


def wrong_return() -> int:
    """Doc."""
    return 1


def unfit_type(call: Callable[[], int]) -> str:
    """Doc."""
    return str(call)


def endless_type(tree: Tree) -> str:
    """Doc."""
    return str(tree)


def grounded_number(count: Annotated[int, Grounded.FILE]) -> str:
    """Doc."""
    return str(count)


async def asynchronous() -> str:
    """Doc."""
    return ""


@pytest.mark.parametrize(
    ("function", "problem"),
    [
        (no_docstring, "no docstring"),
        (no_annotation, "path has no annotation"),
        (unknown_annotation, "cannot be resolved: name 'Missing'"),
        (many, "cannot be passed by name"),
        (any_options, "cannot be passed by name"),
        (only_by_place, "cannot be passed by name"),
        (context_last, "context, which comes first"),
        (wrong_default, "default of its parameter count does not fit"),
        (wrong_return, "returns str or ToolOutput"),
        (unfit_type, "type"),
        (endless_type, "Tree contains itself"),
        (grounded_number, "count is grounded, which only a str can be"),
        (asynchronous, "coroutine"),
    ],
)
def test_a_function_that_cannot_be_a_tool_is_told_why(function: Callable[..., Any], problem: str) -> None:
    with pytest.raises(UsageError, match=problem) as refused:
        tool(function)
    assert function.__name__ in str(refused.value)


@pytest.mark.parametrize("name", ["", "a b", "naïve", "x" * 65, "a.b", "a\n"])
def test_a_name_outside_the_alphabet_is_refused(name: str) -> None:
    with pytest.raises(UsageError, match="cannot name a tool"):
        tool(name=name or "-" * 65, description="Doc.")(no_docstring)
