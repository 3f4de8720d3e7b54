-- Retention: old runs are deleted in small batches. A run disappears at once, with its status. Its tasks, results, logs
-- and attempts can be gigabytes: `pending_cleanup` lists them, and they are deleted slice by slice.
--
-- Old runs are found by a walk over their ids (db/queries/retention.sql), because ids rise with time and an index on
-- finished_at would cost every run. Here each is checked again, under its lock. The leader of shard 0 does all of it.

-- One audit entry per round counts deleted rows, in the transaction that deletes them. Returns the entry.
create function record_pruned(p_entry bigint, p_actor actor, p_before timestamptz, p_kind text, p_count bigint)
returns bigint language plpgsql as $$
declare
    noted bigint;
begin
    if p_count = 0 then
        return p_entry;
    end if;
    update audit_log j
    set detail = j.detail || jsonb_build_object(p_kind, coalesce((j.detail->>p_kind)::bigint, 0) + p_count)
    where j.entry_id = p_entry
    returning j.entry_id into noted;
    if noted is null then
        noted := write_audit(p_actor, 'prune', jsonb_build_object('before', p_before, p_kind, p_count));
    end if;
    return noted;
end $$;

-- Deletes those of the given runs that have ended before p_before; a locked, open or just reopened run stays. The
-- cursors of schedules are not touched: no fire can happen twice because its run is deleted.
create function prune_runs(p_shard smallint, p_epoch bigint, p_run_ids bigint[], p_before timestamptz, p_actor actor,
                           p_entry bigint, out pruned bigint, out entry bigint) language plpgsql as $$
declare
    doomed bigint[];
begin
    perform fence(p_shard, p_epoch);
    doomed := array(
        select r.run_id from run_status r
        where r.run_id = any(p_run_ids) and r.state in ('success', 'failed', 'canceled') and r.finished_at < p_before
        order by r.run_id for update skip locked);
    perform delete_runs(p_shard, doomed);
    pruned := cardinality(doomed);
    entry := record_pruned(p_entry, p_actor, p_before, 'runs', pruned);
end $$;

-- Deletes these ended and locked runs; the rows that depend on them are left to delete_pending_cleanup.
create function delete_runs(p_shard smallint, p_doomed bigint[]) returns void language plpgsql as $$
declare
    awaited int[];
begin
    insert into pending_cleanup (shard, kind, id) select p_shard, 'run', d from unnest(p_doomed) d;
    -- A task that waited for one of them waits for nothing now (is_previous_done): the leader admits it.
    awaited := array(select g.gate_id from gate g
                     where g.kind = 'past' and split_part(g.name, '/', 1)::bigint = any(p_doomed)
                     order by g.gate_id for no key update);
    update gate g set needs_admission = true where g.gate_id = any(awaited);
    delete from run_status r where r.run_id = any(p_doomed);
    delete from backfill_run b where b.run_id = any(p_doomed);
    delete from run_version_override m where m.run_id = any(p_doomed);
    delete from run r where r.run_id = any(p_doomed);
end $$;

-- Deletes one run on request: 'deleted', 'open' when it has not ended, or null if none. Its schedule's cursor stays;
-- the entry names its fire, which has no run from then on.
create function delete_run(p_run_id bigint, p_actor actor) returns text language plpgsql as $$
declare
    doomed run_status;
    detail jsonb;
begin
    select * into doomed from run_status r where r.run_id = p_run_id for update;
    if doomed.run_id is null then
        return null;
    elsif doomed.state not in ('success', 'failed', 'canceled') then
        return 'open';
    end if;
    select jsonb_strip_nulls(jsonb_build_object('state', doomed.state, 'schedule_id', r.schedule_id,
                                                'fire_at', r.fire_at)) into detail
    from run r where r.run_id = p_run_id;
    perform delete_runs(0::smallint, array[p_run_id]);
    perform write_audit(p_actor, 'delete_run', detail, p_dag_id => doomed.dag_id, p_run_id => p_run_id);
    return 'deleted';
end $$;

-- Deletes at most p_limit rows of deleted runs or versions, and takes those without any more off the list. By ctid, as
-- a delete has no limit. No other transaction uses these rows: every verb begins with the run, or with the DAG.
create function delete_pending_cleanup(p_shard smallint, p_epoch bigint, p_kind text, p_ids bigint[], p_limit int,
                                       out swept int, out is_clean boolean) language plpgsql as $$
declare
    gone bigint[];
    hung text;
    n int;
begin
    perform fence(p_shard, p_epoch);
    swept := 0;
    gone := array(select m.id from pending_cleanup m where m.shard = p_shard and m.kind = p_kind and m.id = any(p_ids)
                  order by m.id for update skip locked);
    foreach hung in array case p_kind
        when 'run' then array['log_chunk', 'result', 'step_result', 'state_entry', 'asset_update', 'map_item',
            'deferral', 'sensor_poll', 'task_trigger', 'approval', 'child_run',
            'attempt', 'note', 'run_group', 'run_partition', 'task']
                                      else array['edge', 'retry_group', 'task_input', 'task_gate', 'trigger_dag_task',
                                                 'wait_spec', 'task_deadline', 'notification_rule', 'mapping_input',
                                                     'task_mapping', 'task_spec'] end loop
        execute format('delete from %1$I where ctid = any(array('
                       'select x.ctid from %1$I x where x.%2$I = any($1) limit $2))', hung,
                        p_kind || '_id') using gone, p_limit - swept;
        get diagnostics n = row_count;
        swept := swept + n;
    end loop;
    is_clean := swept < p_limit;
    if is_clean then
        if p_kind = 'run' then
            -- Their logs in the storage go next. An object being uploaded stays listed for as long as that may take.
            update log_archive_object o set look_at = greatest(o.look_at, clock()) where o.run_id = any(gone);
        end if;
        delete from pending_cleanup m where m.shard = p_shard and m.kind = p_kind and m.id = any(gone);
    end if;
end $$;

-- Deletes versions that were replaced before p_before and that no run has any more. A run takes the version that is
-- current when it begins, so its runs are among those that had begun when it was replaced: few are left after that
-- long. 100,000 ids more, for runs that began in that moment. The DAG's lock keeps a publish from bringing one back.
create function prune_versions(p_shard smallint, p_epoch bigint, p_before timestamptz, p_limit int, p_actor actor,
                               p_entry bigint, out pruned bigint, out entry bigint) language plpgsql as $$
declare
    doomed int[];
begin
    perform fence(p_shard, p_epoch);
    doomed := array(
        select v.version_id from dag_version v join dag d on d.dag_id = v.dag_id
        where v.retired_at < p_before and v.version_id is distinct from d.version_id
          and not exists (select 1 from run r where r.dag_id = v.dag_id and r.version_id = v.version_id
                          and r.run_id <= v.final_run_id + 100000)
          and not exists (select 1 from run_version_override m where m.version_id = v.version_id)
        limit p_limit for no key update skip locked);
    insert into pending_cleanup (shard, kind, id) select p_shard, 'version', d from unnest(doomed) d;
    delete from dag_version v where v.version_id = any(doomed);
    pruned := cardinality(doomed);
    entry := record_pruned(p_entry, p_actor, p_before, 'versions', pruned);
end $$;

create function prune_audit_log(p_shard smallint, p_epoch bigint, p_entry_ids bigint[], p_before timestamptz,
                                p_actor actor, p_entry bigint, out pruned bigint, out entry bigint)
language plpgsql as $$
begin
    perform fence(p_shard, p_epoch);
    delete from audit_log where ctid = any(array(
        select j.ctid from audit_log j
        where j.entry_id = any(p_entry_ids) and j.occurred_at < p_before for update skip locked));
    get diagnostics pruned = row_count;
    entry := record_pruned(p_entry, p_actor, p_before, 'journal', pruned);
end $$;

-- One batch of what needs no walk and has nothing hanging on it.
create function prune_kind(p_shard smallint, p_epoch bigint, p_kind text, p_before timestamptz, p_limit int,
                           p_actor actor, p_entry bigint, out pruned bigint, out entry bigint) language plpgsql as $$
declare
    n bigint;
begin
    perform fence(p_shard, p_epoch);
    if p_kind = 'skip_records' then
        -- Schedule by schedule: within one, ranges are in the order of time. A range is recorded when it is over.
        delete from skip_record where ctid = any(array(
            select k.ctid from schedule c cross join lateral (
                select x.ctid from skip_record x
                where x.schedule_id = c.schedule_id and x.first_at < p_before and x.recorded_at < p_before
                order by x.first_at limit p_limit for update skip locked) k
            limit p_limit));
    elsif p_kind = 'causes' then
        -- What fires of long ago came after, schedule by schedule as well.
        delete from run_trigger where ctid = any(array(
            select k.ctid from schedule c cross join lateral (
                select x.ctid from run_trigger x
                where x.schedule_id = c.schedule_id and x.fire_at < p_before
                order by x.fire_at limit p_limit for update skip locked) k
            limit p_limit));
        get diagnostics n = row_count;
        delete from partition_update where ctid = any(array(
            select k.ctid from schedule c cross join lateral (
                select x.ctid from partition_update x
                where x.schedule_id = c.schedule_id and x.occurred_at < p_before
                limit p_limit for update skip locked) k
            limit p_limit));
        get diagnostics pruned = row_count;
        pruned := pruned + n;
    elsif p_kind = 'alerts' then
        -- Their episode is long over.
        delete from alert where ctid = any(array(
            select a.ctid from alert a where a.ended_at < p_before limit p_limit for update skip locked));
    elsif p_kind = 'violations' then
        -- Of guarantees: those that no longer hold.
        delete from proof_violation where ctid = any(array(
            select v.ctid from proof_violation v where v.ended_at < p_before limit p_limit for update skip locked));
    elsif p_kind = 'notifications' then
        -- Sent or expired ones. The oldest first, by the key: waiting ones are never old for long.
        delete from outbox where ctid = any(array(
            select x.ctid from outbox x where x.ended_at < p_before order by x.delivery_id
                limit p_limit for update skip locked));
    elsif p_kind = 'events' then
        -- In the order of their ids, which is that of time: the first recent one ends the scan.
        delete from event where ctid = any(array(
            select x.ctid from (select e.ctid, e.sent_at from event e where e.is_delivered order by e.event_id
                                limit p_limit for update skip locked) x
            where x.sent_at < p_before));
    elsif p_kind = 'asset_updates' then
        delete from asset_update where ctid = any(array(
            select x.ctid from (select u.ctid, u.occurred_at from asset_update u
                                where u.occurred_at is not null order by u.update_id
                                limit p_limit for update skip locked) x
            where x.occurred_at < p_before));
    elsif p_kind = 'state' then
        -- Rows that were kept for a time only. Nothing reads them since then.
        delete from state_entry where ctid = any(array(
            select e.ctid from state_entry e where e.expires_at < p_before limit p_limit for update skip locked));
    elsif p_kind = 'backfills' then
        -- They are over and their runs are all counted; the runs go by themselves.
        delete from backfill where ctid = any(array(
            select b.ctid from backfill b where b.finished_at < p_before and b.open_runs = 0
            limit p_limit for update skip locked));
    elsif p_kind = 'runners' then
        -- Runners that ended long ago. One that comes back notices it because its row is missing.
        delete from runner where ctid = any(array(
            select r.ctid from runner r
            where r.ended_at < p_before and not exists (select 1 from lease l where l.session = r.session)
            limit p_limit for update of r skip locked));
    elsif p_kind = 'bundles' then
        -- Code that no version has. Publishing renews the date: no process is about to use it.
        delete from bundle where ctid = any(array(
            select b.ctid from bundle b
            where b.created_at < p_before and b.hash <> all(select v.bundle_hash from dag_version v)
            limit p_limit for update skip locked));
    elsif p_kind = 'deployments' then
        -- Replaced versions: nothing can be rolled back to them any more.
        with gone as (
            delete from deployment_version v where v.ctid = any(array(
                select x.ctid from deployment_version x join deployment d on d.name = x.deployment
                where x.deployed_at < p_before and x.number < d.version limit p_limit for update of x skip locked))
            returning v.deployment, v.number
        ), emptied as (
            delete from deployment_dag x using gone g where x.deployment = g.deployment and x.number = g.number)
        select count(*) into pruned from gone;
    else
        raise exception 'nothing is pruned as %', p_kind;
    end if;
    if pruned is null then
        get diagnostics pruned = row_count;
    end if;
    entry := record_pruned(p_entry, p_actor, p_before, p_kind, pruned);
end $$;
