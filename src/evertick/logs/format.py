"""The format of log lines, in the spool and as shipped. Pure: bytes in, bytes out.
Shipped: `<unix microseconds> <level> <text>\n`, valid UTF-8 without NUL. Levels: DEBUG INFO WARNING ERROR CRITICAL of
logging, OUT and ERR of print, RAW of subprocesses and C code, MARK for Evertick's notes, RENDER for templates. In the
spool a framed line has 0x1e before it; a header line starts with 0x1f and names the attempt that follows.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import NamedTuple

from evertick.domain.attempt import TaskKey, storable_text

LONGEST_LINE_CHARS = 16 * 1024


_FRAME = "\x1e"


_HEADER = b"\x1f"


# Possessive, so that a long log costs one pass and no stack.
_ALL_FRAMED = re.compile(rb"(?:\x1e\d{16} [A-Z]{2,8} [^\n\x00\x1e]*+\n)++")


_FRAMED = re.compile(rb"\x1e(\d{16} [A-Z]{2,8} )(.*)", re.DOTALL)


_HEADER_LINE = re.compile(rb"^\x1f(\d+) (\d+) (-?\d+) (\d+) (-?\d+)\n", re.MULTILINE)


class Header(NamedTuple):
    """The attempt whose lines follow in a spool file."""

    key: TaskKey
    epoch: int
    session: int


def framed(micros: int, level: str, text: str) -> bytes:
    """One text as spool lines: split at newlines and where a line is too long."""
    clean = storable_text(text).replace(_FRAME, "\ufffd").removesuffix("\n")
    prefix = f"{_FRAME}{str(micros).zfill(16)} {level} "
    if "\n" not in clean and len(clean) <= LONGEST_LINE_CHARS:
        return f"{prefix}{clean}\n".encode()
    return "".join(f"{prefix}{piece}\n" for line in clean.split("\n") for piece in _pieces(line)).encode()


def mark(micros: int, text: str) -> bytes:
    """A note of Evertick's own, in shipped form."""
    return f"{micros:016d} MARK {text}\n".encode()


def header(run_id: int, idx: int, map_index: int, epoch: int, session: int) -> bytes:
    return b"\x1f%d %d %d %d %d\n" % (run_id, idx, map_index, epoch, session)


def find_headers(spooled: bytes) -> Iterator[tuple[int, Header]]:
    """The positions of the headers in a part of a spool."""
    for found in _HEADER_LINE.finditer(spooled):
        run_id, idx, map_index, epoch, session = map(int, found.groups())
        yield found.start(), Header(TaskKey(run_id, idx, map_index), epoch, session)


def shipped(spooled: bytes, now_micros: int) -> bytes:
    """Whole spool lines in shipped form. Unframed ones are stamped now; a header is skipped."""
    if spooled.startswith(_HEADER) and (found := _HEADER_LINE.match(spooled)):
        spooled = spooled[found.end() :]
    if not spooled:
        return b""
    if _ALL_FRAMED.fullmatch(spooled) and _is_utf8(spooled):
        return spooled[1:].replace(b"\n\x1e", b"\n")
    lines = spooled.removesuffix(b"\n").split(b"\n")
    return b"".join(_shipped_line(line, now_micros) for line in lines)


def _shipped_line(line: bytes, now_micros: int) -> bytes:
    found = _FRAMED.fullmatch(line)
    prefix, text = (found[1], found[2]) if found else (b"%016d RAW " % now_micros, line)
    clean = storable_text(text.decode("utf-8", "replace")).replace(_FRAME, "\ufffd")
    return prefix + clean.removesuffix("\r").encode() + b"\n"


def _pieces(line: str) -> list[str]:
    starts = range(0, len(line), LONGEST_LINE_CHARS) if line else range(1)
    return [line[start : start + LONGEST_LINE_CHARS] for start in starts]


def _is_utf8(raw: bytes) -> bool:
    try:
        raw.decode()
    except UnicodeDecodeError:
        return False
    return True


# The level of lines that show a task's rendered templates: `name = JSON`, before any output of the task.
RENDERED = "RENDER"


class Line(NamedTuple):
    epoch: int
    at: datetime | None
    level: str
    text: str
    is_late: bool


def lines_of(content: str, *, epoch: int, is_late: bool) -> Iterator[Line]:
    for raw in content.removesuffix("\n").split("\n"):
        micros, _, rest = raw.partition(" ")
        level, _, text = rest.partition(" ")
        if micros.isdecimal() and len(micros) == 16 and level.isupper():
            at = datetime.fromtimestamp(int(micros) // 1_000_000, UTC).replace(microsecond=int(micros) % 1_000_000)
            yield Line(epoch, at, level, text, is_late)
        else:
            yield Line(epoch, None, "RAW", raw, is_late)
