"""The network between one service and the database, to be broken while it is in use.

This is the handle: the proxy itself is a process of its own (`proxy_main.py`), told what to do over its standard input,
so that a busy harness never slows the traffic and no proxy outlives its harness.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from psycopg import conninfo

UP, DOWN = "up", "down"
ANY_PORT = "127.0.0.1:0"

_ROOT = Path(__file__).parents[2]


@dataclass(frozen=True, slots=True, kw_only=True)
class Mode:
    """What a group's connections meet. Made by one of the functions below."""

    moves_up: bool = True
    moves_down: bool = True
    accepts: bool = True
    delay_ms: float = 0.0
    jitter_ms: float = 0.0
    bytes_per_second: float | None = None

    @classmethod
    def passing(cls) -> Mode:
        return cls()

    @classmethod
    def delay(cls, ms: float, jitter_ms: float = 0.0) -> Mode:
        """Each chunk arrives later, in order, both ways."""
        return cls(delay_ms=ms, jitter_ms=jitter_ms)

    @classmethod
    def throttle(cls, bytes_per_second: float) -> Mode:
        """Each way of each connection."""
        return cls(bytes_per_second=bytes_per_second)

    @classmethod
    def blackhole(cls) -> Mode:
        """Sockets stay open and nothing moves, not even a close."""
        return cls(moves_up=False, moves_down=False)

    @classmethod
    def one_way(cls, direction: str) -> Mode:
        """Only "up" (client to server) or only "down" moves."""
        if direction not in (UP, DOWN):
            raise ValueError(f"{direction!r} is no direction: use {UP!r} or {DOWN!r}")
        return cls(moves_up=direction == UP, moves_down=direction == DOWN)

    @classmethod
    def refuse(cls) -> Mode:
        """Open connections go on; new ones are reset."""
        return cls(accepts=False)

    def moves(self, direction: str) -> bool:
        return self.moves_up if direction == UP else self.moves_down


class Proxy:
    """A running proxy. Every call takes effect before it returns, for connections that are open, too."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self._talking = threading.Lock()

    @classmethod
    def start(cls, upstream: str) -> Self:
        """`upstream` is host:port or unix:/path/of/.s.PGSQL.5432."""
        command = [sys.executable, "-m", "tests.chaos.proxy_main", upstream]
        return cls(
            subprocess.Popen(command, cwd=_ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def listen(self, group: str, *, at: str = ANY_PORT, speaks: str = "postgres") -> int | str:
        """Open a place for this group's connections: a TCP port, which is returned, or a unix socket, whose path is.

        What speaks "bytes" is passed on without being understood. `drop_reply` is for PostgreSQL, and for "http" with one
        request per connection.
        """
        place: int | str = self._ask("listen", group=group, at=at, speaks=speaks)
        return place

    def set(self, group: str, mode: Mode) -> None:
        self._ask("set", group=group, mode=asdict(mode))

    def heal(self, group: str | None = None) -> None:
        """Let everything pass again, what was held back first. Disarms `drop_reply`, too."""
        self._ask("heal", group=group)

    def reset(self, group: str) -> int:
        """Reset every open connection of the group, once. Returns how many there were."""
        broken: int = self._ask("reset", group=group)
        return broken

    def drop_reply(self, group: str, *, times: int = 1, match: str | None = None) -> None:
        """Lose the answers to the next statements that end their transaction, and break their connections. In HTTP: the answers
        that say that something was done, to requests whose first line contains `match`."""
        self._ask("drop_reply", group=group, times=times, match=match)

    def redirect(self, upstream: str) -> None:
        """Where new connections go from now on."""
        self._ask("redirect", upstream=upstream)

    def status(self) -> dict[str, dict[str, Any]]:
        found: dict[str, dict[str, Any]] = self._ask("status")
        return found

    def stop(self) -> None:
        """End it; every connection breaks."""
        if self._process.poll() is None and self._process.stdin is not None:
            self._process.stdin.close()
            try:
                self._process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()

    @property
    def pid(self) -> int:
        return self._process.pid

    def _ask(self, verb: str, **arguments: Any) -> Any:
        assert self._process.stdin is not None and self._process.stdout is not None
        with self._talking:
            self._process.stdin.write(json.dumps({"verb": verb, **arguments}) + "\n")
            line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the proxy ended ({self._process.poll()}) when it was asked to {verb}")
        answer = json.loads(line)
        if "error" in answer:
            raise ValueError(f"the proxy cannot {verb}: {answer['error']}")
        return answer["ok"]


def proxied(url: str, place: int | str) -> str:
    """The same database by way of the proxy. Plain text, because the proxy must see statements and replies."""
    path = Path(str(place))
    where = (
        {"host": "127.0.0.1", "port": place}
        if isinstance(place, int)
        else {"host": path.parent, "port": path.suffix[1:]}
    )
    plain = {"sslmode": "disable", "gssencmode": "disable", "hostaddr": None}
    return conninfo.make_conninfo(url, **{name: str(value) for name, value in where.items()}, **plain)
