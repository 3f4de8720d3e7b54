-- Deployments, their versions, and archives that are being uploaded.

-- name: find
select d.name, d.kind, d.version, d.source, d.published_commit, d.problem, d.created_at, d.deleted_at,
       (select count(*) from dag x where x.deployment = d.name and x.deleted_at is null) as dag_count
  from deployment d where d.name = %(name)s

-- name: page
-- In name order, from after one.
select d.name, d.kind, d.version, d.source, d.published_commit, d.problem, d.created_at, d.deleted_at,
       (select count(*) from dag x where x.deployment = d.name and x.deleted_at is null) as dag_count
  from deployment d where d.name > %(after)s and d.deleted_at is null order by d.name limit %(limit)s

-- name: failed
-- Git repositories whose newest commit is not published.
select d.name, d.problem from deployment d where d.problem is not null order by d.name limit 20

-- name: versions
-- Newest first, starting before a number. One whose DAG versions were pruned cannot be restored. One without DAGs is
-- the deletion of the deployment.
select v.number, v.content_hash, v.commit_hash, v.author, v.message, v.restores, v.deployed_by, v.deployed_at,
       v.number = d.version as is_current, c.dag_count, c.dag_count = c.stored_count and c.dag_count > 0 as is_complete
  from deployment_version v join deployment d on d.name = v.deployment
  cross join lateral (select count(*) as dag_count, count(w.version_id) as stored_count from deployment_dag x
                        left join dag_version w on w.version_id = x.version_id
                       where x.deployment = v.deployment and x.number = v.number) c
 where v.deployment = %(name)s and v.number < %(before)s::int order by v.number desc limit %(limit)s

-- name: dags_of
-- The DAGs of one version, with what is needed to publish them again.
select d.name, w.number, b.file, w.bundle_hash, w.spec from deployment_dag x
  join dag_version w on w.version_id = x.version_id join dag d on d.dag_id = w.dag_id
  join bundle b on b.hash = w.bundle_hash
 where x.deployment = %(name)s and x.number = %(number)s order by d.name limit 10000

-- name: changes
-- The DAGs that differ between two versions of a deployment: the version of each in both, if it is there.
select d.name, b.number as before, a.number as after
  from (select w.dag_id, w.number from deployment_dag x join dag_version w on w.version_id = x.version_id
         where x.deployment = %(name)s and x.number = %(old)s) b
  full join (select w.dag_id, w.number from deployment_dag x join dag_version w on w.version_id = x.version_id
              where x.deployment = %(name)s and x.number = %(new)s) a on a.dag_id = b.dag_id
  join dag d on d.dag_id = coalesce(a.dag_id, b.dag_id)
 where a.number is distinct from b.number order by d.name limit 10000

-- name: received
-- How many bytes of an archive are there without a gap, counted from its start.
select coalesce(max(p.upto), 0) as received
  from (select x.start, x.start + length(x.content) as upto,
               sum(length(x.content)) over (order by x.start) as total
          from upload_piece x where x.hash = %(hash)s and x.owner = %(owner)s limit 10000) p where p.upto = p.total

-- name: kept_bytes
-- The size of all archives that a user began to upload and did not publish, without one.
select coalesce(sum(length(content)), 0)::bigint as kept from upload_piece
 where owner = %(owner)s and hash <> %(hash)s

-- name: pieces
select content from upload_piece where hash = %(hash)s and owner = %(owner)s order by start limit 10000
