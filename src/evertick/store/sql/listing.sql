-- Runs and tasks listed by many filters, with an offset and a total, for clients that page so.

-- name: runs_by_id
-- In the order of their numbers, by the key: what does not fit is passed over on the way.
select run_id, dag_id, dag, version_id, version, version_created_at, text_id, kind, fire_at, due_at, created_at, started_at, finished_at, seconds,
       state, reason, params, triggered_by
  from listed_run
 where (%(dag_ids)s::int[] is null or dag_id = any(%(dag_ids)s)) and (%(states)s::text[] is null or state = any(%(states)s))
   and (%(kinds)s::text[] is null or kind = any(%(kinds)s)) and (%(version)s::int is null or version = %(version)s)
   and (%(due_from)s::timestamptz is null or due_at >= %(due_from)s) and (%(due_until)s::timestamptz is null or due_at <= %(due_until)s)
   and (%(fire_from)s::timestamptz is null or fire_at >= %(fire_from)s) and (%(fire_until)s::timestamptz is null or fire_at <= %(fire_until)s)
   and (%(start_from)s::timestamptz is null or started_at >= %(start_from)s)
   and (%(start_until)s::timestamptz is null or started_at <= %(start_until)s)
   and (%(end_from)s::timestamptz is null or finished_at >= %(end_from)s) and (%(end_until)s::timestamptz is null or finished_at <= %(end_until)s)
   and (%(seconds_from)s::double precision is null or seconds >= %(seconds_from)s)
   and (%(seconds_until)s::double precision is null or seconds <= %(seconds_until)s)
   and (%(like)s::text[] is null or text_id ilike any(%(like)s)) and (%(actor_like)s::text[] is null or triggered_by ilike any(%(actor_like)s))
   and (%(dag_like)s::text[] is null or dag ilike any(%(dag_like)s))
 order by run_id desc limit %(limit)s offset %(offset)s

-- name: find_run
-- By the text of its id: its key, or the number at its end.
select run_id, dag_id, dag, version_id, version, version_created_at, text_id, kind, fire_at, due_at, created_at, started_at, finished_at, seconds,
       state, reason, params, triggered_by
  from listed_run where dag_id = %(dag_id)s and run_id = %(run_id)s and text_id = %(text_id)s

-- name: run_of_key
select run_id from run where dag_id = %(dag_id)s and key = %(key)s
