-- Fleets of launched runners: which launcher leads one, and its changes. Each of them is fenced by the fleet's epoch,
-- so that a launcher that was replaced starts and ends nothing.

-- Takes or keeps the lead of a fleet. Returns its epoch; null: another launcher leads it. The lease of the leader
-- itself may have ended, as long as no other launcher took it. The first fleets are made here, and those forgotten that
-- have had neither a leader nor a runner for a week.
create function renew_fleet_lease(p_fleet text, p_leader text, p_epoch bigint, p_seconds double precision, p_spec jsonb)
returns bigint language plpgsql as $$
declare
    t timestamptz := clock();
    f fleet;
begin
    insert into fleet (name, engine, queues, least, most, slots, epoch, leader, lease_until)
    values (p_fleet, '', '{}', 0, 0, 1, 0, '', '-infinity') on conflict (name) do nothing;
    select x.* into f from fleet x where x.name = p_fleet for no key update;
    if f.epoch = p_epoch then
        update fleet set lease_until = t + make_interval(secs => p_seconds) where name = p_fleet;
        return p_epoch;
    elsif f.lease_until > t then
        return null;
    end if;
    update fleet set epoch = f.epoch + 1, leader = p_leader, lease_until = t + make_interval(secs => p_seconds),
        engine = x.engine, queues = x.queues, least = x.least, most = x.most, slots = x.slots, trouble = null
    from jsonb_to_record(p_spec) as x(engine text, queues text[], least int, most int, slots int)
    where name = p_fleet;
    delete from fleet x where x.lease_until < t - interval '7 days' and x.name <> p_fleet
        and not exists (select 1 from pilot p where p.fleet = x.name);
    return f.epoch + 1;
end $$;

-- Ends the lease of its leader, which stops: another launcher leads at once.
create function leave_fleet(p_fleet text, p_epoch bigint) returns boolean language sql as $$
    update fleet set lease_until = clock() where name = p_fleet and epoch = p_epoch returning true
$$;

-- Whether this epoch still leads; keeps it so until the transaction ends.
create function fence_fleet(p_fleet text, p_epoch bigint) returns boolean language plpgsql as $$
begin
    perform 1 from fleet f where f.name = p_fleet and f.epoch = p_epoch for no key update;
    return found;
end $$;

-- Adds runners, each with a token of its own for the fleet's queues, up to the fleet's limit. Returns their names;
-- null: this epoch is over. `p_pilots`: name and hash of the secret.
create function add_pilots(p_fleet text, p_epoch bigint, p_token_seconds double precision, p_pilots jsonb)
returns text[] language plpgsql as $$
declare
    t timestamptz := clock();
    f fleet;
    room int;
    new record;
    token int;
    added text[] := '{}';
begin
    if not fence_fleet(p_fleet, p_epoch) then
        return null;
    end if;
    select x.* into f from fleet x where x.name = p_fleet;
    room := f.most - (select count(*) from pilot p where p.fleet = p_fleet);
    for new in select x.name, decode(x.hash, 'hex') as hash
               from jsonb_to_recordset(p_pilots) as x(name text, hash text) order by x.name limit greatest(room, 0) loop
        insert into runner_token (secret_hash, name, queues, created_by, created_at, expires_at)
        values (new.hash, new.name, f.queues, 'launcher', t, t + make_interval(secs => p_token_seconds))
        returning token_id into token;
        insert into pilot (name, fleet, token_id, created_at) values (new.name, p_fleet, token, t);
        added := added || new.name;
    end loop;
    return added;
end $$;

-- What the engine says about the fleet's runners, and what the leader decided. False: this epoch is over.
create function note_fleet(p_fleet text, p_epoch bigint, p_desired int, p_trouble text, p_seen jsonb)
returns boolean language plpgsql as $$
begin
    if not fence_fleet(p_fleet, p_epoch) then
        return false;
    end if;
    update fleet f set desired = p_desired, trouble = p_trouble
    where f.name = p_fleet and (f.desired, f.trouble) is distinct from (p_desired, p_trouble);
    update pilot p set phase = x.phase, reason = x.reason,
        submitted_at = case when x.is_submitted then coalesce(p.submitted_at, clock()) end
    from jsonb_to_recordset(p_seen) as x(name text, phase text, reason text, is_submitted boolean)
    where p.name = x.name and p.fleet = p_fleet;
    return true;
end $$;

-- A runner that is not needed. If it has joined, it is asked to leave, and ends with its last attempt: 'draining'. If
-- it has not, it cannot join any more, and its object is to be removed: 'withdrawn'. The token's lock decides between a
-- runner that joins at this moment and this. Null: this epoch is over, or it has ended.
create function withdraw_pilot(p_fleet text, p_epoch bigint, p_name text) returns text language plpgsql as $$
declare
    token int;
begin
    if not fence_fleet(p_fleet, p_epoch) then
        return null;
    end if;
    select p.token_id into token from pilot p where p.name = p_name and p.fleet = p_fleet for no key update;
    perform 1 from runner_token k where k.token_id = token for no key update;
    if not found then
        return null;
    end if;
    update runner r set request = 'leave' where r.token_id = token and r.ended_at is null;
    if found then
        return 'draining';
    end if;
    update runner_token k set revoked_at = clock() where k.token_id = token and k.revoked_at is null;
    update pilot p set withdrawn_at = coalesce(p.withdrawn_at, clock()) where p.name = p_name;
    return 'withdrawn';
end $$;

-- The object of a runner has certainly ended. Nothing can join with its token any more, and what its runner still held
-- is lost: that one is declared dead at once, without a timeout. Returns how many attempts were taken from it; null:
-- this epoch is over, or it was ended before.
create function end_pilot(p_fleet text, p_epoch bigint, p_name text, p_reason text, p_infra_retries int)
returns int language plpgsql as $$
declare
    token int;
    lost bigint;
    taken int := 0;
begin
    if not fence_fleet(p_fleet, p_epoch) then
        return null;
    end if;
    delete from pilot p where p.name = p_name and p.fleet = p_fleet returning p.token_id into token;
    if not found then
        return null;
    end if;
    update runner_token k set revoked_at = coalesce(k.revoked_at, clock()) where k.token_id = token;
    for lost in select r.session from runner r where r.token_id = token and r.ended_at is null loop
        taken := taken + mark_runner_dead(lost, p_reason, p_infra_retries);
    end loop;
    return taken;
end $$;

-- The runners of a fleet, with the sessions that joined. Busy: its slots that are taken, and one if it runs triggers.
create function pilots_of(p_fleet text)
returns table (name text, phase text, reason text, is_submitted boolean, is_withdrawn boolean,
               has_joined boolean, is_expired boolean, session bigint, request text, busy bigint, slots int,
               joined_seconds double precision, silent_seconds double precision) language sql stable as $$
    select p.name, p.phase, p.reason, p.submitted_at is not null, p.withdrawn_at is not null,
           k.used_at is not null, k.expires_at <= clock(),
           r.session, r.request, coalesce(busy_slots(r.session), 0)
           + (select count(*) from (select 1 from task_trigger w where w.session = r.session limit 1) x), r.slots,
           extract(epoch from clock() - r.started_at)::double precision, r.silent_seconds
    from pilot p join runner_token k on k.token_id = p.token_id
    left join runner r on r.token_id = p.token_id and r.ended_at is null
    where p.fleet = p_fleet order by p.name, r.started_at
$$;

-- For `explain_task` and the view of what is blocked: the fleet that starts runners for a queue, and the first of those
-- that have not joined.
create function fleet_facts(p_queue text) returns jsonb language sql stable as $$
    select jsonb_build_object('name', f.name, 'engine', f.engine, 'is_led', f.lease_until > clock(), 'desired',
               f.desired, 'most', f.most, 'trouble', f.trouble, 'starting', s.starting, 'reason', s.reason)
    from fleet f
    cross join lateral (select count(*) as starting,
                               (array_agg(p.reason order by p.reason is null, p.created_at))[1] as reason
                        from pilot p where p.fleet = f.name and p.withdrawn_at is null
                          and not exists (select 1 from runner r
                                          where r.token_id = p.token_id and r.ended_at is null)) s
    where p_queue = any(f.queues) order by f.lease_until desc limit 1
$$;
