"""What was learnt from a template, kept on disk under the hash of all that it was learnt from."""

from __future__ import annotations

import hashlib
import logging
import os
import tempfile
from pathlib import Path
from typing import Any, TypeVar

import msgspec

_log = logging.getLogger(__name__)

_Value = TypeVar("_Value")


def cache_key(*inputs: Any) -> str:
    """Return the SHA-256 of `inputs` (anything that msgspec encodes), 64 hex digits."""
    return hashlib.sha256(msgspec.json.encode(inputs, order="deterministic")).hexdigest()


def load_cached(folder: Path | None, name: str, *, value_type: type[_Value]) -> _Value | None:
    """Return the value stored as `name`; None where there is none, or none that can be read."""
    if folder is None:
        return None
    try:
        return msgspec.json.decode((folder / f"{name}.json").read_bytes(), type=value_type)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.DecodeError) as error:
        _log.info("ignoring the cached template result %s: %s", name, error)
        return None


def store_cached(folder: Path | None, name: str, value: Any) -> None:
    """Store `value` as `name`, whole or not at all. A cache that cannot be written costs time and nothing else."""
    if folder is None:
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder, prefix=f".{name}.", delete=False) as part:
            part.write(msgspec.json.encode(value))
        try:
            os.replace(part.name, folder / f"{name}.json")  # noqa: PTH105 (one call, as the comment above promises)
        except OSError:
            Path(part.name).unlink(missing_ok=True)
            raise
    except OSError as error:
        _log.warning("cannot keep what was learnt of the chat template in %s: %s", folder, error)
