"""Runs the DAGs of one file with Airflow itself, in an interpreter that has it, and prints how each task instance ended.

`python truth.py FOLDER FILE OUTPUT`. The environment names an AIRFLOW_HOME with a migrated database of its own.
"""

from __future__ import annotations

import json
import signal
import sys
import traceback
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

LOGICAL_DATE = datetime(2026, 1, 5, tzinfo=UTC)
DAG_SECONDS = 90


def main(folder: Path, file: str, output: Path) -> None:
    from airflow.dag_processing.dagbag import BundleDagBag
    from airflow.models.taskinstance import TaskInstance
    from airflow.utils.session import create_session

    bag = BundleDagBag(dag_folder=str(folder / file), bundle_path=folder, bundle_name="dags-folder")
    found: dict[str, Any] = {}
    for name, dag in bag.dags.items():
        found[name] = _run(dag)
        output.write_text(json.dumps(found))
        with create_session() as session:
            rows = session.query(TaskInstance.task_id, TaskInstance.map_index, TaskInstance.state, TaskInstance.run_id)
            rows = rows.filter(TaskInstance.dag_id == name).all()
        first = min((row[3] for row in rows), default=None)
        found[name]["tasks"] = {f"{task}[{index}]": state for task, index, state, run in rows if run == first}
        output.write_text(json.dumps(found))


def _run(dag: Any) -> dict[str, Any]:
    def stop(_signum: int, _frame: object) -> None:
        raise TimeoutError(f"longer than {DAG_SECONDS} s")

    signal.signal(signal.SIGALRM, stop)
    signal.alarm(DAG_SECONDS)
    try:
        run = dag.test(logical_date=LOGICAL_DATE)
        return {"state": str(run.state.value if hasattr(run.state, "value") else run.state)}
    except BaseException as error:
        return {"error": f"{type(error).__name__}: {error}"[:500], "trace": traceback.format_exc(limit=-3)[-800:]}
    finally:
        signal.alarm(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))
