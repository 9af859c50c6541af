"""Walks the workspace in sorted order, honouring .gitignore, without following a link."""

from __future__ import annotations

import os
import posixpath
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from operator import attrgetter
from typing import TYPE_CHECKING

from ...kernels.errors import ChapbookError
from ..git_patterns import compile_patterns
from .containment import is_git_folder, is_offerable
from .workspace import ResolvedPath, Workspace

if TYPE_CHECKING:
    import pathspec

ENTRY_LIMIT = 200_000
DEPTH_LIMIT = 100
IGNORE_FILE_LIMIT_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeEntry:
    """A regular file or a folder. `ignored` ones are given only to who asks, and sizes (else 0)."""

    path: str
    is_folder: bool
    size_bytes: int
    ignored: bool


class IgnoreRules:
    """The .gitignore files from the workspace down to one folder. The deepest rule that matches decides."""

    def __init__(self, levels: tuple[tuple[str, pathspec.GitIgnoreSpec], ...] = ()) -> None:
        self._levels = levels

    def ignores(self, path: str, *, is_folder: bool) -> bool:
        """Whether a path, relative to the workspace, is ignored; its parents are taken not to be."""
        name = f"{path}/" if is_folder else path
        for prefix, rules in reversed(self._levels):
            verdict = _verdict(rules, name[len(prefix) :])
            if verdict is not None:
                return verdict
        return False

    def below(self, workspace: Workspace, folder: str) -> IgnoreRules:
        """Return the rules inside `folder`: these, and those of its own .gitignore."""
        in_root = folder == "."
        names = (".git/info/exclude", ".gitignore") if in_root else (f"{folder}/.gitignore",)
        lines = [line for name in names for line in _read_lines(workspace, name)]
        if not lines:
            return self
        level = ("" if in_root else f"{folder}/", compile_patterns(tuple(lines)))
        return IgnoreRules((*self._levels, level))


def _verdict(rules: pathspec.GitIgnoreSpec, name: str) -> bool | None:
    """Return whether a rule ignores (True) or re-includes (False) the entry itself; None where none speaks of it.

    pathspec lets a rule for a folder speak of all that is below it too. Where a folder is ignored nothing below is
    looked at, but one that a rule re-includes would take back what another rule ignores inside.
    """
    verdict = rules.check_file(name).include
    if verdict is None or all(pattern.include is not False for pattern in rules.patterns):
        return verdict
    for pattern in reversed(rules.patterns):
        found = None if pattern.regex is None else pattern.regex.match(name)
        if found is not None and found.end() == len(name):
            return bool(pattern.include)
    return None


class TreeWalk:
    """The entries below `base`, depth first, sorted by name. Iterate once; the counters are final after that.

    `.git`, the store, links and special files are passed over; ignored entries too, or with `show_ignored` they are
    given but not entered. A `base` that is ignored itself is walked by its own rules: who names it wants it.
    `complete`: neither `max_entries` nor DEPTH_LIMIT cut it short. `unnameable` counts names that no call can hold.
    """

    def __init__(
        self,
        workspace: Workspace,
        base: str = ".",
        *,
        max_depth: int = DEPTH_LIMIT,
        max_entries: int = ENTRY_LIMIT,
        show_ignored: bool = False,
        with_sizes: bool = False,
    ) -> None:
        self.complete = True
        self.unnameable = 0
        self._workspace = workspace
        self._base = base
        self._max_depth = min(max_depth, DEPTH_LIMIT)
        self._entries_left = max_entries
        self._show_ignored = show_ignored
        self._with_sizes = with_sizes

    def check_integrity(self) -> None:
        """Assert that a walk that was cut short says so."""
        assert self._entries_left >= 0 or not self.complete

    def __iter__(self) -> Iterator[TreeEntry]:
        pending = [iter(self._children(self._base, rules_of_folder(self._workspace, self._base)))]
        while pending:
            child = next(pending[-1], None)
            if child is None:
                pending.pop()
                continue
            entry, rules = child
            yield entry
            if not entry.is_folder or entry.ignored:
                continue
            if len(pending) < self._max_depth:
                pending.append(iter(self._children(entry.path, rules, has_own_rules=True)))
            elif len(pending) == DEPTH_LIMIT:
                self.complete = False

    def _children(
        self, folder: str, rules: IgnoreRules, *, has_own_rules: bool = False
    ) -> list[tuple[TreeEntry, IgnoreRules]]:
        """Return the entries of one folder, sorted; none where it went away or may not be read."""
        resolved = ResolvedPath(folder, self._workspace.root / folder)
        try:
            with self._workspace.open_folder(resolved) as handle, os.scandir(handle) as found:
                items = list(islice(found, self._entries_left + 1))
                self._entries_left -= len(items)
                if self._entries_left < 0:
                    self.complete = False
                    items.pop()
                if has_own_rules and any(item.name == ".gitignore" for item in items):
                    rules = rules.below(self._workspace, folder)
                entries = [self._entry(folder, item, rules) for item in sorted(items, key=attrgetter("name"))]
        except OSError:
            return []
        return [(entry, rules) for entry in entries if entry is not None]

    def _entry(self, folder: str, item: os.DirEntry[str], rules: IgnoreRules) -> TreeEntry | None:
        if not is_offerable(item.name):
            self.unnameable += 1
            return None
        path = item.name if folder == "." else f"{folder}/{item.name}"
        try:
            is_folder = item.is_dir(follow_symlinks=False)
            if is_git_folder(item.name) or not (is_folder or item.is_file(follow_symlinks=False)):
                return None
            size_bytes = item.stat(follow_symlinks=False).st_size if self._with_sizes and not is_folder else 0
        except OSError:
            return None
        if is_folder and self._workspace.store_folder == self._workspace.root / path:
            return None
        ignored = rules.ignores(path, is_folder=is_folder)
        if ignored and not self._show_ignored:
            return None
        return TreeEntry(path=path, is_folder=is_folder, size_bytes=size_bytes, ignored=ignored)


class IgnoreCheck:
    """Says of files found otherwise below `base` whether a TreeWalk from there would have passed them over."""

    def __init__(self, workspace: Workspace, base: str) -> None:
        self._workspace = workspace
        self._base = base
        self._rules: dict[str, IgnoreRules | None] = {base: rules_of_folder(workspace, base)}

    def ignores_file(self, path: str) -> bool:
        """Whether the file or a folder above it, up to `base`, is ignored, or lies deeper than a walk goes."""
        if path.count("/") >= DEPTH_LIMIT:
            return True
        rules = self._rules_in(posixpath.dirname(path) or ".")
        return rules is None or rules.ignores(path, is_folder=False)

    def _rules_in(self, folder: str) -> IgnoreRules | None:
        """Return the rules inside `folder`; None where it is ignored itself."""
        if folder not in self._rules:
            outer = self._rules_in(posixpath.dirname(folder) or ".")
            ignored = outer is None or outer.ignores(folder, is_folder=True)
            self._rules[folder] = None if ignored or outer is None else outer.below(self._workspace, folder)
        return self._rules[folder]


def rules_of_folder(workspace: Workspace, folder: str) -> IgnoreRules:
    """Return the rules that hold inside `folder`, those of its parents included unless they ignore it."""
    rules = IgnoreRules().below(workspace, ".")
    if folder == ".":
        return rules
    parts = folder.split("/")
    for depth in range(1, len(parts) + 1):
        ancestor = "/".join(parts[:depth])
        if rules.ignores(ancestor, is_folder=True):
            rules = IgnoreRules()
        rules = rules.below(workspace, ancestor)
    return rules


def _read_lines(workspace: Workspace, path: str) -> list[str]:
    try:
        with workspace.open_file(path) as file:
            return file.read(IGNORE_FILE_LIMIT_BYTES).decode(errors="replace").splitlines()
    except (ChapbookError, OSError):
        return []
