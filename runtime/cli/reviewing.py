"""Asking the person at the terminal what is to become of a submitted plan."""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from ...compaction.artifacts import SHORT_ID_DIGITS
from ..plan_review import ReviewAnswer, ReviewDecision, SubmittedPlan
from .asking import read_answer
from .terminal import boxed, console, visible, visible_line

if TYPE_CHECKING:
    from rich.console import RenderableType

WIDEST = 100
MOST_EDITED_BYTES = 4 << 20
QUESTION = "y(es, approve), k(eep planning), d(ismiss), e(dit), s(ource as it was written): "
MOST_RENDERED_CHARS = 100_000
"""A longer plan is shown as it was written: rendering it would take long."""

_FENCE_INFO = re.compile(r"^([ \t]*(?:`{3,}|~{3,}))[ \t]*[\w+#.-]{0,12}[ \t]*$", re.MULTILINE)
_SHOWN_OTHERWISE = re.compile(r"\]:|<[^<>\s]*[:@]|&#?\w+;")
"""The definition of a link, an address in angle brackets, a character reference: what is seen of them may hold letters
that were not written there, and so stand for others that are not seen."""

_DECISIONS = {
    "y": ReviewDecision.APPROVE,
    "yes": ReviewDecision.APPROVE,
    "k": ReviewDecision.KEEP_PLANNING,
    "keep": ReviewDecision.KEEP_PLANNING,
    "d": ReviewDecision.DISMISS,
    "dismiss": ReviewDecision.DISMISS,
}


class TerminalReview:
    """Shows a plan on standard error and reads the answer from standard input. Call it on the main thread.

    The plan is rendered within a frame, so that nothing in it can look like the question or its answer. Ctrl-D is no
    answer, and so is the KeyboardInterrupt that passes through.
    """

    def __init__(self, *, no_color: bool = False) -> None:
        self._console = console(sys.stderr, no_color=no_color)

    def __call__(self, plan: SubmittedPlan) -> ReviewAnswer | None:
        """Return what the person decides; None is no answer."""
        self._show(plan)
        answer: ReviewAnswer | None = None
        while answer is None:
            typed = read_answer(QUESTION)
            if typed is None:
                self._say("no answer: the plan is pending, which is no approval")
                return None
            word, _, note = typed.partition(" ")
            decision = _DECISIONS.get(word.lower())
            if decision is not None:
                answer = self._decided(decision, note.strip())
            elif word.lower() in ("e", "edit"):
                answer = self._edited(plan)
            elif word.lower() in ("s", "source"):
                self._show_source(plan.text)
        return answer

    def _decided(self, decision: ReviewDecision, note: str) -> ReviewAnswer | None:
        """Return the answer, with the feedback that is asked for; None where the question is to be put again.

        Of a note with an approval the session tells the person what it means.
        """
        if decision is ReviewDecision.KEEP_PLANNING and not note:
            typed = read_answer("What should be different? (an empty line: say nothing) ")
            if typed is None:
                return None
            note = typed
        return ReviewAnswer(decision=decision, note=note)

    def _edited(self, plan: SubmittedPlan) -> ReviewAnswer | None:
        """Return the text that an editor made of the plan, as feedback; None where it is the same, or none was made."""
        try:
            text = edit_text(plan.text)
        except (OSError, ValueError, subprocess.SubprocessError) as error:
            self._say(f"the editor came to nothing: {visible_line(str(error))}")
            return None
        if text is None or text.strip() == plan.text.strip():
            self._say("the plan is as it was")
            return None
        if not text.strip():
            self._say("nothing is left of the text: it is not sent")
            return None
        self._say("your text goes to the model as feedback, to be submitted again: nothing is approved")
        note = f"the reviewer edited the plan. Submit it again in these words, or say why not:\n\n{text}"
        return ReviewAnswer(decision=ReviewDecision.KEEP_PLANNING, note=note)

    def _show(self, plan: SubmittedPlan) -> None:
        from rich.markdown import Markdown  # noqa: PLC0415  heavy: only where something is printed
        from rich.panel import Panel  # noqa: PLC0415  with it

        self._say(f"The model submits a plan: {visible_line(plan.title)}")
        size = f"{len(plan.text.encode('utf-8', 'replace')):,} bytes"
        self._say(f"{size}, stored: chapbook plans show {plan.artifact[:SHORT_ID_DIGITS]}")
        if len(plan.text) > MOST_RENDERED_CHARS:
            self._say("It is too long to be rendered, so here it is as it was written:")
            self._show_source(plan.text)
            return
        shown = Panel(Markdown(visible(plan.text), hyperlinks=False), width=self._width)
        self._console.print(shown, soft_wrap=False)
        if leaves_out(shown, plan.text, width=self._width):
            self._say("Parts of it may not be seen when it is rendered, so here it is as it was written:")
            self._show_source(plan.text)

    def _show_source(self, text: str) -> None:
        for line in text.split("\n"):
            for row in boxed(line, width=self._width):
                self._say(row, style="")

    def _say(self, text: str, *, style: str = "bold") -> None:
        from rich.text import Text  # noqa: PLC0415  heavy: only where something is printed

        self._console.print(Text(text, style=style))

    @property
    def _width(self) -> int:
        return min(self._console.width, WIDEST)


def leaves_out(rendered: RenderableType, text: str, *, width: int) -> bool:
    """Whether letters or digits of `text` may not be in what is seen of it on so many columns: HTML, the definition of
    a link, an image, the cells of a table that is too wide.

    Cheap and on the safe side: they are counted, so what shows letters more than once counts as leaving out others.
    The language behind a fence does not.
    """
    from rich.console import Console  # noqa: PLC0415  heavy: only where something is printed

    if _SHOWN_OTHERWISE.search(text):
        return True
    plain = Console(file=io.StringIO(), width=width, color_system=None, emoji=False, highlight=False)
    with plain.capture() as captured:
        plain.print(rendered)
    written = _FENCE_INFO.sub(r"\1", visible(text))
    before, after = _counted(written), _counted(captured.get())
    more_letters = any(character.isalpha() for character in after - before)  # digits: a list numbers its items
    return more_letters or bool(before - after)


def _counted(text: str) -> Counter[str]:
    return Counter(character for character in text if character.isalnum())


def edit_text(text: str) -> str | None:
    """Return what the person's editor (VISUAL, EDITOR, else vi) makes of `text`, in a file for the owner alone; None
    where it leaves the file as it was.

    Raises OSError, ValueError for an editor that cannot be run or a text that is too long, and SubprocessError for an
    editor that ends with an error.
    """
    written = text.encode("utf-8", "backslashreplace")
    command = shlex.split(os.environ.get("VISUAL") or os.environ.get("EDITOR") or "vi")
    with tempfile.TemporaryDirectory(prefix="chapbook-plan-") as folder:
        path = Path(folder) / "plan.md"
        path.write_bytes(written)
        path.chmod(0o600)
        with _interrupts_left_to_the_editor():
            # Its screen is the terminal, also where our standard output is a pipe.
            subprocess.run([*command, str(path)], check=True, stdout=sys.stderr)
        with path.open("rb") as file:
            edited = file.read(max(MOST_EDITED_BYTES, len(written)) + 1)
        if edited == written:
            return None
        if len(edited) > MOST_EDITED_BYTES:
            raise ValueError(f"the text has more than {MOST_EDITED_BYTES:,} bytes; shorten it")
        return edited.decode("utf-8", "replace")


@contextlib.contextmanager
def _interrupts_left_to_the_editor() -> Iterator[None]:
    """Ctrl-C in the editor is the editor's: it reaches this process too, and must not end the review."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    # A function, not SIG_IGN, which the editor would inherit.
    before = signal.signal(signal.SIGINT, lambda _number, _frame: None)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
