-- Check-ins: jobs that run elsewhere report that they ran, and a report that does not arrive in time is an alert.

-- Creates a check-in, or changes what it expects. p_due_at: when the next report is expected.
create function put_checkin(p_name text, p_spec jsonb, p_grace_seconds double precision, p_due_at timestamptz,
                            p_actor actor) returns boolean language plpgsql as $$
declare
    is_new boolean;
begin
    insert into checkin as c (name, spec, grace_seconds, due_at, changed_by, changed_at)
    values (p_name, p_spec, p_grace_seconds, p_due_at, p_actor.name, clock())
    on conflict (name) do update
        set spec = excluded.spec, grace_seconds = excluded.grace_seconds, due_at = excluded.due_at, late_since = null,
            changed_by = excluded.changed_by, changed_at = excluded.changed_at
    returning c.xmax = 0 into is_new;
    perform write_audit(p_actor, 'put_checkin', jsonb_build_object('checkin', p_name, 'spec', p_spec,
                                                                   'grace_seconds', p_grace_seconds));
    return is_new;
end $$;

create function delete_checkin(p_name text, p_actor actor) returns boolean language plpgsql as $$
begin
    delete from checkin where name = p_name;
    if not found then
        return false;
    end if;
    perform write_audit(p_actor, 'delete_checkin', jsonb_build_object('checkin', p_name));
    return true;
end $$;

-- A report: it answers what was expected until now, and ends an alert. p_due_at: when the next one is expected;
-- a report that arrived out of order does not move that back. A failure is an alert of its own.
create function record_checkin(p_name text, p_due_at timestamptz, p_spec jsonb, p_message text, p_has_failed boolean)
returns boolean language plpgsql as $$
declare
    t timestamptz := clock();
begin
    update checkin c set last_at = t, message = p_message, count = c.count + 1, has_failed = p_has_failed,
        due_at = greatest(c.due_at, p_due_at), late_since = null
    where c.name = p_name and c.spec = p_spec;
    if not found then
        return false;
    end if;
    if p_has_failed then
        perform notify_checkins(array[p_name], 'checkin_failed');
    end if;
    return true;
end $$;

-- By the leader: check-ins whose report did not arrive in time, each once until the next report.
create function raise_late_checkins(p_shard smallint, p_epoch bigint) returns setof text language plpgsql as $$
declare
    t timestamptz := clock();
    late text[];
begin
    perform fence(p_shard, p_epoch);
    with moved as (
        update checkin c set late_since = t
        where c.late_since is null and c.due_at + make_interval(secs => c.grace_seconds) < t
        returning c.name
    )
    select array_agg(m.name order by m.name) into late from moved m;
    if late is not null then
        perform notify_checkins(late, 'no_checkin');
    end if;
    return query select unnest(late);
end $$;

-- To the recipients of missed deadlines of all DAGs.
create function notify_checkins(p_names text[], p_alert text) returns void language plpgsql as $$
declare
    t timestamptz := clock();
begin
    insert into outbox (shard, sink, event, payload, created_at, waiting_since, due_at)
    select 0, n.sink, 'deadline', jsonb_strip_nulls(jsonb_build_object(
               'event', 'deadline', 'alert', p_alert, 'checkin', c.name, 'due_at', c.due_at, 'reason', c.message,
               'at', t)), t, t, t
    from checkin c cross join (select distinct x.sink from default_notification_rule x where x.event = 'deadline') n
    where c.name = any(p_names) order by c.name, n.sink;
end $$;
