"""What commands ask of a server instead of the database: the documents of its API as the records that are shown.

A command that has no way here says so (`cli/connection.py::ask`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields
from datetime import datetime
from importlib import import_module
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import quote

from evertick.cli.logins import chosen_server, token_for
from evertick.db.queries.notifications import QuarantinedRow
from evertick.db.queries.runs import JournalEntry, RunRow
from evertick.db.queries.schedules import RunTrigger
from evertick.db.queries.tasks import AttemptRow, Cleared, TaskRow
from evertick.domain.errors import EvertickError
from evertick.domain.explain import Explained, Reason
from evertick.logs.format import Line

if TYPE_CHECKING:
    from evertick.cli.server import Server

PAUSE_SECONDS = 1.0
_V1 = "/api/v1"

R = TypeVar("R")


def far_server() -> Server | None:
    """The server that this command goes to, if it goes to one. What HTTP takes is loaded only then."""
    address = chosen_server()
    if address is None:
        return None
    made: Server = import_module("evertick.cli.server").Server(address, token_for(address))
    return made


def path(*parts: object) -> str:
    """Under the native API; names may hold anything."""
    return "/".join([_V1, *(quote(str(part), safe="") for part in parts)])


def record(kind: type[R], document: Mapping[str, Any], /, **more: object) -> R:
    """A record of the store from the document that the API makes of it; `more` has what that calls otherwise."""
    values: dict[str, object] = {}
    for each in fields(kind):  # type: ignore[arg-type]
        value = more[each.name] if each.name in more else document[each.name]
        is_instant = isinstance(value, str) and str(each.type).startswith("datetime")
        values[each.name] = datetime.fromisoformat(str(value)) if is_instant else value
    return kind(**values)


# Runs and tasks -------------------------------------------------------------------------------------------------------


def run_row(document: Mapping[str, Any]) -> RunRow:
    is_stopped = document["is_canceling"] or document["state"] == "canceled"
    return record(RunRow, document, version_id=0, failed_leaves=0, cancel_requested=is_stopped)


def list_runs(server: Server, dag: str | None, state: str | None, limit: int) -> list[RunRow]:
    found = server.pages(path("runs"), limit=limit, dag=dag, state=state)
    return [run_row(each) for each in found]


def find_run(server: Server, run_id: int) -> RunRow:
    return run_row(server.get(path("runs", run_id)))


def run_with_counts(server: Server, run_id: int) -> tuple[RunRow, dict[str, int]]:
    page = server.get(path("runs", run_id))
    return run_row(page), page["tasks_by_state"]


def run_page(
    server: Server, run_id: int, limit: int
) -> tuple[RunRow, list[TaskRow], list[JournalEntry], QuarantinedRow | None, list[RunTrigger]]:
    page = server.get(path("runs", run_id))
    return (
        run_row(page),
        list_tasks(server, run_id, limit),
        [record(JournalEntry, each) for each in page["journal"]],
        record(QuarantinedRow, page["quarantine"]) if page["quarantine"] else None,
        [record(RunTrigger, each) for each in page["causes"]],
    )


def list_tasks(server: Server, run_id: int, limit: int) -> list[TaskRow]:
    return [record(TaskRow, each) for each in server.pages(path("runs", run_id, "tasks"), limit=limit)]


def show_task(server: Server, run_id: int, task: str) -> list[tuple[TaskRow, list[AttemptRow], object]]:
    """All instances of that name, or the one that is named with its number."""
    pages = server.get(path("runs", run_id, "tasks", _plain_name(task)), map_index=_map_index(task))
    attempts = [record(AttemptRow, each) for each in pages["attempts"]]
    return [(record(TaskRow, pages["task"]), attempts, pages["result"])]


def explain(server: Server, run_id: int, task: str) -> Explained:
    return _explained(server.get(path("runs", run_id, "tasks", _plain_name(task), "why")))


def _explained(found: Mapping[str, Any]) -> Explained:
    reasons = [
        Reason(each["kind"], {name: value for name, value in each.items() if name not in ("kind", "text")})
        for each in found["reasons"]
    ]
    upstream = _explained(found["upstream"]) if found["upstream"] else None
    return Explained(
        run_id=found["run_id"], task=found["task"], state=found["state"], reasons=reasons, upstream=upstream
    )


def mark(server: Server, run_id: int, task: str, state: str) -> list[str]:
    body = {"state": state, "map_index": _map_index(task)}
    return [server.post(path("runs", run_id, "tasks", _plain_name(task), "mark"), body)["outcome"]]


def cancel(server: Server, run_id: int, reason: str | None) -> int:
    return int(server.post(path("runs", run_id, "cancel"), {"reason": reason})["asked_to_stop"])


def to_clear(server: Server, run_id: int, wish: Mapping[str, object]) -> list[TaskRow]:
    found = server.post(path("runs", run_id, "clear"), {**wish, "is_preview": True})
    return [record(TaskRow, each) for each in found["tasks"]]


def clear(server: Server, run_id: int, wish: Mapping[str, object]) -> Cleared:
    done = server.post(path("runs", run_id, "clear"), dict(wish))
    return Cleared(reopened=done["reopened"], asked=done["asked_to_stop"])


def log_lines(server: Server, run_id: int, task: str, *, is_followed: bool) -> Iterator[list[Line]]:
    """Page by page, or as events while the task runs; a stream that breaks is taken up where it was."""
    name = path("runs", run_id, "tasks", _plain_name(task), "logs")
    if not is_followed:
        yield [Line(**{**each, "at": _instant(each["at"])}) for each in log_records(server, run_id, task)]
        return
    for event, found in server.events(name, follow=True, map_index=_map_index(task)):
        if event == "lines":
            shared = {"epoch": found["epoch"], "is_late": found["is_late"]}
            yield [Line(**{**each, "at": _instant(each["at"]), **shared}) for each in found["lines"]]
        elif event == "end" and found.get("reason"):
            raise EvertickError(f"This is not all of the log: {found['reason']}")


def log_records(server: Server, run_id: int, task: str) -> list[dict[str, Any]]:
    name = path("runs", run_id, "tasks", _plain_name(task), "logs")
    found: list[dict[str, Any]] = []
    cursor = None
    while True:
        page = server.get(name, map_index=_map_index(task), cursor=cursor)
        found += page["items"]
        cursor = page["next_cursor"]
        if cursor is None:
            return found


def _instant(text: str | None) -> datetime | None:
    return None if text is None else datetime.fromisoformat(text)


def _plain_name(task: str) -> str:
    return task.rpartition("[")[0] if _map_index(task) >= 0 else task


def _map_index(task: str) -> int:
    """Of `train[3]` the 3; -1 for a task that is not mapped."""
    name, _, number = task.removesuffix("]").rpartition("[")
    return int(number) if name and task.endswith("]") and number.isdecimal() else -1


def look_until_over(look: Callable[[], bool], *, within_seconds: float | None = None) -> bool:
    """Look until it says that all is over. False: it was not within the time given."""
    deadline = None if within_seconds is None else time.monotonic() + within_seconds
    while not look():
        if deadline is not None and time.monotonic() >= deadline:
            return False
        time.sleep(PAUSE_SECONDS)
    return True
