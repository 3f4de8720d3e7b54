-- Routing, specialised runners and fairness between priorities.

-- The rules changed and the code did not: from now on the version's tasks go where the rules say. What is in line already
-- stays there. Returns how many tasks were routed anew.
create function reroute(p_dag_id int, p_version_id int, p_tasks jsonb, p_actor text) returns int language plpgsql as $$
declare
    moved jsonb;
begin
    with changed as (
        update task_spec s set queue = x.queue
        from jsonb_to_recordset(p_tasks) as x(idx int, queue text), task_spec o
        where s.version_id = p_version_id and s.idx = x.idx and s.queue <> x.queue
          and o.version_id = s.version_id and o.idx = s.idx
        returning s.name, o.queue as old, s.queue as new
    )
    select jsonb_object_agg(c.name, jsonb_build_array(c.old, c.new)) into moved from changed c;
    if moved is null then
        return 0;
    end if;
    insert into journal (occurred_at, verb, actor, dag_id, detail)
    values (clock(), 'route', p_actor, p_dag_id, jsonb_build_object('version_id', p_version_id, 'tasks', moved));
    return (select count(*) from jsonb_object_keys(moved));
end $$;

-- Since when a task is in line, for whoever asks how long it waits.
alter table ready add column offered_at timestamptz not null default clock();

-- The patterns of a runner that serves only some tasks of its queues; none is all of them.
alter table runner add column match text[] not null default '{}';

-- A pattern on names as a regular expression on addresses. Segments end with '::', so that each stands for itself. The twin of
-- domain/patterns.py, which says what patterns mean; a test compares both.
create function pattern_regex(p_pattern text) returns text language sql immutable as $$
    select '^' || string_agg(case x.segment when '**' then '([^:]+::)*'
                                  else replace(replace(x.segment, '.', '\.'), '*', '[^:]*') || '::' end, '' order by x.place) || '$'
    from unnest(string_to_array(case when strpos(p_pattern, '::') = 0 and p_pattern <> '**' then '**::' || p_pattern else p_pattern end,
                                '::')) with ordinality as x(segment, place)
$$;

-- The full name of a task, for those regular expressions.
create function address_of(p_version_id int, p_idx int) returns text language sql stable as $$
    select d.name || '::' || replace(s.name, '.', '::') || '::'
    from task_spec s join dag_version v on v.version_id = s.version_id join dag d on d.dag_id = v.dag_id
    where s.version_id = p_version_id and s.idx = p_idx
$$;

-- Whether a runner with these patterns takes a task of its queues.
create function takes(p_match text[], p_version_id int, p_idx int) returns boolean language plpgsql stable as $$
begin
    return p_match = '{}' or exists (select 1 from unnest(p_match) m where address_of(p_version_id, p_idx) ~ pattern_regex(m));
end $$;

-- Claims these very rows of the line, as far as they are still there and nobody has them, in the order in which they are
-- named. p_places: 10 x (place of the queue in p_queues, from 0) + rank. The guards are those of claim.
create function claim_rows(p_session bigint, p_queues text[], p_places int[], p_seqs bigint[]) returns setof step_row
language plpgsql as $$
declare
    t timestamptz := clock();
begin
    perform 1 from runner where session = p_session and gone_at is null and request is null;
    if not found then
        return;
    end if;
    return query
    with picked as materialized (
        select w.turn, w.place, r.spot, r.seq, r.run_id, r.idx, r.map_index
        from unnest(p_places, p_seqs) with ordinality w(place, seq, turn)
        cross join lateral (
            select q.ctid as spot, q.seq, q.run_id, q.idx, q.map_index from ready q
            where q.queue = p_queues[w.place / 10 + 1] and q.rank = (w.place % 10)::smallint and q.seq = w.seq
            for update skip locked) r
    ), taken as (
        delete from ready r where r.ctid = any(array(select p.spot from picked p))
    ), moved as (
        update task k
        set state = 'running', epoch = k.epoch + 1, attempt = k.attempt + 1, session = p_session,
            started_at = t, finished_at = null, reason = null, exit_code = null
        from picked p
        where k.run_id = p.run_id and k.idx = p.idx and k.map_index = p.map_index and k.state = 'available'
        returning k.run_id, k.idx, k.map_index, k.epoch, k.attempt, k.version_id, p.turn, p.place, p.seq
    ), leased as (
        insert into lease (session, run_id, idx, map_index, epoch)
        select p_session, m.run_id, m.idx, m.map_index, m.epoch from moved m
    )
    select 'claim', m.run_id, m.idx, m.map_index, m.epoch, m.attempt::int, m.version_id, r.fire_at, r.params::text,
           case when m.map_index >= 0 then inputs_of_instance(m.run_id, m.version_id, m.idx, m.map_index) else
           (select jsonb_object_agg(s.name, case when s.is_mapped then results_of(m.run_id, i.src) else v.value end)::text
            from task_input i
            join task_spec s on s.version_id = i.version_id and s.idx = i.src
            left join result v on v.run_id = m.run_id and v.idx = i.src and v.map_index = -1
            where i.version_id = m.version_id and i.idx = m.idx) end, m.place, m.seq
    from moved m join run r on r.run_id = m.run_id
    order by m.turn;
end $$;

-- The heads of lines that have waited longer than p_aging seconds for each level between them and the line that strict order
-- serves next; the most overdue first. One look-up for each rank of each queue, however long the lines are. The twin of
-- domain/fairness.py, which says more; a test compares both. plpgsql, because it keeps the plan.
create function overdue(p_queues text[], p_low bigint[], p_aging double precision, p_most int)
returns table (place int, seq bigint) language plpgsql as $$
#variable_conflict use_column
declare
    t timestamptz := clock();
begin
    return query
    with head as materialized (
        select 10 * (n.n - 1) + k.rank as place, n.n, k.rank, h.seq,
               extract(epoch from t - h.offered_at)::double precision as waited
        from generate_subscripts(p_queues, 1) n(n) cross join generate_series(0, 9) k(rank)
        cross join lateral (
            select r.seq, r.offered_at from ready r
            where r.queue = p_queues[n.n] and r.rank = k.rank
              and r.seq >= coalesce(p_low[10 * (n.n - 1) + k.rank + 1], 0)
            order by r.seq limit 1) h
    ), served_next as (
        select h.place, h.n, h.rank from head h order by h.place limit 1
    )
    select h.place, h.seq
    from head h cross join served_next f
    cross join lateral (select p_aging * case when h.n = f.n then h.rank - f.rank
                                              else greatest(1, h.rank - f.rank) end as allowed) a
    where h.place <> f.place and h.waited > a.allowed
    order by h.waited - a.allowed desc, h.place limit p_most;
end $$;

-- claim, with up to half of the free slots, one at least, for those that waited too long.
create function claim_fairly(p_session bigint, p_queues text[], p_free int, p_low bigint[], p_aging double precision)
returns setof step_row language plpgsql as $$
declare
    places int[];
    seqs bigint[];
    got int := 0;
begin
    select array_agg(o.place), array_agg(o.seq) into places, seqs
    from overdue(p_queues, p_low, p_aging, (p_free + 1) / 2) o;
    if places is not null then
        return query select * from claim_rows(p_session, p_queues, places, seqs);
        get diagnostics got = row_count;
    end if;
    if p_free > got then
        return query select * from claim(p_session, p_queues, p_free - got, p_low);
    end if;
end $$;
