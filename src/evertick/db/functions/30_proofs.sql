-- The continuous proof of the leader of shard 0: what it has checked, and what it has found.

-- Writes the result of one slice. p_done: [{name, position, checked}]; p_found: [{check, subject, run, idx, map_index,
-- detail}]; p_ended: ids of violations that no longer hold. Returns the violations that are new.
create function record_proof(p_shard smallint, p_epoch bigint, p_done jsonb, p_found jsonb, p_ended bigint[])
returns table (check_name text, subject text, run_id bigint, detail text) language plpgsql as $$
#variable_conflict use_column
declare
    t timestamptz := clock();
begin
    perform fence(p_shard, p_epoch);
    insert into proof_cursor as c (check_name, position, checked, checked_at)
    select x.name, x.position, x.checked, t
    from jsonb_to_recordset(p_done) as x(name text, position jsonb, checked bigint) order by x.name
    on conflict (check_name) do update
        set position = excluded.position, checked = c.checked + excluded.checked, checked_at = t;
    update proof_violation v set ended_at = t where v.violation_id = any(p_ended) and v.ended_at is null;
    return query with found as (
        select x."check", x.subject, x.run, x.idx, x.map_index, x.detail
        from jsonb_to_recordset(p_found) as x("check" text, subject text, run bigint, idx int, map_index int,
                                              detail text)
    ), seen as (
        update proof_violation v set seen_at = t, detail = f.detail from found f
        where v.check_name = f."check" and v.subject = f.subject and v.ended_at is null
        returning v.check_name, v.subject
    ), made as (
        insert into proof_violation (check_name, subject, run_id, idx, map_index, detail, found_at, seen_at)
        select f."check", f.subject, f.run, f.idx, f.map_index, f.detail, t, t from found f
        where not exists (select 1 from seen s where s.check_name = f."check" and s.subject = f.subject)
        on conflict (check_name, subject) where ended_at is null do nothing
        returning *
    ), sent as (
        insert into outbox (shard, sink, event, run_id, payload, created_at, waiting_since, due_at)
        select 0, n.sink, 'violation', m.run_id, jsonb_strip_nulls(jsonb_build_object('event', 'violation',
            'guarantee', m.check_name, 'subject', m.subject, 'reason', m.detail, 'run', m.run_id, 'dag', d.name,
            'at', t)), t, t, t
        from made m
        cross join (select distinct x.sink from default_notification_rule x) n
        left join run r on r.run_id = m.run_id left join dag d on d.dag_id = r.dag_id
    )
    select m.check_name, m.subject, m.run_id, m.detail from made m order by m.violation_id;
end $$;
