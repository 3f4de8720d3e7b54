"""What --server says on this command line. By itself, because the entry point must import nothing heavy."""

from __future__ import annotations

from contextvars import ContextVar

SERVER_OPTION: ContextVar[str | None] = ContextVar("server_option", default=None)
