"""Notifications where processes die: told by the control plane, at least once, and always under the same id."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from evertick.domain.access import Actor
from evertick.engine.runs import trigger
from tests.notifications.sinks import web_sink
from tests.system.processes import Installation
from tests.system.work import loaded, publish_work
from tests.waiting import eventually

NOTIFYING = """
import os, pathlib, signal
from evertick import dag, notify, task

def tell(event):
    pathlib.Path(os.environ["EFFECTS"] + "-told").write_text(f"{event['dag']} {event['task']} {event['reason'][:10]}")

@dag
def dying():
    @task(rerun_on_loss=False, on_failure=[notify.webhook("URL"), tell])
    def work():
        os.kill(os.getppid(), signal.SIGKILL)
        signal.pause()
    work()
"""


@pytest.mark.requirement("F7")
async def test_a_leader_killed_between_sending_and_recording_sends_again_under_the_same_id(
    there: Installation, tmp_path: Path
) -> None:
    with web_sink() as hook:
        await there.conn.execute(
            "insert into outbox (shard, sink, event, payload, created_at, waiting_since, due_at)"
            " values (0, %s, 'failure', '{}', clock(), clock(), clock())",
            [f"webhook:{hook.url}/"],
        )
        dies = "notifications.record:before"
        first = there.launch("scheduler", webhook_allowed_networks=("127.0.0.1",), failpoint=dies)
        await first.ended()
        assert len(hook.told) == 1
        await there.start("scheduler", webhook_allowed_networks=("127.0.0.1",))
        # Nobody waits for the end of the time for which it was taken.
        await there.conn.execute("update outbox set due_at = clock()")
        await eventually(lambda: there.value("select count(*) = 1 from outbox where state = 'sent'"), 60)
        assert hook.ids() == ["1", "1"]


@pytest.mark.requirement("F7")
async def test_a_leader_that_loses_the_database_while_it_sends_still_records_it(there: Installation) -> None:
    with web_sink() as hook:
        await there.conn.execute(
            "insert into outbox (shard, sink, event, payload, created_at, waiting_since, due_at)"
            " values (0, %s, 'failure', '{}', clock(), clock(), clock())",
            [f"webhook:{hook.url}/"],
        )
        await there.start("scheduler", webhook_allowed_networks=("127.0.0.1",), failpoint="notifications.record:error")
        await eventually(lambda: there.value("select count(*) = 1 from outbox where state = 'sent'"), 60)
        assert hook.ids() == ["1"]


@pytest.mark.requirement("F7")
async def test_who_fails_by_kill_9_is_told_of_and_the_callback_runs_elsewhere(
    there: Installation, tmp_path: Path
) -> None:
    with web_sink() as hook:
        text = NOTIFYING.replace("URL", hook.url + "/")
        await publish_work(there.conn, await asyncio.to_thread(loaded, text, tmp_path / "notifying"))
        await there.start("scheduler", webhook_allowed_networks=("127.0.0.1",))
        await there.start("runner")
        await trigger(there.conn, dag="dying", params={}, actor=Actor("test"))
        told = Path(f"{there.effects_file}-told")
        await eventually(lambda: told.exists() and told.read_text(), 30)
        assert told.read_text().startswith("dying work ")
        await eventually(lambda: hook.told, 60)
        assert (hook.told[0].json["event"], hook.told[0].json["task"]) == ("failure", "work")
