"""The position in the user's file, so that every error points at a line."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType

from evertick.domain.errors import InvalidDag

_OWN = str(Path(__file__).parent.parent) + "/"
_EXAMPLES = _OWN + "examples/"


def refused(message: str) -> InvalidDag:
    """The error to raise, pointing at the line of the user's code that is being executed."""
    frame = _user_frame()
    if frame is None:
        return InvalidDag(message)
    return InvalidDag(message, file=frame.f_code.co_filename, line=frame.f_lineno)


def module_file() -> str | None:
    """The file whose top-level code is running: through any number of functions, but not through another import."""
    frame = _user_frame()
    while frame is not None and frame.f_code.co_name != "<module>":
        frame = frame.f_back
    return frame.f_code.co_filename if frame is not None else None


def _user_frame() -> FrameType | None:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and is_own(frame.f_code.co_filename):
        frame = frame.f_back
    return frame


def is_own(filename: str) -> bool:
    """Whether a file belongs to Evertick and should not appear in errors. The examples count as user code."""
    return filename.startswith(_OWN) and not filename.startswith(_EXAMPLES)
