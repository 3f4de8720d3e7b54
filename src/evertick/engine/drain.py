"""drain and undrain: a runner claims no new tasks and finishes its current ones, or claims tasks again."""

from __future__ import annotations

from collections.abc import Iterable

from psycopg import AsyncConnection

from evertick.domain.attempt import session_text
from evertick.domain.errors import NotFound
from evertick.engine.extend import Request
from evertick.store import runners
from evertick.store.runners import BusyRunner

_SHORTEST_PREFIX = 4


async def drain(conn: AsyncConnection, *, sessions: list[int], actor: str, then_leave: bool = False) -> list[int]:
    """The sessions that were not draining before. A wake-up triggers an immediate heartbeat, which delivers the request."""
    request = Request.LEAVE if then_leave else Request.DRAIN
    return await runners.ask_of(conn, sessions=sessions, request=request, actor=actor)


async def undrain(conn: AsyncConnection, *, sessions: list[int], actor: str) -> list[int]:
    """The sessions that were draining."""
    return await runners.ask_of(conn, sessions=sessions, request=None, actor=actor)


async def find_runners(conn: AsyncConnection, which: Iterable[str]) -> list[BusyRunner]:
    """Live runners by readable id, name or session. An id or a name shared by several runners selects all of them."""
    alive = await runners.list_busy(conn, limit=10_000)
    found: dict[int, BusyRunner] = {}
    for text in which:
        matching = [each for each in alive if _is_meant(each, text)]
        if not matching:
            raise NotFound(f"There is no live runner {text!r}. List live runners with `evertick runners list`.")
        found |= {each.session: each for each in matching}
    return list(found.values())


def _is_meant(runner: BusyRunner, text: str) -> bool:
    is_session = len(text) >= _SHORTEST_PREFIX and session_text(runner.session).startswith(text.lower())
    return text in (runner.runner_id, runner.name) or is_session
