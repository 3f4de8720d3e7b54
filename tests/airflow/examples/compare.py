"""Runs Airflow's example files by a real `evertick up`, and compares how each DAG and each task instance ends with what
Airflow made of them. `python -m tests.airflow.examples.compare [FILE...]` prints a table; exit 1 for a new difference."""

from __future__ import annotations

import os
import re
import sys
import tempfile
import time
import tomllib
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from tests.airflow.examples.files import (
    LOGICAL_DATE,
    airflow_home,
    copy_examples,
    example_files,
    known_truth,
    version_of,
)
from tests.system.test_up import Up
from tests.waiting import eventually_sync

PASSWORD = "correct horse battery"
_LOAD_SECONDS, _RUN_SECONDS = 300.0, 150.0
_ENDED = ("success", "failed")
_CODE = re.compile(r": (AF\d{3}) ")
KNOWN = tomllib.loads((Path(__file__).parent / "known.toml").read_text(encoding="utf-8"))
_PAUSE_SECONDS = 0.5
_PAGE = 100


@dataclass(slots=True)
class Comparison:
    """`differences`: of a DAG, what was otherwise. `known`: those of them whose reason is in known.toml."""

    release: str
    files: int = 0
    loaded: int = 0
    dags: int = 0
    published: int = 0
    compared: int = 0
    same_dags: int = 0
    instances: int = 0
    same_instances: int = 0
    load_seconds: float = 0.0
    run_seconds: float = 0.0
    differences: dict[str, str] = field(default_factory=dict)
    known: dict[str, str] = field(default_factory=dict)

    def new(self) -> dict[str, str]:
        return {dag: what for dag, what in self.differences.items() if dag not in self.known}

    def table(self) -> str:
        lines = [
            f"Airflow {self.release}: {self.loaded} of {self.files} files load, {self.published} of {self.dags} DAGs are"
            f" published ({self.load_seconds:.1f} s)",
            f"as under Airflow: {self.same_dags} of {self.compared} DAGs, {self.same_instances} of {self.instances} task"
            f" instances ({self.run_seconds:.1f} s)",
        ]
        for dag, what in sorted(self.differences.items()):
            lines.append(f"  {dag}: {what}\n      {'known: ' + self.known[dag] if dag in self.known else 'NEW'}")
        stale = sorted(set(self.known) - set(self.differences))
        return "\n".join([*lines, *([f"no longer different: {', '.join(stale)}"] if stale else [])])


class Client:
    """The API of a running `evertick up`: Airflow's own, and Evertick's for what Airflow's has not."""

    def __init__(self, address: str) -> None:
        self._http = httpx.Client(base_url=address, timeout=60)
        token = self._http.post("/auth/token", json={"username": "admin", "password": PASSWORD}).raise_for_status()
        self._http.headers["Authorization"] = f"Bearer {token.json()['access_token']}"

    def get(self, path: str, **params: object) -> Any:
        return self._http.get(path, params=params).raise_for_status().json()

    def every(self, path: str, name: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        while True:
            page = self.get(f"/api/v2/{path}", limit=_PAGE, offset=len(found))
            found += page[name]
            if len(found) >= page["total_entries"] or not page[name]:
                return found

    def unpause(self, dag: str) -> None:
        """Without its schedules: only the run that is compared is created."""
        for each in self.get(f"/api/v1/dags/{dag}/schedules")["items"]:
            self._http.post(f"/api/v1/dags/{dag}/schedules/{each['name']}/pause").raise_for_status()
        self._http.patch(f"/api/v2/dags/{dag}", json={"is_paused": False}).raise_for_status()

    def trigger(self, dag: str) -> str:
        """The id of the run, or why there is none, in parentheses."""
        answer = self._http.post(f"/api/v2/dags/{dag}/dagRuns", json={"logical_date": LOGICAL_DATE})
        return str(answer.json()["dag_run_id"]) if answer.is_success else f"({answer.text[:200]})"


def compare(python: Path, chosen: Sequence[str] = ()) -> Comparison:
    files, truth = example_files(python), known_truth(python)
    if chosen:
        files = {name: path for name, path in files.items() if name in chosen}
    truth = {name: truth[name] for name in files if name in truth}
    found = Comparison(release=version_of(python), files=len(files))
    found.dags = sum(len(each["dags"]) for each in truth.values())
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        copy_examples(files, home / "dags")
        environment = airflow_home(home / "airflow", home / "dags", python) | {
            "EVERTICK_AIRFLOW_PYTHON": str(python),
            "EVERTICK_ADMIN_PASSWORD": PASSWORD,
            "EVERTICK_API_RATE_LIMIT": "0",
            "EVERTICK_LOAD_TIMEOUT_SECONDS": "120",
        }
        up = Up(home, "--dags", str(home / "dags"), "--port", "0", **environment)
        try:
            _compare(up, truth, found)
        finally:
            Path(os.environ.get("EVERTICK_TEST_OUTPUT", os.devnull)).write_text(up.output, encoding="utf-8")
            up.end()
    named = {dag for each in truth.values() for dag in each["dags"]}
    of_release = KNOWN["releases"].get(".".join(found.release.split(".")[:2]), {})
    found.known = {dag: why for dag, why in {**KNOWN["dags"], **of_release}.items() if dag in named}
    for dag, what in found.differences.items():
        code = _CODE.search(what) if what.startswith("not published") else None
        if code is not None and code[1] in KNOWN["refused"]:
            found.known[dag] = KNOWN["refused"][code[1]]
    return found


def _compare(up: Up, truth: Mapping[str, Any], found: Comparison) -> None:
    up.wait_for("api_listening")
    address = re.search(r"api_listening +url=(\S+)", up.output)
    assert address is not None
    client = Client(address[1])
    began = time.monotonic()
    dags = _published(client, truth)
    found.load_seconds = time.monotonic() - began
    found.loaded = found.files - sum(not _CODE.search(text) for text in _errors(client).values())
    found.published = len(dags)
    began = time.monotonic()
    for dag in dags:
        client.unpause(dag)
    runs = {dag: client.trigger(dag) for dag in dags}
    known = {dag for each in truth.values() for dag, expected in each["dags"].items() if expected["state"]}
    _wait(client, {dag: run for dag, run in runs.items() if dag in known and not run.startswith("(")})
    found.run_seconds = time.monotonic() - began
    for file, each in truth.items():
        for dag, expected in each["dags"].items():
            run = runs.get(dag, "(not published)") if dag in dags else f"(not published: {_why(client, file)})"
            _compare_dag(client, dag, expected, run, found)


def _published(client: Client, truth: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The DAGs, when each file has been loaded: it has a DAG or an import error then."""
    wanted = {name for name, each in truth.items() if each["dags"]}
    dags: dict[str, dict[str, Any]] = {}

    def is_loaded() -> bool:
        dags.update({each["dag_id"]: each for each in client.every("dags", "dags")})
        errors = {each["filename"] for each in client.every("importErrors", "import_errors")}
        return wanted <= {each["relative_fileloc"] for each in dags.values()} | {Path(name).name for name in errors}

    with suppress(AssertionError):  # what is missing then is a difference
        eventually_sync(is_loaded, _LOAD_SECONDS, pause_seconds=_PAUSE_SECONDS)
    return dags


def _wait(client: Client, runs: Mapping[str, str]) -> None:
    wanted = set(runs.items())

    def are_over() -> bool:
        listed = client.every("dags/~/dagRuns", "dag_runs")
        return wanted <= {(each["dag_id"], each["dag_run_id"]) for each in listed if each["state"] in _ENDED}

    with suppress(AssertionError):
        eventually_sync(are_over, _RUN_SECONDS, pause_seconds=_PAUSE_SECONDS)


def _compare_dag(client: Client, dag: str, expected: Mapping[str, Any], run: str, found: Comparison) -> None:
    is_known = expected["state"] is not None  # otherwise it waits for a person, or for another process
    found.compared += is_known
    found.instances += len(expected.get("tasks", ()))
    if run.startswith("(") and (is_known or "not published" in run):
        found.differences[dag] = run.strip("()")
    if run.startswith("(") or not is_known:
        return
    state = client.get(f"/api/v2/dags/{dag}/dagRuns/{run}")["state"]
    rows = client.every(f"dags/{dag}/dagRuns/{run}/taskInstances", "task_instances")
    tasks = {
        row["task_id"] if row["map_index"] < 0 else f"{row['task_id']}[{row['map_index']}]": row["state"]
        for row in rows
    }
    wanted = expected["tasks"]
    same = sum(tasks.get(name) == value for name, value in wanted.items())
    # A DAG that chooses a branch at random.
    is_random = (
        same < len(wanted) and Counter(tasks.values()) == Counter(wanted.values()) and dag in KNOWN["random"]["dags"]
    )
    found.same_instances += len(wanted) if is_random else same
    if state == expected["state"] and (is_random or (same == len(wanted) == len(tasks))):
        found.same_dags += 1
        return
    other = {name: (tasks.get(name), wanted.get(name)) for name in sorted({*tasks, *wanted})}
    told = [f"{name} {ours} for {theirs}" for name, (ours, theirs) in other.items() if ours != theirs]
    told.sort(key=lambda text: "upstream_failed" in text)  # the causes first
    found.differences[dag] = "; ".join([f"{state} for {expected['state']}", *told[:5]])


def _errors(client: Client) -> dict[str, str]:
    """By file: its first line."""
    listed = client.every("importErrors", "import_errors")
    return {each["filename"]: str(each["stack_trace"]).strip().splitlines()[0] for each in listed}


def _why(client: Client, file: str) -> str:
    return _errors(client).get(file, "no import error")[:160]


def main() -> None:
    python = Path(os.environ["EVERTICK_TEST_AIRFLOW_PYTHON"]).absolute()
    found = compare(python, sys.argv[1:])
    print(found.table())
    sys.exit(1 if found.new() else 0)


if __name__ == "__main__":
    main()
