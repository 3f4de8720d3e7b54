"""`evertick health`: the health of the processes on this machine, from their ports, and of the rest, from the database."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

import psycopg
import typer
from rich.text import Text

from evertick.cli.app import Single
from evertick.cli.commands.alerts import alert_text
from evertick.cli.options import Json
from evertick.cli.output import Cell, line, print_json, show, table
from evertick.client.local import opened
from evertick.config import Settings, read_settings
from evertick.db.connect import Purpose
from evertick.db.queries import notifications, runners, shards
from evertick.domain.durations import length
from evertick.domain.errors import EvertickError, PostgresUnavailable, UserError
from evertick.observability.health import HEALTHY, UNHEALTHY
from evertick.observability.health_endpoint import get, living_notes
from evertick.supervisor.postgres_home import holder_of

app = Single()

# The answer of a process is any JSON object.
Document = dict[str, Any]

ASK_SECONDS = 3.0
DATABASE_SECONDS = 10.0
MOST_RUNNERS = 1000
MOST_ALERTS = 100
# One or two heartbeats may be late; after three a runner is about to be declared dead.
SILENT_HEARTBEATS = 3

Urls = Annotated[
    list[str] | None,
    typer.Option("--url", metavar="URL", help="Only the health port at this address; repeat for several."),
]


@app.command(epilog="Example: evertick health --json")
def health(url: Urls = None, as_json: Json = False) -> None:
    """Show the health of the database, the leader, the runners, and the processes of this machine.

    Exit status 0 if all are healthy, 1 if one is not.
    """
    document = asyncio.run(_read_health(read_settings(), url or []))
    if as_json:
        print_json(document)
    else:
        show(table(("COMPONENT", "STATUS", "WHERE", "DETAIL"), _rows(document)))
    if document["status"] != HEALTHY:
        raise typer.Exit(1)


async def _read_health(settings: Settings, urls: list[str]) -> Document:
    """The health at these addresses, or without any of all that this machine and the database know of."""
    document: Document = {}
    if not urls:
        notes = living_notes(settings.home)
        urls = [note.url for note in notes]
        document |= await _ask_database(settings, has_processes=bool(notes))
    processes = await asyncio.gather(*(_ask_process(each) for each in urls))
    # `evertick up` reports its children itself.
    children = {part.get("pid") for each in processes for part in _components(each).values()} - {None}
    document["processes"] = [each for each in processes if each.get("pid") not in children]
    statuses = [part["status"] for part in _parts(document)]
    return {"status": HEALTHY if all(each == HEALTHY for each in statuses) else UNHEALTHY, **document}


async def _ask_process(url: str) -> Document:
    base = url.rstrip("/").removesuffix("/monitor/health")
    try:
        return {**(await get(f"{base}/monitor/health", seconds=ASK_SECONDS)).document(), "url": base}
    except TimeoutError:
        reason = f"does not answer within {ASK_SECONDS:g} s"
    except OSError as error:
        reason = f"does not answer: {error.strerror or error}"
    except ValueError as error:
        raise UserError(f"{url}: {error}") from None
    return {"service": "process", "status": UNHEALTHY, "url": base, "reasons": [reason]}


async def _ask_database(settings: Settings, *, has_processes: bool) -> Document:
    holder = None if settings.database_url else holder_of(settings.home)
    url = settings.database_url or (holder.url if holder else None)
    if url is None:
        if has_processes:
            return {}
        raise PostgresUnavailable(
            f"Evertick is not running in {settings.home}; start it with `evertick up`, or set EVERTICK_HOME or"
            " EVERTICK_DATABASE_URL to where it runs, or name a health port with --url."
        )
    try:
        async with asyncio.timeout(DATABASE_SECONDS), opened(url, Purpose.READ) as conn:
            leader = await shards.leader(conn, shard=0)
            living = await runners.list_busy(conn, limit=MOST_RUNNERS)
            late = await notifications.list_alerts(conn, notifications.AlertFilter(), limit=MOST_ALERTS)
    except TimeoutError:
        return _without_database(f"does not answer within {DATABASE_SECONDS:g} s")
    except (EvertickError, psycopg.Error, OSError) as error:
        return _without_database(str(error))
    return {
        "metadatabase": {"status": HEALTHY},
        "scheduler": _leader_document(leader),
        "runners": [_runner_document(each, settings) for each in living] or [_NO_RUNNER],
        # Alerts are about DAGs. They are shown, but the health of the installation does not depend on them.
        "alerts": [{"alert_id": each.alert_id, "kind": each.kind, "detail": alert_text(each)} for each in late],
    }


def _without_database(reason: str) -> Document:
    return {"metadatabase": {"status": UNHEALTHY, "reasons": [reason]}}


_NO_RUNNER: Document = {
    "status": UNHEALTHY,
    "runner_id": None,
    "reasons": ["no runner is alive, so nothing can run. Start one with: evertick runner"],
}


def _leader_document(leader: shards.Leader | None) -> Document:
    if leader is None or leader.missing is not None:
        missing = "no scheduler leads, so nothing fires" if leader is None else leader.missing
        return {"status": UNHEALTHY, "leader": None, "reasons": [f"{missing}. Start one with: evertick scheduler"]}
    document: Document = {"status": HEALTHY, "leader": leader.owner, "epoch": leader.epoch}
    document |= {"lease_until": leader.lease_until}
    return document | ({"shards": leader.shard_count, "leaders": leader.leaders} if leader.shard_count > 1 else {})


def _runner_document(runner: runners.BusyRunner, settings: Settings) -> Document:
    is_silent = runner.silent_seconds > SILENT_HEARTBEATS * settings.heartbeat_seconds
    document: Document = {
        "status": UNHEALTHY if is_silent else HEALTHY,
        "runner_id": runner.runner_id,
        # A session is 63 bits, more than a number in JavaScript holds.
        "session": str(runner.session),
        "host": runner.host,
        "pid": runner.pid,
        "running": runner.busy,
        "slots": runner.slots,
        "silent_seconds": runner.silent_seconds,
    }
    return document | ({"reasons": [f"silent for {length(runner.silent_seconds)}"]} if is_silent else {})


def _components(process: Document) -> dict[str, Document]:
    """The components of a process that have their own status."""
    return {name: part for name, part in process.items() if isinstance(part, dict) and "status" in part}


def _parts(document: Document) -> list[Document]:
    """All parts whose status counts."""
    alone = [document[name] for name in ("metadatabase", "scheduler") if name in document]
    return [*alone, *document.get("runners", []), *document["processes"]]


def _rows(document: Document) -> list[list[Cell]]:
    rows: list[list[Cell]] = []
    for part in _parts(document):
        if "service" in part:
            where = part["url"] if "owner" not in part else f"{part['owner']} {part['url']}"
            rows.append([str(part["service"]), _state(part), str(where), _detail(part)])
            parts = _components(part).items()
            rows += [[f"{part['service']}: {name}", _state(each), None, _detail(each)] for name, each in parts]
        elif "runner_id" in part:
            rows.append(["runner", _state(part), part["runner_id"], _detail(part)])
        elif "leader" in part:
            rows.append(["leader", _state(part), part["leader"], _detail(part)])
        else:
            rows.append(["database", _state(part), None, _detail(part)])
    rows += [["alert", line("open", "bold red"), None, each["detail"]] for each in document.get("alerts", [])]
    return rows


def _state(part: Document) -> Text:
    return line(str(part["status"]), "green" if part["status"] == HEALTHY else "bold red")


def _detail(part: Document) -> str | None:
    """The problems of a part, or else its most important facts."""
    reasons = part.get("reasons", [part["reason"]] if "reason" in part else [])
    said = [str(each) for each in reasons] if isinstance(reasons, list) else []
    if not said:
        said += [str(part["role"])] if "role" in part else []
        said += [f"epoch {part['epoch']}"] if "epoch" in part else []
        said += [f"{part['running']}/{part['slots']} running"] if "slots" in part else []
    if part.get("restarts"):
        said.append(f"{part['restarts']} restarts, last: {part['last_exit']}")
    return "; ".join(said) or None
