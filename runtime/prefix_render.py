"""Renders the session prefix: everything before the first user's content, in pieces that say what is markup.

The template is rendered once with sentinels in place of the system text and of the user's. The system text then
enters as plain pieces, whatever it holds; the tools are the template's own render, since only it knows their form.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import msgspec

from ..kernels.errors import TemplateRefused, UsageError
from .calls import ToolSchema
from .chat_format import ChatFormat, ContentForm, PrefixPiece, Shape
from .chatml import SYSTEM_CLOSING, SYSTEM_OPENING, USER_OPENING
from .template_cache import cache_key, load_cached, store_cached
from .template_render import WAY_OUT, RenderResult, render_all
from .template_split import SYSTEM_FORM
from .transition_glue import common_end, common_start
from .transition_probes import Sentinels, ToolsForm, choose_sentinels, template_request
from .transitions import LEARNER_VERSION, given_variables

GLUE = "glue"
CATALOGUE = "catalogue"
_JOINT = "\n\n"


class PrefixText(msgspec.Struct, frozen=True):
    """A section of the system text, as plain text."""

    section: str
    text: str


class _Frame(msgspec.Struct, frozen=True, kw_only=True):
    """What stands around the system text. `folded`: it goes into the first user message, for want of a role."""

    before: tuple[PrefixPiece, ...]
    after: tuple[PrefixPiece, ...]
    folded: bool


def render_prefix(
    template: str | None,
    chat_format: ChatFormat,
    *,
    system: Sequence[PrefixText],
    tools: Sequence[ToolSchema],
    bos_text: str,
    eos_text: str,
    cache_folder: Path | None,
) -> tuple[PrefixPiece, ...]:
    """Return the pieces of the prefix; they end with the opening of the first user message.

    The sections of `system` are joined by a blank line. `tools` may be given where `chat_format.tools_native`; the
    caller has checked them (`check_tool_texts`). What the template and the tools give is in the sections
    ``glue`` and ``catalogue``. The same inputs give the same pieces, on any day and any machine.
    Raises TemplateRefused where the template does not render these tools.
    """
    sections = [text for text in system if text.text.strip()]
    if tools and not chat_format.tools_native:
        raise UsageError("this chat format has no catalogue of its own: put the tools into the system text")
    if template is None or chat_format.origin == "chatml":
        return tuple(_merged(_chatml_pieces(sections)))
    inputs = (LEARNER_VERSION, template, bos_text, eos_text, chat_format.variables, bool(sections), tools)
    key = cache_key("prefix", *inputs)
    frame = load_cached(cache_folder, key, value_type=_Frame)
    if frame is None:
        variables = {**given_variables(chat_format), "bos_token": bos_text, "eos_token": eos_text}
        wants_system = bool(sections) and chat_format.system_native
        frame = _render_frame(template, tools, variables=variables, wants_system=wants_system)
        store_cached(cache_folder, key, frame)
    form = chat_format.form(Shape.USER) if frame.folded else chat_format.forms.get(SYSTEM_FORM, ContentForm())
    written = _system_pieces(sections, form, folded=frame.folded)
    return tuple(_merged([*frame.before, *written, *frame.after]))


def _chatml_pieces(sections: Sequence[PrefixText]) -> Iterator[PrefixPiece]:
    if sections:
        yield PrefixPiece(section=GLUE, text=SYSTEM_OPENING, markup=True)
        yield from _system_pieces(sections, ContentForm(), folded=False)
        yield PrefixPiece(section=GLUE, text=SYSTEM_CLOSING, markup=True)
    yield PrefixPiece(section=GLUE, text=USER_OPENING, markup=True)


def _system_pieces(sections: Sequence[PrefixText], form: ContentForm, *, folded: bool) -> list[PrefixPiece]:
    """Return the system text as the template would have written it, joined with what follows it where folded.

    What joins two sections belongs to the second, so that one that comes or goes leaves those before it as they were.
    Where folded each section ends with it, since the user's own text follows.
    """
    texts = [section.text for section in sections]
    if form.trimmed and texts:
        texts[0] = texts[0].lstrip()
        texts[-1] = texts[-1] if folded else texts[-1].rstrip()
    joined = [text + _JOINT for text in texts] if folded else [*texts[:1], *(_JOINT + text for text in texts[1:])]
    inner = ContentForm(json_encoded=form.json_encoded)
    return [
        PrefixPiece(section=section.section, text=inner.apply(text), markup=False)
        for section, text in zip(sections, joined, strict=True)
    ]


def _merged(pieces: Iterable[PrefixPiece]) -> Iterator[PrefixPiece]:
    """Yield the pieces that are not empty; neighbours of one kind become one, since they are tokenised together."""
    whole = (piece for piece in pieces if piece.text)
    for (section, markup), run in groupby(whole, key=lambda piece: (piece.section, piece.markup)):
        yield PrefixPiece(section=section, text="".join(piece.text for piece in run), markup=markup)


def _render_frame(
    template: str, tools: Sequence[ToolSchema], *, variables: Mapping[str, Any], wants_system: bool
) -> _Frame:
    functions = [tool.as_function() for tool in tools]
    sentinels = choose_sentinels(template, json.dumps(functions, ensure_ascii=False), json.dumps(variables))
    forms = [ToolsForm.REAL] if tools else []
    forms += [ToolsForm.OMITTED, ToolsForm.EMPTY, ToolsForm.NONE]
    scripts = [True, False] if wants_system else [False]
    requests = [
        template_request(
            _opening_messages(sentinels, with_system=with_system),
            tools=form,
            functions=functions if form is ToolsForm.REAL else [],
            variables=variables,
            prompt=True,
        )
        for with_system in scripts
        for form in forms
    ]
    results = render_all(template, requests)
    rounds = [results[start : start + len(forms)] for start in range(0, len(results), len(forms))]
    for with_system, outcomes in zip(scripts, rounds, strict=True):
        heads = [_head(outcome, sentinels, with_system=with_system) for outcome in outcomes]
        frame = _cut_frame(heads, sentinels, has_tools=bool(tools), with_system=with_system)
        if frame is not None:
            return frame
    refusal = next((result.refusal for result in results if result.refusal), "it does not show the user's message")
    raise TemplateRefused(f"The model's chat template does not render the session prefix: {refusal}. {WAY_OUT}")


def _opening_messages(sentinels: Sentinels, *, with_system: bool) -> list[dict[str, Any]]:
    user = {"role": "user", "content": sentinels.content(1)}
    return [{"role": "system", "content": sentinels.content(0)}, user] if with_system else [user]


def _head(result: RenderResult, sentinels: Sentinels, *, with_system: bool) -> str | None:
    """Return what stands before the user's content; None where a content is missing or comes twice."""
    if result.text is None or result.text.count(sentinels.content(1)) != 1:
        return None
    head = result.text.partition(sentinels.content(1))[0]
    return head if head.count(sentinels.content(0)) == with_system else None


def _cut_frame(
    heads: Sequence[str | None], sentinels: Sentinels, *, has_tools: bool, with_system: bool
) -> _Frame | None:
    """Cut the first head at the system text. With tools, it is compared with one without to find the catalogue."""
    bare = next((head for head in heads[has_tools:] if head is not None), None)
    full = heads[0] if has_tools else bare
    if full is None:
        return None
    # Without a system text the whole head is what stands before it.
    before, _, after = full.partition(sentinels.content(0))
    bare_before, _, bare_after = (bare or "").partition(sentinels.content(0))
    return _Frame(
        before=tuple(_mark_catalogue(before, bare_before)),
        after=tuple(_mark_catalogue(after, bare_after)),
        folded=not with_system,
    )


def _mark_catalogue(full: str, bare: str) -> Iterator[PrefixPiece]:
    """Yield `full` in pieces: what `bare` has too, at its start and end, is glue; the rest is the catalogue."""
    start = common_start(full, bare)
    full, bare = full[len(start) :], bare[len(start) :]
    end = common_end(full, bare)
    middle = full[: len(full) - len(end)]
    for section, text in ((GLUE, start), (CATALOGUE, middle), (GLUE, end)):
        yield PrefixPiece(section=section, text=text, markup=True)


def check_tool_texts(tools: Sequence[ToolSchema], control_texts: Sequence[str]) -> None:
    """Raise UsageError where a text of a tool holds a control token's text.

    A catalogue is rendered by the template as a whole, so its special tokens are parsed, and with them any that a
    description brought along.
    """
    for tool in tools:
        for text in _strings((tool.name, tool.description, tool.parameters)):
            found = next((control for control in control_texts if control and control in text), None)
            if found is not None:
                raise UsageError(
                    f"The tool {tool.name!r} cannot be offered to this model: its schema holds {found!r}, which is a "
                    f"control token here. Write it otherwise in the tool's name, description or parameters."
                )


def _strings(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield str(key)
            yield from _strings(inner)
    elif isinstance(value, Sequence):
        for inner in value:
            yield from _strings(inner)
