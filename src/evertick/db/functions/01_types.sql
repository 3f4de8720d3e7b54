-- Rows that cross functions. Enums are in the baseline, because tables use them; these belong to the functions alone.

create type task_ref as (run_id bigint, idx int, map_index int, version_id int, state task_state);

-- The author of a change, for the audit log. The origin is the address or the host of the request.
create type actor as (name text, origin text, request_id text);

create type attempt_ref as (run_id bigint, idx int, map_index int, epoch int);
create type group_ref as (run_id bigint, version_id int, group_id int);
create type gate_slots as (gate_id int, weight int);

create type exchange_row as (kind text, run_id bigint, idx int, map_index int, epoch int, attempt int, version_id int,
                             fire_at timestamptz, params text, inputs text, place int, seq bigint);

-- A deadline that is over, of a schedule or of a run of none; and one missed for the first time in its episode.
create type judged_deadline as (kind text, schedule_id int, run_id bigint, task text, due_at timestamptz,
                                is_on_time boolean);
create type missed_deadline as (kind text, schedule_id int, run_id bigint, task text, due_at timestamptz);

-- A schedule as it is published or set, with when it is due next, and what it skips until then.
create type planned_schedule as (name text, spec jsonb, params jsonb, misfire text, window_seconds double precision,
    catchup_limit int, overlap text, start_within double precision, finish_within double precision,
    delay_seconds double precision, next_due timestamptz, skipped jsonb);

-- What a transaction has to do at its end, and what it did so far. A verb begins with an empty one; each function that
-- adds to it takes it and returns it, as `inout fx effects` or in a result below; `apply_effects` is the verb's last
-- call.
--   entering       pending tasks that must pass their gates, expand or be deferred
--   counted        tasks that only count at their gates: tasks of a paused DAG with an ordered key, and ended tasks for
--                  which the next run may wait
--   released       slots to count back, and gates to process again (weight 0)
--   enqueued       how many tasks became available
--   wakes_planner  whether the leader has something to do: an event for a schedule, or a wait
-- A variable is not rolled back with a subtransaction: in a block with an exception clause, effects come from one call,
-- and nothing after it can fail (tests/test_sql.py checks that).
create type effects as (
    entering task_ref[], counted task_ref[], released gate_slots[], enqueued int, wakes_planner boolean);

create type move_result as (tasks task_ref[], fx effects);
create type finish_result as (refused attempt_ref[], fx effects);
create type dispatch_result as (sessions bigint[], fx effects);
create type gate_result as (held int[], looks int, fx effects);
create type stop_result as (stopped task_ref[], asked int, fx effects);
create type admission_result as (admitted int, refused int, fx effects);
create type reconcile_result as (repairs text[], fx effects);
create type overlap_result as (plans jsonb, canceled int, fx effects);

-- What fire plans did: the schedules that advanced, their fires that an open run skipped, and the tasks asked to stop.
create type fire_result as (won int[], overlapped int, canceled int, fx effects);

create type gate_request as (run_id bigint, idx int, map_index int, version_id int, rank smallint, kind gate_kind,
                             name text, weight int, capacity int, need bigint, period double precision);
create type gate_candidate as (run_id bigint, idx int, map_index int, version_id int, rank smallint, gate_ids int[],
                               weights int[], checks int[], needs bigint[]);

-- How a mapped task ends instead of becoming instances. 'skipped' or 'failed', with the reason; null: it does not.
create type expansion_error as (state task_state, reason text);

-- Something that happened to a task, or to a run (idx -1).
create type notification_event as (run_id bigint, version_id int, idx int, task text, event text, state text,
                                   attempt int, reason text);

create type wait_result as (run_id bigint, idx int, map_index int, epoch int, state task_state, reason text,
                            result jsonb);
create type dispatch_row as (run_id bigint, idx int, map_index int, epoch int, session bigint, place int, seq bigint);
-- A trigger that a runner starts, or that it no longer holds (kind 'lost'; 'stop': a person ended the wait).
create type trigger_row as (kind text, run_id bigint, idx int, map_index int, epoch int, version_id int, attempt int,
                            fire_at timestamptz, classpath text, kwargs jsonb, run jsonb);
create type agent_start as (verdict text, attempt int, version_id int, fire_at timestamptz, params text, inputs text);

-- A DAG that was published: its version, whether that is new, and how many of its queued tasks moved to another queue.
create type stored_dag as (dag text, dag_id int, version_id int, is_new boolean, rerouted int);
