"""The rules of a path: what a tool may name at all, before any file is touched. Pure.

What needs the file tree (symbolic links, kinds of files) is `workspace`'s concern.
"""

from __future__ import annotations

import enum
import re

from ...kernels.errors import ContainmentError

PATH_LIMIT_BYTES = 4096


class Rule(enum.StrEnum):
    """Names the rule in a refusal."""

    EMPTY = "empty path"
    TOO_LONG = "path too long"
    CONTROL_CHARACTER = "control character"
    NOT_UTF8 = "not UTF-8"
    PARENT_FOLDER = "parent folder"
    DEVICE_NAME = "device name"
    OUTSIDE = "outside the workspace"
    SYMLINK_LOOP = "symlink loop"
    SYMLINK_RACE = "symlink race"
    SPECIAL_FILE = "not a regular file"
    GIT_FOLDER = "write under .git"
    STORE = "write under the store"


# The names that Windows gives to devices in every folder, with any extension, and superscript digits among them:
# https://learn.microsoft.com/windows/win32/fileio/naming-a-file
_DEVICE = re.compile(r"(?:con|prn|aux|nul|conin\$|conout\$|(?:com|lpt)[0-9¹²³])(?:[. :].*)?", re.IGNORECASE)
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")
# Characters that HFS+ leaves out when it compares names, so that ".g\u200cit" opens ".git".
_IGNORED_BY_HFS = re.compile("[\u200c-\u200f\u202a-\u202e\u206a-\u206f\ufeff]")


def check_text(path: str) -> None:
    """Raise ContainmentError where the text of a path breaks a rule that holds on every system."""
    if not path.strip():
        raise ContainmentError("the path is empty; '.' is the workspace", path=path, rule=Rule.EMPTY)
    control = _CONTROL.search(path)
    if control:
        message = f"the path {path!r} holds the control character {control.group()!r}; no path here does"
        raise ContainmentError(message, path=path, rule=Rule.CONTROL_CHARACTER)
    try:
        size_bytes = len(path.encode())
    except UnicodeEncodeError as problem:
        message = f"the path {path!r} is not UTF-8; rename the file to read it here"
        raise ContainmentError(message, path=path, rule=Rule.NOT_UTF8) from problem
    if size_bytes > PATH_LIMIT_BYTES:
        message = f"the path has {size_bytes} bytes; the limit is {PATH_LIMIT_BYTES}"
        raise ContainmentError(message, path=path, rule=Rule.TOO_LONG)
    if ".." in split_path(path):
        message = f"{path!r} goes through '..'; name the path from the workspace down"
        raise ContainmentError(message, path=path, rule=Rule.PARENT_FOLDER)


def split_path(path: str) -> list[str]:
    """Return the components of a path as the strictest system would see them: a backslash separates too."""
    return re.split(r"[/\\]", path)


def is_device_name(component: str) -> bool:
    """Whether Windows would open a device where it is asked for this file."""
    return _DEVICE.fullmatch(component.rstrip(". ")) is not None


def is_git_folder(component: str) -> bool:
    """Whether some system takes this name for ``.git``: other case, trailing dots, short name, ignorable characters."""
    if component.isascii() and component[:1] not in {".", "g", "G"}:
        return False
    plain = _IGNORED_BY_HFS.sub("", component).split(":")[0].rstrip(". ").casefold()
    return plain in {".git", "git~1"}


def is_offerable(name: str) -> bool:
    """Whether a file name found in the tree could stand in the path of a call."""
    if name.isascii() and name.isprintable() and "\\" not in name and not name.isspace():
        return True
    try:
        check_text(name)
    except ContainmentError:
        return False
    return True
