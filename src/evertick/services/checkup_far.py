"""Whether attempts submitted to remote executors are watched by a runner and get to start: a part of `evertick doctor`."""

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
            f"{row.attempts} attempts of queue {row.queue} were submitted to executor {row.executor}, and no live runner watches"
            " them.",
            "Attempts that have not started wait, and the outcome of the others is not recorded.",
            f"Start one with: evertick runner --executor {row.executor} --queues {row.queue}",
        )
    elif row.stuck:
        yield warning(
            "not_begun",
            f"{row.stuck} attempts of queue {row.queue} have been prevented from starting by executor {row.executor} for over ten"
            f" minutes: {row.trouble}",
            "Their tasks stay queued until the executor starts them or reports that it cannot.",
            "List them with: evertick tasks why RUN TASK; docs/howto/remote.md and docs/howto/kubernetes.md describe the fixes.",
        )
