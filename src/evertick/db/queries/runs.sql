-- Runs: their immutable facts and their current status.

-- name: find
select * from run_detail where run_id = %(run_id)s

-- name: existing
-- The runs of these that have not been pruned.
select run_id from run where run_id = any(%(run_ids)s::bigint[])

-- name: list_of_dag
-- Newest first by the index of the DAG's runs.
select r.run_id, d.name as dag, s.version_id, v.number as version, r.kind, r.key, r.fire_at, r.params, r.triggered_by,
       r.created_at, s.state, s.open_tasks, s.cancel_requested, s.started_at, s.finished_at, s.reason,
       v.task_count + s.extra_tasks as task_count, s.retried
  from run r join run_status s on s.run_id = r.run_id join dag d on d.dag_id = r.dag_id
  join dag_version v on v.version_id = s.version_id
 where r.dag_id = %(dag_id)s and (%(state)s::run_state is null or s.state = %(state)s) order by r.run_id desc
 limit %(limit)s

-- name: list
select * from run_detail where %(state)s::run_state is null or state = %(state)s order by run_id desc limit %(limit)s

-- name: has_failed
-- Whether the last runs of a DAG that have ended, by their dates, failed, and there are so many. Of the newest 1,000.
select count(*) = %(most)s::int and coalesce(bool_and(e.state = 'failed'), false)
  from (select s.state from (select r.run_id, coalesce(r.fire_at, r.created_at) as at from dag d
                             join run r on r.dag_id = d.dag_id where d.name = %(dag)s
                             order by r.run_id desc limit 1000) n
        join run_status s on s.run_id = n.run_id
        where s.state in ('success', 'failed') order by n.at desc, n.run_id desc limit %(most)s::int) e

-- name: newest_of_each_dag
-- One index probe per DAG, whatever the number of runs.
select r.* from dag d
  cross join lateral (select n.run_id from run n where n.dag_id = d.dag_id order by n.run_id desc limit 1) newest
  join run_detail r on r.run_id = newest.run_id
 where d.deleted_at is null and d.name > %(after)s::text and (%(dag_ids)s::int[] is null or d.dag_id = any(%(dag_ids)s))
 order by d.name limit %(limit)s

-- name: orphans
-- The limit counts only rows past the threshold, so that many watched runs never hide a lost one.
select w.run_id from orphan_watch w
 where w.watched_seconds >= %(orphan_after)s::double precision and not is_quarantined('run', w.run_id)
   and (select d.shard from run_status r join dag d on d.dag_id = r.dag_id where r.run_id = w.run_id)
       = %(shard)s::smallint order by w.run_id limit 1000

-- name: journal
select occurred_at, action as verb, actor, idx as task_index, map_index, detail from audit_log
 where run_id = %(run_id)s order by entry_id limit %(limit)s

-- name: page_of_all
-- Without a filter, which is the form that clients poll. The window is a number in the text and as long as the longest
-- page: with a parameter PostgreSQL makes a new plan for every query, which takes 0.55 of 0.7 ms.
select r.* from (select n.run_id from run n where n.run_id < %(before)s::bigint order by n.run_id desc limit 200) w
  join run_detail r on r.run_id = w.run_id order by r.run_id desc limit %(limit)s

-- name: page
-- Newest first, before one run. Reads a window of the newest runs by their key and no further: a rare state must not
-- read a million runs. A caller with an incomplete page continues at the window's end. Of rows that do not match only
-- the state is read: the newest runs of a busy DAG are all queued while a query for finished runs passes over them.
select r.*
  from (select w.run_id
          from (select n.run_id, n.dag_id, n.kind, n.key, n.params, coalesce(n.fire_at, n.created_at) as due_at
                  from run n where n.run_id < %(before)s::bigint order by n.run_id desc limit %(window)s) w
          join run_status o on o.run_id = w.run_id
         where (%(state)s::run_state is null or o.state = %(state)s)
           and (%(dag_ids)s::int[] is null or o.dag_id = any(%(dag_ids)s))
           and (%(kind)s::run_kind is null or w.kind = %(kind)s)
           and (%(since)s::timestamptz is null or w.due_at >= %(since)s)
           and (%(until)s::timestamptz is null or w.due_at < %(until)s)
           and (%(like)s::text is null or w.key ilike %(like)s or w.params::text ilike %(like)s
                or exists (select 1 from dag d where d.dag_id = w.dag_id and d.name ilike %(like)s))
         order by w.run_id desc limit %(limit)s) f
  join run_detail r on r.run_id = f.run_id order by r.run_id desc

-- name: page_of_dag
select r.*
  from (select w.run_id
          from (select n.run_id, n.dag_id, n.kind, n.key, n.params, coalesce(n.fire_at, n.created_at) as due_at
                  from run n where n.dag_id = any(%(dag_ids)s::int[]) and n.run_id < %(before)s::bigint
                 order by n.run_id desc limit %(window)s) w
          join run_status o on o.run_id = w.run_id
         where (%(state)s::run_state is null or o.state = %(state)s)
           and (%(kind)s::run_kind is null or w.kind = %(kind)s)
           and (%(since)s::timestamptz is null or w.due_at >= %(since)s)
           and (%(until)s::timestamptz is null or w.due_at < %(until)s)
           and (%(like)s::text is null or w.key ilike %(like)s or w.params::text ilike %(like)s
                or exists (select 1 from dag d where d.dag_id = w.dag_id and d.name ilike %(like)s))
         order by w.run_id desc limit %(limit)s) f
  join run_detail r on r.run_id = f.run_id order by r.run_id desc

-- name: end_of_window
-- Where the window of a page ended: the oldest run that it read.
select min(w.run_id) from (select n.run_id from run n
 where n.run_id < %(before)s::bigint and (%(dag_ids)s::int[] is null or n.dag_id = any(%(dag_ids)s))
 order by n.run_id desc limit %(window)s) w
