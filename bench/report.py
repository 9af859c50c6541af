"""The report of a benchmark: figures with what they were measured on, as lines for a person and as one of JSON."""

from __future__ import annotations

import importlib.metadata
import math
import os
import subprocess
from pathlib import Path

import msgspec

from ..runtime.doctor import examine_machine
from ..runtime.engine import EngineInfo
from .bare_loop import BareParameters
from .paired import Figure, is_undecided

NAME_WIDTH = 30


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """Where it was measured. `load` is the load average of the last minute, None where the system has none."""

    system: str
    cpu_flags: tuple[str, ...]
    cores: int
    memory_bytes: int
    python: str
    load: float | None


class BenchedModel(msgspec.Struct, frozen=True, kw_only=True):
    """The model and the context that was measured."""

    name: str
    fingerprint: str
    memory: str
    n_ctx: int
    n_batch: int
    n_ubatch: int
    n_threads: int


class BenchReport(msgspec.Struct, frozen=True, kw_only=True):
    """A run. `commit` is that of the checkout which the package was run from, empty for an installed one.

    `missed` names the figures that are not what they should be.
    """

    benchmark: str
    chapbook: str
    llama_cpp_python: str
    commit: str
    machine: Machine
    model: BenchedModel
    figures: tuple[Figure, ...]
    missed: tuple[str, ...]


def make_report(
    benchmark: str, figures: tuple[Figure, ...], *, info: EngineInfo, parameters: BareParameters
) -> BenchReport:
    """Put figures together with the machine, the model and the versions."""
    examined = examine_machine()
    return BenchReport(
        benchmark=benchmark,
        chapbook=examined.chapbook,
        llama_cpp_python=importlib.metadata.version("llama-cpp-python"),
        commit=checkout_commit(),
        machine=Machine(
            system=examined.system,
            cpu_flags=examined.cpu_flags,
            cores=examined.cores,
            memory_bytes=examined.memory_bytes,
            python=examined.python,
            load=round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
        ),
        model=BenchedModel(
            name=info.model_name,
            fingerprint=info.fingerprint,
            memory=info.memory,
            n_ctx=info.n_ctx,
            n_batch=parameters.n_batch,
            n_ubatch=parameters.n_ubatch,
            n_threads=parameters.n_threads,
        ),
        figures=figures,
        missed=tuple(figure.name for figure in figures if figure.met is False),
    )


def checkout_commit() -> str:
    """Return the commit of the checkout that this package lies in, marked where files differ; empty without one."""
    root = Path(__file__).resolve().parents[1]
    if not (root / ".git").exists():
        return ""
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def report_lines(report: BenchReport) -> list[str]:
    """Return the report for a person."""
    machine, model = report.machine, report.model
    load = "" if machine.load is None else f", load {machine.load}"
    return [
        f"{report.benchmark}: {model.name}, n_ctx {model.n_ctx:,}, {model.memory}, {model.n_threads} threads",
        f"on {machine.system}, {machine.cores} cores{load}; llama-cpp-python {report.llama_cpp_python}, "
        f"chapbook {report.chapbook} {report.commit}".rstrip(),
        "",
        *(figure_line(figure) for figure in report.figures),
        "",
        f"missed: {', '.join(report.missed)}" if report.missed else "every target is met",
    ]


def json_line(report: BenchReport) -> str:
    """Return the report as one line. A value that is not a number is null."""
    return msgspec.json.encode(report).decode()


def figure_line(figure: Figure) -> str:
    """Return a figure for a person: its value, its target and whether that is met, and what is to be said of it."""
    value = "no value" if math.isnan(figure.value) else f"{_number(figure.value)} {figure.unit}".rstrip()
    parts = [f"{figure.name:<{NAME_WIDTH}} {value:<14}"]
    if figure.target is not None:
        target = f"{figure.target.relation} {figure.target.limit:g} {figure.unit}".rstrip()
        parts.append(f"target {target:<10} {'met' if figure.met else 'MISSED':<7}")
    if figure.low is not None and figure.high is not None and figure.of_totals is not None:
        parts.append(
            f"95 % of the median: {_number(figure.low)} to {_number(figure.high)}, {figure.pairs:,} pairs, "
            f"of totals {_number(figure.of_totals)}"
        )
    if is_undecided(figure):
        parts.append("(undecided: more --rounds or a quieter machine would tell)")
    if figure.note:
        parts.append(figure.note)
    return "  ".join(parts).rstrip()


def _number(value: float) -> str:
    return f"{value:,.0f}" if value == int(value) and value != 1 else f"{value:,.3f}"
