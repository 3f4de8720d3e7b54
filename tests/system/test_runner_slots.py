"""A runner's slots are a limit that holds whatever happens: replies that are lost, runners that die and come again."""

from __future__ import annotations

import pytest
from psycopg import AsyncConnection

from tests.system.processes import Installation
from tests.system.work import Published, most_at_once, publish_work, start_run
from tests.waiting import eventually

SLOTS = 2


async def watch_leases(conn: AsyncConnection) -> None:
    """Note the largest number of leases that each session ever had."""
    await conn.execute("create table most_leases (session bigint, leases int)")
    await conn.execute(
        "create function note_leases() returns trigger language plpgsql as $$ begin"
        " insert into most_leases select session, count(*) from lease"
        " where session in (select session from new_rows) group by session; return null; end $$"
    )
    await conn.execute(
        "create trigger note_leases after insert on lease referencing new table as new_rows"
        " for each statement execute function note_leases()"
    )


@pytest.mark.requirement("K8", "K1", "K11", "N17")
async def test_eight_runners_whose_replies_are_lost_and_of_whom_some_die_never_exceed_their_slots(
    there: Installation, long: Published
) -> None:
    await publish_work(there.conn, long, only=["many"])
    await watch_leases(there.conn)
    runs = [await start_run(there.conn, "many") for _ in range(3)]
    # Each loses the reply of a different step: of its first claim, and of later ones that report, too.
    services = [
        there.launch("runner", runner_id=f"r{n}", runner_slots=SLOTS, failpoint=f"finish_and_claim:drop_reply:{n + 1}")
        for n in range(8)
    ]
    # By the time that the last is there the others may have done it all.
    await eventually(lambda: there.value("select count(*) = 8 from runner"), 60)
    runs += [await start_run(there.conn, "many") for _ in range(2)]
    for number in range(2):
        wanted = 60 * (number + 1)
        await eventually(lambda wanted=wanted: len(there.effects()) > wanted, 60)  # type: ignore[misc]
        await services[number].kill()
        services.append(there.launch("runner", runner_id=f"again{number}", runner_slots=SLOTS))
    assert [await there.ended(run_id, 60) for run_id in runs] == ["success"] * len(runs)
    # Until each of the living has had a part: on a busy machine the last to come may find that all is done.
    living = {f"r{n}" for n in range(2, 8)} | {"again0", "again1"}
    for _ in range(20):
        if living <= {each.runner for each in there.effects()}:
            break
        assert await there.ended(await start_run(there.conn, "many"), 60) == "success"
    found = there.effects()
    names = {each.runner for each in found}
    assert living <= names
    assert max(most_at_once(each for each in found if each.runner == name) for name in names) == SLOTS
    assert await there.value("select max(leases) from most_leases") == SLOTS
    assert sum(len(service.events("claim_reply_lost")) for service in services) >= 1
