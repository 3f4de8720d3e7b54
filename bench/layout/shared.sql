-- What all three layouts share: the plan, the decision, and the words. Version 1 is a DAG of one task, 2 a chain,
-- 3 a fan.

create type task_state as enum (
    'waiting', 'pending', 'available', 'queued', 'running', 'deferred',
    'success', 'failed', 'skipped', 'canceled', 'upstream_failed');
create type run_state as enum ('queued', 'running', 'success', 'failed', 'canceled');
create type ended as (run_id bigint, idx int, map_index int, version_id int, state task_state);

create table task_spec (
    version_id     int not null,
    idx            int not null,
    queue          text not null,
    rank           smallint not null,
    upstream_total int not null,
    primary key (version_id, idx)
);
create table edge (
    version_id int not null,
    src        int not null,
    dst        int not null,
    primary key (version_id, src, dst)
);

-- all_success, the rule of nearly every task. The other rules differ in this function alone.
create function decide(total int, success int, failed int) returns task_state language sql immutable as $$
    select case when failed > 0 then 'upstream_failed' when success >= total then 'available'
                else 'waiting' end::task_state
$$;

-- The reports as rows. ROWS is far too low on purpose, and the function volatile so that it is not inlined: with the
-- usual estimate of 100 the planner reads whole tables that look small when the plan is made, and keeps doing so.
create function read_reports(p_reports jsonb) returns table (r bigint, i int, m int, e int, state task_state)
rows 5 language sql volatile as $$
    select x.r, x.i, x.m, x.e, case x.kind when 'success' then 'success' else 'pending' end::task_state
    from jsonb_to_recordset(p_reports) as x(r bigint, i int, m int, e int, kind text)
$$;
