"""Splits a template into transitions: rendered probes in, a chat format out. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from .append_kind import append_kind
from .chat_format import AppendKind, ChatFormat, ContentForm, Glue, ReasoningMarks, Shape, Slot
from .chatml import ResultWrapper, pair, wrapped_result_glues
from .template_render import RenderResult
from .transition_glue import (
    closing_of,
    content_form,
    drop_written_end,
    literal,
    make_glue,
    strip_call,
    text_after,
    text_between,
)
from .transition_probes import (
    CALL_FORMS,
    CHAT_SAMPLE,
    TOOL_SAMPLE,
    CallForm,
    CallProbe,
    Probe,
    Sentinels,
    ToolsForm,
    growth,
    label,
)

SYSTEM_FORM = "system"
"""The key of the system text's form in `ChatFormat.forms`, beside the shapes."""

_REASONING_MARKS = (
    # The text that a template with this kind of reasoning holds, and the marks.
    ("<|channel|>analysis<|message|>", "<|channel|>analysis<|message|>", "<|end|>"),
    ("<|END_THINKING|>", "<|START_THINKING|>", "<|END_THINKING|>"),
    ("</seed:think>", "<seed:think>", "</seed:think>"),
    ("[/THINK]", "[THINK]", "[/THINK]"),
    ("◁/think▷", "◁think▷", "◁/think▷"),
    # Some only drop what stands before the end, and leave the rest to the model.
    ("</think>", "<think>", "</think>"),
    ("<think>", "<think>", "</think>"),
)


@dataclass(frozen=True, slots=True)
class CannotSplit:
    """Why a template does not yield transitions."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Renders:
    """The rendered probes of a template, by label, and the words that were put into them."""

    results: Mapping[str, RenderResult]
    sentinels: Sentinels
    eos_text: str

    def text(self, tools: ToolsForm, name: str, form: CallForm | None = None) -> str | None:
        """Return a probe's render; None where the template refused it or it was not rendered in this form."""
        result = self.results.get(label(tools, name, form))
        return None if result is None else result.text

    def between(self, text: str | None, before: int, after: int) -> str | None:
        """Return what stands between the contents of two messages."""
        content = self.sentinels.content
        return None if text is None else text_between(text, content(before), content(after))

    def after(self, text: str | None, before: int) -> str | None:
        """Return what follows the content of a message."""
        return None if text is None else text_after(text, self.sentinels.content(before))

    def slots(self, *, own: int | None = None, previous: int | None = None) -> dict[str, Slot]:
        """Return what the names and ids of two calls stand for: the result's own, and that of the one before."""
        slots: dict[str, Slot] = {}
        if own is not None:
            slots |= {self.sentinels.name(own): Slot.TOOL_NAME, self.sentinels.call_id(own): Slot.CALL_ID}
        if previous is not None:
            slots |= {
                self.sentinels.name(previous): Slot.PREVIOUS_TOOL_NAME,
                self.sentinels.call_id(previous): Slot.PREVIOUS_CALL_ID,
            }
        return slots

    def is_clean(self, text: str | None, **calls: int) -> bool:
        """Tell whether `text` holds no sentinel but the names and ids of `calls` (as for `slots`)."""
        return text is not None and make_glue(text, self.slots(**calls), self.sentinels) is not None

    def glue(self, text: str, **calls: int) -> Glue:
        """Return clean text as glue."""
        glue = make_glue(text, self.slots(**calls), self.sentinels)
        assert glue is not None, "only clean text becomes glue"
        return glue


@dataclass(frozen=True, slots=True, kw_only=True)
class _ChatText:
    """The transitions without tools, as text; `user_close` and `reply_close` begin two of them."""

    tools: ToolsForm
    user_reply: str
    reply_user: str
    user_user: str
    user_close: str
    reply_close: str

    @property
    def user_open(self) -> str:
        return self.reply_user[len(self.reply_close) :]


@dataclass(frozen=True, slots=True, kw_only=True)
class _ToolText:
    """The transitions from and to results, as text: call 1 is the previous or only one, call 2 the next."""

    tools: ToolsForm
    form: CallForm | None
    reply_tool: str
    tool_tool: str
    tool_reply: str
    tool_user: str
    user_tool: str


def split_template(
    template: str, renders: Renders, *, template_hash: str, wrapper: ResultWrapper
) -> ChatFormat | CannotSplit:
    """Return the chat format that the rendered probes of `template` show."""
    chat = next((chat for tools in ToolsForm if (chat := _chat_text(renders, tools)) is not None), None)
    if chat is None:
        return CannotSplit(_why_not(renders))
    tool = _tool_text(renders, chat) if "tool" in template else None
    glues = {
        pair(Shape.USER, Shape.REPLY): literal(chat.user_reply),
        pair(Shape.REPLY, Shape.USER): literal(chat.reply_user),
        pair(Shape.USER, Shape.USER): literal(chat.user_user),
        **_result_glues(renders, chat, tool, wrapper),
    }
    forms = _forms(renders, chat, tool)
    tools_native = _shows_tools(renders)
    return ChatFormat(
        template_hash=template_hash,
        origin="template",
        glues=glues,
        forms=forms,
        tools_native=tools_native,
        system_native=SYSTEM_FORM in forms,
        append_kind=_append_kind(renders, chat, tool, glues, tools_native=tools_native),
        reasoning=_reasoning_marks(template, chat.user_reply),
    )


def _why_not(renders: Renders) -> str:
    for probe in (Probe.OPENING, Probe.CHAT):
        result = renders.results[label(ToolsForm.OMITTED, probe)]
        if result.text is None:
            return f"it refuses a plain conversation ({result.refusal})"
    return "it does not render the contents of a plain conversation one after another"


def _chat_text(renders: Renders, tools: ToolsForm) -> _ChatText | None:
    opening, chat = renders.text(tools, Probe.OPENING), renders.text(tools, Probe.CHAT)
    user_reply, shown = renders.after(chat, 2), renders.between(chat, 1, 2)
    if opening is None or renders.sentinels.content(0) not in opening or user_reply is None or shown is None:
        return None
    if not renders.is_clean(user_reply + shown):
        return None
    reply_user = drop_written_end(shown, eos_text=renders.eos_text)
    user_end = renders.after(renders.text(tools, Probe.USER_END), 2)
    reply_end = renders.after(renders.text(tools, Probe.REPLY_END), 1)
    user_close = closing_of(user_reply, at_end=user_end, eos_text=renders.eos_text)
    reply_close = closing_of(reply_user, at_end=reply_end, eos_text=renders.eos_text)
    two = renders.text(tools, Probe.TWO_USERS)
    user_user = renders.between(two, 2, 3)
    consistent = renders.between(two, 1, 2) == shown and renders.after(two, 3) == user_reply
    if user_user is None or not consistent or not renders.is_clean(user_user):
        user_user = user_close + reply_user[len(reply_close) :]
    return _ChatText(
        tools=tools,
        user_reply=user_reply,
        reply_user=reply_user,
        user_user=user_user,
        user_close=user_close,
        reply_close=reply_close,
    )


def _tool_text(renders: Renders, chat: _ChatText) -> _ToolText | None:
    """Return the transitions of results, in the first form of tools and call in which the template shows a call.

    A template that shows results and no call has the call in the reply's content (`form` is None).
    """
    forms = [(tools, form) for tools in ToolsForm for form in CALL_FORMS] + [(tools, None) for tools in ToolsForm]
    found = (_tool_text_of(renders, chat, tools, form) for tools, form in forms)
    return next((text for text in found if text is not None), None)


def _tool_text_of(renders: Renders, chat: _ChatText, tools: ToolsForm, form: CallForm | None) -> _ToolText | None:
    def probe(with_call: CallProbe, without: Probe) -> str | None:
        return renders.text(tools, without if form is None else with_call, form)

    result = probe(CallProbe.RESULT, Probe.PLAIN_RESULT)
    plain = renders.between(renders.text(tools, Probe.PLAIN_RESULT), 1, 2)
    plain = None if plain is None else drop_written_end(plain, eos_text=renders.eos_text)
    reply_tool = plain
    if form is not None and result is not None:
        behind_argument = text_between(result, renders.sentinels.argument(1), renders.sentinels.content(2))
        if behind_argument is None:
            return None
        reply_tool = strip_call(behind_argument, plain=plain, eos_text=renders.eos_text)
    tool_reply = renders.after(result, 2)
    if reply_tool is None or not renders.is_clean(reply_tool, own=1):
        return None
    if tool_reply is None or not renders.is_clean(tool_reply, previous=1):
        return None
    tool_end = renders.after(probe(CallProbe.RESULT_END, Probe.PLAIN_RESULT_END), 2)
    tool_close = closing_of(tool_reply, at_end=tool_end, eos_text=renders.eos_text)
    reply_close = closing_of(reply_tool, at_end=chat.reply_close, eos_text=renders.eos_text)
    tool_open = reply_tool[len(reply_close) :]
    tool_user = renders.between(probe(CallProbe.RESULT_USER, Probe.PLAIN_RESULT_USER), 2, 3)
    if tool_user is None or not renders.is_clean(tool_user, previous=1):
        tool_user = tool_close + chat.user_open
    in_a_row = (
        probe(CallProbe.RESULTS, Probe.PLAIN_RESULTS),
        probe(CallProbe.RESULTS_OF_ONE, Probe.PLAIN_RESULTS),
    )
    return _ToolText(
        tools=tools,
        form=form,
        reply_tool=reply_tool,
        tool_tool=_tool_tool(renders, in_a_row, tool_close=tool_close, tool_open=tool_open),
        tool_reply=tool_reply,
        tool_user=tool_user,
        user_tool=chat.user_close + tool_open,
    )


def _tool_tool(renders: Renders, in_a_row: tuple[str | None, ...], *, tool_close: str, tool_open: str) -> str:
    """Return the transition between two results; `tool_open` names call 1, the result that it opens here is call 2's.

    A template that takes the name from the last message with calls shows the first one's: the end is then as it is
    behind a reply, with the second's name.
    """
    sentinels = renders.sentinels
    next_open = tool_open.replace(sentinels.name(1), sentinels.name(2))
    next_open = next_open.replace(sentinels.call_id(1), sentinels.call_id(2))
    for text in in_a_row:
        found = renders.between(text, 2, 3)
        if found is None or not renders.is_clean(found, own=2, previous=1):
            continue
        return found.removesuffix(tool_open) + next_open if tool_open and found.endswith(tool_open) else found
    return tool_close + next_open


def _result_glues(
    renders: Renders, chat: _ChatText, tool: _ToolText | None, wrapper: ResultWrapper
) -> Mapping[str, Glue]:
    if tool is None:
        return wrapped_result_glues(
            user_reply=chat.user_reply, reply_user=chat.reply_user, user_user=chat.user_user, wrapper=wrapper
        )
    return {
        pair(Shape.USER, Shape.TOOL): renders.glue(tool.user_tool, own=1),
        pair(Shape.REPLY, Shape.TOOL): renders.glue(tool.reply_tool, own=1),
        pair(Shape.TOOL, Shape.TOOL): renders.glue(tool.tool_tool, own=2, previous=1),
        pair(Shape.TOOL, Shape.REPLY): renders.glue(tool.tool_reply, previous=1),
        pair(Shape.TOOL, Shape.USER): renders.glue(tool.tool_user, previous=1),
    }


def _forms(renders: Renders, chat: _ChatText, tool: _ToolText | None) -> dict[str, ContentForm]:
    """Return how contents are written, by shape; the system text's only where the template has a place for it."""

    def form_of(text: str | None, index: int) -> ContentForm | None:
        return None if text is None else content_form(text, index, renders.sentinels)

    user = form_of(renders.text(chat.tools, Probe.USER_FORM), 2) or ContentForm()
    forms: dict[str, ContentForm] = {
        Shape.USER: user,
        Shape.REPLY: form_of(renders.text(chat.tools, Probe.REPLY_FORM), 1) or ContentForm(),
        # In a wrapper the edges of a result are not those of the message.
        Shape.TOOL: ContentForm(json_encoded=user.json_encoded),
    }
    if tool is not None:
        probe = Probe.PLAIN_RESULT_FORM if tool.form is None else CallProbe.RESULT_FORM
        forms[Shape.TOOL] = form_of(renders.text(tool.tools, probe, tool.form), 2) or ContentForm()
    system = form_of(renders.text(chat.tools, Probe.SYSTEM_FORM), 0)
    if system is not None and renders.between(renders.text(chat.tools, Probe.SYSTEM), 0, 1) is not None:
        forms[SYSTEM_FORM] = system
    return forms


def _shows_tools(renders: Renders) -> bool:
    text = renders.text(ToolsForm.REAL, Probe.OPENING)
    head = None if text is None else text.partition(renders.sentinels.content(0))[0]
    return head is not None and renders.sentinels.description in head


def _append_kind(
    renders: Renders, chat: _ChatText, tool: _ToolText | None, glues: Mapping[str, Glue], *, tools_native: bool
) -> AppendKind:
    shapes = {"U": Shape.USER, "R": Shape.REPLY, "T": Shape.TOOL}
    slots = {slot: text for calls in (renders.slots(own=1), renders.slots(previous=1)) for text, slot in calls.items()}

    def expected(before: str, after: str) -> str:
        return "".join(piece.text for piece in glues[pair(shapes[before], shapes[after])].pieces(slots))

    tools = ToolsForm.REAL if tools_native else chat.tools
    if tool is not None and tool.form is not None:
        tools = ToolsForm.REAL if tools_native else tool.tools
        grown = [renders.text(tools, script, tool.form if "C" in script else None) for script in growth(TOOL_SAMPLE)]
        kind = append_kind(grown, TOOL_SAMPLE, renders.sentinels, expected)
        if kind is not AppendKind.UNKNOWN:
            return kind
    grown = [renders.text(tools, script) for script in growth(CHAT_SAMPLE)]
    return append_kind(grown, CHAT_SAMPLE, renders.sentinels, expected)


def _reasoning_marks(template: str, generation_prompt: str) -> ReasoningMarks | None:
    """Return the first known pair of marks that the template knows of.

    The generation prompt may leave the reasoning open; an empty block that it closes again does not.
    """
    for sign, begin, end in _REASONING_MARKS:
        if sign in template:
            is_open = generation_prompt.rfind(begin) > generation_prompt.rfind(end)
            return ReasoningMarks(begin=begin, end=end, open_at_start=is_open)
    return None
