-- Where a run stands, and the attempts that were superseded: the same in every layout, one copy for each.

create table run_status (
    run_id      bigint generated always as identity primary key,
    dag_id      int not null,
    version_id  int not null,
    state       run_state not null,
    open_tasks  int not null check (open_tasks >= 0),
    started_at  timestamptz not null,
    finished_at timestamptz
) with (fillfactor = 70);
create index run_active on run_status (dag_id, state, run_id) where state in ('queued', 'running');

create table attempt (
    run_id      bigint not null,
    idx         int not null,
    map_index   int not null,
    epoch       int not null,
    attempt     smallint not null,
    session     bigint not null,
    outcome     text not null,
    started_at  timestamptz not null,
    finished_at timestamptz not null,
    primary key (run_id, idx, map_index, epoch)
);

create function lock_runs(p_reports jsonb) returns void language plpgsql as $$
begin
    perform 1 from run_status s
    where s.run_id = any(array(select (x->>'r')::bigint from jsonb_array_elements(p_reports) x))
    order by s.run_id for no key update;
end $$;

create function close_runs(p_ended ended[]) returns void language plpgsql as $$
begin
    update run_status r
    set open_tasks = r.open_tasks - p.n,
        finished_at = case when r.open_tasks = p.n then clock_timestamp() end,
        state = case when r.open_tasks = p.n then 'success' else r.state end
    from (select e.run_id, count(*)::int as n from unnest(p_ended) e group by e.run_id) p
    where r.run_id = p.run_id and r.state = 'running';
end $$;

-- One round trip of a runner: what ended is recorded, what is free is claimed.
create function step(p_session bigint, p_reports jsonb, p_free int, p_from_seq bigint default 0)
returns table (run_id bigint, idx int, map_index int, epoch int) language plpgsql as $$
begin
    if p_reports is not null then
        perform finish(p_session, p_reports);
    end if;
    return query select c.run_id, c.idx, c.map_index, c.epoch from claim(p_session, p_free, p_from_seq) c;
end $$;
