"""How programs use the client: mypy checks these with `--strict`, so that every call and every record is typed."""

from __future__ import annotations

from datetime import datetime

from evertick.client import AsyncEvertick, Evertick
from evertick.operations.dags import TriggerRequest
from evertick.operations.runs import Run
from evertick.operations.schedules import ScheduleRequest


def restart_failures(client: Evertick, dag: str) -> list[int]:
    names: list[str] = [each.name for each in client.items(client.list_dags, contains=dag)]
    made = client.trigger_run(dag=names[0], body=TriggerRequest(params={"day": "2026-11-30"}))
    run: Run = client.wait(made.run_id, timeout_seconds=60)
    lines: list[str] = [line.text for line in client.follow_log(run.run_id, "load")]
    number: int = client.show_dag(dag=dag).record.task_count
    client.put_schedule(dag=dag, name="nightly", body=ScheduleRequest(when="0 3 * * *"))
    return [run.run_id, number, len(lines)]


async def watch(client: AsyncEvertick, dag: str) -> datetime | None:
    async for run in client.items(client.list_runs, dag=dag):
        found: Run = await client.wait(run.run_id)
        async for line in client.follow_log(found.run_id, "load"):
            assert line.text
        return found.finished_at
    return None
