"""A collector of traces that takes connections and never answers: it costs traces, and nothing else."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from evertick.config import environment_for
from tests.system.processes import Installation
from tests.system.served import served
from tests.system.work import Published, let_go, schedule_now, start_run
from tests.waiting import eventually


class Silence:
    """What was sent to it; it keeps every line open and says nothing."""

    def __init__(self) -> None:
        self.received = 0
        self.url = ""

    async def take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while chunk := await reader.read(65536):
            self.received += len(chunk)
        writer.close()


@asynccontextmanager
async def silence() -> AsyncIterator[Silence]:
    found = Silence()
    server = await asyncio.start_server(found.take, "127.0.0.1", 0)
    found.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield found
    finally:
        server.close()


@pytest.mark.requirement("A1", "A2")
async def test_a_collector_that_hangs_in_a_send_holds_up_neither_fires_nor_runners_nor_the_end(
    there: Installation, long: Published
) -> None:
    async with silence() as collector:
        traced = {"otlp_endpoint": collector.url, "health_port": 0}
        environment = environment_for(there.settings(**traced), there._environment())
        runner = await there.start("runner", **traced)
        async with served("scheduler", environment, there.folder) as scheduler:
            await eventually(scheduler.is_ready, 60)
            await schedule_now(there.conn, long, "alone", every=0.2, times=500)
            await eventually(lambda: collector.received > 0, 60)
            # From here on a send is under way that never ends. Five more fires, and a run that people start.
            ended = "select count(*) from run r join run_status s using (run_id)"
            ended += " where r.fire_at is not null and s.state = 'success'"
            enough = await there.value(ended) + 5
            await eventually(lambda: there.value(f"{ended} having count(*) >= %s", enough), 60)
            let_go(there.effects_file)
            assert await there.ended(await start_run(there.conn, "holding")) == "success"
            assert await scheduler.is_ready()
            scheduler.process.send_signal(signal.SIGTERM)
            async with asyncio.timeout(60):
                assert await scheduler.process.wait() == 0
        assert await runner.terminate() == 0
