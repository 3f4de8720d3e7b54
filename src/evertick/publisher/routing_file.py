"""The routing rules of a publisher, reloaded when their file changes. Invalid rules never replace valid ones."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from evertick.domain.errors import InvalidRouting
from evertick.domain.routing import Routing, read_routing

if TYPE_CHECKING:
    from evertick.observability.logging import Log


def load_routing(file: Path | None) -> Routing:
    """The rules of the routing file; none without a file."""
    if file is None:
        return Routing()
    try:
        return read_routing(file.read_text(encoding="utf-8"))
    except InvalidRouting as error:
        raise InvalidRouting(f"Routing file {file}: {error}") from None
    except UnicodeDecodeError:
        raise InvalidRouting(f"Routing file {file} is not UTF-8 text.") from None
    except OSError as error:
        raise InvalidRouting(
            f"Routing file {file} cannot be read: {error.strerror}. Correct EVERTICK_ROUTING_FILE."
        ) from None


class Rules:
    """`current` is None until a file was read; `problem` describes the error in the current file."""

    def __init__(self, file: Path | None, *, log: Log) -> None:
        self._file, self._log = file, log
        self._seen: bytes | None = None
        self.current: Routing | None = None
        self.problem: str | None = None

    def look(self) -> bool:
        """Read the file if it changed. Returns whether the rules are different."""
        content = None
        with suppress(OSError):
            content = self._file.read_bytes() if self._file else None
        if self.current is not None and self.problem is None and content == self._seen:
            return False
        self._seen = content
        try:
            found = load_routing(self._file)
        except InvalidRouting as error:
            self._tell(str(error))
            return False
        self.problem = None
        is_changed = self.current is not None and found != self.current
        if is_changed:
            self._log.info("routing_loaded", file=str(self._file), rules=len(found.rules))
        self.current = found
        return is_changed

    def _tell(self, error: str) -> None:
        effect = (
            "Nothing is published until it is fixed." if self.current is None else "The previous rules stay in effect."
        )
        if (problem := f"{error} {effect}") != self.problem:
            self._log.error("routing_failed", message=problem)
        self.problem = problem
