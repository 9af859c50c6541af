"""Text by lines in bounded memory: a reader that goes forward through UTF-8 chunks, and where characters begin.

A line ends at a line feed and nowhere else. Columns are bytes of a line, from 1, so that reaching into a line of a
gigabyte is a skip and not a decode.
"""

from __future__ import annotations

from collections.abc import Iterator


class LineReader:
    """Goes forward through UTF-8 chunks by lines and bytes, holding one chunk at a time."""

    def __init__(self, chunks: Iterator[bytes], *, first_line: int = 1) -> None:
        """`first_line` is the number of the line that the chunks begin with."""
        self._chunks = chunks
        self._chunk = b""
        self._at = 0
        self._lines_before = first_line - 1
        self._newlines = 0
        self._last = ord("\n")
        self.passed_bytes = 0

    @property
    def lines(self) -> int:
        """The lines begun in what was passed so far; at the end, the lines of the file."""
        return self._lines_before + self._newlines + (self._last != ord("\n"))

    @property
    def ended_with_newline(self) -> bool:
        """Whether the last byte passed is a line feed, or none was passed."""
        return self._last == ord("\n")

    def check_integrity(self) -> None:
        """Assert that the place in the chunk and the counters agree."""
        assert 0 <= self._at <= len(self._chunk)
        assert 0 <= self._newlines <= self.passed_bytes
        if self._at:
            assert self._last == self._chunk[self._at - 1]

    def skip_lines(self, count: int) -> None:
        """Pass `count` line feeds, or all there is."""
        while count and self._fill():
            end, count = self._after_newlines(count, len(self._chunk))
            self._pass_to(end)

    def skip_in_line(self, size_bytes: int) -> int:
        """Pass up to `size_bytes` of the line, not its line feed; return how many were passed."""
        skipped = 0
        while skipped < size_bytes and self._fill():
            start, limit = self._at, min(len(self._chunk), self._at + size_bytes - skipped)
            newline = self._chunk.find(b"\n", start, limit)
            self._pass_to(limit if newline < 0 else newline)
            skipped += self._at - start
            if newline >= 0:
                break
        return skipped

    def take(self, *, max_lines: int, max_bytes: int) -> bytes:
        """Return what follows, up to and with the last of `max_lines` line feeds, cut at `max_bytes`."""
        taken = bytearray()
        while max_lines and len(taken) < max_bytes and self._fill():
            start = self._at
            end, max_lines = self._after_newlines(max_lines, min(len(self._chunk), start + max_bytes - len(taken)))
            self._pass_to(end)
            taken += self._chunk[start:end]
        return bytes(taken)

    def finish_line(self) -> int:
        """Pass the rest of the line with its line feed; return the bytes before the line feed."""
        size_bytes = self.skip_in_line(1 << 62)
        self.skip_lines(1)
        return size_bytes

    def count_rest(self, *, limit_bytes: int) -> bool:
        """Pass what is left, at most `limit_bytes` and a chunk; return whether the end was reached."""
        limit_bytes += self.passed_bytes
        while self._fill():
            if self.passed_bytes > limit_bytes:
                return False
            self._pass_to(len(self._chunk))
        return True

    def _fill(self) -> bool:
        while self._at == len(self._chunk):
            chunk = next(self._chunks, None)
            if chunk is None:
                return False
            self._chunk, self._at = chunk, 0
        return True

    def _after_newlines(self, count: int, limit: int) -> tuple[int, int]:
        """Return where `count` line feeds of [at, limit) have been passed, else `limit`, and how many are left."""
        present = self._chunk.count(b"\n", self._at, limit)
        if present < count:
            return limit, count - present
        at = self._at
        for _ in range(count):
            at = self._chunk.index(b"\n", at) + 1
        return at, 0

    def _pass_to(self, end: int) -> None:
        if end == self._at:
            return
        self._newlines += self._chunk.count(b"\n", self._at, end)
        self._last = self._chunk[end - 1]
        self.passed_bytes += end - self._at
        self._at = end


def character_start(data: bytes, at: int) -> int:
    """Return `at`, or the start of the UTF-8 character that [0, at) would cut in two."""
    for back in range(1, min(4, at + 1)):
        lead = data[at - back]
        if lead & 0xC0 != 0x80:  # not a continuation byte: it says how long its character is
            length = 4 if lead >= 0xF0 else 3 if lead >= 0xE0 else 2 if lead >= 0xC0 else 1
            return at - back if length > back and _is_character(data[at - back : at - back + length]) else at
    return at


def _is_character(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError as problem:
        return problem.reason == "unexpected end of data"
    return True
