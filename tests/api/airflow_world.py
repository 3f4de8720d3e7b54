"""A small world that Airflow's official client looks at: written by other doors, at known times, served once per module."""

from __future__ import annotations

import ast
import asyncio
import inspect
import re
import textwrap
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from functools import cache
from pathlib import Path
from typing import Any

import airflow_client.client as airflow
import httpx
import structlog
from airflow_client.client import api as airflow_apis
from airflow_client.client.exceptions import ApiException
from psycopg import AsyncConnection

from evertick.api.server import serve
from evertick.config import Settings
from evertick.db.connect import Purpose, connect
from evertick.db.queries import dags
from evertick.domain.access import Actor, Role
from evertick.domain.dags.gates import GateKind, GateSpec
from evertick.domain.dags.mapping import MappedList, Mapping
from evertick.domain.dags.params import ParamSpec
from evertick.domain.dags.spec import TaskKind
from evertick.domain.encryption import new_key
from evertick.domain.schedules.dependencies import Asset, after
from evertick.engine import accounts
from evertick.engine.gates import set_pool
from evertick.engine.runs import trigger_run
from evertick.runtime.listen_socket import address_of, bound
from tests.api.applications import shared_app
from tests.engine.test_after import waiting
from tests.engine.world import T0, Runner, make_dag, put, set_clock

JANUARY, FEBRUARY = T0 - timedelta(days=60), T0 - timedelta(days=30)


@dataclass(frozen=True, slots=True)
class Operation:
    """One of the client's: its class, its name, how it is sent, and what its lists can be ordered by."""

    api: str
    name: str
    method: str
    path: str
    query: tuple[str, ...]
    order: tuple[str, ...]


@cache
def operations() -> list[Operation]:
    """Read once from the client's own code: the API must answer everything that the client can call."""
    return list(_operations())


def _operations() -> Iterator[Operation]:
    for api in sorted(set(vars(airflow_apis))):
        found = getattr(airflow_apis, api)
        if not inspect.isclass(found) or not api.endswith("Api"):
            continue
        for name, function in vars(found).items():
            if not name.endswith("_serialize"):
                continue
            operation = name.removesuffix("_serialize").removeprefix("_")
            source = textwrap.dedent(inspect.getsource(function))
            said = {
                keyword.arg: keyword.value.value
                for node in ast.walk(ast.parse(source))
                if isinstance(node, ast.Call)
                for keyword in node.keywords
                if keyword.arg in ("method", "resource_path") and isinstance(keyword.value, ast.Constant)
            }
            query = tuple(dict.fromkeys(re.findall(r"_query_params\.append\(\(\s*'(\w+)'", source)))
            documented = getattr(found, operation).__doc__ or ""
            known = re.search(r":param order_by:.*?Supported attributes: `([^`]*)`", documented, re.S)
            order = tuple(each.strip() for each in known[1].split(",")) if known else ()
            yield Operation(api, operation, str(said["method"]), str(said["resource_path"]), query, order)


class Official:
    """The client, in a thread: it is synchronous."""

    def __init__(self, address: str, token: str) -> None:
        self.client = airflow.ApiClient(airflow.Configuration(host=address, access_token=token))
        self._apis = {each.name: each.api for each in operations()}

    async def __call__(self, operation: str, *arguments: Any, **options: Any) -> Any:
        method = getattr(getattr(airflow, self._apis[operation])(self.client), operation)
        return await asyncio.to_thread(method, *arguments, **options)

    async def raw(self, operation: str, *arguments: Any, **options: Any) -> Any:
        """The answer as it came: for what the client cannot read itself."""
        method = getattr(getattr(airflow, self._apis[operation])(self.client), f"{operation}_without_preload_content")

        def whole() -> Any:
            answer = method(*arguments, **options)
            # Here and not later: who reads in the loop that serves waits for itself.
            _ = answer.data
            return answer

        return await asyncio.to_thread(whole)

    async def request(self, method: str, path: str) -> int:
        """The status of a plain request with the client's token."""
        headers = {"Authorization": f"Bearer {self.client.configuration.access_token}"}
        async with httpx.AsyncClient(base_url=self.client.configuration.host, headers=headers, timeout=60) as plain:
            return (await plain.request(method, path)).status_code

    async def status_of(self, operation: str, *arguments: Any, **options: Any) -> int:
        try:
            await self(operation, *arguments, **options)
        except ApiException as error:
            return int(error.status)
        return 200


@dataclass(slots=True)
class World:
    conn: AsyncConnection
    client: Official
    runner: Runner
    run_ids: dict[str, int] = field(default_factory=dict)

    async def start(self, dag: str, key: str, *, actor: str = "test", at: datetime | None = None, **params: Any) -> int:
        row = await dags.find(self.conn, dag)
        assert row is not None
        made = await trigger_run(self.conn, dag_id=row.dag_id, params=params, actor=Actor(actor), key=key, fire_at=at)
        assert made is not None and made.is_new
        self.run_ids[key] = made.run_id
        return made.run_id

    async def clock(self, hours: float) -> None:
        await set_clock(self.conn, T0 + timedelta(hours=hours))

    async def finish_one(self, kind: str = "success", *, queue: str = "default", **fields: Any) -> None:
        """The next task in that queue."""
        (claim,) = await self.runner.claim(1, queues=(queue,))
        assert await self.runner.finish(claim, kind, **fields) == []


@asynccontextmanager
async def served(database: str, key_file: Path) -> AsyncIterator[World]:
    """The API on a database, and the client of an admin."""
    key_file.write_text(new_key() + "\n", encoding="ascii")
    key_file.chmod(0o600)
    settings, at, stop = Settings(api_rate_limit=0, secret_key_file=key_file), bound("127.0.0.1", 0), asyncio.Event()
    serving = asyncio.create_task(serve(shared_app, settings, database, structlog.get_logger(), at, stop))
    async with await connect(database, purpose=Purpose.SCHEDULER) as conn:
        await accounts.add_user(conn, name="root", role=Role.ADMIN, actor=Actor("test"))
        row = await accounts.find_user(conn, "root")
        issued = await accounts.issue(conn, row, kind="token", name="t", actor=Actor("test"), seconds=3600)
        runner = await Runner.join(conn, queues=("default", "gpu"))
        yield World(conn, Official(address_of(at), issued.secret), runner)
    stop.set()
    await serving


async def people(world: World) -> None:
    """Two DAGs with three runs: r1 failed, r2 succeeded, o1 is running. Every time in them is known."""
    conn = world.conn
    await set_pool(conn, name="db", slots=3, actor=Actor("test"))
    etl = make_dag(
        "etl",
        {"extract": [], "side.load": ["extract"]},
        every="@every 1h",
        tags=("finance", "daily"),
        description="Loads.",
        max_active_runs=3,
        params=(ParamSpec(name="rows", default=1),),
        per_task={
            "extract": {"kind": TaskKind.SHELL, "command": "true", "outlets": ("orders",)},
            "side.load": {"queue": "gpu", "gates": (GateSpec(kind=GateKind.POOL, name="db", weight=2),)},
        },
    )
    two = Mapping(lists=(MappedList(argument="x", length=2),))
    await world.clock(0)
    await put(conn, etl)
    await put(conn, make_dag("other", {"t": []}, tags=("daily",), owner="ann", per_task={"t": {"mapping": two}}))
    await put(conn, waiting("taker", after(Asset("orders"), Asset("rates"))))
    await dags.put_import_error(conn, file="other.py", line=3, message="no module x", detail="Traceback of theirs")
    await world.clock(1)
    await world.start("etl", "r1", actor="user:root", at=JANUARY, rows=5)
    await world.finish_one(result={"n": 3})
    await world.clock(1.5)
    await world.finish_one("failed", queue="gpu")
    await world.clock(2)
    await world.start("etl", "r2", actor="cli:ann", at=FEBRUARY, rows=7)
    await world.finish_one(result=4)
    await world.clock(4)
    await world.finish_one(queue="gpu")
    await world.clock(5)
    await world.start("other", "o1")
    assert len(await world.runner.claim(1)) == 1
