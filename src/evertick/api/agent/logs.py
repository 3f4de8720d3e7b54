"""Log lines of an attempt, as they are written. Lines of one that is over may still come, and are marked late."""

from __future__ import annotations

from fastapi import APIRouter

from evertick.api.agent.door import AgentRoute, Who, shows
from evertick.api.agent.shapes import LogsAnswer, LogsRequest
from evertick.domain.agent_token import TokenUse
from evertick.domain.attempt import storable_text
from evertick.store import logs
from evertick.store.logs import NewChunk

router = APIRouter(route_class=AgentRoute, tags=["logs"])


@router.post("/logs")
@shows(TokenUse.ATTEMPT)
async def append(agent: Who, request: LogsRequest) -> LogsAnswer:
    """Store these lines. What is stored already is passed over, so that sending again is harmless; the answer says how far it is.

    Without any it only says where to go on.
    """
    bearer = agent.bearer
    async with agent.lent() as lent:
        until = await logs.shipped_until(lent.conn, bearer.key, epoch=bearer.epoch)
        chunks: list[NewChunk] = []
        for each in request.chunks:
            if each.offset >= until and each.end > each.offset:
                text = storable_text(each.content)
                chunks.append(NewChunk(bearer.key, bearer.epoch, each.offset, each.end, text))
                until = each.end
        if chunks:
            await logs.append(lent.conn, session=bearer.session, chunks=chunks)
    return LogsAnswer(until=until)
