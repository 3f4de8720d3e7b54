-- What people write beside runs, tasks and pools; and runs, tasks and DAGs as the clients of other schedulers list them.

-- One note for a run (idx and map_index -1) or a task. It goes with the run, see sweep.
create table note (
    run_id     bigint not null,
    idx        int not null,
    map_index  int not null,
    content    text not null,
    written_by text not null,
    written_at timestamptz not null,
    primary key (run_id, idx, map_index)
);

-- What a pool is for. By its name: the gate itself is looked at too often to carry texts.
create table pool_text (
    name        text primary key,
    description text not null
);

-- Writes a note, or takes it away (null). Whether there is such a run: its row is held, so that nobody deletes it meanwhile and
-- leaves the note behind.
create function put_note(p_run_id bigint, p_idx int, p_map_index int, p_content text, p_actor text) returns boolean
language plpgsql as $$
begin
    perform 1 from run_status r where r.run_id = p_run_id for key share;
    if not found then
        return false;
    end if;
    if p_content is null then
        delete from note n where n.run_id = p_run_id and n.idx = p_idx and n.map_index = p_map_index;
    else
        insert into note as n (run_id, idx, map_index, content, written_by, written_at)
        values (p_run_id, p_idx, p_map_index, p_content, p_actor, clock())
        on conflict (run_id, idx, map_index) do update
            set content = excluded.content, written_by = excluded.written_by, written_at = excluded.written_at;
    end if;
    insert into journal (occurred_at, verb, actor, run_id, idx, map_index, detail)
    values (clock(), 'note', p_actor, p_run_id, nullif(p_idx, -1), case when p_idx >= 0 then p_map_index end,
            jsonb_build_object('is_taken_away', p_content is null));
    return true;
end $$;

-- A text for a run's id: its key, or one that ends with its number. Of parts that are immutable, so that PostgreSQL puts it in line where
-- it is called: an index on it costs a new run 2.3 us so, and 6 us with to_char.
create function run_text(p_key text, p_kind run_kind, p_at timestamptz, p_run_id bigint) returns text language sql immutable as $$
    select coalesce(p_key,
        case p_kind when 'manual' then 'manual__' when 'scheduled' then 'scheduled__' else 'backfill__' end
        || overlay(overlay(overlay(overlay(overlay(
               lpad((date_part('year', p_at at time zone 'UTC') * 1e10 + date_part('month', p_at at time zone 'UTC') * 1e8
                     + date_part('day', p_at at time zone 'UTC') * 1e6 + date_part('hour', p_at at time zone 'UTC') * 1e4
                     + date_part('minute', p_at at time zone 'UTC') * 1e2 + floor(date_part('second', p_at at time zone 'UTC')))::bigint::text, 14, '0')
               placing ':' from 13 for 0) placing ':' from 11 for 0) placing 'T' from 9 for 0) placing '-' from 7 for 0) placing '-' from 5 for 0)
        || '+00:00__' || p_run_id::text)
$$;
-- Clients of other schedulers order by this text: of a DAG with a million runs that took 1.8 s to sort.
create index run_of_text on run (dag_id, (run_text(key, kind, coalesce(fire_at, created_at), run_id)));
-- Those that somebody looks for among a million that went well. Costs only them.
create index run_unwell on run_status (dag_id, run_id) where state in ('failed', 'canceled');
-- Runs in the order of time (store/sql/listing.sql). Scheduled ones are in run_fire already, so that they are in none of the first two; all
-- are in the third from their end on. What that costs is in docs/decisions/0031-lists-in-order.md.
create index run_filled on run (dag_id, fire_at) where kind = 'backfill';
create index run_made on run (dag_id, created_at) where kind = 'manual';
create index run_ended on run_status (dag_id, finished_at) where finished_at is not null;
create index journal_in_time on journal (occurred_at);

-- Each run with a text for its id, from which it is found again. Whatever a query does not name here costs it nothing: the joins are
-- outer ones, of rows that are always there, because only such a join is left out where nothing of it is asked for. `status`,
-- `status_dag_id` and `fact_kind` are what the indexes know.
create view listed_run as
select r.run_id, r.dag_id, d.name as dag, s.version_id, v.number as version, v.created_at as version_created_at,
       run_text(r.key, r.kind, coalesce(r.fire_at, r.created_at), r.run_id) as text_id,
       -- As other schedulers call it. What came after an asset is told by what it came after.
       case when r.kind = 'manual' and r.triggered_by ^@ 'run ' then 'operator_triggered'
            when r.kind = 'scheduled' and exists (
                 select 1 from cause c where c.schedule_id = r.schedule_id and c.fire_at = r.fire_at and c.kind = 'asset') then 'asset_triggered'
            else r.kind::text end as run_type,
       r.schedule_id, r.fire_at,
       case when r.kind = 'manual' then r.created_at else coalesce(r.fire_at, r.created_at) end as due_at,
       r.created_at, s.started_at, s.finished_at, coalesce(s.finished_at, s.started_at, r.created_at) as changed_at,
       extract(epoch from s.finished_at - s.started_at)::double precision as seconds, s.state::text as state, s.reason, r.params,
       r.triggered_by, n.content as note, s.state as status, s.dag_id as status_dag_id,
       r.kind as fact_kind
  from run r left join run_status s on s.run_id = r.run_id left join dag d on d.dag_id = r.dag_id
  left join dag_version v on v.version_id = s.version_id
  left join note n on n.run_id = r.run_id and n.idx = -1 and n.map_index = -1;

-- Each task of each run, also those without a row, which are waiting. `phase` is its state, with a retry that waits, and a sensor between two polls, told apart.
create view listed_task as
select r.run_id, r.dag_id, d.name as dag, b.version_id, v.number as version, v.created_at as version_created_at,
       run_text(r.key, r.kind, coalesce(r.fire_at, r.created_at), r.run_id) as text_id,
       r.fire_at, case when r.kind = 'manual' then r.created_at else coalesce(r.fire_at, r.created_at) end as due_at,
       s.idx, coalesce(k.map_index, -1) as map_index, s.name as task, s.queue, s.priority, s.max_attempts,
       case when k.state is null then 'waiting' when k.state = 'pending' and k.not_before is not null then 'retrying'
            when k.state = 'deferred' and not s.defers then 'polling' else k.state::text end as phase,
       coalesce(k.attempt, 0) as attempt, k.started_at, k.finished_at,
       -- How many attempts there were in all: `attempt` begins anew when a task is cleared.
       (select count(*) from attempt a where a.run_id = k.run_id and a.idx = k.idx and a.map_index = k.map_index and a.epoch <> k.epoch)::int
           + (k.started_at is not null or exists (
              select 1 from attempt a where a.run_id = k.run_id and a.idx = k.idx and a.map_index = k.map_index and a.epoch = k.epoch))::int as tries,
       coalesce(k.finished_at, k.started_at, r.created_at) as changed_at,
       extract(epoch from k.finished_at - k.started_at)::double precision as seconds, k.reason, h.host, n.content as note,
       (select g.name from task_gate g where g.version_id = s.version_id and g.idx = s.idx and g.kind = 'pool' and s.is_gated
         order by g.place limit 1) as pool,
       (select g.weight from task_gate g where g.version_id = s.version_id and g.idx = s.idx and g.kind = 'pool' and s.is_gated
         order by g.place limit 1) as slots,
       coalesce(v.spec->'tasks'->s.idx->>'kind', 'python') as kind, b.state as run_status,
       k.state as task_status, k.map_index as row_map_index
  from run r join run_status b on b.run_id = r.run_id join dag d on d.dag_id = r.dag_id join dag_version v on v.version_id = b.version_id
  join task_spec s on s.version_id = b.version_id
  left join task k on k.run_id = r.run_id and k.idx = s.idx
  left join runner h on h.session = k.session
  left join note n on n.run_id = r.run_id and n.idx = s.idx and n.map_index = coalesce(k.map_index, -1);

-- Each DAG with when it is due next and how its latest run stands.
create view listed_dag as
select d.dag_id, d.name as dag, d.paused, d.file, v.spec,
       array(select jsonb_array_elements_text(coalesce(v.spec->'tags', '[]'))) as tags,
       exists (select 1 from import_error e where e.file = d.file) as is_broken,
       case when not d.paused then (
           select min(t.next_due) from schedule c join schedule_state t on t.schedule_id = c.schedule_id
            where c.dag_id = d.dag_id and c.deleted_at is null and not t.paused) end as next_due,
       array(select w.name from schedule c join awaited w on w.schedule_id = c.schedule_id and w.kind = 'asset'
              where c.dag_id = d.dag_id and c.deleted_at is null) as assets,
       last.state as last_state, last.started_at as last_started_at, last.finished_at as last_finished_at
  from dag d join dag_version v on v.version_id = d.version_id
  left join lateral (select s.state::text, s.started_at, s.finished_at
                       from (select x.run_id from run x where x.dag_id = d.dag_id order by x.run_id desc limit 1) n
                       join run_status s on s.run_id = n.run_id) last on true
 where d.deleted_at is null;

-- What tasks returned (key null), and what they put out by name beside it.
create view listed_output as
select t.*, e.key
  from result v join listed_task t on t.run_id = v.run_id and t.idx = v.idx and t.map_index = v.map_index
  cross join lateral (
    select null as key where v.value->>'$evertick' is distinct from 'outputs' or v.value->'value' <> 'null'
    union all
    select n.key from jsonb_object_keys(case when v.value->>'$evertick' = 'outputs' then v.value->'named' else '{}' end) n(key)) e;

-- Somebody puts an output in place of, or beside, what a task returned; p_name null is that itself, p_value null takes it away. Only of
-- one that has succeeded: another could be writing its own. 'done', 'exists' or 'missing' against p_must ('new', 'old'), or null: there is
-- no such task, or it has not succeeded.
create function put_output(p_run_id bigint, p_idx int, p_map_index int, p_name text, p_value jsonb, p_must text, p_actor text) returns text
language plpgsql as $$
declare
    owner task;
    before jsonb;
    named jsonb;
    returned jsonb;
    is_there boolean;
begin
    perform 1 from run_status r where r.run_id = p_run_id for no key update;
    if not found then
        return null;
    end if;
    select * into owner from task k where k.run_id = p_run_id and k.idx = p_idx and k.map_index = p_map_index and k.state = 'success';
    if owner.run_id is null then
        return null;
    end if;
    select v.value into before from result v where v.run_id = p_run_id and v.idx = p_idx and v.map_index = p_map_index;
    named := case when before->>'$evertick' = 'outputs' then before->'named' else '{}' end;
    returned := case when before->>'$evertick' = 'outputs' then nullif(before->'value', 'null') else before end;
    is_there := case when p_name is null then returned is not null else named ? p_name end;
    if p_must = 'new' and is_there then
        return 'exists';
    elsif p_must = 'old' and not is_there then
        return 'missing';
    end if;
    if p_name is null then
        returned := p_value;
    else
        named := case when p_value is null then named - p_name else named || jsonb_build_object(p_name, p_value) end;
    end if;
    if named <> '{}' then
        returned := jsonb_build_object('$evertick', 'outputs', 'value', returned, 'named', named);
    end if;
    if returned is null then
        delete from result v where v.run_id = p_run_id and v.idx = p_idx and v.map_index = p_map_index;
    else
        insert into result as v (run_id, idx, map_index, epoch, value) values (p_run_id, p_idx, p_map_index, owner.epoch, returned)
        on conflict (run_id, idx, map_index) do update set epoch = excluded.epoch, value = excluded.value;
    end if;
    insert into journal (occurred_at, verb, actor, run_id, idx, map_index, detail)
    values (clock(), 'put_output', p_actor, p_run_id, p_idx, p_map_index,
            jsonb_strip_nulls(jsonb_build_object('name', p_name, 'is_taken_away', nullif(p_value is null, false))));
    return 'done';
end $$;

-- The journal, each entry with the DAG, run and task that it is about. `dag_id` asks the run only where the entry does not say.
create view listed_event as
select j.entry_id, j.occurred_at, j.verb, j.actor, d.name as dag,
       case when r.run_id is not null then run_text(r.key, r.kind, coalesce(r.fire_at, r.created_at), r.run_id) end as text_id,
       r.fire_at, s.name as task, j.map_index, j.detail, j.run_id,
       coalesce(j.dag_id, (select x.dag_id from run x where x.run_id = j.run_id)) as dag_id
  from journal j left join run r on r.run_id = j.run_id left join run_status b on b.run_id = j.run_id
  left join dag d on d.dag_id = coalesce(j.dag_id, r.dag_id)
  left join task_spec s on s.version_id = b.version_id and s.idx = j.idx;

-- Every asset that a task of a current version updates, or that a schedule waits for.
create view listed_asset as
select a.name, min(a.since) as since
  from (
    select o.name, v.created_at as since
      from dag d join dag_version v on v.version_id = d.version_id join task_spec s on s.version_id = d.version_id
      cross join lateral unnest(s.outlets) o(name)
     where d.deleted_at is null and s.outlets is not null
    union all
    select w.name, c.changed_at from awaited w join schedule c on c.schedule_id = w.schedule_id where w.kind = 'asset') a
 group by a.name;

-- Each update of an asset that is still on record: a task of a version that updates it has succeeded, or somebody told of it.
create view listed_update as
select o.name as asset, null::bigint as update_id, t.run_id, t.dag_id, t.dag, t.text_id, t.idx, t.task, t.map_index,
       t.finished_at as occurred_at, null::jsonb as extra
  from listed_task t join task_spec s on s.version_id = t.version_id and s.idx = t.idx
  cross join lateral unnest(s.outlets) o(name)
 where s.outlets is not null and t.phase = 'success'
union all
select u.asset, u.update_id, null, null, null, null, null, null, -1, u.occurred_at, u.extra from asset_update u;

-- Somebody tells of an update of an asset. It stays on record, and whoever waits for it hears of it as of a task's.
create function update_asset(p_asset text, p_extra jsonb, p_actor text, out update_id bigint, out occurred_at timestamptz)
language plpgsql as $$
begin
    insert into asset_update as u (asset, extra, updated_by, occurred_at) values (p_asset, p_extra, p_actor, clock())
    returning u.update_id, u.occurred_at into update_asset.update_id, update_asset.occurred_at;
    insert into arrival (kind, name, update_id, occurred_at)
    select 'asset', p_asset, update_asset.update_id, update_asset.occurred_at
    where exists (select 1 from awaited w where w.kind = 'asset' and w.name = p_asset);
    insert into journal (occurred_at, verb, actor, detail)
    values (update_asset.occurred_at, 'update_asset', p_actor, jsonb_build_object('asset', p_asset, 'update', update_asset.update_id));
end $$;

-- Updates that schedules of these DAGs (null: of all) have heard of count no more, as if they had not happened. How many.
create function unhear(p_dag_ids int[], p_asset text, p_before timestamptz, p_actor text) returns int language plpgsql as $$
declare
    meant int[] := array(
        select c.schedule_id from schedule c join heard h on h.schedule_id = c.schedule_id and h.kind = 'asset'
        where p_dag_ids is null or c.dag_id = any(p_dag_ids));
    n int;
begin
    perform 1 from schedule_state s where s.schedule_id = any(meant) order by s.schedule_id for no key update;
    delete from heard h
    where h.schedule_id = any(meant) and h.kind = 'asset' and (p_asset is null or h.name = p_asset)
      and (p_before is null or h.occurred_at < p_before);
    get diagnostics n = row_count;
    if n > 0 then
        insert into journal (occurred_at, verb, actor, dag_id, detail)
        values (clock(), 'unhear', p_actor, case when cardinality(p_dag_ids) = 1 then p_dag_ids[1] end,
                jsonb_strip_nulls(jsonb_build_object('asset', p_asset, 'updates', n)));
    end if;
    return n;
end $$;
