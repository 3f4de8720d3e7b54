-- The audit log by many filters, with an offset and a total.

-- name: list
with named as not materialized (
    select e.*, coalesce(%(names)s::jsonb->>e.verb, split_part(e.verb, ' ', 1)) as event from listed_event e
), found as not materialized (
    select * from named
     where (%(entry_id)s::bigint is null or entry_id = %(entry_id)s)
       and (%(dag_ids)s::int[] is null or dag_id = any(%(dag_ids)s)) and (%(task)s::text is null or task = %(task)s)
       and (%(run_ids)s::bigint[] is null or run_id = any(%(run_ids)s))
       and (%(map_index)s::int is null or map_index = %(map_index)s) and (%(actor)s::text is null or actor = %(actor)s)
       and (%(verb)s::text is null or event = %(verb)s) and (%(without)s::text[] is null or event <> all(%(without)s))
       and (%(verbs)s::text[] is null or event = any(%(verbs)s))
       and (%(occurred)s::tstzrange is null or occurred_at <@ %(occurred)s)
       and (%(task_like)s::text[] is null or task ilike any(%(task_like)s))
       and (%(task_heads)s::text[] is null or task ^@ any(%(task_heads)s))
       and (%(run_like)s::text[] is null or text_id ilike any(%(run_like)s))
       and (%(run_heads)s::text[] is null or text_id ^@ any(%(run_heads)s))
       and (%(actor_like)s::text[] is null or actor ilike any(%(actor_like)s))
       and (%(actor_heads)s::text[] is null or actor ^@ any(%(actor_heads)s))
       and (%(verb_like)s::text[] is null or event ilike any(%(verb_like)s))
       and (%(verb_heads)s::text[] is null or event ^@ any(%(verb_heads)s))
)
select t.total, f.* from (select count(*) as total from (select from found limit %(most)s) x) t
  left join lateral (select entry_id, occurred_at, event, actor, dag, text_id, fire_at, task, map_index, detail
                       from found order by /* order */ entry_id limit %(limit)s offset %(offset)s) f on true

-- Accounts and their credentials; and the audit log.

-- name: add_account
-- No row: an account with that name exists.
with made as (
    insert into account (name, role, tags, password_hash, created_by, created_at, password_changed_at)
    values (%(name)s, %(role)s, %(tags)s::text[], %(password_hash)s::text, (%(actor)s::actor).name, clock(),
            case when %(password_hash)s::text is null then null else clock() end)
    on conflict (lower(name)) do nothing
    returning account_id, name, role, tags
), noted as (
    insert into audit_log (occurred_at, action, actor, origin, request_id, detail)
    select clock(), 'add_user', (%(actor)s::actor).*, jsonb_build_object('user', name, 'role', role, 'tags', tags)
      from made
)
select account_id from made

-- name: find_account
select account_id, name, role, tags, password_hash, is_disabled, created_by, created_at, password_changed_at
  from account where lower(name) = lower(%(name)s)

-- name: find_account_by_id
select account_id, name, role, tags, password_hash, is_disabled, created_by, created_at, password_changed_at
  from account where account_id = %(account_id)s

-- name: list_accounts
select account_id, name, role, tags, password_hash, is_disabled, created_by, created_at, password_changed_at
  from account where lower(name) > lower(%(after)s) order by lower(name) limit %(limit)s

-- name: count_accounts
-- The number of accounts, and how many of them can sign in with a password.
select count(*) as accounts, count(password_hash) filter (where not is_disabled) as with_password from account

-- name: forgive
-- After a successful sign-in. Other users may share the address: of its count only this try is subtracted. If the
-- count were reset, any user with a valid password could try the passwords of all others from there.
with gone as (delete from login_attempt where subject = any(%(subjects)s::text[]))
update login_attempt set failures = greatest(failures - 1, 0) where subject = any(%(fading)s::text[])

-- name: add_credential
-- Also deletes sessions and links that ended long ago.
with old as (
    delete from credential
     where credential_id in (
       select credential_id from credential
        where account_id = %(account_id)s and kind <> 'token' and expires_at < clock() - interval '1 day' limit 100)
), made as (
    insert into credential (secret_hash, account_id, kind, name, role, tags, created_by, created_at, expires_at)
    values (%(secret_hash)s, %(account_id)s, %(kind)s, %(name)s, %(role)s::text, %(tags)s::text[],
            (%(actor)s::actor).name, clock(), clock() + make_interval(secs => %(seconds)s::double precision))
    returning credential_id, expires_at, account_id, kind, name, role, tags
), noted as (
    insert into audit_log (occurred_at, action, actor, origin, request_id, detail)
    select clock(), case m.kind when 'session' then 'sign_in' when 'link' then 'add_link' else 'add_token' end,
           (%(actor)s::actor).*, jsonb_build_object('user', a.name, m.kind, m.name, 'id', m.credential_id,
                                                    'role', m.role, 'tags', m.tags, 'expires_at', m.expires_at)
      from made m join account a on a.account_id = m.account_id
)
select credential_id, expires_at from made

-- name: take_link
-- A one-time link works once: the caller that revokes it may use it.
with taken as (
    update credential c set revoked_at = clock(), used_at = clock(), used_from = %(origin)s::text
     where c.secret_hash = %(secret_hash)s and c.kind = 'link' and c.revoked_at is null and c.expires_at > clock()
    returning c.account_id
)
select a.account_id, a.name, a.role, a.tags, a.password_hash, a.is_disabled, a.created_by, a.created_at,
    a.password_changed_at
  from taken t join account a on a.account_id = t.account_id where not a.is_disabled

-- name: authenticate
-- By the unique hash. A revoked or expired credential, or one of a disabled account, is not found.
select c.credential_id, c.kind, c.name as credential, c.role as role_cap, c.tags as tag_cap, a.account_id, a.name,
       a.role, a.tags, coalesce(c.used_at < clock() - interval '1 minute', true) as is_use_old,
       extract(epoch from c.expires_at - clock())::float8 as seconds_left,
       extract(epoch from clock() - i.checked_at)::float8 as check_age_seconds
  from credential c join account a on a.account_id = c.account_id
  left join oidc_identity i on i.account_id = a.account_id
 where c.secret_hash = %(secret_hash)s and c.kind <> 'link' and c.revoked_at is null
   and (c.expires_at is null or c.expires_at > clock()) and not a.is_disabled

-- name: still_valid
-- Rechecks credentials that authenticated a while ago.
select c.credential_id, c.kind, c.name as credential, c.role as role_cap, c.tags as tag_cap, a.account_id, a.name,
       a.role, a.tags, false as is_use_old, extract(epoch from c.expires_at - clock())::float8 as seconds_left,
       extract(epoch from clock() - i.checked_at)::float8 as check_age_seconds
  from unnest(%(credential_ids)s::bigint[]) w join credential c on c.credential_id = w
  join account a on a.account_id = c.account_id left join oidc_identity i on i.account_id = a.account_id
 where coalesce(i.checked_at > clock() - make_interval(secs => %(valid_seconds)s), true)
   and c.revoked_at is null and (c.expires_at is null or c.expires_at > clock()) and not a.is_disabled

-- name: note_use
-- At most once a minute: a thousand reads write one update.
update credential set used_at = clock(), used_from = %(origin)s::text
 where credential_id = %(credential_id)s and coalesce(used_at < clock() - interval '1 minute', true)

-- name: list_credentials
select c.credential_id, a.name as account, c.kind, c.name, c.role, c.tags, c.created_by, c.created_at, c.expires_at,
       c.used_at, c.used_from
  from credential c join account a on a.account_id = c.account_id
 where (%(account)s::text is null or lower(a.name) = lower(%(account)s)) and c.kind <> 'link' and c.revoked_at is null
   and (c.expires_at is null or c.expires_at > clock()) and c.credential_id > %(after)s::bigint
 order by c.credential_id limit %(limit)s

-- name: revoke
-- No row: none, or already revoked. With an account, only its own. API processes cache it for some seconds.
with ended as (
    update credential c set revoked_at = clock() from account a
     where c.credential_id = %(credential_id)s and c.revoked_at is null and a.account_id = c.account_id
       and (%(account)s::text is null or lower(a.name) = lower(%(account)s))
    returning c.credential_id, c.kind, c.name, a.name as account
), noted as (
    insert into audit_log (occurred_at, action, actor, origin, request_id, detail)
    select clock(), case kind when 'session' then 'sign_out' else 'revoke_token' end, (%(actor)s::actor).*,
           jsonb_build_object('user', account, kind, name, 'id', credential_id) from ended
)
select account, pg_notify('evertick_access', '') from ended

-- name: note
-- A rejected request, or an action without its own verb.
select write_audit(%(actor)s::actor, %(verb)s::text, %(detail)s::jsonb, %(dag_id)s::int, %(run_id)s::bigint)

-- name: audit_floor
-- The lower end of a window of entries before one entry, and whether older entries exist.
select w.entry_id, exists (select 1 from audit_log x where x.entry_id < w.entry_id) as has_more
  from (select min(n.entry_id) as entry_id
          from (select j.entry_id from audit_log j where j.entry_id < %(before)s::bigint order by j.entry_id desc
                limit %(window)s) n) w
 where w.entry_id is not null

-- name: audit
-- Newest first, by the primary key.
select j.entry_id, j.occurred_at, j.action as verb, j.actor, j.origin, j.request_id, d.name as dag, j.run_id,
       s.name as task, j.map_index, j.detail
  from audit_log j left join dag d on d.dag_id = j.dag_id left join run_status r on r.run_id = j.run_id
  left join task_spec s on s.version_id = r.version_id and s.idx = j.idx
 where j.entry_id < %(before)s::bigint and j.entry_id >= %(floor)s::bigint
   and (%(verb)s::text is null or j.action = %(verb)s) and (%(actor)s::text is null or j.actor = %(actor)s)
   and (%(dag)s::text is null or d.name = %(dag)s) and (%(run_id)s::bigint is null or j.run_id = %(run_id)s)
   and (%(since)s::timestamptz is null or j.occurred_at >= %(since)s) order by j.entry_id desc limit %(limit)s

-- name: use_once
-- Whether this is the first use. Deletes what has expired, a hundred at a time.
with gone as (
    delete from used_once
    where key in (select key from used_once where expires_at < clock() limit 100 for update skip locked)
)
insert into used_once (key, expires_at) values (%(key)s, clock() + make_interval(secs => %(seconds)s::double precision))
on conflict do nothing returning true

-- name: access_facts
-- Admins that a password signs in, whatever a provider says; and tokens that deserve a look.
select (select count(*) from account a
         where a.role = 'admin' and a.tags is null and not a.is_disabled and a.password_hash is not null
           and not exists (select 1 from oidc_identity i where i.account_id = a.account_id)) as local_admins,
       count(*) filter (where c.expires_at is null) as endless_tokens,
       count(*) filter (where coalesce(c.used_at, c.created_at) < clock() - make_interval(days => %(unused_days)s))
           as unused_tokens,
       count(*) filter (where a.role = 'admin' and coalesce(c.role, 'admin') = 'admin' and c.tags is null
                        and a.tags is null) as admin_tokens
  from credential c join account a on a.account_id = c.account_id
 where c.kind = 'token' and c.revoked_at is null and (c.expires_at is null or c.expires_at > clock())
   and not a.is_disabled
