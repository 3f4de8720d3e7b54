"""Logs that are moved to an object storage by the leader's own means: for tests of moving them, and of reading what was moved."""

from __future__ import annotations

from contextlib import nullcontext

from psycopg import AsyncConnection

from evertick.config import Settings
from evertick.db.queries import logs
from evertick.db.queries.logs import NewChunk
from evertick.domain.attempt import TaskKey
from evertick.logs import archive
from evertick.logs.archive import LogArchiver
from evertick.logs.reader import LogArchive, LogReader
from evertick.runtime.connections import ReconnectingConnection
from evertick.storage.object_store import open_store
from tests.engine.world import Runner, key_of, start, value
from tests.system.hosting import Said

LINE = "1700000000000000 INFO {} and enough of it to be worth an object\n"


class Mover:
    def __init__(self, conn: AsyncConnection, settings: Settings, link: ReconnectingConnection, epoch: int) -> None:
        self.conn, self.settings, self.link, self.epoch, self.said = conn, settings, link, epoch, Said()
        self.moving = self.another()

    def another(self) -> LogArchiver:
        """As after a crash: it knows nothing but what the database does."""
        store = open_store(self.settings)
        assert store is not None
        return LogArchiver(self.settings, store, link=self.link, epoch=lambda: self.epoch, log=self.said.log)

    async def round(self) -> float:
        """Until there is nothing to do; the pause after that."""
        while (pause := await self.moving.tick()) < archive.ROUND_SECONDS and self.moving.pulse.blocked is None:
            pass
        return pause

    async def write(self, *, chunks: int = 10, run_id: int | None = None) -> TaskKey:
        """A task whose run has ended, with so many chunks of a few kilobytes."""
        run = run_id or await start(self.conn, "d")
        runner = await Runner.join(self.conn)
        (claim,) = await runner.claim(1)
        assert claim.run_id == run
        place = 0
        for number in range(chunks):
            content = "".join(LINE.format(f"{claim.epoch}.{number}.{n}") for n in range(50))
            chunk = NewChunk(key_of(claim), claim.epoch, place, place + len(content), content)
            await logs.append(self.conn, session=runner.session, chunks=[chunk])
            place += len(content)
        await runner.finish(claim)
        return key_of(claim)

    async def here(self) -> object:
        return await value(self.conn, "select count(*) from log_chunk where content is not null")

    async def read(self, key: TaskKey) -> str:
        reader = LogReader(LogArchive(self.settings), lambda: nullcontext(self.conn))
        return "".join(chunk.content for chunk in await reader.read(key, after=(0, -1), limit=1000))
