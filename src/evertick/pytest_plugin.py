"""Fixtures and checks for the tests of DAGs, loaded by pytest itself: docs/howto/testing.md.

pytest imports this module in every project, also in those without DAGs: it imports nothing of Evertick before it is used.
"""

from __future__ import annotations

import json
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

import pytest

if TYPE_CHECKING:
    from evertick.sdk.dag import DagDefinition
    from evertick.sdk.local_run import LocalRun, LocalRunOptions
    from evertick.sdk.runtime import CompiledDag
    from evertick.testing import Moment, Simulation

_FOLDERS = "evertick_dags"
_START_SECONDS, _STOP_SECONDS = 60.0, 30.0


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addini(_FOLDERS, "Folders of DAG files: each file gets a test that it loads and is valid.", type="paths")


def pytest_configure(config: pytest.Config) -> None:
    """A folder that pytest does not visit would be a check that never fails."""
    if config.args_source is config.ArgsSource.TESTPATHS:
        visited = [config.invocation_params.dir / each for each in config.args]
        for folder in config.getini(_FOLDERS):
            if not any(folder.is_relative_to(each) for each in visited):
                raise pytest.UsageError(f"evertick_dags names {folder}, which is not in testpaths: add it there.")


def pytest_collect_file(file_path: Path, parent: pytest.Collector) -> pytest.Collector | None:
    for folder in parent.config.getini(_FOLDERS):
        if file_path.suffix == ".py" and file_path.is_relative_to(folder):
            from evertick.publisher.publisher import find_dag_files

            if str(file_path.relative_to(folder)) in find_dag_files(folder):
                file: _DagFile = _DagFile.from_parent(parent, path=file_path)
                file.folder = folder
                return file
    return None


class _DagFile(pytest.File):
    folder: Path

    def collect(self) -> Iterator[pytest.Item]:
        yield _DagCheck.from_parent(self, name="loads")


class _DagCheck(pytest.Item):
    """The file loads as the publisher would load it, in a process of its own, and its DAGs are valid."""

    def runtest(self) -> None:
        import asyncio

        from evertick.bundles.loader import load_file
        from evertick.config import user_environment

        folder = getattr(self.parent, "folder", self.path.parent)
        file = str(self.path.relative_to(folder))
        loaded = asyncio.run(load_file(folder, file, environment=user_environment()))
        if loaded.error is not None:
            pytest.fail("\n".join(filter(None, (str(loaded.error), loaded.error.traceback))), pytrace=False)

    def reportinfo(self) -> tuple[Path, None, str]:
        return self.path, None, f"{self.path.name} loads"


class RunDag:
    """Run a DAG in this process. An exception that fails a task is raised: `raise_errors=False` returns the failed run."""

    def __call__(self, dag: DagDefinition[Any] | CompiledDag, **options: Unpack[LocalRunOptions]) -> LocalRun:
        options.setdefault("raise_errors", True)
        return dag.test(**options)


@pytest.fixture
def run_dag() -> RunDag:
    """`run_dag(etl, params={"rows": 3}).results["load"]`: run a DAG in this process, without a server."""
    return RunDag()


class SimulateSchedule:
    """`evertick.testing.simulate`."""

    def __call__(self, subject: object, start: Moment, end: Moment, **options: Any) -> Simulation:
        from evertick.testing import simulate

        return simulate(subject, start, end, **options)


@pytest.fixture
def simulate_schedule() -> SimulateSchedule:
    """`simulate_schedule(etl, "2030-01-01", "2030-01-08").local_times`: the runs that a schedule would create."""
    return SimulateSchedule()


class EvertickServer:
    """A real Evertick with its own database: scheduler, runner, publisher and API."""

    def __init__(self, url: str, environment: dict[str, str]) -> None:
        self.url = url
        self._environment = environment

    def command(self, *arguments: object) -> str:
        """What `evertick ARGUMENTS` prints. A failure is an AssertionError with its message."""
        done = self._run(*arguments)
        if done.returncode:
            raise AssertionError(f"`evertick {' '.join(map(str, arguments))}` failed: {done.stderr or done.stdout}")
        return done.stdout

    def run(self, dag: str, params: Mapping[str, object] | None = None, *, timeout: float = 120.0) -> dict[str, Any]:
        """Start a run as soon as the DAG is published, and wait for its end. Returns the run with its `tasks`."""
        deadline = time.monotonic() + timeout
        while (shown := self._run("dags", "show", dag, "--json")).returncode and time.monotonic() < deadline:
            time.sleep(0.2)
        if shown.returncode:
            listed = self._run("dags", "list").stdout
            raise AssertionError(f"DAG {dag!r} was not published within {timeout:g} s: {shown.stderr}\n{listed}")
        options = ["--params", json.dumps(params or {}), "--wait", "--timeout", str(timeout), "--json"]
        done = self._run("dags", "trigger", dag, *options)
        if not done.stdout:
            raise AssertionError(f"the run of {dag!r} has not ended: {done.stderr}")
        document = json.loads(done.stdout)
        return {**document["run"], "tasks": document["tasks"]}

    def _run(self, *arguments: object) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "evertick", *map(str, arguments)]
        return subprocess.run(command, env=self._environment, capture_output=True, text=True, check=False)


@pytest.fixture(scope="session")
def evertick_server(pytestconfig: pytest.Config) -> Iterator[EvertickServer]:
    """A server for this test session, with the DAGs of the first folder in `evertick_dags` (default: `dags`). It uses none of
    your settings, and so never your database."""
    from evertick.config import user_environment

    folders = pytestconfig.getini(_FOLDERS) or [pytestconfig.rootpath / "dags"]
    # Short: the database's socket is in it, and its path has at most 107 characters.
    home = Path(tempfile.mkdtemp(prefix="evertick-"))
    port = _free_port()
    environment = user_environment() | {"EVERTICK_CONFIG": "none", "EVERTICK_HOME": str(home)}
    environment |= {"EVERTICK_DAGS_FOLDER": str(folders[0]), "EVERTICK_API_PORT": str(port), "EVERTICK_HEALTH": "off"}
    output = home / "output.log"
    with output.open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "evertick", "up", "--no-examples"], env=environment, stdout=log, stderr=log
        )
    try:
        _wait_for(port, process, output)
        yield EvertickServer(f"http://127.0.0.1:{port}", environment)
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        shutil.rmtree(home, ignore_errors=True)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _wait_for(port: int, process: subprocess.Popen[bytes], output: Path) -> None:
    deadline = time.monotonic() + _START_SECONDS
    while process.poll() is None and time.monotonic() < deadline:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.05)
    pytest.fail(f"`evertick up` did not start:\n{output.read_text()}", pytrace=False)
