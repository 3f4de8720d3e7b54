-- Groups of tasks that run again as a whole when they fail. Why so: docs/decisions/0028-group-retries.md.
--
-- What comes after such a group hears of none of its tasks before all of them have ended (edge.out_of). Then either the group begins
-- again, and nobody has heard anything, or all of their ends are heard at once. `run_group.ended` counts, where tasks are settled.

-- Counts tasks that ended for their groups. Of groups that are over by that: the tasks whose ends are heard outside now, and the
-- groups that begin again instead. The caller holds the runs' locks.
create function leave_groups(p_ended ended[], out heard ended[], out again group_key[]) language plpgsql as $$
declare
    over group_key[];
begin
    heard := '{}';
    again := '{}';
    with counted as (
        insert into run_group as g (run_id, grp, ended)
        select e.run_id, s.grp, count(*)::int from unnest(p_ended) e
        cross join lateral (select x.grp from task_spec x where x.version_id = e.version_id and x.idx = e.idx offset 0) s
        where s.grp is not null
        group by e.run_id, s.grp order by e.run_id, s.grp
        on conflict (run_id, grp) do update set ended = g.ended + excluded.ended
        returning g.run_id, g.grp, g.ended, g.more
    )
    select array_agg(row(c.run_id, r.version_id, c.grp)::group_key) into over
    from counted c
    cross join lateral (select x.version_id from run_status x where x.run_id = c.run_id offset 0) r
    cross join lateral (select x.members from retry_group x where x.version_id = r.version_id and x.grp = c.grp offset 0) w
    where c.ended >= cardinality(w.members) + c.more;
    if over is null then
        return;
    end if;
    again := array(select o from unnest(over) o where begins_again(o));
    heard := array(
        select row(k.run_id, k.idx, k.map_index, k.version_id, k.state)::ended
        from unnest(over) o
        join retry_group w on w.version_id = o.version_id and w.grp = o.grp
        cross join unnest(w.members) m(idx)
        cross join lateral (select * from task x where x.run_id = o.run_id and x.idx = m.idx offset 0) k
        where o <> all(again));
end $$;

-- Whether a group that is over runs again: something in it failed, it failed by that, and it has tries left. Not where it only could
-- not start, and not in a run that somebody canceled or that took too long.
create function begins_again(p_group group_key) returns boolean language sql stable as $$
    select count(*) filter (where k.state = 'failed') > 0
       and count(*) filter (where s.decides_grp and k.state in ('failed', 'canceled', 'upstream_failed')) > 0
    from run_status r
    join dag_version v on v.version_id = r.version_id
    join run_group g on g.run_id = r.run_id and g.grp = p_group.grp
    join retry_group w on w.version_id = r.version_id and w.grp = p_group.grp and g.retried < w.retries
    cross join unnest(w.members) m(idx)
    cross join lateral (select x.state from task x where x.run_id = r.run_id and x.idx = m.idx offset 0) k
    cross join lateral (select x.decides_grp from task_spec x where x.version_id = r.version_id and x.idx = m.idx offset 0) s
    where r.run_id = p_group.run_id and r.state = 'running' and not r.cancel_requested
      and coalesce(r.started_at + make_interval(secs => v.run_timeout) > clock(), true)
$$;

-- Everything in these groups waits again, as after a clear, and the attempts become history. What a branch outside did not choose stays
-- skipped: the branch does not run again. The caller holds the runs' locks. Returns how many tasks can start.
create function retry_groups(p_groups group_key[]) returns int language plpgsql as $$
declare
    one group_key;
    what retry_group;
    everything ended[] := '{}';
    tries int;
begin
    foreach one in array p_groups loop
        select w.* into what from retry_group w where w.version_id = one.version_id and w.grp = one.grp;
        -- Nothing of it has been heard outside, so nothing there is taken back.
        update run_group g set retried = g.retried + 1, ended = 0 where g.run_id = one.run_id and g.grp = one.grp
        returning g.retried into tries;
        insert into journal (occurred_at, verb, actor, run_id, detail)
        values (clock(), 'retry', 'evertick', one.run_id, jsonb_build_object('group', what.name, 'retried', tries, 'failed', (
            select jsonb_agg(distinct s.name) from unnest(what.members) m(idx)
            join task k on k.run_id = one.run_id and k.idx = m.idx and k.state = 'failed'
            join task_spec s on s.version_id = one.version_id and s.idx = m.idx)));
        everything := everything || array(
            select row(k.run_id, k.idx, k.map_index, k.version_id, k.state)::ended
            from unnest(what.members) m(idx)
            cross join lateral (select * from task x where x.run_id = one.run_id and x.idx = m.idx offset 0) k
            where not (k.state = 'skipped' and k.started_at is null and coalesce(k.reason, '') like 'not chosen by %' and not exists (
                select 1 from unnest(what.members) u(idx) join task_spec s on s.version_id = one.version_id and s.idx = u.idx
                where k.reason = format('not chosen by %s', s.name))));
    end loop;
    return reopen(everything);   -- all at once: a group that is still to begin again must not be heard
end $$;

-- The groups of a run whose counters are not what its tasks say.
create function groups_that_drifted(p_run_id bigint) returns table (grp int, ended int, more int) language sql stable as $$
    select w.grp, c.ended, c.more
    from run_status r
    join retry_group w on w.version_id = r.version_id
    cross join lateral (
        select count(*) filter (where k.state in ('success', 'failed', 'skipped', 'canceled', 'upstream_failed'))::int as ended,
               (count(k.idx) - count(distinct k.idx))::int as more
        from unnest(w.members) m(idx)
        cross join lateral (select x.idx, x.state from task x where x.run_id = p_run_id and x.idx = m.idx offset 0) k) c
    left join run_group g on g.run_id = r.run_id and g.grp = w.grp
    where r.run_id = p_run_id and (coalesce(g.ended, 0), coalesce(g.more, 0)) <> (c.ended, c.more)
$$;

-- Counts a run's groups anew from its tasks. Returns how many had drifted.
create function recount_groups(p_run_id bigint) returns int language plpgsql as $$
declare
    drifted int;
begin
    insert into run_group as g (run_id, grp, ended, more)
    select p_run_id, d.grp, d.ended, d.more from groups_that_drifted(p_run_id) d
    on conflict (run_id, grp) do update set ended = excluded.ended, more = excluded.more;
    get diagnostics drifted = row_count;
    return drifted;
end $$;
