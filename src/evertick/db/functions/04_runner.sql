-- What runners ask for, each in one round trip: claim, finish, extend. Each names the states that it leaves and, where
-- an attempt exists, its epoch and session. A report that does not match changes nothing and is returned to its caller.

-- The queues with available tasks. Steps from queue to queue through the index, however long they are.
create view ready_queue as
with recursive line as (
    (select r.queue from ready_task r order by r.queue limit 1)
    union all
    select (select r.queue from ready_task r where r.queue > l.queue order by r.queue limit 1)
      from line l where l.queue is not null
)
select queue from line where queue is not null;

-- What a session holds: running attempts, and triggers of deferred tasks.
create view held_attempt as
select session, run_id, idx, map_index, epoch from lease
union all
select session, run_id, idx, map_index, epoch from task_trigger where session is not null;

-- The same for one attempt, without the view: no decision depends on one.
create function holds_lease(p_session bigint, p_run_id bigint, p_idx int, p_map_index int, p_epoch int)
returns boolean language sql stable as $$
    select exists (select 1 from lease l where l.session = p_session and l.run_id = p_run_id and l.idx = p_idx
                     and l.map_index = p_map_index and l.epoch = p_epoch)
        or exists (select 1 from task_trigger w where w.session = p_session and w.run_id = p_run_id and w.idx = p_idx
                     and w.map_index = p_map_index and w.epoch = p_epoch)
$$;

-- Claims up to p_free available tasks of the queues. MATERIALIZED, because a plan that ran the locking subquery twice
-- would lock more than it takes. Rows are deleted by ctid, here and in finish: joined by key, a plan made while the
-- table was empty compares each with each (4 to 13 times slower with 3,000 queued tasks). p_low: where to begin (null:
-- at the head), ten ranks for each queue; it skips deleted rows that an old snapshot keeps from being vacuumed.
create function claim_tasks(p_session bigint, p_queues text[], p_free int, p_low bigint[])
returns setof exchange_row language plpgsql as $$
declare
    wanted int := p_free;
    got int;
    t timestamptz := clock();
begin
    perform 1 from runner where session = p_session and ended_at is null and request is null;
    if not found then
        return;
    end if;
    for n in 1 .. cardinality(p_queues) loop
        exit when wanted <= 0;
        return query with picked as materialized (
            select p.* from generate_series(0, 9) k(rank)
            cross join lateral (select r.ctid as place, r.rank, r.seq, r.run_id, r.idx, r.map_index from ready_task r
                                where r.queue = p_queues[n] and r.rank = k.rank
                                  and r.seq >= coalesce(p_low[10 * (n - 1) + k.rank + 1], 0)
                                order by r.seq limit wanted for update skip locked) p
            limit wanted
        ), taken as (
            delete from ready_task r where r.ctid = any(array(select p.place from picked p))
        ), moved as (
            update task k
            set state = 'running', epoch = k.epoch + 1, attempt = k.attempt + 1, session = p_session, started_at = t,
                finished_at = null, reason = null, exit_code = null
            from picked p
            where k.run_id = p.run_id and k.idx = p.idx and k.map_index = p.map_index and k.state = 'available'
            returning k.run_id, k.idx, k.map_index, k.epoch, k.attempt, k.version_id, p.rank, p.seq
        ), leased as (
            insert into lease (session, run_id, idx, map_index, epoch)
            select p_session, m.run_id, m.idx, m.map_index, m.epoch from moved m
        )
        select 'claim', m.run_id, m.idx, m.map_index, m.epoch, m.attempt::int, m.version_id,
               coalesce(r.fire_at, r.created_at), r.params::text,
               case when m.map_index >= 0
                    then inputs_of_instance(m.run_id, m.version_id, m.idx, m.map_index, m.attempt)
                    else (select jsonb_object_agg(s.name, case
                              when i.src = i.idx then run_of_attempt(m.run_id, m.idx, m.map_index, m.attempt)
                              when s.is_mapped then mapped_results(m.run_id, i.src) else v.value end)::text
                          from task_input i join task_spec s on s.version_id = i.version_id and s.idx = i.src
                          left join result v on v.run_id = m.run_id and v.idx = i.src and v.map_index = -1
                          where i.version_id = m.version_id and i.idx = m.idx) end, 10 * (n - 1) + m.rank, m.seq
        from moved m join run r on r.run_id = m.run_id order by m.rank, m.seq;
        get diagnostics got = row_count;
        wanted := wanted - got;
    end loop;
end $$;

-- The reports as rows. ROWS is far too low on purpose: with 100 the planner reads all of a table that is small when the
-- plan is made (6 ms of 13 at 10,000 tasks). Volatile: a stable function would be inlined and its estimate lost.
create function read_reports(p_reports jsonb) returns table (
    run_id bigint, idx int, map_index int, epoch int, kind text, reason text, result jsonb, exit_code int,
    retry_in double precision, no_retry boolean, log text, seq bigint, until bigint, start_in real, cpu real,
    mem bigint) rows 5
language sql volatile as $$
    select x.r, x.i, x.m, x.e, x.kind, x.reason, x.result, x.exit_code, x.retry_in, coalesce(x.no_retry, false), x.log,
           coalesce(x.seq, 0), coalesce(x.until, 0), x.start_in, x.cpu, x.mem
    from jsonb_to_recordset(p_reports) as x(r bigint, i int, m int, e int, kind text, reason text, result jsonb,
         exit_code int, retry_in double precision, no_retry boolean, log text, seq bigint, until bigint, start_in real,
         cpu real, mem bigint)
$$;

-- Records how attempts ended. p_reports: [{r, i, m, e, kind, reason, result, exit_code, retry_in, no_retry, log, seq,
-- until, start_in, cpu, mem}]. Returns the reports that were refused because the attempt is no longer the session's.
-- The same report twice is one event: the second is dropped. p_unchosen: tasks that a branch has skipped, which end
-- with it.
create function finish_attempts(p_session bigint, p_reports jsonb, p_infra_retries int, p_unchosen task_ref[],
                                fx effects) returns finish_result language plpgsql as $$
declare
    refused attempt_ref[];
    moved_now task_ref[];
    ended_now task_ref[];
    again task_ref[];
    cleared task_ref[];
    retried jsonb;
    polled jsonb;
    left_now task_ref[];
    t timestamptz := clock();
begin
    perform 1 from run_status s
    where s.run_id = any(array(select (x->>'r')::bigint from jsonb_array_elements(p_reports) x))
    order by s.run_id for no key update;
    with report as materialized (
        select * from read_reports(p_reports)
    ), decided as (
        select x.*, k.attempt, k.lost_attempts, k.started_at, k.request, k.version_id, s.is_gated,
               case when n.state = 'pending' and x.kind = 'lost'
                    then t + make_interval(secs => case k.lost_attempts when 0 then 0
                        else least(5 * 2 ^ (k.lost_attempts - 1), 300)
                                           end)
                    when n.state = 'pending' then t + make_interval(secs => greatest(coalesce(x.retry_in, 0), 0))
               end as not_before, n.state
        from report x
        join task k on k.run_id = x.run_id and k.idx = x.idx and k.map_index = x.map_index
        join task_spec s on s.version_id = k.version_id and s.idx = k.idx
        cross join lateral (select case
            when k.request = 'mark_success' then 'success'::task_state
            when k.request = 'mark_failed' then 'failed'
            when k.request = 'mark_skipped' then 'skipped'
            when x.kind = 'success' then 'success'
            when x.kind = 'skipped' then 'skipped'
            when k.request in ('cancel', 'clear') then 'canceled'
            when x.kind = 'deferred' then 'deferred'
            when x.kind = 'given_back' then 'pending'
            when x.kind = 'lost' then
                case when s.rerun_on_loss and k.lost_attempts < p_infra_retries then 'pending'::task_state
                    else 'failed' end
            when x.no_retry or k.attempt >= s.max_attempts then 'failed'
            else 'pending' end as state) n
    ), freed as (
        delete from lease l where l.ctid = any(array(
            select h.ctid from report x cross join lateral (
                select y.ctid from lease y
                where y.session = p_session and y.run_id = x.run_id and y.idx = x.idx and y.map_index = x.map_index
                  and y.epoch = x.epoch offset 0) h))
    ), moved as (
        update task k
        set state = d.state,
            -- a returned or lost attempt never uses the user's own retries
            attempt = case when d.kind in ('given_back', 'lost') and d.state = 'pending' then d.attempt - 1
                           -- the attempt that resumes is the same one
                           when d.state = 'deferred' and d.result ? 'trigger' then d.attempt - 1
                           when d.state = 'deferred' then 0   -- it went well: errors are counted from zero again
                           else d.attempt end,
            lost_attempts = case when d.kind = 'lost' then d.lost_attempts + 1 else d.lost_attempts end,
            session = case when d.kind in ('given_back', 'lost') then null else p_session end, request = null,
            not_before = case when d.not_before > t then d.not_before end, startup_seconds = d.start_in,
            cpu_seconds = d.cpu, peak_memory_bytes = d.mem,
            finished_at = case when d.state not in ('pending', 'deferred') then t end, exit_code = d.exit_code,
            reason = case when d.request is null or d.state = 'canceled' or d.kind in ('failed', 'timed_out', 'lost')
                          then d.reason end
        from decided d
        where k.run_id = d.run_id and k.idx = d.idx and k.map_index = d.map_index
          and k.state = 'running' and k.epoch = d.epoch and k.session = p_session
        returning k.run_id, k.idx, k.map_index, k.version_id, k.state, k.epoch, k.not_before, d.kind, d.reason,
                  d.result, d.request, d.exit_code, d.attempt, d.started_at, d.log, d.seq, d.until, d.is_gated,
                  k.admitted_at, k.queued_at, k.startup_seconds, k.cpu_seconds, k.peak_memory_bytes
    ), kept as (
        insert into result (run_id, idx, map_index, epoch, value)
        select m.run_id, m.idx, m.map_index, m.epoch, m.result from moved m
        where m.state = 'success' and m.result is not null
        on conflict (run_id, idx, map_index) do update set epoch = excluded.epoch, value = excluded.value
    ), logged as (
        insert into log_chunk (run_id, idx, map_index, epoch, seq, end_offset, content)
        select m.run_id, m.idx, m.map_index, m.epoch, m.seq, m.until, m.log from moved m where m.log is not null
        on conflict (run_id, idx, map_index, epoch, seq) do nothing
    )
    select array_agg(row(m.run_id, m.idx, m.map_index, m.version_id, m.state)::task_ref),
           array_agg(row(m.run_id, m.idx, m.map_index, m.version_id, m.state)::task_ref)
               filter (where m.state not in ('pending', 'deferred') and m.request is distinct from 'clear'),
           array_agg(row(m.run_id, m.idx, m.map_index, m.version_id, m.state)::task_ref)
               filter (where m.state = 'pending' and m.not_before is null),
           array_agg(row(m.run_id, m.idx, m.map_index, m.version_id, m.state)::task_ref) filter
               (where m.request = 'clear'),
           jsonb_agg(to_jsonb(m) - array['result', 'log']) filter (where m.state = 'pending'),
           array_agg(row(m.run_id, m.idx, m.map_index, m.version_id, m.state)::task_ref) filter (where m.is_gated),
           jsonb_agg(to_jsonb(m) - 'log') filter (where m.state = 'deferred')
    into moved_now, ended_now, again, cleared, retried, left_now, polled from moved m;
    if left_now is not null then
        fx := release_gates(left_now, fx);
    end if;
    if retried is not null then
        perform record_attempts(p_session, retried);
    end if;
    if polled is not null then
        perform record_deferrals(polled);
    end if;
    if coalesce(cardinality(moved_now), 0) < jsonb_array_length(p_reports) then
        select array_agg(row(x.run_id, x.idx, x.map_index, x.epoch)::attempt_ref) into refused
        from read_reports(p_reports) x
        where not exists (select 1 from unnest(moved_now) m
                          where m.run_id = x.run_id and m.idx = x.idx and m.map_index = x.map_index)
          and not exists (select 1 from task k where k.run_id = x.run_id and k.idx = x.idx and k.map_index = x.map_index
                          and k.epoch = x.epoch and k.session = p_session and k.state <> 'running');
        -- An attempt that ended with `commit_attempt` brings its last lines with the report that is dropped.
        insert into log_chunk (run_id, idx, map_index, epoch, seq, end_offset, content)
        select x.run_id, x.idx, x.map_index, x.epoch, x.seq, x.until, x.log from read_reports(p_reports) x
        join task k on k.run_id = x.run_id and k.idx = x.idx and k.map_index = x.map_index
        where x.log is not null and k.epoch = x.epoch and k.session = p_session and k.state <> 'running'
        on conflict (run_id, idx, map_index, epoch, seq) do nothing;
    end if;
    fx := complete_tasks(ended_now || p_unchosen, fx);
    if again is not null then
        fx := release_pending_tasks(again, fx);
    end if;
    if cleared is not null then
        fx := reopen_tasks(cleared, fx);
    end if;
    return row(refused, fx)::finish_result;
end $$;

-- One round trip of a runner: records ended attempts and claims tasks; with p_aging, overdue ones first.
create function finish_and_claim(p_session bigint, p_reports jsonb, p_infra_retries int, p_queues text[], p_free int,
                                 p_low bigint[], p_aging double precision)
returns setof exchange_row language plpgsql as $$
declare
    fx effects;
    done finish_result;
    claimed int := 0;
    unchosen task_ref[];
    notice exchange_row;
begin
    if p_reports is not null then
        if p_reports @? '$[*].skip' then
            unchosen := skip_unselected_branches(p_session, p_reports);
        end if;
        done := finish_attempts(p_session, p_reports, p_infra_retries, unchosen, fx);
        fx := apply_effects(done.fx);
        if done.refused is not null then
            return query select 'refused', r.run_id, r.idx, r.map_index, r.epoch, null::int, null::int,
                                null::timestamptz, null::text, null::text, null::int, null::bigint
                         from unnest(done.refused) r;
        end if;
    end if;
    if fx.wakes_planner then
        notice.kind := 'arrived';
        return next notice;
    end if;
    if p_free > 0 and p_aging is null then
        return query select * from claim_tasks(p_session, p_queues, p_free, p_low);
        get diagnostics claimed = row_count;
    elsif p_free > 0 then
        return query select * from claim_overdue_first(p_session, p_queues, p_free, p_low, p_aging);
        get diagnostics claimed = row_count;
    end if;
    if fx.enqueued > claimed then
        notice.kind := 'more';
        return next notice;
    end if;
end $$;

-- A heartbeat. p_held: [[run_id, idx, map_index, epoch]]. The reply lists what the runner lost, what is recorded as its
-- own but missing from its list (a claim whose reply was lost), what was asked to stop, the request to the runner, and
-- whether triggers of its queues wait for a session that runs them.
create function extend_leases(p_session bigint, p_held jsonb)
returns table (kind text, run_id bigint, idx int, map_index int, epoch int) language plpgsql as $$
#variable_conflict use_column
declare
    asked text;
    served text[];
begin
    update runner set heartbeat_seq = heartbeat_seq + 1, heartbeat_at = clock() where session = p_session
        and ended_at is null
    returning request, queues into asked, served;
    if not found then
        return query select 'gone', null::bigint, null::int, null::int, null::int;
    elsif asked is not null then
        return query select asked, null::bigint, null::int, null::int, null::int;
    elsif exists (select 1 from task_trigger w where w.queue = any(served) and w.session is null
                  and w.event is null) then
        return query select 'triggers', null::bigint, null::int, null::int, null::int;
    end if;
    return query with held as (
        select (x->>0)::bigint as run_id, (x->>1)::int as idx, (x->>2)::int as map_index, (x->>3)::int as epoch
        from jsonb_array_elements(p_held) x
    )
    select case when l.run_id is null then 'lost' when h.run_id is null then 'unknown' else 'stop' end,
           coalesce(h.run_id, l.run_id), coalesce(h.idx, l.idx), coalesce(h.map_index, l.map_index),
           coalesce(h.epoch, l.epoch)
    from held h
    full join (select * from lease where session = p_session) l on l.run_id = h.run_id and l.idx = h.idx
        and l.map_index = h.map_index and l.epoch = h.epoch
    left join task k on k.run_id = l.run_id and k.idx = l.idx and k.map_index = l.map_index
    where l.run_id is null or h.run_id is null or k.request is not null;
end $$;

-- Applies changed routing rules to tasks of a version with unchanged code; queued tasks stay. Returns how many.
create function reroute_ready_tasks(p_dag_id int, p_version_id int, p_tasks jsonb, p_actor actor)
returns int language plpgsql as $$
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
    perform write_audit(p_actor, 'route', jsonb_build_object('version_id', p_version_id, 'tasks', moved),
                        p_dag_id => p_dag_id);
    return (select count(*) from jsonb_object_keys(moved));
end $$;

-- A pattern on names as a regular expression on addresses. The twin of domain/routing.py; a test compares both.
create function pattern_regex(p_pattern text) returns text language sql immutable as $$
    select '^' || string_agg(case x.segment when '**' then '([^:]+::)*'
                                  else replace(replace(x.segment, '.', '\.'), '*', '[^:]*') || '::' end, ''
                                      order by x.place) || '$'
    from unnest(string_to_array(case when strpos(p_pattern, '::') = 0 and p_pattern <> '**' then '**::' || p_pattern
                                else p_pattern end, '::')) with ordinality as x(segment, place)
$$;

-- The full name of a task, for those regular expressions.
create function task_address(p_version_id int, p_idx int) returns text language sql stable as $$
    select d.name || '::' || replace(s.name, '.', '::') || '::'
    from task_spec s join dag_version v on v.version_id = s.version_id join dag d on d.dag_id = v.dag_id
    where s.version_id = p_version_id and s.idx = p_idx
$$;

-- Whether a runner with these patterns takes a task of its queues.
create function matches_patterns(p_match text[], p_version_id int, p_idx int)
returns boolean language plpgsql stable as $$
begin
    return p_match = '{}'
        or exists (select 1 from unnest(p_match) m where task_address(p_version_id, p_idx) ~ pattern_regex(m));
end $$;

-- Claims exactly these queued rows, as far as they are still there and not locked, in the given order. p_places: 10 x
-- (position of the queue in p_queues, from 0) + rank. The guards are those of claim_tasks.
create function claim_selected(p_session bigint, p_queues text[], p_places int[], p_seqs bigint[])
returns setof exchange_row language plpgsql as $$
declare
    t timestamptz := clock();
begin
    perform 1 from runner where session = p_session and ended_at is null and request is null;
    if not found then
        return;
    end if;
    return query
    with picked as materialized (
        select w.turn, w.place, r.spot, r.seq, r.run_id, r.idx, r.map_index
        from unnest(p_places, p_seqs) with ordinality w(place, seq, turn)
        cross join lateral (
            select q.ctid as spot, q.seq, q.run_id, q.idx, q.map_index from ready_task q
            where q.queue = p_queues[w.place / 10 + 1] and q.rank = (w.place % 10)::smallint and q.seq = w.seq
            for update skip locked) r
    ), taken as (
        delete from ready_task r where r.ctid = any(array(select p.spot from picked p))
    ), moved as (
        update task k
        set state = 'running', epoch = k.epoch + 1, attempt = k.attempt + 1, session = p_session, started_at = t,
            finished_at = null, reason = null, exit_code = null
        from picked p
        where k.run_id = p.run_id and k.idx = p.idx and k.map_index = p.map_index and k.state = 'available'
        returning k.run_id, k.idx, k.map_index, k.epoch, k.attempt, k.version_id, p.turn, p.place, p.seq
    ), leased as (
        insert into lease (session, run_id, idx, map_index, epoch)
        select p_session, m.run_id, m.idx, m.map_index, m.epoch from moved m
    )
    select 'claim', m.run_id, m.idx, m.map_index, m.epoch, m.attempt::int, m.version_id,
           coalesce(r.fire_at, r.created_at), r.params::text,
           case when m.map_index >= 0
                then inputs_of_instance(m.run_id, m.version_id, m.idx, m.map_index, m.attempt) else
           (select jsonb_object_agg(s.name, case
                when i.src = i.idx then run_of_attempt(m.run_id, m.idx, m.map_index, m.attempt)
                when s.is_mapped then mapped_results(m.run_id, i.src) else v.value end)::text
            from task_input i
            join task_spec s on s.version_id = i.version_id and s.idx = i.src
            left join result v on v.run_id = m.run_id and v.idx = i.src and v.map_index = -1
            where i.version_id = m.version_id and i.idx = m.idx) end, m.place, m.seq
    from moved m join run r on r.run_id = m.run_id order by m.turn;
end $$;

-- The heads of queues that have waited longer than p_aging seconds for each level between them and the rank that strict
-- order serves next; the most overdue first. One lookup per rank of each queue, however long. The counterpart of
-- engine/finish_and_claim.py; a test compares both. plpgsql keeps the plan.
create function overdue_queues(p_queues text[], p_low bigint[], p_aging double precision, p_most int)
returns table (place int, seq bigint) language plpgsql as $$
#variable_conflict use_column
declare
    t timestamptz := clock();
begin
    return query with head as materialized (
        select 10 * (n.n - 1) + k.rank as place, n.n, k.rank, h.seq,
               extract(epoch from t - h.enqueued_at)::double precision as waited
        from generate_subscripts(p_queues, 1) n(n) cross join generate_series(0, 9) k(rank)
        cross join lateral (select r.seq, r.enqueued_at from ready_task r
                            where r.queue = p_queues[n.n] and r.rank = k.rank
                              and r.seq >= coalesce(p_low[10 * (n.n - 1) + k.rank + 1], 0) order by r.seq limit 1) h
    ), served_next as (
        select h.place, h.n, h.rank from head h order by h.place limit 1
    )
    select h.place, h.seq from head h cross join served_next f
    cross join lateral (select p_aging * case when h.n = f.n then h.rank - f.rank
                                              else greatest(1, h.rank - f.rank) end as allowed) a
    where h.place <> f.place and h.waited > a.allowed order by h.waited - a.allowed desc, h.place limit p_most;
end $$;

-- claim, with up to half of the free slots, one at least, for tasks that waited too long.
create function claim_overdue_first(p_session bigint, p_queues text[], p_free int, p_low bigint[],
                                    p_aging double precision) returns setof exchange_row language plpgsql as $$
declare
    places int[];
    seqs bigint[];
    got int := 0;
begin
    select array_agg(o.place), array_agg(o.seq) into places, seqs
    from overdue_queues(p_queues, p_low, p_aging, (p_free + 1) / 2) o;
    if places is not null then
        return query select * from claim_selected(p_session, p_queues, places, seqs);
        get diagnostics got = row_count;
    end if;
    if p_free > got then
        return query select * from claim_tasks(p_session, p_queues, p_free - got, p_low);
    end if;
end $$;

-- Skips the tasks that a branch or a short-circuit did not select, whatever their trigger rule, before its end is
-- recorded and could start them. Only the attempt's owner may do this, and not after it was asked to stop. Tasks that
-- were evaluated already stay. The caller completes the returned tasks together with the end.
create function skip_unselected_branches(p_session bigint, p_reports jsonb, out skipped task_ref[])
language plpgsql as $$
declare
    t timestamptz := clock();
begin
    perform 1 from run_status s
    where s.run_id = any(array(select (x->>'r')::bigint from jsonb_array_elements(p_reports) x))
    order by s.run_id for no key update;
    with moved as (
        insert into task as k (run_id, idx, map_index, version_id, state, finished_at, reason)
        select distinct on (x.r, i.idx, i.map_index) x.r, i.idx, i.map_index, b.version_id, 'skipped'::task_state, t,
            format('not chosen by %s', b.name)
        from jsonb_to_recordset(p_reports) as x(r bigint, i int, m int, e int, kind text, skip jsonb)
        cross join lateral (select y.version_id, s.name, s.map_head from task y
                            join task_spec s on s.version_id = y.version_id and s.idx = y.idx
                            where y.run_id = x.r and y.idx = x.i and y.map_index = x.m and y.state = 'running'
                              and y.epoch = x.e and y.session = p_session and y.request is null) b
        cross join lateral jsonb_array_elements_text(x.skip) n(idx)
        join task_spec s on s.version_id = b.version_id and s.idx = n.idx::int
        cross join lateral instances_to_skip(x.r, s, b.map_head, x.m) i
        where x.kind = 'success' order by x.r, i.idx, i.map_index
        on conflict (run_id, idx, map_index) do update set state = 'skipped', finished_at = t, reason = excluded.reason
            where k.state = 'waiting'
        returning k.run_id, k.idx, k.map_index, k.version_id, k.state
    )
    select array_agg(row(m.run_id, m.idx, m.map_index, m.version_id, m.state)::task_ref) into skipped from moved m;
end $$;
