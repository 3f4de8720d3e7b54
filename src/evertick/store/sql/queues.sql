-- Queues: how much is in line.

-- name: depths
-- Steps from queue to queue through the index of the line, and counts each no further than the cap: the price is bounded,
-- however long the lines are.
with recursive line as (
    (select queue from ready order by queue limit 1)
    union all
    select (select r.queue from ready r where r.queue > l.queue order by r.queue limit 1)
      from line l where l.queue is not null
)
select l.queue, (select count(*) from (select 1 from ready r where r.queue = l.queue limit %(cap)s) counted) as depth
  from line l where l.queue is not null limit %(most)s
