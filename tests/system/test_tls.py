"""A PostgreSQL on another machine: TLS both ways, a role and a certificate for each service."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import urlencode

import pytest
from psycopg import conninfo

from evertick.db import roles
from evertick.db.connect import Purpose, connect
from evertick.doctor.database import check_route, route_of
from evertick.domain.errors import PostgresUnavailable
from tests.certificates import Authority
from tests.databases import Cluster
from tests.external_postgres import external_cluster, system_programs
from tests.system.processes import Installation
from tests.system.work import Published, publish_work, start_run
from tests.waiting import eventually

pytestmark = [pytest.mark.skipif(system_programs() is None, reason="needs a PostgreSQL that was built with TLS")]

# Whoever owns the schema comes with a password; everybody else over TLS, with a certificate that has the role's name in it.
DOORS = """
host    all evertick 127.0.0.1/32 scram-sha-256
hostssl all all      127.0.0.1/32 cert
"""
LOGINS = {"berlin": roles.RUNNER, "planner": roles.SCHEDULER}

Url = Callable[..., str]


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("certificates"), "authority")


@pytest.fixture(scope="module")
def far(tmp_path_factory: pytest.TempPathFactory, authority: Authority) -> Iterator[Cluster]:
    """A server that speaks TLS."""
    folder = tmp_path_factory.mktemp("tls") / "postgres"
    files = [
        *authority.issue("localhost", host="localhost", file="server"),
        *authority.issue("localhost", host="localhost", days=-1, file="outdated"),
        authority.certificate,
    ]
    contents = {"pg_hba.conf": DOORS.encode(), **{path.name: path.read_bytes() for path in files}}
    authorities = authority.certificate.name
    with external_cluster(folder, system_programs(), files=contents, ssl="on", ssl_ca_file=authorities) as cluster:
        yield cluster


@pytest.fixture
def far_database(far: Cluster) -> Iterator[str]:
    name = far.create(far.template())
    with far.admin() as admin:
        for login in LOGINS:
            admin.execute(f"do $$ begin create role {login} login; exception when duplicate_object then null; end $$")  # type: ignore[call-overload]
    yield name
    far.drop(name)


@pytest.fixture
def url(far: Cluster, far_database: str, authority: Authority) -> Url:
    """The address as an administrator writes it down, for a login and with changes."""
    port = conninfo.conninfo_to_dict(far.url)["port"]

    def make(login: str, *, host: str = "localhost", **changes: object) -> str:
        certificate, key = authority.issue(login)
        options = {
            "sslmode": "verify-full",
            "sslrootcert": authority.certificate,
            "sslcert": certificate,
            "sslkey": key,
        }
        chosen = {name: str(value) for name, value in {**options, **changes}.items() if value is not None}
        return f"postgresql://{login}@{host}:{port}/{far_database}?{urlencode({'hostaddr': '127.0.0.1', **chosen})}"

    return make


async def why_not(url: str) -> str:
    with pytest.raises(PostgresUnavailable) as refused:
        await connect(url, purpose=Purpose.READ)
    return str(refused.value)


async def test_a_runner_elsewhere_works_over_tls_with_a_certificate_and_a_role_of_its_own(
    far: Cluster, far_database: str, url: Url, tmp_path: Path, long: Published
) -> None:
    async with Installation(far.database_url(far_database), tmp_path / "there") as there:
        await roles.apply(there.conn)
        for login, role in LOGINS.items():
            await there.conn.execute(f"grant {role} to {login}")  # type: ignore[call-overload]
        await publish_work(there.conn, long)
        await there.start("scheduler", database_url=url("planner"))
        await there.start("runner", database_url=url("berlin"))
        assert await there.ended(await start_run(there.conn, "single"), 60) == "success"
        sessions = await there.rows(
            "select a.usename, bool_and(s.ssl), min(s.client_dn) from pg_stat_activity a join pg_stat_ssl s using (pid)"
            " where a.usename <> 'evertick' and a.backend_type = 'client backend' group by 1 order by 1"
        )
        assert sessions == [("berlin", True, "/CN=berlin"), ("planner", True, "/CN=planner")]


async def test_what_is_wrong_with_a_certificate_is_said_with_what_to_do(
    far: Cluster, url: Url, authority: Authority, tmp_path: Path
) -> None:
    async with await connect(url("berlin"), purpose=Purpose.READ) as conn:
        assert list(check_route(route_of(conn))) == []
    stranger = Authority(tmp_path, "stranger")
    assert "is not signed by a CA in sslrootcert of EVERTICK_DATABASE_URL" in await why_not(
        url("berlin", sslrootcert=stranger.certificate)
    )
    assert "Correct sslrootcert=" in await why_not(url("berlin", sslrootcert=tmp_path / "none"))
    assert "a name that is in the server's certificate" in await why_not(url("berlin", host="127.0.0.1", hostaddr=None))
    assert "add ?sslmode=verify-full" in await why_not(
        url("berlin", sslmode="disable", sslrootcert=None, sslcert=None, sslkey=None)
    )
    assert "Add sslcert= and sslkey=" in await why_not(
        url("berlin", sslcert=tmp_path / "none", sslkey=tmp_path / "none")
    )
    old, old_key = authority.issue("berlin", days=-1, file="old")
    assert "renew the file that sslcert= names" in await why_not(url("berlin", sslcert=old, sslkey=old_key))
    theirs, their_key = stranger.issue("berlin")
    assert "The server does not trust the CA" in await why_not(url("berlin", sslcert=theirs, sslkey=their_key))
    other, other_key = authority.issue("somebody")
    assert "must be that of the role" in await why_not(url("berlin", sslcert=other, sslkey=other_key))


async def test_a_server_whose_certificate_has_expired_is_not_spoken_to(far: Cluster, url: Url) -> None:
    _use(far, ssl_cert_file="outdated.crt", ssl_key_file="outdated.key")
    try:

        async def refuses() -> bool:
            try:
                await (await connect(url("berlin"), purpose=Purpose.READ)).close()
            except PostgresUnavailable as error:
                assert "or it has expired" in str(error)
                return True
            return False

        await eventually(refuses, 60)
    finally:
        _use(far, ssl_cert_file="server.crt", ssl_key_file="server.key")


def _use(far: Cluster, **settings: str) -> None:
    """Sessions that begin from now on, or in a moment, are met with these."""
    with far.admin() as admin:
        for name, value in settings.items():
            admin.execute(f"alter system set {name} = '{value}'")  # type: ignore[call-overload]
        admin.execute("select pg_reload_conf()")
