-- Assets: their producers, their consumers, and the runs started after updates.

-- name: list_assets
select l.name, l.since, coalesce(a.uri, l.name) as uri, coalesce(a.asset_group, 'asset') as asset_group,
       coalesce(a.extra, '{}') as extra
  from listed_asset l left join asset a on a.name = l.name order by l.name limit %(limit)s

-- name: list_page
-- One page, from after a name.
select l.name, l.since, coalesce(a.uri, l.name) as uri, coalesce(a.asset_group, 'asset') as asset_group,
       coalesce(a.extra, '{}') as extra
  from listed_asset l left join asset a on a.name = l.name
 where l.name > %(after)s and (%(like)s::text is null or l.name ilike %(like)s) order by l.name limit %(limit)s

-- name: is_known
-- Whether a task of a current version updates it, or a schedule waits for it.
select exists (select 1 from schedule_dependency w where w.kind = 'asset' and w.name = %(asset)s)
    or exists (select 1 from dag d join task_spec s on s.version_id = d.version_id
                where d.deleted_at is null and s.outlets @> array[%(asset)s::text])
    or exists (select 1 from asset_alias x where x.asset = %(asset)s)

-- name: partitions
-- Which it has, if its DAG file says so.
select a.partitions from asset a where a.name = %(asset)s

-- name: producers
-- The tasks of current versions that update some assets, or all.
select o.name as asset, d.name as dag, s.name as task, v.created_at as since
  from dag d join dag_version v on v.version_id = d.version_id join task_spec s on s.version_id = d.version_id
  cross join lateral unnest(s.outlets) o(name)
 where d.deleted_at is null and s.outlets is not null and (%(names)s::text[] is null or o.name = any(%(names)s))
 order by o.name, d.name, s.name limit 100000

-- name: consumers
-- The DAGs with a schedule that depends on an asset, and the update since their last run.
select w.name as asset, d.name as dag, c.changed_at as since, h.occurred_at as updated_at from schedule_dependency w
  join schedule c on c.schedule_id = w.schedule_id and c.deleted_at is null join dag d on d.dag_id = c.dag_id
  left join dependency_state h on h.schedule_id = w.schedule_id and h.kind = w.kind and h.name = w.name
 where w.kind = 'asset' and d.deleted_at is null and (%(names)s::text[] is null or w.name = any(%(names)s))
 order by w.name, d.name limit 100000

-- name: causes
-- The asset updates after which a run was started.
select c.name as asset, c.occurred_at, c.run_id as source_run_id, d.name as source_dag,
       case when x.run_id is not null then run_display_id(x.key, x.kind, coalesce(x.fire_at, x.created_at), x.run_id)
           end as source_text_id, c.update_id, u.extra,
       coalesce(u.partition_key, (select p.source_key from partition_update p
                                  where p.schedule_id = r.schedule_id and p.fire_at = r.fire_at and p.asset = c.name
                                  order by p.update_id desc limit 1)) as partition_key
  from run r join run_trigger c on c.schedule_id = r.schedule_id and c.fire_at = r.fire_at and c.kind = 'asset'
  left join run x on x.run_id = c.run_id left join dag d on d.dag_id = x.dag_id
  left join asset_update u on u.update_id = c.update_id
 where r.run_id = %(run_id)s order by c.name limit 1000

-- name: updates
with found as not materialized (
    select * from listed_update
     where (%(dag_ids)s::int[] is null or dag_id = any(%(dag_ids)s))
       and (%(assets)s::text[] is null or asset = any(%(assets)s)) and (%(dag)s::text is null or dag = %(dag)s)
       and (%(task)s::text is null or task = %(task)s) and (%(text_id)s::text is null or text_id = %(text_id)s)
       and (%(map_index)s::int is null or map_index = %(map_index)s)
       and (%(like)s::text[] is null or asset ilike any(%(like)s))
       and (%(heads)s::text[] is null or asset ^@ any(%(heads)s))
       and (%(occurred)s::tstzrange is null or occurred_at <@ %(occurred)s)
       and (%(partition)s::text is null or partition_key = %(partition)s)
)
select t.total, f.* from (select count(*) as total from (select from found limit %(most)s) x) t
  left join lateral (select asset, update_id, run_id, dag, text_id, task, map_index, occurred_at, extra, partition_key
                       from found
                      order by /* order */ occurred_at, run_id, idx, map_index, asset, update_id
                      limit %(limit)s offset %(offset)s) f on true

-- name: followers
-- The runs that were started after updates of some assets, by runs or from outside.
select c.name as asset, c.run_id as source_run_id, c.update_id, d.name as dag,
       run_display_id(r.key, r.kind, coalesce(r.fire_at, r.created_at), r.run_id) as text_id, r.fire_at,
       coalesce(s.started_at, r.created_at) as started_at, s.finished_at, s.state::text as state
  from run_trigger c join run r on r.schedule_id = c.schedule_id and r.fire_at = c.fire_at
  join run_status s on s.run_id = r.run_id join dag d on d.dag_id = r.dag_id
 where c.schedule_id = any(array(select w.schedule_id from schedule_dependency w
                                  where w.kind = 'asset' and w.name = any(%(assets)s::text[]))) and c.kind = 'asset'
   and c.name = any(%(assets)s::text[])
   and (c.run_id = any(%(run_ids)s::bigint[]) or c.update_id = any(%(update_ids)s::bigint[]))
   and (%(dag_ids)s::int[] is null or r.dag_id = any(%(dag_ids)s)) order by c.name, r.run_id limit 10000

-- name: arrivals
-- Updates that schedules have still to map, oldest first, with what the run that made the update was for.
select a.arrival_id, a.schedule_id, s.version, c.spec::text as spec, a.asset, a.key, p.date as source_date
  from partition_arrival a join schedule c on c.schedule_id = a.schedule_id
  join schedule_state s on s.schedule_id = a.schedule_id
  left join asset_update u on u.update_id = a.update_id
  left join run_partition p on p.run_id = u.run_id and p.key = a.key
 order by a.arrival_id limit %(limit)s

-- name: partition_of_run
-- The partition that a run is for; no row for none.
select p.key, p.date from run_partition p where p.run_id = %(run_id)s

-- name: partitions_of_asset
-- The partitions of an asset, the highest key first, from before a key; each with its last update. Steps from one key
-- to the next in the index, however many updates each has: 200 of 100,000 take 4 ms.
with recursive step(key) as (
    (select u.partition_key from asset_update u
      where u.asset = %(asset)s and u.partition_key is not null
        and (%(before)s::text is null or u.partition_key < %(before)s) order by u.partition_key desc limit 1)
    union all
    select (select u.partition_key from asset_update u
             where u.asset = %(asset)s and u.partition_key < s.key order by u.partition_key desc limit 1)
      from step s where s.key is not null
)
select s.key, l.occurred_at as updated_at, l.updated_by, l.run_id
  from (select x.key from step x where x.key is not null limit %(limit)s) s
  cross join lateral (select * from asset_update u where u.asset = %(asset)s and u.partition_key = s.key
                      order by u.occurred_at desc limit 1) l
 order by s.key desc

-- name: pending
-- Updates received for some incomplete partitions of schedules.
select distinct u.schedule_id, u.key, u.asset, u.source_key, u.source_date
  from unnest(%(schedule_ids)s::int[], %(keys)s::text[]) as x(schedule_id, key)
  join partition_update u on u.schedule_id = x.schedule_id and u.key = x.key and u.fire_at is null
