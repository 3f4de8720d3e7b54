-- Accounts and sign-in attempts (docs/decisions/0020-api.md), and the audit log.

-- One entry of the audit log, in the transaction of the change that it records. Returns its id.
create function write_audit(p_actor actor, p_action text, p_detail jsonb, p_dag_id int default null,
                            p_run_id bigint default null, p_idx int default null, p_map_index int default null)
returns bigint language sql as $$
    insert into audit_log (occurred_at, action, actor, origin, request_id, dag_id, run_id, idx, map_index, detail)
    values (clock(), p_action, p_actor.name, p_actor.origin, p_actor.request_id, p_dag_id, p_run_id, p_idx, p_map_index,
             p_detail)
    returning entry_id
$$;

-- The author of changes that the engine makes by itself.
create function system_actor() returns actor language sql immutable as $$
    select row('evertick', null, null)::actor
$$;

-- Changes an account; null leaves a value. A new password, and disabling, revoke all its credentials.
create function change_account(p_name text, p_role text, p_tags text[], p_all_tags boolean, p_disabled boolean,
                               p_password_hash text, p_actor actor) returns text language plpgsql as $$
declare
    before account;
    t timestamptz := clock();
begin
    -- All admins, in one order, so that two of them cannot take each other's last one away.
    perform 1 from account a where a.role = 'admin' or lower(a.name) = lower(p_name)
        order by a.account_id for no key update;
    select * into before from account a where lower(a.name) = lower(p_name);
    if before.account_id is null then
        return 'unknown';
    elsif before.role = 'admin' and not before.is_disabled and before.tags is null
       and (p_role <> 'admin' or p_disabled or p_tags is not null)
       and not exists (select 1 from account a where a.role = 'admin' and not a.is_disabled and a.tags is null
                       and a.account_id <> before.account_id) then
        return 'last_admin';
    end if;
    update account a
    set role = coalesce(p_role, a.role), tags = case when p_all_tags then null else coalesce(p_tags, a.tags) end,
        is_disabled = coalesce(p_disabled, a.is_disabled), password_hash = coalesce(p_password_hash, a.password_hash),
        password_changed_at = case when p_password_hash is null then a.password_changed_at else t end
    where a.account_id = before.account_id;
    if p_password_hash is not null or p_disabled then
        update credential c set revoked_at = t where c.account_id = before.account_id and c.revoked_at is null;
    end if;
    perform write_audit(p_actor, 'change_user', jsonb_build_object('user', before.name,
            'before', jsonb_build_object('role', before.role, 'tags', before.tags, 'is_disabled', before.is_disabled),
            'after', (select jsonb_build_object('role', a.role, 'tags', a.tags, 'is_disabled', a.is_disabled)
                      from account a where a.account_id = before.account_id),
            'password', case when p_password_hash is null then 'kept' else 'changed' end));
    -- API processes cache for some seconds which credentials are valid.
    perform pg_notify('evertick_access', '');
    return 'changed';
end $$;

-- Counts one more attempt of each subject before its password is checked, so that many at once cannot pass together,
-- and returns how long to wait (0: not). After p_free failures each one doubles the wait, up to a quarter of an hour.
-- Of p_fading one failure a minute is forgotten: many people share an address, and some of them always mistype.
create function record_login_attempt(p_subjects text[], p_free int[], p_fading text[])
returns double precision language plpgsql as $$
declare
    t timestamptz := clock();
    wait double precision;
begin
    delete from login_attempt l where l.tried_at < t - interval '1 day' and l.subject <> all(p_subjects);
    update login_attempt l
    set failures = greatest(l.failures - floor(extract(epoch from t - l.tried_at) / 60)::int, 0),
        tried_at = l.tried_at + floor(extract(epoch from t - l.tried_at) / 60) * interval '1 minute'
    where l.subject = any(p_fading) and l.tried_at <= t - interval '1 minute';
    select max(extract(epoch from l.tried_at - t) + least(2 ^ least(l.failures - s.free, 20), 900)) into wait
    from unnest(p_subjects, p_free) as s(subject, free) join login_attempt l on l.subject = s.subject
        and l.failures >= s.free;
    if wait > 0 then
        return wait;
    end if;
    insert into login_attempt as l (subject, failures, tried_at)
    select s, 1, t from unnest(p_subjects) s order by s
    on conflict (subject) do update set failures = l.failures + 1, tried_at = t;
    return 0;
end $$;
