-- Runners over HTTPS: how they join, and what a revoked or expired token changes. All else is that of every runner.

-- Registers a session for a token that is valid now; repeating it is harmless. False: the token is revoked or expired,
-- or the session is another's. The token is locked, so that a revocation finds every session that joined before it.
create function join_runner(p_token_id int, p_origin text, p_runner jsonb) returns boolean language plpgsql as $$
declare
    t timestamptz := clock();
begin
    perform 1 from runner_token k where k.token_id = p_token_id and k.revoked_at is null and k.expires_at > t
        for no key update;
    if not found then
        return false;
    end if;
    insert into runner (session, runner_id, name, version, host, boot_id, pid_namespace, uid, pid, pid_started, queues,
                        task_patterns, slots, request, lost_after_seconds, executor, heartbeat_at, started_at, token_id)
    select x.session, x.runner_id, x.name, x.version, x.host, x.boot_id, x.pid_namespace, x.uid, x.pid, x.pid_started,
           x.queues, x.match, x.slots, x.request, x.lost_after_seconds, 'local', t, t, p_token_id
    from jsonb_to_record(p_runner) as x(session bigint, runner_id text, name text, version text, host text,
        boot_id text,
         pid_namespace text, uid int, pid int, pid_started double precision, queues text[], match text[], slots int,
         request text, lost_after_seconds double precision)
    on conflict (session) do nothing;
    update runner_token k set used_at = t, used_from = p_origin where k.token_id = p_token_id;
    return exists (select 1 from runner r where r.session = (p_runner->>'session')::bigint and r.token_id = p_token_id);
end $$;

-- The heartbeat of a runner over HTTPS. Once its token is revoked or expired, it is asked to end without new work.
create function extend_joined(p_session bigint, p_held jsonb)
returns table (kind text, run_id bigint, idx int, map_index int, epoch int) language plpgsql as $$
#variable_conflict use_column
begin
    update runner r set request = 'leave' from runner_token k
    where r.session = p_session and r.ended_at is null and r.request is distinct from 'leave'
      and k.token_id = r.token_id and (k.revoked_at is not null or k.expires_at <= clock());
    return query select * from extend_leases(p_session, p_held);
end $$;

-- Revokes a token. Its runners take no new work from now on, and end with their last attempt. Returns their sessions;
-- null: there is no such token, or it was revoked before.
create function revoke_runner_token(p_token_id int, p_actor actor) returns bigint[] language plpgsql as $$
declare
    was text;
    sessions bigint[];
begin
    update runner_token k set revoked_at = clock() where k.token_id = p_token_id and k.revoked_at is null
    returning k.name into was;
    if not found then
        return null;
    end if;
    with asked as (
        update runner r set request = 'leave' where r.token_id = p_token_id and r.ended_at is null returning r.session
    )
    select coalesce(array_agg(a.session), '{}') into sessions from asked a;
    perform write_audit(p_actor, 'revoke_runner_token', jsonb_build_object('token', was, 'id', p_token_id,
            'runners', cardinality(sessions)));
    return sessions;
end $$;
