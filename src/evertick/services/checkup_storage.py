"""Whether logs reach the object storage and can be read from it: a part of `evertick doctor`. Whether the storage
answers is checked in `checkup_here.py`."""

from __future__ import annotations

from collections.abc import Iterator

from psycopg import AsyncConnection

from evertick.config import Settings
from evertick.services.checkup import Finding, error, warning
from evertick.store import checkup
from evertick.store.checkup import StoredLogs

# An outage of some minutes is not worth a finding.
LONGEST_WAIT_SECONDS = 3600.0


async def examine_logs(conn: AsyncConnection, settings: Settings) -> list[Finding]:
    return list(judge_logs(settings, await checkup.stored_logs(conn)))


def judge_logs(settings: Settings, logs: StoredLogs) -> Iterator[Finding]:
    if settings.storage is None and logs.are_there:
        yield error(
            "storage",
            "Logs of ended runs were archived to an object storage, but none is configured here.",
            "They cannot be read from here, and a scheduler without the setting does not delete expired ones.",
            "Set EVERTICK_STORAGE and its keys for every scheduler and API, and where `evertick tasks logs` is used.",
        )
    late_seconds = settings.storage_logs_after_seconds + LONGEST_WAIT_SECONDS
    if settings.storage_logs and (logs.waiting_seconds or 0.0) > late_seconds:
        yield warning(
            "log_moves",
            f"Logs of runs that ended {(logs.waiting_seconds or 0.0) / 3600:.0f} hours ago have not been archived to the storage.",
            "Until then they fill the database.",
            "The leading scheduler logs the reason: storage_unavailable or log_move_refused in its log, log_moving in its health.",
        )
