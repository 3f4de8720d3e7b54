"""What Airflow's client expects of pools, variables, connections, assets, event logs, health and the rest."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from pydantic import Field

from evertick.api.airflow.dag_shapes import Shape


class PoolResponse(Shape):
    deferred_slots: int
    description: str | None = None
    include_deferred: bool
    name: str
    occupied_slots: int
    open_slots: int
    queued_slots: int
    running_slots: int
    scheduled_slots: int
    slots: int
    team_name: str | None = None


class PoolCollectionResponse(Shape):
    pools: list[PoolResponse]
    total_entries: int


class VariableResponse(Shape):
    description: str | None = None
    is_encrypted: bool
    key: str
    team_name: str | None = None
    value: str | None = None


class VariableCollectionResponse(Shape):
    total_entries: int
    variables: list[VariableResponse]


class ConnectionResponse(Shape):
    conn_type: str
    connection_id: str
    description: str | None = None
    extra: str | None = None
    host: str | None = None
    login: str | None = None
    password: str | None = None
    port: int | None = None
    var_schema: str | None = Field(default=None, alias="schema")
    team_name: str | None = None


class ConnectionCollectionResponse(Shape):
    connections: list[ConnectionResponse]
    total_entries: int


class ConnectionTestResponse(Shape):
    message: str
    status: bool


class BulkActionResponse(Shape):
    errors: list[dict[str, Any]] | None = None
    success: list[str] | None = None


class BulkResponse(Shape):
    create: BulkActionResponse | None = None
    delete: BulkActionResponse | None = None
    update: BulkActionResponse | None = None


class EventLogResponse(Shape):
    dag_display_name: str | None = None
    dag_id: str | None = None
    event: str
    event_log_id: int
    extra: str | None = None
    logical_date: datetime | None = None
    map_index: int | None = None
    owner: str | None = None
    run_id: str | None = None
    task_display_name: str | None = None
    task_id: str | None = None
    try_number: int | None = None
    when: datetime


class EventLogCollectionResponse(Shape):
    event_logs: list[EventLogResponse]
    total_entries: int


class AssetAliasResponse(Shape):
    group: str
    id: int
    name: str


class AssetAliasCollectionResponse(Shape):
    asset_aliases: list[AssetAliasResponse]
    total_entries: int


class AssetWatcherResponse(Shape):
    created_date: datetime
    name: str
    trigger_id: int


class TaskInletAssetReference(Shape):
    created_at: datetime
    dag_id: str
    task_id: str
    updated_at: datetime


class TaskOutletAssetReference(Shape):
    created_at: datetime
    dag_id: str
    task_id: str
    updated_at: datetime


class DagScheduleAssetReference(Shape):
    created_at: datetime
    dag_id: str
    updated_at: datetime


class LastAssetEventResponse(Shape):
    id: int | None = None
    timestamp: datetime | None = None


class AssetResponse(Shape):
    aliases: list[AssetAliasResponse]
    consuming_tasks: list[TaskInletAssetReference]
    created_at: datetime
    extra: dict[str, Any] | None = None
    group: str
    id: int
    last_asset_event: LastAssetEventResponse | None = None
    name: str
    producing_tasks: list[TaskOutletAssetReference]
    scheduled_dags: list[DagScheduleAssetReference]
    updated_at: datetime
    uri: str
    watchers: list[AssetWatcherResponse]


class AssetCollectionResponse(Shape):
    assets: list[AssetResponse]
    total_entries: int


class DagRunAssetReference(Shape):
    dag_id: str
    data_interval_end: datetime | None = None
    data_interval_start: datetime | None = None
    end_date: datetime | None = None
    logical_date: datetime | None = None
    partition_key: str | None = None
    run_id: str
    start_date: datetime
    state: str
    triggering: bool


class AssetEventResponse(Shape):
    asset_id: int
    created_dagruns: list[DagRunAssetReference]
    extra: dict[str, Any] | None = None
    group: str | None = None
    id: int
    name: str | None = None
    partition_key: str | None = None
    source_dag_id: str | None = None
    source_map_index: int
    source_run_id: str | None = None
    source_task_id: str | None = None
    timestamp: datetime
    uri: str | None = None


class AssetEventCollectionResponse(Shape):
    asset_events: list[AssetEventResponse]
    total_entries: int


class QueuedEventResponse(Shape):
    asset_id: int
    created_at: datetime
    dag_display_name: str
    dag_id: str


class QueuedEventCollectionResponse(Shape):
    queued_events: list[QueuedEventResponse]
    total_entries: int


class PluginResponse(Shape):
    appbuilder_menu_items: list[dict[str, Any]]
    appbuilder_views: list[dict[str, Any]]
    external_views: list[dict[str, Any]]
    fastapi_apps: list[dict[str, Any]]
    fastapi_root_middlewares: list[dict[str, Any]]
    flask_blueprints: list[str]
    global_operator_extra_links: list[str]
    listeners: list[str]
    macros: list[str]
    name: str
    operator_extra_links: list[str]
    react_apps: list[dict[str, Any]]
    source: str
    timetables: list[str]


class PluginCollectionResponse(Shape):
    plugins: list[PluginResponse]
    total_entries: int


class PluginImportErrorResponse(Shape):
    error: str
    source: str


class PluginImportErrorCollectionResponse(Shape):
    import_errors: list[PluginImportErrorResponse]
    total_entries: int


class ProviderResponse(Shape):
    description: str
    documentation_url: str | None = None
    package_name: str
    version: str


class ProviderCollectionResponse(Shape):
    providers: list[ProviderResponse]
    total_entries: int


class ConfigOption(Shape):
    key: str
    value: str


class ConfigSection(Shape):
    name: str
    options: list[ConfigOption]


class Config(Shape):
    sections: list[ConfigSection]


class BaseInfoResponse(Shape):
    status: str | None = None


class SchedulerInfoResponse(Shape):
    latest_scheduler_heartbeat: str | None = None
    status: str | None = None


class TriggererInfoResponse(Shape):
    latest_triggerer_heartbeat: str | None = None
    status: str | None = None


class DagProcessorInfoResponse(Shape):
    latest_dag_processor_heartbeat: str | None = None
    status: str | None = None


class HealthInfoResponse(Shape):
    dag_processor: DagProcessorInfoResponse | None = None
    metadatabase: BaseInfoResponse
    scheduler: SchedulerInfoResponse
    triggerer: TriggererInfoResponse


class VersionResponse(Shape):
    git_version: str | None = None
    version: str
