"""The embedding API by name: every name is there, and none costs anything before it is used."""

import ast
import inspect

import pytest

import chapbook.runtime


def test_every_name_of_the_api_is_there() -> None:
    for name in chapbook.runtime.__all__:
        assert getattr(chapbook.runtime, name).__name__ if name != "StreamEvent" else True


def test_what_type_checkers_see_is_what_there_is() -> None:
    tree = ast.parse(inspect.getsource(chapbook.runtime))
    block = next(node for node in tree.body if isinstance(node, ast.If))
    seen = {alias.asname for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert seen == set(chapbook.runtime.__all__)


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Sesion'"):
        _ = chapbook.runtime.Sesion
