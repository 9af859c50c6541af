"""Writing GBNF, llama.cpp's grammar notation: literals, named rules, tries, members in any order, integer ranges.

The notation is that of llama.cpp's `grammars/README.md`. Every rule here begins with a character or is right
recursive, so no grammar is left recursive, and a long match does not deepen the parser's stacks.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import NamedTuple

from ..kernels.errors import UsageError

MAX_REPEAT = 1_000
"""llama.cpp refuses 2,000 or more copies of a symbol; a bound over this one is left to the check."""

MAX_MEMBERS_IN_ANY_ORDER = 5
"""Members in any order cost a rule for each subset: 32. Beyond, their order is fixed."""

MAX_INTEGER_DIGITS = 16
"""Every integer of so many digits is exact as a float, and none can go on for ever."""

SPACE = "ws"
"""A reference to the rule for bounded white space, which every `RuleBook` has."""

_SPACE_BODY = r'(" " | "\n" [ ]{0,12})?'

_ESCAPES = {code: f"\\x{code:02X}" for code in (*range(0x20), 0x7F)} | {
    ord("\n"): "\\n",
    ord("\r"): "\\r",
    ord("\t"): "\\t",
    ord('"'): '\\"',
    ord("\\"): "\\\\",
}
_REFERENCE = re.compile(r'"(?:[^"\\]|\\.)*"|\[(?:[^\]\\]|\\.)*\]|([A-Za-z][A-Za-z0-9-]*)')


def literal(text: str) -> str:
    """Return the GBNF literal that matches exactly `text`."""
    return f'"{text.translate(_ESCAPES)}"'


def repeat(symbol: str, *, least: int = 0, most: int | None = None) -> str:
    """Return `symbol` (one reference, class or group) so many times; bounds over `MAX_REPEAT` are dropped."""
    least = min(least, MAX_REPEAT)
    upper = "" if most is None or most > MAX_REPEAT else str(most)
    return f"{symbol}{{{least},{upper}}}"


def either(alternatives: Iterable[str]) -> str:
    """Return a group that matches any of the alternatives."""
    return f"({' | '.join(dict.fromkeys(alternatives))})"


class RuleBook:
    """The named rules of one grammar. Equal bodies share a name, which also folds equal tails of a trie."""

    def __init__(self) -> None:
        self._bodies: dict[str, str] = {SPACE: _SPACE_BODY}
        self._names: dict[str, str] = {}
        self._built: dict[Hashable, str] = {}
        self._next = 0

    def add(self, hint: str, body: str) -> str:
        """Return the name of a rule with this body; `hint` makes it readable."""
        known = self._names.get(body)
        if known is not None:
            return known
        name = self.reserve(hint)
        self.define(name, body)
        self._names[body] = name
        return name

    def once(self, key: Hashable, build: Callable[[], str]) -> str:
        """Return what `build` returned for this key before, or returns now: for what several tools share."""
        if key not in self._built:
            self._built[key] = build()
        return self._built[key]

    def reserve(self, hint: str) -> str:
        """Return a name to refer to before its rule is defined, as recursion needs."""
        self._next += 1
        return f"{re.sub('[^A-Za-z0-9]+', '-', hint).strip('-') or 'rule'}-{self._next}"

    def define(self, name: str, body: str) -> None:
        """Give a reserved name its rule."""
        assert name not in self._bodies, f"rule {name} is defined twice"
        self._bodies[name] = body

    def render(self, root: str) -> str:
        """Return the grammar whose rule `root` has this body."""
        return "".join(f"{name} ::= {body}\n" for name, body in {"root": root, **self._bodies}.items())

    def check_integrity(self) -> None:
        """Assert that every rule that is referred to is defined, and that a shared body has one name."""
        for name, body in self._bodies.items():
            missing = {found for found in _REFERENCE.findall(body) if found} - self._bodies.keys()
            assert not missing, f"rule {name} refers to {sorted(missing)}, which are not defined"
        for body, name in self._names.items():
            assert self._bodies[name] == body, f"rule {name} is not what it was added as"


class TrieEntry(NamedTuple):
    """A text, and the GBNF of what follows it."""

    text: str
    then: str = ""


def trie(rules: RuleBook, hint: str, entries: Iterable[TrieEntry]) -> str:
    """Return a reference to rules that match one of the entries; at least one is needed.

    Alternatives that start alike share their rules, so that llama.cpp follows one path and not one for each value.
    """
    ordered = sorted(set(entries))
    spans = [(0, len(ordered), 0)]  # of entries [low, high), which share their first `depth` characters
    edges: list[list[tuple[str, str | int]]] = []
    while len(edges) < len(spans):
        low, high, depth = spans[len(edges)]
        out: list[tuple[str, str | int]] = []
        while low < high:
            text, then = ordered[low]
            group_end = _group_end(ordered, low, high, depth)
            if group_end == low + 1:
                out.append((text[depth:], then))
            else:
                shared = _shared_length(text, ordered[group_end - 1].text)
                out.append((text[depth:shared], len(spans)))
                spans.append((low, group_end, shared))
            low = group_end
        edges.append(out)
    names = [""] * len(spans)
    for index in reversed(range(len(spans))):  # a span's children come after it
        bodies = [
            f"{literal(text)} {then if isinstance(then, str) else names[then]}".rstrip() for text, then in edges[index]
        ]
        names[index] = rules.add(hint, " | ".join(bodies))
    return names[0]


def _group_end(ordered: Sequence[TrieEntry], low: int, high: int, depth: int) -> int:
    """Return the end of the run from `low` with the same character at `depth`; a text that ends there is alone."""
    if len(ordered[low].text) == depth:
        return low + 1
    first = ordered[low].text[depth]
    end = low + 1
    while end < high and ordered[end].text[depth] == first:
        end += 1
    return end


def _shared_length(left: str, right: str) -> int:
    for index, (a, b) in enumerate(zip(left, right, strict=False)):
        if a != b:
            return index
    return min(len(left), len(right))


class Member(NamedTuple):
    """The GBNF of one member of an object or an argument list."""

    body: str
    required: bool


def arrange(rules: RuleBook, hint: str, members: Sequence[Member], *, separator: str) -> str:
    """Return the GBNF of the members, none twice and the required ones always; empty where there are none.

    In any order up to `MAX_MEMBERS_IN_ANY_ORDER` (a rule for each set of members still open), else in theirs.
    """
    named = [Member(rules.add(f"{hint}-member", member.body), member.required) for member in members]
    if len(named) > MAX_MEMBERS_IN_ANY_ORDER:
        return _in_order(rules, hint, named, separator=separator)
    whole = (1 << len(named)) - 1
    needed = sum(1 << index for index, member in enumerate(named) if member.required)
    rest = {0: ""}
    for still_open in range(1, whole):
        options = [
            f"{separator} {member.body} {rest[still_open & ~(1 << index)]}".strip()
            for index, member in enumerate(named)
            if still_open >> index & 1
        ]
        rest[still_open] = rules.add(hint, " | ".join([*options, *_nothing(not still_open & needed)]))
    options = [f"{member.body} {rest[whole & ~(1 << index)]}".strip() for index, member in enumerate(named)]
    return rules.add(hint, " | ".join([*options, *_nothing(not needed)])) if named else ""


def _in_order(rules: RuleBook, hint: str, members: Sequence[Member], *, separator: str) -> str:
    first, rest = '""', '""'  # what may follow where nothing was written yet, and where something was
    for member in reversed(members):
        skip_first, skip_rest = ([], []) if member.required else ([first], [rest])
        first = rules.add(hint, " | ".join([f"{member.body} {rest}", *skip_first]))
        rest = rules.add(hint, " | ".join([f"{separator} {member.body} {rest}".strip(), *skip_rest]))
    return first


def _nothing(allowed: bool) -> list[str]:
    return ['""'] if allowed else []


def integer_between(low: int | None, high: int | None) -> str:
    """Return the GBNF of the integers in [low, high], without leading zeros; None: `MAX_INTEGER_DIGITS` digits.

    Raises UsageError where the range is empty.
    """
    furthest = 10 ** max(MAX_INTEGER_DIGITS, len(str(abs(low or 0))), len(str(abs(high or 0)))) - 1
    low = -furthest if low is None else low
    high = furthest if high is None else high
    if low > high:
        raise UsageError(f"the schema allows no integer: its minimum {low} is over its maximum {high}")
    negative = [f'"-" {body}' for body in _naturals(max(1, -high), -low)] if low < 0 else []
    return either([*negative, *_naturals(max(0, low), high)])


def _naturals(low: int, high: int) -> list[str]:
    """Return alternatives that together match [low, high], 0 <= low; none where high < low."""
    alternatives: list[str] = []
    whole_lengths: list[int] = []
    for digits in range(len(str(low)), len(str(high)) + 1 if low <= high else 0):
        floor, ceiling = (0 if digits == 1 else 10 ** (digits - 1)), 10**digits - 1
        if digits > 1 and low <= floor and ceiling <= high:
            whole_lengths.append(digits)
        else:
            alternatives += _same_length(str(max(low, floor)), str(min(high, ceiling)))
    if whole_lengths:
        alternatives.append(f"[1-9] [0-9]{{{whole_lengths[0] - 1},{whole_lengths[-1] - 1}}}")
    return alternatives


def _same_length(low: str, high: str) -> list[str]:
    """Return alternatives for the digit strings in [low, high], which have one length."""
    if not low:
        return [""]
    first, last = int(low[0]), int(high[0])
    if first == last:
        return [f'"{first}" {tail}'.strip() for tail in _same_length(low[1:], high[1:])]
    alternatives = []
    if low[1:].strip("0"):
        alternatives += [f'"{first}" {tail}' for tail in _same_length(low[1:], "9" * len(low[1:]))]
        first += 1
    if high[1:].strip("9"):
        alternatives += [f'"{last}" {tail}' for tail in _same_length("0" * len(high[1:]), high[1:])]
        last -= 1
    if first <= last:
        tail = f" [0-9]{{{len(low) - 1}}}" if len(low) > 1 else ""
        alternatives.append(f"[{first}-{last}]{tail}")
    return alternatives
