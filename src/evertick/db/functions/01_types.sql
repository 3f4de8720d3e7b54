-- Rows that cross functions. Enums are in the baseline, because tables use them; these belong to the functions alone.

create type task_ref as (run_id bigint, idx int, map_index int, version_id int, state task_state);

create type group_ref as (run_id bigint, version_id int, grp int);

-- The result of applying fire plans: the schedules that advanced, how many of their fires were skipped because of an
-- open run, and how many tasks of such runs were asked to stop.
create type fire_result as (won int[], overlapped int, canceled int);

create type exchange_row as (
    kind text, run_id bigint, idx int, map_index int, epoch int, attempt int, version_id int,
    fire_at timestamptz, params text, inputs text, place int, seq bigint);

-- Something that was late for the first time of its episode, and of whom: of a schedule, or of a run that belongs to
-- none.
create type missed_deadline as (kind text, schedule_id int, run_id bigint, task text, due_at timestamptz);

create type gate_slots as (gate_id int, weight int);

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

create type dispatch_row as (
    run_id bigint, idx int, map_index int, epoch int, session bigint, place int, seq bigint);

create type agent_start as (verdict text, attempt int, version_id int, fire_at timestamptz, params text, inputs text);
