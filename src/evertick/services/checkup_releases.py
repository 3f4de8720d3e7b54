"""Findings of `evertick doctor` about an upgrade in progress: a schema or runners of another release."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from importlib.metadata import version

from psycopg import AsyncConnection

from evertick.services.checkup import Finding, warning
from evertick.store import runners
from evertick.store.migrate import SchemaStatus
from evertick.store.runners import BusyRunner

_SHOWN = 3
_ADVICE = "Install the same release everywhere, one service after the other: see docs/howto/upgrade.md."


async def examine_releases(conn: AsyncConnection, schema: SchemaStatus) -> list[Finding]:
    alive = await runners.list_busy(conn, with_agents=False)
    return [*judge_schema(schema), *judge_runners(alive)]


def judge_schema(schema: SchemaStatus) -> Iterator[Finding]:
    if schema.newer:
        yield warning(
            "later_schema",
            f"The database has {schema.newer[-1].label} of a later release; this is Evertick {version('evertick')}.",
            "This release is compatible with the next one, but not necessarily with later ones.",
            _ADVICE,
        )


def judge_runners(alive: Iterable[BusyRunner]) -> Iterator[Finding]:
    mine = version("evertick")
    others = [each for each in alive if each.version not in ("", mine)]
    if others:
        shown = ", ".join(f"{each.name or each.runner_id} is {each.version}" for each in others[:_SHOWN])
        more = f" and {len(others) - _SHOWN} more" if len(others) > _SHOWN else ""
        yield warning(
            "other_release",
            f"Runners of another release are running: {shown}{more}. This is {mine}.",
            "Two consecutive releases work side by side, but a DAG that uses a new feature fails on the older one.",
            _ADVICE,
        )
