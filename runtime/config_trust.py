"""Which settings of a workspace file take effect only after the user has read and trusted it.

A repository that was cloned a minute ago brings its own `chapbook.toml`. It may set limits and sampling; it must not
run programs, permit tools (as a mode of its own may), choose where data is written, have more of it written outside
the workspace, or point at a model file, before the user has agreed. What the user agreed to is the file's exact content
at its exact path, recorded in the user's own folder.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from .modes import PLAN_MODE

ALWAYS_NEED_TRUST = frozenset(
    {"tools.allow", "modes", "hooks.before", "hooks.after", "store", "cache.folder", "cache.disk", "cache.disk_mb"}
)


def needs_trust(name: str, value: object, *, workspace: Path) -> bool:
    """Whether a workspace file may set this key to this value only when it is trusted."""
    if name == "model":
        return isinstance(value, str) and not _is_listed_name(value, workspace=workspace)
    if name == "mode":
        return value != PLAN_MODE  # it may not take back a restriction that the user has chosen
    # An empty list, false and 0 ask for nothing. None is "auto", which takes back what the user has decided.
    return name in ALWAYS_NEED_TRUST and (value is None or bool(value))


def _is_listed_name(model: str, *, workspace: Path) -> bool:
    """Whether a model is named as `chapbook models` lists it: neither a path, nor a download, nor a file at hand."""
    points_elsewhere = any(mark in model for mark in "/\\:~") or model.lower().endswith(".gguf")
    return not points_elsewhere and not (workspace / model).exists()


def trust_folder(user_file: Path) -> Path:
    """Return where trust is recorded: beside the user's own configuration."""
    return user_file.parent / "trusted"


def is_trusted(file: Path, content: bytes, *, user_file: Path) -> bool:
    """Whether the user has trusted this content of this file."""
    return _record(file, content, user_file=user_file).is_file()


def record_trust(file: Path, content: bytes, *, user_file: Path) -> None:
    """Record that the user trusts this content of this file. Doing it twice is the same as once."""
    record = _record(file, content, user_file=user_file)
    record.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    record.write_text(f"{file.resolve()}\n", encoding="utf-8")


def _record(file: Path, content: bytes, *, user_file: Path) -> Path:
    """Return the record's path: an empty-handed look-up needs no parsing, and two writers cannot spoil each other."""
    identity = hashlib.sha256(bytes(file.resolve()) + b"\0" + content).hexdigest()
    return trust_folder(user_file) / identity
