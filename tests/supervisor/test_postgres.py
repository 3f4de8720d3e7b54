"""The embedded PostgreSQL: real servers, really killed."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import stat
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path

import psutil  # type: ignore[import-untyped]
import psycopg
import pytest

from evertick.domain.errors import Conflict, PostgresUnavailable
from evertick.supervisor.postgres import EmbeddedPostgres, backoff_seconds, initialise, programs
from evertick.supervisor.postgres_home import PostgresDirectory, holder_of
from tests.databases import run
from tests.waiting import eventually, eventually_sync

ROOT = Path(__file__).parents[2]
NOBODY = 65534
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")

# An ordinary user who may also read everywhere, because the interpreter may lie in somebody's private directory.
AS_NOBODY = tuple(
    f"setpriv --reuid {NOBODY} --regid {NOBODY} --clear-groups --inh-caps -all,+dac_read_search"
    " --ambient-caps -all,+dac_read_search --bounding-set -all,+dac_read_search".split()
)
WITHOUT_NAMESPACES = (sys.executable, str(Path(__file__).with_name("without_namespaces.py")))


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data directory that was made once; copying it is ten times as quick as `initdb`."""
    data = tmp_path_factory.mktemp("pristine") / "postgres"
    run(initialise(data, programs()))
    return data


@pytest.fixture
def home(pristine: Path, tmp_path: Path) -> Path:
    directory = tmp_path / "home"
    directory.mkdir(mode=0o700)
    (directory / "lock").touch()
    shutil.copytree(pristine, directory / "postgres", copy_function=shutil.copy)
    return directory


@asynccontextmanager
async def started(home: Path) -> AsyncIterator[EmbeddedPostgres]:
    server = EmbeddedPostgres(home)
    await server.start()
    try:
        yield server
    finally:
        await server.stop()


@asynccontextmanager
async def supervised(home: Path) -> AsyncIterator[EmbeddedPostgres]:
    async with started(home) as server, asyncio.TaskGroup() as group:
        supervision = group.create_task(server.supervise())
        yield server
        supervision.cancel()


@contextmanager
def owned_by_another_process(
    home: Path, *, through: tuple[str, ...] = ()
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A real process that owns the server of `home`, and the server's URL."""
    with subprocess.Popen(
        [*through, sys.executable, "-m", "tests.supervisor.postgres_owner", str(home)],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as owner:
        try:
            assert owner.stdout is not None
            yield owner, owner.stdout.readline().strip()
        finally:
            owner.kill()


def end(owner: subprocess.Popen[str]) -> None:
    """Ask the owner to stop, and see that it does so cleanly."""
    assert owner.stdin is not None
    owner.stdin.close()
    assert owner.wait(timeout=60) == 0


def execute(url: str, statement: str) -> object:
    with psycopg.connect(url, autocommit=True) as conn:
        cursor = conn.execute(statement)
        row = cursor.fetchone() if cursor.description else None
        return row[0] if row else None


def answers(url: str) -> bool:
    try:
        return execute(url, "select 1") == 1
    except psycopg.Error:
        return False


def servers_in(home: Path) -> list[int]:
    """The processes that work in this home's data directory."""
    data = str((home / "postgres").resolve())
    found = []
    for process in psutil.process_iter():
        try:
            if process.status() != psutil.STATUS_ZOMBIE and process.cwd() == data:
                found.append(process.pid)
        except psutil.Error:
            continue
    return found


def users_of(pids: list[int]) -> set[int]:
    """Whom they run as. A server's short-lived helpers may be gone by the time they are asked."""
    users = set()
    for pid in pids:
        with suppress(psutil.NoSuchProcess):
            users.add(psutil.Process(pid).uids().effective)
    return users


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


async def test_the_first_start_makes_a_private_home_in_a_path_with_spaces(tmp_path: Path) -> None:
    home = tmp_path / "a b" / "50 % & ü"
    async with started(home) as server:
        assert execute(server.url, "select current_database()") == "evertick"
        assert {mode(path) for path in (home, home / "postgres", PostgresDirectory(home).sockets, home / "logs")} == {
            0o700
        }
        assert mode(home / "lock") == mode(home / "logs" / "postgres.log") == 0o600
        assert execute(server.url, "show listen_addresses") == ""
        assert execute(server.url, "show fsync") == execute(server.url, "show synchronous_commit") == "on"
        assert execute(server.url, "show full_page_writes") == "on"
    assert servers_in(home) == []
    assert {path.name for path in home.iterdir()} <= {"lock", "logs", "postgres", "run"}


async def test_what_was_committed_is_there_after_a_stop_and_a_start(home: Path) -> None:
    async with started(home) as server:
        execute(server.url, "create table kept as select 42 as answer")
    async with started(home) as server:
        assert execute(server.url, "select answer from kept") == 42


@needs_root
def test_an_ordinary_user_can_own_one(tmp_path: Path) -> None:
    os.chown(tmp_path, NOBODY, NOBODY)
    home = tmp_path / "home"
    with owned_by_another_process(home, through=AS_NOBODY) as (owner, url):
        assert execute(url, "select 1") == 1
        assert users_of([owner.pid, *servers_in(home)]) == {NOBODY}
        assert {path.stat().st_uid for path in (home, home / "postgres")} == {NOBODY}
        end(owner)
    assert servers_in(home) == []


@needs_root
async def test_root_without_user_namespaces_falls_back_to_another_user_and_back_again(home: Path) -> None:
    with owned_by_another_process(home, through=WITHOUT_NAMESPACES) as (owner, url):
        execute(url, "create table kept as select 42 as answer")
        assert users_of(servers_in(home)) == {NOBODY}
        assert mode(home) == 0o700
        end(owner)
    async with started(home) as server:
        assert execute(server.url, "select answer from kept") == 42


async def test_a_killed_server_is_restarted_with_every_committed_row(home: Path) -> None:
    async with supervised(home) as server:
        execute(server.url, "create table kept as select generate_series(1, 1000) as answer")
        killed = server.pid
        assert killed is not None
        os.kill(killed, signal.SIGKILL)
        await eventually(lambda: server.pid not in (None, killed) and answers(server.url), within_seconds=60)
        assert execute(server.url, "select count(*) from kept") == 1000


async def test_a_backend_that_outlives_its_killed_server_does_not_stop_the_restart(home: Path) -> None:
    async with supervised(home) as server:
        busy = await psycopg.AsyncConnection.connect(server.url, autocommit=True)
        # Not for ever: if this test is killed, the backend must not stay behind on somebody's machine.
        loop = "declare t timestamptz := clock_timestamp() + interval '1 min'; begin while clock_timestamp() < t loop end loop; end"
        looping = asyncio.ensure_future(busy.execute(f"do $$ {loop} $$"))
        backend = psutil.Process(busy.info.backend_pid)
        await eventually(lambda: "DO" in " ".join(backend.cmdline()))
        killed = server.pid
        assert killed is not None
        os.kill(killed, signal.SIGKILL)
        await eventually(lambda: server.pid not in (None, killed) and answers(server.url), within_seconds=60)
        assert backend.pid not in servers_in(home)
        with pytest.raises(psycopg.OperationalError):
            await looping


async def test_a_stale_pid_file_that_names_a_living_stranger_does_not_stop_the_start(home: Path) -> None:
    lock_file = home / "postgres" / "postmaster.pid"
    async with started(home) as server:
        execute(server.url, "create table kept as select 42 as answer")
        _, *rest = lock_file.read_text().splitlines()
    with stranger() as pid:
        lock_file.write_text("\n".join([str(pid), *rest, ""]))
        async with started(home) as server:
            assert execute(server.url, "select answer from kept") == 42
        assert psutil.Process(pid).name() == "cat"


@contextmanager
def stranger() -> Iterator[int]:
    """A living process that has nothing to do with us."""
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as process:
        yield process.pid


async def test_after_the_owner_is_killed_nothing_is_left_and_the_next_start_has_every_row(home: Path) -> None:
    with owned_by_another_process(home) as (owner, url):
        execute(url, "create table kept as select 42 as answer")
        earlier = set(servers_in(home))
        owner.kill()
        # Not waiting for the old server to go: coping with that is the new one's part.
        async with started(home) as server:
            assert execute(server.url, "select answer from kept") == 42
            assert earlier.isdisjoint(servers_in(home))
    assert servers_in(home) == []


def test_a_killed_owner_takes_its_server_along(home: Path) -> None:
    with owned_by_another_process(home) as (owner, _):
        assert servers_in(home)
        owner.kill()
        eventually_sync(lambda: not servers_in(home))


def kill_owner_during_initdb(home: Path) -> None:
    """On a machine that stands still an owner may be done with it before anybody looks: then once more."""
    while not was_killed_during_initdb(home):
        eventually_sync(lambda: not servers_in(home))
        shutil.rmtree(home)
    assert not (home / "postgres").exists()


def was_killed_during_initdb(home: Path) -> bool:
    command = [sys.executable, "-m", "tests.supervisor.postgres_owner", str(home)]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE) as owner:
        try:
            eventually_sync(lambda: (home / "postgres").exists() or is_frozen_in_initdb(owner, home))
            if (home / "postgres").exists():
                return False
            eventually_sync(lambda: list(home.glob("postgres.new-*/base/1")))
        finally:
            owner.kill()
    return True


def is_frozen_in_initdb(owner: subprocess.Popen[bytes], home: Path) -> bool:
    """Frozen while its initdb goes on, so that it cannot be done meanwhile; what has not begun yet, goes on."""
    owner.send_signal(signal.SIGSTOP)
    is_at_work = bool(list(home.glob("postgres.new-*"))) and bool(psutil.Process(owner.pid).children())
    if not is_at_work:
        owner.send_signal(signal.SIGCONT)
    return is_at_work


async def test_an_owner_killed_while_it_makes_the_data_directory_leaves_no_half_one(tmp_path: Path) -> None:
    home = tmp_path / "home"
    kill_owner_during_initdb(home)
    async with started(home) as server:
        assert execute(server.url, "select 1") == 1
        assert list(home.glob("postgres.new-*")) == []


async def test_a_second_owner_of_a_home_is_rejected_with_the_first_owner(home: Path) -> None:
    assert holder_of(home) is None
    with owned_by_another_process(home) as (owner, url):
        with pytest.raises(Conflict) as refusal:
            await EmbeddedPostgres(home).start()
        message = str(refusal.value)
        assert f"process {owner.pid} since 20" in message
        assert url in message
        holder = holder_of(home)
        assert holder is not None
        assert (holder.pid, holder.url) == (owner.pid, url)
        assert answers(url)
    assert holder_of(home) is None


async def test_a_home_with_a_long_path_keeps_its_socket_in_a_short_private_place(
    pristine: Path, tmp_path: Path
) -> None:
    home = tmp_path / ("a" * 60) / ("b" * 60)
    home.mkdir(parents=True)
    shutil.copytree(pristine, home / "postgres", copy_function=shutil.copy)
    async with started(home) as server:
        assert execute(server.url, "select 1") == 1
        assert mode(PostgresDirectory(home).sockets) == 0o700
        assert PostgresDirectory(home).sockets.parent == Path("/tmp")
    assert not PostgresDirectory(home).sockets.exists()


@needs_root
async def test_a_socket_place_that_belongs_to_somebody_else_is_refused(tmp_path: Path) -> None:
    home = tmp_path / ("c" * 110)
    sockets = PostgresDirectory(home).sockets
    sockets.mkdir()
    try:
        os.chown(sockets, NOBODY, NOBODY)
        with pytest.raises(PostgresUnavailable, match="belongs to another user"):
            await EmbeddedPostgres(home).start()
    finally:
        sockets.rmdir()


async def test_a_directory_with_other_peoples_files_keeps_its_mode(pristine: Path, tmp_path: Path) -> None:
    home = tmp_path / "shared"
    home.mkdir()
    home.chmod(0o755)
    (home / "theirs.txt").touch()
    shutil.copytree(pristine, home / "postgres", copy_function=shutil.copy)
    async with started(home):
        assert mode(home) == 0o755
        assert {mode(path) for path in (home / "postgres", PostgresDirectory(home).sockets, home / "logs")} == {0o700}


def test_a_server_that_fails_for_days_is_started_again_with_the_same_pause() -> None:
    assert [backoff_seconds(failures) for failures in (0, 1, 2)] == [0.0, 0.2, 0.4]
    # A day of them, and more than a float can double.
    assert {backoff_seconds(failures) for failures in range(6, 20_000)} == {5.0}


async def test_a_server_that_cannot_start_says_why_and_gives_the_home_back(home: Path) -> None:
    with pytest.raises(PostgresUnavailable, match=r'(?s)exit code 1.*postgres\.log.*"shared_buffers": "plenty"'):
        await EmbeddedPostgres(home, settings={"shared_buffers": "plenty"}).start()
    assert holder_of(home) is None
    async with started(home) as server:
        assert answers(server.url)


async def test_the_log_cannot_grow_without_bound(home: Path) -> None:
    log = home / "logs" / "postgres.log"
    log.parent.mkdir()
    log.write_bytes(b"x" * 9_000_000)
    async with started(home):
        assert log.stat().st_size < 10_000
        assert (log.parent / "postgres.log.1").stat().st_size == 9_000_000


async def test_stopping_twice_or_before_the_start_is_harmless(home: Path) -> None:
    server = EmbeddedPostgres(home)
    await server.stop()
    await server.start()
    await server.stop()
    await server.stop()
    assert servers_in(home) == []
