"""Log lines of an attempt. Lines that arrive after the attempt has ended are stored and marked late."""

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
    """Store log lines and return how far the log is stored. Lines already stored are skipped, so repeating a request is harmless.

    A request without lines only returns the position.
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
