-- Publishing: a DAG's version, its tasks and its schedules, in one transaction. The same content again changes nothing.

-- Lock order: schedules before their DAG, as firing does.
create function lock_schedules(p_name text) returns void language sql as $$
    select from schedule_state s join schedule c on c.schedule_id = s.schedule_id join dag d on d.dag_id = c.dag_id
    where d.name = p_name order by s.schedule_id for no key update of s
$$;

-- Publishes DAGs of one deployment, and retires others of it: all of them, or none if anything is refused.
-- p_deployment: {name, kind, source, expected, is_whole, content_hash, commit_hash, author, message, restores}.
-- `expected` is the version that the caller has seen: after another change of the deployment it must plan again. With
-- `is_whole` these DAGs are all that the deployment has, and become its next version. p_dags: [dag_row with
-- "schedules"]. p_seen: {dag: the schedules as they were when this was planned} (see check_unchanged). p_settle: what
-- is due under schedules that this changes or removes (see apply_fire_plans): it is applied first. `done`: [{dag,
-- dag_id, version_id, is_new, rerouted}].
create function publish_dags(p_deployment jsonb, p_dags jsonb, p_retired text[], p_seen jsonb, p_settle jsonb,
                             p_actor actor, out version int, out is_new boolean, out done jsonb) language plpgsql as $$
declare
    fx effects;
    place text := p_deployment->>'name';
    names text[] := array(select x->>'name' from jsonb_array_elements(p_dags) x) || p_retired;
    dag_row jsonb;
begin
    version := lock_deployment(p_deployment);
    perform from schedule_state s join schedule c on c.schedule_id = s.schedule_id join dag d on d.dag_id = c.dag_id
    where d.name = any(names) order by s.schedule_id for no key update of s;
    perform check_unchanged(n, null, coalesce(p_seen->n, '[]')) from unnest(names) n;
    fx := (apply_fire_plans(p_settle, true, fx)).fx;
    done := '[]';
    -- In the order of their names, as another deployment locks them.
    for dag_row in select x from jsonb_array_elements(p_dags) x order by x->>'name' loop
        done := done || to_jsonb(store_dag(dag_row, place, p_actor));
    end loop;
    perform retire_dag(d.dag_id, p_actor) from dag d
    where d.name = any(p_retired) and d.deployment = place and d.deleted_at is null;
    is_new := false;
    if (p_deployment->>'is_whole')::boolean then
        is_new := record_deployment(p_deployment, done, version, p_actor);
        version := version + is_new::int;
    end if;
    fx := apply_effects(fx);
end $$;

-- Locks a deployment, and creates it if it does not exist. Returns its version. EV004: it was changed meanwhile.
-- EV005: its DAGs come from elsewhere.
create function lock_deployment(p_deployment jsonb) returns int language plpgsql as $$
declare
    found_row deployment;
begin
    insert into deployment (name, kind, source, created_at)
    values (p_deployment->>'name', coalesce(p_deployment->>'kind', 'folder'), p_deployment->'source', clock())
    on conflict (name) do nothing;
    select * into found_row from deployment d where d.name = p_deployment->>'name' for no key update;
    if found_row.version <> (p_deployment->>'expected')::int then
        raise exception 'deployment % is at version %', found_row.name, found_row.version using errcode = 'EV004';
    elsif found_row.kind <> p_deployment->>'kind' then
        if exists (select 1 from dag d where d.deployment = found_row.name and d.deleted_at is null) then
            raise exception 'deployment % comes from %', found_row.name, found_row.kind using errcode = 'EV005';
        end if;
    end if;
    update deployment d
    set kind = coalesce(p_deployment->>'kind', d.kind), source = coalesce(p_deployment->'source', d.source),
        problem = case when (p_deployment->>'is_whole')::boolean then null else d.problem end, deleted_at = null,
        published_commit = case when p_deployment->>'restores' is not null then d.published_commit
                                when p_deployment->>'kind' = 'git' then p_deployment->>'commit_hash' end
    where d.name = found_row.name;
    return found_row.version;
end $$;

-- The next version of a deployment, unless it has exactly these DAGs at these versions. Returns whether it is new.
create function record_deployment(p_deployment jsonb, p_done jsonb, p_version int, p_actor actor)
returns boolean language plpgsql as $$
declare
    place text := p_deployment->>'name';
    wanted int[] := array(select (x->>'version_id')::int from jsonb_array_elements(p_done) x order by 1);
begin
    if wanted = array(select x.version_id from deployment_dag x
                      where x.deployment = place and x.number = p_version order by 1) then
        return false;
    end if;
    update deployment d set version = p_version + 1 where d.name = place;
    insert into deployment_version (deployment, number, content_hash, commit_hash, author, message, restores,
                                    deployed_by, deployed_at)
    values (place, p_version + 1, p_deployment->>'content_hash', p_deployment->>'commit_hash', p_deployment->>'author',
            p_deployment->>'message', (p_deployment->>'restores')::int, p_actor.name, clock());
    insert into deployment_dag (deployment, number, version_id) select place, p_version + 1, w from unnest(wanted) w;
    perform write_audit(p_actor, 'deploy', jsonb_strip_nulls(jsonb_build_object(
        'deployment', place, 'version', p_version + 1, 'commit', p_deployment->>'commit_hash',
        'restores', (p_deployment->>'restores')::int)));
    return true;
end $$;

-- Makes a version the current one of its DAG. The caller holds the locks of its schedules, and has applied what is due.
-- p_dag: {name, file, hash, bundle_hash, spec, max_active_runs, run_timeout, run_retries, starts_paused, tasks: [...],
-- edges: [[src, dst, leaves_group, scope]], inputs: [[idx, src]], schedules: [planned_schedule]}, and rows for the
-- tables below. EV006: another deployment has a DAG of that name.
create function store_dag(p_dag jsonb, p_deployment text, p_actor actor, out stored stored_dag) language plpgsql as $$
declare
    t timestamptz := clock();
    before int;
    id int;
    made int;
begin
    insert into dag as d (name, deployment, file, is_paused, shard)
    values (p_dag->>'name', p_deployment, p_dag->>'file', coalesce((p_dag->>'starts_paused')::boolean, false),
            shard_of(p_dag->>'name', open_shard_count()))
    on conflict (name) do update set file = excluded.file, deployment = excluded.deployment, deleted_at = null
    where d.deployment = excluded.deployment or d.deleted_at is not null
    returning d.dag_id, d.version_id into id, before;
    if not found then
        raise exception 'DAG % belongs to another deployment', p_dag->>'name' using errcode = 'EV006';
    end if;
    stored := (p_dag->>'name', id, null, true, 0);
    insert into dag_version as v (dag_id, number, hash, bundle_hash, spec, task_count, run_timeout, run_retries,
                                  created_at)
    select id, coalesce(max(v.number), 0) + 1, p_dag->>'hash', p_dag->>'bundle_hash', p_dag->'spec',
           jsonb_array_length(p_dag->'tasks'), (p_dag->>'run_timeout')::double precision,
           coalesce((p_dag->>'run_retries')::int, 0), t
    from dag_version v where v.dag_id = id
    on conflict (dag_id, hash, bundle_hash) do nothing
    returning v.version_id into made;
    if found then
        perform store_tasks(p_dag, made);
    else
        stored.is_new := false;
        select v.version_id into made from dag_version v
        where v.dag_id = id and v.hash = p_dag->>'hash' and v.bundle_hash = p_dag->>'bundle_hash';
        stored.rerouted := reroute_ready_tasks(id, made, p_dag->'tasks', p_actor);
    end if;
    insert into asset as a (name, uri, asset_group, extra, partitions, changed_at)
    select x.name, x.uri, x."group", x.extra, nullif(x.partitions, 'null'), t
    from jsonb_to_recordset(p_dag->'assets') as x(name text, uri text, "group" text, extra jsonb, partitions jsonb)
    order by x.name
    on conflict (name) do update
        set uri = excluded.uri, asset_group = excluded.asset_group, extra = excluded.extra,
            partitions = coalesce(excluded.partitions, a.partitions), changed_at = t
        where (a.uri, a.asset_group, a.extra, a.partitions) is distinct from
              (excluded.uri, excluded.asset_group, excluded.extra, coalesce(excluded.partitions, a.partitions));
    stored.version_id := made;
    perform set_current_version(id, made, p_dag);
    perform sync_schedules(id, p_dag->'schedules', false, p_actor);
    if stored.is_new or before is distinct from made then
        perform write_audit(p_actor, 'publish', jsonb_build_object('version_id', made, 'hash', p_dag->>'hash'),
                            p_dag_id => id);
    end if;
end $$;

-- The tasks of a new version, and all that belongs to them.
create function store_tasks(p_dag jsonb, p_version_id int) returns void language plpgsql as $$
declare
    part text;
    target text;
begin
    insert into task_spec (version_id, idx, name, queue, priority, trigger_rule, upstream_total, setup_total,
        is_setup, is_leaf, is_root, max_attempts, rerun_on_loss, queue_timeout, outlets, is_gated, has_order_key,
        awaits_past, is_mapped, is_wait, notifies, group_id, decides_group, map_head, lists_total, feeds_instances)
    select p_version_id, x.idx, x.name, x.queue, x.priority, x.rule, x.upstream_total, x.setup_total, x.is_setup,
           x.is_leaf, x.starts_at_once, x.max_attempts, x.rerun_on_loss, x.queue_timeout, x.outlets,
           coalesce(x.is_gated, false), coalesce(x.is_ordered, false), coalesce(x.awaits_past, false),
           coalesce(x.is_mapped, false), coalesce(x.defers, false), coalesce(x.notifies, false), x.group_id,
           coalesce(x.decides_grp, false), x.map_head, x.lists_total, coalesce(x.feeds_instances, false)
    from jsonb_to_recordset(p_dag->'tasks') as x(idx int, name text, queue text, priority smallint,
        rule trigger_rule, upstream_total int, setup_total int, is_setup boolean, is_leaf boolean,
        starts_at_once boolean, max_attempts int, rerun_on_loss boolean, queue_timeout double precision,
        outlets text[], is_gated boolean, is_ordered boolean, awaits_past boolean, is_mapped boolean,
        defers boolean, notifies boolean, group_id int, decides_grp boolean,
        map_head int, lists_total int, feeds_instances boolean);
    for part, target in
        values ('groups', 'retry_group'), ('gates', 'task_gate'), ('mappings', 'task_mapping'),
               ('lists', 'mapping_input'), ('children', 'trigger_dag_task'), ('notices', 'notification_rule'),
               ('deadlines', 'task_deadline'), ('waits', 'wait_spec')
    loop
        execute format('insert into %1$I select r.* from jsonb_array_elements($1) x '
                       'cross join lateral jsonb_populate_record(null::%1$I, x || $2) r', target)
        using p_dag->part, jsonb_build_object('version_id', p_version_id);
    end loop;
    insert into edge (version_id, src, dst, leaves_group, scope)
    select p_version_id, (x->>0)::int, (x->>1)::int, (x->>2)::int, (x->>3)::edge_scope
    from jsonb_array_elements(p_dag->'edges') x;
    insert into task_input (version_id, idx, src)
    select p_version_id, (x->>0)::int, (x->>1)::int from jsonb_array_elements(p_dag->'inputs') x;
end $$;

create function set_current_version(p_dag_id int, p_version_id int, p_dag jsonb) returns void language plpgsql as $$
begin
    -- Which runs can have the replaced version, for prune: by the sequence, because ids that were drawn count.
    update dag_version v set retired_at = clock(), final_run_id = (select last_value from run_run_id_seq)
    from dag d where d.dag_id = p_dag_id and v.version_id = d.version_id and v.version_id <> p_version_id;
    update dag_version v set retired_at = null, final_run_id = null
    where v.version_id = p_version_id and v.retired_at is not null;
    update dag d set version_id = p_version_id, max_active_runs = (p_dag->>'max_active_runs')::int
    where d.dag_id = p_dag_id
      and (d.version_id, d.max_active_runs) is distinct from (p_version_id, (p_dag->>'max_active_runs')::int);
    update dag d set has_run_timeout = true
    where d.dag_id = p_dag_id and not d.has_run_timeout and (p_dag->>'run_timeout') is not null;
    update dag d set has_run_retries = true
    where d.dag_id = p_dag_id and not d.has_run_retries and (p_dag->>'run_retries')::int > 0;
    update dag d set depends_on_past = true
    where d.dag_id = p_dag_id and not d.depends_on_past and exists (
        select 1 from task_spec s where s.version_id = p_version_id and s.awaits_past);
    update dag d set has_notifications = true
    where d.dag_id = p_dag_id and not d.has_notifications and exists (
        select 1 from notification_rule n where n.version_id = p_version_id and n.idx = -1);
    -- A run may wait for a run of another version: the end of its tasks must wake it.
    update task_spec s set awaits_past = true
    from dag d, dag_version v
    where d.dag_id = p_dag_id and d.depends_on_past and v.dag_id = d.dag_id and s.version_id = v.version_id
        and not s.awaits_past
      and s.name in (select n.name from task_spec n join dag_version w on w.version_id = n.version_id
                     where w.dag_id = d.dag_id and n.awaits_past);
    update dag d set has_dependents = true
    where d.dag_id = p_dag_id and not d.has_dependents and exists (
        select 1 from schedule_dependency w where w.kind in ('dag', 'end') and w.name = d.name);
end $$;

-- What identifies a schedule, without the instants that the user's code computed ahead.
create function schedule_identity(p_spec jsonb) returns jsonb language sql immutable as $$
    select case when p_spec->>'kind' = 'computed' then p_spec - array['times', 'intervals'] else p_spec end
$$;

-- Stores more instants of unchanged computed schedules. One that had run out continues with the first of them.
create function renew_instants(p_dag_id int, p_schedules jsonb) returns void language sql as $$
    with more as (
        update schedule c set spec = w.spec
        from jsonb_populate_recordset(null::planned_schedule, p_schedules) w
        where c.dag_id = p_dag_id and c.name = w.name and c.deleted_at is null
          and schedule_identity(c.spec) = schedule_identity(w.spec) and c.spec <> w.spec
        returning c.schedule_id, w.next_due
    )
    update schedule_state s set next_due = m.next_due from more m
    where s.schedule_id = m.schedule_id and s.next_due is null
$$;

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
                   or (schedule_identity(c.spec), c.params, c.misfire, c.window_seconds, c.catchup_limit, c.overlap,
                       c.start_within,
                                               c.finish_within)
                  is distinct from (schedule_identity(excluded.spec), excluded.params, excluded.misfire,
                      excluded.window_seconds,
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
    if jsonb_path_exists(p_schedules, '$[*].spec ? (@.kind == "computed")') then
        perform renew_instants(p_dag_id, p_schedules);
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
    perform retire_dag(p_dag_id, p_actor);
    -- Not when only its file disappears: that may come back.
    delete from state_entry e where e.run_id = 0 and e.dag_id = p_dag_id;
    fx := apply_effects(fx);
    return true;
end $$;

create function retire_dag(p_dag_id int, p_actor actor) returns void language plpgsql as $$
begin
    perform sync_schedules(p_dag_id, '[]', true, p_actor);
    update dag d set deleted_at = clock() where d.dag_id = p_dag_id and d.deleted_at is null;
    perform write_audit(p_actor, 'delete', '{}', p_dag_id => p_dag_id);
end $$;

-- Retires all DAGs of a deployment, as if its files were deleted. p_seen and p_settle as in publish_dags. Its next
-- version, which has no DAGs, refuses a deployment that was prepared before, and can be rolled back. A folder has no
-- versions. Returns the retired DAGs; null: it is deleted already. EV004: it was changed meanwhile.
create function delete_deployment(p_name text, p_expected int, p_seen jsonb, p_settle jsonb, p_actor actor)
returns text[] language plpgsql as $$
declare
    fx effects;
    current_version int;
    names text[];
begin
    select d.version into current_version from deployment d
    where d.name = p_name and d.deleted_at is null for no key update;
    if not found then
        return null;
    elsif current_version <> p_expected then
        raise exception 'deployment % is at version %', p_name, current_version using errcode = 'EV004';
    end if;
    names := array(select d.name from dag d where d.deployment = p_name and d.deleted_at is null order by d.name);
    perform from schedule_state s join schedule c on c.schedule_id = s.schedule_id join dag d on d.dag_id = c.dag_id
    where d.name = any(names) order by s.schedule_id for no key update of s;
    perform check_unchanged(n, null, coalesce(p_seen->n, '[]')) from unnest(names) n;
    fx := (apply_fire_plans(p_settle, true, fx)).fx;
    perform retire_dag(d.dag_id, p_actor) from dag d where d.name = any(names) order by d.name;
    delete from import_error e where e.deployment = p_name;
    update deployment d set deleted_at = clock(), problem = null, version = d.version + (d.version > 0)::int
    where d.name = p_name;
    insert into deployment_version (deployment, number, deployed_by, deployed_at)
    select p_name, current_version + 1, p_actor.name, clock() where current_version > 0;
    perform write_audit(p_actor, 'delete_deployment', jsonb_build_object('deployment', p_name, 'dags', names));
    fx := apply_effects(fx);
    return names;
end $$;

-- Keeps one piece of an uploaded archive. Pieces are read together when all are there; old ones are deleted.
create function put_upload_piece(p_hash text, p_owner text, p_start int, p_content bytea) returns int language sql as $$
    delete from upload_piece x where x.received_at < clock() - interval '1 day';
    insert into upload_piece (hash, owner, start, content, received_at)
    values (p_hash, p_owner, p_start, p_content, clock())
    on conflict (hash, owner, start) do update set content = excluded.content, received_at = excluded.received_at;
    select p_start + length(p_content)
$$;

create function delete_upload(p_hash text, p_owner text) returns void language sql as $$
    delete from upload_piece x where x.hash = p_hash and x.owner = p_owner
$$;

-- The repository of a deployment, and what went wrong when it was last published; null: nothing.
create function note_deployment(p_name text, p_kind text, p_source jsonb, p_problem text)
returns void language sql as $$
    insert into deployment as d (name, kind, source, problem, created_at)
    values (p_name, p_kind, p_source, left(p_problem, 4000), clock())
    on conflict (name) do update set source = excluded.source, problem = excluded.problem
    where d.kind = excluded.kind
$$;

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
