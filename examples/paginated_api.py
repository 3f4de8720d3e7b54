"""Read all pages of an API. A retry continues with the page that failed instead of the first one."""

import json
from pathlib import Path
from urllib.request import urlopen

from evertick import Param, TaskContext, dag, task


@task(retries=5, retry_delay="10s")
def read_all(url: str, folder: str, context: TaskContext) -> int:
    # The same for every attempt of this task, and for no other task.
    kept = Path(folder, f"{context.idempotency_key.replace('/', '-')}.json")
    rows, page = json.loads(kept.read_text(encoding="utf-8")) if kept.exists() else ([], 1)
    while page is not None:
        with urlopen(f"{url}?page={page}", timeout=30) as response:
            answer = json.load(response)
        rows, page = [*rows, *answer["rows"]], answer["next"]
        kept.write_text(json.dumps([rows, page]), encoding="utf-8")
    kept.unlink()
    return len(rows)


@dag(schedule="@daily")
def all_pages(url: str = Param("https://api.example/orders"), folder: str = Param(".")) -> None:
    read_all(url, folder)
