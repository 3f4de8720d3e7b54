"""Tables refuse rows that make no sense, rows without their parent, and rows that exist already."""

from __future__ import annotations

import re

import pytest
from psycopg import AsyncConnection
from psycopg.errors import CheckViolation, ForeignKeyViolation, RestrictViolation, UniqueViolation
from psycopg.sql import SQL, Identifier
from psycopg.types.json import Jsonb

NOW = "2030-01-01T00:00:00Z"
EARLIER = "2029-12-31T23:59:59Z"

# check constraint: a row that only this constraint refuses (columns that are not given are null)
REFUSED: dict[str, dict[str, object]] = {
    "account_role_check": {"role": "owner"},
    "account_tags_check": {"tags": []},
    "alert_kind_check": {"kind": "bored"},
    "approval_check": {"decided_at": NOW, "decided_by": "me"},
    "backfill_check": {"first_at": NOW, "last_at": EARLIER},
    "backfill_check1": {"state": "done"},
    "backfill_open_runs_check": {"open_runs": -1},
    "backfill_parallel_check": {"parallel": 1001},
    "backfill_reprocess_check": {"reprocess": "some"},
    "backfill_state_check": {"state": "asleep"},
    "backfill_total_check": {"total": 0},
    "child_run_depth_check": {"depth": 0},
    "asset_update_check": {"run_id": 1},
    "credential_check": {"kind": "session"},
    "credential_kind_check": {"kind": "key", "expires_at": NOW},
    "credential_role_check": {"role": "owner"},
    "dag_max_active_runs_check": {"max_active_runs": 0},
    "dag_version_run_retries_check": {"run_retries": -1},
    "dag_version_run_timeout_check": {"run_timeout": 0},
    "deployment_kind_check": {"kind": "ftp"},
    "deadline_kind_check": {"kind": "pause"},
    "default_notification_rule_event_check": {"event": "success"},
    "dependency_event_check": {},
    "dependency_state_check": {},
    "gate_capacity_check": {"capacity": -1},
    "figure_cursor_is_only_check": {"is_only": False},
    "checkin_grace_seconds_check": {"grace_seconds": -1},
    "forecast_accuracy_is_only_check": {"is_only": False},
    "lineage_cursor_is_only_check": {"is_only": False},
    "log_archive_cursor_is_only_check": {"is_only": False},
    "log_chunk_check": {"content": "text", "object_id": "00000000-0000-0000-0000-000000000000", "object_offset": 0,
                        "bytes": 4, "digest": "\\x00"},
    "mapping_input_check": {"src": 1, "length": 2},
    "notification_rule_event_check": {"event": "started"},
    "outbox_check": {"state": "waiting", "ended_at": NOW},
    "outbox_state_check": {"state": "lost", "ended_at": NOW},
    "pending_cleanup_kind_check": {"kind": "task"},
    "pilot_phase_check": {"phase": "asleep"},
    "quarantine_kind_check": {"kind": "task"},
    "retry_group_retries_check": {"retries": 0},
    "run_status_check": {"state": "success", "open_tasks": 0},
    "run_status_check1": {"state": "running", "open_tasks": 0},
    "run_status_failed_leaves_check": {"failed_leaves": -1},
    "run_status_open_tasks_check": {"open_tasks": -1, "state": "queued"},
    "run_trigger_check": {},
    "runner_request_check": {"request": "stop"},
    "runner_token_queues_check": {"queues": []},
    "schedule_catchup_limit_check": {"catchup_limit": 0},
    "schedule_finish_within_check": {"finish_within": 0},
    "schedule_origin_check": {"origin": "file"},
    "schedule_overlap_check": {"overlap": "queue"},
    "schedule_start_within_check": {"start_within": 0},
    "schedule_version_check": {"version": 0},
    "schedule_dependency_kind_check": {"kind": "moon"},
    "schedule_dependency_updates_check": {"updates": "some"},
    "schedule_version_change_check": {"change": "wish"},
    "shard_state_check": {"state": "asleep"},
    "skip_record_count_check": {"count": 0},
    "stored_value_kind_check": {"kind": "token"},
    "state_entry_key_check": {"key": ""},
    "task_attempt_check": {"attempt": -1, "state": "waiting"},
    "task_check": {"state": "running", "session": 1, "epoch": 0, "started_at": NOW},
    "task_check1": {"state": "queued", "session": 1, "epoch": 1, "started_at": NOW},
    "task_check2": {"state": "available", "request": "cancel"},
    "task_check3": {"state": "available", "not_before": NOW},
    "task_check4": {"state": "success"},
    "task_trigger_check": {"session": 1, "event": {}},
    "task_deadline_seconds_check": {"seconds": 0},
    "task_gate_capacity_check": {"capacity": 0, "name": "p"},
    "task_gate_check": {"name": "p", "parts": ["p"]},
    "task_gate_check1": {"kind": "order", "name": "p"},
    "task_gate_check2": {"kind": "rate", "name": "p"},
    "task_gate_period_check": {"kind": "rate", "period": 0, "name": "p"},
    "task_gate_weight_check": {"weight": 0, "name": "p"},
    "task_mapping_most_check": {"most": 0},
    "task_spec_max_attempts_check": {"max_attempts": 0},
    "task_spec_priority_check": {"priority": 10},
    "task_spec_queue_timeout_check": {"queue_timeout": 0},
    "trigger_dag_task_timeout_check": {"timeout": 0},
    "wait_spec_backoff_check": {"backoff": 0.5},
    "wait_spec_kind_check": {"kind": "start"},
    "wait_spec_on_reject_check": {"on_reject": "success"},
    "wait_spec_on_timeout_check": {"on_timeout": "success"},
    "wait_spec_seconds_check": {"seconds": -1},
    "wait_spec_timeout_check": {"timeout": 0},
}  # fmt: skip

CHECKS = """
    select c.relname, k.conname, pg_get_constraintdef(k.oid)
    from pg_constraint k join pg_class c on c.oid = k.conrelid
    where k.contype = 'c' and k.connamespace = 'evertick'::regnamespace
    order by 1, 2
"""


async def test_each_check_constraint_refuses_a_row_that_makes_no_sense(rollback_conn: AsyncConnection) -> None:
    checks = await (await rollback_conn.execute(CHECKS)).fetchall()
    assert {name for _, name, _ in checks} == set(REFUSED)
    for table in {table for table, _, _ in checks}:
        # A copy with these checks only, so that no other column and no other table is needed.
        await rollback_conn.execute(
            SQL("create temporary table {} on commit drop as select * from evertick.{} limit 0").format(
                Identifier(f"copy_of_{table}"), Identifier(table)
            )
        )
    for table, name, definition in checks:
        await rollback_conn.execute(
            SQL("alter table {} add constraint {} ").format(Identifier(f"copy_of_{table}"), Identifier(name))
            + SQL(definition)
        )
    for table, name, _ in checks:
        insert = SQL("insert into {} select * from jsonb_populate_record(null::evertick.{}, %s)").format(
            Identifier(f"copy_of_{table}"), Identifier(table)
        )
        with pytest.raises(CheckViolation) as refused:
            async with rollback_conn.transaction():
                await rollback_conn.execute(insert, [Jsonb(REFUSED[name])])
        assert refused.value.diag.constraint_name == name


# unique index: its columns, and which rows it is for
UNIQUE = {
    "account_name": "(lower(name))",
    "account_pkey": "(account_id)",
    "alert_open": "(schedule_id, kind, task) WHERE (ended_at IS NULL)",
    "alert_pkey": "(alert_id)",
    "approval_pkey": "(run_id, idx, map_index, epoch)",
    "asset_alias_pkey": "(alias, asset)",
    "asset_pkey": "(name)",
    "asset_update_pkey": "(update_id)",
    "attempt_pkey": "(run_id, idx, map_index, epoch)",
    "audit_log_pkey": "(entry_id)",
    "backfill_pkey": "(backfill_id)",
    "backfill_request_key": "(request)",
    "backfill_run_pkey": "(run_id)",
    "bundle_pkey": "(hash)",
    "child_run_pkey": "(run_id)",
    "credential_pkey": "(credential_id)",
    "credential_secret_hash_key": "(secret_hash)",
    "dag_name_key": "(name)",
    "dag_pkey": "(dag_id)",
    "dag_version_dag_id_hash_bundle_hash_key": "(dag_id, hash, bundle_hash)",
    "dag_version_dag_id_number_key": "(dag_id, number)",
    "dag_version_pkey": "(version_id)",
    "deadline_pkey": "(shard, due_at, run_id, kind, idx)",
    "default_notification_rule_pkey": "(event, sink)",
    "deferral_pkey": "(run_id, idx, map_index)",
    "deployment_dag_pkey": "(deployment, number, version_id)",
    "deployment_pkey": "(name)",
    "deployment_version_pkey": "(deployment, number)",
    "dependency_event_pkey": "(event_id)",
    "dead_letter_pkey": "(letter_id)",
    "delayed_run_pkey": "(run_id)",
    "event_arrival_pkey": "(event_id)",
    "event_window_pkey": "(schedule_id, group_key)",
    "fleet_pkey": "(name)",
    "inbox_pkey": "(inbox_id)",
    "oidc_identity_pkey": "(account_id)",
    "oidc_identity_provider_subject_key": "(provider, subject)",
    "pilot_pkey": "(name)",
    "pilot_token_id_key": "(token_id)",
    "used_once_pkey": "(key)",
    "unique_period_pkey": "(dag_id, key)",
    "webhook_pkey": "(name)",
    "dependency_state_pkey": "(schedule_id, kind, name)",
    "dispatch_pkey": "(run_id, idx, map_index, epoch)",
    "dispatch_session_key": "(session)",
    "edge_pkey": "(version_id, src, dst) INCLUDE (leaves_group, scope)",
    "event_key": "(name, key) WHERE (key IS NOT NULL)",
    "event_pkey": "(event_id)",
    "failure_streak_pkey": "(schedule_id, task)",
    "function_set_pkey": "(hash)",
    "gate_kind_name_key": "(kind, name)",
    "gate_pkey": "(gate_id)",
    "gate_holder_pkey": "(run_id, idx, map_index)",
    "gate_order_pkey": "(gate_id, version, run_id, idx, map_index)",
    "gate_order_run_id_idx_map_index_gate_id_key": "(run_id, idx, map_index, gate_id)",
    "gate_queue_gate_ids_weights_checks_needs_queue_key": "(gate_ids, weights, checks, needs, queue) NULLS NOT DISTINCT",
    "gate_queue_pkey": "(queue_id)",
    "gate_waiter_pkey": "(queue_id, rank, seq)",
    "gate_waiter_run_id_idx_map_index_key": "(run_id, idx, map_index)",
    "import_error_pkey": "(deployment, file)",
    "lease_pkey": "(session, run_id, idx, map_index)",
    "checkin_pkey": "(name)",
    "figure_cursor_pkey": "(is_only)",
    "forecast_accuracy_pkey": "(is_only)",
    "run_forecast_pkey": "(run_id)",
    "lineage_cursor_pkey": "(is_only)",
    "log_archive_cursor_pkey": "(is_only)",
    "task_figure_pkey": "(dag_id, task)",
    "log_archive_object_pkey": "(object_id)",
    "log_archive_queue_pkey": "(run_id)",
    "log_chunk_pkey": "(run_id, idx, map_index, epoch, seq)",
    "login_attempt_pkey": "(subject)",
    "map_item_pkey": "(run_id, idx, map_index)",
    "mapping_input_pkey": "(version_id, idx, place)",
    "migration_pkey": "(number)",
    "note_pkey": "(run_id, idx, map_index)",
    "notification_rule_pkey": "(version_id, idx, event, sink)",
    "orphan_watch_pkey": "(run_id)",
    "outbox_pkey": "(delivery_id)",
    "pending_cleanup_pkey": "(shard, kind, id)",
    "pool_description_pkey": "(name)",
    "proof_cursor_pkey": "(check_name)",
    "proof_violation_open": "(check_name, subject) WHERE (ended_at IS NULL)",
    "proof_violation_pkey": "(violation_id)",
    "quarantine_pkey": "(kind, subject_id)",
    "rate_slot_pkey": "(gate_id, until, seq)",
    "ready_task_pkey": "(queue, rank, seq)",
    "result_pkey": "(run_id, idx, map_index)",
    "state_entry_pkey": "(run_id, dag_id, owner, map_index, key)",
    "step_result_pkey": "(run_id, idx, map_index, name)",
    "partition_arrival_pkey": "(arrival_id)",
    "partition_ready_pkey": "(schedule_id, fire_at)",
    "partition_update_pkey": "(schedule_id, key, update_id)",
    "run_partition_pkey": "(run_id)",
    "retry_group_pkey": "(version_id, group_id)",
    "retry_queue_pkey": "(shard, queue, due_at, run_id, idx, map_index)",
    "retry_slot_pkey": "(shard, queue, run_id, idx, map_index)",
    "run_fire": "(schedule_id, fire_at) WHERE (schedule_id IS NOT NULL)",
    "run_instant": "(dag_id, fire_at) WHERE ((kind = 'manual'::run_kind) AND (fire_at IS NOT NULL))",
    "run_key": "(dag_id, key) WHERE (key IS NOT NULL)",
    "run_pkey": "(run_id)",
    "run_group_pkey": "(run_id, group_id)",
    "run_status_pkey": "(run_id)",
    "run_trigger_pkey": "(schedule_id, fire_at, kind, name)",
    "run_version_override_pkey": "(run_id)",
    "runner_pkey": "(session)",
    "runner_token_pkey": "(token_id)",
    "runner_token_secret_hash_key": "(secret_hash)",
    "schedule_dag_id_name_key": "(dag_id, name)",
    "schedule_pkey": "(schedule_id)",
    "schedule_dependency_pkey": "(kind, name, schedule_id)",
    "schedule_state_pkey": "(schedule_id)",
    "schedule_version_pkey": "(schedule_id, version)",
    "scheduler_pkey": "(owner)",
    "sensor_poll_pkey": "(run_id, idx, map_index)",
    "task_trigger_pkey": "(run_id, idx, map_index)",
    "server_timeline_pkey": "(system_id, timeline)",
    "shard_pkey": "(shard)",
    "skip_record_pkey": "(schedule_id, first_at)",
    "stored_value_pkey": "(kind, name)",
    "task_pkey": "(run_id, idx, map_index)",
    "task_deadline_pkey": "(version_id, idx)",
    "task_gate_pkey": "(version_id, idx, place)",
    "task_input_pkey": "(version_id, idx, src)",
    "task_mapping_pkey": "(version_id, idx)",
    "task_spec_pkey": "(version_id, idx)",
    "task_timer_pkey": "(shard, due_at, run_id, idx, map_index)",
    "trigger_dag_task_pkey": "(version_id, idx)",
    "upload_piece_pkey": "(hash, owner, start)",
    "wait_spec_pkey": "(version_id, idx)",
}

INDEXES = """
    select c.relname, i.relname, split_part(pg_get_indexdef(i.oid), ' USING btree ', 2)
    from pg_index x join pg_class i on i.oid = x.indexrelid join pg_class c on c.oid = x.indrelid
    where x.indisunique and c.relnamespace = 'evertick'::regnamespace
    order by 1, 2
"""
COLUMNS = """
    select attname, format_type(atttypid, null) from pg_attribute
    where attrelid = %s::regclass and attnum > 0 and not attisdropped
"""
VALUES: dict[str, object] = {
    "bigint": 1, "integer": 1, "smallint": 1, "boolean": True, "text": "a", "bytea": "\\x00", "timestamp with time zone": NOW,
    "uuid": "00000000-0000-0000-0000-000000000000", "bigint[]": [1], "integer[]": [1], "gate_kind": "pool", "run_kind": "manual",
    "edge_scope": "list",
}  # fmt: skip


async def test_each_unique_index_refuses_a_row_that_exists(rollback_conn: AsyncConnection) -> None:
    indexes = await (await rollback_conn.execute(INDEXES)).fetchall()
    assert {name: key for _, name, key in indexes} == UNIQUE
    for table, name, key in indexes:
        columns = dict(await (await rollback_conn.execute(COLUMNS, [f"evertick.{table}"])).fetchall())
        row = {column: VALUES[kind] for column, kind in columns.items() if re.search(rf"\b{column}\b", key)}
        if name in ("alert_open", "proof_violation_open"):
            row["ended_at"] = None
        copy = Identifier(f"copy_of_{name}")
        # A copy with this index only, so that no other column and no other table is needed.
        await rollback_conn.execute(
            SQL("create temporary table {} on commit drop as select * from evertick.{} limit 0").format(
                copy, Identifier(table)
            )
        )
        await rollback_conn.execute(SQL("create unique index {} on {} ").format(Identifier(name), copy) + SQL(key))
        insert = SQL("insert into {} select * from jsonb_populate_record(null::evertick.{}, %s)").format(
            copy, Identifier(table)
        )
        await rollback_conn.execute(insert, [Jsonb(row)])
        with pytest.raises(UniqueViolation) as refused:
            async with rollback_conn.transaction():
                await rollback_conn.execute(insert, [Jsonb(row)])
        assert refused.value.diag.constraint_name == name


DAG = "insert into dag (dag_id, name, file) overriding system value values (1, 'a', 'a.py')"
SCHEDULE = (
    "insert into schedule (schedule_id, dag_id, name, version, spec, params, misfire, window_seconds, changed_by, changed_at)"
    " overriding system value values (1, 1, 's', 1, '{}', '{}', 'latest', 0, 'me', clock())"
)
ORPHANS = {
    "dag_version": "insert into dag_version (dag_id, number, hash, bundle_hash, spec, task_count, created_at)"
    " values (1, 1, 'h', 'b', '{}', 1, clock())",
    "schedule": SCHEDULE,
    "schedule_state": "insert into schedule_state (schedule_id, shard, version) values (1, 0, 1)",
    "schedule_version": "insert into schedule_version select 1, 1, 'put', 'me', clock(), 'code', false, '{}'",
    "backfill": "insert into backfill (shard, dag_id, spec, params, newest_first, request, created_by, created_at, first_at,"
    " last_at, reprocess, parallel, state, total, open_runs) select 0, 1, '{}', '{}', false, 'r', 'me', clock(), clock(),"
    " clock(), 'none', 1, 'running', 1, 0",
    "credential": "insert into credential (secret_hash, account_id, kind, name, created_by, created_at)"
    " values ('s', 1, 'token', 'n', 'x', clock())",
}


@pytest.mark.parametrize("table", ORPHANS)
async def test_a_row_without_its_parent_is_refused(rollback_conn: AsyncConnection, table: str) -> None:
    with pytest.raises(ForeignKeyViolation):
        await rollback_conn.execute(ORPHANS[table])  # type: ignore[arg-type]


@pytest.mark.parametrize("parent", ["dag", "schedule"])
async def test_a_parent_that_has_rows_stays(rollback_conn: AsyncConnection, parent: str) -> None:
    await rollback_conn.execute(DAG)
    await rollback_conn.execute(SCHEDULE)
    await rollback_conn.execute(ORPHANS["schedule_state"])  # type: ignore[arg-type]
    # PostgreSQL 18 calls it a RestrictViolation, those before a ForeignKeyViolation.
    with pytest.raises((ForeignKeyViolation, RestrictViolation)):
        await rollback_conn.execute(f"delete from {parent}")  # type: ignore[arg-type]
