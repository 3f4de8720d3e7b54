"""A small world to try the engine's verbs in: publish a DAG in one line, be a runner, set the clock. No user code runs."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime, timedelta

from psycopg import AsyncConnection

from evertick.db.function_sets import lock_key, own_set
from evertick.db.queries import dags, runners, runs, tasks
from evertick.db.queries.runners import NewRunner
from evertick.db.queries.tasks import ExchangeRow
from evertick.domain.access import Actor
from evertick.domain.attempt import Outcome, OutcomeKind, TaskKey
from evertick.domain.dags.spec import DagSpec, NamedSchedule, TaskSpec
from evertick.domain.retry import RetryPolicy
from evertick.domain.schedules.spec import parse_schedule
from evertick.engine.finish_and_claim import encode_report, finish_and_claim
from evertick.engine.publish import publish
from evertick.engine.runs import trigger_run
from evertick.engine.shards import acquire_shard

T0 = datetime(2030, 1, 1, tzinfo=UTC)
# The server shows those of all its databases, and other tests are at work in theirs. Each connection also shares the lock of its
# set of functions.
OWN_LOCKS = (
    "(select k.* from pg_locks k join pg_database b on b.oid = k.database and b.datname = current_database()"
    f"  where k.locktype <> 'advisory' or k.classid <> {lock_key(own_set().hash) >> 32}) own"
)
_SESSIONS = itertools.count(1000)


def make_dag(name: str, shape: Mapping[str, Iterable[str]], **options: object) -> DagSpec:
    """`shape` maps each task to its upstream tasks, in topological order. Options named task_<field> go to every task."""
    task_options = {key[5:]: options.pop(key) for key in list(options) if key.startswith("task_")}
    per_task: dict[str, dict[str, object]] = options.pop("per_task", {})  # type: ignore[assignment]
    every = options.pop("every", None)
    place = {task: index for index, task in enumerate(shape)}
    if every is not None:
        options["schedules"] = (NamedSchedule(name="main", spec=parse_schedule(every)),)
    return DagSpec(
        name=name,
        tasks=tuple(TaskSpec(name=task, **{**task_options, **per_task.get(task, {})}) for task in shape),  # type: ignore[arg-type]
        edges=tuple(sorted((place[up], place[task]) for task, ups in shape.items() for up in ups)),
        **options,  # type: ignore[arg-type]
    )


def hourly_from_half_an_hour_on() -> tuple[NamedSchedule, ...]:
    """Every hour, and next in half an hour, whatever time it is: a test that counts its instants meets none while it does."""
    spec = parse_schedule("@every 1h", anchor_at=datetime.now(UTC) + timedelta(minutes=30))
    return (NamedSchedule(name="main", spec=spec),)


async def put(conn: AsyncConnection, spec: DagSpec) -> int:
    """Publish; returns the version's id."""
    await dags.put_bundle(conn, bundle_hash="b", file="f.py", archive=b"", uses_threads=None)
    return (await publish(conn, spec=spec, file=f"{spec.name}.py", bundle_hash="b", actor=Actor("test"))).version_id


async def start(conn: AsyncConnection, dag: str, key: str | None = None, *, partition: str | None = None) -> int:
    row = await dags.find(conn, dag)
    assert row is not None
    made = await trigger_run(conn, dag_id=row.dag_id, params={}, key=key, partition=partition, actor=Actor("test"))
    assert made is not None
    return made.run_id


async def set_clock(conn: AsyncConnection, instant: datetime) -> None:
    await conn.execute("select set_config('evertick.now', %s, false)", [instant.isoformat()])


async def lead(conn: AsyncConnection) -> int:
    """Become the leader of shard 0, whoever leads it."""
    await conn.execute("update shard set lease_until = null")
    epoch = await acquire_shard(conn, shard=0, owner="test", seconds=1e6)
    assert epoch is not None
    return epoch


class Runner:
    """A runner that claims and reports but runs nothing."""

    def __init__(self, conn: AsyncConnection, session: int) -> None:
        self.conn, self.session = conn, session

    @classmethod
    async def join(
        cls,
        conn: AsyncConnection,
        *,
        queues: tuple[str, ...] = ("default",),
        match: tuple[str, ...] = (),
        executor: str = "local",
        slots: int = 100,
    ) -> Runner:
        session = next(_SESSIONS)
        new = NewRunner(
            session=session,
            runner_id=f"r{session}",
            host="h",
            boot_id="b",
            pid_namespace="p",
            pid=1,
            pid_started=0.0,
            queues=list(queues),
            slots=slots,
            match=list(match),
            executor=executor,
        )
        await runners.register(conn, new)
        return cls(conn, session)

    async def claim(self, free: int = 100, queues: tuple[str, ...] = ("default",)) -> list[ExchangeRow]:
        done = await finish_and_claim(
            self.conn, session=self.session, reports=[], queues=list(queues), free=free, infra_retries=3
        )
        return done.claims

    async def finish(
        self, claim: ExchangeRow, kind: str = "success", *, free: int = 0, again: bool = False, **fields: object
    ) -> list[tuple[TaskKey, int]]:
        """Report one attempt's end; returns what was refused."""
        return (await self.step([(claim, kind, fields)], free=free))[1]

    async def step(
        self, ends: list[tuple[ExchangeRow, str, dict[str, object]]], *, free: int = 0
    ) -> tuple[list[ExchangeRow], list[tuple[TaskKey, int]]]:
        reports = [end(claim, kind, **fields) for claim, kind, fields in ends]
        done = await finish_and_claim(
            self.conn, session=self.session, reports=reports, queues=["default"], free=free, infra_retries=3
        )
        return done.claims, done.refused

    async def drain(self, outcome_of: Mapping[str, str] | None = None, *, batch: int = 100) -> list[str]:
        """Run everything that becomes available to its end; returns the names in the order of their claims."""
        ran: list[str] = []
        claims = await self.claim(batch)
        while claims:
            names = await names_of(self.conn, claims)
            ran += names
            kinds = [(outcome_of or {}).get(name, "success") for name in names]
            ends = [(claim, kind, {}) for claim, kind in zip(claims, kinds, strict=True)]
            claims, refused = await self.step(ends, free=batch)  # type: ignore[arg-type]
            assert refused == []
        return ran


def key_of(claim: ExchangeRow) -> TaskKey:
    return TaskKey(claim.run_id, claim.idx, claim.map_index)


def end(claim: ExchangeRow, kind: str, **fields: object) -> str:
    """A report as a runner sends it. `retry_in` and the like go in as they are."""
    outcome = Outcome(
        key=key_of(claim), epoch=claim.epoch, kind=OutcomeKind(kind) if kind != "lost" else OutcomeKind.KILLED
    )
    plain = json.loads(encode_report(outcome, policy=RetryPolicy(delay_seconds=0), attempt=claim.attempt))
    return json.dumps({**plain, "kind": kind, **fields})


async def names_of(conn: AsyncConnection, claims: Iterable[ExchangeRow]) -> list[str]:
    found = []
    for claim in claims:
        cursor = await conn.execute(
            "select name from task_spec where version_id = %s and idx = %s", [claim.version_id, claim.idx]
        )
        row = await cursor.fetchone()
        assert row is not None
        found.append(str(row[0]))
    return found


async def states(conn: AsyncConnection, run_id: int) -> dict[str, str]:
    return {row.task: row.state for row in await tasks.list_of_run(conn, run_id=run_id, limit=100_000)}


async def run_state(conn: AsyncConnection, run_id: int) -> str:
    row = await runs.find(conn, run_id)
    assert row is not None
    return row.state


async def value(conn: AsyncConnection, query: str, *params: object) -> object:
    cursor = await conn.execute(query, params)  # type: ignore[arg-type]
    row = await cursor.fetchone()
    return None if row is None else row[0]


def later(seconds: float) -> datetime:
    return T0 + timedelta(seconds=seconds)
