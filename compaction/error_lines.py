"""Finds the lines of a text that tell what went wrong: one pass, bounded memory, alike ones counted as one.

A single RE2 pattern says which lines are worth a look; what each of them is, `error_classes` decides.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING

from .error_classes import (
    LOG_CLASSES,
    ErrorClass,
    ErrorForms,
    depends_on_others,
    exception_after_frames,
    is_borne_out,
    shape_of,
    without_clock,
    without_numbers,
)
from .quoting import cleaned, clipped

if TYPE_CHECKING:
    import re2

_SHAPES_LIMIT = 64
_CACHED_LIMIT = 4096
_LOOKS_LIMIT = 20_000
_BLOCK_LOOKS = 300
_WINDOW_BYTES = 600
_AHEAD_LINES = 12
_CONTEXT_BYTES = 4096
_KEPT_BACK_BYTES = 1 << 16
_OFTEN_TIMES = 20
"""What is met so many times as often as another thing matters less."""


@dataclass(slots=True, kw_only=True)
class ErrorLine:
    """A line that tells what went wrong, standing for `count` lines alike, the last of them at `last_line`.

    `raw` is what was looked at of the line, from its start unless it is very long; `text` the same cleaned and clipped
    around what matters; `column` is the byte where it begins in a very long line, else 0.
    `before` and `after` are its neighbours. The lowest `rank` matters most.
    """

    error_class: ErrorClass
    line: int
    text: str
    raw: str
    column: int = 0
    count: int = 1
    last_line: int
    before: str = ""
    after: str = ""
    rank: int = 0


class ErrorScan:
    """Reads a text in blocks, without colour codes, and holds what it found.

    Its work is bounded: of a text with tens of thousands of such lines the counts are floors (`is_complete` is then
    False), but what tests, compilers and tracebacks say is looked for to the end. `other_lines` are those counted in no
    `ErrorLine`, for their many shapes.
    """

    def __init__(self) -> None:
        self.other_lines = 0
        self.is_complete = True
        self._forms = ErrorForms()
        self._shapes: dict[ErrorClass, dict[bytes, ErrorLine]] = {one: {} for one in ErrorClass}
        self._cache: dict[bytes, tuple[ErrorClass, bytes] | None] = {}
        self._data = b""
        self._begin = 0
        self._line = 1
        self._looks_left = _LOOKS_LIMIT
        self._frame: tuple[int, int, int] | None = None
        self._frame_owed_until = 0

    def check_integrity(self) -> None:
        """Assert that what is held is bounded and its counts agree."""
        assert 0 <= self._begin <= len(self._data)
        assert self._line >= 1
        assert len(self._cache) <= _CACHED_LIMIT
        for shapes in self._shapes.values():
            assert len(shapes) <= _SHAPES_LIMIT
            assert all(one.count >= 1 and one.line <= one.last_line for one in shapes.values())

    def feed(self, block: bytes) -> None:
        """Read on. The last lines are kept back: until what follows them is known, and since the end counts most."""
        keep_from = max(0, self._begin - _CONTEXT_BYTES)
        self._data = self._data[keep_from:] + block
        self._begin -= keep_from
        stop = self._data.rfind(b"\n", self._begin, max(self._begin, len(self._data) - _KEPT_BACK_BYTES)) + 1
        self._search(stop or max(self._begin, len(self._data) - _KEPT_BACK_BYTES))

    def finish(self) -> list[ErrorLine]:
        """Return what was found, by rank."""
        self._looks_left = max(self._looks_left, _LOOKS_LIMIT // 4)
        self._search(len(self._data))
        ranked: list[ErrorLine] = []
        tested = bool(self._shapes[ErrorClass.ASSERTION] or self._shapes[ErrorClass.FAILURE])
        for error_class, shapes in self._shapes.items():
            found = list(shapes.values())
            if error_class is ErrorClass.EXCEPTION or (error_class is ErrorClass.LOCATION and not tested):
                found.reverse()  # the last one ended the program
            elif error_class in LOG_CLASSES and len(found) > 1:
                found.insert(1, found.pop())  # the first, the last, then the rest
            ranked += _ranked(error_class, _rare_first(error_class, found))
        survived = sum(one.count for one in self._shapes[ErrorClass.EXCEPTION].values())
        ranked = [_promoted(one, survived) for one in ranked]
        return sorted(ranked, key=lambda one: (one.rank, one.line))

    def _search(self, stop: int) -> None:
        """Look at [begin, stop). Where too many lines are worth a look, what logs say is passed over for the rest."""
        for pattern in (self._forms.candidates, self._forms.grave_candidates):
            looks = max(self._looks_left, _BLOCK_LOOKS)
            self._looks_left = looks
            if self._search_for(pattern, stop):
                break
            self.is_complete = False
        self._line += self._data.count(b"\n", self._begin, stop)
        self._begin = stop

    def _search_for(self, pattern: re2._Regexp, stop: int) -> bool:
        """Look at the lines of [begin, stop) that match; return False where looks ran out, `begin` being moved on.

        `start` and `end` are those of the line of the last match; up to `start` line feeds are counted.
        """
        data = self._data
        start, end, at = self._begin, -1, self._begin
        within_line = True
        while within_line:
            within_line = False
            for match in pattern.finditer(data, at, stop):
                first = match.start()
                if first < at:  # on a line that was looked at
                    continue
                if first > end:
                    line_start = data.rfind(b"\n", at, first) + 1 or start
                    self._line += data.count(b"\n", start, line_start)
                    start = self._begin = line_start
                    end = data.find(b"\n", first)
                    end = len(data) if end < 0 else end
                if self._looks_left <= 0:
                    return False
                self._look_at(start, end, first)
                # More than one place of a very long line may tell something, but not every few bytes of it.
                within_line = end - first > _WINDOW_BYTES
                at = first + _WINDOW_BYTES // 2 if within_line else end
                if within_line:
                    break
        return True

    def _look_at(self, start: int, end: int, first: int) -> None:
        _, raw = self._window(start, end, first)
        self._looks_left -= 1
        key = without_numbers(raw)
        if key in self._cache:
            known = self._cache[key]
        else:
            known = self._classify(raw)
            if len(self._cache) >= _CACHED_LIMIT:
                self._cache.clear()
            self._cache[key] = known
        if known is None or (depends_on_others(raw) and not self._is_borne_out(raw, start, end)):
            return
        error_class, shape = known
        if error_class is ErrorClass.PYTHON_FRAME:
            self._meet_python_frame(start, end, raw)
        elif error_class is ErrorClass.FRAME:
            if self._line <= self._frame_owed_until:
                self._frame_owed_until = 0
                self._record(ErrorClass.LOCATION, shape, self._line, start, end, first=first)
        else:
            if error_class is ErrorClass.EXCEPTION:
                self._record_last_frame(start)
            self._record(error_class, shape, self._line, start, end, first=first)
            if error_class.has_frames:
                self._frame_owed_until = self._line + _AHEAD_LINES

    def _window(self, start: int, end: int, first: int) -> tuple[int, bytes]:
        """Return the part of a line that is looked at, and where it begins: one state of what was written over."""
        window = start if end - start <= _WINDOW_BYTES else max(start, first - _WINDOW_BYTES // 3)
        window = max(window, self._data.rfind(b"\r", window, min(first + 1, end)) + 1)
        raw = self._data[window : min(end, window + _WINDOW_BYTES)]
        return window, raw.partition(b"\r")[0] if b"\r" in raw else raw

    def _classify(self, raw: bytes) -> tuple[ErrorClass, bytes] | None:
        self._looks_left -= 3  # it takes about that much longer
        error_class = self._forms.classify(raw)
        return None if error_class is None else (error_class, shape_of(raw))

    def _is_borne_out(self, raw: bytes, start: int, end: int) -> bool:
        self._looks_left -= 1
        before = self._data[max(0, start - _CONTEXT_BYTES) : start].split(b"\n")[-_AHEAD_LINES:]
        return is_borne_out(raw, before, self._lines_after(end))

    def _meet_python_frame(self, start: int, end: int, raw: bytes) -> None:
        """Keep the frame as the latest; record the exception line if it follows, however it is called."""
        self._frame = (self._line, start, end)
        after = self._lines_after(end)
        ahead = exception_after_frames(raw, after)
        if ahead:
            # The lines [end + 1, at) lie between frame and exception.
            at = end + 1
            for _ in range(ahead - 1):
                at = self._data.index(b"\n", at) + 1
            line_end = self._data.find(b"\n", at)
            line_end = len(self._data) if line_end < 0 else line_end
            self._record_last_frame(at)
            self._record(ErrorClass.EXCEPTION, shape_of(after[ahead - 1]), self._line + ahead, at, line_end, first=at)

    def _record_last_frame(self, exception_start: int) -> None:
        if self._frame is not None and self._frame[1] < exception_start <= self._frame[1] + _CONTEXT_BYTES:
            line, start, end = self._frame
            if line <= self._line and self._data[start:end].lstrip().startswith(b"File "):
                shape = shape_of(self._data[start : min(end, start + _WINDOW_BYTES)])
                self._record(ErrorClass.LOCATION, shape, line, start, end, first=start)
        self._frame = None

    def _record(self, error_class: ErrorClass, shape: bytes, line: int, start: int, end: int, *, first: int) -> None:
        shapes = self._shapes[error_class]
        known = shapes.get(shape)
        if known is not None:
            if line > known.last_line:
                known.count, known.last_line = known.count + 1, line
            return
        if len(shapes) >= _SHAPES_LIMIT:  # the oldest and the newest are kept
            oldest_of_newer = next(islice(shapes, _SHAPES_LIMIT // 2, None))
            self.other_lines += shapes.pop(oldest_of_newer).count
        window, raw = self._window(start, end, first)
        line_raw = raw.decode(errors="replace")
        text = clipped(cleaned(line_raw), around=max(0, first - window))
        shapes[shape] = ErrorLine(
            error_class=error_class,
            line=line,
            text=without_clock(text) if error_class in LOG_CLASSES else text,
            raw=line_raw,
            column=window - start + 1 if end - start > _WINDOW_BYTES else 0,
            last_line=line,
            before=self._line_before(start),
            after=self._line_after(end),
        )

    def _line_before(self, start: int) -> str:
        if not start:
            return ""
        begin = self._data.rfind(b"\n", max(0, start - _CONTEXT_BYTES), start - 1) + 1
        return self._data[begin : min(start - 1, begin + _WINDOW_BYTES)].decode(errors="replace")

    def _line_after(self, end: int) -> str:
        return b"".join(self._lines_after(end, 1)).decode(errors="replace")

    def _lines_after(self, end: int, count: int = _AHEAD_LINES) -> list[bytes]:
        ahead = self._data[end + 1 : end + 1 + _CONTEXT_BYTES].split(b"\n", count)[:count]
        return [line[:_WINDOW_BYTES] for line in ahead]


def _rare_first(error_class: ErrorClass, found: list[ErrorLine]) -> list[ErrorLine]:
    """Return what is met often behind what is not: a program that went on after a thousand of them lives with them."""
    most = max((one.count for one in found), default=0)
    if error_class is ErrorClass.ASSERTION or most < _OFTEN_TIMES:
        return found
    return sorted(found, key=lambda one: one.count * _OFTEN_TIMES > most)


def _promoted(one: ErrorLine, survived: int) -> ErrorLine:
    """Put a rare line of a log before the exceptions where so many of those were survived."""
    first = one.rank in (ErrorClass.FATAL.rank(0), ErrorClass.ERROR.rank(0))
    if one.error_class not in LOG_CLASSES or not first or one.count * _OFTEN_TIMES > survived:
        return one
    return replace(one, rank=0 if one.error_class is ErrorClass.FATAL else 3)


def _ranked(error_class: ErrorClass, found: list[ErrorLine]) -> list[ErrorLine]:
    """Give the lines of a class their ranks; what an assertion says in lines right below ranks behind its location."""
    place, below, last_line = -1, 0, -_AHEAD_LINES
    ranked = []
    for one in found:
        adjoins = error_class is ErrorClass.ASSERTION and 0 < one.line - last_line <= 2
        place, below = (place, min(max(below, 1) + 1, 4)) if adjoins else (place + 1, 0)
        last_line = one.line
        ranked.append(replace(one, rank=error_class.rank(place) + below))
    return ranked
