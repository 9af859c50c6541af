"""One session in a process of its own: `python -m chapbook.bench.session_process JOB`, see `restarts`.

It does what the job says, says what came of it in one line of JSON, and keeps everything until standard input ends.
"""

from __future__ import annotations

import enum
import sys
import time
from pathlib import Path

import msgspec

from ..runtime.prefix_cache.options import CacheOptions
from .long_session import Answer, ReadingEngine, SourceText, ask, grow, open_long_session
from .played_turn import PlayedTurn


class JobKind(enum.StrEnum):
    """What a process does."""

    GROW = "grow a session, and wait until it is on disk"
    RESUME = "resume the session, and ask"
    NEW = "ask in a new session"
    UNBROKEN = "grow a session, and ask"


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """What a process is to do, on which model, in which `folder` (its workspace, and beside it the snapshots).

    `templates` keeps what was learnt of the model's template, for all processes. The session is to be `tokens` long, by
    messages of `turn_tokens`.
    """

    kind: JobKind
    model: Path
    folder: Path
    templates: Path
    n_ctx: int
    n_threads: int | None
    tokens: int
    turn_tokens: int
    with_tools: bool
    seed: int = 0

    @property
    def workspace(self) -> Path:
        return self.folder / "workspace"

    @property
    def snapshots(self) -> Path:
        return self.folder / "snapshots"


class Grown(msgspec.Struct, frozen=True, kw_only=True):
    """A session that was grown: its length, and the sums over its steps."""

    tokens: int
    turns: int
    evaluated: int
    bound: int
    prefill_s: float
    cache_notes: tuple[str, ...]


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What a process says."""

    grown: Grown | None = None
    answer: Answer | None = None


def carry_out(job: Job) -> None:
    """Do a job, say what came of it, and hold it."""
    from ..runtime.llama import LlamaEngine  # noqa: PLC0415  (loads llama.cpp)

    started_s = time.perf_counter()
    # The unbroken session is what the others are compared with: nothing of it is on disk.
    cache = CacheOptions(folder=None if job.kind is JobKind.UNBROKEN else str(job.snapshots))
    with LlamaEngine.open(job.model, n_ctx=job.n_ctx, n_threads=job.n_threads, cache=cache) as opened:
        engine = ReadingEngine(opened)
        resume = job.kind is JobKind.RESUME
        with open_long_session(
            engine, job.workspace, templates=job.templates, with_tools=job.with_tools, resume=resume
        ) as session:
            opened_s = time.perf_counter() - started_s
            grown = answer = None
            if job.kind in {JobKind.GROW, JobKind.UNBROKEN}:
                text = SourceText(engine, seed=job.seed)
                turns = grow(session, text, tokens=job.tokens, turn_tokens=job.turn_tokens)
                grown = _grown(turns, tokens=session.transcript.window.token_count)
            if job.kind is JobKind.GROW:
                engine.settle()
            else:
                answer = msgspec.structs.replace(ask(session, engine), opened_s=opened_s)
            sys.stdout.write(msgspec.json.encode(Outcome(grown=grown, answer=answer)).decode() + "\n")
            sys.stdout.flush()
            sys.stdin.read()


def _grown(turns: list[PlayedTurn], *, tokens: int) -> Grown:
    usages = [usage for turn in turns for usage in turn.usages]
    return Grown(
        tokens=tokens,
        turns=len(turns),
        evaluated=sum(usage.evaluated for usage in usages),
        bound=sum(usage.bound for usage in usages),
        prefill_s=sum(usage.prefill_s for usage in usages),
        cache_notes=tuple(note for turn in turns for note in turn.cache_notes),
    )


if __name__ == "__main__":
    carry_out(msgspec.json.decode(sys.argv[1], type=Job, dec_hook=lambda kind, value: kind(value)))
