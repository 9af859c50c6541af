"""What binary content is: told by its magic number, with what its header says of it."""

from __future__ import annotations

import re
import struct
from collections.abc import Callable
from typing import TYPE_CHECKING

from .kinds import first_bytes
from .quoting import PreviewLine, quoted

if TYPE_CHECKING:
    from .stored_text import StoredText

_HEAD_BYTES = 1 << 16
_NAME_CHARS = 80
_ZEROS = bytes(1 << 20)


def binary_preview(text: StoredText) -> tuple[PreviewLine, ...]:
    """Return what the content is, its size, and whether it is all zeros."""
    size_bytes = text.ref.size_bytes
    head = first_bytes(text.chunks(), _HEAD_BYTES)
    zeros = _leading_zeros(text) if head[:512].count(0) == len(head[:512]) else 0
    if zeros >= size_bytes:
        return (PreviewLine(f"{size_bytes:,} bytes, all of them zero", 0),)
    found = [PreviewLine(f"{describe_binary(head) or 'unknown format'}, {size_bytes:,} bytes", 0)]
    if zeros:
        found.append(PreviewLine(f"the first {zeros:,} bytes are zero", 1))
    else:
        found.append(PreviewLine(f"first bytes: {head[:16].hex(' ')}", 3))
    words = [quoted(word.decode(), limit=40) for word in re.findall(rb"[ -~]{8,}", head)[:3]]
    if words:
        found.append(PreviewLine(f"strings: {'; '.join(words)}", 2))
    return tuple(found)


def describe_binary(head: bytes) -> str:
    """Return the format of content that begins with `head`, empty where its magic number is not known."""
    for offset, magic, describe in _MAGIC:
        if head.startswith(magic, offset):
            try:
                return describe(head)
            except (struct.error, IndexError, ValueError):
                return f"{describe.__name__[1:]} header, cut short"
    return ""


def _leading_zeros(text: StoredText) -> int:
    zeros = 0
    for chunk in text.chunks():
        if chunk != _ZEROS[: len(chunk)]:
            return zeros + len(chunk) - len(chunk.lstrip(b"\0"))
        zeros += len(chunk)
    return zeros


def _png(head: bytes) -> str:
    width, height = struct.unpack_from(">II", head, 16)
    return f"PNG image, {width} x {height}"


def _gif(head: bytes) -> str:
    width, height = struct.unpack_from("<HH", head, 6)
    return f"GIF image, {width} x {height}"


def _bmp(head: bytes) -> str:
    width, height = struct.unpack_from("<ii", head, 18)
    return f"BMP image, {width} x {abs(height)}"


def _jpeg(head: bytes) -> str:
    """Go from marker to marker up to the frame header, which has the dimensions."""
    at = 2
    while at + 9 <= len(head) and head[at] == 0xFF:
        marker, length = head[at + 1], int.from_bytes(head[at + 2 : at + 4])
        if 0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC):
            height, width = struct.unpack_from(">HH", head, at + 5)
            return f"JPEG image, {width} x {height}"
        at += 2 + max(2, length)
    return "JPEG image"


def _riff(head: bytes) -> str:
    return {b"WEBP": "WebP image", b"WAVE": "WAV audio", b"AVI ": "AVI video"}.get(head[8:12], "RIFF container")


def _zip(head: bytes) -> str:
    length = struct.unpack_from("<H", head, 26)[0]
    name = quoted(head[30 : 30 + min(length, _NAME_CHARS)].decode(errors="replace"))
    for mark, kind in ((b"word/", "Word document"), (b"xl/", "Excel workbook"), (b"META-INF/", "Java archive")):
        if mark in head:
            return f"zip archive ({kind}), first entry {name}"
    return f"zip archive, first entry {name}"


def _gzip(head: bytes) -> str:
    if head[3] & 0x0C == 0x08:
        name = quoted(head[10 : head.index(0, 10)][:_NAME_CHARS].decode("latin-1"))
        return f"gzip data of {name}"
    return "gzip data"


def _pdf(head: bytes) -> str:
    return f"PDF document, version {head[5:8].decode('ascii', 'replace')}"


def _elf(head: bytes) -> str:
    bits = {1: "32-bit", 2: "64-bit"}[head[4]] if head[4] in (1, 2) else "unknown class"
    order = "<" if head[5] == 1 else ">"
    kind, machine = struct.unpack_from(f"{order}HH", head, 16)
    kinds = {1: "object file", 2: "executable", 3: "shared object", 4: "core dump"}
    machines = {3: "x86", 40: "ARM", 62: "x86-64", 183: "AArch64", 243: "RISC-V"}
    return f"ELF {bits} {kinds.get(kind, 'file')}, {machines.get(machine, f'machine {machine}')}"


def _sqlite(head: bytes) -> str:
    page_bytes = struct.unpack_from(">H", head, 16)[0]
    pages = struct.unpack_from(">I", head, 28)[0]
    return f"SQLite database, {pages:,} pages of {65536 if page_bytes == 1 else page_bytes:,} bytes"


def _wasm(head: bytes) -> str:
    return f"WebAssembly module, version {struct.unpack_from('<I', head, 4)[0]}"


def _gguf(head: bytes) -> str:
    version, tensors, entries = struct.unpack_from("<IQQ", head, 4)
    return f"GGUF model, version {version}, {tensors:,} tensors, {entries:,} metadata entries"


def _tar(head: bytes) -> str:
    name = head[:100].split(b"\0", 1)[0][:_NAME_CHARS].decode(errors="replace")
    return f"tar archive, first entry {quoted(name)}"


def _isobmff(head: bytes) -> str:
    brand = head[8:12].decode("ascii", "replace").strip()
    image = {"heic", "heix", "mif1", "avif"}
    return f"{'HEIF or AVIF image' if brand in image else 'MP4 or QuickTime media'}, brand {quoted(brand)}"


def _named(name: str) -> Callable[[bytes], str]:
    return lambda _: name


_MAGIC: tuple[tuple[int, bytes, Callable[[bytes], str]], ...] = (
    (0, b"\x89PNG\r\n\x1a\n", _png),
    (0, b"GIF8", _gif),
    (0, b"\xff\xd8\xff", _jpeg),
    (0, b"RIFF", _riff),
    (0, b"PK\x03\x04", _zip),
    (0, b"PK\x05\x06", _named("empty zip archive")),
    (0, b"\x1f\x8b", _gzip),
    (0, b"%PDF-", _pdf),
    (0, b"\x7fELF", _elf),
    (0, b"SQLite format 3\0", _sqlite),
    (0, b"\0asm", _wasm),
    (0, b"GGUF", _gguf),
    (257, b"ustar", _tar),
    (4, b"ftyp", _isobmff),
    (0, b"BZh", _named("bzip2 data")),
    (0, b"\xfd7zXZ\0", _named("xz data")),
    (0, b"\x28\xb5\x2f\xfd", _named("zstd data")),
    (0, b"7z\xbc\xaf\x27\x1c", _named("7-Zip archive")),
    (0, b"Rar!\x1a\x07", _named("RAR archive")),
    (0, b"PAR1", _named("Parquet table")),
    (0, b"ARROW1", _named("Arrow file")),
    (0, b"\x89HDF\r\n\x1a\n", _named("HDF5 file")),
    (0, b"\x93NUMPY", _named("NumPy array")),
    (0, b"OggS", _named("Ogg media")),
    (0, b"fLaC", _named("FLAC audio")),
    (0, b"ID3", _named("MP3 audio")),
    (0, b"\x1a\x45\xdf\xa3", _named("Matroska or WebM media")),
    (0, b"II*\0", _named("TIFF image")),
    (0, b"MM\0*", _named("TIFF image")),
    (0, b"BM", _bmp),
    (0, b"\xca\xfe\xba\xbe", _named("Java class or universal Mach-O file")),
    (0, b"\xcf\xfa\xed\xfe", _named("Mach-O 64-bit file")),
    (0, b"MZ", _named("Windows executable")),
    (0, b"wOFF", _named("WOFF font")),
    (0, b"wOF2", _named("WOFF2 font")),
    (0, b"\0\1\0\0\0", _named("TrueType font")),
    (0, b"\x80\x04\x95", _named("Python pickle")),
)
