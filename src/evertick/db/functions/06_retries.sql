-- What time does to tasks and runs: due retries are admitted where there is room (H5), and what takes too long ends.

-- How many more retries of a queue may become active. p_bound null: half of the slots of the live runners that serve
-- it. The bound is one for all shards, so that their leaders count one after the other.
create function free_retry_slots(p_queue text, p_bound int) returns int language plpgsql as $$
declare
    places smallint[] := array(select s.shard from shard s);
begin
    if cardinality(places) > 1 then
        perform pg_advisory_xact_lock(4713, hashtext(p_queue));
    end if;
    delete from retry_slot x
    where x.shard = any(places) and x.queue = p_queue and (
        select true from task k
        where k.run_id = x.run_id and k.idx = x.idx and k.map_index = x.map_index
          -- a cleared task is no retry
          and ((k.state = 'available' and k.epoch = x.epoch and k.attempt + k.lost_attempts > 0)
               or (k.state in ('queued', 'running') and k.epoch = x.epoch + 1))) is null;
    return coalesce(p_bound, (select greatest(sum(r.slots) / 2, 1) from runner r
                              where r.ended_at is null and p_queue = any(r.queues)), 1)
         - (select count(*) from retry_slot x where x.shard = any(places) and x.queue = p_queue);
end $$;

-- Whether a task is still pending for that instant; a cancel, a clear or a mark does not clean up behind it.
create function is_delayed_until(p_run_id bigint, p_idx int, p_map_index int, p_instant timestamptz)
returns boolean language sql stable as $$
    select exists (select 1 from task k where k.run_id = p_run_id and k.idx = p_idx and k.map_index = p_map_index
                   and k.state = 'pending' and k.not_before = p_instant)
$$;

-- Takes retries out of the retry queue: they become available, or merely pending if their DAG is paused or they have
-- gates. Rows are found by key and changed by ctid (docs/decisions/0005); only the leader changes the retry queue.
create function admit_retries(p_places tid[], inout fx effects) language plpgsql as $$
declare
    due task_ref[];
begin
    with gone as (
        delete from retry_queue l where l.ctid = any(p_places)
        returning l.shard, l.queue, l.due_at, l.run_id, l.idx, l.map_index
    ), placed as (
        select g.*, h.place, d.is_paused or s.is_gated as is_held from gone g
        cross join lateral (select k.ctid as place, k.version_id from task k
                            where k.run_id = g.run_id and k.idx = g.idx and k.map_index = g.map_index offset 0) h
        cross join lateral (select x.is_gated from task_spec x where x.version_id = h.version_id and x.idx = g.idx
                            offset 0) s
        cross join lateral (select r.dag_id from run_status r where r.run_id = g.run_id offset 0) r
        cross join lateral (select x.is_paused from dag x where x.dag_id = r.dag_id offset 0) d
    ), moved as (
        update task k set state = case when p.is_held then 'pending'::task_state else 'available' end, not_before = null
        from placed p where k.ctid = p.place and k.state = 'pending' and k.not_before = p.due_at
        returning k.run_id, k.idx, k.map_index, k.version_id, k.state, k.epoch, p.shard, p.queue
    ), kept as (
        insert into retry_slot (shard, queue, run_id, idx, map_index, epoch)
        select m.shard, m.queue, m.run_id, m.idx, m.map_index, m.epoch from moved m where m.state = 'available'
        on conflict (shard, queue, run_id, idx, map_index) do update set epoch = excluded.epoch
    )
    select array_agg(row(m.run_id, m.idx, m.map_index, m.version_id, m.state)::task_ref) into due from moved m;
    fx := enqueue_tasks(due, fx);
end $$;

-- Due pending tasks enter the retry queue, and leave it as far as there is room. Locked runs are skipped, and the limit
-- counts only what is taken. Returns how many became available or were set aside, the next due time, and if any waits.
create function promote_due_tasks(p_shard smallint, p_epoch bigint, p_limit int, p_bound int, out promoted int,
                                  out refused int, out next_due timestamptz, out has_waiting_retries boolean)
language plpgsql as $$
declare
    fx effects;
    q text;
    room int;
    chosen tid[];
    one tid;
    guilty bigint;
    t timestamptz := clock();
begin
    perform fence(p_shard, p_epoch);
    refused := 0;
    with due as materialized (
        select come.* from (
            select w.ctid as place, w.due_at, w.run_id, w.idx, w.map_index from task_timer w
            where w.shard = p_shard and w.due_at <= t order by w.due_at offset 0) come
        cross join lateral (select from run_status r where r.run_id = come.run_id for no key update skip locked) locked
        limit p_limit
    ), passed as (
        delete from task_timer w where w.ctid = any(array(select d.place from due d))
    )
    insert into retry_queue (shard, queue, due_at, run_id, idx, map_index)
    select p_shard, s.queue, d.due_at, d.run_id, d.idx, d.map_index
    from due d
    cross join lateral (select x.version_id from task x where x.run_id = d.run_id and x.idx = d.idx
                        and x.map_index = d.map_index and x.state = 'pending' and x.not_before = d.due_at offset 0) k
    cross join lateral (select x.queue from task_spec x where x.version_id = k.version_id and x.idx = d.idx offset 0) s
    on conflict do nothing;
    q := (select min(l.queue) from retry_queue l where l.shard = p_shard);
    while q is not null loop
        room := free_retry_slots(q, p_bound);
        if room > 0 then
            chosen := array(
                select first.place from (
                    select l.ctid as place, l.run_id from retry_queue l
                    where l.shard = p_shard and l.queue = q and is_delayed_until(l.run_id, l.idx, l.map_index, l.due_at)
                    order by l.due_at offset 0) first
                cross join lateral (select from run_status r where r.run_id = first.run_id
                                    for no key update skip locked) locked
                limit least(room, p_limit));
            if cardinality(chosen) = 0 then
                delete from retry_queue l
                where l.shard = p_shard and l.queue = q and not is_delayed_until(l.run_id, l.idx, l.map_index,
                    l.due_at);
            end if;
            begin
                fx := admit_retries(chosen, fx);
            exception when others then
                if not is_poison(sqlstate) then
                    raise;
                end if;
                foreach one in array chosen loop
                    begin
                        fx := admit_retries(array[one], fx);
                    exception when others then
                        if not is_poison(sqlstate) then
                            raise;
                        end if;
                        -- Out of the line; reconcile winds its timer up again when its time to be tried again has come.
                        delete from retry_queue l where l.ctid = one returning l.run_id into guilty;
                        perform quarantine_row('run', guilty, 'promote', sqlerrm, true);
                        refused := refused + 1;
                    end;
                end loop;
            end;
        end if;
        q := (select min(l.queue) from retry_queue l where l.shard = p_shard and l.queue > q);
    end loop;
    fx := apply_effects(fx);
    promoted := coalesce(fx.enqueued, 0);
    select min(w.due_at) into next_due from task_timer w where w.shard = p_shard;
    has_waiting_retries := exists (select 1 from retry_queue l where l.shard = p_shard);
end $$;

-- Failed runs begin again as a whole: all waits again, and attempts become history. The caller holds their locks.
create function retry_runs(p_run_ids bigint[], inout fx effects) language plpgsql as $$
begin
    update run_status r set retried = r.retried + 1 where r.run_id = any(p_run_ids) and r.state = 'failed';
    update run_group g set retried = 0 where g.run_id = any(p_run_ids) and g.retried > 0;
    perform write_audit(system_actor(),
        'retry', jsonb_strip_nulls(jsonb_build_object('retried', r.retried, 'reason', r.reason)), p_run_id => r.run_id)
    from run_status r where r.run_id = any(p_run_ids);
    perform enqueue_notifications(array(
        select row(r.run_id, r.version_id, -1, '', 'retry', 'failed', r.retried, r.reason)::notification_event
        from unnest(p_run_ids) p(run_id)
        cross join lateral (select * from run_status x where x.run_id = p.run_id offset 0) r
        cross join lateral (select from dag d where d.dag_id = r.dag_id and d.has_notifications offset 0) d));
    fx := reopen_tasks(array(select row(k.run_id, k.idx, k.map_index, k.version_id, k.state)::task_ref from task k
                             where k.run_id = any(p_run_ids)
                               and k.state in ('success', 'failed', 'skipped', 'canceled', 'upstream_failed')), fx);
end $$;

-- Ends a run that takes longer than its DAG allows, as for a cancel, but as failed. Counted from its start, which a
-- clear of an ended run sets again. Returns how many tasks are asked to stop; null when it is not over its limit.
create function time_out_run(p_shard smallint, p_epoch bigint, p_run_id bigint) returns int language plpgsql as $$
declare
    fx effects;
    why text;
    done stop_result;
begin
    perform fence(p_shard, p_epoch);
    begin
        perform 1 from run_status r where r.run_id = p_run_id and r.state = 'running' for no key update;
        if not is_run_overdue(p_run_id) then
            return null;
        end if;
        select format('run_timeout: exceeded %s s', v.run_timeout) into why
        from run_status r join dag_version v on v.version_id = r.version_id where r.run_id = p_run_id;
        update run_status r set reason = why where r.run_id = p_run_id and r.state = 'running';
        done := stop_tasks(p_run_id, why, fx);
        perform write_audit(system_actor(), 'time_out', jsonb_build_object('reason', why, 'asked_to_stop', done.asked),
                            p_run_id => p_run_id);
        fx := close_finished_runs(done.stopped, done.fx);
        fx := apply_effects(fx);
        return done.asked;
    exception when others then
        if not is_poison(sqlstate) then
            raise;
        end if;
        perform quarantine_row('run', p_run_id, 'time_out', sqlerrm, true);
        return -1;
    end;
end $$;

-- Available tasks that no runner took within their queue_timeout fail, without another try. A claim or a pause removes
-- the row and its limit. The ready queue is one for all shards. Returns how many failed and how many were set aside.
create function time_out_queued_tasks(p_shard smallint, p_epoch bigint, p_limit int, out failed int, out refused int)
language plpgsql as $$
declare
    fx effects;
    done move_result;
    late ready_task[];
    one ready_task;
begin
    perform fence(p_shard, p_epoch);
    failed := 0;
    refused := 0;
    late := array(
        select first.whole from (
            select q as whole, q.run_id from ready_task q
            where q.expires_at <= clock() and not is_quarantined('run', q.run_id) order by q.expires_at offset 0) first
        cross join lateral (select from run_status r where r.run_id = first.run_id for no key update skip locked) locked
        limit p_limit);
    begin
        done := fail_expired_tasks(late, fx);
        fx := done.fx;
        failed := coalesce(cardinality(done.tasks), 0);
    exception when others then
        if not is_poison(sqlstate) then
            raise;
        end if;
        foreach one in array late loop
            begin
                done := fail_expired_tasks(array[one], fx);
                fx := done.fx;
                failed := failed + coalesce(cardinality(done.tasks), 0);
            exception when others then
                if not is_poison(sqlstate) then
                    raise;
                end if;
                perform quarantine_row('run', one.run_id, 'time_out', sqlerrm, true);
                refused := refused + 1;
            end;
        end loop;
    end;
    fx := apply_effects(fx);
end $$;

-- The caller holds the runs' locks. A task that a runner is just taking stays with it. Returns the tasks that failed.
create function fail_expired_tasks(p_late ready_task[], fx effects) returns move_result language plpgsql as $$
declare
    over task_ref[];
begin
    with expired as (
        delete from ready_task q
        where q.ctid = any(array(select h.place from unnest(p_late) p
                                 cross join lateral (select x.ctid as place from ready_task x
                                                     where x.queue = p.queue and x.rank = p.rank and x.seq = p.seq
                                                     for update skip locked) h))
        returning q.run_id, q.idx, q.map_index, q.queue
    ), placed as (
        select h.place, e.queue from expired e
        cross join lateral (select k.ctid as place from task k
                            where k.run_id = e.run_id and k.idx = e.idx and k.map_index = e.map_index offset 0) h
    ), moved as (
        update task k
        set state = 'failed', finished_at = clock(),
            reason = format('queue_timeout: no runner of queue %s took it within %s s', p.queue,
                (select s.queue_timeout from task_spec s where s.version_id = k.version_id and s.idx = k.idx))
        from placed p where k.ctid = p.place and k.state = 'available'
        returning k.run_id, k.idx, k.map_index, k.version_id, k.state
    )
    select array_agg(row(m.run_id, m.idx, m.map_index, m.version_id, m.state)::task_ref) into over from moved m;
    fx := release_gates(over, fx);
    fx := complete_tasks(over, fx);
    return row(over, fx)::move_result;
end $$;
