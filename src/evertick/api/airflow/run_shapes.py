"""What Airflow's client expects of runs, task instances, logs, XComs and backfills."""

from __future__ import annotations

from datetime import datetime
from typing import Any
from uuid import UUID

from pydantic import ConfigDict

from evertick.api.airflow.dag_shapes import (
    DagRunState,
    DagRunTriggeredByType,
    DagRunType,
    DagVersionResponse,
    ReprocessBehavior,
    Shape,
    TaskInstanceState,
)


class DAGRunResponse(Shape):
    bundle_version: str | None = None
    conf: dict[str, Any] | None = None
    dag_display_name: str
    dag_id: str
    dag_run_id: str
    dag_versions: list[DagVersionResponse]
    data_interval_end: datetime | None = None
    data_interval_start: datetime | None = None
    duration: float | None = None
    end_date: datetime | None = None
    last_scheduling_decision: datetime | None = None
    logical_date: datetime | None = None
    note: str | None = None
    partition_date: datetime | None = None
    partition_key: str | None = None
    queued_at: datetime | None = None
    run_after: datetime
    run_type: DagRunType
    start_date: datetime | None = None
    state: DagRunState
    triggered_by: DagRunTriggeredByType | None = None
    triggering_user_name: str | None = None


class DAGRunCollectionResponse(Shape):
    dag_runs: list[DAGRunResponse]
    next_cursor: str | None = None
    previous_cursor: str | None = None
    total_entries: int | None = None
    total_entries_limit: int | None = None


class JobResponse(Shape):
    dag_display_name: str | None = None
    dag_id: str | None = None
    end_date: datetime | None = None
    executor_class: str | None = None
    hostname: str | None = None
    id: int
    job_type: str | None = None
    latest_heartbeat: datetime | None = None
    start_date: datetime | None = None
    state: str | None = None
    unixname: str | None = None


class TriggerResponse(Shape):
    classpath: str
    created_date: datetime
    id: int
    kwargs: str
    queue: str | None = None
    triggerer_id: int | None = None


class TaskInstanceResponse(Shape):
    dag_display_name: str
    dag_id: str
    dag_run_id: str
    dag_version: DagVersionResponse | None = None
    duration: float | None = None
    end_date: datetime | None = None
    executor: str | None = None
    executor_config: str
    hostname: str | None = None
    id: UUID
    logical_date: datetime | None = None
    map_index: int
    max_tries: int
    note: str | None = None
    operator: str | None = None
    operator_name: str | None = None
    pid: int | None = None
    pool: str
    pool_slots: int
    priority_weight: int | None = None
    queue: str | None = None
    queued_when: datetime | None = None
    rendered_fields: dict[str, Any] | None = None
    rendered_map_index: str | None = None
    run_after: datetime
    scheduled_when: datetime | None = None
    start_date: datetime | None = None
    state: TaskInstanceState | None = None
    task_display_name: str
    task_id: str
    trigger: TriggerResponse | None = None
    triggerer_job: JobResponse | None = None
    try_number: int
    unixname: str | None = None


class TaskInstanceCollectionResponse(Shape):
    next_cursor: str | None = None
    previous_cursor: str | None = None
    task_instances: list[TaskInstanceResponse]
    total_entries: int | None = None
    total_entries_limit: int | None = None


class ClearTaskInstanceCollectionResponse(Shape):
    task_instances: list[TaskInstanceResponse]
    total_entries: int


class TaskInstanceHistoryResponse(Shape):
    dag_display_name: str
    dag_id: str
    dag_run_id: str
    dag_version: DagVersionResponse | None = None
    duration: float | None = None
    end_date: datetime | None = None
    executor: str | None = None
    executor_config: str
    hostname: str | None = None
    map_index: int
    max_tries: int
    operator: str | None = None
    operator_name: str | None = None
    pid: int | None = None
    pool: str
    pool_slots: int
    priority_weight: int | None = None
    queue: str | None = None
    queued_when: datetime | None = None
    scheduled_when: datetime | None = None
    start_date: datetime | None = None
    state: TaskInstanceState | None = None
    task_display_name: str
    task_id: str
    try_number: int
    unixname: str | None = None


class TaskInstanceHistoryCollectionResponse(Shape):
    task_instances: list[TaskInstanceHistoryResponse]
    total_entries: int


class TaskDependencyResponse(Shape):
    name: str
    reason: str


class TaskDependencyCollectionResponse(Shape):
    dependencies: list[TaskDependencyResponse]


class StructuredLogMessage(Shape):
    model_config = ConfigDict(extra="allow")

    event: str
    timestamp: datetime | None = None


class TaskInstancesLogResponse(Shape):
    content: list[StructuredLogMessage]
    continuation_token: str | None = None


class ExternalLogUrlResponse(Shape):
    url: str


class ExtraLinkCollectionResponse(Shape):
    extra_links: dict[str, str]
    total_entries: int


class XComResponse(Shape):
    dag_display_name: str
    dag_id: str
    key: str
    logical_date: datetime | None = None
    map_index: int
    run_after: datetime
    run_id: str
    task_display_name: str
    task_id: str
    timestamp: datetime


class XComCollectionResponse(Shape):
    total_entries: int
    xcom_entries: list[XComResponse]


class XComResponseNative(XComResponse):
    value: Any


class XComResponseString(XComResponse):
    value: str | None = None


class BackfillResponse(Shape):
    completed_at: datetime | None = None
    created_at: datetime
    dag_display_name: str
    dag_id: str
    dag_run_conf: dict[str, Any] | None = None
    from_date: datetime
    id: int
    is_paused: bool
    max_active_runs: int
    reprocess_behavior: ReprocessBehavior
    to_date: datetime
    updated_at: datetime


class BackfillCollectionResponse(Shape):
    backfills: list[BackfillResponse]
    total_entries: int


class DryRunBackfillResponse(Shape):
    logical_date: datetime | None = None
    partition_date: datetime | None = None
    partition_key: str | None = None


class DryRunBackfillCollectionResponse(Shape):
    backfills: list[DryRunBackfillResponse]
    total_entries: int


class HITLUser(Shape):
    id: str
    name: str


class HITLDetail(Shape):
    assigned_users: list[HITLUser] | None = None
    body: str | None = None
    chosen_options: list[str] | None = None
    created_at: datetime
    defaults: list[str] | None = None
    multiple: bool = False
    options: list[str]
    params: dict[str, Any] | None = None
    params_input: dict[str, Any] | None = None
    responded_at: datetime | None = None
    responded_by_user: HITLUser | None = None
    response_received: bool = False
    subject: str
    task_instance: TaskInstanceResponse


class HITLDetailCollection(Shape):
    hitl_details: list[HITLDetail]
    total_entries: int


class HITLDetailHistory(Shape):
    assigned_users: list[HITLUser] | None = None
    body: str | None = None
    chosen_options: list[str] | None = None
    created_at: datetime
    defaults: list[str] | None = None
    multiple: bool = False
    options: list[str]
    params: dict[str, Any] | None = None
    params_input: dict[str, Any] | None = None
    responded_at: datetime | None = None
    responded_by_user: HITLUser | None = None
    response_received: bool = False
    subject: str
    task_instance: TaskInstanceHistoryResponse


class HITLDetailResponse(Shape):
    chosen_options: list[str]
    params_input: dict[str, Any] | None = None
    responded_at: datetime
    responded_by: HITLUser


class JobCollectionResponse(Shape):
    jobs: list[JobResponse]
    total_entries: int
