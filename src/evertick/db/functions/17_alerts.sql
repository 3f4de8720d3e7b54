-- Deadlines of runs and tasks, and the alerts that are raised when they are missed.

create function set_deadlines(p_run_ids bigint[]) returns void language sql as $$
    insert into deadline (shard, due_at, run_id, kind)
    select d.shard, r.fire_at + make_interval(secs => c.delay_seconds + k.within), r.run_id, k.kind from run r
    cross join lateral (select * from schedule c where c.schedule_id = r.schedule_id offset 0) c
    cross join lateral (select * from dag d where d.dag_id = r.dag_id offset 0) d
    cross join lateral (values ('start', c.start_within), ('finish', c.finish_within)) k(kind, within)
    where r.run_id = any(p_run_ids) and k.within is not null
    on conflict do nothing
$$;

-- Deadlines of tasks count from when their run was due, and for a triggered run from its start. A backfill has none.
create function set_task_deadlines(p_run_ids bigint[]) returns void language sql as $$
    insert into deadline (shard, due_at, run_id, kind, idx)
    select d.shard, coalesce(r.fire_at + make_interval(secs => c.delay_seconds),
                             (select w.start_at from delayed_run w where w.run_id = r.run_id), r.created_at)
        + make_interval(secs => x.seconds), r.run_id, 'task', x.idx
    from run r
    cross join lateral (select y.idx, y.seconds from task_deadline y where y.version_id = r.version_id offset 0) x
    cross join lateral (select y.shard from dag y where y.dag_id = r.dag_id offset 0) d
    left join lateral (select y.delay_seconds from schedule y where y.schedule_id = r.schedule_id offset 0) c on true
    where r.run_id = any(p_run_ids) and r.kind <> 'backfill'
    on conflict do nothing
$$;

-- Whether a schedule still has the deadline that it missed: of its runs, or of a task of its DAG's version of now.
create function has_deadline(a alert) returns boolean language sql stable as $$
    select exists (
        select 1 from schedule c where c.schedule_id = a.schedule_id and c.deleted_at is null and case
            when a.task <> '' then exists (
                select 1 from dag d join task_deadline x on x.version_id = d.version_id
                join task_spec s on s.version_id = x.version_id and s.idx = x.idx
                where d.dag_id = c.dag_id and s.name = a.task)
            when a.kind = 'not_started' then c.start_within is not null
            else c.finish_within is not null end)
$$;

-- Whether a run was on time. A deleted run raises no alert.
create function is_run_on_time(p_run_id bigint, p_kind text, p_due_at timestamptz)
returns boolean language sql stable as $$
    select coalesce((
        select (s.state in ('success', 'failed', 'canceled') and s.finished_at <= p_due_at)
            or (p_kind = 'start' and (
                exists (select 1 from task k where k.run_id = p_run_id and k.started_at <= p_due_at)
                or exists (select 1 from attempt a where a.run_id = p_run_id and a.started_at <= p_due_at)))
        from run_status s where s.run_id = p_run_id), true)
$$;

-- Whether a task had ended with all its instances, in any state: a failure has its own notification. No row: not begun.
create function is_task_on_time(p_run_id bigint, p_idx int, p_due_at timestamptz)
returns boolean language sql stable as $$
    select is_run_on_time(p_run_id, 'finish', p_due_at) or coalesce((
        select bool_and(k.state in ('success', 'failed', 'skipped', 'upstream_failed', 'canceled')
                        and k.finished_at <= p_due_at)
        from task k where k.run_id = p_run_id and k.idx = p_idx), false)
$$;

create function is_fire_overdue(s schedule_state, t timestamptz, p_seconds double precision)
returns boolean language sql stable as $$
    select s.next_due < t - make_interval(secs => p_seconds) and not s.is_paused
$$;

-- Raises what is late and resolves what is over, once per streak, by the indexes of what is due. Returns changes.
create function raise_alerts(p_shard smallint, p_epoch bigint, p_unfired_seconds double precision, p_limit int)
returns table (kind text, dag text, schedule text, run_id bigint, task text, has_ended boolean) language plpgsql as $$
#variable_conflict use_column
declare
    t timestamptz := clock();
    judged judged_deadline[];
    raised bigint[];
    of_no_schedule missed_deadline[];
    ended bigint[];
    newest bigint;
begin
    perform fence(p_shard, p_epoch);
    select coalesce(max(alert_id), 0) into newest from alert;
    with due as (
        delete from deadline x
        where x.ctid = any(array(select y.ctid from deadline y where y.shard = p_shard and y.due_at <= t
                                 order by y.due_at limit p_limit for update skip locked))
        returning x.run_id, x.kind, x.idx, x.due_at
    )
    select array_agg(row(case d.kind when 'start' then 'not_started' else 'not_finished' end, r.schedule_id, d.run_id,
           coalesce(s.name, ''), d.due_at, case d.kind when 'task' then is_task_on_time(d.run_id, d.idx, d.due_at)
                                                else is_run_on_time(d.run_id, d.kind, d.due_at) end)::judged_deadline)
    into judged from due d
    cross join lateral (select y.schedule_id, y.version_id from run y where y.run_id = d.run_id offset 0) r
    left join lateral (select y.name from task_spec y where y.version_id = r.version_id and y.idx = d.idx offset 0) s
        on true;
    of_no_schedule := array(select row(x.kind, x.schedule_id, x.run_id, x.task, x.due_at)::missed_deadline
                            from unnest(judged) x where not x.is_on_time and x.schedule_id is null);
    with missed as (
        select x.schedule_id, x.kind, x.task, min(x.run_id) as run_id, min(x.due_at) as due_at,
               max(x.due_at) as last_due_at, count(*)::int as count
        from unnest(judged) x where not x.is_on_time and x.schedule_id is not null group by 1, 2, 3
        union all
        select s.schedule_id, 'not_fired', '', null, s.next_due, s.next_due, 1
        from (select y.schedule_id, y.next_due from schedule_state y
              where y.shard = p_shard and y.next_due < t - make_interval(secs => p_unfired_seconds)
                and y.next_due is not null and not y.is_paused and y.error is null order by y.next_due limit p_limit) s
        union all
        select s.schedule_id, 'not_fired', '', null, s.next_due, s.next_due, 1 from quarantine q
        cross join lateral (select * from schedule_state y where y.schedule_id = q.subject_id offset 0) s
        where q.kind = 'schedule' and s.shard = p_shard and is_fire_overdue(s, t, p_unfired_seconds)
    ), written as (
        insert into alert as a (kind, schedule_id, task, run_id, due_at, last_due_at, count, raised_at)
        select m.kind, m.schedule_id, m.task, min(m.run_id), min(m.due_at), max(m.last_due_at), max(m.count), t
        from missed m group by 1, 2, 3
        on conflict (schedule_id, kind, task) where ended_at is null do update set count = a.count + excluded.count,
            last_due_at = excluded.last_due_at where a.kind <> 'not_fired'
        returning a.alert_id
    )
    select array_agg(w.alert_id) filter (where w.alert_id > newest) into raised from written w;
    if raised is not null or cardinality(of_no_schedule) > 0 then
        perform notify_alerts(of_no_schedule || array(
            select row(a.kind, a.schedule_id, a.run_id, a.task, a.due_at)::missed_deadline from alert a
            where a.alert_id = any(raised) order by a.alert_id));
    end if;
    with over as (
        update alert a set ended_at = t
        where a.ended_at is null and case a.kind
            when 'not_fired' then not exists (select 1 from schedule_state s where s.schedule_id = a.schedule_id
                                              and is_fire_overdue(s, t, p_unfired_seconds))
            else not has_deadline(a) or exists (
                select 1 from unnest(judged) x where x.schedule_id = a.schedule_id and x.kind = a.kind
                    and x.task = a.task and x.is_on_time and x.due_at > a.last_due_at) end
        returning a.alert_id
    )
    select array_agg(o.alert_id) into ended from over o;
    return query select a.kind, d.name, c.name, a.run_id, a.task, coalesce(a.alert_id = any(ended), false) from alert a
    join schedule c on c.schedule_id = a.schedule_id join dag d on d.dag_id = c.dag_id
    where a.alert_id = any(raised || ended)
    union all
    select o.kind, d.name, null, o.run_id, o.task, false from unnest(of_no_schedule) o
    join run r on r.run_id = o.run_id join dag d on d.dag_id = r.dag_id;
end $$;
