"""What is redacted and what is not, and that chunks, encodings and a second pass change nothing."""

from __future__ import annotations

import base64
import hashlib
import random
import re
import textwrap

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from chapbook.kernels.secret_patterns import (
    FORMS,
    HEAD_BYTES,
    TAIL_LOOK_BYTES,
    compiled_escapes,
    compiled_heads,
    compiled_scout,
)
from chapbook.kernels.secrets import Redactor, redact, redact_reference
from chapbook.kernels.text_encoding import UTF_8, TextEncoding

# Made here, so that no scanner takes this file for a leak: letters and digits as a real key has them.
ALNUM = "aZ3kQ9xW7mB2vN5tR8yL1pD4sF6gH0jC" * 8
UPPER = "Q7RZ2M5XK4TB9WDA3LJH"


def pem(label: str = "RSA PRIVATE KEY", *, lines: int = 12, eol: str = "\n", lead: str = "", headers: str = "") -> str:
    """Return a private key of `lines` full lines and a short one."""
    body = base64.b64encode(random.Random(lines).randbytes(48 * lines + 7)).decode()
    rows = [body[at : at + 64] for at in range(0, len(body), 64)]
    return eol.join(f"{lead}{row}" for row in (f"-----BEGIN {label}-----", *headers.split("|"), *rows) if row) + (
        f"{eol}{lead}-----END {label}-----"
    )


def jwt() -> str:
    """Return a signed token."""
    parts = (b'{"alg":"HS256","typ":"JWT"}', b'{"sub":"1234567890","name":"J"}', bytes(range(32)))
    return ".".join(base64.urlsafe_b64encode(part).decode().rstrip("=") for part in parts)


def mark(kind: str, secret: str) -> str:
    """Return what stands for a secret, whatever its colours are."""
    seen = re.sub(r"\x1b\[[0-9;]*m", "", secret)
    return f"[redacted:{kind}:{hashlib.sha256(seen.encode()).hexdigest()[:8]}]"


def as_seen(text: str) -> bytes:
    """Return the text without a terminal's codes."""
    return compiled_escapes().sub(lambda escape: b"\x1b" if escape[2] is not None else b"", text.encode())


PGP_HEADERS = "Version: GnuPG v2|Comment: https://example.org"
# kind, what stands before it and stays, the secret, what stands behind it and stays
SECRETS = [
    ("private-key", "", pem(), "\n"),
    ("private-key", "", pem("PRIVATE KEY", lines=1), ""),
    ("private-key", "", pem("EC PRIVATE KEY", eol="\r\n"), "\r\n"),
    ("private-key", "", pem("OPENSSH PRIVATE KEY", lines=30), "\nnext"),
    ("private-key", "", pem("ENCRYPTED PRIVATE KEY"), " and on"),
    ("private-key", "", pem(headers="Proc-Type: 4,ENCRYPTED|DEK-Info: AES-128-CBC,0A1B2C3D4E5F60718293"), "\n"),
    ("private-key", "", pem("PGP PRIVATE KEY BLOCK", headers=PGP_HEADERS), "\n"),
    ("private-key", '{"key": "', pem("PRIVATE KEY", eol="\\n"), '\\n", "b": 1}'),
    ("private-key", '{"key": "', pem("PRIVATE KEY", eol="\\r\\n"), '\\r\\n"}'),
    ("private-key", '"', pem("PRIVATE KEY", eol='\\n" +\n    "'), '"'),
    ("private-key", "+", pem("PRIVATE KEY", eol="\n+"), "\n+x"),
    ("private-key", "-", pem("PRIVATE KEY", eol="\n-"), "\n x"),
    ("private-key", "  > ", pem("PRIVATE KEY", eol="\n  > "), "\n"),
    ("private-key", "  7\t", pem("PRIVATE KEY", eol="\n  12\t"), "\n"),
    ("private-key", "KEY=", pem("PRIVATE KEY", eol=" "), "\n"),
    ("private-key", "", "-----BEGIN PRIVATE KEY-----\nMIIabc\nde==\n-----END PRIVATE KEY-----", "\n"),
    ("private-key", "", pem()[:500], ""),
    ("private-key", "", pem()[: pem().index("\n-----END")], "\n$ ls -la\n"),
    ("private-key", '"', pem(eol="\\n")[:600], '"}'),
    ("aws-access-key", "id=", "AK" + "IA" + UPPER[:16], ","),
    ("aws-access-key", "X-Amz-Credential=", "AS" + "IA" + UPPER[:16], "%2F20300101"),
    ("aws-secret-key", "aws_secret_access_key = ", ALNUM[:38] + "/+", "\n"),
    ("aws-secret-key", 'AWS_SECRET_ACCESS_KEY="', ALNUM[3:43], '"'),
    ("aws-secret-key", '\\"SecretAccessKey\\": \\"', ALNUM[5:45], '\\"'),
    ("aws-session-token", "aws_session_token=", ALNUM[:120] + "==", "\n"),
    *(("github-token", "x ", prefix + ALNUM[:36], " y") for prefix in ("ghp_", "gho_", "ghu_", "ghs_", "ghr_")),
    ("github-token", "token: ", "github_pat_" + ALNUM[:22] + "_" + ALNUM[:59], "."),
    ("github-token", '{"out": "a\\n', "ghp_" + ALNUM[:36], '\\n"}'),
    ("github-token", "\x1b[01;31m", "ghp_" + ALNUM[:36], "\x1b[m"),
    ("github-token", "https://", "ghp_" + ALNUM[:36], "@github.com/o/r"),
    ("github-token", "next%3D", "ghp_" + ALNUM[:36], "%26a"),
    ("sk-key", "key=", "sk-" + ALNUM[:48], "\n"),
    ("sk-key", "", "sk-proj-" + ALNUM[:20] + "-" + ALNUM[:30] + "_" + ALNUM[:9], ""),
    ("sk-key", "'", "sk-ant-api03-" + ALNUM[:60] + "-" + ALNUM[:20] + "AA", "'"),
    ("sk-key", "-", "sk-" + "a" * 48, "\n"),
    ("stripe-key", "(", "sk_" + "live_" + ALNUM[:24], ")"),
    ("jwt", "jwt ", jwt(), "."),
    ("jwt", '"', jwt() + "x" * 3000, '"'),
    ("jwt", "", ".".join(("eyJ" + ALNUM[:60], "", ALNUM[:16], ALNUM[:90], ALNUM[:22])), " "),
    ("authorization", "Authorization: Bearer ", ALNUM[:20], "\r\n"),
    ("authorization", "authorization: bearer ", "some-opaque-word", "\r\n"),
    ("authorization", '{"AUTHORIZATION": "BEARER ', "a.b~c+d/e=f_12==", '"}'),
    ("authorization", "-H 'Authorization: Basic ", "dXNlcjpwYXNzd29yZA==", "' x"),
    ("authorization", "Authorization: Bearer ", jwt(), "\n"),
    ("bearer", "the Bearer ", ALNUM[:24], " was sent"),
    ("url-parameter", "https://h/p?token=", "abc123", "&x=1"),
    ("url-parameter", "https://h/p?x=1&access_token=", ALNUM[:30], "#part"),
    ("url-parameter", "/cb#access_token=", ALNUM[:30], " x"),
    ("url-parameter", "?a=b&amp;api_key=", "k-12345-xyz", '"'),
    ("url-parameter", '"/a?b=c\\u0026client_secret=', ALNUM[:12], '"'),
    ("url-parameter", "?password=", "p%40ss!word$1", " "),
    ("url-parameter", "?sv=1&sig=", "abc%2Bdef%3D", ">"),
    ("url-parameter", "&X-Amz-Signature=", "0123456789abcdef" * 4, "</a>"),
    ("url-parameter", "see ?TOKEN=", "abcdef12", ". Then"),
    ("url-password", "postgres://user:", "hunter2", "@db.example/x"),
    ("url-password", "redis://:", "s3cr3t", "@h:6379"),
    ("url-password", "amqp://u:", "p@ss,w:rd", "@h/"),
    ("url-password", "ftp://u:", "pässwört", "@h/"),
    ("url-password", "https://", "ghp_" + ALNUM[:36] + ":x-oauth-basic", "@github.com"),
    ("gitlab-token", "", "glpat-" + ALNUM[:20], "\n"),
    ("slack-token", "", "xoxb-" + "123456789012-" + ALNUM[:24], "\n"),
    ("google-key", "?key=", "AIza" + ALNUM[:35], "&x"),
    ("npm-token", "_authToken=", "npm_" + ALNUM[:36], "\n"),
    ("huggingface-token", "", "hf_" + ALNUM[:34], "\n"),
]
# The same where codes of a terminal or other text stand before, between and behind.
SECRETS += [
    *(
        (kind, escape, secret, "")
        for kind, secret in (
            ("github-token", "ghp_" + ALNUM[:36]),
            ("sk-key", "sk-proj-" + ALNUM[:40]),
            ("aws-access-key", "AK" + "IA" + UPPER[:16]),
            ("jwt", jwt()),
            ("slack-token", "xoxb-" + "123456789012-" + ALNUM[:24]),
            ("npm-token", "npm_" + ALNUM[:36]),
        )
        for escape in (
            "\x1b[01;31m\x1b[K",
            "key\x1b[38;2;255;255;255m",
            "\x1b[38:2::255:100:50m",
            "done\x1b[2K\x1b[1G",
            "\x1b[m\x1b(B",
            "\\u001b[32m",
            "\\\\u001B[1;32m",
            "\\x1b[32m",
            "\\033[0m\\033[32m",
            "\\e[1m",
            "\\x22",
            "\\012",
            "a%253D",
            "TOKEN_",
        )
    ),
    ("github-token", "\x1b]8;;http://h\x1b\\", "ghp_" + ALNUM[:36], "\x1b]8;;\x1b\\"),
    ("slack-token", "\x1b]0;a\x07", "xoxb-" + "123456789012-" + ALNUM[:24], ""),
    ("bearer", "done\x1b[32mBearer ", ALNUM[:24], "\x1b[0m"),
    ("aws-secret-key", '\x1b[34;1m"SecretAccessKey"\x1b[0m\x1b[1;39m:\x1b[0m \x1b[0;32m"', ALNUM[:40], '"\x1b[0m'),
    ("authorization", "\x1b[36mAuthorization\x1b[39;49;00m: Bearer ", ALNUM[:14], "\x1b[0m"),
    ("authorization", "\\u001b[36mAuthorization\\u001b[39;49;00m: Bearer ", ALNUM[:14], "\\u001b[0m"),
    ("url-password", "postgres://user:\x1b[1m", "s3cr3t", "\x1b[0m@h"),
    ("url-parameter", "?token\x1b[0m=\x1b[38;5;2m", ALNUM[:14], "\x1b[0m&a"),
    ("aws-secret-key", "aws_secret_access_key             = ", ALNUM[:40], "\n"),
    ("aws-secret-key", 'secret_access_key                 = "', ALNUM[:40], '"'),
    ("aws-secret-key", "SecretAccessKey: `", ALNUM[:40], "`,"),
    ("aws-secret-key", "| SecretAccessKey |  ", ALNUM[:40], " |"),
    ("aws-secret-key", "<td>Secret access key</td><td>", ALNUM[:40], "</td>"),
    ("aws-secret-key", "aws_secret_access_key%3D", ALNUM[:40], "&"),
    ("aws-session-token", "aws_session_token                     = `", ALNUM[:120], "`"),
    ("url-password", "postgres:\\/\\/user:", "s3cr3t", "@h\\/db"),
    ("url-password", f"postgres://{'u' * 100}:", "s3cr3t", "@h"),
    ("url-password", "postgres://me@corp.example:", "s3cr3t", "@h"),
    ("url-password", "postgres://u:", "a's3cr3t", "@h"),
    ("url-password", "postgres://u:", "a{s3cr3t", "@h"),
    ("url-password", "postgres://u:", "a}s3cr3t", "@h"),
    ("url-password", "postgres://u:", "$Abcs3cr3t", "@h"),
    ("url-password", "postgres://u:", "%ss3cr3t", "@h"),
    ("url-password", '"postgres://u:', "a\\u0026b", '@h"'),
    ("url-parameter", "?token=", "my-s3cr3tPassw0rd", ""),
    ("url-parameter", "?token=", "your-a1B2c3D4", "&"),
    ("url-parameter", "?a=b%26token=", ALNUM[:14], ""),
    ("private-key", "x:1:", pem(eol="\nsrc/key.pem:12:"), "\n"),
    ("private-key", "x-1-", pem(eol="\nsrc/key.pem-12-"), "\n"),
    ("private-key", "web_1  | ", pem(eol="\nweb_1  | "), "\n"),
    ("private-key", "", pem(eol="\n2030-01-01T10:00:00Z [main] INFO sshd[12]: "), "\n"),
    ("private-key", "", pem(eol="\n^a1b2c3d (John Doe 2030-01-01 10:00:00 +0100 12) "), "\n"),
    ("private-key", "\x1b[32m+\x1b[m\x1b[32m", pem(eol="\x1b[m\n\x1b[32m+\x1b[m\x1b[32m"), "\x1b[m\n"),
    ("private-key", "", pem(eol="<br>\n"), "<br>"),
    ("private-key", "", pem(eol="%0A").replace(" ", "+"), "%0A"),
    ("private-key", "x:1:", pem(eol="\nsrc/key.pem:12:", lines=150), "\nThat is all.\n"),
    ("private-key", "x:1:", pem(eol="\nsrc/key.pem:12:", lines=5).rpartition("\n")[0].rpartition("\n")[0], "\n$ ls\n"),
    ("private-key", "", pem(eol="<br>\n")[:500], ""),
    ("private-key", "", "-----BEGIN PRIVATE KEY-----\nMII" + "abcdefghij" * 6 + "\n" + ALNUM[:64], "\n$ "),
    *(
        ("private-key", "", "-----BEGIN PRIVATE KEY-----\n" + "\n".join(textwrap.wrap(ALNUM, width)) + end, "\n$ ls\n")
        for width in (8, 15, 16, 19)
        for end in ("", "\n-----END PRIVATE KEY-----")
    ),
    ("private-key", "", "---- BEGIN SSH2 ENCRYPTED PRIVATE KEY ----\nComment: a b\n" + ALNUM[:70], "\n"),
]
LOOKALIKES = [
    "da39a3ee5e6b4b0d3255bfef95601890afd80709 e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855",
    "550e8400-e29b-41d4-a716-446655440000",
    "commit 8f3c1e2d9b7a6054f1e2d3c4b5a69788f0e1d2c3\nindex 83db48f..bf2a9c1 100644",
    '"integrity": "sha512-' + base64.b64encode(bytes(range(64))).decode() + '",',
    'checksum = "' + "0a1b2c3d" * 8 + '"',
    '{file = "a-1.0-py3-none-any.whl", hash = "sha256:' + "9f8e7d6c" * 8 + '"},',
    "![x](data:image/png;base64," + base64.b64encode(random.Random(3).randbytes(6000)).decode() + ")",
    "task-management-systems-2024-q3 risk-assessment-1234567890ab desk-reservation-abcdef123456",
    "the bearer of bad news, bearer tokens, Bearer authentication, Authorization: Bearer tokens are used",
    "?token={token}&x=1 ?token=${token} ?token=%s ?token=<token> ?api_key=$KEY ?token=:token ?token=abcdef{x}",
    '"?token=" + token; url + "&password=" + encodeURIComponent(password)',
    "?token=getToken() a&&token=somethingElse ?page_token=abcdefgh ?sort_key=abcdefgh",
    "sk-... sk-your-key-here sk-xxxxxxxxxxxxxxxxxxxxxxxx <your token> ?token=YOUR_TOKEN_HERE ?token=xxxxxxxx ?sig=***",
    "Authorization: Bearer <token> Authorization: Bearer {token}\nAuthorization: Bearer YOUR_API_TOKEN\n",
    "sk-toggleable__label-arrow sk-estimator-doc-link sk-top-container-fluid-12 sk-internationalization",
    "f'Bearer {token}' Bearer ${TOKEN_1234567890123}",
    "if '-----BEGIN PRIVATE KEY-----' in text: # and -----END PRIVATE KEY-----",
    "-----BEGIN PRIVATE KEY-----\n...\n-----END PRIVATE KEY-----",
    "-----BEGIN CERTIFICATE-----\nMIIDdzCCAl+gAwIBAgIEAgAAuTANBgkqhkiG9w0BAQUFADBaMQswCQYD\n-----END CERTIFICATE-----",
    "-----BEGIN PUBLIC KEY-----\nMFkwEwYHKoZIzj0CAQYIKoZIzj0DAQcDQgAEabcdefgh\n-----END PUBLIC KEY-----",
    "http://host:8080/@scope git@github.com:o/r.git https://x.y/@a:b ssh://git@host:22/p http://[::1]:80/a@b",
    "postgres://user:${PASS}@h postgres://user:$PASS@h postgres://{user}:{pw}@h x://u:<password>@h x://u:***@h x://u:%s@h",
    "npm_config_registry_of_the_whole_company_url hf_hub_download_with_a_long_name xoxo-hugs-and-kisses AKIA",
    "http://u:{pw}@h http://u:{d['x']}@h 'http://u:'+p+'@h' ['http://h:80','u@h'] {a:'http://h:80',b:'c@d'} http://h:80},b@c",
    "x://u:$pass@h x://u:$dbPass@h x://u:$DB_PASS_1@h x://u:%(pw)s@h x://u:$(pw)@h x://u:$1@h x://u:%PASS%@h",
    "?token=your-256-bit-secret ?token=my-token ?token=MY_TOKEN_1 ?secret=your_secret.",
    "-----BEGIN PRIVATE KEY-----\nYour private key goes here, see docs/keys.md\n-----END PRIVATE KEY-----",
    "-----BEGIN PRIVATE KEY-----\x1b[0m is looked for\nin /usr/lib/python3/dist-packages/cryptography\n",
    "\x1b[35m\x1b[Ktests/a.py\x1b[m\x1b[K\x1b[36m\x1b[K:\x1b[m\x1b[K \x1b[01;31m\x1b[Ktask-\x1b[mlist",
    "\x1b[0m\x1b[01;34mcolours\x1b[0m \x1b[01;32mthat-\x1b[m\x1b[Kare-not-secrets\x1b[0m ta\x1b[1msk-1\x1b[0m",
    "secret_access_key =                                                                  " + "a1" * 20,
    "\x1b[ \x1b[[redacted:bearer:12345678] \x1b[99999 \\x1b \\033[ \x1b",
    "ghp_short eyJhbGciOiJIUzI1NiJ9 eyJhbGciOiJIUzI1NiJ9.json secret_access_key_id = 12",
    mark("bearer", "x"),
]
NOISE = [
    " ",
    "\n",
    "\r\n",
    '"',
    "=",
    "&",
    "?",
    ":",
    "-",
    "_",
    ".",
    "@",
    "a",
    "A1",
    "é",
    "日本",
    "\x1b",
    "\x1b[0m",
    "\x1b[1;3",
    "\x1b[2K\x1b[1G",
    "\\u001b[0m",
    "\\x1b[",
    "\\",
    "\\n",
    "%20",
    "\0",
    "sk-",
    "eyJ",
]
PIECES = st.one_of(
    st.sampled_from(NOISE),
    st.sampled_from(SECRETS).map(lambda row: row[1] + row[2] + row[3]),
    st.sampled_from(SECRETS).map(lambda row: row[2]),
    st.sampled_from(LOOKALIKES),
    st.tuples(st.sampled_from(SECRETS), st.integers(0, 200)).map(lambda cut: (cut[0][1] + cut[0][2])[: cut[1]]),
)
# So long that what is decided by size is decided in the middle of a text.
FILL = st.sampled_from(["", ". " * (HEAD_BYTES // 2), "a1" * (HEAD_BYTES // 2), "\n" * 700])
TEXTS = st.tuples(st.lists(PIECES, max_size=6), FILL, st.lists(PIECES, max_size=4)).map(
    lambda parts: ("".join(parts[0]) + parts[1] + "".join(parts[2])).encode()
)
CHUNK_SIZES = st.lists(st.sampled_from([0, 1, 2, 3, 64, 511, 512, 513, 5_000, HEAD_BYTES, 20_000]), max_size=12)


def in_chunks(data: bytes, sizes: list[int], encoding: TextEncoding = UTF_8) -> bytes:
    """Redact chunk by chunk, deciding all that can be decided after each."""
    redactor = Redactor(encoding, block_bytes=1)
    out, at = [], 0
    for size in [*sizes, len(data)]:
        if chunk := data[at : at + size]:
            for start in range(0, len(chunk), 20_000):
                out.append(redactor.feed(chunk[start : start + 20_000]))
                redactor.check_integrity()
        at += size
    out.append(redactor.finish())
    redactor.check_integrity()
    return b"".join(out)


@pytest.mark.parametrize(("kind", "before", "secret", "after"), SECRETS)
def test_each_secret_gives_way_to_a_mark_and_what_is_around_it_stays(
    kind: str, before: str, secret: str, after: str
) -> None:
    found = redact((before + secret + after).encode())
    assert found.data.decode() == before + mark(kind, secret) + after
    assert found.counts == {kind: 1}


def test_every_form_is_among_the_secrets_of_this_test() -> None:
    used = set()
    for _, before, secret, after in SECRETS:
        text = as_seen(before + secret + after)
        used |= {match.lastindex for match in compiled_heads().finditer(text)}
    assert used == set(range(1, len(FORMS) + 1))


@pytest.mark.parametrize("text", LOOKALIKES)
def test_what_only_looks_like_a_secret_stays(text: str) -> None:
    data = f"a {text} b\n{text}\n".encode()
    assert redact(data).data is data


def test_several_on_one_line_and_adjacent_ones_are_told_apart() -> None:
    first, second = "ghp_" + ALNUM[:36], "gho_" + ALNUM[1:37]
    text = f"{first} {second},{first}\tBearer {ALNUM[:20]} https://u:pw@h/?token={ALNUM[:9]}&sig={ALNUM[:8]}\n"
    found = redact(text.encode())
    assert re.sub(rb"[0-9a-f]{8}\]", b"]", found.data) == (
        b"[redacted:github-token:] [redacted:github-token:],[redacted:github-token:]\tBearer [redacted:bearer:] "
        b"https://u:[redacted:url-password:]@h/?token=[redacted:url-parameter:]&sig=[redacted:url-parameter:]\n"
    )
    assert found.counts == {"github-token": 3, "bearer": 1, "url-password": 1, "url-parameter": 2}
    assert found.data.count(mark("github-token", first).encode()) == 2


def test_of_overlapping_candidates_the_first_takes_the_whole() -> None:
    token = "ghp_" + ALNUM[:36]
    assert redact(f"?token={token}".encode()).data == f"?token={mark('url-parameter', token)}".encode()
    assert redact(f"sk-{token}".encode()).counts == {"sk-key": 1}
    assert redact((pem()[:400] + "\n" + pem()).encode()).counts == {"private-key": 2}


def test_a_candidate_that_fails_hides_nothing_behind_it() -> None:
    token = "ghp_" + "a" * 36
    assert redact(f"sk-{'x' * 16}-{token}".encode()).data == f"sk-{'x' * 16}-{mark('github-token', token)}".encode()
    assert redact(b"?token=xxxxxx?sig=abcdef").counts == {"url-parameter": 1}


def test_bytes_that_are_no_utf_8_hide_nothing() -> None:
    found = redact(b"\xff\xfe ftp://\xe9u:p\xe4ss\xff@h \x80")
    assert found.data == b"\xff\xfe ftp://\xe9u:[redacted:url-password:%s]@h \x80" % (
        hashlib.sha256(b"p\xe4ss\xff").hexdigest()[:8].encode()
    )


@given(TEXTS, CHUNK_SIZES)
@example((pem(lines=300) + "\n").encode(), [1, 511, 513, 5_000])
@example(b"?token=" + b"a1" * HEAD_BYTES + b"\n", [HEAD_BYTES, 600, 1])
@settings(deadline=None)
def test_any_chunks_give_what_one_pattern_over_the_whole_gives(data: bytes, sizes: list[int]) -> None:
    expected = redact_reference(data)
    assert redact(data) == expected
    assert in_chunks(data, sizes) == expected.data


@given(TEXTS)
@example(("AIza" + ALNUM[:35] + pem()).encode())
@example(("AK" + "IA" + UPPER[:16] + "-sk-" + ALNUM[:32]).encode())
@example((pem() + "sk-" + ALNUM[:32]).encode())
@example(("?token=abcdefgh=ghp_" + ALNUM[:36] + "(x)").encode())
@example(("-----BEGIN PRIVATE KEY-----\nComment: ghp_" + ALNUM[:250] + "\n" + ALNUM[:64]).encode())
@settings(deadline=None)
def test_a_second_pass_changes_nothing(data: bytes) -> None:
    once = redact(data).data
    assert redact(once).data is once


@pytest.mark.parametrize(("kind", "before", "secret", "after"), SECRETS)
def test_a_secret_across_any_boundary_is_found(kind: str, before: str, secret: str, after: str) -> None:
    text = f"x\n{before}{secret}{after}".encode()
    # What is decided by the first chunk ends at each of its bytes; at its end, or in long texts, the tail is.
    data = text + b"\n" + b". " * (HEAD_BYTES // 2)
    expected = redact_reference(data).data
    assert mark(kind, secret).encode() in expected
    around = range(0, len(text) + 4, max(1, len(text) // 16))
    for place in around:
        for cut in (place, place + TAIL_LOOK_BYTES, place + HEAD_BYTES):
            assert in_chunks(data, [cut]) == expected, cut


@pytest.mark.parametrize(
    "secret",
    [
        pem("PGP PRIVATE KEY BLOCK", lines=280),
        pem("PRIVATE KEY", lines=280, eol='\\n" +\n    "'),
        jwt() + "x1" * 9_000,
        "?token=" + "abc.123." * 2_300 + "z",
    ],
    ids=["pgp", "quoted", "jwt", "parameter"],
)
def test_a_secret_that_is_longer_than_what_is_held_ends_where_it_does_in_the_whole(secret: str) -> None:
    data = f"{secret}.\nMore words here and on.\n{'. ' * 400}".encode()
    expected = redact_reference(data).data
    end = len(secret)
    for cut in range(end - 120, end + TAIL_LOOK_BYTES + 40, 7):
        assert in_chunks(data, [HEAD_BYTES + 900, cut - HEAD_BYTES - 900, 3]) == expected, cut


def test_what_was_given_out_is_still_looked_back_at() -> None:
    data = ("word" + "ghp_" + ALNUM[:36] + " a&&token=abcdefgh " + ". " * (HEAD_BYTES // 2)).encode()
    for place in range(70):
        assert in_chunks(data, [HEAD_BYTES + place]) == data


@pytest.mark.parametrize("name", ["utf-16-le", "utf-16-be", "utf-32-le", "utf-32-be"])
@given(text=st.lists(PIECES, max_size=6).map("".join), odd=st.binary(max_size=3), sizes=CHUNK_SIZES)
@settings(deadline=None, max_examples=25)
def test_wide_text_is_redacted_as_its_utf_8_is(name: str, text: str, odd: bytes, sizes: list[int]) -> None:
    encoding = TextEncoding(name=name)
    odd = odd[: encoding.unit_bytes - 1]
    data = f"\ufeff{text}".encode(name) + odd
    expected = redact(f"\ufeff{text}".encode()).data.decode().encode(name) + odd
    assert redact(data, encoding).data == expected
    assert in_chunks(data, sizes, encoding) == expected


@given(st.sampled_from(["utf-16-le", "utf-16-be", "utf-32-le", "utf-32-be"]), st.binary(max_size=60))
def test_wide_text_that_is_not_valid_comes_back_byte_for_byte(name: str, noise: bytes) -> None:
    encoding = TextEncoding(name=name)
    noise += b"\xff" * (-len(noise) % encoding.unit_bytes)
    secret = ("ghp_" + ALNUM[:36]).encode(name)
    lone = "\ud800\udc00\udfff ".encode(name, "surrogatepass")
    assert redact(noise + lone + b"\1", encoding).data == noise + lone + b"\1"
    found = redact(lone + secret + lone + noise, encoding)
    assert found.data == lone + mark("github-token", "ghp_" + ALNUM[:36]).encode(name) + lone + noise


@pytest.mark.parametrize(
    "unit",
    [
        b"sk-",
        b"eyJ",
        b"eyJ-",
        b".eyJ",
        b"?token=a",
        b"-----BEGIN PRIVATE KEY-----",
        b"://a:",
        b"Bearer ",
        b"=",
        b"A",
        b"\\n",
        b"\x1b[0m",
        b"a\x1b[" + b"1;" * 18 + b"m" + b"\x1b[0m\\\\\\\\u001b[m",
        b"\\\\",
        b"a_eyJ_sk-",
    ],
)
def test_a_hostile_megabyte_passes_and_little_of_it_is_held(unit: bytes) -> None:
    data = unit * (1_000_000 // len(unit))
    redactor = Redactor()
    out = bytearray()
    for start in range(0, len(data), 100_000):
        out += redactor.feed(data[start : start + 100_000])
        redactor.check_integrity()
    out += redactor.finish()
    assert bytes(out) == redact(data).data
    assert redact(bytes(out)).data == out


def test_a_secret_of_any_length_is_dropped_whole_in_bounded_memory() -> None:
    redactor = Redactor()
    digest = hashlib.sha256()
    out = bytearray(redactor.feed(b"?token="))
    for _ in range(60):
        chunk = b"a1B2" * 25_000
        digest.update(chunk)
        out += redactor.feed(chunk)
        redactor.check_integrity()
    out += redactor.feed(b" end") + redactor.finish()
    assert bytes(out) == f"?token=[redacted:url-parameter:{digest.hexdigest()[:8]}] end".encode()


def test_a_colour_inside_a_secret_goes_with_it_and_changes_no_mark() -> None:
    token = "ghp_" + ALNUM[:36]
    for escape in ("\x1b[m\x1b[K", "\\u001b[0m"):
        text = f"a {escape}{token[:4]}{escape}{token[4:]}{escape} b"
        assert redact(text.encode()).data.decode() == f"a {escape}{mark('github-token', token)}{escape} b"
        assert redact(text.encode("utf-16-le"), TextEncoding(name="utf-16-le")).data.decode("utf-16-le") == (
            f"a {escape}{mark('github-token', token)}{escape} b"
        )


def test_an_escape_hides_no_token_that_begins_in_it() -> None:
    for text in ("\x1b[AK" + "IA" + UPPER[:16], "\x1b[ghp_" + ALNUM[:36], "\x1b]0;ghp_" + ALNUM[:36] + "\x07"):
        assert sum(redact(text.encode()).counts.values()) == 1, text


def test_the_scout_starts_wherever_a_pattern_does() -> None:
    for _, before, secret, after in SECRETS:
        text = as_seen(before + secret + after)
        heads = compiled_heads().search(text)
        assert heads is not None
        starts, at = set(), 0
        while (candidate := compiled_scout().search(text, at)) is not None:
            starts.add(candidate.start())
            at = candidate.start() + 1
        assert heads.start() in starts
