"""A session of twenty steps whose replies are given, on a real engine: what it costs, and what it should.

The replies are decoded as if the model had chosen them, so that token counts repeat on any machine while the work is
real. `python -m chapbook.bench.forced_session` runs it and holds it, see `memory`.
"""

from __future__ import annotations

import contextlib
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Unpack

import msgspec

from ..kernels.tokens import TokenIds
from ..runtime.dialects import dialect_named
from ..runtime.engine import Engine, GeneratedToken, Generation, GenerationReport, SequenceId, SyncReport
from ..runtime.events import StepUsage
from ..runtime.session import Session
from ..runtime.session_settings import SessionSettings
from ..runtime.tools.spec import Policy
from ..runtime.wrapped import ForcedEngine, GenerateOptions, SyncOptions, WrappedEngine
from .played_turn import play_turn

DIALECT = "hermes"
MESSAGES = (
    "What is the password of the vault? @notes.md:1-3",
    "Write the first two lines into out.txt, and look at it.",
    "Anything else?",
)


class SessionCost(msgspec.Struct, frozen=True, kw_only=True):
    """What a session took. `engine_s` and `tools_s` are the parts of `seconds` that were spent in these."""

    usages: tuple[StepUsage, ...]
    seconds: float
    engine_s: float
    tools_s: float

    @property
    def evaluated(self) -> int:
        return sum(usage.evaluated for usage in self.usages)

    @property
    def generated(self) -> int:
        return sum(usage.generated for usage in self.usages)

    @property
    def bound(self) -> int:
        return sum(usage.bound for usage in self.usages)

    @property
    def undeclared_breaks(self) -> int:
        return sum(usage.undeclared_break is not None for usage in self.usages)

    @property
    def own_s(self) -> float:
        """Seconds that the runtime itself took."""
        return self.seconds - self.engine_s - self.tools_s


class TimedEngine(WrappedEngine):
    """Adds up the seconds that are spent in the engine."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self.seconds = 0.0

    def tokenize(self, text: str, *, parse_special: bool) -> TokenIds:
        with self._timed():
            return super().tokenize(text, parse_special=parse_special)

    def detokenize(self, tokens: TokenIds, *, special: bool = True) -> bytes:
        with self._timed():
            return super().detokenize(tokens, special=special)

    def sync(self, sequence: SequenceId, wanted: TokenIds, **options: Unpack[SyncOptions]) -> SyncReport:
        with self._timed():
            return super().sync(sequence, wanted, **options)

    def generate(self, sequence: SequenceId, **options: Unpack[GenerateOptions]) -> Generation:
        with self._timed():
            return _TimedGeneration(super().generate(sequence, **options), self)

    @contextlib.contextmanager
    def _timed(self) -> Iterator[None]:
        started_s = time.perf_counter()
        try:
            yield
        finally:
            self.seconds += time.perf_counter() - started_s


@dataclass(frozen=True, slots=True)
class _TimedGeneration:
    generation: Generation
    engine: TimedEngine

    def __iter__(self) -> Iterator[GeneratedToken]:
        tokens = iter(self.generation)
        while True:
            started_s = time.perf_counter()
            token = next(tokens, None)
            self.engine.seconds += time.perf_counter() - started_s
            if token is None:
                return
            yield token

    @property
    def report(self) -> GenerationReport:
        return self.generation.report

    def close(self) -> None:
        self.generation.close()


def given_replies() -> list[str]:
    """Return the twenty replies: reads, a search, edits, two calls at once, calls that fail, answers."""
    rendered = dialect_named(DIALECT).render_call

    def call(name: str, **arguments: object) -> str:
        return "".join(piece.text for piece in rendered(name, arguments))

    return [
        call("list", path="."),
        call("read", path="notes.md") + "\n" + call("read", path="src/main.py"),
        "I look for it. " + call("search", pattern="vault"),
        *(call("read", path="notes.md", offset=line, limit=2) for line in range(1, 9)),
        "The password of the vault is heron: notes.md says so in its third line.",
        call("write", path="out.txt", content="# Notes\n\n"),
        call("edit", path="out.txt", old="# Notes", new="# My notes"),
        call("read", path="missing.txt"),
        "<tool_call>\n{broken\n</tool_call>",
        call("read", path="out.txt"),
        call("search", pattern="def main"),
        "Done: out.txt begins with `# My notes`.",
        "Nothing more.",
    ]


def write_workspace(folder: Path) -> None:
    """Write the files that the session works on."""
    (folder / "notes.md").write_text("# Notes\n\nThe password of the vault is heron.\n" + "One more line.\n" * 20)
    (folder / "src").mkdir()
    (folder / "src" / "main.py").write_text("def main() -> int:\n    return 42\n")


@contextlib.contextmanager
def played_session(engine: Engine) -> Iterator[SessionCost]:
    """Run the session in a folder of its own, yield what it took while it is still open, then take all away.

    Raises ContextTooSmall for a window that is too small for the session prefix, UsageError for one in which the
    session did not come to its end.
    """
    timed = TimedEngine(ForcedEngine(engine, given_replies()))
    settings = SessionSettings(dialect=DIALECT, policies={"write": Policy.ALLOW, "edit": Policy.ALLOW})
    with tempfile.TemporaryDirectory(prefix="chapbook-bench-") as folder:
        write_workspace(Path(folder))
        with Session.open(timed, workspace=Path(folder), settings=settings) as session:
            timed.seconds = 0.0
            yield _play(session, timed)


def _play(session: Session, timed: TimedEngine) -> SessionCost:
    turns = [play_turn(session, message) for message in MESSAGES]
    return SessionCost(
        usages=tuple(usage for turn in turns for usage in turn.usages),
        seconds=sum(turn.seconds for turn in turns),
        engine_s=timed.seconds,
        tools_s=sum(turn.tools_s for turn in turns),
    )


class HeldSession(msgspec.Struct, frozen=True):
    """What the process that holds a session says of it: the tokens that are resident, by where they came from."""

    prefilled: int
    generated: int


def hold(arguments: list[str]) -> None:
    """Run the session, say what is resident, and keep everything until standard input ends.

    `arguments`: the model, and the `BareParameters` of its context.
    """
    from ..runtime.llama import LlamaEngine  # noqa: PLC0415  (loads llama.cpp)
    from ..runtime.llama.placement import SPARE_CELLS_DIVISOR  # noqa: PLC0415  (with it)

    path, *numbers = arguments
    n_cells, n_batch, n_ubatch, n_threads, flash_attn = map(int, numbers)
    # The engine adds its spare cells to the window: n + n / divisor makes up the cells of the baseline.
    n_ctx = n_cells * SPARE_CELLS_DIVISOR // (SPARE_CELLS_DIVISOR + 1)
    with (
        LlamaEngine.open(
            Path(path),
            n_ctx=n_ctx,
            n_batch=n_batch,
            n_ubatch=n_ubatch,
            n_threads=n_threads,
            flash_attn=None if flash_attn < 0 else bool(flash_attn),
        ) as engine,
        played_session(engine) as cost,
    ):
        resident = cost.usages[-1].window + cost.usages[-1].generated
        held = HeldSession(prefilled=resident - cost.generated, generated=cost.generated)
        sys.stdout.write(msgspec.json.encode(held).decode() + "\n")
        sys.stdout.flush()
        sys.stdin.read()


if __name__ == "__main__":
    hold(sys.argv[1:])
