"""Records, by `sys.setprofile`, the functions of Evertick on the stack whenever a process hands something over.

Part of tools/walk.py. Imports nothing else, because a copy of it also runs in the processes of attempts.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

SOURCE = str(Path(__file__).resolve().parents[1] / "src" / "evertick") + os.sep
TRACE_FILE = "EVERTICK_WALK_TRACE"
# A statement, and what passes work to another part of the same process.
_HANDING_OVER = {
    ("psycopg/cursor_async.py", "AsyncCursor.execute"): "statement",
    ("asyncio/locks.py", "Event.set"): "event",
    ("asyncio/base_events.py", "BaseEventLoop.call_soon"): "call",
    ("asyncio/base_events.py", "BaseEventLoop.call_soon_threadsafe"): "call",
}
_SYSTEM_CALLS = frozenset({os.read, os.write, os.pread})
_SOCKET_CALLS = frozenset({"send", "sendmsg", "recv", "recvmsg"})
Entry = dict[str, Any]


class Tracer:
    """`emit` receives an entry for each handover, and for each first call of a function."""

    def __init__(self, emit: Callable[[Entry], None], *, user_file: str = "") -> None:
        self._emit, self._user_file = emit, user_file
        self._kinds: dict[CodeType, str] = {}
        # Frames are kept, so that a new one is never taken for an old one.
        self._began: dict[int, tuple[FrameType, int]] = {}

    def start(self) -> None:
        threading.setprofile(self)
        sys.setprofile(self)

    def stop(self) -> None:
        threading.setprofile(None)
        sys.setprofile(None)

    def __call__(self, frame: FrameType, event: str, called: object) -> None:
        if event == "call":
            code = frame.f_code
            kind = self._kinds.get(code)
            if kind is None:
                kind = self._kinds[code] = self._kind_of(code)
            if kind == "function":
                if self._is_new(frame):
                    self._record(frame, kind)
            elif kind and self._is_new(frame):
                query = frame.f_locals.get("query") if kind == "statement" else None
                self._record(frame.f_back, kind, statement=query if isinstance(query, str) else "")
        elif event == "c_call" and frame.f_code.co_filename.startswith(SOURCE):
            is_socket = isinstance(getattr(called, "__self__", None), socket.socket)
            if called in _SYSTEM_CALLS or (is_socket and getattr(called, "__name__", "") in _SOCKET_CALLS):
                self._record(frame, "bytes")

    def _kind_of(self, code: CodeType) -> str:
        if code.co_filename.startswith(SOURCE):
            return "function"
        if code.co_filename == self._user_file:
            return "task" if code.co_name == "walked" else ""
        return next(
            (
                kind
                for (file, name), kind in _HANDING_OVER.items()
                if code.co_filename.endswith(file) and code.co_qualname == name
            ),
            "",
        )

    def _is_new(self, frame: FrameType) -> bool:
        """Whether this call has just begun; a coroutine is also called whenever it continues."""
        known = self._began.get(id(frame))
        if known is not None and known[0] is frame:
            return False
        self._began[id(frame)] = frame, time.monotonic_ns()
        return True

    def _record(self, frame: FrameType | None, kind: str, *, statement: str = "") -> None:
        stack = []
        while frame is not None:
            if frame.f_code.co_filename.startswith(SOURCE):
                stack.append(self._described(frame))
            frame = frame.f_back
        if stack:
            self._emit({"kind": kind, "at": time.monotonic_ns(), "statement": statement, "stack": stack[::-1]})

    def _described(self, frame: FrameType) -> Entry:
        code = frame.f_code
        began = self._began.get(id(frame), (frame, 0))[1]
        return {
            "file": code.co_filename[len(SOURCE) :],
            "name": code.co_qualname,
            "line": code.co_firstlineno,
            "at": began,
        }


def trace_children(user_file: str) -> None:
    """Trace every process that is forked from this one, into the file that the environment names."""
    if not (path := os.environ.get(TRACE_FILE)):
        return
    fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    def emit(entry: Entry) -> None:
        os.write(fd, (json.dumps({**entry, "pid": os.getpid()}) + "\n").encode())

    os.register_at_fork(after_in_child=lambda: Tracer(emit, user_file=user_file).start())
