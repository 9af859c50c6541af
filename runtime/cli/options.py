"""The options that commands share, declared once: each is a flag of every command that takes its group."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_type_hints

import typer

from ...kernels.errors import UsageError
from ..modes import PLAN_MODE

Options = TypeVar("Options")


@dataclass(frozen=True, kw_only=True)
class PlaceOptions:
    """Where to work, and which configuration holds."""

    workspace: Annotated[Path, typer.Option("--workspace", "-C", help="The folder to work in.")] = Path()
    store: Annotated[str | None, typer.Option(help="Where sessions are kept, from the workspace.")] = None
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Set any key of the configuration.")
    ] = None
    workspace_config: Annotated[
        bool, typer.Option("--workspace-config/--no-workspace-config", help="Read chapbook.toml of the workspace.")
    ] = True
    no_color: Annotated[bool, typer.Option("--no-color", help="No colours; so does NO_COLOR.")] = False

    def flags(self) -> dict[str, object]:
        """Return what these options say as keys of the configuration; None is a flag that was not given."""
        return {"store": self.store}


@dataclass(frozen=True, kw_only=True)
class ModelOptions(PlaceOptions):
    """Which model."""

    model: Annotated[
        str | None,
        typer.Option("--model", "-m", help="A path, a name `chapbook models` lists, hf:owner/repo/file."),
    ] = None
    dialect: Annotated[str | None, typer.Option(help="How calls are written, if not as the template says.")] = None
    template: Annotated[str | None, typer.Option(help="chatml: use it in place of the model's own template.")] = None

    def flags(self) -> dict[str, object]:
        return {**super().flags(), "model": self.model, "dialect": self.dialect, "template": self.template}


@dataclass(frozen=True, kw_only=True)
class SessionOptions(ModelOptions):
    """How a session runs."""

    plan: Annotated[
        bool, typer.Option("--plan", help="Begin in plan mode: look, change nothing, submit a plan for review.")
    ] = False
    mode: Annotated[str | None, typer.Option(metavar="NAME", help="Begin in this mode; default is none.")] = None
    n_ctx: Annotated[int | None, typer.Option(help="The window, in tokens.")] = None
    allow: Annotated[list[str] | None, typer.Option(metavar="TOOL", help="Run this tool without asking.")] = None
    ask: Annotated[list[str] | None, typer.Option(metavar="TOOL", help="Ask before this tool runs.")] = None
    deny: Annotated[list[str] | None, typer.Option(metavar="TOOL", help="Never run this tool.")] = None
    tool_choice: Annotated[str, typer.Option(help="auto, required, none, or the tool to call first.")] = "auto"
    seed: Annotated[int | None, typer.Option(help="Makes a run repeatable.")] = None
    temperature: Annotated[float | None, typer.Option(help="0 takes the likeliest token.")] = None
    max_reply_tokens: Annotated[int | None, typer.Option(help="The longest reply of a step.")] = None
    rounds: Annotated[int | None, typer.Option(help="How many replies a turn may take.")] = None

    def flags(self) -> dict[str, object]:
        if self.plan and self.mode not in (None, PLAN_MODE):
            raise UsageError(f"--plan is --mode {PLAN_MODE}, and --mode names {self.mode!r}: give one of them")
        return {
            **super().flags(),
            "mode": PLAN_MODE if self.plan else self.mode,
            "engine.n_ctx": self.n_ctx,
            "tools.allow": self.allow or None,
            "tools.ask": self.ask or None,
            "tools.deny": self.deny or None,
            "sampling.seed": self.seed,
            "sampling.temperature": self.temperature,
            "sampling.max_reply_tokens": self.max_reply_tokens,
            "turn.rounds": self.rounds,
        }


def takes(options_type: type[Options]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Give a command, whose last parameter is `options`, the flags of a group; it is called with the group's value."""
    names = [field.name for field in fields(options_type)]  # type: ignore[arg-type]  # a TypeVar cannot say "dataclass"
    hints = get_type_hints(options_type, include_extras=True)

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(command)
        def called(**given: Any) -> Any:
            options = options_type(**{name: given.pop(name) for name in names})
            return command(**given, options=options)

        own = inspect.signature(command, eval_str=True)
        shared = [
            inspect.Parameter(
                name, inspect.Parameter.KEYWORD_ONLY, annotation=hints[name], default=getattr(options_type, name)
            )
            for name in names
        ]
        mine = [
            parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
            for parameter in own.parameters.values()
            if parameter.name != "options"
        ]
        parameters = [*mine, *shared]
        called.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # what typer reads
        called.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return called

    return decorate
