-- Publishing: a DAG's version, its tasks and its schedules, in one transaction. The same content again changes nothing.

-- Lock order: schedules before their DAG, as firing does.
create function lock_schedules(p_name text) returns void language sql as $$
    select from schedule_state s join schedule c on c.schedule_id = s.schedule_id join dag d on d.dag_id = c.dag_id
    where d.name = p_name order by s.schedule_id for no key update of s
$$;

-- p_dag: {name, file, hash, bundle_hash, spec, max_active_runs, run_timeout, run_retries, starts_paused, tasks: [...],
-- edges: [[src, dst, leaves_group]], inputs: [[idx, src]], schedules: [planned_schedule]}, and rows for the tables
-- below. p_seen: the schedules as they were when this was planned (see check_unchanged). p_settle: what is due under
-- schedules that this changes or removes (see apply_fire_plans): it is applied first.
create function publish_dag(p_dag jsonb, p_seen jsonb, p_settle jsonb, p_actor actor, out out_dag_id int,
                            out out_version_id int, out is_new boolean, out rerouted int) language plpgsql as $$
declare
    fx effects;
    t timestamptz := clock();
    before int;
    part text;
    target text;
begin
    perform lock_schedules(p_dag->>'name');
    perform check_unchanged(p_dag->>'name', null, p_seen);
    before := (select d.version_id from dag d where d.name = p_dag->>'name');
    insert into dag as d (name, file, is_paused, shard)
    values (p_dag->>'name', p_dag->>'file', coalesce((p_dag->>'starts_paused')::boolean, false),
            shard_of(p_dag->>'name', open_shard_count()))
    on conflict (name) do update set file = excluded.file, deleted_at = null
    returning d.dag_id into out_dag_id;

    insert into dag_version as v (dag_id, number, hash, bundle_hash, spec, task_count, run_timeout, run_retries,
                                  created_at)
    select out_dag_id, coalesce(max(v.number), 0) + 1, p_dag->>'hash', p_dag->>'bundle_hash', p_dag->'spec',
           jsonb_array_length(p_dag->'tasks'), (p_dag->>'run_timeout')::double precision,
           coalesce((p_dag->>'run_retries')::int, 0), t
    from dag_version v where v.dag_id = out_dag_id
    on conflict (dag_id, hash, bundle_hash) do nothing
    returning v.version_id into out_version_id;
    is_new := out_version_id is not null;
    rerouted := 0;
    if is_new then
        insert into task_spec (version_id, idx, name, queue, priority, trigger_rule, upstream_total, setup_total,
            is_setup, is_leaf, is_root, max_attempts, rerun_on_loss, queue_timeout, outlets, is_gated, has_order_key,
            awaits_past, is_mapped, is_wait, notifies, group_id, decides_group)
        select out_version_id, x.idx, x.name, x.queue, x.priority, x.rule, x.upstream_total, x.setup_total, x.is_setup,
               x.is_leaf, x.starts_at_once, x.max_attempts, x.rerun_on_loss, x.queue_timeout, x.outlets,
               coalesce(x.is_gated, false), coalesce(x.is_ordered, false), coalesce(x.awaits_past, false),
               coalesce(x.is_mapped, false), coalesce(x.defers, false), coalesce(x.notifies, false), x.group_id,
               coalesce(x.decides_grp, false)
        from jsonb_to_recordset(p_dag->'tasks') as x(idx int, name text, queue text, priority smallint,
            rule trigger_rule, upstream_total int, setup_total int, is_setup boolean, is_leaf boolean,
            starts_at_once boolean, max_attempts int, rerun_on_loss boolean, queue_timeout double precision,
            outlets text[], is_gated boolean, is_ordered boolean, awaits_past boolean, is_mapped boolean,
            defers boolean, notifies boolean, group_id int, decides_grp boolean);
        for part, target in
            values ('groups', 'retry_group'), ('gates', 'task_gate'), ('mappings', 'task_mapping'),
                   ('lists', 'mapping_input'), ('children', 'trigger_dag_task'), ('notices', 'notification_rule'),
                   ('deadlines', 'task_deadline'), ('waits', 'wait_spec')
        loop
            execute format('insert into %1$I select r.* from jsonb_array_elements($1) x '
                           'cross join lateral jsonb_populate_record(null::%1$I, x || $2) r', target)
            using p_dag->part, jsonb_build_object('version_id', out_version_id);
        end loop;
        insert into edge (version_id, src, dst, leaves_group)
        select out_version_id, (x->>0)::int, (x->>1)::int, (x->>2)::int from jsonb_array_elements(p_dag->'edges') x;
        insert into task_input (version_id, idx, src)
        select out_version_id, (x->>0)::int, (x->>1)::int from jsonb_array_elements(p_dag->'inputs') x;
    else
        select v.version_id into out_version_id from dag_version v
        where v.dag_id = out_dag_id and v.hash = p_dag->>'hash' and v.bundle_hash = p_dag->>'bundle_hash';
        rerouted := reroute_ready_tasks(out_dag_id, out_version_id, p_dag->'tasks', p_actor);
    end if;
    fx := (apply_fire_plans(p_settle, true, fx)).fx;
    -- Which runs can have the replaced version, for prune: by the sequence, because ids that were drawn count.
    update dag_version v set retired_at = t, final_run_id = (select last_value from run_run_id_seq)
    from dag d where d.dag_id = out_dag_id and v.version_id = d.version_id and v.version_id <> out_version_id;
    update dag_version v set retired_at = null, final_run_id = null
    where v.version_id = out_version_id and v.retired_at is not null;
    update dag d set version_id = out_version_id, max_active_runs = (p_dag->>'max_active_runs')::int
    where d.dag_id = out_dag_id
      and (d.version_id, d.max_active_runs) is distinct from (out_version_id, (p_dag->>'max_active_runs')::int);
    update dag d set has_run_timeout = true
    where d.dag_id = out_dag_id and not d.has_run_timeout and (p_dag->>'run_timeout') is not null;
    update dag d set has_run_retries = true
    where d.dag_id = out_dag_id and not d.has_run_retries and (p_dag->>'run_retries')::int > 0;
    update dag d set depends_on_past = true
    where d.dag_id = out_dag_id and not d.depends_on_past and exists (
        select 1 from task_spec s where s.version_id = out_version_id and s.awaits_past);
    update dag d set has_notifications = true
    where d.dag_id = out_dag_id and not d.has_notifications and exists (
        select 1 from notification_rule n where n.version_id = out_version_id and n.idx = -1);
    -- A run may wait for a run of another version: the end of its tasks must wake it.
    update task_spec s set awaits_past = true
    from dag d, dag_version v
    where d.dag_id = out_dag_id and d.depends_on_past and v.dag_id = d.dag_id and s.version_id = v.version_id
        and not s.awaits_past
      and s.name in (select n.name from task_spec n join dag_version w on w.version_id = n.version_id
                     where w.dag_id = d.dag_id and n.awaits_past);
    update dag d set has_dependents = true
    where d.dag_id = out_dag_id and not d.has_dependents and exists (
        select 1 from schedule_dependency w where w.kind in ('dag', 'end') and w.name = d.name);
    perform sync_schedules(out_dag_id, p_dag->'schedules', false, p_actor);
    if is_new or before is distinct from out_version_id then
        perform write_audit(p_actor, 'publish',
                            jsonb_build_object('version_id', out_version_id, 'hash', p_dag->>'hash'),
                            p_dag_id => out_dag_id);
    end if;
    fx := apply_effects(fx);
end $$;

-- Schedules are declared: an absent one is removed, an unchanged one keeps its cursor, a changed one starts from now
-- under a higher version, and one that a user has set stays as it is. A schedule's id is stable per (dag, name).
create function sync_schedules(p_dag_id int, p_schedules jsonb, p_removes_all boolean, p_actor actor)
returns void language plpgsql as $$
declare
    changed int[];
    t timestamptz := clock();
begin
    with wanted as (
        select * from jsonb_populate_recordset(null::planned_schedule, p_schedules)
    ), written as (
        insert into schedule as c (dag_id, name, version, spec, params, misfire, window_seconds, catchup_limit, overlap,
                                   start_within, finish_within, delay_seconds, changed_by, changed_at)
        select p_dag_id, w.name, 1, w.spec, w.params, w.misfire, w.window_seconds, w.catchup_limit, w.overlap,
               w.start_within, w.finish_within, w.delay_seconds, p_actor.name, t
        from wanted w
        on conflict (dag_id, name) do update
            set version = c.version + 1, spec = excluded.spec, params = excluded.params, misfire = excluded.misfire,
                window_seconds = excluded.window_seconds, catchup_limit = excluded.catchup_limit,
                    overlap = excluded.overlap, start_within = excluded.start_within,
                finish_within = excluded.finish_within, delay_seconds = excluded.delay_seconds,
                changed_by = p_actor.name, changed_at = t, deleted_at = null
            where c.origin = 'code'
              and (c.deleted_at is not null
                   or (c.spec, c.params, c.misfire, c.window_seconds, c.catchup_limit, c.overlap, c.start_within,
                                               c.finish_within)
                  is distinct from (excluded.spec, excluded.params, excluded.misfire, excluded.window_seconds,
                                    excluded.catchup_limit, excluded.overlap, excluded.start_within,
                                        excluded.finish_within))
        returning c.schedule_id, c.name, c.version
    ), missed as (
        -- instants that were over before the schedule was known; a later version begins when it is created
        insert into skip_record (schedule_id, first_at, last_at, count, reason, recorded_at)
        select c.schedule_id, k.first_at, k.last_at, k.count, k.reason, t
        from written c join wanted w on w.name = c.name
        cross join lateral jsonb_to_record(w.skipped) as k(first_at timestamptz, last_at timestamptz, count bigint,
                                                           reason text)
        where jsonb_typeof(w.skipped) = 'object' and c.version = 1
        on conflict (schedule_id, first_at) do nothing
    ), placed as (
        insert into schedule_state as s (schedule_id, shard, version, next_due, is_paused)
        select c.schedule_id, d.shard, c.version, w.next_due, d.is_paused
        from written c join wanted w on w.name = c.name join dag d on d.dag_id = p_dag_id
        on conflict (schedule_id) do update set version = excluded.version, next_due = excluded.next_due, error = null
    )
    select array(select c.schedule_id from written c) into changed;
    if cardinality(changed) > 0 then
        perform record_schedule_versions(changed, 'publish');
        update dag d set serializes_runs = true where d.dag_id = p_dag_id and not d.serializes_runs and exists (
            select 1 from schedule c where c.schedule_id = any(changed) and c.overlap <> 'allow');
    end if;
    perform delete_schedules(array(
        select c.schedule_id from schedule c
        where c.dag_id = p_dag_id and c.deleted_at is null and (c.origin = 'code' or p_removes_all)
          and c.name not in (select x->>'name' from jsonb_array_elements(p_schedules) x)), p_actor);
end $$;

-- Creates or changes one schedule by compare-and-set (V12). p_expected: the version that the caller has seen, 0 for
-- none, null for any. p_request: a key and a digest of the schedule, which makes a repeated request one change (-1: the
-- key was used with another one). p_origin: the owner, code or user. Returns the version, or null after another change.
create function put_schedule(p_dag_id int, p_schedule jsonb, p_expected int, p_request text, p_origin text,
                             p_seen jsonb, p_settle jsonb, p_actor actor, out put int) language plpgsql as $$
declare
    fx effects;
    id int;
    t timestamptz := clock();
begin
    perform lock_schedules(d.name) from dag d where d.dag_id = p_dag_id;
    select case when c.request = p_request then c.version else -1 end into put from schedule c
    where c.dag_id = p_dag_id and c.name = p_schedule->>'name' and c.deleted_at is null
        and split_part(c.request, ' ', 1) = split_part(p_request, ' ', 1);
    if found then
        return;
    end if;
    perform check_unchanged(d.name, p_schedule->>'name', p_seen) from dag d where d.dag_id = p_dag_id;
    fx := (apply_fire_plans(p_settle, true, fx)).fx;
    insert into schedule as c (dag_id, name, version, spec, params, misfire, window_seconds, catchup_limit, overlap,
                               start_within, finish_within, delay_seconds, origin, request, changed_by, changed_at)
    select p_dag_id, w.name, 1, w.spec, w.params, w.misfire, w.window_seconds, w.catchup_limit, w.overlap,
           w.start_within, w.finish_within, w.delay_seconds, p_origin, p_request, p_actor.name, t
    from jsonb_populate_record(null::planned_schedule, p_schedule) w
    where coalesce(p_expected, 0) = 0
      or exists (select 1 from schedule x where x.dag_id = p_dag_id and x.name = p_schedule->>'name')
    on conflict (dag_id, name) do update set version = c.version + 1, spec = excluded.spec, params = excluded.params,
        misfire = excluded.misfire, window_seconds = excluded.window_seconds, catchup_limit = excluded.catchup_limit,
        overlap = excluded.overlap, start_within = excluded.start_within, finish_within = excluded.finish_within,
        delay_seconds = excluded.delay_seconds, origin = p_origin, request = p_request, changed_by = p_actor.name,
        changed_at = t, deleted_at = null where p_expected is null
        or p_expected = case when c.deleted_at is null then c.version else 0 end
    returning c.version, c.schedule_id into put, id;
    if put is null then
        fx := apply_effects(fx);
        return;
    end if;
    insert into schedule_state as s (schedule_id, shard, version, next_due, is_paused)
    select id, d.shard, put, (p_schedule->>'next_due')::timestamptz, d.is_paused from dag d where d.dag_id = p_dag_id
    on conflict (schedule_id) do update
        set version = excluded.version, next_due = excluded.next_due, error = null,
            -- a pause by hand ends when the schedule is the code's again
            is_paused_directly = s.is_paused_directly and p_origin = 'user',
            is_paused = excluded.is_paused or (s.is_paused_directly and p_origin = 'user');
    update dag d set serializes_runs = true
    where d.dag_id = p_dag_id and not d.serializes_runs and p_schedule->>'overlap' <> 'allow';
    insert into skip_record (schedule_id, first_at, last_at, count, reason, recorded_at)
    select id, k.first_at, k.last_at, k.count, k.reason, t
    from jsonb_to_record(p_schedule->'skipped') as k(first_at timestamptz, last_at timestamptz, count bigint,
                                                     reason text)
    where jsonb_typeof(p_schedule->'skipped') = 'object' and put = 1
    on conflict (schedule_id, first_at) do nothing;
    perform record_schedule_versions(array[id], 'put');
    perform write_audit(p_actor, 'put_schedule', p_schedule || jsonb_build_object('version', put),
                        p_dag_id => p_dag_id);
    fx := apply_effects(fx);
end $$;

-- Removes a DAG from planning: its schedules end after their due fires; its history stays, and open runs continue.
create function delete_dag(p_dag_id int, p_seen jsonb, p_settle jsonb, p_actor actor)
returns boolean language plpgsql as $$
declare
    fx effects;
begin
    perform lock_schedules(d.name) from dag d where d.dag_id = p_dag_id;
    perform check_unchanged(d.name, null, p_seen) from dag d where d.dag_id = p_dag_id;
    perform 1 from dag d where d.dag_id = p_dag_id and d.deleted_at is null for no key update;
    if not found then
        return false;
    end if;
    fx := (apply_fire_plans(p_settle, true, fx)).fx;
    perform sync_schedules(p_dag_id, '[]', true, p_actor);
    update dag d set deleted_at = clock() where d.dag_id = p_dag_id and d.deleted_at is null;
    perform write_audit(p_actor, 'delete', '{}', p_dag_id => p_dag_id);
    fx := apply_effects(fx);
    return true;
end $$;

-- Pauses or unpauses a DAG. p_settle: what is due before a pause, or what each schedule does about the fires during it.
create function pause_dag(p_dag_id int, p_paused boolean, p_seen jsonb, p_settle jsonb, p_actor actor)
returns boolean language plpgsql as $$
declare
    fx effects;
begin
    perform lock_schedules(d.name) from dag d where d.dag_id = p_dag_id;
    perform check_unchanged(d.name, null, p_seen) from dag d where d.dag_id = p_dag_id;
    if p_paused then
        fx := (apply_fire_plans(p_settle, false, fx)).fx;
    end if;
    perform 1 from run_status r where r.dag_id = p_dag_id and r.state = 'running' order by r.run_id for no key update;
    update dag d set is_paused = p_paused where d.dag_id = p_dag_id and d.deleted_at is null
        and d.is_paused <> p_paused;
    if not found then
        fx := apply_effects(fx);
        return false;
    end if;
    update schedule_state s set is_paused = p_paused or s.is_paused_directly
    from schedule c where c.schedule_id = s.schedule_id and c.dag_id = p_dag_id;
    if p_paused then
        fx := suspend_dag_tasks(p_dag_id, fx);
    else
        fx := resume_dag_tasks(p_dag_id, fx);
        fx := (apply_fire_plans(p_settle, false, fx)).fx;
    end if;
    perform write_audit(p_actor, case when p_paused then 'pause' else 'unpause' end, '{}', p_dag_id => p_dag_id);
    fx := apply_effects(fx);
    return true;
end $$;
