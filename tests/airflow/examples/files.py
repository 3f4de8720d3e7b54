"""The example files of an installed release of Airflow, and what Airflow itself makes of them: `truth-3.3.json` and so on.

`python -m tests.airflow.examples.files` makes the truth again, in about ten minutes; only for files that have changed.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

LOGICAL_DATE = "2026-06-01T00:00:00+00:00"
FOLDERS = ("example_dags", "providers/standard/example_dags")
# Data files and modules that a file needs next to it.
PARTS = ("sql", "libs")
# A DAG that another file triggers or waits for.
COMPANIONS = {
    "example_trigger_controller_dag.py": ("example_trigger_target_dag.py",),
    "example_external_task_parent_deferrable.py": ("example_external_task_child_deferrable.py",),
}
# Airflow's cluster policy, in the configuration of both systems: a retry after five minutes proves nothing more.
POLICY = """
from datetime import timedelta

def task_policy(task):
    task.retry_delay = min(task.retry_delay, timedelta(seconds=0.1))
"""
_SECONDS_A_DAG, _SECONDS_A_FILE = 40.0, 400.0
_HERE = Path(__file__).parent


def version_of(python: Path) -> str:
    code = "from importlib.metadata import version; print(version('apache-airflow-core'))"
    return subprocess.run([str(python), "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def library(python: Path) -> Path:
    """Where its packages are."""
    code = "import sysconfig; print(sysconfig.get_path('purelib'))"
    return Path(subprocess.run([str(python), "-c", code], capture_output=True, text=True, check=True).stdout.strip())


def example_files(python: Path) -> dict[str, Path]:
    """The files with the words `dag` and `airflow`, by name."""
    found = {}
    for folder in FOLDERS:
        for path in sorted((library(python) / "airflow" / folder).glob("*.py")):
            if path.name != "__init__.py":
                found[path.name] = path
    return found


def airflow_home(home: Path, dags: Path, python: Path) -> dict[str, str]:
    """Make a home of Airflow, and return its environment."""
    (home / "config").mkdir(parents=True, exist_ok=True)
    (home / "config" / "airflow_local_settings.py").write_text(POLICY, encoding="utf-8")
    return {
        "PATH": f"{python.parent}:{os.environ['PATH']}",
        "HOME": str(home),
        "AIRFLOW_HOME": str(home),
        "AIRFLOW__CORE__DAGS_FOLDER": str(dags),
        # With its examples, Airflow also knows the plugins that they use.
        "AIRFLOW__CORE__LOAD_EXAMPLES": "True",
        "AIRFLOW_CONN_FS_DEFAULT": "fs:///",
        "PYTHONHASHSEED": "0",
        "PYTHONDONTWRITEBYTECODE": "1",
    }


def copy_examples(files: Mapping[str, Path], folder: Path) -> None:
    folder.mkdir(parents=True)
    for path in files.values():
        shutil.copy(path, folder)
        for part in PARTS:
            if (path.parent / part).is_dir():
                shutil.copytree(path.parent / part, folder / part, dirs_exist_ok=True)


def known_truth(python: Path) -> dict[str, Any]:
    """By file: its hash, its error or its DAGs. Of a release without a file of its own, what the newest one made of files with
    the same names."""
    path = _truth_file(python)
    if not path.exists():
        path = max(_HERE.glob("truth-*.json"), default=path)
    known = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    names = example_files(python)
    return {name: each for name, each in known.items() if name in names}


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


def _truth_file(python: Path) -> Path:
    return _HERE / f"truth-{'.'.join(version_of(python).split('.')[:2])}.json"


def make_truth(python: Path) -> None:
    files, path = example_files(python), _truth_file(python)
    known = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    done = {
        name for name, each in known.items() if name in files and each["hash"] == digest(files[name]) and each["dags"]
    }
    wanted = {name: path for name, path in files.items() if name not in done}
    kept = {name: each for name, each in known.items() if name in files and name not in wanted}
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(2) as pool:
        template = Path(folder) / "template"
        environment = airflow_home(template, template / "dags", python)
        subprocess.run([python, "-m", "airflow", "db", "migrate"], env=environment, check=True, capture_output=True)
        asked = {name: pool.submit(_ask, python, name, files, template, Path(folder) / name) for name in wanted}
        for name, answer in asked.items():
            kept[name] = {"hash": digest(files[name]), **answer.result()}
            print(name, {dag: each["state"] for dag, each in kept[name]["dags"].items()}, flush=True)
    path.write_text(json.dumps(dict(sorted(kept.items())), indent=1) + "\n", encoding="utf-8")


def _ask(python: Path, name: str, files: Mapping[str, Path], template: Path, home: Path) -> dict[str, Any]:
    chosen = {each: files[each] for each in (name, *COMPANIONS.get(name, ())) if each in files}
    copy_examples(chosen, home / "dags")
    environment = airflow_home(home, home / "dags", python)
    shutil.copy(template / "airflow.db", home)
    answer = home / "answer.json"
    command = [python, _HERE / "truth.py", home / "dags", name, answer, LOGICAL_DATE, str(_SECONDS_A_DAG)]
    process = subprocess.Popen(
        [str(each) for each in command],
        env=environment,
        start_new_session=True,
        stdout=subprocess.DEVNULL,
        stderr=(home / "errors").open("wb"),
    )
    try:
        process.wait(_SECONDS_A_FILE)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    if not answer.exists():
        return {"dags": {}, "error": (home / "errors").read_text(encoding="utf-8")[-500:]}
    return json.loads(answer.read_text(encoding="utf-8"))  # type: ignore[no-any-return]


if __name__ == "__main__":
    make_truth(Path(sys.argv[1] if len(sys.argv) > 1 else os.environ["EVERTICK_TEST_AIRFLOW_PYTHON"]).absolute())
