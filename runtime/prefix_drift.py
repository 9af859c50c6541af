"""What of a session prefix would be composed otherwise now, section by section, and how it is said. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from .events import DriftKind, PrefixSection, RequestHeader, SectionDrift

INSTRUCTIONS = "instructions"
CHAT_FORMAT = "chat format"
DIALECT = "dialect"

_SHOWN_NAMES = {
    INSTRUCTIONS: "project instructions",
    "catalogue": "tool catalogue",
    "system": "system text",
    "glue": "template's markup",
    CHAT_FORMAT: "markup between messages",
    DIALECT: "form of tool calls",
}
_FOR_THE_HOST = frozenset({"glue", CHAT_FORMAT, DIALECT})
"""What says nothing to a model."""

MOST_NAMED_TOOLS = 20


def drift_between(recorded: Sequence[PrefixSection], fresh: Sequence[PrefixSection]) -> tuple[SectionDrift, ...]:
    """Return which sections drifted: none where both prefixes have the same ones, with the same tokens, in one order.

    Sections of one name count as one, and those without tokens not at all. The tokens that all drifts add are exactly
    those by which the prefixes differ. Where each is as it was and their order is not, all are `changed`.
    """
    before, after = _by_name(recorded), _by_name(fresh)
    names = list(dict.fromkeys((*before, *after)))
    drifted = [name for name in names if _hashes(before.get(name, ())) != _hashes(after.get(name, ()))]
    if not drifted and _hashes(recorded) != _hashes(fresh):
        drifted = names
    return tuple(_drift(name, before.get(name, ()), after.get(name, ())) for name in drifted)


def header_drift(recorded: RequestHeader, fresh: RequestHeader) -> tuple[SectionDrift, ...]:
    """Return `drift_between` the sections of two headers, and what differs in how messages and calls are written.

    Those two have no tokens of their own in a prefix.
    """
    drifts = list(drift_between(recorded.sections, fresh.sections))
    old, new = recorded.chat_format, fresh.chat_format
    if (old.glues, old.forms, old.reasoning) != (new.glues, new.forms, new.reasoning):
        drifts.append(_drift(CHAT_FORMAT, (), (), kind=DriftKind.CHANGED))
    if recorded.dialect != fresh.dialect:
        drifts.append(_drift(DIALECT, (), (), kind=DriftKind.CHANGED))
    return tuple(drifts)


def concerns_model(names: Collection[str]) -> bool:
    """Whether a model should know that these sections drifted."""
    return bool(set(names) - _FOR_THE_HOST)


def describe_drift(in_force: RequestHeader, fresh: RequestHeader, names: Collection[str]) -> str:
    """Return what is to be said of the sections `names`, which differ from what was said of them before.

    ``project instructions changed, +212 tokens; tool catalogue changed, -40 tokens (gone: look)``.
    """
    drifts = {drift.name: drift for drift in header_drift(in_force, fresh)}
    phrases = {name: _phrase(drifts[name]) if name in drifts else f"{_shown(name)} as before again" for name in names}
    if "catalogue" in phrases:
        phrases["catalogue"] += _tool_names(in_force.tools, fresh.tools)
    return "; ".join(phrases.values())


def drift_text(drifts: Iterable[SectionDrift]) -> str:
    """Return the drifts of a recorded header in words."""
    return "; ".join(_phrase(drift) for drift in drifts)


def _by_name(sections: Sequence[PrefixSection]) -> dict[str, tuple[PrefixSection, ...]]:
    found: dict[str, tuple[PrefixSection, ...]] = {}
    for section in sections:
        if section.tokens:
            found[section.name] = (*found.get(section.name, ()), section)
    return found


def _hashes(sections: Sequence[PrefixSection]) -> list[tuple[str, str]]:
    return [(section.name, section.xxh3) for section in sections if section.tokens]


def _drift(
    name: str, before: Sequence[PrefixSection], after: Sequence[PrefixSection], *, kind: DriftKind | None = None
) -> SectionDrift:
    if kind is None:
        kind = DriftKind.CHANGED if before and after else DriftKind.ADDED if after else DriftKind.REMOVED
    return SectionDrift(
        name=name,
        before_tokens=sum(section.tokens for section in before),
        after_tokens=sum(section.tokens for section in after),
        kind=kind,
    )


def _phrase(drift: SectionDrift) -> str:
    if not drift.before_tokens and not drift.after_tokens:
        return f"{_shown(drift.name)} {drift.kind}"
    return f"{_shown(drift.name)} {drift.kind}, {drift.after_tokens - drift.before_tokens:+,} tokens"


def _shown(name: str) -> str:
    return _SHOWN_NAMES.get(name, name)


def _tool_names(before: Sequence[str], after: Sequence[str]) -> str:
    parts = []
    for label, names in (
        ("new", [name for name in after if name not in before]),
        ("gone", [name for name in before if name not in after]),
    ):
        if names:
            more = f" and {len(names) - MOST_NAMED_TOOLS} more" if len(names) > MOST_NAMED_TOOLS else ""
            parts.append(f"{label}: {', '.join(names[:MOST_NAMED_TOOLS])}{more}")
    return f" ({'; '.join(parts)})" if parts else ""
