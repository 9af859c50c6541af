"""Patterns as in a .gitignore, compiled whatever stands in the file: git passes over a line that is no pattern."""

from __future__ import annotations

import warnings
from functools import lru_cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pathspec


@lru_cache(maxsize=64)  # a tree is walked at every request, and its patterns seldom change
def compile_patterns(lines: tuple[str, ...]) -> pathspec.GitIgnoreSpec:
    """Return the rules of `lines`; a line that cannot be compiled has none."""
    import pathspec  # noqa: PLC0415 (heavy, and needed only where patterns are)

    with warnings.catch_warnings():
        # Python's re warns of sets that a later version may read in another way.
        warnings.simplefilter("ignore", FutureWarning)
        usable = [line for line in lines if _compiles(line)]
        try:
            return pathspec.GitIgnoreSpec.from_lines(usable)
        except Exception:  # RE2 takes fewer and other patterns than Python's re, and raises its own errors
            return pathspec.GitIgnoreSpec.from_lines(usable, backend="simple")


def _compiles(line: str) -> bool:
    import pathspec  # noqa: PLC0415 (as above)

    try:
        pathspec.GitIgnoreSpec.from_lines([line], backend="simple")
    except Exception:  # pathspec's, or that of re
        return False
    return True
