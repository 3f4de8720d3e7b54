-- Runners that are gone: their attempts are ended as lost, so that the tasks run again or fail visibly (V5).

-- A runner that is provably gone: what it held is ended as lost, all at once. Where the database refuses that, one by
-- one: an attempt that cannot be moved keeps no other (A13); it is set aside and found again later.
create function mark_runner_dead(p_session bigint, p_reason text, p_infra_retries int)
returns int language plpgsql as $$
declare
    fx effects;
    reports jsonb;
    report jsonb;
    moved int := 0;
begin
    update runner set ended_at = coalesce(ended_at, clock()), end_reason = coalesce(end_reason, p_reason)
    where session = p_session;
    if exists (select 1 from task_trigger w where w.session = p_session) then
        perform release_triggers(p_session);
    end if;
    select jsonb_agg(jsonb_build_object('r', l.run_id, 'i', l.idx, 'm', l.map_index, 'e', l.epoch, 'kind', 'lost',
                                        'reason', p_reason) order by l.run_id, l.idx, l.map_index)
    into reports from lease l where l.session = p_session and not is_quarantined('run', l.run_id);
    if reports is null then
        return 0;
    end if;
    begin
        fx := (finish_attempts(p_session, reports, p_infra_retries, null, fx)).fx;
        moved := jsonb_array_length(reports);
    exception when others then
        if not is_poison(sqlstate) then
            raise;
        end if;
        for report in select x from jsonb_array_elements(reports) x loop
            begin
                fx := (finish_attempts(p_session, jsonb_build_array(report), p_infra_retries, null, fx)).fx;
                moved := moved + 1;
            exception when others then
                if not is_poison(sqlstate) then
                    raise;
                end if;
                perform quarantine_row('run', (report->>'r')::bigint, 'bury', sqlerrm, true);
            end;
        end loop;
    end;
    fx := apply_effects(fx);
    return moved;
end $$;

-- Declares a runner dead that has been silent for too long, or that has ended and still holds something. Returns how
-- many attempts were taken from it (null when it lives), and how many could not be moved.
create function reap_runner(p_shard smallint, p_epoch bigint, p_session bigint, p_lost_after double precision,
                            p_infra_retries int, out reaped int, out refused int) language plpgsql as $$
declare
    why text;
begin
    perform fence(p_shard, p_epoch);
    refused := 0;
    select case when r.ended_at is not null then 'agent_lost: its runner is gone'
                when r.heartbeat_seq = r.observed_seq and r.silent_seconds > greatest(p_lost_after,
                    r.lost_after_seconds)
                     and not has_claimed_since(p_session, greatest(p_lost_after, r.lost_after_seconds))
                then format('agent_lost: no heartbeat for %s s', round(greatest(p_lost_after, r.lost_after_seconds)))
                    end
    into why from runner r where r.session = p_session for no key update;
    if not found then
        why := 'agent_lost: its runner is unknown';
    end if;
    if why is null then
        return;
    end if;
    reaped := mark_runner_dead(p_session, why, p_infra_retries);
    select count(*) into refused from lease l where l.session = p_session;
end $$;

-- Owners to take over from: ended, unknown, or silent for a while. Steps from owner to owner through the index.
create function dead_dispatch_owners(p_silent_seconds double precision) returns setof bigint language sql stable as $$
    with recursive holder as (
        (select owner from dispatch order by owner limit 1)
        union all
        select (select d.owner from dispatch d where d.owner > h.owner order by d.owner limit 1)
        from holder h where h.owner is not null
    )
    select h.owner from holder h left join runner r on r.session = h.owner
    where h.owner is not null and (r.session is null or r.ended_at is not null or r.silent_seconds > p_silent_seconds)
$$;

-- A runner takes over the attempts of such an owner: of its executor and its queues, because these determine the place
-- (cluster, namespace). Of two runners that see the same attempt one gets it, by compare-and-set. Submitting twice is
-- harmless, because an executor accepts a name once; so an unproven silence is enough. Slots do not limit it.
create function adopt_dispatches(p_session bigint, p_silent_seconds double precision, p_most int, out adopted int)
language plpgsql as $$
begin
    with orphan as materialized (
        select d.place from dead_dispatch_owners(p_silent_seconds) o(owner)
        cross join lateral (select x.ctid as place from dispatch x
                            cross join lateral (select r.executor, r.queues from runner r
                                                where r.session = p_session and r.ended_at is null offset 0) me
                            where x.owner = o.owner and x.executor = me.executor and x.queue = any(me.queues)
                            limit p_most for update of x skip locked) d
        where o.owner <> p_session
    )
    update dispatch d set owner = p_session where d.ctid = any(array(select o.place from orphan o limit p_most));
    get diagnostics adopted = row_count;
end $$;
