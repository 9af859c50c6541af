"""`chapbook prefix`: the sections of the session prefix and what they cost, with the whole default tool set.

The tools that later parts of chapbook bring are counted with those there are, so that what is measured is what a
session will cost. It needs a model's vocabulary and nothing else of it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from ..calls import ToolSchema
from ..engine import EngineInfo
from ..events import PrefixSection
from ..tools.builtin import builtin_tools, optional_tools
from ..tools.reserved import RESERVED_SCHEMAS
from .opening import Place, configured_model, open_place, template_cache_folder
from .options import ModelOptions, takes
from .terminal import print_columns, print_json


@takes(ModelOptions)
def prefix(
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False, *, options: ModelOptions
) -> None:
    """Show the session prefix and its cost, with the whole default tool set."""
    place = open_place(options)
    optional = optional_tools(subagents=place.loaded.config.tools.task)
    in_force = tuple(tool.schema for tool in (*builtin_tools(), *optional))
    composed = compose(configured_model(place), place, tool_sets=((*in_force, *RESERVED_SCHEMAS), in_force))
    whole, now = composed
    tokens, in_force_tokens = _tokens(whole), _tokens(now)
    if as_json:
        sections = [{"name": each.name, "tokens": each.tokens, "hash": each.xxh3} for each in whole]
        print_json({"tokens": tokens, "sections": sections, "in_force_tokens": in_force_tokens})
        return
    rows = [(each.name, f"{each.tokens:,}", each.xxh3) for each in whole]
    rows.append(("total with the reserved tools", f"{tokens:,}", ""))
    print_columns(("section", "tokens", "hash"), rows, no_color=options.no_color)
    reserved = ", ".join(schema.name for schema in RESERVED_SCHEMAS)
    sys.stdout.write(
        f"\n{len(in_force)} tools in force: {', '.join(schema.name for schema in in_force)}\n"
        f"{len(RESERVED_SCHEMAS)} reserved for later, counted and not told to a model yet: {reserved}\n"
        f"a session opened now is without those: its prefix is {in_force_tokens:,} tokens\n"
    )


def compose(
    model: Path, place: Place, *, tool_sets: Sequence[tuple[ToolSchema, ...]]
) -> list[tuple[PrefixSection, ...]]:
    """Return the prefix with each of the tool sets, by the vocabulary and template of the model."""
    from ..composition import Composer  # noqa: PLC0415  brings numpy
    from ..llama import open_vocabulary  # noqa: PLC0415  brings llama.cpp
    from ..session_prefix import SYSTEM_TEXT, PrefixInputs, compose_prefix, read_instructions  # noqa: PLC0415  with it
    from ..tools.workspace import Workspace  # noqa: PLC0415  with it
    from ..transitions import learn_chat_format  # noqa: PLC0415  with it

    config, cache = place.loaded.config, template_cache_folder()
    instructions = read_instructions(Workspace(place.workspace, place.store.folder), config.instructions)
    with open_vocabulary(model) as vocabulary:
        info = vocabulary_info(vocabulary, model)
        template = None if config.template == "chatml" else info.chat_template
        chat_format = learn_chat_format(template, bos_text=info.bos_text, eos_text=info.eos_text, cache_folder=cache)
        composer = Composer(vocabulary, chat_format)
        return [
            compose_prefix(
                PrefixInputs(system=SYSTEM_TEXT, instructions=instructions, tools=tools),
                template=template,
                composer=composer,
                info=info,
                cache_folder=cache,
            )
            for tools in tool_sets
        ]


def vocabulary_info(vocabulary: Any, model: Path) -> EngineInfo:
    """Return what a `Vocabulary` tells of its model; what only weights and a context tell is empty."""
    metadata = vocabulary.metadata
    trained = metadata.context_length_tokens or 0
    return EngineInfo(
        model_name=metadata.name or model.stem,
        model_path=str(model),
        fingerprint="",
        n_ctx=trained,
        n_ctx_trained=trained,
        vocab_size=vocabulary.size,
        memory=metadata.memory_kind(),
        sliding_window_tokens=metadata.sliding_window_tokens,
        chat_template=metadata.chat_template,
        add_bos=vocabulary.add_bos,
        bos_id=vocabulary.bos_id,
        bos_text=vocabulary.text(vocabulary.bos_id),
        eos_text=vocabulary.text(vocabulary.eos_id),
        control_texts=vocabulary.control_texts,
    )


def _tokens(sections: Sequence[PrefixSection]) -> int:
    return sum(section.tokens for section in sections)
