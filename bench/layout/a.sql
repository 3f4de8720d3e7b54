-- A: one table for everything; the state decides what is in which index, as in River and Oban. The indexes are
-- partial, which is the shape's best form: only available rows are in the claim index, only timed ones in the timer
-- index. There is none by owner (River has none either): it tempted the planner into reading all of a session's rows
-- for each one that it ends.

create sequence line;

create table task (
    run_id            bigint not null,
    idx               int not null,
    map_index         int not null default -1,
    version_id        int not null,
    state             task_state not null,
    queue             text not null,
    rank              smallint not null,
    seq               bigint,
    epoch             int not null default 0,
    attempt           smallint not null default 0,
    losses            smallint not null default 0,
    session           bigint,
    not_before        timestamptz,
    started_at        timestamptz,
    finished_at       timestamptz,
    n_success         int,
    n_failed          int,
    n_upstream_failed int,
    n_skipped         int,
    n_setup_success   int,
    n_setup_skipped   int,
    exit_code         int,
    reason            text,
    primary key (run_id, idx, map_index),
    check (state <> 'running' or (session is not null and epoch > 0 and started_at is not null)),
    check (not_before is null or state = 'pending'),
    check (finished_at is not null or state not in ('success', 'failed', 'skipped', 'canceled', 'upstream_failed'))
) with (vacuum_truncate = off);
create index task_line on task (queue, rank, seq) where state = 'available';
create index task_timer on task (not_before) where state = 'pending' and not_before is not null;

create view listing as select run_id, idx, map_index, state, epoch, attempt from task;

create function open_runs(p_version int, p_count int) returns void language plpgsql as $$
begin
    with opened as (
        insert into run_status (dag_id, version_id, state, open_tasks, started_at)
        select p_version, p_version, 'running', (select count(*) from task_spec s where s.version_id = p_version),
               clock_timestamp()
        from generate_series(1, p_count)
        returning run_id
    )
    insert into task (run_id, idx, version_id, state, queue, rank, seq)
    select o.run_id, s.idx, p_version, 'available', s.queue, s.rank, nextval('line')
    from opened o join task_spec s on s.version_id = p_version and s.upstream_total = 0
    on conflict (run_id, idx, map_index) do nothing;
end $$;

create function claim(p_session bigint, p_free int, p_from_seq bigint)
returns table (run_id bigint, idx int, map_index int, epoch int) language plpgsql as $$
#variable_conflict use_column
begin
    return query
    with picked as materialized (
        select r.run_id, r.idx, r.map_index from task r
        where r.state = 'available' and r.queue = 'default' and (r.rank, r.seq) >= (0, p_from_seq)
        order by r.rank, r.seq limit p_free for update skip locked
    )
    update task k
    set state = 'running', epoch = k.epoch + 1, attempt = k.attempt + 1, session = p_session, seq = null,
        started_at = clock_timestamp(), finished_at = null, reason = null, exit_code = null
    from picked p
    -- no look at the state again: it is locked, and naming it sends the planner through the claim index once more
    where k.run_id = p.run_id and k.idx = p.idx and k.map_index = p.map_index
    returning k.run_id, k.idx, k.map_index, k.epoch;
end $$;

create function finish(p_session bigint, p_reports jsonb) returns void language plpgsql as $$
declare
    ended_now ended[];
    t timestamptz := clock_timestamp();
begin
    perform lock_runs(p_reports);
    with report as materialized (
        select * from read_reports(p_reports)
    ), moved as (
        update task k
        set state = x.state,
            not_before = case when x.state = 'pending' then t end,
            finished_at = case when x.state <> 'pending' then t end
        from report x
        where k.run_id = x.r and k.idx = x.i and k.map_index = x.m
          and k.state = 'running' and k.epoch = x.e and k.session = p_session
        returning k.run_id, k.idx, k.map_index, k.version_id, k.state, k.epoch, k.attempt, k.started_at
    ), past as (
        insert into attempt (run_id, idx, map_index, epoch, attempt, session, outcome, started_at, finished_at)
        select m.run_id, m.idx, m.map_index, m.epoch, m.attempt, p_session, 'failed', m.started_at, t
        from moved m where m.state = 'pending'
        on conflict (run_id, idx, map_index, epoch) do nothing
    )
    select array_agg(row(m.run_id, m.idx, m.map_index, m.version_id, m.state)::ended) filter (where m.state = 'success')
    into ended_now from moved m;
    perform settle(ended_now);
end $$;

create function settle(p_ended ended[]) returns void language plpgsql as $$
declare
    frontier ended[] := p_ended;
    everything ended[] := p_ended;
    t timestamptz := clock_timestamp();
begin
    if p_ended is null then
        return;
    end if;
    loop
        with hit as (
            select e.run_id, g.dst, e.version_id, count(*) filter (where e.state = 'success')::int as success,
                   count(*) filter (where e.state <> 'success')::int as failed
            from unnest(frontier) e join edge g on g.version_id = e.version_id and g.src = e.idx
            group by e.run_id, g.dst, e.version_id
        ), counted as (
            insert into task as k (run_id, idx, version_id, state, queue, rank, seq, finished_at, n_success, n_failed,
                                   n_upstream_failed, n_skipped, n_setup_success, n_setup_skipped)
            select h.run_id, h.dst, h.version_id, n.state, s.queue, s.rank,
                   case when n.state = 'available' then nextval('line') end,
                   case when n.state = 'upstream_failed' then t end, h.success, h.failed, 0, 0, 0, 0
            from hit h join task_spec s on s.version_id = h.version_id and s.idx = h.dst
            cross join lateral (select decide(s.upstream_total, h.success, h.failed) as state) n
            order by h.run_id, h.dst
            on conflict (run_id, idx, map_index) do update set
                n_success = k.n_success + excluded.n_success,
                n_failed = k.n_failed + excluded.n_failed,
                (state, finished_at, seq) = (
                    select n.state, case when n.state = 'upstream_failed' then t end,
                           case when n.state = 'available' then nextval('line') end
                    from task_spec s
                    cross join lateral (select decide(s.upstream_total, k.n_success + excluded.n_success,
                                                      k.n_failed + excluded.n_failed) as state) n
                    where s.version_id = k.version_id and s.idx = k.idx)
            where k.state = 'waiting'
            returning k.run_id, k.idx, k.map_index, k.version_id, k.state
        )
        select array_agg(row(run_id, idx, map_index, version_id, state)::ended) filter (where state = 'upstream_failed')
        into frontier from counted;
        exit when frontier is null;
        everything := everything || frontier;
    end loop;
    perform close_runs(everything);
end $$;

create function promote() returns bigint language plpgsql as $$
declare
    promoted bigint;
begin
    update task k set state = 'available', not_before = null, seq = nextval('line')
    where k.state = 'pending' and k.not_before is not null and k.not_before <= clock_timestamp();
    get diagnostics promoted = row_count;
    return promoted;
end $$;

-- Release admissions: the first p_count queued tasks go back behind their gate.
create function park(p_count int) returns bigint[] language plpgsql as $$
declare
    parked bigint[];
begin
    with picked as materialized (
        select r.run_id, r.idx, r.map_index from task r where r.state = 'available' and r.queue = 'default'
        order by r.rank, r.seq limit p_count for update skip locked
    ), moved as (
        update task k set state = 'pending', seq = null from picked p
        where k.run_id = p.run_id and k.idx = p.idx and k.map_index = p.map_index
        returning k.run_id
    )
    select array_agg(run_id) into parked from moved;
    return parked;
end $$;

create function admit(p_run_ids bigint[]) returns void language plpgsql as $$
begin
    update task k set state = 'available', seq = nextval('line') from unnest(p_run_ids) p(run_id)
    where k.run_id = p.run_id and k.state = 'pending' and k.not_before is null;
end $$;

create function low_water() returns bigint language sql as $$
    select coalesce(min(seq), 0) from task where state = 'available' and queue = 'default' and rank = 0
$$;
