"""Requests for runs that could not become one: list, show and replay dead letters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from annotated_doc import Doc
from annotated_types import Ge, Le, MaxLen, MinLen

from evertick.db.notify import Channel
from evertick.db.queries import requests
from evertick.db.queries.requests import DeadLetter
from evertick.domain.errors import Conflict, NotFound
from evertick.engine.inbound.requests import replay_dead_letters as replay
from evertick.operations.caller import Caller
from evertick.operations.paging import (
    LARGEST,
    MOST_ITEMS,
    USUAL_ITEMS,
    Cursor,
    Limit,
    Page,
    RequestBody,
    page_of,
    read_cursor,
)

LetterId = Annotated[int, Ge(1), Le(LARGEST), Doc("The dead letter's number.")]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayRequest(RequestBody):
    """The dead letters by their numbers."""

    letter_ids: Annotated[list[Annotated[int, Ge(1), Le(LARGEST)]], MinLen(1), MaxLen(MOST_ITEMS)]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayResult:
    """How many went back into the inbox. Those that were replayed before are left out."""

    count: int


async def list_dead_letters(
    caller: Caller,
    *,
    with_replayed: Annotated[bool, Doc("Also replayed ones.")] = False,
    limit: Limit = USUAL_ITEMS,
    cursor: Cursor = None,
) -> Page[DeadLetter]:
    """List requests that could not become a run, with the reason, newest first."""
    (before,) = read_cursor(cursor, LARGEST)
    async with caller.read() as conn:
        found = await requests.dead_letters(conn, before=before, is_all=with_replayed, limit=limit)
    return page_of(found, limit, lambda row: (row.letter_id,), lambda row: row)


async def show_dead_letter(caller: Caller, *, letter_id: LetterId) -> DeadLetter:
    """Show one dead letter."""
    async with caller.read() as conn:
        return _found(await requests.find_letter(conn, letter_id=letter_id), letter_id)


async def replay_dead_letters(caller: Caller, *, body: ReplayRequest) -> ReplayResult:
    """Put dead letters back into the inbox. What still cannot become a run is a new dead letter."""
    async with caller.write(Channel.SCHEDULE) as conn:
        return ReplayResult(count=await replay(conn, letter_ids=body.letter_ids, actor=caller.actor))


async def replay_dead_letter(caller: Caller, *, letter_id: LetterId) -> DeadLetter:
    """Put one dead letter back into the inbox. If it was replayed before, the answer is 409."""
    async with caller.write(Channel.SCHEDULE) as conn:
        count = await replay(conn, letter_ids=[letter_id], actor=caller.actor)
        found = _found(await requests.find_letter(conn, letter_id=letter_id), letter_id)
    if not count:
        raise Conflict(f"Dead letter {letter_id} was replayed before, by {found.replayed_by}.")
    return found


def _found(letter: DeadLetter | None, letter_id: int) -> DeadLetter:
    if letter is None:
        raise NotFound(f"There is no dead letter {letter_id}. List them with `evertick dead-letters list`.")
    return letter
