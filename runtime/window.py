"""The window: the ordered segments whose tokens make up the next request. A pure value."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import accumulate

from ..kernels.prefix import common_prefix_length
from ..kernels.tokens import TokenIds, concat_tokens
from .engine import SyncPoints
from .events import BreakReport, SegmentKind


@dataclass(frozen=True, slots=True)
class Segment:
    """A run of tokens with one origin. `source` names it for a person: ``tool result read call00003``."""

    kind: SegmentKind
    tokens: TokenIds
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentAt:
    """A place in the window: the segment that holds it, the segment's index, and the offset within it."""

    index: int
    segment: Segment
    offset: int


@dataclass(frozen=True, slots=True)
class Window:
    """Segments in order. Each change returns a new window; empty segments are left out."""

    segments: tuple[Segment, ...] = ()
    _ends: tuple[int, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        # _ends[i] is the first offset behind segment i: segment i covers [_ends[i-1], _ends[i]), _ends[-1] read as 0.
        object.__setattr__(self, "segments", tuple(s for s in self.segments if len(s.tokens)))
        object.__setattr__(self, "_ends", tuple(accumulate(len(s.tokens) for s in self.segments)))

    @property
    def token_count(self) -> int:
        """The exact length of the next request."""
        return self._ends[-1] if self._ends else 0

    def tokens(self) -> TokenIds:
        """Return the whole request, one read-only run."""
        return concat_tokens([segment.tokens for segment in self.segments])

    def start_of(self, index: int) -> int:
        """Return the offset at which segment `index` begins."""
        return self._ends[index - 1] if index else 0

    def append(self, segments: Iterable[Segment]) -> Window:
        """Return this window with `segments` behind it."""
        return Window((*self.segments, *segments))

    @property
    def prefix_length(self) -> int:
        """How many of the segments, all at the beginning, are the session prefix."""
        kinds = [segment.kind for segment in self.segments]
        return next((index for index, kind in enumerate(kinds) if kind is not SegmentKind.PREFIX), len(kinds))

    def replace(self, first: int, last: int, segments: Iterable[Segment]) -> Window:
        """Return this window with the segments [first, last) replaced: a declared replacement point."""
        if not 0 <= first <= last <= len(self.segments):
            raise IndexError(f"segments [{first}, {last}) of {len(self.segments)}")
        return Window((*self.segments[:first], *segments, *self.segments[last:]))

    def tail(self, first: int) -> Window:
        """Return the window of the segments from `first` on."""
        return Window(self.segments[first:])

    def at(self, offset: int) -> SegmentAt:
        """Return the segment that holds the token at `offset`. Raises IndexError outside [0, token_count)."""
        if not 0 <= offset < self.token_count:
            raise IndexError(f"token {offset} of {self.token_count}")
        index = bisect_right(self._ends, offset)
        return SegmentAt(index=index, segment=self.segments[index], offset=offset - self.start_of(index))

    def tokens_by_kind(self) -> Mapping[str, int]:
        """Return the tokens of each kind of segment that occurs."""
        counts: dict[str, int] = {}
        for segment in self.segments:
            counts[segment.kind] = counts.get(segment.kind, 0) + len(segment.tokens)
        return counts

    def points(self) -> SyncPoints:
        """Return where a later request may part from this one: after the session prefix, and after each message."""
        prefix = self.prefix_length
        messages = [
            end for segment, end in zip(self.segments, self._ends, strict=True) if segment.kind is SegmentKind.MESSAGE
        ]
        return SyncPoints(pinned=(self.start_of(prefix),) if prefix else (), ring=tuple(messages))

    def broken_from(self, earlier: TokenIds) -> BreakReport | None:
        """Return where this window stops repeating `earlier`, a request and its reply; None where it repeats it all."""
        request = self.tokens()
        shared = common_prefix_length(request, earlier)
        if shared == len(earlier):
            return None
        source = self.at(shared).segment.source if shared < len(request) else "the end of the window"
        return BreakReport(section=source, token=shared)

    def check_integrity(self) -> None:
        """Assert that the account of segments is that of the tokens."""
        assert self.token_count == len(self.tokens()) == sum(len(s.tokens) for s in self.segments)
        assert all(self.at(self.start_of(i)).index == i for i in range(len(self.segments)))
