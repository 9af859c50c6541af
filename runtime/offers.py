"""What a request offers to the model: the tools as they are now, and the grammar of a call among them."""

from __future__ import annotations

import msgspec

from .calls import CallableTool, ToolChoice
from .dialects.base import Dialect
from .engine import Grammar
from .gate import Gate
from .tool_run import CallRunner
from .transcript import Transcript


class Offers:
    """Makes the grammar anew only when the tools, the paths that exist, or the choice have changed."""

    def __init__(self, *, dialect: Dialect, runner: CallRunner, gate: Gate, transcript: Transcript) -> None:
        self._dialect = dialect
        self._runner = runner
        self._gate = gate
        self._transcript = transcript
        self._made_for: tuple[tuple[CallableTool, ...], ToolChoice] | None = None
        self._grammar: Grammar | None = None

    def tools(self) -> tuple[CallableTool, ...]:
        """Return the tools with the paths that exist now, and the blobs that stubs or the person have named."""
        state = self._transcript.state
        return self._runner.callable_tools(self._gate.citations((*state.artifacts, *state.named_hashes)))

    def grammar(self, choice: ToolChoice) -> Grammar | None:
        """Return the grammar of a call under `choice`; None where none may be made."""
        tools = self.tools()
        if self._made_for != (tools, choice):
            made = self._dialect.grammar(tools, choice=choice)
            reasoning = self._transcript.composer.chat_format.reasoning
            self._grammar = msgspec.structs.replace(made, reasoning=reasoning) if made is not None else None
            self._made_for = (tools, choice)
        return self._grammar
