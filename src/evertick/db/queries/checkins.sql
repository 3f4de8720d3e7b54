-- Check-ins of jobs that run elsewhere.

-- name: list_of
select name, spec, grace_seconds, due_at, last_at, message, has_failed, count, late_since, changed_by, changed_at
  from checkin where name > %(after)s and (not %(only_late)s or late_since is not null or has_failed)
 order by name limit %(limit)s

-- name: find
select name, spec, grace_seconds, due_at, last_at, message, has_failed, count, late_since, changed_by, changed_at
  from checkin where name = %(name)s

-- name: unaccounted
-- What keeps an installation from saying that every due instant is accounted for: schedules that are late or cannot be
-- planned, and violations of the guarantees about fires and triggers.
select (select count(*) from (
           select 1 from schedule_state s where s.next_due < clock() - make_interval(secs => %(late_seconds)s)
              and s.next_due is not null and not s.is_paused and s.error is null limit 1000) l)
       + (select count(*) from schedule_state s join schedule c on c.schedule_id = s.schedule_id
           where s.error is not null and c.deleted_at is null and not s.is_paused)
       + (select count(*) from proof_violation v where v.ended_at is null
             and v.check_name in ('fire_unanswered', 'trigger_lost')) as problems
