-- Rows that cannot be planned, promoted, repaired or reaped are set aside, so that they block no other row (V11). The
-- leader processes a batch as a whole; if the database refuses it, row by row; a row that is refused alone comes here.

-- Errors of one row, not of the database or the program. The twin of engine/poison.py; a test compares both.
create function is_poison(p_code text) returns boolean language sql immutable as $$
    select left(p_code, 2) in ('22', '23', '54', 'XX') or p_code = 'P0001'
$$;

create function is_quarantined(p_kind text, p_subject_id bigint) returns boolean language sql stable as $$
    select exists (select 1 from quarantine q where q.kind = p_kind and q.subject_id = p_subject_id
                   and (q.retry_at is null or q.retry_at > clock()))
$$;

-- Ten seconds, then twice as long with every failure, up to an hour.
create function quarantine_row(p_kind text, p_subject_id bigint, p_verb text, p_reason text, p_is_tried_again boolean)
returns void language plpgsql as $$
declare
    t timestamptz := clock();
    shown text := left(p_reason, 2000);
begin
    insert into quarantine as q (kind, subject_id, verb, reason, failures, since, failed_at, retry_at)
    values (p_kind, p_subject_id, p_verb, shown, 1, t, t, case when p_is_tried_again then t + interval '10 seconds' end)
    on conflict (kind, subject_id) do update
        set verb = excluded.verb, reason = excluded.reason, failures = q.failures + 1, failed_at = t,
            retry_at = case when p_is_tried_again
                            then t + make_interval(secs => least(10 * 2 ^ least(q.failures, 20), 3600)) end;
    perform write_audit(system_actor(),
        'quarantine', jsonb_build_object('kind', p_kind, 'verb', p_verb, 'reason', shown),
        p_dag_id => case p_kind when 'dag' then p_subject_id::int
                         when 'schedule' then (select c.dag_id from schedule c where c.schedule_id = p_subject_id) end,
        p_run_id => case p_kind when 'run' then p_subject_id end);
end $$;

-- A schedule that cannot be planned leaves the index of due schedules, with a visible reason; the others continue.
create function quarantine_schedule(p_shard smallint, p_epoch bigint, p_schedule_id int, p_version int, p_reason text,
                                    p_is_tried_again boolean) returns boolean language plpgsql as $$
begin
    perform fence(p_shard, p_epoch);
    update schedule_state s set error = left(p_reason, 2000)
    where s.schedule_id = p_schedule_id and s.version = p_version and s.error is null and s.shard = p_shard;
    if not found then
        return false;
    end if;
    perform quarantine_row('schedule', p_schedule_id, 'fire', p_reason, p_is_tried_again);
    return true;
end $$;

-- Schedules whose retry time has come may fire. Rows that have not failed again for as long as they were set aside are
-- deleted, as are those of republished schedules, and timers and queue entries whose task is gone or waits otherwise.
create function release_quarantine(p_shard smallint) returns void language plpgsql as $$
declare
    t timestamptz := clock();
begin
    update schedule_state s set error = null
    from quarantine q
    where q.kind = 'schedule' and q.subject_id = s.schedule_id and q.retry_at <= t and s.shard = p_shard
        and s.error is not null;
    delete from quarantine q
    where q.retry_at + greatest(q.retry_at - q.failed_at, interval '1 minute') < t
       or (q.kind = 'schedule' and q.retry_at is null
           and not exists (select 1 from schedule_state s where s.schedule_id = q.subject_id and s.error is not null));
    delete from retry_queue l where l.shard = p_shard and not is_delayed_until(l.run_id, l.idx, l.map_index, l.due_at);
    delete from task_timer w
    where w.shard = p_shard and w.due_at <= t and (select true from run_status r where r.run_id = w.run_id) is null;
end $$;
