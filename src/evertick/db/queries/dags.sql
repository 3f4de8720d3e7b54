-- DAGs, their versions and the bundles of those.

-- name: put_bundle
-- Content-addressed. The date is renewed: prune deletes old unused bundles, and this one is about to be used.
insert into bundle (hash, file, archive, uses_threads, created_at)
values (%(bundle_hash)s, %(file)s, %(archive)s, %(uses_threads)s, clock())
on conflict (hash) do update set created_at = excluded.created_at

-- name: bundle
select file, archive, uses_threads from bundle where hash = %(bundle_hash)s

-- name: published_bundle
-- The bundle of the current version of the DAGs of a deployment's file.
select b.hash, b.archive from dag d join dag_version v on v.version_id = d.version_id
  join bundle b on b.hash = v.bundle_hash
 where d.deployment = %(deployment)s and d.file = %(file)s and d.deleted_at is null order by d.name limit 1

-- name: of_bundles
-- The DAGs with a version from this bundle: a file may define several. Includes deleted ones.
select distinct d.name from dag_version v join dag d on d.dag_id = v.dag_id
 where v.bundle_hash = any(%(hashes)s::text[]) order by d.name limit 100000

-- name: find
select d.dag_id, d.name, d.is_paused as paused, d.version_id, d.max_active_runs, d.deployment, d.file,
       d.deleted_at, v.number, v.spec,
       v.created_at, b.uses_threads
  from dag d left join dag_version v on v.version_id = d.version_id left join bundle b on b.hash = v.bundle_hash
 where d.name = %(name)s

-- name: names
-- For "did you mean".
select name from dag where deleted_at is null order by name limit 10000

-- name: files
-- The DAGs of each file of a deployment, so that those of a missing file can be retired.
select deployment, file, name from dag
 where (%(deployment)s::text is null or deployment = %(deployment)s) and deleted_at is null
 order by deployment, file, name limit 100000

-- name: owners
-- The deployments that these DAGs belong to, and their current versions.
select d.name, d.deployment, d.file, v.hash, v.bundle_hash from dag d
  left join dag_version v on v.version_id = d.version_id
 where d.name = any(%(names)s::text[]) and d.deleted_at is null order by d.name limit cardinality(%(names)s::text[])

-- name: version
select d.name, v.bundle_hash, b.file, b.uses_threads, v.spec from dag_version v join dag d on d.dag_id = v.dag_id
  join bundle b on b.hash = v.bundle_hash where v.version_id = %(version_id)s

-- name: versions
-- Newest first. A rollback makes an old one current again, with its number.
select v.version_id, v.number, v.hash, v.bundle_hash, v.task_count, v.created_at,
    v.version_id = d.version_id as is_current, w.commit_hash, w.author
  from dag_version v join dag d on d.dag_id = v.dag_id
  left join lateral (select y.commit_hash, y.author from deployment_dag x
                       join deployment_version y on y.deployment = x.deployment and y.number = x.number
                      where x.version_id = v.version_id and y.restores is null
                      order by y.deployed_at, y.number limit 1) w on true
 where v.dag_id = %(dag_id)s and v.number < %(before)s::int order by v.number desc limit %(limit)s

-- name: queues
-- The queues of a version's tasks: their author's choice, or that of the routing rules.
select queue from task_spec where version_id = %(version_id)s::int order by idx limit 100000

-- name: published_route
-- One task of the current version. The spec has a queue only if the author declared one.
select s.queue, v.spec->'tasks'->s.idx->>'queue' as written from dag d join dag_version v on v.version_id = d.version_id
  join task_spec s on s.version_id = d.version_id and s.name = %(task)s where d.name = %(dag)s and d.deleted_at is null

-- name: put_import_error
insert into import_error (deployment, file, line, message, detail, occurred_at)
values (%(deployment)s, %(file)s, %(line)s, left(%(message)s, 4000), left(%(detail)s, 20000), clock())
on conflict (deployment, file) do update set line = excluded.line, message = excluded.message, detail = excluded.detail,
    occurred_at = excluded.occurred_at where (import_error.line, import_error.message,
        import_error.detail) is distinct from (excluded.line, excluded.message, excluded.detail)

-- name: drop_import_errors
delete from import_error where deployment = %(deployment)s and file = any(%(files)s::text[])

-- name: import_errors
select deployment, file, line, message, detail, occurred_at from import_error order by deployment, file limit 1000

-- name: ids_with_tags
-- For a caller who may see only these DAGs. Includes deleted ones: their history stays.
select d.dag_id from dag d join dag_version v on v.version_id = d.version_id
 where v.spec->'tags' ?| %(tags)s::text[] order by d.dag_id limit 100000

-- name: page
-- In name order, from after one; optionally only DAGs with one of some tags, with a tag, or with a text in the name.
select d.dag_id, d.name, d.is_paused as paused, d.version_id, d.max_active_runs, d.deployment, d.file,
       d.deleted_at, v.number, v.spec,
       v.created_at, null as uses_threads
  from dag d join dag_version v on v.version_id = d.version_id
 where d.deleted_at is null and d.name > %(after)s and (%(tags)s::text[] is null or v.spec->'tags' ?| %(tags)s)
   and (%(tag)s::text is null or v.spec->'tags' ? %(tag)s) and (%(like)s::text is null or d.name ilike %(like)s)
   and (%(paused)s::boolean is null or d.is_paused = %(paused)s) order by d.name limit %(limit)s

-- name: version_number
select v.spec from dag_version v where v.dag_id = %(dag_id)s and v.number = %(number)s

-- name: named
select d.dag_id, d.name, d.is_paused as paused, d.version_id, d.max_active_runs, d.deployment, d.file,
       d.deleted_at, v.number, v.spec,
       v.created_at, null as uses_threads
  from dag d join dag_version v on v.version_id = d.version_id
 where d.deleted_at is null and d.name = any(%(names)s::text[])
 order by array_position(%(names)s::text[], d.name) limit cardinality(%(names)s::text[])

-- name: versions_of
-- The versions of some DAGs, or of all that are not deleted, oldest first.
select d.name as dag, v.version_id, v.number, v.created_at from dag d join dag_version v on v.dag_id = d.dag_id
 where d.deleted_at is null and (%(dag_ids)s::int[] is null or d.dag_id = any(%(dag_ids)s)) order by v.version_id
 limit 100000

-- name: kinds
-- The kind of each task of a version, in task order: the spec has it only if it is not the default.
select v.version_id, array(select coalesce(t.task->>'kind', 'python')
                           from jsonb_array_elements(v.spec->'tasks') with ordinality t(task, place)
                            order by t.place) as kinds
  from dag_version v where v.version_id = any(%(version_ids)s::int[]) order by v.version_id limit 1000

-- The DAG catalogue: a page in name order, with the states of the newest runs.

-- name: page_of_dags
-- From after a name. Only parts of the spec: a large DAG must not slow it down. The newest run only if requested.
select d.dag_id, d.name, d.is_paused as paused, v.number as version, v.task_count,
       coalesce(v.spec->'tags', '[]') as tags, v.spec->>'owner' as owner,
       left(v.spec->>'description', 300) as description, d.deployment, d.file
  from dag d join dag_version v on v.version_id = d.version_id
 where d.deleted_at is null and d.name > %(after)s and (%(tags)s::text[] is null or v.spec->'tags' ?| %(tags)s)
   and (%(tag)s::text is null or v.spec->'tags' ? %(tag)s) and (%(like)s::text is null or d.name ilike %(like)s)
   and (%(paused)s::boolean is null or d.is_paused = %(paused)s)
   and (%(newest)s::run_state is null or %(newest)s = (
            select s.state from run_status s
             where s.run_id = (select n.run_id from run n where n.dag_id = d.dag_id order by n.run_id desc limit 1)))
 order by d.name limit %(limit)s

-- name: sorted_page
-- In another order than by name: each matching DAG costs one or two index probes, and only the page's specs are read.
select d.dag_id, d.name, d.is_paused as paused, v.number as version, v.task_count,
       coalesce(v.spec->'tags', '[]') as tags, v.spec->>'owner' as owner,
       left(v.spec->>'description', 300) as description, d.deployment, d.file
  from (select f.dag_id, f.name, f.weight
          from (select g.dag_id, g.name,
                       case %(by)s::text when 'next' then (select min(extract(epoch from s.next_due)) from schedule c
                                                             join schedule_state s on s.schedule_id = c.schedule_id
                                                            where c.dag_id = g.dag_id and c.deleted_at is null
                                                              and not s.is_paused and s.error is null)
                            when 'newest' then (select extract(epoch from n.created_at) from run n
                                                 where n.dag_id = g.dag_id order by n.run_id desc limit 1)
                            when 'took' then (select extract(epoch from coalesce(s.finished_at, clock()) - s.started_at)
                                                from (select n.run_id from run n
                                                       where n.dag_id = g.dag_id order by n.run_id desc limit 1) w
                                                join run_status s on s.run_id = w.run_id) end as weight
                  from dag g join dag_version x on x.version_id = g.version_id
                 where g.deleted_at is null and (%(tags)s::text[] is null or x.spec->'tags' ?| %(tags)s)
                   and (%(tag)s::text is null or x.spec->'tags' ? %(tag)s)
                   and (%(like)s::text is null or g.name ilike %(like)s)
                   and (%(paused)s::boolean is null or g.is_paused = %(paused)s)
                   and (%(newest)s::run_state is null or %(newest)s = (
                            select s.state from run_status s
                             where s.run_id = (select n.run_id from run n
                                                where n.dag_id = g.dag_id order by n.run_id desc limit 1)))) f
         order by case when %(is_down)s then -f.weight else f.weight end nulls last,
             case when not %(is_down)s then f.name end, case when %(is_down)s then f.name end desc
         limit %(limit)s offset %(offset)s) p
  join dag d on d.dag_id = p.dag_id join dag_version v on v.version_id = d.version_id
 order by case when %(is_down)s then -p.weight else p.weight end nulls last, case when not %(is_down)s then p.name end,
     case when %(is_down)s then p.name end desc

-- name: newest_runs
-- One index probe per DAG.
select r.dag_id, s.run_id, s.state, r.created_at, r.fire_at, s.started_at, s.finished_at
  from unnest(%(dag_ids)s::int[]) w(dag_id)
  cross join lateral (select n.run_id, n.dag_id, n.created_at, n.fire_at from run n
                       where n.dag_id = w.dag_id order by n.run_id desc limit %(each)s) r
  cross join lateral (select * from run_status x where x.run_id = r.run_id offset 0) s order by r.dag_id, s.run_id

-- name: next_fires
-- For each DAG its next schedule, or one that depends on something other than time.
select distinct on (c.dag_id) c.dag_id, c.name, c.spec, s.next_due, s.is_paused as paused, s.error
  from schedule c join schedule_state s on s.schedule_id = c.schedule_id
 where c.dag_id = any(%(dag_ids)s::int[]) and c.deleted_at is null
 order by c.dag_id, s.next_due nulls last, c.name limit cardinality(%(dag_ids)s::int[])

-- name: grid
-- The newest runs of a DAG, before one run.
select r.run_id, v.number as version, r.kind, r.fire_at, r.created_at, s.state, s.started_at, s.finished_at,
       v.task_count + s.extra_tasks as task_count
  from (select n.run_id from run n
         where n.dag_id = %(dag_id)s and n.run_id < %(before)s::bigint order by n.run_id desc limit %(limit)s) w
  join run r on r.run_id = w.run_id join run_status s on s.run_id = w.run_id
  join dag_version v on v.version_id = r.version_id order by r.run_id desc

-- name: cells
-- The tasks of these runs by name, with the instances of a mapped task combined: how many are in each state.
select k.run_id, s.name as task, k.state::text as state, count(*) as count, bool_or(k.map_index >= 0) as is_mapped,
       min(k.started_at) as started_at, max(k.finished_at) as finished_at, max(k.attempt) as attempt
  from unnest(%(run_ids)s::bigint[]) w(run_id)
  cross join lateral (select * from task x where x.run_id = w.run_id offset 0) k
  join task_spec s on s.version_id = k.version_id and s.idx = k.idx group by k.run_id, s.name, k.state limit %(limit)s

-- name: group_retries
-- The groups of these runs that were retried as a whole. Queried only for DAGs with such groups.
select g.run_id, w.name, g.retried from unnest(%(run_ids)s::bigint[]) r(run_id)
  cross join lateral (select * from run_group x where x.run_id = r.run_id and x.retried > 0 offset 0) g
  cross join lateral (select x.version_id from run_status x where x.run_id = g.run_id offset 0) s
  join retry_group w on w.version_id = s.version_id and w.group_id = g.group_id limit 10000
