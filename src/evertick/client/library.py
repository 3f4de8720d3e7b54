"""The client for programs: every operation of the native API as a typed method, sync (`Evertick`) and async (`AsyncEvertick`).

Each method has the parameters and the record of the operation that the server calls. Requests that have no further effect
when they are repeated are repeated after a failure; a request that creates something gets an idempotency key for that.
"""

from __future__ import annotations

import asyncio
import inspect
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from typing import Any, Concatenate, Generic, ParamSpec, Self, TypeVar, cast, overload

import httpx2

from evertick.client.connect import RETRY_SECONDS
from evertick.client.credentials import read_address
from evertick.client.http import HttpClient
from evertick.client.wire import EventReader, Server, result_of
from evertick.domain.errors import OutcomeUnknown, PostgresUnavailable, RateLimited
from evertick.domain.states import TERMINAL_RUN_STATES
from evertick.operations import (
    backfills,
    dags,
    deployments,
    gates,
    launchers,
    notifications,
    proofs,
    requests,
    runner_tokens,
    runners,
    runs,
    schedules,
    state,
    task_logs,
    tasks,
    users,
    values,
    waits,
    webhooks,
)
from evertick.operations.caller import Caller
from evertick.operations.monitoring import checkins, figures, forecasts
from evertick.operations.paging import Page
from evertick.operations.routes import route_of
from evertick.operations.runs import Run
from evertick.operations.task_logs import LogEnd, NewLine, NewLines

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")

# A server waits at most a minute for the end of a run.
_WAIT_SECONDS = 30.0


class Method(Generic[P, R]):
    """An operation as a method: it waits in `Evertick`, and is awaited in `AsyncEvertick`."""

    def __init__(self, operation: Callable[Concatenate[Caller, P], Awaitable[R]]) -> None:
        self.operation = operation

    @overload
    def __get__(self, client: Evertick, kind: type[Evertick]) -> Callable[P, R]: ...
    @overload
    def __get__(self, client: AsyncEvertick, kind: type[AsyncEvertick]) -> Callable[P, Awaitable[R]]: ...
    @overload
    def __get__(self, client: None, kind: type[Any]) -> Self: ...
    def __get__(self, client: Evertick | AsyncEvertick | None, kind: type[Any]) -> Any:
        if client is None:
            return self
        call = client.call

        def method(*args: P.args, **params: P.kwargs) -> Any:
            assert not args
            return call(self.operation, params)

        method.__name__, method.__doc__ = self.operation.__name__, self.operation.__doc__
        return method


class Operations:
    """Every operation of the native API, in the order of its document."""

    list_runs = Method(runs.list_runs)
    list_latest_runs = Method(runs.list_latest_runs)
    show_run = Method(runs.show_run)
    wait_for_run = Method(runs.wait_for_run)
    read_run_log = Method(task_logs.read_run_log)
    cancel_run = Method(runs.cancel_run)
    clear_run = Method(runs.clear_run)
    list_tasks = Method(tasks.list_tasks)
    show_task = Method(tasks.show_task)
    explain_task = Method(tasks.why_task)
    mark_task = Method(tasks.mark_task)
    read_log = Method(task_logs.read_log)
    list_dags = Method(dags.list_dags)
    show_dag = Method(dags.show_dag)
    pause_dag = Method(dags.pause_dag)
    unpause_dag = Method(dags.unpause_dag)
    delete_dag = Method(dags.delete_dag)
    trigger_run = Method(dags.trigger_run)
    list_figures = Method(figures.list_figures)
    show_figures = Method(figures.show_figures)
    list_import_errors = Method(dags.list_import_errors)
    list_versions = Method(dags.list_versions)
    show_version = Method(dags.show_version)
    diff_versions = Method(dags.diff_versions)
    roll_back_dag = Method(dags.roll_back_dag)
    list_all_schedules = Method(schedules.list_all_schedules)
    list_schedules = Method(schedules.list_schedules)
    show_schedule = Method(schedules.show_schedule)
    put_schedule = Method(schedules.put_schedule)
    delete_schedule = Method(schedules.delete_schedule)
    pause_schedule = Method(schedules.pause_schedule)
    unpause_schedule = Method(schedules.unpause_schedule)
    reset_schedule = Method(schedules.reset_schedule)
    list_next_fires = Method(schedules.list_next_fires)
    list_schedule_versions = Method(schedules.list_schedule_versions)
    list_schedule_skips = Method(schedules.list_schedule_skips)
    list_skips = Method(schedules.list_skips)
    simulate_schedule = Method(schedules.simulate_schedule)
    list_approvals = Method(waits.list_approvals)
    show_approval = Method(waits.show_approval)
    decide_approval = Method(waits.decide_approval)
    send_event = Method(waits.send_event)
    list_sent_events = Method(waits.list_sent_events)
    list_dead_letters = Method(requests.list_dead_letters)
    show_dead_letter = Method(requests.show_dead_letter)
    replay_dead_letters = Method(requests.replay_dead_letters)
    replay_dead_letter = Method(requests.replay_dead_letter)
    list_assets = Method(waits.list_assets)
    record_asset_update = Method(waits.record_asset_update)
    list_backfills = Method(backfills.list_backfills)
    create_backfill = Method(backfills.create_backfill)
    show_backfill = Method(backfills.show_backfill)
    pause_backfill = Method(backfills.pause_backfill)
    unpause_backfill = Method(backfills.unpause_backfill)
    cancel_backfill = Method(backfills.cancel_backfill)
    list_deployments = Method(deployments.list_deployments)
    show_deployment = Method(deployments.show_deployment)
    deploy_archive = Method(deployments.deploy_archive)
    list_deployment_versions = Method(deployments.list_deployment_versions)
    diff_deployment_versions = Method(deployments.diff_deployment_versions)
    delete_deployment = Method(deployments.delete_deployment)
    roll_back_deployment = Method(deployments.roll_back_deployment)
    show_upload = Method(deployments.show_upload)
    put_upload = Method(deployments.put_upload)
    list_notifications = Method(notifications.list_notifications)
    show_notification = Method(notifications.show_notification)
    retry_notifications = Method(notifications.retry_notifications)
    retry_notification = Method(notifications.retry_notification)
    list_alerts = Method(notifications.list_alerts)
    show_proof = Method(proofs.show_proof)
    list_quarantine = Method(notifications.list_quarantine)
    list_task_state = Method(state.list_task_state)
    show_task_state = Method(state.show_task_state)
    put_task_state = Method(state.put_task_state)
    delete_task_state = Method(state.delete_task_state)
    list_asset_state = Method(state.list_asset_state)
    show_asset_state = Method(state.show_asset_state)
    put_asset_state = Method(state.put_asset_state)
    delete_asset_state = Method(state.delete_asset_state)
    list_pools = Method(gates.list_pools)
    show_pool = Method(gates.show_pool)
    put_pool = Method(gates.put_pool)
    delete_pool = Method(gates.delete_pool)
    list_keys = Method(gates.list_keys)
    show_key = Method(gates.show_key)
    list_blocked = Method(gates.list_blocked)
    list_runners = Method(runners.list_runners)
    drain_runners = Method(runners.drain_runners)
    undrain_runners = Method(runners.undrain_runners)
    drain_runner = Method(runners.drain_runner)
    undrain_runner = Method(runners.undrain_runner)
    list_runner_tokens = Method(runner_tokens.list_runner_tokens)
    create_runner_token = Method(runner_tokens.create_runner_token)
    revoke_runner_token = Method(runner_tokens.revoke_runner_token)
    list_launchers = Method(launchers.list_launchers)
    list_queues = Method(runners.list_queues)
    list_shards = Method(runners.list_shards)
    show_health = Method(runners.show_health)
    list_users = Method(users.list_users)
    create_user = Method(users.add_user)
    show_user = Method(users.show_user)
    update_user = Method(users.change_user)
    create_link = Method(users.make_link)
    list_tokens = Method(users.list_tokens)
    create_token = Method(users.make_token)
    delete_token = Method(users.revoke_token)
    list_audit = Method(users.list_audit)
    list_values = Method(values.list_values)
    show_value = Method(values.show_value)
    put_value = Method(values.put_value)
    delete_value = Method(values.delete_value)
    show_forecast = Method(forecasts.show_forecast)
    forecast_run = Method(forecasts.forecast_run)
    list_webhooks = Method(webhooks.list_webhooks)
    show_webhook = Method(webhooks.show_webhook)
    put_webhook = Method(webhooks.put_webhook)
    delete_webhook = Method(webhooks.delete_webhook)
    list_checkins = Method(checkins.list_checkins)
    show_checkin = Method(checkins.show_checkin)
    put_checkin = Method(checkins.put_checkin)
    delete_checkin = Method(checkins.delete_checkin)
    record_checkin = Method(checkins.record_checkin)
    list_partitions = Method(waits.list_partitions)


class _Policy:
    """Which failures of one call are followed by another try, and after how long."""

    def __init__(self, operation: Callable[..., Awaitable[Any]], params: Mapping[str, Any]) -> None:
        self.params = dict(params)
        if "idempotency_key" in inspect.signature(operation).parameters and not self.params.get("idempotency_key"):
            self.params["idempotency_key"] = f"client-{secrets.token_hex(8)}"
        self._is_repeatable = "idempotency_key" in self.params or route_of(operation, params).method == "GET"
        self._pauses = iter(RETRY_SECONDS)

    def pause_after(self, error: PostgresUnavailable | RateLimited) -> float:
        """The seconds to wait. Raises the error if it is final: also if the request may have been processed."""
        if isinstance(error, OutcomeUnknown) and not self._is_repeatable:
            raise error
        pause = next(self._pauses, None)
        if pause is None:
            raise error
        return max(pause, (error.retry_after_seconds or 0.0) if isinstance(error, RateLimited) else 0.0)


class _Http(HttpClient):
    """Says nothing on standard error."""

    def _pause_after(self, failures: int) -> float:
        return RETRY_SECONDS[min(failures, len(RETRY_SECONDS)) - 1]


class Evertick(Operations):
    """A connection to a server. Use it in a `with` statement, in one thread at a time."""

    def __init__(self, address: str, *, token: str | None = None) -> None:
        self._http = _Http(read_address(address), token)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._http.close()

    def call(self, operation: Callable[..., Awaitable[R]], params: Mapping[str, Any]) -> R:
        policy = _Policy(operation, params)
        while True:
            try:
                return self._http.call(operation, **policy.params)
            except (PostgresUnavailable, RateLimited) as error:
                time.sleep(policy.pause_after(error))

    def items(self, method: Callable[P, Page[T]], *args: P.args, **params: P.kwargs) -> Iterator[T]:
        """Every item of a list, page by page: `client.items(client.list_runs, dag="etl")`."""
        assert not args
        cursor: str | None = None
        while True:
            page = cast("Callable[..., Page[T]]", method)(**params, **({} if cursor is None else {"cursor": cursor}))
            yield from page.items
            if (cursor := page.next_cursor) is None:
                return

    def wait(self, run_id: int, *, timeout_seconds: float | None = None) -> Run:
        """The run when it has ended. Raises TimeoutError if it has not by then."""
        deadline = None if timeout_seconds is None else time.monotonic() + timeout_seconds
        while True:
            run = self.wait_for_run(run_id=run_id, seconds=_left(deadline))
            if is_over(run, deadline):
                return run

    def follow_log(self, run_id: int, task: str, *, map_index: int = -1) -> Iterator[NewLine]:
        """The lines of a task until it has ended. A stream that breaks is continued where it was."""
        for event in self._http.stream(task_logs.follow_log, run_id=run_id, task=task, map_index=map_index):
            if isinstance(event, NewLines):
                yield from event.lines


class AsyncEvertick(Operations):
    """The same with methods to await. Use it in an `async with` statement."""

    def __init__(self, address: str, *, token: str | None = None) -> None:
        self._server = Server(address=read_address(address), token=token)
        self._http = httpx2.AsyncClient(**self._server.options)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        await self._http.aclose()

    async def call(self, operation: Callable[..., Awaitable[R]], params: Mapping[str, Any]) -> R:
        policy = _Policy(operation, params)
        while True:
            request = self._server.request_of(operation, policy.params)
            try:
                return cast("R", result_of(operation, await self._send(request)))
            except (PostgresUnavailable, RateLimited) as error:
                await asyncio.sleep(policy.pause_after(error))

    async def items(
        self, method: Callable[P, Awaitable[Page[T]]], *args: P.args, **params: P.kwargs
    ) -> AsyncIterator[T]:
        """Every item of a list, page by page."""
        assert not args
        cursor: str | None = None
        while True:
            more = {} if cursor is None else {"cursor": cursor}
            page = await cast("Callable[..., Awaitable[Page[T]]]", method)(**params, **more)
            for each in page.items:
                yield each
            if (cursor := page.next_cursor) is None:
                return

    async def wait(self, run_id: int, *, timeout_seconds: float | None = None) -> Run:
        """The run when it has ended. Raises TimeoutError if it has not by then."""
        deadline = None if timeout_seconds is None else time.monotonic() + timeout_seconds
        while True:
            run = await self.wait_for_run(run_id=run_id, seconds=_left(deadline))
            if is_over(run, deadline):
                return run

    async def follow_log(self, run_id: int, task: str, *, map_index: int = -1) -> AsyncIterator[NewLine]:
        """The lines of a task until it has ended. A stream that breaks is continued where it was."""
        after: str | None = None
        pauses = iter(RETRY_SECONDS)
        while True:
            params = {"run_id": run_id, "task": task, "map_index": map_index, "after": after}
            try:
                async for event in self._events(params):
                    after, pauses = event.id, iter(RETRY_SECONDS)
                    if isinstance(event, NewLines):
                        for each in event.lines:
                            yield each
                    elif isinstance(event, LogEnd):
                        return
            except PostgresUnavailable:
                if (pause := next(pauses, None)) is None:
                    raise
                await asyncio.sleep(pause)

    async def _events(self, params: Mapping[str, Any]) -> AsyncIterator[Any]:
        reader = EventReader(task_logs.follow_log)
        request = self._server.request_of(task_logs.follow_log, params, follows=True)
        answer = await self._send(request, is_streamed=True)
        try:
            async for line in answer.aiter_lines():
                if (event := reader.feed(line)) is not None:
                    yield event
        except httpx2.HTTPError as error:
            raise self._server.failure("GET", error) from None
        finally:
            await answer.aclose()

    async def _send(self, request: dict[str, Any], *, is_streamed: bool = False) -> httpx2.Response:
        try:
            answer = await self._http.send(self._http.build_request(**request), stream=is_streamed)
            if answer.status_code >= 300:
                await answer.aread()
        except httpx2.HTTPError as error:
            raise self._server.failure(request["method"], error) from None
        self._server.check(request, answer)
        return answer


def _left(deadline: float | None) -> float:
    return _WAIT_SECONDS if deadline is None else min(_WAIT_SECONDS, max(deadline - time.monotonic(), 0.0))


def is_over(run: Run, deadline: float | None) -> bool:
    """Whether the run has ended. Raises TimeoutError if its time is up."""
    if run.state in TERMINAL_RUN_STATES:
        return True
    if deadline is not None and time.monotonic() >= deadline:
        raise TimeoutError(f"Run {run.run_id} of {run.dag} is {run.state} and has not ended in time.")
    return False
