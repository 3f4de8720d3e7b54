-- The journal by many filters, with an offset and a total.

-- name: list
with found as not materialized (
    select * from listed_event
     where (%(entry_id)s::bigint is null or entry_id = %(entry_id)s)
         and (%(dag_ids)s::int[] is null or dag_id = any(%(dag_ids)s))
       and (%(task)s::text is null or task = %(task)s) and (%(run_ids)s::bigint[] is null or run_id = any(%(run_ids)s))
       and (%(map_index)s::int is null or map_index = %(map_index)s) and (%(actor)s::text is null or actor = %(actor)s)
       and (%(verb)s::text is null or verb = %(verb)s) and (%(without)s::text[] is null or verb <> all(%(without)s))
       and (%(verbs)s::text[] is null or verb = any(%(verbs)s))
           and (%(occurred)s::tstzrange is null or occurred_at <@ %(occurred)s)
       and (%(task_like)s::text[] is null or task ilike any(%(task_like)s))
           and (%(task_heads)s::text[] is null or task ^@ any(%(task_heads)s))
       and (%(run_like)s::text[] is null or text_id ilike any(%(run_like)s))
           and (%(run_heads)s::text[] is null or text_id ^@ any(%(run_heads)s))
       and (%(actor_like)s::text[] is null or actor ilike any(%(actor_like)s))
           and (%(actor_heads)s::text[] is null or actor ^@ any(%(actor_heads)s))
       and (%(verb_like)s::text[] is null or verb ilike any(%(verb_like)s))
           and (%(verb_heads)s::text[] is null or verb ^@ any(%(verb_heads)s))
)
select t.total, f.*
  from (select count(*) as total from (select from found limit %(most)s) x) t
  left join lateral (
    select entry_id, occurred_at, verb, actor, dag, text_id, fire_at, task, map_index, detail
      from found order by /* order */ entry_id limit %(limit)s offset %(offset)s) f on true
