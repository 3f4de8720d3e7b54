"""`evertick events` and `evertick approvals`."""

from __future__ import annotations

from psycopg import AsyncConnection

from evertick.domain.dags.params import Param, declare_params
from evertick.domain.dags.spec import TaskKind
from evertick.domain.dags.waits import WaitKind, WaitSpec
from tests.cli.conftest import Cli
from tests.engine.world import make_dag, put, start, states

FORM = declare_params({"version": Param(type=int, required=True, minimum=1)})


async def asked(conn: AsyncConnection) -> int:
    wait = WaitSpec(kind=WaitKind.APPROVAL, name="Release?", form=FORM, timeout_seconds=3600)
    await put(conn, make_dag("d", {"ask": []}, per_task={"ask": {"kind": TaskKind.WAIT, "wait": wait}}))
    return await start(conn, "d")


async def test_an_event_is_sent_once_per_key_and_listed(cli: Cli, conn: AsyncConnection) -> None:
    assert "No event was sent" in (await cli("events", "list")).out
    assert (await cli("events", "send", "file", "--payload", '{"a": 1}', "--key", "k")).out == "Sent event file.\n"
    assert "was sent before" in (await cli("events", "send", "file", "--payload", '{"a": 1}', "--key", "k")).out
    assert "another payload" in (await cli("events", "send", "file", "--key", "k")).err
    assert (await cli.json("events", "send", "other"))["event"]["is_new"] is True
    listed = (await cli.json("events", "list", "--name", "file"))["events"]
    assert [(each["name"], each["payload"], each["key"]) for each in listed] == [("file", {"a": 1}, "k")]
    assert '{"a": 1}' in (await cli("events", "list")).out


async def test_bad_events_are_refused(cli: Cli, conn: AsyncConnection) -> None:
    assert "--payload is not JSON" in await cli.refused("events", "send", "file", "--payload", "ready")
    assert "is not a valid name for an event" in await cli.refused("events", "send", " x")
    assert "1 to 200 characters" in await cli.refused("events", "send", "x", "--key", "")


async def test_an_approval_is_listed_filled_in_and_decided_once(cli: Cli, conn: AsyncConnection) -> None:
    assert "No task waits for an approval" in (await cli("approvals", "list")).out
    run = await asked(conn)
    page = (await cli("approvals", "list")).out
    assert "Release?" in page and "version: an integer of at least 1" in page
    assert "evertick approvals list" in (await cli("tasks", "why", run, "ask")).out
    assert "is required" in await cli.refused("approvals", "approve", run, "ask")
    assert "of at least 1" in await cli.refused("approvals", "approve", run, "ask", "--field", "version=0")
    assert "unknown param 'vers'" in await cli.refused("approvals", "approve", run, "ask", "--field", "vers=1")
    assert "needs a name and a value" in await cli.refused("approvals", "approve", run, "ask", "--field", "version")
    done = await cli("approvals", "approve", run, "ask", "--field", "version=2", "--note", "fine")
    assert done.out == f"Approved 'Release?': ask of run {run}.\n"
    assert (await states(conn, run))["ask"] == "success"
    assert "was approved by cli:" in await cli.refused("approvals", "reject", run, "ask", status=1)
    assert "has no approval" in await cli.refused("approvals", "approve", run, "other")


async def test_a_rejection_needs_no_form(cli: Cli, conn: AsyncConnection) -> None:
    run = await asked(conn)
    done = await cli.json("approvals", "reject", run, "ask", "--note", "no")
    assert (done["approval"]["is_approved"], done["approval"]["note"]) == (False, "no")
    assert (await states(conn, run))["ask"] == "failed"
