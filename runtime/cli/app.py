"""The commands and what they are called. A command's module is imported when it is called, plug-ins too."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
from collections.abc import Callable
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from ...kernels.errors import UsageError

PLUGINS = "chapbook.commands"
"""The entry point group in which other packages register commands: a name, and a typer app or function."""

# name → module of this package, and what it does as `chapbook --help` shows it
COMMANDS = {
    "run": ("turns", "Run one turn on a task, and report."),
    "chat": ("turns", "Talk, turn after turn."),
    "resume": ("turns", "Go on with a session."),
    "sessions": ("inspect", "List the sessions of a workspace."),
    "log": ("log", "Show, verify or repair a session's log."),
    "artifact": ("artifact", "List, look into or check what is stored of large results."),
    "plans": ("plans", "List the plans that were submitted, or show one."),
    "plan": ("plans", "Show the ledger of a plan's steps."),
    "models": ("inspect", "List the models on this machine."),
    "prefix": ("prefix", "Show the session prefix and its cost."),
    "cache": ("cache", "Show, shrink or check what is kept of evaluated tokens."),
    "config": ("settings", "Show every setting and where it comes from."),
    "doctor": ("checkup", "Check this machine and a model."),
}


def run_app(arguments: list[str]) -> int:
    """Run the command of `arguments` and return its exit code. Raises what the command raises."""
    app = typer.Typer(
        cls=_Commands,
        help="An agent for small local models, in your process.",
        no_args_is_help=True,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_options)
    command = typer.main.get_command(app)
    try:
        code = command.main(args=arguments, prog_name="chapbook", standalone_mode=False)
    except typer.Abort as error:
        raise KeyboardInterrupt from error
    except Exception as error:
        # typer carries its own copy of click or uses the installed one, by version: tell its errors by what they do.
        if not hasattr(error, "show") or not hasattr(error, "exit_code"):
            raise
        if "--json" in arguments:
            raise UsageError(getattr(error, "message", str(error))) from error
        error.show()
        code = error.exit_code
    return code if isinstance(code, int) else 0


def _options(
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of a fault.")] = False,
    version: Annotated[
        bool, typer.Option("--version", help="Show the version.", callback=_version, is_eager=True)
    ] = False,
) -> None:
    del version  # its callback has run
    if debug:
        os.environ["CHAPBOOK_DEBUG"] = "1"


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"chapbook {importlib.metadata.version('chapbook')}")
        raise typer.Exit


class _Commands(TyperGroup):
    """All commands. What is listed is not imported: `--help` is fast, and no plug-in can break it."""

    def list_commands(self, ctx: Any) -> list[str]:
        del ctx  # they are the same everywhere
        return [*COMMANDS, *sorted(set(_plugins()) - set(COMMANDS))]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        del ctx  # they are the same everywhere
        if cmd_name in COMMANDS:
            module, text = COMMANDS[cmd_name]
            return _Late(cmd_name, text, lambda: _own(module, cmd_name))
        plugin = _plugins().get(cmd_name)
        if plugin is None:
            return None
        return _Late(cmd_name, f"From {_package_of(plugin)}; {cmd_name} --help says more.", lambda: _load(plugin))


class _Late(TyperCommand):
    """Stands for a command that is imported once it is called."""

    def __init__(self, name: str, text: str, load: Callable[[], Any]) -> None:
        super().__init__(name, help=text, short_help=text, rich_markup_mode=None)
        self._load = load

    def make_context(self, info_name: Any, args: Any, parent: Any = None, **extra: Any) -> Any:
        return self._load().make_context(info_name, args, parent=parent, **extra)


def _own(module: str, name: str) -> Any:
    return _as_command(getattr(importlib.import_module(f".{module}", __package__), name), name)


def _as_command(found: Any, name: str) -> Any:
    """Return the command of a function or a typer app; other things are taken for commands already."""
    if isinstance(found, typer.Typer):
        command = typer.main.get_command(found)
        command.name = name
        return command
    if not callable(found) or hasattr(found, "make_context"):
        return found
    app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
    app.command(name)(found)
    return typer.main.get_command(app)


def _plugins() -> dict[str, importlib.metadata.EntryPoint]:
    return {plugin.name: plugin for plugin in importlib.metadata.entry_points(group=PLUGINS)}


def _load(plugin: importlib.metadata.EntryPoint) -> Any:
    """Import a plug-in. Raises UsageError where something that it needs is not installed."""
    try:
        return _as_command(plugin.load(), plugin.name)
    except ImportError as error:
        package = _package_of(plugin)
        extra = f"{package}[{plugin.name}]"
        raise UsageError(
            f"the command {plugin.name} cannot be loaded: {error}. It may need more than is installed: "
            f"pip install '{extra}'"
        ) from error


def _package_of(plugin: importlib.metadata.EntryPoint) -> str:
    return plugin.dist.name if plugin.dist is not None else "a plug-in"
