-- Runs, tasks, DAGs, outputs, events and assets as the APIs list them.

-- Each run with its display id. A column that a query does not name costs nothing: only outer joins of rows that always
-- exist are removed when unused. `status`, `status_dag_id` and `fact_kind` are columns of indexes.
create view listed_run as
select r.run_id, r.dag_id, d.name as dag, s.version_id, v.number as version, v.created_at as version_created_at,
       run_display_id(r.key, r.kind, coalesce(r.fire_at, r.created_at), r.run_id) as text_id,
       case when r.kind = 'manual' and r.triggered_by ^@ 'run ' then 'operator_triggered'
            when r.kind = 'scheduled' and exists (select 1 from run_trigger c
                                                   where c.schedule_id = r.schedule_id and c.fire_at = r.fire_at
                                                     and c.kind in ('asset', 'alias')) then 'asset_triggered'
            else r.kind::text end as run_type, r.schedule_id, r.fire_at,
       case when r.kind = 'manual' then r.created_at else coalesce(r.fire_at, r.created_at) end as due_at, r.created_at,
       s.started_at, s.finished_at, coalesce(s.finished_at, s.started_at, r.created_at) as changed_at,
       extract(epoch from s.finished_at - s.started_at)::double precision as seconds, s.state::text as state, s.reason,
       r.params, r.triggered_by, n.content as note, s.state as status, s.dag_id as status_dag_id, r.kind as fact_kind
  from run r left join run_status s on s.run_id = r.run_id left join dag d on d.dag_id = r.dag_id
  left join dag_version v on v.version_id = s.version_id
  left join note n on n.run_id = r.run_id and n.idx = -1 and n.map_index = -1;

-- A run with its status, for people.
create view run_detail as
select r.run_id, d.name as dag, s.version_id, v.number as version, r.kind, r.key, r.fire_at, r.params, r.triggered_by,
       r.created_at, s.state, s.open_tasks, s.cancel_requested, s.started_at, s.finished_at, s.reason,
       v.task_count + s.extra_tasks as task_count, s.retried
  from run r join run_status s on s.run_id = r.run_id join dag d on d.dag_id = r.dag_id
  join dag_version v on v.version_id = s.version_id;

-- Questions to people. Open means that the task still waits for it.
create view listed_approval as
select a.run_id, a.idx, a.map_index, a.epoch, d.name as dag, s.name as task, d.dag_id, a.title, a.asked_at,
       coalesce(w.deadline, (a.request->>'until')::timestamptz) as deadline,
       a.decided_at, a.decided_by, a.is_approved, a.note, a.fields, a.chosen,
       coalesce(a.request, v.spec->'tasks'->a.idx->'wait') as wait,
       k.state = 'deferred' and k.epoch = a.epoch and a.decided_at is null as is_open
  from approval a join run_status r on r.run_id = a.run_id join dag d on d.dag_id = r.dag_id
  join dag_version v on v.version_id = r.version_id join task_spec s on s.version_id = r.version_id and s.idx = a.idx
  left join task k on k.run_id = a.run_id and k.idx = a.idx and k.map_index = a.map_index
  left join deferral w on w.run_id = a.run_id and w.idx = a.idx and w.map_index = a.map_index and w.epoch = a.epoch;

-- Each task of each run, without a row waiting. `phase`: its state, with waiting retries and sensors between two polls.
-- `tries`: attempts in all, because `attempt` begins at zero when a task is cleared.
create view listed_task as
select r.run_id, r.dag_id, d.name as dag, b.version_id, v.number as version, v.created_at as version_created_at,
       run_display_id(r.key, r.kind, coalesce(r.fire_at, r.created_at), r.run_id) as text_id, r.fire_at,
       case when r.kind = 'manual' then r.created_at else coalesce(r.fire_at, r.created_at) end as due_at, s.idx,
       coalesce(k.map_index, -1) as map_index, s.name as task, s.queue, s.priority, s.max_attempts,
       case when k.state is null then 'waiting' when k.state = 'pending' and k.not_before is not null then 'retrying'
            when k.state = 'deferred' and not s.is_wait and not exists (
                select 1 from task_trigger w where w.run_id = k.run_id and w.idx = k.idx and w.map_index = k.map_index
                                               and w.event is null)
            then 'polling' else k.state::text end as phase,
       coalesce(k.attempt, 0) as attempt, k.started_at, k.finished_at, k.map_name,
       (select count(*) from attempt a where a.run_id = k.run_id and a.idx = k.idx and a.map_index = k.map_index
                                         and a.epoch <> k.epoch)::int
       + (k.started_at is not null or exists (select 1 from attempt a where a.run_id = k.run_id and a.idx = k.idx
                                                and a.map_index = k.map_index and a.epoch = k.epoch))::int as tries,
       coalesce(k.finished_at, k.started_at, r.created_at) as changed_at,
       extract(epoch from k.finished_at - k.started_at)::double precision as seconds, k.reason, h.host,
       n.content as note,
       (select g.name from task_gate g where g.version_id = s.version_id and g.idx = s.idx and g.kind = 'pool'
           and s.is_gated order by g.place limit 1) as pool,
       (select g.weight from task_gate g where g.version_id = s.version_id and g.idx = s.idx and g.kind = 'pool'
           and s.is_gated order by g.place limit 1) as slots,
       coalesce(v.spec->'tasks'->s.idx->>'kind', 'python') as kind, b.state as run_status, k.state as task_status,
       k.map_index as row_map_index
  from run r join run_status b on b.run_id = r.run_id join dag d on d.dag_id = r.dag_id
  join dag_version v on v.version_id = b.version_id join task_spec s on s.version_id = b.version_id
  left join task k on k.run_id = r.run_id and k.idx = s.idx left join runner h on h.session = k.session
  left join note n on n.run_id = r.run_id and n.idx = s.idx and n.map_index = coalesce(k.map_index, -1);

-- Each DAG with when it is due next and how its latest run stands.
create view listed_dag as
select d.dag_id, d.name as dag, d.is_paused as paused, d.file, v.spec,
       array(select jsonb_array_elements_text(coalesce(v.spec->'tags', '[]'))) as tags,
       exists (select 1 from import_error e where e.file = d.file and e.message !~ '^AF[0-9]{3} ') as is_broken,
       case when not d.is_paused then (
           select min(t.next_due) from schedule c join schedule_state t on t.schedule_id = c.schedule_id
            where c.dag_id = d.dag_id and c.deleted_at is null and not t.is_paused) end as next_due,
       array(select w.name from schedule c
               join schedule_dependency w on w.schedule_id = c.schedule_id and w.kind = 'asset'
              where c.dag_id = d.dag_id and c.deleted_at is null) as assets,
       last.state as last_state, last.started_at as last_started_at, last.finished_at as last_finished_at
  from dag d join dag_version v on v.version_id = d.version_id
  left join lateral (select s.state::text, s.started_at, s.finished_at
                       from (select x.run_id from run x where x.dag_id = d.dag_id order by x.run_id desc limit 1) n
                       join run_status s on s.run_id = n.run_id) last on true
 where d.deleted_at is null;

-- What tasks returned (key null), and their named outputs.
create view listed_output as
select t.*, e.key
  from result v join listed_task t on t.run_id = v.run_id and t.idx = v.idx and t.map_index = v.map_index
  cross join lateral (
    select null as key where v.value->>'$evertick' is distinct from 'outputs' or v.value->'value' <> 'null'
    union all
    select n.key from jsonb_object_keys(case when v.value->>'$evertick' = 'outputs' then v.value->'named' else '{}' end)
        n(key)) e;

-- The audit log with DAG, run and task of each entry, the user's name, and the verb with its object where others have
-- the same verb. `dag_id` asks the run only where the entry does not say.
create view listed_event as
select j.entry_id, j.occurred_at, j.action || case
           when j.action in ('pause', 'unpause', 'cancel') and j.detail ? 'backfill' then ' backfill'
           when j.action = 'note' and j.idx is null then ' run'
           when j.action = 'set_pool' and not j.detail ? 'was' then ' new'
           when j.action in ('put_value', 'delete_value')
               then format(' %s', j.detail->>'kind') || case j.detail->>'is_new' when 'true' then ' new' else '' end
           when j.action = 'put_output'
               then case when j.detail ? 'is_taken_away' then ' gone' when j.detail ? 'is_new' then ' new' else '' end
           else '' end as verb,
       case when split_part(j.actor, ':', 1) in ('user', 'cli') then substr(j.actor, strpos(j.actor, ':') + 1)
           else j.actor end as actor, d.name as dag,
       case when r.run_id is not null then run_display_id(r.key, r.kind, coalesce(r.fire_at, r.created_at), r.run_id)
           end as text_id, r.fire_at, s.name as task, j.map_index, j.detail, j.run_id,
       coalesce(j.dag_id, (select x.dag_id from run x where x.run_id = j.run_id)) as dag_id
  from audit_log j left join run r on r.run_id = j.run_id left join run_status b on b.run_id = j.run_id
  left join dag d on d.dag_id = coalesce(j.dag_id, r.dag_id)
  left join task_spec s on s.version_id = b.version_id and s.idx = j.idx;

-- Every asset that a task of a current version updates, or that a schedule waits for.
create view listed_asset as
select a.name, min(a.since) as since
  from (select o.name, v.created_at as since from dag d join dag_version v on v.version_id = d.version_id
          join task_spec s on s.version_id = d.version_id cross join lateral unnest(s.outlets) o(name)
         where d.deleted_at is null and s.outlets is not null
        union all
        select w.name, c.changed_at from schedule_dependency w join schedule c on c.schedule_id = w.schedule_id
         where w.kind = 'asset'
        union all
        select x.asset, a.changed_at from asset_alias x join asset a on a.name = x.asset) a
 group by a.name;

-- Each recorded update of an asset: a task that updates it has succeeded, or it was reported from outside.
create view listed_update as
select u.asset, null::bigint as update_id, t.run_id, t.dag_id, t.dag, t.text_id, t.idx, t.task, t.map_index,
       u.occurred_at, nullif(u.extra, '{}') as extra, u.partition_key
  from asset_update u join listed_task t on t.run_id = u.run_id and t.idx = u.idx and t.map_index = u.map_index
 where u.run_id is not null and u.occurred_at is not null
union all
select u.asset, u.update_id, null, null, null, null, null, null, -1, u.occurred_at, u.extra, u.partition_key
  from asset_update u
 where u.run_id is null;
