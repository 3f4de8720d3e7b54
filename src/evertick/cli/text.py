"""Text that came from elsewhere, made safe for a terminal: colours may stay, everything else that steers it goes."""

from __future__ import annotations

import re

# Escape sequences whole, so that their letters do not stay behind: CSI, OSC and its kin up to their end, then single ones.
_SEQUENCE = re.compile(
    r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]"
    r"|(?:\x1b[\]PX^_]|[\x9d\x90\x98\x9e\x9f])[^\x07\x1b\x9c]*(?:\x07|\x1b\\|\x9c)?"
    r"|\x1b[ -/]*[0-~]?"
)
_COLOUR = re.compile(r"\x1b\[[0-9;:]*m")
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
# Marks that turn the reading direction of a line, and so make it lie about its content.
_DIRECTION = re.compile("[\u202a-\u202e\u2066-\u2069]")


def plain(text: str) -> str:
    """Without any control but newline and tab."""
    return _DIRECTION.sub("", _CONTROL.sub("", _SEQUENCE.sub("", text)))


def coloured(text: str) -> str:
    """Like `plain`, but colours stay, and end where the text ends."""
    if "\x1b" not in text:
        return plain(text)
    parts = []
    start = 0
    for colour in _COLOUR.finditer(text):
        parts += [plain(text[start : colour.start()]), colour[0]]
        start = colour.end()
    return "".join([*parts, plain(text[start:])]) + ("\x1b[0m" if parts else "")


def one_line(text: str) -> str:
    return " ".join(plain(text).split())
