"""A9, one contract on both set-ups: `evertick up` on its embedded PostgreSQL, and separate processes, two of each, on a
PostgreSQL of the operator's. The same tests, the same answers; only settings and the number of processes differ.

The fleet is on the oldest PostgreSQL that this machine has of those that Evertick works with.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import psycopg
import pytest

from evertick.db.connect import Purpose, connect
from evertick.db.function_sets import own_set
from evertick.domain.attempt import TaskKey
from evertick.engine.finish_and_claim import finish_and_claim
from evertick.engine.runners import extend
from evertick.processes.tree import find_by_token, kill_tree
from evertick.supervisor.postgres_home import holder_of
from tests.databases import Cluster
from tests.engine import invariants
from tests.external_postgres import external_cluster, system_programs
from tests.system.processes import is_running
from tests.system.work import LONG, Effect, effects, executed_twice, let_go
from tests.waiting import eventually, eventually_sync

pytestmark = pytest.mark.requirement("A9")

PACE_SECONDS = 0.3
WORK = (
    LONG
    + f"""
@dag(schedule="@every {PACE_SECONDS}s")
def ticking():
    quick()
"""
)
SETTINGS = {"EVERTICK_HEARTBEAT_SECONDS": "1", "EVERTICK_LOST_AFTER_SECONDS": "5", "EVERTICK_HEALTH_PORT": "0"}
PATIENCE = 90.0


class SetUp:
    """Processes of one installation, started as people start them. `url` is where its database is."""

    def __init__(self, folder: Path, **environment: str) -> None:
        self.folder, self.token, self.url = folder, uuid.uuid4().hex, environment.get("EVERTICK_DATABASE_URL", "")
        self.effects_file = folder / "effects"
        (folder / "dags").mkdir(parents=True)
        (folder / "dags" / "work.py").write_text(WORK)
        self.effects_file.touch()
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("EVERTICK_", "PYTHON"))}
        ours = {"TEST_TOKEN": self.token, "EFFECTS": str(self.effects_file), "RUNNER_NAME": "any"}
        self.environment = {**kept, **ours, **SETTINGS, **environment}
        self._started: list[subprocess.Popen[bytes]] = []
        self._conn: psycopg.Connection | None = None
        self._output = (folder / "output.txt").open("wb")

    def start(self, command: str) -> None:
        self._started.append(
            subprocess.Popen(
                [sys.executable, "-m", "evertick.cli.main", command],
                cwd=self.folder,
                env=self.environment,
                stdout=self._output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        )

    def evertick(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "evertick.cli.main", *arguments],
            cwd=self.folder,
            env=self.environment | environment,
            capture_output=True,
            text=True,
            check=False,
        )

    def pids(self, kind: str) -> list[int]:
        """The processes of that service, oldest first."""
        wanted = (f"evertick.cli.main {kind} ", f"evertick {kind} ")
        found = []
        for pid in find_by_token(self.token):
            try:
                line = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode() + " "
            except OSError:
                continue
            found += [pid] if any(each in line for each in wanted) and is_running(pid) else []
        return sorted(found)

    def kill(self, pid: int, kind: str) -> None:
        """kill -9, and start another: `up` does that by itself, here an init system would."""
        os.kill(pid, signal.SIGKILL)
        if self._started[0].pid != pid and len(self._started) > 1:
            self.start(kind)

    def rows(self, query: str, *params: object) -> list[tuple[object, ...]]:
        if self._conn is None:
            path = f"-c search_path={own_set().search_path}"
            self._conn = psycopg.connect(self.url, options=path, autocommit=True)
        return self._conn.execute(query, params).fetchall()  # type: ignore[arg-type]

    def trigger(self, dag: str) -> int:
        done = self.evertick("dags", "trigger", dag, "--key", (key := uuid.uuid4().hex))
        assert done.returncode == 0, done.stderr
        ((run_id,),) = self.rows("select run_id from run where key = %s", key)
        assert isinstance(run_id, int)
        return run_id

    def begun(self, run_id: int, epoch: int = 1) -> Effect:
        def found() -> Effect | None:
            mine = [e for e in effects(self.effects_file) if (e.run_id, e.epoch, e.what) == (run_id, epoch, "begin")]
            return mine[0] if mine else None

        effect: Effect = eventually_sync(found, within_seconds=PATIENCE)
        return effect

    def ended(self, run_id: int) -> str:
        state = "select state::text from run_status where run_id = %s and finished_at is not null"
        ((found,),) = eventually_sync(lambda: self.rows(state, run_id), within_seconds=PATIENCE)
        return str(found)

    def end(self) -> None:
        if self._conn is not None:
            self._conn.close()
        for process in self._started:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
        for process in self._started:
            try:
                process.wait(timeout=30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for pid in find_by_token(self.token):
            kill_tree(pid)
        self._output.close()


@pytest.fixture(scope="module")
def oldest(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """The system's PostgreSQL where there is one that is supported, else the one that the tests bring."""
    if (programs := system_programs()) is None:
        yield request.getfixturevalue("external")
        return
    with external_cluster(tmp_path_factory.mktemp("system") / "postgres", programs) as cluster:
        yield cluster


@pytest.fixture(scope="module", params=["up", "fleet"])
def set_up(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SetUp]:
    folder = tmp_path_factory.mktemp(request.param) / "place"
    with ExitStack() as stack:
        if request.param == "up":
            made = SetUp(folder)
            stack.callback(made.end)
            made.start("up")
            made.url = eventually_sync(lambda: _embedded(folder), within_seconds=PATIENCE)
        else:
            cluster: Cluster = request.getfixturevalue("oldest")
            name = cluster.create()
            stack.callback(cluster.drop, name)
            made = SetUp(folder, EVERTICK_DATABASE_URL=cluster.database_url(name))
            stack.callback(made.end)
            migrated = made.evertick("db", "migrate")
            assert migrated.returncode == 0, migrated.stderr
            for kind in ("publisher", "scheduler", "scheduler", "runner", "runner"):
                made.start(kind)
        eventually_sync(lambda: _fires(made) > 0, within_seconds=PATIENCE)
        yield made


def _embedded(folder: Path) -> str | None:
    holder = holder_of(folder / ".evertick")
    try:
        if holder is None:
            return None
        with psycopg.connect(holder.url) as conn:
            conn.execute("select 1 from evertick.runner")
    except psycopg.Error:
        return None
    return holder.url


def _fires(set_up: SetUp) -> int:
    """How many runs a schedule has made that have ended well."""
    found = set_up.rows(
        "select count(*)::int from run r join run_status s using (run_id) where r.fire_at is not null and s.state = 'success'"
    )
    assert isinstance(found[0][0], int)
    return found[0][0]


def _goes_on(set_up: SetUp) -> None:
    """From now on, two more fires are made and executed."""
    enough = _fires(set_up) + 2
    eventually_sync(lambda: _fires(set_up) >= enough, within_seconds=PATIENCE)


def test_a_file_in_the_folder_becomes_a_dag_whose_schedule_fires_once_per_instant(set_up: SetUp) -> None:
    _goes_on(set_up)
    twice = "select fire_at from run where fire_at is not null group by schedule_id, fire_at having count(*) > 1"
    assert set_up.rows(twice) == []
    # On a busy machine it may fall behind: then it makes up for the latest instant, and the others are on record.
    left_out = """
        select (extract(epoch from b.last - b.first) / %s)::int + 1 - b.runs - coalesce((
               select sum(k.count)::int from skip_record k where k.first_at > b.first and k.last_at < b.last), 0)
          from (select min(fire_at) as first, max(fire_at) as last, count(*)::int as runs from run where fire_at is not null) b"""
    assert set_up.rows(left_out, PACE_SECONDS) == [(0,)]


def test_a_retry_and_a_successor_take_the_same_way(set_up: SetUp) -> None:
    again, many = set_up.trigger("again"), set_up.trigger("many")
    assert (set_up.ended(again), set_up.ended(many)) == ("success", "success")
    history = "select epoch, attempt, outcome from all_attempts where run_id = %s order by epoch"
    assert set_up.rows(history, again) == [(1, 1, "failed"), (2, 2, "success")]
    assert set_up.rows("select count(*)::int from all_attempts where run_id = %s", many) == [(81,)]


def test_what_a_killed_runner_ran_runs_again_under_a_higher_epoch_and_costs_no_retry(set_up: SetUp) -> None:
    run_id = set_up.trigger("careful")
    first = set_up.begun(run_id)
    ((pid,),) = set_up.rows("select r.pid from lease l join runner r using (session) where l.run_id = %s", run_id)
    assert isinstance(pid, int)
    set_up.kill(pid, "runner")
    set_up.begun(run_id, epoch=2)
    assert not is_running(first.pid)
    let_go(set_up.effects_file)
    assert set_up.ended(run_id) == "success"
    lost = "select epoch, attempt, outcome, reason like 'agent_lost: runner %% died' from all_attempts"
    assert set_up.rows(f"{lost} where run_id = %s and idx = 0 order by epoch", run_id) == [
        (1, 1, "lost", True),
        (2, 1, "success", None),
    ]
    Path(f"{set_up.effects_file}-go").unlink()


def test_firing_goes_on_when_its_leader_is_killed(set_up: SetUp) -> None:
    ((owner, epoch),) = set_up.rows("select leader, epoch from shard")
    set_up.kill(int(str(owner).rpartition("-")[2]), "scheduler")
    eventually_sync(lambda: set_up.rows("select 1 from shard where epoch > %s", epoch), within_seconds=PATIENCE)
    _goes_on(set_up)


async def test_a_stale_report_changes_nothing(set_up: SetUp) -> None:
    run_id = set_up.trigger("holding")
    set_up.begun(run_id)
    ((session, epoch),) = set_up.rows("select session, epoch from lease where run_id = %s", run_id)
    assert isinstance(session, int) and isinstance(epoch, int)
    before = set_up.rows("select * from task where run_id = %s order by idx", run_id)
    key = TaskKey(run_id, 0, -1)
    async with await connect(set_up.url, purpose=Purpose.SCHEDULER) as conn:
        for who, old in ((session, epoch - 1), (session + 1, epoch)):
            report = f'{{"r": {run_id}, "i": 0, "m": -1, "e": {old}, "kind": "success", "result": "stale"}}'
            done = await finish_and_claim(conn, session=who, reports=[report], queues=[], free=0, infra_retries=3)
            assert done.refused == [(key, old)]
        assert (await extend(conn, session=session + 1, held=[(key, epoch)])).is_gone
    assert set_up.rows("select * from task where run_id = %s order by idx", run_id) == before
    let_go(set_up.effects_file)
    assert set_up.ended(run_id) == "success"
    Path(f"{set_up.effects_file}-go").unlink()


def test_a_canceled_run_ends_when_its_body_is_dead(set_up: SetUp) -> None:
    run_id = set_up.trigger("holding")
    body = set_up.begun(run_id)
    assert set_up.evertick("runs", "cancel", str(run_id)).returncode == 0
    assert set_up.ended(run_id) == "canceled"
    assert not is_running(body.pid)


def test_settings_that_are_not_safe_are_refused_in_the_same_words(tmp_path: Path) -> None:
    place = SetUp(tmp_path / "place", EVERTICK_LOST_AFTER_SECONDS="2")
    said = {command: place.evertick(command) for command in ("up", "scheduler", "runner")}
    place.end()
    assert {done.returncode for done in said.values()} == {2}
    (message,) = {done.stderr for done in said.values()}
    assert "EVERTICK_LOST_AFTER_SECONDS=2.0" in message and "EVERTICK_HEARTBEAT_SECONDS=1.0" in message


async def test_the_sql_is_the_same_and_so_is_what_is_always_true(set_up: SetUp, conn: psycopg.AsyncConnection) -> None:
    body = "select proname, md5(prosrc) from pg_proc where pronamespace = current_schema()::regnamespace order by 1, 2"
    cursor = await conn.execute(body)  # type: ignore[arg-type]
    assert set_up.rows(body) == await cursor.fetchall()
    async with await connect(set_up.url, purpose=Purpose.SCHEDULER) as its_own:
        await invariants.install(its_own)
        _goes_on(set_up)
        # Between a claim and its next look something may be under way; what is wrong stays wrong.
        await eventually(lambda: _is_consistent(its_own), PATIENCE)
    assert executed_twice(effects(set_up.effects_file)) == []


async def _is_consistent(conn: psycopg.AsyncConnection) -> bool:
    return await invariants.violations(conn) == []
