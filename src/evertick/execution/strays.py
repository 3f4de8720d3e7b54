"""Orphaned processes of a dead runner. Kills them, so that the runner can be declared dead with no body left running.

Everything that a fork server started carries its mark, which names the runner's session. Never touches anything else.
"""

from __future__ import annotations

import os
import re
import time
from contextlib import suppress
from pathlib import Path

from evertick.domain.attempt import FORK_SERVER_MARK, session_text
from evertick.execution.kill import kill_tree

_PAUSE_SECONDS = 0.01


def end_strays(session: int, *, within_seconds: float) -> bool:
    """Whether no process of that session is left. Its fork servers exit by themselves; the rest is killed."""
    give_up_at = time.monotonic() + within_seconds
    while strays := find_strays(session):
        if time.monotonic() > give_up_at:
            return False
        for pid in strays:
            kill_tree(pid)
        time.sleep(_PAUSE_SECONDS)
    return True


def find_strays(session: int) -> list[int]:
    """Processes of that session's attempts. One that ran another program is known by its environment."""
    name = session_text(session).encode()
    marks = (
        ("cmdline", re.compile(rb"evertick\.execution\.parent_main\0.*/" + name + rb"/", re.S)),
        ("environ", re.compile(rb"(^|\0)" + FORK_SERVER_MARK.encode() + rb"=[^\0]*/" + name + rb"/")),
    )
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            for file, mark in marks:
                with suppress(OSError):
                    if mark.search((entry / file).read_bytes()):
                        found.append(int(entry.name))
                        break
    return found
