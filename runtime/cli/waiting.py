"""What stands on the terminal while nothing can be shown yet: the bar of a long prefill, the tool that runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from ..stream import PrefillProgressed
from .terminal import clipped, visible_line

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.live import Live

SHOWN_AFTER_S = 1.0
BAR_CHARACTERS = 30


class PrefillEstimate:
    """How far a prefill is, between two reports, which come behind each batch: within the batch that is evaluated now.

    It never goes back, and is not the whole before that is reported.
    """

    def __init__(self) -> None:
        self._last: PrefillProgressed | None = None
        self._at_s = 0.0
        self._batch_tokens = 0
        self._shown = 0.0
        self.tokens_a_second = 0.0
        """The rate of the last batch, since later tokens take longer than earlier ones; 0 before there was one."""

    def report(self, event: PrefillProgressed, *, now_s: float) -> None:
        """Take in a report. One that says less, or of another total, begins a prefill."""
        last = self._last
        if last is None or last.total_tokens != event.total_tokens or event.evaluated_tokens < last.evaluated_tokens:
            self._batch_tokens, self._shown, self.tokens_a_second = 0, 0.0, 0.0
        elif event.evaluated_tokens > last.evaluated_tokens and event.seconds > last.seconds:
            self._batch_tokens = event.evaluated_tokens - last.evaluated_tokens
            self.tokens_a_second = self._batch_tokens / (event.seconds - last.seconds)
        self._last, self._at_s = event, now_s

    def done_tokens(self, now_s: float) -> float:
        """Return what to show as evaluated."""
        last = self._last
        if last is None:
            return 0.0
        ahead = min(self.tokens_a_second * (now_s - self._at_s), self._batch_tokens)
        guessed = min(last.evaluated_tokens + ahead, last.total_tokens - 1)
        self._shown = max(self._shown, guessed, last.evaluated_tokens)
        return self._shown


class WaitingLine:
    """One line that is redrawn in place and leaves nothing behind. On what is no terminal it does nothing.

    `clock` gives seconds that never go back.
    """

    def __init__(self, console: Console, *, clock: Callable[[], float]) -> None:
        self._console, self._clock = console, clock
        self._live: Live | None = None
        self._since_s = 0.0
        self._running = ""
        self._prefill: PrefillProgressed | None = None
        self._estimate = PrefillEstimate()

    def prefill(self, event: PrefillProgressed) -> None:
        """A prefill has come so far."""
        now = self._clock()
        if self._prefill is None:
            self._since_s = now - event.seconds
        self._prefill = event
        self._estimate.report(event, now_s=now)
        self.tick()

    def running(self, name: str) -> None:
        """A tool has begun to run."""
        self.clear()
        self._running, self._since_s = name, self._clock()

    def tick(self) -> None:
        """Redraw, once the wait has been long enough to be worth a line."""
        waiting = self._prefill is not None or self._running
        if not waiting or not self._console.is_terminal or self._clock() - self._since_s < SHOWN_AFTER_S:
            return
        if self._live is None:
            from rich.live import Live  # noqa: PLC0415  heavy: only where there is something to wait for

            self._live = Live(
                console=self._console,
                auto_refresh=False,
                transient=True,
                redirect_stdout=False,
                redirect_stderr=False,
                vertical_overflow="crop",
            )
            self._live.start()
        self._live.update(self._line(), refresh=True)

    def clear(self) -> None:
        """Take the line away."""
        self._prefill, self._running = None, ""
        if self._live is not None:
            live, self._live = self._live, None
            live.stop()

    def _line(self) -> RenderableType:
        from rich.progress_bar import ProgressBar  # noqa: PLC0415  heavy: only where there is something to wait for
        from rich.table import Table  # noqa: PLC0415  with it
        from rich.text import Text  # noqa: PLC0415  with it

        row = Table.grid(padding=(0, 1))
        now = self._clock()
        if self._prefill is None:
            text = f"{clipped(visible_line(self._running), 60)} · {now - self._since_s:.0f} s"
            row.add_row(Text(text, no_wrap=True, overflow="ellipsis"))
            return row
        total = self._prefill.total_tokens
        done, rate = int(self._estimate.done_tokens(now)), self._estimate.tokens_a_second
        left = f"{(total - done) / rate:.0f} s left" if rate else "measuring"
        row.add_row(
            Text("reading"),
            ProgressBar(total=max(total, 1), completed=done, width=BAR_CHARACTERS),
            Text(f"{done:,} of {total:,} tokens · {left}", no_wrap=True, overflow="ellipsis"),
        )
        return row
