"""What Airflow's client expects of DAGs, tasks and versions: the fields and enums of its own models (a test compares them)."""

from __future__ import annotations

from datetime import datetime
from typing import Any, Literal
from uuid import UUID

from pydantic import BaseModel, ConfigDict, Field

DagRunState = Literal["queued", "running", "success", "failed"]
DagRunType = Literal[
    "backfill", "scheduled", "manual", "operator_triggered", "asset_triggered", "asset_materialization"
]
DagRunTriggeredByType = Literal["cli", "operator", "rest_api", "ui", "test", "timetable", "asset", "backfill"]
DagWarningType = Literal["asset conflict", "non-existent pool", "runtime varying value"]
ReprocessBehavior = Literal["failed", "completed", "none"]
TaskInstanceState = Literal[
    "removed",
    "scheduled",
    "queued",
    "running",
    "success",
    "restarting",
    "failed",
    "up_for_retry",
    "up_for_reschedule",
    "upstream_failed",
    "skipped",
    "deferred",
    "awaiting_input",
]


class Shape(BaseModel):
    """One answer, or a part of one."""

    model_config = ConfigDict(populate_by_name=True, protected_namespaces=())


class HTTPExceptionResponse(Shape):
    """What every error says."""

    detail: str | dict[str, Any]


class DagTagResponse(Shape):
    dag_display_name: str
    dag_id: str
    name: str


class DagVersionResponse(Shape):
    bundle_name: str | None = None
    bundle_url: str | None = None
    bundle_version: str | None = None
    created_at: datetime
    dag_display_name: str
    dag_id: str
    id: UUID
    version_number: int


class DAGResponse(Shape):
    allowed_run_types: list[DagRunType] | None = None
    bundle_name: str | None = None
    bundle_version: str | None = None
    dag_display_name: str
    dag_id: str
    description: str | None = None
    file_token: str
    fileloc: str
    has_import_errors: bool
    has_task_concurrency_limits: bool
    is_backfillable: bool
    is_paused: bool
    is_stale: bool
    last_expired: datetime | None = None
    last_parse_duration: float | None = None
    last_parsed_time: datetime | None = None
    max_active_runs: int | None = None
    max_active_tasks: int
    max_consecutive_failed_dag_runs: int
    next_dagrun_data_interval_end: datetime | None = None
    next_dagrun_data_interval_start: datetime | None = None
    next_dagrun_logical_date: datetime | None = None
    next_dagrun_run_after: datetime | None = None
    owners: list[str]
    relative_fileloc: str | None = None
    tags: list[DagTagResponse]
    timetable_description: str | None = None
    timetable_partitioned: bool
    timetable_periodic: bool
    timetable_summary: str | None = None


class DAGDetailsResponse(DAGResponse):
    active_runs_count: int = 0
    asset_expression: dict[str, Any] | None = None
    catchup: bool
    concurrency: int
    dag_run_timeout: str | None = None
    default_args: dict[str, Any] | None = None
    doc_md: str | None = None
    end_date: datetime | None = None
    is_favorite: bool = False
    is_paused_upon_creation: bool | None = None
    last_parsed: datetime | None = None
    latest_dag_version: DagVersionResponse | None = None
    owner_links: dict[str, str] | None = None
    params: dict[str, Any] | None = None
    render_template_as_native_obj: bool
    rerun_with_latest_version: bool | None = None
    start_date: datetime | None = None
    template_search_path: list[str] | None = None
    timezone: str | None = None


class DAGCollectionResponse(Shape):
    dags: list[DAGResponse]
    total_entries: int


class DAGTagCollectionResponse(Shape):
    tags: list[str]
    total_entries: int


class DAGVersionCollectionResponse(Shape):
    dag_versions: list[DagVersionResponse]
    total_entries: int


class DAGSourceResponse(Shape):
    content: str | None = None
    dag_display_name: str
    dag_id: str
    version_number: int | None = None


class DagStatsStateResponse(Shape):
    count: int
    state: DagRunState


class DagStatsResponse(Shape):
    dag_display_name: str
    dag_id: str
    stats: list[DagStatsStateResponse]


class DagStatsCollectionResponse(Shape):
    dags: list[DagStatsResponse]
    total_entries: int


class DAGWarningResponse(Shape):
    dag_display_name: str
    dag_id: str
    message: str
    timestamp: datetime
    warning_type: DagWarningType


class DAGWarningCollectionResponse(Shape):
    dag_warnings: list[DAGWarningResponse]
    total_entries: int


class TimeDelta(Shape):
    type: str = Field(default="TimeDelta", alias="__type")
    days: int
    microseconds: int
    seconds: int


class TaskResponse(Shape):
    class_ref: dict[str, Any] | None = None
    depends_on_past: bool
    doc_md: str | None = None
    downstream_task_ids: list[str] | None = None
    end_date: datetime | None = None
    execution_timeout: TimeDelta | None = None
    extra_links: list[str]
    is_mapped: bool | None = None
    operator_name: str | None = None
    owner: str | None = None
    params: dict[str, Any] | None = None
    pool: str | None = None
    pool_slots: float | None = None
    priority_weight: float | None = None
    queue: str | None = None
    retries: float | None = None
    retry_delay: TimeDelta | None = None
    retry_exponential_backoff: float
    start_date: datetime | None = None
    task_display_name: str | None = None
    task_id: str | None = None
    template_fields: list[str] | None = None
    trigger_rule: str | None = None
    ui_color: str | None = None
    ui_fgcolor: str | None = None
    wait_for_downstream: bool
    weight_rule: str | None = None


class TaskCollectionResponse(Shape):
    tasks: list[TaskResponse]
    total_entries: int


class ImportErrorResponse(Shape):
    bundle_name: str | None = None
    filename: str
    import_error_id: int
    stack_trace: str
    timestamp: datetime


class ImportErrorCollectionResponse(Shape):
    import_errors: list[ImportErrorResponse]
    total_entries: int
