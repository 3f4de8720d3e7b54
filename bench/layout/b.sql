-- B: one table per state, a move is a delete and an insert; waiting has no row, only its counters (from two upstreams
-- on). What a task carries through its life (epoch, attempt, losses) travels with it from table to table. Rows are
-- deleted by place (ctid): joined by key, a plan made while the table is empty compares every row with every report
-- once it has grown.

create table ready (
    queue      text not null,
    rank       smallint not null,
    seq        bigint generated always as identity,
    run_id     bigint not null,
    idx        int not null,
    map_index  int not null,
    version_id int not null,
    epoch      int not null,
    attempt    smallint not null,
    losses     smallint not null,
    primary key (queue, rank, seq)
) with (vacuum_truncate = off);

create table running (
    run_id     bigint not null,
    idx        int not null,
    map_index  int not null,
    version_id int not null,
    epoch      int not null,
    attempt    smallint not null,
    losses     smallint not null,
    session    bigint not null,
    started_at timestamptz not null,
    primary key (run_id, idx, map_index)
) with (vacuum_truncate = off);

create table done (
    run_id      bigint not null,
    idx         int not null,
    map_index   int not null,
    version_id  int not null,
    state       task_state not null,
    epoch       int not null,
    attempt     smallint not null,
    losses      smallint not null,
    session     bigint,
    started_at  timestamptz,
    finished_at timestamptz not null,
    exit_code   int,
    reason      text,
    primary key (run_id, idx, map_index)
);

create table parked (
    run_id     bigint not null,
    idx        int not null,
    map_index  int not null,
    version_id int not null,
    epoch      int not null,
    attempt    smallint not null,
    losses     smallint not null,
    primary key (run_id, idx, map_index)
) with (vacuum_truncate = off);

create table timer (
    shard      smallint not null,
    due_at     timestamptz not null,
    run_id     bigint not null,
    idx        int not null,
    map_index  int not null,
    version_id int not null,
    epoch      int not null,
    attempt    smallint not null,
    losses     smallint not null,
    primary key (shard, due_at, run_id, idx, map_index)
) with (vacuum_truncate = off);

create table dep (
    run_id            bigint not null,
    idx               int not null,
    map_index         int not null default -1,
    version_id        int not null,
    n_success         int not null,
    n_failed          int not null,
    n_upstream_failed int not null,
    n_skipped         int not null,
    n_setup_success   int not null,
    n_setup_skipped   int not null,
    is_decided        boolean not null,
    primary key (run_id, idx, map_index)
) with (fillfactor = 50);

create view listing as
select run_id, idx, map_index, 'available'::task_state as state, epoch, attempt from ready
union all select run_id, idx, map_index, 'running', epoch, attempt from running
union all select run_id, idx, map_index, 'pending', epoch, attempt from parked
union all select run_id, idx, map_index, 'pending', epoch, attempt from timer
union all select run_id, idx, map_index, state, epoch, attempt from done;

create function open_runs(p_version int, p_count int) returns void language plpgsql as $$
begin
    with opened as (
        insert into run_status (dag_id, version_id, state, open_tasks, started_at)
        select p_version, p_version, 'running', (select count(*) from task_spec s where s.version_id = p_version),
               clock_timestamp()
        from generate_series(1, p_count)
        returning run_id
    )
    insert into ready (queue, rank, run_id, idx, map_index, version_id, epoch, attempt, losses)
    select s.queue, s.rank, o.run_id, s.idx, -1, p_version, 0, 0, 0
    from opened o join task_spec s on s.version_id = p_version and s.upstream_total = 0
    order by s.rank, o.run_id, s.idx;
end $$;

create function claim(p_session bigint, p_free int, p_from_seq bigint)
returns table (run_id bigint, idx int, map_index int, epoch int) language plpgsql as $$
#variable_conflict use_column
begin
    return query
    with picked as materialized (
        select r.ctid as place from ready r
        where r.queue = 'default' and (r.rank, r.seq) >= (0, p_from_seq)
        order by r.rank, r.seq limit p_free for update skip locked
    ), taken as (
        delete from ready r where r.ctid = any(array(select p.place from picked p))
        returning r.run_id, r.idx, r.map_index, r.version_id, r.epoch, r.attempt, r.losses
    )
    insert into running as k (run_id, idx, map_index, version_id, epoch, attempt, losses, session, started_at)
    select t.run_id, t.idx, t.map_index, t.version_id, t.epoch + 1, t.attempt + 1, t.losses, p_session,
           clock_timestamp()
    from taken t
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
    ), taken as (
        delete from running k where k.ctid = any(array(
            select h.place from report x cross join lateral (
                select k.ctid as place from running k
                where k.run_id = x.r and k.idx = x.i and k.map_index = x.m and k.epoch = x.e and k.session = p_session
                offset 0) h))
        returning k.*
    ), freed as materialized (
        -- a hashed lookup; a join would compare each row with each report
        select t.*, case when (t.run_id, t.idx, t.map_index) in (
                             select x.r, x.i, x.m from report x where x.state = 'pending')
                         then 'pending' else 'success' end::task_state as state
        from taken t
    ), past as (
        insert into attempt (run_id, idx, map_index, epoch, attempt, session, outcome, started_at, finished_at)
        select f.run_id, f.idx, f.map_index, f.epoch, f.attempt, p_session, 'failed', f.started_at, t
        from freed f where f.state = 'pending'
        on conflict (run_id, idx, map_index, epoch) do nothing
    ), timed as (
        insert into timer (shard, due_at, run_id, idx, map_index, version_id, epoch, attempt, losses)
        select 0, t, f.run_id, f.idx, f.map_index, f.version_id, f.epoch, f.attempt, f.losses
        from freed f where f.state = 'pending'
        on conflict do nothing
    ), moved as (
        insert into done (run_id, idx, map_index, version_id, state, epoch, attempt, losses, session, started_at,
                          finished_at)
        select f.run_id, f.idx, f.map_index, f.version_id, f.state, f.epoch, f.attempt, f.losses, f.session,
               f.started_at, t
        from freed f where f.state <> 'pending'
        returning run_id, idx, map_index, version_id, state
    )
    select array_agg(row(m.run_id, m.idx, m.map_index, m.version_id, m.state)::ended) into ended_now from moved m;
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
        with hit as materialized (
            select e.run_id, g.dst, e.version_id, count(*) filter (where e.state = 'success')::int as success,
                   count(*) filter (where e.state <> 'success')::int as failed
            from unnest(frontier) e join edge g on g.version_id = e.version_id and g.src = e.idx
            group by e.run_id, g.dst, e.version_id
        ), counted as (
            insert into dep as k (run_id, idx, version_id, n_success, n_failed, n_upstream_failed, n_skipped,
                                  n_setup_success, n_setup_skipped, is_decided)
            select h.run_id, h.dst, h.version_id, h.success, h.failed, 0, 0, 0, 0,
                   decide(s.upstream_total, h.success, h.failed) <> 'waiting'
            from hit h join task_spec s on s.version_id = h.version_id and s.idx = h.dst and s.upstream_total > 1
            order by h.run_id, h.dst
            on conflict (run_id, idx, map_index) do update set
                n_success = k.n_success + excluded.n_success,
                n_failed = k.n_failed + excluded.n_failed,
                is_decided = (select decide(s.upstream_total, k.n_success + excluded.n_success,
                                            k.n_failed + excluded.n_failed) <> 'waiting'
                              from task_spec s where s.version_id = k.version_id and s.idx = k.idx)
            where not k.is_decided
            returning k.run_id, k.idx, k.version_id, k.n_failed, k.is_decided
        ), decided as (
            select c.run_id, c.idx, c.version_id, decide(0, 0, c.n_failed) as state from counted c where c.is_decided
            union all
            select h.run_id, h.dst, h.version_id, decide(1, h.success, h.failed)
            from hit h join task_spec s on s.version_id = h.version_id and s.idx = h.dst and s.upstream_total = 1
        ), offered as (
            insert into ready (queue, rank, run_id, idx, map_index, version_id, epoch, attempt, losses)
            select s.queue, s.rank, d.run_id, d.idx, -1, d.version_id, 0, 0, 0
            from decided d join task_spec s on s.version_id = d.version_id and s.idx = d.idx
            where d.state = 'available'
            order by s.rank, d.run_id, d.idx
        ), blocked as (
            insert into done (run_id, idx, map_index, version_id, state, epoch, attempt, losses, finished_at)
            select d.run_id, d.idx, -1, d.version_id, d.state, 0, 0, 0, t
            from decided d where d.state = 'upstream_failed'
            on conflict (run_id, idx, map_index) do nothing
            returning run_id, idx, map_index, version_id, state
        )
        select array_agg(row(run_id, idx, map_index, version_id, state)::ended) into frontier from blocked;
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
        delete from timer w where w.shard = 0 and w.due_at <= clock_timestamp() returning w.*
    )
    insert into ready (queue, rank, run_id, idx, map_index, version_id, epoch, attempt, losses)
    select s.queue, s.rank, c.run_id, c.idx, c.map_index, c.version_id, c.epoch, c.attempt, c.losses
    from come c join task_spec s on s.version_id = c.version_id and s.idx = c.idx
    order by s.rank, c.run_id, c.idx;
    get diagnostics promoted = row_count;
    return promoted;
end $$;

-- Release admissions: the first p_count queued tasks go back behind their gate.
create function park(p_count int) returns bigint[] language plpgsql as $$
declare
    parked_runs bigint[];
begin
    with picked as materialized (
        select r.ctid as place from ready r where r.queue = 'default'
        order by r.rank, r.seq limit p_count for update skip locked
    ), taken as (
        delete from ready r where r.ctid = any(array(select p.place from picked p)) returning r.*
    ), moved as (
        insert into parked (run_id, idx, map_index, version_id, epoch, attempt, losses)
        select t.run_id, t.idx, t.map_index, t.version_id, t.epoch, t.attempt, t.losses from taken t
        returning run_id
    )
    select array_agg(run_id) into parked_runs from moved;
    return parked_runs;
end $$;

create function admit(p_run_ids bigint[]) returns void language plpgsql as $$
begin
    with taken as (
        delete from parked k using unnest(p_run_ids) p(run_id) where k.run_id = p.run_id returning k.*
    )
    insert into ready (queue, rank, run_id, idx, map_index, version_id, epoch, attempt, losses)
    select s.queue, s.rank, t.run_id, t.idx, t.map_index, t.version_id, t.epoch, t.attempt, t.losses
    from taken t join task_spec s on s.version_id = t.version_id and s.idx = t.idx
    order by s.rank, t.run_id, t.idx;
end $$;

create function low_water() returns bigint language sql as $$
    select coalesce(min(seq), 0) from ready where queue = 'default' and rank = 0
$$;
