-- Events sent from outside, for tasks that wait for them.

-- name: send
select event_id, is_new, sent_at, sent_by
    from send_event(%(name)s::text, %(key)s::text, %(payload)s::jsonb, %(actor)s::text)

-- name: list_events
-- The newest first.
select event_id, name, key, payload, sent_at, sent_by, is_heard
  from event where (%(name)s::text is null or name = %(name)s::text) order by event_id desc limit %(limit)s
