"""What Airflow itself makes of a DAG file: `dag.test()` of each of its DAGs. Runs in Airflow's interpreter, with a database
of its own that `compare.py` made before: python truth.py FOLDER FILE ANSWER LOGICAL_DATE SECONDS

Writes the answer after each DAG: the caller kills the process after a time, because the SDK ignores SIGTERM.
"""

from __future__ import annotations

import json
import logging
import os
import select
import signal
import sys
from datetime import datetime
from pathlib import Path
from typing import Any


def main(folder: str, file: str, answer: str, date: str, seconds: str) -> None:
    logging.disable(logging.CRITICAL)
    bag = _bag(folder, file)
    found: dict[str, Any] = {}
    errors = {Path(path).name: text for path, text in bag.import_errors.items()}
    for dag_id, dag in sorted(bag.dags.items()):
        if Path(dag.fileloc).name == file:
            found[dag_id] = _in_a_process(dag, datetime.fromisoformat(date), float(seconds))
        Path(answer).write_text(json.dumps({"dags": found, "error": errors.get(file)}), encoding="utf-8")


def _bag(folder: str, file: str) -> Any:
    try:
        from airflow.dag_processing.dagbag import BundleDagBag, sync_bag_to_db

        bag = BundleDagBag(dag_folder=folder, bundle_path=Path(folder), bundle_name="dags-folder")
    except ImportError:  # before 3.2
        from airflow.models.dagbag import DagBag, sync_bag_to_db

        bag = DagBag(dag_folder=folder, include_examples=False)
    from airflow.dag_processing.bundles.manager import DagBundlesManager

    DagBundlesManager().sync_bundles_to_db()
    sync_bag_to_db(bag, "dags-folder", None)
    return bag


def _in_a_process(dag: Any, date: datetime, seconds: float) -> dict[str, Any]:
    """What a DAG leaves in the process does not reach the next one."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.write(writer, json.dumps(_test(dag, date)).encode())
        finally:
            os._exit(0)
    os.close(writer)
    text = b""
    with os.fdopen(reader, "rb") as lines:
        # The SDK uses SIGALRM itself, and ignores SIGTERM.
        if select.select([lines], [], [], seconds)[0]:
            text = lines.read()
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    if not text:
        return {"state": None, "why": f"dag.test() did not end within {seconds:g} s"}
    return json.loads(text)  # type: ignore[no-any-return]


def _test(dag: Any, date: datetime) -> dict[str, Any]:
    from airflow import settings

    settings.engine.dispose()  # the connection of the process that forked
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    try:
        run = dag.test(logical_date=date)
    except Exception as error:
        return {"state": None, "why": f"{type(error).__name__}: {error}"[:200]}
    from airflow.models.taskinstance import TaskInstance

    rows = settings.Session().query(TaskInstance).filter_by(dag_id=dag.dag_id, run_id=run.run_id).all()
    tasks = {row.task_id if row.map_index < 0 else f"{row.task_id}[{row.map_index}]": row.state for row in rows}
    return {"state": str(getattr(run.state, "value", run.state)), "tasks": dict(sorted(tasks.items()))}


if __name__ == "__main__":
    main(*sys.argv[1:])
