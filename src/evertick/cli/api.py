"""`evertick api`: the HTTP API in this process. The only command that knows the API's package."""

from __future__ import annotations

from typing import Annotated

import typer

from evertick.api.service import Api
from evertick.cli.serve import serve
from evertick.config import read_settings

app = typer.Typer(add_completion=False)

Host = Annotated[str | None, typer.Option("--host", help="The address to listen on; others need a password first.")]
Port = Annotated[int | None, typer.Option("--port", min=0, max=65_535, help="The port; 8080, or any if that is taken.")]

# By name: importing the framework and the pages is put off until somebody asks.
APPLICATION = "evertick.ui.app"


@app.command(epilog="Example: evertick api --port 8080")
def api(host: Host = None, port: Port = None) -> None:
    """Serve the web pages and the HTTP API: /api/v1, Airflow's /api/v2, and signing in. It loads with the first request."""
    settings = read_settings(api_host=host, api_port=port)
    serve("api", settings, lambda url, log: Api(settings, url=url, log=log, application=APPLICATION))
