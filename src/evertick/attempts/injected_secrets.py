"""The variables, connections and secrets injected into an attempt: only in its own process, and masked in all of its
output.

Its standard output and error pass through a pipe of this process, so that the output of commands is masked before it
reaches a disk.
"""

from __future__ import annotations

import json
import os
import threading
from typing import Any

from evertick.domain.stored_values import Connection, ValueKind, as_environment, hidden_parts, read_connection
from evertick.logs.capture import SpoolWriter
from evertick.secrets.masking import Masker

_PIPE_BYTES = 64 * 1024
_LONGEST_DRAIN_SECONDS = 2.0


class InjectedSecrets:
    """Created from the values that the runner sent for this attempt."""

    def __init__(self, text: str) -> None:
        raw: dict[str, dict[str, str]] = json.loads(text)
        self.variables: dict[str, Any] = {name: _json_or_text(value) for name, value in raw["variable"].items()}
        self.secrets: dict[str, str] = raw["secret"]
        self.connections: dict[str, Connection] = {
            name: read_connection(value) for name, value in raw["connection"].items()
        }
        parts = [part for kind in ValueKind for value in raw[kind].values() for part in hidden_parts(kind, value)]
        parts += [each.uri for each in self.connections.values() if each.password]
        self.masker = Masker(parts)

    def environment(self) -> dict[str, str]:
        """For a shell or a program, which has its own environment."""
        return as_environment(self.variables, self.connections, self.secrets)


class MaskedOutput:
    """Reads descriptors 1 and 2 and writes to the spool while the attempt runs."""

    def __init__(self, writer: SpoolWriter, masker: Masker) -> None:
        self._writer, self._masker = writer, masker
        self._read_fd, write_fd = os.pipe()
        self._kept = os.dup(1), os.dup(2)
        os.dup2(write_fd, 1)
        os.dup2(write_fd, 2)
        os.close(write_fd)
        self._thread = threading.Thread(target=self._pump, name="evertick-output", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Called after the body's leftover processes were killed, so that no process holds the other end."""
        for fd, kept in zip((1, 2), self._kept, strict=True):
            os.dup2(kept, fd)
            os.close(kept)
        self._thread.join(_LONGEST_DRAIN_SECONDS)

    def _pump(self) -> None:
        rest = b""
        while part := os.read(self._read_fd, _PIPE_BYTES):
            whole, newline, rest = (rest + part).rpartition(b"\n")
            if newline:
                self._writer.append(self._hidden(whole) + b"\n")
            elif len(rest) > _PIPE_BYTES:
                shown, kept = self._masker.hide_stream(rest.decode("utf-8", "surrogateescape"))
                self._writer.append(shown.encode("utf-8", "surrogateescape"))
                rest = kept.encode("utf-8", "surrogateescape")
        if rest:
            self._writer.append(self._hidden(rest) + b"\n")
        os.close(self._read_fd)

    def _hidden(self, raw: bytes) -> bytes:
        text = raw.decode("utf-8", "surrogateescape")
        return self._masker.hide(text).encode("utf-8", "surrogateescape")


def _json_or_text(value: str) -> Any:
    try:
        return json.loads(value)
    except ValueError:
        return value
