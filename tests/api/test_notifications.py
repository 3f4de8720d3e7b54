"""Notifications over HTTP: what was told to whom, and trying again what failed."""

from __future__ import annotations

from psycopg import AsyncConnection

from evertick.domain.access import Role
from evertick.domain.notifications import NotificationEvent, NotificationRuleSpec
from tests.api.conftest import Client, Signed
from tests.engine.world import Runner, make_dag, put, start

V1 = "/api/v1"
HOOK = "webhook:https://example.com/hook"


async def test_what_failed_is_listed_and_tried_again_by_who_may(
    admin: Client, signed: Signed, conn: AsyncConnection
) -> None:
    told = (NotificationRuleSpec(event=NotificationEvent.SUCCESS, sink=HOOK, every_time=True),)
    await put(conn, make_dag("d", {"a": []}, notices=told))
    run_ids = [await start(conn, "d") for _ in range(3)]
    await (await Runner.join(conn)).drain()
    await conn.execute(
        "update outbox set state = 'failed', ended_at = clock(), response = '503' where run_id <> %s", [run_ids[0]]
    )
    first = await admin.ok("GET", f"{V1}/notifications?limit=2")
    rest = await admin.ok("GET", f"{V1}/notifications?limit=2&cursor={first['next_cursor']}")
    assert [len(page["items"]) for page in (first, rest)] == [2, 1]
    assert rest["next_cursor"] is None
    (waiting,) = (await admin.ok("GET", f"{V1}/notifications?state=waiting&dag=d"))["items"]
    assert (waiting["sink"], waiting["event"], waiting["run_id"]) == (HOOK, "success", run_ids[0])
    failed = (await admin.ok("GET", f"{V1}/notifications?state=failed&run_id={run_ids[1]}"))["items"][0]
    assert failed["last_response"] == "503"
    path = f"{V1}/notifications/{failed['notification_id']}"
    viewer, operator = await signed(Role.VIEWER), await signed(Role.OPERATOR)
    for method, way in (("GET", path), ("POST", f"{path}/retry"), ("POST", f"{V1}/notifications/retry")):
        await viewer.refused(method, way, 403)
    assert (await operator.ok("POST", f"{path}/retry"))["state"] == "waiting"
    assert "is still being tried" in str(await operator.refused("POST", f"{path}/retry", 409))
    assert (await operator.ok("POST", f"{V1}/notifications/retry", json={"sink": "webhook:https://other"}))[
        "count"
    ] == 0
    assert (await operator.ok("POST", f"{V1}/notifications/retry"))["count"] == 1
    assert (await admin.ok("GET", f"{V1}/notifications?state=failed"))["items"] == []
    await admin.refused("GET", f"{V1}/notifications/999", 404)
    await admin.refused("GET", f"{V1}/notifications?state=lost", 422)
    await admin.refused("POST", f"{V1}/notifications/retry", 422, json={"snik": "x"})
