-- Return values and named outputs of tasks: listed by many filters, and set by hand.

-- name: list
-- With the position of each in its run; the values are read one by one.
with found as not materialized (
    select * from listed_output
     where (%(run_id)s::bigint is null or run_id = %(run_id)s) and (%(dag_id)s::int is null or dag_id = %(dag_id)s)
       and (%(dag_ids)s::int[] is null or dag_id = any(%(dag_ids)s))
           and (%(text_ids)s::text[] is null or text_id = any(%(text_ids)s))
       and (%(tasks)s::text[] is null or task = any(%(tasks)s))
           and (%(map_indexes)s::int[] is null or map_index = any(%(map_indexes)s))
       and (%(keys)s::text[] is null or coalesce(key, %(returned)s) = any(%(keys)s))
       and (%(key_like)s::text[] is null or coalesce(key, %(returned)s) ilike any(%(key_like)s))
       and (%(key_heads)s::text[] is null or coalesce(key, %(returned)s) ^@ any(%(key_heads)s))
       and (%(like)s::text[] is null or task ilike any(%(like)s))
           and (%(heads)s::text[] is null or task ^@ any(%(heads)s))
       and (%(run_like)s::text[] is null or text_id ilike any(%(run_like)s))
           and (%(run_heads)s::text[] is null or text_id ^@ any(%(run_heads)s))
       and (%(dag_like)s::text[] is null or dag ilike any(%(dag_like)s))
           and (%(dag_heads)s::text[] is null or dag ^@ any(%(dag_heads)s))
       and (%(due)s::tstzrange is null or due_at <@ %(due)s) and (%(fire)s::tstzrange is null or fire_at <@ %(fire)s)
)
select t.total, f.*
  from (select count(*) as total from (select from found limit %(most)s) x) t
  left join lateral (
    select run_id, dag, text_id, fire_at, due_at, idx, map_index, task, started_at, finished_at, key
      from found order by /* order */ run_id, idx, map_index, key nulls first limit %(limit)s offset %(offset)s) f
          on true

-- name: put
select put_output(%(run_id)s::bigint, %(idx)s::int, %(map_index)s::int, %(name)s::text, %(value)s::jsonb,
                  %(must)s::text, %(actor)s::text)
