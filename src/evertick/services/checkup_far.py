"""Whether what was handed to executors elsewhere is looked after, and gets to begin: a part of `evertick doctor`."""

from __future__ import annotations

from collections.abc import Iterator

from psycopg import AsyncConnection

from evertick.config import Settings
from evertick.services.checkup import Finding, error, warning
from evertick.store import checkup
from evertick.store.checkup import FarRow


async def examine_far(conn: AsyncConnection, settings: Settings) -> list[Finding]:
    return [finding for row in await checkup.far(conn) for finding in judge_far(row)]


def judge_far(row: FarRow) -> Iterator[Finding]:
    if not row.has_runner:
        yield error(
            "unserved_executor",
            f"{row.attempts} attempts of queue {row.queue} were handed to executor {row.executor}, and no live runner of it looks"
            " after them.",
            "What has not begun waits, and how the others end there is not seen.",
            f"Start one with: evertick runner --executor {row.executor} --queues {row.queue}",
        )
    elif row.stuck:
        yield warning(
            "not_begun",
            f"{row.stuck} attempts of queue {row.queue} have been kept from beginning by executor {row.executor} for more than ten"
            f" minutes: {row.trouble}",
            "Their tasks stay queued until it lets them begin, or gives them up.",
            "See which with: evertick tasks why RUN TASK; docs/howto/remote.md and docs/howto/kubernetes.md say what to do.",
        )
