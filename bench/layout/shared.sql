-- What all three layouts share: the plan, the decision, and the words. Version 1 is a DAG of one task, 2 a chain, 3 a fan.

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
    select case when failed > 0 then 'upstream_failed' when success >= total then 'available' else 'waiting' end::task_state
$$;
