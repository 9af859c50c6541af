"""The catalogue: a fixed order, unique names, the same bytes in every run."""

from __future__ import annotations

import subprocess
import sys

import pytest

from chapbook.kernels.errors import UsageError
from chapbook.runtime.tools.builtin import builtin_tools
from chapbook.runtime.tools.catalogue import Catalogue, render_schemas
from chapbook.runtime.tools.declare import tool
from chapbook.runtime.tools.reserved import RESERVED_SCHEMAS

RENDER = """
from chapbook.runtime.tools.builtin import builtin_tools
from chapbook.runtime.tools.catalogue import Catalogue, render_schemas
print(render_schemas(Catalogue(builtin_tools()).schemas()))
"""


@tool
def zebra() -> str:
    """Come last by name, first by registration."""
    return ""


def test_order_is_that_of_registration() -> None:
    catalogue = Catalogue([zebra, *builtin_tools()])
    files = ("read", "search", "list", "write", "edit", "bash", "artifact")
    assert catalogue.names == ("zebra", *files, "plan_start", "plan_step", "plan_status", "exit_plan_mode")
    assert [schema.name for schema in catalogue.schemas()] == list(catalogue.names)
    assert len(catalogue) == 12
    assert catalogue.get("read") is builtin_tools()[0]
    assert "read" in catalogue
    assert catalogue.get("rm") is None


def test_a_name_that_is_taken_is_refused() -> None:
    with pytest.raises(UsageError, match="two tools are named zebra"):
        Catalogue([zebra, *builtin_tools(), zebra])


def test_rendering_is_the_same_bytes_in_another_process_with_another_hash_seed() -> None:
    here = render_schemas(Catalogue(builtin_tools()).schemas())
    for seed in ("1", "2"):
        other = subprocess.run(
            [sys.executable, "-c", RENDER], env={"PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True
        )
        assert other.stdout == f"{here}\n"


def test_the_default_set_is_fourteen_short_schemas_with_unique_names() -> None:
    schemas = (*Catalogue(builtin_tools()).schemas(), *RESERVED_SCHEMAS)
    assert len({schema.name for schema in schemas}) == 14
    assert all(len(schema.description) <= 60 and "\n" not in schema.description for schema in schemas)
    # 1,500 tokens with the system text; JSON of this kind has some 3.5 characters to a token.
    assert len(render_schemas(schemas)) < 4200
