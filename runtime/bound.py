"""The lower bound of a step: what must be evaluated, whatever was kept, as the logs of a store tell it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, TypeAlias

from ..kernels.prefix import common_prefix_length
from ..kernels.tokens import NO_TOKENS, TOKEN_BYTES, TokenIds, concat_tokens, decode_tokens
from .engine import SyncReport, SyncSource
from .log_reading import replaced_prefixes

READ_TOKENS = 4096
"""How much of another session is read at a time: most part ways with this one at their first message."""

COLD_START = "cold start"
"""Nothing was resident: a new process, or a sequence that is used for the first time."""

NOT_HELD = (
    "what earlier requests asked for is held no more: cut off, or never copied before its process or its room went"
)

LAST_TOKEN = "the last token again, for what follows it"
"""A request that is known whole costs one token all the same: nothing keeps its logits across a restart."""


class BoundAccount:
    """What requests of this session and of others were, to tell what of a new one none of them holds.

    `others` are the `tokens.i32` of sessions with the same model fingerprint. A session's file up to its end counts as
    a request and its reply; what a session that stopped had appended and not yet asked about counts with it. Where its
    prefix was replaced, so does each prefix with the messages behind it. A file that is missing or cannot be read
    holds nothing.
    """

    def __init__(self, others: Iterable[Path] = ()) -> None:
        self._others = [_OtherRun(path, parts) for path in others for parts in _runs_of(path)]
        self._runs: list[TokenIds] = []
        self._last = NO_TOKENS

    def add(self, request: TokenIds, *, reply: TokenIds) -> None:
        """Take in a request of this session and its reply, as far as it was generated."""
        run = concat_tokens((request, reply))
        if any(common_prefix_length(run, known) == len(run) for known in self._runs):
            return
        self._runs = [known for known in self._runs if common_prefix_length(run, known) < len(known)]
        self._runs.append(run)

    def bound(self, request: TokenIds) -> int:
        """Return the tokens of `request`, shape (n,), that no earlier request and its reply begins with."""
        unchanged = common_prefix_length(request, self._last)
        own = max((common_prefix_length(request, run) for run in self._runs), default=0)
        others = max((other.shared_with(request, unchanged=unchanged) for other in self._others), default=0)
        self._last = request
        return len(request) - max(own, others)

    def check_integrity(self) -> None:
        """Assert that no run is kept that another one begins with."""
        for index, run in enumerate(self._runs):
            for other in self._runs[index + 1 :]:
                assert common_prefix_length(run, other) < min(len(run), len(other))


_Parts: TypeAlias = tuple[tuple[int, int | None], ...]
"""Ranges [start, end) of a token file that make up a run one after another; None: to the end of the file."""


def _runs_of(path: Path) -> list[_Parts]:
    """Return the runs in a session's token file: one, or one for each session prefix that was in force."""
    prefixes = replaced_prefixes(path.parent)
    if not prefixes:
        return [((0, None),)]
    runs: list[_Parts] = []
    messages: list[tuple[int, int | None]] = []
    for index, prefix in enumerate(prefixes):
        # Under this prefix the file grew by [end of the prefix, start of the next one), or to its end.
        grown = (prefix.stop, prefixes[index + 1].start if index + 1 < len(prefixes) else None)
        runs.append(((prefix.start, prefix.stop), *messages, grown))
        messages.append(grown)
    return runs


@dataclass(slots=True)
class _OtherRun:
    """A run of another session, and how many of its tokens the last request began with.

    The file is opened only as long as it is read: a store has more sessions than a process may open files.
    """

    path: Path
    parts: _Parts
    shared: int = 0
    parted: bool = False

    def shared_with(self, request: TokenIds, *, unchanged: int) -> int:
        """Return how many tokens of `request` this session begins with.

        `unchanged` is how many of them are those of the last request. A file only grows, so that where they parted
        before that, they still do.
        """
        if self.parted and self.shared < unchanged:
            return self.shared
        self.shared = min(self.shared, unchanged)
        self.parted = False
        try:
            if not self.path.is_file():  # a FIFO would wait for ever
                return 0
            with self.path.open("rb") as file:
                while self.shared < len(request):
                    run = self._read(file)
                    if not len(run):
                        break
                    # [shared, shared + len(run)) of the request against what was read.
                    wanted = request[self.shared : self.shared + len(run)]
                    same = common_prefix_length(wanted, run)
                    self.shared += same
                    if same < len(wanted):
                        self.parted = True
                        break
        except OSError:
            self.shared = 0
        return self.shared

    def _read(self, file: BinaryIO) -> TokenIds:
        """Return some of the tokens that follow the first `shared` ones; none at the end."""
        before = 0
        for start, end in self.parts:
            # This part holds [before, before + end - start) of the run.
            offset = start + self.shared - before
            if end is None or offset < end:
                file.seek(offset * TOKEN_BYTES)
                most = READ_TOKENS if end is None else min(READ_TOKENS, end - offset)
                data = file.read(most * TOKEN_BYTES)
                # A writer may be in the middle of a token: whole ones only.
                return decode_tokens(data[: len(data) // TOKEN_BYTES * TOKEN_BYTES])
            before += end - start
        return NO_TOKENS


def explain_difference(report: SyncReport, bound: int) -> str:
    """Return why a sync evaluated another number of tokens than the bound, and nothing where it did not."""
    more = report.evaluated - bound
    if more == 0:
        return ""
    if report.cancelled:
        return f"cancelled after {report.evaluated} of at least {bound} tokens"
    if more < 0:
        held = "the engine" if report.source in (SyncSource.RESIDENT, SyncSource.REWIND) else f"a {report.source}"
        return f"{-more} fewer than the bound, which knows this store only: {held} held more"
    if bound == 0 and more == 1:
        return LAST_TOKEN
    if not report.reason and report.source is SyncSource.NOTHING:
        return COLD_START
    return f"{more} more than the bound: {report.reason or NOT_HELD}"
