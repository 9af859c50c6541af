"""`chapbook doctor`: what there is, what it can do, and what stands in the way."""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated

import typer

from ...compaction.durable_files import way_out
from ...kernels.errors import ModelLoadError
from ..chat_format import AppendKind
from ..doctor import MachineReport, ModelQuestions, ModelReport, examine_machine, examine_model
from ..llama.build_info import BuildInfo, build_info
from ..llama.reuse_tests import run_mode_tests
from ..prefix_cache.mode_results import ModeResult, ModeResults, Outcome, all_results, save_results
from ..sizes import size_text
from ..template_report import TemplateDescription
from .opening import (
    Place,
    configured_model,
    found_models,
    modes_folder,
    open_engine,
    open_place,
    template_cache_folder,
)
from .options import ModelOptions, takes
from .terminal import print_json, visible_line

WIDTH = 18


@takes(ModelOptions)
def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
    self_test: Annotated[
        bool, typer.Option("--self-test", help="Load the model and test each way of reusing KV.")
    ] = False,
    n_ctx: Annotated[int | None, typer.Option(help="The window to plan for, in tokens.")] = None,
    *,
    options: ModelOptions,
) -> int:
    """Check this machine, the llama.cpp build and a model. Ends with 1 where something is wrong."""
    place = open_place(options)
    problems: list[str] = []
    machine = examine_machine()
    build = _build(problems)
    path = None if build is None else _model(place)
    model = None if path is None else examine_model(path, _questions(place, n_ctx))
    if model is not None and model.template_problem:
        problems.append(model.template_problem)
    if self_test:
        tested = _self_test(path, place, n_ctx, problems)
    else:
        tested = None if model is None or build is None else _known_results(model, build, place)
    if tested is not None:
        problems += [
            f"{result.name} does not work with this model and this build of llama.cpp, and is off: {result.reason}"
            for result in tested.failed
        ]
    if as_json:
        print_json({"machine": machine, "llama_cpp": build, "model": model, "self_test": tested, "problems": problems})
    else:
        _print("machine", _machine_lines(machine))
        _print("llama.cpp", [] if build is None else _build_lines(build, machine))
        if model is not None:
            _print("model", _model_lines(model))
        if model is not None:
            _print(*_test_lines(tested))
        if path is None and build is not None:
            sys.stdout.write("\nno model was named: --model shows what there is to know of one\n")
        for problem in problems:
            sys.stdout.write(f"\nproblem: {visible_line(problem)}\n")
    return 1 if problems else 0


def _build(problems: list[str]) -> BuildInfo | None:
    try:
        return build_info()
    except ModelLoadError as error:
        problems.append(str(error))
        return None


def _model(place: Place) -> Path | None:
    """Return the model that was named, or the only one there is."""
    if place.loaded.config.model is None and len(found_models()) != 1:
        return None
    return configured_model(place)


def _questions(place: Place, n_ctx: int | None) -> ModelQuestions:
    config = place.loaded.config
    return ModelQuestions(
        n_ctx=n_ctx or config.engine.n_ctx,
        n_ubatch=config.engine.n_ubatch,
        type_k=config.engine.type_k,
        type_v=config.engine.type_v,
        dialect=config.dialect,
        template=config.template,
        cache_folder=template_cache_folder(),
    )


def _self_test(path: Path | None, place: Place, n_ctx: int | None, problems: list[str]) -> ModeResults | None:
    """Test the model and keep the results, so that a mode that failed stays off."""
    if path is None:
        problems.append("there is no model to test: name one with --model")
        return None
    with (
        open_engine(path, place, n_ctx=n_ctx) as engine,
        tempfile.TemporaryDirectory(prefix="chapbook-self-test-") as folder,
    ):
        results = run_mode_tests(engine, folder=Path(folder), on_test=_say_test)
        tested = ModeResults(identity=engine.identity, tested=time.time(), results=results)
    try:
        save_results(modes_folder(), tested)
    except OSError as error:
        problems.append(f"the results cannot be kept in {modes_folder()}: {way_out(error)}")
    return tested


def _say_test(mode: str) -> None:
    sys.stderr.write(f"testing: {mode.replace('_', ' ')}\n")
    sys.stderr.flush()


def _known_results(model: ModelReport, build: BuildInfo, place: Place) -> ModeResults | None:
    """Return what the last self-test of this model with this build and these number types found."""
    engine = place.loaded.config.engine
    wanted = (model.fingerprint, engine.type_k or "f16", engine.type_v or "f16", build.identity)
    for results in all_results(modes_folder()):
        known = results.identity
        if (known.fingerprint, known.type_k, known.type_v, known.build) == wanted:
            return results
    return None


def _print(title: str, lines: list[tuple[str, str]]) -> None:
    if lines:
        sys.stdout.write(f"\n{title}\n")
    for name, value in lines:
        sys.stdout.write(f"  {name:{WIDTH}} {visible_line(value)}\n")


def _machine_lines(machine: MachineReport) -> list[tuple[str, str]]:
    packages = ", ".join(f"{name} {version}" for name, version in machine.packages.items())
    return [
        ("chapbook", machine.chapbook),
        ("Python", f"{machine.python} on {machine.system}"),
        ("packages", packages),
        ("cores", f"{machine.cores} physical"),
        ("memory", f"{size_text(machine.free_memory_bytes)} free of {size_text(machine.memory_bytes)}"),
        ("commands", machine.confinement),
        ("search", f"ripgrep, {machine.ripgrep}" if machine.ripgrep else "no ripgrep here: a slower walk in Python"),
    ]


def _build_lines(build: BuildInfo, machine: MachineReport) -> list[tuple[str, str]]:
    lines = [
        ("version", f"{build.llama_cpp} in llama-cpp-python {build.llama_cpp_python}"),
        ("uses", ", ".join(build.features)),
        ("GPU offload", "yes" if build.gpu_offload else "no: this build runs on the processor alone"),
        ("mmap, mlock", f"{'yes' if build.mmap else 'no'}, {'yes' if build.mlock else 'no'}"),
    ]
    if machine.cpu_flags:
        lines.insert(2, ("processor has", ", ".join(machine.cpu_flags)))
    return lines


def _model_lines(model: ModelReport) -> list[tuple[str, str]]:
    window = f", window {model.sliding_window_tokens:,}" if model.sliding_window_tokens else ""
    trained = "not named" if model.n_ctx_trained is None else f"{model.n_ctx_trained:,} tokens"
    files = f" in {model.files} files" if model.files > 1 else ""
    return [
        ("name", f"{model.name} ({model.architecture}, {size_text(model.size_bytes)}{files})"),
        ("path", model.path),
        ("fingerprint", model.fingerprint),
        ("memory", f"{model.memory}{window}, {model.kv_bytes_per_token:,} bytes a token"),
        ("trained context", trained),
        ("placement", model.placement.describe()),
        ("vocabulary", f"{model.vocab_size:,} tokens, {model.tokenizer}"),
        ("counting", f"by the tokenizer: {model.counter}" if model.counter else "by tiktoken, proved equal"),
        ("dialect", f"{model.dialect}: {model.dialect_reason}"),
        *(_template_lines(model.template) if model.template is not None else []),
    ]


def _template_lines(template: TemplateDescription) -> list[tuple[str, str]]:
    origin = template.origin + (f" ({template.fallback_reason})" if template.fallback_reason else "")
    yes_no = {True: "yes", False: "no: they go into the system text"}
    lines = [
        ("template", origin),
        ("native tools", yes_no[template.tools_native]),
        ("system role", "yes" if template.system_native else "no: it goes into the first message"),
        ("appending", _append_text(template)),
    ]
    if template.reasoning:
        lines.append(("reasoning", template.reasoning))
    frozen = {name: value for name, value in template.variables.items() if value != "unset"}
    if frozen:
        lines.append(("frozen variables", ", ".join(f"{name}={value}" for name, value in frozen.items())))
    return lines


def _append_text(template: TemplateDescription) -> str:
    kind: AppendKind = template.append_kind
    cost = template.rerender
    if cost is None:
        return str(kind)
    if not cost.rewriting_requests:
        return f"{kind}: rendering a sample of {cost.requests} requests anew would change nothing that was evaluated"
    return (
        f"{kind}: rendered anew, {cost.rewriting_requests} of the {cost.requests} requests of a sample would change "
        f"what was evaluated, {cost.rewritten_chars:,} characters again for a last request of {cost.sent_chars:,}; "
        "transitions change nothing"
    )


def _test_lines(tested: ModeResults | None) -> tuple[str, list[tuple[str, str]]]:
    if tested is None:
        return "self-test", [("not done yet", "--self-test loads the model and tests each way of reusing KV")]
    return f"self-test of {tested.date}", [(result.name, _result_text(result)) for result in tested.results]


def _result_text(result: ModeResult) -> str:
    if result.outcome in (Outcome.NOT_APPLICABLE, Outcome.NOT_TESTED):
        return f"{result.outcome}: {result.reason}"
    figures = [f"{result.cached} tokens reused"] if result.cached else []
    if result.agreement is not None and result.difference is not None:
        figures.append(f"the likeliest token the same at {result.agreement:.0%}, {result.difference:.4f} nats off")
    if result.loss_worse is not None:
        how = "better" if result.loss_worse < 0 else "worse"
        figures.append(f"text behind it foretold {abs(result.loss_worse):.3f} nats {how}")
    if result.outcome is Outcome.FAILED:
        return "; ".join(("FAILED, and off", result.reason, *figures))
    return f"passed: {', '.join(figures)}"
