-- The figures of DAGs and tasks, which the leader adds up (functions/30_figures.sql).

-- name: of_dags
-- Of runs as a whole, by the name of the DAG.
select d.name as dag, f.task, f.succeeded, f.failed, f.other, f.retries, f.duration_seconds, f.wait_seconds, f.landed,
       f.landing_seconds, f.cpu_seconds, f.peak_memory_bytes, f.durations, f.counted_at
  from dag d join task_figure f on f.dag_id = d.dag_id and f.task = ''
 where d.name > %(after)s and (%(dag_ids)s::int[] is null or d.dag_id = any(%(dag_ids)s)) and d.deleted_at is null
 order by d.name limit %(limit)s

-- name: of_tasks
-- Of the tasks of one DAG, by name, and first of its runs as a whole.
select d.name as dag, f.task, f.succeeded, f.failed, f.other, f.retries, f.duration_seconds, f.wait_seconds, f.landed,
       f.landing_seconds, f.cpu_seconds, f.peak_memory_bytes, f.durations, f.counted_at
  from task_figure f join dag d on d.dag_id = f.dag_id
 where f.dag_id = %(dag_id)s::int and (f.task > %(after)s or %(is_first)s) order by f.task limit %(limit)s
