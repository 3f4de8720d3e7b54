"""The findings of `evertick doctor` about a runner over HTTPS on this machine. Needs no database."""

from __future__ import annotations

import asyncio
import stat
from collections.abc import Iterator

from evertick.config import Settings
from evertick.doctor.database import Finding, error, warning
from evertick.domain.errors import EvertickError, InvalidSettings
from evertick.runner.http_api import join_token
from evertick.runtime.http_client import HttpEndpoint, HttpRequest

ANSWER_SECONDS = 10.0
_WAITS = "The runner here cannot join: it takes no task."


def examine_runner(settings: Settings) -> Iterator[Finding]:
    """Nothing without EVERTICK_RUNNER_SERVER."""
    server, file = settings.runner_server, settings.runner_token_file
    if server is None:
        return
    try:
        join_token(settings)
        endpoint = HttpEndpoint(server, ca_file=settings.runner_ca_file)
    except InvalidSettings as wrong:
        yield error("runner_server", str(wrong), _WAITS, "Correct it; see docs/howto/https-runners.md.")
        return
    if endpoint.is_plain:
        yield warning(
            "runner_unencrypted",
            f"The runner here reaches {server} without TLS.",
            "Others on the network can read its tokens, and the code and secrets of tasks.",
            "Use the https address of a TLS proxy in front of the API.",
        )
    if file is not None and stat.S_IMODE(file.stat().st_mode) & 0o077:
        yield warning(
            "runner_token_file",
            f"Other users can read the join token in {file}.",
            "They can run tasks of its queues, and read their secrets.",
            f"chmod 600 {file}",
        )
    if problem := asyncio.run(_unreachable(endpoint)):
        yield error("runner_server", f"{server} cannot be reached: {problem}.", _WAITS, "Start the API, or correct it.")


async def _unreachable(endpoint: HttpEndpoint) -> str | None:
    request = HttpRequest(method="GET", path="/healthz", token="")
    try:
        answer = await endpoint.ask(request, seconds=ANSWER_SECONDS, most_bytes=64 * 1024)
    except (OSError, EvertickError) as failure:
        return str(failure) or type(failure).__name__
    return None if answer.status == 200 else f"it answered {answer.status}"
