"""One session in a process of its own: `python -m chapbook.bench.session_process KIND JOB`, see `restarts`.

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
    """What a process does with a session.

    GROW: grow one, and wait until it is on disk. RESUME: resume it, and ask. NEW: ask in a new one. UNBROKEN: grow one,
    and ask.
    """

    GROW = "grow"
    RESUME = "resume"
    NEW = "new"
    UNBROKEN = "unbroken"


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """On which model, and in which `folder` (its workspace, and beside it the snapshots).

    `templates` keeps what was learnt of the model's template, for all processes. The session is to be `tokens` long, by
    messages of `turn_tokens`.
    """

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


def encode_job(job: Job) -> str:
    """Return the job as an argument of a command."""
    return msgspec.json.encode(job, enc_hook=str).decode()


def decode_job(text: str) -> Job:
    """Return the job of `encode_job`."""
    return msgspec.json.decode(text, type=Job, dec_hook=lambda kind, value: kind(value))


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


def carry_out(kind: JobKind, job: Job) -> None:
    """Do a job, say what came of it, and hold it."""
    from ..runtime.llama import LlamaEngine  # noqa: PLC0415  (loads llama.cpp)

    started_s = time.perf_counter()
    # The unbroken session is what the others are compared with: nothing of it is on disk.
    cache = CacheOptions(folder=None if kind is JobKind.UNBROKEN else str(job.snapshots))
    with LlamaEngine.open(job.model, n_ctx=job.n_ctx, n_threads=job.n_threads, cache=cache) as opened:
        engine = ReadingEngine(opened)
        resume = kind is JobKind.RESUME
        with open_long_session(
            engine, job.workspace, templates=job.templates, with_tools=job.with_tools, resume=resume
        ) as session:
            opened_s = time.perf_counter() - started_s
            grown = answer = None
            if kind in {JobKind.GROW, JobKind.UNBROKEN}:
                text = SourceText(engine, seed=job.seed)
                turns = grow(session, text, tokens=job.tokens, turn_tokens=job.turn_tokens)
                grown = _grown(turns, tokens=session.transcript.window.token_count)
            if kind is JobKind.GROW:
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
    carry_out(JobKind(sys.argv[1]), decode_job(sys.argv[2]))
