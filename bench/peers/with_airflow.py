"""Airflow 3: API server, scheduler and DAG processor with the local executor on PostgreSQL. `python with_airflow.py [tuned]`."""

import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from importlib.metadata import version
from pathlib import Path

import stamps

SINGLES = 40
TICKS = 4
TUNED = {
    "AIRFLOW__SCHEDULER__SCHEDULER_IDLE_SLEEP_TIME": "0.05",
    "AIRFLOW__SCHEDULER__MAX_DAGRUNS_TO_CREATE_PER_LOOP": "100",
    "AIRFLOW__SCHEDULER__MAX_DAGRUNS_PER_LOOP_TO_SCHEDULE": "100",
    "AIRFLOW__SCHEDULER__MAX_TIS_PER_QUERY": "64",
    "AIRFLOW__CORE__MAX_ACTIVE_RUNS_PER_DAG": "64",
}
HERE = Path(__file__).parent


def environment(port, is_tuned):
    home = Path(os.environ["PEER_FOLDER"])
    url = os.environ["PEER_URL"].replace("postgresql://", "postgresql+psycopg2://")
    return {
        **os.environ,
        # Its programs call each other by name.
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "AIRFLOW_HOME": str(home),
        "AIRFLOW__CORE__DAGS_FOLDER": str(home / "dags"),
        "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
        "AIRFLOW__CORE__EXECUTOR": "LocalExecutor",
        "AIRFLOW__CORE__DAGS_ARE_PAUSED_AT_CREATION": "False",
        "AIRFLOW__CORE__SIMPLE_AUTH_MANAGER_ALL_ADMINS": "True",
        "AIRFLOW__CORE__EXECUTION_API_SERVER_URL": f"http://127.0.0.1:{port}/execution/",
        "AIRFLOW__DATABASE__SQL_ALCHEMY_CONN": url,
        "AIRFLOW__API__PORT": str(port),
        "AIRFLOW__API__SECRET_KEY": secrets.token_hex(16),
        "AIRFLOW__API_AUTH__JWT_SECRET": secrets.token_hex(32),
        **(TUNED if is_tuned else {}),
    }


class Api:
    """The REST API, as any client would use it."""

    def __init__(self, port):
        self._url, self._token = f"http://127.0.0.1:{port}", None

    def wait(self, within_seconds):
        deadline = time.monotonic() + within_seconds
        while True:
            try:
                self._token = self.call("GET", "/auth/token")["access_token"]
                return
            except (OSError, KeyError):
                if time.monotonic() > deadline:
                    raise SystemExit(f"the API did not answer within {within_seconds} s") from None
                time.sleep(0.3)

    def call(self, method, path, document=None):
        headers = {"Content-Type": "application/json"}
        if self._token:
            headers["Authorization"] = f"Bearer {self._token}"
        content = None if document is None else json.dumps(document).encode()
        request = urllib.request.Request(self._url + path, content, headers, method=method)
        with urllib.request.urlopen(request, timeout=30) as answer:
            return json.loads(answer.read() or b"{}")

    def trigger(self, dag):
        self.call("POST", f"/api/v2/dags/{dag}/dagRuns", {"logical_date": None})

    def wait_for_dag(self, dag, within_seconds):
        deadline = time.monotonic() + within_seconds
        while True:
            try:
                return self.call("GET", f"/api/v2/dags/{dag}")
            except urllib.error.HTTPError:
                if time.monotonic() > deadline:
                    raise SystemExit(f"DAG {dag} did not appear within {within_seconds} s") from None
                time.sleep(0.5)


def measure(api):
    for dag in ("warm_up", "chain", "fan", "single", "tick"):
        api.wait_for_dag(dag, 90)
    api.trigger("warm_up")
    stamps.wait_for("warm-up", 1, 60)
    api.trigger("chain")
    figures = stamps.chain_figures(stamps.wait_for("chain", stamps.CHAIN, 150))
    api.trigger("fan")
    figures["fan_s"] = stamps.wall(stamps.wait_for("fan", stamps.WIDTH + 2, 120))
    for _ in range(SINGLES):
        api.trigger("single")
    figures["runs_per_s"] = SINGLES / stamps.wall(stamps.wait_for("single", SINGLES, 120))
    api.call("PATCH", "/api/v2/dags/tick", {"is_paused": False})
    return figures | stamps.late_figures(TICKS, 60)


def main():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    env = environment(port, sys.argv[1:] == ["tuned"])
    dags = Path(env["AIRFLOW__CORE__DAGS_FOLDER"])
    dags.mkdir(parents=True)
    for file in ("airflow_dags.py", "stamps.py"):
        shutil.copy(HERE / file, dags / file)
    airflow = [sys.executable, "-m", "airflow"]
    subprocess.run([*airflow, "db", "migrate"], env=env, check=True)
    running = [subprocess.Popen([*airflow, part], env=env) for part in ("api-server", "scheduler", "dag-processor")]
    try:
        api = Api(port)
        api.wait(120)
        stamps.tell(version=version("apache-airflow"), **measure(api))
    finally:
        for process in running:
            process.terminate()
        for process in running:
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()


if __name__ == "__main__":
    main()
