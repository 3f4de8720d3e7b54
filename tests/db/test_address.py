"""Where a database is: one host or several, what people are shown of it, and what is refused."""

from __future__ import annotations

import asyncio
import socket
from contextlib import closing

import pytest
from psycopg import conninfo

from evertick.db.connect import Purpose, connect
from evertick.db.connection import each_host, parse, where
from evertick.domain.errors import PostgresUnavailable


@pytest.mark.parametrize(
    ("url", "place"),
    [
        ("postgresql://u:s3cret@a:1,b:2/shop", "a:1, b:2 (database shop)"),
        ("postgresql://u:s3cret@a,b/shop", "a, b (database shop)"),
        ("postgresql://a:1,b/shop", "a:1, b (database shop)"),
        ("host=a,b port=5432", "a:5432, b:5432"),
        ("hostaddr=10.0.0.1,10.0.0.2 port=1,2", "10.0.0.1:1, 10.0.0.2:2"),
        ("postgresql:///shop?host=/run/a,/run/b&user=u", "/run/a, /run/b (database shop)"),
    ],
)
def test_every_host_is_shown_with_its_port_and_no_password(url: str, place: str) -> None:
    assert where(url) == place


def test_each_host_has_its_own_address_and_everything_else_in_common() -> None:
    first, second = each_host(parse("postgresql://u:p@a:1,b:2/shop?sslmode=require&load_balance_hosts=random"))
    rest = {"user": "u", "password": "p", "dbname": "shop", "sslmode": "require", "target_session_attrs": "primary"}
    assert first == {**rest, "host": "a", "port": "1"}
    assert second == {**rest, "host": "b", "port": "2"}


@pytest.mark.parametrize("attrs", ["any", "read-write", "primary"])
def test_whatever_is_asked_for_is_the_primary(attrs: str) -> None:
    (only,) = each_host(parse(f"postgresql://a/shop?target_session_attrs={attrs}"))
    assert only["target_session_attrs"] == "primary"


@pytest.mark.requirement("E2")
@pytest.mark.parametrize("attrs", ["standby", "prefer-standby", "read-only"])
def test_a_url_that_asks_for_a_standby_is_refused(attrs: str) -> None:
    with pytest.raises(PostgresUnavailable, match=f"target_session_attrs={attrs}, but Evertick needs the primary"):
        each_host(parse(f"postgresql://a,b/shop?target_session_attrs={attrs}"))


def test_hosts_and_ports_that_do_not_match_are_refused() -> None:
    with pytest.raises(PostgresUnavailable, match="2 hosts but a different number of addresses or ports"):
        where("host=a,b port=1,2,3")


def beside(url: str, host: str, port: int) -> str:
    """The same database, with another host before it."""
    parts = conninfo.conninfo_to_dict(url)
    hosts, ports = f"{host},{parts['host']}", f"{port},{parts.get('port', 5432)}"
    return conninfo.make_conninfo(url, host=hosts, port=ports)


@pytest.mark.parametrize("purpose", Purpose)
async def test_a_host_that_is_down_is_passed_over(shared_database: str, purpose: Purpose) -> None:
    """Also by those who only read: asking for a writable session would refuse them."""
    url = conninfo.make_conninfo(beside(shared_database, "127.0.0.1", 1), target_session_attrs="read-write")
    async with await connect(url, purpose=purpose) as conn:
        assert conn.info.host.startswith("/")


@pytest.mark.requirement("N03")
async def test_a_host_that_swallows_everything_holds_nobody_up(shared_database: str) -> None:
    with closing(socket.socket()) as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        url = beside(shared_database, "127.0.0.1", silent.getsockname()[1])
        # The usual time limit of a connection is ten seconds.
        async with asyncio.timeout(9):
            for _ in range(2):
                await (await connect(url, purpose=Purpose.SCHEDULER)).close()


async def test_when_no_host_can_be_used_each_is_told_with_its_reason() -> None:
    with pytest.raises(PostgresUnavailable) as refusal:
        await connect("postgresql://u:s3cret@127.0.0.1:1,127.0.0.1:2/shop", purpose=Purpose.READ)
    text = str(refusal.value)
    assert "None of the servers 127.0.0.1:1, 127.0.0.1:2 (database shop) can be used." in text
    assert text.count("Connection refused") >= 2
    assert "s3cret" not in text
