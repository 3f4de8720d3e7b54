-- Shards: how many there are, which scheduler leads each of them, and how the DAGs of a shard move to another one. Why:
-- docs/decisions/0010-who-leads.md and docs/decisions/0026-shards.md.
--
-- A shard is open (it receives DAGs), leaving (led until it is empty) or closed (not led). Its row stays: an epoch is
-- never given twice. Its leader serves every row that names it, also one that is to be moved.

-- Planning writes begin here. A takeover takes the lock exclusively that is shared here until the commit, so an old
-- leader's commit never follows a new leader's first. The epoch is read after the lock, in a new statement.
create function fence(p_shard smallint, p_epoch bigint) returns void language plpgsql as $$
begin
    perform pg_advisory_xact_lock_shared(4711, p_shard);
    perform 1 from shard where shard = p_shard and epoch = p_epoch;
    if not found then
        raise exception 'not the leader of shard %: epoch % is over', p_shard, p_epoch using errcode = 'EV001';
    end if;
end $$;

-- Whether that scheduler may take a shard: no lease is valid, and it is not being transferred to another scheduler.
create function is_shard_free(s shard, p_owner text) returns boolean language sql stable as $$
    select (s.lease_until is null or s.lease_until < clock()) and s.state <> 'closed'
       and (s.successor is null or s.successor = p_owner or s.successor_until < clock())
$$;

create function acquire_shard(p_shard smallint, p_owner text, p_seconds double precision, out taken bigint)
language plpgsql as $$
begin
    perform 1 from shard s where s.shard = p_shard and is_shard_free(s, p_owner);
    if not found then
        return;
    end if;
    perform pg_advisory_xact_lock(4711, p_shard);
    update shard s
    set epoch = s.epoch + 1, leader = p_owner, lease_until = clock() + make_interval(secs => p_seconds),
        has_session_lock = false, leader_since = clock(), successor = null, successor_until = null
    where s.shard = p_shard and is_shard_free(s, p_owner)
    returning s.epoch into taken;
end $$;

create function renew_shard(p_shard smallint, p_epoch bigint, p_seconds double precision)
returns boolean language plpgsql as $$
begin
    update shard set lease_until = clock() + make_interval(secs => p_seconds)
    where shard = p_shard and epoch = p_epoch and lease_until is not null;
    return found;
end $$;

-- Releases the leadership; with a successor, no other scheduler takes it for so many seconds. The session lock is
-- released here, and not only with the session, because the next leader must be able to hold it from its first moment.
-- Before the commit: a scheduler that finds the lock free waits for this row.
create function release_shard(p_shard smallint, p_epoch bigint, p_successor text, p_successor_seconds double precision)
returns boolean language plpgsql as $$
declare
    held boolean := exists (select 1 from shard s where s.shard = p_shard and s.has_session_lock);
begin
    update shard s
    set lease_until = null, leader = null, has_session_lock = false, successor = p_successor,
        successor_until = clock() + make_interval(secs => p_successor_seconds)
    where s.shard = p_shard and s.epoch = p_epoch;
    if not found then
        return false;
    elsif held then
        perform pg_advisory_unlock(4712, p_shard);
    end if;
    return true;
end $$;

-- Waits to become the leader of a shard. The lease decides who leads; the session lock shows a crash at once: while the
-- row says that the leader's session holds it, a free lock proves that this session and its lease have ended. Without
-- the lock (after a frozen predecessor, or behind a pooler) the lease must expire. Returns when to try again.
create function try_acquire_shard(p_shard smallint, p_owner text, p_seconds double precision, p_watches boolean,
                                  out epoch bigint, out has_session_lock boolean, out free_in double precision,
                                  out shard_count smallint) language plpgsql as $$
begin
    -- Held to the end of this transaction, so that no other scheduler can reach the same conclusion meanwhile.
    has_session_lock := p_watches and pg_try_advisory_xact_lock(4712, p_shard);
    if has_session_lock and exists (select 1 from shard s where s.shard = p_shard and s.has_session_lock
                              and s.lease_until is not null) then
        perform pg_advisory_xact_lock(4711, p_shard);
        update shard s set lease_until = null where s.shard = p_shard and s.has_session_lock;
    end if;
    epoch := acquire_shard(p_shard, p_owner, p_seconds);
    if epoch is null then
        has_session_lock := false;
        select greatest(extract(epoch from s.lease_until - clock()), 0), s.shard_count into free_in, shard_count
        from shard s where s.shard = p_shard;
        return;
    elsif has_session_lock then
        perform pg_advisory_lock(4712, p_shard);
    end if;
    update shard s set has_session_lock = try_acquire_shard.has_session_lock
    where s.shard = p_shard and s.epoch = try_acquire_shard.epoch
    returning s.shard_count into shard_count;
end $$;

create function open_shard_count() returns int language sql stable as $$
    select count(*)::int from shard s where s.state = 'open'
$$;

create function shard_of(p_dag text, p_shards int) returns smallint language sql immutable as $$
    select case when p_shards <= 1 then 0 else ((hashtextextended(p_dag, 0) % p_shards + p_shards) % p_shards)
        end::smallint
$$;

-- Sets the number of shards; each leader moves rows after its next renewal. Returns whether it was written.
create function set_shard_count(p_shards int, p_actor actor, p_if_never_chosen boolean)
returns boolean language plpgsql as $$
declare
    before int;
    t timestamptz := clock();
begin
    perform pg_advisory_xact_lock(4714, 0);
    if p_if_never_chosen and exists (select 1 from shard s where s.count_set_at is not null) then
        return false;
    end if;
    before := open_shard_count();
    insert into shard (shard, epoch) select n, 0 from generate_series(0, p_shards - 1) n on conflict (shard) do nothing;
    update shard s
    set state = case when s.shard < p_shards then 'open' when s.state = 'closed' then 'closed' else 'draining' end,
        rebalancing_since = case when s.shard >= p_shards and s.state = 'closed' then null else t end, count_set_at = t;
    perform refresh_shard_count();
    perform write_audit(p_actor, 'set_shards', jsonb_build_object('shards', p_shards, 'before', before));
    return true;
end $$;

create function refresh_shard_count() returns void language sql as $$
    update shard s set shard_count = (select count(*) from shard x where x.state <> 'closed')
$$;

-- Registers a scheduler as alive and returns how the shards are distributed. A shard is free without a valid lease, and
-- when the session of a leader that has the session lock no longer holds it. A scheduler that was silent for most of a
-- lease may be frozen: it is not counted, and gets no shard. Being registered need not survive a crash of the server.
create function survey_shards(p_owner text, p_seconds double precision, p_watches boolean)
returns table (shard smallint, state text, leader text, successor text, is_free boolean, free_in double precision,
    live text[]) language plpgsql as $$
#variable_conflict use_column
declare
    t timestamptz := clock();
    there text[];
    held int[];
begin
    perform set_config('synchronous_commit', 'off', true);
    insert into scheduler (owner, since, seen_until, pid)
    values (p_owner, t, t + make_interval(secs => p_seconds), case when p_watches then pg_backend_pid() end)
    on conflict (owner) do update set seen_until = excluded.seen_until, pid = excluded.pid;
    delete from scheduler x where x.ctid = any(array(
        select y.ctid from scheduler y where y.seen_until < t - interval '1 minute' for update skip locked));
    there := array(select x.owner from scheduler x
                   where x.seen_until > t + make_interval(secs => p_seconds * 0.4)
                     and (x.pid is null or x.pid in (select a.pid from pg_stat_activity a)) order by x.owner);
    held := array(select l.objid::int from pg_locks l where l.locktype = 'advisory' and l.classid = 4712
                  and l.objsubid = 2
                  and l.database = (select d.oid from pg_database d where d.datname = current_database())
                      and l.granted);
    return query select s.shard, s.state, s.leader, h.heir, s.lease_until is null or s.lease_until < t
        or (p_watches and s.has_session_lock and s.shard <> all(held)), extract(epoch from greatest(s.lease_until,
            case when h.heir is not null then s.successor_until end) - t)::double precision, there
    from shard s cross join lateral (select case when s.successor_until > t then s.successor end as heir) h
    where s.state <> 'closed' order by s.shard;
end $$;

-- The shard of the rows that belong to a run. Those of a deleted run belong to shard 0.
create function shard_of_run(p_run_id bigint) returns smallint language plpgsql stable as $$
begin
    return coalesce((select d.shard from run_status r join dag d on d.dag_id = r.dag_id where r.run_id = p_run_id), 0);
end $$;

-- What of one shard belongs to another: DAGs, schedules, backfills and rows of runs, each no further than p_limit.
create function misplaced_count(p_shard smallint, p_limit int) returns bigint language sql stable as $$
    select (select count(*) from (select 1 from dag d where d.shard = p_shard
                                  and shard_of(d.name, open_shard_count()) <> p_shard limit p_limit) x)
         + (select count(*) from (select 1 from schedule_state s join schedule c on c.schedule_id = s.schedule_id
                                  join dag d on d.dag_id = c.dag_id where s.shard = p_shard and d.shard <> p_shard
                                  limit p_limit) x)
         + (select count(*) from (select 1 from backfill b join dag d on d.dag_id = b.dag_id
                                  where b.shard = p_shard and d.shard <> p_shard limit p_limit) x)
         + (select count(*) from (select 1 from (select shard, run_id from deferral
                                                 union all select shard, run_id from task_timer
                                                 union all select shard, run_id from retry_queue
                                                 union all select shard, run_id from retry_slot
                                                 union all select shard, run_id from deadline) w
                                  where w.shard = p_shard and shard_of_run(w.run_id) <> p_shard limit p_limit) x)
$$;

-- The leader of a shard gives away what belongs to another one: DAGs first, then the rows that depend on them. A locked
-- row moves the next time. A transaction may be writing a row for the shard that its DAG had a moment ago, so this
-- continues for a minute after the last change; then the rebalancing is over, and a shard that is leaving closes.
create function rebalance_shard(p_shard smallint, p_epoch bigint, p_limit int, out moved int, out is_over boolean,
                                out is_closed boolean) language plpgsql as $$
declare
    n int := open_shard_count();
    k int;
    hung text;
    t timestamptz := clock();
begin
    perform fence(p_shard, p_epoch);
    is_over := false;
    is_closed := false;
    update dag d set shard = shard_of(d.name, n)
    where d.dag_id = any(array(select x.dag_id from dag x where x.shard = p_shard and shard_of(x.name, n) <> p_shard
                               order by x.dag_id limit p_limit for no key update skip locked));
    get diagnostics moved = row_count;
    with gone as materialized (
        select s.schedule_id, d.shard as home from schedule_state s
        join schedule c on c.schedule_id = s.schedule_id join dag d on d.dag_id = c.dag_id
        where s.shard = p_shard and d.shard <> p_shard limit p_limit for no key update of s skip locked)
    update schedule_state s set shard = g.home from gone g where s.schedule_id = g.schedule_id and s.shard = p_shard;
    get diagnostics k = row_count;
    moved := moved + k;
    with gone as materialized (
        select b.backfill_id, d.shard as home from backfill b join dag d on d.dag_id = b.dag_id
        where b.shard = p_shard and d.shard <> p_shard limit p_limit for no key update of b skip locked)
    update backfill b set shard = g.home from gone g where b.backfill_id = g.backfill_id and b.shard = p_shard;
    get diagnostics k = row_count;
    moved := moved + k;
    -- The shard is part of the key of most of them, and a row like it may be there already.
    foreach hung in array array['deferral', 'task_timer', 'retry_queue', 'retry_slot', 'deadline'] loop
        execute format('
            with gone as (
                delete from %1$I w where w.ctid = any(array(
                    select x.ctid from %1$I x where x.shard = $1 and shard_of_run(x.run_id) <> $1
                        limit $2 for update skip locked))
                returning w
            ), placed as (
                insert into %1$I
                select n.* from gone g
                cross join lateral jsonb_populate_record(g.w,
                    jsonb_build_object(''shard'', shard_of_run((g.w).run_id))) n
                on conflict do nothing
            )
            select count(*) from gone', hung) into k using p_shard, p_limit;
        moved := moved + k;
    end loop;
    if moved = 0 and misplaced_count(p_shard, 1) = 0 then
        select e.is_over, e.is_closed into is_over, is_closed from finish_rebalancing(p_shard, p_epoch, t) e;
    end if;
end $$;

-- Ends the rebalancing once nothing is left to move and each transaction that could write for the shard has ended.
-- Closing ends the epoch as a takeover does: while another transaction has passed the fence, the shard stays open until
-- the next call. It does not wait for the lock: two transactions that share it and wait for each other would deadlock.
create function finish_rebalancing(p_shard smallint, p_epoch bigint, p_now timestamptz, out is_over boolean,
                                   out is_closed boolean) language plpgsql as $$
begin
    is_over := false;
    is_closed := false;
    perform pg_advisory_xact_lock(4714, 0);
    if exists (select 1 from shard s where s.shard = p_shard and s.state = 'draining')
       and not pg_try_advisory_xact_lock(4711, p_shard) then
        return;
    end if;
    update shard s set rebalancing_since = null
    where s.shard = p_shard and s.epoch = p_epoch and s.rebalancing_since < p_now - interval '1 minute';
    is_over := found;
    if is_over then
        update shard s set state = 'closed', epoch = s.epoch + 1, lease_until = null, leader = null,
            has_session_lock = false
        where s.shard = p_shard and s.epoch = p_epoch and s.state = 'draining';
        is_closed := found;
    end if;
    if is_closed then
        perform refresh_shard_count();
    end if;
end $$;

-- A closed shard in which something turned up is led again until it is empty. By shard 0, once per round of repairs.
create function reopen_shards() returns void language plpgsql as $$
begin
    if not exists (select 1 from shard s where s.state = 'closed') then
        return;
    elsif exists (select 1 from shard s where s.state = 'closed' and misplaced_count(s.shard, 1) > 0) then
        perform pg_advisory_xact_lock(4714, 0);
        update shard s set state = 'draining', rebalancing_since = clock()
            where s.state = 'closed' and misplaced_count(s.shard, 1) > 0;
        perform refresh_shard_count();
    end if;
end $$;
