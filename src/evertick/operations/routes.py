"""The table of operations: how each one is called over HTTP, and the permission that it requires.

The API makes its routes from this table and the remote client its requests. An operation without a row cannot be called
over HTTP.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from evertick.domain.access import Permission
from evertick.domain.stored_values import ValueKind
from evertick.operations import (
    backfills,
    dags,
    gates,
    notifications,
    runners,
    runs,
    schedules,
    task_logs,
    tasks,
    users,
    values,
    waits,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """One operation over HTTP.

    Parameters whose names are in the path, in `headers` or equal to "body" are taken from there, all others from the
    query. `repeated_status` is the status of a request that was made before (its record says `is_new=False`).
    One function can have several rows: `fixed` has the parameters that its path decides, and `name` tells them apart.
    `stream` is the operation that the same path performs with `follow=true`, as server-sent events. The API's route for
    such a row is written by hand.
    """

    tag: str
    method: str
    path: str
    function: Callable[..., Awaitable[Any]]
    permission: Permission
    status: int = 200
    repeated_status: int | None = None
    headers: frozenset[str] = frozenset()
    fixed: Mapping[str, object] = field(default_factory=dict)
    name: str | None = None
    stream: Callable[..., Awaitable[Any]] | None = None


def _get(path: str, function: Callable[..., Awaitable[Any]], permission: Permission, *, tag: str) -> Route:
    return Route(tag=tag, method="GET", path=path, function=function, permission=permission)


def _post(path: str, function: Callable[..., Awaitable[Any]], permission: Permission, *, tag: str) -> Route:
    return Route(tag=tag, method="POST", path=path, function=function, permission=permission)


def _put(path: str, function: Callable[..., Awaitable[Any]], permission: Permission, *, tag: str) -> Route:
    """A change of a record with a version, which the caller may require with If-Match."""
    headers = frozenset({"if_match"})
    return Route(tag=tag, method="PUT", path=path, function=function, permission=permission, headers=headers)


def _delete(path: str, function: Callable[..., Awaitable[Any]], permission: Permission, *, tag: str) -> Route:
    return Route(tag=tag, method="DELETE", path=path, function=function, permission=permission, status=204)


_RUNS = (
    _get("/runs", runs.list_runs, Permission.READ_RUNS, tag="runs"),
    _get("/latest-runs", runs.list_latest_runs, Permission.READ_RUNS, tag="runs"),
    _get("/runs/{run_id}", runs.show_run, Permission.READ_RUNS, tag="runs"),
    _get("/runs/{run_id}/wait", runs.wait_for_run, Permission.READ_RUNS, tag="runs"),
    _post("/runs/{run_id}/cancel", runs.cancel_run, Permission.CANCEL_RUNS, tag="runs"),
    _post("/runs/{run_id}/clear", runs.clear_run, Permission.CLEAR_TASKS, tag="runs"),
)

_TASKS = (
    _get("/runs/{run_id}/tasks", tasks.list_tasks, Permission.READ_RUNS, tag="tasks"),
    _get("/runs/{run_id}/tasks/{task}", tasks.show_task, Permission.READ_RUNS, tag="tasks"),
    _get("/runs/{run_id}/tasks/{task}/why", tasks.why_task, Permission.READ_RUNS, tag="tasks"),
    _post("/runs/{run_id}/tasks/{task}/mark", tasks.mark_task, Permission.MARK_TASKS, tag="tasks"),
    Route(
        tag="tasks",
        method="GET",
        path="/runs/{run_id}/tasks/{task}/logs",
        function=task_logs.read_log,
        permission=Permission.READ_LOGS,
        stream=task_logs.follow_log,
    ),
)

_DAGS = (
    _get("/dags", dags.list_dags, Permission.READ_DAGS, tag="dags"),
    _get("/dags/{dag}", dags.show_dag, Permission.READ_DAGS, tag="dags"),
    _post("/dags/{dag}/pause", dags.pause_dag, Permission.PAUSE_DAGS, tag="dags"),
    _post("/dags/{dag}/unpause", dags.unpause_dag, Permission.PAUSE_DAGS, tag="dags"),
    Route(
        tag="dags",
        method="DELETE",
        path="/dags/{dag}",
        function=dags.delete_dag,
        permission=Permission.DELETE_DAGS,
        status=204,
    ),
    Route(
        tag="dags",
        method="POST",
        path="/dags/{dag}/runs",
        function=dags.trigger_run,
        permission=Permission.TRIGGER_RUNS,
        status=201,
        repeated_status=200,
        headers=frozenset({"idempotency_key"}),
    ),
    _get("/import-errors", dags.list_import_errors, Permission.READ_IMPORTS, tag="dags"),
    _get("/dags/{dag}/versions", dags.list_versions, Permission.READ_DAGS, tag="versions"),
    _get("/dags/{dag}/versions/{number}", dags.show_version, Permission.READ_DAGS, tag="versions"),
    _get("/dags/{dag}/diff", dags.diff_versions, Permission.READ_DAGS, tag="versions"),
    _post("/dags/{dag}/rollback", dags.roll_back_dag, Permission.ROLL_BACK_DAGS, tag="versions"),
)

_SCHEDULE = "/dags/{dag}/schedules/{name}"
_IF_MATCH = frozenset({"if_match"})

_SCHEDULES = (
    _get("/schedules", schedules.list_all_schedules, Permission.READ_SCHEDULES, tag="schedules"),
    _get("/dags/{dag}/schedules", schedules.list_schedules, Permission.READ_SCHEDULES, tag="schedules"),
    _get(_SCHEDULE, schedules.show_schedule, Permission.READ_SCHEDULES, tag="schedules"),
    Route(
        tag="schedules",
        method="PUT",
        path=_SCHEDULE,
        function=schedules.change,
        permission=Permission.EDIT_SCHEDULES,
        headers=frozenset({"if_match", "idempotency_key"}),
    ),
    Route(
        tag="schedules",
        method="DELETE",
        path=_SCHEDULE,
        function=schedules.delete,
        permission=Permission.EDIT_SCHEDULES,
        status=204,
        headers=_IF_MATCH,
    ),
    Route(
        tag="schedules",
        method="POST",
        path=f"{_SCHEDULE}/pause",
        function=schedules.pause,
        permission=Permission.PAUSE_SCHEDULES,
        headers=_IF_MATCH,
    ),
    Route(
        tag="schedules",
        method="POST",
        path=f"{_SCHEDULE}/unpause",
        function=schedules.unpause,
        permission=Permission.PAUSE_SCHEDULES,
        headers=_IF_MATCH,
    ),
    _post(f"{_SCHEDULE}/reset", schedules.reset, Permission.EDIT_SCHEDULES, tag="schedules"),
    _get(f"{_SCHEDULE}/next", schedules.next_fires, Permission.READ_SCHEDULES, tag="schedules"),
    _get(f"{_SCHEDULE}/history", schedules.history, Permission.READ_SCHEDULES, tag="schedules"),
    _get(f"{_SCHEDULE}/skips", schedules.skips, Permission.READ_SCHEDULES, tag="schedules"),
    _get("/skips", schedules.all_skips, Permission.READ_SCHEDULES, tag="schedules"),
    _post("/schedules/simulate", schedules.simulate, Permission.READ_SCHEDULES, tag="schedules"),
)

_BACKFILLS = (
    _get("/backfills", backfills.list_backfills, Permission.READ_BACKFILLS, tag="backfills"),
    Route(
        tag="backfills",
        method="POST",
        path="/backfills",
        function=backfills.create_backfill,
        permission=Permission.RUN_BACKFILLS,
        status=201,
        repeated_status=200,
        headers=frozenset({"idempotency_key"}),
    ),
    _get("/backfills/{backfill_id}", backfills.show_backfill, Permission.READ_BACKFILLS, tag="backfills"),
    _post("/backfills/{backfill_id}/pause", backfills.pause_backfill, Permission.RUN_BACKFILLS, tag="backfills"),
    _post("/backfills/{backfill_id}/resume", backfills.resume_backfill, Permission.RUN_BACKFILLS, tag="backfills"),
    _post("/backfills/{backfill_id}/cancel", backfills.cancel_backfill, Permission.RUN_BACKFILLS, tag="backfills"),
)

_WAITS = (
    _get("/approvals", waits.list_approvals, Permission.READ_RUNS, tag="approvals"),
    _get("/runs/{run_id}/tasks/{task}/approval", waits.show_approval, Permission.READ_RUNS, tag="approvals"),
    _post("/runs/{run_id}/tasks/{task}/approval", waits.decide, Permission.DECIDE_APPROVALS, tag="approvals"),
    Route(
        tag="events",
        method="POST",
        path="/events/{name}",
        function=waits.send,
        permission=Permission.SEND_EVENTS,
        status=201,
        repeated_status=200,
        headers=frozenset({"idempotency_key"}),
    ),
    _get("/sent-events", waits.list_all_sent, Permission.READ_EVENTS, tag="events"),
    _get("/events/{name}", waits.list_sent, Permission.READ_EVENTS, tag="events"),
    _get("/assets", waits.list_assets, Permission.READ_GATES, tag="assets"),
    Route(
        tag="assets",
        method="POST",
        path="/assets/{name}/updates",
        function=waits.tell,
        permission=Permission.SEND_EVENTS,
        status=201,
    ),
)

_GATES = (
    _get("/pools", gates.list_pools, Permission.READ_GATES, tag="gates"),
    _get("/pools/{name}", gates.show_pool, Permission.READ_GATES, tag="gates"),
    _put("/pools/{name}", gates.put_pool, Permission.EDIT_POOLS, tag="gates"),
    _delete("/pools/{name}", gates.remove_pool, Permission.EDIT_POOLS, tag="gates"),
    _get("/keys", gates.list_keys, Permission.READ_GATES, tag="gates"),
    _get("/keys/{name}", gates.show_key, Permission.READ_GATES, tag="gates"),
    _get("/blocked", gates.list_blocked, Permission.READ_GATES, tag="gates"),
)

_RUNNERS = (
    _get("/runners", runners.list_runners, Permission.READ_RUNNERS, tag="fleet"),
    _post("/runners/drain", runners.drain_runners, Permission.DRAIN_RUNNERS, tag="fleet"),
    _post("/runners/undrain", runners.undrain_runners, Permission.DRAIN_RUNNERS, tag="fleet"),
    _post("/runners/{which}/drain", runners.drain_runner, Permission.DRAIN_RUNNERS, tag="fleet"),
    _post("/runners/{which}/undrain", runners.undrain_runner, Permission.DRAIN_RUNNERS, tag="fleet"),
    _get("/queues", runners.list_queues, Permission.READ_RUNNERS, tag="fleet"),
    _get("/shards", runners.list_shards, Permission.READ_METRICS, tag="fleet"),
    _get("/health", runners.show_health, Permission.READ_METRICS, tag="fleet"),
)


def _values(kind: ValueKind) -> tuple[Route, ...]:
    """The same operations for each kind, at paths of its own."""
    read, edit = Permission.READ_VALUES, Permission.EDIT_VALUES
    rows = (
        (_get(f"/{kind}s", values.list_values, read, tag="values"), f"list_{kind}s"),
        (_get(f"/{kind}s/{{name}}", values.show_value, read, tag="values"), f"show_{kind}"),
        (_put(f"/{kind}s/{{name}}", values.put_value, edit, tag="values"), f"put_{kind}"),
        (_delete(f"/{kind}s/{{name}}", values.delete_value, edit, tag="values"), f"delete_{kind}"),
    )
    return tuple(replace(row, fixed={"kind": kind}, name=name) for row, name in rows)


_VALUES = tuple(row for kind in ValueKind for row in _values(kind))

_NOTIFICATIONS = (
    _get("/notifications", notifications.list_notifications, Permission.READ_NOTIFICATIONS, tag="notifications"),
    _get(
        "/notifications/{number}", notifications.show_notification, Permission.READ_NOTIFICATIONS, tag="notifications"
    ),
    _post("/notifications/retry", notifications.retry_all, Permission.RESEND_NOTIFICATIONS, tag="notifications"),
    _post("/notifications/{number}/retry", notifications.retry, Permission.RESEND_NOTIFICATIONS, tag="notifications"),
    _get("/alerts", notifications.list_alerts, Permission.READ_SCHEDULES, tag="troubles"),
    _get("/quarantine", notifications.list_quarantine, Permission.READ_IMPORTS, tag="troubles"),
)

_USERS = (
    _get("/users", users.list_users, Permission.MANAGE_USERS, tag="users"),
    Route(
        tag="users",
        method="POST",
        path="/users",
        function=users.add_user,
        permission=Permission.MANAGE_USERS,
        status=201,
    ),
    _get("/users/{name}", users.show_user, Permission.MANAGE_USERS, tag="users"),
    Route(
        tag="users",
        method="PATCH",
        path="/users/{name}",
        function=users.change_user,
        permission=Permission.MANAGE_USERS,
    ),
    Route(
        tag="users",
        method="POST",
        path="/users/{name}/link",
        function=users.make_link,
        permission=Permission.MANAGE_USERS,
        status=201,
    ),
    _get("/tokens", users.list_tokens, Permission.OWN, tag="users"),
    Route(
        tag="users",
        method="POST",
        path="/tokens",
        function=users.make_token,
        permission=Permission.OWN,
        status=201,
    ),
    Route(
        tag="users",
        method="DELETE",
        path="/tokens/{token_id}",
        function=users.revoke_token,
        permission=Permission.OWN,
        status=204,
    ),
    _get("/audit", users.list_entries, Permission.READ_AUDIT, tag="audit"),
)

# A request is compared with one route after the other, so the routes that clients poll come first.
ROUTES: tuple[Route, ...] = (
    *(*_RUNS, *_TASKS, *_DAGS, *_SCHEDULES, *_WAITS, *_BACKFILLS),
    *(*_NOTIFICATIONS, *_GATES, *_RUNNERS, *_USERS, *_VALUES),
)
