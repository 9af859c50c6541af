"""`search`: the lines that match a pattern, by path and line number, packed into what a page may hold.

ripgrep, where it is installed, only says which files are worth reading: it walks and filters on all cores. The lines
come from the same RE2 pass in either case, so an answer does not depend on what is installed. One difference is left:
``\\b``, ``\\W``, ``\\D`` and ``\\S`` are ASCII in RE2 and Unicode in ripgrep, which may pass over a file for it.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Annotated

from msgspec import Meta

from ...compaction.matching import Hit, Pattern, compile_pattern, hits_in
from ...compaction.packing import pack_lines, page_budget
from ...kernels.errors import ToolError
from ..cancel import Cancel
from .containment import is_offerable
from .declare import tool
from .spec import Grounded, ToolContext
from .text_file import read_format, read_utf8
from .walk import IgnoreCheck, TreeWalk
from .workspace import ResolvedPath, Workspace

HITS_HELD_LIMIT = 1000
ALTERNATIVES_LIMIT = 64


@tool(safe=True)
def search(
    context: ToolContext,
    pattern: Annotated[str, Meta(description="regular expression")],
    path: Annotated[str, Grounded.PATH] = ".",
    glob: Annotated[str, Meta(description="such as *.py")] | None = None,
    offset: Annotated[int, Meta(ge=1, description="first hit")] = 1,
) -> str:
    """Search files for a pattern, ignoring case."""
    compiled = compile_pattern(pattern)
    tally = search_tree(context, compiled, path=path, glob=glob, first=offset, ripgrep=shutil.which("rg"))
    shown = pack_lines(tally.held, budget_tokens=page_budget(context.arrival_tokens), count_tokens=context.count_tokens)
    return "\n".join([*shown, _footer(compiled, tally, len(shown))])


@dataclass(slots=True)
class Tally:
    """What a search found: the lines from hit `first` on, as far as they are held, and the totals of everything."""

    first: int
    held: list[str] = field(default_factory=list)
    hits: int = 0
    files: int = 0
    complete: bool = True

    def add(self, path: str, hit: Hit) -> None:
        """Count a hit, and hold its line if it may be shown."""
        self.hits += 1
        if self.hits >= self.first and len(self.held) < HITS_HELD_LIMIT:
            self.held.append(f"{path}:{hit.line}: {hit.shown}")


def search_tree(
    context: ToolContext, pattern: Pattern, *, path: str, glob: str | None, first: int, ripgrep: str | None
) -> Tally:
    """Search a file, or what .gitignore leaves below a folder, in sorted order; `ripgrep` is its program, if any.

    Raises ContainmentError, and ToolError where `path` is missing or the call was cancelled.
    """
    resolved = context.workspace.resolve(path)
    tally = Tally(first)
    if resolved.real.is_file():
        _search_file(context, pattern, resolved.relative, tally)  # one that was named says so where it is binary
        return tally
    if not resolved.real.is_dir():
        raise ToolError(f"there is no {path!r}; use list to find it")
    matches_glob = _glob_filter(glob)
    found = None if ripgrep is None else _ask_ripgrep(context, ripgrep, pattern, resolved)
    for candidate in _walk(context.workspace, resolved, tally) if found is None else found:
        if matches_glob(_below(candidate, resolved.relative)):
            try:
                _search_file(context, pattern, candidate, tally)
            except ToolError:
                # Binary, gone or unreadable: no text to search. A cancel ends the whole search.
                if context.cancel.is_set:
                    raise
    return tally


def _search_file(context: ToolContext, pattern: Pattern, path: str, tally: Tally) -> None:
    hits_before = tally.hits
    try:
        for hit in find_hits(context.workspace, path, pattern, cancel=context.cancel):
            tally.add(path, hit)
    finally:
        tally.files += tally.hits > hits_before


def find_hits(workspace: Workspace, path: str, pattern: Pattern, *, cancel: Cancel) -> Iterator[Hit]:
    """Yield the lines of a file that match, in order. Raises ToolError for what is no readable text file."""
    with workspace.open_file(path) as file:
        text_format = read_format(file, path=path, size_bytes=os.fstat(file.fileno()).st_size)
        yield from hits_in(read_utf8(file, text_format.encoding, cancel=cancel), pattern)


def _walk(workspace: Workspace, base: ResolvedPath, tally: Tally) -> Iterator[str]:
    walk = TreeWalk(workspace, base.relative)
    for entry in walk:
        if not entry.is_folder:
            yield entry.path
    tally.complete = walk.complete


def _ask_ripgrep(context: ToolContext, program: str, pattern: Pattern, base: ResolvedPath) -> list[str] | None:
    """Return the files below `base` that hold a match, sorted; None where ripgrep does not take the pattern."""
    workspace = context.workspace
    excluded = ["--glob=!.git"]
    store = workspace.store_folder
    if store is not None and store.is_relative_to(workspace.root) and not base.real.is_relative_to(store):
        name = re.sub(r"([][{}*?!\\])", r"\\\1", store.relative_to(workspace.root).as_posix())
        excluded.append(f"--glob=!/{name}")
    command = [
        *(program, "--no-config", "--files-with-matches", "--null", "--no-messages", "--ignore-case", "--crlf"),
        # Every rule that decides what is a text file, and which are ignored, is ours: here just the outermost hull.
        *("--text", "--hidden", "--no-require-git", "--no-ignore-parent", "--no-ignore-dot", "--no-ignore-global"),
        *excluded,
        *(["--fixed-strings"] if pattern.is_literal else []),
        f"--regexp={pattern.source}",
        *("--", base.relative),
    ]
    process = subprocess.Popen(
        command, cwd=workspace.root, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    with process, context.cancel.listening(process.kill):
        output = process.communicate()[0]
    if context.cancel.is_set:
        raise ToolError("cancelled")
    if process.returncode not in (0, 1):
        return None
    paths = (name.decode(errors="surrogateescape").removeprefix("./") for name in output.split(b"\0") if name)
    check = IgnoreCheck(workspace, base.relative)
    return sorted((path for path in paths if is_offerable(path) and not check.ignores_file(path)), key=_order)


def _order(path: str) -> list[str]:
    return path.split("/")


def _below(path: str, folder: str) -> str:
    return path if folder == "." else path[len(folder) + 1 :]


def _glob_filter(glob: str | None) -> Callable[[str], bool]:
    """Return what tells whether a path, relative to the folder searched, fits `glob`, which is as in a .gitignore."""
    if not glob:
        return lambda _: True
    import pathspec  # noqa: PLC0415 (heavy, and rarely needed)

    excludes = glob.startswith("!")
    patterns = _alternatives(glob.removeprefix("!"))
    try:
        rules = pathspec.GitIgnoreSpec.from_lines(patterns)
    except Exception as problem:  # pathspec's, or that of RE2 or re, which share no class
        raise ToolError(f"the glob {glob!r} cannot be used: {problem}") from problem
    return lambda path: rules.match_file(path) is not excludes


def _alternatives(glob: str) -> list[str]:
    """Return what the braces of ``*.{ts,tsx}`` stand for. Raises ToolError over ALTERNATIVES_LIMIT."""
    done: list[str] = []
    pending = [glob]
    while pending:
        current = pending.pop()
        braces = re.search(r"\{([^{}]*,[^{}]*)\}", current)
        if braces is None:
            done.append(current)
        else:
            pending += [current[: braces.start()] + choice + current[braces.end() :] for choice in braces[1].split(",")]
        if len(done) + len(pending) > ALTERNATIVES_LIMIT:
            raise ToolError(f"the glob {glob!r} stands for more than {ALTERNATIVES_LIMIT} patterns; use a shorter one")
    return done


def _footer(pattern: Pattern, tally: Tally, shown: int) -> str:
    notes = []
    if pattern.is_literal:
        notes.append(f"not a regular expression ({pattern.problem}), so taken literally")
    if not tally.hits:
        notes.append("no hits")
    else:
        last = tally.first + shown - 1
        notes.append(f"{tally.hits} hits in {tally.files} files")
        if not shown:
            notes.append(f"offset {tally.first} is past the last")
        elif shown < tally.hits:
            notes.append(f"these are {tally.first}-{last}")
        if shown and last < tally.hits:
            notes.append(f"next: offset={last + 1}, or narrow with path or glob")
    if not tally.complete:
        notes.append("the tree was too large to walk whole; narrow with path")
    return f"[{'; '.join(notes)}]"
