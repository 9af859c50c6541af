"""One event, one line of JSON: the format of a session log. Pure: bytes in, values out.

A line is ``{"seq":…,"time":…,"type":…,"data":{…},"chain":"<16 hex>"}`` and a newline. ``chain`` is the xxh3 (64 bits)
of the previous line's chain and of this line up to its own, so that a line vouches for all lines before it.
"""

from __future__ import annotations

import math
import typing
from pathlib import Path
from typing import Any

import msgspec
import xxhash

from ..kernels.errors import LogDamaged, UnknownEvent
from .events import Event, IgnoredEvent, Logged, Seq, SessionStart

LOG_FORMAT = 1
"""The version that `SessionStart.log_format` names. A log of a later one is refused."""

FIRST_CHAIN = "0" * 16
"""What stands for the previous line's chain in the first line."""

MOST_NESTING = 100
"""How deep a value in an event may be nested: a reader with less of the stack left must still get through."""

_CHAIN_OPENS = b',"chain":"'
_LINE_ENDS = b'"}\n'
# The last bytes of a line: the key, 16 hex digits, the end.
_TAIL_BYTES = len(_CHAIN_OPENS) + 16 + len(_LINE_ENDS)


class EncodedLine(msgspec.Struct, frozen=True, kw_only=True):
    """A line ready to be written, the chain that the next one takes up, and the event as a reader will read it."""

    line: bytes
    chain: str
    logged: Logged


class DecodedLine(msgspec.Struct, frozen=True, kw_only=True):
    """A line as read, and the chain that the next one takes up."""

    logged: Logged
    chain: str


class CleanText(msgspec.Struct, frozen=True, kw_only=True):
    """Text that encodes as UTF-8; `original_bytes` only where something had to be replaced in it."""

    text: str
    original_bytes: bytes | None = None


class _Envelope(msgspec.Struct, frozen=True):
    seq: int
    time: float
    type: str
    data: msgspec.Raw
    chain: str
    ignorable: bool = False


def encode_line(event: Event, *, seq: Seq, time: float, previous_chain: str) -> EncodedLine:
    """Return the line of `event`.

    Raises ValueError, naming the place, where JSON would not give back what went in: a float that is not finite,
    text that does not encode as UTF-8 (`clean_text` first), or nesting beyond `MOST_NESTING`.
    """
    if isinstance(event, IgnoredEvent):
        event_type, data, mark = event.event_type, bytes(event.data), b'"ignorable":true,'
        if b"\n" in data:
            raise ValueError(f"the data of {event_type} has a line end in it")
    else:
        event_type, mark = _TYPE_NAMES[type(event)], b""
        data = _data_of(event, event_type)
    if not math.isfinite(time):
        raise ValueError(f"the clock says {time}, and JSON has no such number")
    head = b'{"seq":%d,"time":%s,"type":%s,%s"data":' % (
        seq,
        msgspec.json.encode(float(time)),
        msgspec.json.encode(event_type),
        mark,
    )
    body = head + data
    chain = _chain_of(body, previous_chain)
    line = body + _tail_of(chain)
    reread = event if isinstance(event, IgnoredEvent) else _DECODERS[event_type].decode(data)
    return EncodedLine(line=line, chain=chain, logged=Logged(seq, float(time), reread))


def decode_line(line: bytes, *, number: int, previous_chain: str, path: Path) -> DecodedLine:
    """Return the event of `line`, newline included, which is line `number` (from 1) of the log at `path`.

    Raises LogDamaged where the line is not what was written there, and UnknownEvent where it is, but this version
    cannot read it and it does not say that it may be passed over. Whether its seq is right is left to the caller.
    """
    chain = _chain_of(line[:-_TAIL_BYTES], previous_chain)
    if line[-_TAIL_BYTES:] != _tail_of(chain):
        problem = (
            "is not a whole line of a session log"
            if stated_chain(line) is None
            else "does not fit its hash, or what stands before it"
        )
        raise LogDamaged(f"line {number} of {path} {problem}", path=path, line=number)
    try:
        envelope = _ENVELOPE.decode(line)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise LogDamaged(f"line {number} of {path} is no event: {error}", path=path, line=number) from error
    event = _event_of(envelope, number, path)
    return DecodedLine(logged=Logged(Seq(envelope.seq), envelope.time, event), chain=chain)


def stated_chain(line: bytes) -> str | None:
    """Return the chain that a line states, unchecked; None where it does not end as a line does."""
    tail = line[-_TAIL_BYTES:]
    if len(tail) < _TAIL_BYTES or not (tail.startswith(_CHAIN_OPENS) and tail.endswith(_LINE_ENDS)):
        return None
    return tail[len(_CHAIN_OPENS) : -len(_LINE_ENDS)].decode("ascii", "replace")


def clean_text(text: str) -> CleanText:
    """Return `text` as it can be stored. Undecodable bytes of a file name or an output (surrogate escapes) and lone
    surrogates become replacement marks, and the bytes are handed back, to be kept as an artifact."""
    try:
        text.encode()
    except UnicodeEncodeError:
        original = _bytes_of(text)
        shown = original.decode("utf-8", "replace")
        return CleanText(text=shown, original_bytes=None if shown.encode() == original else original)
    return CleanText(text=text)


def clean_json(value: Any, *, depth: int = 0) -> Any:
    """Return a JSON value with every text cleaned, and floats that are not finite as text (``nan``, ``inf``).

    Raises ValueError where it is nested deeper than an event may be.
    """
    if depth > MOST_NESTING - 10:  # an event's own structs are around it
        raise ValueError(f"a value is nested deeper than {MOST_NESTING - 10}")
    match value:
        case str():
            return clean_text(value).text
        case float() if not math.isfinite(value):
            return str(value)
        case dict():
            return {clean_text(str(key)).text: clean_json(each, depth=depth + 1) for key, each in value.items()}
        case list() | tuple():
            return [clean_json(each, depth=depth + 1) for each in value]
    return value


def _event_of(envelope: _Envelope, number: int, path: Path) -> Event:
    decoder = _DECODERS.get(envelope.type)
    if decoder is None:
        if envelope.ignorable:
            return IgnoredEvent(event_type=envelope.type, data=envelope.data.copy())
        raise _unknown(envelope, number, path, "is not known to this version")
    try:
        event: Event = decoder.decode(envelope.data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise _unknown(envelope, number, path, f"has another form than this version knows ({error})") from error
    if isinstance(event, SessionStart) and event.log_format > LOG_FORMAT:
        raise _unknown(
            envelope, number, path, f"has log format {event.log_format}, this version reads up to {LOG_FORMAT}"
        )
    return event


def _unknown(envelope: _Envelope, number: int, path: Path, problem: str) -> UnknownEvent:
    return UnknownEvent(
        f"line {number} of {path} is intact, but its event {envelope.type!r} {problem}: open the session with the "
        "chapbook that wrote it, or a newer one",
        path=path,
        line=number,
        event_type=envelope.type,
    )


def _chain_of(body: bytes, previous_chain: str) -> str:
    return xxhash.xxh3_64_hexdigest(previous_chain.encode() + body)


def _tail_of(chain: str) -> bytes:
    return _CHAIN_OPENS + chain.encode() + _LINE_ENDS


def _data_of(event: Event, event_type: str) -> bytes:
    try:
        misfit = _misfit(msgspec.to_builtins(event))
        if misfit is not None:
            raise ValueError(f"{event_type}{misfit}")
        tagged = msgspec.json.encode(event)
    except RecursionError as error:
        raise ValueError(f"{event_type} is nested deeper than {MOST_NESTING}") from error
    # {"type":"turn/start","turn":1}: a tagged struct writes its tag first, and the envelope has it already.
    comma = tagged.find(b",")
    return b"{}" if comma < 0 else b"{" + tagged[comma + 1 :]


def _misfit(value: Any, depth: int = 0) -> str | None:
    """Return what in `value` JSON would not give back, and where; None if nothing."""
    problem: str | None = None
    if isinstance(value, str):
        if not value.isascii():
            try:
                value.encode()
            except UnicodeEncodeError as error:
                problem = f" is text that does not encode as UTF-8 ({error.reason} at {error.start})"
    elif isinstance(value, float):
        if not math.isfinite(value):
            problem = f" is {value}, and JSON has no such number"
    elif isinstance(value, dict | list | tuple):
        if depth > MOST_NESTING:
            return f" is nested deeper than {MOST_NESTING}"
        places = value.items() if isinstance(value, dict) else enumerate(value)
        for place, each in places:
            inner = _misfit(place, depth + 1) or _misfit(each, depth + 1)
            if inner is not None:
                return f".{place!a}{inner}"
    return problem


def _bytes_of(text: str) -> bytes:
    try:
        return text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        return text.encode("utf-8", "surrogatepass")


_EVENT_STRUCTS: tuple[type[msgspec.Struct], ...] = tuple(s for s in typing.get_args(Event) if s is not IgnoredEvent)
_TYPE_NAMES: dict[type, str] = {struct: str(struct.__struct_config__.tag) for struct in _EVENT_STRUCTS}
_DECODERS: dict[str, msgspec.json.Decoder[Any]] = {
    name: msgspec.json.Decoder(struct) for struct, name in _TYPE_NAMES.items()
}
_ENVELOPE = msgspec.json.Decoder(_Envelope)
