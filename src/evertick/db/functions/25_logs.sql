-- Lines of ended runs leave the database if the installation has an object storage (docs/decisions/0032).
--
-- The row of a chunk stays and says where its lines are: a runner that sends it again finds it, and a log is read by
-- the same keys. An object holds lines of one run. It is listed here from before its upload until after its removal, so
-- the list is complete whatever process dies. The leader of shard 0 does all of it; only a clear also writes here.

-- The next runs, up to the recent ones: an id is drawn a moment before its row is visible. Returns how many.
create function queue_log_archiving(p_shard smallint, p_epoch bigint, p_limit int) returns int language plpgsql as $$
declare
    begun bigint;
    passed bigint[];
    t timestamptz := clock();
begin
    perform fence(p_shard, p_epoch);
    insert into log_archive_cursor (after) values (0) on conflict (is_only) do nothing;
    select w.after into begun from log_archive_cursor w for update;
    passed := array(
        select x.run_id from (
            select r.run_id, count(*) filter (where r.created_at between t - interval '1 minute' and t) over
                (order by r.run_id) as young
            from (select f.run_id, f.created_at from run f where f.run_id > begun order by f.run_id limit p_limit) r) x
        where x.young = 0 order by x.run_id);
    if cardinality(passed) > 0 then
        insert into log_archive_queue (run_id) select p from unnest(passed) p on conflict (run_id) do nothing;
        update log_archive_cursor w set after = passed[cardinality(passed)];
    end if;
    return cardinality(passed);
end $$;

-- Runs that begin again write again. Where logs are never moved, nothing was walked over.
create function requeue_log_archiving(p_run_ids bigint[]) returns void language sql as $$
    insert into log_archive_queue (run_id)
    select x.run_id from log_archive_cursor w cross join unnest(p_run_ids) as x(run_id) where x.run_id <= w.after
    on conflict (run_id) do nothing
$$;

-- Records an object that is about to be uploaded; without a line in it within the hour it is lost.
create function create_archive_object(p_shard smallint, p_epoch bigint, p_run_id bigint, p_bytes int, out listed uuid)
language plpgsql as $$
begin
    perform fence(p_shard, p_epoch);
    insert into log_archive_object (run_id, bytes, look_at) values (p_run_id, p_bytes, clock() + interval '1 hour')
        returning object_id into listed;
end $$;

-- The lines of an uploaded object go, under the run's lock, because pruning deletes by place. Returns how many chunks.
create function archive_logs(p_shard smallint, p_epoch bigint, p_object_id uuid, p_pieces jsonb)
returns int language plpgsql as $$
declare
    target bigint;
    moved int;
begin
    perform fence(p_shard, p_epoch);
    select o.run_id into target from log_archive_object o where o.object_id = p_object_id;
    perform 1 from run_status r where r.run_id = target for no key update;
    if not found then
        return 0;
    end if;
    perform 1 from log_archive_object o where o.object_id = p_object_id and o.look_at > clock() for update;
    if not found then
        return 0;
    end if;
    update log_chunk c set content = null, object_id = p_object_id, object_offset = x.at, bytes = x.bytes,
        digest = decode(x.digest, 'hex')
    from jsonb_to_recordset(p_pieces) as x(idx int, map_index int, epoch int, seq bigint, at int, bytes int,
                                           digest text)
    where c.run_id = target and c.idx = x.idx and c.map_index = x.map_index and c.epoch = x.epoch and c.seq = x.seq
      and c.content is not null;
    get diagnostics moved = row_count;
    if moved > 0 then
        update log_archive_object o set look_at = null where o.object_id = p_object_id;
    end if;
    return moved;
end $$;

-- Ends the archiving of these runs: they are deleted, or have not begun again since they were archived.
create function finish_log_archiving(p_shard smallint, p_epoch bigint, p_run_ids bigint[], p_finished timestamptz[])
returns void language plpgsql as $$
begin
    perform fence(p_shard, p_epoch);
    perform 1 from run_status r where r.run_id = any(p_run_ids) order by r.run_id for no key update;
    delete from log_archive_queue w using unnest(p_run_ids, p_finished) as x(run_id, finished_at)
    where w.run_id = x.run_id
        and (select r.finished_at from run_status r where r.run_id = x.run_id) is not distinct from x.finished_at;
end $$;

-- Objects to remove: listed for long, and without a line; listed until they are gone (delete_archive_objects).
create function orphaned_archive_objects(p_shard smallint, p_epoch bigint, p_limit int)
returns table (object_id uuid, run_id bigint) language plpgsql as $$
#variable_conflict use_column
declare
    due uuid[];
begin
    perform fence(p_shard, p_epoch);
    due := array(select o.object_id from log_archive_object o where o.look_at <= clock() order by o.look_at
                 limit p_limit for update skip locked);
    update log_archive_object o set look_at = null
    where o.object_id = any(due) and exists (
        select 1 from log_chunk c where c.run_id = o.run_id and c.object_id = o.object_id);
    return query select o.object_id, o.run_id from log_archive_object o where o.object_id = any(due)
        and o.look_at <= clock();
end $$;

create function delete_archive_objects(p_shard smallint, p_epoch bigint, p_object_ids uuid[])
returns void language plpgsql as $$
begin
    perform fence(p_shard, p_epoch);
    delete from log_archive_object o where o.object_id = any(p_object_ids) and o.look_at <= clock();
end $$;
