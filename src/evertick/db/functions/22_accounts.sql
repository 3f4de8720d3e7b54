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

-- The rights that a provider of OpenID Connect gives. Unlike `change_account` it also takes them from the last admin:
-- an admin with a password is what remains if the provider is wrong.
create function set_provider_rights(p_account_id int, p_role text, p_tags text[], p_actor actor)
returns void language plpgsql as $$
declare
    before account;
begin
    select * into before from account a where a.account_id = p_account_id for no key update;
    if (before.role, before.tags) is not distinct from (p_role, p_tags) then
        return;
    end if;
    update account a set role = p_role, tags = p_tags where a.account_id = p_account_id;
    perform write_audit(p_actor, 'change_user', jsonb_build_object('user', before.name,
            'before', jsonb_build_object('role', before.role, 'tags', before.tags),
            'after', jsonb_build_object('role', p_role, 'tags', p_tags), 'by', 'groups of the provider'));
    perform pg_notify('evertick_access', '');
end $$;

-- A person whom a provider has authenticated. The identity is provider and subject; a name that another account has is
-- refused, because anybody could choose the name `admin` there. Returns 'signed_in', 'taken' or 'disabled'.
create function sign_in_with_provider(p_provider text, p_subject text, p_session_id text, p_name text, p_role text,
                                      p_tags text[], p_tokens text, p_key_id text, p_actor actor)
returns table (outcome text, account_id int) language plpgsql as $$
declare
    mine int;
begin
    select i.account_id into mine from oidc_identity i where i.provider = p_provider and i.subject = p_subject;
    if mine is null then
        insert into account as a (name, role, tags, created_by, created_at)
        values (p_name, p_role, p_tags, p_actor.name, clock())
        on conflict (lower(name)) do nothing
        returning a.account_id into mine;
        if mine is null then
            return query select 'taken', null::int;
            return;
        end if;
        perform write_audit(p_actor, 'add_user', jsonb_build_object('user', p_name, 'role', p_role, 'tags', p_tags,
                'provider', p_provider));
    elsif exists (select 1 from account a where a.account_id = mine and a.is_disabled) then
        return query select 'disabled', mine;
        return;
    else
        perform set_provider_rights(mine, p_role, p_tags, p_actor);
    end if;
    insert into oidc_identity as i (account_id, provider, subject, session_id, tokens, key_id, checked_at)
    values (mine, p_provider, p_subject, p_session_id, p_tokens, p_key_id, clock())
    on conflict on constraint oidc_identity_pkey do update
    set session_id = excluded.session_id, tokens = excluded.tokens, key_id = excluded.key_id,
        checked_at = excluded.checked_at, asked_until = null;
    return query select 'signed_in', mine;
end $$;

-- One process asks the provider about an account at a time: a refresh token may be used once. No row: another one asks,
-- the last answer is younger than p_after_seconds, or the person must sign in again.
create function claim_provider_check(p_account_id int, p_after_seconds double precision,
                                     p_hold_seconds double precision)
returns table (provider text, subject text, tokens text, key_id text, asked_until timestamptz)
language sql as $$
    update oidc_identity i set asked_until = clock() + make_interval(secs => p_hold_seconds)
    where i.account_id = p_account_id and i.tokens is not null
      and i.checked_at <= clock() - make_interval(secs => p_after_seconds)
      and (i.asked_until is null or i.asked_until <= clock())
    returning i.provider, i.subject, i.tokens, i.key_id, i.asked_until
$$;

-- The answer to a claimed check; p_role null: the provider gives no access any more, so that the sessions end, and
-- tokens work again after the next sign-in. False: the claim is over, or the person has signed in meanwhile.
create function record_provider_check(p_account_id int, p_asked_until timestamptz, p_role text, p_tags text[],
                                      p_tokens text, p_key_id text, p_actor actor)
returns boolean language plpgsql as $$
begin
    update oidc_identity i
    set checked_at = case when p_role is null then '-infinity' else clock() end, asked_until = null,
        tokens = case when p_role is null then null else p_tokens end, key_id = p_key_id
    where i.account_id = p_account_id and i.asked_until = p_asked_until;
    if not found then
        return false;
    end if;
    if p_role is null then
        update credential c set revoked_at = clock()
        where c.account_id = p_account_id and c.kind = 'session' and c.revoked_at is null;
        perform write_audit(p_actor, 'end_access', jsonb_build_object('user', a.name))
        from account a where a.account_id = p_account_id;
        perform pg_notify('evertick_access', '');
    else
        perform set_provider_rights(p_account_id, p_role, p_tags, p_actor);
    end if;
    return true;
end $$;

-- The provider says that a person signed out there: the sessions end, and tokens are checked before their next use.
-- Returns the number of sessions.
create function end_provider_sessions(p_provider text, p_subject text, p_session_id text, p_actor actor)
returns int language plpgsql as $$
declare
    accounts int[];
    ended int;
begin
    with found as (
        update oidc_identity i set checked_at = '-infinity'
        where i.provider = p_provider
          and case when p_subject is null then i.session_id = p_session_id else i.subject = p_subject end
        returning i.account_id
    )
    select coalesce(array_agg(f.account_id), '{}') into accounts from found f;
    update credential c set revoked_at = clock()
    where c.account_id = any(accounts) and c.kind = 'session' and c.revoked_at is null;
    get diagnostics ended = row_count;
    perform write_audit(p_actor, 'end_access', jsonb_build_object('user', a.name, 'sessions', ended))
    from account a where a.account_id = any(accounts);
    perform pg_notify('evertick_access', '');
    return ended;
end $$;
