"""One day per run, replaced as a whole: a backfill of a month can run again without duplicates.

evertick backfills create daily_partition --from 2030-01-01 --to 2030-02-01 --parallel 4
"""

import json
from pathlib import Path

from evertick import Param, TaskContext, dag, task


@task(retries=2, mutex="partition:{params.folder}")
def build(folder: str, context: TaskContext) -> str:
    rows = [{"day": context.ds, "orders": 10}]
    target = Path(folder, f"{context.ds}.json")
    new = target.with_suffix(".new")
    new.write_text(json.dumps(rows), encoding="utf-8")
    new.replace(target)  # readers see the old file or the new one, never a part
    return target.name


@dag(schedule="0 2 * * *", timezone="Europe/Berlin", max_active_runs=4)
def daily_partition(folder: str = Param("partitions")) -> None:
    build(folder)
