"""`evertick notifications` and `evertick notifications test`."""

from __future__ import annotations

import pytest
from psycopg import AsyncConnection

from evertick.db.queries import notifications
from evertick.domain.notifications import NotificationEvent, NotificationRuleSpec
from evertick.engine.notifications import Room, claim_deliveries
from tests.cli.conftest import Cli
from tests.engine.world import Runner, lead, make_dag, put, start
from tests.notifications.sinks import web_sink

SINK = "email:ops@example.com"


async def failed_run(conn: AsyncConnection) -> int:
    await put(
        conn, make_dag("etl", {"a": []}, notices=(NotificationRuleSpec(event=NotificationEvent.FAILURE, sink=SINK),))
    )
    run_id = await start(conn, "etl")
    await (await Runner.join(conn)).drain({"a": "failed"})
    return run_id


async def test_notifications_are_listed_shown_and_tried_again(cli: Cli, conn: AsyncConnection) -> None:
    assert "No notifications" in (await cli("notifications", "list")).out
    run_id = await failed_run(conn)
    (found,) = (await cli.json("notifications", "list", "etl", "--run", run_id))["notifications"]
    assert (found["state"], found["sink"], found["payload"]["run"]) == ("waiting", SINK, run_id)
    assert f"etl failed (run {run_id})" in (await cli("notifications", "list", "--state", "waiting")).out
    assert "is still being tried" in await cli.refused("notifications", "retry", 1, status=1)
    room = Room(passed_over=[], each=1, limit=1, seconds=30)
    (taken,) = await claim_deliveries(conn, shard=0, epoch=await lead(conn), room=room)
    await notifications.record(conn, taken, state="failed", answer="SMTP 550", rest_seconds=0)
    shown = (await cli("notifications", "show", 1)).out
    assert "SMTP 550" in shown and "payload: dag" in shown
    assert (await cli.json("notifications", "show", 1))["last_response"] == "SMTP 550"
    assert "Notification 1 will be tried again." in (await cli("notifications", "retry", 1)).out
    assert "0 notifications will be tried again." in (await cli("notifications", "retry", "--all")).out


async def test_bad_input_is_refused_with_the_next_step(cli: Cli, conn: AsyncConnection) -> None:
    await failed_run(conn)
    assert "There is no notification 99" in await cli.refused("notifications", "show", 99)
    assert "by their numbers, or give --all" in await cli.refused("notifications", "retry")
    assert "by their numbers, or give --all" in await cli.refused("notifications", "retry", 1, "--all")
    assert "Did you mean 'etl'?" in await cli.refused("notifications", "list", "elt")
    assert "is not a destination: write webhook:https://" in await cli.refused(
        "notifications", "test", "ops@example.com"
    )


async def test_a_sink_is_tried_and_what_came_of_it_is_said(
    cli: Cli, conn: AsyncConnection, monkeypatch: pytest.MonkeyPatch
) -> None:
    with web_sink() as hook:
        refused = await cli("notifications", "test", f"webhook:{hook.url}/")
        assert refused.status == 1 and "EVERTICK_WEBHOOK_ALLOWED_NETWORKS can allow it" in refused.out
        monkeypatch.setenv("EVERTICK_WEBHOOK_ALLOWED_NETWORKS", "127.0.0.1")
        told = (await cli("notifications", "test", f"webhook:{hook.url}/")).out
        assert "Sent to webhook:http://127.0.0.1" in told and "With the settings of this machine" in told
        tried = await cli.json("notifications", "test", f"slack:{hook.url}/")
    assert (tried["is_sent"], tried["response"]) == (True, "HTTP 200")
    assert hook.told[0].json["text"] == "Evertick sends this message as a test"
