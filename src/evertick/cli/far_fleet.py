"""Pools, queues and runners of a server, as the records that commands show."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from evertick.cli.far import path, record
from evertick.db.queries.gates import GateRow, GateTask
from evertick.db.queries.runners import BusyRunner, QueueRow
from evertick.db.queries.shards import ShardRow
from evertick.domain.attempt import session_text
from evertick.domain.errors import Forbidden
from evertick.domain.explain import Blocked

if TYPE_CHECKING:
    from evertick.cli.server import Server


def list_pools(server: Server) -> list[GateRow]:
    return [_gate_row(each) for each in server.get(path("pools"))["items"]]


def set_pool(server: Server, name: str, slots: int) -> tuple[bool, int, int]:
    """Whether it is new, how many tasks could begin, and how many slots are taken."""
    is_new = name not in {pool.name for pool in list_pools(server)}
    return is_new, 0, int(server.put(path("pools", name), {"slots": slots})["used"])


def delete_pool(server: Server, name: str) -> None:
    server.delete(path("pools", name))


def list_queues(server: Server) -> list[QueueRow]:
    return [record(QueueRow, each) for each in server.get(path("queues"))["items"]]


def list_shards(server: Server) -> list[ShardRow]:
    return [record(ShardRow, each) for each in server.get(path("shards"))["items"]]


def list_runners(server: Server) -> list[BusyRunner]:
    return [_runner_row(each) for each in server.get(path("runners"))["items"]]


def has_runner(server: Server) -> bool:
    """Who may not see runners is not told that there are none."""
    try:
        return bool(list_runners(server))
    except Forbidden:
        return True


def drain(server: Server, which: Sequence[str] | None, *, is_all: bool, then_leave: bool) -> list[BusyRunner]:
    body = {"then_leave": then_leave}
    return _asked(server, [path("runners", each, "drain") for each in _meant(server, which, is_all=is_all)], body)


def undrain(server: Server, which: Sequence[str] | None, *, is_all: bool) -> list[BusyRunner]:
    return _asked(server, [path("runners", each, "undrain") for each in _meant(server, which, is_all=is_all)], None)


def _meant(server: Server, which: Sequence[str] | None, *, is_all: bool) -> list[str]:
    return [session_text(each.session) for each in list_runners(server)] if is_all else list(which or [])


def _asked(server: Server, paths: list[str], body: object) -> list[BusyRunner]:
    found = [_runner_row(each) for one in paths for each in server.post(one, body)["runners"]]
    return list({each.session: each for each in found}.values())


def list_keys(server: Server) -> list[GateRow]:
    return [_gate_row(each) for each in server.get(path("keys"))["items"]]


def gate_pages(
    server: Server, noun: str, gates: Sequence[GateRow], limit: int
) -> list[tuple[GateRow, list[GateTask], list[GateTask]]]:
    """Each with who holds it and who waits for it."""
    pages = [server.get(path(f"{noun}s", each.name), kind=None if noun == "pool" else each.kind) for each in gates]
    return [
        (_gate_row(page), _gate_tasks(page["held_by"], limit), _gate_tasks(page["waiting"], limit)) for page in pages
    ]


def blocked(server: Server) -> list[Blocked]:
    return [record(Blocked, each) for each in server.get(path("blocked"))["items"]]


def _gate_tasks(found: Sequence[Mapping[str, Any]], limit: int) -> list[GateTask]:
    return [record(GateTask, each) for each in found[:limit]]


def _gate_row(document: Mapping[str, Any]) -> GateRow:
    return record(GateRow, document, gate_id=0, capacity=document["slots"])


def _runner_row(document: Mapping[str, Any]) -> BusyRunner:
    session = int(document["session"], 16)
    return record(BusyRunner, document, session=session - 2**64 if session >= 2**63 else session)
