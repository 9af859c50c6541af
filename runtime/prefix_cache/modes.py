"""Which ways of reusing KV are in force. `doctor` tests each on the model at hand, and a failing one is off."""

from __future__ import annotations

import msgspec


class ReuseModes(msgspec.Struct, frozen=True, kw_only=True):
    """Each way of reuse: whether it may be used."""

    rewind: bool = True
    fork: bool = True
    memory_snapshot: bool = True
    disk_snapshot: bool = True
    partial_snapshot: bool = True
    moved_tail: bool = True

    @property
    def off(self) -> tuple[str, ...]:
        """The names of the modes that are off, as a person reads them."""
        return tuple(name.replace("_", " ") for name in self.__struct_fields__ if not getattr(self, name))

    def and_also(self, other: ReuseModes) -> ReuseModes:
        """Return the modes that are on in both."""
        return ReuseModes(**{name: getattr(self, name) and getattr(other, name) for name in self.__struct_fields__})

    @classmethod
    def only(cls, *names: str) -> ReuseModes:
        """Return these modes on and all others off."""
        return cls(**{name: name in names for name in cls.__struct_fields__})


ALL_MODES = ReuseModes()
