"""Canaries: secrets that tasks print (also encoded, and in pieces), raise, template and return, and whose failures people are told
of; then every place where one could be is searched: all tables (logs, results, the audit log, what is mailed and posted), files,
metrics, and what the services say.

`python -m tests.secrets.canaries --tasks 1000` does so at full size; a test does it with fewer tasks.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import json
import secrets
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from urllib.parse import quote

from prometheus_client import generate_latest
from psycopg import AsyncConnection
from psycopg.sql import SQL, Identifier

from evertick.db.connect import Purpose, connect
from evertick.domain.access import Actor
from evertick.domain.stored_values import ValueKind
from evertick.engine.secrets import put_value
from evertick.runner.runner import Runner
from evertick.secrets.keyring import load_keyring, make_key
from tests.databases import own_cluster
from tests.engine.world import run_state
from tests.system.hosting import Said, hosted, quick
from tests.system.work import loaded, publish_work, start_run
from tests.waiting import eventually

COUNT = 50
FLOCK = """
import base64, html, json, os, shlex, subprocess, sys, urllib.parse
from evertick import *

NAMES = [f"canary{n}" for n in range(50)]
# A program of its own: its answer, a named result, its log, what it prints beside, and how it ends.
ANSWER = '''
import json, os, sys
s = os.environ[sys.argv[1]]
print(json.dumps({"evertick": "log", "text": "now " + s}))
print(json.dumps({"evertick": "output", "name": "it", "value": [s]}))
print(json.dumps({"evertick": "result", "value": {s: s}}))
print(s, file=sys.stderr)
if len(sys.argv) > 2: print(json.dumps({"evertick": "fail", "reason": s + " is wrong"}))
'''


def every_form(s):
    raw = s.encode()
    print(html.escape(s), shlex.quote(s), repr(raw), raw.hex().upper(), raw.hex(" "), raw.hex(":"))
    print(base64.b32encode(raw), urllib.parse.quote(s, safe=""), json.dumps([json.dumps({"deep": s})]))
    for before in range(3):
        for encode in (base64.b64encode, base64.urlsafe_b64encode): print(encode(b"x" * before + raw + b"and more"))


def show(how, s):
    match how % 8:
        case 7: every_form(s)
        case 0: print(s, s[:9], end=""); print(s[9:]); print(base64.b64encode(s.encode()), s.encode().hex(), repr(s))
        case 5: print(json.dumps({"it": s}), json.dumps(json.dumps(s)), urllib.parse.quote(s), urllib.parse.quote_plus(s))
        case 6:
            for part in s: sys.stdout.write(part); sys.stdout.flush()
            try: {}[s]
            except KeyError as error: raise RuntimeError(f"https://anna:{urllib.parse.quote(s)}@shop/") from error
        case 1: raise ValueError(s)
        case 2: return {"it": s, s: [base64.b64encode(f"user:{s}".encode()).decode()]}
        case 3: subprocess.run(["echo", s]); os.write(1, s.encode() + b"\\n"); push(s, s); return s
        case 4: raise Fail("x" * 990 + s)


@dag(on_failure=notify.webhook("https://example.com/hook"))
def flock():
    for n in range(TASKS):
        name = NAMES[n % 50]
        if n % 7 == 6:
            said = 'echo {{ secrets.NAME }} "$EVERTICK_SECRET_UPPER"; exit 1'
            shell(f"shell_{n}", said.replace("NAME", name).replace("UPPER", name.upper()), secrets=[name])
        elif n % 11 == 3:
            # Nobody listens there. What its templates became is in the log.
            it = f"{{{{ secrets.{name} }}}}"
            http(f"http_{n}", f"http://127.0.0.1:9/{it}?key={it}", method="POST", headers={"X-Key": f"Bearer {it}"},
                 json={"a": [it, f"{{{{ secrets.{name} | json }}}}", f"{{{{ [secrets.{name}] }}}}"]}, secrets=[name],
                 on_failure=notify.email("ops@example.com"))
        elif n % 11 == 4:
            program(f"program_{n}", [sys.executable, "-c", ANSWER, f"EVERTICK_SECRET_{name.upper()}", *["fail"] * (n % 2)],
                    secrets=[name], on_failure=notify.email("ops@example.com"))
        else:
            def body(context: TaskContext, n=n, name=name):
                return show(n // 50 + n, context.secrets[name])
            task(name=f"task_{n}", secrets=[name], on_failure=notify.email("ops@example.com"))(body)()
"""


async def hunt(url: str, conn: AsyncConnection, folder: Path, tasks: int) -> list[str]:
    """Where canaries were found; nothing, if all is well."""
    settings, said = quick(url, folder / "home"), Said()
    make_key(settings)
    canaries = [f"c4n4ry-{secrets.token_hex(8)}-'{n}\"" for n in range(COUNT)]
    for n, canary in enumerate(canaries):
        await put_value(
            conn, load_keyring(settings), kind=ValueKind.SECRET, name=f"canary{n}", value=canary, actor=Actor("test")
        )
    text = FLOCK.replace("TASKS", str(tasks))
    await publish_work(conn, await asyncio.to_thread(loaded, text, folder / "dags"))
    async with hosted(Runner(settings, url=url, log=said.log)):
        run_id = await start_run(conn, "flock")

        async def is_over() -> bool:
            return await run_state(conn, run_id) in ("success", "failed")

        await eventually(is_over, 600)
    ended = await _one(conn, "select count(*) from task where run_id = %s and started_at is not null", run_id)
    hidden = await _one(conn, "select count(*) from log_chunk where content like '%%***%%'")
    rendered = await _one(conn, "select count(*) from log_chunk where content like '%%headers = %%***%%'")
    assert ended == tasks
    assert hidden > tasks / 5, "they did speak"
    assert rendered > tasks / 20, "templates were told"
    assert await _one(conn, "select count(*) from outbox where payload->>'reason' like '%%***%%'") > 0, (
        "and were told about"
    )
    places = {"log of the runner": repr(said.all), "metrics": generate_latest().decode()}
    places |= {f"table {name}": text async for name, text in _tables(conn)}
    places |= {str(path): path.read_text(errors="replace") for path in (folder / "home").rglob("*") if path.is_file()}
    forms = [form for canary in canaries for form in _forms(canary)]
    return sorted({where for where, content in places.items() for form in forms if form in content})


def _forms(canary: str) -> list[str]:
    """What gives it away: its middle, which no escaping changes, and that middle in every encoding, wherever it stands in it."""
    core = canary.split("-")[1]
    raw = core.encode()
    found = [core, raw.hex(), raw.hex().upper(), raw.hex(" "), raw.hex(":"), quote(canary), json.dumps(canary)[1:-1]]
    for before in range(5):
        # The characters that depend on nothing but the middle.
        found.append(base64.b32encode(b"x" * before + raw).decode().rstrip("=")[8:24])
        found.append(base64.b64encode(b"x" * before + raw).decode().rstrip("=")[8:20])
    return found


async def _one(conn: AsyncConnection, query: str, *params: object) -> int:
    row = await (await conn.execute(query, params)).fetchone()  # type: ignore[arg-type]
    assert row is not None
    return int(row[0])


async def _tables(conn: AsyncConnection) -> AsyncIterator[tuple[str, str]]:
    """Each table's whole content as text: what a dump would have."""
    cursor = await conn.execute("select tablename from pg_tables where schemaname = 'evertick'")
    for (name,) in await cursor.fetchall():
        rows = await conn.execute(SQL("select t::text from {} t").format(Identifier(name)))
        yield name, "\n".join(row[0] for row in await rows.fetchall())


async def _hunt_in(url: str, folder: Path, tasks: int) -> list[str]:
    async with await connect(url, purpose=Purpose.SCHEDULER) as conn:
        return await hunt(url, conn, folder, tasks)


def main() -> int:
    reader = argparse.ArgumentParser(description=__doc__)
    reader.add_argument("--tasks", type=int, default=1000)
    tasks = reader.parse_args().tasks
    began = time.monotonic()
    with (
        tempfile.TemporaryDirectory(prefix="evertick-canaries-") as folder,
        own_cluster(Path(folder) / "pg") as cluster,
    ):
        url = cluster.database_url(cluster.create(cluster.template()))
        found = asyncio.run(_hunt_in(url, Path(folder), tasks))
    print(f"{COUNT} canaries, {tasks} tasks, {time.monotonic() - began:.0f} s: found in {found or 'no place'}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
