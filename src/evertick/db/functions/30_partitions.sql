-- Partitions of assets: updates are mapped to the partitions of the schedules that wait for them, and a complete
-- partition is a fire of its own. The leader maps, because formats of keys and time zones are its business; everything
-- that it decides is stored in one transaction, so that no update is lost or counts twice.

-- p_mapped: [{arrival_id, version, keys, source_date, problem}], one for each arrival that was read; p_ready:
-- [{schedule_id, version, key, date}], the partitions that are complete with them. A schedule that has another version
-- by now is left out: its arrivals are gone, or are mapped again.
create function apply_partition_arrivals(p_shard smallint, p_epoch bigint, p_mapped jsonb, p_ready jsonb,
                                         out mapped int, out became_due int) language plpgsql as $$
declare
    known int[];
    t timestamptz := clock();
begin
    perform fence(p_shard, p_epoch);
    perform 1 from schedule_state s
    where s.schedule_id = any(array(
        select a.schedule_id from jsonb_to_recordset(p_mapped) as m(arrival_id bigint)
        join partition_arrival a on a.arrival_id = m.arrival_id))
    order by s.schedule_id for no key update;
    with gone as (
        delete from partition_arrival a
        using jsonb_to_recordset(p_mapped) as m(arrival_id bigint, version int, keys text[], source_date timestamptz,
                                                problem text), schedule_state s
        where a.arrival_id = m.arrival_id and s.schedule_id = a.schedule_id and s.version = m.version
        returning a.schedule_id, a.update_id, a.asset, a.key, a.occurred_at, m.keys, m.source_date, m.problem
    ), counted as (
        insert into partition_update (schedule_id, key, update_id, asset, source_key, source_date, occurred_at)
        select g.schedule_id, k.key, g.update_id, g.asset, g.key, g.source_date, g.occurred_at
        from gone g cross join lateral unnest(g.keys) k(key)
        on conflict (schedule_id, key, update_id) do nothing
    ), refused as (
        select write_audit(row('schedule', null, null)::actor, 'refuse_partition', jsonb_build_object(
            'asset', g.asset, 'partition', g.key, 'reason', g.problem), p_dag_id => c.dag_id)
        from gone g join schedule c on c.schedule_id = g.schedule_id where g.problem is not null
    )
    select array_agg(distinct g.schedule_id), count(*) + 0 * (select count(*) from refused) into known, mapped
    from gone g;
    with told as (
        select r.schedule_id, r.key, r.date, row_number() over (partition by r.schedule_id order by r.key) as place
        from jsonb_to_recordset(p_ready) as r(schedule_id int, version int, key text, date timestamptz)
        join schedule_state s on s.schedule_id = r.schedule_id and s.version = r.version
        where r.schedule_id = any(known)
          and exists (select 1 from partition_update u
                      where u.schedule_id = r.schedule_id and u.key = r.key and u.fire_at is null)
    ), base as (
        -- Each a microsecond after the other, and all of them due now.
        select s.schedule_id, greatest(
            t - (select count(*) from told x where x.schedule_id = s.schedule_id) * interval '1 microsecond',
            s.last_fired, (select max(p.fire_at) from partition_ready p where p.schedule_id = s.schedule_id)) as at
        from schedule_state s where s.schedule_id = any(known)
    ), ready as (
        insert into partition_ready (schedule_id, fire_at, key, date)
        select x.schedule_id, b.at + x.place * interval '1 microsecond', x.key, x.date
        from told x join base b on b.schedule_id = x.schedule_id
        returning schedule_id, fire_at, key
    ), fired as (
        update partition_update u set fire_at = r.fire_at from ready r
        where u.schedule_id = r.schedule_id and u.key = r.key and u.fire_at is null
        returning u.schedule_id, u.fire_at, u.asset, u.update_id, u.occurred_at
    ), caused as (
        insert into run_trigger (schedule_id, fire_at, kind, name, run_id, occurred_at, update_id)
        select distinct on (f.schedule_id, f.fire_at, f.asset) f.schedule_id, f.fire_at, 'asset', f.asset, y.run_id,
               f.occurred_at, case when y.run_id is null then f.update_id end
        from fired f left join asset_update y on y.update_id = f.update_id
        order by f.schedule_id, f.fire_at, f.asset, f.update_id desc
        on conflict (schedule_id, fire_at, kind, name) do nothing
    ), due as (
        update schedule_state s set next_due = least(s.next_due, r.at)
        from (select x.schedule_id, min(x.fire_at) as at from ready x group by x.schedule_id) r
        where s.schedule_id = r.schedule_id
    )
    select count(*) into became_due from ready;
end $$;

-- The runs that were just made are for these partitions. What a plan has decided is no longer ready.
create function record_partitions(p_plans jsonb, p_made bigint[], p_won int[]) returns void language plpgsql as $$
begin
    with decided as materialized (
        select x.schedule_id, (k.part->>0)::timestamptz as fire_at, k.part->>1 as key,
               (k.part->>2)::timestamptz as date
        from jsonb_to_recordset(p_plans) as x(schedule_id int, partitions jsonb)
        cross join lateral jsonb_array_elements(x.partitions) k(part) where x.schedule_id = any(p_won)
    ), taken as (
        delete from partition_ready p using decided d where p.schedule_id = d.schedule_id and p.fire_at = d.fire_at
    )
    insert into run_partition (run_id, dag_id, key, date)
    select r.run_id, r.dag_id, d.key, d.date from run r
    join decided d on d.schedule_id = r.schedule_id and d.fire_at = r.fire_at where r.run_id = any(p_made);
    -- Partitions that became complete after the plan was made.
    update schedule_state s set next_due = least(s.next_due, r.at)
    from (select p.schedule_id, min(p.fire_at) as at from partition_ready p
          where p.schedule_id = any(p_won) group by p.schedule_id) r
    where s.schedule_id = r.schedule_id;
end $$;

-- Runs that are for no partition any more.
create function clear_run_partitions(p_run_ids bigint[], p_actor actor) returns void language plpgsql as $$
begin
    perform 1 from run_status s where s.run_id = any(p_run_ids) order by s.run_id for no key update;
    perform write_audit(p_actor, 'clear_partition', jsonb_build_object('partition', p.key), p_dag_id => p.dag_id,
                        p_run_id => p.run_id)
    from run_partition p where p.run_id = any(p_run_ids);
    delete from run_partition p where p.run_id = any(p_run_ids);
end $$;

-- Schedules that wait for something else from now on, or were deleted: what was received for partitions of before does
-- not count. A pause changes nothing.
create function forget_partitions(p_ids int[]) returns void language plpgsql as $$
declare
    changed int[] := array(
        select c.schedule_id from schedule c
        left join schedule_version v on v.schedule_id = c.schedule_id and v.version = c.version - 1
        where c.schedule_id = any(p_ids)
          and (c.deleted_at is not null or v.settings->'spec' is distinct from c.spec)
          and exists (select 1 from schedule_dependency w where w.schedule_id = c.schedule_id and w.updates = 'keyed'));
begin
    if changed = '{}' then
        return;
    end if;
    delete from partition_arrival a where a.schedule_id = any(changed);
    delete from partition_update u where u.schedule_id = any(changed) and u.fire_at is null;
    delete from partition_ready p where p.schedule_id = any(changed);
end $$;

-- Discards updates of partitions that are not complete. Returns how many. The caller has locked the schedules.
create function discard_partition_updates(p_schedules int[], p_asset text, p_before timestamptz)
returns bigint language sql as $$
    with gone as (
        delete from partition_update u
        where u.schedule_id = any(p_schedules) and u.fire_at is null and (p_asset is null or u.asset = p_asset)
          and (p_before is null or u.occurred_at < p_before)
        returning 1
    )
    select count(*) from gone
$$;
