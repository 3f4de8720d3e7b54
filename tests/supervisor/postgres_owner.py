"""Owns an embedded PostgreSQL until its standard input ends: `python -m tests.supervisor.postgres_owner HOME`.

Prints the URL when the server answers. The tests kill it.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from evertick.supervisor.postgres import EmbeddedPostgres


async def main(home: Path) -> None:
    server = EmbeddedPostgres(home)
    print(await server.start(), flush=True)
    async with asyncio.TaskGroup() as group:
        supervision = group.create_task(server.supervise())
        await asyncio.to_thread(sys.stdin.read)
        supervision.cancel()
    await server.stop()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
