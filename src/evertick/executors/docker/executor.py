"""Runs each attempt in a container with the attempt's name, through the Engine API of Docker or Podman. The state is always
read from the engine.

A container is created, receives its token, and is started. After any interruption the next try continues from the state
that it finds, and never starts a container that has ended: the engine would run it again.
"""

from __future__ import annotations

import asyncio
import json
import re
import ssl
from collections.abc import AsyncIterator
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any, Self

from evertick.config import Settings
from evertick.domain.attempt import session_text
from evertick.domain.errors import ExecutorUnavailable, InvalidSettings, SubmissionRefused
from evertick.executors.base import Observed, Order, Phase
from evertick.executors.docker.container import (
    OUTCOME_FILE,
    OWNER_LABEL,
    SESSION_LABEL,
    Json,
    container_of,
    file_in,
    files_of,
    has_started,
    inspected,
    listed,
    user_in,
    whole_seconds,
)
from evertick.executors.http_endpoint import Answer, Ask, HttpEndpoint
from evertick.executors.task_options import TaskOptions

_SECONDS = 30.0
_EVENTS_SECONDS = 240.0
# A submission waits so long for an image, below the limit of a call; the pull itself goes on.
_PULL_SECONDS = 45.0
_LONGEST_PULL_SECONDS = 3600.0
_MOST_LOOKS, _LOOK_SECONDS = 20, 0.1
_TAKEN = re.compile(r"already in use")
# Podman answers 500 to everything; these texts name a mistake of the task, which no retry would correct.
_OF_THE_TASK = re.compile(
    r"executable file not found|invalid mount|no such image|unable to find network|network \S+ not found"
)


class DockerExecutor:
    """The remote executor of one engine. `executor_owner` distinguishes the containers of this installation."""

    def __init__(self, settings: Settings) -> None:
        self._settings, self._owner = settings, settings.executor_owner
        self._options = TaskOptions("docker", settings)
        tls = _tls(settings.docker_certs) if settings.docker_certs else None
        self._engine = HttpEndpoint(settings.docker_host, setting="EVERTICK_DOCKER_HOST", tls=tls)
        if self._engine.is_exposed:
            raise InvalidSettings(
                f"EVERTICK_DOCKER_HOST={settings.docker_host} has no TLS: everybody who reaches that port has all rights on"
                " the machine. Set EVERTICK_DOCKER_CERTS to the folder with ca.pem, cert.pem and key.pem."
            )
        self._pulls: dict[str, asyncio.Task[None]] = {}
        self._stops: dict[str, asyncio.Task[None]] = {}

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        """Containers keep running, also those that are being stopped."""
        tasks = [*self._pulls.values(), *self._stops.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def submit(self, order: Order) -> None:
        """Idempotent: if the attempt's own container exists, continue from its state."""
        options, image = self._options.of(order), f"evertick:{version('evertick')}"
        body = container_of(order, options, owner=self._owner, image=image, settings=self._settings)
        if options.get("pull") == "always" and await self._inspect(order.name) is None:
            await self._pull(body["Image"])
        container = await self._create(order, body, may_pull=options.get("pull") != "never")
        if has_started(container):
            return
        try:
            await self._start(order, container)
        except SubmissionRefused:
            # Nothing is left of an attempt that is refused; one that another runner has started is not removed.
            with suppress(ExecutorUnavailable):
                await self._remove(order.name)
            raise

    async def observe(self) -> dict[str, Observed]:
        filters = {"label": [f"{OWNER_LABEL}={self._owner}"]}
        answer = await self._ask(Ask(method="GET", path="/containers/json", query={"all": "1", "filters": filters}))
        if not answer.is_good:
            raise ExecutorUnavailable(answer.message)
        return {each["Names"][0].lstrip("/"): listed(each) for each in answer.json() if each.get("Names")}

    async def find(self, name: str) -> Observed | None:
        container = await self._inspect(name)
        if container is None or not self._is_ours(container):
            return None
        outcome = None
        if has_started(container):
            answer = await self._ask(Ask(method="GET", path=_of(name, "archive"), query={"path": OUTCOME_FILE}))
            outcome = file_in(answer.body) if answer.is_good else None
        return inspected(container, outcome)

    async def cancel(self, name: str, grace_seconds: float) -> None:
        """Stopping takes as long as the task needs, so it goes on after the return, and begins anew after a restart."""
        container = await self._inspect(name)
        if container is None or not self._is_ours(container) or name in self._stops:
            return
        if inspected(container, None).phase is Phase.RUNNING:
            self._stops[name] = asyncio.create_task(self._stop(name, grace_seconds))
        else:
            await self._remove(name)

    async def hints(self) -> AsyncIterator[None]:
        filters = {"type": ["container"], "label": [f"{OWNER_LABEL}={self._owner}"]}
        events = Ask(method="GET", path="/events", query={"filters": filters})
        while True:
            with suppress(TimeoutError):
                async for _ in self._engine.lines(events, seconds=_EVENTS_SECONDS):
                    yield
                return
            yield

    async def _create(self, order: Order, body: Json, *, may_pull: bool) -> Json:
        """The container's state, whether it was created now or before. Docker answers 409 if it exists, Podman 500."""
        create = Ask(method="POST", path="/containers/create", query={"name": order.name}, body=_bytes(body))
        answer = await self._ask(create)
        if answer.status == 404 and may_pull:
            await self._pull(body["Image"])
            answer = await self._ask(create)
        container = await self._inspect(order.name)
        for _ in range(_MOST_LOOKS):
            if container is not None or not _TAKEN.search(answer.message):
                break
            # Another runner is creating it: its name is taken a moment before it can be inspected.
            await asyncio.sleep(_LOOK_SECONDS)
            container = await self._inspect(order.name)
        if container is None:
            _accepted(answer, order)
            raise ExecutorUnavailable(f"container {order.name} existed and is gone: try again")
        labels = (container.get("Config") or {}).get("Labels") or {}
        if labels.get(SESSION_LABEL) != session_text(order.session) or not self._is_ours(container):
            raise SubmissionRefused(
                f"a container {order.name} exists that is not the one of {order.what}. Remove it, and try again."
            )
        return container

    async def _start(self, order: Order, container: Json) -> None:
        user, group = await self._user_of(order.name, container)
        where = {"path": "/"}
        content = files_of(order, user=user, group=group)
        put = Ask(method="PUT", path=_of(order.name, "archive"), query=where, body=content, kind="application/x-tar")
        _accepted(await self._ask(put), order)
        started = await self._ask(Ask(method="POST", path=_of(order.name, "start")))
        if started.status != 304:
            _accepted(started, order)

    async def _user_of(self, name: str, container: Json) -> tuple[int, int]:
        """The agent's user in the container, by number: the files that are put there belong to it."""
        user = str((container.get("Config") or {}).get("User") or "")
        if (found := user_in(b"", user)) is None:
            answer = await self._ask(Ask(method="GET", path=_of(name, "archive"), query={"path": "/etc/passwd"}))
            accounts = file_in(answer.body, most_bytes=1_000_000) if answer.is_good else None
            found = user_in(accounts or b"", user)
        if found is None:
            raise SubmissionRefused(f"its image has no user {user!r}: use one of its /etc/passwd, or a number.")
        return found

    async def _pull(self, image: str) -> None:
        """Wait for the image. A pull that takes longer goes on, and the next try waits for the same."""
        pull = self._pulls.get(image)
        if pull is None:
            pull = self._pulls[image] = asyncio.create_task(self._pull_whole(image))
            pull.add_done_callback(lambda _: self._pulls.pop(image, None))
        done, _ = await asyncio.wait([pull], timeout=_PULL_SECONDS)
        if not done:
            raise ExecutorUnavailable(f"image {image} is still being pulled")
        pull.result()

    async def _pull_whole(self, image: str) -> None:
        name, tag = _parts(image)
        query = {"fromImage": name, **({"tag": tag} if tag else {})}
        answer = await self._engine.ask(
            Ask(method="POST", path="/images/create", query=query), seconds=_LONGEST_PULL_SECONDS
        )
        # A failure after the answer's head is its last line.
        said = re.findall(rb'"error"\s*:\s*"((?:[^"\\]|\\.)*)"', answer.body)
        if answer.is_good and not said:
            return
        why = said[-1].decode("utf-8", "replace") if said else answer.message
        if answer.status == 404 or re.search(r"not found|manifest unknown|denied|unauthorized|no such image", why):
            raise SubmissionRefused(f"image {image} cannot be pulled: {why}.")
        raise ExecutorUnavailable(f"image {image} cannot be pulled: {why}")

    async def _stop(self, name: str, grace_seconds: float) -> None:
        """End it in its grace period or by force, then remove it. Errors are left to the next try."""
        try:
            seconds = whole_seconds(grace_seconds)
            stop = Ask(method="POST", path=_of(name, "stop"), query={"t": str(seconds)})
            with suppress(ExecutorUnavailable):
                await self._engine.ask(stop, seconds=seconds + _SECONDS)
                await self._remove(name)
        finally:
            self._stops.pop(name, None)

    async def _remove(self, name: str) -> None:
        """With its anonymous volumes. One that is missing, or is being removed already, is a success."""
        answer = await self._ask(Ask(method="DELETE", path=_of(name), query={"v": "1"}))
        if not answer.is_good and answer.status not in (404, 409):
            raise ExecutorUnavailable(answer.message)

    async def _inspect(self, name: str) -> Json | None:
        answer = await self._ask(Ask(method="GET", path=_of(name, "json")))
        if answer.status == 404:
            return None
        if not answer.is_good:
            raise ExecutorUnavailable(answer.message)
        found: Json = answer.json()
        # The engine also finds a container by the beginning of its id.
        return found if str(found.get("Name", "")).lstrip("/") == name else None

    def _is_ours(self, container: Json) -> bool:
        labels: dict[str, Any] = (container.get("Config") or {}).get("Labels") or {}
        return labels.get(OWNER_LABEL) == self._owner

    async def _ask(self, ask: Ask) -> Answer:
        return await self._engine.ask(ask, seconds=_SECONDS)


def _accepted(answer: Answer, order: Order) -> None:
    """Raises what an answer that is not 2xx means for this attempt."""
    if answer.is_good:
        return
    if answer.status in (400, 404) or _OF_THE_TASK.search(answer.message):
        raise SubmissionRefused(f"the engine refuses the container of {order.what}: {answer.message}")
    raise ExecutorUnavailable(answer.message)


def _of(name: str, what: str = "") -> str:
    return f"/containers/{name}/{what}".rstrip("/")


def _bytes(body: Json) -> bytes:
    return json.dumps(body).encode()


def _parts(image: str) -> tuple[str, str]:
    """Name and tag. Without a tag it is `latest`: an engine would pull all of them. A digest is part of the name."""
    if "@" in image:
        return image, ""
    name, colon, tag = image.rpartition(":")
    return (name, tag) if colon and "/" not in tag else (image, "latest")


def _tls(folder: Path) -> ssl.SSLContext:
    """The files that Docker's own client uses."""
    try:
        context = ssl.create_default_context(cafile=str(folder / "ca.pem"))
        context.load_cert_chain(str(folder / "cert.pem"), str(folder / "key.pem"))
    except OSError as error:
        raise InvalidSettings(
            f"EVERTICK_DOCKER_CERTS={folder} cannot be used: {error.strerror or error}. It needs ca.pem, cert.pem and key.pem."
        ) from None
    return context
