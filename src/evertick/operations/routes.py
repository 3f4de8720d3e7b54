"""The table of operations: how each one is called over HTTP, and the permission that it requires.

The API makes its routes from this table and the remote client its requests. An operation without a row cannot be called
over HTTP.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from typing import Any

from evertick.domain.access import Permission
from evertick.domain.stored_values import ValueKind
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
from evertick.operations.monitoring import checkins, figures, forecasts

Operation = Callable[..., Awaitable[Any]]

# The parameters of operations that are headers of a request: If-Match and Idempotency-Key.
HEADERS = frozenset({"if_match", "idempotency_key"})


@dataclass(frozen=True, slots=True)
class Route:
    """One operation over HTTP.

    Parameters whose names are in the path, in `HEADERS` or equal to "body" are taken from there, all others from the
    query. "content" is a body of plain bytes.
    `repeated_status` is the status of a request that was made before, or that replaced what existed (its record
    says `is_new=False`). `errors` are statuses of errors that do not follow from the method, the path and the parameters.
    One function can have several rows: `fixed` has the parameters that its path decides, and `name` tells them apart.
    `stream` is the operation that the same path performs with `follow=true`, as server-sent events. The API's route for
    such a row is written by hand.
    """

    method: str
    path: str
    function: Operation
    permission: Permission
    _: KW_ONLY
    tag: str
    status: int = 200
    repeated_status: int | None = None
    fixed: Mapping[str, object] = field(default_factory=dict)
    name: str | None = None
    stream: Operation | None = None
    errors: tuple[int, ...] = ()


_get = partial(Route, "GET")
_post = partial(Route, "POST")
# A caller may repeat it with the same Idempotency-Key: the second answer has status 200.
_create = partial(Route, "POST", status=201, repeated_status=200)
_put = partial(Route, "PUT", status=201, repeated_status=200)
_patch = partial(Route, "PATCH")
_delete = partial(Route, "DELETE", status=204)

_RUNS = (
    _get("/runs", runs.list_runs, Permission.READ_RUNS, tag="runs"),
    _get("/latest-runs", runs.list_latest_runs, Permission.READ_RUNS, tag="runs"),
    _get("/runs/{run_id}", runs.show_run, Permission.READ_RUNS, tag="runs"),
    _get("/runs/{run_id}/wait", runs.wait_for_run, Permission.READ_RUNS, tag="runs"),
    _get("/runs/{run_id}/logs", task_logs.read_run_log, Permission.READ_LOGS, tag="runs"),
    _post("/runs/{run_id}/cancel", runs.cancel_run, Permission.CANCEL_RUNS, tag="runs"),
    _post("/runs/{run_id}/clear", runs.clear_run, Permission.CLEAR_TASKS, tag="runs"),
)

_TASK = "/runs/{run_id}/tasks/{task}"

_TASKS = (
    _get("/runs/{run_id}/tasks", tasks.list_tasks, Permission.READ_RUNS, tag="tasks"),
    _get(_TASK, tasks.show_task, Permission.READ_RUNS, tag="tasks"),
    _get(f"{_TASK}/why", tasks.why_task, Permission.READ_RUNS, tag="tasks", name="explain_task"),
    _post(f"{_TASK}/mark", tasks.mark_task, Permission.MARK_TASKS, tag="tasks"),
    _get(f"{_TASK}/logs", task_logs.read_log, Permission.READ_LOGS, tag="tasks", stream=task_logs.follow_log),
)

_DAGS = (
    _get("/dags", dags.list_dags, Permission.READ_DAGS, tag="dags"),
    _get("/dags/{dag}", dags.show_dag, Permission.READ_DAGS, tag="dags"),
    _post("/dags/{dag}/pause", dags.pause_dag, Permission.PAUSE_DAGS, tag="dags"),
    _post("/dags/{dag}/unpause", dags.unpause_dag, Permission.PAUSE_DAGS, tag="dags"),
    _delete("/dags/{dag}", dags.delete_dag, Permission.DELETE_DAGS, tag="dags"),
    _create("/dags/{dag}/runs", dags.trigger_run, Permission.TRIGGER_RUNS, tag="dags"),
    _get("/forecast", forecasts.show_forecast, Permission.READ_RUNS, tag="runs"),
    _get("/runs/{run_id}/forecast", forecasts.forecast_run, Permission.READ_RUNS, tag="runs"),
    _get("/figures", figures.list_figures, Permission.READ_RUNS, tag="dags"),
    _get("/dags/{dag}/figures", figures.show_figures, Permission.READ_RUNS, tag="dags"),
    _get("/import-errors", dags.list_import_errors, Permission.READ_IMPORTS, tag="dags"),
    _get("/dags/{dag}/versions", dags.list_versions, Permission.READ_DAGS, tag="versions"),
    _get("/dags/{dag}/versions/{number}", dags.show_version, Permission.READ_DAGS, tag="versions"),
    _get("/dags/{dag}/diff", dags.diff_versions, Permission.READ_DAGS, tag="versions"),
    _post("/dags/{dag}/rollback", dags.roll_back_dag, Permission.ROLL_BACK_DAGS, tag="versions"),
)

_DEPLOYMENT, _UPLOAD = "/deployments/{name}", "/uploads/{archive_hash}"
_READ_DEPLOYMENTS = Permission.READ_DEPLOYMENTS

_DEPLOYMENTS = (
    _get("/deployments", deployments.list_deployments, _READ_DEPLOYMENTS, tag="deployments"),
    _get(_DEPLOYMENT, deployments.show_deployment, _READ_DEPLOYMENTS, tag="deployments"),
    _put(_DEPLOYMENT, deployments.deploy_archive, Permission.DEPLOY, tag="deployments"),
    _get(f"{_DEPLOYMENT}/versions", deployments.list_deployment_versions, _READ_DEPLOYMENTS, tag="deployments"),
    _get(f"{_DEPLOYMENT}/diff", deployments.diff_deployment_versions, _READ_DEPLOYMENTS, tag="deployments"),
    _delete(_DEPLOYMENT, deployments.delete_deployment, Permission.DEPLOY, tag="deployments"),
    _post(f"{_DEPLOYMENT}/rollback", deployments.roll_back_deployment, Permission.DEPLOY, tag="deployments"),
    _get(_UPLOAD, deployments.show_upload, Permission.DEPLOY, tag="deployments"),
    Route("PUT", _UPLOAD, deployments.put_upload, Permission.DEPLOY, tag="deployments"),
)

_SCHEDULE = "/dags/{dag}/schedules/{name}"

_SCHEDULES = (
    _get("/schedules", schedules.list_all_schedules, Permission.READ_SCHEDULES, tag="schedules"),
    _get("/dags/{dag}/schedules", schedules.list_schedules, Permission.READ_SCHEDULES, tag="schedules"),
    _get(_SCHEDULE, schedules.show_schedule, Permission.READ_SCHEDULES, tag="schedules"),
    _put(_SCHEDULE, schedules.put_schedule, Permission.EDIT_SCHEDULES, tag="schedules"),
    _delete(_SCHEDULE, schedules.delete_schedule, Permission.EDIT_SCHEDULES, tag="schedules"),
    _post(f"{_SCHEDULE}/pause", schedules.pause_schedule, Permission.PAUSE_SCHEDULES, tag="schedules"),
    _post(f"{_SCHEDULE}/unpause", schedules.unpause_schedule, Permission.PAUSE_SCHEDULES, tag="schedules"),
    _post(f"{_SCHEDULE}/reset", schedules.reset_schedule, Permission.EDIT_SCHEDULES, tag="schedules"),
    _get(f"{_SCHEDULE}/next", schedules.list_next_fires, Permission.READ_SCHEDULES, tag="schedules"),
    _get(f"{_SCHEDULE}/history", schedules.list_schedule_versions, Permission.READ_SCHEDULES, tag="schedules"),
    _get(f"{_SCHEDULE}/skips", schedules.list_schedule_skips, Permission.READ_SCHEDULES, tag="schedules"),
    _get("/skips", schedules.list_skips, Permission.READ_SCHEDULES, tag="schedules"),
    _post("/schedules/simulate", schedules.simulate_schedule, Permission.READ_SCHEDULES, tag="schedules"),
)

_BACKFILLS = (
    _get("/backfills", backfills.list_backfills, Permission.READ_BACKFILLS, tag="backfills"),
    _create("/backfills", backfills.create_backfill, Permission.RUN_BACKFILLS, tag="backfills"),
    _get("/backfills/{backfill_id}", backfills.show_backfill, Permission.READ_BACKFILLS, tag="backfills"),
    _post("/backfills/{backfill_id}/pause", backfills.pause_backfill, Permission.RUN_BACKFILLS, tag="backfills"),
    _post("/backfills/{backfill_id}/unpause", backfills.unpause_backfill, Permission.RUN_BACKFILLS, tag="backfills"),
    _post("/backfills/{backfill_id}/cancel", backfills.cancel_backfill, Permission.RUN_BACKFILLS, tag="backfills"),
)

_WAITS = (
    _get("/approvals", waits.list_approvals, Permission.READ_RUNS, tag="approvals"),
    _get(f"{_TASK}/approval", waits.show_approval, Permission.READ_RUNS, tag="approvals"),
    _post(f"{_TASK}/approval", waits.decide_approval, Permission.DECIDE_APPROVALS, tag="approvals"),
    _create("/events/{name}", waits.send_event, Permission.SEND_EVENTS, tag="events"),
    _get("/events/sent", waits.list_sent_events, Permission.READ_EVENTS, tag="events"),
    _get("/dead-letters", requests.list_dead_letters, Permission.READ_EVENTS, tag="events"),
    _get("/dead-letters/{letter_id}", requests.show_dead_letter, Permission.READ_EVENTS, tag="events"),
    _post("/dead-letters/replay", requests.replay_dead_letters, Permission.REPLAY, tag="events"),
    _post("/dead-letters/{letter_id}/replay", requests.replay_dead_letter, Permission.REPLAY, tag="events"),
    _get("/webhooks", webhooks.list_webhooks, Permission.READ_EVENTS, tag="webhooks"),
    _get("/webhooks/{name}", webhooks.show_webhook, Permission.READ_EVENTS, tag="webhooks"),
    _put("/webhooks/{name}", webhooks.put_webhook, Permission.EDIT_WEBHOOKS, tag="webhooks"),
    _delete("/webhooks/{name}", webhooks.delete_webhook, Permission.EDIT_WEBHOOKS, tag="webhooks"),
    _get("/assets", waits.list_assets, Permission.READ_GATES, tag="assets"),
    _get("/assets/{name}/partitions", waits.list_partitions, Permission.READ_GATES, tag="assets"),
    _post("/assets/{name}/updates", waits.record_asset_update, Permission.SEND_EVENTS, tag="assets", status=201),
)

_TASK_STATE, _ASSET_STATE = "/dags/{dag}/tasks/{task}/state", "/assets/{name}/state"

_STATE = (
    _get(_TASK_STATE, state.list_task_state, Permission.READ_RUNS, tag="state"),
    _get(f"{_TASK_STATE}/{{key}}", state.show_task_state, Permission.READ_RUNS, tag="state"),
    Route("PUT", f"{_TASK_STATE}/{{key}}", state.put_task_state, Permission.MARK_TASKS, tag="state"),
    _delete(f"{_TASK_STATE}/{{key}}", state.delete_task_state, Permission.MARK_TASKS, tag="state"),
    _get(_ASSET_STATE, state.list_asset_state, Permission.READ_GATES, tag="state"),
    _get(f"{_ASSET_STATE}/{{key}}", state.show_asset_state, Permission.READ_GATES, tag="state"),
    Route("PUT", f"{_ASSET_STATE}/{{key}}", state.put_asset_state, Permission.SEND_EVENTS, tag="state"),
    _delete(f"{_ASSET_STATE}/{{key}}", state.delete_asset_state, Permission.SEND_EVENTS, tag="state"),
)

_GATES = (
    _get("/pools", gates.list_pools, Permission.READ_GATES, tag="pools"),
    _get("/pools/{name}", gates.show_pool, Permission.READ_GATES, tag="pools"),
    _put("/pools/{name}", gates.put_pool, Permission.EDIT_POOLS, tag="pools"),
    _delete("/pools/{name}", gates.delete_pool, Permission.EDIT_POOLS, tag="pools"),
    _get("/keys", gates.list_keys, Permission.READ_GATES, tag="keys"),
    _get("/keys/{name}", gates.show_key, Permission.READ_GATES, tag="keys"),
    _get("/blocked", gates.list_blocked, Permission.READ_GATES, tag="keys"),
)

_RUNNER_TOKENS, _MANAGE_RUNNERS = "/runner-tokens", Permission.MANAGE_RUNNERS

_RUNNERS = (
    _get("/runners", runners.list_runners, Permission.READ_RUNNERS, tag="runners"),
    _post("/runners/drain", runners.drain_runners, Permission.DRAIN_RUNNERS, tag="runners"),
    _post("/runners/undrain", runners.undrain_runners, Permission.DRAIN_RUNNERS, tag="runners"),
    _post("/runners/{runner}/drain", runners.drain_runner, Permission.DRAIN_RUNNERS, tag="runners"),
    _post("/runners/{runner}/undrain", runners.undrain_runner, Permission.DRAIN_RUNNERS, tag="runners"),
    _get(_RUNNER_TOKENS, runner_tokens.list_runner_tokens, _MANAGE_RUNNERS, tag="runners"),
    _post(_RUNNER_TOKENS, runner_tokens.create_runner_token, _MANAGE_RUNNERS, tag="runners", status=201),
    _post(f"{_RUNNER_TOKENS}/{{token_id}}/revoke", runner_tokens.revoke_runner_token, _MANAGE_RUNNERS, tag="runners"),
    _get("/launchers", launchers.list_launchers, Permission.READ_RUNNERS, tag="runners"),
    _get("/queues", runners.list_queues, Permission.READ_RUNNERS, tag="runners"),
    _get("/shards", runners.list_shards, Permission.READ_METRICS, tag="runners"),
    _get("/health", runners.show_health, Permission.READ_METRICS, tag="runners"),
)


def _values(kind: ValueKind) -> tuple[Route, ...]:
    """The same operations for each kind, at paths of its own."""
    read, edit, tag, fixed = Permission.READ_VALUES, Permission.EDIT_VALUES, f"{kind}s", {"kind": kind}
    return (
        _get(f"/{tag}", values.list_values, read, tag=tag, fixed=fixed, name=f"list_{tag}"),
        _get(f"/{tag}/{{name}}", values.show_value, read, tag=tag, fixed=fixed, name=f"show_{kind}", errors=(409,)),
        _put(f"/{tag}/{{name}}", values.put_value, edit, tag=tag, fixed=fixed, name=f"put_{kind}"),
        _delete(f"/{tag}/{{name}}", values.delete_value, edit, tag=tag, fixed=fixed, name=f"delete_{kind}"),
    )


_CHECKIN = "/checkins/{name}"

_CHECKINS = (
    _get("/checkins", checkins.list_checkins, Permission.READ_SCHEDULES, tag="checkins"),
    _get(_CHECKIN, checkins.show_checkin, Permission.READ_SCHEDULES, tag="checkins"),
    _put(_CHECKIN, checkins.put_checkin, Permission.EDIT_SCHEDULES, tag="checkins"),
    _delete(_CHECKIN, checkins.delete_checkin, Permission.EDIT_SCHEDULES, tag="checkins"),
    _post(_CHECKIN, checkins.record_checkin, Permission.SEND_EVENTS, tag="checkins"),
)


_VALUES = tuple(row for kind in ValueKind for row in _values(kind))

_SENT, _RESEND = "/notifications/{notification_id}", Permission.RESEND_NOTIFICATIONS

_NOTIFICATIONS = (
    _get("/notifications", notifications.list_notifications, Permission.READ_NOTIFICATIONS, tag="notifications"),
    _get(_SENT, notifications.show_notification, Permission.READ_NOTIFICATIONS, tag="notifications"),
    _post("/notifications/retry", notifications.retry_notifications, _RESEND, tag="notifications"),
    _post(f"{_SENT}/retry", notifications.retry_notification, _RESEND, tag="notifications"),
    _get("/alerts", notifications.list_alerts, Permission.READ_SCHEDULES, tag="alerts"),
    _get("/guarantees", proofs.show_proof, Permission.READ_METRICS, tag="alerts"),
    _get("/quarantine", notifications.list_quarantine, Permission.READ_IMPORTS, tag="quarantine"),
)

_USERS = (
    _get("/users", users.list_users, Permission.MANAGE_USERS, tag="users"),
    _post("/users", users.add_user, Permission.MANAGE_USERS, tag="users", status=201, name="create_user"),
    _get("/users/{name}", users.show_user, Permission.MANAGE_USERS, tag="users"),
    _patch("/users/{name}", users.change_user, Permission.MANAGE_USERS, tag="users", name="update_user"),
    _post("/users/{name}/link", users.make_link, Permission.MANAGE_USERS, tag="users", status=201, name="create_link"),
    _get("/tokens", users.list_tokens, Permission.OWN, tag="users"),
    _post("/tokens", users.make_token, Permission.OWN, tag="users", status=201, name="create_token"),
    _delete("/tokens/{token_id}", users.revoke_token, Permission.OWN, tag="users", name="delete_token"),
    _get("/audit", users.list_audit, Permission.READ_AUDIT, tag="audit"),
)

# A request is compared with one route after the other, so the routes that clients poll come first.
ROUTES: tuple[Route, ...] = (
    *(*_RUNS, *_TASKS, *_DAGS, *_SCHEDULES, *_WAITS, *_BACKFILLS, *_DEPLOYMENTS),
    *(*_NOTIFICATIONS, *_STATE, *_GATES, *_RUNNERS, *_USERS, *_VALUES, *_CHECKINS),
)


def route_of(operation: Operation, params: Mapping[str, Any]) -> Route:
    """The row of an operation with these parameters."""
    for route in ROUTES:
        if operation in (route.function, route.stream) and route.fixed.items() <= params.items():
            return route
    raise LookupError(f"{operation.__name__} has no row in operations/routes.py")
