"""Migrates one database, when told to: `python -m tests.db.migrating URL DIRECTORY`. Many are started at once."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

from evertick.db.connect import Purpose, connect
from evertick.db.migrate import migrate


async def main(url: str, directory: Path) -> None:
    async with await connect(url, purpose=Purpose.SCHEDULER) as conn:
        print("ready", flush=True)
        await asyncio.to_thread(sys.stdin.readline)
        print(json.dumps(await migrate(conn, directory, None)))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], Path(sys.argv[2])))
