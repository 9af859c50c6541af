"""Sizes as a person reads them."""

from __future__ import annotations


def size_text(size_bytes: float) -> str:
    """Return a size for a person: `914 B`, `12.3 kB`, `1.27 GB`."""
    for unit, scale, digits in (("GB", 1e9, 2), ("MB", 1e6, 1), ("kB", 1e3, 1)):
        if size_bytes >= scale:
            return f"{size_bytes / scale:.{digits}f} {unit}"
    return f"{size_bytes:.0f} B"
