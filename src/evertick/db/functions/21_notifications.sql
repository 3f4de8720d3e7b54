-- Notifications. The transaction in which something happens writes it into the outbox: the notification exists exactly
-- if the change does. The leader delivers it. Why: docs/decisions/0022-notifications.md.

-- Tasks that have ended, and runs that were closed. The caller holds the runs' locks.
create function notify_ends(p_ended task_ref[], p_closed bigint[]) returns void language plpgsql as $$
begin
    perform enqueue_notifications(array(
        select row(e.run_id, e.version_id, e.idx,
                   case when e.map_index < 0 then s.name else format('%s[%s]', s.name, e.map_index) end,
                   case e.state when 'success' then 'success' when 'failed' then 'failure' else 'skipped' end, e.state,
                   nullif(k.attempt, 0), k.reason)::notification_event
        from unnest(p_ended) e
        cross join lateral (select x.name from task_spec x
                            where x.version_id = e.version_id and x.idx = e.idx and x.notifies offset 0) s
        cross join lateral (select x.attempt, x.reason from task x
                            where x.run_id = e.run_id and x.idx = e.idx and x.map_index = e.map_index offset 0) k
        where e.state in ('success', 'failed', 'skipped')
        union all
        select row(r.run_id, r.version_id, -1, '', case r.state when 'success' then 'success' else 'failure' end,
                   r.state, null, r.reason)::notification_event
        from unnest(p_closed) c(run_id)
        cross join lateral (select * from run_status x where x.run_id = c.run_id offset 0) r
        where r.state in ('success', 'failed')));
end $$;

-- Attempts that failed or were lost and are not their task's last (see record_attempts).
create function notify_retries(p_retried jsonb) returns void language plpgsql as $$
declare
    happened notification_event[];
begin
    happened := array(select row(m.run_id, m.version_id, m.idx,
                                 case when m.map_index < 0 then s.name else format('%s[%s]', s.name, m.map_index) end,
                                 'retry', m.kind, m.attempt, m.reason)::notification_event
                      from jsonb_to_recordset(p_retried) as m(run_id bigint, version_id int, idx int, map_index int,
                                                              kind text, attempt int, reason text)
                      cross join lateral (select x.name from task_spec x
                                          where x.version_id = m.version_id and x.idx = m.idx and x.notifies offset 0) s
                      where m.kind <> 'given_back');
    if cardinality(happened) > 0 then
        perform enqueue_notifications(happened);
    end if;
end $$;

-- Why a run failed: its own reason (a timeout), or those of the first of its failed tasks. Null if none failed.
create function failure_reason(p_run_id bigint) returns text language sql stable as $$
    select coalesce((select r.reason from run_status r where r.run_id = p_run_id),
                    string_agg(format('%s%s: %s', f.name,
                               case when f.map_index >= 0 then format('[%s]', f.map_index) end,
                                      coalesce(f.reason, 'failed')), e'\n' order by f.place)
                    || case when max(f.n) > 3 then format(e'\nand %s more failed task%s', max(f.n) - 3,
                                                          case when max(f.n) > 4 then 's' end) else '' end)
    from (select s.name, k.map_index, left(k.reason, 1000) as reason, count(*) over () as n,
                 row_number() over (order by k.finished_at, k.idx, k.map_index) as place
          from task k join task_spec s on s.version_id = k.version_id and s.idx = k.idx
          where k.run_id = p_run_id and k.state = 'failed' order by place limit 3) f
$$;

-- Writes events into the outbox, for each destination that subscribed to them. A success ends the failure streak of its
-- schedule; a failure within a streak is counted there, and sent only to destinations that want every one.
create function enqueue_notifications(p_happened notification_event[]) returns void language plpgsql as $$
declare
    t timestamptz := clock();
begin
    delete from failure_streak p using unnest(p_happened) h
    cross join lateral (select x.schedule_id from run x where x.run_id = h.run_id offset 0) r
    where h.event = 'success' and p.schedule_id = r.schedule_id and p.task = h.task;
    with wanted as materialized (
        select h.*, r.schedule_id, r.fire_at, d.name as dag, n.sink, n.every_time from unnest(p_happened) h
        cross join lateral (select x.schedule_id, x.fire_at, x.dag_id from run x where x.run_id = h.run_id offset 0) r
        cross join lateral (select x.name from dag x where x.dag_id = r.dag_id offset 0) d
        cross join lateral (select y.sink, bool_or(y.every_time) as every_time
                            from (select x.sink, x.every_time from notification_rule x
                                  where x.version_id = h.version_id and x.idx = h.idx and x.event = h.event
                                  union all
                                  select x.sink, x.every_time from default_notification_rule x
                                  where h.idx = -1 and x.event = h.event) y
                            group by y.sink) n
    ), failing as materialized (
        select w.schedule_id, w.task, min(w.run_id) as run_id, count(distinct w.run_id)::int as failures from wanted w
        where w.event = 'failure' and w.schedule_id is not null group by w.schedule_id, w.task
    ), noted as (
        insert into failure_streak as p (schedule_id, task, run_id, since, failures)
        select f.schedule_id, f.task, f.run_id, t, f.failures from failing f order by f.schedule_id, f.task
        on conflict (schedule_id, task) do update set failures = p.failures + excluded.failures
        returning p.schedule_id, p.task, p.failures
    ), begun as materialized (
        select f.schedule_id, f.task, f.run_id from failing f
        join noted p on p.schedule_id = f.schedule_id and p.task = f.task and p.failures = f.failures
    )
    insert into outbox (shard, sink, event, run_id, payload, created_at, waiting_since, due_at)
    select 0, w.sink, w.event, w.run_id, jsonb_strip_nulls(jsonb_build_object('event', w.event, 'dag', w.dag,
               'run', w.run_id, 'task', nullif(w.task, ''), 'state', w.state, 'attempt', w.attempt,
               'schedule', (select c.name from schedule c where c.schedule_id = w.schedule_id), 'fire_at', w.fire_at,
               'at', t, 'reason', left(case when w.idx = -1 and w.event in ('failure', 'retry')
                                          then failure_reason(w.run_id) else w.reason end, 4000))), t, t, t
    from wanted w
    where w.event <> 'failure' or w.every_time or w.schedule_id is null
      or exists (select 1 from begun b where b.schedule_id = w.schedule_id and b.task = w.task and b.run_id = w.run_id)
    order by w.run_id, w.idx < 0, w.idx, w.task, w.sink;
end $$;

-- Missed deadlines, each the first of its streak. A task's rules are of the run's version, a run's of the newest.
create function notify_alerts(p_late missed_deadline[]) returns void language plpgsql as $$
declare
    t timestamptz := clock();
begin
    insert into outbox (shard, sink, event, run_id, payload, created_at, waiting_since, due_at)
    select 0, n.sink, 'deadline', a.run_id, jsonb_strip_nulls(jsonb_build_object(
               'event', 'deadline', 'alert', a.kind, 'dag', d.name, 'schedule', c.name, 'run', a.run_id, 'task',
                   nullif(a.task, ''), 'due_at', a.due_at, 'at', t)), t, t, t
    from unnest(p_late) with ordinality a(kind, schedule_id, run_id, task, due_at, place)
    left join lateral (select x.dag_id, x.name from schedule x where x.schedule_id = a.schedule_id offset 0) c on true
    left join lateral (select x.dag_id, x.version_id from run x where x.run_id = a.run_id offset 0) r on true
    cross join lateral (select * from dag x where x.dag_id = coalesce(c.dag_id, r.dag_id) offset 0) d
    cross join lateral (
        select x.sink from notification_rule x where a.task = '' and x.version_id = d.version_id and x.idx = -1
            and x.event = 'deadline'
        union
        select x.sink from task_spec s join notification_rule x on x.version_id = s.version_id and x.idx = s.idx
            and x.event = 'deadline'
        where s.version_id = r.version_id and s.name = a.task
        union
        select x.sink from default_notification_rule x where x.event = 'deadline') n
    order by a.place, n.sink;
end $$;

-- Claims due deliveries: of each destination at most p_each, of those in p_passed_over none, so that none delays the
-- others. No other process claims them for p_seconds. Steps through the index.
create function claim_deliveries(p_shard smallint, p_epoch bigint, p_passed_over text[], p_each int, p_limit int,
                                 p_seconds double precision)
returns table (delivery_id bigint, sink text, event text, fact jsonb, attempts int,
    created_at timestamptz) language plpgsql as $$
#variable_conflict use_column
declare
    t timestamptz := clock();
begin
    perform fence(p_shard, p_epoch);
    return query with recursive waited_for as (
        (select o.sink from outbox o where o.shard = p_shard and o.state = 'waiting' order by o.sink limit 1)
        union all
        select (select o.sink from outbox o where o.shard = p_shard and o.state = 'waiting' and o.sink > w.sink
                order by o.sink limit 1)
        from waited_for w where w.sink is not null
    ), due as materialized (
        select x.place from waited_for w
        cross join lateral (select o.ctid as place from outbox o
                            where o.shard = p_shard and o.sink = w.sink and o.state = 'waiting' and o.due_at <= t
                            order by o.due_at limit p_each for update skip locked) x
        where w.sink is not null and w.sink <> all(p_passed_over) limit p_limit
    )
    update outbox o set attempts = o.attempts + 1, due_at = t + make_interval(secs => p_seconds)
    where o.ctid = any(array(select d.place from due d)) and o.state = 'waiting'
    returning o.delivery_id, o.sink, o.event, o.payload, o.attempts, o.created_at;
end $$;

-- Regularly, by the leader: its settings become the notifications for all DAGs (p_defaults: [{event, sink,
-- every_time}]); deliveries expire after p_give_up_seconds; waiting ones are counted, up to p_most.
create function maintain_outbox(p_shard smallint, p_epoch bigint, p_defaults jsonb, p_give_up_seconds double precision,
                                p_limit int, p_most int, out given_up int, out waiting int,
                                out oldest_seconds double precision) language plpgsql as $$
declare
    t timestamptz := clock();
begin
    perform fence(p_shard, p_epoch);
    delete from default_notification_rule n where not exists (
        select 1 from jsonb_to_recordset(p_defaults) as x(event text, sink text)
            where x.event = n.event and x.sink = n.sink);
    insert into default_notification_rule as n (event, sink, every_time)
    select x.event, x.sink, x.every_time
    from jsonb_to_recordset(p_defaults) as x(event text, sink text, every_time boolean) order by x.event, x.sink
    on conflict (event, sink) do update set every_time = excluded.every_time where n.every_time <> excluded.every_time;
    update outbox o set state = 'failed', ended_at = t,
        response = 'given up: ' || coalesce(o.response, 'its sink did not work for long')
    where o.state = 'waiting' and o.ctid = any(array(
        select x.ctid from outbox x
        where x.shard = p_shard and x.state = 'waiting' and x.due_at <= t
          and x.waiting_since < t - make_interval(secs => p_give_up_seconds) limit p_limit for update skip locked));
    get diagnostics given_up = row_count;
    select count(*), extract(epoch from t - min(w.waiting_since)) into waiting, oldest_seconds
    from (select o.waiting_since from outbox o where o.shard = p_shard and o.state = 'waiting' limit p_most) w;
end $$;

-- Retries failed deliveries on request: these, or all of a destination, or all. Waiting ones are tried anyway.
create function retry_deliveries(p_ids bigint[], p_sink text, p_limit int, p_actor actor, out again int)
language plpgsql as $$
declare
    t timestamptz := clock();
begin
    update outbox o set state = 'waiting', attempts = 0, waiting_since = t, due_at = t, ended_at = null
    where o.state = 'failed' and o.ctid = any(array(
        select x.ctid from outbox x
        where x.state = 'failed' and (p_ids is null or x.delivery_id = any(p_ids))
            and (p_sink is null or x.sink = p_sink) order by x.delivery_id limit p_limit for update skip locked));
    get diagnostics again = row_count;
    if again > 0 then
        perform write_audit(p_actor, 'retry_notifications',
                            jsonb_strip_nulls(jsonb_build_object('ids', p_ids, 'sink', p_sink, 'count', again)));
    end if;
end $$;
