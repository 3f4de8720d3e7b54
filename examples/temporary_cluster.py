"""Create a cluster, use it, and remove it whatever happens in between."""

import shutil
import tempfile
from pathlib import Path

from evertick import dag, setup, task, teardown


@setup(retries=2)
def create() -> str:
    return tempfile.mkdtemp(prefix="cluster-")


@task
def work(cluster: str) -> int:
    Path(cluster, "result.txt").write_text("42", encoding="utf-8")
    return 42


@teardown(retries=5, on_failure_fail_dagrun=True)
def remove(cluster: str) -> None:
    shutil.rmtree(cluster)


@dag(schedule="0 22 * * *")
def on_a_cluster() -> None:
    cluster = create()
    work(cluster) >> remove(cluster)
