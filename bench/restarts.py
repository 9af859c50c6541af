"""A session that is killed and resumed in a new process, with its snapshots and without, against one never broken.

Each process gets a folder of its own, a copy of what the killed one left: none sees what another wrote.
"""

from __future__ import annotations

import shutil
import statistics
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from ..runtime.engine import MemoryKind, SyncSource
from .child_process import held_process
from .long_session import Answer
from .paired import Figure, Target, judged
from .played_turn import reuse_target
from .session_process import Grown, Job, JobKind, Outcome, encode_job

WARM_TARGET = Target("<=", 0.01)
COLD_TARGET = Target(">=", 0.5)
"""About 1: other processes take their part of a prefill that lasts minutes, but not half of it."""

ALL_TARGET = Target(">=", 1.0)


class Restarts(msgspec.Struct, frozen=True, kw_only=True):
    """What came of each process. `warm` were resumed with the snapshots, `cold` without.

    The same tokens were prefilled thrice, each time followed by a resume (or less of these): turn by turn in the
    session that was killed, all at once where the snapshots were deleted, turn by turn in the unbroken session.
    """

    killed: Grown
    cold: Answer
    unbroken_grown: Grown
    unbroken: Answer
    warm: tuple[Answer, ...]
    new: Answer

    @property
    def cold_s(self) -> tuple[float, float, float]:
        """The seconds of the three cold prefills."""
        unbroken_s = self.unbroken_grown.prefill_s + self.unbroken.usage.prefill_s
        return self.killed.prefill_s, self.cold.usage.ttft_s, unbroken_s


def compare_restarts(job: Job, *, resumes: int, tell: Callable[[str], None]) -> Restarts:
    """Grow a session in `job.folder`, kill its process, and resume it in others, `resumes` times (1 to 3) with its
    snapshots. Raises EngineError where a process fails."""
    job.workspace.mkdir(parents=True, exist_ok=True)
    warm: list[Answer] = []

    def resume() -> None:
        if len(warm) < resumes:
            warm.append(_answer(_run_in_copy(job, JobKind.RESUME)))

    tell(f"a session of {job.tokens:,} tokens, killed; then resumed, and a new one")
    killed = _grown(_run(job, JobKind.GROW))
    resume()
    new = _answer(_run_in_copy(job, JobKind.NEW))
    tell("the same without the snapshots")
    cold = _answer(_run_in_copy(job, JobKind.RESUME, with_snapshots=False))
    resume()
    tell("the same session, unbroken")
    apart = msgspec.structs.replace(job, folder=job.folder / "unbroken")
    apart.workspace.mkdir(parents=True)
    unbroken = _run(apart, JobKind.UNBROKEN)
    resume()
    return Restarts(
        killed=killed,
        cold=cold,
        unbroken_grown=_grown(unbroken),
        unbroken=_answer(unbroken),
        warm=tuple(warm),
        new=new,
    )


def restart_figures(restarts: Restarts, memory: MemoryKind) -> tuple[Figure, ...]:
    """Return what a resume cost against a cold prefill, whether it went on as the unbroken session, and a new one."""
    warm, cold, cold_s = restarts.warm, restarts.cold, restarts.cold_s
    on_disk = sum(answer.usage.source == SyncSource.DISK for answer in warm)
    ttft_s = [answer.usage.ttft_s for answer in warm]
    opened_s = [answer.opened_s + answer.usage.ttft_s for answer in warm]
    what = _joined(_what(warm[0]), *restarts.killed.cache_notes[-1:])
    deleted = cold.usage.ttft_s / statistics.fmean(cold_s[::2])
    return (
        judged(Figure(name="resumed from a disk snapshot", value=on_disk / len(warm), note=what), ALL_TARGET),
        judged(_of_cold("TTFT resumed / cold", ttft_s, cold_s), WARM_TARGET),
        _of_cold("the same, with all that opens", opened_s, cold_s),
        judged(Figure(name="TTFT resumed / cold, deleted", value=deleted, note=_what(cold)), COLD_TARGET),
        judged(_evaluated("resumed, evaluated / bound", warm), reuse_target(memory)),
        judged(_equal_tokens("resumed, equal greedy tokens", restarts.unbroken, warm), ALL_TARGET),
        _equal_tokens("the same, deleted", restarts.unbroken, (cold,)),
        judged(_evaluated("new session, evaluated / bound", (restarts.new,)), reuse_target(memory)),
    )


def _evaluated(name: str, answers: tuple[Answer, ...]) -> Figure:
    evaluated = sum(answer.usage.evaluated for answer in answers)
    return Figure(name=name, value=evaluated / sum(answer.usage.bound for answer in answers), note=_what(answers[0]))


def _equal_tokens(name: str, unbroken: Answer, answers: tuple[Answer, ...]) -> Figure:
    """Return the share of the unbroken session's reply with which the worst one begins; none where the request differs.

    Bits agree only where batches do: a cold prefill evaluates otherwise than the turns did.
    """
    equal = [_equal(answer.reply, unbroken.reply) if answer.request == unbroken.request else 0 for answer in answers]
    of = len(unbroken.reply)
    return Figure(name=name, value=min(equal) / of, note=f"{min(equal)} of {of}")


def _equal(left: tuple[int, ...], right: tuple[int, ...]) -> int:
    """Return how many tokens two replies have in common at their start."""
    differs = (index for index, (one, other) in enumerate(zip(left, right, strict=True)) if one != other)
    return next(differs, len(right))


def _what(answer: Answer) -> str:
    usage = answer.usage
    counts = (
        f"source: {usage.source}, {usage.cached:,} of {usage.window:,} cached, {usage.evaluated:,} evaluated, "
        f"bound {usage.bound:,}"
    )
    return _joined(counts, usage.reason, *answer.cache_notes)


def _joined(*parts: str) -> str:
    return "; ".join(part for part in parts if part)


def _of_cold(name: str, seconds: Sequence[float], cold_s: Sequence[float]) -> Figure:
    """Return the median of the ratios of each resume to the cold prefill before it, at about the same load."""
    ratios = [warm / cold for warm, cold in zip(seconds, cold_s, strict=False)]
    pairs = ", ".join(f"{warm:.2f} of {cold:.1f} s" for warm, cold in zip(seconds, cold_s, strict=False))
    return Figure(name=name, value=statistics.median(ratios), note=pairs)


def _run(job: Job, kind: JobKind) -> Outcome:
    """Run a process until it has said what came of its job, and kill it."""
    with held_process("session_process", [kind, encode_job(job)]) as process:
        process.kill()
        return msgspec.json.decode(process.said, type=Outcome)


def _run_in_copy(job: Job, kind: JobKind, *, with_snapshots: bool = True) -> Outcome:
    """Run a process in a copy of the folder as the killed one left it, which is gone afterwards."""
    with tempfile.TemporaryDirectory(dir=job.folder) as name:
        copy = msgspec.structs.replace(job, folder=Path(name))
        shutil.copytree(job.workspace, copy.workspace)
        if with_snapshots and job.snapshots.is_dir():
            shutil.copytree(job.snapshots, copy.snapshots)
        return _run(copy, kind)


def _grown(outcome: Outcome) -> Grown:
    assert outcome.grown is not None
    return outcome.grown


def _answer(outcome: Outcome) -> Answer:
    assert outcome.answer is not None
    return outcome.answer
