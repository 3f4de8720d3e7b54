-- Append-only rows about everything that the database under test committed, for test databases only. A row is written in
-- the transaction that it tells of, so what was rolled back leaves nothing.

create schema chaos_audit;

-- The machine's own clock, which no fault ever sets. To a hundredth of a second.
create function chaos_audit.boot_ns() returns bigint language plpgsql volatile as $$
declare
    seconds text := split_part(pg_read_file('/proc/uptime'), ' ', 1);
begin
    return split_part(seconds, '.', 1)::bigint * 1000000000 + split_part(seconds, '.', 2)::bigint * 10000000;
end $$;

-- One name per session of the server: process ids come back.
create function chaos_audit.me() returns text language sql volatile as $$
    select coalesce(nullif(current_setting('chaos_audit.me', true), ''),
                    set_config('chaos_audit.me', pg_backend_pid() || '@' || gen_random_uuid(), false))
$$;

-- One counter for all tables, so that rows about the same thing can be put in order whatever table they are in.
create sequence chaos_audit.entries;

create table chaos_audit.task_move (
    entry bigint primary key default nextval('chaos_audit.entries'),
    tx xid8 not null default pg_current_xact_id(), at_ns bigint not null,
    run_id bigint not null, idx int not null, map_index int not null, old_state text, new_state text,
    old_epoch bigint, new_epoch bigint, old_session bigint, new_session bigint, attempt int, lost_attempts int, reason text);
create table chaos_audit.run_move (
    entry bigint primary key default nextval('chaos_audit.entries'), tx xid8 not null default pg_current_xact_id(),
    at timestamptz not null default clock_timestamp(), at_ns bigint not null, run_id bigint not null,
    old_state text, new_state text, reason text);
create table chaos_audit.lease_move (
    entry bigint primary key default nextval('chaos_audit.entries'),
    tx xid8 not null default pg_current_xact_id(), at_ns bigint not null,
    session bigint not null, run_id bigint not null, idx int not null, map_index int not null, epoch bigint not null,
    is_gained boolean not null);
create table chaos_audit.shard_move (
    entry bigint primary key default nextval('chaos_audit.entries'),
    tx xid8 not null default pg_current_xact_id(), backend text not null,
    at timestamptz not null default clock_timestamp(), at_ns bigint not null, shard int not null,
    old_epoch bigint, new_epoch bigint, owner text, state text);
create table chaos_audit.schedule_move (
    entry bigint primary key default nextval('chaos_audit.entries'), tx xid8 not null default pg_current_xact_id(),
    at timestamptz not null default clock_timestamp(), at_ns bigint not null, schedule_id int not null, version int,
    old_due timestamptz, new_due timestamptz, is_paused boolean, error text, is_same_version boolean);
create table chaos_audit.schedule_version (
    entry bigint primary key default nextval('chaos_audit.entries'), tx xid8 not null default pg_current_xact_id(),
    at timestamptz not null default clock_timestamp(), at_ns bigint not null, schedule_id int not null, dag_id int not null,
    name text not null, version int not null, spec jsonb not null, misfire text not null, window_seconds double precision,
    request text, changed_by text not null, is_deleted boolean not null, overlap text not null);
create table chaos_audit.runner_move (
    entry bigint primary key default nextval('chaos_audit.entries'),
    tx xid8 not null default pg_current_xact_id(), backend text not null,
    at_ns bigint not null, session bigint not null, what text not null, reason text);
create table chaos_audit.fact_change (
    entry bigint primary key default nextval('chaos_audit.entries'),
    at_ns bigint not null, run_id bigint not null, what text not null);

-- What runners reported, and what they were refused.
create table chaos_audit.report (
    entry bigint primary key default nextval('chaos_audit.entries'),
    tx xid8 not null default pg_current_xact_id(), at_ns bigint not null,
    session bigint not null, run_id bigint not null, idx int not null, map_index int not null, epoch bigint not null,
    kind text, is_refused boolean not null);
create table chaos_audit.refusal (
    entry bigint primary key default nextval('chaos_audit.entries'), at_ns bigint not null, kind text not null, session bigint);
-- A refused plan is rolled back, and with it every row about it. A file stays; a sequence would, too, but a crash of the
-- server makes it jump by up to 32.
create function chaos_audit.refused_files() returns text language sql stable as $$
    select 'chaos_refused_' || oid || '_' from pg_database where datname = current_database()
$$;
create function chaos_audit.note_refused_fence(p_shard int, p_epoch bigint) returns void language plpgsql security definer as $$
begin
    execute format('copy (select %s, %s) to %L', p_shard, p_epoch,
                   current_setting('data_directory') || '/' || chaos_audit.refused_files() || gen_random_uuid());
exception when others then
    null;  -- a full disk must change nothing for who is refused
end $$;

-- What leaders committed, in the order of the commits: the rows are written by triggers that are put off until then.
create table chaos_audit.planning (tx xid8 not null, backend text not null, shard int not null, epoch bigint not null);
create table chaos_audit.leader_commit (
    place bigint generated always as identity primary key, tx xid8 not null default pg_current_xact_id(), backend text not null,
    at_ns bigint not null, kind text not null, shard int, epoch bigint);

-- Runs that were put there as if they had ended long ago: nothing of theirs is noted.
create table chaos_audit.old_run (run_id bigint primary key);

create function chaos_audit.note_task() returns trigger language plpgsql as $$
begin
    if tg_op = 'DELETE' and exists (select 1 from chaos_audit.old_run o where o.run_id = old.run_id) then
        return null;
    end if;
    insert into chaos_audit.task_move (at_ns, run_id, idx, map_index, old_state, new_state, old_epoch, new_epoch, old_session,
                                       new_session, attempt, lost_attempts, reason)
    values (chaos_audit.boot_ns(), coalesce(new.run_id, old.run_id), coalesce(new.idx, old.idx),
            coalesce(new.map_index, old.map_index), old.state, new.state, old.epoch, new.epoch, old.session, new.session,
            new.attempt, new.lost_attempts, new.reason);
    return null;
end $$;
create trigger chaos_inserted after insert on evertick.task for each row
    when (new.state <> 'waiting') execute function chaos_audit.note_task();
create trigger chaos_updated after update on evertick.task for each row
    when ((old.state, old.epoch, old.session) is distinct from (new.state, new.epoch, new.session))
    execute function chaos_audit.note_task();
create trigger chaos_deleted after delete on evertick.task for each row execute function chaos_audit.note_task();

create function chaos_audit.note_run() returns trigger language plpgsql as $$
begin
    if tg_op = 'DELETE' and exists (select 1 from chaos_audit.old_run o where o.run_id = old.run_id) then
        return null;
    end if;
    insert into chaos_audit.run_move (at_ns, run_id, old_state, new_state, reason)
    values (chaos_audit.boot_ns(), coalesce(new.run_id, old.run_id), old.state, new.state, new.reason);
    return null;
end $$;
create trigger chaos_inserted after insert on evertick.run_status for each row execute function chaos_audit.note_run();
create trigger chaos_updated after update on evertick.run_status for each row
    when (old.state <> new.state) execute function chaos_audit.note_run();
create trigger chaos_deleted after delete on evertick.run_status for each row execute function chaos_audit.note_run();

create function chaos_audit.note_fact() returns trigger language plpgsql as $$
begin
    -- What was over long ago may be deleted, and nothing else.
    if tg_op = 'UPDATE' or not exists (select 1 from chaos_audit.old_run o where o.run_id = old.run_id) then
        insert into chaos_audit.fact_change (at_ns, run_id, what) values (chaos_audit.boot_ns(), old.run_id, lower(tg_op));
    end if;
    return null;
end $$;
create trigger chaos_changed after update or delete on evertick.run for each row execute function chaos_audit.note_fact();

create function chaos_audit.note_lease() returns trigger language plpgsql as $$
begin
    if tg_op <> 'INSERT' then
        insert into chaos_audit.lease_move (at_ns, session, run_id, idx, map_index, epoch, is_gained)
        values (chaos_audit.boot_ns(), old.session, old.run_id, old.idx, old.map_index, old.epoch, false);
    end if;
    if tg_op <> 'DELETE' then
        insert into chaos_audit.lease_move (at_ns, session, run_id, idx, map_index, epoch, is_gained)
        values (chaos_audit.boot_ns(), new.session, new.run_id, new.idx, new.map_index, new.epoch, true);
    end if;
    return null;
end $$;
create trigger chaos_moved after insert or update or delete on evertick.lease
    for each row execute function chaos_audit.note_lease();

create function chaos_audit.note_shard() returns trigger language plpgsql as $$
begin
    insert into chaos_audit.shard_move (backend, at_ns, shard, old_epoch, new_epoch, owner, state)
    values (chaos_audit.me(), chaos_audit.boot_ns(), coalesce(new.shard, old.shard), old.epoch, new.epoch, new.leader, new.state);
    return null;
end $$;
create trigger chaos_moved after insert or update or delete on evertick.shard
    for each row execute function chaos_audit.note_shard();

create function chaos_audit.note_schedule() returns trigger language plpgsql as $$
begin
    insert into chaos_audit.schedule_move (at_ns, schedule_id, version, old_due, new_due, is_paused, error, is_same_version)
    values (chaos_audit.boot_ns(), coalesce(new.schedule_id, old.schedule_id), new.version, old.next_due, new.next_due,
            new.is_paused, new.error, old.version = new.version);
    return null;
end $$;
create trigger chaos_inserted after insert or delete on evertick.schedule_state for each row
    execute function chaos_audit.note_schedule();
create trigger chaos_updated after update on evertick.schedule_state for each row
    when ((old.version, old.next_due, old.is_paused, old.error) is distinct from (new.version, new.next_due, new.is_paused, new.error))
    execute function chaos_audit.note_schedule();

create function chaos_audit.note_version() returns trigger language plpgsql as $$
begin
    insert into chaos_audit.schedule_version (at_ns, schedule_id, dag_id, name, version, spec, misfire, window_seconds, request,
                                              changed_by, is_deleted, overlap)
    values (chaos_audit.boot_ns(), new.schedule_id, new.dag_id, new.name, new.version, new.spec, new.misfire, new.window_seconds,
            new.request, new.changed_by, new.deleted_at is not null, new.overlap);
    return null;
end $$;
create trigger chaos_changed after insert or update on evertick.schedule for each row execute function chaos_audit.note_version();

create function chaos_audit.note_runner() returns trigger language plpgsql as $$
begin
    insert into chaos_audit.runner_move (backend, at_ns, session, what, reason)
    values (chaos_audit.me(), chaos_audit.boot_ns(), new.session, tg_argv[0], new.end_reason);
    return null;
end $$;
create trigger chaos_inserted after insert on evertick.runner for each row execute function chaos_audit.note_runner('started');
create trigger chaos_beat after update on evertick.runner for each row
    when (old.heartbeat_seq <> new.heartbeat_seq) execute function chaos_audit.note_runner('beat');
create trigger chaos_silence after update on evertick.runner for each row
    when (old.silent_seconds <> new.silent_seconds) execute function chaos_audit.note_runner('silence');
create trigger chaos_gone after update on evertick.runner for each row
    when (old.ended_at is null and new.ended_at is not null) execute function chaos_audit.note_runner('gone');

create function chaos_audit.commit_planning() returns trigger language plpgsql as $$
begin
    insert into chaos_audit.leader_commit (backend, at_ns, kind, shard, epoch)
    values (new.backend, chaos_audit.boot_ns(), 'planning', new.shard, new.epoch);
    return null;
end $$;
create constraint trigger chaos_commits after insert on chaos_audit.planning deferrable initially deferred for each row
    execute function chaos_audit.commit_planning();

create function chaos_audit.commit_shard() returns trigger language plpgsql as $$
begin
    insert into chaos_audit.leader_commit (backend, at_ns, kind, shard, epoch)
    values (new.backend, chaos_audit.boot_ns(), case when new.old_epoch is distinct from new.new_epoch then 'take' else 'renew' end,
            new.shard, new.new_epoch);
    return null;
end $$;
create constraint trigger chaos_commits after insert on chaos_audit.shard_move deferrable initially deferred for each row
    execute function chaos_audit.commit_shard();

create function chaos_audit.commit_runner() returns trigger language plpgsql as $$
begin
    insert into chaos_audit.leader_commit (backend, at_ns, kind) values (new.backend, chaos_audit.boot_ns(), new.what);
    return null;
end $$;
create constraint trigger chaos_commits after insert on chaos_audit.runner_move deferrable initially deferred for each row
    when (new.what in ('silence', 'gone')) execute function chaos_audit.commit_runner();

-- V6 at every commit: whoever lets somebody in still holds the locks of the gates, so what is seen here is what there is. A pool
-- that somebody made smaller may be overfull for a while; keys and limits never are.
create table chaos_audit.limit_broken (entry bigint primary key default nextval('chaos_audit.entries'), at_ns bigint not null, what text not null);
create function chaos_audit.note_limits() returns trigger language plpgsql as $$
begin
    insert into chaos_audit.limit_broken (at_ns, what)
    select chaos_audit.boot_ns(), format('%s %s: %s of %s held, %s counted', g.kind, g.name, h.weight, g.capacity, g.used)
    from evertick.gate g cross join lateral (
        select coalesce(sum(n.weight), 0) as weight from evertick.gate_holder x
        cross join lateral unnest(x.gate_ids, x.weights) as n(gate_id, weight) where n.gate_id = g.gate_id) h
    where g.gate_id = any(new.gate_ids) and (h.weight > g.capacity or h.weight <> g.used);
    return null;
end $$;
create constraint trigger chaos_limits after insert on evertick.gate_holder deferrable initially deferred for each row
    execute function chaos_audit.note_limits();

-- How large pools are: what a checker holds against the moves of the tasks.
create table chaos_audit.pool_move (
    entry bigint primary key default nextval('chaos_audit.entries'), name text not null, capacity int not null);
create function chaos_audit.note_pool() returns trigger language plpgsql as $$
begin
    insert into chaos_audit.pool_move (name, capacity) values (new.name, new.capacity);
    return null;
end $$;
create trigger chaos_made after insert on evertick.gate for each row
    when (new.kind = 'pool') execute function chaos_audit.note_pool();
create trigger chaos_resized after update on evertick.gate for each row
    when (new.kind = 'pool' and old.capacity <> new.capacity) execute function chaos_audit.note_pool();
