r"""What a secret looks like: one row for each form of it, and the compiled patterns made of the rows.

A row's `before` is a label that stays; `head` is as much of the secret as it takes to be sure; `tail` is the run that
goes on from there, of any length; `rest` is what may close it. A match of `before` and `head`, with all that they look
at, fits into HEAD_BYTES; `tail` can be matched piece by piece; whether it goes on, and whether `rest` follows, shows
within TAIL_LOOK_BYTES.

`scout` is written for RE2, which passes over a text once for all rows: it matches wherever `before` and `head` do,
from the same byte, and costs nothing elsewhere.

That a second pass finds nothing is a matter of the characters: no secret is followed by a letter or a digit, so that
no word begins at a mark's end; no class but a separator's has "[", or a mark is left out of it, so that nothing is
looked for across a mark; and what must not follow a value counts "[" in.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import groupby
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import re2

HEAD_BYTES: Final = 1 << 14
TAIL_LOOK_BYTES: Final = 1 << 9
ESCAPE_BYTES: Final = 1 << 8

# How a token begins that needs no label.
_TOKEN_START = (
    rb"(?:gh[pousr]_|github_pat_|gl(?:pat|dt|rt|ptt|cbt)-|sk-|[sr]k_(?:live|test)_|hf_|npm_|xox[abeoprs]-"
    rb"|A(?:KI|SI|BI|CC)A|AIza|eyJ)"
)
# Codes of a terminal, real or written out. Those for colours hide up to 3 at a time, so that what is hidden stays in
# proportion to what is seen; one that would hide a token's beginning or a mark's is none.
_ESC = rb"[\x1b\\](?:(?<=\x1b)|\\{0,7}(?:u001[bB]|x1[bB]|033|e))"
_COLOUR = rb"(?:\x1b\[[0-9;:]{0,36}+[mK]|" + _ESC + rb"(?:\[[0-9;:]{0,36}[mK]|\([AB0]))"
_CURSOR = _ESC + rb"\[[0-9;:?]{0,36}(?!redacted:|" + _TOKEN_START + rb")[A-JL-Za-ln-z]"

# A word may begin behind a character spelled as an escape, or behind the name of a variable.
_ESCAPE = rb"\\[nrtbf]|\\u00[0-9A-Fa-f]{2}|\\x[0-9A-Fa-f]{2}|\\[0-7]{3}|%(?:25)?[0-9A-Fa-f]{2}"
_WORD = rb"(?:\b|_|" + _ESCAPE + rb")"
# One start for each run of letters, digits and hyphens, so that "sk-sk-sk-…" is looked at once; a hyphen may stand
# before it, as a removed line of a diff has it. Behind "_" too, but not where "_sk-_sk-…" would begin many. Not behind
# "]", the end of a mark: no run began there before.
_RUN_SCOUT = rb"(?:(?:\A|[^A-Za-z0-9_\]-]|" + _ESCAPE + rb")-?)"
_RUN = rb"(?:" + _RUN_SCOUT + rb"|_(?!sk-[A-Za-z0-9-]{0,7}_))"
_SEPARATOR_PART = (
    rb"""(?:[\s=:>"'`|,;\\\[({\x1b]|%[0-9A-Fa-f]{2}|\\u00[0-9A-Fa-f]{2}|&(?:quot|#3[49]);|</?[a-z]{1,8}>)"""
)
_SEPARATOR = _SEPARATOR_PART + rb"{1,64}"

_BLANK = rb"(?: |\+|%20)"
_KEY_LABEL = rb"(?:[A-Z0-9]|" + _BLANK + rb"){0,40}?PRIVATE" + _BLANK + rb"KEY(?:" + _BLANK + rb"BLOCK)?(?:-----| ----)"
_KEY_BEGIN = rb"----[ -]BEGIN" + _BLANK + _KEY_LABEL
_KEY_END = rb"----[ -]END" + _BLANK + _KEY_LABEL
# Anything but another key's lines and a mark.
_INSIDE = rb"(?:[^\[-]|-(?!---[ -](?:BEGIN|END))|\[(?!redacted:))"
_BASE64 = rb"[A-Za-z0-9+/=]"
# Between two lines of a key: line ends, real or escaped, quotes, signs of a quotation or a diff, line numbers.
_JOINT = rb"(?:\\+[nr]|[^A-Za-z/=\x80-\xff]){1,96}+"
_KEY_HEADER = _JOINT + rb"""[A-Z][A-Za-z-]{2,20}: [^\r\n\\"'\[]{0,200}"""
_LINE_END = rb"(?:\r?\n|\r|\\+r\\+n|\\+n|%0[AD])"
_INDENT = rb"[ \t>|+-]{0,32}"


def _mixed(least: int) -> bytes:
    """Return what matches a run of base64 from its start that is no word, path or hex number."""
    run = rb"(?=" + _BASE64 + rb"{0,63}"
    return (
        rb"(?<!"
        + _BASE64
        + rb")"
        + b"".join(run + kind + rb")" for kind in (rb"[0-9]", rb"[A-Z]", rb"[a-z]"))
        + (_BASE64 + rb"{%d}" % least)
    )


def _upto(what: bytes, between: bytes, most: int) -> bytes:
    """Return what matches the first `what`, with at most so many of `between` before it."""
    return rb"(?:(?!" + what + rb")" + between + rb"){0,%d}+" % most + what


# Text of a log, of `grep` or of markup may end a line and begin the next one.
_IN_LINE = rb"(?:[^\r\n\[]|\[(?!redacted:))"
_KEY_LINE = (rb"(?:[^\r\n\\%\[]|(?!" + _LINE_END + rb")" + _IN_LINE + rb"){0,40}+" + _LINE_END) + _upto(
    _mixed(40), _IN_LINE, 160
)
_KEY_INSIDE = (
    rb"(?=" + _upto(_mixed(20), _INSIDE, 1000) + rb"|(?:" + _upto(_mixed(8), _INSIDE, 200) + _BASE64 + rb"*+){3})"
)
_KEY_REST = rb"(?:" + _INSIDE + rb"{0,400}+" + _KEY_END + rb"|" + _LINE_END + _INDENT + _BASE64
_SHORT_LINE = _LINE_END + _INDENT + _BASE64 + rb"""{8,76}+(?=[ \t\r\n"'\\])"""

_BEARER = rb"[A-Za-z0-9._~+/=-]"
_AUTHORIZATION = rb"(?i:authorization)"
_SCHEME = rb"(?i:bearer|basic|token|apikey)(?:[ \t]|%20|\\u0020){1,8}"
_VALUE = rb"[A-Za-z0-9!$%*+./:=@^_~-]"
# Words and short numbers, "your-256-bit-secret", are a placeholder; "my-" before a secret makes it none.
_NO_PLACEHOLDER = (
    rb"(?!(?i:your|my)(?:[_-](?:[A-Za-z]{1,32}+[0-9]?|[0-9]{1,3}+)){1,12}+(?![A-Za-z0-9!$*^_~@-]|[.:][A-Za-z0-9])"
    rb"|[xX*.]+(?![A-Za-z0-9_-]))"
)
_PARAMETERS = (
    rb"(?i:(?:(?:access|refresh|id|auth|session|private|api|oauth|x-amz-security)[_-]?)?token"
    rb"|(?:api|access|secret|private|subscription|account)[_-]?key|(?:client[_-]?)?secret"
    rb"|password|passwd|passphrase|pwd|auth|jwt|sig|(?:x-amz-|x-goog-|oauth_)?signature)"
)
_PARAMETER = rb"(?:[?&#](?:amp;)?|&#38;|\\u0026|\\x26|%26|%3[fF])" + _PARAMETERS + rb"="
_URL = rb":(?:\\{0,8}/){2}"
_USER = rb"""[^\x00-\x20\x7f/?#:"'`<>{}\[\]\\|]"""
# A quote or a brace is part of it where it closes nothing.
_PASSWORD = (
    rb"""(?:[^\x00-\x20\x7f/?#"'`<>{}\[\]\\|]|['}](?=[A-Za-z0-9])|\{(?![^{}@\s]{0,64}\})|\\{1,8}u00[0-9A-Fa-f]{2})"""
)
_TEMPLATE = (
    rb"(?:\$(?i:env:)?(?:[A-Z][A-Z0-9_]{0,64}|[a-z_][A-Za-z_]{0,64}[0-9]?|[0-9])|%s|%[A-Z_]{1,64}%"
    rb"|[$%]\([^()@\s]{0,64}\)s?|[xX*.]{1,64})"
)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SecretForm:
    """One form of a secret; what the parts are is said above."""

    kind: str
    scout: bytes
    head: bytes
    before: bytes = b""
    tail: bytes = b""
    rest: bytes = b""


def _word(kind: str, prefix: bytes, body: bytes, *, tail: bytes = b"", end: bytes = b"") -> SecretForm:
    """A secret that is a word with a prefix of its own."""
    return SecretForm(kind=kind, scout=_WORD + prefix + body, before=_WORD, head=prefix + body + end, tail=tail)


FORMS: Final = (
    # Whatever stands between the two lines, if there are only characters of a key, or some that look like a key.
    SecretForm(
        kind="private-key",
        scout=_KEY_BEGIN,
        head=_KEY_BEGIN
        + rb"(?:[ \t]{0,8}(?:[\r\n]|\\+[nr])[A-Za-z0-9+/=\s\\]{1,4096}+|"
        + _KEY_INSIDE
        + _INSIDE
        + rb"{1,12000}+)"
        + _KEY_END,
    ),
    # Without its end, or longer.
    SecretForm(
        kind="private-key",
        scout=_KEY_BEGIN,
        head=_KEY_BEGIN
        + rb"(?:"
        + _KEY_HEADER
        + rb"){0,8}(?:"
        + _JOINT
        + rb"(?=(?:"
        + _BASE64
        + rb"{0,63}[0-9]|"
        + _BASE64
        + rb"{40}))"
        + _BASE64
        + rb"{20}|"
        + _KEY_LINE
        + rb")",
        tail=_BASE64 + rb"*+(?:" + _JOINT + _BASE64 + rb"{16,}+|" + _KEY_LINE + _BASE64 + rb"*+)*+",
        rest=_KEY_REST + rb"""{1,15}+(?=[\r\n"'\\]|\Z))?""",
    ),
    # In short lines.
    SecretForm(
        kind="private-key",
        scout=_KEY_BEGIN,
        head=_KEY_BEGIN + rb"(?=[^\[]{0,96}?[0-9])[ \t]{0,8}(?:" + _SHORT_LINE + rb"[ \t]{0,8}){4}",
        tail=rb"(?:" + _SHORT_LINE + rb"[ \t]{0,8})*+",
        rest=_KEY_REST + rb"""{1,76}+(?=[\r\n"'\\]|\Z))?""",
    ),
    _word("aws-access-key", rb"(?:AKIA|ASIA|ABIA|ACCA)", rb"[A-Z0-9]{16}", end=rb"(?![A-Za-z0-9_])"),
    SecretForm(
        kind="aws-secret-key",
        scout=rb"(?i:secret[ _-]?access[ _-]?key|aws[_-]?secret(?:[_-]?key)?)"
        + _SEPARATOR_PART
        + rb"+[A-Za-z0-9/+]{40}",
        before=rb"(?i:secret[ _-]?access[ _-]?key|aws[_-]?secret(?:[_-]?key)?)" + _SEPARATOR,
        head=rb"[A-Za-z0-9/+]{40}(?![A-Za-z0-9/+=])",
    ),
    SecretForm(
        kind="aws-session-token",
        scout=rb"(?i:session[_-]?token)" + _SEPARATOR_PART + rb"+[A-Za-z0-9/+]{100}",
        before=rb"(?i:session[_-]?token)" + _SEPARATOR,
        head=rb"[A-Za-z0-9/+]{100}",
        tail=_BASE64 + rb"*+",
    ),
    _word("github-token", rb"gh[pousr]_", rb"[A-Za-z0-9]{30}", tail=rb"[A-Za-z0-9_]*+"),
    _word("github-token", rb"github_pat_", rb"[A-Za-z0-9_]{22}", tail=rb"[A-Za-z0-9_]*+"),
    _word("gitlab-token", rb"gl(?:pat|dt|rt|ptt|cbt)-", rb"[A-Za-z0-9_-]{20}", tail=rb"[A-Za-z0-9_-]*+"),
    _word("google-key", rb"AIza", rb"[A-Za-z0-9_-]{35}", end=rb"(?![A-Za-z0-9_])"),
    _word("npm-token", rb"npm_", rb"[A-Za-z0-9]{36}", tail=rb"[A-Za-z0-9]*+"),
    _word("huggingface-token", rb"hf_", rb"[A-Za-z0-9]{30}", tail=rb"[A-Za-z0-9]*+"),
    _word("stripe-key", rb"[sr]k_(?:live|test)_", rb"[A-Za-z0-9]{10}", tail=rb"[A-Za-z0-9_]*+"),
    SecretForm(
        kind="slack-token",
        scout=rb"(?:_|" + _RUN_SCOUT + rb")xox[abeoprs]-[A-Za-z0-9-]{10}",
        before=_RUN,
        head=rb"xox[abeoprs]-(?=[A-Za-z-]{0,20}[0-9])[A-Za-z0-9-]{10}",
        tail=rb"[A-Za-z0-9-]*+",
    ),
    # Words such as the class names sk-toggleable__label have no long run with a digit in it.
    SecretForm(
        kind="sk-key",
        scout=_RUN_SCOUT + rb"sk-[A-Za-z0-9_-]{16}|_sk-[A-Za-z0-9-]{8}[A-Za-z0-9_-]{8}",
        before=_RUN,
        head=rb"sk-(?:(?=[A-Za-z0-9]{32})|(?=(?:[A-Za-z0-9-]|_(?!sk-)){0,127}?(?=[A-Za-z0-9]{12})[A-Za-z]{0,11}[0-9]))"
        rb"[A-Za-z0-9_-]{16}",
        tail=rb"[A-Za-z0-9_-]*+",
    ),
    # Signed (a header and a payload, both JSON) or encrypted (five parts).
    SecretForm(
        kind="jwt",
        scout=rb"(?:_|" + _RUN_SCOUT + rb")eyJ[A-Za-z0-9-]{14}",
        before=_RUN,
        head=rb"eyJ[A-Za-z0-9-]{14}(?:[A-Za-z0-9-]|_(?!eyJ)){0,8192}+\.(?:eyJ[A-Za-z0-9_-]{2}"
        rb"|[A-Za-z0-9_-]{0,2048}+\.[A-Za-z0-9_-]{8,64}+\.[A-Za-z0-9_-]{8})",
        tail=rb"(?:[A-Za-z0-9_-]|\.(?=[A-Za-z0-9_-]))*+",
    ),
    # Behind the name of the header a value has a digit or ends the line; elsewhere it must look like no word.
    SecretForm(
        kind="authorization",
        scout=_AUTHORIZATION + _SEPARATOR_PART + rb"+" + _SCHEME + _BEARER + rb"{6}",
        before=_AUTHORIZATION + _SEPARATOR + _SCHEME + _NO_PLACEHOLDER + rb"(?!" + _BEARER + rb"{0,64}+[{(\[])",
        head=rb"(?:(?=" + _BEARER + rb"{0,255}?[0-9])|(?=" + _BEARER + rb"""{6,256}+(?:["'\\\r\n\]),;]|\Z)))"""
        rb"[A-Za-z0-9_~+/-]" + _BEARER + rb"{5}",
        tail=rb"(?:[A-Za-z0-9_~+/=-]|\.(?=[A-Za-z0-9._~+/=-]))*+",
    ),
    SecretForm(
        kind="bearer",
        scout=_WORD + rb"(?i:bearer)(?:[ \t]|%20|\\u0020){1,8}" + _BEARER + rb"{16}",
        before=_WORD + rb"(?i:bearer)(?:[ \t]|%20|\\u0020){1,8}(?!" + _BEARER + rb"{0,64}+[{(\[])",
        head=rb"(?=" + _BEARER + rb"{0,255}?[0-9])[A-Za-z0-9_~+/-]" + _BEARER + rb"{15}",
        tail=rb"(?:[A-Za-z0-9_~+/=-]|\.(?=[A-Za-z0-9._~+/=-]))*+",
    ),
    SecretForm(
        kind="url-parameter",
        scout=_PARAMETER + _VALUE + rb"{6}",
        before=rb"(?<!&)" + _PARAMETER + _NO_PLACEHOLDER + rb"(?!" + _VALUE + rb"{0,64}+[{(\[])",
        head=rb"(?:[A-Za-z0-9!+/_~-]|%[0-9A-Fa-f]{2})" + _VALUE + rb"{5}",
        tail=rb"(?:[A-Za-z0-9!$%*+/:=@^_~-]|\.(?=[A-Za-z0-9]))*+",
    ),
    # Where the user is a token as well, both are the secret.
    SecretForm(
        kind="url-password",
        scout=_URL + _USER + rb"""*:[^\x00-\x20\x7f/?#"`<>\[\]|]*?@""",
        before=_URL
        + rb"(?:(?!"
        + _TOKEN_START
        + rb")"
        + _USER
        + rb"{0,256}+:|(?="
        + _TOKEN_START
        + _USER
        + rb"{0,256}+:))(?!"
        + _TEMPLATE
        + rb"@)",
        head=_PASSWORD + rb"{1,1024}(?=@)",
    ),
)


@cache
def compiled_escapes() -> re.Pattern[bytes]:
    """What is not looked at, within ESCAPE_BYTES, as group 1; with a group 2 where words are parted even so.

    A colour code parts a token from what stands before it, and nothing else.
    """
    parts_words = rb"((?<![mK])(?<!\([AB0])|(?=" + _COLOUR + rb"|" + _TOKEN_START + rb"|(?i:bearer)))?"
    return re.compile(rb"(" + _COLOUR + rb"{1,3}+|" + _CURSOR + rb")" + parts_words)


@cache
def compiled_tail(form: SecretForm) -> re.Pattern[bytes]:
    """What goes on behind the head; it may be matched from any byte inside the run."""
    return re.compile(form.tail)


@cache
def compiled_rest(form: SecretForm) -> re.Pattern[bytes]:
    """What may follow the run."""
    return re.compile(form.rest)


@cache
def compiled_heads() -> re.Pattern[bytes]:
    """Every form as far as its head; `lastindex` - 1 is the place in FORMS, and that group is the head."""
    return re.compile(_alternatives(lambda form: form.head))


@cache
def compiled_whole() -> re.Pattern[bytes]:
    """Every form whole, groups as in `compiled_heads`."""
    return re.compile(_alternatives(lambda form: form.head + form.tail + form.rest))


def _alternatives(secret: Callable[[SecretForm], bytes]) -> bytes:
    """Return one pattern of all forms; what many have before them is looked at once."""
    groups = groupby(FORMS, key=lambda form: form.before)
    return b"|".join(
        before + rb"(?:" + b"|".join(rb"(" + secret(form) + rb")" for form in forms) + rb")" for before, forms in groups
    )


@cache
def compiled_written_escape() -> re2._Regexp:
    """What every written-out code of a terminal has in it."""
    return _linear(rb"\\(?:u001[bB]|x1[bB]|033|e)[\[(]")


@cache
def compiled_scout() -> re2._Regexp:
    """What to look at more closely, in one pass and linear time."""
    return _linear(b"|".join(rb"(?:" + scout + rb")" for scout in dict.fromkeys(form.scout for form in FORMS)))


def _linear(pattern: bytes) -> re2._Regexp:
    """Compile a pattern for RE2, over bytes whatever they spell."""
    import re2  # noqa: PLC0415 (loads a native library)

    options = re2.Options()
    options.encoding = re2.Options.Encoding.LATIN1
    options.log_errors = False
    options.max_mem = 16 << 20
    return re2.compile(pattern, options)
