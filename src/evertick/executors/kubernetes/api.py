"""The connection to a Kubernetes cluster, and the few calls that pods need, as plain JSON.

Only documented calls, through the maintained client. Every call has a timeout; none is retried here.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import yaml  # type: ignore[import-untyped]
from kubernetes_asyncio.client import ApiClient, Configuration, CoreV1Api
from kubernetes_asyncio.config import ConfigException, load_incluster_config, load_kube_config

from evertick.config import Settings
from evertick.domain.errors import EvertickError, ExecutorBusy, ExecutorUnavailable, InvalidSettings, SubmissionRefused

Json = dict[str, Any]
Method = Callable[..., Awaitable[Any]]


_PAGE = 500


_LONGEST_MESSAGE = 1000


# The authorizer's message; admission, which checks the pod itself, uses a different one.
_NO_RIGHT = re.compile(r'User ".*" cannot \w+ resource')


class Refusal(EvertickError):
    """A response that is not 2xx."""

    def __init__(self, status: int, body: Json, retry_after_seconds: float | None) -> None:
        self.status, self.body, self.retry_after_seconds = status, body, retry_after_seconds
        self.reason = str(body.get("reason") or "")
        text = " ".join(str(body.get("message") or f"the Kubernetes API answered {status}").split())
        super().__init__(text[:_LONGEST_MESSAGE])


class KubeApi:
    """Pods and Secrets of one namespace. The client accepts plain JSON as well as its own classes, which are slow."""

    def __init__(
        self, client: ApiClient, *, namespace: str, timeout_seconds: float, on_stranger: Callable[[], None]
    ) -> None:
        """`on_stranger` is called when the API does not accept our credentials, or no longer does."""
        self._core, self._namespace, self._timeout_seconds = CoreV1Api(client), namespace, timeout_seconds
        self._on_stranger = on_stranger

    async def create_pod(self, pod: Any) -> Json:
        """A misspelled field is refused with its name; otherwise the server would silently drop it."""
        return await self._ask(self._core.create_namespaced_pod, self._namespace, pod, field_validation="Strict")

    async def create_secret(self, secret: Any) -> Json:
        return await self._ask(self._core.create_namespaced_secret, self._namespace, secret)

    async def delete_secret(self, name: str) -> None:
        await self._change(self._core.delete_namespaced_secret, name)

    async def read_secret(self, name: str) -> Json | None:
        return await self._look(self._core.read_namespaced_secret, name)

    async def read_pod(self, name: str) -> Json | None:
        """The current state: without a resource version the API server asks its store, never its cache."""
        return await self._look(self._core.read_namespaced_pod, name)

    async def delete_pod(self, name: str, *, uid: str, grace_seconds: int) -> None:
        body = {"gracePeriodSeconds": grace_seconds, "preconditions": {"uid": uid}}
        await self._change(self._core.delete_namespaced_pod, name, body=body)

    async def patch_pod(self, name: str, patch: Json) -> None:
        await self._change(self._core.patch_namespaced_pod, name, body=patch)

    async def list_pods(self, selector: str) -> tuple[list[Json], str]:
        """All of them, page by page, and the resource version of the list. A list that expires midway starts over."""
        try:
            return await self._list(selector, limit=_PAGE)
        except Refusal as refusal:
            if refusal.status != 410:
                raise
        return await self._list(selector)

    async def version(self, selector: str) -> str:
        """The resource version at which a watch can begin now."""
        return str((await self._page(selector, limit=1))["metadata"]["resourceVersion"])

    async def _list(self, selector: str, **more: Any) -> tuple[list[Json], str]:
        found: list[Json] = []
        while True:
            page = await self._page(selector, **more)
            found += page["items"]
            meta = page["metadata"]
            if not meta.get("continue"):
                return found, str(meta["resourceVersion"])
            more["_continue"] = meta["continue"]

    async def _page(self, selector: str, **more: Any) -> Json:
        return await self._ask(self._core.list_namespaced_pod, self._namespace, label_selector=selector, **more)

    async def watch_pods(self, selector: str, version: str, *, seconds: int) -> AsyncIterator[Json]:
        """Events until the server ends the watch. Raises Refusal with 410 when the version is too old."""
        # Bookmarks arrive about once a minute: a connection that is silent for longer is dead.
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=self._timeout_seconds, sock_read=seconds + 10)
        call = self._core.list_namespaced_pod(
            self._namespace,
            label_selector=selector,
            watch=True,
            allow_watch_bookmarks=True,
            resource_version=version,
            timeout_seconds=seconds,
            _preload_content=False,
            _request_timeout=timeout,
        )
        async with _answer(call) as response:
            async for line in _lines(response):
                event: Json = json.loads(line)
                if event["type"] == "ERROR":
                    raise Refusal(int(event["object"].get("code") or 500), event["object"], None)
                yield event

    async def _look(self, method: Method, name: str) -> Json | None:
        try:
            return await self._ask(method, name, self._namespace)
        except Refusal as refusal:
            if refusal.status != 404:
                raise
            return None

    async def _change(self, method: Method, name: str, **fields: Any) -> None:
        """Change an object, if it exists."""
        try:
            await self._ask(method, name, self._namespace, **fields)
        except Refusal as refusal:
            # A conflict of a delete concerns the uid: the object that exists now is another one.
            if refusal.status not in (404, 409):
                raise

    async def _ask(self, method: Method, *names: Any, **fields: Any) -> Json:
        try:
            call = method(*names, **fields, _preload_content=False, _request_timeout=self._timeout_seconds)
            async with _answer(call) as response:
                found: Json = json.loads(await response.read())
                return found
        except Refusal as refusal:
            if refusal.status == 401:
                self._on_stranger()
            raise


@asynccontextmanager
async def _answer(call: Awaitable[Any]) -> AsyncIterator[aiohttp.ClientResponse]:
    try:
        response: aiohttp.ClientResponse = await call
        async with response:
            if not 200 <= response.status <= 299:
                raise Refusal(response.status, _body(await response.read()), _retry_after(response))
            yield response
    except (aiohttp.ClientError, OSError, TimeoutError, asyncio.IncompleteReadError) as error:
        raise ExecutorUnavailable(f"the Kubernetes API does not answer: {_words(error)}") from error
    except json.JSONDecodeError:
        raise ExecutorUnavailable("the Kubernetes API returned a response that is not JSON") from None


async def _lines(response: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    """Lines of any length: the client's own limit is shorter than a pod may be, and one large pod must not end the
    whole watch."""
    begun: list[bytes] = []
    async for part in response.content.iter_any():
        *ended, rest = part.split(b"\n")
        for line in ended:
            yield b"".join([*begun, line])
            begun = []
        begun.append(rest)


def _words(error: BaseException) -> str:
    return "it took too long" if isinstance(error, TimeoutError) else str(error) or type(error).__name__


def _body(raw: bytes) -> Json:
    try:
        found = json.loads(raw)
    except ValueError:
        found = None
    return found if isinstance(found, dict) else {"message": raw[:_LONGEST_MESSAGE].decode("utf-8", "replace")}


def _retry_after(response: aiohttp.ClientResponse) -> float | None:
    text = response.headers.get("Retry-After", "")
    return float(text) if text.isdecimal() else None


def meaning(refusal: Refusal, *, of_task: bool = True) -> EvertickError:
    """The cause of an error: the cluster is full or busy, it is unusable now, or the task's pod is invalid."""
    status, text = refusal.status, str(refusal)
    if status == 429 or status == 409 or (status == 403 and "exceeded quota" in text):
        return ExecutorBusy(text, retry_after_seconds=refusal.retry_after_seconds)
    is_ours = status in (401, 404) or status >= 500 or not of_task
    if is_ours or (status == 403 and (_NO_RIGHT.search(text) or "being terminated" in text)):
        return ExecutorUnavailable(f"the Kubernetes API answered {status}: {text}")
    return SubmissionRefused(f"Kubernetes refused the pod ({status}): {text}")


_RENEWAL_SECONDS = 1.0


_OWN_NAMESPACE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")


@asynccontextmanager
async def connected(settings: Settings) -> AsyncIterator[KubeApi]:
    """Without a kubeconfig: the surrounding cluster, else the kubeconfig file that kubectl would use. Raises
    InvalidSettings if no cluster can be determined. Sends nothing yet."""
    configuration, renewal = Configuration(), _Renewal(settings)
    namespace = await _load(settings, configuration)
    if configuration.refresh_api_key_hook is None:
        configuration.refresh_api_key_hook = renewal.renew
    async with ApiClient(configuration) as client:
        yield KubeApi(
            client,
            namespace=settings.kube_namespace or namespace,
            timeout_seconds=settings.kube_timeout_seconds,
            on_stranger=renewal.want,
        )


class _Renewal:
    """Tokens of most clouds last for minutes: a refused token is read or requested again. Inside a cluster the client
    does so."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._is_wanted, self._renewed_at = False, time.monotonic()

    def want(self) -> None:
        self._is_wanted = True

    async def renew(self, configuration: Configuration) -> None:
        """Called before each request. A credential plugin that returns invalid tokens is not called without a pause."""
        if not self._is_wanted or time.monotonic() - self._renewed_at < _RENEWAL_SECONDS:
            return
        self._is_wanted, self._renewed_at = False, time.monotonic()
        try:
            await _load_kubeconfig(self._settings, configuration)
        except InvalidSettings as error:
            raise ExecutorUnavailable(str(error)) from None


async def _load(settings: Settings, configuration: Configuration) -> str:
    """Returns the namespace that belongs to it."""
    if settings.kubeconfig is None and settings.kube_context is None:
        try:
            load_incluster_config(client_configuration=configuration)  # type: ignore[no-untyped-call]
            return (await asyncio.to_thread(_OWN_NAMESPACE.read_text, encoding="utf-8")).strip()
        except (ConfigException, OSError):
            pass  # not in a cluster
    return await _load_kubeconfig(settings, configuration)


async def _load_kubeconfig(settings: Settings, configuration: Configuration) -> str:
    file = None if settings.kubeconfig is None else str(settings.kubeconfig.expanduser())
    try:
        if file is not None and not await asyncio.to_thread(Path(file).is_file):
            raise FileNotFoundError(f"the file {file} does not exist")
        loader = await load_kube_config(
            config_file=file, context=settings.kube_context, client_configuration=configuration, persist_config=False
        )
        current = loader.current_context or {}
    # The client raises odd errors for files that are not a kubeconfig at all.
    except (ConfigException, OSError, yaml.YAMLError, UnicodeDecodeError, TypeError, KeyError) as error:
        said = " ".join(str(error).split()).rstrip(".")
        raise InvalidSettings(
            f"No Kubernetes cluster can be used: {said}. Set EVERTICK_KUBECONFIG and EVERTICK_KUBE_CONTEXT, or run the runner in"
            " the cluster with a service account."
        ) from None
    found = current["context"].get("namespace") if "context" in current else None
    return str(found or "default")
