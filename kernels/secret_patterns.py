r"""What a secret looks like: one row for each form of it, and the compiled patterns made of the rows.

A row's `before` is a label that stays; `head` is as much of the secret as it takes to be sure; `tail` is the run that
goes on from there, of any length; `rest` is what may close it. A match of `before` and `head`, with all that they look
at, fits into HEAD_BYTES; `tail` can be matched piece by piece; whether it goes on, and whether `rest` follows, shows
within TAIL_LOOK_BYTES.

`scout` is written for RE2, which passes over a text once for all rows: it matches wherever `before` and `head` do,
from the same byte, and costs nothing elsewhere.

That a second pass finds nothing is a matter of the characters: no secret is followed by a letter or a digit, so that
no word begins at a mark's end; no class but a separator's has "[", so that nothing is looked for across a mark; and
what must not follow a value counts "[" in.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import re2

HEAD_BYTES: Final = 1 << 14
TAIL_LOOK_BYTES: Final = 1 << 9

# A word may begin behind a line end or a tab spelled as an escape, a percent escape, a colour code.
_ESCAPE = rb"\\[nrtbf]|\\u00[0-9A-Fa-f]{2}|%[0-9A-Fa-f]{2}|\x1b\[[0-9;]{0,12}m"
_WORD = rb"(?:\b|" + _ESCAPE + rb")"
# One start for each run of word characters and hyphens, so that "sk-sk-sk-…" is looked at once; a hyphen may stand
# before it, as a removed line of a diff has it. Not behind "]", the end of a mark: no run began there before.
_RUN = rb"(?:(?:\A|[^A-Za-z0-9_\]-]|" + _ESCAPE + rb")-?)"
_SEPARATOR = rb"""[\s=:>"'\\,\[(]{1,12}"""

_KEY_LABEL = rb"[A-Z0-9 ]{0,40}PRIVATE KEY(?: BLOCK)?-----"
_KEY_BEGIN = rb"-----BEGIN " + _KEY_LABEL
_BASE64 = rb"[A-Za-z0-9+/=]"
# Between two lines of a key: line ends, real or escaped, quotes, signs of a quotation or a diff, line numbers.
_JOINT = rb"(?:\\+[nr]|[^A-Za-z/=\x80-\xff]){1,96}+"
_KEY_HEADER = _JOINT + rb"""[A-Z][A-Za-z-]{2,20}: [^\r\n\\"'\[]{0,200}"""
_KEY_END = _JOINT + rb"END " + _KEY_LABEL
_LINE_END = rb"(?:\r?\n|\\+r\\+n|\\+n)[ \t>|+-]{0,32}"

_BEARER = rb"[A-Za-z0-9._~+/=-]"
_VALUE = rb"[A-Za-z0-9!$%*+./:=@^_~-]"
_NO_PLACEHOLDER = rb"(?!(?i:your|my)[_-]|[xX*.]+(?![A-Za-z0-9_-]))"
_PARAMETERS = (
    rb"(?i:(?:(?:access|refresh|id|auth|session|private|api|oauth|x-amz-security)[_-]?)?token"
    rb"|(?:api|access|secret|private|subscription|account)[_-]?key|(?:client[_-]?)?secret"
    rb"|password|passwd|passphrase|pwd|auth|jwt|sig|(?:x-amz-|x-goog-|oauth_)?signature)"
)
_PARAMETER = rb"(?:[?&#](?:amp;)?|\\u0026)" + _PARAMETERS + rb"="
_TOKEN_AS_USER = rb"(?:gh[pousr]_|github_pat_|glpat-|sk-|[sr]k_|hf_|npm_|xox|AKIA|ASIA)"
_USER = rb"""[^\x00-\x20\x7f/?#@:"'`<>{}\[\]\\|]"""
_PASSWORD = rb"""[^\x00-\x20\x7f/?#"'`<>{}\[\]\\|]"""


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
    # Whatever stands between the two lines, if it is made of the characters of a key: also a short one.
    SecretForm(
        kind="private-key",
        scout=_KEY_BEGIN,
        head=_KEY_BEGIN + rb"[ \t]{0,8}(?:[\r\n]|\\+[nr])[A-Za-z0-9+/=\s\\]{1,4096}+-----END " + _KEY_LABEL,
    ),
    # With headers, quotes or line numbers in it, or without its end.
    SecretForm(
        kind="private-key",
        scout=_KEY_BEGIN,
        head=_KEY_BEGIN
        + rb"(?:"
        + _KEY_HEADER
        + rb"){0,8}"
        + _JOINT
        + rb"(?="
        + _BASE64
        + rb"{0,63}[0-9])"
        + _BASE64
        + rb"{20}",
        tail=_BASE64 + rb"*+(?:" + _JOINT + _BASE64 + rb"{16,}+)*+",
        rest=rb"(?:(?:"
        + _JOINT
        + _BASE64
        + rb"{1,15}+)?+"
        + _KEY_END
        + rb"|"
        + _LINE_END
        + _BASE64
        + rb"""{1,15}+(?=[\r\n"'\\]|\Z))?""",
    ),
    _word("aws-access-key", rb"(?:AKIA|ASIA|ABIA|ACCA)", rb"[A-Z0-9]{16}", end=rb"(?![A-Za-z0-9_])"),
    SecretForm(
        kind="aws-secret-key",
        scout=rb"(?i:secret[_-]?access[_-]?key|aws[_-]?secret(?:[_-]?key)?)" + _SEPARATOR + rb"[A-Za-z0-9/+]{40}",
        before=rb"(?i:secret[_-]?access[_-]?key|aws[_-]?secret(?:[_-]?key)?)" + _SEPARATOR,
        head=rb"[A-Za-z0-9/+]{40}(?![A-Za-z0-9/+=])",
    ),
    SecretForm(
        kind="aws-session-token",
        scout=rb"(?i:session[_-]?token)" + _SEPARATOR + rb"[A-Za-z0-9/+]{100}",
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
        scout=_RUN + rb"xox[abeoprs]-[A-Za-z0-9-]{10}",
        before=_RUN,
        head=rb"xox[abeoprs]-(?=[A-Za-z-]{0,20}[0-9])[A-Za-z0-9-]{10}",
        tail=rb"[A-Za-z0-9-]*+",
    ),
    # Words such as the class names sk-toggleable__label have no long run with a digit in it.
    SecretForm(
        kind="sk-key",
        scout=_RUN + rb"sk-[A-Za-z0-9_-]{16}",
        before=_RUN,
        head=rb"sk-(?:(?=[A-Za-z0-9]{32})|(?=[A-Za-z0-9_-]{0,127}?(?=[A-Za-z0-9]{12})[A-Za-z]{0,11}[0-9]))"
        rb"[A-Za-z0-9_-]{16}",
        tail=rb"[A-Za-z0-9_-]*+",
    ),
    # Signed (a header and a payload, both JSON) or encrypted (five parts).
    SecretForm(
        kind="jwt",
        scout=_RUN + rb"eyJ[A-Za-z0-9_-]{6}",
        before=_RUN,
        head=rb"eyJ[A-Za-z0-9_-]{6,8192}+\.(?:eyJ[A-Za-z0-9_-]{2}"
        rb"|[A-Za-z0-9_-]{0,2048}+\.[A-Za-z0-9_-]{8,64}+\.[A-Za-z0-9_-]{8})",
        tail=rb"(?:[A-Za-z0-9_-]|\.(?=[A-Za-z0-9_-]))*+",
    ),
    # Behind the name of the header a value has a digit or ends the line; elsewhere it must look like no word.
    SecretForm(
        kind="authorization",
        scout=rb"(?i:authorization)" + _SEPARATOR + rb"(?i:bearer|basic|token)[ \t]{1,8}" + _BEARER + rb"{6}",
        before=rb"(?i:authorization)"
        + _SEPARATOR
        + rb"(?i:bearer|basic|token)[ \t]{1,8}"
        + _NO_PLACEHOLDER
        + rb"(?!"
        + _BEARER
        + rb"{0,64}+[{(\[])",
        head=rb"(?:(?=" + _BEARER + rb"{0,255}?[0-9])|(?=" + _BEARER + rb"""{6,256}+(?:["'\\\r\n\]),;]|\Z)))"""
        rb"[A-Za-z0-9_~+/-]" + _BEARER + rb"{5}",
        tail=rb"(?:[A-Za-z0-9_~+/=-]|\.(?=[A-Za-z0-9._~+/=-]))*+",
    ),
    SecretForm(
        kind="bearer",
        scout=_WORD + rb"(?i:bearer)[ \t]{1,8}" + _BEARER + rb"{16}",
        before=_WORD + rb"(?i:bearer)[ \t]{1,8}(?!" + _BEARER + rb"{0,64}+[{(\[])",
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
        scout=rb"://" + _USER + rb"*:" + _PASSWORD + rb"*@",
        before=rb"://(?:(?!"
        + _TOKEN_AS_USER
        + rb")"
        + _USER
        + rb"{0,64}+:|(?="
        + _TOKEN_AS_USER
        + _USER
        + rb"{0,256}+:))"
        rb"(?!\$[A-Za-z_(]|%[s(]|[xX*.]+@)",
        head=_PASSWORD + rb"{1,1024}(?=@)",
    ),
)


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
    return re.compile(b"|".join(form.before + rb"(" + form.head + rb")" for form in FORMS))


@cache
def compiled_whole() -> re.Pattern[bytes]:
    """Every form whole, groups as in `compiled_heads`."""
    return re.compile(b"|".join(form.before + rb"(" + form.head + form.tail + form.rest + rb")" for form in FORMS))


@cache
def compiled_scout() -> re2._Regexp:
    """What to look at more closely, in one pass and linear time."""
    import re2  # noqa: PLC0415 (loads a native library)

    options = re2.Options()
    options.encoding = re2.Options.Encoding.LATIN1  # bytes, whatever they spell
    options.log_errors = False
    options.max_mem = 16 << 20
    return re2.compile(b"|".join(rb"(?:" + scout + rb")" for scout in dict.fromkeys(f.scout for f in FORMS)), options)
