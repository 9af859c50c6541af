"""`chapbook bench`: the command that this package registers."""

from __future__ import annotations

import importlib.util
import sys
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from ..kernels.errors import UsageError

if TYPE_CHECKING:
    from .paired import Figure
    from .report import BenchReport

app = typer.Typer(add_completion=False, no_args_is_help=True, rich_markup_mode=None, pretty_exceptions_enable=False)


@app.callback(help="Measure chapbook on this machine, as ratios within one run.")
def _bench() -> None:
    """Make a group of it: there are more benchmarks to come."""


@app.command(help="Compare the engine and a session with bare llama.cpp: speed, memory, and what is computed twice.")
def speed(  # noqa: PLR0917  (flags: nobody calls it by position)
    model: Annotated[str, typer.Option("--model", "-m", help="A path or a name `chapbook models` lists.")] = "smollm2",
    n_ctx: Annotated[int | None, typer.Option(min=1, help="The window, in tokens; 8,192.")] = None,
    rounds: Annotated[int | None, typer.Option(min=1, help="How often the loops are compared; 12.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Few rounds: whether it works, not how fast it is.")] = False,
    strict: Annotated[bool, typer.Option("--strict", help="End with 1 where a target is missed.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Nothing but the last line.")] = False,
) -> int:
    """Run `speed`. A missed target is reported, and ends with 0 unless `strict`."""
    _require_extras()
    from ..runtime.models import places_of_this_machine, resolve_model  # noqa: PLC0415  (--help stays fast)
    from .speed import DEFAULT_CONTEXT_TOKENS, QUICK, SpeedPlan, run_speed  # noqa: PLC0415  (with it)

    plan = QUICK if quick else SpeedPlan()
    if rounds is not None:
        plan = msgspec.structs.replace(plan, rounds=rounds)
    path = resolve_model(model, places=places_of_this_machine())
    report = run_speed(path, plan=plan, n_ctx=n_ctx or DEFAULT_CONTEXT_TOKENS, tell=_tell)
    return _show(report, as_json=as_json, strict=strict)


@app.command(help="Measure the prefix cache: kill and resume, two sessions at once, the cost of snapshots on disk.")
def cache(  # noqa: PLR0917  (flags: nobody calls it by position)
    model: Annotated[str, typer.Option("--model", "-m", help="A path or a name `chapbook models` lists.")] = "smollm2",
    n_ctx: Annotated[int | None, typer.Option(min=1, help="The window, in tokens; the trained one to 32,768.")] = None,
    tokens: Annotated[int | None, typer.Option(min=1, help="The killed session's length; what fits.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Few rounds: whether it works, not how fast it is.")] = False,
    strict: Annotated[bool, typer.Option("--strict", help="End with 1 where a target is missed.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Nothing but the last line.")] = False,
) -> int:
    """Run `cache`. A missed target is reported, and ends with 0 unless `strict`."""
    _require_extras()
    from ..runtime.models import places_of_this_machine, resolve_model  # noqa: PLC0415  (--help stays fast)
    from .cache import QUICK, CachePlan, run_cache  # noqa: PLC0415  (with it)

    path = resolve_model(model, places=places_of_this_machine())
    plan = QUICK if quick else CachePlan()
    report = run_cache(path, plan=plan, n_ctx=n_ctx, tokens=tokens, tell=_tell, found=_found)
    return _show(report, as_json=as_json, strict=strict)


@app.command(help="Measure the arrival gate: its time against the tokenizer's, its memory, reads of what it stored.")
def gate(
    model: Annotated[str, typer.Option("--model", "-m", help="A path or a name `chapbook models` lists.")] = "smollm2",
    quick: Annotated[bool, typer.Option("--quick", help="Small texts: whether it works, not how fast it is.")] = False,
    strict: Annotated[bool, typer.Option("--strict", help="End with 1 where a target is missed.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Nothing but the last line.")] = False,
) -> int:
    """Run `gate`. A missed target is reported, and ends with 0 unless `strict`."""
    _require_extras()
    from ..runtime.models import places_of_this_machine, resolve_model  # noqa: PLC0415  (--help stays fast)
    from .gate import QUICK, GatePlan, run_gate  # noqa: PLC0415  (with it)

    path = resolve_model(model, places=places_of_this_machine())
    report = run_gate(path, plan=QUICK if quick else GatePlan(), tell=_tell)
    return _show(report, as_json=as_json, strict=strict)


def _show(report: BenchReport, *, as_json: bool, strict: bool) -> int:
    from .report import json_line, report_lines  # noqa: PLC0415  (loads what --help does not need)

    if not as_json:
        sys.stdout.write("\n".join(report_lines(report)) + "\n\n")
    sys.stdout.write(json_line(report) + "\n")
    return 1 if strict and report.missed else 0


def _require_extras() -> None:
    missing = [name for name in ("llama_cpp", "gguf") if importlib.util.find_spec(name) is None]
    if missing:
        raise UsageError(
            f"this benchmark needs {' and '.join(missing)}, which is not installed: pip install 'chapbook[llama,bench]'"
        )


def _tell(what: str) -> None:
    sys.stderr.write(f"measuring {what}\n")


def _found(figure: Figure) -> None:
    from .report import figure_line  # noqa: PLC0415  (loads what --help does not need)

    sys.stderr.write(f"  {figure_line(figure)}\n")
