"""`evertick scheduler`: one scheduler in this process."""

from __future__ import annotations

import typer

from evertick.cli.serve import serve
from evertick.config import Settings, read_settings
from evertick.observability.logging import Log
from evertick.processes.identity import process_name
from evertick.scheduler.scheduler import Scheduler
from evertick.scheduler.telemetry import QueueDepth, Tracing, make_spans

app = typer.Typer(add_completion=False)


@app.command(epilog="Example: EVERTICK_DATABASE_URL=postgresql://db/evertick evertick scheduler")
def scheduler() -> None:
    """Run one scheduler: it fires what is due and repairs what was left. More of them stand by to take over."""
    settings = read_settings()
    serve(
        "scheduler",
        settings,
        lambda url, log: Scheduler(settings, url=url, owner=process_name(), log=log),
        beside=[lambda url, log: QueueDepth(url, log=log).run(), lambda url, log: _trace(settings, url, log)],
    )


async def _trace(settings: Settings, url: str, log: Log) -> None:
    """Send traces, where a collector is named."""
    make = make_spans(settings.otlp_endpoint, log) if settings.otlp_endpoint else None
    if make is not None:
        await Tracing(url, make=make, log=log).run()
