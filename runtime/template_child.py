"""The process in which chat templates are rendered: untrusted programs, held by a sandbox and by resource limits.

A GGUF's template is code from a stranger (CVE-2024-34359 was one), and jinja2's sandbox bounds neither time nor
memory. So this file is run by path in a process of its own, imports nothing of chapbook, reads one JSON object on
stdin and writes one on stdout:

    in   {"import_path": [...], "template": "...", "requests": [{...}], "now": "2024-07-26T12:00:00",
          "cpu_s": 2, "memory_bytes": ..., "output_chars": ...}
    out  {"results": [{"text": "..."} or {"refusal": "..."}]} or {"hostile": "..."}

A refusal is the template's own (`raise_exception`, an undefined value, bad syntax): it concerns one request. Hostile
is what breaks out of the sandbox or over a limit: the whole template is refused.
"""

from __future__ import annotations

import datetime
import json
import sys
from collections.abc import Callable, Mapping
from typing import Any


class Hostile(Exception):
    """The template went for what it must not have. Not an error of jinja2's, so that no template can catch it."""


def main() -> None:
    """Read a job from stdin, render its requests, write the outcome to stdout."""
    sys.dont_write_bytecode = True
    job: dict[str, Any] = json.loads(sys.stdin.buffer.read())
    sys.path[:] = job["import_path"]
    try:
        outcome = _outcome(job)
    except Hostile as error:
        outcome = {"hostile": str(error)}
    except MemoryError:
        outcome = {"hostile": f"it needs more than {job['memory_bytes'] >> 20} MB of memory"}
    except RecursionError:
        outcome = {"hostile": "it recurses without end"}
    sys.stdout.buffer.write(json.dumps(outcome).encode())


def _outcome(job: Mapping[str, Any]) -> dict[str, Any]:
    environment = make_environment(datetime.datetime.fromisoformat(job["now"]))
    from jinja2 import TemplateError  # noqa: PLC0415 (the import path is known only now)

    _limit_resources(cpu_s=job["cpu_s"], memory_bytes=job["memory_bytes"])
    try:
        template = environment.from_string(job["template"])
    except (TemplateError, SyntaxError, ValueError) as error:
        refusal = f"the template does not compile: {_describe(error)}"
        return {"results": [{"refusal": refusal} for _ in job["requests"]]}
    results: list[dict[str, str]] = []
    left_chars = job["output_chars"]
    for request in job["requests"]:
        result = _render(template, request, left_chars=left_chars)
        left_chars -= len(result.get("text", ""))
        results.append(result)
    return {"results": results}


def _render(template: Any, request: Mapping[str, Any], *, left_chars: int) -> dict[str, str]:
    """Render one request, whose values are its own. Raises Hostile, MemoryError or RecursionError; else it refuses."""
    from jinja2.exceptions import SecurityError  # noqa: PLC0415 (the import path is known only now)

    parts: list[str] = []
    try:
        for part in template.generate(request):
            left_chars -= len(part)
            if left_chars < 0:
                raise Hostile("its output is too long")
            parts.append(part)
    except SecurityError as error:
        raise Hostile(f"it leaves the sandbox ({str(error)[:200]})") from error
    except (Hostile, MemoryError, RecursionError):
        raise
    except Exception as error:
        return {"refusal": _describe(error)}
    return {"text": "".join(parts).encode("utf-8", "replace").decode()}


def _describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:500]


def make_environment(now: datetime.datetime) -> Any:
    """Return the environment that Hugging Face templates are written for, with time standing still at `now`.

    Settings and names follow `transformers.utils.chat_template_utils`; `functions` and `datetime` are what older
    templates expect. The environment is not the immutable one, since some templates append to lists in place.
    """
    from jinja2 import TemplateError, nodes  # noqa: PLC0415 (the import path is known only now)
    from jinja2.ext import Extension  # noqa: PLC0415 (as above)
    from jinja2.sandbox import SandboxedEnvironment  # noqa: PLC0415 (as above)

    class GenerationBlock(Extension):
        """`{% generation %}` marks what is trained on; it renders as its body."""

        tags = {"generation"}  # noqa: RUF012 (jinja2 declares it so)

        def parse(self, parser: Any) -> list[nodes.Node]:
            next(parser.stream)
            body: list[nodes.Node] = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return body

    class Environment(SandboxedEnvironment):
        """The sandbox, with a forbidden attribute the end of everything and not an empty value."""

        def unsafe_undefined(self, obj: Any, attribute: str) -> Any:
            raise Hostile(f"it reaches for the attribute {attribute!r} of a {type(obj).__name__}")

    environment = Environment(
        trim_blocks=True, lstrip_blocks=True, extensions=("jinja2.ext.loopcontrols", GenerationBlock)
    )
    environment.filters["tojson"] = _tojson
    # Both are random, and a prefix must come out the same on every run.
    environment.globals["lipsum"] = environment.filters["random"] = _refuse_chance
    environment.globals["range"] = _bounded_range
    environment.globals["raise_exception"] = _raiser(TemplateError)
    environment.globals["strftime_now"] = now.strftime
    environment.globals["datetime"] = now.strftime("%Y-%m-%d")
    return environment


def _raiser(error: type[Exception]) -> Callable[[str], None]:
    def raise_exception(message: str) -> None:
        raise error(message)

    return raise_exception


def _refuse_chance(*_args: object, **_options: object) -> None:
    raise Hostile("it asks for something random")


def _bounded_range(*args: int) -> range:
    values = range(*args)
    if len(values) > 100_000:
        raise Hostile(f"it asks for a range of {len(values):,} numbers")
    return values


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys, default=list
    )


def _limit_resources(*, cpu_s: int, memory_bytes: int) -> None:
    """Bound CPU, memory and files, as far as the system can; the parent's timeout holds everywhere."""
    try:
        import resource  # noqa: PLC0415 (there is none on Windows)
    except ImportError:
        return
    limits = {
        resource.RLIMIT_CORE: (0, 0),
        # The soft limit's signal says what happened; at the hard one the process is just killed.
        resource.RLIMIT_CPU: (cpu_s, cpu_s + 1),
        resource.RLIMIT_AS: (memory_bytes, memory_bytes),
        resource.RLIMIT_FSIZE: (0, 0),
    }
    for limit, soft_and_hard in limits.items():
        try:
            resource.setrlimit(limit, soft_and_hard)
        except (ValueError, OSError):  # macOS has no RLIMIT_AS; a limit that is lower already stays
            continue


if __name__ == "__main__":
    main()
