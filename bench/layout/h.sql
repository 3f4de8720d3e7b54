-- H: the task's own row is the truth and is found by its key alone, so that its updates can stay on their page (HOT);
-- ready, lease and timer are small companions that say in which order, for whom and when. Their rows are deleted by
-- place (ctid): joined by key, a plan made while the table is empty compares every row with every report once it has
-- grown.

create table task (
    run_id            bigint not null,
    idx               int not null,
    map_index         int not null default -1,
    version_id        int not null,
    state             task_state not null,
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
) with (fillfactor = 50);

create table ready (
    queue     text not null,
    rank      smallint not null,
    seq       bigint generated always as identity,
    run_id    bigint not null,
    idx       int not null,
    map_index int not null,
    primary key (queue, rank, seq)
) with (vacuum_truncate = off);

create table lease (
    session   bigint not null,
    run_id    bigint not null,
    idx       int not null,
    map_index int not null,
    epoch     int not null,
    primary key (session, run_id, idx, map_index)
) with (vacuum_truncate = off);

create table timer (
    shard     smallint not null,
    due_at    timestamptz not null,
    run_id    bigint not null,
    idx       int not null,
    map_index int not null,
    primary key (shard, due_at, run_id, idx, map_index)
) with (vacuum_truncate = off);

create view listing as select run_id, idx, map_index, state, epoch, attempt from task;

create function open_runs(p_version int, p_count int) returns void language plpgsql as $$
begin
    with opened as (
        insert into run_status (dag_id, version_id, state, open_tasks, started_at)
        select p_version, p_version, 'running', (select count(*) from task_spec s where s.version_id = p_version),
               clock_timestamp()
        from generate_series(1, p_count)
        returning run_id
    ), entering as (
        insert into task (run_id, idx, version_id, state)
        select o.run_id, s.idx, p_version, 'available'
        from opened o join task_spec s on s.version_id = p_version and s.upstream_total = 0
        on conflict (run_id, idx, map_index) do nothing
        returning run_id, idx, map_index, version_id
    )
    insert into ready (queue, rank, run_id, idx, map_index)
    select s.queue, s.rank, e.run_id, e.idx, e.map_index
    from entering e join task_spec s on s.version_id = e.version_id and s.idx = e.idx
    order by s.rank, e.run_id, e.idx, e.map_index;
end $$;

create function claim(p_session bigint, p_free int, p_from_seq bigint)
returns table (run_id bigint, idx int, map_index int, epoch int) language plpgsql as $$
#variable_conflict use_column
begin
    return query
    with picked as materialized (
        select r.ctid as place, r.run_id, r.idx, r.map_index from ready r
        where r.queue = 'default' and (r.rank, r.seq) >= (0, p_from_seq)
        order by r.rank, r.seq limit p_free for update skip locked
    ), taken as (
        delete from ready r where r.ctid = any(array(select p.place from picked p))
    ), moved as (
        update task k
        set state = 'running', epoch = k.epoch + 1, attempt = k.attempt + 1, session = p_session,
            started_at = clock_timestamp(), finished_at = null, reason = null, exit_code = null
        from picked p
        where k.run_id = p.run_id and k.idx = p.idx and k.map_index = p.map_index and k.state = 'available'
        returning k.run_id, k.idx, k.map_index, k.epoch
    ), leased as (
        insert into lease (session, run_id, idx, map_index, epoch)
        select p_session, m.run_id, m.idx, m.map_index, m.epoch from moved m
    )
    select m.run_id, m.idx, m.map_index, m.epoch from moved m;
end $$;

create function finish(p_session bigint, p_reports jsonb) returns void language plpgsql as $$
declare
    ended_now ended[];
    t timestamptz := clock_timestamp();
begin
    perform lock_runs(p_reports);
    with report as materialized (
        select * from read_reports(p_reports)
    ), freed as (
        delete from lease l where l.ctid = any(array(
            select h.place from report x cross join lateral (
                select l.ctid as place from lease l
                where l.session = p_session and l.run_id = x.r and l.idx = x.i and l.map_index = x.m and l.epoch = x.e
                offset 0) h))
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
    ), timed as (
        insert into timer (shard, due_at, run_id, idx, map_index)
        select 0, t, m.run_id, m.idx, m.map_index from moved m where m.state = 'pending'
        on conflict do nothing
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
            insert into task as k (run_id, idx, version_id, state, finished_at, n_success, n_failed, n_upstream_failed,
                                   n_skipped, n_setup_success, n_setup_skipped)
            select h.run_id, h.dst, h.version_id, n.state, case when n.state = 'upstream_failed' then t end,
                   h.success, h.failed, 0, 0, 0, 0
            from hit h join task_spec s on s.version_id = h.version_id and s.idx = h.dst
            cross join lateral (select decide(s.upstream_total, h.success, h.failed) as state) n
            order by h.run_id, h.dst
            on conflict (run_id, idx, map_index) do update set
                n_success = k.n_success + excluded.n_success,
                n_failed = k.n_failed + excluded.n_failed,
                (state, finished_at) = (
                    select n.state, case when n.state = 'upstream_failed' then t end
                    from task_spec s
                    cross join lateral (select decide(s.upstream_total, k.n_success + excluded.n_success,
                                                      k.n_failed + excluded.n_failed) as state) n
                    where s.version_id = k.version_id and s.idx = k.idx)
            where k.state = 'waiting'
            returning k.run_id, k.idx, k.map_index, k.version_id, k.state
        ), offered as (
            insert into ready (queue, rank, run_id, idx, map_index)
            select s.queue, s.rank, c.run_id, c.idx, c.map_index
            from counted c join task_spec s on s.version_id = c.version_id and s.idx = c.idx
            where c.state = 'available'
            order by s.rank, c.run_id, c.idx, c.map_index
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
    with come as (
        delete from timer w where w.shard = 0 and w.due_at <= clock_timestamp()
        returning w.run_id, w.idx, w.map_index, w.due_at
    ), moved as (
        update task k set state = 'available', not_before = null
        from come c
        where k.run_id = c.run_id and k.idx = c.idx and k.map_index = c.map_index
          and k.state = 'pending' and k.not_before = c.due_at
        returning k.run_id, k.idx, k.map_index, k.version_id
    )
    insert into ready (queue, rank, run_id, idx, map_index)
    select s.queue, s.rank, m.run_id, m.idx, m.map_index
    from moved m join task_spec s on s.version_id = m.version_id and s.idx = m.idx
    order by s.rank, m.run_id, m.idx, m.map_index;
    get diagnostics promoted = row_count;
    return promoted;
end $$;

-- Release admissions: the first p_count queued tasks go back behind their gate.
create function park(p_count int) returns bigint[] language plpgsql as $$
declare
    parked bigint[];
begin
    with picked as materialized (
        select r.ctid as place, r.run_id, r.idx, r.map_index from ready r where r.queue = 'default'
        order by r.rank, r.seq limit p_count for update skip locked
    ), taken as (
        delete from ready r where r.ctid = any(array(select p.place from picked p))
    ), moved as (
        update task k set state = 'pending' from picked p
        where k.run_id = p.run_id and k.idx = p.idx and k.map_index = p.map_index and k.state = 'available'
        returning k.run_id
    )
    select array_agg(run_id) into parked from moved;
    return parked;
end $$;

create function admit(p_run_ids bigint[]) returns void language plpgsql as $$
begin
    with moved as (
        update task k set state = 'available' from unnest(p_run_ids) p(run_id)
        where k.run_id = p.run_id and k.state = 'pending' and k.not_before is null
        returning k.run_id, k.idx, k.map_index, k.version_id
    )
    insert into ready (queue, rank, run_id, idx, map_index)
    select s.queue, s.rank, m.run_id, m.idx, m.map_index
    from moved m join task_spec s on s.version_id = m.version_id and s.idx = m.idx
    order by s.rank, m.run_id, m.idx, m.map_index;
end $$;

create function low_water() returns bigint language sql as $$
    select coalesce(min(seq), 0) from ready where queue = 'default' and rank = 0
$$;
