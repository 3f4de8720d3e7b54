"""A Kubernetes API server over HTTP: create, read, replace, patch, delete, list with pages, watch with bookmarks, and faults.

What clients see is what the documentation of the API promises, no more: a list may expire, a watch may end at any time.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aiohttp import web
from kubernetes_asyncio.client import V1Container, V1PodSpec

from tests.executors.kubernetes.objects import (
    SINGULAR,
    Change,
    Failure,
    Json,
    Objects,
    Selector,
    field_selector,
    label_selector,
)
from tests.waiting import elapse

_FOR_EVER = 10**9
_TRUE = ("1", "t", "T", "true", "True", "TRUE")


@dataclass(slots=True)
class Fault:
    """What happens to requests of a verb and kind ("" for all): `times` of them wait, are answered so, or lose their answer.

    `after`: the request is carried out, and its answer never comes (`hangs`) or the connection breaks.
    """

    verb: str = ""
    kind: str = ""
    times: int = _FOR_EVER
    latency_seconds: float = 0.0
    failure: Failure | None = None
    after: bool = False
    breaks: bool = False

    def takes(self, verb: str, kind: str) -> bool:
        return self.times > 0 and self.verb in ("", verb) and self.kind in ("", kind)


def too_many(retry_after: int) -> Failure:
    return Failure(
        429,
        "TooManyRequests",
        "the server has received too many requests and has asked us to try again later",
        headers={"Retry-After": str(retry_after)},
    )


def quota_conflict() -> Failure:
    """Two creates that count against one quota at the same moment."""
    said = 'Operation cannot be fulfilled on resourcequotas "pods": the object has been modified; please apply your changes'
    return Failure(409, "Conflict", f"{said} to the latest version and try again")


def internal() -> Failure:
    return Failure(500, "InternalError", "Internal error occurred: etcdserver: request timed out")


@dataclass(slots=True)
class _Snapshot:
    """What the rest of a list is read from: the state at its first page."""

    version: int
    items: list[Json]


@dataclass(slots=True)
class ApiServer:
    """`requests` counts what was asked, `refused` what was answered with a failure, `bodies` are all that clients sent."""

    objects: Objects = field(default_factory=Objects)
    token: str = "a-client-s-token"
    bookmark_seconds: float = 60.0
    longest_watch_seconds: float = 3600.0
    most_per_page: int = _FOR_EVER
    faults: list[Fault] = field(default_factory=list)
    forbidden: set[tuple[str, str]] = field(default_factory=set)
    requests: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    bodies: list[tuple[str, str, Json]] = field(default_factory=list)
    url: str = ""
    _lists: dict[str, _Snapshot] = field(default_factory=dict)
    _watches: set[asyncio.Task[None] | asyncio.Future[Any]] = field(default_factory=set)

    def expire_lists(self) -> None:
        self._lists.clear()

    @property
    def open_watches(self) -> int:
        return len(self._watches)

    def end_watches(self) -> None:
        """As a restarted server would: connections just end."""
        for watch in list(self._watches):
            watch.cancel()

    def write_kubeconfig(self, file: Path, *, namespace: str = "default") -> Path:
        file.write_text(
            json.dumps(
                {
                    "apiVersion": "v1",
                    "kind": "Config",
                    "current-context": "test",
                    "clusters": [{"name": "test", "cluster": {"server": self.url}}],
                    "users": [{"name": "test", "user": {"token": self.token}}],
                    "contexts": [
                        {"name": "test", "context": {"cluster": "test", "user": "test", "namespace": namespace}}
                    ],
                }
            )
        )
        return file

    # -- HTTP

    def app(self) -> web.Application:
        app = web.Application(client_max_size=4 * 1024 * 1024)
        kind = "{kind:pods|secrets}"
        one = f"/api/v1/namespaces/{{namespace}}/{kind}/{{name}}"
        app.router.add_route("POST", f"/api/v1/namespaces/{{namespace}}/{kind}", self._serve)
        app.router.add_route("GET", f"/api/v1/namespaces/{{namespace}}/{kind}", self._serve)
        for path in (one, f"{one}/{{part:status}}"):
            for method in ("GET", "PUT", "PATCH", "DELETE"):
                app.router.add_route(method, path, self._serve)
        return app

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        kind, verb = request.match_info["kind"], _verb(request)
        self.requests[f"{verb} {kind}"] += 1
        fault = next((each for each in self.faults if each.takes(verb, kind)), None)
        try:
            # As a real one it has the whole request before it does anything, and does it, although nobody may wait for the answer.
            await request.read()
            if fault is not None:
                fault.times -= 1
                await elapse(fault.latency_seconds)
                if not fault.after:
                    _break(request, fault)
            self._authorize(request, verb, kind)
            if verb == "watch":
                return await self._watch(request, kind)
            answer = await self._answer(request, verb, kind)
            if fault is not None and fault.after:
                _break(request, fault)
                await elapse(_FOR_EVER)
            return web.json_response(answer, status=201 if verb == "create" else 200)
        except Failure as failure:
            self.refused[f"{verb} {kind} {failure.code} {failure.body['reason']}"] += 1
            return web.json_response(failure.body, status=failure.code, headers=failure.headers)

    def _authorize(self, request: web.Request, verb: str, kind: str) -> None:
        if request.headers.get("Authorization") != f"Bearer {self.token}":
            raise Failure(401, "Unauthorized", "Unauthorized")
        if (verb, kind) in self.forbidden:
            who = 'User "system:serviceaccount:default:evertick"'
            said = (
                f'cannot {verb} resource "{kind}" in API group "" in the namespace "{request.match_info["namespace"]}"'
            )
            raise Failure(403, "Forbidden", f"{kind} is forbidden: {who} {said}")

    async def _answer(self, request: web.Request, verb: str, kind: str) -> Json:
        namespace, name = request.match_info["namespace"], request.match_info.get("name", "")
        part = request.match_info.get("part")
        body = await _body(request)
        if verb in ("create", "update", "patch"):
            self.bodies.append((verb, kind, body))
        match verb:
            case "create":
                if request.query.get("fieldValidation") == "Strict":
                    _refuse_unknown(kind, body)
                return self.objects.create(kind, namespace, body)
            case "get":
                return self.objects.get(kind, namespace, name)
            case "update":
                return self.objects.replace(kind, namespace, name, body, part=part)
            case "patch":
                return self.objects.patch(kind, namespace, name, body, part=part)
            case "delete":
                if (seconds := request.query.get("gracePeriodSeconds")) is not None:
                    body.setdefault("gracePeriodSeconds", int(seconds))
                return self.objects.delete(kind, namespace, name, body)
        return self._list(request, kind, namespace)

    def _list(self, request: web.Request, kind: str, namespace: str) -> Json:
        wanted = _selector(request)
        if token := request.query.get("continue"):
            if token not in self._lists:
                said = "The provided continue parameter is too old to display a consistent list result."
                raise Failure(410, "Expired", said)
            snapshot = self._lists.pop(token)
        else:
            items = [each for each in self.objects.all_of(kind, namespace) if wanted(each)]
            snapshot = _Snapshot(self.objects.version, items)
        limit = int(request.query.get("limit") or 0)
        size = min(limit, self.most_per_page) if limit else len(snapshot.items)
        page, rest = snapshot.items[:size], snapshot.items[size:]
        meta: Json = {"resourceVersion": str(snapshot.version)}
        if rest:
            token = f"{snapshot.version}.{len(rest)}.{len(self._lists)}.{self.requests.total()}"
            self._lists[token] = _Snapshot(snapshot.version, rest)
            meta["continue"] = token
        # In a list neither items nor their kind say what they are.
        plain = [{key: value for key, value in each.items() if key not in ("kind", "apiVersion")} for each in page]
        return {"kind": f"{SINGULAR[kind]}List", "apiVersion": "v1", "metadata": meta, "items": plain}

    async def _watch(self, request: web.Request, kind: str) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        await response.prepare(request)
        seconds = min(float(request.query.get("timeoutSeconds") or 3600), self.longest_watch_seconds)
        task = asyncio.ensure_future(self._stream(request, response, kind))
        self._watches.add(task)
        try:
            with suppress(TimeoutError, asyncio.CancelledError, ConnectionError):
                async with asyncio.timeout(seconds):
                    await task
        finally:
            self._watches.discard(task)
        return response

    async def _stream(self, request: web.Request, response: web.StreamResponse, kind: str) -> None:
        namespace, wanted = request.match_info["namespace"], _selector(request)

        async def send(how: str, what: Json) -> None:
            await response.write(json.dumps({"type": how, "object": what}).encode() + b"\n")

        asked = request.query.get("resourceVersion") or "0"
        version = int(asked)
        if version == 0:
            version = self.objects.version
            for each in self.objects.all_of(kind, namespace):
                if wanted(each):
                    await send("ADDED", each)
        while True:
            try:
                changes = list(self.objects.changes_since(version, kind))
            except Failure as failure:
                return await send("ERROR", failure.body)
            version = max(version, self.objects.version)
            for change in changes:
                if change.now["metadata"]["namespace"] == namespace and (event := _event(change, wanted)):
                    await send(event, change.now)
            try:
                async with asyncio.timeout(self.bookmark_seconds):
                    await self.objects.changed(version)
            except TimeoutError:
                if request.query.get("allowWatchBookmarks") in _TRUE:
                    meta = {"resourceVersion": str(version), "creationTimestamp": None}
                    await send("BOOKMARK", {"kind": SINGULAR[kind], "apiVersion": "v1", "metadata": meta})


def _event(change: Change, wanted: Selector) -> str | None:
    """What a watch with a selector sees: an object that no longer fits is as good as deleted."""
    did = change.before is not None and wanted(change.before)
    does = wanted(change.now)
    if change.type == "DELETED":
        return "DELETED" if did or does else None
    if does:
        return "MODIFIED" if did else "ADDED"
    return "DELETED" if did else None


def _verb(request: web.Request) -> str:
    if request.method == "GET" and "name" not in request.match_info:
        return "watch" if request.query.get("watch") in _TRUE else "list"
    return {"POST": "create", "GET": "get", "PUT": "update", "PATCH": "patch", "DELETE": "delete"}[request.method]


def _refuse_unknown(kind: str, body: Json) -> None:
    """Without `fieldValidation=Strict` a server drops what it does not know, and only warns."""
    spec = body.get("spec") or {}
    parts = [("spec", spec, V1PodSpec)] if kind == "pods" else []
    parts += [
        (f"spec.containers[{n}]", each, V1Container) for n, each in enumerate(spec.get("containers") or []) if parts
    ]
    for place, given, model in parts:
        for name in given.keys() - set(model.attribute_map.values()):
            said = f'strict decoding error: unknown field "{place}.{name}"'
            raise Failure(400, "BadRequest", f'Pod in version "v1" cannot be handled as a Pod: {said}')


def _selector(request: web.Request) -> Selector:
    labels, fields = (
        label_selector(request.query.get("labelSelector", "")),
        field_selector(request.query.get("fieldSelector", "")),
    )
    return lambda each: labels(each) and fields(each)


async def _body(request: web.Request) -> Json:
    raw = await request.read()
    if not raw:
        return {}
    if request.method == "PATCH" and not re.match(r"application/(strategic-)?merge-patch\+json", request.content_type):
        raise Failure(
            415, "UnsupportedMediaType", f"the body of the request was in an unknown format: {request.content_type}"
        )
    try:
        found = json.loads(raw)
    except ValueError:
        raise Failure(400, "BadRequest", "the object provided is unrecognized (must be of type Pod)") from None
    if not isinstance(found, dict):
        raise Failure(400, "BadRequest", "the object provided is unrecognized (must be of type Pod)")
    return found


def _break(request: web.Request, fault: Fault) -> None:
    if fault.breaks:
        assert request.transport is not None
        request.transport.abort()
        raise Failure(500, "InternalError", "nobody hears this")
    if fault.failure is not None:
        raise fault.failure


@asynccontextmanager
async def api_server(server: ApiServer | None = None, *, port: int = 0) -> AsyncIterator[ApiServer]:
    """A server at a port of its own, with its garbage collector. Ends its watches when it ends."""
    server = server or ApiServer()
    runner = web.AppRunner(server.app(), access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    host, bound = runner.addresses[0][:2]
    server.url = f"http://{host}:{bound}"
    collector = asyncio.create_task(_collect(server.objects))
    try:
        yield server
    finally:
        collector.cancel()
        server.end_watches()
        await runner.cleanup()


async def _collect(objects: Objects) -> None:
    version = 0
    while True:
        await objects.changed(version)
        version = objects.version
        objects.collect_garbage()
