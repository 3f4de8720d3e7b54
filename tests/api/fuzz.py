"""Requests that nobody would think of, from both OpenAPI documents, as every role: never a 5xx, never an answer against its schema.

    python -m tests.api.fuzz [--examples 50] [--seed n] [--only text] [--faults]

With --faults the database is cut off and restarted all the while: then 503 is an answer, and 500 still is not. Prints what was
tried and what came of it, each failure with the request that repeats it; exits non-zero when there is one.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import hypothesis
import psycopg
import schemathesis
import structlog
from fastapi import FastAPI
from hypothesis import HealthCheck, Phase, given, settings, strategies
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from evertick.api.app import make_app
from evertick.api.context import ApiContext
from evertick.api.server import serve
from evertick.config import Settings
from evertick.db.connect import Purpose, connect
from evertick.db.migrate import migrate
from evertick.domain.access import Actor, Role
from evertick.domain.agent_protocol import AgentIdentity, TokenUse
from evertick.domain.attempt import TaskKey
from evertick.domain.encryption import new_key
from evertick.domain.errors import PostgresUnavailable
from evertick.engine import accounts
from evertick.engine.remote_attempts import claim_for_dispatch, start_attempt
from evertick.runtime.listen_socket import address_of, bound
from evertick.secrets.agent_tokens import AgentTokens
from evertick.supervisor.postgres import EmbeddedPostgres
from tests.api.applications import parts_of, shared_app
from tests.databases import QUICK_SETTINGS, quick_folder
from tests.engine.world import Runner, make_dag, put, start
from tests.waiting import elapse

DOCUMENTS = ("/api/v1", "/api/v2")
AGENT_DOCUMENT = "/api/agent/v1"
# What an answer must match. Airflow's own document does not declare every error.
CHECKS = {"/api/v1": [response_schema_conformance, status_code_conformance, content_type_conformance]}
# These follow something without an end, or wait for it, unless these parameters say otherwise.
ENDLESS = ("/wait", "/logs.txt", "/logs", "/events")
AT_ONCE = {"follow": False, "seconds": 0}
# Something that is there, so that not every request ends at the first name that does not exist.
KNOWN: dict[str, Any] = {
    "dag": "etl",
    "dag_id": "etl",
    "dag_run_id": "r1",
    "run_id": 1,
    "task": "t",
    "task_id": "t",
    "map_index": -1,
    "try_number": 1,
    "schedule": "main",
    "pool_name": "db",
    "version_number": 1,
    "number": 1,
}


@dataclass(slots=True)
class Tally:
    """What was tried, what was answered, and what should not have been."""

    operations: int = 0
    statuses: Counter[int] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)

    def text(self) -> str:
        answers = ", ".join(f"{status}: {count}" for status, count in sorted(self.statuses.items()))
        return (
            f"{self.operations} operations, {self.statuses.total()} requests ({answers}), {len(self.failures)} failures"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """How hard to try. `allows_503`: the database may be away."""

    examples: int
    seed: int | None = None
    only: str = ""
    allows_503: bool = False


class Wrong(Exception):
    """An answer that must not be."""


def document_of(prefix: str) -> dict[str, Any]:
    context = ApiContext(Settings(), "postgresql://nobody@127.0.0.1:1/none", structlog.get_logger())
    app: FastAPI = parts_of(make_app(context))[prefix]
    return app.openapi()


def fuzz(document: dict[str, Any], base_url: str, token: str, wish: Wish, tally: Tally) -> None:
    """Every operation of one document, as whoever has the token."""
    schema = schemathesis.openapi.from_dict(document)
    schema.config.update(base_url=base_url)
    checks = next((each for prefix, each in CHECKS.items() if base_url.endswith(prefix)), [response_schema_conformance])
    for found in schema.get_all_operations():
        operation = found.ok()
        # Agents send their log in pieces.
        is_endless = operation.path.endswith(ENDLESS) and operation.path != "/logs"
        at_once = {name: value for name, value in AT_ONCE.items() if name in _parameters(operation)}
        if (not is_endless or at_once) and wish.only in f"{operation.method} {operation.path}".lower():
            tally.operations += 1
            _fuzz_one(operation, token, wish, tally, checks=checks, at_once=at_once)


def _parameters(operation: Any) -> set[str]:
    return {each["name"] for each in operation.definition.raw.get("parameters", ())}


def _fuzz_one(
    operation: Any, token: str, wish: Wish, tally: Tally, *, checks: list[Any], at_once: dict[str, Any]
) -> None:
    headers = {"Authorization": f"Bearer {token}"}

    @settings(
        max_examples=wish.examples,
        deadline=None,
        database=None,
        derandomize=wish.seed is None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(), is_known=strategies.booleans())
    def try_it(case: Any, is_known: bool) -> None:
        if is_known:
            case.path_parameters.update({name: KNOWN[name] for name in case.path_parameters if name in KNOWN})
        if at_once:
            case.query = {**(case.query or {}), **at_once}
        answer = case.call(headers=headers, timeout=60)
        tally.statuses[answer.status_code] += 1
        is_fault = answer.status_code >= 500 and not (wish.allows_503 and answer.status_code == 503)
        if is_fault or answer.status_code == 429:
            raise Wrong(f"{answer.status_code}: {answer.text[:300]}")
        if answer.status_code < 500:
            case.validate_response(answer, checks=checks)

    if wish.seed is not None:
        try_it = hypothesis.seed(wish.seed)(try_it)
    try:
        try_it()
    except (Wrong, AssertionError, schemathesis.errors.SchemathesisError, Exception) as error:
        tally.failures.append(f"{operation.method.upper()} {operation.path}\n    {_brief(error)}")


def _brief(error: BaseException) -> str:
    """What went wrong, without what the tools say around it."""
    parts = getattr(error, "exceptions", None) or [error]
    return "\n    ".join(str(part)[:1500].replace("\n", "\n    ") for part in parts)


async def token_of(url: str, role: Role) -> str:
    async with await connect(url, purpose=Purpose.SCHEDULER) as conn:
        name = f"fuzz-{role}-{random.getrandbits(32):08x}"
        await accounts.add_user(conn, name=name, role=role, actor=Actor("test"))
        row = await accounts.find_user(conn, name)
        issued = await accounts.issue(conn, row, kind="token", name="t", actor=Actor("test"), seconds=86_400)
        return issued.secret


async def _token_when_there_is_a_database(url: str, role: Role) -> str:
    """While faults are made it may be away for a moment."""
    while True:
        try:
            return await token_of(url, role)
        except (psycopg.Error, PostgresUnavailable):
            await elapse(0.2)


async def agent_tokens_of(url: str, folder: Path) -> dict[TokenUse, str]:
    """Those of an attempt that was dispatched, and those of one that runs."""
    tokens = AgentTokens(Settings(home=folder))
    async with await connect(url, purpose=Purpose.SCHEDULER) as conn:
        runner = await Runner.join(conn, executor="far")
        await put(conn, make_dag("far", {"t": [], "u": []}))
        await start(conn, "far")
        found = await claim_for_dispatch(conn, session=runner.session, queues=["default"], free=2)
        whose: list[Any] = [{"key": TaskKey(*row[:3]), "epoch": row.epoch, "session": row.session} for row in found]
        queued, running = whose
        bearer = AgentIdentity(use=TokenUse.START, expires_at=0, **running)
        agent = {
            "runner_id": "far",
            "version": "1",
            "host": "h",
            "boot_id": "b",
            "pid_namespace": "n",
            "uid": 0,
            "pid": 1,
            "pid_started": 1.0,
        }
        await start_attempt(conn, bearer, nonce="a" * 32, agent=agent, lost_after=300.0)
    return {TokenUse.START: tokens.make_start_token(**queued), TokenUse.ATTEMPT: tokens.make_attempt_token(**running)}


async def furnish(url: str) -> None:
    """One DAG with a schedule, a run and a pool: what `KNOWN` names."""
    async with await connect(url, purpose=Purpose.SCHEDULER) as conn:
        await put(conn, make_dag("etl", {"t": []}, every="@every 1h"))
        await start(conn, "etl", key="r1")
        await conn.execute("select set_pool('db', 3, ('test', null, null))")


@asynccontextmanager
async def api_on(url: str, folder: Path) -> AsyncIterator[str]:
    """The API on this database; its address."""
    key_file = folder / "secret.key"
    key_file.write_text(new_key() + "\n", encoding="ascii")
    key_file.chmod(0o600)
    at, stop = bound("127.0.0.1", 0), asyncio.Event()
    made = Settings(api_rate_limit=0, secret_key_file=key_file, home=folder)
    log = structlog.wrap_logger(structlog.PrintLogger(sys.stderr))
    serving = asyncio.create_task(serve(shared_app, made, url, log, at, stop))
    yield address_of(at)
    stop.set()
    await serving


async def harm(server: EmbeddedPostgres, url: str) -> None:
    """Until canceled: every session is ended now and then, and the server restarted every third time."""
    for turn in range(1, 1_000_000):
        await elapse(2.0)
        if turn % 3 == 0:
            await server.stop()
            await server.start()
            continue
        with suppress(psycopg.Error, OSError):
            async with await psycopg.AsyncConnection.connect(url, autocommit=True) as conn:
                await conn.execute(
                    "select pg_terminate_backend(pid) from pg_stat_activity where pid <> pg_backend_pid()"
                    " and backend_type = 'client backend'"
                )


async def run(wish: Wish, *, with_faults: bool) -> int:
    failed = 0
    with tempfile.TemporaryDirectory(prefix="evertick-fuzz-", dir=quick_folder()) as home:
        server = EmbeddedPostgres(Path(home) / "postgres", settings=QUICK_SETTINGS)
        url = await server.start()
        try:
            async with await connect(url, purpose=Purpose.SCHEDULER) as conn:
                await migrate(conn)
            await furnish(url)
            async with api_on(url, Path(home)) as address:
                harming = asyncio.create_task(harm(server, url)) if with_faults else None
                for prefix, role in _turns():
                    tally = Tally()
                    base = f"{address}{prefix}"
                    # A new one for each turn: an admin's made-up requests may revoke everybody's.
                    token = await _token_when_there_is_a_database(url, role)
                    await asyncio.to_thread(fuzz, document_of(prefix), base, token, wish, tally)
                    if tally.statuses[401] > tally.statuses.total() / 2:
                        tally.failures.append("most requests were those of a stranger: the token was revoked early")
                    print(f"{prefix} as {role}: {tally.text()}", flush=True)
                    for each in tally.failures:
                        print(f"  FAILED {each}", flush=True)
                    failed += len(tally.failures)
                for use, token in (await agent_tokens_of(url, Path(home))).items() if not with_faults else ():
                    tally = Tally()
                    base = f"{address}{AGENT_DOCUMENT}"
                    await asyncio.to_thread(fuzz, document_of(AGENT_DOCUMENT), base, token, wish, tally)
                    print(f"{AGENT_DOCUMENT} with a token to {use}: {tally.text()}", flush=True)
                    for each in tally.failures:
                        print(f"  FAILED {each}", flush=True)
                    failed += len(tally.failures)
                if harming is not None:
                    harming.cancel()
                    with suppress(asyncio.CancelledError):
                        await harming
        finally:
            await server.stop()
    print(f"{failed} failures" if failed else "no failures")
    return failed


def _turns() -> Iterator[tuple[str, Role]]:
    for prefix in DOCUMENTS:
        for role in Role:
            yield prefix, role


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--examples", type=int, default=50, help="how many requests per operation and role")
    parser.add_argument("--seed", type=int, default=random.getrandbits(31), help="repeats the requests of a run")
    parser.add_argument("--only", default="", help="operations whose method and path have this in them")
    parser.add_argument("--faults", action="store_true", help="cut and restart the database meanwhile")
    given_ = parser.parse_args()
    print(f"seed {given_.seed}")
    wish = Wish(examples=given_.examples, seed=given_.seed, only=given_.only.lower(), allows_503=given_.faults)
    sys.exit(min(asyncio.run(run(wish, with_faults=given_.faults)), 1))


if __name__ == "__main__":
    main()
