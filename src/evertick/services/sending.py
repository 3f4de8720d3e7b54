"""Sends one notification: reads the secrets its destination needs, runs the delivery in a thread, and aborts it after a
timeout.

It has a few threads of its own: a destination or a name server that hangs must not block other work.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from evertick.config import Settings
from evertick.domain.errors import DeliveryFailed, NotFound, UserError
from evertick.domain.notices import Fact, headline, plain_text, slack_body, webhook_body
from evertick.domain.sinks import Sink, SinkKind, check_url, read_sink
from evertick.domain.stored_values import ValueKind, hidden_parts, read_connection
from evertick.engine.trigger import trigger
from evertick.execution.masking import Masker
from evertick.services import mailing, webhook
from evertick.services.cutting import OnOpen
from evertick.services.grants import Connect, Grants
from evertick.services.webhook import Post

THREADS = 16
# For the whole delivery: name resolution, connection, response.
SEND_SECONDS = 10.0
Job = Callable[[OnOpen], str]


class Sending:
    """`connect` returns the connection for reading secrets and starting callbacks."""

    def __init__(self, settings: Settings, *, connect: Connect) -> None:
        self._settings, self._connect = settings, connect
        self._grants: Grants | None = None
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="notify")

    async def send(self, sink: str, fact: Fact, *, delivery: str) -> str:
        """The destination's response. Raises DeliveryFailed, whose text contains no secret."""
        chosen = read_sink(sink)
        if chosen.kind is SinkKind.CALL:
            return await self._call(chosen.target, {**fact, "delivery": delivery}, delivery)
        values = await self._values(chosen)
        masker = Masker(part for (kind, _), text in values.items() for part in hidden_parts(ValueKind(kind), text))
        try:
            said = await self._in_thread(self._job(chosen, {**fact, "delivery": delivery}, delivery, values))
        except DeliveryFailed as error:
            raise DeliveryFailed(
                masker.hide(str(error)), is_final=error.is_final, retry_after_seconds=error.retry_after_seconds
            ) from None
        except (OSError, UserError) as error:
            raise DeliveryFailed(masker.hide(f"{type(error).__name__}: {error}")) from None
        return masker.hide(said)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _values(self, sink: Sink) -> dict[tuple[str, str], str]:
        """The secrets that the destination names, read for this delivery only."""
        wanted: list[tuple[str, str]] = [(ValueKind.SECRET, name) for name in (sink.secret, sink.sign_with) if name]
        if sink.kind is SinkKind.EMAIL:
            wanted = [(ValueKind.CONNECTION, self._settings.smtp_connection)]
        if not wanted:
            return {}
        self._grants = self._grants or Grants(self._settings)
        try:
            return await self._grants.values(self._connect, wanted)
        except UserError as error:
            raise DeliveryFailed(str(error)) from None

    def _job(self, sink: Sink, fact: Fact, delivery: str, values: dict[tuple[str, str], str]) -> Job:
        if sink.kind is SinkKind.EMAIL:
            server = read_connection(values[ValueKind.CONNECTION, self._settings.smtp_connection])
            sender = self._settings.smtp_from or f"evertick@{server.host}"
            message = mailing.compose(
                sender=sender,
                recipients=sink.target.split(),
                subject=headline(fact),
                text=plain_text(fact),
                delivery=delivery,
            )
            return lambda on_open: mailing.send(message, server, on_open, seconds=SEND_SECONDS)
        url = check_url(values[ValueKind.SECRET, sink.secret].strip()) if sink.secret else sink.target
        post = Post(
            url=url,
            body=slack_body(fact) if sink.kind is SinkKind.SLACK else webhook_body(fact),
            delivery=delivery,
            key=values[ValueKind.SECRET, sink.sign_with] if sink.sign_with else None,
            allowed=self._settings.webhook_networks,
            seconds=SEND_SECONDS,
        )
        return partial(webhook.send, post)

    async def _in_thread(self, job: Job) -> str:
        """The caller continues in time, even if the job hangs in a call that cannot be aborted."""
        cuts: list[Callable[[], None]] = []
        running = asyncio.get_running_loop().run_in_executor(self._threads, job, cuts.append)
        try:
            return await asyncio.wait_for(asyncio.shield(running), SEND_SECONDS)
        except TimeoutError:
            raise DeliveryFailed(f"it did not answer within {SEND_SECONDS:g} s") from None
        finally:
            if not running.done():
                for cut in cuts:
                    cut()
                running.add_done_callback(_forget)

    async def _call(self, dag: str, event: Fact, delivery: str) -> str:
        """One run per delivery, by its key, however often this is repeated."""
        try:
            made = await trigger(
                await self._connect(),
                dag=dag,
                params={"event": dict(event)},
                actor="notification",
                key=f"notification {delivery}",
            )
        except UserError as error:
            # The callback is published with its DAG, a moment later.
            raise DeliveryFailed(str(error), is_final=not isinstance(error, NotFound)) from None
        return f"run {made.run_id}"


def _forget(job: asyncio.Future[str]) -> None:
    """The caller no longer waits: retrieve the exception, so that asyncio does not log it."""
    if not job.cancelled():
        job.exception()
